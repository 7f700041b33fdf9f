"""Faults in what is kept and given back: scales, zeros, images, hidden copies (chapter "scales")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvport.backend import Store
from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_cpu.base import TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject, page_index


@fault("scales", "copy without scales")
class CopyWithoutScales(Subject):
    """Copying a page copies its codes and leaves scales and zeros behind."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        for name, plane in self.buffers(store).items():
            if name.endswith(".codes"):
                plane[:, page_index(target)] = plane[:, page_index(source)]


@fault("scales", "copy of one layer")
class CopyOfFirstLayer(Subject):
    """Copying a page copies its first layer only."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        for plane in self.buffers(store).values():
            plane[0, page_index(target)] = plane[0, page_index(source)]


@fault("scales", "copy spills")
class CopySpillsOver(Subject):
    """Copying a page writes the page behind the target as well."""

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        for plane in self.buffers(store).values():
            spill = (page_index(target) + 1).clamp(max=store.pages - 1)
            plane[:, spill] = plane[:, page_index(source)]
        super().copy_pages(store, source, target)


@fault("scales", "transfer drops zeros")
class ExportWithoutZeros(Subject):
    """Exported zeros are all 0."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        planes = super().export_pages(store, layer, pages)
        return {n: torch.zeros_like(t) if n.endswith(".zero") else t for n, t in planes.items()}


@fault("scales", "transfer drops scales")
class ImportWithoutScales(Subject):
    """Importing a page keeps the scales that were there."""

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        kept = super().export_pages(store, layer, pages)
        super().import_pages(
            store, layer, pages, {n: t if n.endswith(".codes") else kept[n] for n, t in planes.items()}
        )


@fault("scales", "transfer drops scales")
class ScalesExportedAsHalf(Subject):
    """Scales pass through bfloat16 on their way out."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        planes = super().export_pages(store, layer, pages)
        return {
            n: t.to(torch.bfloat16).to(t.dtype) if n.endswith("scale") and t.dtype == torch.float32 else t
            for n, t in planes.items()
        }


@fault("scales", "imported codes requantized")
class ImportRequantizes(Subject):
    """Imported pages are decoded and encoded again: codes that no encoder would make change."""

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        super().import_pages(store, layer, pages, planes)
        assert isinstance(store, TorchStore)
        key, value = self._read(store, layer, page_index(pages))
        if not len(pages):
            return
        for side, rows in (("key", key), ("value", value)):
            fmt, static = self.side(store, layer, side)
            encoded, _ = self.encode(side, fmt, rows.flatten(0, 1), static)
            for name, plane in store.of_side(layer, side).items():
                plane[page_index(pages)] = encoded[name].view(len(pages), -1, *encoded[name].shape[1:]).to(plane.dtype)


class Shadow(Subject):
    """Keeps a copy of K and V beside the store, by store and layer, and reads from it."""

    quantized = False

    def __init__(self) -> None:
        super().__init__()
        self.shadow: WeakKeyDictionary[Store, dict[int, tuple[Tensor, Tensor]]] = WeakKeyDictionary()

    def rows_of(self, store: TorchStore, layer: int) -> tuple[Tensor, Tensor]:
        layout = store.layout
        layers = self.shadow.setdefault(store, {})
        if layer not in layers:
            shape = (store.pages, layout.page_size, layout.kv_heads)
            layers[layer] = (
                torch.full((*shape, layout.key_dim), torch.nan),
                torch.full((*shape, layout.value_dim), torch.nan),
            )
        return layers[layer]

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert isinstance(store, TorchStore)
        assert value is not None
        super().append(store, layer, key, value, slots)
        pages, offsets, kept = self.where(store, slots)
        k, v = self.rows_of(store, layer)
        if self.quantized:
            decoded = super()._read(store, layer, pages)
            rows = torch.arange(len(pages))
            k[pages, offsets], v[pages, offsets] = (t[rows, offsets] for t in decoded)
        else:
            k[pages, offsets], v[pages, offsets] = key[kept].float(), value[kept].float()

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        assert isinstance(store, TorchStore)
        super().import_pages(store, layer, pages, planes)
        k, v = self.rows_of(store, layer)
        index = page_index(pages)
        k[index], v[index] = super()._read(store, layer, index)

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        assert isinstance(store, TorchStore)
        super().copy_pages(store, source, target)
        for layer in range(store.layout.layers):
            for rows in self.rows_of(store, layer):
                rows[page_index(target)] = rows[page_index(source)]

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.rows_of(store, layer)
        return k[pages.long()], v[pages.long()]


@fault("scales", "float shadow copy")
class FloatShadow(Shadow):
    """K and V are kept in full precision and quantized for the pages only: attention never reads a code."""


@fault("scales", "float shadow copy")
class DecodedShadow(Shadow):
    """A decoded copy of every token is kept beside the pages and attended to: the pages are for show."""

    quantized = True


@fault("scales", "V falls back to K")
class ValueReadWithKeyScale(Subject):
    """V is decoded with K's scale."""

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super()._read(store, layer, pages)
        planes = store.of_side(layer, "value")
        other = store.of_side(layer, "key")
        if "scale" in planes and "scale" in other and planes["scale"].shape == other["scale"].shape:
            fmt, static = self.side(store, layer, "value")
            mine = {n: self.fetch(n, p, pages) for n, p in planes.items()}
            mine["scale"] = self.fetch("scale", other["scale"], pages).to(mine["scale"].dtype)
            value = self.decode("value", fmt, mine, static)
        return key, value


