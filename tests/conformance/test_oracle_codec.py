"""The codec oracle against hand-computed numbers, exact arithmetic and ml_dtypes.

Expected codes, scales and bit patterns are written out or derived here in float64, never read off the oracle.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kvport_conformance import inputs
from kvport_conformance.oracle_codec import (
    CodecSpec,
    Encoded,
    decode,
    encode,
    pack,
    plane_shapes,
    round_trip_bound,
    unpack,
)
from kvport_conformance.oracle_floats import BF16, E2M1, E4M3, E5M2, FP16, SmallFloat, bits_to_float, e8m0_decode

STEP = 2.0**-6
INT8 = CodecSpec("int8")


def f32(numbers: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A float32 array of (nested) Python numbers."""
    return np.asarray(numbers, np.float32)


def row(*elements: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One token, one head."""
    return np.asarray(elements, np.float32)[None, None, :]


def encode_row(spec: CodecSpec, *elements: float, **static: Any) -> Encoded:
    return encode(spec, row(*elements), **static)


def codes_of(spec: CodecSpec, encoded: Encoded) -> list[int]:
    """Unpacked integer codes of the first token and head."""
    plane = encoded.planes["codes"]
    if spec.code == "int8":
        return [int(code) for code in plane[0, 0]]
    return [int(code) for code in unpack(plane, spec.code_bits, signed=spec.symmetric)[0, 0]]


def bits(plane: np.ndarray[Any, Any]) -> int:
    """The pattern of the first entry of a plane of floats or of patterns."""
    return int(plane.ravel()[:1].view(np.uint32 if plane.dtype == np.float32 else plane.dtype)[0])


# --- small floats ---------------------------------------------------------------------------------------------------


def _ml_dtype(name: str) -> Any:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return {
        "bfloat16": ml_dtypes.bfloat16,
        "float16": np.float16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
        "e2m1": ml_dtypes.float4_e2m1fn,
    }[name]


def _all_patterns(small: SmallFloat) -> np.ndarray[Any, Any]:
    return np.arange(2 * small.sign_bit).astype(small.storage)


@pytest.mark.parametrize("small", [BF16, FP16, E4M3, E5M2, E2M1], ids=lambda small: small.name)
def test_every_pattern_reads_as_ml_dtypes_reads_it(small: SmallFloat) -> None:
    patterns = _all_patterns(small)
    theirs = patterns.view(_ml_dtype(small.name)).astype(np.float32)
    ours = small.decode(patterns)
    is_nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), is_nan)
    np.testing.assert_array_equal(ours[~is_nan].view(np.uint32), theirs[~is_nan].view(np.uint32))
    assert ours.dtype == np.float32


@pytest.mark.parametrize("small", [BF16, FP16, E4M3, E5M2, E2M1], ids=lambda small: small.name)
def test_rounding_to_nearest_even_equals_ml_dtypes_at_and_around_every_tie(small: SmallFloat) -> None:
    finite = np.arange(small.largest_code + 1).astype(small.storage)
    exact = small.decode(finite).astype(np.float64)
    ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    # Below the float32 subnormals of bfloat16 a tie is still a float32, so that nothing is lost in this cast.
    np.testing.assert_array_equal(ties.astype(np.float64), (exact[1:] + exact[:-1]) / 2)
    x = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    x = np.concatenate([x, -x, exact.astype(np.float32)])
    theirs = x.astype(_ml_dtype(small.name)).view(small.storage)
    np.testing.assert_array_equal(small.encode(x), theirs)


@pytest.mark.parametrize("small", [BF16, FP16], ids=lambda small: small.name)
def test_floor_is_the_largest_value_not_above(small: SmallFloat) -> None:
    x = np.concatenate([inputs.key(3, (8, 1, 64)).ravel(), inputs.special_rows(16)["subnormal"]])
    x = np.concatenate([x, x * np.float32(1e-6), -x])
    floor = small.round(x, "floor")
    assert (floor <= x).all()
    nearest = small.round(x)
    step_up = np.where(nearest > x, nearest, np.inf)
    assert (floor < step_up).all()
    np.testing.assert_array_equal(floor[nearest <= x], nearest[nearest <= x])
    assert (floor < nearest).any(), "some values have to round differently, or this test shows nothing"


@pytest.mark.parametrize(
    ("small", "value", "code"),
    [
        (BF16, -1.003, 0xBF81),  # between -1.0078125 and -1.0
        (BF16, 1.005, 0x3F80),
        (BF16, -1e-40, 0x8002),  # 1.09 times the smallest subnormal 2**-133
        (BF16, 3.4e38, 0x7F7F),  # overflow stops at the largest finite value going down to it
        (BF16, -3.4e38, 0xFF80),
        (FP16, -1e-9, 0x8001),
        (FP16, 1e-9, 0x0000),
        (FP16, -0.0, 0x8000),
        (FP16, 1e5, 0x7BFF),
        (FP16, -1e5, 0xFC00),
    ],
)
def test_floor_by_hand(small: SmallFloat, value: float, code: int) -> None:
    assert int(small.encode(f32([value]), "floor")[0]) == code


def test_overflow_and_nan_of_each_encoding() -> None:
    x = f32([65519.996, 65520.0, -1e30, np.inf, np.nan])
    assert FP16.encode(x).tolist() == [0x7BFF, 0x7C00, 0xFC00, 0x7C00, 0x7E00]
    assert BF16.encode(f32([3.4028235e38, -np.inf])).tolist() == [0x7F80, 0xFF80]
    assert E4M3.encode(x).tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0x7F], "E4M3 has no infinity: it saturates at 448"
    assert E5M2.encode(x).tolist() == [0x7C, 0x7C, 0xFC, 0x7C, 0x7F]
    assert E2M1.encode(f32([7.5, -100.0, -np.inf, -0.0])).tolist() == [7, 15, 15, 8]
    with pytest.raises(ValueError, match="no NaN"):
        E2M1.encode(f32([np.nan]))
    for small, code in ((BF16, 0x7FC0), (FP16, 0x7E00), (E4M3, 0x7F), (E5M2, 0x7F)):
        assert set(small.encode(inputs.nan_payloads()).tolist()) == {code}


def test_bit_patterns_are_refused_of_anything_but_float32() -> None:
    with pytest.raises(TypeError, match="float64"):
        BF16.encode(np.asarray([1.0]))


def test_e8m0_reads_powers_of_two() -> None:
    bytes_ = np.arange(256)
    expected = np.ldexp(1.0, bytes_[:255] - 127).astype(np.float32)
    assert expected[0] == 2.0**-127
    np.testing.assert_array_equal(e8m0_decode(bytes_)[:255], expected)
    assert bits(e8m0_decode(np.asarray([0xFF]))) == 0x7FC00000


# --- packing --------------------------------------------------------------------------------------------------------


def test_packing_order_is_lowest_bits_first() -> None:
    assert pack(np.asarray([1, -2, 7, -7]), 4).tolist() == [0xE1, 0x97]
    assert pack(np.asarray([1, -1, 0, 1]), 2).tolist() == [0x4D]
    assert pack(np.asarray([3, 0, 2, 1]), 2).tolist() == [0x63]
    assert unpack(np.asarray([0xE1, 0x97], np.uint8), 4, signed=True).tolist() == [1, -2, 7, -7]
    assert unpack(np.asarray([0x63], np.uint8), 2, signed=False).tolist() == [3, 0, 2, 1]
    assert unpack(np.asarray([0x8A], np.uint8), 4, signed=True).tolist() == [-6, -8]


@pytest.mark.parametrize("width", [4, 2])
@pytest.mark.parametrize("signed", [True, False])
def test_every_byte_unpacks_and_packs_to_itself(width: int, signed: bool) -> None:
    every = np.arange(256, dtype=np.uint8)
    codes = unpack(every, width, signed=signed)
    assert codes.min() == (-(2 ** (width - 1)) if signed else 0)
    np.testing.assert_array_equal(pack(codes, width), every)


# --- symmetric integers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "row_name", "expected"),
    [
        ("int8", "ties_int8", [127, 0, 2, 2, 0, -2, 64, 64, -126, 126, 100, -100, 0, -127, 32, -32]),
        ("int4", "ties_int4", [7, 0, 2, 2, 4, 4, 6, 6, 0, -2, -2, -4, -4, -6, -6, -7]),
        ("int2", "ties_int2", [1, 0, 0, -1, 0, 0, 0, 1, 0, 0, 0, 0, 1, -1, 0, 0]),
    ],
)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
def test_symmetric_ties_go_to_the_even_code(code: str, row_name: str, expected: list[int], scale_dtype: str) -> None:
    spec = CodecSpec(code, scale_dtype=scale_dtype)
    x = inputs.special_rows(16)[row_name][None, None, :]
    encoded = encode(spec, x)
    assert codes_of(spec, encoded) == expected
    assert bits(encoded.planes["scale"]) == {"float32": 0x3C800000, "bfloat16": 0x3C80, "float16": 0x2400}[scale_dtype]
    np.testing.assert_array_equal(decode(spec, encoded.planes, 16)[0, 0], f32(expected) * np.float32(STEP))
    assert encoded.saturated == 0


@pytest.mark.parametrize(("code", "qmax"), [("int8", 127), ("int4", 7), ("int2", 1)])
def test_symmetric_extremes_are_plus_and_minus_qmax(code: str, qmax: int) -> None:
    spec = CodecSpec(code)
    encoded = encode(spec, inputs.special_rows(16)[f"qmax_{code}"][None, None, :])
    assert codes_of(spec, encoded) == [qmax, -qmax] * 8
    assert float(encoded.planes["scale"][0, 0]) == STEP


@pytest.mark.parametrize(
    ("scale_dtype", "pattern"),
    [("float32", 0x3C010204), ("bfloat16", 0x3C01), ("float16", 0x2008)],  # 1/127 = 2**-7 * 1.0078740157
)
def test_scale_is_amax_over_qmax_in_its_dtype(scale_dtype: str, pattern: int) -> None:
    encoded = encode_row(CodecSpec("int8", scale_dtype=scale_dtype), 0.25, -1.0)
    assert bits(encoded.planes["scale"]) == pattern


def test_codes_use_the_scale_as_stored() -> None:
    x = (1.0, 100.497 / 127)  # quotient 100.497 under the exact scale, 100.503 under bfloat16(1/127)
    assert codes_of(INT8, encode_row(INT8, *x)) == [127, 100]
    spec = CodecSpec("int8", scale_dtype="bfloat16")
    assert codes_of(spec, encode_row(spec, *x)) == [127, 101]


def test_divisions_are_rounded_once_as_float64_rounds_them() -> None:
    """float64 has more than 2 * 24 + 2 bits, so a float64 quotient cast to float32 is the correctly rounded one."""
    x = inputs.key(11, (64, 2, 64))
    planes = encode(INT8, x).planes
    scale = (np.abs(x.astype(np.float64)).max(axis=-1) / 127.0).astype(np.float32)
    np.testing.assert_array_equal(planes["scale"].view(np.uint32), scale.view(np.uint32))
    quotient = (x.astype(np.float64) / scale.astype(np.float64)[..., None]).astype(np.float32)
    expected = [max(-127, min(127, round(float(q)))) for q in quotient.ravel()]  # Python rounds half to even
    assert planes["codes"].ravel().tolist() == expected
    reciprocal = np.abs(x).max(axis=-1) * np.float32(1.0 / 127.0)
    assert (reciprocal != planes["scale"]).any(), "the reciprocal has to differ somewhere, or this test shows nothing"


def _once(exact: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A float64 result of two float32 operands, rounded once to float32."""
    assert exact.dtype == np.float64
    return np.asarray(exact.astype(np.float32))


@pytest.mark.parametrize(("code", "levels"), [("int8", 255.0), ("int4", 15.0), ("int2", 3.0)])
def test_asymmetric_arithmetic_is_rounded_once_a_step(code: str, levels: float) -> None:
    spec = CodecSpec(code, symmetric=False)
    x = inputs.key(12, (64, 2, 64))
    planes = encode(spec, x).planes
    wide = x.astype(np.float64)
    zero = wide.min(axis=-1)
    extent = _once(wide.max(axis=-1) - zero)
    scale = _once(extent.astype(np.float64) / levels)
    np.testing.assert_array_equal(planes["zero"], zero)
    np.testing.assert_array_equal(planes["scale"], scale)
    assert (extent * np.float32(1.0 / levels) != scale).any(), "the reciprocal has to differ somewhere"
    shifted = _once(wide - zero[..., None])
    quotient = _once(shifted.astype(np.float64) / scale.astype(np.float64)[..., None])
    expected = [max(0, min(int(levels), round(float(q)))) for q in quotient.ravel()]
    stored = planes["codes"]
    codes = stored if code == "int8" else unpack(stored, spec.code_bits, signed=False)
    assert codes.ravel().tolist() == expected


def test_nvfp4_arithmetic_is_rounded_once_a_step() -> None:
    x = inputs.key(13, (64, 2, 64))
    planes = encode(CodecSpec("nvfp4"), x).planes
    blocks = x.astype(np.float64).reshape(64, 2, 4, 16)
    tensor_scale = _once(np.abs(blocks).max(axis=(-2, -1)) / 2688.0)
    np.testing.assert_array_equal(planes["tensor_scale"], tensor_scale)
    sixth = _once(np.abs(blocks).max(axis=-1) / 6.0)
    wanted = _once(sixth.astype(np.float64) / tensor_scale.astype(np.float64)[..., None])
    np.testing.assert_array_equal(planes["scale"], E4M3.encode(np.minimum(wanted, np.float32(448))))
    scale = _once(E4M3.decode(planes["scale"]).astype(np.float64) * tensor_scale.astype(np.float64)[..., None])
    codes = E2M1.encode(_once(blocks / scale.astype(np.float64)[..., None])).reshape(64, 2, 64)
    np.testing.assert_array_equal(unpack(planes["codes"], 4, signed=False), codes)


def test_nvfp4_divides_by_six_before_it_divides_by_the_tensor_scale() -> None:
    """amax 1 and a block of 0.04687500372529: 21.000002, above the tie of 20 and 22; in one division 21.0, so 20."""
    block = float.fromhex("0x1.8000020000000p-5")
    encoded = encode_row(CodecSpec("nvfp4"), 1.0, *[0.0] * 15, block, *[0.0] * 15)
    assert E4M3.decode(encoded.planes["scale"])[0, 0].tolist() == [448.0, 22.0]


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("code", ["int8", "int4", "int2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_groups_have_scale_zero_and_decode_to_zero(code: str, symmetric: bool, scale_dtype: str) -> None:
    spec = CodecSpec(code, symmetric=symmetric, scale_dtype=scale_dtype)
    encoded = encode_row(spec, 0.0, -0.0, 0.0, -0.0)
    assert all(bits(plane) == 0 for plane in encoded.planes.values())
    np.testing.assert_array_equal(decode(spec, encoded.planes, 4).view(np.uint32), 0)


@pytest.mark.parametrize(
    ("scale_dtype", "smallest"), [("float32", 0x00800000), ("bfloat16", 0x0080), ("float16", 0x0400)]
)
@pytest.mark.parametrize("tiny", [2.0**-149, 1e-40, 2.0**-126])
def test_a_scale_that_would_underflow_is_the_smallest_normal(scale_dtype: str, smallest: int, tiny: float) -> None:
    for code in ("int8", "int2", "fp8_e4m3"):
        encoded = encode_row(CodecSpec(code, scale_dtype=scale_dtype), tiny / 2, -tiny, 0.0, 0.0)
        assert bits(encoded.planes["scale"]) == smallest
        assert encoded.saturated == 0


def test_a_scale_that_would_overflow_is_the_largest_finite_and_counts_what_it_clips() -> None:
    spec = CodecSpec("int8", scale_dtype="float16")
    encoded = encode_row(spec, 1e8, -9e6, 8e6, 1.0)  # 65504 * 127.5 = 8.35e6
    assert bits(encoded.planes["scale"]) == 0x7BFF
    assert encoded.planes["codes"][0, 0].tolist() == [127, -127, 122, 0]
    assert encoded.saturated == 2
    assert encoded.saturated_elements[0, 0].tolist() == [True, True, False, False]
    # A scale that merely rounds down to the largest value is no clamp: nothing is counted.
    assert encode_row(spec, 65510.0 * 127, 0.0).saturated == 0


def test_inputs_beyond_the_limit_are_clamped_first_and_counted() -> None:
    limit = 2.0**125
    encoded = encode_row(INT8, limit * 4, -limit * 2, limit, limit / 2)
    assert encoded.saturated == 2
    assert encoded.planes["codes"][0, 0].tolist() == [127, -127, 127, 64]  # 63.5 is a tie
    assert float(encoded.planes["scale"][0, 0]) == float(np.float32(limit / 127))
    assert encode_row(INT8, limit, -limit).saturated == 0


# --- asymmetric integers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "row_name", "expected"),
    [
        ("int8", "ties_int8_asym", [0, 255, 0, 2, 2, 4, 64, 64, 100, 126, 128, 32, 32, 16, 16, 8]),
        ("int4", "ties_int4_asym", [0, 15, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14]),
        ("int2", "ties_int2_asym", [0, 3, 0, 2, 2, 0, 2, 2, 3, 0, 1, 2, 0, 2, 2, 3]),
    ],
)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offset", [0.0, -0.5, 2.0])
def test_asymmetric_by_hand(code: str, row_name: str, expected: list[int], scale_dtype: str, offset: float) -> None:
    spec = CodecSpec(code, symmetric=False, scale_dtype=scale_dtype)
    x = inputs.special_rows(16)[row_name][None, None, :] + np.float32(offset)
    encoded = encode(spec, x)
    assert codes_of(spec, encoded) == expected
    assert decode(spec, encoded.planes, 16)[0, 0].tolist() == [c * STEP + offset for c in expected]
    zero = np.float32(offset)
    if scale_dtype == "float32":
        assert encoded.planes["zero"].view(np.uint32)[0, 0] == zero.view(np.uint32)
        assert float(encoded.planes["scale"][0, 0]) == STEP
    assert encoded.planes["codes"].dtype == np.uint8


@pytest.mark.parametrize(
    ("scale_dtype", "minimum", "pattern"),
    [
        ("bfloat16", -1.003, 0xBF81),
        ("bfloat16", 1.005, 0x3F80),
        ("bfloat16", -1e-40, 0x8002),
        ("float16", -1e-9, 0x8001),
        ("float16", 1e-9, 0x0000),
        ("float16", -1.0001, 0xBC01),
        ("float32", -1.25, 0xBFA00000),
        ("bfloat16", -0.0, 0x0000),
        ("float16", -0.0, 0x0000),
        ("float32", -0.0, 0x00000000),
    ],
)
def test_zero_is_cast_toward_minus_infinity_and_is_never_minus_zero(
    scale_dtype: str, minimum: float, pattern: int
) -> None:
    encoded = encode_row(CodecSpec("int8", symmetric=False, scale_dtype=scale_dtype), minimum, 4.0)
    assert bits(encoded.planes["zero"]) == pattern
    assert encoded.saturated == 0


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_zero_is_never_above_the_minimum(scale_dtype: str) -> None:
    spec = CodecSpec("int4", "group", 16, symmetric=False, scale_dtype=scale_dtype)
    x = inputs.key(5, (32, 2, 64)) + np.float32(3.0)
    zero = {"bfloat16": BF16, "float16": FP16}[scale_dtype].decode(encode(spec, x).planes["zero"])
    minimum = x.reshape(32, 2, 4, 16).min(axis=-1)
    assert (zero <= minimum).all()
    assert (zero < minimum).any()


@pytest.mark.parametrize(("minimum", "pattern"), [(-1e5, 0xFBFF), (1e5, 0x7BFF)])
def test_a_zero_beyond_its_dtype_is_clamped_and_counted(minimum: float, pattern: int) -> None:
    spec = CodecSpec("int8", symmetric=False, scale_dtype="float16")
    encoded = encode_row(spec, minimum, minimum + 5e4)
    assert bits(encoded.planes["zero"]) == pattern
    assert (encoded.saturated_zeros, encoded.saturated) == (1, 1)


def test_a_group_wholly_below_the_smallest_zero_decodes_to_that_zero() -> None:
    spec = CodecSpec("int4", symmetric=False, scale_dtype="float16")
    encoded = encode_row(spec, -1e6, -2e6)
    assert bits(encoded.planes["scale"]) == 0
    assert decode(spec, encoded.planes, 2)[0, 0].tolist() == [-65504.0, -65504.0]
    assert encoded.saturated >= 1
    assert np.isinf(round_trip_bound(spec, row(-1e6, -2e6), encoded.planes)).all()


@pytest.mark.parametrize("constant", [2.5, -0.375, 1 / 3, -1e-3, 1e30, -(2.0**-149), 3e4])
@pytest.mark.parametrize("code", ["int8", "int4", "int2"])
def test_a_constant_group_decodes_to_the_constant(constant: float, code: str) -> None:
    x = row(*[constant] * 4)
    spec = CodecSpec(code, symmetric=False)
    np.testing.assert_array_equal(decode(spec, encode(spec, x).planes, 4), x)
    for scale_dtype, digits in (("bfloat16", 8), ("float16", 11)):
        if scale_dtype == "float16" and not 2.0**-14 <= abs(constant) <= 65504:
            continue
        spec = CodecSpec(code, symmetric=False, scale_dtype=scale_dtype)
        ulp = 2.0 ** max(math.floor(math.log2(abs(constant))) + 1 - digits, -133)
        error = np.abs(decode(spec, encode(spec, x).planes, 4).astype(np.float64) - x)
        assert error.max() <= ulp


# --- poison ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("scale_dtype", "pattern"), [("float32", 0x7FC00000), ("bfloat16", 0x7FC0), ("float16", 0x7E00)]
)
@pytest.mark.parametrize("code", ["int8", "int4", "int2", "fp8_e4m3", "fp8_e5m2"])
def test_poison_fills_its_group_and_nothing_else(code: str, scale_dtype: str, pattern: int, poison: float) -> None:
    for granularity, group in (("token", 0), ("group", 16), ("channel_group", 4)):
        for symmetric in (True, False) if code.startswith("int") else (True,):
            spec = CodecSpec(code, granularity, group, symmetric, scale_dtype)
            clean = inputs.key(1, (8, 2, 32))
            x = clean.copy()
            x[5, 1, 19] = poison
            encoded, reference = encode(spec, x), encode(spec, clean)
            hit: tuple[int, ...]
            inside: tuple[int | slice, ...]
            hit, inside = {
                "token": ((5, 1), (5, 1)),
                "group": ((5, 1, 1), (5, 1, slice(16, 32))),
                "channel_group": ((1, 1, 19), (slice(4, 8), 1, 19)),
            }[granularity]
            members = np.zeros(x.shape, bool)
            members[inside] = True
            scale = encoded.planes["scale"]
            assert bits(scale[hit]) == pattern
            assert encoded.poisoned.sum() == 1
            assert encoded.poisoned[hit]
            assert encoded.saturated == 0, "poison is no saturation"
            if spec.has_zero:
                assert bits(encoded.planes["zero"][hit]) == 0
            decoded = decode(spec, encoded.planes, 32)
            np.testing.assert_array_equal(np.isnan(decoded), members)
            np.testing.assert_array_equal(decoded[~members], decode(spec, reference.planes, 32)[~members])
            stripped = {name: plane.copy() for name, plane in encoded.planes.items()}
            stripped["scale"] = np.where(encoded.poisoned, reference.planes["scale"], scale).astype(scale.dtype)
            assert not decode(spec, stripped, 32)[members].any(), "all codes of the group, and its zero, are 0"


def test_poison_of_the_block_formats() -> None:
    clean = inputs.value(1, (4, 2, 64))
    x = clean.copy()
    x[2, 1, 40] = np.inf
    mx = encode(CodecSpec("mxfp4"), x)
    assert mx.planes["scale"][2, 1].tolist() == [int(encode(CodecSpec("mxfp4"), clean).planes["scale"][2, 1, 0]), 0xFF]
    assert not mx.planes["codes"][2, 1, 16:].any()
    assert np.isnan(decode(CodecSpec("mxfp4"), mx.planes, 64)).sum() == 32

    nv = encode(CodecSpec("nvfp4"), x)
    assert bits(nv.planes["tensor_scale"][2, 1]) == 0x7FC00000
    assert nv.planes["scale"][2, 1].tolist() == [0x7F] * 4
    assert not nv.planes["codes"][2, 1].any()
    assert nv.poisoned.shape == (4, 2)
    assert nv.poisoned.sum() == 1
    assert np.isnan(decode(CodecSpec("nvfp4"), nv.planes, 64)).sum() == 64

    static = CodecSpec("nvfp4", static=True)
    nvs = encode(static, x, static_scale=np.float32(0.01))
    assert nvs.planes["scale"][2, 1, 2] == 0x7F
    assert nvs.poisoned.sum() == 1
    assert np.isnan(decode(static, nvs.planes, 64, static_scale=np.float32(0.01))).sum() == 16


# --- fp8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "largest", "expected"),
    [
        (
            "fp8_e4m3",
            448.0,
            [448, 16, 20, 20, -16, -20, 448, 32, 40, 0, 2.0**-8, -0.0, 0, 1, 1.25, -448],
        ),
        (
            "fp8_e5m2",
            57344.0,
            [57344, 8, 12, 12, 16, -8, -12, 16, 24, 0, 2.0**-15, -0.0, 0, 1, 1.5, -57344],
        ),
    ],
)
def test_fp8_by_hand(code: str, largest: float, expected: list[float]) -> None:
    spec = CodecSpec(code)
    x = inputs.special_rows(16)[f"ties_{code}"][None, None, :]
    assert float(x.max()) == largest * STEP
    encoded = encode(spec, x)
    assert float(encoded.planes["scale"][0, 0]) == STEP
    wanted = f32(expected) * np.float32(STEP)
    np.testing.assert_array_equal(decode(spec, encoded.planes, 16)[0, 0].view(np.uint32), wanted.view(np.uint32))


