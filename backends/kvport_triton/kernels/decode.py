# mypy: ignore-errors
# ruff: noqa: N803, N806, E741, SIM102, SIM108
# Triton's language is not typed Python: tensors, constexprs and pointers share one notation, compile-time names are in
# capitals, and what depends on one of them is an if statement, never a conditional expression. Calls keep their
# arguments in lines by meaning (K, V, static, geometry), not one a line.
# fmt: off
"""attend for one query token a sequence over integer codes: the numbers of :mod:`attend`'s CODES mode, transposed.

Tensor cores multiply tiles of 16 rows by 8 columns. With stored tokens (and channels of V) as rows and the query heads
of a group as columns, a group of 4 wastes half of every tile; the other way round it would waste three quarters, in
products, softmax and registers alike. All rows see the same tokens, so that masks are one value a token.
"""

import triton
import triton.language as tl

from kvport_triton.kernels.attend import (
    ITEM_FIELDS,
    NEGATIVE_INFINITY,
    SMALLEST_HALF,
    SMALLEST_TOP,
    _kept,
    _larger,
    _static_slice,
    _with_sink,
)
from kvport_triton.kernels.numerics import (
    LN_2,
    LOG2_E,
    code_unit,
    decode_half,
    decode_subnormal,
    dot_add,
    pick,
    plane_gain,
    read_scale,
    tanh,
)


@triton.jit
def _lifted(q, up, SLICE: tl.constexpr, BITS: tl.constexpr, PER_BYTE: tl.constexpr):
    """A query slice (channels, heads) as float16, against codes that count plane_gain times too much."""
    return (q * (up * (1.0 / plane_gain(BITS, SLICE % PER_BYTE)))[None, :]).to(tl.float16)


