"""Faults that a review by breaking found, each with the right outcome."""

from __future__ import annotations

from pathlib import Path

import core_support as support
import pytest
import torch

from kvport import CacheFormat, PageImage, codec


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
