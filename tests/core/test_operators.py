"""append and attend inside functions that torch.compile traces, and as registered operators of torch."""

from __future__ import annotations

from typing import Any

import core_support as support
import pytest
import torch
from torch import Tensor

from kvport import (
    Attention,
    CacheFormat,
    CacheLayout,
    ClosedError,
    GraphBody,
    InvalidArgument,
    LayerSpec,
    PagedCache,
    Sequence,
    StepError,
    operators,
)


def layer_of_model(step: Any, layer: int, key: Tensor, value: Tensor, query: Tensor) -> Attention:
    """What a model's attention layer does around the cache."""
    step.append(layer, key * 2, value)
    found = step.attend(layer, query + 1, scale=0.3)
    return Attention(found.output * 0.5, found.lse)


def run(function: Any, cache: PagedCache, tokens: dict[Sequence, int], seed: int) -> list[Attention]:
    found = []
    starts = {s: s.length for s in tokens}
    with cache.step(tokens) as step:
        for layer in range(len(cache.layout.layers)):
            rows = [
                (*support.kv(cache.layout, layer, seed, n, starts[s]), support.queries(cache.layout, layer, seed, n))
                for s, n in tokens.items()
            ]
            found.append(function(step, layer, *(torch.cat(part) for part in zip(*rows, strict=True))))
    return found


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_equals_the_plain_one(backend: str) -> None:
    """Whole graphs, and the same ones again: new steps, lengths, tables and counts are no reason to compile anew."""
    from torch._dynamo.testing import CompileCounterWithBackend  # here: two seconds for every process of a parallel run

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer_of_model, backend=counter, fullgraph=True, dynamic=True)
    caches = [support.uniform("int8", layers=3, page_size=4, pages=30) for _ in range(2)]
    sequences = [[cache.sequence(), cache.sequence()] for cache in caches]
    for turn, counts in enumerate(([5, 2], [2, 3], [3, 2], [2, 7], [4, 4])):
        made = [
            run(function, cache, dict(zip(own, counts, strict=True)), turn)
            for function, cache, own in zip((compiled, layer_of_model), caches, sequences, strict=True)
        ]
        for ours, theirs in zip(*made, strict=True):
            assert torch.equal(ours.output, theirs.output)
            assert torch.equal(ours.lse, theirs.lse)
        if turn == 0:
            first = counter.frame_count
    assert counter.frame_count == first <= 2  # the layer number becomes a variable with its second value
    for one, two in zip(*sequences, strict=True):
        assert support.same_pages((caches[0], one), (caches[1], two))


def test_layers_of_different_width() -> None:
    layout = CacheLayout(
        (LayerSpec(2, 4, 32, 32), LayerSpec(2, 4, 32, 64), LayerSpec(2, 2, 32, 16)), CacheFormat.parse("int8"), 8
    )
    compiled = torch.compile(layer_of_model, backend="aot_eager", fullgraph=True)
    caches = [support.open_cache(layout, 8) for _ in range(2)]
    made = [run(f, c, {c.sequence(): 3}, 1) for f, c in zip((compiled, layer_of_model), caches, strict=True)]
    assert [found.output.shape[2] for found in made[0]] == [32, 64, 16]
    assert all(torch.equal(a.output, b.output) for a, b in zip(*made, strict=True))


