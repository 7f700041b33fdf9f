"""Attend's memory does not grow with the context, counted from torch's own allocation events, not from the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import core_support as support
import pytest
import torch
from core_support import FORMATS
from torch.profiler import ProfilerActivity, profile

from kvport import CacheLayout, PagedCache

SHORT, LONG = 2048, 8192


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that were allocated at once during ``call``, beyond what was before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CUDA builds of torch warn once about what a profiler keeps
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            result = call()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    assert events, "the profiler recorded no allocations"
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak


def test_the_measure_itself() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1_000_000)
        second = first + 1
        del first
        return second[:10].clone()

    assert 8_000_000 <= peak_bytes(call) <= 8_100_000


@pytest.mark.parametrize("format", [*FORMATS, "bf16"])
def test_peak_of_attend_at_8k_is_that_of_2k(format: str, figures: list[str]) -> None:
    """Decode, verify and a chunk of prefill, on shuffled pages; two sequences of that length at once."""
    layout = CacheLayout.uniform(layers=1, kv_heads=2, query_heads=6, head_dim=64, page_size=128, format=format)
    peaks: dict[int, list[int]] = {}
    for length in (SHORT, LONG):
        cache = support.open_cache(layout, length // 128 + 10)
        support.shuffle_free_pages(cache, seed=length)
        a = support.fill(cache, 1, length - 300)
        b = a.fork()
        peaks[length] = [attend_peak(cache, {a: rows, b: rows}) for rows in (1, 4, 300)]
    for rows, short, long in zip((1, 4, 300), peaks[SHORT], peaks[LONG], strict=True):
        figures.append(f"attend peak, {format}, {rows} rows a sequence: {short:,} bytes at 2k, {long:,} at 8k")
        assert long <= 1.2 * short
    history = 2 * LONG * 2 * 64 * 4  # K and V of one sequence in float32
    assert peaks[LONG][0] < history / 2


def attend_peak(cache: PagedCache, tokens: dict[Any, int]) -> int:
    step = cache.step(tokens)
    support.append_all(step)
    query = support.queries(cache.layout, 0, 3, step.tokens)
    step.attend(0, query)  # tables that are made once are not part of the working set
    peak = peak_bytes(lambda: step.attend(0, query))
    step.rollback()
    return peak


@pytest.mark.parametrize("format", FORMATS)
def test_stores_are_as_large_as_they_say(format: str) -> None:
    """Buffers add up to page_bytes * pages, canonical bytes to the exported planes."""
    cache = support.open_cache(support.hybrid_layout(format), [7, 11])
    for group, (store, stats) in enumerate(zip(support.stores(cache), cache.stats().pools, strict=True)):
        found = sum(b.numel() * b.itemsize for b in cache.backend.buffers(store).values())
        assert found == stats.allocated_bytes == stats.page_bytes * store.pages
        assert stats.page_bytes == cache.layout.groups[group].layout.canonical_page_bytes
    assert cache.stats().allocated_bytes == sum(pool.allocated_bytes for pool in cache.stats().pools)
    sequences = [support.fill(cache, 1, n) for n in (1, 4, 9)]
    # Counted as at the next step's begin: a window's last passed page is kept so that the last step can be truncated.
    support.run_step(cache, dict.fromkeys(sequences, 0))
    assert cache.canonical_bytes() == sum(cache.export(s).nbytes for s in sequences)
