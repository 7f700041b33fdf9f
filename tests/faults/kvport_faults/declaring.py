"""Faults in what a backend says of itself, and in how it behaves beyond numbers (chapter "robustness")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvport.backend import Plan, StepArrays, Store, Support
from kvport.errors import ScaleError, Unsupported
from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales
from kvport_cpu.base import TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject


@fault("robustness", "wrong refusal")
class DeclaredThenRefused(Subject):
    """support() says yes to int4, and allocate declines it."""

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        if layout.format.key.bits == 4:
            raise Unsupported("int4 is not implemented")
        return super().allocate(layout, pages, scales=scales, storage=storage)


@fault("robustness", "accepted and ignored")
class RefusedThenAccepted(Subject):
    """support() declines asymmetric formats, and allocate takes them all the same."""

    asked = False

    def support(self, layout: GroupLayout) -> Support:
        if not layout.format.key.symmetric and not self.asked:
            return Support(("asymmetric formats are not supported; use a symmetric one",))
        return super().support(layout)

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        self.asked = True
        try:
            return super().allocate(layout, pages, scales=scales, storage=storage)
        finally:
            self.asked = False


@fault("scales", "wrong refusal")
class ScalesRefusedUnannounced(Subject):
    """Static scales that are no bfloat16 numbers are declined in allocate, and support() does not say so."""

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        for layer in scales or ():
            for side in (layer.key, layer.value):
                if side is not None and bool((side.scale.bfloat16() != side.scale).any()):
                    raise ScaleError("scales must be bfloat16 numbers")
        return super().allocate(layout, pages, scales=scales, storage=storage)


@fault("scales", "accepted and ignored")
class ScaleRuleTakesNothing(Subject):
    """support() takes static formats with a rule for their scales, and allocate then declines whatever is given."""

    def support(self, layout: GroupLayout) -> Support:
        return replace(super().support(layout), scale_rule="any number" if layout.format.static else "")

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        if layout.format.static:
            raise ScaleError("these scales do not fit")
        return super().allocate(layout, pages, scales=scales, storage=storage)


@fault("robustness", "refusal without a reason")
class BlankReasons(Subject):
    """support() declines a format with an empty reason."""

    def support(self, layout: GroupLayout) -> Support:
        return Support(("",)) if layout.format.key.bits == 2 else super().support(layout)


@fault("robustness", "capability that changes")
class SupportChangesItsMind(Subject):
    """support() answers yes and no by turns."""

    turn = 0

    def support(self, layout: GroupLayout) -> Support:
        self.turn += 1
        return super().support(layout) if self.turn % 2 else replace(super().support(layout), workspace="bounded")


@fault("robustness", "capability invented")
class UnknownFeature(Subject):
    """support() declares a feature that the interface does not know."""

    def support(self, layout: GroupLayout) -> Support:
        return replace(super().support(layout), features=frozenset({"window", "telepathy"}))


@fault("robustness", "allocator's word")
class StorageCopied(Subject):
    """Storage handed in by an engine is copied and not used."""

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        copied = None if storage is None else {n: t.clone() for n, t in storage.items()}
        return super().allocate(layout, pages, scales=scales, storage=copied)


@fault("robustness", "missing companion tensor")
class IncompleteStorageAccepted(Subject):
    """Storage that lacks a tensor is completed silently."""

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        if storage is not None:
            whole = self.buffers(super().allocate(layout, pages, scales=scales))
            storage = {n: storage.get(n, t) for n, t in whole.items()}
        return super().allocate(layout, pages, scales=scales, storage=storage)


@fault("robustness", "memory did not go down")
class HistoryMaterialized(Subject):
    """The whole history is decoded at once, and the workspace is declared bounded."""

    def support(self, layout: GroupLayout) -> Support:
        return replace(super().support(layout), workspace="bounded")


@fault("robustness", "state shared between stores")
class ScratchSharedByStores(Subject):
    """Static or not, the static scales of the store allocated last serve every store."""

    latest: TorchStore | None = None

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        self.latest = super().allocate(layout, pages, scales=scales, storage=storage)
        return self.latest

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        super().write(name, plane, values, pages, offsets)
        assert self.latest is not None
        other = next(
            (p for n, p in self.latest.planes.items() if n.endswith(name) and p.shape[2:] == plane.shape[1:]), None
        )
        if other is not None and other.shape[1] == plane.shape[0]:
            other[0, pages, offsets] = values


@fault("robustness", "plans of another store")
class OnePlanForAllStores(Subject):
    """Plans are kept by the page table's shape, for all stores together."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, ...], Plan] = {}

    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        return self.tables.setdefault(tuple(arrays.page_table.shape), super().plan(store, arrays))


@fault("robustness", "facts")
class FactsAreNotStrings(Subject):
    """facts() holds numbers and None."""

    def facts(self) -> dict[str, str]:
        return {"driver": None, "cores": 4}  # type: ignore[dict-item]


@fault("robustness", "execution kind")
class ExecutionMadeUp(Subject):
    """The execution kind is a word that reports do not know."""

    execution = "native"  # type: ignore[assignment]


@fault("robustness", "precision lost on read")
class GatherThroughHalf(Subject):
    """gather in bfloat16 truncates instead of rounding."""

    def gather(
        self, store: Store, layer: int, page_table: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        key, value = super().gather(store, layer, page_table, lengths, torch.float32)
        if dtype == torch.bfloat16:
            key, value = (((t.contiguous().view(torch.int32) >> 16) << 16).view(torch.float32) for t in (key, value))
        return key.to(dtype), value.to(dtype)


@fault("robustness", "silent fallback")
class StoreOfAnotherFormat(Subject):
    """int4 is accepted and stored as int8: the store's layout is not the one that was asked for."""

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        fmt = layout.format
        if fmt.key == TensorFormat("int8") and fmt.value == fmt.key:
            half = replace(layout, format=replace(fmt, key=TensorFormat("bf16"), value=TensorFormat("bf16")))
            return super().allocate(half, pages, storage=storage)
        return super().allocate(layout, pages, scales=scales, storage=storage)


@fault("robustness", "duplicate slots after sorting")
class SlotsSortedWithoutRows(Subject):
    """Slots of a long call are sorted and their rows are not."""

    def where(self, store: TorchStore, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages, offsets, kept = super().where(store, slots)
        if len(pages) > 64:
            order = (pages * store.layout.page_size + offsets).argsort()
            return pages[order], offsets[order], kept
        return pages, offsets, kept
