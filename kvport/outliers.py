"""Outlier channels: a few channels per KV head that are kept in float32 beside the codes.

Some channels of K are many times as large as the others and would stretch the scale of every group they are in
(Hooper et al., "KVQuant", 2024). ``outliers=c`` keeps c channels of each KV head apart: which ones is chosen by
calibration and given with the scales (:class:`kvport.scales.LayerScales`), once.

The channels' values go to a plane of their own, ``(page_size, heads, c)`` float32: every dtype that K may arrive in is
exact there, and a page means the same whatever the model's dtype. In the codes their places hold a filler that
stretches no range: 0, or for asymmetric scales computed at append the smallest other member of the group. Decoding
puts the kept values back, so that they are exact, NaN and infinity included, and poison in one reaches nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_channels(amax: Tensor, count: int) -> Tensor:
    """The ``count`` channels of largest magnitude of each head, ascending; of equal ones the first.

    ``amax`` ``(kv_heads, dim)``: the largest magnitude seen in each channel. Returns int64 ``(kv_heads, count)``.
    """
    order = torch.sort(amax, dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(-1).values


def take_channels(rows: Tensor, channels: Tensor) -> Tensor:
    """Values ``(..., heads, c)`` of ``channels`` ``(heads, c)`` in ``rows`` ``(..., heads, dim)``."""
    return rows.gather(-1, channels.expand(*rows.shape[:-1], -1))


def put_channels(rows: Tensor, channels: Tensor, kept: Tensor) -> Tensor:
    """``rows`` with the kept values in their places."""
    return rows.scatter(-1, channels.expand(kept.shape), kept)


def mask_channels(channels: Tensor, dim: int) -> Tensor:
    """``(heads, dim)`` bool: where the outlier channels are."""
    mask = torch.zeros((channels.shape[0], dim), dtype=torch.bool, device=channels.device)
    return mask.scatter_(-1, channels, True)
