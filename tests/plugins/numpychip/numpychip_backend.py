"""The work behind the numpychip plugin. It shares no code with kvport's codec or with the torch base class.

A store is one array of bytes ``(layers, pages, page_bytes)``. Inside a page lie, one after the other, the planes of K
and then of V, each *head-major* (head, then slot), which is not the canonical order; a flag byte; and padding to a
multiple of 64 bytes, which is declared through page_bytes. numpy has no bfloat16, so half-precision planes that are not
float16 are uint16 bit patterns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvport.backend import Backend, Plan, StepArrays, Store, Support
from kvport.errors import InvalidArgument, Unsupported
from kvport.formats import TensorFormat
from kvport.hookspecs import Probe
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
INTEGERS = ("int8", "int4", "int2")
FLOATS = ("fp32", "fp16", "bf16")
LIMIT = np.float32(2.0**125)


# --- floats ---------------------------------------------------------------------------------------------------------


def to_bf16(x: Array, *, down: bool = False) -> Array:
    """float32 to bfloat16 bits: to nearest even, or toward minus infinity. NaN becomes 0x7FC0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    floored = (bits >> 16) + ((bits >> 31 == 1) & (bits & 0xFFFF != 0))
    grown = floored if down else nearest
    return np.where(np.isnan(x), 0x7FC0, grown).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cast(x: Array, dtype: str, *, down: bool = False) -> Array:
    """float32 as it is stored in a scale or page dtype: float32, float16, or bfloat16 bits."""
    if dtype == "fp32":
        return x.astype(np.float32)
    if dtype == "bf16":
        return to_bf16(x, down=down)
    with np.errstate(over="ignore"):
        near = x.astype(np.float16)
    if down:
        near = np.where(near.astype(np.float32) > x, np.nextafter(near, np.float16(-np.inf)), near)
    return near


def widen(stored: Array) -> Array:
    return from_bf16(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)


def limits(dtype: str) -> tuple[np.float32, np.float32]:
    """Smallest normal and largest finite number of a scale dtype."""
    if dtype == "fp16":
        return np.float32(2.0**-14), np.float32(65504)
    top = np.float32(np.finfo(np.float32).max) if dtype == "fp32" else from_bf16(np.asarray([0x7F7F], np.uint16))[0]
    return np.float32(2.0**-126), top


def from_torch(tensor: Tensor) -> Array:
    """Any float tensor as float32."""
    return tensor.detach().to(torch.float32).contiguous().numpy()


# --- the codec ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One plane inside a page: where it begins, its dtype, and its shape without the page, head first."""

    name: str
    offset: int
    dtype: np.dtype[Any]
    heads: int
    inner: tuple[int, ...]


