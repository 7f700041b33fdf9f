# mypy: ignore-errors
# ruff: noqa: N803, SIM116
# Triton's language is not typed Python: tensors, constexprs and pointers share one notation, compile-time names are in
# capitals, and what depends on one of them is an if statement, never a conditional expression.
"""Number conversions inside kernels: codes to floats in registers, and float32 to stored bits.

Everything that is stored is made by integer operations on bit patterns, so that a compiled and an interpreted kernel
write the same bytes: the interpreter truncates in ``.to(bfloat16)``, and compiled casts give NaN other bits. ``INTERP``
marks the few places where the two need different operations.
"""

import triton
import triton.language as tl

#: Rounds a float32 below 2**22 to an integer, ties to even, by pushing its fraction out of the significand.
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23
INPUT_LIMIT = tl.constexpr(2.0**125)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)


#: Kinds of codes that are floats, where a number of bits stands for integers.
E4M3 = tl.constexpr(43)
E5M2 = tl.constexpr(52)

#: Codes in the lowest bits of a float16 are multiples of its smallest subnormal.
SUBNORMAL = tl.constexpr(2.0**-24)


@triton.constexpr_function
def code_unit(bits):
    """What the code 1 counts as :func:`decode_subnormal` gives it (at position 0)."""
    return 2.0**-24 if bits <= 8 else 1.0


@triton.constexpr_function
def largest_code(bits, symmetric):
    """The largest finite code."""
    if bits > 8:
        return 448.0 if bits == 43 else 57344.0
    return 2.0 ** (bits - 1) - 1.0 if symmetric else 2.0**bits - 1.0


@triton.constexpr_function
def float_code_asm(bits):
    """PTX for four stored fp8 bytes -> four float16, exact. E5M2 is the upper half of a float16."""
    if bits == 52:
        return "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;"
    return "{ .reg .b16 p, q; mov.b32 {p, q}, $2; cvt.rn.f16x2.e4m3x2 $0, p; cvt.rn.f16x2.e4m3x2 $1, q; }"


@triton.constexpr_function
def plane_gain(bits, position):
    """What :func:`decode_subnormal` multiplies a code by, beside 2**-24: its bits stay where they are in the byte."""
    return float(1 << (position * bits))


@triton.constexpr_function
def decode_asm(bits, position):
    """PTX for four stored bytes -> the codes at ``position`` in each byte, minus half their range, as four float16.

    A code is put into the low bits of 0x6400 (float16 1024.0, where one unit is one ulp), then 1024 and half the range
    are subtracted. Every step is exact.
    """
    half = 1 << (bits - 1)
    lines = []
    if bits == 8:
        lines.append("prmt.b32 p, $2, 0x64646464, 0x4140; prmt.b32 q, $2, 0x64646464, 0x4342;")
        lines.append(f"mov.b32 m, {(0x6400 + half) * 0x10001:#x}; sub.f16x2 $0, p, m; sub.f16x2 $1, q, m;")
        return "{ .reg .b32 t, p, q, m; " + " ".join(lines) + " }"
    # Two bytes into the low halves of two words, then the code's bits in place: shifted up, a code counts 2**shift.
    shift = position * bits
    lines.append("prmt.b32 p, $2, 0, 0x4140; prmt.b32 q, $2, 0, 0x4342;")
    field = (((1 << bits) - 1) << shift) * 0x10001
    for word in "pq":
        lines.append(f"lop3.b32 {word}, {word}, {field:#x}, 0x64006400, 0xea;")  # (word & field) | 0x6400
    if shift == 0:
        lines.append(f"mov.b32 m, {(0x6400 + half) * 0x10001:#x}; sub.f16x2 $0, p, m; sub.f16x2 $1, q, m;")
    else:
        # (1024 + code * 2**shift) * 2**-shift - (1024 * 2**-shift + half), one exact fused operation.
        scale = (15 - shift) << 10
        offset = _half_bits(-(1024.0 / (1 << shift) + half))
        lines.append(f"mov.b32 m, {scale * 0x10001:#x}; mov.b32 t, {offset * 0x10001:#x};")
        lines.append("fma.rn.f16x2 $0, p, m, t; fma.rn.f16x2 $1, q, m, t;")
    return "{ .reg .b32 t, p, q, m; " + " ".join(lines) + " }"


