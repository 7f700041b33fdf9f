"""What encoding lost: saturation, underflow and poison, counted on request.

Appends count nothing, so that they stay fast; this module looks at rows and the planes they were encoded to. It is
kept apart from :mod:`kvport.codec` for that reason, and agrees with the numpy oracle of the conformance suite in what
saturation means:

* *saturated*: finite values beyond +-2**125; values whose code was clipped because the scale is static, or was clamped
  to the largest number of its dtype (infinities under a static scale included); and asymmetric zeros clamped to their
  dtype. What a dynamic scale rounds off its own largest value, or mxfp4 between 6 and 8 scales, is rounding. Numbers
  that are kept apart (outlier channels, sparse outliers) are not among them.
* *underflow*: finite values other than zero that decode to exactly zero. Some of that is plain rounding; a large share
  means that the scale is too coarse for most of the values.
* *poisoned*: values that decode to NaN, and NaNs that a static integer format had to store as code 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvport import codec, codec_floats
from kvport.formats import CODES, TensorFormat
from kvport.scales import SideScales


@dataclass(frozen=True)
class Counts:
    """Numbers of values. ``saturated_zeros`` counts groups, and is part of ``saturated``."""

    elements: int = 0
    saturated: int = 0
    saturated_zeros: int = 0
    underflow: int = 0
    poisoned: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def share(self, name: str) -> float:
        """One of the counts as a share of all values; 0 where there are none."""
        found: int = getattr(self, name)
        return found / self.elements if self.elements else 0.0


def count(
    fmt: TensorFormat,
    rows: Tensor,
    planes: Mapping[str, Tensor] | None = None,
    static: SideScales | None = None,
    channels: Tensor | None = None,
) -> Counts:
    """Count what ``planes`` lost of ``rows`` ``(..., tokens, heads, dim)``.

    ``planes`` by short name, as :func:`kvport.codec.encode` makes them of these rows; None encodes them here.
    ``static``: the scales of a static format; ``channels``: its outlier channels.
    """
    if planes is None:
        planes = codec.encode(fmt, rows, static, channels).planes
    x = rows.to(torch.float32)
    elements, zeros = saturated(fmt, x, planes, static, channels)
    decoded = codec.decode(fmt, planes, static, channels=channels)
    poisoned = decoded.isnan() | (x.isnan() if fmt.hides_nan else False)
    return Counts(
        elements=x.numel(),
        saturated=int(elements.sum()) + zeros,
        saturated_zeros=zeros,
        underflow=int(((decoded == 0) & (x != 0) & x.isfinite()).sum()),
        poisoned=int(poisoned.sum()),
    )


def saturated(
    fmt: TensorFormat,
    x: Tensor,
    planes: Mapping[str, Tensor],
    static: SideScales | None = None,
    channels: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Which elements of ``x`` (float32) saturated, of its shape, and how many zeros were clamped."""
    if not fmt.quantized:
        return torch.zeros_like(x, dtype=torch.bool), 0
    if fmt.outliers or fmt.sparse:
        rest, filled, kept = codec.without_kept(fmt, x, planes, channels)
        elements, zeros = saturated(rest, filled, planes, static)
        return elements & ~kept, zeros
    beyond = x.isfinite() & (x.abs() > codec.INPUT_LIMIT)
    x = torch.where(x.isfinite(), x.clamp(-codec.INPUT_LIMIT, codec.INPUT_LIMIT), x)
    if fmt.kind == "mx" or (fmt.kind == "nv" and not fmt.static):
        return beyond, 0
    if fmt.kind == "nv":
        return beyond | _nv_clipped(fmt, x, planes, static), 0
    if fmt.static:
        scale, zero = codec.static_parts(fmt, static)
        return beyond | _clipped(fmt, (x if zero is None else x - zero) / scale), 0
    clipped, zeros = _dynamic_clipped(fmt, x, planes)
    return beyond | clipped, zeros


def _clipped(fmt: TensorFormat, quotient: Tensor) -> Tensor:
    """Whether the code of a quotient had to be clipped. NaN compares false."""
    if fmt.kind == "fp8":
        return quotient.abs() > CODES[fmt.code].largest
    least, most = codec.code_range(fmt)
    rounded = quotient.round()
    return (rounded < least) | (rounded > most)


def _dynamic_clipped(fmt: TensorFormat, x: Tensor, planes: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Codes clipped because the scale that they needed does not fit its dtype; and zeros that did not fit."""
    grouped = codec.to_groups(fmt, x)
    poison = ~grouped.isfinite().all(-1, keepdim=True)
    grouped = grouped.masked_fill(poison, 0.0)
    limit = torch.finfo(fmt.scale_torch_dtype).max
    scale = planes["scale"].to(torch.float32).unsqueeze(-1)
    zeros = 0
    largest = codec.code_range(fmt)[1]
    if fmt.symmetric:
        extent, shifted = grouped.abs().amax(-1, keepdim=True), grouped
    else:
        zero = planes["zero"].to(torch.float32).unsqueeze(-1)
        extent, shifted = grouped.amax(-1, keepdim=True) - zero, grouped - zero
        low = grouped.amin(-1)
        zeros = int((low.abs() > limit).sum())
    needed = (extent / torch.full_like(extent, largest)).to(fmt.scale_torch_dtype)
    quotient = shifted / scale.masked_fill(scale == 0, 1.0)
    return codec.from_groups(fmt, _clipped(fmt, quotient) & (needed > limit), x.shape), zeros


def _nv_clipped(fmt: TensorFormat, x: Tensor, planes: Mapping[str, Tensor], static: SideScales | None) -> Tensor:
    """Blocks whose scale would exceed 448 times the calibrated tensor scale, and their values beyond 6."""
    tensor_scale = codec.static_parts(fmt, static)[0]
    grouped = codec.to_groups(fmt, x)
    wanted = grouped.abs().amax(-1, keepdim=True) / torch.full((), 6.0, device=x.device) / tensor_scale
    block = scale_values(fmt, planes["scale"]).unsqueeze(-1)
    largest = CODES[fmt.code].largest
    clipped = ((grouped / (block * tensor_scale)).abs() > largest) & (wanted > 448.0)
    return codec.from_groups(fmt, clipped, x.shape)


def scale_values(fmt: TensorFormat, stored: Tensor) -> Tensor:
    """A scale plane as float32: block scales of mxfp4 and nvfp4 decoded from their bytes (nvfp4's are to be multiplied
    by its tensor scale)."""
    if fmt.kind == "mx":
        return codec_floats.decode_e8m0(stored)
    return (stored.view(torch.float8_e4m3fn) if fmt.kind == "nv" else stored).to(torch.float32)
