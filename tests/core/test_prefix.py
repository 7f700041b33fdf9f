"""The prefix index: a hit is worth a miss bit for bit, and nothing is ever found that was not stored."""

from __future__ import annotations

import itertools
from typing import Any

import core_support as support
import numpy as np
import pytest
import torch
from core_support import FORMATS

from kvport import CacheFormat, CacheLayout, InvalidArgument, LayerSpec, OutOfPages, PagedCache, Sequence, SideScales

TEXT = [
    3,
    1,
    4,
    1,
    5,
    9,
    2,
    6,
    5,
    3,
    5,
    8,
    9,
    7,
    9,
    3,
    2,
    3,
    8,
    4,
    6,
    2,
    6,
    4,
    3,
    3,
    8,
    3,
    2,
    7,
    9,
    5,
    0,
    2,
    8,
    8,
    4,
    1,
]


def hybrid(format: str = "int8", pages: list[int] | int = 40, **more: Any) -> PagedCache:
    """Pages of 4, a full-attention group and a group with window 6."""
    return support.open_cache(support.hybrid_layout(format), pages, **more)


def stored(cache: PagedCache, ids: list[int], seed: int = 1) -> None:
    """Text that only the index still holds."""
    support.fill(cache, seed, len(ids), ids=ids).free()


def found(cache: PagedCache, ids: list[int]) -> int:
    """How many tokens of a text are found."""
    with cache.match(ids) as sequence:
        return sequence.length


def evicted(cache: PagedCache) -> int:
    return cache.stats().prefix.evicted_pages


