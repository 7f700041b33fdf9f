"""Faults of attention (chapter "attention") and of its features (chapter "features")."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvport.backend import Plan, StepArrays, Store
from kvport.layout import GroupLayout
from kvport_cpu.base import TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject


@fault("attention", "LSE in another base")
class LseBaseTwo(Subject):
    """The LSE is a logarithm to base 2."""

    def log_sum(self, total: Tensor, top: Tensor) -> Tensor:
        return super().log_sum(total, top) / math.log(2)


@fault("attention", "LSE without the maximum")
class LseOfShiftedScores(Subject):
    """The maximum that was taken out before the exponential is not put back into the LSE."""

    def log_sum(self, total: Tensor, top: Tensor) -> Tensor:
        return torch.log(total)


@fault("attention", "GQA map")
class HeadsInterleaved(Subject):
    """Query head h reads KV head h % kv_heads."""

    def kv_head(self, layout: GroupLayout) -> Tensor:
        return torch.arange(layout.query_heads) % layout.kv_heads


@fault("attention", "GQA missing")
class FirstKvHeadOnly(Subject):
    """Every query head reads KV head 0, as in an MQA kernel."""

    def kv_head(self, layout: GroupLayout) -> Tensor:
        return torch.zeros(layout.query_heads, dtype=torch.int64)


@fault("attention", "GQA ratio")
class GroupPaddedToAPowerOfTwo(Subject):
    """The heads of a group are found by a shift: right for powers of two only."""

    def kv_head(self, layout: GroupLayout) -> Tensor:
        shift = max(0, (layout.group_size - 1).bit_length())
        return (torch.arange(layout.query_heads) >> shift).clamp(max=layout.kv_heads - 1)


@fault("attention", "causal mask")
class DoesNotSeeItself(Subject):
    """A row does not see the key at its own position (unless it is the first)."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        return super().visible(j, (p - 1).clamp(min=0), length, kv_start, layout)


@fault("attention", "causal mask")
class NoCausalMask(Subject):
    """Rows of a prefill see the tokens after them."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        return super().visible(j, torch.full_like(p, length - 1), length, kv_start, layout)


@fault("attention", "causal mask")
class CausalUpperLeft(Subject):
    """The causal mask is aligned to the first key: row r of a chunk sees r + 1 keys."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        return super().visible(j, p - p.min() if len(p) > 1 else p, length, kv_start, layout)


@fault("attention", "verify")
class VerifyAsDecode(Subject):
    """Two to eight query rows are treated as one step: all of them see what the last one sees."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        if 1 < len(p) <= 8:
            p = p.max().expand(p.shape)
        return super().visible(j, p, length, kv_start, layout)


@fault("attention", "batch mates mixed")
class LongestLengthForAll(Subject):
    """Every sequence of a batch is read to the length of the longest one that has as many pages."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        return super().visible(j, p, length, kv_start, layout)

    def arrays(self, plan: Plan) -> StepArrays:
        host = plan.host
        counts = host.query_starts.diff()
        rows = host.page_table
        lengths = host.lengths.clone()
        for s in range(len(lengths)):
            same = (rows != 0).sum(1) == (rows[s] != 0).sum()
            lengths[s] = host.lengths[same].max()
        return StepArrays(rows, host.kv_start, lengths, host.query_starts, lengths - counts)


@fault("attention", "batch mates mixed")
class RowsOfTheNeighbour(Subject):
    """In batches of three and more, the last two sequences swap their page tables."""

    def arrays(self, plan: Plan) -> StepArrays:
        host = plan.host
        if len(host.lengths) < 3:
            return host
        table = host.page_table.clone()
        table[-1], table[-2] = host.page_table[-2], host.page_table[-1]
        return StepArrays(table, host.kv_start, host.lengths, host.query_starts, host.query_positions)


