"""Graphs over Triton's kernels: launches of a fixed shape, filled anew for every step.

Everywhere the host's side and the kernels run over plans of a fixed shape; on a GPU the same tests replay a CUDA graph.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvport import CacheLayout, Graph, GraphBody, LayerSpec, OutOfPages, PagedCache, Sequence, StepError
from kvport.backend import Backend, Limits, StepArrays
from kvport.formats import CacheFormat
from kvport_conformance import inputs, oracle_attention

DEVICE = os.environ.get("KVPORT_TRITON_DEVICE", "cpu")
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Model:
    """A cache of equal layers and static inputs of ``rows`` rows, token t of stream s the same in every step."""

    def __init__(self, backend: Backend, text: str, rows: int, *, pages: int | list[int] = 24, layers: int = 2,
                 heads: int = 1, group: int = 2, dim: int = 32, page_size: int = 16, window: int | None = None,
                 dtype: torch.dtype = torch.float16) -> None:  # fmt: skip
        spec = LayerSpec(kv_heads=heads, query_heads=heads * group, key_dim=dim, value_dim=dim, window=window)
        self.layout = CacheLayout((spec,) * layers, CacheFormat.parse(text), page_size, dtype)
        self.cache = PagedCache(backend, self.layout, [pages] if isinstance(pages, int) else pages)
        for store in self.cache._stores:
            for name, buffer in backend.buffers(store).items():
                if name != "poison":
                    buffer.view(torch.uint8).fill_(0xFF)
        device, self.dtype, self.shape = backend.torch_device, dtype, (heads, heads * group, dim)
        self.query = torch.full((layers, rows, heads * group, dim), math.nan, dtype=dtype, device=device)
        self.key = torch.full((layers, rows, heads, dim), math.nan, dtype=dtype, device=device)
        self.value = torch.full_like(self.key, math.nan)
        self.seeds: dict[Sequence, int] = {}

    def sequence(self, seed: int) -> Sequence:
        made = self.cache.sequence()
        self.seeds[made] = seed
        return made

    def fork(self, sequence: Sequence, seed: int) -> Sequence:
        made = sequence.fork()
        self.seeds[made] = seed
        return made

    def rows(self, seed: int, layer: int, start: int, count: int) -> list[Tensor]:
        heads, query_heads, dim = self.shape
        seed = inputs.derive(seed, layer)
        made = (
            inputs.key(seed, (count, heads, dim), start=start),
            inputs.value(seed, (count, heads, dim), start=start),
            inputs.query(seed, (count, query_heads, dim), start=start),
        )
        return [torch.from_numpy(x).to(self.dtype) for x in made]

    def fill(self, tokens: dict[Sequence, int]) -> None:
        """This step's rows, and NaN in the padding."""
        for buffer in (self.key, self.value, self.query):
            buffer.fill_(math.nan)
        row = 0
        for sequence, count in tokens.items():
            for layer in range(self.key.shape[0]):
                made = self.rows(self.seeds[sequence], layer, sequence.length, count)
                for buffer, rows in zip((self.key, self.value, self.query), made, strict=True):
                    buffer[layer, row : row + count] = rows.to(buffer.device)
            row += count

    def body(self, step: Any, **how: Any) -> list[tuple[Tensor, Tensor]]:
        found = []
        for layer in range(self.key.shape[0]):
            step.append(layer, self.key[layer, : step.tokens], self.value[layer, : step.tokens])
            found.append(tuple(step.attend(layer, self.query[layer, : step.tokens], **how)))
        return found  # type: ignore[return-value]

    def graph(self, **limits: int) -> Graph:
        graph = self.cache.graph(**{"max_pages": 8, "max_tokens": self.key.shape[1], **limits})
        graph.capture(self.body)
        return graph

    def replay(self, graph: Graph, tokens: dict[Sequence, int]) -> list[tuple[Tensor, Tensor]]:
        self.fill(tokens)
        replay = graph.replay(tokens)
        found = []
        for out, lse in replay.result:
            assert not out[replay.tokens :].any(), "padding rows are zeros"
            assert bool((lse[replay.tokens :] == -math.inf).all())
            found.append((out[: replay.tokens].clone(), lse[: replay.tokens].clone()))
        return found

    def step(self, tokens: dict[Sequence, int]) -> list[tuple[Tensor, Tensor]]:
        self.fill(tokens)
        with self.cache.step(tokens) as step:
            return self.body(step)

    def worst(self, results: list[tuple[Tensor, Tensor]], tokens: dict[Sequence, int]) -> float:
        """Observed / bound against float64 attention over the decoded pages, of the step just taken."""
        worst, row = 0.0, 0
        for sequence, count in tokens.items():
            rows = slice(row, row := row + count)
            for layer, (out, lse) in enumerate(results):
                key, value = (t.float().cpu().numpy() for t in self.cache.gather(sequence, layer, torch.float32))
                query = self.query[layer, rows].float().cpu().numpy()
                given: dict[str, Any] = {
                    "scale": self.shape[2] ** -0.5,
                    "window": self.layout.layers[0].window,
                    "query_start": sequence.length - count,
                }
                want = oracle_attention.attend(query, key, value, **given)
                bound = oracle_attention.attention_bound(query, key, value, query_dtype=NAMES[self.dtype], **given)
                for got, exact, allowed in zip((out[rows], lse[rows]), want, bound, strict=True):
                    seen = oracle_attention.observed_over_bound(got.float().cpu().numpy(), exact, allowed)
                    worst = max(worst, seen)
        return worst


