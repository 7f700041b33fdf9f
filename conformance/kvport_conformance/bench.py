"""The bench a case works on: one backend, deterministic inputs, and the judge beside them.

:class:`Bench` is what a check receives. From it come a :class:`Held` store (operations called with raw arrays) or a
:class:`~kvport_conformance.served.Served` cache (sequences and steps). Both keep the judge's own account of what every
slot or position must hold, and compare whatever comes back from the backend with it.

Every byte that nobody has written is poison: stores are filled through ``buffers()`` right after they are allocated,
and what a backend allocates while it works is filled with NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvport.backend import Backend, Limits, Plan, StepArrays, Store, Support
from kvport.errors import ScaleError, Unsupported
from kvport.features import unmet
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_conformance import hints, inputs, judge, oracle_attention, oracle_rotation
from kvport_conformance.axes import Geometry, parse
from kvport_conformance.cases import Case
from kvport_conformance.content import Content, Ids
from kvport_conformance.figures import Figures
from kvport_conformance.oracle_floats import Array, Float32Array
from kvport_conformance.profiles import profiles_of
from kvport_conformance.tensors import (
    DTYPES,
    fill_bytes,
    plane_to_numpy,
    poisoned_allocations,
    to_torch,
)
from kvport_conformance.verdicts import Disagreement, NotSupported

__tracebackhide__ = True  # a backend's traceback leads from the check into the backend, not through here

#: Every byte of a fresh store: NaN to every float, -1 to signed and 255 to unsigned codes.
FILL: Final = judge.FILL


_derive = functools.cache(inputs.derive)


@functools.lru_cache(maxsize=256)
def _block(side: str, seed: int, heads: int, dim: int, dtype: str, tokens: int) -> Float32Array:
    generate = {"key": inputs.key, "value": inputs.value, "query": inputs.query}[side]
    block = generate(seed, (tokens, heads, dim), dtype=dtype)
    block.setflags(write=False)
    return block


def _run(side: str, seed: int, heads: int, dim: int, dtype: str, start: int, count: int) -> Float32Array:
    """Rows start .. start + count - 1 of a stream, as a copy; blocks are kept, because cases use the same ones."""
    tokens = 64
    while tokens < start + count:
        tokens *= 2
    return _block(side, seed, heads, dim, dtype, tokens)[start : start + count].copy()


#: Query rows of one sequence up to which the oracle computes all of them.
SAMPLED_ROWS: Final = 24


def group_layout(format_text: str, shape: Geometry) -> GroupLayout:
    """What a backend is asked to store for a format and a geometry: tiers and rotation are the core's affair."""
    return GroupLayout(
        format=parse(format_text).far(),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        query_heads=shape.query_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        page_size=shape.page_size,
        window=shape.window,
        dtype=DTYPES[shape.dtype],
        latent=shape.latent,
    )


