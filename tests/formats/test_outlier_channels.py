"""Outlier channels: kept exactly beside the codes, chosen beforehand, and part of a page's identity.

The oracle here is of its own: the numpy codec applied to what is left when the channels are taken away.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import core_support as support
import numpy as np
import pytest
import torch
from core_support import Array, bits
from replay import open_layout, placed, tiered

from kvport import (
    CacheFormat,
    CacheLayout,
    FormatError,
    ImageError,
    LayerScales,
    LayerSpec,
    LayoutError,
    PageImage,
    ScaleError,
    SideScales,
    TensorFormat,
    codec,
)
from kvport.calibration import Calibrator
from kvport.outliers import choose_channels
from kvport.recipes import Recipe, load_recipe
from kvport.tiers import canonical_bytes
from kvport_conformance import inputs, oracle_codec

HEADS, DIM, COUNT = 2, 32, 3
CHANNELS = torch.tensor([[4, 9, 31], [0, 9, 16]])
FORMATS = [
    "int8",
    "int4:g16",
    "int2:g8:asym:scale=fp16",
    "int8:asym:scale=bf16",
    "int4:c4:asym",
    "int8:c8",
    "fp8_e4m3",
    "fp8_e5m2:g16",
    "mxfp4",
    "nvfp4",
    "int8:head:static",
    "int4:tensor:asym:static",
    "fp8_e4m3:channel:static",
]


def rows() -> Array:
    """(64, HEADS, DIM): ordinary numbers, and forty times as large ones in the outlier channels."""
    x = inputs.value(1, (64, HEADS, DIM)) + np.float32(0.5)
    for head in range(HEADS):
        x[:, head, CHANNELS[head].numpy()] *= np.float32(40.0)
    return x


def static_of(fmt: TensorFormat) -> tuple[Any, Any, SideScales | None]:
    if not fmt.static:
        return None, None, None
    shape = {"tensor": (), "head": (HEADS,), "channel": (HEADS, DIM)}[fmt.granularity]
    scale = inputs.values(2, shape, low=0.02, high=0.2)
    zero = None if fmt.symmetric else inputs.values(3, shape, low=-1.0, high=-0.5)
    side = SideScales(torch.from_numpy(np.array(scale)), None if zero is None else torch.from_numpy(np.array(zero)))
    return scale, zero, side


def without(fmt: TensorFormat) -> TensorFormat:
    return dataclasses.replace(fmt, outliers=0)


def expected(fmt: TensorFormat, x: Array) -> tuple[dict[str, Array], Array]:
    """Planes and decoded rows, said group by group: a group's range is that of its other members."""
    scale, zero, _ = static_of(fmt)
    tokens = len(x)
    filled = x.copy()
    for head in range(HEADS):
        taken = set(CHANNELS[head].tolist())
        for channel in taken:
            if fmt.symmetric or fmt.static or fmt.granularity == "channel_group":
                filled[:, head, channel] = 0
                continue
            size = fmt.group if fmt.granularity == "group" else DIM
            members = [c for c in range(channel // size * size, channel // size * size + size) if c not in taken]
            filled[:, head, channel] = x[:, head, members].min(axis=-1) if members else 0
    spec = support.spec_of(without(fmt))
    planes = oracle_codec.encode(spec, filled, static_scale=scale, static_zero=zero).planes
    decoded = oracle_codec.decode(spec, planes, DIM, static_scale=scale, static_zero=zero)
    kept = np.stack([x[:, head, CHANNELS[head].numpy()] for head in range(HEADS)], axis=1)
    for head in range(HEADS):
        decoded[:, head, CHANNELS[head].numpy()] = kept[:, head]
    assert kept.shape == (tokens, HEADS, COUNT)
    return {**planes, "outliers": kept}, decoded


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_planes_and_decoded_rows_equal_the_oracle(name: str, dtype: torch.dtype) -> None:
    fmt = TensorFormat.parse(f"{name}:outliers={COUNT}")
    x = torch.from_numpy(rows()).to(dtype)
    _, _, static = static_of(fmt)
    wanted, back = expected(fmt, x.float().numpy())
    got = codec.encode(fmt, x, static, CHANNELS)
    assert set(got.planes) == set(wanted)
    for plane, tensor in got.planes.items():
        assert (bits(support.to_numpy(tensor)) == bits(wanted[plane])).all(), plane
    decoded = codec.decode(fmt, got.planes, static, channels=CHANNELS)
    assert (bits(np.ascontiguousarray(decoded.numpy())) == bits(back)).all()
    # Whatever the format loses, it does not lose there.
    assert torch.equal(decoded[:, 0, CHANNELS[0]], x.float()[:, 0, CHANNELS[0]])


@pytest.mark.parametrize("name", [n for n in FORMATS if "static" not in n and ":c" not in n])
def test_outliers_stretch_no_scale(name: str) -> None:
    """However large the kept channels are, codes and scales of the rest stay what they are."""
    fmt = TensorFormat.parse(f"{name}:outliers={COUNT}")
    x = torch.from_numpy(rows())
    larger = x.clone()
    for head in range(HEADS):
        larger[:, head, CHANNELS[head]] *= -1e6
    first, second = (codec.encode(fmt, rows, None, CHANNELS).planes for rows in (x, larger))
    for plane in set(first) - {"outliers"}:
        assert torch.equal(first[plane], second[plane])
    assert not torch.equal(first["outliers"], second["outliers"])
    scale = "tensor_scale" if fmt.kind == "nv" else "scale"
    plain = codec.encode(without(fmt), x).planes[scale].float()
    wanted = plain - 3 if fmt.kind == "mx" else plain / 8  # E8M0 bytes are exponents
    assert (first[scale].float() <= wanted).float().mean() > 0.4


@pytest.mark.parametrize("name", ["int4:g16", "int4:g16:asym", "nvfp4", "int8:tensor:static"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_in_a_kept_channel_reaches_nothing_else(name: str, poison: float) -> None:
    fmt = TensorFormat.parse(f"{name}:outliers={COUNT}")
    _, _, static = static_of(fmt)
    x = torch.from_numpy(rows())
    bad = x.clone()
    bad[7, 1, 16] = poison
    clean, dirty = (codec.encode(fmt, each, static, CHANNELS) for each in (x, bad))
    assert dirty.poisoned is None or not dirty.poisoned.any()  # it is visible, so it needs no flag
    a, b = (codec.decode(fmt, each.planes, static, channels=CHANNELS) for each in (clean, dirty))
    where = torch.zeros_like(x, dtype=torch.bool)
    where[7, 1, 16] = True
    assert (b[where].isnan() | b[where].isinf()).all()
    assert torch.equal(a[~where], b[~where])


def test_a_group_of_nothing_but_outliers() -> None:
    fmt = TensorFormat.parse("int8:g4:asym:outliers=4")
    channels = torch.tensor([[4, 5, 6, 7]])
    x = torch.from_numpy(inputs.key(4, (6, 1, 16)))
    planes = codec.encode(fmt, x, None, channels).planes
    assert not planes["scale"][:, :, 1].any()
    assert not planes["zero"][:, :, 1].any()
    assert torch.equal(codec.decode(fmt, planes, channels=channels)[..., 4:8], x[..., 4:8])


def test_the_codec_needs_its_channels() -> None:
    fmt = TensorFormat.parse("int8:outliers=3")
    x = torch.zeros(1, HEADS, DIM)
    planes = codec.encode(fmt, x, None, CHANNELS).planes
    with pytest.raises(ScaleError, match="outliers=3 needs its outlier channels"):
        codec.encode(fmt, x)
    with pytest.raises(ScaleError, match="outliers=3 needs its outlier channels"):
        codec.decode(fmt, planes)


# --- in a cache -----------------------------------------------------------------------------------------------------


def outlier_layers(layers: int = 1, **sides: Any) -> dict[int, LayerScales]:
    return {layer: LayerScales(**(sides or {"key_channels": CHANNELS})) for layer in range(layers)}


@pytest.mark.parametrize(
    "format",
    [
        "k=int4:g16:outliers=3,v=int8",
        "k=int2:c4:asym:outliers=3,v=int8,recent=5",
        "k=nvfp4:outliers=3,v=int4:g8,sink=2",
    ],
)
def test_a_cache_keeps_them_through_steps_seals_forks_and_files(format: str, tmp_path: Path) -> None:
    cache = tiered(format, head_dim=DIM, scales=outlier_layers())
    sequence = cache.sequence()
    x = torch.from_numpy(rows())
    taken = 0
    for count in (9, 1, 8, 3, 1):
        key = x[taken : taken + count]
        with cache.step({sequence: count}) as step:
            step.append(0, key, key)
            query = support.queries(cache.layout, 0, 5, count, taken)
            found = step.attend(0, query)
            dense = [side[0] for side in step.gather(0)]
        taken += count
        stored = [side.numpy() for side in dense]
        wanted, lse, allowed, allowed_lse = support.attention(query.numpy(), *stored)
        assert support.ratio(found.output, wanted, allowed) < 1
        assert support.ratio(found.lse, lse, allowed_lse) < 1
        for head in range(HEADS):
            assert torch.equal(dense[0][:, head, CHANNELS[head]], x[:taken, head, CHANNELS[head]])
    fmt = cache.layout.format.key
    back = np.concatenate([expected(fmt, x.numpy()[first : first + 4])[1] for first in range(0, 20, 4)])
    far = [t for t in range(20) if placed(cache, sequence)[t] == "f"] if cache.layout.format.tiered else list(range(20))
    assert len(far) >= 12
    assert (bits(stored[0][far]) == bits(back[far])).all()

    child = sequence.fork()
    with cache.step({child: 1}) as step:
        step.append(0, x[:1] * 2, x[:1])
    assert torch.equal(cache.gather(sequence, 0)[0], dense[0])
    assert torch.equal(cache.gather(child, 0)[0][:21], dense[0][:21])

    cache.export(sequence).save(tmp_path / "image")
    image = PageImage.load(tmp_path / "image")
    assert image.layers[0]["key.outliers"].shape[1:] == (4, HEADS, COUNT)
    other = tiered(format, head_dim=DIM, scales=outlier_layers())
    assert torch.equal(other.gather(other.insert(image), 0)[0], dense[0])
    lacking = {n: p for n, p in image.layers[0].items() if n != "key.outliers"}
    with pytest.raises(ImageError):
        other.insert(dataclasses.replace(image, layers={0: lacking}))


def test_bytes_count_them() -> None:
    with_them = CacheLayout.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, format="int4:outliers=3", page_size=4)
    plain = CacheLayout.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, format="int4", page_size=4)
    assert canonical_bytes(with_them, 8) - canonical_bytes(plain, 8) == 8 * 2 * 2 * HEADS * 3 * 4
    cache = open_layout(with_them, 5, scales=outlier_layers(2, key_channels=CHANNELS, value_channels=CHANNELS))
    [pool] = cache.stats().pools
    held = sum(b.numel() * b.itemsize for b in cache.backend.buffers(cache._stores[0]).values())
    assert held == pool.page_bytes * 5 == canonical_bytes(with_them, 20)


def test_a_latent_layer_keeps_channels_of_its_latent_part() -> None:
    spec = LayerSpec(kv_heads=1, query_heads=2, key_dim=DIM + 16, value_dim=DIM, latent=True)
    layout = CacheLayout((spec,), CacheFormat.parse("latent=int4:outliers=2,rope=bf16"), 4)
    cache = open_layout(layout, scales={0: LayerScales(key_channels=torch.tensor([[30, 2]]))})
    sequence = cache.sequence()
    key = torch.from_numpy(inputs.key(6, (5, 1, DIM + 16)))
    with cache.step({sequence: 5}) as step:
        step.append(0, key)
    stored, value = cache.gather(sequence, 0)
    assert torch.equal(value[..., [2, 30]], key[..., [2, 30]])
    assert torch.equal(stored[..., :DIM], value)
    with pytest.raises(ScaleError, match="latent part"):
        open_layout(
            layout,
            scales={0: LayerScales(key_channels=torch.tensor([[30, 2]]), value_channels=torch.tensor([[30, 2]]))},
        )


def test_outliers_lower_the_error_of_the_others() -> None:
    """The reason to pay for them: a few channels ruin int4 per token for all others."""
    x = torch.from_numpy(rows())
    others = torch.ones(HEADS, DIM, dtype=torch.bool).scatter(-1, CHANNELS, False)
    errors = []
    for format in ("int4", "int4:outliers=3"):
        fmt = TensorFormat.parse(format)
        planes = codec.encode(fmt, x, None, CHANNELS).planes
        back = codec.decode(fmt, planes, channels=CHANNELS)
        errors.append((back - x)[:, others].square().mean().sqrt().item())
    assert errors[1] < errors[0] / 10


# --- identity -------------------------------------------------------------------------------------------------------


def test_the_choice_of_channels_is_part_of_the_identity() -> None:
    format = "k=int4:outliers=3,v=int8"
    caches = [tiered(format, head_dim=DIM, scales=outlier_layers())]
    moved = CHANNELS.clone()
    moved[1, 1] = 10
    caches.append(tiered(format, head_dim=DIM, scales=outlier_layers(key_channels=moved)))
    swapped = CHANNELS.flip(0)
    caches.append(tiered(format, head_dim=DIM, scales=outlier_layers(key_channels=swapped)))
    assert len({cache.fingerprint for cache in caches}) == 3
    sequence = caches[0].sequence()
    support.run_step(caches[0], {sequence: 5})
    for cache in caches[1:]:
        with pytest.raises(ImageError, match="belongs to another kind"):
            cache.insert(caches[0].export(sequence))


def test_the_order_of_the_channels_is_not() -> None:
    format = "k=int4:outliers=3,v=int8"
    one = tiered(format, head_dim=DIM, scales=outlier_layers())
    two = tiered(format, head_dim=DIM, scales=outlier_layers(key_channels=CHANNELS.flip(-1).tolist()))
    assert one.fingerprint == two.fingerprint
    sequence = one.sequence()
    support.run_step(one, {sequence: 5})
    copy = two.insert(one.export(sequence))
    assert torch.equal(one.gather(sequence, 0)[0], two.gather(copy, 0)[0])


def test_channels_of_k_and_of_v_are_told_apart() -> None:
    sides = [{"key_channels": CHANNELS, "value_channels": CHANNELS.flip(0)}]
    sides.append({"key_channels": CHANNELS.flip(0), "value_channels": CHANNELS})
    caches = [tiered("int4:outliers=3", head_dim=DIM, scales=outlier_layers(**each)) for each in sides]
    assert caches[0].fingerprint != caches[1].fingerprint
    for cache, each in zip(caches, sides, strict=True):
        sequence = cache.sequence()
        x = torch.from_numpy(rows())[:6]
        with cache.step({sequence: 6}) as step:
            step.append(0, x, x)
        for got, channels in zip(cache.gather(sequence, 0), each.values(), strict=True):
            for head in range(HEADS):
                exact = (got[:, head] == x[:, head]).all(0).nonzero().flatten().tolist()
                assert set(channels[head].tolist()) <= set(exact)
                assert len(exact) < 8


def test_the_given_channels_are_copied() -> None:
    given = CHANNELS.clone()
    cache = tiered("k=int4:outliers=3,v=int8", head_dim=DIM, scales=outlier_layers(key_channels=given))
    sequence = cache.sequence()
    support.run_step(cache, {sequence: 5})
    before = cache.gather(sequence, 0)[0]
    given.zero_()
    assert torch.equal(cache.gather(sequence, 0)[0], before)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, facts",
    [
        ("bf16:outliers=4", ["bf16", "outliers"]),
        ("int8:outliers=0", ["'outliers=0'", "outliers=N"]),
        ("int8:outliers=x", ["'outliers=x'"]),
        ("int8:outliers=2:outliers=3", ["outliers twice"]),
        ("int4,recent=4:int8:outliers=2", ["int8:outliers=2", "per-token"]),
        ("latent=int8,rope=int8:outliers=2", ["rope part"]),
        ("int4:outliers=2,rotate=1", ["rotate", "choose one"]),
    ],
)
def test_formats_that_cannot_be(format: str, facts: list[str]) -> None:
    with pytest.raises(FormatError) as error:
        CacheFormat.parse(format)
    for fact in facts:
        assert fact in str(error.value)
    with pytest.raises(FormatError, match="number of channels"):
        TensorFormat("int8", outliers=-1)


def test_strings_and_identity() -> None:
    fmt = CacheFormat.parse("k=int4:outliers=4:g64:scale=fp16,v=int8")
    assert str(fmt) == "k=int4:g64:scale=fp16:outliers=4,v=int8"
    assert CacheFormat.parse(str(fmt)) == fmt
    assert fmt.identity() != CacheFormat.parse("k=int4:outliers=3:g64:scale=fp16,v=int8").identity()
    assert fmt.calibrated
    assert not fmt.static
    assert CacheFormat.parse("k=int4,v=int8,rotate=1").calibrated is False
    CacheFormat.parse("k=int4,v=int8:outliers=2,rotate=1")  # V is not rotated


@pytest.mark.parametrize("count", [16, 17])
def test_something_must_be_left_to_quantize(count: int) -> None:
    with pytest.raises(LayoutError, match=rf"outliers={count}.*dim 16.*less than 16"):
        CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, format=f"int8:outliers={count}", page_size=4)


