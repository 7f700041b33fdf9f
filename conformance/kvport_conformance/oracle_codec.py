"""The written definition of kvport's codes, scales and zeros, in float32, one operation at a time.

Every arithmetic step below is one numpy float32 operation: IEEE 754, round to nearest even, divisions correctly
rounded, nothing fused. A backend agrees when its planes equal these bit for bit. Speed does not matter here; being
readable as a specification does.

A tensor is ``(tokens, heads, dim)``. Its encoded form is a dict of *planes* laid out as in the canonical page image,
token-major, then head:

=============  ====================================================  =============================================
plane          shape                                                 dtype
=============  ====================================================  =============================================
codes          (tokens, heads, packed dim)                           int8 for symmetric int8; uint8 for every other
                                                                     code; fp32 pages float32, fp16/bf16 uint16 bits
scale, zero    token (tokens, heads), group (tokens, heads, groups), float32, or uint16 bits of bfloat16 / float16
               channel_group (tokens / N, heads, dim)
scale          mxfp4 (tokens, heads, dim / 32)                       uint8, E8M0
scale          nvfp4 (tokens, heads, dim / 16)                       uint8, E4M3
tensor_scale   nvfp4, dynamic only: (tokens, heads)                  float32
outliers       (tokens, heads, channels kept apart)                  float32
sparse_index   (tokens / page, heads, numbers kept apart)            int32
sparse_value   the same                                              float32
sparse_overflow static only: (tokens / page, heads)                  int32
=============  ====================================================  =============================================

Static scales (and zeros) are no plane: the caller passes them to `encode` and `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvport_conformance.oracle_floats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0_BIAS,
    E8M0_NAN,
    F32_LARGEST,
    F32_SMALLEST_NORMAL,
    FP16,
    Array,
    BoolArray,
    Float32Array,
    Rounding,
    SmallFloat,
    e8m0_decode,
    e8m0_floor_log2,
    quiet_nan,
)

INTEGER_BITS = {"int8": 8, "int4": 4, "int2": 2}
FP8 = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
FLOAT_PAGES = {"fp32": None, "fp16": FP16, "bf16": BF16}
BLOCK_SIZE = {"mxfp4": 32, "nvfp4": 16}
SCALE_DTYPES: dict[str, SmallFloat | None] = {"float32": None, "bfloat16": BF16, "float16": FP16}

CODES = (*FLOAT_PAGES, *INTEGER_BITS, *FP8, *BLOCK_SIZE)
STATIC_GRANULARITIES = ("tensor", "head", "channel")
DYNAMIC_GRANULARITIES = ("token", "group", "channel_group")

INPUT_LIMIT = np.float32(2.0**125)
"""Finite inputs are clamped to +-2**125 before anything else, so that max - min cannot overflow float32."""

E2M1_LARGEST = np.float32(6.0)
E4M3_LARGEST = np.float32(448.0)
E4M3_NAN = 0x7F
E4M3_SMALLEST = np.float32(2.0**-9)
NVFP4_RANGE = np.float32(6.0 * 448.0)


@dataclass(frozen=True)
class CodecSpec:
    """How one of K or V is encoded.

    ``group`` is N of `group` (gN, along head_dim) and `channel_group` (cN, along tokens), 0 otherwise. Float pages and
    the block formats imply their grouping: there ``granularity``, ``group``, ``symmetric`` and ``scale_dtype`` do not
    describe anything and are not read; of the block formats only nvfp4 may be ``static`` (its tensor scale is).

    ``outliers`` channels per head (which, the caller says) and up to ``sparse`` numbers of each ``page`` of so many
    tokens and head are kept in float32 beside the codes.
    """

    code: str
    granularity: str = "token"
    group: int = 0
    symmetric: bool = True
    scale_dtype: str = "float32"
    static: bool = False
    outliers: int = 0
    sparse: int = 0
    page: int = 0

    def __post_init__(self) -> None:
        if (self.sparse > 0) != (self.page > 0) or (self.outliers and self.sparse):
            raise ValueError(f"sparse={self.sparse} of pages of {self.page} tokens, outliers={self.outliers}: not both")
        if self.code not in CODES:
            raise ValueError(f"unknown code {self.code!r}; choose one of {', '.join(CODES)}")
        if self.code in FLOAT_PAGES or self.code in BLOCK_SIZE:
            if self.static and self.code != "nvfp4":
                raise ValueError(f"{self.code} has no static scale; only nvfp4, integer and fp8 codes have one")
            return
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"unknown scale dtype {self.scale_dtype!r}; choose one of {', '.join(SCALE_DTYPES)}")
        if not self.symmetric and self.code not in INTEGER_BITS:
            raise ValueError(f"{self.code} has no asymmetric form; only integer codes have a zero")
        allowed = STATIC_GRANULARITIES if self.static else DYNAMIC_GRANULARITIES
        if self.granularity not in allowed:
            kind = "static" if self.static else "dynamic"
            raise ValueError(f"granularity {self.granularity!r} is not {kind}; choose one of {', '.join(allowed)}")
        if (self.group > 0) != (self.granularity in ("group", "channel_group")):
            raise ValueError(f"group={self.group} does not fit granularity {self.granularity!r}: it is N of gN and cN")

    @property
    def has_zero(self) -> bool:
        """Whether elements are code * scale + zero."""
        return self.code in INTEGER_BITS and not self.symmetric

    @property
    def code_bits(self) -> int:
        """Bits one element takes in the codes plane."""
        if self.code in INTEGER_BITS:
            return INTEGER_BITS[self.code]
        return {"fp32": 32, "fp16": 16, "bf16": 16, "mxfp4": 4, "nvfp4": 4}.get(self.code, 8)

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest integer an encoder emits."""
        bits = INTEGER_BITS[self.code]
        qmax = 2 ** (bits - 1) - 1
        return (-qmax, qmax) if self.symmetric else (0, 2**bits - 1)