def test_fp8_keeps_the_sign_of_zero_unless_the_scale_is_zero() -> None:
    spec = CodecSpec("fp8_e4m3")
    assert encode_row(spec, 1.0, -0.0).planes["codes"][0, 0].tolist() == [0x7E, 0x80]
    assert encode_row(spec, 0.0, -0.0).planes["codes"][0, 0].tolist() == [0, 0]


@pytest.mark.parametrize(("code", "largest", "nan"), [("fp8_e4m3", 448.0, 0x7F), ("fp8_e5m2", 57344.0, 0x7F)])
def test_static_fp8_saturates_and_counts_infinities_and_keeps_nan(code: str, largest: float, nan: int) -> None:
    spec = CodecSpec(code, "tensor", static=True)
    scale = np.float32(0.5)
    encoded = encode_row(spec, np.nan, np.inf, -np.inf, largest, 1.0, largest / 2, static_scale=scale)
    assert encoded.planes["codes"][0, 0, 0] == nan
    decoded = decode(spec, encoded.planes, 6, static_scale=scale)[0, 0]
    assert np.isnan(decoded[0])
    assert decoded[1:].tolist() == [largest / 2, -largest / 2, largest / 2, 1.0, largest / 2]
    assert encoded.saturated == 3
    assert not encoded.flagged.any()