@pytest.mark.parametrize(
    "channels, message",
    [
        (None, "keeps 3 outlier channels per head and none were chosen"),
        ([[1, 2, 3]], r"\(1, 3\).*\(2, 3\)"),
        ([[1, 2], [1, 2]], r"\(2, 2\).*\(2, 3\)"),
        ([[1, 2, 2], [1, 2, 3]], r"\[1, 2, 2\] of head 0 must differ"),
        ([[1, 2, 3], [1, 2, 32]], r"of head 1 .*0 .. 31"),
        ([[-1, 2, 3], [1, 2, 3]], r"of head 0 .*0 .. 31"),
        ([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], "integers"),
        ([[True, True, True], [True, True, True]], "integers"),
        ("three", "cannot read"),
    ],
)
def test_channels_that_cannot_be_are_refused_by_name(channels: object, message: str) -> None:
    layout = CacheLayout.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, format="k=int4:outliers=3,v=int8", page_size=4)
    scales: Any = {0: LayerScales(key_channels=CHANNELS), 1: LayerScales(key_channels=channels)}  # type: ignore[arg-type]
    with pytest.raises(ScaleError, match=message) as error:
        open_layout(layout, scales=scales)
    assert "layer 1 K" in str(error.value)


def test_channels_without_a_use_are_refused() -> None:
    with pytest.raises(ScaleError, match="layer 0 V: outlier channels given, but its format int8 has none"):
        tiered(
            "k=int4:outliers=3,v=int8",
            head_dim=DIM,
            scales=outlier_layers(key_channels=CHANNELS, value_channels=CHANNELS),
        )
    with pytest.raises(ScaleError, match="layer 0 K"):
        tiered("int8", head_dim=DIM, scales=outlier_layers())


