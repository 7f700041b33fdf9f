# mypy: ignore-errors
# ruff: noqa: B007, N803, N806, E741, RUF005, SIM102, SIM108
# Triton's language is not typed Python: tensors, constexprs and pointers share one notation, compile-time names are in
# capitals, and what depends on one of them is an if statement, never a conditional expression. Calls keep their
# arguments in lines by meaning (K, V, static, geometry), not one a line. Tuples of tensors grow by concatenation.
# fmt: off
"""attend for one query token a sequence over codes: the numbers of :mod:`attend`'s CODES mode, transposed.

Tensor cores multiply tiles of 16 rows by 8 columns. With stored tokens (and channels of V) as rows and the query heads
of a group as columns, a group of 4 wastes half of every tile; the other way round it would waste three quarters, in
products, softmax and registers alike. All rows see the same tokens, so that masks are one value a token.

A row of K or V is cut into slices, one per (group of channels, position of the code inside its byte), each with its own
product: tuples hold the query's slices and V's accumulators. Scales of a token multiply the scores and the weights.
Scales of a channel multiply the query and the result: once where they are static, for every tile where they are those
of a block of tokens (``GROUPS`` < 0; a tile lies within one block).
"""

import triton
import triton.language as tl

from kvport_triton.kernels.attend import (
    ITEM_FIELDS,
    NEGATIVE_INFINITY,
    SMALLEST_TOP,
    _kept,
    _larger,
    _static_slice,
    _with_sink,
    centre,
)
from kvport_triton.kernels.numerics import (
    LN_2,
    LOG2_E,
    code_unit,
    decode_half,
    decode_subnormal,
    dot_add,
    fused,
    load_scale,
    plane_gain,
    read_scale,
    tanh,
)


@triton.constexpr_function
def slice_width(used):
    """Channels of a slice, padded to what a product takes."""
    return max(16, triton.next_power_of_2(used))


