# mypy: ignore-errors
# ruff: noqa: N803, N806, E741, RUF005, SIM108
# Triton's language is not typed Python: tensors, constexprs and pointers share one notation, compile-time names are in
# capitals, and what depends on one of them is an if statement, never a conditional expression. Calls keep their
# arguments in lines by meaning (latent part, rope part, geometry), not one a line.
# fmt: off
"""attend over latent (MLA) pages: K is the latent vector followed by the rotary part, V the latent vector again.

Each stored token is read and decoded once, for its score and for its value. All query heads share it; a program takes
a block of them for some query tokens. Products are those of :mod:`attend`'s EXACT and ROUNDED modes.
"""

import triton
import triton.language as tl

from kvport_triton.kernels.attend import (
    EXACT,
    ITEM_FIELDS,
    NEGATIVE_INFINITY,
    ROUNDED,
    _with_sink,
    exact_codes,
)
from kvport_triton.kernels.numerics import LN_2, LOG2_E, dot, dot_add, interleave, round_bf16, tanh


@triton.jit
def _rows(
    C, S, Z, STATIC_S, STATIC_Z, page, offset, MODE: tl.constexpr, PAGE: tl.constexpr, INTERP: tl.constexpr,
    DIM: tl.constexpr, BITS: tl.constexpr, PER_BYTE: tl.constexpr, QUANTIZED: tl.constexpr, SYMMETRIC: tl.constexpr,
    GROUPS: tl.constexpr, STATIC: tl.constexpr, SCALE: tl.constexpr,
):
    """Stored rows, decoded, as the products take them: (T, channels), zeros past ``DIM``."""
    USED: tl.constexpr = DIM // PER_BYTE
    WIDTH: tl.constexpr = triton.next_power_of_2(USED)
    j = tl.arange(0, WIDTH)
    address = C + ((page * PAGE + offset) * USED)[:, None] + j[None, :]
    if USED == WIDTH:
        code = tl.load(address)
    else:
        code = tl.load(address, mask=(j < USED)[None, :], other=0)
    planes = ()
    for p in tl.static_range(PER_BYTE):
        x = exact_codes(code, S, Z, STATIC_S, STATIC_Z, page, offset, 0, p, DIM, PAGE, BITS, PER_BYTE, QUANTIZED,
                        SYMMETRIC, GROUPS, STATIC, SCALE, WIDTH, INTERP)
        if MODE == ROUNDED:
            x = round_bf16(x, INTERP)
        planes = planes + (x,)
    x = interleave(planes, PER_BYTE, offset.shape[0], WIDTH)
    if USED != WIDTH:
        x = tl.where((tl.arange(0, WIDTH * PER_BYTE) < DIM)[None, :], x, 0.0)
    return x


