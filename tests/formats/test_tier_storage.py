"""Tiered sequences as page images and files, with static scales, and with NaN in what is sealed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from core_support import Array, bits
from replay import Replay, placed, run, state, tiered

from kvport import ImageError, LayerScales, OutOfPages, PageImage, ScaleError, SideScales
from kvport_conformance import inputs, oracle_codec

FORMATS = (
    "int8,recent=6",
    "int4:g8:asym,sink=5,recent=6:fp8_e4m3",
    "k=int2:c4:asym:scale=fp16,v=int2:g8:asym:scale=fp16,recent=5",
    "nvfp4,recent=3",
    "mxfp4,sink=4",
)


# --- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("pin", [0, 6])
def test_images_of_tiered_sequences_go_on_as_if_nothing_happened(
    format: str, window: int | None, pin: int, tmp_path: Path
) -> None:
    """Export, save, load, import into another cache at every kind of length; then both go on alike, bit for bit."""
    for total in (0, 3, 12, 13, 17, 23):
        source, target = (tiered(format, window=window, head_dim=32, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(total % 3):
            target.sequence()  # other page ids than at the source
        sequence, oracle = source.sequence(), Replay(source.layout, pin=pin)
        sequence.pin(pin)
        for count in (total // 2, total - total // 2, 0):
            run(source, {sequence: count}, {sequence: [oracle]}) if count else None
        source.export(sequence).save(tmp_path / "image")
        image = PageImage.load(tmp_path / "image")
        assert image.digests() == source.export(sequence).digests()
        assert (image.pin, image.sealed) == (pin, (sequence.sealed_length(),))
        twin = target.insert(image)
        assert placed(target, twin) == placed(source, sequence)
        assert target.export(twin).digests() == image.digests()
        other = oracle.fork()
        twin.number, before = sequence.number, twin.number
        for count in (1, 5, 1, 7):
            run(source, {sequence: count}, {sequence: [oracle]})
            run(target, {twin: count}, {twin: [other]})
            assert target.export(twin).digests() == source.export(sequence).digests()
        twin.number = before


def test_every_plane_of_either_tier_is_in_the_image_and_needed() -> None:
    cache = tiered("k=int2:c4:asym,v=nvfp4,recent=5:int8")
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    for count in (16, 3):
        run(cache, {sequence: count}, {sequence: [oracle]})
    image = cache.export(sequence)
    assert set(image.layers[0]) == {
        "key.codes", "key.scale", "key.zero", "value.codes", "value.scale", "value.tensor_scale",
        "near.key.codes", "near.key.scale", "near.value.codes", "near.value.scale",
    }  # fmt: skip
    far, near = placed(cache, sequence).count("f") // 4, 3
    assert image.layers[0]["key.codes"].shape[0] == far == 2
    assert image.layers[0]["near.key.codes"].shape[0] == near
    assert not image.layers[0]["near.key.codes"][-1, 3:].any()  # the slot never written
    before = state(cache)
    for name, plane in image.layers[0].items():
        for planes in (
            {n: p for n, p in image.layers[0].items() if n != name},
            {**image.layers[0], name: plane[:-1]},
            {**image.layers[0], name: plane.to(torch.int16)},
        ):
            with pytest.raises(ImageError):
                cache.insert(dataclasses.replace(image, layers={0: planes}))
    assert state(cache) == before


@pytest.mark.parametrize("change", [{"sealed": (3,)}, {"sealed": (20,)}, {"sealed": (4,)}, {"pin": 5}, {"pin": -1}])
def test_an_image_whose_tiers_cannot_be_is_refused(change: dict[str, object]) -> None:
    cache = tiered("int8,recent=5")
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    for count in (16, 3):
        run(cache, {sequence: count}, {sequence: [oracle]})
    image = cache.export(sequence)
    assert image.sealed == (8,)
    with pytest.raises(ImageError):
        cache.insert(dataclasses.replace(image, **change))  # type: ignore[arg-type]


def test_an_image_that_does_not_fit_either_pool_changes_nothing() -> None:
    source = tiered("int8,recent=5")
    sequence, oracle = source.sequence(), Replay(source.layout)
    for count in (20, 3):
        run(source, {sequence: count}, {sequence: [oracle]})
    image = source.export(sequence)
    for pages, missing in (([3, 40], "int8"), ([40, 3], "fp32")):
        cache = tiered("int8,recent=5", pages=pages)
        before = state(cache)
        with pytest.raises(OutOfPages, match=f"{missing} pages"):
            cache.insert(image)
        assert state(cache) == before


@pytest.mark.parametrize(
    "other", ["int8,recent=5", "int8,recent=6,sink=1", "int8,recent=6:bf16", "int8", "int4,recent=6"]
)
def test_another_tier_rule_is_another_cache(other: str) -> None:
    source = tiered("int8,recent=6")
    sequence, oracle = source.sequence(), Replay(source.layout)
    run(source, {sequence: 9}, {sequence: [oracle]})
    cache = tiered(other)
    assert cache.fingerprint != source.fingerprint
    with pytest.raises(ImageError, match="belongs to another kind"):
        cache.insert(source.export(sequence))


def test_digests_see_one_bit_of_a_far_scale_and_of_a_near_value() -> None:
    cache = tiered("int8,recent=5")
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    for count in (20, 3):
        run(cache, {sequence: count}, {sequence: [oracle]})
    image = cache.export(sequence)
    for name in image.layers[0]:
        planes = {n: p.clone() for n, p in image.layers[0].items()}
        planes[name].view(torch.uint8).reshape(-1)[0] ^= 1
        changed = dataclasses.replace(image, layers={0: planes}).digests()[0]
        part, rest = ("codes", "scales") if name.endswith(".codes") else ("scales", "codes")
        assert changed[part] != image.digests()[0][part]
        assert changed[rest] == image.digests()[0][rest]


# --- static scales --------------------------------------------------------------------------------------------------


def static_oracle(code: str, x: Array, scale: float) -> Array:
    spec = oracle_codec.CodecSpec(code, granularity="tensor", static=True)
    planes = oracle_codec.encode(spec, x, static_scale=np.float32(scale)).planes
    return oracle_codec.decode(spec, planes, x.shape[-1], static_scale=np.float32(scale))


@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_static_scales_belong_to_the_far_pages(code: str) -> None:
    scales = {0: LayerScales(SideScales(torch.tensor(0.11)), SideScales(torch.tensor(0.013)))}
    format = f"{code}:tensor:static,recent=6,sink=2"
    with pytest.raises(ScaleError, match="layer 0 K"):
        tiered(format)
    cache = tiered(format, scales=scales)
    sequence = cache.sequence()
    key, value = torch.from_numpy(inputs.key(1, (23, 2, 16))), torch.from_numpy(inputs.value(2, (23, 2, 16)))
    for first, end in ((0, 22), (22, 23)):
        with cache.step({sequence: end - first}) as step:
            step.append(0, key[first:end], value[first:end])
    assert placed(cache, sequence) == "nnnn" + "f" * 12 + "n" * 7
    for got, rows, scale in zip(cache.gather(sequence, 0), (key, value), (0.11, 0.013), strict=True):
        wanted = rows.numpy().copy()
        wanted[4:16] = static_oracle(code, wanted[4:16], scale)
        assert (bits(got.numpy()) == bits(wanted)).all()  # near tokens are untouched by any scale
    assert set(cache.export(sequence).layers[0]) == {"key.codes", "value.codes", "near.key.codes", "near.value.codes"}
    twice = {0: LayerScales(SideScales(torch.tensor(0.22)), SideScales(torch.tensor(0.013)))}
    with pytest.raises(ImageError):
        tiered(format, scales=twice).insert(cache.export(sequence))


def test_a_nan_is_flagged_when_a_static_integer_page_seals_and_not_before() -> None:
    scales = {0: LayerScales(SideScales(torch.tensor(0.11)), SideScales(torch.tensor(0.013)))}
    cache = tiered("int8:tensor:static,recent=3", scales=scales)
    clean, bad = cache.sequence(), cache.sequence()
    for count in (11, 1):
        key = torch.ones(2 * count, 2, 16)
        value = torch.ones(2 * count, 2, 16)
        if count == 11:
            value[count + 5, 1, 3] = torch.nan
        with cache.step({clean: count, bad: count}) as step:
            assert cache.backend.poisoned(cache._stores[0]).sum() == (count == 1)
            step.append(0, key, value)
        if count == 11:
            assert cache.check() == ()
            assert cache.gather(bad, 0)[1][5, 1, 3].isnan()
    assert [(p.sequence, p.layer, p.position) for p in cache.check()] == [(bad, 0, 4)]
    assert cache.gather(bad, 0)[1][5, 1, 3] == 0
    assert torch.isfinite(cache.gather(clean, 0)[1]).all()
    bad.free()
    assert cache.check() == ()


# --- poison ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, hit",
    [
        ("int8,recent=3", (slice(5, 6), slice(1, 2), slice(0, 16))),
        ("int4:g8,recent=3", (slice(5, 6), slice(1, 2), slice(8, 16))),
        ("k=int8:c4,v=int8", (slice(4, 8), slice(1, 2), slice(9, 10))),
        ("k=int2:c2:asym,v=int8", (slice(4, 6), slice(1, 2), slice(9, 10))),
        ("fp8_e4m3,recent=3:bf16", (slice(5, 6), slice(1, 2), slice(0, 16))),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_poison_in_a_near_page_spoils_its_group_when_it_seals(
    format: str, hit: tuple[slice, ...], value: float
) -> None:
    caches = [tiered(format), tiered(format)]
    sequences = [cache.sequence() for cache in caches]
    for cache, sequence in zip(caches, sequences, strict=True):
        key = torch.from_numpy(inputs.key(3, (12, 2, 16)))
        if sequence is sequences[1]:
            key[5, 1, 9] = value
        for first, end in ((0, 11), (11, 12)):
            with cache.step({sequence: end - first}) as step:
                step.append(0, key[first:end], torch.ones(end - first, 2, 16))
            if first == 0:
                near = cache.gather(sequence, 0)[0]
                where = ~torch.isfinite(near)
                assert where.sum() == (sequence is sequences[1])  # still one number
        assert placed(cache, sequence).startswith("ffffffff")
    clean, dirty = (cache.gather(s, 0)[0] for cache, s in zip(caches, sequences, strict=True))
    spoilt = torch.zeros_like(clean, dtype=torch.bool)
    spoilt[hit] = True
    assert dirty[spoilt].isnan().all()
    assert torch.equal(dirty[~spoilt], clean[~spoilt])


def test_poisoned_tokens_reach_only_the_rows_that_see_them() -> None:
    """A NaN key in a far page: the poisoned head is NaN for every later row, the other head is not."""
    cache = tiered("int8,recent=3")
    sequence = cache.sequence()
    key, value = torch.from_numpy(inputs.key(4, (14, 2, 16))), torch.from_numpy(inputs.value(5, (14, 2, 16)))
    key[5, 1, 9] = torch.nan
    for first, end in ((0, 12), (12, 14)):
        with cache.step({sequence: end - first}) as step:
            step.append(0, key[first:end], value[first:end])
            output = step.attend(0, torch.ones(end - first, 4, 16)).output
    assert placed(cache, sequence)[5] == "f"
    assert torch.isfinite(output[:, :2]).all()
    assert output[:, 2:].isnan().all()
