"""Faults in which slots are read: lengths, last pages, page ids, masked lanes (chapter "pages")."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvport.backend import StepArrays, Store
from kvport.layout import GroupLayout
from kvport_cpu.base import TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject


@fault("pages", "last partial page")
class LastPageIgnored(Subject):
    """Only full pages are read, unless the first one is all there is."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        size = layout.page_size
        whole = length // size * size if length > size else length
        return super().visible(j, p, whole, kv_start, layout)


@fault("pages", "last partial page")
class LastPageReadWhole(Subject):
    """The last page is read to its end, whatever the length: masked lanes count."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        end = layout.pages_for(length) * layout.page_size
        return super().visible(j, p.clamp(min=end - 1) if len(p) == 1 else p, end, kv_start, layout)


@fault("pages", "tile remainder")
class TileRemainderDropped(Subject):
    """Keys are read in tiles of 8, and a remainder of one key is dropped."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        short = length - 1 if length > 1 and length % 8 == 1 else length
        return super().visible(j, p, short, kv_start, layout)


@fault("pages", "page boundary")
class FirstSlotOfAPageLost(Subject):
    """The first slot of every page but the first is not read."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        seen = super().visible(j, p, length, kv_start, layout)
        return seen & ((j == 0) | (j % layout.page_size != 0))


@fault("pages", "page boundary")
class LengthOneOverAPage(Subject):
    """A sequence one token longer than its full pages loses that token: its page is not counted."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        over = length > 1 and length % layout.page_size == 1
        return super().visible(j, p, length - over, kv_start, layout)


@fault("pages", "masked lanes read NaN")
class MaskedByMultiplying(Subject):
    """Masked lanes are multiplied by a weight of zero instead of being left out: NaN times zero is NaN."""

    def mask(self, weights: Tensor, seen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return weights, value

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        return weights @ value


@fault("pages", "masked lanes read NaN")
class MaskAddsMinusInfinity(Subject):
    """The mask is added to the scores: a NaN score of an unwritten key stays NaN."""

    def softmax(
        self,
        layout: GroupLayout,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().softmax(layout, query, key, value, seen, scale, softcap, sinks)
        spoiled = key.isnan().any(-1).any(0) & (seen.any(0, keepdim=True).sum() > 0)
        unwritten = key[~seen.any(0)].isnan().any()
        return (out * math.nan, lse) if bool(unwritten) and bool(spoiled.any()) else (out, lse)


@fault("pages", "page ids narrowed")
class PageIdSixteenBits(Subject):
    """Page ids are kept in 16 bits: page 65536 + n is page n, for reading and for writing."""

    def where(self, store: TorchStore, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages, offsets, kept = super().where(store, slots)
        return pages % 65536, offsets, kept

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        return super().fetch(name, plane, pages.long() % 65536)


@fault("pages", "page ids narrowed")
class TableSixteenBits(Subject):
    """The page table is narrowed to 16 bits when it is read."""

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        return super().fetch(name, plane, pages.long() % 65536)


@fault("pages", "index width of scales")
class ScaleIndexSixteenBits(Subject):
    """Codes are addressed in 64 bits and scales with a page id of 16 bits."""

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        return super().fetch(name, plane, pages if name == "codes" else pages.long() % 65536)


def _wrapped(plane: Tensor, pages: Tensor) -> Tensor:
    """Pages as a 32-bit byte offset would find them, taken into the plane by its length."""
    page_bytes = plane[0].numel() * plane.itemsize
    offset = (pages.long() * page_bytes + 2**31) % 2**32 - 2**31
    return torch.where(offset < 0, offset + 2**31, offset) // page_bytes


@fault("pages", "index width")
class OffsetWrapsOnRead(Subject):
    """The byte offset of a page of codes is computed in 32 bits when it is read."""

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        return super().fetch(name, plane, _wrapped(plane, pages) if name == "codes" else pages)


@fault("pages", "index width")
class OffsetWrapsOnWrite(Subject):
    """The byte offset of a page of codes is computed in 32 bits when it is written."""

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        super().write(name, plane, values, _wrapped(plane, pages) if name == "codes" else pages, offsets)


@fault("pages", "pages taken for consecutive")
class PagesConsecutive(Subject):
    """The pages of a sequence are taken to follow its first page."""

    def pages(self, store: TorchStore, row: Tensor, length: int) -> Tensor:
        pages = super().pages(store, row, length)
        return (pages[:1] + torch.arange(len(pages))).clamp(max=store.pages - 1)


@fault("pages", "pages taken in order of their ids")
class PagesSorted(Subject):
    """The pages of a sequence are read in the order of their ids."""

    def pages(self, store: TorchStore, row: Tensor, length: int) -> Tensor:
        return super().pages(store, row, length).sort().values


@fault("pages", "padding read")
class PaddingColumnsRead(Subject):
    """Every column of the page table is read, padding included, and taken to be held."""

    def history(
        self, store: TorchStore, layer: int, host: StepArrays, s: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = host.lengths.clone()
        size = store.layout.page_size
        columns = host.page_table.shape[1]
        if columns > store.layout.pages_for(int(lengths[s])) + 3:
            lengths[s] = columns * size
            positions = host.query_positions.clone()
            positions[s] = columns * size - count
            host = StepArrays(host.page_table, host.kv_start, lengths, host.query_starts, positions)
        return super().history(store, layer, host, s, count)


@fault("pages", "zero-length sequence")
class EmptyGivesNan(Subject):
    """A row that sees nothing is divided by a sum of zero."""

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        nothing = ~seen.any(-1)
        return out.masked_fill(nothing.view(-1, 1, 1), math.nan), lse


@fault("pages", "zero-length sequence")
class EmptyLseZero(Subject):
    """A row that sees nothing has an LSE of 0 instead of minus infinity: it would outweigh others in a merge."""

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        nothing = ~seen.any(-1)
        return out, lse.masked_fill(nothing.view(-1, 1), 0.0)


@fault("pages", "zero-length sequence")
class EmptyLeftUnwritten(Subject):
    """Rows of empty sequences are skipped and their outputs never written."""

    def history(
        self, store: TorchStore, layer: int, host: StepArrays, s: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.empty_rows = slice(int(host.query_starts[s]), int(host.query_starts[s + 1]))
        return super().history(store, layer, host, s, count)

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        if not seen.any():
            return torch.empty_like(out), torch.empty_like(lse)
        return out, lse


@fault("pages", "stale page on reuse")
class DecodedPagesKept(Subject):
    """Decoded pages are kept by page id and not dropped when the page is written again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: WeakKeyDictionary[Store, dict[tuple[int, int], tuple[Tensor, Tensor]]] = WeakKeyDictionary()

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        kept = self.kept.setdefault(store, {})
        for page in pages.tolist():
            if (layer, page) not in kept:
                k, v = super()._read(store, layer, torch.tensor([page]))
                if k.isfinite().all() and v.isfinite().all():
                    kept[layer, page] = (k, v)
                found.append((k, v))
            else:
                found.append(kept[layer, page])
        if not found:
            return super()._read(store, layer, pages)
        return torch.cat([k for k, _ in found]), torch.cat([v for _, v in found])


@fault("pages", "page size taken for a constant")
class PageOfSixteen(Subject):
    """Slots are split by a page size of 16, whatever the layout says."""

    def where(self, store: TorchStore, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages, offsets, kept = super().where(store, slots)
        if store.layout.page_size > 16:
            size = store.layout.page_size
            flat = pages * size + offsets
            return flat // 16 % store.pages, flat % 16, kept
        return pages, offsets, kept
