"""The Ascend backend: pages as torch_npu's operators read them, written and attended through ``torch.ops.npu``.

Layout of a store, one tensor for all layers, so that a layer's slice is contiguous:

=================  ===========================  ===============================================================
codes              int8 (or the model's float)  ``(layers, pages, page_size, heads, dim)``, or where NZ pages were
                                                asked for ``(layers, pages, heads, dim / 32, page_size, 32)``;
                                                see :mod:`kvport_ascend.pages`
scales per token   float32                      ``(layers, pages, heads, page_size)``, antiquant mode 5
=================  ===========================  ===============================================================

Append quantizes with kvport's own codec and scatters with ``npu_scatter_pa_kv_cache`` (codes) and
``npu_scatter_nd_update_`` (scales). Attend takes one of two routes a sequence, chosen once per step in
:meth:`AscendBackend.plan`:

decode
    one query token: ``npu_fused_infer_attention_score`` straight over the int8 pages, all such sequences in one call;
dense
    several query tokens (the operator takes no int8 pages then): decode the history to the model's dtype and attend
    over that. Its memory grows with the context, which ``support`` declares.

The emulated backend runs this very code; the operators are then those of :mod:`kvport_ascend.emulator`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvport.backend import Plan, StepArrays, Store, Support
from kvport.errors import BackendUnavailable, InvalidArgument, ScaleError, Unsupported
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_ascend.formats import max_pages, mode_of, refusals, scale_rule, static_operands
from kvport_ascend.pages import (
    FORMS,
    ND,
    PageForm,
    buffers,
    own_or_given,
    signed_codes,
    swap_zeros,
    to_canonical,
    to_native,
)
from kvport_ascend.probing import probe
from kvport_ascend.socs import SOCS, Soc
from kvport_cpu.base import POISON, TorchBackend, TorchStore

#: How pages lie, on a device as well: nd (the default) or nz. Read when a backend is loaded.
ENVIRONMENT_LAYOUT = "KVPORT_ASCEND_LAYOUT"
#: Which chip's rules ``ascend@cpu`` follows (A2, A3, 950), and its arithmetic (planes, exact).
ENVIRONMENT_SOC = "KVPORT_ASCEND_SOC"
ENVIRONMENT_NUMERIC = "KVPORT_ASCEND_NUMERIC"

MASK_SIDE = 2048
"""The operator's triangular mask for causal attention has this side, whatever the lengths."""

HALVED = {torch.bfloat16: 1.0, torch.float16: 0.5}
"""The dense route holds K and V times this. A float16 row near 65504 may decode to a little more, which would be
infinite; a power of two costs nothing and is undone in the softmax scale and the output."""

FAINT = 2.0**-118
"""The decode kernel divides 127 by the largest magnitude of a query row, times the K scales where they are static.
What it answers for a row of zeros is not known, nor for one below 2^-121, where the quotient is infinite. The first
channel of a row that is fainter than this is set to this, or to the nearest that its dtype has: a float16 query to
2^-24. Scores move by at most that much times |k| times the softmax scale: less than the bound while |k| * scale < 2^13
in float16, whose largest number is 2^16, and always in bfloat16 unless K is beyond 2^100."""


WEIGHT_ERROR = {0: 1 / (2 * 127 * 254**2), 1: 1 / (2 * 127 * 254)}
"""Half a step of three (``inner_precise`` 0) and of two int8 planes, relative to the largest number of a row."""

PARTIALS = "float32 in type; the operator rounded them to the query's dtype once"


class AscendStore(TorchStore):
    """``planes`` as in the module docstring; ``operands[layer]``: the attention operator's static arguments.

    ``key_scales[layer]``: static K scales as float32 ``(query_heads, D)``, None where they are not static.
    """

    operands: list[dict[str, Any]]
    key_scales: list[Tensor | None]


