"""Attention of one sequence over pages in float32: a softmax that walks the pages a few at a time.

The reference backend attends with it over decoded pages, a step with ``fresh="exact"`` over its own K and V.

Memory does not grow with the context: at most :data:`CHUNK_TOKENS` decoded tokens and :data:`QUERY_ROWS` query rows
are alive at once. The running maximum, sum and weighted values are merged chunk by chunk (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

#: Decoded history tokens alive at once. Large enough that a chunk's matrix products outweigh its Python overhead.
CHUNK_TOKENS = 1024
#: Query rows alive at once, which bounds the score matrix in prefill.
QUERY_ROWS = 256

#: ``read(first_page, end_page)`` decodes table columns to K ``(pages, P, kv_heads, D)`` and V, float32.
Read = Callable[[int, int], tuple[Tensor, Tensor]]


def attend_sequence(
    read: Read,
    query: Tensor,
    *,
    kv_heads: int,
    value_dim: int,
    page_size: int,
    query_position: int,
    kv_start: int,
    length: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` ``(rows, query_heads, D)``, whose first row is at ``query_position``.

    Row r sees stored positions j with kv_start <= j < length, j <= query_position + r and, with a window, j >
    query_position + r - window. Returns float32 output ``(rows, query_heads, E)`` and LSE ``(rows, query_heads)``.
    """
    with _ieee_products(query.device.type):
        outputs = [
            _attend_rows(
                read,
                query[begin : begin + QUERY_ROWS],
                kv_heads=kv_heads,
                value_dim=value_dim,
                page_size=page_size,
                query_position=query_position + begin,
                kv_start=kv_start,
                length=length,
                window=window,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
            for begin in range(0, query.shape[0], QUERY_ROWS)
        ]
    return torch.cat([out for out, _ in outputs]), torch.cat([lse for _, lse in outputs])


def uncast(device_type: str) -> AbstractContextManager[object]:
    """Autocast off: a cache's numbers do not follow it, and what joins tensors raises under one of another dtype."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


@contextmanager
def _ieee_products(device_type: str) -> Iterator[None]:
    """float32 products in float32, whatever the process allows elsewhere: TF32, bfloat16 on CPUs, autocast."""
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with uncast(device_type):
            yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def _attend_rows(
    read: Read,
    query: Tensor,
    *,
    kv_heads: int,
    value_dim: int,
    page_size: int,
    query_position: int,
    kv_start: int,
    length: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, query_heads, key_dim = query.shape
    per_head = query_heads // kv_heads
    # (kv_heads, per_head * rows, D): the query heads of one KV head share its K and V in one matrix product.
    q = query.to(torch.float32).mul(scale).reshape(rows, kv_heads, per_head, key_dim).permute(1, 2, 0, 3)
    q = q.reshape(kv_heads, per_head * rows, key_dim)
    positions = torch.arange(query_position, query_position + rows, device=query.device)

    first = kv_start if window is None else max(kv_start, query_position - window + 1)
    last = min(length, query_position + rows)  # nothing after the last row is visible
    state = _Softmax(q.shape[:-1], value_dim, query.device)
    per_chunk = max(1, CHUNK_TOKENS // page_size)
    for page in range(first // page_size, -(-last // page_size) if last > first else 0, per_chunk):
        end = min(page + per_chunk, -(-last // page_size))
        key, value = (t.flatten(0, 1) for t in read(page, end))  # (tokens, kv_heads, dim)
        j = torch.arange(page * page_size, end * page_size, device=query.device)
        seen = (j <= positions.unsqueeze(-1)) & (j >= kv_start) & (j < length)
        if window is not None:
            seen &= j > positions.unsqueeze(-1) - window
        scores = q @ key.permute(1, 2, 0)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        # Select, never multiply by zero: an unseen lane may hold NaN.
        scores.view(kv_heads, per_head, rows, -1).masked_fill_(~seen, -math.inf)
        stored = (j >= kv_start) & (j < last)
        if not bool(stored.all()):
            value = value.masked_fill(~stored.view(-1, 1, 1), 0.0)
        state.add(scores, value.transpose(0, 1), seen.repeat(per_head, 1))
    if sinks is not None:
        state.add_sink(
            sinks.to(query.device, torch.float32).view(kv_heads, per_head, 1).expand(-1, -1, rows).flatten(1)
        )
    out, lse = state.result()
    out = out.view(kv_heads, per_head, rows, value_dim).permute(2, 0, 1, 3).flatten(1, 2)
    return out, lse.view(kv_heads, per_head, rows).permute(2, 0, 1).flatten(1, 2)


class _Softmax:
    """Running softmax-weighted sum for rows ``(heads, rows)``."""

    def __init__(self, shape: torch.Size, value_dim: int, device: torch.device) -> None:
        self.top = torch.full(shape, -math.inf, dtype=torch.float32, device=device)
        self.total = torch.zeros(shape, dtype=torch.float32, device=device)
        self.out = torch.zeros((*shape, value_dim), dtype=torch.float32, device=device)

    def add(self, scores: Tensor, value: Tensor, seen: Tensor) -> None:
        """Add columns: scores ``(heads, rows, tokens)`` with -inf where unseen, value ``(heads, tokens, E)``."""
        weights, shrink = self._rescale(scores.amax(-1), scores)
        self.total = self.total * shrink + weights.sum(-1)
        self.out *= shrink.unsqueeze(-1)
        if math.isfinite(value.sum().item()):
            self.out += weights @ value
        else:
            self.out += _weigh_non_finite(weights, value, seen)

    def add_sink(self, logits: Tensor) -> None:
        """One column of value 0 and these logits ``(heads, rows)``, for the rows that saw anything."""
        logits = logits.masked_fill(self.top == -math.inf, -math.inf)
        weights, shrink = self._rescale(logits, logits.unsqueeze(-1))
        self.total = self.total * shrink + weights.squeeze(-1)
        self.out *= shrink.unsqueeze(-1)

    def _rescale(self, top: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """exp of the scores under the new maximum, and the factor for what was summed under the old one."""
        new = torch.maximum(self.top, top)
        base = torch.where(new == -math.inf, torch.zeros_like(new), new)  # a row that has seen nothing stays 0
        shrink = torch.exp(self.top - base)
        self.top = new
        return torch.exp(scores - base.unsqueeze(-1)), shrink

    def result(self) -> tuple[Tensor, Tensor]:
        empty = self.total == 0
        out = self.out / self.total.masked_fill(empty, 1.0).unsqueeze(-1)
        return out, self.top + torch.log(self.total)  # -inf + log 0 = -inf for a row that saw nothing


def _weigh_non_finite(weights: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """weights @ value where some values are NaN or infinite, which must reach only the rows that see them."""
    out = weights @ torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
    visible = seen.to(weights.dtype)
    for special in (math.nan, math.inf, -math.inf):
        hit = value.isnan() if math.isnan(special) else value == special
        out += torch.where(visible @ hit.to(weights.dtype) > 0, special, 0.0)
    return out
