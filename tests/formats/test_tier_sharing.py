"""Tiers across forks, prefix hits, small pools and exceptions: nothing leaks, nothing is shared that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay import Replay, placed, run, state, tiered

from kvport import OutOfPages, PagedCache, Sequence
from kvport_cpu import reference

FORMATS = ("int8,recent=6", "int4:g8:asym,sink=3,recent=5", "k=int2:c4:asym,v=int8,recent=3", "int4:asym:sparse=4")


def held(cache: PagedCache) -> list[int]:
    """Pages in use by lane: far, near."""
    return [pool.total - pool.free for pool in cache._pools]


def started(format: str, tokens: int, **more: Any) -> tuple[PagedCache, Sequence, Replay]:
    cache = tiered(format, **more)
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    run(cache, {sequence: tokens}, {sequence: [oracle]})
    return cache, sequence, oracle


# --- forks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_siblings_with_different_tails_share_one_far_page(together: bool) -> None:
    cache, parent, oracle = started("int8,recent=6", 8)
    siblings = [parent.fork() for _ in range(3)]
    oracles = {parent: [oracle]} | {s: [oracle.fork()] for s in siblings}
    everyone = [parent, *siblings]
    # Different tails of different lengths, in one step or in one step each.
    steps = [dict.fromkeys(everyone, 6)] if together else [{s: 6} for s in everyone]
    for tokens in steps:
        run(cache, tokens, oracles)
    assert held(cache)[0] == 0
    steps = [dict.fromkeys(everyone, 1)] if together else [{s: 1} for s in everyone]
    for tokens in steps:
        run(cache, tokens, oracles)
    assert [placed(cache, s) for s in everyone] == ["ffffffff" + "n" * 7] * 4
    far = {s.pages() for s in everyone}
    assert len(far) == 1  # the same two pages for all
    assert held(cache)[0] == 2
    assert held(cache)[1] == 4 * 2  # the shared near pages are gone, each tail has its own
    for index, sequence in enumerate(everyone):
        run(cache, {s: 1 for s in everyone[index:]}, oracles)
        sequence.free()
        assert held(cache)[0] == (2 if sequence is not everyone[-1] else 0)
    assert held(cache) == [0, 0]


def test_a_sibling_that_has_not_sealed_yet_takes_the_others_far_page_later() -> None:
    cache, parent, oracle = started("int4:g8,recent=6", 10)
    child, twin = parent.fork(), oracle.fork()
    oracles = {parent: [oracle], child: [twin]}
    run(cache, {parent: 1}, oracles)
    assert (placed(cache, parent), placed(cache, child)) == ("ffff" + "n" * 7, "n" * 10)
    assert held(cache) == [1, 1 + 1 + 1 + 1]  # far page, child's first page, the shared second, two open ones
    run(cache, {child: 3}, oracles)
    assert child.pages()[0] == parent.pages()[0]
    assert held(cache)[0] == 1
    assert cache._pools[0].references(child.pages()[0]) == 2
    parent.free()
    run(cache, {child: 1}, oracles)
    child.free()
    assert held(cache) == [0, 0]


def test_a_page_rewritten_after_a_siblings_seal_is_sealed_anew() -> None:
    """The sibling sealed the shared page; this sequence is truncated into it, alone with it, and goes another way."""
    cache, first, oracle = started("int8,recent=4", 8)
    second, twin = first.fork(), oracle.fork()
    oracles = {first: [oracle], second: [twin]}
    run(cache, {first: 1}, oracles)
    assert placed(cache, first) == "ffffnnnnn"
    assert first.pages()[0] == cache._sealed_as[0][second.pages(tier="near")[0]]
    second.truncate(2)
    twin.truncate(2)
    run(cache, {second: 7}, oracles, seed=1)
    run(cache, {second: 1}, oracles, seed=1)
    assert placed(cache, second) == "ffff" + "n" * 6
    assert second.pages()[0] != first.pages()[0]
    run(cache, {first: 1, second: 1}, oracles, seed=2)  # both still read back as their own
    for sequence in (first, second):
        sequence.free()
    assert held(cache) == [0, 0]


def test_an_abandoned_rewrite_keeps_what_the_sibling_sealed() -> None:
    cache, first, oracle = started("int8,recent=4", 8)
    second, twin = first.fork(), oracle.fork()
    oracles = {first: [oracle], second: [twin]}
    run(cache, {first: 1}, oracles)
    second.truncate(2)
    twin.truncate(2)
    before = state(cache)
    with pytest.raises(ZeroDivisionError), cache.step({second: 3}) as step:  # noqa: PT012 - the step is the subject
        step.append(0, torch.full((3, 2, 16), 9.0), torch.full((3, 2, 16), 9.0))
        raise ZeroDivisionError
    assert state(cache) == before
    run(cache, {second: 9}, oracles)
    run(cache, {second: 1, first: 1}, oracles)


@pytest.mark.parametrize("format", FORMATS)
def test_truncate_and_fork_across_a_seal(format: str) -> None:
    """A child of a sealed parent goes back to a page boundary below the seal, and both go on apart."""
    cache, parent, oracle = started(format, 15)
    run(cache, {parent: 4}, {parent: [oracle]})
    sealed = parent.sealed_length()
    assert sealed >= 8
    child, twin = parent.fork(), oracle.fork()
    oracles = {parent: [oracle], child: [twin]}
    child.truncate(sealed - 4)
    twin.truncate(sealed - 4)
    for count in (3, 5, 1, 8, 1):
        run(cache, {child: count, parent: 1}, oracles, seed=count)
        assert placed(cache, child) == twin.tiers()
        assert placed(cache, parent) == oracle.tiers()
    head = -(-cache.layout.format.sink // 4)
    shared = (sealed - 4) // 4
    assert child.pages()[head:shared] == parent.pages()[head:shared]
    parent.free()
    child.free()
    assert held(cache) == [0, 0]


def test_fork_in_mid_page_copies_the_open_page_only() -> None:
    cache, parent, oracle = started("int8,recent=6", 15)
    run(cache, {parent: 0}, {parent: [oracle]})
    assert held(cache) == [2, 2]
    child, twin = parent.fork(), oracle.fork()
    assert held(cache) == [2, 2]
    run(cache, {child: 1}, {child: [twin]})
    assert held(cache) == [2, 3]
    run(cache, {parent: 1}, {parent: [oracle]}, seed=5)


# --- exceptions -----------------------------------------------------------------------------------------------------


class Failing(reference.ReferenceBackend):
    """Fails in the operation that ``fails`` names, after doing it."""

    fails = ""

    def seal(self, *args: Any) -> None:
        super().seal(*args)
        self._maybe("seal")

    def copy_pages(self, *args: Any) -> None:
        super().copy_pages(*args)
        self._maybe("copy_pages")

    def plan(self, *args: Any) -> Any:
        self._maybe("plan")
        return super().plan(*args)

    def append(self, *args: Any) -> None:
        super().append(*args)
        self._maybe("append")

    def _maybe(self, operation: str) -> None:
        if self.fails == operation:
            raise ZeroDivisionError(operation)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fails", ["seal", "copy_pages", "plan", "append", "body", "incomplete"])
def test_an_exception_after_sealing_restores_everything(format: str, fails: str) -> None:
    backend = Failing("cpu", torch.device("cpu"))
    cache, parent, oracle = started(format, 15, backend=backend)
    run(cache, {parent: 1}, {parent: [oracle]})
    child, twin = parent.fork(), oracle.fork()
    oracles = {parent: [oracle], child: [twin]}
    run(cache, {parent: 3}, oracles)  # the child has the open page and unsealed pages of its own
    run(cache, {child: 6}, oracles)
    grandchild = child.fork()
    third = twin.fork()
    before = state(cache)
    backend.fails = fails
    tokens = {child: 2, parent: 1, grandchild: 0}
    # Which exception it is depends on the parameter; the step is the subject.
    with pytest.raises(Exception) as error:  # noqa: PT011, PT012, SIM117
        with cache.step(tokens) as step:
            if fails == "body":
                step.append(0, torch.ones(3, 2, 16), torch.ones(3, 2, 16))
                step.attend(0, torch.ones(3, 4, 16))
                raise ZeroDivisionError
            if fails == "append":
                step.append(0, torch.ones(3, 2, 16), torch.ones(3, 2, 16))
    assert error.type.__name__ == ("IncompleteStep" if fails == "incomplete" else "ZeroDivisionError")
    assert state(cache) == before
    cache.check()
    backend.fails = ""
    run(cache, tokens, {**oracles, grandchild: [third]}, seed=4)
    assert state(cache) != before
    for sequence in (parent, child, grandchild):
        sequence.free()
    assert held(cache) == [0, 0]


# --- out of pages ---------------------------------------------------------------------------------------------------


def test_out_of_near_pages_and_out_of_far_pages_name_their_pool() -> None:
    cache, sequence, _ = started("int8,recent=6", 14, pages=[40, 5])
    before = state(cache)
    with pytest.raises(OutOfPages, match="fp32 pages") as error:
        cache.step({sequence: 3})
    assert (error.value.needed, error.value.free, error.value.total) == (1, 0, 4)
    assert state(cache) == before

    cache, sequence, oracle = started("int8,recent=6", 14, pages=[2, 40])
    before = state(cache)
    with pytest.raises(OutOfPages, match="int8 pages") as error:
        cache.step({sequence: 1})
    assert (error.value.needed, error.value.free, error.value.total) == (2, 1, 1)
    assert state(cache) == before
    sequence.truncate(10)
    oracle.truncate(10)
    run(cache, {sequence: 3}, {sequence: [oracle]})  # needs one far page, which there is
    assert placed(cache, sequence) == "ffff" + "n" * 9


def test_a_pool_of_exactly_the_promised_size_is_enough() -> None:
    """The near pool holds a step's tokens + recent + P per running sequence, and no step runs out."""
    recent, size, most = 6, 4, 5
    near = -(-(most + recent + size) // size)
    cache = tiered("int8,recent=6", pages=[40, 2 * near + 1])
    a, b = cache.sequence(), cache.sequence()
    oracles = {a: [Replay(cache.layout)], b: [Replay(cache.layout)]}
    for index in range(24):
        run(cache, {a: 1 + index % most, b: most - index % most}, oracles)


def test_siblings_that_seal_the_same_page_need_one_far_page() -> None:
    cache, parent, oracle = started("int8,recent=4", 8, pages=[2, 40])
    child, twin = parent.fork(), oracle.fork()
    oracles = {parent: [oracle], child: [twin]}
    run(cache, {parent: 1, child: 1}, oracles)  # one far page for both: the pool has no more
    assert held(cache)[0] == 1


# --- prefixes -------------------------------------------------------------------------------------------------------


def rows_of(ids: list[int], first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and queries that follow from the ids and positions from ``first`` on."""
    found = []
    for position in range(first, len(ids)):
        generator = torch.Generator().manual_seed(position * 1009 + ids[position])
        found.append(torch.randn(8, 16, generator=generator))
    rows = torch.stack(found)
    return rows[:, :2], rows[:, 2:4] * 3 + 1, rows[:, 4:]


def serve(cache: PagedCache, sequence: Sequence, ids: list[int], sizes: list[int]) -> list[torch.Tensor]:
    outputs = []
    for size in sizes:
        first = sequence.length
        key, value, query = rows_of(ids[: first + size], first)
        with cache.step({sequence: ids[first : first + size]}) as step:
            step.append(0, key, value)
            outputs.append(step.attend(0, query).output)
    return outputs


@pytest.mark.parametrize("format", ["int8,recent=6", "int8,recent=6,sink=5", "int8,sink=5", "int2:c4:asym", "int8"])
def test_a_prefix_hit_ends_before_the_recent_window(format: str) -> None:
    recent = 6 if "recent" in format else 0
    ids = [7 * i % 50 for i in range(40)]
    for length in range(41):
        cache = tiered(format)
        first = cache.sequence()
        serve(cache, first, ids, [17, 23])
        serve(cache, first, [*ids, 1], [1])  # what is old enough is at rest
        with cache.match(ids[:length]) as hit:
            assert hit.length == max(0, (length - recent) // 4 * 4)
            pages = hit.length // 4
            assert hit.pages() == first.pages()[:pages]
            assert hit.pages(tier="near") == first.pages(tier="near")[:pages]
            # ... and may be pinned no further than the sink, which stays near anyway.
            assert hit.sealed_length() == (hit.length if "," in format or ":c" in format else 0)


@pytest.mark.parametrize("format", ["int8", "int8,recent=4", "int4:g8,sink=5,recent=3", "int2:c4:asym"])
@pytest.mark.parametrize("window", [6, 9, 30])
@pytest.mark.parametrize("chunks", [[41], [8] * 5, [11, 11, 11, 7], [40, 1, 1, 1], [1] * 41], ids=str)
def test_a_window_passes_no_page_before_it_can_be_found(format: str, window: int, chunks: list[int]) -> None:
    """Pages that seal in a step are behind the window by its end. Found all the same is what a cache without a window
    finds, where the pages that the next token sees are at rest."""
    ids = [5 * i % 37 for i in range(sum(chunks))]
    found = []
    for cache in (tiered(format, window=window), tiered(format)):
        first = cache.sequence()
        serve(cache, first, ids, chunks)
        first.free()
        hit = cache.match(ids)
        found.append((hit.length, *(rows[max(0, hit.length - window + 1) :] for rows in cache.gather(hit, 0))))
        cache.check()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))


def test_a_window_within_recent_passes_pages_that_never_seal() -> None:
    """They are read as they came, and never at rest: only steps longer than ``recent`` leave something to find."""
    ids = list(range(60))
    for chunks, wanted in (([40, 1], 24), ([20, 20], 4), ([20, 20, 1], 24), ([10] * 4, 0), ([1] * 41, 0)):
        cache = tiered("int8,recent=13", window=6)
        serve(cache, cache.sequence(), ids, chunks)
        assert cache.match(ids).length == wanted, chunks


@pytest.mark.parametrize("format", ["int8,recent=6", "int8,recent=6,sink=5", "int2:c4:asym"])
def test_nothing_is_indexed_before_it_is_at_rest(format: str) -> None:
    recent, head = (6 if "recent" in format else 0), (8 if "sink" in format else 0)
    cache = tiered(format)
    ids = list(range(40))
    sequence = cache.sequence()
    serve(cache, sequence, ids, [22])  # nothing has sealed: only whole sink pages are final
    with cache.match(ids) as hit:
        assert hit.length == head
    serve(cache, sequence, ids, [1])
    with cache.match(ids) as hit:
        assert hit.length == (22 - recent) // 4 * 4


@pytest.mark.parametrize("format", ["int8,recent=6", "int4:g8,recent=6,sink=5", "int2:c4:asym,recent=5"])
def test_a_hit_is_as_good_as_the_same_prefix_sealed_by_oneself(format: str) -> None:
    """Outputs after a hit equal those of a run with the same sealed prefix and steps, bit for bit."""
    ids = [3 * i % 31 for i in range(45)]
    cache = tiered(format, pages=60)
    first = cache.sequence()
    serve(cache, first, ids, [36, 1, 1])
    hit = cache.match(ids[:36])
    assert hit.length == (36 - cache.layout.format.recent) // 4 * 4
    got = serve(cache, hit, ids, [36 - hit.length, 1, 5, 1])

    other = tiered(format, pages=60, share_prefixes=False)
    own = other.sequence()
    # Seal exactly the prefix: run past it, come back to it.
    serve(other, own, ids, [36])
    serve(other, own, ids, [1])
    own.truncate(hit_length := (36 - cache.layout.format.recent) // 4 * 4)
    assert own.sealed_length() == hit_length
    wanted = serve(other, own, ids, [36 - hit_length, 1, 5, 1])
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    assert cache.export(hit).digests() == other.export(own).digests()
    assert placed(cache, hit) == placed(other, own)


def test_a_facts_page_found_by_a_hit_reads_back_as_it_was_stored() -> None:
    cache = tiered("int8,recent=6,sink=4")
    ids = list(range(31))
    first = cache.sequence()
    serve(cache, first, ids, [30, 1])
    hit = cache.match(ids[:30])
    key, value = cache.gather(hit, 0)
    wanted_key, wanted_value = cache.gather(first, 0)
    assert torch.equal(key, wanted_key[: hit.length])
    assert torch.equal(value, wanted_value[: hit.length])
    assert hit.length == 24
    first.free()
    assert torch.equal(cache.gather(hit, 0)[0], key)


def test_pins_are_namespaces() -> None:
    """Pages sealed without a pin never stand in for pinned ones, nor the other way round."""
    cache = tiered("int8,recent=6", pages=60)
    ids = list(range(31))
    for pin in (0, 5, 8):
        sequence = cache.match(ids[:30], pin=pin)
        assert sequence.length == 0
        serve(cache, sequence, ids, [30, 1])
        with cache.match(ids[:30], pin=pin) as hit:
            assert hit.length == 24
            assert placed(cache, hit) == "n" * (-(-pin // 4) * 4) + "f" * (24 - -(-pin // 4) * 4)
            serve(cache, hit, ids, [6, 1])
            assert placed(cache, hit).startswith("n" * (-(-pin // 4) * 4) + "f")
    with cache.match(ids[:30], pin=7) as hit:
        assert hit.length == 0  # the pin itself is the namespace, not the pages that it rounds up to


def test_a_pin_given_later_moves_to_its_own_namespace() -> None:
    cache = tiered("int8,recent=6", pages=60)
    ids = list(range(31))
    sequence = cache.sequence()
    serve(cache, sequence, ids, [9])
    sequence.pin(6)
    serve(cache, sequence, ids, [21, 1])
    with cache.match(ids[:30]) as plain, cache.match(ids[:30], pin=6) as pinned:
        assert (plain.length, pinned.length) == (0, 24)


def test_prefix_pages_of_both_tiers_are_evicted_when_needed_and_only_then() -> None:
    cache = tiered("int8,recent=4,sink=4", pages=[7, 8])
    ids = list(range(24))
    first = cache.sequence()
    serve(cache, first, ids, [12, 8, 1])
    first.free()
    kept = [pool.evictable for pool in cache.stats().pools]
    assert kept == [3, 1]
    second = cache.sequence()
    others = [100 + i for i in ids]
    serve(cache, second, others, [12, 8])
    serve(cache, second, others, [1])
    with cache.match(ids) as hit:
        assert hit.length == 20 - 4  # nothing had to go
    with pytest.raises(OutOfPages):
        cache.step({second: 40})
    with cache.match(ids) as hit:
        assert hit.length == 16  # a step that cannot be helped evicts nothing
    third = cache.sequence()
    serve(cache, third, [200 + i for i in range(20)], [16])
    assert cache.stats().prefix.evicted_pages > 0
    cache.check()
    for sequence in (second, third):
        sequence.free()
    cache.prefix.clear()
    assert held(cache) == [0, 0]
