"""A correct version of every operation on any torch device: what a vendor inherits and then replaces, one at a time.

Pages are kept in the canonical planes (token-major, then head), one tensor per plane of shape
``(layers, pages, *plane.shape)``. Override :meth:`TorchBackend.allocate` and the operations that touch the store
together if your chip wants another layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvport import codec
from kvport.attention import Read, attend_sequence
from kvport.backend import Backend, Limits, Plan, StepArrays, Store, Support
from kvport.errors import InvalidArgument, Unsupported
from kvport.features import FEATURES
from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales

POISON = "poison"  # the name of the flag buffer beside the planes


class StoredSide(NamedTuple):
    """One stored part and what was chosen for it beforehand, on the device."""

    name: str
    format: TensorFormat
    static: SideScales | None
    channels: Tensor | None

    def encode(self, rows: Tensor) -> codec.Encoded:
        return codec.encode(self.format, rows, self.static, self.channels)

    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        return codec.decode(self.format, planes, self.static, channels=self.channels)


class TorchStore(Store):
    """``planes``: name -> ``(layers, pages, *shape)``; ``scales``: per layer, on the device; ``poison``: flags.

    ``paired``: where K and V are stored alike, the same memory as one tensor ``(2, layers, pages, *shape)`` by short
    name. Both sides are then appended and read in one go: on a CPU, a decode step of a small model is spent in calls.
    """

    def __init__(
        self,
        layout: GroupLayout,
        pages: int,
        planes: dict[str, Tensor],
        scales: tuple[LayerScales, ...],
        poison: Tensor | None,
        paired: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(layout, pages)
        self.planes, self.scales, self.poison = planes, scales, poison
        pairs = [{n: pair[:, layer] for n, pair in (paired or {}).items()} for layer in range(layout.layers)]
        self._pairs: list[dict[str, Tensor]] = pairs
        self._pair_rows = [{n: pair.flatten(1, 2) for n, pair in layer.items()} for layer in pairs]
        # Made once: on a CPU, looking these up anew for each layer and step costs as much as a small model's attention.
        first, second = layout.sides
        self._sides = [
            (
                StoredSide(first.name, first.format, chosen.key, chosen.key_channels),
                StoredSide(second.name, second.format, chosen.value, chosen.value_channels),
            )
            for chosen in scales
        ]
        self._views = [
            {
                side.name: {
                    name.removeprefix(f"{side.name}."): plane[layer]
                    for name, plane in planes.items()
                    if name.startswith(f"{side.name}.")
                }
                for side in (first, second)
            }
            for layer in range(layout.layers)
        ]

    def sides(self, layer: int) -> tuple[StoredSide, StoredSide]:
        """What is stored: K and V, or the latent and rope parts."""
        return self._sides[layer]

    def of_side(self, layer: int, side: str) -> dict[str, Tensor]:
        """Planes of one side of one layer by short name ("codes", "scale", "zero"), each ``(pages, P, ...)``."""
        return self._views[layer][side]

    def pair(self, layer: int) -> dict[str, Tensor]:
        """Both sides of a layer by short name, each ``(2, pages, P, ...)``; empty where they are not stored alike."""
        return self._pairs[layer]

    def pair_rows(self, layer: int) -> dict[str, Tensor]:
        """The same memory by slot: ``(2, pages * P, ...)``."""
        return self._pair_rows[layer]


class TorchBackend(Backend):
    """Every operation in plain torch. Subclasses give ``name`` and may override any operation."""

    name: ClassVar[str] = "torch"

    def __init__(self, device: str, torch_device: torch.device) -> None:
        self.device = device
        self.torch_device = torch_device

    def support(self, layout: GroupLayout) -> Support:
        # Plans of a fixed shape go with this plan and this attend; a subclass with others of its own says so itself.
        own = all(getattr(type(self), name) is getattr(TorchBackend, name) for name in ("plan", "attend"))
        return Support(features=FEATURES if own else FEATURES - {"graph"})

    def page_bytes(self, layout: GroupLayout) -> int:
        return layout.canonical_page_bytes + (layout.layers if _needs_flags(layout) else 0)

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        support = self.support(layout)
        if not support.ok:
            raise Unsupported(f"backend {self.name} cannot store {layout.format}", support.reasons)
        wanted = {p.name: ((layout.layers, pages, *p.shape), p.dtype) for p in layout.planes}
        if _needs_flags(layout):
            wanted[POISON] = ((layout.layers, pages), torch.uint8)
        paired: dict[str, Tensor] = {}
        if storage is None:
            tensors = {n: torch.empty(s, dtype=d, device=self.torch_device) for n, (s, d) in wanted.items()}
            if _alike(layout):
                first, second = layout.sides
                for name, (shape, dtype) in wanted.items():
                    if name.startswith(f"{first.name}."):
                        short = name.removeprefix(f"{first.name}.")
                        pair = torch.empty((2, *shape), dtype=dtype, device=self.torch_device)
                        tensors[name], tensors[f"{second.name}.{short}"] = pair
                        paired[short] = pair
        else:
            tensors = {n: _take(storage, n, s, d, self.torch_device) for n, (s, d) in wanted.items()}
        poison = tensors.pop(POISON, None)
        if poison is not None:
            poison.zero_()
        moved = tuple(_to_device(s, self.torch_device) for s in scales or [LayerScales()] * layout.layers)
        return TorchStore(layout, pages, tensors, moved, poison, paired)

    def buffers(self, store: Store) -> dict[str, Tensor]:
        assert isinstance(store, TorchStore)
        return store.planes if store.poison is None else {**store.planes, POISON: store.poison}

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert isinstance(store, TorchStore)
        page_size = store.layout.page_size
        if any(side.format.sealed_only for side in store.sides(layer)):
            raise Unsupported(
                f"{store.layout.format} pages are encoded whole: seal them from another store, do not append"
            )
        # A skipped row (-1) lands in slot 0 of the spare page, whose contents nobody reads: no host sync to filter.
        slots = slots.clamp(min=0)
        rows = _rows(store.layout, key, value)
        sides = store.sides(layer)
        if pair := store.pair_rows(layer):
            both = sides[0].encode(torch.stack(rows)).planes
            for name, plane in pair.items():
                plane.index_copy_(1, slots, both[name])
            return
        pages, offsets = slots // page_size, slots % page_size
        poisoned: Tensor | None = None
        for side, given in zip(sides, rows, strict=True):
            encoded = side.encode(given)
            for name, plane in store.of_side(layer, side.name).items():
                plane[pages, offsets] = encoded.planes[name]  # not through a view: storage may be strided
            if encoded.poisoned is not None:
                poisoned = encoded.poisoned if poisoned is None else poisoned | encoded.poisoned
        if poisoned is not None and store.poison is not None:
            flags = store.poison[layer]
            # A page begins anew with its first slot; only then does an old flag go. (A sum of flags would wrap.)
            begun = torch.zeros_like(flags).scatter_reduce_(0, pages, (offsets == 0).to(flags.dtype), "amax")
            flags.masked_fill_(begun > 0, 0)
            flags.scatter_reduce_(0, pages, poisoned.to(flags.dtype), "amax")

    def seal(
        self, source: Store, target: Store, layer: int, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        assert isinstance(source, TorchStore)
        assert isinstance(target, TorchStore)
        old, new = (
            torch.tensor(ids, device=self.torch_device, dtype=torch.int64) for ids in (source_pages, target_pages)
        )
        poisoned = torch.zeros(new.shape, dtype=torch.bool, device=self.torch_device)
        stored = _rows(target.layout, *self._read(source, layer, old))
        for side, rows in zip(target.sides(layer), stored, strict=True):
            encoded = side.encode(rows)
            for name, plane in target.of_side(layer, side.name).items():
                plane[new] = encoded.planes[name]
            if encoded.poisoned is not None:
                poisoned |= encoded.poisoned.any(-1)
        if target.poison is not None:
            target.poison[layer][new] = poisoned.to(torch.uint8)

    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        return Plan(arrays, arrays.to(self.torch_device))

    def attend(
        self,
        store: Store,
        layer: int,
        query: Tensor,
        plan: Plan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        partial: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(store, TorchStore)
        layout, host = store.layout, plan.host
        out = query.new_empty(
            (query.shape[0], layout.query_heads, layout.value_dim), dtype=torch.float32 if partial else query.dtype
        )
        lse = query.new_empty((query.shape[0], layout.query_heads), dtype=torch.float32)
        starts = host.query_starts.tolist()
        positions, kv_starts, lengths = (t.tolist() for t in (host.query_positions, host.kv_start, host.lengths))
        for s, (first, last) in enumerate(pairwise(starts)):
            if first == last:
                continue
            out[first:last], lse[first:last] = attend_sequence(
                self._reader(store, layer, plan.device.page_table[s]),
                query[first:last],
                kv_heads=layout.kv_heads,
                value_dim=layout.value_dim,
                page_size=layout.page_size,
                query_position=positions[s],
                kv_start=kv_starts[s],
                length=lengths[s],
                window=layout.window,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
        if starts[-1] < query.shape[0]:  # the padding of a fixed plan
            out[starts[-1] :], lse[starts[-1] :] = 0, -torch.inf
        return out, lse

    def fixed_plan(self, store: Store, limits: Limits) -> Plan:
        return self.plan(store, limits.padding())

    def refill(self, store: Store, plan: Plan, arrays: StepArrays) -> None:
        for name, given in vars(arrays).items():
            host, device = getattr(plan.host, name), getattr(plan.device, name)
            host.copy_(given)
            if device is not host:
                self.upload(host, device)

    def gather(
        self, store: Store, layer: int, page_table: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(store, TorchStore)
        longest = max(lengths, default=0)
        pages = page_table[:, : store.layout.pages_for(longest)]
        key, value = (
            t.view(pages.shape[0], pages.shape[1] * store.layout.page_size, *t.shape[2:])[:, :longest]
            for t in self._read(store, layer, pages.flatten())
        )
        for s, length in enumerate(lengths):
            if length < longest:
                key[s, length:] = 0
                value[s, length:] = 0
        return key.to(dtype), value.to(dtype)

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        old, new = (torch.tensor(ids, device=self.torch_device, dtype=torch.int64) for ids in (source, target))
        for plane in self.buffers(store).values():
            plane[:, new] = plane[:, old]

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        assert isinstance(store, TorchStore)
        index = torch.tensor(pages, device=self.torch_device, dtype=torch.int64)
        return {name: plane[layer][index].cpu() for name, plane in store.planes.items()}

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        assert isinstance(store, TorchStore)
        index = torch.tensor(pages, device=self.torch_device, dtype=torch.int64)
        for name, plane in store.planes.items():
            plane[layer][index] = planes[name].to(self.torch_device)
        if store.poison is not None:
            store.poison[layer][index] = 0

    def poisoned(self, store: Store) -> Tensor:
        assert isinstance(store, TorchStore)
        if store.poison is None:
            return torch.zeros((store.layout.layers, store.pages), dtype=torch.bool, device="cpu")
        return store.poison.cpu() > 0

    def flag_pages(self, store: Store, layer: int, pages: Sequence[int]) -> None:
        assert isinstance(store, TorchStore)
        if store.poison is not None:
            store.poison[layer][torch.tensor(pages, device=self.torch_device, dtype=torch.int64)] = 1

    def _reader(self, store: TorchStore, layer: int, pages: Tensor) -> Read:
        return lambda begin, end: self._read(store, layer, pages[begin:end])

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Decode pages ``(n,)`` to float32 K ``(n, P, kv_heads, D)`` and V, never views of the store."""
        run = _as_run(pages)
        sides = store.sides(layer)
        if run is not None and (pair := store.pair(layer)):
            found = sides[0].decode(_pick(sides[0].format, pair, 1, run)).unbind()
        else:
            found = tuple(
                side.decode(_pick(side.format, store.of_side(layer, side.name), 0, pages if run is None else run))
                for side in sides
            )
        if store.layout.latent:
            return torch.cat(found, -1), found[0]
        return found[0], found[1]


