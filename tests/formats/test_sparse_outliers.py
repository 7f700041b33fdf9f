"""Sparse outliers: a fixed number of a page's numbers kept exactly, chosen when it seals; what finds no room is clipped
and counted. The oracle is the conformance suite's, which shares no code with the codec; some answers are by hand.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import core_support as support
import numpy as np
import pytest
import torch
from core_support import Array, bits
from replay import Replay, open_layout, placed, run, tiered

from kvport import (
    CacheFormat,
    CacheLayout,
    FormatError,
    ImageError,
    LayerScales,
    LayerSpec,
    LayoutError,
    PageImage,
    SideScales,
    Support,
    TensorFormat,
    Unsupported,
    codec,
    codec_stats,
)
from kvport.cache import Clipped
from kvport.cli import main
from kvport.features import ATTENTION_FEATURES, FEATURES
from kvport.image_report import inspect_image
from kvport.recipes import Recipe
from kvport.tiers import canonical_bytes
from kvport_conformance import inputs, oracle_codec
from kvport_cpu.base import TorchBackend
from kvport_cpu.reference import ReferenceBackend

PAGE, HEADS, DIM, COUNT = 8, 2, 32, 6
FORMATS = [
    "int8",
    "int4",
    "int4:g16",
    "int4:asym",
    "int2:g8:asym:scale=fp16",
    "int8:asym:scale=bf16",
    "int4:c4",
    "int2:c8:asym:scale=fp16",
    "fp8_e4m3",
    "fp8_e5m2:g16",
    "mxfp4",
    "nvfp4",
    "int8:head:static",
    "int4:channel:static",
    "int4:tensor:asym:static",
    "int2:channel:asym:static:scale=fp16",
    "fp8_e4m3:channel:static",
    "nvfp4:static",
]


def sparse_of(name: str, count: int = COUNT) -> TensorFormat:
    return TensorFormat.parse(f"{name}:sparse={count}")


def pages(count: int = 3) -> Array:
    """(pages, PAGE, HEADS, DIM): ordinary numbers with an offset per channel, and rare ones up to fifty times as large.
    The last page has more of them than there is room for."""
    x = inputs.value(1, (count * PAGE, HEADS, DIM)) + inputs.values(2, (1, HEADS, DIM), low=-1.0, high=2.0)
    rare = inputs.values(3, x.shape) > np.float32(0.99)
    rare[-PAGE:] |= inputs.values(4, (PAGE, HEADS, DIM)) > np.float32(0.95)
    return np.where(rare, x * np.float32(50), x).astype(np.float32).reshape(count, PAGE, HEADS, DIM)


def static_of(fmt: TensorFormat) -> tuple[Any, Any, SideScales | None]:
    """Scales that hold the ordinary numbers and clip the rare ones."""
    if not fmt.static:
        return None, None, None
    shape = {"tensor": (), "block": (), "head": (HEADS,), "channel": (HEADS, DIM)}[fmt.granularity]
    largest = {"int": 2.0 ** (fmt.bits - fmt.symmetric) - 1, "fp8": 448.0, "nv": 2688.0}[fmt.kind]
    scale = inputs.values(5, shape, low=3.0, high=4.0) / np.float32(largest)
    zero = None if fmt.symmetric else inputs.values(6, shape, low=-2.5, high=-1.5)
    if fmt.scale_dtype == "fp16":
        scale, zero = (np.asarray(part, np.float16).astype(np.float32) for part in (scale, zero))
    side = SideScales(torch.from_numpy(np.array(scale)), None if zero is None else torch.from_numpy(np.array(zero)))
    return scale, zero, side


def oracle(fmt: TensorFormat, x: Array) -> tuple[oracle_codec.Encoded, Array]:
    """The oracle's answer for pages (n, PAGE, heads, dim)."""
    scale, zero, _ = static_of(fmt)
    spec = support.spec_of(fmt, PAGE)
    found = oracle_codec.encode(spec, x.reshape(-1, HEADS, DIM), static_scale=scale, static_zero=zero)
    return found, oracle_codec.decode(spec, found.planes, DIM, static_scale=scale, static_zero=zero)


