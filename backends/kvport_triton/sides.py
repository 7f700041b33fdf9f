"""How the kernels see one of K or V: the compile-time description of a tensor format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from kvport.formats import CODES, TensorFormat
from kvport.layout import GroupLayout

#: The kernels' numbers for scale and page dtypes (FLOAT32, BFLOAT16, FLOAT16 in kernels.numerics).
DTYPE_NUMBER: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: For the kinds of fp8 codes, by their exponent and mantissa bits.
FLOAT_CODE: Final = {"fp8_e4m3": 43, "fp8_e5m2": 52}
#: And for static granularities.
_STATIC_NUMBER: Final = {"tensor": 1, "head": 2, "channel": 3}
#: The most slices of a row that attend keeps accumulators for, and that decode does.
MOST_SLICES: Final = 4
MOST_DECODED_SLICES: Final = 16
#: The shortest inner dimension of a float16 tensor-core product.
LEAST_SLICE: Final = 16


@dataclass(frozen=True)
class Side:
    """Constants of K or V, by the names of the kernels' parameters (without K_ or V_).

    ``bits`` are those of an integer code; for fp8 it is the number of its kind (E4M3, E5M2 in kernels.numerics).
    ``groups`` are the scales of a token and head, or -N where a scale is one channel's over N tokens.
    """

    dim: int
    bits: int
    per_byte: int
    quantized: bool
    symmetric: bool
    groups: int
    static: int
    scale: int

    @classmethod
    def of(cls, fmt: TensorFormat, dim: int) -> Side:
        return cls(
            dim=dim,
            bits=FLOAT_CODE.get(fmt.code, fmt.bits),
            per_byte=CODES[fmt.code].per_byte,
            quantized=fmt.quantized,
            symmetric=fmt.symmetric,
            groups=_groups(fmt, dim),
            static=_STATIC_NUMBER[fmt.granularity] if fmt.static else 0,
            scale=DTYPE_NUMBER[fmt.scale_torch_dtype],
        )

    @property
    def slices(self) -> int:
        """What a row is cut into: one slice for each group of channels and position of the code inside its byte."""
        return max(1, self.groups) * self.per_byte

    @property
    def sliceable(self) -> bool:
        """Whether attend's CODES mode has enough accumulators, and tensor cores long enough products, for this side."""
        few = self.groups > 0 and self.slices <= MOST_SLICES
        return self.quantized and few and self.dim // self.slices >= LEAST_SLICE

    @property
    def decodable(self) -> bool:
        """Whether the decode kernel, which pads short slices and multiplies scales of channels in, takes this side."""
        blocks = self.groups > 0 or -self.groups >= LEAST_SLICE
        return self.quantized and blocks and self.slices <= MOST_DECODED_SLICES

    def constants(self, prefix: str) -> dict[str, Any]:
        """Keyword arguments for a kernel, by ``prefix``: ``K_DIM``, ``K_BITS``, ..."""
        return _constants(self, prefix).copy()


@lru_cache
def _constants(side: Side, prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name.upper()}": value for name, value in vars(side).items()}


def _groups(fmt: TensorFormat, dim: int) -> int:
    if fmt.granularity == "channel_group":
        return -fmt.group
    return dim // fmt.group if fmt.granularity == "group" else 1


@lru_cache  # asked for several times a layer and step
def sides(layout: GroupLayout) -> tuple[Side, Side]:
    """Constants of K and of V, or of the latent and rope parts."""
    first, second = layout.sides
    return Side.of(first.format, first.dim), Side.of(second.format, second.dim)


@lru_cache
def code_bytes(layout: GroupLayout) -> int:
    """Bytes of a token's codes, of all KV heads and both sides, in one layer."""
    return sum(plane.nbytes for plane in layout.planes if plane.name.endswith(".codes")) // layout.page_size


def bits_view(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width: kernels store and load scales and float pages as bits."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