def _needs_flags(layout: GroupLayout) -> bool:
    # Only a static integer format has nowhere to keep a NaN visible.
    return any(side.format.hides_nan for side in layout.sides)


def _as_run(pages: Tensor) -> slice | None:
    """Page ids that follow one another as a slice, which picks pages without copying them.

    For the CPU alone: elsewhere, looking at the ids would wait for the device.
    """
    if pages.device.type != "cpu" or not pages.numel():
        return None
    ids = pages.tolist()
    return slice(ids[0], ids[0] + len(ids)) if ids == list(range(ids[0], ids[0] + len(ids))) else None


def _pick(fmt: TensorFormat, planes: Mapping[str, Tensor], dim: int, pages: Tensor | slice) -> dict[str, Tensor]:
    """Pages of each plane: views of a run, where decoding copies them; else copies."""
    if isinstance(pages, Tensor):
        return {name: plane.index_select(dim, pages) for name, plane in planes.items()}
    views = {name: plane.narrow(dim, pages.start, pages.stop - pages.start) for name, plane in planes.items()}
    return views if fmt.quantized else {name: view.clone() for name, view in views.items()}


def _alike(layout: GroupLayout) -> bool:
    """Whether both sides are stored in the same way, with nothing chosen beforehand that could differ."""
    first, second = layout.sides
    return first.format == second.format and first.dim == second.dim and not first.format.calibrated


def _rows(layout: GroupLayout, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of each stored side: K and V, or the latent and rope parts of K."""
    if layout.latent:
        return key[..., : layout.value_dim], key[..., layout.value_dim :]
    assert value is not None
    return key, value


def _take(
    storage: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if name not in storage:
        raise InvalidArgument(f"storage lacks {name!r}; it needs {shape} of {dtype}")
    tensor = storage[name]
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != device.type:
        raise InvalidArgument(
            f"storage {name!r} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
            f"needs {shape} {dtype} on {device}"
        )
    return tensor


def _to_device(scales: LayerScales, device: torch.device) -> LayerScales:
    def move(side: SideScales | None) -> SideScales | None:
        if side is None:
            return None
        return SideScales(side.scale.to(device), None if side.zero is None else side.zero.to(device))

    channels = [None if c is None else c.to(device) for c in (scales.key_channels, scales.value_channels)]
    return LayerScales(move(scales.key), move(scales.value), *channels)