# --- four-bit float blocks ------------------------------------------------------------------------------------------

E2M1_TIES = [6, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, -6]
E2M1_TIE_CODES = [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 15]


def test_mxfp4_by_hand() -> None:
    spec = CodecSpec("mxfp4")
    x = inputs.special_rows(32)["ties_mxfp4"][None, None, :]
    encoded = encode(spec, x)
    assert encoded.planes["scale"].tolist() == [[[127 - 6]]]
    assert encoded.planes["codes"][0, 0, :8].tolist() == [
        low | high << 4 for low, high in zip(E2M1_TIE_CODES[::2], E2M1_TIE_CODES[1::2], strict=True)
    ]
    assert decode(spec, encoded.planes, 32)[0, 0, :16].tolist() == [value * STEP for value in E2M1_TIES]


@pytest.mark.parametrize(
    ("amax", "byte", "decoded"),
    [
        (float(np.nextafter(np.float32(8), np.float32(0))), 127, 6.0),  # log2 in float32 would say 3
        (8.0, 128, 8.0),
        (4.0, 127, 4.0),
        (2.0**125, 250, 2.0**125),
        (2.0**-126, 0, 2.0**-126),
        (2.0**-149, 0, 0.0),
        (0.0, 0, 0.0),
    ],
)
def test_mxfp4_exponent_is_extracted_from_the_bits(amax: float, byte: int, decoded: float) -> None:
    spec = CodecSpec("mxfp4")
    encoded = encode_row(spec, amax, *[0.0] * 31)
    assert encoded.planes["scale"].item() == byte
    assert decode(spec, encoded.planes, 32)[0, 0, 0] == decoded
    assert encoded.saturated == 0


