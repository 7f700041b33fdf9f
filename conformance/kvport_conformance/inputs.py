"""Deterministic inputs: a counter-based integer hash scaled exactly to floats.

The same bytes on every operating system, processor and numpy version: element i of a stream depends on (seed, i)
only, through wrapping uint64 arithmetic, and the way from an integer to a float uses single IEEE operations, no
transcendental function and no library generator. A longer stream continues a shorter one, so token t of a key is the
same however many tokens are asked for.

The hash is SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
its golden-gamma increment and the finalizer constants published with it ("variant 13" of D. Stafford's list).
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvport_conformance.oracle_floats import BF16, FP16, Float32Array, bits_to_float, quiet_nan

Seed: TypeAlias = int
Uint64Array: TypeAlias = npt.NDArray[np.uint64]

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = 0xFFFFFFFFFFFFFFFF
EVEN_FIELDS = np.uint64(0x0000FFFF0000FFFF)

FLOAT_DTYPES = ("float32", "float16", "bfloat16")


# --- the hash -------------------------------------------------------------------------------------------------------


def words(seed: Seed, count: int, start: int = 0) -> Uint64Array:
    """Words ``start`` .. ``start + count - 1`` of a SplitMix64 stream whose state begins at ``seed`` (mod 2**64)."""
    # In place: most of the time of making an array goes into memory.
    z = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
    z *= np.uint64(GOLDEN_GAMMA)
    z += np.uint64(seed & MASK_64)
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    return z


def _word(seed: Seed) -> int:
    """The first word of a stream, without an array: names are hashed a byte at a time."""
    z = (seed + GOLDEN_GAMMA) & MASK_64
    z = (z ^ (z >> 30)) * MIX_1 & MASK_64
    z = (z ^ (z >> 27)) * MIX_2 & MASK_64
    return z ^ (z >> 31)


def derive(*parts: int | str) -> Seed:
    """A seed from integers and names, in order: ``derive("append", layer, "key")``.

    A name counts by its UTF-8 bytes and its length, so that no two different lists of parts are likely to share a seed.
    """
    state = len(parts)
    for part in parts:
        numbers = [part] if isinstance(part, int) else [-1, *part.encode("utf-8"), -2 - len(part)]
        for number in numbers:
            state = _word(state ^ (number & MASK_64))
    return state


# --- floats from words ----------------------------------------------------------------------------------------------


def values(
    seed: Seed,
    shape: tuple[int, ...],
    *,
    low: float = -1.0,
    high: float = 1.0,
    distribution: Literal["uniform", "bell"] = "uniform",
    start: int = 0,
) -> Float32Array:
    """Float32 values between ``low`` and ``high``, both included, of ``shape`` in C order.

    'uniform': a multiple k of 2**-24 from one word each. 'bell': the sum of twelve 16-bit uniforms from three words
    each, so close to a normal distribution with mean (low + high) / 2 and standard deviation (high - low) / 12.
    ``start`` skips that many elements of the stream. The scaling is computed in float64 and rounded once to float32.
    """
    if not low < high:
        raise ValueError(f"low={low} has to be below high={high}")
    count = math.prod(shape)
    if distribution == "uniform":
        fraction = (words(seed, count, start) >> np.uint64(40)).astype(np.float64) * 2.0**-24
    elif distribution == "bell":
        # Two fields of a word side by side, each with 16 bits of room above it for the sum.
        pairs = words(seed, 3 * count, 3 * start)
        pairs = (pairs & EVEN_FIELDS) + ((pairs >> np.uint64(16)) & EVEN_FIELDS)
        three = pairs[0::3] + pairs[1::3] + pairs[2::3]
        sums = (three >> np.uint64(32)) + (three & np.uint64(0xFFFFFFFF))
        fraction = sums.astype(np.float64) / (12.0 * 65535.0)
    else:
        raise ValueError(f"unknown distribution {distribution!r}; choose 'uniform' or 'bell'")
    return (low + (high - low) * fraction).astype(np.float32).reshape(shape)


def bell(seed: Seed, shape: tuple[int, ...], *, mean: float = 0.0, deviation: float = 1.0) -> Float32Array:
    """Bell-shaped float32 values of the given mean and standard deviation, never beyond six deviations."""
    return values(seed, shape, low=mean - 6.0 * deviation, high=mean + 6.0 * deviation, distribution="bell")


def integers(seed: Seed, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.int64]:
    """Integers low <= n < high (at most 2**32 apart); their frequencies differ by less than (high - low) / 2**32."""
    if not 0 < high - low <= 2**32:
        raise ValueError(f"need low < high, at most 2**32 apart; got {low} and {high}")
    upper = words(seed, math.prod(shape)) >> np.uint64(32)
    return ((upper * np.uint64(high - low)) >> np.uint64(32)).astype(np.int64).reshape(shape) + low


def permutation(seed: Seed, count: int) -> npt.NDArray[np.int64]:
    """A permutation of 0 .. count - 1: the order of ``count`` hash words."""
    return np.argsort(words(seed, count), kind="stable").astype(np.int64)


def round_to(x: Float32Array, dtype: str) -> Float32Array:
    """``x`` rounded to the nearest value of 'float32', 'float16' or 'bfloat16', returned as float32.

    Casting the result to that dtype is then exact on every library, so that every backend receives the same bits.
    """
    if dtype == "float32":
        return x.copy()
    if dtype == "bfloat16":
        return BF16.round(x)
    if dtype == "float16":
        return FP16.round(x)
    raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(FLOAT_DTYPES)}")


# --- keys, values, queries ------------------------------------------------------------------------------------------
# Keys and values of one seed come from different streams and live in different ranges, so that a swap of K and V, of
# their scales or of their pages can never go unnoticed.

KEY_DEVIATION = 0.75
KEY_OFFSET = 2.0
KEY_OUTLIER = 8.0
CHANNELS_PER_OUTLIER = 32

VALUE_DEVIATION = 0.125
VALUE_OFFSET = 0.3125
VALUE_TOKEN_SCALE = (0.25, 4.0)

QUERY_DEVIATION = 0.5


def key(seed: Seed, shape: tuple[int, int, int], *, dtype: str = "float32", start: int = 0) -> Float32Array:
    """Keys (tokens, heads, dim) like those of real models: an offset per channel and a few outlier channels per head.

    Bell-shaped with deviation 0.75 around a fixed offset within +-2 per head and channel; one channel in 32 (at least
    one) of each head is eight times as large. Rounded to ``dtype``. ``start`` is the position of the first token.
    """
    _, heads, dim = shape
    base = derive(seed, "key")
    spread = values(
        derive(base, "spread"),
        shape,
        low=-6.0 * KEY_DEVIATION,
        high=6.0 * KEY_DEVIATION,
        distribution="bell",
        start=start * heads * dim,
    )
    offset = values(derive(base, "offset"), (heads, dim), low=-KEY_OFFSET, high=KEY_OFFSET)
    gain = np.ones((heads, dim), np.float32)
    for head in range(heads):
        outliers = permutation(derive(base, "outlier", head), dim)[: max(1, dim // CHANNELS_PER_OUTLIER)]
        gain[head, outliers] = KEY_OUTLIER
    return round_to((spread + offset) * gain, dtype)


def value(seed: Seed, shape: tuple[int, int, int], *, dtype: str = "float32", start: int = 0) -> Float32Array:
    """Values (tokens, heads, dim) whose magnitude changes from token to token, with no outlier channels.

    Bell-shaped with deviation 0.125 around 0.3125, times a factor from 0.25 to 4 per token and head. Rounded to
    ``dtype``. ``start`` is the position of the first token.
    """
    tokens, heads, dim = shape
    base = derive(seed, "value")
    spread = values(
        derive(base, "spread"),
        shape,
        low=VALUE_OFFSET - 6.0 * VALUE_DEVIATION,
        high=VALUE_OFFSET + 6.0 * VALUE_DEVIATION,
        distribution="bell",
        start=start * heads * dim,
    )
    low, high = VALUE_TOKEN_SCALE
    token_scale = values(derive(base, "token"), (tokens, heads, 1), low=low, high=high, start=start * heads)
    return round_to(spread * token_scale, dtype)


def query(seed: Seed, shape: tuple[int, int, int], *, dtype: str = "float32", start: int = 0) -> Float32Array:
    """Queries (tokens, query_heads, key_dim), bell-shaped with deviation 0.5, rounded to ``dtype``."""
    _, heads, dim = shape
    limit = 6.0 * QUERY_DEVIATION
    stream = derive(seed, "query")
    x = values(stream, shape, low=-limit, high=limit, distribution="bell", start=start * heads * dim)
    return round_to(x, dtype)


# --- special rows ---------------------------------------------------------------------------------------------------

_STEP = 2.0**-6
_TIES = {
    # First the largest magnitude, which makes the scale exactly 2**-6, then quotients halfway between two codes.
    "ties_int8": (127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.5, 64.5, -126.5, 126.5, 100.5, -99.5, 0.0, -127.0, 31.5, -32.5),
    "ties_int4": (7.0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, -0.5, -1.5, -2.5, -3.5, -4.5, -5.5, -6.5, -7.0),
    "ties_int2": (1.0, 0.5, -0.5, -1.0, 0.0, 0.5, -0.5, 1.0, 0.5, 0.5, -0.5, -0.5, 1.0, -1.0, 0.0, 0.5),
    "ties_int8_asym": (0.0, 255.0, 0.5, 1.5, 2.5, 3.5, 63.5, 64.5, 100.5, 126.5, 127.5, 31.5, 32.5, 15.5, 16.5, 7.5),
    "ties_int4_asym": (0.0, 15.0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5, 11.5, 12.5, 14.5),
    "ties_int2_asym": (0.0, 3.0, 0.5, 1.5, 2.5, 0.5, 1.5, 2.5, 3.0, 0.0, 1.0, 2.0, 0.5, 1.5, 2.5, 3.0),
    "ties_fp8_e4m3": (448.0, 17.0, 19.0, 21.0, -17.0, -19.0, 432.0, 34.0, 38.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10),
                      0.0, 1.0625, 1.1875, -448.0),
    "ties_fp8_e5m2": (57344.0, 9.0, 11.0, 13.0, 15.0, -9.0, -11.0, 18.0, 22.0, 2.0**-17, 3 * 2.0**-17, -(2.0**-17),
                      0.0, 1.125, 1.375, -57344.0),
    # amax 6 gives mxfp4 the exponent of its leading bit, so a scale of 2**-6 times one.
    "ties_mxfp4": (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0),
}  # fmt: skip
# nvfp4: amax 42 = 6 * 448 * 2**-6, so the tensor scale is 2**-6, the block scale 448 and their product 7.
_NVFP4_PRODUCT = 7.0
_QMAX = {"qmax_int8": 127.0, "qmax_int4": 7.0, "qmax_int2": 1.0}


def special_rows(dim: int, *, dtype: str = "float32") -> dict[str, Float32Array]:
    """Rows of ``dim`` float32 elements (a multiple of 16) that sit on the edges of a format, by name.

    Every pattern repeats within 16 channels, so that each group of 16 or more shows the same edge. Rows whose values
    ``dtype`` cannot hold exactly are left out, so that every row of the answer reaches a backend with these very bits.
    """
    if dim % 16:
        raise ValueError(f"special rows repeat every 16 channels, and dim {dim} is no multiple of 16")
    alternating = (1.0, -1.0) * 8
    rows: dict[str, Any] = {
        "zeros": (0.0,) * 16,
        "negative_zeros": (-0.0,) * 16,
        "mixed_zeros": (0.0, -0.0) * 8,
        "constant": (2.5,) * 16,
        "constant_negative": (-0.375,) * 16,
        "constant_third": (float(np.float32(1.0) / np.float32(3.0)),) * 16,
        "one_nonzero": (0.0,) * 15 + (1.5,),
    }
    rows |= {name: tuple(x * _STEP for x in pattern) for name, pattern in _TIES.items()}
    rows["ties_nvfp4"] = tuple(x * _NVFP4_PRODUCT for x in _TIES["ties_mxfp4"])
    rows |= {name: tuple(sign * qmax * _STEP for sign in alternating) for name, qmax in _QMAX.items()}
    limit = 2.0**125
    rows |= {
        "smallest_subnormal": tuple(sign * 2.0**-149 for sign in alternating),
        "subnormal": tuple(sign * (1 + index) * 2.0**-140 for index, sign in enumerate(alternating)),
        "smallest_normal": tuple(sign * 2.0**-126 for sign in alternating),
        "subnormal_scale": tuple(sign * (1 + index) * 2.0**-124 for index, sign in enumerate(alternating)),
        "huge": tuple(sign * float(np.float32(1e30)) for sign in alternating),
        "at_limit": tuple(sign * limit for sign in alternating),
        "below_limit": tuple(sign * limit * (1 - 2.0**-8) for sign in alternating),
        "beyond_limit": (limit * (1 + 2.0**-7), -limit * 2.0, limit * 0.5, -limit) * 4,
        "largest_finite": tuple(sign * float(BF16.largest) for sign in alternating),
        "wide": tuple(sign * 2.0 ** (10 - index) for index, sign in enumerate(alternating)),
        "infinity": (1.0, -0.5, float("inf"), 0.25) * 4,
        "negative_infinity": (1.0, -0.5, float("-inf"), 0.25) * 4,
    }
    result = {name: np.tile(np.asarray(pattern, np.float32), dim // 16) for name, pattern in rows.items()}
    result["nan"] = np.tile(np.asarray((1.0, -0.5, float(quiet_nan()), 0.25) * 4, np.float32), dim // 16)
    exact = {}
    for name, row in result.items():
        rounded = round_to(row, dtype)
        if bool(((rounded == row) | (np.isnan(rounded) & np.isnan(row))).all()):
            exact[name] = rounded
    return exact


def nan_payloads() -> Float32Array:
    """Float32 NaN of both signs, quiet and signalling, smallest and largest payload: (6,)."""
    return bits_to_float([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
