# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM108
# Triton's language is not typed Python: tensors, constexprs and pointers share one notation, compile-time names are in
# capitals, and what depends on one of them is an if statement, never a conditional expression.
"""append: quantize K and V of one layer and scatter them into pages, one launch.

Private page layout, per layer (see :mod:`kvport_triton.store`): K codes ``[page, head, token, byte]``, quantized V
codes ``[page, head, byte, token]`` (transposed, so that attend's second product reads tokens contiguously), scales and
zeros ``[page, head, group, token]``. A program encodes ``BT`` rows of one head of K or of V.

The arithmetic is the contract's, bit for bit: IEEE division, ties to even, and no multiplication that a compiler could
contract with an addition.
"""

import triton
import triton.language as tl

from kvport_triton.kernels.numerics import (
    FLOAT32,
    INPUT_LIMIT,
    ROUNDER,
    float_code_bits,
    floor_bits,
    largest_code,
    load_scale,
    nan_bits,
    quotient,
    round_bits,
    scale_bits,
    store_bits,
    widen_bits,
)


@triton.jit
def _pack(codes, BT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """int32 codes (BT, WIDTH) -> bytes as int32 (BT, WIDTH * BITS / 8), low bits first."""
    if BITS == 8:
        return codes
    elif BITS == 4:
        low, high = tl.split(tl.reshape(codes & 15, (BT, WIDTH // 2, 2)))
        return low | (high << 4)
    else:
        even, odd = tl.split(tl.reshape(codes & 3, (BT, WIDTH // 4, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first | (second << 2) | (third << 4) | (fourth << 6)


@triton.jit
def _store_codes(
    codes, C, page, offset, live, run, h, heads, first_byte, used,
    BT: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scatter (BT, WIDTH) codes of head ``h``; ``first_byte`` is where they begin in a row of ``BYTES``."""
    j = tl.arange(0, WIDTH)
    base = page * heads + h
    mask = live[:, None] & (j < used)[None, :]
    if not TRANSPOSED:
        tl.store(C + ((base * PAGE + offset) * BYTES)[:, None] + first_byte + j[None, :], codes, mask=mask)
    else:
        # Rows that fill an aligned run of slots, as in prefill, are stored as vectors along the tokens.
        flipped = tl.trans(codes)
        if run:
            start = tl.min(base, 0) * (BYTES * PAGE) + tl.multiple_of(tl.min(offset, 0), BT)
            target = C + start + (first_byte + j)[:, None] * PAGE + tl.arange(0, BT)[None, :]
            tl.store(target, flipped, mask=(j < used)[:, None])
        else:
            target = C + ((base * BYTES + first_byte) * PAGE + offset)[None, :] + j[:, None] * PAGE
            tl.store(target, flipped, mask=live[None, :] & (j < used)[:, None])


@triton.jit
def _encode_side(
    X, x_token, x_head, x_dim, C, S, Z, STATIC_S, STATIC_Z, FLAGS, rows, inside, slots, h, heads,
    BT: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, PER_BYTE: tl.constexpr,
    QUANTIZED: tl.constexpr, SYMMETRIC: tl.constexpr, GROUPS: tl.constexpr, STATIC: tl.constexpr,
    SCALE: tl.constexpr, PAGE_FLOAT: tl.constexpr, RAW: tl.constexpr, TRANSPOSED: tl.constexpr,
    INTERP: tl.constexpr,
):  # fmt: skip
    live = inside & (slots >= 0)
    # A skipped row counts as slot 0, which its mask keeps it from writing. (Selecting instead of multiplying trips a
    # layout pass of triton 3.6 where branches follow.)
    slots = slots * live.to(tl.int64)
    page = slots // PAGE
    offset = slots % PAGE
    # Whether the rows fill slots first .. first + BT - 1 of one page, beginning at a multiple of BT.
    first = tl.min(slots, 0)
    gaps = tl.max(tl.abs(slots - first - tl.arange(0, BT)), 0) + (BT - tl.sum(live.to(tl.int32), 0))
    run = gaps + first % BT + PAGE % BT == 0
    N: tl.constexpr = DIM // GROUPS
    WIDTH: tl.constexpr = triton.next_power_of_2(N)
    BYTES: tl.constexpr = DIM // PER_BYTE
    LARGEST: tl.constexpr = largest_code(BITS, SYMMETRIC)
    d = tl.arange(0, WIDTH)
    used = live[:, None] & (d < N)[None, :]
    for g in tl.static_range(GROUPS):
        source = X + rows.to(tl.int64)[:, None] * x_token + h * x_head + (g * N + d)[None, :] * x_dim
        loaded = tl.load(source, mask=used, other=0)
        if not QUANTIZED:
            if RAW:
                bits = loaded
            else:
                x = loaded.to(tl.float32)
                bits = tl.where(x == x, round_bits(x, PAGE_FLOAT), nan_bits(PAGE_FLOAT))
            if PAGE_FLOAT != FLOAT32:
                bits = bits.to(tl.int16)
            _store_codes(bits, C, page, offset, live, run, h, heads, 0, N, BT, BYTES, WIDTH, PAGE, TRANSPOSED)
        else:
            x = loaded.to(tl.float32)
            if STATIC > 0:
                if STATIC == 1:
                    where = tl.zeros([1, WIDTH], tl.int32)
                elif STATIC == 2:
                    where = tl.zeros([1, WIDTH], tl.int32) + h
                else:
                    where = h * DIM + tl.minimum(d, N - 1)[None, :]
                scale = load_scale(STATIC_S + where, where >= 0, SCALE)
                nan = x != x
                if not SYMMETRIC:
                    x = x - load_scale(STATIC_Z + where, where >= 0, SCALE)
                # What lies beyond 512 scales (2 * 57344 for E5M2) saturates, infinities too; the quotient must not
                # overflow on the way.
                reach = tl.broadcast_to(scale * (2.0 * LARGEST if BITS > 8 else 512.0), x.shape)
                reach = tl.minimum(reach, 3.0e38)
                sign = x
                x = tl.where(nan, 0.0, tl.minimum(tl.maximum(x, -reach), reach))
                q = quotient(x, scale, INTERP)
                if BITS <= 8:
                    flagged = tl.max((nan & used).to(tl.int32), 1) > 0
                    tl.store(FLAGS + page, tl.full([BT], 1, tl.uint8), mask=live & flagged)
            else:
                # Bits of magnitudes order as the magnitudes do, infinities and NaN above all: one maximum tells both.
                extreme = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
                bad = extreme >= 0x7F800000
                if SYMMETRIC:
                    # Elements beyond the input limit need no clamp of their own: their codes saturate either way.
                    extent = tl.minimum(tl.where(bad, 0, extreme).to(tl.float32, bitcast=True), INPUT_LIMIT)
                else:
                    x = tl.where(bad[:, None], 0.0, tl.minimum(tl.maximum(x, -INPUT_LIMIT), INPUT_LIMIT))
                    # Padding channels must decide neither extreme.
                    low = tl.min(tl.where((d < N)[None, :], x, INPUT_LIMIT), 1)
                    high = tl.max(tl.where((d < N)[None, :], x, -INPUT_LIMIT), 1)
                    zero = floor_bits(low, SCALE)
                    offset_value = widen_bits(zero, SCALE)
                    extent = high - offset_value
                    x = x - offset_value[:, None]
                raw = tl.div_rn(extent, tl.full([BT], LARGEST, tl.float32))
                bits = scale_bits(raw, extent > 0.0, SCALE)
                q = quotient(x, widen_bits(bits, SCALE)[:, None], INTERP)
                sign = x
                if SYMMETRIC:
                    q = tl.where(bad[:, None], 0.0, q)
                where = ((page * heads + h) * GROUPS + g) * PAGE + offset
                store_bits(S + where, tl.where(bad, nan_bits(SCALE), bits), live, SCALE)
                if not SYMMETRIC:
                    store_bits(Z + where, zero, live, SCALE)
            # Clamping to integers before rounding equals clamping after, and keeps q where ROUNDER rounds. The sum's
            # low bits are then the integer; symmetric codes are stored plus half their range (kvport_triton.store).
            q = tl.minimum(tl.maximum(q, -LARGEST if SYMMETRIC else 0.0), LARGEST)
            if BITS > 8:
                # Zeros keep their sign, which the quotient's corrections lose, unless there is no scale to keep it by.
                packed = float_code_bits(q, BITS) | ((sign.to(tl.int32, bitcast=True) >> 24) & 0x80)
                if STATIC > 0:
                    packed = tl.where(nan, 0x7F, packed)
                else:
                    packed = tl.where(((bits == 0) | bad)[:, None], 0, packed)
            else:
                q = q + (ROUNDER + (LARGEST + 1.0 if SYMMETRIC else 0.0))
                packed = _pack(q.to(tl.int32, bitcast=True), BT, WIDTH, BITS)
            _store_codes(
                packed.to(tl.uint8), C, page, offset, live, run, h, heads, g * (N // PER_BYTE), N // PER_BYTE,
                BT, BYTES, WIDTH // PER_BYTE, PAGE, TRANSPOSED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "heads"])
def append_kernel(
    KX, kx_token, kx_head, kx_dim, KC, KS, KZ, K_STATIC_S, K_STATIC_Z,
    VX, vx_token, vx_head, vx_dim, VC, VS, VZ, V_STATIC_S, V_STATIC_Z,
    FLAGS, SLOTS, tokens, heads,
    BT: tl.constexpr, PAGE: tl.constexpr, INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_QUANTIZED: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    K_FLOAT: tl.constexpr, K_RAW: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_PER_BYTE: tl.constexpr, V_QUANTIZED: tl.constexpr,
    V_SYMMETRIC: tl.constexpr, V_GROUPS: tl.constexpr, V_STATIC: tl.constexpr, V_SCALE: tl.constexpr,
    V_FLOAT: tl.constexpr, V_RAW: tl.constexpr,
):  # fmt: skip
    """Grid: (row blocks, heads, 2); the last axis is K, V."""
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    inside = rows < tokens
    slots = tl.load(SLOTS + rows, mask=inside, other=-1)
    if tl.program_id(2) == 0:
        _encode_side(
            KX, kx_token, kx_head, kx_dim, KC, KS, KZ, K_STATIC_S, K_STATIC_Z, FLAGS, rows, inside, slots, h, heads,
            BT, K_DIM, PAGE, K_BITS, K_PER_BYTE, K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE, K_FLOAT,
            K_RAW, False, INTERP,
        )  # fmt: skip
    else:
        _encode_side(
            VX, vx_token, vx_head, vx_dim, VC, VS, VZ, V_STATIC_S, V_STATIC_Z, FLAGS, rows, inside, slots, h, heads,
            BT, V_DIM, PAGE, V_BITS, V_PER_BYTE, V_QUANTIZED, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE, V_FLOAT,
            V_RAW, V_QUANTIZED, INTERP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def begin_pages_kernel(FLAGS, SLOTS, tokens, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Clear the NaN flag of every page whose first slot is about to be written. Grid: (blocks of slots,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(SLOTS + i, mask=i < tokens, other=-1)
    begun = (slots >= 0) & (slots % PAGE == 0)
    tl.store(FLAGS + tl.where(begun, slots // PAGE, 0), tl.zeros([BLOCK], tl.uint8), mask=begun)