# --- the codec ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_planes_and_decoded_rows_equal_the_oracle(name: str, dtype: torch.dtype) -> None:
    fmt = sparse_of(name)
    x = torch.from_numpy(pages()).to(dtype)
    _, _, static = static_of(fmt)
    wanted, back = oracle(fmt, x.float().numpy())
    got = codec.encode(fmt, x, static)
    assert set(got.planes) == set(wanted.planes)
    for plane, tensor in got.planes.items():
        assert (bits(support.to_numpy(tensor.flatten(0, 1))) == bits(wanted.planes[plane])).all(), plane
    decoded = codec.decode(fmt, got.planes, static)
    assert (bits(np.ascontiguousarray(decoded.flatten(0, 1).numpy())) == bits(back)).all()
    kept = got.planes["sparse_index"] >= 0
    assert kept.sum() >= kept.numel() // 2
    flat = x.float().movedim(-2, -3).flatten(-2)
    values = flat.gather(-1, got.planes["sparse_index"].squeeze(1).clamp(min=0).long())
    assert torch.equal(got.planes["sparse_value"].squeeze(1)[kept.squeeze(1)], values[kept.squeeze(1)])


@pytest.mark.parametrize("name", FORMATS)
def test_special_rows_equal_the_oracle(name: str) -> None:
    """Ties, zeros, constants, tiny, huge and non-finite rows."""
    fmt = sparse_of(name)
    _, _, static = static_of(fmt)
    rows = inputs.special_rows(DIM)
    x = np.stack([np.stack([a, b]) for a, b in zip(rows.values(), reversed(list(rows.values())), strict=True)])
    x = x[: len(x) // PAGE * PAGE].reshape(-1, PAGE, HEADS, DIM)
    wanted, back = oracle(fmt, x)
    got = codec.encode(fmt, torch.from_numpy(x), static)
    for plane, tensor in got.planes.items():
        assert (bits(support.to_numpy(tensor.flatten(0, 1))) == bits(wanted.planes[plane])).all(), plane
    decoded = codec.decode(fmt, got.planes, static).flatten(0, 1).numpy()
    assert ((bits(np.ascontiguousarray(decoded)) == bits(back)) | (np.isnan(decoded) & np.isnan(back))).all()


def test_by_hand() -> None:
    """int4 per token, two of four large numbers kept: the scales are those of the others."""
    fmt = TensorFormat.parse("int4:sparse=2")
    x = torch.tensor([[7.0, -700.0, 3.5, 0.0], [90.0, 14.0, -2.0, 90.0]]).reshape(1, 2, 1, 4)
    planes = codec.encode(fmt, x).planes
    assert planes["sparse_index"].tolist() == [[[[1, 4]]]]  # of the two 90s the earlier
    assert planes["sparse_value"].tolist() == [[[[-700.0, 90.0]]]]
    assert planes["scale"].flatten().tolist() == pytest.approx([1.0, 90 / 7])
    assert codec.unpack(fmt, planes["codes"]).flatten().tolist() == [7.0, 0.0, 4.0, 0.0, 0.0, 1.0, 0.0, 7.0]
    assert codec.decode(fmt, planes).flatten().tolist()[:5] == [7.0, -700.0, 4.0, 0.0, 90.0]


def test_a_static_range_by_hand() -> None:
    """int8 with scale 0.5 holds up to 63.5; of three beyond two are kept, the nearest is counted."""
    fmt = TensorFormat.parse("int8:tensor:static:sparse=2")
    static = SideScales(torch.tensor(0.5))
    x = torch.tensor([63.7, 70.0, -100.0, 1e6, torch.inf, torch.nan]).reshape(1, 2, 1, 3)
    encoded = codec.encode(fmt, x, static)
    assert encoded.planes["sparse_index"].flatten().tolist() == [2, 3]
    assert encoded.planes["sparse_overflow"].flatten().tolist() == [2]  # 70 and infinity; 63.7 rounds to the last code
    assert encoded.poisoned is not None
    assert encoded.poisoned.tolist() == [[False, True]]
    back = codec.decode(fmt, encoded.planes, static).flatten().tolist()
    assert back == [63.5, 63.5, -100.0, 1e6, 63.5, 0.0]


def test_asymmetric_distances_are_from_the_lower_median() -> None:
    """A large common offset is no outlier, what leaves it is; with |x| the five hundreds would be taken."""
    fmt = TensorFormat.parse("int2:asym:sparse=1")
    x = torch.tensor([500.0, 501.0, 300.0, 502.0, 503.0, 503.0, 501.0, 500.0]).reshape(1, 1, 1, 8)
    planes = codec.encode(fmt, x).planes
    assert planes["sparse_index"].tolist() == [[[[2]]]]
    assert planes["zero"].item() == 500.0
    assert torch.equal(codec.decode(fmt, planes), x)


def test_fewer_than_there_is_room_for() -> None:
    fmt = sparse_of("int4", 5)
    x = torch.zeros(1, PAGE, 1, 4)
    x[0, 3, 0, 2] = 2.0
    planes = codec.encode(fmt, x).planes
    assert planes["sparse_index"].flatten().tolist() == [14, -1, -1, -1, -1]
    assert planes["sparse_value"].flatten().tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert not planes["scale"].any()
    assert torch.equal(codec.decode(fmt, planes), x)


@pytest.mark.parametrize("name", ["int4:g16", "int8:c4:asym", "nvfp4", "mxfp4", "int8:tensor:static", "nvfp4:static"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_is_never_kept_and_hides_nothing(name: str, poison: float) -> None:
    fmt = sparse_of(name)
    _, _, static = static_of(fmt)
    x = torch.from_numpy(pages(1))
    x[0, 5, 1, 16] = poison
    encoded = codec.encode(fmt, x, static)
    plain = dataclasses.replace(fmt, sparse=0)
    alone = codec.decode(plain, codec.encode(plain, x, static).planes, static)
    back = codec.decode(fmt, encoded.planes, static)
    assert torch.equal(back.isnan(), alone.isnan())
    assert encoded.planes["sparse_value"].isfinite().all()
    if fmt.hides_nan:
        assert torch.equal(encoded.poisoned, x.isnan().flatten(-2).any(-1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_any_bits_decode(name: str) -> None:
    """Pages that nobody wrote are read where tables are padded: an index that is none of the page's changes nothing."""
    fmt = sparse_of(name)
    _, _, static = static_of(fmt)
    planes = codec.encode(fmt, torch.from_numpy(pages()), static).planes
    clean = codec.decode(fmt, {**planes, "sparse_index": torch.full_like(planes["sparse_index"], -1)}, static)
    for bad in (-(2**31), -2, PAGE * DIM, 2**31 - 1):
        found = codec.decode(fmt, {**planes, "sparse_index": torch.full_like(planes["sparse_index"], bad)}, static)
        assert torch.equal(found, clean)


@pytest.mark.parametrize("name", [n for n in FORMATS if "static" not in n])
def test_they_lower_the_error_of_all_others(name: str) -> None:
    """The reason to pay for them: the rest is as good as without the rare numbers, or better."""
    x = torch.from_numpy(pages(2)[:1])
    errors = []
    for count in (0, 40):
        fmt = TensorFormat.parse(name + (f":sparse={count}" if count else ""))
        back = codec.decode(fmt, codec.encode(fmt, x).planes)
        errors.append((back - x).square().mean().sqrt().item())
    assert errors[1] < errors[0] / (1.3 if fmt.kind in ("fp8", "mx", "nv") else 2)


def test_counters_leave_out_what_is_kept_and_count_what_overflows() -> None:
    fmt = sparse_of("int4:channel:static")
    _, _, static = static_of(fmt)
    x = torch.from_numpy(pages())
    found = codec_stats.count(fmt, x, static=static)
    wanted, _ = oracle(fmt, x.numpy())
    overflow = codec.encode(fmt, x, static).planes["sparse_overflow"]
    assert found.saturated == wanted.saturated == int(overflow.sum()) > 0
    plain = dataclasses.replace(fmt, sparse=0)
    kept = int((wanted.planes["sparse_index"] >= 0).sum())
    assert codec_stats.count(plain, x, static=static).saturated == found.saturated + kept
    channels = torch.tensor([[1, 2], [3, 4]])
    with_channels = TensorFormat.parse("int4:channel:static:outliers=2")
    rest = codec_stats.count(with_channels, x, static=static, channels=channels)
    assert 0 < rest.saturated < codec_stats.count(plain, x, static=static).saturated


# --- in a cache -----------------------------------------------------------------------------------------------------

CACHED = (
    "int4:g16:sparse=5",
    "k=int2:c4:asym:sparse=7,v=int2:g8:asym:sparse=3,recent=5",
    "k=nvfp4:sparse=4,v=int8,sink=2",
    "int8:sparse=2,recent=3:fp8_e4m3",
)


@pytest.mark.parametrize("format", CACHED)
def test_steps_equal_the_replay_however_they_are_split(format: str) -> None:
    """Seals, forks, truncation and copy-on-write, judged bit for bit and within the bound by the replaying oracle."""
    cache = tiered(format)
    first = cache.sequence()
    oracles = {first: [Replay(cache.layout)]}
    for count in (5, 1, 6):
        run(cache, {first: count}, oracles)
    child = first.fork()
    oracles[child] = [oracles[first][0].fork()]
    run(cache, {first: 1, child: 3}, oracles)
    child.truncate(13)
    oracles[child][0].truncate(13)
    run(cache, {child: 9, first: 2}, oracles)
    assert "f" in placed(cache, child)
    shared = set(first.pages(0)) & set(child.pages(0)) - {0}
    assert shared  # siblings that seal the same page share the result
    one = tiered(format)
    alone = one.sequence()
    with one.step({alone: 20}) as step:
        key, value = support.kv(one.layout, 0, 9, 20)
        step.append(0, key, value)
    again = one.sequence()
    for n in range(20):
        with one.step({again: 1}) as step:
            step.append(0, *(x[n : n + 1] for x in support.kv(one.layout, 0, 9, 20)))
    with one.step({alone: 1, again: 1}) as step:
        step.append(0, *(x[:2] for x in support.kv(one.layout, 0, 10, 2)))
    for page in range(12 // 4 if "recent" not in format else 2):
        a, b = (one.export(s).layers[0] for s in (alone, again))
        for name, plane in a.items():
            if not name.startswith("near."):
                assert torch.equal(plane[page].view(torch.uint8), b[name][page].view(torch.uint8)), name


def test_images_carry_them_with_a_digest_of_their_own(tmp_path: Path) -> None:
    cache = tiered(CACHED[0])
    sequence = cache.sequence()
    support.run_step(cache, {sequence: 9})
    support.run_step(cache, {sequence: 1})
    image = cache.export(sequence)
    assert {"key.sparse_index", "key.sparse_value", "value.sparse_index"} <= set(image.layers[0])
    digests = image.digests()[0]
    assert set(digests) == {"codes", "scales", "outliers"}
    planes = dict(image.layers[0])
    planes["key.sparse_value"] = planes["key.sparse_value"] + 1
    moved = dataclasses.replace(image, layers={0: planes}).digests()[0]
    assert {part for part in digests if digests[part] != moved[part]} == {"outliers"}
    image.save(tmp_path / "image")
    other = tiered(CACHED[0])
    copy = other.insert(PageImage.load(tmp_path / "image"))
    for mine, theirs in zip(cache.gather(sequence, 0), other.gather(copy, 0), strict=True):
        assert torch.equal(mine, theirs)
    assert other.export(copy).digests() == image.digests()


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: index.fill_(64),  # a page has 4 tokens of 16 channels
        lambda index: index.fill_(-2),
        lambda index: index.fill_(3),  # twice
        lambda index: index.copy_(index.flip(-1)),
        lambda index: index[..., 0].fill_(-1),  # a gap
    ],
)
def test_indices_that_cannot_be_are_refused(edit: Any) -> None:
    cache = tiered(CACHED[0])
    sequence = cache.sequence()
    support.run_step(cache, {sequence: 9})
    support.run_step(cache, {sequence: 1})
    image = cache.export(sequence)
    planes = {name: plane.clone() for name, plane in image.layers[0].items()}
    edit(planes["value.sparse_index"][0])
    before = support.snapshot(cache)
    with pytest.raises(ImageError, match=r"layer 0 value: indices of sparse outliers must ascend within 0 .. 63"):
        cache.insert(dataclasses.replace(image, layers={0: planes}))
    assert support.snapshot(cache) == before


def overflowing() -> tuple[Any, Any, dict[int, LayerScales]]:
    """A cache whose second page of V has 3 numbers beyond the range of layer 1, room for one."""
    scales = {n: LayerScales(SideScales(torch.tensor(1.0 + n)), SideScales(torch.tensor(0.5))) for n in range(2)}
    cache = tiered("int8:tensor:static:sparse=1", layers=2, scales=scales)
    sequence = cache.sequence()
    x = torch.ones(9, 2, 16)
    value = x.clone()
    value[5, 0, 3], value[5, 1, 3], value[6, 1, 2] = 100.0, -100.0, 200.0
    for count in (8, 1):
        with cache.step({sequence: count}) as step:
            first = sequence.length
            step.append(0, x[first : first + count], x[first : first + count])
            step.append(1, x[first : first + count], value[first : first + count])
    return cache, sequence, scales


def test_overflow_is_counted_where_users_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, sequence, _ = overflowing()
    child = sequence.fork()
    assert cache.check() == tuple(Clipped(s, 1, "value", 4, 1) for s in (sequence, child))
    value = cache.gather(sequence, 1)[1]
    assert value[5, 0, 3] == 100.0
    assert value[5, 1, 3] == -63.5  # head 1 has room for the larger one alone
    assert value[6, 1, 2] == 200.0
    image = cache.export(sequence)
    sides = {(s.layer, s.side): s for s in inspect_image(image)}
    assert (sides[1, "value"].kept, sides[1, "value"].overflow) == (2, 1)
    assert (sides[0, "value"].kept, sides[0, "value"].overflow) == (0, 0)
    assert "found no room (sparse=1)" in sides[1, "value"].suspicions()[-1]
    image.save(tmp_path / "image.safetensors")
    assert main(["inspect", str(tmp_path / "image.safetensors")]) == 0
    assert "1 numbers beyond the static range found no room (sparse=1)" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "image.safetensors"), "--json"]) == 0
    assert '"overflow": 1' in capsys.readouterr().out
    sequence.free()
    child.free()
    assert cache.check() == ()


def test_a_recipe_of_the_dense_format_serves() -> None:
    """What a static range means does not depend on how many numbers are kept beside it."""
    _, _, scales = overflowing()
    recipe = Recipe(scales, dict.fromkeys(scales, "int8:tensor:static"), {})
    tiered("int8:tensor:static:sparse=1", layers=2, scales=recipe)


def test_a_latent_layer_keeps_numbers_of_either_part() -> None:
    spec = LayerSpec(kv_heads=1, query_heads=2, key_dim=48, value_dim=32, latent=True)
    layout = CacheLayout((spec,), CacheFormat.parse("latent=int4:g16:sparse=3,rope=int8:sparse=2"), 4)
    cache = open_layout(layout)
    sequence = cache.sequence()
    oracles = {sequence: [Replay(layout)]}
    for count in (5, 1, 7):
        run(cache, {sequence: count}, oracles)
    assert {"latent.sparse_index", "rope.sparse_index"} <= set(cache.export(sequence).layers[0])


def test_bytes_count_them() -> None:
    layout = CacheLayout.uniform(layers=3, kv_heads=HEADS, head_dim=DIM, format="int4:sparse=5", page_size=4)
    plain = CacheLayout.uniform(layers=3, kv_heads=HEADS, head_dim=DIM, format="int4", page_size=4)
    assert canonical_bytes(layout, 8) - canonical_bytes(plain, 8) == 2 * 3 * 2 * HEADS * 5 * 8
    static = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=8, format="int8:tensor:static:sparse=5", page_size=4)
    assert static.groups[0].layout.canonical_page_bytes == 2 * (4 * 8 + 5 * 8 + 4)
    cache = open_layout(layout, 5)
    far = cache.stats().pools[0]
    held = sum(b.numel() * b.itemsize for b in cache.backend.buffers(cache._stores[0]).values())
    assert held == far.page_bytes * 5 == 5 * layout.groups[0].layout.canonical_page_bytes