@triton.jit
def _against_codes(
    q, scales, zeros, GROUPS: tl.constexpr, PER_BYTE: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr,
    SYMMETRIC: tl.constexpr, INTERP: tl.constexpr,
):
    """Query slices, float32 (channels, heads), as float16 to be multiplied with :func:`decode_subnormal`'s codes.

    Where ``SCALED`` (one group), each slice's channels are multiplied by ``scales`` first. Every head is scaled by a
    power of two. Returns the slices; what the products of each group begin at; and the powers of two, up and down.
    """
    slices = ()
    for n in tl.static_range(GROUPS * PER_BYTE):
        x = q[n]
        if SCALED:
            factor = scales[n]
            if not SYMMETRIC:
                # A channel without range is its zero alone.
                factor = tl.where(factor == 0.0, tl.abs(zeros[n]), factor)
            x = x * factor[:, None]
        if n == 0:
            size = tl.abs(x)
        else:
            size = tl.maximum(size, tl.abs(x))
        slices = slices + (x,)
    # 2**(14 - floor(log2 largest)) by exponent bits, within the normal numbers; 1 for zero, inf and NaN rows.
    exponent = (tl.max(size, 0).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where((exponent == 0) | (exponent == 255), 141, exponent)
    lift = tl.minimum(268 - tl.minimum(tl.maximum(exponent, 16), 253), 252)
    up = (lift << 23).to(tl.float32, bitcast=True)
    down = ((254 - lift) << 23).to(tl.float32, bitcast=True)
    halves = ()
    offsets = ()
    for g in tl.static_range(GROUPS):
        offset = tl.zeros(slices[0].shape, tl.float32)
        for p in tl.static_range(PER_BYTE):
            half = (slices[g * PER_BYTE + p] * (up * (1.0 / plane_gain(BITS, p)))[None, :]).to(tl.float16)
            wide = half.to(tl.float32) * (plane_gain(BITS, p) * code_unit(BITS))
            if SCALED and not SYMMETRIC:
                # k = scale * code + zero may cancel: the zero part takes the rounded query, as the code part does.
                ranged = scales[p] > 0.0
                ratio = zeros[p] / tl.where(ranged, scales[p], tl.where(zeros[p] == 0.0, 1.0, tl.abs(zeros[p])))
                if INTERP:
                    offset += wide * (ratio + tl.where(ranged, 2.0 ** (BITS - 1), 0.0))[:, None]
                else:
                    offset += wide * ratio[:, None]
                half = tl.where(ranged[:, None], half, 0.0)
            elif not INTERP and BITS <= 8:
                offset -= wide * 2.0 ** (BITS - 1)  # codes are half their range too large
            halves = halves + (half,)
        offsets = offsets + (tl.sum(offset, 0),)
    return halves, offsets, up, down


@triton.jit
def _block_slice(
    S, where, POSITION: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PER_BYTE: tl.constexpr,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr,
):
    """Scales or zeros of the channels at one position of each byte, for a block of -GROUPS tokens: float32 (WIDTH,)."""
    j = tl.arange(0, WIDTH)
    return load_scale(S + where + (j * PER_BYTE + POSITION) * (PAGE // -GROUPS), j < DIM // PER_BYTE, SCALE)


@triton.jit
def _decode_tile(
    t, top, m, l, acc, z, q, halves, offsets, sums, moves, rs, softcap,
    K, KS, KZ, V, VS, VZ, TABLE, table_columns, heads, start, end,
    RUNS: tl.constexpr, WHOLE: tl.constexpr, SOFTCAP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr, INTERP: tl.constexpr,
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
    if K_GROUPS < 0 or V_GROUPS < 0:
        # Blocks are no longer than a page, tiles no longer than a block.
        one_page = tl.load(TABLE + t // (PAGE // T)).to(tl.int64)
        begin = (t % (PAGE // T)) * T

    # Scores (tokens, heads), up to the positive factor rs of each head.
    K_SLICED: tl.constexpr = K_GROUPS if K_GROUPS > 0 else 1
    K_USED: tl.constexpr = K_DIM // (K_SLICED * K_PER_BYTE)
    K_WIDTH: tl.constexpr = slice_width(K_USED)
    jk = tl.arange(0, K_WIDTH)
    krow = page * (heads * (PAGE * (K_DIM // K_PER_BYTE))) + offset * (K_DIM // K_PER_BYTE)
    if K_GROUPS < 0:
        where = one_page * (heads * (K_DIM * (PAGE // -K_GROUPS))) + begin // -K_GROUPS
        scales = ()
        zeros = ()
        for p in tl.static_range(K_PER_BYTE):
            scales = scales + (_block_slice(KS, where, p, K_DIM, PAGE, K_PER_BYTE, K_GROUPS, K_SCALE, K_WIDTH),)
            if not K_SYMMETRIC:
                zeros = zeros + (_block_slice(KZ, where, p, K_DIM, PAGE, K_PER_BYTE, K_GROUPS, K_SCALE, K_WIDTH),)
        halves, offsets, _, down = _against_codes(
            q, scales, zeros, 1, K_PER_BYTE, K_BITS, True, K_SYMMETRIC, INTERP
        )
    for g in tl.static_range(K_SLICED):
        address = K + krow[:, None] + (g * K_USED + jk)[None, :]
        if K_USED == K_WIDTH:
            code = tl.load(address)
        else:
            code = tl.load(address, mask=(jk < K_USED)[None, :], other=0)
        product = tl.zeros([T, N], tl.float32) + offsets[g][None, :]
        for p in tl.static_range(K_PER_BYTE):
            product = dot_add(decode_subnormal(code, p, K_BITS, INTERP), halves[g * K_PER_BYTE + p], product, False,
                              INTERP)
        if K_STATIC == 0 and K_GROUPS > 0:
            where = page * (heads * (K_GROUPS * PAGE)) + g * PAGE + offset
            ks = _kept(read_scale(KS + where, K_SCALE), stored, WHOLE)
            if g == 0:
                x = product * ks[:, None]
            else:
                x = fused(product, ks[:, None], x, INTERP)
            if not K_SYMMETRIC:
                kz = _kept(read_scale(KZ + where, K_SCALE), stored, WHOLE)
                kz = kz + ks * 2.0 ** (K_BITS - 1)
                x += sums[g][None, :] * kz[:, None]
        else:
            x = product  # one group
    if K_GROUPS < 0:
        x = x * (down / code_unit(K_BITS))[None, :]
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
    weights = tl.exp2(fused(x, rate[None, :], (15.0 - finite * rate)[None, :], INTERP))
    l = l * shrink + tl.sum(weights, 0)

    V_SLICED: tl.constexpr = V_GROUPS if V_GROUPS > 0 else 1
    V_USED: tl.constexpr = V_DIM // (V_SLICED * V_PER_BYTE)
    V_WIDTH: tl.constexpr = slice_width(V_USED)
    jv = tl.arange(0, V_WIDTH)
    if RUNS:
        columns = t * (T // PAGE) + tl.arange(0, T // PAGE)
        if WHOLE:
            pages = tl.load(TABLE + columns)
        else:
            pages = tl.load(TABLE + columns, mask=columns < table_columns, other=0)
        page_starts = pages.to(tl.int64) * (heads * (V_DIM // V_PER_BYTE * PAGE))
    BY_TOKEN: tl.constexpr = V_STATIC == 0 and V_GROUPS > 0
    if BY_TOKEN:
        peak = tl.zeros([T], tl.float32)
        for g in tl.static_range(V_SLICED):
            where = page * (heads * (V_GROUPS * PAGE)) + g * PAGE + offset
            vs = _kept(read_scale(VS + where, V_SCALE), stored, WHOLE)
            peak = _larger(peak, vs, INTERP)
        higher = tl.maximum(top, tl.max(peak, 0))
        inverse = 1.0 / higher
        rescale = shrink * (top * inverse)
        top = higher
    else:
        rescale = shrink
        w16 = weights.to(tl.float16)
    found = ()
    found_z = ()
    for g in tl.static_range(V_SLICED):
        vrow = page * (heads * (V_DIM // V_PER_BYTE * PAGE)) + offset
        address = V + vrow[None, :] + ((g * V_USED + jv) * PAGE)[:, None]
        if RUNS and V_USED == V_WIDTH:
            # By the addresses above a warp would take a few bytes of each of several rows. A page of one head is one
            # run of memory: read as such, a warp takes 512 bytes of one page, and the tile lies in shared memory as
            # the tensor cores read it.
            run = tl.load(
                V + page_starts[:, None] + (g * V_USED * PAGE + tl.arange(0, V_WIDTH * PAGE))[None, :]
            )
            cube = tl.reshape(run, (T // PAGE, V_WIDTH, PAGE))
            code = tl.reshape(tl.permute(cube, (1, 0, 2)), (V_WIDTH, T))
        elif V_USED == V_WIDTH:
            code = tl.load(address)
        else:
            code = tl.load(address, mask=(jv < V_USED)[:, None], other=0)
        if BY_TOKEN:
            where = page * (heads * (V_GROUPS * PAGE)) + g * PAGE + offset
            vs = _kept(read_scale(VS + where, V_SCALE), stored, WHOLE)
            w16 = (weights * (vs * inverse)[:, None]).to(tl.float16)
            if not V_SYMMETRIC:
                move, rest = centre(vs, _kept(read_scale(VZ + where, V_SCALE), stored, WHOLE), V_BITS, INTERP)
                found_z = found_z + (z[g] * shrink + tl.sum(weights * rest[:, None], 0),)
        for p in tl.static_range(V_PER_BYTE):
            value = decode_half(code, p, V_BITS, INTERP)
            if V_BITS > 8 and not WHOLE:
                value = tl.where(stored[None, :], value, 0.0)  # an unwritten byte may be a NaN
            a = acc[g * V_PER_BYTE + p] * rescale[None, :]
            if V_GROUPS < 0:
                where = one_page * (heads * (V_DIM * (PAGE // -V_GROUPS))) + begin // -V_GROUPS
                scale = _block_slice(VS, where, p, V_DIM, PAGE, V_PER_BYTE, V_GROUPS, V_SCALE, V_WIDTH)
                if not V_SYMMETRIC:
                    zero = _block_slice(VZ, where, p, V_DIM, PAGE, V_PER_BYTE, V_GROUPS, V_SCALE, V_WIDTH)
                    move, rest = centre(scale, zero, V_BITS, INTERP)
                    value = value + move[:, None]
                    a = a + tl.sum(weights, 0)[None, :] * rest[:, None]
                product = dot_add(value, w16, tl.zeros([V_WIDTH, N], tl.float32), False, INTERP)
                a = a + product * scale[:, None]
            elif V_SYMMETRIC:
                a = dot_add(value, w16, a, False, INTERP)
            elif V_STATIC > 0:
                a = dot_add(value + moves[p][:, None], w16, a, False, INTERP)
            else:
                a = dot_add(value + move[None, :], w16, a, False, INTERP)
            found = found + (a,)
    return top, new, l, found, found_z


@triton.jit(do_not_specialize=["table_columns", "query_heads", "heads", "group", "sinks"])
def decode_kernel(
    Q, q_token, q_head, q_dim,
    K, KS, KZ, K_STATIC_S, K_STATIC_Z, V, VS, VZ, V_STATIC_S, V_STATIC_Z,
    TABLE, table_columns, ITEMS, OUT, LSE, PART_OUT, PART_LSE, SINKS, sinks, query_heads, heads, group, scale,
    softcap,
    SOFTCAP: tl.constexpr, N: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    RUNS: tl.constexpr, INTERP: tl.constexpr,
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
    K_SLICED: tl.constexpr = K_GROUPS if K_GROUPS > 0 else 1
    K_USED: tl.constexpr = K_DIM // (K_SLICED * K_PER_BYTE)
    K_WIDTH: tl.constexpr = slice_width(K_USED)
    jk = tl.arange(0, K_WIDTH)
    sign = tl.where(scale > 0.0, 1.0, tl.where(scale < 0.0, -1.0, 0.0))
    rs = tl.zeros([N], tl.float32) + tl.where(scale == 0.0, LOG2_E, tl.abs(scale) * LOG2_E)
    q = ()
    scales = ()
    zeros = ()
    totals = ()
    for g in tl.static_range(K_SLICED):
        total = tl.zeros([N], tl.float32)
        for p in tl.static_range(K_PER_BYTE):
            d = g * (K_DIM // K_SLICED) + jk * K_PER_BYTE + p
            address = Q + row.to(tl.int64) * q_token + q_heads[None, :] * q_head + d[:, None] * q_dim
            x = sign * tl.load(address, mask=live[None, :] & (jk < K_USED)[:, None], other=0.0).to(tl.float32)
            total += tl.sum(x, 0)
            q = q + (x,)
            if K_STATIC > 0:
                # Static formats have one group.
                scales = scales + (
                    _static_slice(K_STATIC_S, h, 0, p, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE),
                )
                if not K_SYMMETRIC:
                    zeros = zeros + (
                        _static_slice(K_STATIC_Z, h, 0, p, K_DIM, 1, K_PER_BYTE, K_WIDTH, K_STATIC, K_SCALE),
                    )
        totals = totals + (total,)
    halves, offsets, up, down = _against_codes(
        q, scales, zeros, K_SLICED, K_PER_BYTE, K_BITS, K_STATIC > 0, K_SYMMETRIC, INTERP
    )
    if K_GROUPS > 0:
        rs = rs * (down / code_unit(K_BITS))
    sums = ()
    for g in tl.static_range(K_SLICED):
        sums = sums + (totals[g] * (up * code_unit(K_BITS)),)

    V_SLICED: tl.constexpr = V_GROUPS if V_GROUPS > 0 else 1
    V_USED: tl.constexpr = V_DIM // (V_SLICED * V_PER_BYTE)
    V_WIDTH: tl.constexpr = slice_width(V_USED)
    BY_TOKEN: tl.constexpr = V_STATIC == 0 and V_GROUPS > 0
    m = tl.full([N], NEGATIVE_INFINITY, tl.float32)
    l = tl.zeros([N], tl.float32)
    top = SMALLEST_TOP + tl.sum(l, 0)
    acc = ()
    z = ()
    for n in tl.static_range(V_SLICED * V_PER_BYTE):
        acc = acc + (tl.zeros([V_WIDTH, N], tl.float32),)
    if BY_TOKEN and not V_SYMMETRIC:
        for g in tl.static_range(V_SLICED):
            z = z + (tl.zeros([N], tl.float32),)

    moves = ()
    if V_STATIC > 0 and not V_SYMMETRIC:
        for p in tl.static_range(V_PER_BYTE):
            move, _ = centre(
                _static_slice(V_STATIC_S, h, 0, p, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE),
                _static_slice(V_STATIC_Z, h, 0, p, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE),
                V_BITS, INTERP,
            )
            moves = moves + (move,)

    table = TABLE + sequence.to(tl.int64) * table_columns
    K += h * (PAGE * (K_DIM // K_PER_BYTE))
    V += h * (PAGE * (V_DIM // V_PER_BYTE))
    if K_STATIC == 0:
        K_SCALES: tl.constexpr = K_GROUPS * PAGE if K_GROUPS > 0 else K_DIM * (PAGE // -K_GROUPS)
        KS += h * K_SCALES
        if not K_SYMMETRIC:
            KZ += h * K_SCALES
    if V_STATIC == 0:
        V_SCALES: tl.constexpr = V_GROUPS * PAGE if V_GROUPS > 0 else V_DIM * (PAGE // -V_GROUPS)
        VS += h * V_SCALES
        if not V_SYMMETRIC:
            VZ += h * V_SCALES
    whole_first = tl.minimum(tl.maximum((start + T - 1) // T, tile_first), tile_end)
    whole_end = tl.minimum(tl.maximum(end // T, whole_first), tile_end)
    for t in tl.range(whole_first, whole_end, num_stages=STAGES):
        top, m, l, acc, z = _decode_tile(
            t, top, m, l, acc, z, q, halves, offsets, sums, moves, rs, softcap,
            K, KS, KZ, V, VS, VZ, table, table_columns, heads, start, end,
            RUNS, True, SOFTCAP, T, N, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            V_DIM, V_BITS, V_PER_BYTE, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE,
        )
    before = whole_first - tile_first
    for n in tl.range(0, before + tile_end - whole_end, num_stages=1):
        t = tl.where(n < before, tile_first + n, whole_end + n - before)
        top, m, l, acc, z = _decode_tile(
            t, top, m, l, acc, z, q, halves, offsets, sums, moves, rs, softcap,
            K, KS, KZ, V, VS, VZ, table, table_columns, heads, start, end,
            RUNS, False, SOFTCAP, T, N, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            V_DIM, V_BITS, V_PER_BYTE, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE,
        )

    empty = l == 0.0
    lse = tl.where(empty, NEGATIVE_INFINITY, m * (1.0 if SOFTCAP else rs) + tl.log2(tl.where(empty, 1.0, l)) - 15.0)
    per_weight = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))
    factor = per_weight
    if BY_TOKEN:
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
    for n in tl.static_range(V_SLICED * V_PER_BYTE):
        e = (n // V_PER_BYTE) * (V_DIM // V_SLICED) + jv * V_PER_BYTE + n % V_PER_BYTE
        value = acc[n] * factor[None, :]
        if V_STATIC > 0:
            static = _static_slice(V_STATIC_S, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE)
            value = value * static[:, None]
            if not V_SYMMETRIC:
                zero = _static_slice(V_STATIC_Z, h, 0, n, V_DIM, 1, V_PER_BYTE, V_WIDTH, V_STATIC, V_SCALE)
                _, rest = centre(static, zero, V_BITS, INTERP)
                value = value + rest[:, None]
        elif BY_TOKEN and not V_SYMMETRIC:
            value = value + (z[n // V_PER_BYTE] * per_weight)[None, :]
        value = tl.where(empty[None, :], 0.0, value) * shift[None, :]
        inside = live[None, :] & (jv < V_USED)[:, None]
        if whole:
            tl.store(OUT + row_out[None, :] * V_DIM + e[:, None], value.to(OUT.dtype.element_ty), mask=inside)
        else:
            tl.store(PART_OUT + row_part[None, :] * V_DIM + e[:, None], value, mask=inside)