def test_block_formats_keep_the_sign_of_zero_where_a_scale_exists() -> None:
    zeros = [-0.0] * 32
    assert set(encode_row(CodecSpec("mxfp4"), *zeros).planes["codes"].ravel().tolist()) == {0x88}
    assert set(encode_row(CodecSpec("nvfp4"), *zeros).planes["codes"].ravel().tolist()) == {0x00}
    beside = encode_row(CodecSpec("nvfp4"), *zeros[:16], 1.0, *zeros[:15])
    assert set(beside.planes["codes"][0, 0, :8].tolist()) == {0x88}


def test_nvfp4_by_hand() -> None:
    spec = CodecSpec("nvfp4")
    small = [3 * x / 256 for x in inputs.special_rows(16)["ties_nvfp4"].tolist()]  # block amax 42 * 3 / 256
    x = row(*inputs.special_rows(16)["ties_nvfp4"].tolist(), *small, *[0.0] * 16)
    encoded = encode(spec, x)
    assert float(encoded.planes["tensor_scale"][0, 0]) == STEP
    # 448; 448 * 3 / 256 = 5.25 = tie of 5 and 5.5, even mantissa 5; empty block 2**-9
    assert encoded.planes["scale"][0, 0].tolist() == [0x7E, 0x4A, 0x01]
    decoded = decode(spec, encoded.planes, 48)[0, 0]
    assert decoded[:16].tolist() == [7 * value for value in E2M1_TIES]
    assert decoded[16] == 6 * 5.0 * STEP  # 6.3 saturates at 6
    assert decoded[17] == 0.5 * 5.0 * STEP  # 0.2625 is above the tie at 0.25
    assert not decoded[32:].any()
    assert encoded.saturated == 0


