"""Hadamard rotation of K: spreads a few large channels over all of them, so that low-bit codes lose less.

Per head, with n the largest power of two that divides the rotated dim (at least 16) and blocks of n channels: flip the
signs of the seed, run the fast Walsh-Hadamard transform in float32 with strides 1, 2, 4, ..., and multiply once by
1/sqrt(n). The rotation is orthogonal, so that scores are unchanged when queries are rotated alike (Ashkboos et al.,
"QuaRot", 2024). It is applied after RoPE, and its seed is part of the format's identity.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvport.errors import LayoutError

_MASK = (1 << 64) - 1


def rotation_size(dim: int) -> int:
    """Block size n for ``dim`` channels. Raises :class:`LayoutError` where it would be below 16."""
    size = dim & -dim
    if size < 16:
        raise LayoutError(f"rotate needs a dim divisible by 16, got {dim}, which is divisible by {size} only")
    return size


@functools.cache
def rotation_signs(seed: int, dim: int) -> tuple[float, ...]:
    """+1 or -1 per channel: the top bit of the splitmix64 output for counter seed * 2**32 + channel.

    Constants of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    signs = []
    for channel in range(dim):
        z = ((seed << 32) + channel + 1) * 0x9E3779B97F4A7C15 & _MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
        signs.append(-1.0 if (z ^ (z >> 31)) >> 63 else 1.0)
    return tuple(signs)


@functools.cache
def _signs_on(seed: int, dim: int, device: torch.device) -> Tensor:
    """The signs beside the data, made once: a copy from the host would make every call wait, and break a recording."""
    with torch.inference_mode(False):
        return torch.tensor(rotation_signs(seed, dim), dtype=torch.float32, device=device)


def rotate(x: Tensor, seed: int, dim: int) -> Tensor:
    """Rotate the first ``dim`` channels of ``(..., channels)``; the result is float32."""
    signs = _signs_on(seed, dim, x.device)
    turned = _transform(x[..., :dim].to(torch.float32) * signs)
    return turned if x.shape[-1] == dim else torch.cat([turned, x[..., dim:].to(torch.float32)], -1)


def unrotate(x: Tensor, seed: int, dim: int) -> Tensor:
    """The inverse of :func:`rotate`, up to float32 rounding."""
    signs = _signs_on(seed, dim, x.device)
    turned = _transform(x[..., :dim].to(torch.float32)) * signs
    return turned if x.shape[-1] == dim else torch.cat([turned, x[..., dim:].to(torch.float32)], -1)


def _transform(x: Tensor) -> Tensor:
    size = rotation_size(x.shape[-1])
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    stride = 1
    while stride < size:
        pairs = blocks.reshape(*blocks.shape[:-1], size // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack([a + b, a - b], -2).reshape(blocks.shape)
        stride *= 2
    return (blocks * torch.full((), size**-0.5, dtype=torch.float32, device=x.device)).reshape(x.shape)
