"""One store with a few sequences of known K and V, and the oracle's view of what it holds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvport.backend import Backend, StepArrays, Store
from kvport.formats import CacheFormat, TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_conformance import inputs, oracle_attention, oracle_codec

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SCALE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LAYER = 1  # of two, so that a layer's offset is always in play


def with_dtypes(texts: Sequence[str]) -> list[tuple[str, torch.dtype]]:
    """Formats with input dtypes: every pair on hardware, one dtype each in turn for the slow interpreter."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if os.environ.get("KVPORT_TRITON_DEVICE", "cpu") != "cpu":
        return [(text, dtype) for text in texts for dtype in dtypes]
    return list(zip(texts, itertools.cycle(dtypes), strict=False))


def layout_of(
    text: str,
    *,
    heads: int = 2,
    group: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    page_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> GroupLayout:
    """A group of two layers; ``heads`` KV heads with ``group`` query heads each."""
    return GroupLayout(
        format=CacheFormat.parse(text),
        layers=2,
        kv_heads=heads,
        query_heads=heads * group,
        key_dim=dim,
        value_dim=value_dim or dim,
        page_size=page_size,
        window=window,
        dtype=dtype,
    )


def static_scales(fmt: TensorFormat, heads: int, dim: int, seed: int) -> SideScales | None:
    """Static scales that differ by head and channel, near the inputs' range; None where the format has none."""
    if not fmt.static:
        return None
    shape = {"tensor": (), "head": (heads,), "channel": (heads, dim)}[fmt.granularity]
    unit = torch.from_numpy(inputs.values(inputs.derive(seed, "scale"), shape, low=0.5, high=1.5))
    largest = 2.0 ** (fmt.bits - 1) if fmt.symmetric else 2.0**fmt.bits
    scale = (unit * 6.0 / largest).to(fmt.scale_torch_dtype)
    return SideScales(scale, None if fmt.symmetric else (-unit * 3.0).to(fmt.scale_torch_dtype))


def scales_of(layout: GroupLayout) -> list[LayerScales]:
    """Static scales for every layer of the layout."""
    key = static_scales(layout.format.key, layout.kv_heads, layout.key_dim, 1)
    value = static_scales(layout.format.value, layout.kv_heads, layout.value_dim, 2)
    return [LayerScales(key, value)] * layout.layers


def spec_of(fmt: TensorFormat) -> oracle_codec.CodecSpec:
    """The oracle's description of a format."""
    if not fmt.quantized:
        return oracle_codec.CodecSpec(fmt.code)
    return oracle_codec.CodecSpec(
        fmt.code, fmt.granularity, fmt.group, fmt.symmetric, SCALE_NAMES[fmt.scale_dtype], fmt.static
    )


def to_numpy(plane: Tensor) -> Any:
    """A plane as the oracle has it: 16-bit floats as uint16 bits."""
    if plane.dtype in (torch.bfloat16, torch.float16):
        return plane.contiguous().view(torch.int16).numpy().view(np.uint16)
    return plane.numpy()


def static_arguments(scales: SideScales | None) -> dict[str, Any]:
    if scales is None:
        return {}
    found = {"static_scale": scales.scale.float().numpy()}
    if scales.zero is not None:
        found["static_zero"] = scales.zero.float().numpy()
    return found


def allocate(backend: Backend, layout: GroupLayout, pages: int) -> Store:
    """A store whose every byte is ones: NaN in every float, -1 in every code. Flags are left alone."""
    store = backend.allocate(layout, pages, scales=scales_of(layout) if layout.format.static else None)
    for name, buffer in backend.buffers(store).items():
        if name != "poison":
            buffer.view(torch.uint8).fill_(0xFF)
    return store


class Filled:
    """A store holding ``lengths[s]`` tokens of sequence s on shuffled pages; the query rows are each one's last."""

    def __init__(
        self,
        backend: Backend,
        layout: GroupLayout,
        queries: Sequence[int],
        lengths: Sequence[int],
        *,
        kv_start: Sequence[int] | None = None,
        poison: dict[tuple[int, int, int, str], float] | None = None,
        beyond: int = 0,
        flat: bool = False,
    ) -> None:
        """``poison`` maps (sequence, token, head, "key" or "value") to what stands in channel 3 there. The sequences
        use no page up to ``beyond``. Where ``flat``, channel 1 is 2.5 in every row, and channel 2 is 0."""
        self.backend, self.layout, self.queries, self.lengths = backend, layout, queries, lengths
        heads, size = layout.kv_heads, layout.page_size
        counts = [layout.pages_for(n) for n in lengths]
        self.store = allocate(backend, layout, sum(counts) + 3 + beyond)
        ids = (inputs.permutation(7, sum(counts) + 2) + 1 + beyond).tolist()
        table = torch.zeros((len(lengths), max(1, *counts)), dtype=torch.int32)
        keys, values, slots = [], [], []
        for s, n in enumerate(lengths):
            for column in range(counts[s]):
                table[s, column] = ids.pop()
            position = torch.arange(n)
            slots.append(table[s, position // size].long() * size + position % size)
            key = torch.from_numpy(inputs.key(100 + s, (n, heads, layout.key_dim))).to(layout.dtype)
            value = torch.from_numpy(inputs.value(200 + s, (n, heads, layout.value_dim))).to(layout.dtype)
            if flat:
                for rows in (key, value):
                    rows[..., 1], rows[..., 2] = 2.5, 0.0
            for (sequence, token, head, side), what in (poison or {}).items():
                if sequence == s:
                    (key if side == "key" else value)[token, head, 3] = what
            keys.append(key)
            values.append(value)
        device = backend.torch_device
        moved = [torch.cat(parts).to(device) for parts in (keys, values, slots)]
        if any(side.format.sealed_only for side in layout.sides):
            # Whole pages, encoded from a store of floats.
            plain = replace(layout, format=CacheFormat.parse("fp32"))
            source = allocate(backend, plain, sum(counts) + 3 + beyond)
            backend.append(source, LAYER, *moved)
            pages = sorted(set(table.flatten().tolist()) - {0})
            backend.seal(source, self.store, LAYER, pages, pages)
        else:
            backend.append(self.store, LAYER, *moved)
        self.arrays = StepArrays(
            page_table=table,
            kv_start=torch.tensor(kv_start or [0] * len(lengths), dtype=torch.int32),
            lengths=torch.tensor(list(lengths), dtype=torch.int32),
            query_starts=torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32),
            query_positions=torch.tensor([n - q for n, q in zip(lengths, queries, strict=True)], dtype=torch.int32),
        )
        self.plan = backend.plan(self.store, self.arrays)

    def query(self, dtype: torch.dtype | None = None) -> Tensor:
        """(tokens, query_heads, key_dim), heads outermost in memory."""
        shape = (sum(self.queries), self.layout.query_heads, self.layout.key_dim)
        rows = torch.from_numpy(inputs.query(300, shape)).to(dtype or self.layout.dtype)
        return rows.transpose(0, 1).contiguous().transpose(0, 1).to(self.backend.torch_device)

    def decoded(self, sequence: int) -> tuple[Any, Any]:
        """float32 K and V of a sequence, decoded by the oracle from exported planes."""
        length = self.lengths[sequence]
        pages = self.arrays.page_table[sequence, : self.layout.pages_for(length)].tolist()
        stored = self.backend.export_pages(self.store, LAYER, pages)
        static = scales_of(self.layout)[LAYER]
        found = []
        for side, scales in zip(self.layout.sides, (static.key, static.value), strict=True):
            prefix = f"{side.name}."
            planes = {
                n.removeprefix(prefix): to_numpy(p.flatten(0, 1)) for n, p in stored.items() if n.startswith(prefix)
            }
            rows = oracle_codec.decode(spec_of(side.format), planes, side.dim, **static_arguments(scales))
            found.append(rows[:length])
        return found[0], found[1]

    def attend(self, query: Tensor, *, sinks: Tensor | None = None, scale: float, **options: Any) -> Any:
        moved = None if sinks is None else sinks.to(self.backend.torch_device)
        return self.backend.attend(self.store, LAYER, query, self.plan, scale=scale, sinks=moved, **options)

    def worst(
        self,
        *,
        query: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        partial: bool = False,
    ) -> float:
        """Attend; the worst observed / bound against float64 attention over what the store decodes to."""
        query = self.query() if query is None else query
        scale = self.layout.key_dim**-0.5 if scale is None else scale
        out, lse = self.attend(query, scale=scale, softcap=softcap, sinks=sinks, partial=partial)
        assert out.dtype == (torch.float32 if partial else query.dtype)
        assert lse.dtype == torch.float32
        worst, row = 0.0, 0
        for s, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            start = int(self.arrays.kv_start[s])
            key, value = self.decoded(s)
            given = (query[row : row + count].float().cpu().numpy(), key[start:], value[start:])
            options: dict[str, Any] = {
                "scale": scale,
                "softcap": softcap,
                "window": self.layout.window,
                "sinks": None if sinks is None else sinks.numpy(),
                "query_start": length - count - start,
            }
            want, want_lse = oracle_attention.attend(*given, **options)
            bound, lse_bound = oracle_attention.attention_bound(*given, query_dtype=DTYPE_NAMES[query.dtype], **options)
            got, got_lse = (t[row : row + count].float().cpu().numpy() for t in (out, lse))
            worst = max(
                worst,
                oracle_attention.observed_over_bound(got, want, bound),
                oracle_attention.observed_over_bound(got_lse, want_lse, lse_bound),
            )
            row += count
        return worst