def same(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def agree(model: Model, twin: Model, graph: Graph, counts: list[tuple[Sequence, Sequence, int]], *, bits: bool) -> None:
    """One replay beside one ordinary step of a twin, and float64 for both."""
    tokens = {a: n for a, _, n in counts}
    got = model.replay(graph, tokens)
    want = twin.step({b: n for _, b, n in counts})
    assert not bits or same(got, want)
    assert model.worst(got, tokens) <= 1
    for a, b, _ in counts:
        assert model.cache.export(a).digests() == twin.cache.export(b).digests()


def append(model: Model, sequence: Sequence, count: int) -> None:
    """An ordinary step that only appends."""
    with model.cache.step({sequence: count}) as step:
        for layer in range(model.key.shape[0]):
            key, value, _ = model.rows(model.seeds[sequence], layer, sequence.length, count)
            step.append(layer, key.to(model.key.device), value.to(model.key.device))


# The codes, native and exact kernels, scales of every kind, and both ways of splitting K and V.
DECODE = [
    ("int8", torch.float16),
    ("int4:g16:asym", torch.bfloat16),
    ("int8:g16", torch.float32),
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
]


@pytest.mark.parametrize(("text", "dtype"), DECODE, ids=str)
def test_decode_replays_equal_ordinary_steps(backend: Backend, text: str, dtype: torch.dtype) -> None:
    """Lengths, tables, page ids, data and the batch change between replays; the launches were recorded once."""
    model, twin = (Model(backend, text, 4, dtype=dtype, layers=1) for _ in range(2))
    graph = model.graph(max_seqs=4, max_query=1)
    pairs = [(model.sequence(n), twin.sequence(n)) for n in range(3)]
    for (a, b), n in zip(pairs, (40, 3, 16), strict=True):  # prompts that no graph takes part in
        append(model, a, n)
        append(twin, b, n)
    agree(model, twin, graph, [(*pair, 1) for pair in pairs], bits=True)
    agree(model, twin, graph, [(*pairs[2], 1)], bits=True)  # fewer sequences: three rows of padding
    pairs[0][0].truncate(9), pairs[0][1].truncate(9)  # shorter than when it was last attended
    fork = model.fork(pairs[2][0], 7), twin.fork(pairs[2][1], 7)
    agree(model, twin, graph, [(*fork, 1), (*pairs[2], 1), (*pairs[0], 1), (*pairs[1], 1)], bits=True)
    pairs[1][0].free(), pairs[1][1].free()  # and its pages are used by others
    fresh = model.sequence(9), twin.sequence(9)
    agree(model, twin, graph, [(*fresh, 1), (*fork, 1)], bits=True)
    model.cache.check()


@pytest.mark.parametrize("text", ["int8", "bf16"])
def test_verify_and_prefill_replays(backend: Backend, text: str) -> None:
    """All kinds of launches in one graph: a prompt, verification of drafts and decode share a batch."""
    model, twin = (Model(backend, text, 26, dtype=torch.bfloat16, layers=1, window=40) for _ in range(2))
    graph = model.graph(max_seqs=3)
    pairs = [(model.sequence(n), twin.sequence(n)) for n in range(3)]
    kinds = {launch.kind for launch in graph._body._groups[0].plans[0][1].private.launches}
    assert kinds == {"decode", "verify", "prefill"}
    for counts in ([20, 3, 1], [0, 16, 2], [1, 1, 1], [2, 0, 17]):
        agree(model, twin, graph, [(*pair, n) for pair, n in zip(pairs, counts, strict=True)], bits=False)


def test_tiers_seal_between_replays(backend: Backend) -> None:
    """A tiered format seals between replays; every range is in the graph from the start."""
    pages = [20, 20]
    model, twin = (Model(backend, "int8,sink=16,recent=16", 12, pages=pages, layers=1) for _ in range(2))
    graph = model.graph(max_seqs=2)
    pairs = [(model.sequence(n), twin.sequence(n)) for n in range(2)]
    for n in (31, 20):  # what is left to seal is sealed when replays begin
        for one, whose in zip((model, twin), pairs[0], strict=True):
            append(one, whose, n)
    assert pairs[0][0].sealed_length() == 0
    for counts in ([12, 0], [1, 3], [1, 1]):
        agree(model, twin, graph, [(*pair, n) for pair, n in zip(pairs, counts, strict=True)], bits=False)
    assert pairs[0][0].sealed_length() == 48


def test_runs_are_split_by_the_lengths_of_the_step(backend: Backend) -> None:
    """The grid is the largest step's; a long run is split and merged, a short one is not."""
    model, twin = (Model(backend, "int8", 2, layers=1, pages=90, page_size=16, dim=16, group=4) for _ in range(2))
    graph = model.graph(max_seqs=2, max_query=1, max_pages=48)
    pair = model.sequence(1), twin.sequence(1)
    append(model, pair[0], 700)
    append(twin, pair[1], 700)
    short = model.sequence(2), twin.sequence(2)
    fixed = graph._body._groups[0].plans[0][1].private.fixed

    def splits() -> int:
        ordinary = model.cache.backend.plan(model.cache._stores[0], fixed.arrays)
        return sum(launch.partials for launch in ordinary.private.launches)

    agree(model, twin, graph, [(*pair, 1)], bits=True)
    assert splits() > 1
    agree(model, twin, graph, [(*short, 1)], bits=True)
    assert splits() == 0
    agree(model, twin, graph, [(*pair, 1), (*short, 1)], bits=True)


def test_another_query_dtype_gets_a_fixed_plan_of_its_own(backend: Backend) -> None:
    """A layer that asks in float32 over a float16 layout has tiles of its own; they are filled anew as well."""
    model = Model(backend, "int8", 2, layers=1)
    query = torch.zeros((2, 2, 32), device=backend.torch_device)

    def body(step: GraphBody) -> Any:
        step.append(0, model.key[0], model.value[0])
        return step.attend(0, query), step.attend(0, model.query[0])

    graph = model.cache.graph(max_seqs=2, max_tokens=2, max_pages=4, max_query=1)
    graph.capture(body)
    one, two = model.sequence(1), model.sequence(2)
    for tokens in ({one: 1}, {one: 1, two: 1}, {two: 1}):
        model.fill(tokens)
        query.copy_(torch.nan_to_num(model.query[0].float()))
        wide, narrow = graph.replay(tokens).result
        n = sum(tokens.values())
        torch.testing.assert_close(wide.output[:n], narrow.output[:n].float(), rtol=4e-3, atol=4e-3)
        assert not wide.output[n:].any()


def test_poison_flags_are_raised_by_replays(backend: Backend) -> None:
    """A NaN that a static integer format cannot store is reported, and padding rows of NaN are not."""
    from kvport import LayerScales, SideScales

    model = Model(backend, "int8", 3, layers=1)
    scales = {0: LayerScales(SideScales(torch.tensor(0.05)), SideScales(torch.tensor(0.03)))}
    layout = CacheLayout(model.layout.layers, CacheFormat.parse("int8:tensor:static"), 16, torch.float16)
    model.cache = PagedCache(backend, layout, [8], scales=scales)
    graph = model.graph(max_seqs=2)
    sequence = model.sequence(1)
    model.replay(graph, {sequence: 2})
    assert model.cache.check() == ()
    model.fill({sequence: 1})
    model.key[0, 0, 0, 3] = math.nan
    graph.replay({sequence: 1})
    [found] = model.cache.check()
    assert (found.sequence, found.layer, found.position) == (sequence, 0, 0)


def test_room_suffices_for_any_step(backend: Backend) -> None:
    """Random steps within random limits never need more items, blocks or partials than the launches have."""
    from kvport_triton.planning import Shape, prepare_fixed

    choose = np.random.default_rng(5)
    split = 0
    for _ in range(300):
        sequences, group, heads = (int(choose.integers(1, n)) for n in (9, 9, 9))
        limits = Limits(sequences, int(choose.integers(1, 90)), 90, int(choose.integers(6, 70)))
        shapes = {
            kind: Shape(int(choose.choice([16, 32, 128])), int(choose.choice([32, 64, 128])), int(programs))
            for kind, programs in zip(("decode", "verify", "prefill"), choose.integers(1, 600, 3), strict=True)
        }
        _, prepared = prepare_fixed(
            limits, torch.device("cpu"), group=group, kv_heads=heads, window=None, page_size=16, shapes=shapes,
            most_verify=16,
        )  # fmt: skip
        assert prepared.fixed is not None
        for _ in range(4):
            arrays = limits.padding()
            counts = choose.multinomial(int(choose.integers(0, limits.tokens + 1)), np.ones(sequences) / sequences)
            history = choose.integers(0, limits.pages * 16, sequences) * choose.integers(0, 2, sequences)
            lengths = np.minimum(counts + history, limits.pages * 16)
            arrays.lengths[:] = torch.from_numpy(lengths)
            arrays.query_positions[:] = torch.from_numpy(lengths - counts)
            arrays.query_starts[1:] = torch.from_numpy(np.cumsum(counts))
            content = prepared.fixed.pack(arrays).numpy()
            rows = np.zeros(limits.tokens, np.int64)
            for launch in prepared.launches:
                items = content[prepared.fixed.places[f"{launch.kind}.items"]].reshape(-1, 10)
                blocks = content[prepared.fixed.places[f"{launch.kind}.blocks"]].reshape(-1, 4)
                split += int((blocks[:, 1] > 0).sum())
                for row, tokens in {(int(i[1]), int(i[2])) for i in items if i[2]}:
                    rows[row : row + tokens] += 1
            assert bool((rows == 1).all()), "every row, padding included, is written once"
    assert split > 100


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.hardware
def test_a_recorded_step_is_a_cuda_graph(backend: Backend) -> None:
    """The body's Python runs at capture and never again; nothing in a replay waits for the device."""
    model = Model(backend, "int8", 4, dtype=torch.bfloat16, dim=128, group=4, page_size=64)
    assert model.cache.info.capture == "cuda graph"
    calls = 0

    def body(step: GraphBody) -> Any:
        nonlocal calls
        calls += 1
        return model.body(step)

    graph = model.cache.graph(max_seqs=4, max_tokens=4, max_pages=8, max_query=1)
    graph.capture(body)
    recorded = calls
    one, two = model.sequence(1), model.sequence(2)
    model.replay(graph, {one: 1})
    model.fill({one: 1, two: 1})
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay({one: 1, two: 1})
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert calls == recorded


@pytest.mark.hardware
def test_a_recording_outlives_the_garbage_of_others(backend: Backend) -> None:
    """Graphs that only the collector can free are not destroyed while another is recorded, which that would end."""
    for _ in range(3):
        model = Model(backend, "int8", 8, dtype=torch.bfloat16, dim=64, heads=2, group=4, layers=2, pages=40)
        graph = model.graph(max_seqs=2, max_query=1, max_pages=4)
        model.replay(graph, {model.sequence(1): 1})
        cycle: list[Any] = [graph, model]
        cycle.append(cycle)
        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            del cycle, graph, model
            other = Model(backend, "int8", 8, dtype=torch.bfloat16, dim=64, heads=2, group=4, layers=2, pages=40)
            again = other.graph(max_seqs=2, max_query=1, max_pages=4)
        finally:
            gc.set_threshold(*before)
        other.replay(again, {other.sequence(1): 1})
        assert gc.isenabled()


@pytest.mark.hardware
def test_replays_run_ahead_of_the_device(backend: Backend) -> None:
    """Many replays in the queue at once: no step's arrays are overwritten before the device has read them."""
    model, twin = (
        Model(backend, "int8", 8, dtype=torch.bfloat16, dim=128, heads=2, group=4, layers=4, page_size=16, pages=400)
        for _ in range(2)
    )
    graph = model.graph(max_seqs=8, max_query=1, max_pages=32)
    pairs = [(model.sequence(n), twin.sequence(n)) for n in range(8)]
    # All inputs are made beforehand: a copy from the host's ordinary memory would wait for the device.
    lengths, made = [0] * 8, []
    for turn in range(24):
        rows = [[model.rows(n, layer, lengths[n], 1) for n in range(1 + turn % 8)] for layer in range(4)]
        packed = [torch.stack([torch.cat([row[i] for row in layer]) for layer in rows]) for i in range(3)]
        made.append([part.to(backend.torch_device) for part in packed])
        for n in range(1 + turn % 8):
            lengths[n] += 1

    def take_all() -> tuple[list[list[tuple[Tensor, Tensor]]], bool]:
        """The results of every turn, and whether the host was eight steps ahead of the device."""
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # about 0.2 s, in which the host takes all the steps
        slept, ahead, taken = torch.cuda.Event(), False, []
        slept.record()
        for turn, given in enumerate(made):
            for buffer, rows in zip((model.key, model.value, model.query), given, strict=True):
                buffer[:, : rows.shape[1]] = rows
            replay = graph.replay({a: 1 for a, _ in pairs[: 1 + turn % 8]})
            taken.append([(out[: replay.tokens].clone(), lse[: replay.tokens].clone()) for out, lse in replay.result])
            ahead |= turn >= 8 and not slept.query()
        torch.cuda.synchronize()
        return taken, ahead

    take_all()  # pinned memory is made at first use, and making it may wait for the device
    for a, _ in pairs:
        a.truncate(0)
    taken, ahead = take_all()
    assert ahead, "the steps were meant to queue up"
    for turn in range(24):
        assert same(taken[turn], twin.step({b: 1 for _, b in pairs[: 1 + turn % 8]})), turn
    for a, b in pairs:
        assert model.cache.export(a).digests() == twin.cache.export(b).digests()


@pytest.mark.hardware
@pytest.mark.parametrize("text", ["int8", "int4:g64"])
def test_long_decode_on_a_gpu(backend: Backend, text: str) -> None:
    """Splits over many multiprocessors, merged; lengths that shrink, grow and swap between replays."""
    shape: dict[str, Any] = {"dim": 128, "heads": 8, "group": 4, "page_size": 64, "pages": 400, "layers": 1}
    model, twin = (Model(backend, text, 4, dtype=torch.bfloat16, **shape) for _ in range(2))
    graph = model.graph(max_seqs=4, max_query=1, max_pages=140)
    pairs = [(model.sequence(n), twin.sequence(n)) for n in range(3)]
    for (a, b), n in zip(pairs, (8000, 700, 65), strict=True):
        append(model, a, n)
        append(twin, b, n)
    agree(model, twin, graph, [(*pair, 1) for pair in pairs], bits=True)
    agree(model, twin, graph, [(*pairs[1], 1)], bits=True)
    for sequence in pairs[0]:
        sequence.truncate(130)
    agree(model, twin, graph, [(*pairs[2], 1), (*pairs[0], 1)], bits=True)
    agree(model, twin, graph, [(*pairs[0], 1), (*pairs[1], 1), (*pairs[2], 1)], bits=True)


WAITS = """
import sys, torch, kvport

cache = kvport.open(sys.argv[1], format="int8", layers=1, kv_heads=1, head_dim=32, page_size=16, tokens=64)
row = torch.zeros((1, 1, 32), device=cache.backend.torch_device)
graph = cache.graph(max_seqs=1, max_tokens=1, max_pages=2)
def waits(step):
    step.append(0, row, row)
    return step.attend(0, row).output.sum().item()
try:
    graph.capture(waits)
except kvport.StepError as refusal:
    assert "cannot be recorded" in str(refusal), refusal
    sequence = cache.sequence()
    try:
        graph.replay({sequence: 1})
    except kvport.StepError:
        cache.check()
        print("refused")
"""


@pytest.mark.hardware
def test_a_body_that_waits_for_the_device_is_refused() -> None:
    """In a process of its own: what a failed recording leaves of a CUDA context is not for other tests to find out."""
    found = subprocess.run([sys.executable, "-c", WAITS, DEVICE], capture_output=True, text=True, timeout=120)
    assert "refused" in found.stdout, found.stdout + found.stderr


@pytest.mark.hardware
def test_an_ordinary_step_is_not_recorded(backend: Backend) -> None:
    model = Model(backend, "int8", 2, layers=1)
    graph = model.cache.graph(max_seqs=2, max_tokens=2, max_pages=4)
    sequence = model.sequence(1)
    step = model.cache.step({sequence: 1})

    def record() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model.key.zero_()  # an empty recording would be warned of
            step.append(0, model.key[0, :1], model.value[0, :1])

    with pytest.raises(StepError, match="stale"):
        record()
    step.rollback()
    graph.capture(model.body)
    model.replay(graph, {sequence: 2})
    with model.cache.step({model.sequence(1): 170, model.sequence(2): 155}) as step:  # leaves one page of 23
        rows = torch.zeros((325, 1, 32), dtype=model.dtype, device=backend.torch_device)
        step.append(0, rows, rows)
    before = model.cache.stats()
    with pytest.raises(OutOfPages):
        graph.replay({model.sequence(3): 1, model.sequence(4): 1})
    assert model.cache.stats().pools == before.pools
    model.cache.check()


def test_padding_has_the_full_shape() -> None:
    arrays = Limits(3, 5, 2, 7).padding()
    assert isinstance(arrays, StepArrays)
    assert arrays.page_table.shape == (3, 7)
    assert arrays.query_starts.tolist() == [0] * 4
