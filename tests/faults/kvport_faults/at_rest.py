"""Faults in what is stored: rounding, scales, zeros, packing, slots (chapter "append")."""

from __future__ import annotations

import torch
from torch import Tensor

from kvport import codec
from kvport.backend import Store
from kvport.formats import TensorFormat
from kvport.scales import SideScales
from kvport_cpu.base import TorchStore
from kvport_faults.registry import fault
from kvport_faults.subject import Subject

Encoded = tuple[dict[str, Tensor], Tensor | None]


class Integers(Subject):
    """Integer formats are encoded by :meth:`requantize` from the correct scale and zero; other formats correctly."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if fmt.kind == "int" and fmt.bits <= 8:
            x = rows.float().clamp(-codec.INPUT_LIMIT, codec.INPUT_LIMIT)
            if fmt.static:
                scale, zero = codec.static_parts(fmt, static)
                zero = torch.zeros(()) if zero is None else zero
                scale, zero = scale.expand(x.shape), zero.expand(x.shape)
            else:
                scale = _spread(fmt, planes["scale"].float(), x)
                zero = _spread(fmt, planes["zero"].float(), x) if "zero" in planes else torch.zeros_like(x)
            codes = self.requantize(fmt, x, scale, zero)
            planes["codes"] = codec.pack(fmt, codes.nan_to_num(0.0))
        return planes, flags

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = limits(fmt)
        return self.round((x - zero) / torch.where(scale == 0, 1.0, scale)).clamp(low, high).where(scale != 0, 0.0)

    def round(self, quotient: Tensor) -> Tensor:
        return quotient.round()


def limits(fmt: TensorFormat) -> tuple[float, float]:
    high = 2.0 ** (fmt.bits - 1) - 1 if fmt.symmetric else 2.0**fmt.bits - 1
    return (-high if fmt.symmetric else 0.0), high


def _spread(fmt: TensorFormat, scale: Tensor, x: Tensor) -> Tensor:
    if fmt.granularity == "group":
        return scale.repeat_interleave(fmt.group, -1)
    return scale.unsqueeze(-1).expand(x.shape)


@fault("append", "rounding mode")
class RoundsHalfAway(Integers):
    """Quotients halfway between two codes are rounded away from zero, not to even."""

    def round(self, quotient: Tensor) -> Tensor:
        return quotient.sign() * (quotient.abs() + 0.5).floor()


@fault("append", "rounding mode")
class Truncates(Integers):
    """Codes are truncated toward zero: the cast to an integer without rounding."""

    def round(self, quotient: Tensor) -> Tensor:
        return quotient.trunc()


@fault("append", "rounding mode")
class RoundsDown(Integers):
    """Codes are rounded toward minus infinity."""

    def round(self, quotient: Tensor) -> Tensor:
        return quotient.floor()


@fault("append", "reciprocal for division")
class ReciprocalScale(Integers):
    """Inputs are multiplied by the reciprocal of the scale: ties and their neighbours move."""

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = limits(fmt)
        return ((x - zero) * (1.0 / scale)).round().clamp(low, high).where(scale != 0, 0.0)


@fault("append", "inverse scale")
class MultipliesByScale(Integers):
    """The writer multiplies by the scale instead of dividing."""

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = limits(fmt)
        return ((x - zero) * scale).round().clamp(low, high)


@fault("append", "scale not forwarded")
class UnscaledCodes(Integers):
    """The scale never reaches the function that makes codes: they are made as if it were 1."""

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = limits(fmt)
        return (x - zero).round().clamp(low, high)


@fault("append", "code range")
class EmitsMinusQmaxMinusOne(Integers):
    """Codes are clamped to -2**(b-1), which no encoder may emit."""

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = limits(fmt)
        low -= fmt.symmetric
        return ((x - zero) / torch.where(scale == 0, 1.0, scale)).round().clamp(low, high).where(scale != 0, 0.0)


@fault("append", "code range")
class NarrowRange(Integers):
    """The top code is never used: the range ends one short."""

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return super().requantize(fmt, x, scale, zero).clamp(max=limits(fmt)[1] - 1)


@fault("append", "zero not subtracted")
class ZeroNotSubtracted(Integers):
    """Asymmetric codes are made without subtracting the zero."""

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return super().requantize(fmt, x, scale, torch.zeros_like(zero))


class Planes(Subject):
    """Encodes correctly and then spoils the planes."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        self.spoil(side, fmt, planes)
        return planes, flags

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        raise NotImplementedError