def test_nvfp4_of_zeros_has_block_bytes_of_the_smallest_scale() -> None:
    encoded = encode_row(CodecSpec("nvfp4"), *[0.0] * 32)
    assert bits(encoded.planes["tensor_scale"]) == 0
    assert encoded.planes["scale"].ravel().tolist() == [0x01, 0x01]
    assert not encoded.planes["codes"].any()
    assert not decode(CodecSpec("nvfp4"), encoded.planes, 32).any()


def test_nvfp4_static_counts_blocks_beyond_the_calibrated_range() -> None:
    spec = CodecSpec("nvfp4", static=True)
    ts = np.float32(STEP)  # largest representable 42
    encoded = encode_row(spec, 84.0, 43.0, -45.5, 1.0, *[0.0] * 12, 42.0, *[1.0] * 15, static_scale=ts)
    assert set(encoded.planes) == {"codes", "scale"}
    assert encoded.planes["scale"][0, 0].tolist() == [0x7E, 0x7E]
    assert encoded.saturated == 3
    assert decode(spec, encoded.planes, 32, static_scale=ts)[0, 0, [0, 1, 2, 16]].tolist() == [42.0, 42.0, -42.0, 42.0]


def test_nvfp4_tensor_scale_never_underflows() -> None:
    encoded = encode_row(CodecSpec("nvfp4"), 2.0**-140, *[0.0] * 15)
    assert bits(encoded.planes["tensor_scale"]) == 0x00800000