def planes_of(side: str, fmt: TensorFormat, dim: int) -> list[tuple[str, Any, tuple[int, ...]]]:
    """(name, dtype, shape per head and slot) of every plane."""
    stored = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
    if fmt.code in FLOATS:
        return [(f"{side}.codes", stored[fmt.code], (dim,))]
    per_byte = 8 // int(fmt.code.removeprefix("int"))
    signed = fmt.code == "int8" and fmt.symmetric
    found = [(f"{side}.codes", np.int8 if signed else np.uint8, (dim // per_byte,))]
    if not fmt.static:
        shape = () if fmt.granularity == "token" else (dim // fmt.group,)
        found += [
            (f"{side}.{n}", stored[fmt.scale_dtype], shape) for n in ("scale", *(() if fmt.symmetric else ("zero",)))
        ]
    return found


def encode(fmt: TensorFormat, x: Array, static: tuple[Array, Array] | None) -> tuple[dict[str, Array], Array]:
    """Planes of rows ``(tokens, heads, dim)`` by short name, and which tokens hid a NaN."""
    hidden = np.zeros(len(x), np.bool_)
    if fmt.code in FLOATS:
        return {"codes": cast(x, fmt.code)}, hidden
    bits = int(fmt.code.removeprefix("int"))
    low, high = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if fmt.symmetric else (0, 2**bits - 1)
    with np.errstate(all="ignore"):
        if static is not None:
            scale, zero = static
            hidden = np.isnan(x).any((1, 2))
            clipped = np.where(np.isfinite(x), np.clip(x, -LIMIT, LIMIT), x)
            quotient = (clipped - zero) / scale if not fmt.symmetric else clipped / scale
            codes = np.where(np.isnan(quotient), 0, np.clip(np.rint(quotient), low, high))
            return {"codes": pack(codes, bits, signed=bits == 8 and fmt.symmetric)}, hidden
        members = fmt.group if fmt.granularity == "group" else x.shape[-1]
        groups = x.reshape(*x.shape[:2], x.shape[-1] // members, members)
        poison = ~np.isfinite(groups).all(-1)
        groups = np.where(poison[..., None], np.float32(0), np.clip(groups, -LIMIT, LIMIT))
        smallest, largest = limits(fmt.scale_dtype)
        if fmt.symmetric:
            zero = np.zeros(groups.shape[:3], np.float32)
            spread = np.abs(groups).max(-1)
        else:
            bottom = groups.min(-1)
            zero_stored = cast(np.clip(bottom, -largest, largest), fmt.scale_dtype, down=True)
            zero = np.clip(widen(zero_stored), -largest, largest) + np.float32(0)
            spread = np.maximum(groups.max(-1) - zero, np.float32(0))
        scale = np.minimum(widen(cast(spread / np.float32(high), fmt.scale_dtype)), largest)
        scale = np.where(spread > 0, np.maximum(scale, smallest), np.float32(0))
        quotient = (groups - zero[..., None]) / np.where(scale == 0, np.float32(1), scale)[..., None]
        codes = np.where((scale == 0)[..., None], 0, np.clip(np.rint(quotient), low, high)).reshape(x.shape)
        planes = {"codes": pack(codes, bits, signed=bits == 8 and fmt.symmetric)}
        shape = scale.shape if fmt.granularity == "group" else scale.shape[:2]
        planes["scale"] = cast(np.where(poison, np.float32(np.nan), scale).reshape(shape), fmt.scale_dtype)
        if fmt.scale_dtype == "fp32":  # the one quiet NaN, whatever this processor makes
            raw = planes["scale"].view(np.uint32)
            raw[np.isnan(planes["scale"])] = 0x7FC00000
        elif fmt.scale_dtype == "fp16":
            planes["scale"].view(np.uint16)[np.isnan(planes["scale"])] = 0x7E00
        if not fmt.symmetric:
            planes["zero"] = cast(zero.reshape(shape), fmt.scale_dtype)
    return planes, hidden


def decode(fmt: TensorFormat, planes: Mapping[str, Array], dim: int, static: tuple[Array, Array] | None) -> Array:
    """float32 rows ``(tokens, heads, dim)``."""
    codes = planes["codes"]
    if fmt.code in FLOATS:
        return widen(codes)
    bits = int(fmt.code.removeprefix("int"))
    x = unpack(codes, bits, signed=fmt.symmetric).astype(np.float32)
    with np.errstate(all="ignore"):
        if static is not None:
            x = x * static[0]
            return x if fmt.symmetric else x + static[1]
        repeat = fmt.group if fmt.granularity == "group" else dim
        shape = (*x.shape[:2], dim // repeat)
        spread = {n: np.repeat(widen(planes[n]).reshape(shape), repeat, -1) for n in planes if n != "codes"}
        x = x * spread["scale"]
        return x if fmt.symmetric else x + spread["zero"]


def pack(codes: Array, bits: int, *, signed: bool) -> Array:
    if bits == 8:
        return codes.astype(np.int8 if signed else np.uint8)
    whole = (codes.astype(np.int64) & (2**bits - 1)).astype(np.uint8)
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] * bits // 8), np.uint8)
    for place in range(8 // bits):
        packed |= whole[..., place :: 8 // bits] << (bits * place)
    return packed


def unpack(packed: Array, bits: int, *, signed: bool) -> Array:
    if bits == 8:
        return packed.astype(np.int16)
    fields = np.empty((*packed.shape[:-1], packed.shape[-1] * 8 // bits), np.int16)
    for place in range(8 // bits):
        fields[..., place :: 8 // bits] = (packed >> (bits * place)) & (2**bits - 1)
    return np.where(fields >= 2 ** (bits - 1), fields - 2**bits, fields) if signed else fields


# --- the store ------------------------------------------------------------------------------------------------------


class NumpyStore(Store):
    """``bytes`` ``(layers, pages, page_bytes)`` uint8, and how a page is divided."""

    def __init__(self, layout: GroupLayout, pages: int, memory: Tensor, scales: list[dict[str, Any]]) -> None:
        super().__init__(layout, pages)
        self.memory = memory
        self.bytes: Array = memory.numpy()
        self.static = scales
        self.parts, self.flag, _ = divide(layout)

    def view(self, layer: int, part: Part) -> Array:
        """A plane of one layer, ``(pages, slots, heads, ...)``: the canonical order over head-major memory."""
        item, size = part.dtype.itemsize, self.layout.page_size
        row = math.prod(part.inner) * item
        inner = tuple(int(s) for s in np.cumprod([item, *part.inner[::-1]])[:-1][::-1]) if part.inner else ()
        return np.ndarray(
            (self.pages, size, part.heads, *part.inner),
            part.dtype,
            self.bytes[layer].reshape(-1).data,
            part.offset,
            (self.bytes.shape[-1], row, row * size, *inner),
        )

    def side(self, layer: int, side: str) -> dict[str, Array]:
        prefix = f"{side}."
        return {p.name.removeprefix(prefix): self.view(layer, p) for p in self.parts if p.name.startswith(prefix)}


def divide(layout: GroupLayout) -> tuple[list[Part], int, int]:
    """The planes of a page, where its flag byte is, and how many bytes it takes."""
    parts, offset = [], 0
    for side, fmt, dim in (
        ("key", layout.format.key, layout.key_dim),
        ("value", layout.format.value, layout.value_dim),
    ):
        for name, kind, inner in planes_of(side, fmt, dim):
            dtype = np.dtype(kind)
            offset = -(-offset // dtype.itemsize) * dtype.itemsize
            parts.append(Part(name, offset, dtype, layout.kv_heads, inner))
            offset += layout.page_size * layout.kv_heads * math.prod(inner) * dtype.itemsize
    return parts, offset, -(-(offset + 1) // ALIGNMENT) * ALIGNMENT


def static_of(fmt: TensorFormat, scales: SideScales | None) -> tuple[Array, Array] | None:
    """Scale and zero as float32, broadcastable to (heads, dim)."""
    if scales is None:
        return None
    found = [np.zeros((), np.float32) if t is None else from_torch(t) for t in (scales.scale, scales.zero)]
    if fmt.granularity == "head":
        found = [a[:, None] if a.ndim else a for a in found]
    return found[0], found[1]


# --- the backend ----------------------------------------------------------------------------------------------------


class NumpyBackend(Backend):
    """numpy on the host. Attention is dense, sequence by sequence, and declares that."""

    name: ClassVar[str] = "numpychip"

    def __init__(self, device: str) -> None:
        self.device, self.torch_device = device, torch.device("cpu")

    def support(self, layout: GroupLayout) -> Support:
        reasons = []
        for side, fmt in (("K", layout.format.key), ("V", layout.format.value)):
            if fmt.code not in (*FLOATS, *INTEGERS):
                reasons.append(f"{side} codes are {fmt.code}; this chip has {', '.join((*FLOATS, *INTEGERS))}")
            elif fmt.granularity == "channel_group":
                reasons.append(f"{side} scales span {fmt.group} tokens (c{fmt.group}); this chip has token and gN")
            elif fmt.outliers:
                reasons.append(f"{side} keeps {fmt.outliers} outlier channels; this chip keeps none")
        if layout.latent:
            reasons.append("latent (MLA) layers are not implemented; use k= and v= formats")
        if layout.format.rotate is not None:
            reasons.append("rotated formats are not implemented")
        return Support(tuple(reasons), workspace="history")

    def page_bytes(self, layout: GroupLayout) -> int:
        return layout.layers * divide(layout)[2]

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> NumpyStore:
        support = self.support(layout)
        if not support.ok:
            raise Unsupported(f"numpychip cannot store {layout.format}", support.reasons)
        shape = (layout.layers, pages, divide(layout)[2])
        if storage is None:
            memory = torch.empty(shape, dtype=torch.uint8)
        else:
            if (
                "pages" not in storage
                or tuple(storage["pages"].shape) != shape
                or storage["pages"].dtype != torch.uint8
            ):
                raise InvalidArgument(f"storage needs 'pages', {shape} of torch.uint8, contiguous; got {list(storage)}")
            memory = storage["pages"]
        fmt = layout.format
        chosen = scales if scales is not None else [LayerScales()] * layout.layers
        static = [{"key": static_of(fmt.key, s.key), "value": static_of(fmt.value, s.value)} for s in chosen]
        store = NumpyStore(layout, pages, memory, static)
        store.bytes[..., store.flag] = 0
        return store

    def buffers(self, store: Store) -> dict[str, Tensor]:
        assert isinstance(store, NumpyStore)
        return {"pages": store.memory}

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert isinstance(store, NumpyStore)
        assert value is not None
        where = slots.cpu().numpy()
        kept = where >= 0
        page, slot = np.divmod(where[kept], store.layout.page_size)
        hidden = self._write(store, layer, from_torch(key)[kept], from_torch(value)[kept], (page, slot))
        if store.layout.format.static:
            flags = store.bytes[layer, :, store.flag]
            flags[page[slot == 0]] = 0
            flags[page[hidden]] = 1

    def _write(self, store: NumpyStore, layer: int, key: Array, value: Array, where: tuple[Array, Array]) -> Array:
        hidden = np.zeros(len(key), np.bool_)
        for side, fmt, rows in (
            ("key", store.layout.format.key, key),
            ("value", store.layout.format.value, value),
        ):
            planes, flags = encode(fmt, rows, store.static[layer][side])
            hidden |= flags
            for name, plane in store.side(layer, side).items():
                plane[where] = planes[name]
        return hidden

    def seal(
        self, source: Store, target: Store, layer: int, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        assert isinstance(source, NumpyStore)
        assert isinstance(target, NumpyStore)
        if not len(source_pages):
            return
        key, value = self._read(source, layer, np.asarray(source_pages))
        size = target.layout.page_size
        where = np.repeat(np.asarray(target_pages), size), np.tile(np.arange(size), len(target_pages))
        hidden = self._write(target, layer, key, value, where)
        if target.layout.format.static:
            target.bytes[layer, np.asarray(target_pages), target.flag] = hidden.reshape(-1, size).any(1)

    def _read(self, store: NumpyStore, layer: int, pages: Array) -> tuple[Array, Array]:
        """Decoded K and V ``(pages * size, heads, dim)``."""
        found = []
        for side, fmt, dim in (
            ("key", store.layout.format.key, store.layout.key_dim),
            ("value", store.layout.format.value, store.layout.value_dim),
        ):
            tokens = len(pages) * store.layout.page_size
            planes = {n: p[pages].reshape(tokens, *p.shape[2:]) for n, p in store.side(layer, side).items()}
            found.append(decode(fmt, planes, dim, store.static[layer][side]))
        return found[0], found[1]

    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        return Plan(arrays, arrays)

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
        assert isinstance(store, NumpyStore)
        layout, host = store.layout, plan.host
        q = from_torch(query)
        out = np.zeros((len(q), layout.query_heads, layout.value_dim), np.float32)
        lse = np.full((len(q), layout.query_heads), -np.inf, np.float32)
        logits = None if sinks is None else from_torch(sinks)
        starts, lengths = host.query_starts.tolist(), host.lengths.tolist()
        for s, length in enumerate(lengths):
            rows = slice(starts[s], starts[s + 1])
            if rows.start == rows.stop or not length:
                continue
            pages = host.page_table[s, : layout.pages_for(length)].numpy()
            key, value = (t[:length] for t in self._read(store, layer, pages))
            j = np.arange(length)
            p = int(host.query_positions[s]) + np.arange(rows.stop - rows.start)[:, None]
            seen = (j <= p) & (j >= int(host.kv_start[s]))
            if layout.window is not None:
                seen &= j > p - layout.window
            self._softmax(layout, q[rows], key, value, seen, scale, softcap, logits, out[rows], lse[rows])
        found = torch.from_numpy(out)
        return found if partial else found.to(query.dtype), torch.from_numpy(lse)

    def _softmax(
        self,
        layout: GroupLayout,
        query: Array,
        key: Array,
        value: Array,
        seen: Array,
        scale: float,
        softcap: float | None,
        sinks: Array | None,
        out: Array,
        lse: Array,
    ) -> None:
        """Write the output and LSE of one sequence's rows, head by head; rows that see nothing stay as they are."""
        used = seen.any(0)  # a key that nobody sees may hold any bits: it is taken out before it meets a product
        key, value, seen = key[used], value[used], seen[:, used]
        rows = seen.any(1)
        with np.errstate(all="ignore"):
            for head in range(layout.query_heads):
                kv = head // (layout.query_heads // layout.kv_heads)
                score = (query[rows, head] * np.float32(scale)) @ key[:, kv].T
                if softcap is not None:
                    score = np.float32(softcap) * np.tanh(score / np.float32(softcap))
                score = np.where(seen[rows], score, np.float32(-np.inf))
                top = score.max(1, keepdims=True)
                if sinks is not None:
                    top = np.maximum(top, sinks[head])
                weight = np.exp(score - top)
                total = weight.sum(1, keepdims=True)
                if sinks is not None:
                    total = total + np.exp(sinks[head] - top)
                # Poison reaches the rows that see it: a weight of zero must not meet a NaN.
                clean = np.where(np.isfinite(value[:, kv]), value[:, kv], np.float32(0))
                summed = weight @ clean
                for special in (np.nan, np.inf, -np.inf):
                    hit = np.isnan(value[:, kv]) if np.isnan(special) else value[:, kv] == special
                    if hit.any():
                        summed += np.where(seen[rows].astype(np.float32) @ hit.astype(np.float32) > 0, special, 0)
                out[rows, head] = summed / total
                lse[rows, head] = (top + np.log(total))[:, 0]

    def gather(
        self, store: Store, layer: int, page_table: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(store, NumpyStore)
        layout, longest = store.layout, max(lengths, default=0)
        key = np.zeros((len(lengths), longest, layout.kv_heads, layout.key_dim), np.float32)
        value = np.zeros((len(lengths), longest, layout.kv_heads, layout.value_dim), np.float32)
        for s, length in enumerate(lengths):
            k, v = self._read(store, layer, page_table[s, : layout.pages_for(length)].cpu().numpy())
            key[s, :length], value[s, :length] = k[:length], v[:length]
        return torch.from_numpy(key).to(dtype), torch.from_numpy(value).to(dtype)

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        assert isinstance(store, NumpyStore)
        if len(source):
            store.bytes[:, np.asarray(target)] = store.bytes[:, np.asarray(source)]

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        assert isinstance(store, NumpyStore)
        dtypes = {plane.name: plane.dtype for plane in store.layout.planes}
        index = np.asarray(list(pages), np.int64)
        found = {}
        for part in store.parts:
            plane = np.ascontiguousarray(store.view(layer, part)[index])
            found[part.name] = torch.from_numpy(plane.view(np.int16) if plane.dtype == np.uint16 else plane)
            if found[part.name].dtype != dtypes[part.name]:
                found[part.name] = found[part.name].view(dtypes[part.name])
        return found

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        assert isinstance(store, NumpyStore)
        index = np.asarray(list(pages), np.int64)
        for part in store.parts:
            given = planes[part.name].cpu().contiguous()
            if given.dtype == torch.bfloat16:
                given = given.view(torch.int16)
            store.view(layer, part)[index] = given.numpy().view(part.dtype)
        store.bytes[layer, index, store.flag] = 0

    def poisoned(self, store: Store) -> Tensor:
        assert isinstance(store, NumpyStore)
        if not store.layout.format.static:
            return torch.zeros((store.layout.layers, store.pages), dtype=torch.bool)
        return torch.from_numpy(store.bytes[..., store.flag] > 0)

    def facts(self) -> dict[str, str]:
        return {"numpy": np.__version__}


def probe(device_type: str) -> Probe:
    return Probe(usable=True, count=1, facts={"numpy": np.__version__})


def load(device: str) -> NumpyBackend:
    return NumpyBackend(device)