@fault("append", "offset sign")
class ZeroNegated(Planes):
    """The zero is stored with the opposite sign convention (x_hat = (code - zero) * scale in other systems)."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "zero" in planes:
            planes["zero"] = -planes["zero"]


@fault("append", "scale dtype rounding")
class ZeroRoundedToNearest(Subject):
    """The zero of a half-precision format is rounded to nearest, not down: the minimum falls below code 0."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if "zero" in planes:
            planes["zero"] = codec.to_groups(fmt, rows.float()).amin(-1).to(planes["zero"].dtype)
        return planes, flags


@fault("append", "scale dtype rounding")
class CodesFromUnroundedScale(Integers):
    """Codes are made with the float32 scale, and the scale is rounded to its dtype afterwards."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if fmt.kind == "int" and not fmt.static and fmt.symmetric and fmt.scale_dtype != "fp32":
            x = codec.to_groups(fmt, rows.float())
            high = limits(fmt)[1]
            scale = x.abs().amax(-1, keepdim=True) / high
            codes = (x / torch.where(scale == 0, 1.0, scale)).round().clamp(-high, high)
            planes["codes"] = codec.pack(fmt, codec.from_groups(fmt, codes, rows.shape).nan_to_num(0.0))
        return planes, flags


@fault("append", "scale clamp too high")
class ScaleFlooredAtOne(Planes):
    """Scales are clamped to at least 1, so that small values use a handful of codes."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "scale" in planes and planes["scale"].is_floating_point():
            planes["scale"] = planes["scale"].clamp(min=1.0)


@fault("append", "scale defaulted to one")
class StoredScaleOfOne(Planes):
    """The codes are right and every stored scale is 1."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "scale" in planes and planes["scale"].is_floating_point():
            planes["scale"] = torch.ones_like(planes["scale"])


@fault("append", "zero range")
class ScaleWithEpsilon(Planes):
    """A group of zeros gets a scale of 1e-8 instead of 0."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "scale" in planes and planes["scale"].dtype == torch.float32:
            planes["scale"] = planes["scale"].masked_fill(planes["scale"] == 0, 1e-8)


@fault("append", "scale dtype overflow")
class ScaleOverflows(Planes):
    """A scale beyond its half-precision dtype becomes infinite instead of the largest finite value."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "scale" in planes and planes["scale"].dtype in (torch.float16, torch.bfloat16):
            top = planes["scale"] == torch.finfo(planes["scale"].dtype).max
            planes["scale"] = planes["scale"].masked_fill(top, torch.inf)


@fault("append", "scale dtype underflow")
class ScaleFlushed(Planes):
    """Scales at the smallest normal number are flushed to zero, as with flush-to-zero arithmetic."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "scale" in planes and planes["scale"].is_floating_point():
            tiny = torch.finfo(planes["scale"].dtype).smallest_normal
            planes["scale"] = planes["scale"].masked_fill(planes["scale"] <= tiny, 0.0)


@fault("append", "packing order")
class HighNibbleFirst(Planes):
    """4-bit codes are packed with the first channel in the high nibble."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if fmt.bits == 4:
            planes["codes"] = (planes["codes"] >> 4) | (planes["codes"] << 4)


@fault("append", "packing order")
class Int2Reversed(Planes):
    """2-bit codes are packed with the first channel in the highest bits."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if fmt.bits == 2:
            c = planes["codes"]
            planes["codes"] = (c >> 6) | ((c >> 2) & 0x0C) | ((c << 2) & 0x30) | (c << 6)


@fault("append", "packing along tokens")
class PackedAcrossHalves(Subject):
    """4-bit codes pack channel i with channel i + dim / 2, not with its neighbour."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if fmt.bits == 4 and fmt.kind == "int":
            c = planes["codes"]
            wide = torch.stack([c & 0xF, c >> 4], -1).flatten(-2)
            half = wide.shape[-1] // 2
            planes["codes"] = wide[..., :half] | (wide[..., half:] << 4)
        return planes, flags


@fault("append", "signedness")
class ExcessCodes(Planes):
    """Signed sub-byte codes are stored in excess notation, not in two's complement."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if fmt.kind == "int" and fmt.symmetric and fmt.bits == 4:
            planes["codes"] = planes["codes"] ^ 0x88


