"""The report by layer, on data where it is known which layer breaks and by how much."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kvport
from kvport.errors import ImageError, InvalidArgument, ScaleError
from kvport.image_report import StoredSide, inspect_image
from kvport.layout import CacheLayout, LayerSpec
from kvport.quality import LayerError, Limits, layer_error, worst_layer

TOKENS, DIM = 48, 32


def qkv(seed: int = 0, kv_heads: int = 2, query_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(TOKENS, query_heads, DIM, generator=generator)
    k, v = torch.randn(2, TOKENS, kv_heads, DIM, generator=generator)
    return q, k, v


def test_float_pages_have_no_error() -> None:
    found = layer_error(0, "fp32", *qkv())
    assert (found.key.relative, found.value.relative) == (0.0, 0.0)
    assert found.output_cosine_p1 == pytest.approx(1.0, abs=1e-6)
    assert found.kl_max == pytest.approx(0.0, abs=1e-12)
    assert found.broken == ()


@pytest.mark.parametrize("window", [None, 7])
def test_errors_by_their_definition(window: int | None) -> None:
    """Against float64, written out once more for one head. Position p sees p - window < j <= p."""
    q, k, v = qkv(kv_heads=1, query_heads=1)
    found = layer_error(3, "int4", q, k, v, scale=0.3, window=window)
    fmt = kvport.TensorFormat.parse("int4")
    stored = [kvport.codec.decode(fmt, kvport.codec.encode(fmt, x).planes) for x in (k, v)]
    assert found.layer == 3
    relative = ((stored[0] - k).double().square().sum() / k.double().square().sum()).sqrt().item()
    assert found.key.relative == pytest.approx(relative, rel=1e-9)
    outputs, probabilities = [], []
    for keys, values in ((k, v), stored):
        s = 0.3 * q[:, 0].double() @ keys[:, 0].double().T
        seen = torch.ones_like(s).tril().bool()
        if window is not None:
            seen &= ~torch.ones_like(s).tril(-window).bool()
        p = s.masked_fill(~seen, -math.inf).softmax(-1)
        probabilities.append(p)
        outputs.append(p @ values[:, 0].double())
    cosine = torch.nn.functional.cosine_similarity(*outputs, dim=-1)
    assert found.output_cosine_min == pytest.approx(cosine.min().item(), abs=1e-6)
    p, r = probabilities
    kl = (p * (p.clamp(min=1e-300).log() - r.clamp(min=1e-300).log())).sum(-1)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found.kl_max == pytest.approx(kl.max().item(), rel=1e-4)


def test_the_layer_that_breaks_is_named() -> None:
    report = []
    for layer in range(4):
        q, k, v = qkv(layer)
        if layer == 2:
            k[..., 5] += 40  # a channel outlier: per-token scales of 4 bits lose the others
        report.append(layer_error(layer, "int4", q, k, v))
    assert [one.layer for one in report if one.broken] == [2]
    assert worst_layer(report).layer == 2
    assert "attention output cosine p1" in report[2].broken[0]
    # One scale per channel instead does not break it.
    q, k, v = qkv(2)
    k[..., 5] += 40
    assert layer_error(2, "k=int4:c16:asym,v=int4", q, k, v).broken == ()


def test_rotation_repairs_a_channel_outlier() -> None:
    q, k, v = qkv()
    k[..., 5] += 40
    plain, turned = layer_error(0, "int4", q, k, v), layer_error(0, "int4,rotate=1", q, k, v)
    assert turned.key.relative < plain.key.relative / 2


def test_tokens_past_the_last_whole_group_stay_as_they_are() -> None:
    q, k, v = qkv()
    exact = layer_error(0, "k=int2:c64,v=fp32", q, k, v)  # 48 tokens are no group of 64
    assert exact.key.relative == 0.0
    assert layer_error(0, "k=int2:c32,v=fp32", q, k, v).key.relative > 0.1


def test_what_is_kept_apart_lowers_the_error_and_is_not_counted_as_saturated() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(150, heads, DIM, generator=generator) for heads in (4, 2, 2))
    large = torch.rand(k.shape, generator=generator) > 0.99
    k[large] *= 40
    dense = layer_error(0, "k=int4,v=fp32", q, k, v)
    sparse = layer_error(0, "k=int4:sparse=99,v=fp32", q, k, v)
    assert sparse.key.relative < dense.key.relative / 3
    # Pages have 128 tokens: of 150 the last 22 are none, and stay as they are.
    other = k.clone()
    other[128:] *= 7
    assert layer_error(0, "k=int4:sparse=99,v=fp32", q, other, v).key.relative < sparse.key.relative
    limit = kvport.LayerScales(kvport.SideScales(torch.tensor(4.0 / 127)))
    counted = [
        layer_error(0, format, q, k, v, scales=limit, counters=True).key.counts
        for format in ("k=int8:tensor:static,v=fp32", "k=int8:tensor:static:sparse=4,v=fp32")
    ]
    assert counted[0] is not None
    assert counted[1] is not None
    beyond = int((k[:128].abs() > 4.0 * 127.5 / 127).sum())
    assert counted[1].saturated == beyond - 2 * 4  # two heads, four each
    k[large] /= 40
    k[..., 5] += 60
    channels = kvport.LayerScales(key_channels=torch.tensor([[5], [5]]))
    apart = layer_error(0, "k=int4:outliers=1,v=fp32", q, k, v, scales=channels)
    assert apart.key.relative < layer_error(0, "k=int4,v=fp32", q, k, v).key.relative / 3


def test_counters_only_on_request_and_beyond_limits_by_name() -> None:
    q, k, v = qkv()
    small = kvport.LayerScales(*(kvport.SideScales(torch.tensor(s)) for s in (0.001, 0.05)))
    plain = layer_error(0, "int8:tensor:static", q, k, v, scales=small)
    assert plain.key.counts is None
    found = layer_error(0, "int8:tensor:static", q, k, v, scales=small, counters=True)
    assert found.key.counts is not None
    assert found.key.counts.share("saturated") > 0.8
    assert found.value.counts is not None
    assert found.value.counts.saturated == 0
    assert any(reason.startswith("K saturated") for reason in found.broken)
    assert not any(reason.startswith("V saturated") for reason in found.broken)
    with pytest.raises(ScaleError, match="needs static scales"):
        layer_error(0, "int8:tensor:static", q, k, v)


def test_nan_is_the_worst_of_all() -> None:
    q, k, v = qkv()
    v[3, 1, 2] = math.nan
    bad, fine = layer_error(1, "int8", q, k, v, counters=True), layer_error(0, "int2", *qkv())
    assert worst_layer([fine, bad]) is bad
    assert any("poisoned" in reason for reason in bad.broken)
    assert any("cosine p1 nan" in reason for reason in bad.broken)


def test_limits_are_the_callers() -> None:
    assert layer_error(0, "int4", *qkv(), limits=Limits(cosine_p1=0.99999)).broken
    assert isinstance(layer_error(0, "int4", *qkv()).to_json()["key"]["relative"], float)


def test_latent_formats_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="latent"):
        layer_error(0, "latent=int8,rope=bf16", *qkv())


# -- page images -----------------------------------------------------------------------------------------------------


def image_of(format: str, key: Tensor, value: Tensor, page_size: int = 16, **more: object) -> kvport.PageImage:
    layout = CacheLayout.uniform(
        layers=1, kv_heads=key.shape[1], head_dim=key.shape[2], format=format, page_size=page_size
    )
    with kvport.open("cpu", layout=layout, tokens=256, **more) as cache:  # type: ignore[arg-type]
        sequence = cache.sequence()
        for count in (len(key), 0):  # the second step seals
            with cache.step({sequence: count}) as step:
                step.append(0, key[:count], value[:count])
        return cache.export(sequence)


def test_an_image_tells_codes_and_scales() -> None:
    _, k, v = qkv()
    key, value = inspect_image(image_of("int8", k[:40], v[:40]))
    assert (key.layer, key.side, key.format, key.tokens) == (0, "key", "int8", 40)
    amax = k[:40].abs().amax(-1)
    assert key.scale_min == pytest.approx(amax.min().item() / 127)
    assert key.scale_max == pytest.approx(amax.max().item() / 127)
    assert key.extreme == pytest.approx(1 / DIM, rel=0.2)  # the largest of each group
    assert key.levels is not None
    assert key.levels > 200
    assert (key.dead, key.poisoned) == (0.0, 0)
    assert key.suspicions() == value.suspicions() == ()


@pytest.mark.parametrize(
    ("format", "sides"),
    [
        ("int4:g16,recent=16", {"key": 16, "value": 16, "near.key": 24, "near.value": 24}),
        ("int4:g16,recent=16:fp8_e4m3", {"key": 16, "value": 16, "near.key": 24, "near.value": 24}),
        ("k=int2:c16:asym,v=int2:g16:asym", {"key": 32, "value": 32, "near.key": 8, "near.value": 8}),
        ("mxfp4", {"key": 40, "value": 40}),
        ("nvfp4", {"key": 40, "value": 40}),
        ("bf16", {"key": 40, "value": 40}),
    ],
)
def test_every_kind_of_page(format: str, sides: dict[str, int]) -> None:
    _, k, v = qkv()
    found = inspect_image(image_of(format, k[:40], v[:40]))
    assert {one.side: one.tokens for one in found} == sides
    assert all(one.suspicions() == () for one in found)


def test_latent_images() -> None:
    layout = CacheLayout(
        (LayerSpec(1, 2, 48, 32, latent=True),), kvport.CacheFormat.parse("latent=int8:g16,rope=bf16"), 16
    )
    with kvport.open("cpu", layout=layout, tokens=64) as cache:
        sequence = cache.sequence()
        with cache.step({sequence: 5}) as step:
            step.append(0, torch.randn(5, 1, 48))
        found = inspect_image(cache.export(sequence))
    assert [(one.side, one.format, one.tokens) for one in found] == [("latent", "int8:g16", 5), ("rope", "bf16", 5)]


def test_a_static_scale_too_small_or_too_large_is_suspected() -> None:
    _, k, v = qkv()
    scales = {0: kvport.LayerScales(kvport.SideScales(torch.tensor(0.005)), kvport.SideScales(torch.tensor(5.0)))}
    key, value = inspect_image(image_of("int8:tensor:static", k, v, scales=scales))
    assert any("too small" in words for words in key.suspicions())
    assert any("too large" in words for words in value.suspicions())


def test_zeros_and_poison_are_suspected() -> None:
    _, k, v = qkv()
    v[7, 0, 0] = math.nan
    key, value = inspect_image(image_of("int8", torch.zeros_like(k), v))
    assert key.suspicions() == ("every code is the same", "100.0% of groups are all zero")
    assert value.suspicions() == ("1 poisoned groups",)
    [one, other] = inspect_image(image_of("bf16", k, v))
    assert (one.suspicions(), other.suspicions()) == ((), ("1 poisoned values",))


def test_a_layer_with_a_format_of_its_own_is_refused() -> None:
    own = LayerSpec(1, 1, DIM, DIM, format=kvport.CacheFormat.parse("int4"))
    layout = CacheLayout((LayerSpec(1, 1, DIM, DIM), own), kvport.CacheFormat.parse("int8"), 16)
    with kvport.open("cpu", layout=layout, tokens=64) as cache:
        sequence = cache.sequence()
        with cache.step({sequence: 5}) as step:
            for layer in range(2):
                step.append(layer, torch.ones(5, 1, DIM), torch.ones(5, 1, DIM))
        image = cache.export(sequence)
    with pytest.raises(ImageError, match="layer 1 key is not stored as int8"):
        inspect_image(image)


@pytest.mark.parametrize(
    "plane,change,message",
    [
        ("key.codes", lambda t: None, "layer 0 key of the image has no codes"),
        ("key.codes", lambda t: t.flatten(), "layer 0 key of the image has no codes"),
        ("key.codes", lambda t: t.to(torch.int64), "layer 0 key is not stored as int8"),
        ("key.scale", lambda t: t[:1], "layer 0 key is not stored as int8"),
        ("near.key.codes", lambda t: t.to(torch.int64), "image has near.key in torch.int64"),
        ("near.value.codes", lambda t: t[0, 0, 0, 0], "layer 0 near.value of the image has no codes"),
    ],
)
def test_an_image_whose_planes_cannot_be_is_refused(plane: str, change: Any, message: str) -> None:
    _, k, v = qkv()
    image = image_of("int8,recent=3", k[:40], v[:40])
    planes = dict(image.layers[0])
    planes[plane] = change(planes[plane])
    layers = {0: {name: tensor for name, tensor in planes.items() if tensor is not None}}
    with pytest.raises(ImageError, match=message):
        inspect_image(dataclasses.replace(image, layers=layers))


def test_reports_are_json() -> None:
    one = StoredSide(0, "key", "int8", 4)
    assert one.to_json()["suspicions"] == []
    assert isinstance(layer_error(0, "int8", *qkv()), LayerError)
