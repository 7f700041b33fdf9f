"""Small float encodings on bit patterns: rounding float32 into them and reading them back.

One routine rounds (`SmallFloat.encode`) and one reads (`SmallFloat.decode`); the five encodings are rows of data.
Both work on integers, so no library cast, no flush-to-zero mode and no compiler can change a result.

Sources of the constants: IEEE 754-2019 (binary16), bfloat16 as the upper half of binary32, the OCP "8-bit Floating
Point Specification" 1.0 (E4M3 in its finite-plus-NaN form, E5M2) and the OCP "Microscaling Formats Specification" 1.0
(E2M1, E8M0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]

Rounding = Literal["nearest_even", "floor"]

F32_QUIET_NAN = 0x7FC00000
"""The one float32 NaN an encoder writes; an arithmetic NaN differs between processors (x86 sets the sign bit)."""

F32_SMALLEST_NORMAL = np.float32(2.0**-126)
F32_LARGEST = np.float32((2.0 - 2.0**-23) * 2.0**127)


def float_bits(x: Float32Array) -> npt.NDArray[np.uint32]:
    """The bit patterns of float32 values, same shape. TypeError for any other dtype: a cast here would round twice."""
    if x.dtype != np.float32:
        raise TypeError(f"bit patterns are taken of float32 only; got {x.dtype}")
    return np.ascontiguousarray(x).reshape(np.shape(x)).view(np.uint32)


def bits_to_float(bits: npt.ArrayLike) -> Float32Array:
    """Float32 values with the given uint32 bit patterns, same shape."""
    patterns = np.asarray(bits, dtype=np.uint32)
    return np.ascontiguousarray(patterns).reshape(patterns.shape).view(np.float32)


def quiet_nan() -> np.float32:
    """The canonical quiet NaN, 0x7FC00000."""
    return np.float32(bits_to_float(F32_QUIET_NAN)[()])


@dataclass(frozen=True)
class SmallFloat:
    """A sign-exponent-mantissa encoding of at most 16 bits, bias 2**(exponent_bits-1) - 1, with subnormals.

    ``largest_code`` is the magnitude code of the largest finite value. ``infinity`` and ``nan`` are magnitude codes,
    None where the encoding has no such value.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest_code: int
    infinity: int | None
    nan: int | None

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def storage(self) -> type[np.uint8] | type[np.uint16]:
        """The unsigned integer that holds one code (E2M1 uses the low four bits of a byte)."""
        return np.uint8 if self.exponent_bits + self.mantissa_bits < 8 else np.uint16

    @property
    def largest(self) -> np.float32:
        """The largest finite value."""
        return np.float32(self.decode(np.asarray(self.largest_code))[()])

    @property
    def smallest_normal(self) -> np.float32:
        """The smallest positive value with a full mantissa."""
        return np.float32(2.0 ** (1 - self.bias))

    def encode(self, x: Float32Array, rounding: Rounding = "nearest_even") -> Array:
        """Round float32 values to codes, same shape, dtype `storage`.

        ``nearest_even`` rounds to nearest, ties to even; ``floor`` toward minus infinity. Overflow goes where IEEE 754
        sends it for that rounding: to infinity, or to the largest finite value where the rounding points inward. NaN
        becomes the one positive quiet NaN code. An encoding without infinity saturates instead, and one without NaN
        refuses it (ValueError).
        """
        bits = float_bits(x).astype(np.int64)
        negative = (bits >> 31) == 1
        exponent_field = (bits >> 23) & 0xFF
        fraction = bits & 0x7FFFFF
        is_nan = (exponent_field == 0xFF) & (fraction != 0)
        is_infinite = (exponent_field == 0xFF) & (fraction == 0)
        if self.nan is None and bool(is_nan.any()):
            raise ValueError(f"{self.name} has no NaN, but {int(is_nan.sum())} of {is_nan.size} inputs are NaN")

        # value = significand * 2**(exponent - 23); float32 subnormals have no implicit bit and exponent -126
        significand = np.where(exponent_field == 0, fraction, fraction | 0x800000)
        exponent = np.maximum(exponent_field, 1) - 127

        # Bits below the target's last place are dropped; below its smallest normal the last place no longer moves.
        # 25 dropped bits already leave less than half a unit of any 24-bit significand.
        smallest_exponent = 1 - self.bias
        target_exponent = np.maximum(exponent, smallest_exponent)
        dropped = np.minimum(23 - self.mantissa_bits + target_exponent - exponent, 25)
        kept = significand >> dropped
        remainder = significand & ((np.int64(1) << dropped) - 1)
        if rounding == "nearest_even":
            half = np.int64(1) << (dropped - 1)
            upward = (remainder > half) | ((remainder == half) & ((kept & 1) == 1))
        else:
            upward = negative & (remainder != 0)
        # Adding (not or-ing) lets a carry out of the mantissa step into the exponent, and the implicit bit of a normal
        # value supplies the last one of its exponent field.
        magnitude = ((target_exponent + self.bias - 1) << self.mantissa_bits) + kept + upward

        overflow = (magnitude > self.largest_code) & ~is_infinite & ~is_nan
        beyond = self.largest_code if self.infinity is None else self.infinity
        if rounding == "floor":
            magnitude = np.where(overflow, np.where(negative, beyond, self.largest_code), magnitude)
        else:
            magnitude = np.where(overflow, beyond, magnitude)
        magnitude = np.where(is_infinite, beyond, magnitude)
        code = magnitude | np.where(negative, self.sign_bit, 0)
        if self.nan is not None:
            code = np.where(is_nan, self.nan, code)
        return code.astype(self.storage)

    def decode(self, codes: npt.ArrayLike) -> Float32Array:
        """The float32 values of codes, same shape; exact, since every such value is a float32."""
        code = np.asarray(codes).astype(np.int64)
        negative = (code & self.sign_bit) != 0
        magnitude = code & (self.sign_bit - 1)
        exponent_field = magnitude >> self.mantissa_bits
        fraction = magnitude & ((1 << self.mantissa_bits) - 1)
        significand = np.where(exponent_field == 0, fraction, fraction | (1 << self.mantissa_bits))
        power = np.maximum(exponent_field, 1) - self.bias - self.mantissa_bits
        value = np.ldexp(significand.astype(np.float64), power.astype(np.int32))
        value = np.where(negative, -value, value)
        beyond = magnitude > self.largest_code
        if self.infinity is not None:
            infinite = magnitude == self.infinity
            value = np.where(infinite, np.where(negative, -np.inf, np.inf), value)
            beyond &= ~infinite
        if self.nan is not None:
            value = np.where(beyond, np.nan, value)
        with np.errstate(over="ignore"):  # codes beyond the largest were replaced above, this only silences their cast
            result = value.astype(np.float32)
        return np.where(beyond, quiet_nan(), result) if self.nan is not None else result

    def round(self, x: Float32Array, rounding: Rounding = "nearest_even") -> Float32Array:
        """The nearest value of this encoding, as float32: `decode` of `encode`."""
        return self.decode(self.encode(x, rounding))

    def half_spacing(self, x: Array) -> npt.NDArray[np.float64]:
        """Half the distance between neighbouring values around |x|: the largest rounding error there."""
        with np.errstate(invalid="ignore"):
            magnitude = np.where(np.isfinite(x), np.abs(x.astype(np.float64)), 0.0)
        _, exponent = np.frexp(magnitude)  # magnitude = f * 2**exponent with f in [0.5, 1)
        exponent = np.maximum(np.where(magnitude == 0, 1 - self.bias, exponent - 1), 1 - self.bias)
        half: npt.NDArray[np.float64] = np.ldexp(np.float64(0.5), exponent - self.mantissa_bits)
        return half