class Bench:
    """One backend, one case, one seed."""

    def __init__(self, backend: Backend, case: Case, *, seed: int = 0) -> None:
        self.backend = backend
        self.case = case
        self.seed = seed
        self.figures = Figures()
        self.exactness: str = getattr(backend, "exactness", "bit-exact")
        self.weight_error: float = getattr(backend, "weight_error", 0.0)
        self.record: dict[str, Any] = {
            "id": case.id,
            "chapter": case.chapter,
            "tier": case.tier,
            "check": case.check,
            "format": case.format,
            "geometry": case.geometry.name,
            "profiles": list(profiles_of(case)),
            # What the backend declares of itself and is allowed by it: it belongs beside what was observed.
            **({"declared_exactness": self.exactness} if self.exactness != "bit-exact" else {}),
            **({"declared_weight_error": self.weight_error} if self.weight_error else {}),
        }

    def run(self) -> None:
        """Run the case. Returns where it passed; raises :class:`Disagreement` or :class:`NotSupported`."""
        try:
            self.case.function(self)
        except Unsupported as refusal:
            raise Disagreement(
                f"support() accepted the layout, and then an operation declined it: {refusal}"
            ) from refusal
        finally:
            self.record.update(self.figures.to_json())

    # -- what the case is about ----------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        return self.case.geometry

    def option(self, name: str) -> Any:
        return dict(self.case.options)[name]

    @property
    def dtype(self) -> str:
        """The model's float dtype: that of K, V and queries."""
        return self.geometry.dtype

    def layout(
        self, format_text: str | None = None, geometry: Geometry | None = None, *, tiered: bool = False
    ) -> GroupLayout:
        """The layout of the case (or of another format and geometry, or of one tier of two); ends the case where the
        backend declines it."""
        layout = group_layout(format_text or self.case.format, geometry or self.geometry)
        self.require(layout, tiered=tiered)
        return layout

    def require(self, layout: GroupLayout, *, tiered: bool = False) -> Support:
        """The backend's answer for a layout, which must be yes, with the features that the case needs."""
        support = self.backend.support(layout)
        if not isinstance(support, Support):
            raise Disagreement(f"support() must return a kvport.backend.Support, got {type(support).__name__}")
        if reasons := unmet(support, layout, tiered=tiered, wanted=self.case.requires):
            raise NotSupported("; ".join(reasons))
        return support

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        scales: Sequence[LayerScales] | None,
        *,
        storage: dict[str, Tensor] | None = None,
    ) -> Store:
        """A store of the backend. Ends the case where these static scales break the rule that it declared for them."""
        with self.judging_scales(layout, scales):
            return self.backend.allocate(layout, pages, scales=scales, storage=storage)

    @contextmanager
    def judging_scales(self, layout: GroupLayout, scales: Iterable[LayerScales] | None) -> Iterator[None]:
        """Inside, a ScaleError ends the case as not supported, where the backend declared a rule for static scales.

        It is a disagreement where no rule was declared, and where the rule declines scales that every float dtype
        holds: then it is no rule but a refusal, which support() must make.
        """
        try:
            yield
        except ScaleError as refusal:
            rule = self.backend.support(layout).scale_rule
            if not rule or scales is None:
                raise Disagreement(
                    f"ScaleError for scales that support() says nothing of: {refusal}; a backend that cannot hold all "
                    "static scales declares which it can, as Support.scale_rule"
                ) from refusal
            try:
                self.backend.allocate(layout, 2, scales=[_plain_scales(layer) for layer in scales])
            except ScaleError as again:
                raise Disagreement(
                    f"scale_rule {rule!r} takes not even scales of 1/64 and zeros of -2: {again}; "
                    "decline the format in support()"
                ) from again
            raise NotSupported(f"declared of static scales: {rule}") from refusal

    def gives_lse(self, layout: GroupLayout) -> bool:
        """Whether attend's LSE means anything for this layout; where it does not, it must not look as if it did."""
        return "lse" in self.backend.support(layout).features

    # -- inputs --------------------------------------------------------------------------------------------------

    def content(self, layout: GroupLayout, layer: int, rotate: int | None = None) -> Content:
        content = Content.of(layout, _derive(self.seed, "scales", layer), rotate)
        for name, side in content.sides.items():
            if side.static_scale is not None:
                self.figures.given(f"{name}.scale", side.static_scale)
            if side.static_zero is not None:
                self.figures.given(f"{name}.zero", side.static_zero)
        return content

    def tokens(
        self,
        layout: GroupLayout,
        layer: int,
        count: int,
        *,
        start: int = 0,
        stream: str = "a",
        dtype: str | None = None,
    ) -> tuple[Float32Array, Float32Array]:
        """K and V of ``count`` tokens of a layer, from position ``start`` of a named stream. A latent layer's V is the
        latent part of its K."""
        seed = _derive(self.seed, "tokens", stream, layer)
        name = dtype or self.dtype
        key = _run("key", seed, layout.kv_heads, layout.key_dim, name, start, count)
        if layout.latent:
            return key, key[..., : layout.value_dim].copy()
        value = _run("value", seed, layout.kv_heads, layout.value_dim, name, start, count)
        return key, value

    def queries(
        self, layout: GroupLayout, count: int, *, stream: str = "a", start: int = 0, dtype: str | None = None
    ) -> Float32Array:
        seed = _derive(self.seed, "queries", stream)
        return _run("query", seed, layout.query_heads, layout.key_dim, dtype or self.dtype, start, count)

    def shuffled_pages(self, pages: int, count: int, name: str = "pages") -> list[int]:
        """``count`` different page ids of 1 .. pages-1 in no order (0 is the spare)."""
        order = inputs.permutation(_derive(self.seed, name, pages), pages - 1) + 1
        return [int(page) for page in order[:count]]

    def held(self, pages: int, layout: GroupLayout | None = None, *, fill: int | None = FILL, **how: Any) -> Held:
        """A fresh store of this many pages (the spare included), every byte of it ``fill``."""
        return Held(self, layout or self.layout(), pages, fill=fill, **how)