def test_the_plan_counts_them_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 512,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "torch_dtype": "bfloat16",
            }
        )
    )
    found = {}
    for format in ("int4:g64", "int4:g64:sparse=16"):
        command = ["plan", "--model", str(config), "--tokens", "4096", "--format", format, "--json"]
        assert main(command) == 0
        [found[format]] = json.loads(capsys.readouterr().out)["plans"]
    dense, sparse = (plan["per_request"] for plan in found.values())
    assert sparse["codes"] == dense["codes"]
    assert (sparse["scales"], dense["outliers"]) == (dense["scales"], 0)
    assert sparse["outliers"] == 32 * 2 * 2 * 2 * 16 * 8  # pages, layers, sides, heads, entries, bytes
    assert main([*command[:-1], "--format", "int4:g64"]) == 0
    assert capsys.readouterr().out.count("  outliers  ") == 2


# --- identity and refusals ------------------------------------------------------------------------------------------


def test_strings_and_identity() -> None:
    fmt = CacheFormat.parse("k=int4:sparse=4:g64:scale=fp16,v=int8")
    assert str(fmt) == "k=int4:g64:scale=fp16:sparse=4,v=int8"
    assert CacheFormat.parse(str(fmt)) == fmt
    assert fmt.tiered
    assert not fmt.calibrated
    others = ["k=int4:g64:scale=fp16:sparse=5,v=int8", "k=int4:g64:scale=fp16,v=int8"]
    assert len({CacheFormat.parse(text).digest() for text in others} | {fmt.digest()}) == 3
    caches = [tiered(text) for text in ("int4:sparse=4", "int4:sparse=5", "k=int4:sparse=4,v=int4")]
    assert len({cache.fingerprint for cache in caches}) == 3


