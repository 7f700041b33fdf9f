"""Poison stays in its own group; what was never written, was freed or is masked never reaches an output."""

from __future__ import annotations

import math

import core_support as support
import numpy as np
import pytest
import torch
from core_support import FORMATS

from kvport import CacheLayout, LayerScales, PagedCache, SideScales, StepArrays
from kvport_conformance import inputs


def poison_spare_only(cache: PagedCache) -> None:
    for store in support.stores(cache):
        slots = np.zeros((store.pages, cache.layout.page_size), np.bool_)
        slots[0] = True
        support.poison_slots(cache.backend, store, slots)


@pytest.mark.parametrize("format", [*FORMATS, "bf16", "int8:asym:scale=bf16", "int2:g32:scale=fp16"])
@pytest.mark.parametrize("window", [None, 19])
def test_poisoned_storage_gives_the_same_bits_as_clean_storage(format: str, window: int | None) -> None:
    """The same steps in a cache whose unowned bytes are all NaN, and in one where they are all zero."""
    results = []
    for poisoned in (False, True):
        cache = support.uniform(format, pages=24, layers=2, window=window)
        if not poisoned:
            for store in support.stores(cache):
                for buffer in cache.backend.buffers(store).values():
                    buffer.zero_()
        found = []
        a, b, c = (cache.sequence() for _ in range(3))
        seeds = {a: 1, b: 2, c: 3}
        for counts in ((33, 1, 0), (1, 1, 17), (1, 15, 1), (4, 1, 30), (1, 1, 1)):
            if poisoned:
                support.poison_unowned(cache)
            found += support.run_step(cache, dict(zip(seeds, counts, strict=True)), seeds)
        found.append(cache.gather(b, 1))
        b.free()
        if poisoned:
            support.poison_unowned(cache)
        b = cache.sequence()  # recycled pages
        found += support.run_step(cache, {b: 21, a: 1}, {b: 4, a: 1})
        results.append(found)
    for clean, dirty in zip(*results, strict=True):
        for x, y in zip(clean, dirty, strict=True):
            assert torch.isfinite(y).all()
            assert torch.equal(x, y)


def test_the_spare_page_is_never_read_and_skipped_rows_are_never_written() -> None:
    """Slot -1: not the last slot, not any slot; and page 0 pads tables without being seen."""
    cache = support.uniform("int8", pages=6, page_size=16)
    sequence = support.fill(cache, 1, 20)
    store = support.stores(cache)[0]
    poison_spare_only(cache)
    before = {name: buffer.clone() for name, buffer in cache.backend.buffers(store).items()}
    key, value = support.kv(cache.layout, 0, 2, 3)
    page = sequence.pages()[1]
    cache.backend.append(store, 0, key, value, torch.tensor([-1, page * 16 + 4, -1]))
    for name, buffer in cache.backend.buffers(store).items():
        differs = (buffer.view(torch.uint8) != before[name].view(torch.uint8))[0].flatten(2).any(-1)
        changed = {(int(p), int(o)) for p, o in differs.nonzero() if p != 0}
        assert changed == {(page, 4)}, name
    arrays = StepArrays(
        page_table=torch.tensor([[*sequence.pages(), 0, 0]], dtype=torch.int32),
        kv_start=torch.tensor([0], dtype=torch.int32),
        lengths=torch.tensor([20], dtype=torch.int32),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        query_positions=torch.tensor([19], dtype=torch.int32),
    )
    query = support.queries(cache.layout, 0, 3, 1)
    out, lse = cache.backend.attend(store, 0, query, cache.backend.plan(store, arrays), scale=0.2)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int8:asym", "int4:g16", "int4:g16:asym"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_one_bad_number_reaches_only_those_who_see_it(format: str, poison: float, side: str) -> None:
    """A NaN or infinity at token 5, KV head 1, channel 20, of one of two sequences.

    Rows before position 5, the other KV head's query heads, other layers and other sequences keep their bits. A bad V
    reaches the channels of its own group only; a bad K makes a score NaN and with it the row.
    """
    results = {}
    for bad in (False, True):
        cache = support.uniform(format, pages=24, layers=2, kv_heads=2, query_heads=4, page_size=16)
        a, b = cache.sequence(), cache.sequence()
        found = []
        with cache.step({a: 18, b: 18}) as step:
            for layer in range(2):
                key, value = support.kv(cache.layout, layer, 1, 36)
                if bad and layer == 0:
                    (key if side == "key" else value)[5, 1, 20] = poison
                step.append(layer, key, value)
                found.append(step.attend(layer, support.queries(cache.layout, layer, 2, 36)).output)
        found += [cache.gather(s, layer)[n] for s in (a, b) for layer in range(2) for n in range(2)]
        results[bad] = found
        assert cache.check() == ()
    group = slice(0, 32) if ":g" not in format else slice(16, 32)
    if format in ("fp32", "bf16"):
        group = slice(20, 21)
    clean, dirty = results[False], results[True]

    hit = torch.zeros(36, 4, 32, dtype=torch.bool)
    hit[5:18, 2:, group if side == "value" else slice(None)] = True
    assert torch.equal(dirty[0][~hit], clean[0][~hit])
    if side == "value" and format in ("fp32", "bf16") and math.isinf(poison):
        assert (dirty[0][hit] == poison).all()
    elif side == "value" or not (math.isinf(poison) and format in ("fp32", "bf16")):
        assert dirty[0][hit].isnan().all()
    else:  # an infinite key: its sign decides whether the row's weight is all there, or nothing
        assert not torch.equal(dirty[0][hit], clean[0][hit])
    assert torch.equal(dirty[1], clean[1])

    stored = 2 if side == "key" else 3
    for index, (x, y) in enumerate(zip(clean[2:], dirty[2:], strict=True), start=2):
        if index != stored:
            assert torch.equal(x, y)
    reach = torch.zeros(18, 2, 32, dtype=torch.bool)
    reach[5, 1, group] = True
    assert torch.equal(dirty[stored][~reach], clean[stored][~reach])
    if format in ("fp32", "bf16") and not math.isnan(poison):
        assert (dirty[stored][reach] == poison).all()
    else:
        assert dirty[stored][reach].isnan().all()


