"""Faults that show when a step that was recorded once is replayed with others' arrays (chapter "graph")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kvport.backend import Limits, Plan, StepArrays, Store
from kvport_faults.registry import fault
from kvport_faults.subject import Subject


class Keeps(Subject):
    """A correct backend whose refills can leave some arrays as they were: correct where ``kept`` is empty."""

    kept: tuple[str, ...] = ()

    def refill(self, store: Store, plan: Plan, arrays: StepArrays) -> None:
        """The first refill is that of the recording; what a fault keeps stays as the first step made it."""
        filled = bool(plan.host.query_starts.any())
        values = {
            field.name: getattr(plan.host if filled and field.name in self.kept else arrays, field.name).clone()
            for field in fields(StepArrays)
        }
        super().refill(store, plan, StepArrays(**values))


@fault("graph", "stale plan")
class StalePlan(Keeps):
    """A replay uses the plan of the graph's first step, whole."""

    kept = ("page_table", "kv_start", "lengths", "query_starts", "query_positions")


@fault("graph", "stale plan")
class StaleLengths(Keeps):
    """Lengths are those of the graph's first step: what was appended since is not seen."""

    kept = ("lengths",)


@fault("graph", "stale table")
class StaleTable(Keeps):
    """Page tables are those of the graph's first step: pages taken since are not read."""

    kept = ("page_table",)


@fault("graph", "stale plan")
class StalePositions(Keeps):
    """The positions of the query rows are those of the graph's first step, and the causal mask with them."""

    kept = ("query_positions",)


@fault("graph", "stale batch")
class StaleRows(Keeps):
    """Which rows belong to which sequence is as in the graph's first step."""

    kept = ("query_starts",)


@fault("graph", "stale plan")
class LengthsOnlyGrow(Subject):
    """A fixed plan keeps the largest length that each of its rows ever had."""

    def refill(self, store: Store, plan: Plan, arrays: StepArrays) -> None:
        lengths = torch.maximum(arrays.lengths, plan.host.lengths)
        most = arrays.page_table.shape[1] * store.layout.page_size
        values = {field.name: getattr(arrays, field.name) for field in fields(StepArrays)}
        values["query_positions"] = arrays.query_positions + (lengths - arrays.lengths)
        super().refill(store, plan, StepArrays(**values | {"lengths": lengths.clamp(max=most)}))


@fault("graph", "stale slots")
class StaleSlots(Subject):
    """Slots are written into the graph's buffer once: every replay appends to those of its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def upload(self, host: Tensor, target: Tensor | None = None) -> Tensor:
        if target is None or target.dtype != torch.int64 or not bool((host >= 0).any()):
            return super().upload(host, target)
        if target.data_ptr() in self.written:
            return target
        self.written.add(target.data_ptr())
        return super().upload(host, target)


@fault("graph", "padding written")
class PaddingIsAppended(Subject):
    """A graph's rows of padding are appended behind the last sequence's token, into whoever's page comes next."""

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        padding = slots < 0
        if bool(padding.any()) and not bool(padding.all()):
            slots = torch.where(padding, slots[~padding][-1] + padding.cumsum(0), slots)
            slots = torch.where(slots < store.layout.page_size * store.pages, slots, -1)
        super().append(store, layer, key, value, slots)


@fault("graph", "unwritten output")
class PaddingRowsUntouched(Subject):
    """Rows of padding are left as they were allocated."""

    def pad(self, out: Tensor, lse: Tensor, first: int) -> None:
        pass


@fault("graph", "unwritten output")
class PaddingOutputOnly(Subject):
    """Rows of padding have zero outputs, and the LSE of one key with score 0."""

    def pad(self, out: Tensor, lse: Tensor, first: int) -> None:
        out[first:], lse[first:] = 0, 0


@fault("graph", "recorded data")
class ReplaysTheRecordedResult(Subject):
    """What a recording repeats is its result, not its work."""

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        result = run()
        return lambda: result


@fault("graph", "recorded data")
class ReplaysOnce(Subject):
    """The work is repeated at the first replay; the later ones find it done."""

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        found: list[Any] = []

        def repeat() -> Any:
            if not found:
                found.append(run())
            return found[0]

        return repeat


@fault("graph", "recording writes")
class RecordingWrites(Subject):
    """Padding of the recording is appended from the first page on."""

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        if len(slots) and not bool((slots >= 0).any()):
            slots = store.layout.page_size + torch.arange(len(slots))
        super().append(store, layer, key, value, slots)


@fault("graph", "plans shared")
class OnePlanForAll(Subject):
    """Fixed plans of the same limits are one plan: who fills it last fills it for all."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Limits, Plan] = {}

    def fixed_plan(self, store: Store, limits: Limits) -> Plan:
        if limits not in self.made:
            self.made[limits] = super().fixed_plan(store, limits)
        return self.made[limits]


@fault("graph", "scales of the recording")
class ScalesOfTheFirstReplay(Subject):
    """The scales of a layer are those of the graph's first token, as if they had been recorded as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[tuple[int, str], Tensor] = {}
        self.recorded = False

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded = True
        return run

    def edit(
        self, store: Any, layer: int, planes: dict[str, dict[str, Tensor]], pages: Tensor, offsets: Tensor
    ) -> None:
        for side, found in planes.items():
            if self.recorded and "scale" in found and len(found["scale"]):
                first = self.scales.setdefault((layer, side), found["scale"][:1].clone())
                found["scale"] = first.expand_as(found["scale"]).contiguous()