@fault("scales", "granularity ignored by kernel")
class FirstHeadsScaleRead(Subject):
    """Every head is decoded with the first head's scale."""

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        found = super().fetch(name, plane, pages)
        if name == "scale" and found.is_floating_point():
            return found[:, :, :1].expand(found.shape)
        return found


@fault("scales", "granularity ignored by kernel")
class FirstGroupsScaleRead(Subject):
    """Every group of a head is decoded with the scale of its first group."""

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        found = super().fetch(name, plane, pages)
        return found[..., :1].expand(found.shape) if name == "scale" and found.dim() == 4 else found


@fault("scales", "granularity ignored by kernel")
class PagesFirstScaleRead(Subject):
    """Every token of a page is decoded with the scale of the page's first slot."""

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        found = super().fetch(name, plane, pages)
        return found[:, :1].expand(found.shape) if name == "scale" and found.is_floating_point() else found


@fault("scales", "scale precision lost on read")
class ScaleReadAsHalf(Subject):
    """float32 scales are read in bfloat16."""

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        found = super().fetch(name, plane, pages)
        return found.to(torch.bfloat16).float() if name == "scale" and found.dtype == torch.float32 else found


@fault("scales", "offset dropped")
class ZeroDroppedOnRead(Subject):
    """The zero of asymmetric formats is not added back."""

    def decode(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor], static: SideScales | None) -> Tensor:
        if "zero" in planes:
            planes = {**planes, "zero": torch.zeros_like(planes["zero"])}
        return super().decode(side, fmt, planes, static)


@fault("scales", "offset sign")
class ZeroSubtractedOnRead(Subject):
    """The zero is subtracted when decoding: another system's convention."""

    def decode(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor], static: SideScales | None) -> Tensor:
        if "zero" in planes:
            planes = {**planes, "zero": -planes["zero"]}
        return super().decode(side, fmt, planes, static)


@fault("scales", "decoder refuses a code")
class LowestCodeClamped(Subject):
    """A stored code of -128 is read as -127."""

    def decode(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor], static: SideScales | None) -> Tensor:
        if fmt.code == "int8" and fmt.symmetric:
            planes = {**planes, "codes": planes["codes"].clamp(min=-127)}
        return super().decode(side, fmt, planes, static)


@fault("scales", "page size ignores scales")
class PageBytesWithoutScales(Subject):
    """page_bytes counts codes only."""

    def page_bytes(self, layout: GroupLayout) -> int:
        return layout.layers * sum(p.nbytes for p in layout.planes if p.name.endswith(".codes"))


@fault("scales", "hidden memory")
class BuffersHideScales(Subject):
    """buffers() and page_bytes leave out the scales, and agree with each other."""

    def buffers(self, store: Store) -> dict[str, Tensor]:
        return {n: t for n, t in super().buffers(store).items() if n.endswith(".codes")}

    def page_bytes(self, layout: GroupLayout) -> int:
        return layout.layers * sum(p.nbytes for p in layout.planes if p.name.endswith(".codes"))


