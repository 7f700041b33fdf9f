"""Float codes: fp8 (E4M3 "fn", E5M2), E2M1 and the scales of its blocks (E8M0 for mxfp4, E4M3 for nvfp4).

Sources: Micikevicius et al., "FP8 formats for deep learning" (2022) for E4M3 and E5M2; the OCP Microscaling Formats
(MX) Specification v1.0 for E2M1 and E8M0. Rounding is to nearest, ties to even, and saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvport.formats import CODES, TensorFormat

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
E8M0_NAN = 0xFF
E4M3_NAN = 0x7F
#: Largest value of nvfp4 before its tensor scale: 6 (E2M1) times 448 (E4M3).
NVFP4_RANGE = 6.0 * 448.0
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
#: Value of each 4-bit E2M1 code; the top bit is the sign.
E2M1_VALUES = torch.tensor(_POSITIVE + [-v for v in _POSITIVE], dtype=torch.float32, device="cpu")


def encode_fp8(fmt: TensorFormat, x: Tensor) -> Tensor:
    """Bytes of the nearest fp8 code of ``x``, infinities and large values saturated, NaN as the positive quiet NaN."""
    largest = CODES[fmt.code].largest
    # NaN's sign and payload are not values: one bit pattern for all, so that pages compare by bytes.
    x = x.clamp(-largest, largest).masked_fill_(x.isnan(), torch.nan)
    return x.to(FP8[fmt.code]).view(torch.uint8)


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes 0 .. 15 as uint8: the code's index counts the midpoints passed, ties going to the even code."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint, up_on_tie in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += size >= midpoint if up_on_tie else size > midpoint
    code += size > 5.0
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def mx_exponent(amax: Tensor) -> Tensor:
    """E8M0 byte of a block: floor(log2 amax) - 2, by extraction of the exponent bits, at least -127.

    -2 because E2M1's largest power of two is 4. Float32 subnormals have exponent bits 0 and end at -127 as well.
    """
    biased = (amax.view(torch.int32) >> 23) & 0xFF
    return (biased - 2).clamp_(min=0).to(torch.uint8)


def decode_e8m0(exponent: Tensor) -> Tensor:
    """2**(byte - 127) as float32; 0xFF is NaN."""
    e = exponent.to(torch.int32)
    # Byte 0 is 2**-127, a float32 subnormal: half the smallest normal.
    bits = torch.where(e == 0, 1 << 22, e << 23)
    return torch.where(e == E8M0_NAN, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def nv_block_scale(wanted: Tensor) -> Tensor:
    """E4M3 block scale nearest to ``wanted``, between 2**-9 (the smallest positive E4M3 number) and 448."""
    return wanted.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