@triton.jit
def _query(
    Q, row, heads, live, q_token, q_head, q_dim, MODE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    """(M, WIDTH) of the query, zero past ``DIM`` and in rows that are not live.

    Rounded products take bfloat16 queries as they are: only what comes straight from a load stays in shared memory,
    where the tensor cores read it; registers have no room for it. IEEE products take float32, multiplied by 1, as a
    query that is merely widened trips a layout pass of triton 3.6.
    """
    d = tl.arange(0, WIDTH)
    address = Q + row.to(tl.int64) * q_token + heads[:, None] * q_head + d[None, :] * q_dim
    q = tl.load(address, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    if MODE == EXACT:
        q = q.to(tl.float32) * tl.where(live, 1.0, 0.0)[:, None]
    return q


@triton.jit
def _latent_tile(
    t, m, l, a, q, r, rs, softcap,
    K, KS, KZ, K_STATIC_S, K_STATIC_Z, R, RS, RZ, TABLE, table_columns, start, end,
    MODE: tl.constexpr, WHOLE: tl.constexpr, SOFTCAP: tl.constexpr, T: tl.constexpr,
    PAGE: tl.constexpr, INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_QUANTIZED: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    R_DIM: tl.constexpr, R_BITS: tl.constexpr, R_PER_BYTE: tl.constexpr, R_QUANTIZED: tl.constexpr,
    R_SYMMETRIC: tl.constexpr, R_GROUPS: tl.constexpr, R_STATIC: tl.constexpr, R_SCALE: tl.constexpr,
):
    """One tile of ``T`` stored tokens, all of them seen where ``WHOLE``, else those from start to end."""
    position = t * T + tl.arange(0, T)
    column = position // PAGE
    offset = position % PAGE
    page = tl.load(TABLE + column, mask=column < table_columns, other=0).to(tl.int64)
    stored = (position >= start) & (position < end)
    rope = _rows(R, RS, RZ, RS, RZ, page, offset, MODE, PAGE, INTERP,
                 R_DIM, R_BITS, R_PER_BYTE, R_QUANTIZED, R_SYMMETRIC, R_GROUPS, R_STATIC, R_SCALE)
    key = _rows(K, KS, KZ, K_STATIC_S, K_STATIC_Z, page, offset, MODE, PAGE, INTERP,
                K_DIM, K_BITS, K_PER_BYTE, K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE)
    x = dot(r, tl.trans(rope), MODE == EXACT, INTERP)
    x = dot_add(q, tl.trans(key), x, MODE == EXACT, INTERP)
    if SOFTCAP:
        x = tanh(x * (rs / (softcap * LOG2_E))) * (softcap * LOG2_E)
    else:
        x = x * rs
    if not WHOLE:
        x = tl.where(stored[None, :], x, NEGATIVE_INFINITY)
    new = tl.maximum(m, tl.max(x, 1))
    finite = tl.where(new == NEGATIVE_INFINITY, 0.0, new)
    shrink = tl.exp2(m - finite)
    weights = tl.exp2(x - finite[:, None])
    l = l * shrink + tl.sum(weights, 1)
    if MODE == ROUNDED:
        weights = round_bf16(weights, INTERP)
    if not WHOLE:
        key = tl.where(stored[:, None], key, 0.0)
    a = dot_add(weights, key, a * shrink[:, None], MODE == EXACT, INTERP)
    return new, l, a


@triton.jit(do_not_specialize=[
    "table_columns", "query_heads", "blocks", "group", "sinks",
])
def latent_kernel(
    Q, q_token, q_head, q_dim,
    K, KS, KZ, K_STATIC_S, K_STATIC_Z, R, RS, RZ,
    TABLE, table_columns, ITEMS, OUT, LSE, PART_OUT, PART_LSE, SINKS, sinks, query_heads, blocks, group,
    scale, softcap,
    MODE: tl.constexpr, SOFTCAP: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_QUANTIZED: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    R_DIM: tl.constexpr, R_BITS: tl.constexpr, R_PER_BYTE: tl.constexpr, R_QUANTIZED: tl.constexpr,
    R_SYMMETRIC: tl.constexpr, R_GROUPS: tl.constexpr, R_STATIC: tl.constexpr, R_SCALE: tl.constexpr,
):
    """Grid: (items * blocks,), blocks fastest; a block is ``group`` query heads. An item has one query token, so that
    every row of a program sees the same stored tokens. See attend_kernel for the rest."""
    h = tl.program_id(0) % blocks
    item = ITEMS + (tl.program_id(0) // blocks) * ITEM_FIELDS
    sequence = tl.load(item)
    row = tl.load(item + 1)
    tokens = tl.load(item + 2)
    start = tl.load(item + 4)
    end = tl.load(item + 5)
    tile_first = tl.load(item + 6)
    tile_end = tl.load(item + 7)
    splits = tl.load(item + 8)
    part = tl.load(item + 9)

    i = tl.arange(0, M)
    live = (i < group) & (i * 0 + tokens > 0)
    q_heads = h * group + tl.where(live, i, 0)
    rs = scale * LOG2_E

    K_WIDTH: tl.constexpr = triton.next_power_of_2(K_DIM // K_PER_BYTE) * K_PER_BYTE
    R_WIDTH: tl.constexpr = triton.next_power_of_2(R_DIM // R_PER_BYTE) * R_PER_BYTE
    q = _query(Q, row, q_heads, live, q_token, q_head, q_dim, MODE, K_DIM, K_WIDTH)
    r = _query(Q + K_DIM * q_dim, row, q_heads, live, q_token, q_head, q_dim, MODE, R_DIM, R_WIDTH)
    m = tl.full([M], NEGATIVE_INFINITY, tl.float32)
    l = tl.zeros([M], tl.float32)
    a = tl.zeros([M, K_WIDTH], tl.float32)

    table = TABLE + sequence.to(tl.int64) * table_columns
    whole_first = tl.minimum(tl.maximum((start + T - 1) // T, tile_first), tile_end)
    whole_end = tl.minimum(tl.maximum(end // T, whole_first), tile_end)
    for t in tl.range(whole_first, whole_end, num_stages=STAGES):
        m, l, a = _latent_tile(
            t, m, l, a, q, r, rs, softcap,
            K, KS, KZ, K_STATIC_S, K_STATIC_Z, R, RS, RZ, table, table_columns, start, end,
            MODE, True, SOFTCAP, T, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            R_DIM, R_BITS, R_PER_BYTE, R_QUANTIZED, R_SYMMETRIC, R_GROUPS, R_STATIC, R_SCALE,
        )
    before = whole_first - tile_first
    for n in tl.range(0, before + tile_end - whole_end, num_stages=1):
        t = tl.where(n < before, tile_first + n, whole_end + n - before)
        m, l, a = _latent_tile(
            t, m, l, a, q, r, rs, softcap,
            K, KS, KZ, K_STATIC_S, K_STATIC_Z, R, RS, RZ, table, table_columns, start, end,
            MODE, False, SOFTCAP, T, PAGE, INTERP,
            K_DIM, K_BITS, K_PER_BYTE, K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE,
            R_DIM, R_BITS, R_PER_BYTE, R_QUANTIZED, R_SYMMETRIC, R_GROUPS, R_STATIC, R_SCALE,
        )

    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    lse = tl.where(empty, NEGATIVE_INFINITY, m + tl.log2(total))
    factor = tl.where(empty, 0.0, 1.0 / total)
    row_out = row.to(tl.int64) * query_heads + q_heads
    row_part = (part.to(tl.int64) * blocks + h) * group + i
    whole = splits == 1
    alone = live & (splits + i * 0 == 1) & (sinks + i * 0 != 0)
    sink = tl.load(SINKS + q_heads, mask=alone, other=NEGATIVE_INFINITY).to(tl.float32) * LOG2_E
    lse, shift = _with_sink(lse, sink)
    if whole:
        tl.store(LSE + row_out, lse * LN_2, mask=live)
    else:
        tl.store(PART_LSE + row_part, lse, mask=live)
    e = tl.arange(0, K_WIDTH)
    value = tl.where(empty[:, None], 0.0, a * (factor * shift)[:, None])
    inside = live[:, None] & (e < K_DIM)[None, :]
    if whole:
        tl.store(OUT + row_out[:, None] * K_DIM + e[None, :], value.to(OUT.dtype.element_ty), mask=inside)
    else:
        tl.store(PART_OUT + row_part[:, None] * K_DIM + e[None, :], value, mask=inside)