# --- a hit is worth a miss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [*FORMATS, "bf16", "int2:g16:asym:scale=fp16"])
@pytest.mark.parametrize("tokens", [4, 9, 24, 38])
def test_a_hit_equals_a_miss_bit_for_bit(format: str, tokens: int) -> None:
    """Codes, scales, outputs and LSE of the rest, with and without the index, in one batch with a stranger."""
    sharing, miss = hybrid(format), hybrid(format, share_prefixes=False)
    stored(sharing, TEXT[:tokens])
    support.poison_unowned(sharing)
    hit = sharing.match(TEXT[:tokens])
    assert hit.length == tokens // 4 * 4
    assert miss.match(TEXT[:tokens]).length == 0
    twin = support.fill(miss, 1, hit.length, ids=TEXT[: hit.length])
    rest = [*TEXT[hit.length : tokens], 11, 12, 13]
    results = []
    for cache, sequence in ((sharing, hit), (miss, twin)):
        stranger = cache.sequence()
        seeds = {sequence: 1, stranger: 2}
        results.append(
            [
                support.run_step(cache, {sequence: rest, stranger: 7}, seeds),
                support.run_step(cache, {sequence: [14], stranger: 1}, seeds),
            ]
        )
    for mine, theirs in zip(*results, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    ours, other = sharing.export(hit), miss.export(twin)
    for layer in (0, 2):
        assert ours.digests()[layer] == other.digests()[layer]
    assert support.bits(sharing.gather(hit, 1)[0][-6:].numpy()).tolist() == (
        support.bits(miss.gather(twin, 1)[0][-6:].numpy()).tolist()
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_chain_of_hits(format: str) -> None:
    """Found, extended, found again: every generation shares the pages of the one before."""
    cache = hybrid(format)
    for length in (8, 16, 24, 36):
        sequence = cache.match(TEXT[:length])
        assert sequence.length == max(0, length - 8 if length < 36 else 24)
        support.run_step(cache, {sequence: TEXT[sequence.length : length]}, 1)
        sequence.free()
    hit = cache.match(TEXT[:36])
    fresh = hybrid(format)
    twin = support.fill(fresh, 1, 36)
    for layer in (0, 2):
        assert cache.export(hit).digests()[layer] == fresh.export(twin).digests()[layer]


def test_partial_blocks_other_texts_and_longer_texts() -> None:
    cache = hybrid()
    stored(cache, TEXT[:22])
    for asked, wanted in (
        (TEXT[:22], 20),
        (TEXT[:20], 20),
        (TEXT[:19], 16),  # all but the last id of 20
        (TEXT[:3], 0),
        (TEXT, 20),
        ([], 0),
        ([*TEXT[:7], 0, *TEXT[8:20]], 4),  # differs in the second block
        ([0, *TEXT[1:20]], 0),
        (TEXT[4:20], 0),  # a block is found under its prefix only
        ([*TEXT[4:8], *TEXT[:4]], 0),
    ):
        sequence = cache.match(asked)
        assert sequence.length == wanted, asked
        assert len(sequence.pages(0)) == wanted // 4
        sequence.free()
    assert cache.check() == ()


def test_ids_may_be_lists_arrays_or_tensors_of_any_integer() -> None:
    cache = hybrid()
    ids = [-5, 0, 2**63 - 1, -(2**63), 7, 7, 7, 7]
    stored(cache, ids)
    for given in (ids, np.array(ids), torch.tensor(ids), tuple(ids)):
        assert cache.match(given).length == 8
    sequence = cache.sequence()
    support.run_step(cache, {sequence: torch.tensor(TEXT[:8], dtype=torch.int32)}, 2)
    assert cache.match(np.array(TEXT[:8], dtype=np.uint16)).length == 8
    before = support.snapshot(cache)
    for wrong in ([2**63] * 4, [1.0, 2.0], "text", [[1, 2], [3, 4]], 5, None, [True] * 4, [2**70]):
        with pytest.raises(InvalidArgument, match="token ids"):
            cache.match(wrong)  # type: ignore[arg-type]
        if wrong != 5:
            with pytest.raises(InvalidArgument, match="token ids"):
                cache.step({sequence: wrong})  # type: ignore[dict-item]
        assert support.snapshot(cache) == before
    support.run_step(cache, {sequence: 1}, 2)


# --- who is found ---------------------------------------------------------------------------------------------------


def test_unknown_ids_are_never_indexed() -> None:
    cache = hybrid()
    sequence = cache.sequence()
    support.run_step(cache, {sequence: TEXT[:6]}, 1)
    support.run_step(cache, {sequence: 5}, 1)
    support.run_step(cache, {sequence: TEXT[11:24]}, 1)  # after unknown ids, known ones say nothing about the prefix
    assert cache.match(TEXT[:24]).length == 4
    assert len(cache.prefix) == 1
    support.run_step(cache, {sequence: TEXT[:12]}, 1)
    assert found(cache, TEXT[:24]) == 4
    unknown = support.fill(cache, 2, 12)
    assert len(cache.prefix) == 1
    assert unknown.length == 12


def test_other_tokens_after_a_truncation_get_pages_of_their_own() -> None:
    cache = hybrid()
    sequence = support.fill(cache, 1, 22, ids=TEXT[:22])
    digests = cache.export(cache.match(TEXT[:20])).digests()
    sequence.truncate(17)  # in mid-page, in a page the index holds; the window refuses nothing of the last step
    other = [*TEXT[:17], 70, 71, 72, 73, 74, 75, 76]
    support.run_step(cache, {sequence: other[17:]}, 2)
    assert sequence.pages(0)[:4] == cache.match(TEXT[:20]).pages(0)[:4]
    assert sequence.pages(0)[4] != cache.match(TEXT[:20]).pages(0)[4]
    assert cache.export(cache.match(TEXT[:20])).digests() == digests
    hit = cache.match(other)
    assert hit.length == 24
    for layer in (0, 2):
        assert cache.export(hit).digests()[layer] == cache.export(sequence).digests()[layer]


def test_forks_are_indexed_under_their_own_ids() -> None:
    cache = hybrid()
    parent = support.fill(cache, 1, 10, ids=TEXT[:10])
    child = parent.fork()
    support.run_step(cache, {parent: [50, 51], child: [60, 61]}, {parent: 2, child: 3})
    for sequence, tail in ((parent, [50, 51]), (child, [60, 61])):
        hit = cache.match([*TEXT[:10], *tail])
        assert hit.length == 12
        assert hit.pages(0) == sequence.pages(0)


def test_equal_text_computed_twice_is_stored_once() -> None:
    cache = hybrid()
    first = support.fill(cache, 1, 16, ids=TEXT[:16])
    inserted = cache.stats().prefix.inserted_pages
    assert inserted == 8
    second = support.fill(cache, 1, 16, ids=TEXT[:16])
    assert cache.stats().prefix.inserted_pages == inserted
    assert cache.match(TEXT[:16]).pages(0) == first.pages(0)
    assert set(second.pages(0)).isdisjoint(first.pages(0))
    free = cache.stats().pools[0].free
    second.free()
    assert cache.stats().pools[0].free == free + 4


def test_nothing_is_shared_where_sharing_is_off() -> None:
    cache = hybrid(share_prefixes=False)
    stored(cache, TEXT)
    assert cache.match(TEXT).length == 0
    assert len(cache.prefix) == 0
    assert cache.stats().pools[0].free == cache.stats().pools[0].total


def test_hit_statistics() -> None:
    cache = hybrid()
    stored(cache, TEXT[:22])
    for ids in (TEXT[:22], TEXT[:9], [0] * 5, []):
        cache.match(ids)
    stats = cache.stats()
    assert (stats.prefix.lookups, stats.prefix.lookup_tokens, stats.prefix.hit_tokens) == (4, 36, 28)
    assert (stats.prefix_entries, stats.prefix.inserted_pages, stats.prefix.evicted_pages) == (5, 10, 0)
    assert [pool.evictable for pool in stats.pools] == [0, 1]  # the window of a match needs no passed page


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_shared_pages_are_freed_with_their_last_holder(order: tuple[int, ...]) -> None:
    cache = hybrid()
    holders: list[Sequence] = [support.fill(cache, 1, 18, ids=TEXT[:18])]
    holders += [cache.match(TEXT[:18]), cache.match(TEXT[:9])]
    for index in order:
        if index == 3:
            cache.prefix.clear()
        else:
            holders[index].free()
        assert cache.check() == ()
    for group, pool in enumerate(cache.stats().pools):
        assert pool.free == pool.total
        assert support.references(cache, group) == [1] + [0] * pool.total


# --- eviction -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents() -> None:
    cache = hybrid(pages=[13, 40])
    texts = [[n] * 12 for n in (1, 2, 3)]
    for text in texts:
        stored(cache, text)
    cache.match(texts[0]).free()  # used again: 2 is now the oldest
    assert [pool.free for pool in cache.stats().pools] == [3, 30]
    sequence = support.fill(cache, 9, 16)  # one page more than is free
    assert evicted(cache) == 2  # a block is dropped in every group
    assert [found(cache, text) for text in texts] == [12, 8, 12]
    support.run_step(cache, {sequence: 8}, 9)
    # The look-ups above touched 1, then 2, then 3.
    assert [found(cache, text) for text in texts] == [4, 8, 12]
    assert cache.check() == ()


def test_pages_that_a_sequence_holds_are_not_evicted() -> None:
    cache = hybrid(pages=[9, 40])
    stored(cache, [1] * 16)
    stored(cache, [2] * 12)
    held = cache.match([1] * 8)
    assert cache.stats().pools[0].evictable == 5
    sequence = support.fill(cache, 9, 24)
    assert [found(cache, [n] * 16) for n in (1, 2)] == [8, 0]
    with pytest.raises(OutOfPages) as error:
        cache.step({sequence: 4})
    assert (error.value.needed, error.value.free, error.value.total) == (1, 0, 8)
    held.free()
    support.run_step(cache, {sequence: 4}, 9)


def test_eviction_happens_only_if_it_suffices() -> None:
    cache = hybrid(pages=[9, 40])
    stored(cache, [1] * 16)
    sequence = support.fill(cache, 9, 12)
    with pytest.raises(OutOfPages):
        cache.step({sequence: 24})
    assert evicted(cache) == 0
    assert cache.match([1] * 16).length == 16


def test_a_parent_that_goes_takes_its_children_along() -> None:
    """Blocks whose prefix can no longer be found would hold their pages for nothing."""
    cache = hybrid(pages=[9, 40])
    first = support.fill(cache, 1, 8, ids=TEXT[:8])
    second = support.fill(cache, 1, 12, ids=TEXT[:12])  # its third block hangs under the first's pages
    first.free()
    assert cache.stats().pools[0].evictable == 2
    other = support.fill(cache, 9, 20)
    assert cache.match(TEXT[:12]).length == 0
    assert len(cache.prefix) == 0
    assert second.length == 12
    assert other.length == 20
    second.free()
    assert cache.stats().pools[0].free == 3


def test_a_window_group_needs_only_the_pages_its_next_token_sees() -> None:
    cache = hybrid(pages=[40, 9])
    stored(cache, TEXT[:24])
    assert [pool.free for pool in cache.stats().pools] == [39 - 6, 8 - 6]
    full = cache.match(TEXT[:24])
    assert full.pages(1)[:4] == (0,) * 4  # position 24 sees 19 and later: pages 4 and 5
    assert all(full.pages(1)[4:])
    full.free()
    support.fill(cache, 9, 12).free()  # takes one of the window's pages: that of the last block
    assert evicted(cache) == 1
    assert cache.match(TEXT[:24]).length == 20
    cache.prefix.clear()

    # Early pages may be missing: the sequence that grew past them had given them back before they were indexed.
    cache = hybrid()
    sequence = cache.sequence()
    support.run_step(cache, {sequence: TEXT[:3]}, 1)
    for position in range(3, 26):
        support.run_step(cache, {sequence: TEXT[position : position + 1]}, 1)
    assert cache.match(TEXT[:24]).length == 24
    pages = cache.prefix.pages(1)
    assert len(pages) == 6


# --- namespaces -----------------------------------------------------------------------------------------------------


def _caches() -> dict[str, PagedCache]:
    def uniform(**more: Any) -> PagedCache:
        options: dict[str, Any] = {"format": "int8", "layers": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 32}
        options |= {"page_size": 4} | more
        extra = {key: options.pop(key) for key in ("identity", "scales") if key in options}
        return support.open_cache(CacheLayout.uniform(**options), 3, **extra)

    def static(scale: Any, zero: float | None = None, format: str = "int8:tensor:static") -> PagedCache:
        layout = CacheLayout.uniform(layers=2, kv_heads=2, query_heads=4, head_dim=32, page_size=4, format=format)
        side = SideScales(torch.tensor(scale), None if zero is None else torch.tensor(zero))
        return support.open_cache(layout, 3, scales=support.unit_scales(layout, side))

    def layers(*specs: LayerSpec) -> PagedCache:
        layout = CacheLayout(specs, CacheFormat.parse("int8"), 4)
        return support.open_cache(layout, 3)

    spec = LayerSpec(kv_heads=2, query_heads=4, key_dim=32, value_dim=32)
    local = LayerSpec(kv_heads=2, query_heads=4, key_dim=32, value_dim=32, window=8)
    shared = LayerSpec(kv_heads=2, query_heads=4, key_dim=32, value_dim=32, shares=0)
    int4 = LayerSpec(kv_heads=2, query_heads=4, key_dim=32, value_dim=32, format=CacheFormat.parse("int4"))
    asym = "int8:tensor:asym:static"
    return {
        "base": uniform(),
        "fp32": uniform(format="fp32"),
        "bf16": uniform(format="bf16"),
        "int4": uniform(format="int4"),
        "int4 groups": uniform(format="int4:g16"),
        "int4 other groups": uniform(format="int4:g32"),
        "asym": uniform(format="int8:asym"),
        "scale dtype bf16": uniform(format="int8:scale=bf16"),
        "scale dtype fp16": uniform(format="int8:scale=fp16"),
        "k int4": uniform(format="k=int4,v=int8"),
        "v int4": uniform(format="k=int8,v=int4"),
        "static": static(0.05),
        "static, another scale": static(0.0500001),
        "static per head": static([0.05, 0.05], format="int8:head:static"),
        "static asym": static(0.05, 0.0, asym),
        "static asym, another zero": static(0.05, -1.0, asym),
        "page size": uniform(page_size=8),
        "dtype bf16": uniform(dtype=torch.bfloat16),
        "dtype fp16": uniform(dtype=torch.float16),
        "model": uniform(identity={"model": "a"}),
        "another model": uniform(identity={"model": "b"}),
        "adapter": uniform(identity={"adapter": "a"}),
        "rope": uniform(identity={"rope": "a"}),
        "model and adapter": uniform(identity={"model": "a", "adapter": "a"}),
        "kv heads": uniform(kv_heads=4),
        "query heads": uniform(query_heads=8),
        "head dim": uniform(head_dim=64),
        "value dim": uniform(value_dim=64),
        "window": uniform(window=8),
        "another window": uniform(window=9),
        "one layer": uniform(layers=1),
        "three layers": uniform(layers=3),
        "second layer local": layers(spec, local),
        "first layer local": layers(local, spec),
        "second layer shares": layers(spec, shared),
        "second layer int4": layers(spec, int4),
    }  # fmt: skip


def test_caches_that_differ_in_anything_share_no_namespace() -> None:
    caches = _caches()
    fingerprints = {name: cache.fingerprint for name, cache in caches.items()}
    for (a, x), (b, y) in itertools.combinations(fingerprints.items(), 2):
        assert x != y, f"{a} and {b} share a fingerprint"
    blocks = set()
    for cache in caches.values():  # and no digest of a block
        chain = cache.prefix.digests([1] * 8)
        blocks |= set(chain)
    assert len(blocks) == sum(8 // cache.layout.page_size for cache in caches.values())


def test_equal_caches_agree_on_their_namespace_however_they_were_spelled() -> None:
    def fingerprint(format: str, **identity: str) -> str:
        layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=32, page_size=4, format=format)
        return support.open_cache(layout, 3, identity=identity).fingerprint

    assert fingerprint("int8") == fingerprint("int8:token:sym:scale=float32") == fingerprint("k=int8,v=int8:token")
    assert fingerprint("int8", model="a", rope="") == fingerprint("int8", model="a")
    assert fingerprint("int8:asym:g16:scale=fp16") == fingerprint("int8:scale=float16:g16:asym")
