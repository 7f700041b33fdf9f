"""Graphs: what the host does between replays, compared with ordinary steps bit for bit.

The reference repeats a body by running it anew over the graph's buffers, so that all of the host's side is tested here:
reserving, filling, padding, committing, refusing. Recorded work on a GPU is tested in tests/triton.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import core_support as support
import pytest
import torch
from torch import Tensor

from kvport import (
    CacheLayout,
    ClosedError,
    Graph,
    GraphBody,
    IncompleteStep,
    InvalidArgument,
    OutOfPages,
    PagedCache,
    Sequence,
    StepError,
    Support,
    Unsupported,
)
from kvport.layout import GroupLayout
from kvport_cpu.base import TorchBackend


class Inputs:
    """Static inputs of a graph of ``rows`` rows, and a body that appends and attends every layer over them."""

    def __init__(self, layout: CacheLayout, rows: int) -> None:
        self.layout = layout
        self.key, self.value, self.query = ([] for _ in range(3))  # type: ignore[var-annotated]
        for layer in range(len(layout.layers)):
            key, value = support.kv(layout, layer, 0, rows)
            self.key.append(key)
            self.value.append(value)
            self.query.append(support.queries(layout, layer, 0, rows))
        self.poison()

    def poison(self) -> None:
        for tensor in (*self.key, *self.value, *self.query):
            tensor.fill_(math.nan)

    def fill(self, tokens: Mapping[Sequence, int], seeds: Mapping[Sequence, int]) -> None:
        """Rows of a step as :func:`support.run_step` makes them; NaN in the padding."""
        self.poison()
        row = 0
        for sequence, count in tokens.items():
            rows, start = slice(row, row + count), sequence.length
            for layer in range(len(self.layout.layers)):
                seed = seeds[sequence]
                key, value = support.kv(self.layout, layer, seed, count, start)
                self.key[layer][rows], self.value[layer][rows] = key, value
                self.query[layer][rows] = support.queries(self.layout, layer, seed, count, start)
            row += count

    def body(self, step: GraphBody) -> list[tuple[Tensor, Tensor]]:
        found = []
        for layer, spec in enumerate(self.layout.layers):
            if spec.shares is None:
                step.append(layer, self.key[layer], self.value[layer])
            found.append(tuple(step.attend(layer, self.query[layer])))
        return found  # type: ignore[return-value]


def graph_of(cache: PagedCache, **limits: int) -> tuple[Graph, Inputs]:
    graph = cache.graph(**{"max_seqs": 4, "max_tokens": 12, "max_pages": 8, **limits})
    inputs = Inputs(cache.layout, graph.limits.tokens)
    graph.capture(inputs.body)
    return graph, inputs


def take(
    graph: Graph, inputs: Inputs, tokens: Mapping[Sequence, int], seeds: Mapping[Sequence, int], ids: Any = None
) -> list[tuple[Tensor, Tensor]]:
    """One replay; the results of its own rows, after the padding was found to be zeros and -inf."""
    inputs.fill(tokens, seeds)
    replay = graph.replay(dict(tokens) if ids is None else ids)
    assert replay.tokens == sum(tokens.values())
    assert [r.stop - r.start for r in replay.rows.values()] == list(tokens.values())
    for out, lse in replay.result:
        assert out.shape[0] == graph.limits.tokens
        assert not out[replay.tokens :].any()
        assert bool((lse[replay.tokens :] == -math.inf).all())
    return [(out[: replay.tokens], lse[: replay.tokens]) for out, lse in replay.result]


def equal(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for pair in zip(first, second, strict=True) for a, b in zip(*pair, strict=True))


# --- equality with ordinary steps -----------------------------------------------------------------------------------


class Twins:
    """Two caches that must agree after every operation: one takes steps by a graph, the other by ordinary steps."""

    def __init__(self, make: Callable[[], PagedCache]) -> None:
        self.caches = make(), make()
        self.graph, self.inputs = graph_of(self.caches[0])
        self.live: list[tuple[Sequence, Sequence, int]] = []  # and the seed of its stream
        self.replays = self.refused = 0

    def agree(self) -> None:
        assert support.snapshot(self.caches[0]) == support.snapshot(self.caches[1])
        for cache in self.caches:
            cache.check()

    def step(self, chosen: list[tuple[Sequence, Sequence, int]], counts: list[int], known: bool) -> None:
        seeds = ({a: seed for a, _, seed in chosen}, {b: seed for _, b, seed in chosen})
        tokens: Any = [{pair[side]: n for pair, n in zip(chosen, counts, strict=True)} for side in (0, 1)]
        ids: Any = tokens
        if known:  # one token id per stream position, so that forks and matches find each other
            ids = [
                {s: [seeds[side][s] * 1000 + s.length + i for i in range(n)] for s, n in tokens[side].items()}
                for side in (0, 1)
            ]
        refusal: OutOfPages | None = None
        try:
            want = support.run_step(self.caches[1], ids[1], seeds[1])
        except OutOfPages as error:
            refusal = error
        if refusal is not None:
            before = support.snapshot(self.caches[0])
            with pytest.raises(OutOfPages) as caught:
                self.graph.replay(ids[0])
            assert (caught.value.needed, caught.value.free) == (refusal.needed, refusal.free)
            assert support.snapshot(self.caches[0]) == before
            self.refused += 1
            return
        got = take(self.graph, self.inputs, tokens[0], seeds[0], ids[0])
        assert equal(got, want)
        self.replays += 1


LAYOUTS: dict[str, Callable[[], PagedCache]] = {
    "int8": lambda: support.uniform("int8", layers=2, page_size=4, pages=24),
    "int4-asym": lambda: support.uniform("int4:g16:asym", page_size=4, pages=20),
    "fp32-gqa1": lambda: support.uniform("fp32", page_size=8, pages=12, query_heads=2),
    "hybrid": lambda: support.open_cache(support.hybrid_layout("int8"), 24),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_operations_agree_with_ordinary_steps(layout: str, seed: int) -> None:
    choose = random.Random(seed)
    twins = Twins(LAYOUTS[layout])
    made = 0
    for turn in range(60):
        operation = choose.choice(["step"] * 6 + ["new", "fork", "truncate", "free", "match", "poison"])
        if operation == "new" or not twins.live:
            made += 1
            twins.live.append((twins.caches[0].sequence(), twins.caches[1].sequence(), made))
        elif operation == "step":
            chosen = choose.sample(twins.live, min(len(twins.live), choose.randint(1, 4)))
            counts = [choose.choice([0, 1, 1, 1, 2, 5]) for _ in chosen]
            while sum(counts) > 12:
                counts[counts.index(max(counts))] = 1
            if all(a.length + n <= 30 for (a, _, _), n in zip(chosen, counts, strict=True)):
                twins.step(chosen, counts, known=choose.random() < 0.7)
        elif operation == "fork":
            a, b, stream = choose.choice(twins.live)
            twins.live.append((a.fork(), b.fork(), stream))
        elif operation == "truncate":
            a, b, _ = choose.choice(twins.live)
            length = max(0, a.length - choose.randint(0, 6))
            refusals = []
            for sequence in (a, b):
                try:
                    sequence.truncate(length)
                except Exception as refusal:
                    refusals.append(type(refusal))
            assert len(refusals) in (0, 2)
        elif operation == "free":
            a, b, _ = twins.live.pop(choose.randrange(len(twins.live)))
            a.free()
            b.free()
        elif operation == "match":
            _, _, stream = choose.choice(twins.live)
            ids = [stream * 1000 + i for i in range(choose.randint(1, 20))]
            twins.live.append((twins.caches[0].match(ids), twins.caches[1].match(ids), stream))
        else:
            for cache in twins.caches:
                support.poison_unowned(cache)
        if turn % 4 == 0:
            twins.agree()
    twins.agree()
    assert twins.replays > 10


def test_replays_evict_and_run_out_of_pages_as_steps_do() -> None:
    twins = Twins(lambda: support.uniform("int8", page_size=4, pages=9))
    for stream in range(1, 5):  # each leaves pages to the prefix index
        pair = (twins.caches[0].sequence(), twins.caches[1].sequence(), stream)
        twins.step([pair], [9], known=True)
        twins.agree()
        for sequence in pair[:2]:
            sequence.free()
    assert twins.caches[0].stats().prefix.evicted_pages > 0
    pairs = [(twins.caches[0].sequence(), twins.caches[1].sequence(), 9 + n) for n in range(3)]
    for pair in pairs * 2:
        twins.step([pair], [8], known=False)
        twins.agree()
    assert twins.refused > 0
    pairs[0][0].free()
    pairs[0][1].free()
    twins.step([pairs[1]], [3], known=False)
    twins.agree()


@pytest.mark.parametrize(
    "format", ["int8,sink=4,recent=8", "k=int4:c8,v=int8:token,recent=8", "int8:g16,recent=4,rotate=1"]
)
def test_tiers_seal_between_replays(format: str) -> None:
    """All ranges of a tiered format are in the graph from the start, empty where nothing is sealed yet."""
    layout = CacheLayout.uniform(layers=2, kv_heads=2, query_heads=4, head_dim=32, page_size=8, format=format)
    twins = Twins(lambda: PagedCache(support.reference.load("cpu"), layout, [20, 20]))
    pairs = [(twins.caches[0].sequence(), twins.caches[1].sequence(), n) for n in (1, 2)]
    for counts in ([10, 2], [1, 1], [12, 0], [6, 6], *[[1, 1]] * 6):
        seeds = ({a: n for a, _, n in pairs}, {b: n for _, b, n in pairs})
        tokens = [{pair[side]: n for pair, n in zip(pairs, counts, strict=True)} for side in (0, 1)]
        got = take(twins.graph, twins.inputs, tokens[0], seeds[0])
        want = support.run_step(twins.caches[1], tokens[1], seeds[1])
        for ours, theirs in zip(got, want, strict=True):
            for a, b in zip(ours, theirs, strict=True):  # merged from more partials than an ordinary step has
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b, _ in pairs:
        assert a.sealed_length() == b.sealed_length()
        assert twins.caches[0].export(a).digests() == twins.caches[1].export(b).digests()
    assert pairs[0][0].sealed_length() > 8


def test_two_graphs_of_one_cache_take_turns() -> None:
    """A decode and a verify graph, and ordinary steps between their replays."""
    twins = Twins(lambda: support.uniform("int8", page_size=4, pages=24, layers=2))
    decode, inputs = graph_of(twins.caches[0], max_tokens=4, max_query=1)
    pairs = [(twins.caches[0].sequence(), twins.caches[1].sequence(), n) for n in (1, 2)]
    seeds = ({a: n for a, _, n in pairs}, {b: n for _, b, n in pairs})
    for turn in range(9):
        counts = [1, 1] if turn % 3 else [3, 2]
        tokens = [{pair[side]: n for pair, n in zip(pairs, counts, strict=True)} for side in (0, 1)]
        want = support.run_step(twins.caches[1], tokens[1], seeds[1])
        if turn % 3 == 0:
            got = take(twins.graph, twins.inputs, tokens[0], seeds[0])
        elif turn % 3 == 1:
            got = take(decode, inputs, tokens[0], seeds[0])
        else:
            got = support.run_step(twins.caches[0], tokens[0], seeds[0])
        assert equal(got, want)
        twins.agree()


# --- capture --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "int4:g16,recent=4"])
@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode_may_begin_and_end_between_replays(format: str, inside: bool) -> None:
    results = []
    for mode in (False, True):
        with torch.inference_mode(mode and inside):
            cache = support.uniform(format, page_size=4, pages=40)
            sequence = support.fill(cache, 1, 9)
            graph = cache.graph(max_seqs=1, max_tokens=2, max_pages=8)
        inputs = Inputs(cache.layout, 2)
        with torch.inference_mode(mode and inside):
            graph.capture(inputs.body)
        found = []
        for replay in range(4):
            with torch.inference_mode(mode and (replay % 2 == 0) != inside):
                found += [tuple(t.clone() for t in p) for p in take(graph, inputs, {sequence: 2}, {sequence: 1})]
        results.append(found)
    assert equal(*results)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 3, "body", [torch.ones(1)]])
def test_capture_takes_a_function(given: Any) -> None:
    cache = support.uniform("int8", page_size=4, pages=40)
    graph, inputs = graph_of(cache)
    sequence = support.fill(cache, 1, 5)
    with pytest.raises(InvalidArgument, match="capture takes a function of one argument"):
        graph.capture(given)
    take(graph, inputs, {sequence: 2}, {sequence: 1})  # what was recorded before is still there


def test_capture_leaves_everything_as_it_was() -> None:
    cache = support.uniform("int8", layers=2, page_size=4)
    sequence = support.fill(cache, 1, 7, ids=range(7))
    before = support.snapshot(cache)
    bytes_before = [{n: b[:, 1:].clone() for n, b in cache.backend.buffers(s).items()} for s in support.stores(cache)]
    graph, inputs = graph_of(cache)
    assert support.snapshot(cache) == before
    for store, old in zip(support.stores(cache), bytes_before, strict=True):
        for name, buffer in cache.backend.buffers(store).items():  # every page but the spare, bit for bit
            assert torch.equal(buffer[:, 1:].view(torch.uint8), old[name].view(torch.uint8))
    take(graph, inputs, {sequence: 1}, {sequence: 1})
    cache.check()


def test_a_body_must_append_every_layer_once() -> None:
    cache = support.uniform("int8", layers=2)
    inputs = Inputs(cache.layout, 4)
    graph = cache.graph(max_seqs=2, max_tokens=4, max_pages=4)

    def forgets(step: GraphBody) -> None:
        step.append(1, inputs.key[1], inputs.value[1])

    def repeats(step: GraphBody) -> None:
        step.append(0, inputs.key[0], inputs.value[0])
        step.append(0, inputs.key[0], inputs.value[0])

    def gathers(step: GraphBody) -> None:
        step.gather(0)

    def forks(step: GraphBody) -> None:
        cache.sequence()

    for body, error, words in (
        (forgets, IncompleteStep, "layers \\[0\\]"),
        (repeats, StepError, "already appended"),
        (gathers, Unsupported, "gather"),
        (forks, StepError, "while a step is open"),
    ):
        with pytest.raises(error, match=words):
            graph.capture(body)
        with pytest.raises(StepError, match="capture"):
            graph.replay({cache.sequence(): 1})
    graph.capture(inputs.body)
    sequence = cache.sequence()
    take(graph, inputs, {sequence: 3}, {sequence: 1})


def test_a_body_that_raises_during_a_replay_rolls_the_step_back() -> None:
    cache = support.uniform("int8", layers=2, page_size=4)
    sequence = support.fill(cache, 1, 6)
    inputs = Inputs(cache.layout, 4)
    failing = False

    def body(step: GraphBody) -> Any:
        found = inputs.body(step)
        if failing:
            raise ArithmeticError("as it were")
        return found

    graph = cache.graph(max_seqs=2, max_tokens=4, max_pages=4)
    graph.capture(body)
    before = support.snapshot(cache)
    failing = True
    with pytest.raises(ArithmeticError):
        graph.replay({sequence.fork(): 3, sequence: 1})
    assert support.snapshot(cache)["digests"][sequence.number] == before["digests"][sequence.number]
    failing = False
    cache.check()
    take(graph, inputs, {sequence: 4}, {sequence: 1})


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_a_graph_cannot_do_is_refused_before_anything_changes() -> None:
    cache = support.uniform("int8", page_size=4, pages=40)
    graph, inputs = graph_of(cache, max_seqs=2, max_tokens=6, max_pages=3, max_query=4)
    one, two, three = (support.fill(cache, n, 5) for n in range(3))
    long = support.fill(cache, 4, 12)
    before = support.snapshot(cache)
    for tokens, words in (
        ({one: 1, two: 1, three: 1}, ["3 sequences", "max_seqs is 2"]),
        ({one: 4, two: 3}, ["7 new tokens", "max_tokens is 6"]),
        ({one: 5}, ["5 new tokens of one sequence", "max_query is 4"]),
        ({long: 1}, ["4 pages of one sequence", "max_pages is 3"]),
    ):
        with pytest.raises(InvalidArgument) as caught:
            graph.replay(tokens)
        assert all(word in str(caught.value) for word in words), caught.value
        assert support.snapshot(cache) == before
    with pytest.raises(Unsupported, match="exact"):
        graph.replay({one: 1}, fresh="exact")
    with cache.step({one: 1}) as step:
        for action in (lambda: graph.replay({two: 1}), lambda: graph.capture(inputs.body)):
            with pytest.raises(StepError, match="while a step is open"):
                action()
        step.rollback()
    assert support.snapshot(cache) == before
    take(graph, inputs, {one: 2, two: 4}, {one: 0, two: 1})
    cache.close()
    with pytest.raises(ClosedError):
        graph.replay({one: 1})


@pytest.mark.parametrize("name", ["max_seqs", "max_tokens", "max_pages", "max_query"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", 2**31])
def test_limits_are_positive_integers(name: str, value: Any) -> None:
    cache = support.uniform("int8")
    with pytest.raises(InvalidArgument, match=name):
        cache.graph(**{"max_seqs": 1, "max_tokens": 1, "max_pages": 1, name: value})


class WithoutGraphs(TorchBackend):
    name = "without"

    def support(self, layout: GroupLayout) -> Support:
        return Support()


def test_a_backend_without_the_feature_is_refused_by_name() -> None:
    cache = support.uniform("int8", backend=WithoutGraphs("cpu", torch.device("cpu")))
    assert cache.info.capture == "none"
    assert support.uniform("int8").info.capture == "eager"
    with pytest.raises(Unsupported, match=r"without.*int8.*graph"):
        cache.graph(max_seqs=1, max_tokens=1, max_pages=1)


class OwnAttend(TorchBackend):
    """Inherits fixed plans, which its own attend may not know of."""

    name = "own"

    def attend(self, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return super().attend(*args, **more)


def test_fixed_plans_are_not_inherited_with_a_plan_or_attend_of_ones_own() -> None:
    layout = support.uniform("int8").layout.groups[0].layout
    assert "graph" in support.reference.load("cpu").support(layout).features
    assert "graph" not in OwnAttend("cpu", torch.device("cpu")).support(layout).features


class Recording(TorchBackend):
    """A device on which somebody records."""

    name = "recording"
    active = False

    def recording(self) -> bool:
        return self.active


def test_an_ordinary_step_cannot_be_recorded() -> None:
    """Its slots and plan would be stale at the first replay; a graph's own body can be."""
    backend = Recording("cpu", torch.device("cpu"))
    cache = support.uniform("int8", backend=backend)
    sequence = support.fill(cache, 1, 3)
    with cache.step({sequence: 1}) as step:
        backend.active = True
        with pytest.raises(StepError, match=r"stale.*cache\.graph"):
            support.append_all(step)
        backend.active = False
        support.append_all(step)
        backend.active = True
        with pytest.raises(StepError, match="stale"):
            step.attend(0, support.queries(cache.layout, 0, 1, 1))
        backend.active = False
    graph = cache.graph(max_seqs=1, max_tokens=1, max_pages=2)
    backend.active = True
    with pytest.raises(StepError, match="in progress"):
        graph.capture(lambda step: None)
