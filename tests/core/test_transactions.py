"""A step is a transaction: whatever ends it early leaves every sequence, page list, count and digest as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import core_support as support
import pytest
import torch
from core_support import FORMATS

from kvport import CacheLayout, IncompleteStep, OutOfPages, PagedCache, Sequence, Step, StepError
from kvport_cpu.reference import ReferenceBackend


class Failing(ReferenceBackend):
    """The reference, of which one operation raises when called for the n-th time (from 0)."""

    def __init__(self) -> None:
        super().__init__("cpu", torch.device("cpu"))
        self.operation = ""
        self.countdown = 0

    def fail(self, operation: str, nth: int = 0) -> None:
        self.operation, self.countdown = operation, nth

    def _call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        if operation == self.operation:
            self.countdown -= 1
            if self.countdown < 0:
                self.operation = ""
                raise OSError(f"{operation} failed")
        return getattr(super(), operation)(*args, **kwargs)

    def append(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("append", *args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("attend", *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("plan", *args, **kwargs)

    def copy_pages(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("copy_pages", *args, **kwargs)

    def import_pages(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("import_pages", *args, **kwargs)


def hybrid(format: str, pages: list[int], backend: ReferenceBackend | None = None, **more: Any) -> PagedCache:
    return support.open_cache(support.hybrid_layout(format), pages, backend, **more)


def busy(cache: PagedCache) -> list[Sequence]:
    """A fork family in mid-page, a lone sequence past its window, and one with ids, as a batch would have."""
    first = support.fill(cache, 1, 6)
    child = first.fork()
    grandchild = child.fork()
    support.run_step(cache, {child: 1}, 2)
    return [first, child, grandchild, support.fill(cache, 3, 11), support.fill(cache, 4, 8, ids=list(range(8)))]


def take_step(cache: PagedCache, tokens: dict[Sequence, Any], body: Callable[[Step], None]) -> None:
    with cache.step(tokens) as step:
        body(step)


def nothing(step: Step) -> None:
    pass


def append_one_layer(step: Step) -> None:
    support.append_all(step, 9, layers=[1])


def raise_at_once(step: Step) -> None:
    raise LookupError


def raise_after_all_layers(step: Step) -> None:
    support.append_all(step, 9)
    raise KeyboardInterrupt


def break_the_rules(step: Step) -> None:
    support.append_all(step, 9)
    support.append_all(step, 9)


@pytest.mark.parametrize(
    "body,error",
    [
        (nothing, IncompleteStep),
        (append_one_layer, IncompleteStep),
        (raise_at_once, LookupError),
        (raise_after_all_layers, KeyboardInterrupt),
        (break_the_rules, StepError),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_leaving_early_changes_nothing(format: str, body: Callable[[Step], None], error: type[BaseException]) -> None:
    cache = hybrid(format, [40, 30])
    sequences = busy(cache)
    before = support.snapshot(cache)
    counts = [support.references(cache, g) for g in range(2)]
    with pytest.raises(error):
        take_step(cache, {s: n for s, n in zip(sequences, (1, 3, 5, 9, 0), strict=True)}, body)
    assert support.snapshot(cache) == before
    assert [support.references(cache, g) for g in range(2)] == counts
    assert cache.check() == ()
    for s in sequences:  # and the cache goes on
        support.run_step(cache, {s: 2}, 7)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "operation,nth",
    [("copy_pages", 0), ("copy_pages", 1), ("plan", 0), ("plan", 1), ("append", 0), ("append", 2), ("attend", 1)],
)
def test_a_failing_backend_changes_nothing(format: str, operation: str, nth: int) -> None:
    backend = Failing()
    cache = hybrid(format, [40, 30], backend)
    sequences = busy(cache)
    before = support.snapshot(cache)
    tokens = {s: n for s, n in zip(sequences, (1, 3, 5, 9, 0), strict=True)}
    backend.fail(operation, nth)
    with pytest.raises(OSError, match=operation):
        support.run_step(cache, tokens, 9)
    assert support.snapshot(cache) == before
    assert cache.check() == ()
    # The step that failed, taken again, gives what it gives in a cache where nothing failed.
    again = support.run_step(cache, tokens, 9)
    other = hybrid(format, [40, 30])
    fresh = busy(other)
    expected = support.run_step(other, {s: n for s, n in zip(fresh, (1, 3, 5, 9, 0), strict=True)}, 9)
    for mine, theirs in zip(again, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for a, b in zip(sequences, fresh, strict=True):
        assert support.same_pages((cache, a), (other, b))


@pytest.mark.parametrize("operation,nth", [("import_pages", 0), ("import_pages", 2)])
def test_a_failing_import_changes_nothing(operation: str, nth: int) -> None:
    backend = Failing()
    cache = hybrid("int8", [40, 30], backend)
    image = cache.export(busy(cache)[3])
    before = support.snapshot(cache)
    backend.fail(operation, nth)
    with pytest.raises(OSError, match=operation):
        cache.insert(image)
    assert support.snapshot(cache) == before
    assert cache.check() == ()


@pytest.mark.parametrize("short", [0, 1])
def test_running_out_in_one_of_two_groups_takes_nothing_from_the_other(short: int) -> None:
    pages = [40, 40]
    pages[short] = 8
    cache = hybrid("int4:g16", pages)
    sequences = [support.fill(cache, 1, 10), support.fill(cache, 2, 9)]
    before = support.snapshot(cache)
    with pytest.raises(OutOfPages) as error:
        cache.step({sequences[0]: 3, sequences[1]: 8})
    assert (error.value.needed, error.value.free, error.value.total) == (3, 1, 7)
    for fact in ("needs 3", "1 of 7", "free or truncate", f"layers {[[0, 2], [1]][short]}"):
        assert fact in str(error.value)
    assert support.snapshot(cache) == before
    support.run_step(cache, {sequences[0]: 3, sequences[1]: 0})  # what fits, fits


def test_a_copy_that_does_not_fit_is_out_of_pages_too() -> None:
    """Copy-on-write needs a page for each sequence that writes into a shared one."""
    cache = support.uniform("int8", pages=3, page_size=16)
    parent = support.fill(cache, 1, 20)
    child = parent.fork()
    before = support.snapshot(cache)
    with pytest.raises(OutOfPages):
        cache.step({child: 1})
    assert support.snapshot(cache) == before
    parent.free()
    support.run_step(cache, {child: 1})


def test_rolling_back_after_an_eviction_leaves_the_same_pages_available() -> None:
    cache = hybrid("int8", [9, 9])
    support.fill(cache, 1, 16, ids=list(range(16))).free()
    other = support.fill(cache, 2, 5)
    before = support.snapshot(cache)
    evictable = [p.evictable for p in cache.stats().pools]
    with pytest.raises(IncompleteStep), cache.step({other: 16}):
        pass
    assert cache.stats().prefix.evicted_pages > 0
    assert support.snapshot(cache) == before
    assert [p.evictable for p in cache.stats().pools] != evictable
    with pytest.raises(OutOfPages):  # eviction happens only if it suffices
        cache.step({other: 40})
    assert len(cache.prefix) > 0


# --- sharing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 32, 40])
def test_forks_of_forks_are_independent(format: str, shared: int) -> None:
    """Three generations fork at one length and go on with tokens of their own: each equals a cache of its own."""
    cache = support.uniform(format, pages=40, layers=2)
    parent = support.fill(cache, 1, shared)
    child = parent.fork()
    grandchild = child.fork()
    family = {parent: 11, child: 12, grandchild: 13}
    for s in family:
        assert s.pages() == parent.pages()
    support.poison_unowned(cache)
    support.run_step(cache, {parent: 3, child: 2, grandchild: 20}, family)
    support.poison_unowned(cache)
    late = child.fork()
    family[late] = 14
    outputs = support.run_step(cache, {s: 2 for s in family}, family)
    for index, (s, seed) in enumerate(family.items()):
        alone = support.uniform(format, pages=40, layers=2)
        twin = support.fill(alone, 1, shared)
        first = {parent: 3, child: 2, grandchild: 20, late: 2}[s]
        support.run_step(alone, {twin: first}, 12 if s is late else seed)
        expected = support.run_step(alone, {twin: 2}, seed)
        for layer in range(2):
            for got, wanted in zip(outputs[layer], expected[layer], strict=True):
                assert torch.equal(got[2 * index : 2 * index + 2], wanted)
        assert support.same_pages((cache, s), (alone, twin))
    full = shared // 16
    assert all(s.pages()[:full] == parent.pages()[:full] for s in family)
    assert len({s.pages()[full] for s in (parent, child, grandchild)}) == 3


def test_only_the_open_page_is_copied_and_only_when_written() -> None:
    cache = support.uniform("int8", pages=40)
    parent = support.fill(cache, 1, 40)
    free = cache.stats().pools[0].free
    children = [parent.fork() for _ in range(5)]
    assert cache.stats().pools[0].free == free
    support.run_step(cache, {children[0]: 1}, 2)
    assert cache.stats().pools[0].free == free - 1
    assert children[0].pages()[:2] == parent.pages()[:2]
    assert children[0].pages()[2] != parent.pages()[2]
    for child in children[1:]:
        child.free()
    children[0].free()
    support.run_step(cache, {parent: 1}, 3)  # nobody else holds it: written in place
    assert cache.stats().pools[0].free == free


@pytest.mark.parametrize("format", FORMATS)
def test_truncating_and_appending_never_writes_a_shared_page(format: str) -> None:
    cache = support.uniform(format, pages=40, layers=2)
    parent = support.fill(cache, 1, 37)
    child = parent.fork()
    digests = cache.export(parent).digests()
    for length in (37, 33, 32, 20, 16, 7, 0):
        child.truncate(length)
        support.poison_unowned(cache)
        support.run_step(cache, {child: 4}, 2)
        assert cache.export(parent).digests() == digests
        alone = support.uniform(format, pages=40, layers=2)
        twin = support.fill(alone, 1, length)
        support.run_step(alone, {twin: 4}, 2)
        assert support.same_pages((cache, child), (alone, twin))
        child.truncate(length)


def test_a_truncated_parent_does_not_write_into_its_child() -> None:
    cache = support.uniform("int8", pages=40)
    parent = support.fill(cache, 1, 37)
    child = parent.fork()
    digests = cache.export(child).digests()
    parent.truncate(5)
    support.run_step(cache, {parent: 20}, 2)
    assert cache.export(child).digests() == digests
    parent.free()
    assert cache.export(child).digests() == digests
    support.poison_unowned(cache)
    assert cache.export(child).digests() == digests


def test_pages_of_the_prefix_index_are_never_written() -> None:
    """A sequence that is cut into an indexed page and goes on elsewhere copies that page first."""
    cache = support.uniform("int4:g16", pages=40)
    ids = list(range(48))
    writer = support.fill(cache, 1, 48, ids=ids)
    digests = cache.export(cache.match(ids)).digests()
    writer.truncate(30)
    support.run_step(cache, {writer: [7] * 40}, 2)
    found = cache.match(ids)
    assert found.length == 48
    assert cache.export(found).digests() == digests
    writer.free()
    support.poison_unowned(cache)
    assert cache.export(cache.match(ids)).digests() == digests


def test_a_window_group_gives_passed_pages_back_and_refuses_to_go_behind_them() -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, page_size=4, window=6, format="int8")
    cache = support.open_cache(layout, 12)
    sequence = support.fill(cache, 1, 30)
    assert 0 not in sequence.pages()  # the last step can always be truncated, here to 0
    support.run_step(cache, {sequence: 1}, 1)
    # Position 30, the first of that step, sees 25 .. 30, so pages before position 24 are gone.
    assert [page > 0 for page in sequence.pages()] == [False] * 6 + [True] * 2
    assert cache.stats().pools[0].free == 11 - 2
    with pytest.raises(Exception, match=r"truncate\(28\).*window 6.*29"):
        sequence.truncate(28)
    sequence.truncate(30)
    sequence.truncate(29)
    support.poison_unowned(cache)
    [(out, _)] = support.run_step(cache, {sequence: 2}, 1)
    alone = support.open_cache(layout, 12)
    twin = support.fill(alone, 1, 29)
    [(expected, _)] = support.run_step(alone, {twin: 2}, 1)
    assert torch.equal(out, expected)
