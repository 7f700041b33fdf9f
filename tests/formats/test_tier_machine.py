"""Random operations on tiered caches against the replaying oracle. KVPORT_LONG=1 makes the runs long.

As in tests/core/test_state_machine.py, a token's row follows from its ids where they are known. Two groups, one with a
window, so that sealing, passing and prefix matching meet. Storage that holds no token is poisoned before every step.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import core_support as support
import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from replay import Replay, attended, gathered, open_layout, placed, poison, state

from kvport import CacheLayout, IncompleteStep, OutOfPages, PagedCache, Sequence, SequenceError
from kvport.tiers import make_lanes
from kvport_conformance import inputs

PAGE, WINDOW, LONGEST, POOL = 4, 9, 34, 512
OPERATIONS = {"long": 4000, "short": 130}
FORMATS = {
    "int8,recent=5": torch.float32,
    "int4:g8:asym,sink=3,recent=6:fp8_e4m3": torch.float32,
    "k=int2:c4:asym:scale=fp16,v=int2:g8:asym:scale=fp16,recent=2": torch.float32,
    "k=nvfp4,v=int8:c2,sink=5": torch.bfloat16,
    "k=int4:g8:asym:sparse=5,v=int2:c4:sparse=3,recent=3": torch.float32,
}


class Rows:
    """The pool of K, V and queries of every layer."""

    def __init__(self, format: str, dtype: torch.dtype) -> None:
        self.layout: CacheLayout = support.hybrid_layout(format, page_size=PAGE, window=WINDOW, dtype=dtype)
        self.layers = range(len(self.layout.layers))
        self.kv = [support.kv(self.layout, layer, 5, POOL) for layer in self.layers]
        self.query = [support.queries(self.layout, layer, 6, POOL) for layer in self.layers]


class Model:
    """What the oracle knows of a sequence: its replay by layer, and its ids, None once unknown."""

    def __init__(self, layout: CacheLayout, pin: int = 0) -> None:
        self.layout, self.pin = layout, pin
        self.replays = [Replay(layout, layer, pin) for layer in range(len(layout.layers))]
        self.ids: list[int] | None = []
        self.floor = 0  # the last step can always be truncated: its first position

    def __len__(self) -> int:
        return len(self.replays[0])

    def fork(self) -> Model:
        twin = Model(self.layout, self.pin)
        twin.replays = [replay.fork() for replay in self.replays]
        twin.ids, twin.floor = None if self.ids is None else list(self.ids), self.floor
        return twin

    def set_pin(self, pin: int) -> None:
        self.pin = pin
        for replay in self.replays:
            replay.pin = pin


class TierMachine(RuleBasedStateMachine):
    """``rows`` is set on the subclass of each format."""

    rows: ClassVar[Rows]
    operations: ClassVar[int] = 0
    worst: ClassVar[float] = 0.0
    seen: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layout = self.rows.layout
        lanes = len(make_lanes(self.layout)[0])
        self.cache: PagedCache = open_layout(self.layout, [16, 12, 22, 20][:lanes])
        self.models: dict[Sequence, Model] = {self.cache.sequence(): Model(self.layout)}
        self.fresh = itertools.count()

    def count(self, name: str) -> None:
        type(self).operations += 1
        self.seen[name] = self.seen.get(name, 0) + 1

    def pick(self, index: int) -> Sequence:
        return list(self.models)[index % len(self.models)]

    def plan(self, entries: list[tuple[int, int, int | None]]) -> tuple[dict[Sequence, list[int]], dict[Sequence, Any]]:
        """Pool rows, and what step is told (ids or a count), from drawn (sequence, count, text or None)."""
        rows: dict[Sequence, list[int]] = {}
        given: dict[Sequence, Any] = {}
        for index, count, text in entries:
            sequence = self.pick(index)
            model = self.models[sequence]
            count = min(count, LONGEST - len(model))
            if text is None or model.ids is None:
                rows[sequence] = inputs.integers(inputs.derive("row", next(self.fresh)), (count,), 0, POOL).tolist()
                given[sequence] = count
            else:
                ids = text_ids(text, len(model), count)
                rows[sequence] = [row_of([*model.ids, *ids[: i + 1]]) for i in range(count)]
                given[sequence] = ids
        return rows, given

    def write(self, rows: dict[Sequence, list[int]], given: dict[Sequence, Any], layers: list[int], fail: bool) -> None:
        """A whole step in which everything is checked; the oracles have begun."""
        models = {s: self.models[s] for s in rows}
        with self.cache.step(given) as step:
            for layer in layers:
                packed = [row for each in rows.values() for row in each]
                key, value = (side[packed] for side in self.rows.kv[layer])
                step.append(layer, key, value)
                output, lse = step.attend(layer, self.rows.query[layer][packed])
                if fail:
                    continue
                for sequence, model in models.items():
                    here, replay = step.rows[sequence], model.replays[layer]
                    replay.append(support.floats(key[here]), support.floats(value[here]))
                    if here.start < here.stop:
                        query = self.rows.query[layer][packed][here]
                        found = attended(self.layout, layer, replay, query, output[here], lse[here])
                        type(self).worst = max(self.worst, found)
            if fail:
                raise ZeroDivisionError

    texts = st.sampled_from([0, 0, 0, 1, 2, None])
    entries = st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 1, 2, 4, 7, 13]), texts), min_size=1, max_size=4
    )

    @precondition(lambda self: self.models)
    @rule(entries=entries)
    def step(self, entries: list[tuple[int, int, int | None]]) -> None:
        rows, given = self.plan(entries)
        self.count("step")
        poison(self.cache)
        before = state(self.cache)
        try:
            probe = self.cache.step(given)
        except OutOfPages:
            assert state(self.cache) == before
            self.count("refused for pages")
            return
        probe.rollback()
        for sequence in rows:
            model = self.models[sequence]
            model.floor = len(model)
            far = len(model.replays[0].far)
            for replay in model.replays:
                replay.begin()
            if len(model.replays[0].far) > far:
                self.seen["sealed"] = self.seen.get("sealed", 0) + 1
        self.write(rows, given, list(self.rows.layers), fail=False)
        for sequence in rows:
            model = self.models[sequence]
            if isinstance(given[sequence], list) and model.ids is not None:
                model.ids += given[sequence]
            elif rows[sequence]:
                model.ids = None

    decodes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2), texts), min_size=1, max_size=4)
    prompts = st.lists(st.tuples(st.integers(0, 5), st.integers(6, 17), st.integers(0, 2)), min_size=1, max_size=3)

    @precondition(lambda self: self.models)
    @rule(entries=decodes)
    def decode(self, entries: list[tuple[int, int, int | None]]) -> None:
        self.step(entries)

    @precondition(lambda self: self.models)
    @rule(entries=prompts)
    def prefill(self, entries: list[tuple[int, int, int | None]]) -> None:
        self.step(entries)

    @precondition(lambda self: self.models)
    @rule(entries=entries, layers=st.lists(st.integers(0, 2), unique=True, max_size=2), fail=st.booleans())
    def abandoned_step(self, entries: list[tuple[int, int, int | None]], layers: list[int], fail: bool) -> None:
        rows, given = self.plan(entries)
        before = state(self.cache)
        try:
            self.cache.step(given).rollback()
        except OutOfPages:
            return
        self.count("abandoned step")
        with pytest.raises(ZeroDivisionError if fail else IncompleteStep):  # noqa: PT012, SIM117
            with self.cache.step(given) as step:
                for layer in layers:
                    packed = [row for each in rows.values() for row in each]
                    step.append(layer, *(side[packed] for side in self.rows.kv[layer]))
                    step.attend(layer, self.rows.query[layer][packed])
                if fail:
                    raise ZeroDivisionError
        after = state(self.cache)
        del before["free"], after["free"]  # prefix pages may have been evicted for it
        if before["references"] == after["references"]:
            assert after == before
        assert after["sequences"] == before["sequences"]
        assert after["digests"] == before["digests"]

    @precondition(lambda self: 0 < len(self.models) < 6)
    @rule(index=st.integers(0, 5))
    def fork(self, index: int) -> None:
        self.count("fork")
        parent = self.pick(index)
        self.models[parent.fork()] = self.models[parent].fork()

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5), back=st.integers(0, LONGEST), aligned=st.booleans())
    def truncate(self, index: int, back: int, aligned: bool) -> None:
        sequence = self.pick(index)
        model = self.models[sequence]
        length = max(0, len(model) - back)
        length = length // PAGE * PAGE if aligned else length
        passed = sum(far == near == 0 for far, near in zip(sequence.pages(1), sequence.pages(1, "near"), strict=True))
        if passed * PAGE > max(0, length - WINDOW + 1) or (length < model.replays[0].at_rest and length % PAGE):
            assert length < model.floor  # never the last step
            before = state(self.cache)
            with pytest.raises(SequenceError):
                sequence.truncate(length)
            assert state(self.cache) == before
            self.count("refused truncate")
            return
        self.count("truncate below the seal" if length < model.replays[0].at_rest else "truncate")
        sequence.truncate(length)
        for replay in model.replays:
            replay.truncate(length)
        if model.ids is not None:
            del model.ids[length:]
        model.floor = min(model.floor, length)

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5))
    def free(self, index: int) -> None:
        self.count("free")
        sequence = self.pick(index)
        sequence.free()
        del self.models[sequence]

    @precondition(lambda self: len(self.models) < 6)
    @rule(text=st.sampled_from([0, 0, 0, 1, 2]), length=st.integers(0, LONGEST), pin=st.sampled_from([0, 0, 0, 6]))
    def match(self, text: int, length: int, pin: int) -> None:
        ids = text_ids(text, 0, length)
        sequence = self.cache.match(ids, pin=pin)
        found = sequence.length
        self.count("match with a hit" if found else "match")
        assert found % PAGE == 0
        assert found <= max(0, (length - self.layout.format.recent) // PAGE * PAGE)
        model = self.models[sequence] = Model(self.layout, pin)
        model.ids, model.floor = ids[:found], found
        rows = [row_of(ids[: i + 1]) for i in range(found)]
        for layer, replay in enumerate(model.replays):
            replay.append(*(support.floats(side[rows]) for side in self.rows.kv[layer]))
            replay.at_rest = found
            head = max(self.layout.format.sink, pin)
            replay.far = {page for page in range(found // PAGE) if page * PAGE >= head}

    @precondition(lambda self: self.models)
    @rule(index=st.integers(0, 5), more=st.integers(0, 9))
    def pin(self, index: int, more: int) -> None:
        sequence = self.pick(index)
        model = self.models[sequence]
        wanted = model.pin + more
        head, pages = (-(-max(self.layout.format.sink, p) // PAGE) for p in (model.pin, wanted))
        if pages > head and model.replays[0].at_rest > head * PAGE:
            with pytest.raises(SequenceError, match="sealed"):
                sequence.pin(wanted)
            self.count("refused pin")
            return
        self.count("pin")
        sequence.pin(wanted)
        model.set_pin(wanted)

    @precondition(lambda self: 0 < len(self.models) < 6)
    @rule(index=st.integers(0, 5))
    def transfer(self, index: int) -> None:
        sequence = self.pick(index)
        image = self.cache.export(sequence)
        try:
            twin = self.cache.insert(image)
        except OutOfPages:
            return
        self.count("transfer")
        assert self.cache.export(twin).digests() == image.digests()
        self.models[twin] = self.models[sequence].fork()

    @invariant()
    def everything_reads_back(self) -> None:
        assert self.cache.check() == ()
        for sequence, model in self.models.items():
            assert sequence.length == len(model)
            for group, members in enumerate(self.layout.groups):
                letters, wanted = placed(self.cache, sequence, group), model.replays[members.layers[0]].tiers()
                passed = letters.count("-") if members.layout.window else 0
                assert letters[passed:] == wanted[passed:]
                assert sequence.sealed_length(group) == model.replays[0].at_rest
            if len(model):
                layer = next(self.fresh) % len(self.rows.layers)
                dense = list(self.cache.gather(sequence, layer, torch.float32))
                gathered(self.cache, layer, sequence, model.replays[layer], dense)

    def teardown(self) -> None:
        for sequence in self.models:
            sequence.free()
        self.cache.prefix.clear()
        assert self.cache.check() == ()
        assert all(pool.free == pool.total for pool in self.cache._pools), "a page leaked"


def text_ids(text: int, first: int, count: int) -> list[int]:
    """Ids ``first`` .. of one of three texts that have 11 tokens in common."""
    return [0 if i < 11 else text for i in range(first, first + count)]


def row_of(ids: list[int]) -> int:
    """The pool row of the last of these tokens, which depends on all of them."""
    return inputs.derive("row", *ids) % POOL


@pytest.mark.parametrize("format", FORMATS)
def test_random_operations_agree_with_the_replay(format: str, long_run: bool) -> None:
    wanted = OPERATIONS["long" if long_run else "short"]
    kinds = {"step", "sealed", "match with a hit", "abandoned step", "fork", "truncate", "transfer"}
    if long_run:
        kinds |= {"refused for pages", "truncate below the seal", "refused truncate", "refused pin"}
    rows = Rows(format, FORMATS[format])
    machine: Any = type("Machine", (TierMachine,), {"rows": rows, "seen": {}})
    options = settings(
        max_examples=20 if long_run else 4,
        stateful_step_count=50 if long_run else 30,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    # Hypothesis switches rules off at random, so runs are added, each with its own seed, until all have been taken.
    for seed in range(1000 if long_run else 20):
        if machine.operations >= wanted and kinds <= machine.seen.keys():
            break
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=options)
    print(format, machine.operations, machine.seen, f"worst observed/bound {machine.worst:.4f}")
    assert not kinds - machine.seen.keys()
