"""Robustness: refusals that say why, answers that are what they claim to be, memory that stays bounded."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from kvport.backend import OPERATIONS, Support, operations
from kvport.errors import KVPortError, Unsupported
from kvport.features import FEATURES
from kvport_conformance import allocation, bounds
from kvport_conformance.axes import (
    BASE,
    CORE,
    FORMATS,
    HALF_MODELS,
    KINDS,
    MODEL,
    every_half_model,
    families,
    geometry,
    half_kinds,
    kinds,
    product,
)
from kvport_conformance.bench import FILL, Bench, Row, group_layout
from kvport_conformance.cases import check
from kvport_conformance.tensors import fill_bytes, to_torch
from kvport_conformance.verdicts import Disagreement, NotSupported

CHAPTER: Final = "robustness"


@check(CHAPTER, product(FORMATS, (BASE, MODEL)) + every_half_model())
def honest_support(bench: Bench) -> None:
    """support() answers the same twice, names its reasons, and allocate does what it said: all of it, or refuses."""
    shape = bench.geometry
    layout = group_layout(bench.case.format, shape)
    first, second = bench.backend.support(layout), bench.backend.support(layout)
    if not isinstance(first, Support) or first != second:
        raise Disagreement(f"support() gave {first!r}, then {second!r}")
    if unknown := first.features - FEATURES:
        raise Disagreement(f"support() declares unknown features {sorted(unknown)}; known: {sorted(FEATURES)}")
    if first.workspace not in ("bounded", "history"):
        raise Disagreement(f"workspace must be 'bounded' or 'history', got {first.workspace!r}")
    contents = [bench.content(layout, layer) for layer in range(shape.layers)]
    scales = [content.scales() for content in contents] if layout.format.calibrated else None
    if first.ok:
        bench.allocate(layout, 3, scales)
        return
    if not all(isinstance(reason, str) and reason.strip() for reason in first.reasons):
        raise Disagreement(f"every reason is a sentence, got {first.reasons!r}")
    try:
        bench.backend.allocate(layout, 3, scales=scales)
    except Unsupported as refusal:
        if not refusal.reasons and not str(refusal).strip():
            raise Disagreement("allocate declined a layout without a reason") from refusal
    else:
        raise Disagreement("allocate accepted a layout that support() declines")
    raise NotSupported("; ".join(first.reasons))


@check(CHAPTER, product(("int8",), (BASE, MODEL, HALF_MODELS[0])))
def identity(bench: Bench) -> None:
    """Name, device, execution, facts and the list of native operations are there and of the right kind."""
    backend: Any = bench.backend
    for name in ("name", "device"):
        if not isinstance(getattr(backend, name, None), str) or not getattr(backend, name):
            raise Disagreement(f"{name} must be a non-empty string, got {getattr(backend, name, None)!r}")
    if backend.execution not in ("hardware", "interpreter", "emulated"):
        raise Disagreement(f"execution must be hardware, interpreter or emulated, got {backend.execution!r}")
    if not isinstance(backend.torch_device, torch.device):
        raise Disagreement(f"torch_device must be a torch.device, got {backend.torch_device!r}")
    facts = backend.facts()
    if not isinstance(facts, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in facts.items()):
        raise Disagreement(f"facts() must map strings to strings, got {facts!r}")
    found = operations(backend)
    if set(found) != set(OPERATIONS):
        raise Disagreement(f"operations() lists {sorted(found)}, must list {sorted(OPERATIONS)}")
    if not 0 <= bench.weight_error <= bounds.WEIGHT_ERROR.value:
        raise Disagreement(f"weight_error is {bench.weight_error}; at most {bounds.WEIGHT_ERROR.value} may be declared")
    bench.figures.more["weight_error"] = bench.weight_error
    if bench.exactness not in ("bit-exact", "one-code"):
        raise Disagreement(f"exactness must be 'bit-exact' or 'one-code', got {bench.exactness!r}")
    layout = bench.layout()
    held = bench.held(3, layout)
    for name, buffer in backend.buffers(held.store).items():
        if buffer.device.type != backend.torch_device.type:
            raise Disagreement(
                f"buffer {name!r} is on {buffer.device}, the backend's torch_device is {backend.torch_device}"
            )
    if held.store.layout != layout or held.store.pages != 3:
        raise Disagreement("the store does not carry the layout and the page count it was allocated with")


@check(CHAPTER, families())
def own_storage(bench: Bench) -> None:
    """A store may live in tensors that an engine hands in: nothing is copied aside, and what lacks is refused."""
    layout = bench.layout()
    size = layout.page_size
    template = bench.held(4, layout)
    storage = {name: torch.empty_like(tensor) for name, tensor in bench.backend.buffers(template.store).items()}
    for tensor in storage.values():
        fill_bytes(tensor, FILL)
    held = bench.held(4, layout, storage=storage)
    found = bench.backend.buffers(held.store)
    if {n: t.data_ptr() for n, t in found.items()} != {n: t.data_ptr() for n, t in storage.items()}:
        raise Disagreement("buffers() are not the tensors that were handed in as storage")
    held.fill_sequence([3, 1], size + 3)
    held.check()
    held.attend(1, [Row([3, 1], size + 3)], bench.queries(layout, 1))
    name = sorted(storage)[0]
    wrong = {**storage, name: storage[name][..., :1].contiguous()}
    missing = {n: t for n, t in storage.items() if n != name}
    for what, given in (("of the wrong shape", wrong), ("missing", missing)):
        try:
            bench.backend.allocate(layout, 4, scales=held.scales(), storage=given)
        except KVPortError:
            continue
        raise Disagreement(f"storage {name!r} {what} was accepted; it must be refused with a kvport error")


@check(CHAPTER, kinds(), requires=("verify",))
def two_stores(bench: Bench) -> None:
    """Stores of one backend, of the same and of other layouts, do not touch each other, nor each other's plans."""
    layout = bench.layout()
    first, second = bench.held(4, layout), bench.held(4, layout)
    other = bench.held(5, bench.layout(geometry=geometry(1, 3, 64, 32, layers=1, dtype=bench.dtype)))
    for held, stream, pages in ((first, "a", [1, 3]), (second, "b", [3, 2]), (other, "c", [4, 2])):
        held.fill_sequence(pages, held.layout.page_size + 4, stream=stream)
    plans = [
        (held, held.plan([Row(pages, held.layout.page_size + 4, 2)]))
        for held, pages in ((first, [1, 3]), (other, [4, 2]), (second, [3, 2]))
    ]
    for held, plan in (*plans, *plans[::-1]):
        held.attend(0, plan, bench.queries(held.layout, 2))
        held.check()


