"""The emulated operators against a statement of their semantics in numpy, written without the emulator's code.

The statement (:func:`attend`) works on plain arrays: every sequence's K and V are first laid out token by token from
the operator's arguments by this file's own indexing, then attention is written out in float64, row by row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvport_ascend import emulator

Array = NDArray[Any]
FIA = "npu_fused_infer_attention_score"


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    emulator.load()


# ------------------------------------------------------------------------------------- the statement, in numpy float64


def attend(query: Array, key: Array, value: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    """One sequence: query (rows, Q_N, D), key (L, KV_N, D), value (L, KV_N, E), all decoded -> out, LSE (rows, Q_N).

    ``causal``: the last row sees all L tokens, the one before it one less, and so on.
    """
    rows, heads = query.shape[:2]
    length, kv_heads = key.shape[:2]
    out = np.zeros((rows, heads, value.shape[2]))
    lse = np.zeros((rows, heads))
    for r in range(rows):
        seen = length - (rows - 1 - r) if causal else length
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = np.array([scale * float(np.dot(query[r, h], key[j, g])) for j in range(seen)])
            exps = np.exp(scores - scores.max())
            lse[r, h] = scores.max() + np.log(exps.sum())
            out[r, h] = sum(exps[j] * value[j, g] for j in range(seen)) / exps.sum()
    return out, lse


def dequantize(codes: Array, scale: Array, offset: Array | float) -> Array:
    """(code + offset) * scale: the operator adds the offset (checkpoints subtract it)."""
    return (codes.astype(np.float64) + offset) * scale


# ------------------------------------------------------------------------------------------------------------- inputs

RNG = np.random.default_rng(20260822)
Q_HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 64, 32, 9
TABLE = np.array([[4, 7, 1], [8, 2, 0], [3, 5, 6]], dtype=np.int32)
LENGTHS = [65, 31, 96]


def tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def numbers(tensor_: torch.Tensor) -> Array:
    result: Array = tensor_.to(torch.float64).numpy()
    return result


class Case:
    """A paged int8 cache in token order, and the scales and offsets of one antiquant mode in both forms."""

    def __init__(self, mode: int | tuple[int, int], offsets: bool, dtype: torch.dtype) -> None:
        self.modes = mode if isinstance(mode, tuple) else (mode, mode)
        self.query = tensor(RNG.normal(size=(3, Q_HEADS, 1, DIM)), dtype)
        self.codes = [RNG.integers(-128, 128, size=(PAGES, PAGE, KV_HEADS, DIM)).astype(np.int8) for _ in range(2)]
        self.arguments: dict[str, torch.Tensor] = {}
        self.decoded: list[list[Array]] = []
        for side, name, each in ((0, "key", self.modes[0]), (1, "value", self.modes[1])):
            scale, scale_tokens = self._parameter(each, dtype, 0.002 * (1 + 2 * side), 0.03 * (1 + side))
            self.arguments[f"{name}_antiquant_scale"] = scale
            shift_tokens: list[Array] = [np.zeros(())] * 3
            if offsets:
                shift, shift_tokens = self._parameter(each, dtype, -9.0, 9.0 + side)
                self.arguments[f"{name}_antiquant_offset"] = shift
            self.decoded.append([dequantize(self.tokens(side, s), scale_tokens[s], shift_tokens[s]) for s in range(3)])

    def tokens(self, side: int, sequence: int) -> Array:
        """Codes of one sequence in token order, (L, KV_N, D)."""
        rows = [self.codes[side][TABLE[sequence, t // PAGE], t % PAGE] for t in range(LENGTHS[sequence])]
        return np.stack(rows)

    def _parameter(self, mode: int, dtype: torch.dtype, low: float, high: float) -> tuple[torch.Tensor, list[Array]]:
        """The operator's argument, and per sequence its numbers broadcastable to (L, KV_N, D)."""
        own = torch.float32 if mode in (1, 3, 4, 5) else dtype
        shape = {
            0: (1, KV_HEADS, 1, DIM),
            1: (1, 3, 3 * PAGE),
            2: (KV_HEADS,),
            3: (3, KV_HEADS, 3 * PAGE + 5),
            4: (PAGES, PAGE),
            5: (PAGES, KV_HEADS, PAGE),
        }[mode]
        given = tensor(RNG.uniform(low, high, size=shape), own)
        n = numbers(given)
        found: list[Array] = []
        for s, length in enumerate(LENGTHS):
            if mode == 0:
                found.append(n[0, :, 0, :][None])
            elif mode == 1:
                found.append(n[0, s, :length][:, None, None])
            elif mode == 2:
                found.append(n[None, :, None])
            elif mode == 3:
                found.append(n[s, :, :length].T[:, :, None])
            elif mode == 4:
                found.append(np.array([n[TABLE[s, t // PAGE], t % PAGE] for t in range(length)])[:, None, None])
            else:
                found.append(np.array([n[TABLE[s, t // PAGE], :, t % PAGE] for t in range(length)])[:, :, None])
        return given, found

    def run(self, *, form: str = "BnBsH", **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        caches = []
        for side in range(2):
            cache = self.codes[side]
            if form == "BnBsH":
                caches.append(tensor(cache.reshape(PAGES, PAGE, KV_HEADS * DIM), torch.int8))
            else:
                caches.append(tensor(cache.transpose(0, 2, 1, 3), torch.int8))
        answer: tuple[torch.Tensor, torch.Tensor] = getattr(torch.ops.npu, FIA)(
            self.query,
            *caches,
            num_heads=Q_HEADS,
            num_key_value_heads=KV_HEADS,
            scale=0.19,
            input_layout="BNSD",
            block_table=torch.from_numpy(TABLE),
            block_size=PAGE,
            actual_seq_lengths_kv=LENGTHS,
            key_antiquant_mode=self.modes[0],
            value_antiquant_mode=self.modes[1],
            softmax_lse_flag=True,
            **self.arguments,
            **more,
        )
        return answer

    def expected(self) -> tuple[Array, Array]:
        outs, lses = [], []
        for s in range(3):
            query = numbers(self.query[s]).transpose(1, 0, 2)
            out, lse = attend(query, self.decoded[0][s], self.decoded[1][s], 0.19, causal=False)
            outs.append(out)
            lses.append(lse)
        return np.stack(outs), np.stack(lses)  # (B, 1, Q_N, D), (B, 1, Q_N)


UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half a unit in the last place of the output, relative."""


def assert_out(out: torch.Tensor, expected: Array, extra: float = 0.0) -> None:
    error = np.abs(numbers(out) - expected)
    allowed = UNIT[out.dtype] * np.abs(expected) + 1e-7 + extra
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert (error <= allowed).all(), f"error {error[worst]} at {worst}, allowed {allowed[worst]}"


# -------------------------------------------------------------------------------------------------------------- decode

MODES = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("offsets", [False, True], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_paged_decode(mode: int, dtype: torch.dtype, offsets: bool) -> None:
    case = Case(mode, offsets, dtype)
    out, lse = case.run()
    expected, expected_lse = case.expected()
    assert out.shape == (3, Q_HEADS, 1, DIM)
    assert lse.shape == (3, Q_HEADS, 1, 1)
    assert_out(out.transpose(1, 2), expected)
    np.testing.assert_allclose(numbers(lse)[..., 0].transpose(0, 2, 1), expected_lse, rtol=1e-6, atol=1e-6)


def test_mixed_modes() -> None:
    """K per channel with V per token."""
    case = Case((0, 1), True, torch.float16)
    out, _ = case.run()
    assert_out(out.transpose(1, 2), case.expected()[0])


def test_four_dimensional_cache() -> None:
    case = Case(5, False, torch.float16)
    flat, four = case.run(), case.run(form="BnNBsD")
    assert torch.equal(flat[0], four[0])
    assert torch.equal(flat[1], four[1])


@pytest.mark.parametrize("offsets", [False, True], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("mode", MODES)
def test_planes_stay_near_exact(mode: int, offsets: bool) -> None:
    """Three planes: float32 noise. Two planes: 254 times coarser, still far below a bfloat16 ulp of the output."""
    case = Case(mode, offsets, torch.float16)
    expected, expected_lse = case.expected()
    with emulator.settings(numeric="planes"):
        three, lse = case.run(inner_precise=0)
        two, _ = case.run(inner_precise=1)
    largest = max(float(np.abs(v).max()) for v in case.decoded[1])
    assert_out(three.transpose(1, 2), expected, extra=2e-5 * largest)
    assert_out(two.transpose(1, 2), expected, extra=1e-3 * largest)
    np.testing.assert_allclose(numbers(lse)[..., 0].transpose(0, 2, 1), expected_lse, rtol=2e-6, atol=2e-5)
    assert not torch.equal(two, three)  # the option does something


def test_key_offset_moves_the_lse_but_not_the_output() -> None:
    """Per channel, a K offset adds one number to all scores of a row."""
    case = Case(0, True, torch.float16)
    out, lse = case.run()
    case.arguments["key_antiquant_offset"] = torch.zeros_like(case.arguments["key_antiquant_offset"])
    out_without, lse_without = case.run()
    assert_out(out_without, numbers(out), extra=1e-3)
    assert (lse - lse_without).abs().max() > 0.1


def test_fused_scales_mean_the_same() -> None:
    case = Case(0, False, torch.float16)
    separate, _ = case.run()
    both = torch.cat([case.arguments.pop("key_antiquant_scale"), case.arguments.pop("value_antiquant_scale")])
    fused, _ = case.run(antiquant_scale=both)
    assert torch.equal(separate, fused)


def test_incremental_operator_agrees() -> None:
    """npu_incre_flash_attention with the same numbers, in BSH."""
    case = Case(0, False, torch.float16)
    expected, _ = case.run()
    out = torch.ops.npu.npu_incre_flash_attention(
        case.query.transpose(1, 2).reshape(3, 1, Q_HEADS * DIM),
        *(tensor(cache.reshape(PAGES, PAGE, KV_HEADS * DIM), torch.int8) for cache in case.codes),
        num_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        scale_value=0.19,
        input_layout="BSH",
        block_table=torch.from_numpy(TABLE),
        block_size=PAGE,
        actual_seq_lengths=LENGTHS,
        antiquant_scale=torch.cat([case.arguments["key_antiquant_scale"], case.arguments["value_antiquant_scale"]]),
    )
    assert torch.equal(out.reshape(3, Q_HEADS, 1, DIM), expected)


def test_v2_agrees() -> None:
    case = Case(5, False, torch.float16)
    expected, expected_lse = case.run()
    out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2(
        case.query,
        *(tensor(cache.reshape(PAGES, PAGE, KV_HEADS * DIM), torch.int8) for cache in case.codes),
        num_query_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=0.19,
        input_layout="BNSD",
        block_table=torch.from_numpy(TABLE),
        block_size=PAGE,
        actual_seq_kvlen=LENGTHS,
        dequant_scale_key=case.arguments["key_antiquant_scale"],
        dequant_scale_value=case.arguments["value_antiquant_scale"],
        key_quant_mode=5,
        value_quant_mode=5,
        return_softmax_lse=True,
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_nz_cache() -> None:
    """A cache of (nb, KV_N, D/32, bs, 32), decode and four query tokens with the triangular mask."""
    heads, dim, page, lengths = 10, 128, 128, [200]
    table = np.array([[2, 1]], dtype=np.int32)
    codes = [RNG.integers(-128, 128, size=(3, page, 1, dim)).astype(np.int8) for _ in range(2)]
    scale = [tensor(RNG.uniform(0.002, 0.03, size=(1, 1, dim)), torch.bfloat16) for _ in range(2)]
    pages = [tensor(c.reshape(3, page, 1, 4, 32).transpose(0, 2, 3, 1, 4), torch.int8) for c in codes]
    decoded = [
        np.stack([dequantize(codes[i][table[0, t // page], t % page], numbers(scale[i])[0], 0.0) for t in range(200)])
        for i in range(2)
    ]
    for rows in (1, 4):
        query = tensor(RNG.normal(size=(1, heads, rows, dim)), torch.bfloat16)
        mask: dict[str, Any] = {}
        if rows > 1:
            mask = {"sparse_mode": 3, "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1)}
        out, _ = getattr(torch.ops.npu, FIA)(
            query,
            *pages,
            num_heads=heads,
            num_key_value_heads=1,
            scale=0.1,
            input_layout="BNSD",
            block_table=torch.from_numpy(table),
            block_size=page,
            actual_seq_lengths_kv=lengths,
            key_antiquant_scale=scale[0],
            value_antiquant_scale=scale[1],
            inner_precise=1,
            **mask,
        )
        expected, _ = attend(numbers(query[0]).transpose(1, 0, 2), *decoded, 0.1, causal=True)
        assert_out(out[0].transpose(0, 1), expected)


def test_empty_sequence_and_zero_query() -> None:
    case = Case(5, False, torch.float16)
    case.query[1] = 0
    emulator.OBSERVED.clear()
    out, _ = case.run()
    assert emulator.OBSERVED["faint_query_rows"] == Q_HEADS
    assert torch.isfinite(out).all()
    with emulator.settings(numeric="planes"):
        assert case.run()[0][1].isnan().all()  # 127 / 0: what a device answers is not known
    query = numbers(case.query)
    assert (query[1] == 0).all()


def test_value_scales_of_zero() -> None:
    """The second product divides 127 by the largest weight times V scale."""
    case = Case(5, False, torch.float16)
    case.arguments["value_antiquant_scale"][:, 0] = 0
    emulator.OBSERVED.clear()
    out, _ = case.run()
    assert emulator.OBSERVED["faint_value_scales"] == len(LENGTHS)
    group = Q_HEADS // KV_HEADS
    assert (out[:, :group] == 0).all()
    with emulator.settings(numeric="planes"):
        out = case.run()[0]
    assert out[:, :group].isnan().all()
    assert out[:, group:].isfinite().all()


def test_sequence_without_tokens_gives_zeros() -> None:
    case = Case(5, False, torch.float16)
    global LENGTHS
    kept, LENGTHS = LENGTHS, [65, 0, 96]
    try:
        out, lse = case.run()
    finally:
        LENGTHS = kept
    assert (out[1] == 0).all()
    assert lse[1].isnan().all()


# ------------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("layout", ["TND", "BSND", "BNSD", "BSH"])
@pytest.mark.parametrize("sparse", [2, 3])
def test_prefill(layout: str, sparse: int) -> None:
    """Dense float K/V; mode 3 is causal from the lower right, mode 2 from the upper left."""
    dim = 128
    rows, lengths = [3, 5], [9, 7]
    queries = [RNG.normal(size=(n, Q_HEADS, dim)) for n in rows]
    keys, values = ([RNG.normal(size=(n, KV_HEADS, dim)) for n in lengths] for _ in range(2))
    queries, keys, values = (
        [numbers(tensor(array, torch.float16)) for array in side] for side in (queries, keys, values)
    )
    if layout == "TND":
        q, k, v = (tensor(np.concatenate(side), torch.float16) for side in (queries, keys, values))
        counts = {"actual_seq_lengths": [3, 8], "actual_seq_lengths_kv": [9, 16]}
    else:
        counts = {"actual_seq_lengths": rows, "actual_seq_lengths_kv": lengths}

        def pad(side: list[Array], to: int) -> torch.Tensor:
            full = np.full((2, to, *side[0].shape[1:]), np.nan)
            for i, array in enumerate(side):
                full[i, : len(array)] = array
            if layout == "BNSD":
                full = full.transpose(0, 2, 1, 3)
            return tensor(full.reshape(2, to, -1) if layout == "BSH" else full, torch.float16)

        q, k, v = pad(queries, 5), pad(keys, 9), pad(values, 9)
    out, lse = getattr(torch.ops.npu, FIA)(
        q,
        k,
        v,
        num_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        scale=0.07,
        input_layout=layout,
        sparse_mode=sparse,
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        softmax_lse_flag=True,
        **counts,
    )
    assert out.shape == q.shape
    start = 0
    for s in range(2):
        if sparse == 3:
            expected, expected_lse = attend(queries[s], keys[s], values[s], 0.07, causal=True)
        else:  # row r sees tokens 0 .. r
            parts = [
                attend(queries[s][r : r + 1], keys[s][: r + 1], values[s][: r + 1], 0.07, causal=False)
                for r in range(rows[s])
            ]
            expected, expected_lse = (np.concatenate([part[i] for part in parts]) for i in range(2))
        if layout == "TND":
            got, got_lse = out[start : start + rows[s]], lse[start : start + rows[s], :, 0]
        else:
            dense = out.transpose(1, 2) if layout == "BNSD" else out.reshape(2, 5, Q_HEADS, dim)
            got, got_lse = dense[s, : rows[s]], lse[s, :, : rows[s], 0].T
        start += rows[s]
        assert_out(got, expected)
        np.testing.assert_allclose(numbers(got_lse), expected_lse, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- scatter


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_scatter_rows(mode: str) -> None:
    """Every row lands in its slot, nothing else changes, and -1 writes nothing."""
    tokens, heads, dim, page, pages = 5, 2, 64, 32, 4
    key, value = (RNG.integers(-128, 128, size=(tokens, heads, dim)).astype(np.int8) for _ in range(2))
    before = [RNG.integers(-128, 128, size=(pages, page, heads, dim)).astype(np.int8) for _ in range(2)]
    slots = [70, 3, 127, 64, -1] if mode == "Norm" else [70, 3, 127, 64, 5]

    def lay_out(cache: Array) -> Array:
        if mode == "Norm":
            return cache
        return np.ascontiguousarray(cache.reshape(pages, page, heads * dim // 32, 32).transpose(0, 2, 1, 3))

    after = [cache.copy() for cache in before]
    for row, slot in enumerate(slots):
        if slot >= 0:
            after[0][slot // page, slot % page] = key[row]
            after[1][slot // page, slot % page] = value[row]
    caches = [torch.from_numpy(lay_out(cache).copy()) for cache in before]
    torch.ops.npu.npu_scatter_pa_kv_cache(
        torch.from_numpy(key), torch.from_numpy(value), *caches, torch.tensor(slots), cache_mode=mode
    )
    for cache, expected in zip(caches, after, strict=True):
        np.testing.assert_array_equal(cache.numpy(), lay_out(expected))


def test_scatter_of_scales() -> None:
    before = RNG.normal(size=(40,)).astype(np.float32)
    updates = RNG.normal(size=(3,)).astype(np.float32)
    target = torch.from_numpy(before.copy())
    torch.ops.npu.npu_scatter_nd_update_(target, torch.tensor([[7], [0], [39]]), torch.from_numpy(updates))
    before[[7, 0, 39]] = updates
    np.testing.assert_array_equal(target.numpy(), before)