def _plain_scales(layer: LayerScales) -> LayerScales:
    """The same with scales of 1/64 and zeros of -2."""

    def plain(side: SideScales | None) -> SideScales | None:
        if side is None:
            return None
        zero = None if side.zero is None else torch.full_like(side.zero, -2.0)
        return SideScales(torch.full_like(side.scale, 1 / 64), zero)

    return replace(layer, key=plain(layer.key), value=plain(layer.value))


@dataclass(frozen=True)
class Row:
    """One sequence of a batch: the pages of its positions, its length, and how many of its last rows are queries.

    ``first`` is the position of the first query row where the queries are not the last rows: in a partial over some of
    the keys. Positions before ``kv_start`` are not held; their table entries are the spare page.
    """

    pages: Sequence[int]
    length: int
    queries: int = 1
    kv_start: int = 0
    first: int | None = None

    @property
    def position(self) -> int:
        """The position of the first query row."""
        return self.length - self.queries if self.first is None else self.first


@dataclass(frozen=True)
class Planned:
    """A plan and the batch it was made for."""

    plan: Plan
    rows: tuple[Row, ...]


class Held:
    """A store driven by raw arrays, and what the judge knows of it.

    ``slots[layer, page * P + offset]`` is the number of the token that lies there in the layer's :class:`Content`,
    -1 where nothing was written; ``former`` is what lay there before the last copy or import.
    """

    def __init__(
        self,
        bench: Bench,
        layout: GroupLayout,
        pages: int,
        *,
        fill: int | None = FILL,
        contents: Sequence[Content] | None = None,
        storage: dict[str, Tensor] | None = None,
    ) -> None:
        """``contents`` are the layers' tables, where not fresh ones with the bench's static scales."""
        self.bench, self.layout, self.pages = bench, layout, pages
        self.contents = list(contents or (bench.content(layout, layer) for layer in range(layout.layers)))
        self.store: Store = bench.allocate(layout, pages, self.scales(), storage=storage)
        self.slots = np.full((layout.layers, pages * layout.page_size), -1, np.int64)
        self.former = self.slots.copy()
        if fill is not None:
            for buffer in bench.backend.buffers(self.store).values():
                fill_bytes(buffer, fill)

    def scales(self) -> list[LayerScales] | None:
        """What the store's format needed beforehand."""
        return [content.scales() for content in self.contents] if self.layout.format.calibrated else None

    @property
    def device(self) -> torch.device:
        return self.bench.backend.torch_device

    def slots_of(self, pages: Sequence[int], first: int, last: int) -> Ids:
        """Slots of positions first .. last-1 of a sequence on these pages."""
        size = self.layout.page_size
        position = np.arange(first, last, dtype=np.int64)
        return np.asarray(pages, np.int64)[position // size] * size + position % size

    # -- writing -------------------------------------------------------------------------------------------------

    def append(
        self,
        layer: int,
        key: Float32Array,
        value: Float32Array,
        slots: npt.ArrayLike,
        *,
        dtype: str | None = None,
        form: str = "packed",
    ) -> Ids:
        """Append rows at slots (-1 skips one) and record what they must have become. Returns their token numbers."""
        name = dtype or self.bench.dtype
        where = np.asarray(slots, np.int64)
        for what, array in ((f"key {name}", key), (f"value {name}", value), ("slots", where)):
            self.bench.figures.given(what, array)
        k, v = (to_torch(x, name, self.device, form) for x in (key, value))
        before = (k.clone(), v.clone())
        given = torch.from_numpy(where.copy()).to(self.device)
        with poisoned_allocations():
            answer = self.bench.backend.append(self.store, layer, k, None if self.layout.latent else v, given)
        if answer is not None:
            raise Disagreement(f"append returns None, got {type(answer).__name__}")
        for what, now, then in (("key", k, before[0]), ("value", v, before[1])):
            if not torch.equal(torch.nan_to_num(now), torch.nan_to_num(then)):
                raise Disagreement(f"append changed its {what} argument")
        if not np.array_equal(given.cpu().numpy(), where):
            raise Disagreement("append changed its slots argument")
        ids = self.contents[layer].add(key, value)
        kept = where >= 0
        self.slots[layer, where[kept]] = ids[kept]
        return ids

    def append_run(
        self, layer: int, pages: Sequence[int], first: int, last: int, *, stream: str = "a", **how: Any
    ) -> Ids:
        """Append positions first .. last-1 of a named stream to a sequence on these pages."""
        key, value = self.bench.tokens(self.layout, layer, last - first, start=first, stream=stream, **_dtype(how))
        return self.append(layer, key, value, self.slots_of(pages, first, last), **how)

    def fill_sequence(self, pages: Sequence[int], length: int, *, stream: str = "a", **how: Any) -> None:
        """Append a whole sequence to every layer."""
        for layer in range(self.layout.layers):
            self.append_run(layer, pages, 0, length, stream=stream, **how)

    def import_tokens(self, layer: int, pages: Sequence[int], ids: Ids) -> None:
        """Import whole pages holding these tokens (page by page, slot by slot)."""
        planes = self.contents[layer].torch_planes(ids, (len(pages), self.layout.page_size), self.layout)
        self.former = self.slots.copy()
        for plane, tensor in planes.items():
            self.bench.figures.given(plane, plane_to_numpy(tensor))
        self.bench.backend.import_pages(self.store, layer, list(pages), planes)
        self.slots[layer, self.slots_of(pages, 0, len(ids))] = ids

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.former = self.slots.copy()
        self.bench.backend.copy_pages(self.store, list(source), list(target))
        size = self.layout.page_size
        view = self.slots.reshape(self.layout.layers, self.pages, size)
        view[:, list(target)] = view[:, list(source)]

    # -- reading back --------------------------------------------------------------------------------------------

    def export(self, layer: int, pages: Sequence[int]) -> dict[str, Array]:
        """The planes of these pages as the judge holds them, each ``(pages, *plane shape)``; shapes are checked."""
        exported = self.bench.backend.export_pages(self.store, layer, list(pages))
        wanted = {plane.name: ((len(pages), *plane.shape), plane.dtype) for plane in self.layout.planes}
        got = {name: (tuple(t.shape), t.dtype) for name, t in exported.items()}
        if got != wanted:
            raise Disagreement(f"export_pages must give the planes {wanted}, got {got}")
        if any(t.device.type != "cpu" for t in exported.values()):
            raise Disagreement("export_pages must give host tensors")
        return {name: plane_to_numpy(tensor) for name, tensor in exported.items()}

    def check(
        self, layers: Iterable[int] | None = None, pages: Sequence[int] | None = None, *, unambiguous: bool = False
    ) -> None:
        """Export pages (all that hold a token, where not given) and compare every written slot with the judge's."""
        size = self.layout.page_size
        for layer in range(self.layout.layers) if layers is None else layers:
            held = self.slots[layer].reshape(self.pages, size)
            chosen = np.flatnonzero((held >= 0).any(axis=1)) if pages is None else np.asarray(list(pages))
            if not len(chosen):
                continue
            exported = self.export(layer, [int(p) for p in chosen])
            page, offset = np.nonzero(held[chosen] >= 0)
            places = [f"layer {layer}, page {chosen[p]}, slot {o}" for p, o in zip(page, offset, strict=True)]
            judge.judge_planes(
                self.contents[layer],
                held[chosen][page, offset],
                {name: self.contents[layer].by_token(name, array)[page, offset] for name, array in exported.items()},
                places,
                self.bench.figures,
                exactness=self.bench.exactness,
                unambiguous=unambiguous,
                former=self.former[layer].reshape(self.pages, size)[chosen][page, offset],
            )

    def snapshot(self, pages: Sequence[int], layers: Iterable[int] | None = None) -> dict[tuple[int, str], bytes]:
        """The exported bytes of these pages, for comparisons with a later moment."""
        return {
            (layer, name): array.tobytes()
            for layer in (range(self.layout.layers) if layers is None else layers)
            for name, array in self.export(layer, pages).items()
        }

    def gather(self, layer: int, rows: Sequence[Row]) -> None:
        """Gather these sequences in float32 and compare with the decoded tokens; past a length there are zeros."""
        table, lengths = _table(rows), [row.length for row in rows]
        with poisoned_allocations():
            key, value = self.bench.backend.gather(
                self.store, layer, torch.from_numpy(table).to(self.device), lengths, torch.float32
            )
        layout = self.layout
        for name, tensor, dim in (("key", key, layout.key_dim), ("value", value, layout.value_dim)):
            shape = (len(rows), max(lengths), layout.kv_heads, dim)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                raise Disagreement(f"gather must give {name} {shape} float32, got {tuple(tensor.shape)} {tensor.dtype}")
            dense = tensor.detach().cpu().numpy()
            for s, row in enumerate(rows):
                ids = self._ids(layer, row)
                places = [f"layer {layer}, sequence {s}, position {p}" for p in range(row.length)]
                judge.judge_gathered(
                    self.contents[layer], name, ids, dense[s, : row.length], self.bench.exactness, places
                )
                if dense[s, row.length :].any():
                    raise Disagreement(f"gather: {name} of sequence {s} is not zero past its length {row.length}")

    # -- attention -----------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row], *, columns: int = 0) -> Planned:
        """Plan a batch; ``columns`` are columns of padding that the page table has beyond the longest sequence."""
        arrays = self._arrays(rows, _table(rows, columns))
        with poisoned_allocations():
            plan = self.bench.backend.plan(self.store, arrays)
        return Planned(plan, tuple(rows))

    def refill(self, plan: Plan, limits: Limits, rows: Sequence[Row]) -> None:
        """Fill a fixed plan with a batch; the sequences up to its limits are empty and have no queries."""
        empty = [Row([], 0, 0)] * (limits.sequences - len(rows))
        table = np.zeros((limits.sequences, limits.pages), np.int32)
        for s, row in enumerate(rows):
            table[s, : len(row.pages)] = row.pages
        with poisoned_allocations():
            self.bench.backend.refill(self.store, plan, self._arrays([*rows, *empty], table))

    def _arrays(self, rows: Sequence[Row], table: npt.NDArray[np.int32]) -> StepArrays:
        counts = [row.queries for row in rows]

        def int32(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32)

        return StepArrays(
            page_table=torch.from_numpy(table),
            kv_start=int32(row.kv_start for row in rows),
            lengths=int32(row.length for row in rows),
            query_starts=int32([0, *np.cumsum(counts).tolist()]),
            query_positions=int32(row.position for row in rows),
        )

    def attend(
        self,
        layer: int,
        planned: Planned | Sequence[Row],
        query: Float32Array,
        *,
        dtype: str | None = None,
        form: str = "packed",
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Float32Array | None = None,
        partial: bool = False,
        judged: bool = True,
    ) -> tuple[Float32Array, Float32Array]:
        """Attend and compare every sequence with the oracle. Returns output and LSE as float32 on the host."""
        plan = planned if isinstance(planned, Planned) else self.plan(planned)
        name = dtype or self.bench.dtype
        scale = 1.0 / math.sqrt(self.layout.key_dim) if scale is None else scale
        self.bench.figures.given(f"query {name}", query)
        tensor = to_torch(query, name, self.device, form)
        logits = None if sinks is None else torch.from_numpy(sinks.copy()).to(self.device)
        with poisoned_allocations():
            answer = self.bench.backend.attend(
                self.store, layer, tensor, plan.plan, scale=scale, softcap=softcap, sinks=logits, partial=partial
            )
        if not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(to_torch(query, name, self.device, form))):
            raise Disagreement("attend changed its query argument")
        given = {"scale": scale, "softcap": softcap, "window": self.layout.window, "sinks": sinks}
        return self.judge(answer, layer, plan.rows if judged else (), query, name=name, partial=partial, given=given)

    def judge(
        self,
        answer: Any,
        layer: int,
        judged: Sequence[Row],
        query: Float32Array,
        *,
        given: dict[str, Any],
        name: str | None = None,
        partial: bool = False,
    ) -> tuple[Float32Array, Float32Array]:
        """Compare what attend gave for these queries with the oracle; returns it as float32 on the host."""
        name = name or self.bench.dtype
        out, lse = self._answer(answer, query, torch.float32 if partial else DTYPES[name])
        first = 0
        for s, row in enumerate(judged):
            rows = slice(first, first := first + row.queries)
            content, ids = self.contents[layer], self._ids(layer, row)
            key, value = (content.decoded[n][ids] for n in ("key", "value"))
            start = row.position - row.kv_start
            judge_rows(
                (out[rows], lse[rows]),
                query[rows],
                key,
                value,
                start,
                given,
                "float32" if partial and name == "float32" else name,
                f"layer {layer}, sequence {s} (length {row.length}, {row.queries} query rows)",
                self.bench.figures,
                lse=self.bench.gives_lse(self.layout),
                weight_error=self.bench.weight_error,
                tokens=(content, ids),
            )
        return out, lse

    def _answer(self, answer: Any, query: Float32Array, dtype: torch.dtype) -> tuple[Float32Array, Float32Array]:
        return check_answer(answer, len(query), self.layout, dtype)

    def _ids(self, layer: int, row: Row) -> Ids:
        ids: Ids = self.slots[layer, self.slots_of(row.pages, row.kv_start, row.length)]
        if (ids < 0).any():
            raise RuntimeError(f"the case reads positions of {row} that nobody wrote")
        return ids


