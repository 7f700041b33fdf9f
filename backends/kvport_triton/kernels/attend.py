# mypy: ignore-errors
# ruff: noqa: N803, N806, E741, SIM102, SIM108
# Triton's language is not typed Python: tensors, constexprs and pointers share one notation, compile-time names are in
# capitals, and what depends on one of them is an if statement, never a conditional expression. Calls keep their
# arguments in lines by meaning (K, V, static, geometry), not one a line.
# fmt: off
"""attend: one program takes a tile of query rows of one KV head over a run of stored tokens.

Rows of a tile are (token, query head of the group), so K and V are read once for the whole group. Work items come from
the plan; an item whose run is only a part of what its rows see leaves a normalized partial and its base-2 LSE for
:func:`merge_kernel`.

Products (``MODE``):

``CODES``
    Integer codes become float16 in registers, exactly; codes of asymmetric formats are counted from the one nearest to
    the value 0 (V, see :func:`centre`), or minus half their range (K; the zeros take up the half, in float32). The
    query is scaled by a power of two per row into float16's range. K's scales multiply the scores, V's the softmax
    weights; neither multiplies an element of K or V. Weights are kept relative to the largest V scale met so far
    (``top``) and lifted by 2**15, so that float16 holds them with full precision down to 2**-29 of the largest.
``NATIVE``
    Float pages in the query's own dtype.
``EXACT``
    Decoded to float32 and multiplied in IEEE float32: float32 queries, and every combination without a faster way.
``ROUNDED``
    Decoded to float32 and rounded to bfloat16, which is what the bound allows bfloat16 queries: quantized formats with
    more slices than CODES has accumulators for, or with scales of channels.

A row of K or V is cut into slices: one per (group of channels, position of the code inside its byte). Slice (g, p) has
channels g * N + p, g * N + p + PER_BYTE, ...; up to four slices have their own query tile and accumulator.

Masked lanes are selected away, never multiplied by zero: unwritten slots hold any bits.
"""

import triton
import triton.language as tl

from kvport_triton.kernels.numerics import (
    LN_2,
    LOG2_E,
    ROUNDER,
    code_unit,
    decode_code,
    decode_half,
    decode_subnormal,
    dot,
    dot_add,
    fused,
    is_finite,
    load_scale,
    pick,
    plane_gain,
    reciprocal,
    round_bf16,
    tanh,
)

CODES = tl.constexpr(0)
NATIVE = tl.constexpr(1)
EXACT = tl.constexpr(2)
ROUNDED = tl.constexpr(3)
ITEM_FIELDS = tl.constexpr(10)
BLOCK_FIELDS = tl.constexpr(4)
SMALLEST_TOP = tl.constexpr(2.0**-110)  # its reciprocal, and every product with it, stays a normal float32
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _larger(a, b, INTERP: tl.constexpr):
    """Elementwise maximum that leaves NaN in ``b`` out; compiled maxima do so of themselves, numpy's do not."""
    if INTERP:
        b = tl.where(b == b, b, 0.0)
    return tl.maximum(a, b)


@triton.jit
def _kept(value, stored, WHOLE: tl.constexpr):
    """``value`` where its token is stored, else 0."""
    if WHOLE:
        return value
    else:
        return tl.where(stored, value, 0.0)


