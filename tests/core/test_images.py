"""Page images: bit for bit out and in, on file and off; and every image that is not whole is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import core_support as support
import pytest
import safetensors.torch
import torch
from core_support import FORMATS
from safetensors import safe_open

from kvport import (
    FEATURES,
    Backend,
    CacheFormat,
    CacheLayout,
    FileError,
    ImageError,
    LayerSpec,
    MissingFile,
    OutOfPages,
    PagedCache,
    PageImage,
    Poisoned,
    Sequence,
    SideScales,
    Support,
    Unsupported,
)
from kvport.cli import main
from kvport.tiers import make_lanes
from kvport_conformance.cases import run_case, select
from kvport_cpu import reference
from kvport_cpu.reference import ReferenceBackend

MORE_FORMATS = (*FORMATS, "bf16", "fp16", "int2:g32:asym:scale=bf16", "k=int8:scale=fp16,v=int4:g16")


def hybrid(format: str, pages: int = 30, window: int = 6, **more: Any) -> PagedCache:
    layout = support.hybrid_layout(format, window=window, key_dim=32)
    return support.open_cache(layout, pages, **more)


def equal(a: PageImage, b: PageImage) -> bool:
    """Equal in every field, arrays bit for bit."""
    fields = [f.name for f in dataclasses.fields(PageImage) if f.name != "layers"]
    if any(getattr(a, f) != getattr(b, f) for f in fields) or a.digests() != b.digests():
        return False
    return all(
        support.bits(support.to_numpy(x)).tobytes() == support.bits(support.to_numpy(b.layers[layer][name])).tobytes()
        for layer, planes in a.layers.items()
        for name, x in planes.items()
    )


def grown(cache: PagedCache, tokens: int, steps: int = 3, ids: bool = False) -> Sequence:
    """A sequence that grew over several steps, so that its window has freed pages."""
    sequence = cache.sequence()
    while sequence.length < tokens:
        count = min(-(-tokens // steps), tokens - sequence.length)
        support.run_step(
            cache, {sequence: [sequence.length + i for i in range(count)] if ids else count}, 1, attend=False
        )
    return sequence


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 13, 24])
@pytest.mark.parametrize("format", MORE_FORMATS)
def test_an_imported_sequence_is_the_exported_one(format: str, tokens: int, tmp_path: Path) -> None:
    """Through memory and through a file into a poisoned cache: equal images, and equal outputs from then on."""
    local = hybrid(format)
    source = grown(local, tokens, ids=tokens % 2 == 1)
    image = local.export(source)
    image.save(tmp_path / "image.safetensors")
    loaded = PageImage.load(tmp_path / "image.safetensors")
    assert equal(loaded, image)
    expected = support.run_step(local, {source: 5}, 1)
    later = local.export(source)
    for given in (image, loaded):
        remote = hybrid(format)
        support.fill(remote, 9, 3)
        support.shuffle_free_pages(remote, 5)
        copy = remote.insert(given)
        assert copy.length == tokens
        support.poison_unowned(remote)
        assert equal(remote.export(copy), image)
        assert remote.check() == ()
        for mine, theirs in zip(support.run_step(remote, {copy: 5}, 1), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert equal(remote.export(copy), later)
        copy.free()


def test_an_image_leaves_out_what_the_window_has_passed() -> None:
    cache = hybrid("int8")
    sequence = grown(cache, 24)
    image = cache.export(sequence)
    assert image.passed == (0, 2)
    assert image.layers[0]["key.codes"].shape[0] == 6
    assert image.layers[1]["key.codes"].shape[0] == 4
    copy = cache.insert(image)
    assert copy.pages(1)[:2] == (0, 0)
    held = sum(page > 0 for page in copy.pages(1))
    free = cache.stats().pools[1].free
    copy.free()
    assert cache.stats().pools[1].free == free + held


@pytest.mark.parametrize("format", MORE_FORMATS)
def test_unwritten_slots_are_exported_as_zero(format: str) -> None:
    cache = hybrid(format)
    sequence = support.fill(cache, 1, 6)
    support.poison_unowned(cache)
    for name, plane in support.all_planes(cache, sequence):
        assert plane.shape[:2] == (2, 4), name
        assert not plane[1, 2:].contiguous().view(torch.uint8).any(), name
        assert plane[1, :2].contiguous().view(torch.uint8).any(), name


def test_an_image_is_a_copy() -> None:
    cache = hybrid("int8")
    sequence = support.fill(cache, 1, 6)
    image = cache.export(sequence)
    digests = image.digests()
    sequence.truncate(3)
    support.run_step(cache, {sequence: 9}, 2)
    sequence.free()
    support.poison_unowned(cache)
    assert image.digests() == digests


def test_codes_and_scales_are_digested_apart() -> None:
    cache = hybrid("int4:g16:asym")
    image = cache.export(support.fill(cache, 1, 6))
    before = image.digests()
    image.layers[2]["value.zero"][0, 1, 1, 0] += 1
    after = image.digests()
    assert after[2]["scales"] != before[2]["scales"]
    assert after[2]["codes"] == before[2]["codes"]
    assert {layer: after[layer] for layer in (0, 1)} == {layer: before[layer] for layer in (0, 1)}
    image.layers[0]["key.codes"][0, 1, 1, 0] ^= 1
    assert image.digests()[0]["codes"] != before[0]["codes"]
    assert image.digests()[0]["scales"] == before[0]["scales"]


def test_bytes_of_an_image_are_its_planes() -> None:
    cache = hybrid("int4:g16")
    image = cache.export(support.fill(cache, 1, 6))
    # A page of 4 tokens and 2 heads, dim 32: K 16 bytes of codes and 2 float32 scales a head, V the same.
    assert image.nbytes == 3 * 2 * (4 * 2 * (16 + 8) * 2)


def test_ids_travel_and_make_the_pages_findable() -> None:
    local, remote = hybrid("int8"), hybrid("int8")
    ids = list(range(100, 113))
    image = local.export(support.fill(local, 1, 13, ids=ids))
    assert image.ids == tuple(ids)
    copy = remote.insert(image)
    found = remote.match(ids)
    assert found.length == 12
    assert found.pages() == copy.pages()[:3]
    assert hybrid("int8", share_prefixes=False).insert(image).length == 13


def test_a_code_edited_in_an_image_moves_the_output() -> None:
    """What is imported is what is attended: a shadow copy in floats could not pass."""
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, page_size=4, format="int8")
    cache = support.open_cache(layout, 12)
    image = cache.export(support.fill(cache, 1, 3))
    image.layers[0]["value.codes"][0, 1, 0, 5] = -128
    image.layers[0]["value.scale"][0, 1, 0] = 0.5
    copy = cache.insert(image)
    key, value = cache.gather(copy, 0)
    assert value[1, 0, 5] == -64.0
    with cache.step({copy: 1}) as step:
        step.append(0, *support.kv(layout, 0, 1, 1, 3))
        got = step.attend(0, support.queries(layout, 0, 1, 1))
    key, value = cache.gather(copy, 0)
    expected = support.attention(support.queries(layout, 0, 1, 1).numpy(), key.numpy(), value.numpy())
    assert support.ratio(got.output, expected[0], expected[2]) < 1


def test_static_formats_travel_with_equal_scales_only() -> None:
    def cache(scale: float) -> PagedCache:
        layout = support.hybrid_layout("int8:tensor:static", key_dim=32)
        side = SideScales(torch.tensor(scale))
        return support.open_cache(layout, 30, scales=support.unit_scales(layout, side))

    local = cache(0.05)
    image = local.export(support.fill(local, 1, 6))
    twin = cache(0.05)
    assert equal(twin.export(twin.insert(image)), image)
    with pytest.raises(ImageError, match="static scales"):
        cache(0.0500001).insert(image)


# --- refusals in memory ---------------------------------------------------------------------------------------------


def static(pages: int = 8, backend: Any = None, **more: Any) -> PagedCache:
    """Three layers in two groups, whose pages of 4 tokens can hide a NaN: layers 0 and 2, and layer 1 with a window."""
    specs = tuple(LayerSpec(1, 1, 16, 16, window=window) for window in (None, 6, None))
    layout = CacheLayout(specs, CacheFormat.parse(more.pop("format", "int8:tensor:static")), 4)
    scales = support.unit_scales(layout, SideScales(0.02))
    count = len(make_lanes(layout)[0])
    return PagedCache(backend or reference.load("cpu"), layout, [pages] * count, scales=scales)


def append(cache: PagedCache, sequence: Sequence, count: int, *, nan_in: int | None = None) -> None:
    """Tokens without attention; the last of them has a NaN in this layer."""
    with cache.step({sequence: count}) as step:
        for layer in range(len(cache.layout.layers)):
            key = torch.ones(count, 1, 16)
            if layer == nan_in:
                key[-1, 0, 3] = math.nan
            step.append(layer, key, torch.ones(count, 1, 16))


def flagged(cache: PagedCache) -> list[tuple[Sequence, int, int]]:
    found = [entry for entry in cache.check() if isinstance(entry, Poisoned)]
    return [(entry.sequence, entry.layer, entry.position) for entry in found]


def test_flags_of_nans_travel_in_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = static()
    clean, dirty = cache.sequence(), cache.sequence()
    append(cache, clean, 5)
    append(cache, dirty, 6, nan_in=2)
    append(cache, dirty, 4, nan_in=1)
    assert flagged(cache) == [(dirty, 2, 4), (dirty, 1, 8)]
    image = cache.export(dirty)
    assert image.poisoned == {1: (8,), 2: (4,)}
    assert cache.export(clean).poisoned == {}
    image.save(tmp_path / "image")
    loaded = PageImage.load(tmp_path / "image")
    assert equal(image, loaded)
    assert main(["inspect", str(tmp_path / "image")]) == 0
    assert "layer 2 met a NaN, stored as code 0, in pages that begin at 4\n" in capsys.readouterr().out
    other = static()
    copy = other.insert(loaded)
    assert flagged(other) == [(copy, 2, 4), (copy, 1, 8)]
    child = copy.fork()
    append(other, child, 1)  # copies the open page, whose flag goes along
    assert (child, 1, 8) in flagged(other)
    assert other.export(child).poisoned == image.poisoned
    copy.free()
    child.free()
    taken = other.insert(cache.export(clean))  # on pages that were flagged
    assert flagged(other) == []
    append(other, taken, 1, nan_in=0)
    assert flagged(other) == [(taken, 0, 4)]


def test_the_suites_cases_of_flags_pass() -> None:
    """They are of its full tier, which runs elsewhere."""
    cases = select(tier="full", checks=("flags_travel",))
    assert {run_case(case, reference.load("cpu")).outcome for case in cases} == {"pass"}


def test_an_image_without_flags_is_written_as_before_and_old_ones_load(tmp_path: Path) -> None:
    """The entry is there where it says something, so that files of formats that hide nothing keep their bytes."""
    cache = static()
    sequence = cache.sequence()
    append(cache, sequence, 5)
    cache.export(sequence).save(tmp_path / "image")
    with safe_open(tmp_path / "image", framework="pt") as file:
        assert set(file.metadata()) == {
            "kvport.image", "fingerprint", "format", "length", "passed", "sealed", "pin", "ids", "digests", "checksum"
        }  # fmt: skip
    assert static().insert(PageImage.load(tmp_path / "image")).length == 5


def test_flags_of_sealed_pages_travel_too() -> None:
    cache = static(format="int8:tensor:static,recent=4")
    sequence = cache.sequence()
    append(cache, sequence, 2, nan_in=0)
    assert cache.export(sequence).poisoned == {}  # a near page shows its NaN
    append(cache, sequence, 8)
    append(cache, sequence, 1)
    assert flagged(cache) == [(sequence, 0, 0)]
    image = cache.export(sequence)
    assert image.poisoned == {0: (0,)}
    other = static(format="int8:tensor:static,recent=4")
    assert flagged(other) == []
    copy = other.insert(image)
    assert flagged(other) == [(copy, 0, 0)]


@pytest.mark.parametrize(
    "poisoned",
    [{3: (0,)}, {-1: (0,)}, {0: (2,)}, {0: (8,)}, {0: (-4,)}, {1: (4, 0, 12)}],
    ids=["no layer", "negative", "in mid-page", "past the end", "before the begin", "one of several"],
)
def test_flags_of_pages_that_are_not_there_are_refused(poisoned: dict[int, tuple[int, ...]]) -> None:
    cache = static()
    sequence = cache.sequence()
    append(cache, sequence, 5)
    image, before = cache.export(sequence), support.snapshot(cache)
    with pytest.raises(ImageError, match=r"layer -?\d met a NaN in pages that begin at"):
        cache.insert(dataclasses.replace(image, poisoned=poisoned))
    assert support.snapshot(cache) == before


def test_formats_that_hide_nothing_take_no_flags() -> None:
    cache = hybrid("int8")
    image = cache.export(support.fill(cache, 1, 6))
    with pytest.raises(ImageError, match="no such pages of static integers"):
        cache.insert(dataclasses.replace(image, poisoned={0: (0,)}))


class Unflagging(ReferenceBackend):
    """A backend that was written before pages could be flagged."""

    flag_pages = Backend.flag_pages


class Flagless(ReferenceBackend):
    """A backend that keeps no flags."""

    def support(self, layout: Any) -> Support:
        return Support(features=FEATURES - {"poison"})


def test_flags_are_never_lost_in_silence() -> None:
    cache = static()
    sequence = cache.sequence()
    append(cache, sequence, 5, nan_in=0)
    image = cache.export(sequence)
    other = static(backend=Unflagging("cpu", torch.device("cpu")))
    before = support.snapshot(other)
    with pytest.raises(Unsupported, match="it has no flag_pages"):
        other.insert(image)
    assert support.snapshot(other) == before
    assert other.insert(dataclasses.replace(image, poisoned={})).length == 5
    third = static(backend=Flagless("cpu", torch.device("cpu")))
    assert third.export(third.insert(image)).poisoned == {}
    with pytest.raises(Unsupported, match="feature poison is not declared"):
        third.check()


def test_an_image_of_another_kind_of_cache_is_refused() -> None:
    cache = hybrid("int8")
    image = cache.export(support.fill(cache, 1, 6))
    others = {
        "format": hybrid("int4:g16"),
        "scale dtype": hybrid("int8:scale=bf16"),
        "window": hybrid("int8", window=7),
        "identity": hybrid("int8", identity={"model": "another"}),
        "page size": support.open_cache(support.hybrid_layout("int8", page_size=8, key_dim=32), 30),
        "dims": support.open_cache(support.hybrid_layout("int8", key_dim=64), 30),
        "dtype": support.open_cache(support.hybrid_layout("int8", key_dim=32, dtype=torch.bfloat16), 30),
    }
    for what, other in others.items():
        before = support.snapshot(other)
        with pytest.raises(ImageError, match=r"fingerprint.*must all agree"):
            other.insert(image)
        assert support.snapshot(other) == before, what


def edited(image: PageImage, edit: Callable[[dict[int, dict[str, torch.Tensor]]], None], **fields: Any) -> PageImage:
    layers = {layer: dict(planes) for layer, planes in image.layers.items()}
    edit(layers)
    return dataclasses.replace(image, layers=layers, **fields)


def keep(layers: dict[int, dict[str, torch.Tensor]]) -> None:
    pass


@pytest.mark.parametrize(
    "edit,fields,message",
    [
        (lambda layers: layers.pop(1), {}, r"layers \[0, 2\].*\[0, 1, 2\]"),
        (lambda layers: layers.update({3: layers[0]}), {}, r"\[0, 1, 2, 3\]"),
        (lambda layers: layers[0].pop("key.scale"), {}, "layer 0"),
        (lambda layers: layers[2].pop("value.codes"), {}, "layer 2"),
        (lambda layers: layers[0].update({"key.zero": layers[0]["key.scale"]}), {}, "layer 0"),
        (lambda layers: layers[1].update({"key.codes": layers[1]["key.codes"].view(torch.uint8)}), {}, "uint8"),
        (lambda layers: layers[1].update({"key.scale": layers[1]["key.scale"].half()}), {}, "float16"),
        (lambda layers: layers[0].update({"key.codes": layers[0]["key.codes"][:1]}), {}, "1 pages.*need 2"),
        (lambda layers: layers[0].update({"key.scale": layers[0]["key.scale"][:1]}), {}, "layer 0"),
        (lambda layers: layers[0].update({"value.codes": layers[0]["value.codes"][..., :16]}), {}, "layer 0"),
        (keep, {"length": 9}, "9 tokens need 3"),
        (keep, {"length": -1}, "length -1"),
        (keep, {"length": 2**62}, "length"),
        (keep, {"length": 2**31 - 1}, "2147483647 tokens need"),
        (keep, {"passed": (1, 0)}, r"1 leading pages.*at most 0"),
        (keep, {"passed": (0, 1)}, r"1 leading pages.*at most 0"),
        (keep, {"passed": (0, -1)}, r"-1 leading pages"),
        (keep, {"passed": (0,)}, "1 groups"),
        (keep, {"sealed": (4, 0)}, "sealed 4"),
        (keep, {"pin": -1}, "pin -1"),
        (keep, {"ids": (1, 2, 3)}, "3 token ids for 6 tokens"),
        (keep, {"ids": (1, 2, 3, 4, 5, 2**63)}, "64 bits"),
        (keep, {"fingerprint": "0" * 64}, "fingerprint"),
        (keep, {"fingerprint": ""}, "fingerprint"),
    ],
)
def test_an_image_whose_parts_do_not_fit_is_refused(edit: Any, fields: dict[str, Any], message: str) -> None:
    cache = hybrid("int8")
    image = cache.export(support.fill(cache, 1, 6))
    before = support.snapshot(cache)
    with pytest.raises(ImageError, match=message):
        cache.insert(edited(image, edit, **fields))
    assert support.snapshot(cache) == before
    assert cache.check() == ()


def test_an_image_that_does_not_fit_into_the_pool_takes_nothing() -> None:
    cache = hybrid("int8")
    image = cache.export(support.fill(cache, 1, 20))
    small = hybrid("int8", pages=5)
    before = support.snapshot(small)
    with pytest.raises(OutOfPages, match="the image needs 5"):
        small.insert(image)
    assert support.snapshot(small) == before


# --- refusals on file -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache = hybrid("int4:g16")
    cache.export(support.fill(cache, 1, 6, ids=list(range(6)))).save(tmp_path / "image")
    return tmp_path / "image"


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def seal(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, str]:
    """What somebody who wants a file believed would write: how the metadata is checked is no secret."""
    covered = {
        "metadata": {name: text for name, text in metadata.items() if name != "checksum"},
        "arrays": {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()},
    }
    return {**metadata, "checksum": hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()}


def test_truncated_at_any_point(saved: Path) -> None:
    whole = saved.read_bytes()
    for size in sorted({0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}):
        saved.write_bytes(whole[:size])
        with pytest.raises(ImageError):
            PageImage.load(saved)
    saved.write_bytes(whole + b"\0")
    with pytest.raises(ImageError):
        PageImage.load(saved)


def test_any_flipped_bit_is_noticed(saved: Path) -> None:
    """Every byte of the header and of the arrays, one bit each (the arrays sampled)."""
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    original = PageImage.load(saved)
    for position in [*range(header), *range(header, len(whole), 37)]:
        altered = bytearray(whole)
        altered[position] ^= 1 << (position % 7)
        saved.write_bytes(altered)
        try:
            image = PageImage.load(saved)
        except ImageError:
            continue
        # Only padding may differ: what loads is what was saved.
        assert equal(image, original), f"byte {position} of {len(whole)} (header {header})"


@pytest.mark.parametrize(
    "name,text",
    [
        ("kvport.image", "2"),
        ("kvport.image", None),
        ("kvport.image", "one"),
        ("fingerprint", None),
        ("format", None),
        ("length", None),
        ("length", "six"),
        ("length", "6.5"),
        ("length", "9" * 5000),
        ("passed", "[0, 0"),
        ("passed", "{}"),
        ("passed", "[0.5, 0]"),
        ("passed", '["0", 0]'),
        ("passed", "[true, false]"),
        ("passed", "7"),
        ("passed", "[" * 100_000),
        ("passed", "[1e400, 0]"),
        ("sealed", "null"),
        ("pin", "null"),
        ("ids", "[[1], 2, 3, 4, 5, 6]"),
        ("ids", '"012345"'),
        ("ids", "[NaN]"),
        ("digests", "[]"),
        ("digests", "{}"),
        ("digests", "null"),
        ("digests", '{"0": 3}'),
    ],
)
def test_hostile_metadata(saved: Path, name: str, text: str | None) -> None:
    tensors, metadata = read(saved)
    metadata.pop(name)
    if text is not None:
        metadata[name] = text
    for resealed in (metadata, seal(tensors, metadata)):
        safetensors.torch.save_file(tensors, str(saved), resealed)
        with pytest.raises(ImageError):
            PageImage.load(saved)


@pytest.mark.parametrize("change", ["drop", "rename", "foreign", "scale", "dtype", "swap"])
def test_altered_arrays(saved: Path, change: str) -> None:
    tensors, metadata = read(saved)
    if change == "drop":
        del tensors["1.value.scale"]
    elif change == "rename":
        tensors["x.key.codes"] = tensors.pop("0.key.codes")
    elif change == "foreign":
        tensors["7.key.codes"] = tensors["0.key.codes"].clone()
    elif change == "scale":
        tensors["1.value.scale"][0, 0, 0, 0] *= 2
    elif change == "dtype":
        tensors["1.key.scale"] = tensors["1.key.scale"].to(torch.bfloat16)
    else:
        tensors["0.key.codes"], tensors["2.key.codes"] = tensors["2.key.codes"], tensors["0.key.codes"]
    for resealed in (metadata, seal(tensors, metadata)):
        safetensors.torch.save_file(tensors, str(saved), resealed)
        with pytest.raises(ImageError):  # some are seen at once, the others by the cache they are meant for
            hybrid("int4:g16").insert(PageImage.load(saved))


@pytest.mark.parametrize("ids", ["[0, 1, 2, 3, 4, 6]", "null"])
def test_token_ids_are_covered_by_a_checksum(saved: Path, ids: str) -> None:
    """Else a damaged file would offer its pages as the prefix of another text."""
    tensors, metadata = read(saved)
    safetensors.torch.save_file(tensors, str(saved), {**metadata, "ids": ids})
    with pytest.raises(ImageError, match="metadata"):
        PageImage.load(saved)


def test_files_that_are_no_image(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    safetensors.torch.save_file({"a": torch.zeros(3)}, str(tmp_path / "weights"))
    for path in (tmp_path / "text", tmp_path / "weights"):
        with pytest.raises(ImageError):
            PageImage.load(path)
    with pytest.raises(FileError, match="it is a folder"):
        PageImage.load(tmp_path)
    with pytest.raises(MissingFile):
        PageImage.load(tmp_path / "nothing")


def test_one_tensor_for_two_layers_is_written_twice(tmp_path: Path) -> None:
    cache = hybrid("int8")
    image = cache.export(support.fill(cache, 1, 6))
    shared = edited(image, lambda layers: layers.update({2: layers[0]}))
    shared.save(tmp_path / "image")
    assert PageImage.load(tmp_path / "image").digests() == shared.digests()


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    cache = hybrid("int4:g16")
    image = cache.export(support.fill(cache, 2, 9))

    def fail(source: Any, target: Any) -> None:
        assert Path(source).stat().st_size > 0  # the new file is whole before the old one is replaced
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        image.save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_the_format_of_an_image_is_the_caches() -> None:
    cache = hybrid("k=int8:scale=fp16,v=int4:g16")
    image = cache.export(cache.sequence())
    assert CacheFormat.parse(image.format) == cache.layout.format