def static_cache(format: str, scale: object = 0.05, **more: int) -> PagedCache:
    layout = CacheLayout.uniform(layers=2, kv_heads=2, query_heads=4, head_dim=32, page_size=4, format=format)
    zero = torch.tensor(-1.0) if "asym" in format else None
    return support.open_cache(
        layout, 12, scales=support.unit_scales(layout, SideScales(torch.tensor(scale), zero)), **more
    )


@pytest.mark.parametrize("format", ["int8:tensor:static", "int4:tensor:static:asym"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_static_integer_stores_nan_as_zero_and_says_where(format: str, side: str) -> None:
    cache = static_cache(format)
    clean, dirty = cache.sequence(), cache.sequence()
    key, value = support.kv(cache.layout, 0, 1, 20)
    with cache.step({clean: 10, dirty: 10}) as step:
        step.append(0, key, value)
        bad = (key.clone(), value.clone())
        bad[side == "value"][10 + 6, 1, 3] = math.nan
        bad[side == "value"][10 + 1, 0, 0] = math.inf  # saturates, is not poison
        step.append(1, *bad)
        out = step.attend(1, support.queries(cache.layout, 1, 2, 20)).output
    assert torch.isfinite(out).all()
    assert [(p.sequence, p.layer, p.position) for p in cache.check()] == [(dirty, 1, 4)]
    image = cache.export(dirty).layers[1][f"{side}.codes"].reshape(-1, 2, 32 if "int8" in format else 16)
    nibble = image[6, 1, 3] if "int8" in format else (image[6, 1, 1] >> 4)
    assert int(nibble) == 0
    top = image[1, 0, 0] if "int8" in format else (image[1, 0, 0] & 15)
    assert int(top) == (127 if "int8" in format else 15)

    # It stays while the page does, follows a fork, and is not rolled back.
    child = dirty.fork()
    support.run_step(cache, {dirty: 1, child: 1}, 3)
    assert {(p.sequence, p.layer, p.position) for p in cache.check()} == {(dirty, 1, 4), (child, 1, 4)}
    dirty.free()
    assert [(p.sequence, p.position) for p in cache.check()] == [(child, 4)]
    # A page that begins anew, here under another sequence, begins clean.
    child.free()
    fresh = [support.fill(cache, 4, 12), support.fill(cache, 5, 12)]
    assert all(s.length == 12 for s in fresh)
    assert cache.check() == ()


def test_a_flag_goes_with_the_page_through_copy_on_write_and_truncation() -> None:
    cache = static_cache("int8:tensor:static")
    parent = cache.sequence()
    key, value = support.kv(cache.layout, 0, 1, 6)
    key[5, 0, 0] = math.nan
    with cache.step({parent: 6}) as step:
        for layer in range(2):
            step.append(layer, key, value)
    child = parent.fork()
    support.run_step(cache, {child: 1}, 2)
    assert child.pages()[1] != parent.pages()[1]
    assert {(p.sequence, p.position) for p in cache.check()} == {(parent, 4), (child, 4)}
    child.truncate(5)  # the NaN's slot is gone, its page is not: the flag is per page
    assert {(p.sequence, p.position) for p in cache.check()} == {(parent, 4), (child, 4)}
    child.truncate(4)
    support.run_step(cache, {child: 1}, 2)
    assert [(p.sequence, p.position) for p in cache.check()] == [(parent, 4), (parent, 4)]


@pytest.mark.parametrize("count", [1, 255, 256, 512])
def test_any_number_of_nan_flags_the_page(count: int) -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=8, page_size=512, format="int8:tensor:static")
    cache = support.open_cache(layout, 3, scales=support.unit_scales(layout, SideScales(torch.tensor(0.05))))
    key, value = support.kv(layout, 0, 1, 512)
    key[-count:] = math.nan
    with cache.step({cache.sequence(): 512}) as step:
        step.append(0, key, value)
    assert [p.position for p in cache.check()] == [0]


def test_page_ids_past_65535() -> None:
    """int4 in the smallest geometry: the same tokens on low and on very high pages, in one batch."""
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=8, page_size=2, format="int4:g8")
    backend_cache = support.open_cache(layout, 70_003)
    pool = backend_cache._pools[0]
    pool._free.sort()  # pages are popped from the end: the highest ids first
    high = support.fill(backend_cache, 1, 7)
    pool._free.sort(reverse=True)
    low = support.fill(backend_cache, 1, 7)
    assert min(high.pages()) > 65_535
    assert max(low.pages()) < 10
    [(out, lse)] = support.run_step(backend_cache, {high: 3, low: 3}, 1)
    assert torch.equal(out[:3], out[3:])
    assert torch.equal(lse[:3], lse[3:])
    assert support.same_pages((backend_cache, high), (backend_cache, low))
    small = support.open_cache(layout, 12)
    twin = support.fill(small, 1, 7)
    [(expected, _)] = support.run_step(small, {twin: 3}, 1)
    assert torch.equal(out[:3], expected)
    child = high.fork()
    support.run_step(backend_cache, {child: 1}, 2)
    assert child.pages()[-1] < 65_535 < high.pages()[-2]


