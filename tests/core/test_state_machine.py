"""Random operations on a cache against a plain oracle: one list of row numbers per sequence.

Every token is a row of a fixed pool. Where token ids are known, a token's row follows from the ids up to it, so that a
prefix found in the index must read back as the rows its ids stand for; else the row is random. The oracle's answer to
anything is a look-up: codes and scales of those rows by the numpy codec, attention over them by the numpy oracle.

Before each operation every slot that holds no committed token is filled with NaN or with codes no encoder emits, and
the free pages are shuffled. After each, the cache recounts its references.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import core_support as support
import hypothesis
import pytest
import torch
from core_support import FORMATS, Array
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvport import CacheLayout, IncompleteStep, OutOfPages, PagedCache, Sequence, SequenceError, Step
from kvport_conformance import inputs

POOL = 1024
PAGE = 4
WINDOW = 6
PAGES = 15  # of the full group, spare included
WINDOW_PAGES = 12
LONGEST = 26  # tokens per sequence: the pool holds about two of them
OPERATIONS = {"long": 10_000, "short": 220}
MUST_MEET = ("step", "abandoned step", "refused for pages", "match with a hit", "evicted pages", "fork", "truncate")


class Rows:
    """The pool of one format: K, V and queries of every layer, and what the oracle makes of them."""

    def __init__(self, format: str) -> None:
        self.layout = support.hybrid_layout(format, page_size=PAGE, window=WINDOW)
        self.layers = range(len(self.layout.layers))
        self.kv = [support.kv(self.layout, layer, 5, POOL) for layer in self.layers]
        self.query = [support.queries(self.layout, layer, 6, POOL) for layer in self.layers]
        self.planes: list[dict[str, Array]] = []
        self.decoded: list[tuple[Array, Array]] = []
        for layer in self.layers:
            group, _ = self.layout.locate(layer)
            fmt = self.layout.groups[group].layout.format
            key, value = self.kv[layer]
            self.planes.append(support.expected_planes(self.layout, group, key.numpy(), value.numpy()))
            self.decoded.append((support.decoded(fmt.key, key), support.decoded(fmt.value, value)))


@dataclass
class Model:
    """What the oracle knows of one sequence: a pool row per token, and the ids, None once they are unknown."""

    rows: list[int] = field(default_factory=list)
    ids: list[int] | None = field(default_factory=list)
    floor: int = 0  # the last step can always be truncated: its first position
    offered: int = 0  # full blocks that were offered to the prefix index

    def copy(self) -> Model:
        return Model(list(self.rows), None if self.ids is None else list(self.ids), self.floor, self.offered)


def row_of(ids: list[int]) -> int:
    """The row of the last of these tokens, which depends on all of them."""
    return inputs.derive("row", *ids) % POOL


class CacheMachine(RuleBasedStateMachine):
    """The rules. ``format`` and ``rows`` are set on the subclass of each format."""

    format: ClassVar[str]
    rows: ClassVar[Rows]
    operations: ClassVar[int] = 0
    worst: ClassVar[float] = 0.0
    seen: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layout: CacheLayout = self.rows.layout
        self.cache: PagedCache = support.open_cache(self.layout, [PAGES, WINDOW_PAGES])
        self.models: dict[Sequence, Model] = {}
        self.indexed: set[tuple[int, ...]] = set()  # ids of every block chain that was ever made findable
        self.fresh = itertools.count()
        self.forgotten = 0  # pages dropped by clearing the index, which its statistics count as evicted

    # -- helpers -----------------------------------------------------------------------------------------------------

    def count(self, name: str) -> None:
        type(self).operations += 1
        self.seen[name] = self.seen.get(name, 0) + 1
        support.shuffle_free_pages(self.cache, next(self.fresh))
        support.poison_unowned(self.cache)

    def pick(self, index: int) -> Sequence:
        return list(self.models)[index % len(self.models)]

    def needs(self, counts: dict[Sequence, int]) -> list[tuple[int, int]]:
        """(pages needed, pages that no sequence holds) of each group, from the page lists alone."""
        found = []
        for group in range(len(self.layout.groups)):
            held = [page for s in self.models for page in s.pages(group) if page]
            shared = set(self.cache.prefix.pages(group))
            need = 0
            for sequence, count in counts.items():
                pages = sequence.pages(group)
                need += -(-(sequence.length + count) // PAGE) - len(pages)
                if count and sequence.length % PAGE:
                    need += held.count(pages[-1]) > 1 or pages[-1] in shared
            found.append((need, self.cache.stats().pools[group].total - len(set(held))))
        return found

    def write(self, step: Step, new: dict[Sequence, list[int]], layers: list[int]) -> None:
        packed = [row for rows in new.values() for row in rows]
        for layer in layers:
            key, value = self.rows.kv[layer]
            step.append(layer, key[packed], value[packed])
            output, lse = step.attend(layer, self.rows.query[layer][packed])
            for sequence, rows in new.items():
                if rows:
                    here = step.rows[sequence]
                    self.check_attention(layer, self.models[sequence].rows + rows, len(rows), output[here], lse[here])

    def check_attention(self, layer: int, rows: list[int], count: int, output: Any, lse: Any) -> None:
        key, value = self.rows.decoded[layer]
        query = self.rows.query[layer].numpy()[rows[-count:]]
        expected, expected_lse, allowed, allowed_lse = support.attention(
            query, key[rows], value[rows], window=self.layout.layers[layer].window
        )
        found = max(support.ratio(output, expected, allowed), support.ratio(lse, expected_lse, allowed_lse))
        assert found < 1, f"layer {layer}, {len(rows)} tokens, {count} new: observed/bound {found}"
        type(self).worst = max(self.worst, found)

    def commit(self, new: dict[Sequence, list[int]], ids: dict[Sequence, list[int] | None]) -> None:
        for sequence, rows in new.items():
            model = self.models[sequence]
            model.floor = len(model.rows)
            model.rows += rows
            known = ids[sequence]
            if known is None and rows:
                model.ids = None
            elif model.ids is not None and known is not None:
                model.ids += known
            self.remember(model)

    def remember(self, model: Model) -> None:
        """Each full block is offered once; it can be found where the block before it can."""
        if model.ids is None:
            return
        for end in range((model.offered + 1) * PAGE, len(model.ids) + 1, PAGE):
            if end == PAGE or tuple(model.ids[: end - PAGE]) in self.indexed:
                self.indexed.add(tuple(model.ids[:end]))
        model.offered = max(model.offered, len(model.ids) // PAGE)

    def plan(self, entries: list[tuple[int, int, int | None]]) -> tuple[dict[Sequence, list[int]], dict[Any, Any]]:
        """Rows and ids of a ragged step from drawn (sequence, count, id bits or None for unknown ids)."""
        new: dict[Sequence, list[int]] = {}
        ids: dict[Sequence, list[int] | None] = {}
        for index, count, id_bits in entries:
            sequence = self.pick(index)
            model = self.models[sequence]
            count = min(count, LONGEST - len(model.rows))
            if id_bits is None or model.ids is None:
                seed = inputs.derive("anonymous", next(self.fresh))
                new[sequence] = [int(r) for r in inputs.integers(seed, (count,), 0, POOL)]
                # Ids after unknown ones stay unknown: their rows cannot follow from the whole prefix.
                ids[sequence] = None if id_bits is None else [(id_bits >> i) & 1 for i in range(count)]
            else:
                known = [(id_bits >> i) & 1 for i in range(count)]
                new[sequence] = [row_of(model.ids + known[: i + 1]) for i in range(count)]
                ids[sequence] = known
        return new, ids

    def given(self, new: dict[Sequence, list[int]], ids: dict[Sequence, list[int] | None]) -> dict[Sequence, Any]:
        return {s: len(rows) if ids[s] is None else ids[s] for s, rows in new.items()}

    # -- rules -------------------------------------------------------------------------------------------------------

    # A few texts, as the bits of a number, so that sequences share prefixes; None for tokens without ids.
    texts = st.sampled_from([0, 0, 0, 0b111, 0b11110000, None])
    entries = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), texts), min_size=1, max_size=3)
    decodes = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.just(0)), min_size=1, max_size=4)
    prompts = st.lists(st.tuples(st.integers(0, 7), st.integers(5, 15), st.just(0)), min_size=1, max_size=2)

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self.models[self.cache.sequence()] = Model()

    @precondition(lambda self: len(self.models) < 7)
    @rule()
    def make(self) -> None:
        self.count("make")
        self.models[self.cache.sequence()] = Model()

    @precondition(lambda self: self.models)
    @rule(entries=entries)
    def step(self, entries: list[tuple[int, int, int | None]]) -> None:
        self.run_step(entries)

    @precondition(lambda self: self.models)
    @rule(entries=decodes)
    def decode(self, entries: list[tuple[int, int, int | None]]) -> None:
        self.run_step(entries)

    @precondition(lambda self: self.models)
    @rule(entries=prompts)
    def prefill(self, entries: list[tuple[int, int, int | None]]) -> None:
        self.run_step(entries)

    def run_step(self, entries: list[tuple[int, int, int | None]]) -> None:
        new, ids = self.plan(entries)
        self.count("step")
        needs = self.needs({s: len(rows) for s, rows in new.items()})
        if any(need > free for need, free in needs):
            self.out_of_pages(self.given(new, ids), needs)
            return
        with self.cache.step(self.given(new, ids)) as step:
            self.write(step, new, list(self.rows.layers))
        self.commit(new, ids)

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 7))
    def too_large_a_step(self, index: int) -> None:
        self.count("out of pages")
        sequence = self.pick(index)
        count = PAGES * PAGE
        self.out_of_pages({sequence: count}, self.needs({sequence: count}))

    def out_of_pages(self, tokens: dict[Sequence, Any], needs: list[tuple[int, int]]) -> None:
        before = support.snapshot(self.cache)
        with pytest.raises(OutOfPages) as error:
            self.cache.step(tokens)
        assert (error.value.needed, error.value.free) == next((n, f) for n, f in needs if n > f)
        assert support.snapshot(self.cache) == before
        self.seen["refused for pages"] = self.seen.get("refused for pages", 0) + 1

    @precondition(lambda self: self.models)
    @rule(entries=entries, layers=st.lists(st.integers(0, 2), unique=True, max_size=2), fail=st.booleans())
    def abandoned_step(self, entries: list[tuple[int, int, int | None]], layers: list[int], fail: bool) -> None:
        """Leave a step by an exception, or with layers missing."""
        new, ids = self.plan(entries)
        if any(need > free for need, free in self.needs({s: len(rows) for s, rows in new.items()})):
            return
        self.count("abandoned step")
        before = support.snapshot(self.cache)
        step = self.cache.step(self.given(new, ids))
        with pytest.raises(ZeroDivisionError if fail else IncompleteStep), step:  # noqa: PT012 - the body is the subject
            self.write(step, new, layers)
            if fail:
                raise ZeroDivisionError
        assert support.snapshot(self.cache) == before

    @precondition(lambda self: self.models and len(self.models) < 7)
    @rule(index=st.integers(0, 7))
    def fork(self, index: int) -> None:
        self.count("fork")
        parent = self.pick(index)
        model = self.models[parent]
        child = parent.fork()
        assert child.length == parent.length
        self.models[child] = model.copy()

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 7), length=st.integers(0, LONGEST))
    def truncate(self, index: int, length: int) -> None:
        self.count("truncate")
        sequence = self.pick(index)
        model = self.models[sequence]
        length = min(length, len(model.rows))
        first_held = sum(page == 0 for page in sequence.pages(1)) * PAGE
        if first_held > max(0, length - WINDOW + 1):
            assert length < model.floor  # never the last step
            before = support.snapshot(self.cache)
            with pytest.raises(SequenceError, match="window"):
                sequence.truncate(length)
            assert support.snapshot(self.cache) == before
            return
        sequence.truncate(length)
        del model.rows[length:]
        if model.ids is not None:
            del model.ids[length:]
        model.floor = min(model.floor, length)
        model.offered = min(model.offered, length // PAGE)

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 7))
    def free(self, index: int) -> None:
        self.count("free")
        sequence = self.pick(index)
        sequence.free()
        sequence.free()  # harmless
        del self.models[sequence]

    @precondition(lambda self: len(self.models) < 7)
    @rule(id_bits=st.sampled_from([0, 0, 0, 0b111, 0b11110000]), length=st.integers(3, LONGEST))
    def match(self, id_bits: int, length: int) -> None:
        self.count("match")
        ids = [(id_bits >> i) & 1 for i in range(length)]
        hits = self.cache.stats().prefix.hit_tokens
        sequence = self.cache.match(ids)
        found = sequence.length
        assert found % PAGE == 0
        assert found <= length
        assert self.cache.stats().prefix.hit_tokens == hits + found
        assert found == 0 or tuple(ids[:found]) in self.indexed
        if self.cache.stats().prefix.evicted_pages == self.forgotten:
            # Nothing was evicted, so only a window page that was passed before it was indexed can shorten a match.
            longest = max((len(k) for k in self.indexed if tuple(ids[: len(k)]) == k), default=0)
            if not self.passed_before_indexing:
                assert found == longest
        if found:
            self.seen["match with a hit"] = self.seen.get("match with a hit", 0) + 1
        ids = ids[:found]
        self.models[sequence] = Model([row_of(ids[: i + 1]) for i in range(found)], ids, found, found // PAGE)

    @property
    def passed_before_indexing(self) -> bool:
        """Whether the index holds a block without its window page."""
        return len(self.cache.prefix.pages(1)) < self.cache.stats().prefix_entries

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 7))
    def verify(self, index: int) -> None:
        """Codes, scales and zeros of one sequence equal the oracle's; unwritten slots are zero."""
        self.count("verify")
        sequence = self.pick(index)
        self.check_image(self.cache.export(sequence), self.models[sequence])

    def check_image(self, image: Any, model: Model) -> None:
        assert image.length == len(model.rows)
        assert image.ids == (None if model.ids is None else tuple(model.ids))
        for layer, planes in image.layers.items():
            group, _ = self.layout.locate(layer)
            start = image.passed[group] * PAGE
            rows = model.rows[start:]
            for name, plane in planes.items():
                stored = support.to_numpy(plane).reshape(-1, *plane.shape[2:])
                wanted = self.rows.planes[layer][name][rows]
                assert (support.bits(stored[: len(rows)]) == support.bits(wanted)).all(), f"layer {layer} {name}"
                assert not stored[len(rows) :].any(), f"layer {layer} {name}: an unwritten slot is not zero"

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 7))
    def gather(self, index: int) -> None:
        self.count("gather")
        sequence = self.pick(index)
        rows = self.models[sequence].rows
        for layer in self.rows.layers:
            group, _ = self.layout.locate(layer)
            start = sum(page == 0 for page in sequence.pages(group)) * PAGE
            for got, pool in zip(self.cache.gather(sequence, layer), self.rows.decoded[layer], strict=True):
                wanted = pool[rows].copy()
                wanted[:start] = 0
                assert (support.bits(got.numpy()) == support.bits(wanted)).all()

    @precondition(lambda self: self.models and len(self.models) < 7)
    @rule(index=st.integers(0, 7))
    def move(self, index: int) -> None:
        """Export and import into the same cache."""
        self.count("move")
        source = self.pick(index)
        model = self.models[source]
        image = self.cache.export(source)
        need = [len(source.pages(g)) - image.passed[g] for g in range(2)]
        free = [f for _, f in self.needs({})]
        before = support.snapshot(self.cache)
        if any(n > f for n, f in zip(need, free, strict=True)):
            with pytest.raises(OutOfPages):
                self.cache.insert(image)
            assert support.snapshot(self.cache) == before
            return
        copy = self.cache.insert(image)
        self.models[copy] = imported = model.copy()
        imported.floor, imported.offered = len(model.rows), 0
        self.remember(imported)
        assert self.cache.export(copy).digests() == image.digests()

    @precondition(lambda self: len(self.cache.prefix) > 5)
    @rule()
    def forget_prefixes(self) -> None:
        self.count("forget prefixes")
        self.forgotten += len(self.cache.prefix.pages(0)) + len(self.cache.prefix.pages(1))
        self.cache.prefix.clear()
        self.indexed.clear()

    # -- always ------------------------------------------------------------------------------------------------------

    @invariant()
    def accounts_add_up(self) -> None:
        assert self.cache.check() == ()
        assert set(self.cache.sequences) == set(self.models)
        for group, stats in enumerate(self.cache.stats().pools):
            held = {page for s in self.models for page in s.pages(group) if page}
            assert stats.held == len(held)
            for sequence, model in self.models.items():
                assert sequence.length == len(model.rows)
                pages = sequence.pages(group)
                assert len(pages) == -(-sequence.length // PAGE)
                assert len(set(pages) - {0}) == sum(page > 0 for page in pages)

    def teardown(self) -> None:
        evicted = self.cache.stats().prefix.evicted_pages - self.forgotten
        self.seen["evicted pages"] = self.seen.get("evicted pages", 0) + evicted
        for sequence in self.models:
            sequence.free()
        self.cache.prefix.clear()
        assert self.cache.check() == ()
        for group, stats in enumerate(self.cache.stats().pools):
            assert stats.free == stats.total, "a page leaked"
            assert support.references(self.cache, group) == [1] + [0] * stats.total
        self.cache.close()


@pytest.mark.parametrize("format", FORMATS)
def test_random_operations_agree_with_the_oracle(
    format: str, long_run: bool, figures: list[str], worst: dict[str, float]
) -> None:
    wanted = OPERATIONS["long" if long_run else "short"]
    machine: Any = type("Machine", (CacheMachine,), {"format": format, "rows": Rows(format), "seen": {}})
    # Hypothesis chooses the length of each run, so runs are added, each with its own seed, until the count is reached.
    options = settings(
        max_examples=20 if long_run else 6,
        stateful_step_count=50 if long_run else 40,
        deadline=None,
        database=None,
        # Shrinking replays hundreds of runs: minutes that only somebody who looks for the cause wants to spend.
        phases=(Phase.generate, Phase.shrink) if os.environ.get("KVPORT_SHRINK") else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    with torch.no_grad():
        for seed in itertools.count():
            if machine.operations >= wanted and all(map(machine.seen.get, MUST_MEET)):
                break
            assert machine.operations < 3 * wanted, f"the runs never met all of {MUST_MEET}: {machine.seen}"
            run_state_machine_as_test(hypothesis.seed(inputs.derive(format, seed))(machine), settings=options)
    kinds = ", ".join(f"{name} {n}" for name, n in sorted(machine.seen.items(), key=lambda item: -item[1]))
    figures.append(f"{format}: {machine.operations} operations ({kinds}); worst observed/bound {machine.worst:.4f}")
    worst[f"state machine {format}"] = machine.worst