@triton.jit
def _query_slice(
    Q, rows, heads, live, q_token, q_head, q_dim,
    G: tl.constexpr, POSITION: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, PER_BYTE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """float32 (M, WIDTH); zero past the slice's end and in rows that are not live."""
    j = tl.arange(0, WIDTH)
    d = G * (DIM // GROUPS) + j * PER_BYTE + POSITION
    address = Q + rows.to(tl.int64)[:, None] * q_token + heads[:, None] * q_head + d[None, :] * q_dim
    used = live[:, None] & (j < DIM // (GROUPS * PER_BYTE))[None, :]
    return tl.load(address, mask=used, other=0.0).to(tl.float32)


@triton.jit
def _lifted(q, up, SLICE: tl.constexpr, BITS: tl.constexpr, PER_BYTE: tl.constexpr):
    """A query slice as float16, against codes that count plane_gain times too much."""
    return (q * (up * (1.0 / plane_gain(BITS, SLICE % PER_BYTE)))[:, None]).to(tl.float16)


@triton.jit
def _static_slice(
    S, h, G: tl.constexpr, POSITION: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, PER_BYTE: tl.constexpr,
    WIDTH: tl.constexpr, STATIC: tl.constexpr, SCALE: tl.constexpr,
):
    """Static scales or zeros of a slice, float32 (WIDTH,)."""
    j = tl.arange(0, WIDTH)
    inside = j < DIM // (GROUPS * PER_BYTE)
    if STATIC == 1:
        return load_scale(S + j * 0, inside, SCALE)
    elif STATIC == 2:
        return load_scale(S + j * 0 + h, inside, SCALE)
    else:
        return load_scale(S + h * DIM + G * (DIM // GROUPS) + j * PER_BYTE + POSITION, inside, SCALE)


@triton.jit
def _spread(
    S, base, offset, POSITION: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PER_BYTE: tl.constexpr,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr,
):
    """Stored scales or zeros of tokens, for the codes at one position of each of ``WIDTH`` bytes: float32 (T, WIDTH).

    Each is loaded once and repeated in registers, where its codes allow; an address for each code costs a load each.
    """
    T: tl.constexpr = offset.shape[0]
    if GROUPS == 1:
        where = base * PAGE + offset
        return tl.broadcast_to(load_scale(S + where, where >= 0, SCALE)[:, None], (T, WIDTH))
    elif GROUPS < 0:
        # The tokens that share a scale are in one page, and begin at a multiple of their number.
        BLOCKS: tl.constexpr = T // -GROUPS if T > -GROUPS else 1
        channel = tl.minimum(tl.arange(0, WIDTH) * PER_BYTE + POSITION, DIM - 1)
        first = tl.max(tl.reshape(base, (BLOCKS, T // BLOCKS)), 1)
        block = tl.max(tl.reshape(offset // -GROUPS, (BLOCKS, T // BLOCKS)), 1)
        where = (first[:, None] * DIM + channel[None, :]) * (PAGE // -GROUPS) + block[:, None]
        scales = load_scale(S + where, where >= 0, SCALE)
        return tl.reshape(tl.broadcast_to(scales[:, None, :], (BLOCKS, T // BLOCKS, WIDTH)), (T, WIDTH))
    else:
        BYTES: tl.constexpr = DIM // (GROUPS * PER_BYTE)
        if triton.next_power_of_2(BYTES) == BYTES:
            group = tl.minimum(tl.arange(0, WIDTH // BYTES), GROUPS - 1)
            where = (base[:, None] * GROUPS + group[None, :]) * PAGE + offset[:, None]
            scales = load_scale(S + where, where >= 0, SCALE)
            return tl.reshape(tl.broadcast_to(scales[:, :, None], (T, WIDTH // BYTES, BYTES)), (T, WIDTH))
        else:
            group = tl.minimum(tl.arange(0, WIDTH) // BYTES, GROUPS - 1)
            where = (base[:, None] * GROUPS + group[None, :]) * PAGE + offset[:, None]
            return load_scale(S + where, where >= 0, SCALE)


@triton.jit
def exact_codes(
    stored, S, Z, STATIC_S, STATIC_Z, base, offset, h, POSITION: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, PER_BYTE: tl.constexpr, QUANTIZED: tl.constexpr, SYMMETRIC: tl.constexpr,
    GROUPS: tl.constexpr, STATIC: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, INTERP: tl.constexpr,
):
    """Decode stored (T, WIDTH) at one position of each byte to float32."""
    if not QUANTIZED:
        x = stored.to(tl.float32)
    else:
        x = decode_code(stored, POSITION, BITS, SYMMETRIC, INTERP)
        if STATIC > 0:
            x = x * _static_slice(STATIC_S, h, 0, POSITION, DIM, 1, PER_BYTE, WIDTH, STATIC, SCALE)[None, :]
            if not SYMMETRIC:
                x = x + _static_slice(STATIC_Z, h, 0, POSITION, DIM, 1, PER_BYTE, WIDTH, STATIC, SCALE)[None, :]
        else:
            x = x * _spread(S, base, offset, POSITION, DIM, PAGE, PER_BYTE, GROUPS, SCALE, WIDTH)
            if not SYMMETRIC:
                x = x + _spread(Z, base, offset, POSITION, DIM, PAGE, PER_BYTE, GROUPS, SCALE, WIDTH)
    return x


@triton.jit
def centre(scale, zero, BITS: tl.constexpr, INTERP: tl.constexpr):
    """V's codes counted from the one nearest to the value 0: what to add to :func:`decode_half`'s as float16, and the
    value there, the rest of the zero.

    scale * code + zero may cancel, to exactly 0 in a channel that is 0 throughout. Counted so, no code outweighs its
    value and no rest is larger, so that either may be weighted by itself; and what is 0 is 0 in both.
    """
    ranged = scale > 0.0
    nearest = tl.minimum(tl.maximum(-zero * reciprocal(tl.where(ranged, scale, 1.0), INTERP), -1024.0), 1024.0)
    nearest = tl.where(ranged, (nearest + ROUNDER) - ROUNDER, 0.0)
    return (2.0 ** (BITS - 1) - nearest).to(tl.float16), scale * nearest + zero


@triton.jit
def _weigh_special(weights, value, acc, seen, IEEE: tl.constexpr, INTERP: tl.constexpr):
    """acc + weights @ value, where NaN and infinities of ``value`` reach the rows that see them and no others."""
    wide = value.to(tl.float32)
    finite = is_finite(wide)
    acc = dot_add(weights, tl.where(finite, wide, 0.0).to(value.dtype), acc, IEEE, INTERP)
    # One product counts all three kinds: a tile has fewer than 256 tokens, and bf16 holds powers of two.
    kind = tl.where(wide != wide, 1.0, tl.where(wide > 0.0, 256.0, 65536.0))
    kind = tl.where(finite, 0.0, kind)
    visible = tl.where(seen, 1.0, 0.0)
    if not INTERP:
        visible = visible.to(tl.bfloat16)
        kind = kind.to(tl.bfloat16)
    count = dot(visible, kind, False, INTERP).to(tl.int32)
    nans = (count & 255) > 0
    ups = ((count >> 8) & 255) > 0
    downs = (count >> 16) > 0
    special = tl.where(nans, float("nan"), tl.where(ups, INFINITY, 0.0)) + tl.where(downs, NEGATIVE_INFINITY, 0.0)
    return acc + tl.where(count > 0, special, 0.0)


@triton.jit
def _weigh_floats(weights, value, acc, seen, PARTLY: tl.constexpr, IEEE: tl.constexpr, INTERP: tl.constexpr):
    """acc + weights @ value for value (T, WIDTH) of a float dtype.

    In a tile that some rows see only in part (``PARTLY``), NaN and infinities must reach only the rows that see them:
    they are left out of the product and added where a count over the visible tokens finds them.
    """
    if PARTLY:
        if IEEE:
            # Slow anyway; and a value that is merely widened, inside a branch, trips a layout pass of triton 3.6.
            return _weigh_special(weights, value, acc, seen, IEEE, INTERP)
        else:
            # Of most tiles nothing has to be left out, and they cost no more than whole ones.
            if tl.min(tl.min(is_finite(value.to(tl.float32)).to(tl.int32), 1), 0) > 0:
                acc = dot_add(weights, value, acc, IEEE, INTERP)
            else:
                acc = _weigh_special(weights, value, acc, seen, IEEE, INTERP)
            return acc
    else:
        return dot_add(weights, value, acc, IEEE, INTERP)


@triton.jit
def _largest_scale(
    S, table, h, heads, begin, end, PAGE: tl.constexpr, GROUPS: tl.constexpr, SCALE: tl.constexpr,
    INTERP: tl.constexpr,
):
    """The largest scale of the tokens begin .. end-1 (NaN left out), at least SMALLEST_TOP."""
    BLOCK: tl.constexpr = 256 if INTERP else 1024
    i = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(begin, end, BLOCK, num_stages=3):
        token = first + i
        page = tl.load(table + token // PAGE, mask=token < end, other=0)
        base = page.to(tl.int64) * heads + h
        for g in tl.static_range(GROUPS):
            where = (base * GROUPS + g) * PAGE + token % PAGE
            largest = _larger(largest, load_scale(S + where, token < end, SCALE), INTERP)
    return tl.maximum(tl.max(largest, 0), SMALLEST_TOP)


@triton.jit
def _tile(
    t, top, m, l, a0, a1, a2, a3, z0, z1, z2, z3, q0, q1, q2, q3, b0, b1, b2, b3, c0, c1, c2, c3,
    row_constant, y0, y1, y2, y3, rs, softcap, reference,
    K, KS, KZ, K_STATIC_S, K_STATIC_Z, V, VS, VZ, V_STATIC_S, V_STATIC_Z, TABLE, table_columns, h, heads,
    start, end, first, last,
    MODE: tl.constexpr, WHOLE: tl.constexpr, PARTLY: tl.constexpr, SOFTCAP: tl.constexpr, T: tl.constexpr,
    M: tl.constexpr, PAGE: tl.constexpr, INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_QUANTIZED: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_PER_BYTE: tl.constexpr, V_QUANTIZED: tl.constexpr,
    V_SYMMETRIC: tl.constexpr, V_GROUPS: tl.constexpr, V_STATIC: tl.constexpr, V_SCALE: tl.constexpr,
    GAIN: tl.constexpr, COARSE: tl.constexpr, SCANNED: tl.constexpr,
):
    """One tile of ``T`` stored tokens.

    Every row sees all of a ``WHOLE`` tile. Otherwise rows see start <= j < end, and where ``PARTLY`` row r only
    first[r] < j <= last[r] of that.
    """
    i = tl.arange(0, T)
    if T >= PAGE:
        column = t * (T // PAGE) + i // PAGE
        offset = i % PAGE
    else:
        column = t // (PAGE // T) + i * 0
        offset = (t % (PAGE // T)) * T + i
    page = tl.load(TABLE + column, mask=column < table_columns, other=0)
    base = page.to(tl.int64) * heads + h
    position = t * T + i
    stored = (position >= start) & (position < end)
    seen = stored[None, :]
    if PARTLY and not WHOLE:
        seen = seen & (position[None, :] > first[:, None]) & (position[None, :] <= last[:, None])

    # In whole tiles of symmetric codes the scales, relative to the run's largest, multiply K and V as they become
    # float16: fewer operations than on the scores, of which a tile of many rows has more. K only for bf16 queries: a
    # rounded scale and a rounded product cost 2**-11, all that the bound allows float16 queries.
    # Nor float codes, whose small ones would become subnormal.
    SCALED_K: tl.constexpr = SCANNED and WHOLE and K_SYMMETRIC and COARSE and K_BITS <= 8
    SCALED_V: tl.constexpr = SCANNED and WHOLE and V_SYMMETRIC and V_BITS <= 8
    if SCALED_K:
        per_reference = 1.0 / reference
        rs = rs * (reference * code_unit(K_BITS))

    # Scores, up to the positive row factor rs.
    K_SLICED: tl.constexpr = K_GROUPS if MODE == CODES else 1
    K_USED: tl.constexpr = K_DIM // (K_SLICED * K_PER_BYTE)
    K_WIDTH: tl.constexpr = triton.next_power_of_2(K_USED) if K_USED > 16 else 16
    K_BYTES: tl.constexpr = K_DIM // K_PER_BYTE
    jk = tl.arange(0, K_WIDTH)
    krow = (base * PAGE + offset) * K_BYTES
    for g in tl.static_range(K_SLICED):
        address = K + krow[:, None] + (g * K_USED + jk)[None, :]
        if K_USED == K_WIDTH:
            code = tl.load(address)
        else:
            code = tl.load(address, mask=(jk < K_USED)[None, :], other=0)
        if SCALED_K:
            where = (base * K_GROUPS + g) * PAGE + offset
            ks = load_scale(KS + where, where >= 0, K_SCALE) * per_reference
            for p in tl.static_range(K_PER_BYTE):
                key = decode_half(code, p, K_BITS, INTERP) * (ks * plane_gain(K_BITS, p)).to(tl.float16)[:, None]
                if g == 0 and p == 0:
                    x = dot(q0, tl.trans(key), False, INTERP)
                else:
                    x = dot_add(pick(g * K_PER_BYTE + p, q0, q1, q2, q3), tl.trans(key), x, False, INTERP)
        elif MODE == CODES:
            # The offset of subnormal codes is in the accumulator before the product begins.
            product = tl.zeros([M, T], tl.float32) + pick(g, b0, b1, b2, b3)[:, None]
            for p in tl.static_range(K_PER_BYTE):
                product = dot_add(pick(g * K_PER_BYTE + p, q0, q1, q2, q3),
                                  tl.trans(decode_subnormal(code, p, K_BITS, INTERP)), product, False,
                                  INTERP)
            if K_STATIC == 0:
                where = (base * K_GROUPS + g) * PAGE + offset
                ks = _kept(load_scale(KS + where, where >= 0, K_SCALE), stored, WHOLE)
                product = product * ks[None, :]
                if not K_SYMMETRIC:
                    kz = _kept(load_scale(KZ + where, where >= 0, K_SCALE), stored, WHOLE)
                    kz = kz + ks * 2.0 ** (K_BITS - 1)
                    product = product + pick(g, c0, c1, c2, c3)[:, None] * kz[None, :]
            if g == 0:
                x = product
            else:
                x = x + product
        elif MODE == NATIVE:
            x = dot(q0, tl.trans(code), False, INTERP)
        else:
            for p in tl.static_range(K_PER_BYTE):
                key = exact_codes(code, KS, KZ, K_STATIC_S, K_STATIC_Z, base, offset, h, p, K_DIM, PAGE, K_BITS,
                                  K_PER_BYTE, K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE, K_WIDTH, INTERP)
                if MODE == ROUNDED:
                    key = round_bf16(key, INTERP)
                if p == 0:
                    x = dot(q0, tl.trans(key), MODE == EXACT, INTERP)
                else:
                    x = dot_add(pick(p, q0, q1, q2, q3), tl.trans(key), x, MODE == EXACT, INTERP)
    if MODE == CODES and K_STATIC > 0 and not K_SYMMETRIC:
        x = x + row_constant[:, None]
    if SOFTCAP:
        x = tanh(x * (rs / (softcap * LOG2_E))[:, None]) * (softcap * LOG2_E)
        rate = tl.full([M], 1.0, tl.float32)
    else:
        rate = rs
    if not WHOLE:
        x = tl.where(seen, x, NEGATIVE_INFINITY)

    new = tl.maximum(m, tl.max(x, 1) * rate)
    finite = tl.where(new == NEGATIVE_INFINITY, 0.0, new)  # a row that has seen nothing keeps weights 0
    shrink = tl.exp2(m - finite)
    weights = tl.exp2(fused(x, rate[:, None], (GAIN - finite)[:, None], INTERP))
    l = l * shrink + tl.sum(weights, 1)

    V_SLICED: tl.constexpr = V_GROUPS if MODE == CODES else 1
    V_USED: tl.constexpr = V_DIM // (V_SLICED * V_PER_BYTE)
    V_WIDTH: tl.constexpr = triton.next_power_of_2(V_USED) if V_USED > 16 else 16
    V_BYTES: tl.constexpr = V_DIM // V_PER_BYTE
    jv = tl.arange(0, V_WIDTH)
    if SCALED_V:
        inverse = 1.0 / top  # the scan has found it
        rescale = shrink
    elif MODE == CODES and V_STATIC == 0:
        peak = tl.zeros([T], tl.float32)
        for g in tl.static_range(V_GROUPS):
            where = (base * V_GROUPS + g) * PAGE + offset
            vs = _kept(load_scale(VS + where, where >= 0, V_SCALE), stored, WHOLE)
            peak = _larger(peak, vs, INTERP)
        higher = tl.maximum(top, tl.max(peak, 0))
        inverse = 1.0 / higher
        rescale = shrink * (top * inverse)
        top = higher
    else:
        rescale = shrink
    for g in tl.static_range(V_SLICED):
        if MODE == CODES or (MODE >= EXACT and V_QUANTIZED):
            address = V + base[None, :] * (V_BYTES * PAGE) + (g * V_USED + jv)[:, None] * PAGE + offset[None, :]
            if V_USED == V_WIDTH:
                code = tl.load(address)
            else:
                code = tl.load(address, mask=(jv < V_USED)[:, None], other=0)
        else:
            address = V + ((base * PAGE + offset) * V_DIM)[:, None] + jv[None, :]
            if WHOLE and V_USED == V_WIDTH:
                code = tl.load(address)
            elif WHOLE:
                code = tl.load(address, mask=(jv < V_USED)[None, :], other=0.0)
            else:
                code = tl.load(address, mask=(jv < V_USED)[None, :] & stored[:, None], other=0.0)
        if MODE == CODES:
            if V_STATIC == 0:
                where = (base * V_GROUPS + g) * PAGE + offset
                vs = _kept(load_scale(VS + where, where >= 0, V_SCALE), stored, WHOLE)
                if SCALED_V:
                    w16 = weights.to(tl.float16)
                    v16 = (vs * inverse).to(tl.float16)
                else:
                    w = weights * (vs * inverse)[None, :]
                    if PARTLY and not WHOLE:
                        w = tl.where(seen, w, 0.0)  # a NaN scale reaches only the rows that see its token
                    w16 = w.to(tl.float16)
                if not V_SYMMETRIC:
                    move, rest = centre(vs, _kept(load_scale(VZ + where, where >= 0, V_SCALE), stored, WHOLE), V_BITS,
                                        INTERP)
                    shift = weights * rest[None, :]
                    if PARTLY and not WHOLE:
                        shift = tl.where(seen, shift, 0.0)
                    z = pick(g, z0, z1, z2, z3) * shrink + tl.sum(shift, 1)
                    if g == 0:
                        z0 = z
                    elif g == 1:
                        z1 = z
                    elif g == 2:
                        z2 = z
                    else:
                        z3 = z
            else:
                w16 = weights.to(tl.float16)
            for p in tl.static_range(V_PER_BYTE):
                value = decode_half(code, p, V_BITS, INTERP)
                if not V_SYMMETRIC:
                    if V_STATIC > 0:
                        value = value + pick(p, y0, y1, y2, y3)[:, None]
                    else:
                        value = value + move[None, :]
                if SCALED_V:
                    value = value * v16[None, :]
                if V_BITS > 8 and not WHOLE:
                    # Float codes may be NaN, in unwritten bytes too.
                    value = tl.where(stored[None, :], value, 0.0)
                    a = _weigh_floats(w16, tl.trans(value), pick(g, a0, a1, a2, a3) * rescale[:, None], seen,
                                      PARTLY, False, INTERP)
                else:
                    a = dot_add(w16, tl.trans(value), pick(g * V_PER_BYTE + p, a0, a1, a2, a3) * rescale[:, None],
                                False, INTERP)
                if g * V_PER_BYTE + p == 0:
                    a0 = a
                elif g * V_PER_BYTE + p == 1:
                    a1 = a
                elif g * V_PER_BYTE + p == 2:
                    a2 = a
                else:
                    a3 = a
        elif MODE == NATIVE:
            w = weights if INTERP else weights.to(code.dtype)  # the interpreter would truncate to bf16
            a0 = _weigh_floats(w, code, a0 * rescale[:, None], seen, PARTLY and not WHOLE, False, INTERP)
        else:
            for p in tl.static_range(V_PER_BYTE):
                if V_QUANTIZED:
                    value = exact_codes(tl.trans(code), VS, VZ, V_STATIC_S, V_STATIC_Z, base, offset, h, p, V_DIM, PAGE,
                                        V_BITS, V_PER_BYTE, True, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE, V_WIDTH,
                                        INTERP)
                    if not WHOLE:
                        value = tl.where(stored[:, None], value, 0.0)
                else:
                    value = code.to(tl.float32)
                if MODE == ROUNDED:
                    w = round_bf16(weights, INTERP)
                    value = round_bf16(value, INTERP)
                else:
                    w = weights
                a = _weigh_floats(w, value, pick(p, a0, a1, a2, a3) * rescale[:, None], seen,
                                  PARTLY and not WHOLE, MODE == EXACT, INTERP)
                if p == 0:
                    a0 = a
                elif p == 1:
                    a1 = a
                elif p == 2:
                    a2 = a
                else:
                    a3 = a
    return top, new, l, a0, a1, a2, a3, z0, z1, z2, z3


@triton.jit
def _with_sink(lse, sink):
    """Base-2 LSE with one more logit, and the factor for what was normalized without it; -inf stays -inf."""
    high = tl.maximum(lse, sink)
    total = high + tl.log2(tl.exp2(lse - high) + tl.exp2(sink - high))
    total = tl.where(lse == NEGATIVE_INFINITY, lse, total)
    return total, tl.where(lse == NEGATIVE_INFINITY, 0.0, tl.exp2(lse - total))


@triton.jit(do_not_specialize=["table_columns", "query_heads", "heads", "group", "row_count", "sinks", "window"])
def attend_kernel(
    Q, q_token, q_head, q_dim,
    K, KS, KZ, K_STATIC_S, K_STATIC_Z, V, VS, VZ, V_STATIC_S, V_STATIC_Z,
    TABLE, table_columns, ITEMS, OUT, LSE, PART_OUT, PART_LSE, SINKS, sinks, query_heads, heads, group,
    row_count, window, scale, softcap,
    MODE: tl.constexpr, MASK_ROWS: tl.constexpr, CONTINUES: tl.constexpr, SOFTCAP: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_QUANTIZED: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_PER_BYTE: tl.constexpr, V_QUANTIZED: tl.constexpr,
    V_SYMMETRIC: tl.constexpr, V_GROUPS: tl.constexpr, V_STATIC: tl.constexpr, V_SCALE: tl.constexpr,
):
    """Grid: (items * KV heads,), heads fastest. ``M`` >= ``row_count`` = query tokens of a tile * ``group`` heads.

    ``window`` is in tokens, WIDEST where there is none. What costs nothing at run time is no constant: fewer kernels to
    compile.
    """
    h = tl.program_id(0) % heads
    item = ITEMS + (tl.program_id(0) // heads) * ITEM_FIELDS
    sequence = tl.load(item)
    row = tl.load(item + 1)
    tokens = tl.load(item + 2)
    if INTERP:  # an item without query tokens is a graph's padding; a GPU lets it run, with nothing to load or store
        if tokens == 0:
            return
    query_position = tl.load(item + 3)
    start = tl.load(item + 4)
    end = tl.load(item + 5)
    tile_first = tl.load(item + 6)
    tile_end = tl.load(item + 7)
    splits = tl.load(item + 8)
    part = tl.load(item + 9)

    r = tl.arange(0, M)
    token = r // group
    live = (token < tokens) & (r < row_count)
    rows = row + tl.where(live, token, 0)
    q_heads = h * group + r % group
    last = query_position + token
    first = last - window

    # The query: sign of the scale folded in; in CODES mode scaled per row by a power of two into float16's range.
    K_SLICED: tl.constexpr = K_GROUPS if MODE == CODES else 1
    K_USED: tl.constexpr = K_DIM // (K_SLICED * K_PER_BYTE)
    K_WIDTH: tl.constexpr = triton.next_power_of_2(K_USED) if K_USED > 16 else 16
    K_SLICES: tl.constexpr = K_SLICED * K_PER_BYTE
    sign = tl.where(scale > 0.0, 1.0, tl.where(scale < 0.0, -1.0, 0.0))
    rs = tl.zeros([M], tl.float32) + tl.where(scale == 0.0, LOG2_E, tl.abs(scale) * LOG2_E)
    row_constant = tl.zeros([M], tl.float32)
    c0 = row_constant
    c1 = row_constant
    c2 = row_constant
    c3 = row_constant
    b0 = row_constant
    b1 = row_constant
    b2 = row_constant
    b3 = row_constant
    if MODE == NATIVE:
        # scale's sign and zero go into rs instead: multiplying a native query would be exact too, but costs a pass.
        q0 = _query_slice(Q, rows, q_heads, live, q_token, q_head, q_dim, 0, 0, K_DIM, 1, 1, K_WIDTH)
        q0 = (q0 * sign).to(Q.dtype.element_ty)
        q1 = q0
        q2 = q0
        q3 = q0
    else:
        for n in tl.static_range(K_SLICES):
            q = sign * _query_slice(Q, rows, q_heads, live, q_token, q_head, q_dim, n // K_PER_BYTE, n % K_PER_BYTE,
                                    K_DIM, K_SLICED, K_PER_BYTE, K_WIDTH)
            if MODE == CODES and K_STATIC > 0:
                # Static formats have one group: slice n is position n.
                q = q * _static_slice(K_STATIC_S, h, 0, n, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE)[None, :]
            if MODE == CODES and K_STATIC == 0 and not K_SYMMETRIC:
                total = tl.sum(q, 1)
                if n // K_PER_BYTE == 0:
                    c0 += total
                elif n // K_PER_BYTE == 1:
                    c1 += total
                elif n // K_PER_BYTE == 2:
                    c2 += total
                else:
                    c3 += total
            if n == 0:
                q0 = q
                largest = tl.max(tl.abs(q), 1)
            else:
                largest = tl.maximum(largest, tl.max(tl.abs(q), 1))
            if n == 1:
                q1 = q
            elif n == 2:
                q2 = q
            elif n == 3:
                q3 = q
        if K_SLICES < 2:
            q1 = q0
        if K_SLICES < 3:
            q2 = q0
        if K_SLICES < 4:
            q3 = q0
        if MODE == ROUNDED:
            # bfloat16 queries, so that nothing is rounded.
            q0 = round_bf16(q0, INTERP)
            q1 = round_bf16(q1, INTERP)
            q2 = round_bf16(q2, INTERP)
            q3 = round_bf16(q3, INTERP)
        if MODE == CODES:
            # 2**(14 - floor(log2 largest)) by exponent bits, within the normal numbers; 1 for zero, inf and NaN rows.
            exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
            exponent = tl.where((exponent == 0) | (exponent == 255), 141, exponent)
            exponent = tl.minimum(tl.maximum(exponent, 16), 253)
            lift = tl.minimum(268 - exponent, 252)
            up = (lift << 23).to(tl.float32, bitcast=True)
            down = ((254 - lift) << 23).to(tl.float32, bitcast=True)
            rs = rs * (down / code_unit(K_BITS))
            up_codes = up * code_unit(K_BITS)  # scores count in units of the codes
            c0 = c0 * up_codes
            c1 = c1 * up_codes
            c2 = c2 * up_codes
            c3 = c3 * up_codes
            q0 = _lifted(q0, up, 0, K_BITS, K_PER_BYTE)
            q1 = _lifted(q1, up, 1, K_BITS, K_PER_BYTE)
            q2 = _lifted(q2, up, 2, K_BITS, K_PER_BYTE)
            q3 = _lifted(q3, up, 3, K_BITS, K_PER_BYTE)
            if not INTERP and K_BITS <= 8:
                for n in tl.static_range(K_SLICES):
                    gain = plane_gain(K_BITS, n % K_PER_BYTE) * code_unit(K_BITS) * 2.0 ** (K_BITS - 1)
                    offset = -gain * tl.sum(pick(n, q0, q1, q2, q3).to(tl.float32), 1)
                    if n // K_PER_BYTE == 0:
                        b0 += offset
                    elif n // K_PER_BYTE == 1:
                        b1 += offset
                    elif n // K_PER_BYTE == 2:
                        b2 += offset
                    else:
                        b3 += offset
            if K_STATIC > 0 and not K_SYMMETRIC:
                # k = scale * code + zero may cancel: the zero part takes the rounded query, as the code part does.
                for n in tl.static_range(K_SLICES):
                    scales = _static_slice(K_STATIC_S, h, 0, n, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE)
                    zeros = _static_slice(K_STATIC_Z, h, 0, n, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE)
                    zeros = zeros + scales * 2.0 ** (K_BITS - 1)
                    ratio = zeros / tl.where(scales > 0.0, scales, 1.0)
                    ratio = ratio * (plane_gain(K_BITS, n) * code_unit(K_BITS))
                    row_constant += tl.sum(pick(n, q0, q1, q2, q3).to(tl.float32) * ratio[None, :], 1)

    V_SLICED: tl.constexpr = V_GROUPS if MODE == CODES else 1
    V_USED: tl.constexpr = V_DIM // (V_SLICED * V_PER_BYTE)
    V_WIDTH: tl.constexpr = triton.next_power_of_2(V_USED) if V_USED > 16 else 16
    V_SLICES: tl.constexpr = V_SLICED * V_PER_BYTE
    # Weights are float16 unless K and V are float32 or bfloat16.
    GAIN: tl.constexpr = 0.0 if MODE >= EXACT or (MODE == NATIVE and Q.dtype.element_ty != tl.float16) else 15.0
    COARSE: tl.constexpr = Q.dtype.element_ty == tl.bfloat16
    # Tiles of many rows repay a pass over the scales alone, a thirtieth of the bytes.
    SCANNED: tl.constexpr = MODE == CODES and K_STATIC == 0 and V_STATIC == 0 and M >= 64
    m = tl.full([M], NEGATIVE_INFINITY, tl.float32)  # running maximum of base-2 scores
    l = tl.zeros([M], tl.float32)
    top = SMALLEST_TOP + tl.sum(l, 0)
    unused = tl.zeros([M], tl.float32)
    a0 = tl.zeros([M, V_WIDTH], tl.float32)
    a1 = unused
    a2 = unused
    a3 = unused
    if V_SLICES > 1:
        a1 = tl.zeros([M, V_WIDTH], tl.float32)
    if V_SLICES > 2:
        a2 = tl.zeros([M, V_WIDTH], tl.float32)
    if V_SLICES > 3:
        a3 = tl.zeros([M, V_WIDTH], tl.float32)
    z0 = unused
    z1 = unused
    z2 = unused
    z3 = unused

    y0 = unused
    y1 = unused
    y2 = unused
    y3 = unused
    if MODE == CODES and V_STATIC > 0 and not V_SYMMETRIC:
        for n in tl.static_range(V_SLICES):
            move, _ = centre(
                _static_slice(V_STATIC_S, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE),
                _static_slice(V_STATIC_Z, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE),
                V_BITS, INTERP,
            )
            if n == 0:
                y0 = move
            elif n == 1:
                y1 = move
            elif n == 2:
                y2 = move
            else:
                y3 = move

    table = TABLE + sequence.to(tl.int64) * table_columns
    # Tiles that every row sees whole, without any masking; then those at the ends, before and after them.
    lowest = tl.maximum(start, query_position + tokens - window)
    whole_first = tl.minimum(tl.maximum((lowest + T - 1) // T, tile_first), tile_end)
    whole_end = tl.minimum(tl.maximum(tl.minimum(query_position + 1, end) // T, whole_first), tile_end)
    reference = SMALLEST_TOP
    if SCANNED:
        if K_SYMMETRIC and COARSE:
            reference = _largest_scale(KS, table, h, heads, whole_first * T, whole_end * T, PAGE, K_GROUPS, K_SCALE,
                                       INTERP)
        if V_SYMMETRIC:
            top = _largest_scale(VS, table, h, heads, whole_first * T, whole_end * T, PAGE, V_GROUPS, V_SCALE, INTERP)
    for t in tl.range(whole_first, whole_end, num_stages=STAGES):
        top, m, l, a0, a1, a2, a3, z0, z1, z2, z3 = _tile(
            t, top, m, l, a0, a1, a2, a3, z0, z1, z2, z3, q0, q1, q2, q3, b0, b1, b2, b3, c0, c1, c2, c3,
            row_constant, y0, y1, y2, y3, rs, softcap, reference,
            K, KS, KZ, K_STATIC_S, K_STATIC_Z, V, VS, VZ, V_STATIC_S, V_STATIC_Z, table, table_columns, h, heads,
            start, end, first, last, MODE, True, MASK_ROWS, SOFTCAP, T, M, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            V_DIM, V_BITS, V_PER_BYTE, V_QUANTIZED, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE, GAIN, COARSE, SCANNED,
        )
    before = whole_first - tile_first
    for n in tl.range(0, before + tile_end - whole_end, num_stages=1):
        t = tl.where(n < before, tile_first + n, whole_end + n - before)
        top, m, l, a0, a1, a2, a3, z0, z1, z2, z3 = _tile(
            t, top, m, l, a0, a1, a2, a3, z0, z1, z2, z3, q0, q1, q2, q3, b0, b1, b2, b3, c0, c1, c2, c3,
            row_constant, y0, y1, y2, y3, rs, softcap, reference,
            K, KS, KZ, K_STATIC_S, K_STATIC_Z, V, VS, VZ, V_STATIC_S, V_STATIC_Z, table, table_columns, h, heads,
            start, end, first, last, MODE, False, MASK_ROWS, SOFTCAP, T, M, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            V_DIM, V_BITS, V_PER_BYTE, V_QUANTIZED, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE, GAIN, COARSE, SCANNED,
        )

    empty = l == 0.0
    lse = tl.where(empty, NEGATIVE_INFINITY, m + tl.log2(tl.where(empty, 1.0, l)) - GAIN)
    per_weight = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))
    factor = per_weight
    if MODE == CODES and V_STATIC == 0:
        factor = per_weight * top
    row_out = rows.to(tl.int64) * query_heads + q_heads
    row_part = (part.to(tl.int64) * heads + h) * row_count + r
    whole = splits == 1
    if CONTINUES:
        # One of several launches over the same rows: 2 begins the running result, 3 and 4 merge with it, 4 ends it.
        whole = whole | (splits == 4)
        begun = live & (splits + r * 0 >= 3)
        old = tl.load(PART_LSE + row_part, mask=begun, other=NEGATIVE_INFINITY)
        high = tl.maximum(lse, old)
        high = tl.where(high == NEGATIVE_INFINITY, 0.0, high)
        both = high + tl.log2(tl.exp2(lse - high) + tl.exp2(old - high))
        safe = tl.where(both == NEGATIVE_INFINITY, 0.0, both)
        mine = tl.exp2(lse - safe)
        theirs = tl.exp2(old - safe)
        lse = both
    last_part = live & (tl.where(whole, 1, 0) + r * 0 == 1) & (sinks + r * 0 != 0)
    sink = tl.load(SINKS + q_heads, mask=last_part, other=NEGATIVE_INFINITY).to(tl.float32) * LOG2_E
    lse, shift = _with_sink(lse, sink)  # a sink of -inf, as partials get, changes nothing
    if whole:
        tl.store(LSE + row_out, lse * LN_2, mask=live)
    else:
        tl.store(PART_LSE + row_part, lse, mask=live)
    jv = tl.arange(0, V_WIDTH)
    for n in tl.static_range(V_SLICES):
        e = (n // V_PER_BYTE) * (V_DIM // V_SLICED) + jv * V_PER_BYTE + n % V_PER_BYTE
        value = pick(n, a0, a1, a2, a3) * factor[:, None]
        if MODE == CODES:
            if V_STATIC > 0:
                scales = _static_slice(V_STATIC_S, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE)
                value = value * scales[None, :]
                if not V_SYMMETRIC:
                    zeros = _static_slice(V_STATIC_Z, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE)
                    _, rest = centre(scales, zeros, V_BITS, INTERP)
                    value = value + rest[None, :]
            elif not V_SYMMETRIC:
                value = value + (pick(n // V_PER_BYTE, z0, z1, z2, z3) * per_weight)[:, None]
        value = tl.where(empty[:, None], 0.0, value)
        inside = live[:, None] & (jv < V_USED)[None, :]
        if CONTINUES:
            kept = tl.load(PART_OUT + row_part[:, None] * V_DIM + e[None, :], mask=inside & begun[:, None], other=0.0)
            value = value * mine[:, None] + kept * theirs[:, None]
        value = value * shift[:, None]
        if whole:
            tl.store(OUT + row_out[:, None] * V_DIM + e[None, :], value.to(OUT.dtype.element_ty), mask=inside)
        else:
            tl.store(PART_OUT + row_part[:, None] * V_DIM + e[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["sinks", "heads", "query_heads", "group", "row_count"])
def merge_kernel(
    BLOCKS, PART_OUT, PART_LSE, OUT, LSE, SINKS, sinks, heads, query_heads, group, row_count,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr,
):
    """Merge the partials of one row by their LSE. Grid: (blocks, KV heads, rows of a block * channel blocks).

    A block is (first packed query row, tokens, first partial, splits); ``SPLITS`` partials are read at a time.
    """
    PARTS: tl.constexpr = (DIM + CHANNELS - 1) // CHANNELS
    block = BLOCKS + tl.program_id(0) * BLOCK_FIELDS
    r = tl.program_id(2) // PARTS
    h = tl.program_id(1)
    if r // group < tl.load(block + 1):
        row = tl.load(block) + r // group
        part = tl.load(block + 2).to(tl.int64)
        splits = tl.load(block + 3)
        e = (tl.program_id(2) % PARTS) * CHANNELS + tl.arange(0, CHANNELS)
        i = tl.arange(0, SPLITS)
        total = 0.0 + tl.sum(tl.zeros([SPLITS], tl.float32), 0)
        high = NEGATIVE_INFINITY + total
        out = tl.zeros([CHANNELS], tl.float32)
        for s in range(0, splits, SPLITS):
            inside = s + i < splits
            address = ((part + s + i) * heads + h) * row_count + r
            lse = tl.load(PART_LSE + address, mask=inside, other=NEGATIVE_INFINITY)
            value = tl.load(
                PART_OUT + address[:, None] * DIM + e[None, :], mask=inside[:, None] & (e < DIM)[None, :], other=0.0
            )
            new = tl.maximum(high, tl.max(lse, 0))
            finite = tl.where(new == NEGATIVE_INFINITY, 0.0, new)
            weight = tl.exp2(lse - finite)
            shrink = tl.exp2(high - finite)
            total = total * shrink + tl.sum(weight, 0)
            # Partials of weight 0 hold zeros, never garbage, so the product cannot spread anything.
            out = out * shrink + tl.sum(weight[:, None] * value, 0)
            high = new
        empty = total == 0.0
        divisor = tl.where(empty, 1.0, total)
        out = out / divisor
        lse_all = tl.where(empty, NEGATIVE_INFINITY, high + tl.log2(divisor))
        q_head = h * group + r % group
        sink = tl.load(SINKS + q_head, mask=sinks != 0, other=NEGATIVE_INFINITY).to(tl.float32) * LOG2_E
        lse_all, shift = _with_sink(lse_all, sink)
        out = out * shift
        row_out = row.to(tl.int64) * query_heads + q_head
        tl.store(OUT + row_out * DIM + e, out.to(OUT.dtype.element_ty), mask=e < DIM)
        if tl.program_id(2) % PARTS == 0:
            tl.store(LSE + row_out, lse_all * LN_2)