def test_storage_of_an_engine_may_be_strided() -> None:
    """K and V as interleaved views of one tensor: written and read where they are, or refused; never a silent copy."""
    cache = support.uniform("bf16", pages=6, layers=1, dtype=torch.bfloat16)
    layout = cache.layout.groups[0].layout
    both = torch.full((1, 6, 2, 16, 2, 32), math.nan, dtype=torch.bfloat16)
    storage = {"key.codes": both[:, :, 0], "value.codes": both[:, :, 1]}
    store = cache.backend.allocate(layout, 6, storage=storage)
    key, value = support.kv(cache.layout, 0, 1, 5)
    cache.backend.append(store, 0, key, value, torch.tensor([32, 33, 50, 95, 16]))
    assert torch.equal(both[0, 2, 0, 1], key[1])
    assert torch.equal(both[0, 5, 1, 15], value[3])
    assert int(both.isfinite().sum()) == 5 * 2 * 2 * 32


@pytest.mark.parametrize("format", FORMATS)
def test_outputs_do_not_depend_on_page_ids(format: str) -> None:
    found = []
    for seed in range(3):
        cache = support.uniform(format, pages=40)
        support.shuffle_free_pages(cache, seed)
        s = support.fill(cache, 1, 50)
        found.append((s.pages(), support.run_step(cache, {s: 5}, 1)[0][0]))
    assert len({pages for pages, _ in found}) == 3
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][1], found[2][1])


def test_inputs_are_left_as_they_were() -> None:
    for format in (*FORMATS, "int2:g16", "bf16"):
        cache = support.uniform(format)
        key, value = support.kv(cache.layout, 0, 1, 9)
        query = support.queries(cache.layout, 0, 1, 9)
        key[3, 0, 2], value[4, 1, 1] = math.nan, 3e38
        copies = [t.clone() for t in (key, value, query)]
        with cache.step({cache.sequence(): 9}) as step:
            step.append(0, key, value)
            step.attend(0, query, softcap=2.0, sinks=torch.from_numpy(inputs.values(1, (4,))))
        for tensor, copy in zip((key, value, query), copies, strict=True):
            assert torch.equal(tensor.nan_to_num(nan=1e9), copy.nan_to_num(nan=1e9))


def test_scales_for_one_side_only() -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=2, head_dim=32, page_size=4, format="k=int8:head:static,v=int4:g16")
    scales = {0: LayerScales(key=SideScales(torch.tensor([0.02, 0.5])))}
    cache = support.open_cache(layout, 8, scales=scales)
    sequence = support.fill(cache, 1, 9)
    key, value = support.kv(layout, 0, 1, 9)
    got_key, got_value = cache.gather(sequence, 0)
    fmt = layout.format
    assert (got_key.numpy() == support.decoded(fmt.key, key, (np.float32([0.02, 0.5]), None))).all()
    assert (got_value.numpy() == support.decoded(fmt.value, value)).all()
