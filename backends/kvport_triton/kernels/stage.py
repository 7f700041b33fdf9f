# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF005
# Triton's language is not typed Python: tensors, constexprs and pointers share one notation, and compile-time names are
# in capitals.
"""Decode a bounded run of one sequence's pages into bf16 pages, for prefill over codes.

A long prefill multiplies every K and V tile with hundreds of query tiles, and turning codes into floats anew for each
of them costs more than the products leave free. So runs of a fixed number of tokens are decoded once, into a scratch
buffer that stays in L2 and is overwritten by the next run; attend's NATIVE mode reads it as it reads float pages.
"""

import triton
import triton.language as tl

from kvport_triton.kernels.attend import exact_codes
from kvport_triton.kernels.numerics import BFLOAT16, interleave, nan_bits, round_bits


@triton.jit
def _bf16_bits(x):
    return tl.where(x == x, round_bits(x, BFLOAT16), nan_bits(BFLOAT16)).to(tl.int16)


@triton.jit(do_not_specialize=["first_column", "columns", "sequence", "table_columns", "heads"])
def stage_kernel(
    K, KS, KZ, K_STATIC_S, K_STATIC_Z, V, VS, VZ, V_STATIC_S, V_STATIC_Z, KEYS, VALUES,
    TABLE, table_columns, sequence, first_column, columns, heads,
    PAGE: tl.constexpr, BT: tl.constexpr, INTERP: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_PER_BYTE: tl.constexpr, K_QUANTIZED: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_GROUPS: tl.constexpr, K_STATIC: tl.constexpr, K_SCALE: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_PER_BYTE: tl.constexpr, V_QUANTIZED: tl.constexpr,
    V_SYMMETRIC: tl.constexpr, V_GROUPS: tl.constexpr, V_STATIC: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: (columns * PAGE / BT, heads, 2); the last axis is K, V.

    Table column c of ``sequence`` (first_column <= c < first_column + columns) goes to scratch page c % columns, so
    that one table serves every run. ``KEYS`` and ``VALUES`` are bits of bf16 ``[page, head, token, channel]``.
    """
    PARTS: tl.constexpr = PAGE // BT
    column = first_column + tl.program_id(0) // PARTS
    h = tl.program_id(1)
    if column < table_columns:
        page = tl.load(TABLE + sequence.to(tl.int64) * table_columns + column)
        i = tl.arange(0, BT)
        offset = (tl.program_id(0) % PARTS) * BT + i
        base = page.to(tl.int64) * heads + h + i * 0
        target = ((column % columns).to(tl.int64) * heads + h) * PAGE + offset
        if tl.program_id(2) == 0:
            K_USED: tl.constexpr = K_DIM // K_PER_BYTE
            K_WIDTH: tl.constexpr = triton.next_power_of_2(K_USED)
            jk = tl.arange(0, K_WIDTH)
            code = tl.load(
                K + ((base * PAGE + offset) * K_USED)[:, None] + jk[None, :], mask=(jk < K_USED)[None, :], other=0
            )
            planes = ()
            for p in tl.static_range(K_PER_BYTE):
                x = _bf16_bits(exact_codes(
                    code, KS, KZ, K_STATIC_S, K_STATIC_Z, base, offset, h, p, K_DIM, PAGE, K_BITS, K_PER_BYTE,
                    K_QUANTIZED, K_SYMMETRIC, K_GROUPS, K_STATIC, K_SCALE, K_WIDTH, INTERP,
                ))  # fmt: skip
                planes = planes + (x,)
            d = tl.arange(0, K_WIDTH * K_PER_BYTE)
            bits = interleave(planes, K_PER_BYTE, BT, K_WIDTH)
            tl.store(KEYS + target[:, None] * K_DIM + d[None, :], bits, mask=(d < K_DIM)[None, :])
        else:
            V_USED: tl.constexpr = V_DIM // V_PER_BYTE
            V_WIDTH: tl.constexpr = triton.next_power_of_2(V_USED)
            jv = tl.arange(0, V_WIDTH)
            stored = tl.load(
                V + (base * (V_USED * PAGE))[None, :] + jv[:, None] * PAGE + offset[None, :],
                mask=(jv < V_USED)[:, None], other=0,
            )  # fmt: skip
            planes = ()
            for p in tl.static_range(V_PER_BYTE):
                y = _bf16_bits(exact_codes(
                    tl.trans(stored), VS, VZ, V_STATIC_S, V_STATIC_Z, base, offset, h, p, V_DIM, PAGE, V_BITS,
                    V_PER_BYTE, V_QUANTIZED, V_SYMMETRIC, V_GROUPS, V_STATIC, V_SCALE, V_WIDTH, INTERP,
                ))  # fmt: skip
                planes = planes + (y,)
            e = tl.arange(0, V_WIDTH * V_PER_BYTE)
            rows = interleave(planes, V_PER_BYTE, BT, V_WIDTH)
            tl.store(VALUES + target[:, None] * V_DIM + e[None, :], rows, mask=(e < V_DIM)[None, :])