# --- float pages ----------------------------------------------------------------------------------------------------


def test_float_pages_keep_bits_signs_nan_and_infinities() -> None:
    x = row(1.0, -0.0, np.inf, -np.inf, 1 + 2.0**-8, 3e38)
    assert encode(CodecSpec("bf16"), x).planes["codes"][0, 0].tolist() == [
        0x3F80, 0x8000, 0x7F80, 0xFF80, 0x3F80, 0x7F62,
    ]  # fmt: skip
    assert encode(CodecSpec("fp16"), x).planes["codes"][0, 0].tolist() == [
        0x3C00, 0x8000, 0x7C00, 0xFC00, 0x3C04, 0x7C00,
    ]  # fmt: skip
    np.testing.assert_array_equal(encode(CodecSpec("fp32"), x).planes["codes"].view(np.uint32), x.view(np.uint32))
    for code in ("bf16", "fp16", "fp32"):
        encoded = encode(CodecSpec(code), row(np.nan, 1.0))
        assert np.isnan(decode(CodecSpec(code), encoded.planes, 2)[0, 0]).tolist() == [True, False]
        assert encoded.saturated == 0


# --- static scales --------------------------------------------------------------------------------------------------


def test_static_granularities_apply_each_scale_where_it_belongs() -> None:
    x = np.full((2, 2, 4), 6.0, np.float32)
    by_head = encode(CodecSpec("int8", "head", static=True), x, static_scale=f32([1.0, 2.0]))
    assert by_head.planes["codes"][1].tolist() == [[6] * 4, [3] * 4]
    scales = f32([[1, 2, 3, 6], [0.5, 1, 1.5, 2]])
    by_channel = encode(CodecSpec("int8", "channel", static=True), x, static_scale=scales)
    assert by_channel.planes["codes"][0].tolist() == [[6, 3, 2, 1], [12, 6, 4, 3]]
    np.testing.assert_array_equal(
        decode(CodecSpec("int8", "channel", static=True), by_channel.planes, 4, static_scale=scales), x
    )
    assert set(by_head.planes) == {"codes"}


def test_static_integers_clip_count_and_flag() -> None:
    spec = CodecSpec("int8", "tensor", static=True)
    x = np.stack([row(np.nan, np.inf, -np.inf, 1.0)[0], row(63.5, 63.75, -64.0, 2.0**126)[0]])
    encoded = encode(spec, x, static_scale=np.float32(0.5))
    assert encoded.planes["codes"][:, 0].tolist() == [[0, 127, -127, 2], [127, 127, -127, 127]]
    # 63.75 / 0.5 = 127.5 rounds to 128, so it is clipped; 2**126 is clamped and clipped, and counts once.
    assert encoded.saturated_elements[:, 0].tolist() == [[False, True, True, False], [False, True, True, True]]
    assert encoded.saturated == 5
    assert encoded.flagged.tolist() == [[True], [False]]
    assert not encoded.poisoned.any()


def test_static_zero_shifts_and_is_cast_down() -> None:
    spec = CodecSpec("int4", "tensor", symmetric=False, scale_dtype="bfloat16", static=True)
    static = {"static_scale": np.float32(0.25), "static_zero": np.float32(-1.003)}
    encoded = encode_row(spec, -1.0078125, 0.0, 2.7421875, 9.0, **static)
    assert codes_of(spec, encoded) == [0, 4, 15, 15]
    assert encoded.saturated == 1
    assert decode(spec, encoded.planes, 4, **static)[0, 0].tolist() == [-1.0078125, -0.0078125, 2.7421875, 2.7421875]


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e-40])
def test_a_static_scale_that_is_no_normal_positive_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="static_scale"):
        encode_row(CodecSpec("int8", "tensor", static=True), 1.0, 2.0, static_scale=np.float32(bad))


