"""The codec: float K/V rows to codes, scales and zeros, and back. One definition for every backend on torch.

Every step is IEEE float32 with round-to-nearest-even: divisions by tensors, never by Python numbers (torch turns the
latter into a multiplication by the reciprocal, which differs in the last bit), no fused multiply-add. A backend with
kernels of its own must produce the same bits; docs/contract.md states the definition in words.

Shapes: rows are ``(..., heads, dim)``; planes have the same leading dims (see :func:`kvport.layout.planes`). What is
encoded for a row depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvport.errors import ScaleError
from kvport.formats import TensorFormat

if TYPE_CHECKING:
    from kvport.scales import SideScales  # scales casts its zeros with floor_cast

#: Finite inputs are clamped to this magnitude, so that a range (max - min) cannot overflow float32.
INPUT_LIMIT = 2.0**125


@dataclass(frozen=True)
class Encoded:
    """Planes by short name (``codes``, ``scale``, ``zero``).

    ``poisoned`` is ``(...)`` bool, one per row of leading dims, for static integer formats: a NaN was met, which no
    integer code can hold (it is stored as code 0). None for formats that keep poison visible in scale or code.
    """

    planes: dict[str, Tensor]
    poisoned: Tensor | None = None


def encode(fmt: TensorFormat, rows: Tensor, static: SideScales | None = None) -> Encoded:
    """Encode ``rows`` ``(..., heads, dim)`` of any float dtype; ``static`` on the rows' device for static formats."""
    if not fmt.quantized:
        return Encoded({"codes": rows.to(fmt.code_torch_dtype)})
    x = rows.to(torch.float32)
    if fmt.static:
        return _encode_static(fmt, x, static)
    shape = x.shape
    if fmt.granularity == "group":
        x = x.reshape(*shape[:-1], shape[-1] // fmt.group, fmt.group)
    if fmt.symmetric:
        codes, scale, zero = _encode_symmetric(fmt, x)
    else:
        codes, scale, zero = _encode_asymmetric(fmt, x)
    found = {"codes": pack(fmt, codes.reshape(shape)), "scale": scale.squeeze(-1)}
    if zero is not None:
        found["zero"] = zero.squeeze(-1)
    return Encoded(found)


def decode(
    fmt: TensorFormat, planes: dict[str, Tensor], static: SideScales | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode planes (short names) to rows ``(..., heads, dim)``: code * scale (+ zero), each step rounded to float32.

    Any code is accepted, also -2**(b-1), which encoders never emit.
    """
    if not fmt.quantized:
        return planes["codes"].to(dtype)
    x = unpack(fmt, planes["codes"])
    if fmt.static:
        scale, zero = _static_parts(fmt, static)
        x *= scale
        if zero is not None:
            x += zero
        return x.to(dtype)
    grouped = x.view(*x.shape[:-1], x.shape[-1] // fmt.group, fmt.group) if fmt.granularity == "group" else x
    grouped *= planes["scale"].to(torch.float32).unsqueeze(-1)
    if not fmt.symmetric:
        grouped += planes["zero"].to(torch.float32).unsqueeze(-1)
    return x.to(dtype)


def _encode_symmetric(fmt: TensorFormat, x: Tensor) -> tuple[Tensor, Tensor, None]:
    qmax = 2.0 ** (fmt.bits - 1) - 1
    x, poison = _clean(x)
    amax = x.abs().amax(-1, keepdim=True)
    scale = _cast_scale(amax / torch.full_like(amax, qmax), amax > 0, fmt.scale_torch_dtype)
    codes = _quotient(x, scale.to(torch.float32)).round_().clamp_(-qmax, qmax)
    return codes, _poison_scale(scale, poison), None


def _encode_asymmetric(fmt: TensorFormat, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    levels = 2.0**fmt.bits - 1
    x, poison = _clean(x)
    low, high = x.aminmax(dim=-1, keepdim=True)
    zero = floor_cast(low, fmt.scale_torch_dtype)
    spread = high - zero.to(torch.float32)
    scale = _cast_scale(spread / torch.full_like(spread, levels), spread > 0, fmt.scale_torch_dtype)
    codes = _quotient(x - zero.to(torch.float32), scale.to(torch.float32)).round_().clamp_(0, levels)
    return codes, _poison_scale(scale, poison), zero


def _encode_static(fmt: TensorFormat, x: Tensor, static: SideScales | None) -> Encoded:
    scale, zero = _static_parts(fmt, static)
    poisoned = x.isnan()
    x = torch.where(x.isinf(), x, x.clamp(-INPUT_LIMIT, INPUT_LIMIT))
    if zero is not None:
        x = x - zero
    low, high = (-(2.0 ** (fmt.bits - 1) - 1), 2.0 ** (fmt.bits - 1) - 1) if fmt.symmetric else (0.0, 2.0**fmt.bits - 1)
    codes = (x / scale).round_().clamp_(low, high).masked_fill_(poisoned, 0)
    return Encoded({"codes": pack(fmt, codes)}, poisoned.flatten(-2).any(-1))


def _static_parts(fmt: TensorFormat, static: SideScales | None) -> tuple[Tensor, Tensor | None]:
    """Scale and zero as float32, broadcastable to ``(heads, dim)``."""
    if static is None:
        raise ScaleError(f"format {fmt} needs static scales and none were given")
    parts = [None if part is None else part.to(torch.float32) for part in (static.scale, static.zero)]
    if fmt.granularity == "head":
        parts = [None if part is None else part.unsqueeze(-1) for part in parts]
    assert parts[0] is not None
    return parts[0], parts[1]


def _clean(x: Tensor) -> tuple[Tensor, Tensor]:
    """(finite values clamped to the input limit, poisoned groups zeroed; which groups (..., 1) were poisoned)."""
    poison = ~torch.isfinite(x).all(-1, keepdim=True)
    return x.clamp(-INPUT_LIMIT, INPUT_LIMIT).masked_fill_(poison, 0.0), poison


def _cast_scale(scale: Tensor, positive: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the stored dtype; where the range is not zero, clamp to its normal numbers."""
    info = torch.finfo(dtype)
    cast = scale.to(dtype).clamp_(max=info.max)
    return torch.where(positive, cast.clamp(min=info.smallest_normal), torch.zeros_like(cast))


def _quotient(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0."""
    flat = scale == 0
    return (x / scale.masked_fill(flat, 1.0)).masked_fill_(flat, 0.0)


def _poison_scale(scale: Tensor, poison: Tensor) -> Tensor:
    # torch.nan converts to the positive quiet NaN of each dtype: 0x7FC00000, 0x7FC0, 0x7E00.
    return scale.masked_fill(poison, torch.nan)


def floor_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 to ``dtype`` toward minus infinity, within its finite range; -0 becomes +0."""
    if dtype == torch.float32:
        return x + 0.0
    info = torch.finfo(dtype)
    cast = x.to(dtype).clamp_(info.min, info.max)
    # Where rounding went up, step one representable number down: on the bit patterns of sign-magnitude floats, that
    # is -1 for positive numbers, +1 for negative ones, and from zero to the smallest negative subnormal.
    bits = cast.view(torch.int16)
    down = torch.where(bits > 0, bits - 1, bits + 1)
    down = torch.where(cast == 0, torch.full_like(bits, -0x7FFF), down)  # 0x8001
    up = (cast.to(torch.float32) > x) & (x > info.min)
    return torch.where(up, down, bits).view(dtype) + 0.0


def pack(fmt: TensorFormat, codes: Tensor) -> Tensor:
    """Integer-valued float codes ``(..., dim)`` to the stored plane: low bits first, two's complement."""
    if fmt.bits == 8:
        return codes.to(fmt.code_torch_dtype)
    per_byte = 8 // fmt.bits
    fields = codes.to(torch.int16).bitwise_and_((1 << fmt.bits) - 1).reshape(*codes.shape[:-1], -1, per_byte)
    packed: Tensor = fields[..., 0].clone()
    for position in range(1, per_byte):
        packed |= fields[..., position] << (position * fmt.bits)
    return packed.to(torch.uint8)


def unpack(fmt: TensorFormat, stored: Tensor) -> Tensor:
    """Stored plane ``(..., packed_dim)`` to float32 codes ``(..., dim)``, freshly allocated."""
    if fmt.bits == 8:
        return stored.to(torch.float32)
    table = _unpack_table(fmt, stored.device)
    return table[stored.reshape(-1).int()].reshape(*stored.shape[:-1], stored.shape[-1] * table.shape[-1])


_tables: dict[tuple[int, bool, str], Tensor] = {}


def _unpack_table(fmt: TensorFormat, device: torch.device) -> Tensor:
    """(256, codes per byte) float32: what each byte decodes to. A look-up beats shifting on CPUs."""
    key = (fmt.bits, fmt.symmetric, str(device))
    if key not in _tables:
        byte = torch.arange(256).unsqueeze(-1)
        fields = (byte >> (torch.arange(8 // fmt.bits) * fmt.bits)) & ((1 << fmt.bits) - 1)
        if fmt.symmetric:
            fields = torch.where(fields >= 1 << (fmt.bits - 1), fields - (1 << fmt.bits), fields)
        _tables[key] = fields.to(torch.float32).to(device)
    return _tables[key]