@pytest.mark.parametrize(
    "format, facts",
    [
        ("bf16:sparse=4", ["bf16", "sparse"]),
        ("int8:sparse=0", ["'sparse=0'", "sparse=N"]),
        ("int8:sparse=2:sparse=3", ["sparse twice"]),
        ("int4:outliers=2:sparse=3", ["outliers=2", "sparse=3", "one of them"]),
        ("int4,recent=4:int8:sparse=2", ["int8:sparse=2", "per-token"]),
    ],
)
def test_formats_that_cannot_be(format: str, facts: list[str]) -> None:
    with pytest.raises(FormatError) as error:
        CacheFormat.parse(format)
    for fact in facts:
        assert fact in str(error.value)
    with pytest.raises(FormatError, match="entries per page"):
        TensorFormat("int8", sparse=-1)


def test_something_must_be_left_to_quantize() -> None:
    with pytest.raises(LayoutError, match=r"sparse=64.*page of 4 tokens of dim 16.*less than 64"):
        CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, format="int8:sparse=64", page_size=4)


class Unaware(ReferenceBackend):
    """A backend written before pages could hold more than codes, scales and zeros."""

    def support(self, layout: Any) -> Support:
        return Support()


@pytest.mark.parametrize(
    "format, feature",
    [("int8:sparse=2", "sparse"), ("int8:outliers=2", "outliers"), ("latent=int8,rope=bf16", "latent")],
)
def test_a_backend_that_does_not_declare_what_pages_hold_is_refused_by_its_name(format: str, feature: str) -> None:
    """It would otherwise leave it out, and be wrong in silence."""
    latent = feature == "latent"
    spec = LayerSpec(kv_heads=1, query_heads=2, key_dim=24, value_dim=16 if latent else 24, latent=latent)
    layout = CacheLayout((spec,), CacheFormat.parse(format), 4)
    channels = torch.tensor([[1, 2]])
    scales = {0: LayerScales(key_channels=channels, value_channels=channels)} if feature == "outliers" else None
    open_layout(layout, scales=scales)
    with pytest.raises(Unsupported, match=f"feature {feature} is not declared, needed for .*(outlier|latent)"):
        open_layout(layout, scales=scales, backend=Unaware("cpu", torch.device("cpu")))
    assert feature in FEATURES - ATTENTION_FEATURES
    assert feature in TorchBackend("cpu", torch.device("cpu")).support(layout.groups[0].layout).features


@pytest.mark.parametrize("count", [-1, 63, 2**31 - 1])
def test_an_image_that_clipped_more_than_a_page_can_is_refused(count: int) -> None:
    cache, sequence, scales = overflowing()
    image = cache.export(sequence)
    layers = {layer: dict(planes) for layer, planes in image.layers.items()}
    counts = layers[1]["value.sparse_overflow"].clone()
    other = tiered("int8:tensor:static:sparse=1", layers=2, scales=scales)
    # 4 tokens of 16 channels, of which head 1 keeps one in its second page: 63 others.
    counts[1, 0, 1] = 63
    layers[1]["value.sparse_overflow"] = counts
    kept = other.insert(dataclasses.replace(image, layers=layers))
    assert [found.count for found in other.check()] == [63]
    kept.free()
    counts[1, 0, 1] = count if count != 63 else 64
    before = support.snapshot(other)
    with pytest.raises(ImageError, match="layer 1 value: a page of 64 numbers a head cannot have clipped"):
        other.insert(dataclasses.replace(image, layers=layers))
    assert support.snapshot(other) == before
