"""Pools of the planned size really are enough, whatever the order of prompts and answers, and hardly more than that."""

from __future__ import annotations

import pytest
import torch

import kvport
from kvport.layout import CacheLayout
from kvport.planning import plan

PAGE = 16


def run(
    layout: CacheLayout, pages: tuple[int, ...], *, requests: int, prompt: int, tokens: int, chunk: int
) -> list[int]:
    """Requests one after the other: one reads its prompt while those before it answer. Most pages held by pool."""
    with kvport.open("cpu", layout=layout, pages=pages, share_prefixes=False) as cache:
        most = [0] * len(pages)
        running: list[kvport.Sequence] = []
        waiting = requests
        while waiting or any(s.length < tokens for s in running):
            step = {s: 1 for s in running if prompt <= s.length < tokens}
            reading = [s for s in running if s.length < prompt]
            if not reading and waiting:
                reading = [cache.sequence()]
                running += reading
                waiting -= 1
            step.update({s: min(chunk, prompt - s.length) for s in reading})
            count = sum(step.values())
            with cache.step(step) as open_step:
                for layer, spec in enumerate(layout.layers):
                    kv = torch.zeros(count, spec.kv_heads, spec.key_dim)
                    open_step.append(layer, kv, kv)
                held = [pool.held for pool in cache.stats().pools]
                most = [max(a, b) for a, b in zip(most, held, strict=True)]
        return most


@pytest.mark.parametrize("format", ["int8", "int4:g16,recent=20", "int4:g16,sink=4,recent=16", "k=int2:c16,v=int4"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("prompt", "chunk"), [(100, 1), (97, 33), (100, 100), (64, 16)])
def test_the_planned_pools_hold_every_step(format: str, window: int | None, prompt: int, chunk: int) -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, format=format, page_size=PAGE, window=window)
    found = plan(layout, tokens=130, requests=3, chunk=chunk)
    most = run(layout, found.pages, requests=3, prompt=prompt, tokens=130, chunk=chunk)
    assert all(held < pool for held, pool in zip(most, found.pages, strict=True))
    # Rounding up to whole pages costs at most one for each request; a prompt being read, six more of these short ones.
    for lane, held in zip(found.lanes, most, strict=True):
        if lane.tier != "sealed" and window is None:
            assert lane.pool_pages - 1 - held <= 3 + (6 if chunk > 1 else 0), (lane.tier, held)


def test_one_page_less_than_planned_is_too_few() -> None:
    """Decoding alone, at the alignment where the open page, the recent tokens and the last seal all take a page."""
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, format="int4:g16,recent=31", page_size=PAGE)
    found = plan(layout, tokens=200, chunk=1)
    sealed, near = found.pages
    assert run(layout, found.pages, requests=1, prompt=1, tokens=200, chunk=1)[1] == near - 1
    with pytest.raises(kvport.OutOfPages):
        run(layout, (sealed, near - 1), requests=1, prompt=1, tokens=200, chunk=1)


@pytest.mark.parametrize("format", ["int8", "int4:g16,recent=20", "int4:g16,sink=4,recent=16"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 36, 51, 52, 53, 100])
def test_at_rest_agrees_with_the_cores_own_account(format: str, tokens: int) -> None:
    layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=32, format=format, page_size=PAGE)
    found = plan(layout, tokens=tokens)
    with kvport.open("cpu", layout=layout, pages=found.pages) as cache:
        sequence = cache.sequence()
        for _ in range(2):  # what may be sealed is sealed at the begin of the next step
            with cache.step({sequence: tokens - sequence.length}) as step:
                for layer in range(2):
                    kv = torch.zeros(step.tokens, 2, 32)
                    step.append(layer, kv, kv)
        assert [pool.held for pool in cache.stats().pools] == [lane.pages for lane in found.lanes]
        assert found.request_bytes == cache.canonical_bytes()
        pools = cache.stats().pools
        assert [pool.page_bytes for pool in pools] == [lane.page_bytes for lane in found.lanes]


def test_pinned_tokens_stay_near() -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, format="int8,recent=16", page_size=PAGE)
    found = plan(layout, tokens=160, pin=33)
    assert found.near_tokens == 3 * PAGE + 16
    with kvport.open("cpu", layout=layout, pages=found.pages) as cache:
        sequence = cache.sequence()
        sequence.pin(33)
        for count in (160, 0):
            with cache.step({sequence: count}) as step:
                step.append(0, torch.zeros(count, 1, 16), torch.zeros(count, 1, 16))
        held = [pool.held for pool in cache.stats().pools]
        assert held == [lane.pages for lane in found.lanes]


@pytest.mark.parametrize("format", ["int8", "int4:g16,recent=20", "int4:g16,sink=4,recent=16", "k=int2:c16,v=int4"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("load", [{}, {"chunk": 7}, {"chunk": 200}, {"pin": 30}])
@pytest.mark.parametrize("requests", [1, 5])
def test_open_makes_the_pools_that_plan_counts(
    format: str, window: int | None, load: dict[str, int], requests: int
) -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, format=format, page_size=PAGE, window=window)
    if "pin" in load and format == "int8":
        with pytest.raises(kvport.InvalidArgument, match="no near tier to pin"):
            kvport.open("cpu", layout=layout, tokens=130, requests=requests, **load)
        return
    found = plan(layout, tokens=130, requests=requests, **load)
    with kvport.open("cpu", layout=layout, tokens=130, requests=requests, **load) as cache:
        pools = cache.stats().pools
    assert tuple(pool.total + 1 for pool in pools) == found.pages
    assert [pool.format for pool in pools] == [lane.format for lane in found.lanes]


def test_a_near_pool_follows_the_load_and_not_the_capacity() -> None:
    """recent 128 + page 128 + 1 are 3 pages a request, and a chunk of 512 twice 4 more."""
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 64, "format": "int4:g64,recent=128"}
    with kvport.open("cpu", tokens=8192, requests=4, **shape) as cache:
        assert [pool.total for pool in cache.stats().pools] == [4 * 63, 4 * 3 + 2 * 4]
    with kvport.open("cpu", tokens=8192, **shape) as cache:
        assert [pool.total for pool in cache.stats().pools] == [64, 64]
