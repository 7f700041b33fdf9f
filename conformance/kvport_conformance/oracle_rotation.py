"""The written definition of the rotation, in float32, one operation at a time; and what turning back does to a bound.

Blocks of n channels, n the largest power of two that divides the dim. A channel's sign is the top bit of word
``seed * 2**32 + channel`` of a SplitMix64 stream from state 0. Flip the signs, then for strides 1, 2, 4, ... replace
each pair (a, b) of channels that differ in that bit by (a + b, a - b), then multiply once by 1/sqrt(n).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvport_conformance import inputs
from kvport_conformance.oracle_floats import Array, Float32Array

SMALLEST = 16


def block_of(dim: int) -> int:
    """Channels that are turned together. Raises ValueError where they would be fewer than 16."""
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    if size < SMALLEST:
        raise ValueError(f"a rotated dim is a multiple of {SMALLEST}, got {dim}")
    return size


def signs(seed: int, dim: int) -> Float32Array:
    """+1 or -1 of each channel."""
    words = inputs.words(0, dim, start=seed << 32)
    return np.where(words >> np.uint64(63), np.float32(-1.0), np.float32(1.0))


def rotate(x: Float32Array, seed: int, dim: int) -> Float32Array:
    """``x`` (..., channels) with its first ``dim`` channels turned; poison spreads over its block, as it must."""
    turned = np.array(x, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        turned[..., :dim] = _transform(turned[..., :dim] * signs(seed, dim))
    return turned


def turn_back(
    output: Array, bound: Array, seed: int, dim: int, step: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """An expected output (..., dim) in rotated space and the bound of its error, turned back.

    The inverse is the transform and then the signs. Each turned number is a sum of a block's n, so errors add up over
    the block by 1/sqrt(n); the float32 transform rounds log2(n) + 1 times, and the result is rounded by ``step``.
    """
    n = block_of(dim)
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / np.sqrt(n)
    blocks = output.astype(np.float64).reshape(*output.shape[:-1], dim // n, n)
    back = (blocks @ matrix).reshape(output.shape) * signs(seed, dim)
    size = np.abs(blocks).sum(axis=-1, keepdims=True) / np.sqrt(n)
    allowed = bound.reshape(blocks.shape).sum(axis=-1, keepdims=True) / np.sqrt(n)
    allowed = allowed + (np.log2(n) + 1) * 2.0**-24 * (size + allowed)
    spread = np.broadcast_to(allowed, blocks.shape).reshape(output.shape)
    return back, spread + step * (np.abs(back) + spread)


def _transform(x: Float32Array) -> Float32Array:
    dim = x.shape[-1]
    n = block_of(dim)
    channels = np.arange(dim)
    stride = 1
    while stride < n:
        low, high = x[..., channels & ~stride], x[..., channels | stride]
        x = np.where(channels & stride, low - high, low + high)
        stride *= 2
    return x * np.float32(n**-0.5)
