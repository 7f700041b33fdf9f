"""Faults that show when sequences share, copy, roll back or reuse pages (chapter "prefix")."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvport.backend import Plan, StepArrays, Store
from kvport_cpu.base import TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject, page_index


@fault("prefix", "fork isolation")
class CopyDoesNothing(Subject):
    """Copy-on-write copies nothing: the branch starts on whatever the new page held."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        pass


@fault("prefix", "fork isolation")
class CopyBackwards(Subject):
    """Copy-on-write copies the new page over the old one."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        super().copy_pages(store, target, source)


@fault("prefix", "fork isolation")
class CopyOfFullSlotsOnly(Subject):
    """Copy-on-write copies the first half of a page."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        half = store.layout.page_size // 2 - 1
        for plane in self.buffers(store).values():
            if plane.dim() > 2:
                plane[:, page_index(target), :half] = plane[:, page_index(source), :half]


@fault("prefix", "copy without scales")
class CopyOfCodesOnly(Subject):
    """Copy-on-write leaves the branch with scales of another sequence."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        for name, plane in self.buffers(store).items():
            if "scale" not in name and "zero" not in name:
                plane[:, page_index(target)] = plane[:, page_index(source)]


@fault("prefix", "fork aliasing")
class BranchesShareTheirPages(Subject):
    """A copied page goes on naming its source: branches write into each other."""

    def __init__(self) -> None:
        super().__init__()
        self.alias: WeakKeyDictionary[Store, dict[int, int]] = WeakKeyDictionary()

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        super().copy_pages(store, source, target)
        names = self.alias.setdefault(store, {})
        names.update({new: names.get(old, old) for old, new in zip(source, target, strict=True)})

    def where(self, store: TorchStore, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages, offsets, kept = super().where(store, slots)
        names = self.alias.get(store, {})
        return torch.tensor([names.get(p, p) for p in pages.tolist()], dtype=torch.int64), offsets, kept

    def pages(self, store: TorchStore, row: Tensor, length: int) -> Tensor:
        names = self.alias.get(store, {})
        return torch.tensor([names.get(p, p) for p in super().pages(store, row, length).tolist()], dtype=torch.int64)

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        names = self.alias.get(store, {})
        return super().export_pages(store, layer, [names.get(p, p) for p in pages])


@fault("prefix", "sequences told apart by their first page")
class TableByFirstPage(Subject):
    """Sequences that begin with the same page are taken for one: the first one's table serves them all."""

    def arrays(self, plan: Plan) -> StepArrays:
        host = plan.host
        table = host.page_table.clone()
        first: dict[int, int] = {}
        for s, row in enumerate(table.tolist()):
            if row and row[0]:
                table[s] = table[first.setdefault(row[0], s)]
        return StepArrays(table, host.kv_start, host.lengths, host.query_starts, host.query_positions)


@fault("prefix", "truncated tokens leave a trace")
class FirstWriteWins(Subject):
    """A slot's scales and zeros are written once and kept, also when the slot is written again."""

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        if name != "codes" and values.is_floating_point():
            old = plane[pages, offsets]
            values = torch.where(old.isnan(), values, old)
        super().write(name, plane, values, pages, offsets)


@fault("prefix", "truncated tokens leave a trace")
class AppendsAtTheHighWaterMark(Subject):
    """A page remembers how far it was ever filled: what is written below that after a truncation is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: WeakKeyDictionary[Store, dict[tuple[int, int], int]] = WeakKeyDictionary()

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert isinstance(store, TorchStore)
        assert value is not None
        marks = self.marks.setdefault(store, {})
        size = store.layout.page_size
        kept = []
        for slot in slots.tolist():
            page, offset = divmod(slot, size)
            if slot >= 0 and offset == 0:
                marks[layer, page] = -1
            fresh = slot >= 0 and offset > marks.get((layer, page), -1)
            if fresh:
                marks[layer, page] = offset
            kept.append(slot if fresh else -1)
        super().append(store, layer, key, value, torch.tensor(kept, dtype=torch.int64))


@fault("prefix", "stale page on reuse")
class PagesRememberTheirSequence(Subject):
    """K of a page is read from a decoded copy that is refreshed only when the page's first slot is written."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: WeakKeyDictionary[Store, dict[tuple[int, int], Tensor]] = WeakKeyDictionary()

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        super().append(store, layer, key, value, slots)
        size = store.layout.page_size
        kept = self.kept.setdefault(store, {})
        for slot in slots.tolist():
            if slot % size == 0:
                kept.pop((layer, slot // size), None)

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super()._read(store, layer, pages)
        kept = self.kept.setdefault(store, {})
        for index, page in enumerate(pages.tolist()):
            if (layer, page) in kept:
                key[index] = kept[layer, page]
            elif key[index].isfinite().all():
                kept[layer, page] = key[index].clone()
        return key, value


@fault("prefix", "prefix hit loses accuracy")
class SharedPagesReadCoarsely(Subject):
    """Pages that were exported once (to a transfer layer, a digest) lose the lowest bit of every code."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        planes = super().export_pages(store, layer, pages)
        assert isinstance(store, TorchStore)
        codes = store.planes["value.codes"]
        if not codes.is_floating_point():
            codes[layer, page_index(pages)] &= -2 if codes.dtype == torch.int8 else 0xFE
        return planes


@fault("prefix", "copies of other layers")
class CopyShiftsLayers(Subject):
    """A copied page gets every layer from the layer before it."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        for plane in self.buffers(store).values():
            plane[:, page_index(target)] = plane[:, page_index(source)].roll(1, 0)
