"""Faults that a review by breaking found, each with the right outcome."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import core_support as support
import pytest
import torch
from torch import Tensor

import kvport
from kvport import (
    CacheFormat,
    CacheLayout,
    ImageError,
    LayerSpec,
    OutOfMemory,
    PagedCache,
    PageImage,
    SequenceError,
    SideScales,
    codec,
)
from kvport.step import Fresh
from kvport_cpu import reference


def test_an_eviction_that_drops_a_shared_open_page_leaks_nothing() -> None:
    cache = support.uniform("int8", pages=4, page_size=4)

    def put(sequence: object, ids: list[int]) -> None:
        with cache.step({sequence: ids}) as step:  # type: ignore[dict-item]
            step.append(0, torch.randn(len(ids), 2, 32), torch.randn(len(ids), 2, 32))

    first, second = cache.sequence(), cache.sequence()
    put(first, [1, 2, 3, 4])
    put(second, [1, 2, 3, 4, 5, 6, 7, 8])
    first.free()
    second.truncate(5)
    put(second, [9])
    cache.check()
    second.free()
    cache.prefix.clear()
    assert cache.stats().pools[0].free == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int8,rotate=1"])
def test_the_default_dtype_of_torch_changes_nothing(format: str, dtype: torch.dtype) -> None:
    rows = torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    digests = []
    for default in (torch.float32, dtype):
        codec._tables.clear()
        torch.set_default_dtype(default)
        try:
            cache = support.uniform(format, pages=6)
            sequence = cache.sequence()
            with cache.step({sequence: 40}) as step:
                step.append(0, rows, rows)
                step.attend(0, rows.repeat(1, 2, 1))
            digests.append(cache.export(sequence).digests())
        finally:
            torch.set_default_dtype(torch.float32)
    assert digests[0] == digests[1]
    assert CacheFormat.parse(format) == cache.layout.format


def test_autocast_does_not_reach_the_products() -> None:
    cache = support.uniform("fp32", pages=20)
    rows = torch.randn(200, 2, 32)
    found = []
    for enabled in (False, True):
        sequence = cache.sequence()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), cache.step({sequence: 200}) as step:
            step.append(0, rows, rows)
            found.append(step.attend(0, rows.repeat(1, 2, 1)).output)
        sequence.free()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("format", ["int8", "bf16", "int8,recent=4", "int8:g32:sparse=4", "int8,rotate=1"])
@pytest.mark.parametrize("fresh", ["stored", "exact"])
def test_autocast_of_either_dtype_changes_nothing(format: str, fresh: Fresh) -> None:
    """torch refuses to join 16-bit tensors under an autocast of the other 16-bit dtype."""
    layout = CacheLayout.uniform(
        layers=1, kv_heads=2, query_heads=4, head_dim=32, page_size=4, format=format, dtype=torch.bfloat16
    )
    rows, query = support.kv(layout, 0, 1, 11), support.queries(layout, 0, 1, 11)
    results = []
    for scope in (nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.half)):
        cache = kvport.open("cpu", layout=layout, tokens=60)
        sequence = cache.sequence()
        with scope:
            for start, end in ((0, 8), (8, 11)):
                with cache.step({sequence: end - start}, fresh=fresh) as step:
                    step.append(0, rows[0][start:end], rows[1][start:end])
                    output, lse = step.attend(0, query[start:end])
            copied = cache.insert(cache.export(sequence))
            results.append([output, lse, *cache.gather(copied, 0)])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))


def test_a_loaded_image_does_not_follow_its_file(tmp_path: Path) -> None:
    cache = support.uniform("int8")
    sequence = support.fill(cache, 1, 20)
    path = tmp_path / "pages"
    cache.export(sequence).save(path)
    image = PageImage.load(path)
    before = image.digests()
    path.write_bytes(b"\0" * path.stat().st_size)
    assert image.digests() == before


def test_rotated_caches_take_empty_sequences_and_steps() -> None:
    cache = support.uniform("int8,rotate=1")
    sequence = cache.sequence()
    assert cache.gather(sequence, 0)[0].shape == (0, 2, 32)
    with cache.step({sequence: 0}) as step:
        step.append(0, torch.empty(0, 2, 32), torch.empty(0, 2, 32))


def test_a_match_that_is_refused_leaves_no_sequence() -> None:
    cache = support.uniform("int8,recent=4", pages=6, page_size=4)
    for pin in (None, True, -1, 2**31, 2**200, 10**5000, "3", 1.0):
        with pytest.raises(SequenceError):
            cache.match([1, 2, 3], pin=pin)  # type: ignore[arg-type]
    assert cache.sequences == ()
    assert cache.match([1, 2, 3], pin=2).length == 0


@pytest.mark.parametrize("format", ["int8", "int8,recent=4"])
@pytest.mark.parametrize("pin", [-1, 2**31, 2**64, 10**30])
def test_an_image_with_an_absurd_pin_is_refused_and_nothing_changes(format: str, pin: int) -> None:
    cache = support.uniform(format, pages=6, page_size=4)
    image = cache.export(support.fill(cache, 1, 9, ids=range(9)))
    before = support.snapshot(cache)
    with pytest.raises(ImageError, match="pin"):
        cache.insert(dataclasses.replace(image, pin=pin))
    assert support.snapshot(cache) == before
    cache.check()


def test_an_image_with_a_pin_needs_a_cache_that_can_pin() -> None:
    cache = support.uniform("int8", pages=6, page_size=4)
    image = cache.export(support.fill(cache, 1, 9))
    with pytest.raises(ImageError, match="says pin 1, which no sequence"):
        cache.insert(dataclasses.replace(image, pin=1))


def test_what_can_fail_in_a_commit_fails_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = support.uniform("int8,recent=4", pages=16, page_size=4)
    first, second = support.fill(cache, 1, 9, ids=range(9)), support.fill(cache, 2, 6, ids=range(50, 56))
    before = support.snapshot(cache)

    def fail(*args: object) -> list[bytes]:
        raise MemoryError("no room for digests")

    step = cache.step({first: [90, 91, 92, 93], second: [1, 2, 3]})
    support.append_all(step)
    with monkeypatch.context() as patched:
        patched.setattr(cache.prefix, "digests", fail)
        with pytest.raises(MemoryError):
            step.commit()
    assert support.snapshot(cache) == before
    cache.check()
    support.run_step(cache, {first: [90, 91, 92, 93], second: [1, 2, 3]})  # the cache goes on
    assert cache.match([*range(9), 90, 91, 92, 93]).length == 4  # what was sealed when the step began


def test_the_index_of_a_windowed_cache_does_not_grow_beyond_its_pages() -> None:
    cache = support.uniform("int8", pages=6, page_size=4, window=5)
    for seed in range(12):
        with cache.sequence() as sequence:
            for start in range(0, 40, 4):
                support.run_step(cache, {sequence: [seed * 100 + start + i for i in range(4)]}, seed, attend=False)
        assert cache.stats().prefix_entries <= 5
    ids = [11 * 100 + i for i in range(40)]
    assert cache.match(ids).length == 40  # the window's own pages are all that a hit needs
    cache.prefix.clear()
    assert cache.stats().prefix_entries == 0


def test_a_windowed_hit_equals_a_run_without_it() -> None:
    ids = list(range(100, 130))
    cache = support.uniform("int8", pages=24, page_size=4, window=9)
    sequence, apart = cache.sequence(), cache.sequence()
    for start in range(0, 30, 3):
        support.run_step(cache, {sequence: ids[start : start + 3]}, 5)
    hit = cache.match(ids[:-1])
    assert hit.length == 28
    support.run_step(cache, {apart: 28}, 5)  # without ids: computed, not found
    assert same([support.run_step(cache, {one: ids[28:]}, 5)[0] for one in (hit, apart)])


def same(results: list[tuple[Tensor, Tensor]]) -> bool:
    (a, a_lse), (b, b_lse) = results
    return torch.equal(a, b) and torch.equal(a_lse, b_lse)


@pytest.mark.parametrize("format,window", [("int8", None), ("int8", 9), ("int8,recent=4", None)])
def test_a_live_sequence_offers_its_pages_again_after_the_index_was_cleared(format: str, window: int | None) -> None:
    ids = list(range(16))
    cache = support.uniform(format, pages=24, page_size=4, window=window)
    sequence = cache.sequence()
    for start in range(0, 16, 2):
        support.run_step(cache, {sequence: ids[start : start + 2]})
    support.run_step(cache, {sequence: [77]})
    found = cache.match([*ids, 77]).length
    assert found >= 12
    cache.prefix.clear()
    assert cache.match([*ids, 77]).length == 0
    support.run_step(cache, {sequence: [78]})
    assert cache.match([*ids, 77]).length == found
    cache.check()


def test_a_live_sequence_offers_its_pages_again_after_an_eviction() -> None:
    cache = support.uniform("int8", pages=8, page_size=4)
    first = support.fill(cache, 1, 4, ids=range(4))
    second = support.fill(cache, 1, 9, ids=range(9))  # its own copy of block 0, indexed by the first sequence
    first.free()
    filler = support.fill(cache, 3, 16)  # evicts block 0 and, as its descendant, block 1, which the second holds
    assert cache.match(range(9)).length == 0
    filler.free()
    support.run_step(cache, {second: [9]})
    hit = cache.match(range(9))
    assert hit.length == 8
    assert hit.pages() == second.pages()[:2]
    for sequence in cache.sequences:
        sequence.free()
    cache.prefix.clear()
    assert cache.check() == ()
    assert cache.stats().pools[0].free == 7


@pytest.mark.parametrize("format", ["int8", "int8,rotate=1", "bf16", "latent=int8,rope=fp32"])
def test_exact_fresh_tokens_do_not_follow_tensors_that_are_written_over(format: str) -> None:
    latent = format.startswith("latent")
    spec = LayerSpec(kv_heads=1 if latent else 2, query_heads=4, key_dim=32, value_dim=16 if latent else 32,
                     latent=latent)  # fmt: skip
    layout = CacheLayout((spec,), CacheFormat.parse(format), 16)
    results = []
    for overwrite in (False, True):
        cache = support.open_cache(layout, 4)
        sequence = cache.sequence()
        key, value = support.kv(layout, 0, 1, 20)
        with cache.step({sequence: 20}, fresh="exact") as step:
            step.append(0, key, None if latent else value)
            if overwrite:
                key.fill_(7.0)
                value.fill_(-7.0)
            results.append(step.attend(0, support.queries(layout, 0, 1, 20)))
    assert torch.equal(results[0].output, results[1].output)
    assert torch.equal(results[0].lse, results[1].lse)


@pytest.mark.parametrize("format", ["fp32", "int4:g16:asym", "mxfp4", "int8,recent=4,rotate=1", "int8:head:static"])
def test_inference_mode_may_begin_and_end_anywhere(format: str) -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=2, query_heads=4, head_dim=32, page_size=4, format=format)
    scales = support.unit_scales(layout, SideScales([0.02, 0.03])) if "static" in format else None
    results = []
    for inside in (False, True):
        codec._tables.clear()
        with torch.inference_mode(inside):
            cache = PagedCache(reference.load("cpu"), layout, [12] * (2 if "recent" in format else 1), scales=scales)
            sequence = cache.sequence()
            support.run_step(cache, {sequence: 6}, 1)
        outside = support.run_step(cache, {sequence: 5}, 1)
        with torch.inference_mode(inside):
            fork = sequence.fork()
            inner = support.run_step(cache, {fork: 2}, 1)
        copied = cache.insert(cache.export(fork))
        results.append([*outside, *inner, *support.run_step(cache, {copied: 2}, 1), cache.gather(copied, 0)])
    for plain, inferred in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, inferred, strict=True))


@pytest.mark.parametrize("format", ["fp32", "int4:g16:asym", "mxfp4", "int8,recent=4,rotate=1", "int8:head:static"])
def test_the_default_device_of_torch_changes_nothing(format: str, tmp_path: Path) -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=2, query_heads=4, head_dim=32, page_size=4, format=format)
    scales = support.unit_scales(layout, SideScales([0.02, 0.03])) if "static" in format else None
    rows, query = support.kv(layout, 0, 1, 11), support.queries(layout, 0, 1, 11)
    results = []
    for device in ("cpu", "meta"):
        codec._tables.clear()
        with torch.device(device):
            cache = kvport.open("cpu", layout=layout, tokens=60, scales=scales)
            sequence = cache.sequence()
            for start, end in ((0, 8), (8, 11)):
                with cache.step({sequence: end - start}, fresh="exact" if start else "stored") as step:
                    step.append(0, rows[0][start:end], rows[1][start:end])
                    output, lse = step.attend(0, query[start:end])
            cache.export(sequence).save(tmp_path / "image")
            copied = cache.insert(PageImage.load(tmp_path / "image"))
            assert cache.check() == ()
            results.append([output, lse, *cache.gather(copied, 0)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("format", ["fp32", "int8", "int8,recent=4"])
def test_a_sink_poisons_its_own_head_alone_and_minus_infinity_is_none(format: str) -> None:
    cache = support.uniform(format, pages=8, page_size=4)
    sequence = support.fill(cache, 1, 9)

    def attend(sinks: list[float] | None) -> tuple[Tensor, Tensor]:
        step = cache.step({sequence: 3})
        step.append(0, *support.kv(cache.layout, 0, 1, 3, 9))
        given = None if sinks is None else torch.tensor(sinks)
        found = step.attend(0, support.queries(cache.layout, 0, 1, 3, 9), sinks=given)
        step.rollback()
        return found

    clean = attend([0.5, 0.5, 0.5, 0.5])
    for bad in (math.nan, math.inf):
        output, lse = attend([0.5, bad, 0.5, 0.5])
        assert output[:, 1].isnan().all()
        assert not lse[:, 1].isfinite().any()
        for head in (0, 2, 3):
            assert torch.equal(output[:, head], clean[0][:, head])
            assert torch.equal(lse[:, head], clean[1][:, head])
    assert same([attend([-math.inf] * 4), attend(None)])


def malformed() -> list[tuple[str, dict[str, Any]]]:
    plane = torch.zeros(1, 4, 2, 32, dtype=torch.int8)
    return [
        ("fingerprint", {"fingerprint": None}),
        ("format", {"format": 8}),
        ("length", {"length": "9"}),
        ("length", {"length": True}),
        ("length", {"length": 9.0}),
        ("pin", {"pin": None}),
        ("pin", {"pin": False}),
        ("passed", {"passed": None}),
        ("passed", {"passed": 0}),
        ("passed", {"passed": ("0",)}),
        ("sealed", {"sealed": (False,)}),
        ("sealed", {"sealed": "0"}),
        ("ids", {"ids": "abc"}),
        ("ids", {"ids": (1.0,)}),
        ("layers", {"layers": [plane]}),
        ("layers", {"layers": {"0": {"key.codes": plane}}}),
        ("layers", {"layers": {True: {"key.codes": plane}}}),
        ("layers", {"layers": {0: plane}}),
        ("planes", {"layers": {0: {"key.codes": plane.numpy()}}}),
        ("planes", {"layers": {0: {"key.codes": None}}}),
        ("planes", {"layers": {0: {7: plane}}}),
        ("planes", {"layers": {0: {"key.codes": plane.to("meta")}}}),
        ("planes", {"layers": {0: {"key.codes": plane.to_sparse()}}}),
        ("poisoned", {"poisoned": [0]}),
        ("poisoned", {"poisoned": {0: 4}}),
        ("poisoned", {"poisoned": {0: (0.0,)}}),
        ("poisoned", {"poisoned": {"0": (0,)}}),
    ]


@pytest.mark.parametrize("number", range(len(malformed())))
def test_a_malformed_image_is_refused_where_it_is_made(number: int) -> None:
    cache = support.uniform("int8", pages=6, page_size=4)
    image = cache.export(support.fill(cache, 1, 9))
    name, fields = malformed()[number]
    with pytest.raises(ImageError, match=f"page image.*{name}"):
        dataclasses.replace(image, **fields)


def test_an_image_prints_short_and_is_compared_by_its_digests() -> None:
    cache = support.uniform("int8", pages=40, layers=3)
    image = cache.export(support.fill(cache, 1, 500, ids=range(500)))
    assert repr(image) == (
        f"<PageImage int8: 500 tokens, 3 layers, {image.nbytes} bytes, fingerprint {cache.fingerprint[:12]}...>"
    )
    again = cache.export(cache.sequences[0])
    assert image != again
    assert image.digests() == again.digests()


def test_statistics_are_of_one_moment() -> None:
    cache = support.uniform("int8", pages=6, page_size=4)
    before = cache.stats()
    cache.match(range(8))
    assert (before.prefix.lookups, cache.stats().prefix.lookups) == (0, 1)


@pytest.mark.parametrize("size", [{"head_dim": 2**30}, {"head_dim": 2**30, "kv_heads": 2**30}, {"head_dim": 2**20}])
def test_pools_that_no_machine_can_hold_are_out_of_memory(size: dict[str, int]) -> None:
    """Petabytes, more bytes than 64 bits count, and the largest page count."""
    with pytest.raises(OutOfMemory, match=r"cpu could not allocate \d+ int8 pages .* GiB\); open with fewer tokens"):
        kvport.open("cpu", layers=2, tokens=2**31 - 1, **{"kv_heads": 1, **size})