def test_channels_and_static_scales_together() -> None:
    side = SideScales(torch.tensor(0.05))
    cache = tiered(
        "k=int8:tensor:static:outliers=3,v=bf16", head_dim=DIM, scales={0: LayerScales(side, key_channels=CHANNELS)}
    )
    sequence = cache.sequence()
    x = torch.from_numpy(rows())[:5]
    with cache.step({sequence: 5}) as step:
        step.append(0, x, x)
    wanted = (x / torch.tensor(0.05)).round().clamp(-127, 127) * torch.tensor(0.05)
    for head in range(HEADS):
        wanted[:, head, CHANNELS[head]] = x[:, head, CHANNELS[head]]
    assert torch.equal(cache.gather(sequence, 0)[0], wanted)
    with pytest.raises(ScaleError, match="needs static scales"):
        tiered("k=int8:tensor:static:outliers=3,v=bf16", head_dim=DIM, scales=outlier_layers())


def test_choosing_channels() -> None:
    amax = torch.tensor([[1.0, 9.0, 3.0, 9.0, 2.0], [5.0, 5.0, 5.0, 0.0, 5.0]])
    assert choose_channels(amax, 2).tolist() == [[1, 3], [0, 1]]
    assert choose_channels(amax, 3).tolist() == [[1, 2, 3], [0, 1, 2]]
    found = choose_channels(torch.from_numpy(np.abs(rows()).max(0)), COUNT)
    assert torch.equal(found, CHANNELS)