def test_the_compiler_keeps_append_before_attend() -> None:
    """Two appends and two attends in one traced function, whose results depend on their order alone."""

    def both(step: Any, key: Tensor, value: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        step.append(0, key, value)
        first = step.attend(0, query).output
        step.append(1, key + 1, value * 3)
        return first, step.attend(1, query).output

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    caches = [support.uniform("int4:g16", layers=2) for _ in range(2)]
    outputs = []
    for function, cache in zip((both, compiled), caches, strict=True):
        rows = (*support.kv(cache.layout, 0, 1, 3), support.queries(cache.layout, 0, 1, 3))
        with cache.step({cache.sequence(): 3}) as step:
            outputs.append(function(step, *rows))
    for plain, traced in zip(*outputs, strict=True):
        assert torch.equal(plain, traced)


def test_a_graph_takes_a_compiled_body() -> None:
    cache, plain = (support.uniform("int8", layers=2, page_size=4, pages=20) for _ in range(2))
    compiled = torch.compile(layer_of_model, backend="aot_eager", fullgraph=True)
    layers = range(2)
    rows = [(*support.kv(cache.layout, i, 5, 3), support.queries(cache.layout, i, 5, 3)) for i in layers]

    def body(step: GraphBody) -> list[Attention]:
        return [compiled(step, layer, *rows[layer]) for layer in layers]

    graph = cache.graph(max_seqs=1, max_tokens=3, max_pages=8)
    graph.capture(body)
    ours, theirs = cache.sequence(), plain.sequence()
    for _ in range(3):
        replay = graph.replay({ours: 3})
        with plain.step({theirs: 3}) as step:
            want = [layer_of_model(step, layer, *rows[layer]) for layer in layers]
        for got, expected in zip(replay.result, want, strict=True):
            assert torch.equal(got.output, expected.output)
    assert support.same_pages((cache, ours), (plain, theirs))


def test_the_rules_of_a_step_hold_in_compiled_functions() -> None:
    def append(step: Any, key: Tensor, value: Tensor) -> None:
        step.append(0, key, value)

    compiled = torch.compile(append, backend="eager", fullgraph=True)
    cache = support.uniform("int8", layers=1)
    sequence = cache.sequence()
    key, value = support.kv(cache.layout, 0, 1, 2)
    with cache.step({sequence: 2}) as step:
        compiled(step, key, value)
        with pytest.raises(StepError, match="already appended"):
            compiled(step, key, value)
    with pytest.raises(StepError, match="ended"):
        compiled(step, key, value)
    with pytest.raises(InvalidArgument, match="this layer and step need"), cache.step({sequence: 1}) as step:
        compiled(step, key, value)
    assert sequence.length == 2
    with pytest.raises(InvalidArgument, match="requires grad"), cache.step({sequence: 2}) as step:
        torch.compile(append, backend="eager")(step, key.requires_grad_(), value)
    assert sequence.length == 2


class Forgetful(set[int]):
    """opcheck calls an operator more than once; the rule that a layer is appended once is not what it is about."""

    def __contains__(self, layer: object) -> bool:
        return False

    def add(self, layer: int) -> None:
        pass


@pytest.mark.parametrize("format", ["int8", "fp32"])
def test_opcheck(format: str) -> None:
    cache = support.uniform(format, layers=1)
    key, value = support.kv(cache.layout, 0, 1, 3)
    query = support.queries(cache.layout, 0, 1, 3)
    sinks = torch.zeros(4)
    with cache.step({cache.sequence(): 3}) as step:
        appended, step._appended = step._appended, Forgetful()
        torch.library.opcheck(operators.append, (cache._order, cache._number, 0, key, value))
        step._appended = appended
        step.append(0, key, value)
        for more in ((None, None, None), (0.5, 3.0, sinks)):
            torch.library.opcheck(operators.attend, (cache._order, cache._number, 0, query, 32, *more))


def test_operators_find_no_cache_that_is_gone() -> None:
    cache = support.uniform("int8")
    order, number = cache._order, cache._number
    with pytest.raises(StepError, match="ended"):
        operators.append(order, number, 0, order, None)
    cache.close()
    del cache
    with pytest.raises(ClosedError, match="gone"):
        operators.append(order, number, 0, order, None)


def test_a_compiler_may_not_record_a_step_by_itself() -> None:
    """A CUDA graph that inductor records on its own would keep one step's slots and plan."""
    for operator in (operators.append, operators.attend):
        assert torch.Tag.cudagraph_unsafe in operator._opoverload.tags