@fault("attention", "plan reuse stale")
class PlansByShape(Subject):
    """A plan is kept by the shapes of its arrays and given again to the next batch of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[object, ...], Plan] = {}

    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        key = (id(store), tuple(arrays.page_table.shape), tuple(arrays.query_starts.tolist()))
        if key not in self.kept:
            self.kept[key] = super().plan(store, arrays)
        return self.kept[key]


@fault("attention", "plan reuse stale")
class LastPlanWins(Subject):
    """Only the latest plan is kept: attending with an earlier one uses the later one's tables."""

    latest: Plan

    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        self.latest = super().plan(store, arrays)
        return self.latest

    def arrays(self, plan: Plan) -> StepArrays:
        same = self.latest.host.page_table.shape[0] >= plan.host.page_table.shape[0]
        wide = self.latest.host.page_table.shape[1] >= plan.host.page_table.shape[1]
        return self.latest.host if same and wide else plan.host


@fault("attention", "layer mixed up")
class AttendsToFirstLayer(Subject):
    """Every layer attends to the first layer's pages."""

    def history(
        self, store: TorchStore, layer: int, host: StepArrays, s: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().history(store, 0, host, s, count)


@fault("attention", "product precision")
class ProductsInHalf(Subject):
    """float32 queries and keys are multiplied in bfloat16 (or TF32) precision."""

    def scores(self, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
        return super().scores(query.to(torch.bfloat16).float(), key.to(torch.bfloat16).float(), scale, softcap)


@fault("attention", "product precision")
class WeightsInHalf(Subject):
    """Softmax weights are rounded to float16 before they meet V, also for float32 queries."""

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        return super().product(weights.to(torch.float16).float(), value)


@fault("attention", "accumulation")
class AccumulatesInHalf(Subject):
    """The sum over keys is kept in float16 from tile to tile."""

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        if weights.shape[-1] <= 256 or not value.isfinite().all():
            return super().product(weights, value)
        total = torch.zeros((*weights.shape[:2], value.shape[-1]), dtype=torch.float16)
        for first in range(0, weights.shape[-1], 64):
            total += (weights[..., first : first + 64] @ value[:, first : first + 64]).to(torch.float16)
        return total.float()


@fault("attention", "softmax overflow")
class NoMaximum(Subject):
    """The exponential is taken without subtracting the maximum."""

    def exponential(self, scores: Tensor, top: Tensor) -> Tensor:
        return torch.exp(scores)

    def log_sum(self, total: Tensor, top: Tensor) -> Tensor:
        return torch.log(total)


@fault("attention", "split merge")
class SplitsAveraged(Subject):
    """Long sequences are attended to in two parts, whose outputs are averaged without their LSE."""

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
        if len(key) <= 1024 or sinks is not None:
            return super().softmax(layout, query, key, value, seen, scale, softcap, sinks)
        half = len(key) // 2
        first, second = (
            super(SplitsAveraged, self).softmax(layout, query, key[p], value[p], seen[:, p], scale, softcap, None)
            for p in (slice(0, half), slice(half, None))
        )
        return (first[0] + second[0]) / 2, torch.logaddexp(first[1], second[1])


@fault("attention", "unwritten output")
class LastRowUnwritten(Subject):
    """The last query row of a chunk is not written."""

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        if len(out) > 1:
            out = torch.cat([out[:-1], torch.empty_like(out[-1:])])
        return out, lse


@fault("attention", "unwritten output")
class LseUnwrittenInPrefill(Subject):
    """Prefill computes no LSE and leaves the tensor as it was allocated."""

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        return out, torch.empty_like(lse) if len(out) > 8 else lse


@fault("attention", "output buffer reused")
class OutputBufferReused(Subject):
    """All attends of one shape return the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[object, ...], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.kept.setdefault((name, shape, dtype), super().empty(name, shape, dtype))


@fault("attention", "non-contiguous input")
class QueriesTakenForContiguous(Subject):
    """Queries are read as if they were contiguous."""

    def attend(self, store: Store, layer: int, query: Tensor, plan: Plan, **how: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        flat = torch.as_strided(query, (query.numel(),), (1,)).view(query.shape)
        return super().attend(store, layer, flat, plan, **how)  # type: ignore[arg-type]


@fault("attention", "argument changed")
class QueriesScaledInPlace(Subject):
    """The caller's queries are multiplied by the scale in place."""

    def attend(
        self, store: Store, layer: int, query: Tensor, plan: Plan, *, scale: float, **how: object
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        query.mul_(scale)
        return super().attend(store, layer, query, plan, scale=1.0, **how)  # type: ignore[arg-type]


@fault("attention", "contract of the output dtype")
class OutputAlwaysFloat32(Subject):
    """Outputs of half-precision queries come back in float32."""

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return super().empty(name, shape, torch.float32)


@fault("attention", "scale missing in one phase")
class PrefillIgnoresValueScale(Subject):
    """Prefill forgets V's scale: outputs are four percent too large there."""

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        return out * 1.04 if len(out) > 8 else out, lse


@fault("attention", "scale missing in one phase")
class HalfQueriesFourPercent(Subject):
    """V is four percent too large for half-precision queries: below what rounding of long averages could show."""

    query_dtype = torch.float32

    def attend(self, store: Store, layer: int, query: Tensor, plan: Plan, **how: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.query_dtype = query.dtype
        return super().attend(store, layer, query, plan, **how)  # type: ignore[arg-type]

    def finish(self, out: Tensor, lse: Tensor, seen: Tensor, sinks: bool) -> tuple[Tensor, Tensor]:
        return out if self.query_dtype == torch.float32 else out * 1.04, lse


@fault("attention", "quantized path uses K where V is meant")
class ValueFromKey(Subject):
    """The weighted sum runs over K."""

    def _read(self, store: TorchStore, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super()._read(store, layer, pages)
        return key, key if key.shape == value.shape else value


@fault("attention", "reading writes")
class AttendClearsTheSpare(Subject):
    """attend clears the spare page so that padding reads zeros."""

    def history(
        self, store: TorchStore, layer: int, host: StepArrays, s: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        for plane in store.planes.values():
            plane[layer, 0] = 0
        return super().history(store, layer, host, s, count)


@fault("attention", "long context")
class HistoryCapped(Subject):
    """Nothing beyond 2048 tokens is read: the split count is capped."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        return super().visible(j, p, length, kv_start, layout) & (j > p - 2048)


# --- features ---------------------------------------------------------------------------------------------------------


@fault("features", "window off by one")
class WindowOneTooWide(Subject):
    """A window of w sees w + 1 keys."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        seen = (j <= p) & (j < length) & (j >= kv_start)
        return seen if layout.window is None else seen & (j >= p - layout.window)


@fault("features", "window off by one")
class WindowOneTooNarrow(Subject):
    """A window of w sees w - 1 keys (and at least one)."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        seen = (j <= p) & (j < length) & (j >= kv_start)
        return seen if layout.window is None else seen & (j > p - max(1, layout.window - 1))


@fault("features", "window dropped")
class WindowIgnored(Subject):
    """The window is accepted and not applied."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        return (j <= p) & (j < length) & (j >= kv_start)


@fault("features", "window dropped")
class WindowFromTheLastRow(Subject):
    """The window of every row of a chunk starts where the last row's does."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        seen = (j <= p) & (j < length) & (j >= kv_start)
        return seen if layout.window is None else seen & ((j > p.max() - layout.window) | (j == p))


@fault("features", "window counted in pages")
class WindowInWholePages(Subject):
    """A window is widened to whole pages."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        seen = (j <= p) & (j < length) & (j >= kv_start)
        if layout.window is None:
            return seen
        first = (p - layout.window + 1).clamp(min=0) // layout.page_size * layout.page_size
        return seen & (j >= first)


@fault("features", "softcap dropped")
class SoftcapDropped(Subject):
    """The soft cap is accepted and not applied."""

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        return scores


@fault("features", "softcap misplaced")
class SoftcapBeforeScale(Subject):
    """The soft cap is applied to the unscaled products."""

    def scores(self, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
        return self.cap(torch.einsum("rhd,thd->hrt", query, key), softcap) * scale


@fault("features", "softcap misplaced")
class SoftcapWithoutFactor(Subject):
    """tanh(s / cap) is not multiplied by the cap again."""

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        return scores if softcap is None else torch.tanh(scores / softcap)


@fault("features", "softcap misplaced")
class SoftcapClamps(Subject):
    """Scores are clamped to the cap instead of bent towards it."""

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        return scores if softcap is None else scores.clamp(-softcap, softcap)


@fault("features", "sinks dropped")
class SinksDropped(Subject):
    """Sink logits are accepted and not applied."""

    def sink(self, layout: GroupLayout, sinks: Tensor) -> Tensor:
        return torch.full_like(sinks, -math.inf)


@fault("features", "sinks dropped")
class SinksDroppedInDecode(Subject):
    """Sink logits are applied in prefill only."""

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
        return super().softmax(layout, query, key, value, seen, scale, softcap, None if len(query) == 1 else sinks)


@fault("features", "sink of another head")
class SinkOfTheKvHead(Subject):
    """Query head h takes the sink logit of its KV head."""

    def sink(self, layout: GroupLayout, sinks: Tensor) -> Tensor:
        return sinks[self.kv_head(layout)]


@fault("features", "sink scaled")
class SinkScaled(Subject):
    """Sink logits are scaled like scores."""

    def sink(self, layout: GroupLayout, sinks: Tensor) -> Tensor:
        return sinks * layout.key_dim**-0.5


@fault("features", "LSE without the sink")
class LseWithoutSink(Subject):
    """The sink takes its share of the softmax and is left out of the returned LSE."""

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
        out, _ = super().softmax(layout, query, key, value, seen, scale, softcap, sinks)
        return out, super().softmax(layout, query, key, value, seen, scale, softcap, None)[1]


@fault("features", "argument ignored")
class ScaleIgnored(Subject):
    """Scores are scaled by 1 / sqrt(head dim), whatever the caller asked for."""

    def scores(self, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
        return super().scores(query, key, query.shape[-1] ** -0.5, softcap)


@fault("features", "argument kept")
class SoftcapStays(Subject):
    """The soft cap of one call stays for the next."""

    kept: float | None = None

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        self.kept = softcap if softcap is not None else self.kept
        return super().cap(scores, self.kept)


@fault("features", "argument kept")
class SinksStay(Subject):
    """The sink logits of one call stay for the next."""

    kept: Tensor | None = None

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
        self.kept = sinks if sinks is not None else self.kept
        if self.kept is not None and len(self.kept) != layout.query_heads:
            self.kept = None
        return super().softmax(layout, query, key, value, seen, scale, softcap, self.kept)


@fault("features", "partial over other keys")
class KvStartIgnored(Subject):
    """A partial over the later keys reads from the first position on."""

    def visible(self, j: Tensor, p: Tensor, length: int, kv_start: int, layout: GroupLayout) -> Tensor:
        return super().visible(j, p, length, 0, layout)


@fault("features", "partial over other keys")
class QueriesTakenForTheLastRows(Subject):
    """Queries are taken for the last rows of what the store holds, also in a partial over earlier keys."""

    def arrays(self, plan: Plan) -> StepArrays:
        host = plan.host
        counts = host.query_starts.diff()
        positions = torch.minimum(host.query_positions, (host.lengths - counts).clamp(min=0))
        return StepArrays(host.page_table, host.kv_start, host.lengths, host.query_starts, positions)


@fault("features", "partial in the query's dtype")
class PartialsRounded(Subject):
    """Partials are rounded to bfloat16 before they are merged."""

    def attend(
        self, store: Store, layer: int, query: Tensor, plan: Plan, *, partial: bool = False, **how: object
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out, lse = super().attend(store, layer, query, plan, partial=partial, **how)  # type: ignore[arg-type]
        return (out.to(torch.bfloat16).float() if partial else out), lse