def test_a_static_scale_that_leaves_its_dtype_is_refused() -> None:
    spec = CodecSpec("int8", "head", scale_dtype="float16", static=True)
    for bad in (1e-5, 7e4):
        with pytest.raises(ValueError, match="float16"):
            encode_row(spec, 1.0, 2.0, static_scale=f32([bad]))


def test_static_scales_missing_superfluous_or_misshapen_are_refused() -> None:
    static = CodecSpec("int8", "head", static=True)
    with pytest.raises(ValueError, match="needs static_scale"):
        encode_row(static, 1.0)
    with pytest.raises(ValueError, match=r"\(1,\).*\(2,\)"):
        encode_row(static, 1.0, static_scale=f32([1, 2]))
    with pytest.raises(ValueError, match="not static"):
        encode_row(INT8, 1.0, static_scale=np.float32(1))
    with pytest.raises(ValueError, match="no static zero"):
        encode_row(static, 1.0, static_scale=f32([1]), static_zero=f32([1]))


# --- decoding what no encoder emits ---------------------------------------------------------------------------------


def test_decoders_accept_the_lowest_code_and_any_scale() -> None:
    scale = f32([[3.0]])
    int8: dict[str, np.ndarray[Any, Any]] = {"codes": np.asarray([[[-128, 1]]], np.int8), "scale": scale}
    int4: dict[str, np.ndarray[Any, Any]] = {"codes": np.asarray([[[0x18]]], np.uint8), "scale": scale}
    int2: dict[str, np.ndarray[Any, Any]] = {"codes": np.asarray([[[0b10_11_00_01]]], np.uint8), "scale": scale}
    assert decode(INT8, int8, 2)[0, 0].tolist() == [-384.0, 3.0]
    assert decode(CodecSpec("int4"), int4, 2)[0, 0].tolist() == [-24.0, 3.0]
    assert decode(CodecSpec("int2"), int2, 4)[0, 0].tolist() == [3.0, 0.0, -3.0, -6.0]


def test_decoding_rounds_each_operation_to_float32() -> None:
    spec = CodecSpec("int8", symmetric=False)
    scale, zero = np.float32(0.1), np.float32(-1 / 3)
    codes = np.arange(256, dtype=np.uint8)[None, None, :]
    decoded = decode(spec, {"codes": codes, "scale": scale.reshape(1, 1), "zero": zero.reshape(1, 1)}, 256)[0, 0]
    for code in range(256):
        product = np.float32(float(scale) * code)  # exact in float64, rounded once
        assert decoded[code] == np.float32(float(product) + float(zero))
    fused = (np.arange(256) * float(scale) + float(zero)).astype(np.float32)
    assert (fused != decoded).any(), "a fused multiply-add has to differ somewhere, or this test shows nothing"


def test_wrong_planes_are_refused() -> None:
    planes = encode_row(INT8, 1.0, 2.0).planes
    with pytest.raises(ValueError, match="scale"):
        decode(INT8, {"codes": planes["codes"]}, 2)
    with pytest.raises(ValueError, match="zero"):
        decode(INT8, {**planes, "zero": planes["scale"]}, 2)
    with pytest.raises(ValueError, match="int8"):
        decode(INT8, {**planes, "codes": planes["codes"].view(np.uint8)}, 2)
    with pytest.raises(ValueError, match=r"\(1, 1, 4\)"):
        decode(INT8, planes, 4)


# --- layout ---------------------------------------------------------------------------------------------------------

DYNAMIC_SPECS = [
    *[
        CodecSpec(code, granularity, group, symmetric, scale_dtype)
        for code in ("int8", "int4", "int2")
        for granularity, group in (("token", 0), ("group", 32), ("channel_group", 16))
        for symmetric in (True, False)
        for scale_dtype in ("float32", "bfloat16", "float16")
    ],
    *[
        CodecSpec(code, granularity, group, True, scale_dtype)
        for code in ("fp8_e4m3", "fp8_e5m2")
        for granularity, group in (("token", 0), ("group", 32), ("channel_group", 16))
        for scale_dtype in ("float32", "bfloat16", "float16")
    ],
    *[CodecSpec(code) for code in ("fp32", "fp16", "bf16", "mxfp4", "nvfp4")],
]


def spec_id(spec: CodecSpec) -> str:
    kind = "" if spec.symmetric else "-asym"
    return f"{spec.code}-{spec.granularity}{spec.group or ''}{kind}-{spec.scale_dtype}"