@fault("append", "V falls back to K")
class ValueScaleFromKey(Subject):
    """V's scales are stored as K's."""

    def edit(
        self, store: TorchStore, layer: int, planes: dict[str, dict[str, Tensor]], pages: Tensor, offsets: Tensor
    ) -> None:
        key, value = planes["key"], planes["value"]
        if "scale" in key and "scale" in value and key["scale"].shape == value["scale"].shape:
            value["scale"] = key["scale"].to(value["scale"].dtype)


@fault("append", "K/V swap")
class KeyAndValueSwapped(Subject):
    """K is written where V belongs and V where K does."""

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert value is not None
        if key.shape == value.shape:
            key, value = value, key
        super().append(store, layer, key, value, slots)


@fault("append", "skipped rows written")
class SkippedGoesToLastSlot(Subject):
    """Slot -1 is taken as an index from the end: skipped rows land in the last slot of the last page."""

    def where(self, store: TorchStore, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slots = torch.where(slots < 0, slots + store.pages * store.layout.page_size, slots)
        return super().where(store, slots)


@fault("append", "skipped rows shift the others")
class SkippedRowsCompacted(Subject):
    """Skipped rows are dropped from the slots and not from the rows: those behind them shift."""

    def where(self, store: TorchStore, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages, offsets, kept = super().where(store, slots)
        return pages, offsets, torch.arange(len(kept))


@fault("append", "non-contiguous input")
class AssumesContiguous(Subject):
    """K and V are read as if they were contiguous, whatever their strides."""

    def rows(self, side: str, rows: Tensor) -> Tensor:
        flat = torch.as_strided(rows, (rows.numel(),), (1,))
        return flat.view(rows.shape)


@fault("append", "non-contiguous input")
class AssumesUnitChannelStride(Subject):
    """Row and head strides are honoured, the channel stride is taken for 1."""

    def rows(self, side: str, rows: Tensor) -> Tensor:
        return torch.as_strided(rows, rows.shape, (*rows.stride()[:2], 1)) if rows.numel() else rows


@fault("append", "groups across tokens")
class ScaleOverTheCall(Subject):
    """One scale is computed over all tokens of the call: a token's codes depend on its batch mates."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if "scale" in planes and planes["scale"].is_floating_point() and len(rows) > 1:
            planes["scale"] = planes["scale"].nan_to_num().amax(0, keepdim=True).expand(planes["scale"].shape)
        return planes, flags


@fault("append", "groups across heads")
class ScaleOverHeads(Planes):
    """One scale serves all heads of a token."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "scale" in planes and planes["scale"].is_floating_point():
            planes["scale"] = planes["scale"].amax(1, keepdim=True).expand(planes["scale"].shape)


@fault("append", "head boundary")
class LastHeadFromFirst(Planes):
    """The last head's codes are those of the one before it: a tile that does not divide the heads."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        codes = planes["codes"].clone()
        codes[:, -1] = codes[:, max(0, codes.shape[1] - 2)]
        planes["codes"] = codes


@fault("append", "head dim", about="-d128-")
class AmaxOverSixtyFour(Subject):
    """The largest magnitude is taken over the first 64 channels of a head."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if fmt.kind == "int" and fmt.symmetric and fmt.granularity == "token" and rows.shape[-1] > 64:
            planes["scale"] = super().encode(side, fmt, rows[..., :64], static)[0]["scale"]
        return planes, flags


@fault("append", "layer mixed up")
class WrittenToFirstLayer(Subject):
    """Every layer is written into the first one."""

    def write_layer(self, layer: int) -> int:
        return 0


@fault("append", "neighbouring slots overwritten")
class ClearsTheRestOfThePage(Subject):
    """Writing a token clears the slot after it in the page."""

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        following = (offsets + 1).clamp(max=plane.shape[1] - 1)
        plane[pages, following] = 0
        super().write(name, plane, values, pages, offsets)


@fault("append", "stale scale on reuse")
class ScaleOfThePage(Subject):
    """The scale of a page's first slot is kept for every token that is written into the page later."""

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        if name == "scale" and values.is_floating_point():
            values = torch.where((offsets == 0).view(-1, *[1] * (values.dim() - 1)), values, plane[pages, 0])
        super().write(name, plane, values, pages, offsets)


@fault("append", "scale frozen at first use")
class ScaleFrozenAtFirstUse(Subject):
    """A slot that has a scale already keeps it."""

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        if name == "scale" and values.is_floating_point():
            old = plane[pages, offsets]
            values = torch.where(old.isnan(), values, old)
        super().write(name, plane, values, pages, offsets)


@fault("append", "scale only ever grows")
class RunningMaximum(Subject):
    """A slot's scale is the larger of the old and the new one."""

    def write(self, name: str, plane: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        if name == "scale" and values.is_floating_point():
            values = torch.fmax(values, plane[pages, offsets])
        super().write(name, plane, values, pages, offsets)


@fault("append", "poison hidden")
class NanBecomesZero(Subject):
    """NaN and infinities are replaced by zero before encoding: poison disappears."""

    def rows(self, side: str, rows: Tensor) -> Tensor:
        return rows.nan_to_num(0.0, 0.0, 0.0)


@fault("append", "poison hidden")
class InfinitySaturates(Subject):
    """An infinity is stored as the largest finite value instead of poisoning its group."""

    def rows(self, side: str, rows: Tensor) -> Tensor:
        limit = torch.finfo(rows.dtype).max
        return torch.where(rows.isinf(), rows.sign() * limit, rows)


@fault("append", "poison spreads")
class NanSpoilsTheToken(Planes):
    """A NaN in one group or head poisons the whole token."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "scale" in planes and planes["scale"].is_floating_point():
            bad = planes["scale"].isnan().flatten(1).any(1)
            planes["scale"] = planes["scale"].masked_fill(bad.view(-1, *[1] * (planes["scale"].dim() - 1)), torch.nan)


@fault("append", "precision lost before encoding")
class EncodesFromHalf(Subject):
    """K and V are rounded to bfloat16 before they are encoded."""

    def rows(self, side: str, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).to(rows.dtype)


@fault("append", "dtype reinterpreted")
class BitsReinterpreted(Subject):
    """Half-precision pages take the upper bits of what they are given: truncation in place of rounding."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if fmt.code == "bf16":
            bits = rows.float().contiguous().view(torch.int32) >> 16
            planes["codes"] = bits.to(torch.int16).view(torch.bfloat16)
        return planes, flags


@fault("append", "argument changed")
class ScalesItsInput(Subject):
    """The caller's K is changed in place."""

    def rows(self, side: str, rows: Tensor) -> Tensor:
        if side == "key":
            rows.mul_(0.5)
        return rows


@fault("append", "float code saturation", about="fp8")
class Fp8Overflows(Subject):
    """Values above the largest fp8 code become NaN instead of saturating."""

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if fmt.code == "fp8_e4m3" and fmt.static:
            top = (planes["codes"] & 0x7F) == 0x7E
            planes["codes"] = planes["codes"].masked_fill(top, 0x7F)
        return planes, flags


@fault("append", "block scale")
class MxExponentTooLarge(Planes):
    """The shared exponent of a 4-bit float block is one too large: half the resolution."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if fmt.code == "mxfp4":
            planes["scale"] = torch.where(planes["scale"] < 254, planes["scale"] + 1, planes["scale"])


@fault("append", "block scale")
class TensorScaleOfOne(Planes):
    """nvfp4's float32 scale per token and head is stored as 1."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "tensor_scale" in planes:
            planes["tensor_scale"] = torch.ones_like(planes["tensor_scale"])


@fault("append", "wrong sign of zero")
class NegativeZeroStored(Planes):
    """A zero of -0 is stored where +0 must be."""

    def spoil(self, side: str, fmt: TensorFormat, planes: dict[str, Tensor]) -> None:
        if "zero" in planes:
            planes["zero"] = torch.where(planes["zero"] == 0, -0.0, planes["zero"])
