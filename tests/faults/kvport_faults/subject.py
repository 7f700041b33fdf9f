"""A correct backend made of small steps, each of which a faulty one changes.

It is the torch base class with append, attend and gather written out step by step: what a fault needs to touch is one
method of a few lines. Attention is dense (and says so), because it only has to be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvport import codec
from kvport.backend import Plan, StepArrays, Store, Support
from kvport.features import ATTENTION_FEATURES
from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import SideScales
from kvport_cpu.base import TorchBackend, TorchStore


class Subject(TorchBackend):
    """The correct backend. Methods without a docstring of :class:`TorchBackend` are the steps to change."""

    name: ClassVar[str] = "subject"

    def __init__(self) -> None:
        super().__init__("cpu", torch.device("cpu"))

    def support(self, layout: GroupLayout) -> Support:
        return Support(workspace="history", features=ATTENTION_FEATURES | {"graph"})

    # -- append --------------------------------------------------------------------------------------------------

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert isinstance(store, TorchStore)
        assert value is not None
        pages, offsets, kept = self.where(store, slots)
        planes: dict[str, dict[str, Tensor]] = {}
        flagged = torch.zeros(len(kept), dtype=torch.bool)
        for side, rows in (("key", key), ("value", value)):
            fmt, static = self.side(store, layer, side)
            planes[side], flags = self.encode(side, fmt, self.rows(side, rows)[kept], static)
            if flags is not None:
                flagged |= flags
        self.edit(store, layer, planes, pages, offsets)
        for side, encoded in planes.items():
            for name, plane in store.of_side(self.write_layer(layer), side).items():
                self.write(name, plane, encoded[name], pages, offsets)
        if store.poison is not None:
            self.flag(store.poison[layer], pages, offsets, flagged)

    def where(self, store: TorchStore, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Page, offset and row number of every row that is not skipped."""
        kept = (slots >= 0).nonzero().squeeze(-1)
        size = store.layout.page_size
        return slots[kept] // size, slots[kept] % size, kept

    def side(self, store: TorchStore, layer: int, side: str) -> tuple[TensorFormat, SideScales | None]:
        fmt, chosen = store.layout.format, store.scales[layer]
        return (fmt.key, chosen.key) if side == "key" else (fmt.value, chosen.value)

    def rows(self, side: str, rows: Tensor) -> Tensor:
        return rows

    def encode(
        self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        encoded = codec.encode(fmt, rows, static)
        return dict(encoded.planes), encoded.poisoned

    def edit(
        self, store: TorchStore, layer: int, planes: dict[str, dict[str, Tensor]], pages: Tensor, offsets: Tensor
    ) -> None:
        """Nothing: what is encoded is what is written."""

    def write_layer(self, layer: int) -> int:
        return layer

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        plane[pages, offsets] = values

    def flag(self, flags: Tensor, pages: Tensor, offsets: Tensor, flagged: Tensor) -> None:
        flags[pages[offsets == 0]] = 0
        flags[pages[flagged]] = 1

    # -- reading pages -------------------------------------------------------------------------------------------

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for side in ("key", "value"):
            fmt, static = self.side(store, layer, side)
            planes = {n: self.fetch(n, plane, pages) for n, plane in store.of_side(layer, side).items()}
            found.append(self.decode(side, fmt, planes, static))
        return found[0], found[1]

    def fetch(self, name: str, plane: Tensor, pages: Tensor) -> Tensor:
        return plane[pages.long()]

    def decode(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor], static: SideScales | None) -> Tensor:
        return codec.decode(fmt, planes, static)

    # -- attend --------------------------------------------------------------------------------------------------

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
        layout, host = store.layout, self.arrays(plan)
        dtype = torch.float32 if partial else query.dtype
        out = self.empty("out", (len(query), layout.query_heads, layout.value_dim), dtype)
        lse = self.empty("lse", (len(query), layout.query_heads), torch.float32)
        starts = host.query_starts.tolist()
        for s in range(len(starts) - 1):
            rows = slice(starts[s], starts[s + 1])
            if starts[s] == starts[s + 1]:
                continue
            key, value, seen = self.history(store, layer, host, s, starts[s + 1] - starts[s])
            out[rows], lse[rows] = self.softmax(layout, query[rows], key, value, seen, scale, softcap, sinks)
        self.pad(out, lse, starts[-1])
        return out, lse

    def pad(self, out: Tensor, lse: Tensor, first: int) -> None:
        """Rows past the last sequence's, which only a fixed plan has."""
        out[first:], lse[first:] = 0, -math.inf

    def arrays(self, plan: Plan) -> StepArrays:
        return plan.host

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def history(
        self, store: TorchStore, layer: int, host: StepArrays, s: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K and V ``(tokens, kv_heads, dim)`` of a sequence in float32, and ``(rows, tokens)``: who sees what."""
        length, kv_start = int(host.lengths[s]), int(host.kv_start[s])
        position = int(host.query_positions[s])
        pages = self.pages(store, host.page_table[s], length)
        key, value = (t.flatten(0, 1) for t in self._read(store, layer, pages))
        j = torch.arange(len(key))
        p = position + torch.arange(count)
        seen = self.visible(j, p.unsqueeze(-1), length, kv_start, store.layout)
        return key, value, seen

    def pages(self, store: TorchStore, row: Tensor, length: int) -> Tensor:
        return row[: store.layout.pages_for(length)]

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        seen = (j <= p) & (j < length) & (j >= kv_start)
        return seen if layout.window is None else seen & (j > p - layout.window)

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
        head = self.kv_head(layout)
        scores = self.scores(query.float(), key[:, head], scale, softcap)  # (heads, rows, tokens)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, self.sink(layout, sinks).view(-1, 1, 1).expand(-1, len(query), 1)], -1)
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else torch.full((*scores.shape[:2], 1), -math.inf)
        weights = self.exponential(scores, top)
        total = weights.sum(-1)
        weights, value = self.mask(weights[..., : len(key)], seen, value[:, head].movedim(0, 1))
        out = self.product(weights, value) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
        lse = self.log_sum(total, top.squeeze(-1))
        return self.finish(out.movedim(0, 1), lse.transpose(0, 1), seen, sinks is not None)

    def kv_head(self, layout: GroupLayout) -> Tensor:
        return torch.arange(layout.query_heads) // layout.group_size

    def scores(self, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
        return self.cap(torch.einsum("rhd,thd->hrt", query, key) * scale, softcap)

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        return scores if softcap is None else torch.tanh(scores / softcap) * softcap

    def sink(self, layout: GroupLayout, sinks: Tensor) -> Tensor:
        return sinks.float()

    def exponential(self, scores: Tensor, top: Tensor) -> Tensor:
        return torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))

    def mask(self, weights: Tensor, seen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A lane that no row sees is taken out of V: weight 0 times NaN would be NaN."""
        return weights, value.masked_fill(~seen.any(0).view(1, -1, 1), 0.0)

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        if value.isfinite().all():
            return weights @ value
        # Poison reaches the rows that see it, and no others: weight 0 times NaN would.
        zeroed = value.masked_fill(~value.isfinite(), 0.0)
        out = weights @ zeroed
        for row in range(weights.shape[1]):
            lanes = (weights[:, row] > 0).unsqueeze(-1) & ~value.isfinite()
            bad = torch.where(lanes, value, torch.zeros_like(value)).sum(1)
            out[:, row] = torch.where(lanes.any(1), bad, out[:, row])
        return out

    def log_sum(self, total: Tensor, top: Tensor) -> Tensor:
        return top + torch.log(total)

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        return out, lse


def page_index(pages: Sequence[int]) -> Tensor:
    return torch.tensor(list(pages), dtype=torch.int64)