@dataclass(frozen=True)
class DecodeRoute:
    """Sequences with one query token. ``rows``: their packed query rows, None for "all, in order"."""

    rows: Tensor | None
    table: Tensor
    """``(sequences, pages)`` int32 on the device, contiguous."""
    lengths: list[int]


@dataclass(frozen=True, eq=False)
class DenseRoute:
    """One sequence of several query tokens.

    Rows ``first .. last-1`` of the packed queries see positions ``start .. length-1``; row r (from 0) sees those up to
    ``position + r``. ``pages``: its row of the page table.
    """

    first: int
    last: int
    position: int
    start: int
    length: int
    pages: Tensor

    @property
    def causal(self) -> bool:
        """The last row sees the last token, the one before it one less: the operator's lower right causal mask."""
        return self.length == self.position + self.last - self.first

    @property
    def full(self) -> bool:
        """Every row sees every token."""
        return self.length <= self.position + 1


@dataclass
class Routes:
    """What :meth:`AscendBackend.plan` prepares. ``empty``: some rows see nothing."""

    decode: DecodeRoute | None = None
    dense: list[DenseRoute] = field(default_factory=list)
    empty: bool = False


class AscendBackend(TorchBackend):
    """Pages for one NPU, or for the emulated operators on the CPU.

    ``soc`` is the chip family whose rules hold, ``numeric`` the emulator's arithmetic, ``form`` how pages lie.
    Inherited from the torch base class: gather, copy_pages and poisoned, which work on this store through
    :meth:`_read` and :meth:`buffers`.
    """

    name: ClassVar[str] = "ascend"

    def __init__(
        self,
        device: str,
        torch_device: torch.device,
        soc: Soc,
        facts: Mapping[str, str],
        *,
        numeric: str = "planes",
        form: PageForm = ND,
    ) -> None:
        super().__init__(device, torch_device)
        self.execution = "emulated" if torch_device.type == "cpu" else "hardware"
        self.soc = soc
        self.form = form
        #: The conformance suite's bound takes this term: by how much a softmax weight may be off, see
        #: ``kvport_conformance.oracle_attention``. The decode kernel holds each to a step of its row's largest.
        self.weight_error = WEIGHT_ERROR[form.inner_precise]
        self._facts = {**facts, "page layout": form.name.upper(), "partials": PARTIALS}
        self._numeric = numeric
        self._mask: Tensor | None = None

    def facts(self) -> dict[str, str]:
        return dict(self._facts)

    def _operators(self) -> AbstractContextManager[None]:
        """Where operators are called: emulated ones answer as this backend's chip, several of which may be open."""
        if self.execution == "hardware":
            return nullcontext()
        from kvport_ascend import emulator

        return emulator.settings(soc=self.soc.name, numeric=self._numeric)

    def synchronize(self) -> None:
        if self.torch_device.type != "cpu":
            torch.npu.synchronize()  # type: ignore[attr-defined,unused-ignore]

    # -- pages -----------------------------------------------------------------------------------------------------

    def support(self, layout: GroupLayout) -> Support:
        features = {"prefill", "verify", "poison"} | ({"lse"} if self.form.lse else set())
        return Support(
            refusals(layout, self.soc, self.form),
            workspace="history",
            features=frozenset(features),
            scale_rule=scale_rule(layout),
        )

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> AscendStore:
        reasons = self.support(layout).reasons
        if pages > max_pages(layout):
            reasons += (f"{pages} pages: at most {max_pages(layout)} keep K below 2^31 elements (rule cache_elements)",)
        if reasons:
            raise Unsupported(f"backend {self.name} cannot store {layout.format}", reasons)
        given = tuple(scales or [LayerScales()] * layout.layers)
        operands = [self._static_operands(layout, index, layer) for index, layer in enumerate(given)]
        tensors = {
            name: own_or_given(storage, name, shape, dtype, self.torch_device)
            for name, (shape, dtype) in buffers(layout, pages, self.form).items()
        }
        poison = tensors.pop(POISON, None)
        if poison is not None:
            poison.zero_()
        store = AscendStore(layout, pages, tensors, tuple(self._on_device(layer) for layer in given), poison)
        store.operands = operands
        store.key_scales = [self._spread_key_scales(layout, layer) for layer in store.scales]
        return store

    def _on_device(self, layer: LayerScales) -> LayerScales:
        def move(side: SideScales | None) -> SideScales | None:
            if side is None:
                return None
            zero = None if side.zero is None else side.zero.to(self.torch_device)
            return SideScales(side.scale.to(self.torch_device), zero)

        return LayerScales(move(layer.key), move(layer.value))

    def _static_operands(self, layout: GroupLayout, index: int, layer: LayerScales) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, fmt, side in (("key", layout.format.key, layer.key), ("value", layout.format.value, layer.value)):
            if not fmt.quantized:
                continue
            found[f"{name}_antiquant_mode"] = mode_of(fmt, self.form)
            if side is not None:
                try:
                    scale, offset = static_operands(name, layout, fmt, side, self.form)
                except ScaleError as refusal:
                    refusal.layer = index
                    raise
                found[f"{name}_antiquant_scale"] = scale.to(self.torch_device)
                if offset is not None:
                    found[f"{name}_antiquant_offset"] = offset.to(self.torch_device)
        return found

    def _spread_key_scales(self, layout: GroupLayout, layer: LayerScales) -> Tensor | None:
        if layer.key is None:
            return None
        scale = layer.key.scale.float()
        by_channel = scale.reshape(-1, scale.shape[1] if layout.format.key.granularity == "channel" else 1)
        spread = by_channel.expand(layout.kv_heads, layout.key_dim)
        return spread.repeat_interleave(layout.group_size, dim=0).contiguous()

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert isinstance(store, AscendStore)
        if value is None:
            raise Unsupported(
                f"backend {self.name}: append without a value; latent (MLA) layouts are not supported here"
            )
        if slots.numel() == 0:
            return
        page_size = store.layout.page_size
        key, value, slots = _without_skipped(key, value, slots.contiguous(), page_size)
        if slots.numel() == 0:
            return
        sides = store.sides(layer)
        encoded = [side.encode(rows) for side, rows in zip(sides, (key, value), strict=True)]
        codes = [signed_codes(side.format, e.planes["codes"]) for side, e in zip(sides, encoded, strict=True)]
        with self._operators():
            torch.ops.npu.npu_scatter_pa_kv_cache(
                codes[0].contiguous(),
                codes[1].contiguous(),
                self.form.for_scatter(store.planes["key.codes"][layer]),
                self.form.for_scatter(store.planes["value.codes"][layer]),
                slots,
                cache_mode=self.form.cache_mode,
            )
            for side, e in zip(sides, encoded, strict=True):
                if "scale" in e.planes:
                    pages, scales = store.planes[f"{side.name}.scale"][layer], e.planes["scale"]
                    scales = swap_zeros(scales) if side.name == "value" else scales
                    self._scatter_scales(pages, scales, slots, page_size)
        if store.poison is not None:
            marks = [e.poisoned for e in encoded if e.poisoned is not None]
            _mark_poison(store.poison[layer], torch.stack(marks).any(0), slots, page_size)

    def seal(
        self, source: Store, target: Store, layer: int, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        assert isinstance(source, TorchStore)
        page_size = target.layout.page_size
        pages = torch.tensor(source_pages, device=self.torch_device, dtype=torch.int64)
        key, value = (rows.flatten(0, 1) for rows in self._read(source, layer, pages))
        first = torch.tensor(target_pages, device=self.torch_device, dtype=torch.int64) * page_size
        slots = (first.unsqueeze(-1) + torch.arange(page_size, device=self.torch_device)).flatten()
        self.append(target, layer, key, value, slots)

    def _scatter_scales(self, pages: Tensor, scales: Tensor, slots: Tensor, page_size: int) -> None:
        """``scales`` ``(T, heads)`` into ``pages`` ``(pages, heads, P)``, at page * heads * P + head * P + offset."""
        heads = pages.shape[1]
        head = torch.arange(heads, device=slots.device) * page_size
        first = slots // page_size * (heads * page_size) + slots % page_size
        index = (first.unsqueeze(-1) + head).reshape(-1, 1)
        torch.ops.npu.npu_scatter_nd_update_(pages.view(-1), index, scales.reshape(-1).contiguous())

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        assert isinstance(store, AscendStore)
        index = torch.tensor(pages, device=self.torch_device, dtype=torch.int64)
        return {
            name: to_canonical(store, self.form, name, plane[layer][index]).contiguous().cpu()
            for name, plane in store.planes.items()
        }

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        assert isinstance(store, AscendStore)
        index = torch.tensor(pages, device=self.torch_device, dtype=torch.int64)
        for name, plane in store.planes.items():
            plane[layer][index] = to_native(store, self.form, name, planes[name].to(self.torch_device))
        if store.poison is not None:
            store.poison[layer][index] = 0

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for side in store.sides(layer):
            planes = {
                name: to_canonical(store, self.form, f"{side.name}.{name}", plane.index_select(0, pages))
                for name, plane in store.of_side(layer, side.name).items()
            }
            found.append(side.decode(planes))
        return found[0], found[1]

    # -- attention -------------------------------------------------------------------------------------------------

    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        """Sort the sequences into the decode and the dense route."""
        layout = store.layout
        device = arrays.to(self.torch_device)
        starts, positions, kv_starts, lengths = (
            t.tolist() for t in (arrays.query_starts, arrays.query_positions, arrays.kv_start, arrays.lengths)
        )
        routes = Routes()
        one: list[tuple[int, int, int, int]] = []  # sequence, row, first page, tokens seen
        for s, (first, last) in enumerate(pairwise(starts)):
            start, length = kv_starts[s], min(lengths[s], positions[s] + last - first)
            if first == last:
                continue
            # A row before the first stored position sees nothing, whatever the later ones see.
            routes.empty |= length <= start or positions[s] < start
            if length <= start:
                continue
            if last - first == 1 and start % layout.page_size == 0:
                one.append((s, first, start // layout.page_size, length - start))
            else:
                routes.dense.append(
                    DenseRoute(first, last, positions[s], start, length, device.page_table[s].to(torch.int64))
                )
        if one:
            routes.decode = self._decode_route(layout, arrays, one)
        return Plan(arrays, device, routes)

    def _decode_route(
        self, layout: GroupLayout, arrays: StepArrays, one: list[tuple[int, int, int, int]]
    ) -> DecodeRoute:
        seen = [tokens for *_, tokens in one]
        columns = layout.pages_for(max(seen))
        if columns * layout.page_size > self.soc.max_decode_tokens:
            raise Unsupported(
                f"backend {self.name}: a sequence of {max(seen)} tokens; at most {self.soc.max_decode_tokens} can be "
                "decoded (rule decode_kv_limit)"
            )
        table = torch.zeros((len(one), columns), dtype=torch.int32, device=arrays.page_table.device)
        for i, (s, _, page, tokens) in enumerate(one):
            used = layout.pages_for(tokens)
            table[i, :used] = arrays.page_table[s, page : page + used]
        total = int(arrays.query_starts[-1])
        rows = [row for _, row, _, _ in one]
        index = None if rows == list(range(total)) else torch.tensor(rows, device=self.torch_device)
        return DecodeRoute(index, table.to(self.torch_device), seen)

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
        """As the interface says. A partial's float32 was rounded to the query's dtype by the operator before.

        Over NZ pages the operator gives no LSE: it is NaN in every row, and partials are refused.
        """
        assert isinstance(store, AscendStore)
        layout, routes = store.layout, plan.private
        if softcap is not None or sinks is not None:
            raise Unsupported(f"backend {self.name}: attend has no soft cap and no sink logits here")
        if query.dtype != layout.dtype:
            raise Unsupported(
                f"backend {self.name}: queries are {query.dtype}, the layout's dtype is {layout.dtype}; they must be "
                "equal, because the operator ties the scales' dtype to the query's (rules key_scale_dtype, query_dtype)"
            )
        if partial and not self.form.lse:
            raise Unsupported(f"backend {self.name}: no partials over NZ pages, whose attention gives no LSE")
        shape = (query.shape[0], layout.query_heads)
        out_dtype = torch.float32 if partial else query.dtype
        out = query.new_empty((*shape, layout.value_dim), dtype=out_dtype)
        lse = query.new_empty(shape, dtype=torch.float32)
        if routes.empty:
            out.zero_()
            lse.fill_(-math.inf)
        with self._operators():
            if routes.decode is not None:
                rows = slice(None) if routes.decode.rows is None else routes.decode.rows
                out_rows, lse_rows = self._decode(store, layer, query[rows], routes.decode, scale)
                out[rows], lse[rows] = out_rows.to(out_dtype), lse_rows
            for batch in self._dense_batches(layout, routes.dense):
                for where, out_rows, lse_rows in self._dense(store, layer, query, batch, scale):
                    out[where], lse[where] = out_rows.to(out_dtype), lse_rows
        if not self.form.lse:
            lse.fill_(math.nan)
        return out, lse

    def _decode(
        self, store: AscendStore, layer: int, query: Tensor, route: DecodeRoute, scale: float
    ) -> tuple[Tensor, Tensor]:
        """``query`` ``(B, query_heads, D)``, one row a sequence -> output and LSE ``(B, query_heads)``."""
        layout = store.layout
        operands = dict(store.operands[layer])
        if layout.format.key.quantized:
            query = _raise_faint_rows(query, store.key_scales[layer])
            if not layout.format.static:
                operands["key_antiquant_scale"] = store.planes["key.scale"][layer]
                operands["value_antiquant_scale"] = store.planes["value.scale"][layer]
        out, lse = torch.ops.npu.npu_fused_infer_attention_score(
            query.unsqueeze(2).contiguous(),
            self.form.for_attention(store.planes["key.codes"][layer]),
            self.form.for_attention(store.planes["value.codes"][layer]),
            input_layout="BNSD",
            num_heads=layout.query_heads,
            num_key_value_heads=layout.kv_heads,
            scale=scale,
            block_table=route.table,
            block_size=layout.page_size,
            actual_seq_lengths_kv=route.lengths,
            inner_precise=self.form.inner_precise,
            softmax_lse_flag=self.form.lse,
            **operands,
        )
        # What the operator gives for an LSE that was not asked for is not to be looked at.
        rows = lse.reshape(lse.shape[:2]) if self.form.lse else query.new_full((), math.nan, dtype=torch.float32)
        return out.squeeze(2), rows

    def _dense_batches(self, layout: GroupLayout, routes: list[DenseRoute]) -> Iterator[list[DenseRoute]]:
        """Causal sequences packed into one TND call where the chip takes the head dim; else one sequence at a time."""
        packed = [route for route in routes if self._packs(layout, route)]
        for begin in range(0, len(packed), self.soc.max_packed_batch):
            yield packed[begin : begin + self.soc.max_packed_batch]
        yield from ([route] for route in routes if not self._packs(layout, route))

    def _packs(self, layout: GroupLayout, route: DenseRoute) -> bool:
        fits = self.soc.packed_dims is None or layout.key_dim in self.soc.packed_dims
        return fits and route.causal and route.position >= route.start

    def _dense(
        self, store: AscendStore, layer: int, query: Tensor, batch: list[DenseRoute], scale: float
    ) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
        """Yield (rows, output, LSE) for the sequences of one batch."""
        layout = store.layout
        dense = [self._history(store, layer, route) for route in batch]
        common = {
            "num_heads": layout.query_heads,
            "num_key_value_heads": layout.kv_heads,
            "scale": scale / HALVED[layout.dtype],
            "softmax_lse_flag": True,
        }
        fia = torch.ops.npu.npu_fused_infer_attention_score
        if all(self._packs(layout, route) for route in batch):
            rows = torch.cat([torch.arange(r.first, r.last, device=query.device) for r in batch])
            out, lse = fia(
                query[rows].contiguous(),
                torch.cat([key for key, _ in dense]),
                torch.cat([value for _, value in dense]),
                input_layout="TND",
                actual_seq_lengths=_cumulative([r.last - r.first for r in batch]),
                actual_seq_lengths_kv=_cumulative([r.length - r.start for r in batch]),
                sparse_mode=3,
                atten_mask=self._triangle(),
                **common,
            )
            yield rows, out / HALVED[layout.dtype], lse.squeeze(-1)
            return
        for route, (key, value) in zip(batch, dense, strict=True):
            first, mask = self._mask_of(route)
            if first >= route.last:
                continue
            out, lse = fia(
                query[first : route.last].unsqueeze(0).contiguous(),
                key.unsqueeze(0),
                value.unsqueeze(0),
                input_layout="BSND",
                **mask,
                **common,
            )
            yield slice(first, route.last), out[0] / HALVED[layout.dtype], lse[0, :, :, 0].T

    def _history(self, store: AscendStore, layer: int, route: DenseRoute) -> tuple[Tensor, Tensor]:
        """K and V ``(tokens, heads, dim)`` of one sequence, :data:`HALVED`, in the layout's dtype."""
        layout = store.layout
        page, last = route.start // layout.page_size, layout.pages_for(route.length)
        begin, end = route.start - page * layout.page_size, route.length - page * layout.page_size
        key, value = self._read(store, layer, route.pages[page:last])
        factor = HALVED[layout.dtype]
        return (
            (key.flatten(0, 1)[begin:end].float() * factor).to(layout.dtype).contiguous(),
            (value.flatten(0, 1)[begin:end].float() * factor).to(layout.dtype).contiguous(),
        )

    def _mask_of(self, route: DenseRoute) -> tuple[int, dict[str, Any]]:
        """First query row that sees something, and the operator's mask arguments for it and the later ones."""
        first = route.first + max(0, route.start - route.position)  # earlier rows see nothing
        rows, tokens = route.last - first, route.length - route.start
        if route.full or rows == 1:
            return first, {}
        if route.causal:
            return first, {"sparse_mode": 3, "atten_mask": self._triangle()}
        # Some rows see all of what is stored, others do not: a tier that ends inside this step.
        position = torch.arange(rows, device=self.torch_device).unsqueeze(1) + route.position + (first - route.first)
        hidden = torch.arange(tokens, device=self.torch_device) + route.start > position
        return first, {"sparse_mode": 1, "atten_mask": hidden.reshape(1, rows, tokens)}

    def _triangle(self) -> Tensor:
        if self._mask is None:
            # Made on the host, where triu is certain to exist.
            ones = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device="cpu")
            self._mask = ones.triu(1).to(self.torch_device)
        return self._mask


# ----------------------------------------------------------------------------------------------------------- append


def _without_skipped(key: Tensor, value: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Replace or drop rows with slot -1, of which the scatter operator's documentation says nothing.

    They go to slots of the spare page that nobody reads, each to its own because equal slots are not allowed. Only
    where there are more rows than the spare page has slots are they dropped, which waits for the device.
    """
    count = slots.shape[0]
    if count <= page_size:
        return key, value, torch.where(slots < 0, torch.arange(count, device=slots.device), slots)
    kept = (slots >= 0).nonzero().squeeze(-1)
    if kept.shape[0] == count:
        return key, value, slots
    return key[kept], value[kept], slots[kept]


def _mark_poison(flags: Tensor, poisoned: Tensor, slots: Tensor, page_size: int) -> None:
    """Sticky flags by page: cleared where a page begins anew with its first slot, then set where a NaN was met."""
    pages = slots // page_size
    begun = torch.zeros_like(flags, dtype=torch.int32)
    begun.index_put_((pages,), (slots % page_size == 0).to(torch.int32), accumulate=True)
    flags.masked_fill_(begun > 0, 0)
    seen = torch.zeros_like(begun).index_put_((pages,), poisoned.to(torch.int32), accumulate=True)
    flags.masked_fill_(seen > 0, 1)


def _raise_faint_rows(query: Tensor, scales: Tensor | None) -> Tensor:
    """``query`` ``(B, heads, D)`` with the first channel of rows below :data:`FAINT` raised to it.

    ``scales``: what the kernel multiplies a row by before it looks for the largest number, float32 ``(heads, D)``; None
    for nothing.
    """
    info = torch.finfo(query.dtype)
    smallest = info.smallest_normal if query.dtype == torch.bfloat16 else 2.0**-24
    if scales is None:
        operand, raised = query.float(), torch.full_like(query[..., 0], max(FAINT, smallest))
    else:
        operand = query.float() * scales
        raised = (FAINT / scales[:, 0]).clamp(smallest, info.max).to(query.dtype)
    first = torch.where(operand.abs().amax(dim=-1) < FAINT, raised, query[..., 0])
    return torch.cat([first.unsqueeze(-1), query[..., 1:]], dim=-1)


def _cumulative(counts: list[int]) -> list[int]:
    total, ends = 0, []
    for count in counts:
        total += count
        ends.append(total)
    return ends


# ------------------------------------------------------------------------------------------------------------- loading


def load(device: str) -> AscendBackend:
    """``"npu"`` or ``"npu:0"``: that device. ``"cpu"``: the emulated operators."""
    kind = device.partition(":")[0]
    layout = os.environ.get(ENVIRONMENT_LAYOUT, "nd")
    if kind == "cpu":
        return load_emulated(
            device,
            soc=os.environ.get(ENVIRONMENT_SOC, "A3"),
            numeric=os.environ.get(ENVIRONMENT_NUMERIC, "planes"),
            layout=layout,
        )
    found = probe(kind)
    if not found.usable:
        raise BackendUnavailable(f"{device}: {found.reason}")
    form = _form(layout)
    torch_device = torch.device(device)
    torch.npu.set_device(torch_device)  # type: ignore[attr-defined,unused-ignore]
    return AscendBackend(device, torch_device, SOCS[found.facts["soc"]], found.facts, form=form)


def load_emulated(
    device: str = "cpu", *, soc: str = "A3", numeric: str = "planes", layout: str = "nd"
) -> AscendBackend:
    """The backend on emulated operators by the rules of ``soc`` (A2, A3, 950), pages lying as ``layout`` (nd, nz)."""
    form = _form(layout)
    if soc not in SOCS:
        raise InvalidArgument(f"{ENVIRONMENT_SOC} is {soc!r}; one of {', '.join(SOCS)}")
    from kvport_ascend import emulator

    if numeric not in emulator.NUMERICS:
        raise InvalidArgument(f"{ENVIRONMENT_NUMERIC} is {numeric!r}; one of {', '.join(emulator.NUMERICS)}")
    emulator.load()
    facts = {
        "torch": str(torch.__version__),
        "emulated": f"operators of torch_npu {emulator.loaded()} for {soc}, arithmetic {numeric}; no device was used",
        "soc": soc,
    }
    return AscendBackend(device, torch.device("cpu"), SOCS[soc], facts, numeric=numeric, form=form)


def _form(layout: str) -> PageForm:
    if layout not in FORMS:
        raise InvalidArgument(f"{ENVIRONMENT_LAYOUT} is {layout!r}; one of {', '.join(FORMS)}")
    return FORMS[layout]