# --- recipes --------------------------------------------------------------------------------------------------------


def test_recipes_carry_them_and_know_what_they_were_made_for(tmp_path: Path) -> None:
    format = "k=int4:g16:outliers=3,v=int8:tensor:static"
    layers = outlier_layers(2, key_channels=CHANNELS, value=SideScales(torch.tensor(0.04)))
    recipe = Recipe(layers, dict.fromkeys(layers, format), {"source": "test"})
    recipe.save(tmp_path / "recipe")
    loaded = load_recipe(tmp_path / "recipe")
    assert loaded.digest() == recipe.digest()
    assert loaded[1].key is None
    assert torch.equal(loaded[1].key_channels, CHANNELS)  # type: ignore[arg-type]
    opened = [tiered(format, head_dim=DIM, layers=2, scales=scales) for scales in (layers, recipe, loaded)]
    assert len({cache.fingerprint for cache in opened}) == 1
    with pytest.raises(ScaleError, match=r"layer 0 K.*outlier channels differ"):
        tiered("k=int4:g16:outliers=2,v=int8:tensor:static", head_dim=DIM, layers=2, scales=loaded)
    moved = CHANNELS.clone()
    moved[0, 0] += 1
    other = outlier_layers(2, key_channels=moved, value=SideScales(torch.tensor(0.04)))
    assert Recipe(other, dict.fromkeys(other, format), {"source": "test"}).digest() != recipe.digest()


