"""The private page layout, and the way between it and the canonical planes.

Per plane one tensor ``(layers, pages, ...)`` with the same bytes as the canonical plane, reordered inside each page:

==================  ========================================  ======================================================
plane               canonical (per page)                      private (per page)
==================  ========================================  ======================================================
key.codes           (token, head, byte)                       (head, token, byte): one head's page is one run
value.codes, float  (token, head, channel)                    (head, token, channel)
value.codes, codes  (token, head, byte)                       (head, byte, token): the second product reads tokens
                                                              contiguously, without byte-sized shared-memory reads
scales, zeros       (token, head) or (token, head, group)     (head, group, token): a tile's scales are one run
latent and rope     as K; no plane of theirs is transposed
scales of cN        (block, head, channel)                    (head, channel, block)
==================  ========================================  ======================================================

Codes of symmetric integers are stored plus half their range, as unsigned numbers: in two's complement that flips each
code's sign bit. The kernels turn unsigned codes into floats with one instruction less a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvport.layout import GroupLayout, Plane
from kvport_cpu.base import TorchStore

#: Canonical axes (of one page) in private order.
_HEAD_FIRST = (1, 0, 2)
_TOKEN_LAST = (1, 2, 0)


def _order(plane: Plane, layout: GroupLayout) -> tuple[int, ...]:
    """The canonical axes of one page, three of them, in the order in which they are stored."""
    side, _, part = plane.name.partition(".")
    if part != "codes":
        return _TOKEN_LAST
    return _TOKEN_LAST if side == "value" and layout.format.value.quantized else _HEAD_FIRST


def _three(plane: Plane) -> tuple[int, ...]:
    """Canonical shape with the group axis that per-token scales leave out."""
    return plane.shape if len(plane.shape) == 3 else (*plane.shape, 1)


def private_shape(plane: Plane, layout: GroupLayout) -> tuple[int, ...]:
    """Shape of one page of this plane as stored."""
    shape = _three(plane)
    return tuple(shape[axis] for axis in _order(plane, layout))


def private_dtype(plane: Plane, layout: GroupLayout) -> torch.dtype:
    """Element dtype of this plane as stored."""
    return torch.uint8 if _flips(plane, layout) else plane.dtype


def _flips(plane: Plane, layout: GroupLayout) -> int:
    """The sign bits of every code in a byte, where the plane holds symmetric integers; else 0."""
    side, _, part = plane.name.partition(".")
    fmt = next(stored.format for stored in layout.sides if stored.name == side)
    if part != "codes" or fmt.kind != "int" or not fmt.symmetric:
        return 0
    return sum(1 << (shift + fmt.bits - 1) for shift in range(0, 8, fmt.bits))


def to_private(plane: Plane, layout: GroupLayout, pages: Tensor) -> Tensor:
    """Canonical ``(n, *plane.shape)`` -> private ``(n, ...)``, maybe a view."""
    if flips := _flips(plane, layout):
        pages = pages.view(torch.uint8) ^ flips
    return pages.reshape(pages.shape[0], *_three(plane)).permute(0, *(1 + axis for axis in _order(plane, layout)))


def to_canonical(plane: Plane, layout: GroupLayout, pages: Tensor) -> Tensor:
    """Private ``(n, ...)`` -> contiguous canonical ``(n, *plane.shape)``."""
    order = _order(plane, layout)
    inverse = [1 + order.index(axis) for axis in range(3)]
    pages = pages.permute(0, *inverse).contiguous().view(pages.shape[0], *plane.shape)
    if flips := _flips(plane, layout):
        pages = (pages ^ flips).view(plane.dtype)
    return pages


class TritonStore(TorchStore):
    """``planes`` hold the private layout: name -> ``(layers, pages, *private_shape)``."""

    def canonical(self, layer: int, pages: Tensor) -> dict[str, Tensor]:
        """Canonical planes of these pages ``(n,)`` of one layer, on the device, freshly allocated."""
        return {
            plane.name: to_canonical(plane, self.layout, self.planes[plane.name][layer].index_select(0, pages))
            for plane in self.layout.planes
        }