@triton.constexpr_function
def _half_bits(value):
    """Bits of a float16, for constants in PTX."""
    import struct

    return struct.unpack("<H", struct.pack("<e", value))[0]


@triton.constexpr_function
def subnormal_asm(bits, position):
    """PTX for four stored bytes -> codes at ``position`` times 2**-24 * :func:`plane_gain`, as four float16.

    The bits of a code in the low bits of a float16 are that multiple of its smallest subnormal: no arithmetic at all.
    """
    if bits == 8:
        return "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;"
    field = (((1 << bits) - 1) << (position * bits)) * 0x10001
    return (
        "{ .reg .b32 p, q; prmt.b32 p, $2, 0, 0x4140; prmt.b32 q, $2, 0, 0x4342;"
        f" and.b32 $0, p, {field:#x}; and.b32 $1, q, {field:#x}; }}"
    )


@triton.jit
def decode_int(stored, POSITION: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Stored bytes -> int32 codes at ``POSITION`` of each byte, signed where ``SYMMETRIC``."""
    field = (stored.to(tl.int32) >> (POSITION * BITS)) & ((1 << BITS) - 1)
    if SYMMETRIC:
        field = field - (1 << (BITS - 1))
    return field


@triton.jit
def decode_float(stored, BITS: tl.constexpr):
    """Stored fp8 bytes -> float32, by integer operations alone: compiled and interpreted alike."""
    byte = stored.to(tl.int32) & 0xFF
    if BITS == E5M2:
        return (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # Its bits in a float16's places count 2**-8, subnormals included; 0x7F and 0xFF are NaN.
        half = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def decode_half(stored, POSITION: tl.constexpr, BITS: tl.constexpr, INTERP: tl.constexpr):
    """Stored bytes -> float16 codes at ``POSITION`` of each byte, integers minus half their range, exact."""
    if BITS > 8:
        if INTERP:
            return decode_float(stored, BITS).to(tl.float16)
        else:
            return tl.inline_asm_elementwise(
                float_code_asm(BITS), "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4
            )
    elif INTERP:
        return decode_int(stored, POSITION, BITS, True).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            decode_asm(BITS, POSITION), "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4
        )


@triton.jit
def decode_code(stored, POSITION: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, INTERP: tl.constexpr):
    """Stored bytes -> float32 codes at ``POSITION`` of each byte, by float16: integers have no quick way to float32."""
    x = decode_half(stored, POSITION, BITS, INTERP).to(tl.float32)
    if not SYMMETRIC:
        x += 2.0 ** (BITS - 1)
    return x


@triton.jit
def decode_subnormal(stored, POSITION: tl.constexpr, BITS: tl.constexpr, INTERP: tl.constexpr):
    """Stored bytes -> float16 codes times code_unit * plane_gain; for integers cheaper than :func:`decode_half`.

    Compiled, integer codes are 0 .. 2**BITS - 1, half the range above what :func:`decode_half` gives; the caller takes
    that back. Interpreted, they are centered already.
    """
    if BITS > 8:
        return decode_half(stored, POSITION, BITS, INTERP)
    elif INTERP:
        code = decode_int(stored, POSITION, BITS, True).to(tl.float32)
        return (code * (plane_gain(BITS, POSITION) * SUBNORMAL)).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            subnormal_asm(BITS, POSITION), "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4
        )


@triton.jit
def round_bits(x, SCALE: tl.constexpr):
    """float32 -> the bits of the scale dtype (as int32), to nearest even, overflow to infinity. Not for NaN."""
    if SCALE == FLOAT32:
        return x.to(tl.int32, bitcast=True)
    elif SCALE == BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    else:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def widen_bits(bits, SCALE: tl.constexpr):
    """Bits of the scale dtype (as int32) -> float32."""
    if SCALE == FLOAT32:
        return bits.to(tl.float32, bitcast=True)
    elif SCALE == BFLOAT16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_bits(pointer, bits, mask, SCALE: tl.constexpr):
    """Store scale bits through a pointer to int32 (float32 scales) or int16."""
    if SCALE == FLOAT32:
        tl.store(pointer, bits, mask=mask)
    else:
        tl.store(pointer, bits.to(tl.int16), mask=mask)


@triton.jit
def load_scale(pointer, mask, SCALE: tl.constexpr):
    """Load a scale or zero through a pointer to int32 or int16 bits, as float32."""
    if SCALE == FLOAT32:
        return tl.load(pointer, mask=mask, other=0).to(tl.float32, bitcast=True)
    else:
        return widen_bits(tl.load(pointer, mask=mask, other=0).to(tl.int32) & 0xFFFF, SCALE)


@triton.jit
def read_scale(pointer, SCALE: tl.constexpr):
    """:func:`load_scale` of a place that is always there."""
    if SCALE == FLOAT32:
        return tl.load(pointer).to(tl.float32, bitcast=True)
    else:
        return widen_bits(tl.load(pointer).to(tl.int32) & 0xFFFF, SCALE)


@triton.jit
def scale_bits(raw, positive, SCALE: tl.constexpr):
    """The stored bits of a scale: cast, clamped to the dtype's normal numbers where the range is not zero."""
    if SCALE == FLOAT32:
        largest: tl.constexpr = 0x7F7FFFFF
        smallest: tl.constexpr = 0x00800000
    elif SCALE == BFLOAT16:
        largest: tl.constexpr = 0x7F7F
        smallest: tl.constexpr = 0x0080
    else:
        largest: tl.constexpr = 0x7BFF
        smallest: tl.constexpr = 0x0400
    # Bits of non-negative floats order as the floats do, infinity above all.
    bits = round_bits(tl.maximum(raw, 0.0), SCALE)
    return tl.where(positive, tl.minimum(tl.maximum(bits, smallest), largest), 0)


@triton.jit
def floor_bits(x, SCALE: tl.constexpr):
    """The stored bits of a zero: finite float32 cast toward minus infinity, within the finite range, never -0."""
    x = tl.where(x == 0.0, 0.0, x)
    if SCALE == FLOAT32:
        return x.to(tl.int32, bitcast=True)
    elif SCALE == BFLOAT16:
        # |x| <= 2**125, so nothing overflows; dropping bits rounds toward zero, one more magnitude for negatives.
        bits = x.to(tl.int32, bitcast=True)
        inexact = (bits & 0xFFFF) != 0
        high = (bits >> 16) & 0xFFFF
        return high + tl.where((bits < 0) & inexact, 1, 0)
    else:
        inside = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        bits = round_bits(inside, SCALE)
        up = widen_bits(bits, SCALE) > inside
        magnitude = bits & 0x7FFF
        down = tl.where(bits >= 0x8000, bits + 1, bits - 1)
        down = tl.where(magnitude == 0, 0x8001, down)
        bits = tl.where(up, down, bits)
        return tl.where((bits & 0x7FFF) == 0, 0, bits)


@triton.jit
def nan_bits(SCALE: tl.constexpr):
    if SCALE == FLOAT32:
        return 0x7FC00000
    elif SCALE == BFLOAT16:
        return 0x7FC0
    else:
        return 0x7E00


@triton.jit
def is_finite(x):
    """Elementwise, by bits: comparisons would need an infinity, which constexprs cannot spell."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def quotient(x, scale, INTERP: tl.constexpr):
    """x / scale rounded as IEEE float32 does, for a scale of 0 x itself; ``scale`` broadcasts along a dim of ``x``.

    One division per scale instead of one per element: multiply by the correctly rounded reciprocal, then correct the
    quotient twice by its exact remainder. The first correction brings it within an ulp, the second rounds correctly
    (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990, theorem on division
    with a correctly rounded reciprocal). Scale and x are first multiplied by a power of two that brings the scale into
    1 .. 2, so that no remainder underflows; an x that underflows has a quotient below 2**-100. Quotients that overflow
    are not needed: codes are clamped. The interpreter has no fused operation and divides.
    """
    scale = tl.where(scale == 0.0, 1.0, scale)
    if INTERP:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        exponent = scale.to(tl.int32, bitcast=True) & 0x7F800000
        shift = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        scale = scale * shift
        reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        x = x * shift
        scale = tl.broadcast_to(scale, x.shape)
        reciprocal = tl.broadcast_to(reciprocal, x.shape)
        q = x * reciprocal
        q = tl.fma(tl.fma(-q, scale, x), reciprocal, q)
        return tl.fma(tl.fma(-q, scale, x), reciprocal, q)


@triton.jit
def reciprocal(x, INTERP: tl.constexpr):
    """1 / x of a normal float32, to about 2**-22; one operation, where a division takes ten."""
    if INTERP:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def fused(a, b, c, INTERP: tl.constexpr):
    """a * b + c rounded once, where nothing depends on it but speed: kernels are compiled without fusing, so that what
    decodes to 0 is 0. The interpreter rounds twice. All three broadcast to the shape of ``a``."""
    if INTERP:
        return a * b + c
    else:
        return tl.fma(a, tl.broadcast_to(b, a.shape), tl.broadcast_to(c, a.shape))


@triton.jit
def float_code_bits(q, BITS: tl.constexpr):
    """float32 within the finite codes -> the nearest fp8 code as int32, ties to even; the sign bit is not set."""
    dropped: tl.constexpr = 20 if BITS == E4M3 else 21
    bias: tl.constexpr = 120 << 3 if BITS == E4M3 else 112 << 2
    smallest: tl.constexpr = 2.0**-6 if BITS == E4M3 else 2.0**-14
    units: tl.constexpr = 512.0 if BITS == E4M3 else 65536.0
    size = tl.abs(q)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped) - bias
    # Subnormal codes count units; 2**23 * 1.5 is 0x4B400000, and the sum's low bits are the integer.
    subnormal = (tl.minimum(size, smallest) * units + ROUNDER).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(size < smallest, subnormal, normal)


@triton.jit
def round_bf16(x, INTERP: tl.constexpr):
    """float32 rounded to bfloat16; the interpreter, which truncates, keeps it in float32."""
    if INTERP:
        rounded = widen_bits(round_bits(x, BFLOAT16), BFLOAT16)
        return tl.where(x == x, rounded, x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def tanh(x):
    """tanh to about 2**-21 relative: the odd series near zero, where 1 - 2 / (e**2x + 1) would cancel."""
    square = x * x
    series = x * (
        1.0 + square * (-0.33333333333 + square * (0.13333333333 + square * (-0.05396825397 + square * 0.02186948854)))
    )
    e = tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2.0 * LOG2_E))
    far = 1.0 - 2.0 / (e + 1.0)
    near = (square < 0.0625) | (x != x)  # NaN stays NaN in the series; compiled minima would lose it
    return tl.where(near, series, tl.where(x < 0.0, -far, far))


@triton.jit
def dot(a, b, IEEE: tl.constexpr, INTERP: tl.constexpr):
    """a @ b with float32 accumulation. The interpreter multiplies bf16 wrongly, so it gets float32 operands."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif IEEE:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def dot_add(a, b, acc, IEEE: tl.constexpr, INTERP: tl.constexpr):
    """acc + a @ b, see :func:`dot`."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif IEEE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def pick(INDEX: tl.constexpr, a, b, c, d):
    """The argument numbered ``INDEX``; a loop over slices is unrolled, and Triton has no arrays of tensors."""
    if INDEX == 0:
        return a
    elif INDEX == 1:
        return b
    elif INDEX == 2:
        return c
    else:
        return d


@triton.jit
def interleave(planes, PER_BYTE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A tuple of (ROWS, WIDTH), the codes at each position of a byte -> (ROWS, WIDTH * PER_BYTE) in channel order."""
    if PER_BYTE == 1:
        return planes[0]
    elif PER_BYTE == 2:
        return tl.reshape(tl.join(planes[0], planes[1]), (ROWS, 2 * WIDTH))
    else:
        both = tl.join(tl.join(planes[0], planes[2]), tl.join(planes[1], planes[3]))
        return tl.reshape(both, (ROWS, 4 * WIDTH))