@check(
    CHAPTER,
    product(("int8", "fp32"), (geometry(1, 4, 64, 128, layers=1),)) + product(CORE, (MODEL,), "full"),
    requires=("verify",),
)
def bounded_workspace(bench: Bench) -> None:
    """Where the workspace is declared bounded, attend needs no more memory at 8192 tokens than at 2048."""
    layout = bench.layout()
    if bench.require(layout).workspace == "history":
        raise NotSupported("the backend declares workspace=history for this layout")
    lengths = (2048, 8192)
    held = bench.held(layout.pages_for(lengths[1]) + 1, layout)
    pages = bench.shuffled_pages(held.pages, held.pages - 1)
    for first in range(0, lengths[1], 2048):
        held.append_run(0, pages, first, first + 2048)
    query = to_torch(bench.queries(layout, 2), bench.dtype, bench.backend.torch_device)
    peaks = []
    for length in lengths:
        plan = held.plan([Row(pages[: layout.pages_for(length)], length, 2)])
        bench.backend.attend(held.store, 0, query, plan.plan, scale=0.125)
        with allocation.peak(bench.backend.torch_device) as measured:
            bench.backend.attend(held.store, 0, query, plan.plan, scale=0.125)
        peaks.append(measured.bytes)
    if peaks[0] is None or peaks[1] is None:
        return
    bench.figures.more["workspace_bytes"] = dict(zip(map(str, lengths), peaks, strict=True))
    grain = bounds.ALLOCATION_GRAINS["cpu" if bench.backend.torch_device.type == "cpu" else "device"].value
    if peaks[1] > bounds.WORKSPACE_GROWTH.value * peaks[0] + grain:
        raise Disagreement(
            f"attend allocated {peaks[0]} bytes at {lengths[0]} tokens and {peaks[1]} at {lengths[1]}: its workspace "
            "grows with the context, which has to be declared (workspace='history')"
        )


@check(CHAPTER, product(KINDS, (BASE,)) + half_kinds())
def scattered_threads(bench: Bench) -> None:
    """Slots of a call may come from many pages in any order, some skipped: each token lands in its own."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(9)
    pages = bench.shuffled_pages(9, 8)
    slots = held.slots_of(pages, 0, 8 * size)
    order = np.argsort((np.arange(8 * size) * 37) % (8 * size), kind="stable")
    slots = slots[order]
    slots[::7] = -1
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 8 * size)
        held.append(layer, key, value, slots)
    held.check()


@check(CHAPTER, product(("int8",), (BASE, HALF_MODELS[0])))
def gathered_dtypes(bench: Bench) -> None:
    """gather converts to the dtype asked for, to nearest even, and accepts int64 tables."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(4, layout)
    held.fill_sequence([2, 3], size + 3)
    table = torch.tensor([[2, 3], [2, 0]], dtype=torch.int64, device=bench.backend.torch_device)
    exact = bench.backend.gather(held.store, 0, table, [size + 3, 4], torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        for name, found, wanted in zip(
            ("key", "value"), bench.backend.gather(held.store, 0, table, [size + 3, 4], dtype), exact, strict=True
        ):
            if found.dtype != dtype or not torch.equal(found, wanted.to(dtype)):
                raise Disagreement(f"gathered {name} in {dtype} is not the float32 one rounded to it")