def check_answer(
    answer: Any, tokens: int, layout: GroupLayout, dtype: torch.dtype
) -> tuple[Float32Array, Float32Array]:
    """What attend returned, after its types and shapes were checked, as float32 on the host."""
    if not isinstance(answer, tuple) or len(answer) != 2 or not all(isinstance(t, Tensor) for t in answer):
        raise Disagreement(f"attend must return a pair of tensors (output, LSE), got {type(answer).__name__}")
    out, lse = answer
    wanted = ((tokens, layout.query_heads, layout.value_dim), dtype), ((tokens, layout.query_heads), torch.float32)
    got = (tuple(out.shape), out.dtype), (tuple(lse.shape), lse.dtype)
    if got != wanted:
        raise Disagreement(f"attend must return output and LSE of {wanted}, got {got}")
    return out.detach().float().cpu().numpy(), lse.detach().cpu().numpy()


def judge_rows(
    observed: tuple[Float32Array, Float32Array],
    query: Float32Array,
    key: Float32Array,
    value: Float32Array,
    start: int,
    given: dict[str, Any],
    query_dtype: str,
    who: str,
    figures: Figures,
    *,
    lse: bool = True,
    weight_error: float = 0.0,
    tokens: tuple[Content, Ids] | None = None,
    turned: tuple[int, int] | None = None,
) -> None:
    """Judge the query rows of one sequence against float64 attention over its decoded keys and values.

    ``turned``: (seed, dim) of the rotation that the values are behind, and the observed outputs turned back from.
    ``lse`` is False where the backend declares that it gives none: all of it must be NaN then. ``weight_error`` is
    what it declares of its softmax weights, see ``oracle_attention.attention_bound``. ``tokens`` are the table and the
    numbers of the tokens behind ``key`` and ``value``, where one table has them all; only hints need them.

    Of more than :data:`SAMPLED_ROWS` rows, only runs of rows at the begin, at the end and around every 16th are
    computed by the oracle (they include all page boundaries); the others must at least be finite where those are.
    """
    asked = ", ".join(
        f"{name} {'given' if name == 'sinks' else value}" for name, value in given.items() if value is not None
    )
    figures.answered(*observed, f"{who}, {asked}")
    if not lse and not np.isnan(observed[1]).all():
        raise Disagreement(f"support() declares no LSE, but that of {who} holds numbers; it must be NaN")
    for first, last in _sampled(len(query), start):
        rows = slice(first, last)
        seen = observed[0][rows], observed[1][rows]
        begin = start + first
        # Later keys than the run's last position are invisible to it; leaving them out keeps the oracle quick.
        end = max(0, min(len(key), begin + last - first))
        arguments = query[rows], key[:end], value[:end]
        expected = oracle_attention.attend(*arguments, query_start=begin, **given)
        bound = oracle_attention.attention_bound(
            *arguments, query_start=begin, query_dtype=query_dtype, weight_error=weight_error, **given
        )
        if turned is not None:
            step = oracle_attention.PRODUCT_ERROR[query_dtype]
            back, allowed = oracle_rotation.turn_back(expected[0], bound[0], *turned, step)
            expected, bound = (back, expected[1]), (allowed, bound[1])
        judge.judge_attention(
            observed=seen,
            expected=expected,
            bound=bound,
            who=who if (first, last) == (0, len(query)) else f"{who}, rows {first} .. {last - 1}",
            figures=figures,
            lse=lse,
            hint=functools.partial(
                hints.attended,
                hints.Attended(
                    seen,
                    query[rows],
                    key,
                    value,
                    begin,
                    given,
                    query_dtype,
                    weight_error,
                    lse,
                    *(tokens or (None, None)),
                ),
            ),
        )
    if np.isfinite(key).all() and np.isfinite(value).all() and not np.isfinite(observed[0]).all():
        bad = np.flatnonzero(~np.isfinite(observed[0]).all(axis=(1, 2)))
        raise Disagreement(f"output of {who} is not finite in query rows {bad.tolist()}")


def _sampled(count: int, start: int) -> list[tuple[int, int]]:
    """Runs (first, last + 1) of query rows to judge, of ``count`` rows whose first is at position ``start``."""
    if count <= SAMPLED_ROWS:
        return [(0, count)] if count else []
    runs = [(0, 2), (count - 2, count)]
    step = 16 * -(-count // 256)
    runs += [(edge - start - 1, edge - start + 1) for edge in range((start // step + 1) * step, start + count, step)]
    return sorted({(max(0, first), min(count, last)) for first, last in runs})


def _table(rows: Sequence[Row], columns: int = 0) -> npt.NDArray[np.int32]:
    width = max((len(row.pages) for row in rows), default=0) + columns
    table = np.zeros((len(rows), width), np.int32)
    for s, row in enumerate(rows):
        table[s, : len(row.pages)] = row.pages
    return table


def _dtype(how: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": how["dtype"]} if "dtype" in how else {}