BF16 = SmallFloat("bfloat16", 8, 7, largest_code=0x7F7F, infinity=0x7F80, nan=0x7FC0)
FP16 = SmallFloat("float16", 5, 10, largest_code=0x7BFF, infinity=0x7C00, nan=0x7E00)
E4M3 = SmallFloat("fp8_e4m3", 4, 3, largest_code=0x7E, infinity=None, nan=0x7F)
E5M2 = SmallFloat("fp8_e5m2", 5, 2, largest_code=0x7B, infinity=0x7C, nan=0x7F)
E2M1 = SmallFloat("e2m1", 2, 1, largest_code=0x7, infinity=None, nan=None)

E8M0_BIAS = 127
E8M0_NAN = 0xFF


def e8m0_decode(exponents: npt.ArrayLike) -> Float32Array:
    """2**(byte - 127) as float32 (byte 0 is the subnormal 2**-127); byte 0xFF is NaN. Shape kept."""
    byte = np.asarray(exponents).astype(np.int32)
    value = np.ldexp(np.float64(1.0), np.minimum(byte, 254) - E8M0_BIAS).astype(np.float32)
    return np.where(byte == E8M0_NAN, quiet_nan(), value)


def e8m0_floor_log2(x: Float32Array) -> npt.NDArray[np.int64]:
    """floor(log2 x) of positive normal float32 by bit extraction; zero and subnormals give -127."""
    exponent: npt.NDArray[np.int64] = ((float_bits(x).astype(np.int64) >> 23) & 0xFF) - 127
    return exponent