@triton.jit
def _decode_tile(
    t, top, m, l, a0, a1, a2, a3, z0, z1, z2, z3, q0, q1, q2, q3, b0, b1, b2, b3, c0, c1, c2, c3,
    row_constant, rs, softcap,
    K, KS, KZ, V, VS, VZ, TABLE, table_columns, heads, start, end,
    WHOLE: tl.constexpr, SOFTCAP: tl.constexpr, T: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_SYMMETRIC: tl.constexpr,
    K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_PER_BYTE: tl.constexpr, V_SYMMETRIC: tl.constexpr,
    V_GROUPS: tl.constexpr, V_STATIC: tl.constexpr, V_SCALE: tl.constexpr,
):
    """One tile of ``T`` stored tokens, all of them seen where ``WHOLE``, else those from start to end.

    K, V and their scales begin at the program's head; a page is ``heads`` times a head's run further.
    """
    i = tl.arange(0, T)
    if T >= PAGE:
        column = t * (T // PAGE) + i // PAGE
        offset = i % PAGE
    else:
        column = t // (PAGE // T) + i * 0
        offset = (t % (PAGE // T)) * T + i
    if WHOLE:
        page = tl.load(TABLE + column)
    else:
        page = tl.load(TABLE + column, mask=column < table_columns, other=0)
    page = page.to(tl.int64)
    stored = (t * T + i >= start) & (t * T + i < end)

    # Scores (tokens, heads), up to the positive factor rs of each head.
    K_USED: tl.constexpr = K_DIM // (K_GROUPS * K_PER_BYTE)
    K_WIDTH: tl.constexpr = triton.next_power_of_2(K_USED)
    jk = tl.arange(0, K_WIDTH)
    krow = page * (heads * (PAGE * (K_DIM // K_PER_BYTE))) + offset * (K_DIM // K_PER_BYTE)
    for g in tl.static_range(K_GROUPS):
        address = K + krow[:, None] + (g * K_USED + jk)[None, :]
        if K_USED == K_WIDTH:
            code = tl.load(address)
        else:
            code = tl.load(address, mask=(jk < K_USED)[None, :], other=0)
        # The offset of subnormal codes is in the accumulator before the product begins.
        product = tl.zeros([T, N], tl.float32) + pick(g, b0, b1, b2, b3)[None, :]
        for p in tl.static_range(K_PER_BYTE):
            product = dot_add(decode_subnormal(code, p, K_BITS, INTERP),
                              pick(g * K_PER_BYTE + p, q0, q1, q2, q3), product, False, INTERP)
        if K_STATIC == 0:
            where = page * (heads * (K_GROUPS * PAGE)) + g * PAGE + offset
            ks = _kept(read_scale(KS + where, K_SCALE), stored, WHOLE)
            product = product * ks[:, None]
            if not K_SYMMETRIC:
                kz = _kept(read_scale(KZ + where, K_SCALE), stored, WHOLE)
                kz = kz + ks * 2.0 ** (K_BITS - 1)
                product = product + pick(g, c0, c1, c2, c3)[None, :] * kz[:, None]
        if g == 0:
            x = product
        else:
            x = x + product
    if K_STATIC > 0 and not K_SYMMETRIC:
        x = x + row_constant[None, :]
    if SOFTCAP:
        x = tanh(x * (rs / (softcap * LOG2_E))[None, :]) * (softcap * LOG2_E)
        rate = tl.full([N], 1.0, tl.float32)
    else:
        rate = rs
    if not WHOLE:
        x = tl.where(stored[:, None], x, NEGATIVE_INFINITY)

    new = tl.maximum(m, tl.max(x, 0))
    finite = tl.where(new == NEGATIVE_INFINITY, 0.0, new)
    shrink = tl.exp2((m - finite) * rate)
    weights = tl.exp2(x * rate[None, :] - (finite * rate - 15.0)[None, :])
    if V_STATIC > 0 and not V_SYMMETRIC:
        l = l * shrink + tl.sum(weights.to(tl.float16).to(tl.float32), 0)
    else:
        l = l * shrink + tl.sum(weights, 0)

    V_USED: tl.constexpr = V_DIM // (V_GROUPS * V_PER_BYTE)
    V_WIDTH: tl.constexpr = triton.next_power_of_2(V_USED)
    jv = tl.arange(0, V_WIDTH)
    if PAGE == 16 and T > PAGE:
        columns = t * (T // PAGE) + tl.arange(0, T // PAGE)
        if WHOLE:
            pages = tl.load(TABLE + columns)
        else:
            pages = tl.load(TABLE + columns, mask=columns < table_columns, other=0)
        page_starts = pages.to(tl.int64) * (heads * (V_DIM // V_PER_BYTE * PAGE))
    if V_STATIC == 0:
        peak = tl.zeros([T], tl.float32)
        for g in tl.static_range(V_GROUPS):
            where = page * (heads * (V_GROUPS * PAGE)) + g * PAGE + offset
            vs = _kept(read_scale(VS + where, V_SCALE), stored, WHOLE)
            peak = _larger(peak, vs, INTERP)
        higher = tl.maximum(top, tl.max(peak, 0))
        inverse = 1.0 / higher
        rescale = shrink * (top * inverse)
        top = higher
    else:
        rescale = shrink
    for g in tl.static_range(V_GROUPS):
        vrow = page * (heads * (V_DIM // V_PER_BYTE * PAGE)) + offset
        address = V + vrow[None, :] + ((g * V_USED + jv) * PAGE)[:, None]
        if PAGE == 16 and T > PAGE and V_USED == V_WIDTH:
            # By the addresses above a warp would take 16 bytes of each of eight pages, and half lines at that. A page
            # of one head is one run of memory: read as such, a warp takes 512 bytes of one page, and the tile lies in
            # shared memory as the tensor cores read it. Longer pages fill their lines by the addresses above.
            run = tl.load(
                V + page_starts[:, None] + (g * V_USED * PAGE + tl.arange(0, V_WIDTH * PAGE))[None, :]
            )
            cube = tl.reshape(run, (T // PAGE, V_WIDTH, PAGE))
            code = tl.reshape(tl.permute(cube, (1, 0, 2)), (V_WIDTH, T))
        elif V_USED == V_WIDTH:
            code = tl.load(address)
        else:
            code = tl.load(address, mask=(jv < V_USED)[:, None], other=0)
        if V_STATIC == 0:
            where = page * (heads * (V_GROUPS * PAGE)) + g * PAGE + offset
            vs = _kept(read_scale(VS + where, V_SCALE), stored, WHOLE)
            w16 = (weights * (vs * inverse)[:, None]).to(tl.float16)
            if not V_SYMMETRIC:
                # As in attend: both parts of scale * code + zero carry the same rounded weight.
                vz = _kept(read_scale(VZ + where, V_SCALE), stored, WHOLE)
                vz = vz + vs * 2.0 ** (V_BITS - 1)
                ratio = tl.where(vs > 0.0, vz / tl.where(vs > 0.0, vs * inverse, 1.0), 0.0)
                wide = w16.to(tl.float32)
                part = tl.where(wide >= SMALLEST_HALF, wide * ratio[:, None], weights * vz[:, None])
                z = pick(g, z0, z1, z2, z3) * shrink + tl.sum(part, 0)
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
            if V_BITS > 8 and not WHOLE:
                value = tl.where(stored[None, :], value, 0.0)  # an unwritten byte may be a NaN
            a = dot_add(value, w16,
                        pick(g * V_PER_BYTE + p, a0, a1, a2, a3) * rescale[None, :], False, INTERP)
            if g * V_PER_BYTE + p == 0:
                a0 = a
            elif g * V_PER_BYTE + p == 1:
                a1 = a
            elif g * V_PER_BYTE + p == 2:
                a2 = a
            else:
                a3 = a
    return top, new, l, a0, a1, a2, a3, z0, z1, z2, z3


@triton.jit(do_not_specialize=["table_columns", "query_heads", "heads", "group", "sinks"])
def decode_kernel(
    Q, q_token, q_head, q_dim,
    K, KS, KZ, K_STATIC_S, K_STATIC_Z, V, VS, VZ, V_STATIC_S, V_STATIC_Z,
    TABLE, table_columns, ITEMS, OUT, LSE, PART_OUT, PART_LSE, SINKS, sinks, query_heads, heads, group, scale,
    softcap,
    SOFTCAP: tl.constexpr, N: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_SYMMETRIC: tl.constexpr,
    K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_PER_BYTE: tl.constexpr, V_SYMMETRIC: tl.constexpr,
    V_GROUPS: tl.constexpr, V_STATIC: tl.constexpr, V_SCALE: tl.constexpr,
):
    """Grid: (items * KV heads,), heads fastest. ``N`` >= 8 and >= ``group`` columns of query heads.

    What costs nothing at run time (heads, group, whether there are sinks) is no constant: fewer kernels to compile.
    """
    h = tl.program_id(0) % heads
    item = ITEMS + (tl.program_id(0) // heads) * ITEM_FIELDS
    sequence = tl.load(item)
    row = tl.load(item + 1)
    tokens = tl.load(item + 2)
    if INTERP:  # an item without query tokens is a graph's padding; a GPU lets it run, with nothing to load or store
        if tokens == 0:
            return
    start = tl.load(item + 4)
    end = tl.load(item + 5)
    tile_first = tl.load(item + 6)
    tile_end = tl.load(item + 7)
    splits = tl.load(item + 8)
    part = tl.load(item + 9)

    r = tl.arange(0, N)
    live = (r < group) & (r * 0 + tokens > 0)
    q_heads = h * group + tl.where(live, r, 0)
    K_USED: tl.constexpr = K_DIM // (K_GROUPS * K_PER_BYTE)
    K_WIDTH: tl.constexpr = triton.next_power_of_2(K_USED)
    K_SLICES: tl.constexpr = K_GROUPS * K_PER_BYTE
    jk = tl.arange(0, K_WIDTH)
    sign = tl.where(scale > 0.0, 1.0, tl.where(scale < 0.0, -1.0, 0.0))
    rs = tl.zeros([N], tl.float32) + tl.where(scale == 0.0, LOG2_E, tl.abs(scale) * LOG2_E)
    zero_row = tl.zeros([N], tl.float32)
    row_constant = zero_row
    c0 = zero_row
    c1 = zero_row
    c2 = zero_row
    c3 = zero_row
    b0 = zero_row
    b1 = zero_row
    b2 = zero_row
    b3 = zero_row
    largest = zero_row
    for n in tl.static_range(K_SLICES):
        d = (n // K_PER_BYTE) * (K_DIM // K_GROUPS) + jk * K_PER_BYTE + n % K_PER_BYTE
        address = Q + row.to(tl.int64) * q_token + q_heads[None, :] * q_head + d[:, None] * q_dim
        q = sign * tl.load(address, mask=live[None, :] & (jk < K_USED)[:, None], other=0.0).to(tl.float32)
        if K_STATIC > 0:
            # Static formats have one group: slice n is position n.
            q = q * _static_slice(K_STATIC_S, h, 0, n, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE)[:, None]
        elif not K_SYMMETRIC:
            total = tl.sum(q, 0)
            if n // K_PER_BYTE == 0:
                c0 += total
            elif n // K_PER_BYTE == 1:
                c1 += total
            elif n // K_PER_BYTE == 2:
                c2 += total
            else:
                c3 += total
        largest = tl.maximum(largest, tl.max(tl.abs(q), 0))
        if n == 0:
            q0 = q
        elif n == 1:
            q1 = q
        elif n == 2:
            q2 = q
        else:
            q3 = q
    if K_SLICES < 2:
        q1 = q0
    if K_SLICES < 3:
        q2 = q0
    if K_SLICES < 4:
        q3 = q0
    # 2**(14 - floor(log2 largest)) by exponent bits, within the normal numbers; 1 for zero, inf and NaN rows.
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where((exponent == 0) | (exponent == 255), 141, exponent)
    lift = tl.minimum(268 - tl.minimum(tl.maximum(exponent, 16), 253), 252)
    up = (lift << 23).to(tl.float32, bitcast=True)
    rs = rs * (((254 - lift) << 23).to(tl.float32, bitcast=True) / code_unit(K_BITS))
    up_codes = up * code_unit(K_BITS)
    c0 = c0 * up_codes
    c1 = c1 * up_codes
    c2 = c2 * up_codes
    c3 = c3 * up_codes
    q0 = _lifted(q0, up, 0, K_BITS, K_PER_BYTE)
    q1 = _lifted(q1, up, 1, K_BITS, K_PER_BYTE)
    q2 = _lifted(q2, up, 2, K_BITS, K_PER_BYTE)
    q3 = _lifted(q3, up, 3, K_BITS, K_PER_BYTE)
    for n in tl.static_range(K_SLICES):
        wide = pick(n, q0, q1, q2, q3).to(tl.float32)
        if not INTERP and K_BITS <= 8:
            part_sum = tl.sum(wide, 0) * -(plane_gain(K_BITS, n % K_PER_BYTE) * code_unit(K_BITS) * 2.0 ** (K_BITS - 1))
            if n // K_PER_BYTE == 0:
                b0 += part_sum
            elif n // K_PER_BYTE == 1:
                b1 += part_sum
            elif n // K_PER_BYTE == 2:
                b2 += part_sum
            else:
                b3 += part_sum
        if K_STATIC > 0 and not K_SYMMETRIC:
            # k = scale * code + zero may cancel: the zero part takes the rounded query, as the code part does.
            scales = _static_slice(K_STATIC_S, h, 0, n, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE)
            zeros = _static_slice(K_STATIC_Z, h, 0, n, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE)
            ratio = (zeros + scales * 2.0 ** (K_BITS - 1)) / tl.where(scales > 0.0, scales, 1.0)
            row_constant += tl.sum(wide * (ratio * (plane_gain(K_BITS, n) * code_unit(K_BITS)))[:, None], 0)

    V_USED: tl.constexpr = V_DIM // (V_GROUPS * V_PER_BYTE)
    V_WIDTH: tl.constexpr = triton.next_power_of_2(V_USED)
    V_SLICES: tl.constexpr = V_GROUPS * V_PER_BYTE
    m = tl.full([N], NEGATIVE_INFINITY, tl.float32)
    l = zero_row
    top = SMALLEST_TOP + tl.sum(l, 0)
    a0 = tl.zeros([V_WIDTH, N], tl.float32)
    a1 = zero_row
    a2 = zero_row
    a3 = zero_row
    if V_SLICES > 1:
        a1 = tl.zeros([V_WIDTH, N], tl.float32)
    if V_SLICES > 2:
        a2 = tl.zeros([V_WIDTH, N], tl.float32)
    if V_SLICES > 3:
        a3 = tl.zeros([V_WIDTH, N], tl.float32)
    z0 = zero_row
    z1 = zero_row
    z2 = zero_row
    z3 = zero_row

    table = TABLE + sequence.to(tl.int64) * table_columns
    K += h * (PAGE * (K_DIM // K_PER_BYTE))
    V += h * (PAGE * (V_DIM // V_PER_BYTE))
    if K_STATIC == 0:
        KS += h * (K_GROUPS * PAGE)
        if not K_SYMMETRIC:
            KZ += h * (K_GROUPS * PAGE)
    if V_STATIC == 0:
        VS += h * (V_GROUPS * PAGE)
        if not V_SYMMETRIC:
            VZ += h * (V_GROUPS * PAGE)
    whole_first = tl.minimum(tl.maximum((start + T - 1) // T, tile_first), tile_end)
    whole_end = tl.minimum(tl.maximum(end // T, whole_first), tile_end)
    for t in tl.range(whole_first, whole_end, num_stages=STAGES):
        top, m, l, a0, a1, a2, a3, z0, z1, z2, z3 = _decode_tile(
            t, top, m, l, a0, a1, a2, a3, z0, z1, z2, z3, q0, q1, q2, q3, b0, b1, b2, b3, c0, c1, c2, c3,
            row_constant, rs, softcap, K, KS, KZ, V, VS, VZ, table, table_columns, heads, start, end,
            True, SOFTCAP, T, N, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            V_DIM, V_BITS, V_PER_BYTE, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE,
        )
    before = whole_first - tile_first
    for n in tl.range(0, before + tile_end - whole_end, num_stages=1):
        t = tl.where(n < before, tile_first + n, whole_end + n - before)
        top, m, l, a0, a1, a2, a3, z0, z1, z2, z3 = _decode_tile(
            t, top, m, l, a0, a1, a2, a3, z0, z1, z2, z3, q0, q1, q2, q3, b0, b1, b2, b3, c0, c1, c2, c3,
            row_constant, rs, softcap, K, KS, KZ, V, VS, VZ, table, table_columns, heads, start, end,
            False, SOFTCAP, T, N, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            V_DIM, V_BITS, V_PER_BYTE, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE,
        )

    empty = l == 0.0
    lse = tl.where(empty, NEGATIVE_INFINITY, m * (1.0 if SOFTCAP else rs) + tl.log2(tl.where(empty, 1.0, l)) - 15.0)
    per_weight = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))
    factor = per_weight
    if V_STATIC == 0:
        factor = per_weight * top
    whole = splits == 1
    alone = live & (splits + r * 0 == 1) & (sinks + r * 0 != 0)
    sink = tl.load(SINKS + q_heads, mask=alone, other=NEGATIVE_INFINITY).to(tl.float32) * LOG2_E
    lse, shift = _with_sink(lse, sink)  # a sink of -inf, as partials get, changes nothing
    row_out = row.to(tl.int64) * query_heads + q_heads
    row_part = (part.to(tl.int64) * heads + h) * group + r
    if whole:
        tl.store(LSE + row_out, lse * LN_2, mask=live)
    else:
        tl.store(PART_LSE + row_part, lse, mask=live)
    jv = tl.arange(0, V_WIDTH)
    for n in tl.static_range(V_SLICES):
        e = (n // V_PER_BYTE) * (V_DIM // V_GROUPS) + jv * V_PER_BYTE + n % V_PER_BYTE
        value = pick(n, a0, a1, a2, a3) * factor[None, :]
        if V_STATIC > 0:
            scales = _static_slice(V_STATIC_S, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE)
            value = value * scales[:, None]
            if not V_SYMMETRIC:
                zeros = _static_slice(V_STATIC_Z, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE)
                value = value + (zeros + scales * 2.0 ** (V_BITS - 1))[:, None]
        elif not V_SYMMETRIC:
            value = value + (pick(n // V_PER_BYTE, z0, z1, z2, z3) * per_weight)[None, :]
        value = tl.where(empty[None, :], 0.0, value) * shift[None, :]
        inside = live[None, :] & (jv < V_USED)[:, None]
        if whole:
            tl.store(OUT + row_out[None, :] * V_DIM + e[:, None], value.to(OUT.dtype.element_ty), mask=inside)
        else:
            tl.store(PART_OUT + row_part[None, :] * V_DIM + e[:, None], value, mask=inside)
