"""Sparse outliers: single numbers that are kept in float32 beside the codes, a fixed number of them per page.

A few numbers of a page, in no fixed channel, stretch the scale of every group they are in; kept apart and exactly,
they let the others have a finer one (dense-and-sparse quantization: Hooper et al., "KVQuant", 2024, after Kim et al.,
"SqueezeLLM", 2023). ``sparse=N`` keeps up to N numbers of each page and KV head. The capacity is fixed, so that a page
has a fixed size; they are chosen when a whole page seals, so that they do not depend on how appends were split.

A page's numbers are counted ``e = token * dim + channel``, and each has a *distance*, in float32:

* Scales computed from the data: the distance from the middle of its group, which is 0, or for ``asym`` the group's
  lower median. The N largest distances above 0 are kept, and the scale is that of the others: nothing is clipped.
* Static scales, whose range is the threshold: the distance from the nearest number that a code can stand for, of those
  alone that lie beyond the range. The N largest are kept; the rest, and infinities, are clipped as without
  ``sparse``, and counted in the page.

Of equal distances the lower e comes first. Numbers of a poisoned group are never kept: it stays NaN throughout.
In the codes their places hold what outlier channels leave there, see :mod:`kvport.outliers`.

Planes of a page: ``sparse_index`` ``(1, heads, N)`` int32, ascending, -1 behind the last; ``sparse_value`` likewise,
float32, 0 behind the last; with static scales ``sparse_overflow`` ``(1, heads)`` int32, the numbers that were clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """What was chosen of pages ``(..., tokens, heads, dim)``.

    ``index`` and ``value`` ``(..., 1, heads, N)``; ``mask`` of the rows' shape; ``overflow`` ``(..., 1, heads)``.
    """

    index: Tensor
    value: Tensor
    mask: Tensor
    overflow: Tensor


def keep(rows: Tensor, distance: Tensor, beyond: Tensor, count: int) -> Kept:
    """Choose ``count`` numbers of each page and head.

    ``distance``: float32 of the rows' shape, below 0 where a number cannot be kept. ``beyond``: bool of that shape,
    the numbers that are clipped unless kept.
    """
    flat, far, lost = (_by_head(x) for x in (rows, distance, beyond))
    order = torch.sort(far, dim=-1, descending=True, stable=True).indices[..., :count]
    size = flat.shape[-1]
    # Unused entries sort behind all others, and point behind the last number.
    order = torch.where(far.gather(-1, order) >= 0, order, size).sort(-1).values
    used = order < size
    value = flat.gather(-1, order.clamp(max=size - 1)).masked_fill(~used, 0.0)
    chosen = torch.zeros((*flat.shape[:-1], size + 1), dtype=torch.bool, device=rows.device)
    chosen = chosen.scatter_(-1, order, True)[..., :size]
    overflow = (lost & ~chosen).sum(-1, dtype=torch.int32)
    index = torch.where(used, order, -1).to(torch.int32)
    per_page = (x.movedim(0, -2).unsqueeze(-3) for x in (index, value, overflow.unsqueeze(-1)))
    index, value, overflow = per_page
    return Kept(index, value, _by_token(chosen, rows.shape), overflow.squeeze(-1))


def put(rows: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Rows with the kept values in their places.

    Any bits are taken, as pages that nobody wrote hold any: an index that is none of the page's changes nothing.
    """
    flat = _by_head(rows)
    size = flat.shape[-1]
    where, given = (x.squeeze(-3).movedim(-2, 0) for x in (index.to(torch.int64), value))
    where = torch.where((where >= 0) & (where < size), where, size)
    room = torch.cat([flat, flat.new_zeros((*flat.shape[:-1], 1))], -1)
    return _by_token(room.scatter(-1, where, given)[..., :size].contiguous(), rows.shape)


def _by_head(x: Tensor) -> Tensor:
    """``(..., tokens, heads, dim)`` as ``(heads, ..., tokens * dim)``, which is how decoded rows lie in memory."""
    return x.movedim(-2, 0).flatten(-2)


def _by_token(flat: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`_by_head`."""
    return flat.reshape(*flat.shape[:-1], shape[-3], shape[-1]).movedim(0, -2)
