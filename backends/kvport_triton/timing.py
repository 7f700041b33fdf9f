"""Timing the candidates of ``kvport tune``: a bounded list, one decode step, CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from kvport.backend import StepArrays
from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_triton import overrides
from kvport_triton.tuning import Tuning

if TYPE_CHECKING:
    from kvport_triton.backend import TritonBackend

#: (tile, warps, stages, waves) beside the present choice: 64 tokens a warp and a few around it, which is where the
#: H200's optimum lay in every shape looked at. More would be slower to compile than it could gain.
CANDIDATES: Final = (
    (128, 2, 3, 4),
    (128, 4, 3, 4),
    (128, 2, 2, 4),
    (64, 1, 3, 8),
    (64, 2, 3, 4),
    (64, 2, 3, 8),
    (64, 4, 3, 4),
    (64, 1, 3, 12),
)
#: A candidate must be faster than the present choice by this share: less is noise, and a table that flickers.
MARGIN: Final = 0.02
SEQUENCES: Final = 32
CONTEXT: Final = 4096
LAYERS: Final = 4


def candidates(present: Tuning) -> list[Tuning]:
    """The present choice first, then the others, at most nine in all."""
    found = [present]
    for tile, warps, stages, waves in CANDIDATES:
        shape = replace(present, tile=tile, warps=warps, stages=stages, waves=waves).fitted()
        if shape not in found:
            found.append(shape)
    return found


def choose(times: list[tuple[Tuning, float]]) -> tuple[Tuning, str]:
    """The shape to keep out of (shape, microseconds), the present choice first, and the reason in words."""
    present, now = times[0]
    best, fastest = min(times, key=lambda pair: pair[1])
    gain = 1 - fastest / now
    if best == present:
        return present, "the present choice is the fastest"
    if gain < MARGIN:
        return present, f"the fastest gains {gain:.1%}, less than {MARGIN:.0%}"
    return best, f"{gain:.1%} faster than the present choice"


def tune(backend: TritonBackend, layout: GroupLayout, gpu: str, *, keep: bool) -> Iterator[str]:
    """Time every candidate for decode over this layout; see :class:`kvport.backend.Tunable`."""
    layout = replace(layout, layers=LAYERS)
    key = overrides.key_of(gpu, layout)
    present = backend.decode_shape(layout)
    times = []
    for shape in candidates(present):
        backend.tuned[key] = shape
        try:
            took = _microseconds(backend, layout)
        except Exception as error:  # a shape that the device has no room for is no candidate
            yield f"{key}: {_words(shape)}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            if shape is present:
                raise
            continue
        finally:
            backend.tuned[key] = present
        times.append((shape, took))
        yield f"{key}: {_words(shape)}: {took:.1f} us"
    best, why = choose(times)
    backend.tuned[key] = best
    yield f"{key}: chosen {_words(best)}: {why}"
    if keep and best != present:
        yield f"{key}: written to {overrides.write({key: best})}"


def _words(shape: Tuning) -> str:
    return f"tile {shape.tile}, warps {shape.warps}, stages {shape.stages}, waves {shape.waves}"


def _microseconds(backend: TritonBackend, layout: GroupLayout) -> float:
    """Median time of one layer's decode of ``SEQUENCES`` sequences of ``CONTEXT`` tokens."""
    pages = SEQUENCES * layout.pages_for(CONTEXT)
    store = backend.allocate(layout, pages + 1, scales=_scales(layout) if layout.format.static else None)
    for name, buffer in backend.buffers(store).items():
        if name.endswith((".scale", ".zero")):
            buffer.fill_(0.02)
        elif name.endswith(".codes"):
            raw = buffer.view(torch.uint8)
            raw.random_(0, 96)  # finite in every code
    generator = torch.Generator().manual_seed(1)
    table = (torch.randperm(pages, generator=generator) + 1).to(torch.int32).view(SEQUENCES, -1)
    arrays = StepArrays(
        page_table=table,
        kv_start=torch.zeros(SEQUENCES, dtype=torch.int32),
        lengths=torch.full((SEQUENCES,), CONTEXT, dtype=torch.int32),
        query_starts=torch.arange(SEQUENCES + 1, dtype=torch.int32),
        query_positions=torch.full((SEQUENCES,), CONTEXT - 1, dtype=torch.int32),
    )
    plan = backend.plan(store, arrays)
    query = torch.ones(SEQUENCES, layout.query_heads, layout.key_dim, dtype=layout.dtype, device=backend.torch_device)

    def step() -> None:
        for layer in range(layout.layers):
            backend.attend(store, layer, query, plan, scale=0.01)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found: list[float] = []
    for number in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 2:
            found.append(begin.elapsed_time(end) * 1e3 / layout.layers)
    return statistics.median(found)


def _scales(layout: GroupLayout) -> list[LayerScales]:
    def side(fmt: TensorFormat, dim: int) -> SideScales:
        shapes: dict[str, tuple[int, ...]] = {"tensor": (), "head": (layout.kv_heads,)}
        shape = shapes.get(fmt.granularity, (layout.kv_heads, dim))
        ones = torch.full(shape, 0.02, dtype=fmt.scale_torch_dtype)
        return SideScales(ones, None if fmt.symmetric else -ones)

    key, value = layout.format.key, layout.format.value
    scales = LayerScales(
        side(key, layout.key_dim) if key.static else None, side(value, layout.value_dim) if value.static else None
    )
    return [scales] * layout.layers
