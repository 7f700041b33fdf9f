"""Faults of images and imports (chapter "transfer") and of sealing (chapter "tiers")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvport import codec
from kvport.backend import Store
from kvport_cpu.base import TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject, page_index


@fault("transfer", "image order")
class ImageHeadMajor(Subject):
    """Images are head-major: exporting and importing agree with each other and with nobody else."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        planes = super().export_pages(store, layer, pages)
        return {n: t.transpose(1, 2).contiguous().view(t.shape) for n, t in planes.items()}

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        turned = {
            n: t.contiguous().view(t.shape[0], t.shape[2], t.shape[1], *t.shape[3:]).transpose(1, 2)
            for n, t in planes.items()
        }
        super().import_pages(store, layer, pages, turned)


@fault("transfer", "image order")
class ImportInOrderOfIds(Subject):
    """Imported pages are placed in the order of their ids."""

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        super().import_pages(store, layer, sorted(pages), planes)


@fault("transfer", "image order")
class ExportInOrderOfIds(Subject):
    """Exported pages come in the order of their ids."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        return super().export_pages(store, layer, sorted(pages))


@fault("transfer", "layer mixed up")
class ImportToEveryLayer(Subject):
    """An import writes the pages of every layer."""

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        for other in range(store.layout.layers):
            super().import_pages(store, other, pages, planes)


@fault("transfer", "truncated page")
class LastSlotNotExported(Subject):
    """The last slot of a page is cut off its image."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        planes = super().export_pages(store, layer, pages)
        for tensor in planes.values():
            tensor[:, -1] = 0
        return planes


@fault("transfer", "truncated page")
class OneScaleNotImported(Subject):
    """The scales of the last slot of a page do not arrive."""

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        assert isinstance(store, TorchStore)
        kept = super().export_pages(store, layer, pages)
        changed = {}
        for name, tensor in planes.items():
            changed[name] = tensor
            if not name.endswith(".codes"):
                changed[name] = torch.cat([tensor[:, :-1], kept[name][:, -1:]], 1)
        super().import_pages(store, layer, pages, changed)


@fault("transfer", "image aliases the store")
class ImageIsAView(Subject):
    """An exported image shares memory with the page: later tokens change it."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        assert isinstance(store, TorchStore)
        ids = list(pages)
        if ids == list(range(ids[0], ids[0] + len(ids))) if ids else False:
            return {n: plane[layer, ids[0] : ids[0] + len(ids)] for n, plane in store.planes.items()}
        return super().export_pages(store, layer, pages)


@fault("transfer", "transfer drops scales")
class ImportScalesRounded(Subject):
    """Imported scales pass through bfloat16."""

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        rounded = {
            n: t.to(torch.bfloat16).to(t.dtype) if n.endswith("scale") and t.dtype == torch.float32 else t
            for n, t in planes.items()
        }
        super().import_pages(store, layer, pages, rounded)


@fault("transfer", "import spills")
class ImportClearsThePool(Subject):
    """An import clears the page behind the last one it writes."""

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        assert isinstance(store, TorchStore)
        if len(pages) and max(pages) + 1 < store.pages:
            for plane in store.planes.values():
                plane[layer, max(pages) + 1] = 0
        super().import_pages(store, layer, pages, planes)


# --- sealing ----------------------------------------------------------------------------------------------------------


class Sealing(Subject):
    """Seals correctly; the steps are methods."""

    def seal(
        self, source: Store, target: Store, layer: int, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        assert isinstance(source, TorchStore)
        assert isinstance(target, TorchStore)
        if not len(source_pages):
            return
        key, value = self._read(source, layer, page_index(self.order(source_pages)))
        for side, rows in (("key", key), ("value", value)):
            fmt, static = self.side(target, layer, side)
            encoded = codec.encode(fmt, self.sealed_rows(side, rows), static).planes
            for name, plane in target.of_side(layer, side).items():
                self.put(side, name, plane, encoded[name], page_index(target_pages))

    def order(self, pages: Sequence[int]) -> Sequence[int]:
        return pages

    def sealed_rows(self, side: str, rows: Tensor) -> Tensor:
        return rows

    def put(self, side: str, name: str, plane: Tensor, values: Tensor, pages: Tensor) -> None:
        plane[pages] = values


@fault("tiers", "sealing")
class SealsKeysOnly(Sealing):
    """Sealing encodes K and forgets V."""

    def put(self, side: str, name: str, plane: Tensor, values: Tensor, pages: Tensor) -> None:
        if side == "key":
            super().put(side, name, plane, values, pages)


@fault("tiers", "sealing")
class SealsInOrderOfIds(Sealing):
    """Sealed pages are taken in the order of their ids."""

    def order(self, pages: Sequence[int]) -> Sequence[int]:
        return sorted(pages)


@fault("tiers", "sealing")
class SealsAllButTheLastSlot(Sealing):
    """The last slot of a page is not sealed."""

    def put(self, side: str, name: str, plane: Tensor, values: Tensor, pages: Tensor) -> None:
        plane[pages, : plane.shape[1] - 1] = values[:, :-1]


@fault("tiers", "sealing")
class SealsFromHalf(Sealing):
    """Sealing reads the higher-precision page in bfloat16."""

    def sealed_rows(self, side: str, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).float()


@fault("tiers", "sealing")
class SealsCodesOnly(Sealing):
    """Sealing writes codes and leaves the scales of whatever was there."""

    def put(self, side: str, name: str, plane: Tensor, values: Tensor, pages: Tensor) -> None:
        if name == "codes":
            super().put(side, name, plane, values, pages)


@fault("tiers", "sealing")
class SealClearsItsSource(Subject):
    """Sealing clears the page it read, which a sibling may still hold."""

    def seal(
        self, source: Store, target: Store, layer: int, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        super().seal(source, target, layer, source_pages, target_pages)
        assert isinstance(source, TorchStore)
        for plane in source.planes.values():
            plane[layer, page_index(source_pages)] = 0


@fault("tiers", "groups across pages")
class ChannelGroupsOverThePage(Sealing):
    """Groups of N tokens share the scale of the page's first group."""

    def put(self, side: str, name: str, plane: Tensor, values: Tensor, pages: Tensor) -> None:
        if name == "scale" and values.is_floating_point() and values.dim() == 4:
            values = values[:, :1].expand(values.shape)
        super().put(side, name, plane, values, pages)


@fault("tiers", "granularity ignored by kernel")
class ChannelScalesAveraged(Sealing):
    """A scale per channel is replaced by the head's largest."""

    def put(self, side: str, name: str, plane: Tensor, values: Tensor, pages: Tensor) -> None:
        if name == "scale" and values.dim() == 4 and values.is_floating_point():
            values = values.amax(-1, keepdim=True).expand(values.shape)
        super().put(side, name, plane, values, pages)


@fault("tiers", "merge")
class PartialLseShifted(Subject):
    """Partials of short parts come with an LSE that is a little too small: tiers are weighted wrongly."""

    def log_sum(self, total: Tensor, top: Tensor) -> Tensor:
        return super().log_sum(total, top) - 0.01
