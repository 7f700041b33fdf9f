"""Merging attention partials by their log-sum-exp: how tiers become one softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(partials: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One attention from partials over disjoint tokens.

    ``partials``: float32 output ``(tokens, query_heads, value_dim)`` and natural-log LSE ``(tokens, query_heads)``.
    ``sinks`` ``(query_heads,)`` logits count once, with value 0. Rows that saw nothing give zeros and -inf, sinks or
    not.
    """
    parts = [lse for _, lse in partials]
    if sinks is not None:
        # As in a single pass, where inf - inf makes a row NaN: a sink that cannot be is not to pass for a large one.
        sinks = sinks.to(parts[0]).masked_fill(sinks == torch.inf, torch.nan)
        saw_nothing = torch.stack(parts).amax(0) == -torch.inf
        parts.append(sinks.expand_as(parts[0]).masked_fill(saw_nothing, -torch.inf))
    stacked = torch.stack(parts)
    lse = torch.logsumexp(stacked, 0)
    # A row that saw nothing has LSE -inf, and its weights would be exp(-inf - -inf).
    weights = torch.exp(stacked - lse.masked_fill(lse == -torch.inf, 0.0))
    out = torch.zeros_like(partials[0][0])
    for (part, _), weight in zip(partials, weights, strict=False):
        out += part * weight.unsqueeze(-1)
    return out, lse