# --- calibration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["amax", "percentile:99", "mse"])
@pytest.mark.parametrize("name", ["int4:g16", "int8:tensor:static", "int8:head:asym:static", "int4:channel:static"])
def test_calibration_finds_the_channels_and_leaves_them_out_of_shared_scales(name: str, method: str) -> None:
    format = f"k={name}:outliers=3,v=fp32"
    layout = CacheLayout.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, format=format, page_size=4)
    x = torch.from_numpy(rows())
    others = x.clone()
    for head in range(HEADS):
        others[:, head, CHANNELS[head]] = others[:, head, CHANNELS[head]] / 1e3  # too small to reach a shared range
    found = []
    for given, kind in ((x, format), (others, format.replace(":outliers=3", ""))):
        if "static" not in name and given is others:
            continue
        calibrator = Calibrator(dataclasses.replace(layout, format=CacheFormat.parse(kind)), method)
        for layer in range(2):
            calibrator.observe(layer, given * (layer + 1), given)
        found.append(calibrator.recipe())
    recipe = found[0]
    for layer in range(2):
        assert torch.equal(recipe[layer].key_channels, CHANNELS)  # type: ignore[arg-type]
        assert recipe[layer].value_channels is None
    if "tensor" in name and method == "amax":
        [with_them, alone] = [float(r[1].key.scale) for r in found]  # type: ignore[union-attr]
        assert with_them == alone == pytest.approx(others.abs().max() * 2 / 127)
    cache = open_layout(layout, scales=recipe)
    sequence = cache.sequence()
    with cache.step({sequence: 8}) as step:
        step.append(0, x[:8], x[:8])
        step.append(1, x[:8] * 2, x[:8])
    for layer in range(2):
        key, _ = cache.gather(sequence, layer)
        error = (key - x[:8] * (layer + 1)).abs() / (layer + 1)
        for head in range(HEADS):
            assert not error[:, head, CHANNELS[head]].any()
        assert error.max() < {"int4:g16": 0.3, "int4:channel:static": 0.4}.get(name, 1.0)