@pytest.mark.parametrize("spec", [spec for spec in DYNAMIC_SPECS if spec.group], ids=spec_id)
def test_groups_equal_tokens_of_a_rearranged_tensor(spec: CodecSpec) -> None:
    """gN and cN are nothing but one scale per vector, after a reshape this test does itself."""
    x = inputs.key(2, (32, 2, 64))
    planes = encode(spec, x).planes
    if spec.granularity == "group":
        vectors = x.reshape(32 * 2 * 2, 1, 32)
    else:
        vectors = np.ascontiguousarray(x.reshape(2, 16, 2, 64).transpose(0, 2, 3, 1)).reshape(2 * 2 * 64, 1, 16)
    per_vector = dataclasses.replace(spec, granularity="token", group=0)
    expected = encode(per_vector, vectors).planes
    for name in set(planes) - {"codes"}:
        assert planes[name].ravel().tolist() == expected[name].ravel().tolist()
    decoded = decode(spec, planes, 64)
    if spec.granularity == "channel_group":
        decoded = np.ascontiguousarray(decoded.reshape(2, 16, 2, 64).transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(decoded.ravel(), decode(per_vector, expected, vectors.shape[-1]).ravel())


@pytest.mark.parametrize("spec", DYNAMIC_SPECS, ids=spec_id)
def test_planes_have_the_published_shapes_and_tokens_are_independent(spec: CodecSpec) -> None:
    x = inputs.value(4, (32, 2, 64))
    planes = encode(spec, x).planes
    groups = {"token": (), "group": (2,), "channel_group": None}[spec.granularity]
    packed = {"int4": 32, "int2": 16, "mxfp4": 32, "nvfp4": 32}.get(spec.code, 64)
    assert planes["codes"].shape == (32, 2, packed)
    if spec.code in ("mxfp4", "nvfp4"):
        assert planes["scale"].shape == (32, 2, 64 // {"mxfp4": 32, "nvfp4": 16}[spec.code])
    elif "scale" in planes:
        assert planes["scale"].shape == ((2, 2, 64) if groups is None else (32, 2, *groups))
        assert planes["scale"].dtype == (np.float32 if spec.scale_dtype == "float32" else np.uint16)
    assert {name: (plane.shape, plane.dtype) for name, plane in planes.items()} == plane_shapes(spec, 32, 2, 64)

    step = 16 if spec.granularity == "channel_group" else 1
    alone = encode(spec, x[step : 2 * step, 1:]).planes
    for name, plane in planes.items():
        per_token = plane.reshape(-1, 2, *plane.shape[2:])
        share = slice(1, 2) if plane.shape[0] == 32 // step else slice(step, 2 * step)
        np.testing.assert_array_equal(per_token[share, 1:], alone[name])


@pytest.mark.parametrize(
    "spec",
    [
        *DYNAMIC_SPECS,
        CodecSpec("int4", "group", 16, outliers=2),
        CodecSpec("int8", outliers=2),
        CodecSpec("int4", sparse=3, page=16),
    ],
    ids=lambda spec: f"{spec_id(spec)}-{spec.outliers}-{spec.sparse}",
)
def test_no_token_at_all_has_planes_too(spec: CodecSpec) -> None:
    channels = [[1, 5], [0, 63]] if spec.outliers else None
    encoded = encode(spec, np.zeros((0, 2, 64), np.float32), channels=channels)
    assert {n: (p.shape, p.dtype) for n, p in encoded.planes.items()} == plane_shapes(spec, 0, 2, 64)
    assert decode(spec, encoded.planes, 64, channels=channels).shape == (0, 2, 64)


@pytest.mark.parametrize("spec", DYNAMIC_SPECS, ids=spec_id)
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e5, 1e-38])
def test_round_trip_stays_within_the_bound(spec: CodecSpec, factor: float) -> None:
    for x in (inputs.key(6, (64, 2, 64)), inputs.value(6, (64, 2, 64))):
        x = x * np.float32(factor)
        planes = encode(spec, x).planes
        error = np.abs(decode(spec, planes, 64).astype(np.float64) - x)
        bound = round_trip_bound(spec, x, planes)
        assert (error <= bound).all()
        if factor == 1.0 and spec.code != "fp32":
            assert np.isfinite(bound).all()
            assert (error / bound).max() > 0.8, "a bound far above the errors would prove nothing"


@pytest.mark.parametrize("spec", DYNAMIC_SPECS, ids=spec_id)
def test_round_trip_of_special_rows(spec: CodecSpec) -> None:
    rows = inputs.special_rows(64)
    x = np.repeat(np.stack(list(rows.values()))[:, None, None, :], 16, axis=1).reshape(-1, 1, 64)
    encoded = encode(spec, x)
    with np.errstate(invalid="ignore"):
        error = np.abs(decode(spec, encoded.planes, 64).astype(np.float64) - x)
    bound = round_trip_bound(spec, x, encoded.planes)
    promised = np.isfinite(bound)
    assert promised.mean() > 0.7
    assert (error[promised] <= bound[promised]).all()
    assert np.isinf(bound[encoded.saturated_elements]).all()


def test_round_trip_bound_is_half_a_scale_and_two_ulp() -> None:
    x = row(127.0, 1.25, -3.0, 0.0)
    bound = round_trip_bound(INT8, x, encode(INT8, x).planes)
    np.testing.assert_array_equal(bound, 0.5 + 2 * 2.0**-17)  # 2**-17 is the float32 ulp at 127
    spec = CodecSpec("int8", symmetric=False, scale_dtype="bfloat16")
    x = row(0.0, 255.0)
    np.testing.assert_array_equal(round_trip_bound(spec, x, encode(spec, x).planes), 1.0 + 2 * 2.0**-16)
    spec = CodecSpec("fp8_e4m3")
    x = row(448.0, 17.0, 2.0**-10)
    np.testing.assert_array_equal(
        round_trip_bound(spec, x, encode(spec, x).planes)[0, 0] - 2 * 2.0**-15, [16.0, 1.0, 2.0**-10]
    )


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": "int3"}, "int3"),
        ({"code": "int8", "granularity": "tensor"}, "not dynamic"),
        ({"code": "int8", "granularity": "token", "static": True}, "not static"),
        ({"code": "int8", "granularity": "group"}, "group=0"),
        ({"code": "int8", "granularity": "token", "group": 64}, "group=64"),
        ({"code": "fp8_e4m3", "symmetric": False}, "asymmetric"),
        ({"code": "int8", "scale_dtype": "float8"}, "float8"),
        ({"code": "mxfp4", "static": True}, "mxfp4"),
    ],
)
def test_specs_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodecSpec(**arguments)


@pytest.mark.parametrize(
    ("spec", "shape", "numbers"),
    [
        (CodecSpec("int4"), (1, 1, 7), ("7", "2")),
        (CodecSpec("int2"), (1, 1, 6), ("6", "4")),
        (CodecSpec("int8", "group", 64), (1, 1, 80), ("64", "80")),
        (CodecSpec("int8", "channel_group", 32), (40, 1, 64), ("32", "40")),
        (CodecSpec("mxfp4"), (1, 1, 48), ("32", "48")),
        (CodecSpec("nvfp4"), (1, 1, 40), ("16", "40")),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(
    spec: CodecSpec, shape: tuple[int, int, int], numbers: tuple[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"multiple|divide") as caught:
        encode(spec, np.zeros(shape, np.float32))
    assert all(number in str(caught.value) for number in numbers)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        encode(INT8, np.zeros((1, 1, 2)))  # type: ignore[arg-type]


def test_bits_to_float_reads_patterns() -> None:
    assert bits_to_float([0x3F800000, 0xC0000000]).tolist() == [1.0, -2.0]