@dataclass(frozen=True)
class Encoded:
    """What `encode` returns.

    planes: the canonical planes (see the module).
    saturated: how many values left the representable range although they were finite or infinite numbers:
        elements in ``saturated_elements`` plus ``saturated_zeros``; an element counts once.
    poisoned: bool, shape of the group's scale (mxfp4, nvfp4:static: per block; nvfp4: per token and head); all False
        in shape (tokens, heads) for static scales and float pages, which have no poisoned groups.
    saturated_elements: bool (tokens, heads, dim): finite inputs beyond +-2**125, and elements whose code was clipped
        because their scale was clamped or static.
    saturated_zeros: zeros that were clamped to the largest finite value of their dtype.
    flagged: bool (tokens, heads): a static integer format met a NaN there (code 0, and a sticky flag in a backend).
    """

    planes: dict[str, Array]
    saturated: int
    poisoned: BoolArray
    saturated_elements: BoolArray
    saturated_zeros: int
    flagged: BoolArray


# --- shapes ---------------------------------------------------------------------------------------------------------


Planes: TypeAlias = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


def plane_shapes(spec: CodecSpec, tokens: int, heads: int, dim: int) -> Planes:
    """Shape and dtype of every plane, in the order of the page image. Refuses what does not divide (ValueError)."""
    per_byte = max(1, 8 // spec.code_bits)
    if dim % per_byte:
        raise ValueError(f"{spec.code} packs {per_byte} codes a byte, and head dim {dim} is no multiple of {per_byte}")
    if spec.code in FLOAT_PAGES:
        return {"codes": ((tokens, heads, dim), np.dtype(np.float32 if spec.code == "fp32" else np.uint16))}
    if spec.outliers or spec.sparse:
        kept = plane_shapes(_without_kept(spec), tokens, heads, dim)
        if spec.outliers:
            return {**kept, "outliers": ((tokens, heads, spec.outliers), np.dtype(np.float32))}
        if tokens % spec.page:
            raise ValueError(f"pages of {spec.page} tokens do not divide {tokens} tokens; a partial page never encodes")
        shape = (tokens // spec.page, heads, spec.sparse)
        kept |= {"sparse_index": (shape, np.dtype(np.int32)), "sparse_value": (shape, np.dtype(np.float32))}
        return kept | ({"sparse_overflow": (shape[:2], np.dtype(np.int32))} if spec.static else {})
    signed_bytes = spec.code == "int8" and spec.symmetric
    planes: Planes = {"codes": ((tokens, heads, dim // per_byte), np.dtype(np.int8 if signed_bytes else np.uint8))}
    if spec.code in BLOCK_SIZE:
        block = BLOCK_SIZE[spec.code]
        if dim % block:
            raise ValueError(f"{spec.code} has blocks of {block}, and head dim {dim} is no multiple of {block}")
        planes["scale"] = ((tokens, heads, dim // block), np.dtype(np.uint8))
        if spec.code == "nvfp4" and not spec.static:
            planes["tensor_scale"] = ((tokens, heads), np.dtype(np.float32))
        return planes
    if spec.static:
        return planes
    scale_shape: tuple[int, ...]
    if spec.granularity == "token":
        scale_shape = (tokens, heads)
    elif spec.granularity == "group":
        if dim % spec.group:
            raise ValueError(f"groups of {spec.group} channels do not divide head dim {dim}")
        scale_shape = (tokens, heads, dim // spec.group)
    else:
        if tokens % spec.group:
            raise ValueError(f"groups of {spec.group} do not divide {tokens} tokens; a partial group never encodes")
        scale_shape = (tokens // spec.group, heads, dim)
    planes["scale"] = (scale_shape, np.dtype(np.float32 if spec.scale_dtype == "float32" else np.uint16))
    if spec.has_zero:
        planes["zero"] = planes["scale"]
    return planes


def _without_kept(spec: CodecSpec) -> CodecSpec:
    """How the rest is encoded."""
    return replace(spec, outliers=0, sparse=0, page=0)


def _to_groups(spec: CodecSpec, x: Array) -> Array:
    """(tokens, heads, dim) -> shape of the scale plus one last axis: the members of the group."""
    tokens, heads, dim = x.shape
    if spec.code in BLOCK_SIZE:
        block = BLOCK_SIZE[spec.code]
        return x.reshape(tokens, heads, dim // block, block)
    if spec.granularity == "token":
        return x
    if spec.granularity == "group":
        return x.reshape(tokens, heads, dim // spec.group, spec.group)
    return np.moveaxis(x.reshape(tokens // spec.group, spec.group, heads, dim), 1, -1)


def _from_groups(spec: CodecSpec, grouped: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_to_groups`."""
    if spec.code not in BLOCK_SIZE and spec.granularity == "channel_group":
        grouped = np.moveaxis(grouped, -1, 1)
    return np.ascontiguousarray(grouped).reshape(shape)


def _spread(spec: CodecSpec, per_group: Array, shape: tuple[int, ...]) -> Array:
    """A value per group -> the same value at each member, (tokens, heads, dim)."""
    tokens, _heads, dim = shape
    if spec.code in BLOCK_SIZE:
        return np.repeat(per_group, BLOCK_SIZE[spec.code], axis=-1)
    if spec.granularity == "token":
        return np.repeat(per_group[..., None], dim, axis=-1)
    if spec.granularity == "group":
        return np.repeat(per_group, spec.group, axis=-1)
    return np.repeat(per_group, spec.group, axis=0)[:tokens]


# --- packing --------------------------------------------------------------------------------------------------------


def pack(codes: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Integers (..., dim) -> bytes (..., dim * bits / 8), first code in the lowest bits, two's complement."""
    per_byte = 8 // bits
    shape = (*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    fields = (codes.astype(np.int64) & (2**bits - 1)).reshape(shape)
    packed = np.zeros(fields.shape[:-1], np.int64)
    for position in range(per_byte):
        packed |= fields[..., position] << (bits * position)
    return packed.astype(np.uint8)


def unpack(packed: Array, bits: int, *, signed: bool) -> npt.NDArray[np.int64]:
    """The inverse of `pack`: bytes (..., n) -> integers (..., n * 8 / bits); ``signed`` extends the sign bit."""
    per_byte = 8 // bits
    byte = packed.astype(np.int64) & 0xFF
    fields = np.stack([(byte >> (bits * position)) & (2**bits - 1) for position in range(per_byte)], axis=-1)
    codes: npt.NDArray[np.int64] = fields.reshape(*packed.shape[:-1], packed.shape[-1] * per_byte)
    if signed:
        codes = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    return codes


# --- scales and zeros -----------------------------------------------------------------------------------------------


def _scale_limits(dtype: str) -> tuple[np.float32, np.float32]:
    """Smallest normal and largest finite value of a scale dtype."""
    small = SCALE_DTYPES[dtype]
    return (F32_SMALLEST_NORMAL, F32_LARGEST) if small is None else (small.smallest_normal, small.largest)


def _cast(dtype: str, value: Float32Array, rounding: Rounding = "nearest_even") -> Float32Array:
    """Round to a scale dtype; the result is held as float32, exactly."""
    small = SCALE_DTYPES[dtype]
    return value if small is None else small.round(value, rounding)


def _cast_scale(dtype: str, raw: Float32Array, nonzero: BoolArray) -> tuple[Float32Array, BoolArray]:
    """The stored scale of a dynamic group, and where it was clamped down to the largest finite value.

    ``nonzero`` says which groups have a range above zero: their scale never rounds to zero or to a subnormal.
    """
    smallest, largest = _scale_limits(dtype)
    stored = _cast(dtype, raw)
    overflow = stored > largest
    stored = np.minimum(stored, largest)
    stored = np.where(nonzero, np.maximum(stored, smallest), np.float32(0.0))
    return stored, overflow


def _cast_zero(dtype: str, minimum: Float32Array) -> tuple[Float32Array, BoolArray]:
    """The stored zero: cast toward minus infinity, clamped to the dtype's finite range; and where it was clamped."""
    _, largest = _scale_limits(dtype)
    clamped = (minimum > largest) | (minimum < -largest)
    stored = np.clip(_cast(dtype, minimum, "floor"), -largest, largest)
    return stored + np.float32(0.0), clamped  # + 0.0 turns -0 into +0


def _to_plane(dtype: str, value: Float32Array) -> Array:
    """Scales or zeros already representable in their dtype -> the plane: float32, or uint16 bit patterns."""
    small = SCALE_DTYPES[dtype]
    return value if small is None else small.encode(value)


def _from_plane(dtype: str, plane: Array) -> Float32Array:
    small = SCALE_DTYPES[dtype]
    return plane.astype(np.float32) if small is None else small.decode(plane)


def _static(spec: CodecSpec, name: str, given: npt.ArrayLike | None, heads: int, dim: int) -> Float32Array:
    """A checked static scale or zero in its dtype, shaped to broadcast against (tokens, heads, dim)."""
    granularity = "tensor" if spec.code == "nvfp4" else spec.granularity
    dtype = "float32" if spec.code == "nvfp4" else spec.scale_dtype
    if given is None:
        raise ValueError(f"{spec.code} with static granularity {granularity!r} needs {name}, and none was given")
    value = np.asarray(given, dtype=np.float32)
    shape = {"tensor": (), "head": (heads,), "channel": (heads, dim)}[granularity]
    if value.shape != shape:
        raise ValueError(f"{name} of granularity {granularity!r} has shape {shape}, but {value.shape} was given")
    smallest, largest = _scale_limits(dtype)
    if name == "static_scale":
        cast = _cast(dtype, value)
        # Refused after the cast: what would over- or underflow its dtype is an error for a scale somebody calibrated.
        bad = ~((cast >= smallest) & (cast <= largest))
        allowed = f"from {smallest} to {largest}"
    else:
        bad = ~(np.abs(value) <= largest)
        cast = _cast(dtype, np.where(bad, np.float32(0.0), value), "floor") + np.float32(0.0)
        allowed = f"from {-largest} to {largest}"
    if bool(bad.any()):
        raise ValueError(f"{name} has {value[bad].ravel()[0]}; {dtype} values {allowed} are allowed")
    return cast[:, None] if granularity == "head" else cast


def _refuse_static(spec: CodecSpec, static_scale: npt.ArrayLike | None, static_zero: npt.ArrayLike | None) -> None:
    """A scale that would be ignored is an error."""
    if static_scale is not None and not spec.static:
        raise ValueError(f"{spec} is not static, but a static_scale was given")
    if static_zero is not None and not (spec.static and spec.has_zero):
        raise ValueError(f"{spec} has no static zero, but a static_zero was given")


# --- encode ---------------------------------------------------------------------------------------------------------


def encode(
    spec: CodecSpec,
    x: Float32Array,
    static_scale: npt.ArrayLike | None = None,
    static_zero: npt.ArrayLike | None = None,
    channels: npt.ArrayLike | None = None,
) -> Encoded:
    """Encode float32 ``x`` (tokens, heads, dim).

    static_scale, static_zero: for static specs, of shape () for `tensor` (and the tensor scale of nvfp4), (heads,) for
    `head`, (heads, dim) for `channel`. channels: (heads, outliers) integers, ascending. Raises TypeError for another
    input dtype, ValueError for shapes that do not divide and for static scales that are missing, superfluous, zero,
    negative, not finite or not normal in their dtype.
    """
    if x.dtype != np.float32 or x.ndim != 3:
        raise TypeError(f"x is float32 (tokens, heads, dim); got {x.dtype} of shape {x.shape}")
    plane_shapes(spec, *x.shape)
    _refuse_static(spec, static_scale, static_zero)
    # Overflow to infinity, and inf or NaN operands, are part of the definition; numpy need not warn about them.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if spec.code in FLOAT_PAGES:
            return _encode_float_page(spec, x)
        if spec.outliers or spec.sparse:
            return _encode_around(spec, x, static_scale, static_zero, channels)
        clamped_inputs = np.isfinite(x) & (np.abs(x) > INPUT_LIMIT)
        # Infinities and NaN pass through: a dynamic group is poisoned by them, a static one has its own rule.
        x = np.where(np.isfinite(x), np.clip(x, -INPUT_LIMIT, INPUT_LIMIT), x)
        if spec.code == "mxfp4":
            return _encode_mxfp4(spec, x, clamped_inputs)
        if spec.code == "nvfp4":
            return _encode_nvfp4(spec, x, clamped_inputs, static_scale)
        if spec.static:
            return _encode_static(spec, x, clamped_inputs, static_scale, static_zero)
        return _encode_dynamic(spec, x, clamped_inputs)


def _not_finite(grouped: Array) -> BoolArray:
    """Which groups (members along the last axis) hold a NaN or an infinity."""
    return np.asarray(~np.isfinite(grouped).all(axis=-1))


def _encode_float_page(spec: CodecSpec, x: Float32Array) -> Encoded:
    """Round to nearest even; NaN and infinity are kept, nothing is clamped."""
    small = FLOAT_PAGES[spec.code]
    return _encoded({"codes": x.copy() if small is None else small.encode(x)}, np.zeros(x.shape, np.bool_))


def _encode_around(
    spec: CodecSpec,
    x: Float32Array,
    static_scale: npt.ArrayLike | None,
    static_zero: npt.ArrayLike | None,
    channels: npt.ArrayLike | None,
) -> Encoded:
    """Take some numbers away, encode the rest as if they were not there, and keep them beside it as they are.

    What stands in their place stretches no range: 0, or for scales computed from the data with a zero the least of the
    group's other members (0 where it has none).
    """
    rest = _without_kept(spec)
    if spec.outliers:
        taken = _channel_mask(spec, channels, x.shape)
        planes = {"outliers": np.take_along_axis(x, np.asarray(channels, np.int64)[None], axis=-1)}
    else:
        taken, planes = _sparse_choice(spec, x, static_scale, static_zero)
    filled = np.where(taken, np.float32(0.0), x)
    if spec.has_zero and not spec.static:
        others = _to_groups(rest, np.where(taken, np.float32(np.inf), x)).min(axis=-1)
        nobody = _to_groups(rest, taken).all(axis=-1)
        filled = np.where(taken, _spread(rest, np.where(nobody, np.float32(0.0), others), x.shape), x)
    found = encode(rest, filled, static_scale, static_zero)
    elements = found.saturated_elements & ~taken
    return replace(
        found,
        planes={**found.planes, **planes},
        saturated=int(elements.sum()) + found.saturated_zeros,
        saturated_elements=elements,
    )


def _channel_mask(spec: CodecSpec, channels: npt.ArrayLike | None, shape: tuple[int, ...]) -> BoolArray:
    """(tokens, heads, dim): where the outlier channels are, which are given ascending for each head."""
    if channels is None:
        raise ValueError(f"{spec.outliers} channels are kept apart, and none were given")
    chosen = np.asarray(channels, np.int64)
    if chosen.shape != (shape[1], spec.outliers):
        raise ValueError(f"channels have shape ({shape[1]}, {spec.outliers}), but {chosen.shape} was given")
    mask = np.zeros(shape, np.bool_)
    for head, row in enumerate(chosen):
        if (np.diff(row) <= 0).any():
            raise ValueError(f"channels {row.tolist()} of head {head} must ascend")
        mask[:, head, row] = True
    return mask


def _sparse_mask(spec: CodecSpec, planes: Mapping[str, Array], shape: tuple[int, ...]) -> BoolArray:
    """(tokens, heads, dim): which numbers the planes keep apart."""
    mask = np.zeros(shape, np.bool_)
    for page, head, entry in np.argwhere(planes["sparse_index"] >= 0).tolist():
        e = int(planes["sparse_index"][page, head, entry])
        mask[page * spec.page + e // shape[-1], head, e % shape[-1]] = True
    return mask


def _sparse_choice(
    spec: CodecSpec, x: Float32Array, static_scale: npt.ArrayLike | None, static_zero: npt.ArrayLike | None
) -> tuple[BoolArray, dict[str, Array]]:
    """Which numbers of each page and head are kept apart, and their planes.

    Those of the largest distance: from the middle of their group where the scale follows the data, or from the end of
    a static range for those beyond it. A page's numbers are counted token * dim + channel; of equal distances the
    earlier wins. Distances of 0 and members of poisoned groups do not take part.
    """
    tokens, heads, dim = x.shape
    pages = tokens // spec.page
    distance, beyond = (
        _static_distance(spec, x, static_scale, static_zero) if spec.static else _middle_distance(spec, x)
    )
    index = np.full((pages, heads, spec.sparse), -1, np.int32)
    value = np.zeros((pages, heads, spec.sparse), np.float32)
    overflow = np.zeros((pages, heads), np.int32)
    taken = np.zeros(x.shape, np.bool_)
    for page in range(pages):
        rows = slice(page * spec.page, (page + 1) * spec.page)
        for head in range(heads):
            far = distance[rows, head].ravel()
            ranked = sorted((-float(far[e]), e) for e in np.flatnonzero(far >= 0).tolist())
            chosen = sorted(e for _, e in ranked[: spec.sparse])
            for entry, e in enumerate(chosen):
                token, channel = page * spec.page + e // dim, e % dim
                index[page, head, entry], value[page, head, entry] = e, x[token, head, channel]
                taken[token, head, channel] = True
            overflow[page, head] = int((beyond[rows, head] & ~taken[rows, head]).sum())
    planes: dict[str, Array] = {"sparse_index": index, "sparse_value": value}
    return taken, planes | ({"sparse_overflow": overflow} if spec.static else {})


def _middle_distance(spec: CodecSpec, x: Float32Array) -> tuple[Float32Array, BoolArray]:
    """|x - middle of the group|, -1 for what cannot be kept; nothing is beyond a range that follows the data."""
    rest = _without_kept(spec)
    limited = np.where(np.isfinite(x), np.clip(x, -INPUT_LIMIT, INPUT_LIMIT), np.float32(0.0))
    middle = np.zeros(x.shape, np.float32)
    if spec.has_zero:
        members = np.sort(_to_groups(rest, limited), axis=-1)
        middle = _spread(rest, members[..., (members.shape[-1] - 1) // 2], x.shape)
    spoilt = _spread(rest, _not_finite(_to_groups(rest, x)), x.shape)
    if spec.code == "nvfp4":  # one non-finite number spoils the scale of its token and head
        spoilt = np.broadcast_to(spoilt.any(axis=-1, keepdims=True), x.shape)
    distance = np.abs(limited - middle)
    return np.where(spoilt | (distance == 0), np.float32(-1.0), distance), np.zeros(x.shape, np.bool_)


def _static_distance(
    spec: CodecSpec, x: Float32Array, static_scale: npt.ArrayLike | None, static_zero: npt.ArrayLike | None
) -> tuple[Float32Array, BoolArray]:
    """|x - nearest end of the static range| where x is beyond it, else -1; and which are beyond, infinities too."""
    rest = _without_kept(spec)
    _, heads, dim = x.shape
    limited = np.where(np.isfinite(x), np.clip(x, -INPUT_LIMIT, INPUT_LIMIT), x)
    scale = _static(rest, "static_scale", static_scale, heads, dim)
    if spec.code == "nvfp4":
        low, high = -NVFP4_RANGE, NVFP4_RANGE
        beyond = np.abs(limited) / np.float32(6.0) / scale > E4M3_LARGEST
        beyond &= ~_spread(rest, _not_finite(_to_groups(rest, x)), x.shape)
        below = limited < 0
    else:
        zero = _static(rest, "static_zero", static_zero, heads, dim) if spec.has_zero else np.float32(0.0)
        _, beyond = _quantize(rest, limited, scale, np.asarray(zero))
        low, high = (np.float32(end) for end in spec.code_range) if spec.code in INTEGER_BITS else _fp8_range(spec)
        below = (limited - zero if spec.has_zero else limited) / scale < low
    edge = np.where(below, low, high) * scale
    if spec.has_zero:
        edge = edge + zero
    return np.where(beyond & np.isfinite(x), np.abs(limited - edge), np.float32(-1.0)), beyond


def _fp8_range(spec: CodecSpec) -> tuple[np.float32, np.float32]:
    return -FP8[spec.code].largest, FP8[spec.code].largest


def _encode_dynamic(spec: CodecSpec, x: Float32Array, clamped_inputs: BoolArray) -> Encoded:
    """Integer and fp8 codes with one scale per token and head, gN or cN group."""
    grouped = _to_groups(spec, x)
    poisoned = _not_finite(grouped)
    grouped = np.where(poisoned[..., None], np.float32(0.0), grouped)

    zero = np.zeros(poisoned.shape, np.float32)
    zero_clamped = np.zeros(poisoned.shape, np.bool_)
    if spec.has_zero:
        _, qmax = spec.code_range
        zero, zero_clamped = _cast_zero(spec.scale_dtype, grouped.min(axis=-1))
        # Negative only where the zero was clamped to its dtype's lowest value: then the scale is 0, as for no extent.
        extent = grouped.max(axis=-1) - zero
        raw = extent / np.float32(qmax)
    else:
        extent = np.abs(grouped).max(axis=-1)
        raw = extent / (np.float32(spec.code_range[1]) if spec.code in INTEGER_BITS else FP8[spec.code].largest)
    scale, scale_clamped = _cast_scale(spec.scale_dtype, raw, extent > 0)

    codes, clipped = _quantize(spec, grouped, scale[..., None], zero[..., None])
    codes = np.where((scale == 0)[..., None], np.zeros((), codes.dtype), codes)
    saturated = clamped_inputs | _from_groups(spec, clipped & scale_clamped[..., None], x.shape)

    planes = {"codes": _pack_codes(spec, _from_groups(spec, codes, x.shape))}
    planes["scale"] = _to_plane(spec.scale_dtype, np.where(poisoned, quiet_nan(), scale))
    if spec.has_zero:
        planes["zero"] = _to_plane(spec.scale_dtype, zero)
    return _encoded(planes, saturated, poisoned=poisoned, saturated_zeros=int(zero_clamped.sum()))


def _encode_static(
    spec: CodecSpec,
    x: Float32Array,
    clamped_inputs: BoolArray,
    static_scale: npt.ArrayLike | None,
    static_zero: npt.ArrayLike | None,
) -> Encoded:
    """Integer and fp8 codes under a calibrated scale: what exceeds it is clipped and counted, infinities included."""
    _, heads, dim = x.shape
    scale = _static(spec, "static_scale", static_scale, heads, dim)
    zero = _static(spec, "static_zero", static_zero, heads, dim) if spec.has_zero else np.zeros((), np.float32)
    codes, clipped = _quantize(spec, x, scale, zero)
    flagged: BoolArray = np.asarray(np.isnan(x).any(axis=-1) & (spec.code in INTEGER_BITS))
    return _encoded({"codes": _pack_codes(spec, codes)}, clamped_inputs | clipped, flagged=flagged)


def _quantize(spec: CodecSpec, x: Float32Array, scale: Float32Array, zero: Float32Array) -> tuple[Array, BoolArray]:
    """Codes for the stored scale and zero, and which of them were clipped.

    Integers come back as int64; fp8 as its bytes. NaN becomes integer 0, or the fp8 NaN code.
    """
    divisor = np.where(scale == 0, np.float32(1.0), scale)  # the caller sets the codes of a zero scale to 0
    shifted = x - zero if spec.has_zero else x
    quotient = shifted / divisor
    if spec.code in FP8:
        largest = FP8[spec.code].largest
        clipped = np.abs(quotient) > largest
        return FP8[spec.code].encode(np.clip(quotient, -largest, largest)), clipped
    low, high = spec.code_range
    rounded = np.rint(quotient)
    clipped = (rounded < low) | (rounded > high)
    rounded = np.where(np.isnan(rounded), np.float32(0.0), np.clip(rounded, np.float32(low), np.float32(high)))
    return rounded.astype(np.int64), clipped


def _pack_codes(spec: CodecSpec, codes: Array) -> Array:
    if spec.code in FP8:
        return codes
    if spec.code == "int8":
        return codes.astype(np.int8 if spec.symmetric else np.uint8)
    return pack(codes, spec.code_bits)


def _encode_mxfp4(spec: CodecSpec, x: Float32Array, clamped_inputs: BoolArray) -> Encoded:
    """E2M1 codes under a power of two per block of 32; values between 6 and 8 scales saturate at 6 by design."""
    blocks: Float32Array = _to_groups(spec, x)
    poisoned = _not_finite(blocks)
    blocks = np.where(poisoned[..., None], np.float32(0.0), blocks)
    exponent = np.maximum(e8m0_floor_log2(np.abs(blocks).max(axis=-1)) - 2, -E8M0_BIAS)
    exponent_byte = exponent + E8M0_BIAS
    scale = e8m0_decode(exponent_byte)
    quotient: Float32Array = blocks / scale[..., None]
    codes = E2M1.encode(quotient)
    codes = np.where(poisoned[..., None], np.uint8(0), codes)
    planes = {
        "codes": pack(_from_groups(spec, codes, x.shape), 4),
        "scale": np.where(poisoned, E8M0_NAN, exponent_byte).astype(np.uint8),
    }
    return _encoded(planes, clamped_inputs, poisoned=poisoned)


def _encode_nvfp4(
    spec: CodecSpec, x: Float32Array, clamped_inputs: BoolArray, static_scale: npt.ArrayLike | None
) -> Encoded:
    """E2M1 codes under an E4M3 scale per block of 16, itself under a float32 scale per token and head, or per layer."""
    tokens, heads, dim = x.shape
    blocks: Float32Array = _to_groups(spec, x)
    planes: dict[str, Array] = {}
    if spec.static:
        poisoned = _not_finite(blocks)
        poisoned_blocks = poisoned
        tensor_scale = np.broadcast_to(_static(spec, "static_scale", static_scale, heads, dim), (tokens, heads))
        blocks = np.where(poisoned[..., None], np.float32(0.0), blocks)
    else:
        poisoned = _not_finite(x)
        poisoned_blocks = np.repeat(poisoned[..., None], dim // BLOCK_SIZE["nvfp4"], axis=-1)
        blocks = np.where(poisoned[..., None, None], np.float32(0.0), blocks)
        amax = np.abs(blocks).max(axis=(-2, -1))
        tensor_scale, _ = _cast_scale("float32", amax / NVFP4_RANGE, amax > 0)
        planes["tensor_scale"] = np.where(poisoned, quiet_nan(), tensor_scale)

    divisor = np.where(tensor_scale == 0, np.float32(1.0), tensor_scale)[..., None]
    wanted = np.abs(blocks).max(axis=-1) / np.float32(6.0) / divisor
    block_scale = E4M3.round(np.maximum(np.minimum(wanted, E4M3_LARGEST), E4M3_SMALLEST))
    scale = block_scale * divisor
    quotient: Float32Array = blocks / scale[..., None]
    codes = np.where((tensor_scale == 0)[..., None, None], np.uint8(0), E2M1.encode(quotient))
    codes = np.where(poisoned_blocks[..., None], np.uint8(0), codes)

    # A calibrated tensor scale may be too small for a block. A dynamic one never is: there 6.0000004 is rounding.
    clipped = (np.abs(quotient) > E2M1_LARGEST) & (wanted > E4M3_LARGEST)[..., None] & spec.static
    planes = {
        "codes": pack(_from_groups(spec, codes, x.shape), 4),
        "scale": np.where(poisoned_blocks, np.uint8(E4M3_NAN), E4M3.encode(block_scale)),
        **planes,
    }
    return _encoded(planes, clamped_inputs | _from_groups(spec, clipped, x.shape), poisoned=poisoned)


def _encoded(
    planes: dict[str, Array],
    saturated_elements: BoolArray,
    *,
    poisoned: BoolArray | None = None,
    saturated_zeros: int = 0,
    flagged: BoolArray | None = None,
) -> Encoded:
    none = np.zeros(saturated_elements.shape[:2], np.bool_)
    return Encoded(
        planes=planes,
        saturated=int(saturated_elements.sum()) + saturated_zeros,
        poisoned=none if poisoned is None else poisoned,
        saturated_elements=saturated_elements,
        saturated_zeros=saturated_zeros,
        flagged=none if flagged is None else flagged,
    )


# --- decode ---------------------------------------------------------------------------------------------------------


def decode(
    spec: CodecSpec,
    planes: Mapping[str, Array],
    dim: int,
    static_scale: npt.ArrayLike | None = None,
    static_zero: npt.ArrayLike | None = None,
    channels: npt.ArrayLike | None = None,
) -> Float32Array:
    """x_hat = code * scale (+ zero), float32 (tokens, heads, dim), each operation rounded once.

    Any bit pattern decodes, also those no encoder emits (-128, a scale of the caller's making); numbers that are kept
    apart come back as they are, and a sparse index that is none of the page's changes nothing. Raises ValueError when
    a plane is missing, superfluous, or of another shape or dtype than the spec says.
    """
    _check_planes(spec, planes, dim)
    _refuse_static(spec, static_scale, static_zero)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _code_values(spec, planes["codes"])
        if spec.outliers or spec.sparse:
            rest = {n: p for n, p in planes.items() if not n.startswith(("outliers", "sparse_"))}
            decoded = decode(_without_kept(spec), rest, dim, static_scale, static_zero).copy()
            if spec.outliers:
                mask = _channel_mask(spec, channels, decoded.shape)
                decoded[mask] = planes["outliers"].ravel()  # both in the order of tokens, heads and channels
                return decoded
            index = planes["sparse_index"]
            for page, head, entry in np.argwhere((index >= 0) & (index < spec.page * dim)).tolist():
                e = int(index[page, head, entry])
                where = page * spec.page + e // dim, head, e % dim
                decoded[where] = planes["sparse_value"][page, head, entry]
            return decoded
        if spec.code in FLOAT_PAGES:
            return values
        decoded = values * _element_scale(spec, planes, values.shape, static_scale)
        if spec.has_zero:
            decoded = decoded + _element_zero(spec, planes, values.shape, static_zero)
        return decoded


def _check_planes(spec: CodecSpec, planes: Mapping[str, Array], dim: int) -> None:
    if "codes" not in planes or planes["codes"].ndim != 3:
        raise ValueError(f"a codes plane (tokens, heads, packed dim) is needed; got planes {sorted(planes)}")
    tokens, heads, _ = planes["codes"].shape
    expected = plane_shapes(spec, tokens, heads, dim)
    if set(planes) != set(expected):
        raise ValueError(f"{spec} has planes {sorted(expected)}; got {sorted(planes)}")
    for name, (shape, dtype) in expected.items():
        if planes[name].shape != shape or planes[name].dtype != dtype:
            got = f"{planes[name].dtype} {planes[name].shape}"
            raise ValueError(f"plane {name!r} of {spec} is {dtype} {shape}; got {got}")


def _code_values(spec: CodecSpec, codes: Array) -> Float32Array:
    """The float32 value of each code before scaling, (tokens, heads, dim)."""
    if spec.code in FLOAT_PAGES:
        small = FLOAT_PAGES[spec.code]
        return codes.astype(np.float32) if small is None else small.decode(codes)
    if spec.code in FP8:
        return FP8[spec.code].decode(codes)
    if spec.code in BLOCK_SIZE:
        return E2M1.decode(unpack(codes, 4, signed=False))
    if spec.code == "int8":
        return codes.astype(np.float32)
    return unpack(codes, spec.code_bits, signed=spec.symmetric).astype(np.float32)


def _element_scale(
    spec: CodecSpec, planes: Mapping[str, Array], shape: tuple[int, ...], static_scale: npt.ArrayLike | None
) -> Float32Array:
    """The float32 scale of each element, (tokens, heads, dim)."""
    tokens, heads, dim = shape
    if spec.code == "mxfp4":
        return _spread(spec, e8m0_decode(planes["scale"]), shape)
    if spec.code == "nvfp4":
        if spec.static:
            tensor_scale = np.broadcast_to(_static(spec, "static_scale", static_scale, heads, dim), (tokens, heads))
        else:
            tensor_scale = planes["tensor_scale"]
        return _spread(spec, E4M3.decode(planes["scale"]) * tensor_scale[..., None], shape)
    if spec.static:
        return np.broadcast_to(_static(spec, "static_scale", static_scale, heads, dim), shape)
    return _spread(spec, _from_plane(spec.scale_dtype, planes["scale"]), shape)


def _element_zero(
    spec: CodecSpec, planes: Mapping[str, Array], shape: tuple[int, ...], static_zero: npt.ArrayLike | None
) -> Float32Array:
    """The float32 zero of each element, (tokens, heads, dim)."""
    if spec.static:
        return np.broadcast_to(_static(spec, "static_zero", static_zero, shape[1], shape[2]), shape)
    return _spread(spec, _from_plane(spec.scale_dtype, planes["zero"]), shape)


# --- round trip -----------------------------------------------------------------------------------------------------


def round_trip_bound(
    spec: CodecSpec,
    x: Float32Array,
    planes: Mapping[str, Array],
    static_scale: npt.ArrayLike | None = None,
    static_zero: npt.ArrayLike | None = None,
    channels: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """The allowed |x - x_hat| of each element, float64 (tokens, heads, dim), for planes that `encode` would write.

    Integers: scale / 2, or one scale for 8-bit asymmetric codes with a bfloat16 scale (rounding the scale down may
    cost one code at the top). fp8: half a step of the code at |x| / scale. E2M1: the same, or the distance to 6 where
    the block's rounded scale leaves |x| / scale above it. All of these plus 2 float32 ulp of the largest |x| of the
    group (of the token and head for static scales). Float pages: half a step of their encoding.
    Infinite, that is no promise, where x is not finite, its group is poisoned, or the value is counted as saturated.
    """
    _check_planes(spec, planes, x.shape[-1])
    if spec.outliers or spec.sparse:  # what is kept apart is exact
        taken = _channel_mask(spec, channels, x.shape) if spec.outliers else _sparse_mask(spec, planes, x.shape)
        rest = {n: p for n, p in planes.items() if not n.startswith(("outliers", "sparse_"))}
        left = np.where(taken, np.float32(0.0), x)
        allowed = round_trip_bound(_without_kept(spec), left, rest, static_scale, static_zero)
        return np.where(taken, np.where(np.isfinite(x), 0.0, np.inf), allowed)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if spec.code in FLOAT_PAGES:
            small = FLOAT_PAGES[spec.code]
            if small is None:
                return np.where(np.isfinite(x), 0.0, np.inf)
            return np.where(np.isfinite(small.round(x)), small.half_spacing(x), np.inf)

        scale = _element_scale(spec, planes, x.shape, static_scale).astype(np.float64)
        poisoned = np.isnan(scale)
        shifted = x.astype(np.float64)
        if spec.has_zero:
            shifted = shifted - _element_zero(spec, planes, x.shape, static_zero).astype(np.float64)
        quotient = shifted / np.where((scale == 0) | poisoned, 1.0, scale)
        steps: Array
        if spec.code in INTEGER_BITS:
            whole_step = spec.has_zero and spec.code == "int8" and spec.scale_dtype == "bfloat16"
            steps = np.full(x.shape, 1.0 if whole_step else 0.5)
            low, high = spec.code_range
            outside = (quotient < low - 0.5) | (quotient > high + 0.5)
        else:
            small = FP8.get(spec.code, E2M1)
            largest = float(small.largest)
            steps = np.maximum(small.half_spacing(quotient), np.abs(quotient) - largest)
            outside = np.abs(quotient) > largest
        bound = steps * scale + 2.0 * _ulp(_largest_of_group(spec, np.abs(x)))
        no_promise = (outside & _may_saturate(spec, planes, x, static_scale)) | ~np.isfinite(x) | poisoned
        return np.where(no_promise | (np.abs(x) > INPUT_LIMIT), np.inf, bound)


def _may_saturate(
    spec: CodecSpec, planes: Mapping[str, Array], x: Float32Array, static_scale: npt.ArrayLike | None
) -> BoolArray:
    """Where a clipped code is counted saturation rather than rounding: the scale is static or sits at its limit."""
    if spec.code == "mxfp4":
        return np.zeros(x.shape, np.bool_)
    if spec.code == "nvfp4":
        at_limit = E4M3.decode(planes["scale"]) == E4M3_LARGEST
        return _spread(spec, at_limit & spec.static, x.shape)
    if spec.static:
        return np.ones(x.shape, np.bool_)
    _, largest = _scale_limits(spec.scale_dtype)
    at_limit = _from_plane(spec.scale_dtype, planes["scale"]) == largest
    if spec.has_zero:
        at_limit |= np.abs(_from_plane(spec.scale_dtype, planes["zero"])) == largest
    return _spread(spec, at_limit, x.shape)


def _largest_of_group(spec: CodecSpec, magnitude: Float32Array) -> Float32Array:
    """The largest finite |x| of each element's group, at each element."""
    magnitude = np.where(np.isfinite(magnitude), np.minimum(magnitude, INPUT_LIMIT), np.float32(0.0))
    if spec.static and spec.code not in BLOCK_SIZE:
        return np.broadcast_to(magnitude.max(axis=-1, keepdims=True), magnitude.shape)
    return _spread(spec, _to_groups(spec, magnitude).max(axis=-1), magnitude.shape)


def _ulp(magnitude: Float32Array) -> npt.NDArray[np.float64]:
    """The distance from a finite float32 magnitude to the next one."""
    exponent = np.maximum(e8m0_floor_log2(magnitude), -126)
    ulp: npt.NDArray[np.float64] = np.ldexp(np.float64(1.0), (exponent - 23).astype(np.int32))
    return ulp