@fault("scales", "hidden memory")
class UndeclaredCopy(Subject):
    """Every store keeps a float32 array as large as its tokens that buffers() does not list."""

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        store = super().allocate(layout, pages, scales=scales, storage=storage)
        if pages < 1000:
            store.hidden = torch.zeros(layout.layers, pages, layout.page_size, layout.kv_heads, layout.key_dim)  # type: ignore[attr-defined]
        return store


class Rescaled(Subject):
    """Changes the static scales that a store is given."""

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        changed = None if scales is None else [self.change(layer) for layer in self.order(list(scales))]
        return super().allocate(layout, pages, scales=changed, storage=storage)

    def order(self, scales: list[LayerScales]) -> list[LayerScales]:
        return scales

    def change(self, scales: LayerScales) -> LayerScales:
        return scales


@fault("scales", "scale overwritten by default")
class StaticScalesReset(Rescaled):
    """Calibrated scales are replaced by 1."""

    def change(self, scales: LayerScales) -> LayerScales:
        def one(side: SideScales | None) -> SideScales | None:
            return None if side is None else replace(side, scale=torch.ones_like(side.scale))

        return LayerScales(one(scales.key), one(scales.value))


@fault("scales", "V falls back to K")
class StaticValueScaleFromKey(Rescaled):
    """V uses K's calibrated scales."""

    def change(self, scales: LayerScales) -> LayerScales:
        if scales.key is None or scales.value is None or scales.key.scale.shape != scales.value.scale.shape:
            return scales
        return LayerScales(scales.key, replace(scales.value, scale=scales.key.scale))


@fault("scales", "layer mixed up")
class StaticScalesOfFirstLayer(Rescaled):
    """Every layer uses the calibrated scales of the first."""

    def order(self, scales: list[LayerScales]) -> list[LayerScales]:
        return [scales[0]] * len(scales)


@fault("scales", "granularity ignored by kernel")
class StaticScalePerHeadAsScalar(Rescaled):
    """Calibrated scales per head or channel are read as one number, the first."""

    def change(self, scales: LayerScales) -> LayerScales:
        def first(side: SideScales | None) -> SideScales | None:
            if side is None:
                return None
            return replace(side, scale=side.scale.flatten()[:1].expand(side.scale.numel()).reshape(side.scale.shape))

        return LayerScales(first(scales.key), first(scales.value))


@fault("scales", "poison flag lost")
class FlagNeverRaised(Subject):
    """A NaN in a static integer format is stored as code 0 and nobody is told."""

    def flag(self, flags: Tensor, pages: Tensor, offsets: Tensor, flagged: Tensor) -> None:
        flags[pages[offsets == 0]] = 0


@fault("scales", "poison flag lost")
class FlagNotSticky(Subject):
    """Any later write to a flagged page lowers its flag."""

    def flag(self, flags: Tensor, pages: Tensor, offsets: Tensor, flagged: Tensor) -> None:
        flags[pages] = 0
        flags[pages[flagged]] = 1


@fault("scales", "poison flag stuck")
class FlagNeverLowered(Subject):
    """A page's flag stays up when the page is begun anew."""

    def flag(self, flags: Tensor, pages: Tensor, offsets: Tensor, flagged: Tensor) -> None:
        unknown = flags[pages] > 1  # bytes that the suite filled in
        flags[pages[unknown]] = 0
        flags[pages[flagged]] = 1


@fault("scales", "poison spreads")
class FlagsTheLayer(Subject):
    """A NaN flags every page of the layer."""

    def flag(self, flags: Tensor, pages: Tensor, offsets: Tensor, flagged: Tensor) -> None:
        super().flag(flags, pages, offsets, flagged)
        if flagged.any():
            flags.fill_(1)


@fault("scales", "K/V swap")
class GatherSwaps(Subject):
    """gather returns V as K and K as V."""

    def gather(
        self, store: Store, layer: int, page_table: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        key, value = super().gather(store, layer, page_table, lengths, dtype)
        return (value, key) if key.shape == value.shape else (key, value)


@fault("scales", "masked lanes returned")
class GatherKeepsTheTail(Subject):
    """gather returns what lies past a length instead of zeros."""

    def gather(
        self, store: Store, layer: int, page_table: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        longest = max(lengths, default=0)
        return super().gather(store, layer, page_table, [longest] * len(lengths), dtype)
