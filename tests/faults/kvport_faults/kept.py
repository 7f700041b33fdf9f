"""Faults of what a page holds beside codes and scales, and of latent layers: outlier channels, sparse outliers, MLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvport import codec, sparse
from kvport.backend import Store, Support
from kvport.features import FEATURES
from kvport.layout import GroupLayout
from kvport.outliers import put_channels, take_channels
from kvport.scales import LayerScales
from kvport_cpu.base import StoredSide, TorchBackend, TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject


class Complete(Subject):
    """The torch base class itself, which stores everything; ``stored`` is the class of a stored part, to be changed."""

    stored: ClassVar[type[StoredSide]] = StoredSide
    append = TorchBackend.append
    attend = TorchBackend.attend

    def support(self, layout: GroupLayout) -> Support:
        return Support(features=FEATURES)

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TorchStore:
        store = super().allocate(layout, pages, scales=scales, storage=storage)
        store._sides = [(self.stored(*first), self.stored(*second)) for first, second in store._sides]
        return store

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        return TorchBackend._read(self, store, layer, pages)


# --- outlier channels -------------------------------------------------------------------------------------------------


class _LastDropped(StoredSide):
    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        found = super().decode(planes)
        if self.channels is None:
            return found
        plain = codec.decode(dataclasses.replace(self.format, outliers=0), planes, self.static)
        last = self.channels[:, -1:]
        return put_channels(found, last, take_channels(plain, last))


@fault("attention", "outlier channel dropped", about="outliers=")
class OutlierChannelDropped(Complete):
    """The last outlier channel of each head is read from its code, not from where it is kept."""

    stored = _LastDropped


class _Stretching(StoredSide):
    def encode(self, rows: Tensor) -> codec.Encoded:
        if self.channels is None:
            return super().encode(rows)
        plain = codec.encode(dataclasses.replace(self.format, outliers=0), rows, self.static)
        return codec.Encoded({**plain.planes, "outliers": take_channels(rows.float(), self.channels)}, plain.poisoned)


@fault("append", "outliers stretch the scale")
class OutliersStretchTheScale(Complete):
    """Outlier channels are kept apart, and their groups' scales are still made to hold them."""

    stored = _Stretching


class _FirstHead(StoredSide):
    def encode(self, rows: Tensor) -> codec.Encoded:
        return super(_FirstHead, self._of_first_head()).encode(rows)

    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        return super(_FirstHead, self._of_first_head()).decode(planes)

    def _of_first_head(self) -> _FirstHead:
        return self if self.channels is None else self._replace(channels=self.channels[:1].expand_as(self.channels))


@fault("append", "granularity ignored by kernel")
class OutliersOfTheFirstHead(Complete):
    """Every head keeps the channels that were chosen for head 0."""

    stored = _FirstHead


class _Halved(StoredSide):
    def encode(self, rows: Tensor) -> codec.Encoded:
        found = super().encode(rows)
        if self.channels is not None:
            found.planes["outliers"] = found.planes["outliers"].to(torch.bfloat16).float()
        return found


@fault("append", "precision lost on write")
class OutliersInHalf(Complete):
    """Outlier channels are kept in bfloat16, whatever they arrive in."""

    stored = _Halved


# --- sparse outliers --------------------------------------------------------------------------------------------------


class _Uncounted(StoredSide):
    def encode(self, rows: Tensor) -> codec.Encoded:
        found = super().encode(rows)
        if "sparse_overflow" in found.planes:
            found.planes["sparse_overflow"] = torch.zeros_like(found.planes["sparse_overflow"])
        return found


@fault("tiers", "saturation not counted")
class SparseOverflowNotCounted(Complete):
    """Numbers beyond a static range that find no room are clipped in silence."""

    stored = _Uncounted


class _Unread(StoredSide):
    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        return codec.decode(dataclasses.replace(self.format, sparse=0), planes, self.static, channels=self.channels)


@fault("tiers", "argument ignored")
class SparseOutliersUnread(Complete):
    """Sparse outliers are stored, and attention reads the codes alone."""

    stored = _Unread


class _ChannelMajor(StoredSide):
    def encode(self, rows: Tensor) -> codec.Encoded:
        found = super().encode(rows)
        if self.format.sparse:
            index, (tokens, dim) = found.planes["sparse_index"].long(), (rows.shape[-3], rows.shape[-1])
            turned = torch.where(index < 0, tokens * dim, index % dim * tokens + index // dim)
            order = turned.argsort(-1)
            index = turned.gather(-1, order)
            found.planes["sparse_index"] = torch.where(index == tokens * dim, -1, index).to(torch.int32)
            found.planes["sparse_value"] = found.planes["sparse_value"].gather(-1, order)
        return found

    def decode(self, planes: Mapping[str, Tensor]) -> Tensor:
        if not self.format.sparse:
            return super().decode(planes)
        plain = codec.decode(dataclasses.replace(self.format, sparse=0), planes, self.static)
        index, (tokens, dim) = planes["sparse_index"].long(), (plain.shape[-3], plain.shape[-1])
        turned = torch.where(index < 0, -1, index % tokens * dim + index // tokens)
        return sparse.put(plain, turned, planes["sparse_value"])


@fault("tiers", "image order")
class SparseIndicesChannelMajor(Complete):
    """Sparse indices count channel by channel: writing and reading agree with each other and with nobody else."""

    stored = _ChannelMajor


class _ByMagnitude(StoredSide):
    def encode(self, rows: Tensor) -> codec.Encoded:
        fmt = self.format
        if not fmt.sparse or fmt.symmetric or fmt.static:
            return super().encode(rows)
        x = rows.float()
        kept = sparse.keep(x, x.abs(), torch.zeros_like(x, dtype=torch.bool), fmt.sparse)
        dense = dataclasses.replace(fmt, sparse=0)
        rest = codec.encode(dense, codec._fill(dense, x, kept.mask), self.static)
        return codec.Encoded({**rest.planes, "sparse_index": kept.index, "sparse_value": kept.value}, rest.poisoned)


@fault("tiers", "wrong outliers")
class SparseByMagnitude(Complete):
    """The largest numbers of a page are kept, also where a zero takes their common offset away."""

    stored = _ByMagnitude


# --- latent layers ----------------------------------------------------------------------------------------------------


@fault("attention", "latent V from the wrong slice")
class LatentValueFromTheEnd(Complete):
    """A latent layer's V is the last channels of K, not the first."""

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super()._read(store, layer, pages)
        return (key, key[..., key.shape[-1] - value.shape[-1] :]) if store.layout.latent else (key, value)


@fault("attention", "rope part dropped")
class RopePartUnread(Complete):
    """Scores of a latent layer leave out the rotary part."""

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super()._read(store, layer, pages)
        if store.layout.latent:
            key = key.clone()
            key[..., store.layout.value_dim :] = 0
        return key, value


class _OneFormat(StoredSide):
    def encode(self, rows: Tensor) -> codec.Encoded:
        return super().encode(rows.to(torch.bfloat16).float() if self.name == "rope" else rows)


@fault("append", "latent and rope parts by one rule", about="rope=")
class RopePartInHalf(Complete):
    """The rotary part passes through bfloat16, whatever its own format is."""

    stored = _OneFormat


# --- rotation ---------------------------------------------------------------------------------------------------------


@fault("attention", "dtype of rotated rows", about="rotate=")
class RotatedKeysRounded(Complete):
    """K is rounded to the model's dtype before it is encoded; rotated rows of a half-precision model are float32."""

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        super().append(store, layer, key.to(store.layout.dtype), value, slots)
