"""The attention oracle against hand-computed numbers, a naive double loop and its own partials."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from kvport_conformance import inputs
from kvport_conformance.oracle_attention import attend, attention_bound, merge, observed_over_bound
from kvport_conformance.oracle_codec import CodecSpec, decode, encode
from kvport_conformance.oracle_floats import BF16

Array = np.ndarray[Any, Any]


def f32(numbers: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A float32 array of (nested) Python numbers."""
    return np.asarray(numbers, np.float32)


def column(*numbers: float) -> Array:
    """(tokens, 1, 1)."""
    return np.asarray(numbers, np.float32)[:, None, None]


def naive(
    query: Array, key: Array, value: Array, scale: float, softcap: float | None, window: int | None, sinks: Array | None
) -> tuple[Array, Array]:
    """Attention with math.fsum, one Python number at a time."""
    q_len, query_heads, _ = query.shape
    kv_len, kv_heads, value_dim = value.shape
    out, lse = np.zeros((q_len, query_heads, value_dim)), np.zeros((q_len, query_heads))
    for row in range(q_len):
        for head in range(query_heads):
            kv_head = head * kv_heads // query_heads
            position = kv_len - q_len + row
            seen = [j for j in range(kv_len) if j <= position and (window is None or j > position - window)]
            scores = []
            for j in seen:
                products = (float(a) * float(b) for a, b in zip(query[row, head], key[j, kv_head], strict=True))
                score = scale * math.fsum(products)
                scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
            sink = [] if sinks is None else [float(sinks[head])]
            total = math.fsum(math.exp(score) for score in scores + sink)
            lse[row, head] = math.log(total)
            for d in range(value_dim):
                weighted = (math.exp(s) * float(value[j, kv_head, d]) for s, j in zip(scores, seen, strict=True))
                out[row, head, d] = math.fsum(weighted) / total
    return out, lse


# --- published figures ----------------------------------------------------------------------------------------------


def test_two_keys_by_hand() -> None:
    out, lse = attend(column(1.0), column(0.14, 0.26), column(1.0, 3.0), scale=1.0)
    assert out.item() == pytest.approx(2.05993, abs=5e-6)
    assert lse.item() == pytest.approx(math.log(math.exp(0.14) + math.exp(0.26)), rel=1e-7)


def test_keys_on_a_coarse_grid_lose_their_difference() -> None:
    spec, step = CodecSpec("int8", "tensor", static=True), np.float32(0.2)
    key = decode(spec, encode(spec, column(0.14, 0.26), static_scale=step).planes, 1, static_scale=step)
    out, _ = attend(column(1.0), key, column(1.0, 3.0), scale=1.0)
    assert out.item() == 2.0


def test_values_on_a_coarse_grid_move_the_mean() -> None:
    spec, step = CodecSpec("int8", "tensor", static=True), np.float32(0.5)
    value = decode(spec, encode(spec, column(1.0, 2.8), static_scale=step).planes, 1, static_scale=step)
    even = column(0.0, 0.0)
    assert attend(column(1.0), even, column(1.0, 2.8), scale=1.0)[0].item() == pytest.approx(1.9, abs=1e-6)
    assert attend(column(1.0), even, value, scale=1.0)[0].item() == 2.0


# --- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_equals_a_naive_double_loop(
    softcap: float | None, window: int | None, with_sinks: bool, query_heads: int, kv_heads: int
) -> None:
    query = inputs.query(1, (3, query_heads, 16))
    key, value = inputs.key(1, (11, kv_heads, 16)), inputs.value(1, (11, kv_heads, 8))
    sinks = inputs.values(9, (query_heads,), low=-2.0, high=4.0) if with_sinks else None
    out, lse = attend(query, key, value, scale=0.25, softcap=softcap, window=window, sinks=sinks)
    expected_out, expected_lse = naive(query, key, value, 0.25, softcap, window, sinks)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


def test_every_feature_changes_the_result() -> None:
    query, key, value = inputs.query(1, (3, 4, 16)), inputs.key(1, (11, 2, 16)), inputs.value(1, (11, 2, 16))
    plain, lse = attend(query, key, value, scale=0.25)
    for arguments in ({"softcap": 1.5}, {"window": 5}, {"sinks": f32([0, 1, 2, 3])}):
        other, other_lse = attend(query, key, value, scale=0.25, **arguments)
        assert np.abs(plain - other).max() > 1e-3
        assert np.abs(lse - other_lse).max() > 1e-3


def test_one_visible_key_returns_its_value_and_its_score() -> None:
    query, key, value = inputs.query(2, (4, 2, 16)), inputs.key(2, (9, 2, 16)), inputs.value(2, (9, 2, 16))
    out, lse = attend(query, key, value, scale=0.5, window=1)
    np.testing.assert_array_equal(out, value[5:].astype(np.float64))
    np.testing.assert_allclose(lse, 0.5 * (query.astype(np.float64) * key[5:]).sum(axis=-1), rtol=1e-12)


def test_a_sink_takes_its_share_of_the_weight() -> None:
    out, lse = attend(column(1.0), column(0.0), column(4.0), scale=1.0, sinks=f32([0.0]))
    assert out.item() == 2.0
    assert lse.item() == pytest.approx(math.log(2.0))


def test_large_scores_do_not_overflow() -> None:
    out, lse = attend(column(1.0), column(1000.0, 990.0), column(1.0, 3.0), scale=1.0)
    assert out.item() == pytest.approx(1.0 + 2.0 / (1.0 + math.exp(10.0)))
    assert lse.item() == pytest.approx(1000.0)


@pytest.mark.parametrize("sinks", [None, f32([1.0, 2.0])])
def test_an_empty_sequence_gives_zeros_and_minus_infinity(sinks: Array | None) -> None:
    empty = np.zeros((0, 1, 8), np.float32)
    query = inputs.query(1, (2, 2, 8))
    out, lse = attend(query, empty, empty, scale=1.0, sinks=sinks)
    assert not out.any()
    assert np.isneginf(lse).all()
    out_bound, lse_bound = attention_bound(query, empty, empty, query_dtype="float32", scale=1.0, sinks=sinks)
    assert observed_over_bound(out, out, out_bound) == observed_over_bound(lse, lse, lse_bound) == 0.0
    assert observed_over_bound(out + 1e-30, out, out_bound) == math.inf
    assert observed_over_bound(np.zeros_like(lse), lse, lse_bound) == math.inf


def test_a_declared_weight_error_widens_the_output_bound_alone() -> None:
    """Weights p = (0.8, 0.2) over |v| = (1, 4): a step of e = 2^-15 of the larger one adds e * 0.8 * 5."""
    arguments = column(1.0), column(math.log(4.0), 0.0), column(1.0, -4.0)
    plain, declared = (
        attention_bound(*arguments, query_dtype="float32", scale=1.0, weight_error=e) for e in (0.0, 2.0**-15)
    )
    assert (declared[0] - plain[0]).item() == pytest.approx(2.0**-15 * 0.8 * 5, rel=1e-6)
    assert declared[1].item() == plain[1].item()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_and_values_are_never_touched(poison: float) -> None:
    query, key, value = inputs.query(3, (4, 2, 16)), inputs.key(3, (10, 2, 16)), inputs.value(3, (10, 2, 16))
    clean, clean_lse = attend(query, key, value, scale=0.25, window=3)
    key[[0, 1, 2, 3, 9]] = poison
    value[[0, 1, 2, 3, 9]] = poison
    out, lse = attend(query, key, value, scale=0.25, window=3)
    np.testing.assert_array_equal(out[:3], clean[:3])
    np.testing.assert_array_equal(lse[:3], clean_lse[:3])
    assert np.isnan(out[3]).all(), "the last row sees the poison, which has to stay visible"


def test_rows_equal_the_same_rows_asked_for_alone() -> None:
    query, key, value = inputs.query(4, (6, 2, 16)), inputs.key(4, (20, 1, 16)), inputs.value(4, (20, 1, 16))
    out, lse = attend(query, key, value, scale=0.25, window=7)
    for row in range(6):
        stop = 15 + row
        alone, alone_lse = attend(query[row : row + 1], key[:stop], value[:stop], scale=0.25, window=7)
        np.testing.assert_allclose(out[row], alone[0], rtol=1e-14)
        np.testing.assert_allclose(lse[row], alone_lse[0], rtol=1e-14)


# --- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("cuts", [(5,), (1, 18), (3, 9, 17), (16, 17, 18, 19)])
def test_merged_partials_equal_a_single_pass(cuts: tuple[int, ...], window: int | None) -> None:
    """Cuts reach into the query rows' own keys, so some partials are invisible to some rows."""
    q_len, kv_len = 4, 20
    query, key, value = inputs.query(5, (q_len, 4, 16)), inputs.key(5, (kv_len, 2, 16)), inputs.value(5, (kv_len, 2, 8))
    sinks = f32([0.5, -1.0, 3.0, 0.0])
    partials = []
    edges = [0, *cuts, kv_len]
    for start, stop in itertools.pairwise(edges):
        part = (key[start:stop], value[start:stop])
        partials.append(attend(query, *part, scale=0.25, window=window, query_start=kv_len - q_len - start))
    out, lse = merge(partials)
    expected_out, expected_lse = attend(query, key, value, scale=0.25, window=window)
    np.testing.assert_allclose(out, expected_out, rtol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)

    sink = (np.zeros_like(out), np.broadcast_to(sinks, lse.shape))
    with_sinks = attend(query, key, value, scale=0.25, window=window, sinks=sinks)
    merged = merge([*partials, sink])
    np.testing.assert_allclose(merged[0], with_sinks[0], rtol=1e-13)
    np.testing.assert_allclose(merged[1], with_sinks[1], rtol=1e-13)


def test_merging_by_hand() -> None:
    out, lse = merge([(np.asarray([[1.0]]), np.asarray([0.0])), (np.asarray([[4.0]]), np.asarray([math.log(2.0)]))])
    assert out.item() == pytest.approx(3.0)
    assert lse.item() == pytest.approx(math.log(3.0))


def test_a_partial_that_saw_nothing_is_left_out_whatever_it_holds() -> None:
    nothing = (np.full((1, 2), np.nan), np.asarray([-np.inf]))
    something = (np.asarray([[1.0, -2.0]]), np.asarray([-1000.0]))
    out, lse = merge([nothing, something, nothing])
    assert out.tolist() == [[1.0, -2.0]]
    assert lse.tolist() == [-1000.0]
    out, lse = merge([nothing, nothing])
    assert out.tolist() == [[0.0, 0.0]]
    assert lse.tolist() == [-math.inf]
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_the_bound_by_hand() -> None:
    query, key, value = column(2.0), column(0.5, -1.0), column(-3.0, 5.0)
    sinks = f32([0.25])
    u, scale = 2.0**-8, 0.125
    weights = [math.exp(0.125), math.exp(-0.25), math.exp(0.25)]
    p = [weight / sum(weights) for weight in weights]
    d = u * scale * 2.0
    expected = (math.exp(2 * d) - 1 + 2 * u) * (3 * p[0] + 5 * p[1]) + u * abs(5 * p[1] - 3 * p[0]) + 2.0**-24 * 5
    arguments: dict[str, Any] = {"query_dtype": "bfloat16", "scale": scale, "sinks": sinks}
    out_bound, lse_bound = attention_bound(query, key, value, **arguments)
    assert out_bound.item() == pytest.approx(expected, rel=1e-12)
    assert lse_bound.item() == pytest.approx(d + u + 2.0**-20 * max(1.0, math.log(sum(weights))), rel=1e-12)


@pytest.mark.parametrize(("query_dtype", "u"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-20)])
def test_u_follows_the_query_dtype(query_dtype: str, u: float) -> None:
    zero_key = column(0.0)
    out_bound, lse_bound = attention_bound(column(1.0), zero_key, column(-2.0), query_dtype=query_dtype, scale=1.0)
    assert out_bound.item() == pytest.approx(3 * u * 2.0 + 2.0**-24 * 2.0)
    assert lse_bound.item() == pytest.approx(u + 2.0**-20)
    wider, _ = attention_bound(
        column(1.0), zero_key, column(-2.0), query_dtype=query_dtype, scale=1.0, extra_product_error=u
    )
    assert wider.item() == pytest.approx(6 * u * 2.0 + 2.0**-24 * 2.0)
    with pytest.raises(ValueError, match="float64"):
        attention_bound(column(1.0), zero_key, zero_key, query_dtype="float64", scale=1.0)


def test_a_bfloat16_implementation_fits_and_a_scale_fault_in_float32_does_not() -> None:
    query = inputs.query(7, (2, 4, 64), dtype="bfloat16")
    key, value = inputs.key(7, (130, 2, 64), dtype="bfloat16"), inputs.value(7, (130, 2, 64), dtype="bfloat16")
    expected, lse = attend(query, key, value, scale=0.125)
    tight, tight_lse = attention_bound(query, key, value, query_dtype="float32", scale=0.125)
    loose, _ = attention_bound(query, key, value, query_dtype="bfloat16", scale=0.125)
    stored = BF16.round(expected.astype(np.float32))
    assert 0.0 < observed_over_bound(stored, expected, loose) <= 1.0
    assert observed_over_bound(stored, expected, tight) > 1.0
    assert observed_over_bound(expected.astype(np.float32), expected, tight) <= 1.0
    faulty, faulty_lse = attend(query, key * np.float32(1.01), value, scale=0.125)
    assert observed_over_bound(faulty, expected, tight) > 1.0
    assert observed_over_bound(faulty_lse, lse, tight_lse) > 1.0
    assert observed_over_bound(expected * 1.01, expected, tight) > 1.0
    swapped, _ = attend(query, value, key, scale=0.125)
    assert observed_over_bound(swapped, expected, loose) > 10.0


def test_observed_over_bound_reports_the_worst_element() -> None:
    expected, bound = np.asarray([1.0, 2.0, 3.0]), np.asarray([0.5, 0.25, 0.0])
    assert observed_over_bound(np.asarray([1.25, 2.5, 3.0]), expected, bound) == 2.0
    assert observed_over_bound(np.asarray([1.0, 2.0, 3.5]), expected, bound) == math.inf
    assert observed_over_bound(np.asarray([np.nan, 2.0, 3.0]), expected, bound) == math.inf
    assert observed_over_bound(np.asarray([np.inf, 2.0, 3.0]), expected, bound) == math.inf
    assert observed_over_bound(expected, np.asarray([np.nan, 2.0, 3.0]), bound) == math.inf
    poisoned = np.asarray([np.nan, -np.inf, 3.0])
    assert observed_over_bound(poisoned, poisoned.copy(), np.asarray([np.nan, np.nan, 0.0])) == 0.0
    assert observed_over_bound(poisoned, np.asarray([np.nan, np.inf, 3.0]), bound) == math.inf
    assert observed_over_bound(np.zeros(0), np.zeros(0), np.zeros(0)) == 0.0
    assert observed_over_bound(np.asarray([1.0]), np.asarray([2.0]), np.asarray([np.nan])) == math.inf
    with pytest.raises(ValueError, match="shapes"):
        observed_over_bound(np.zeros(2), np.zeros(1), np.zeros(2))


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        (((1, 6, 8), (4, 4, 8), (4, 4, 8)), {}, "6 query heads"),
        (((1, 4, 8), (4, 4, 16), (4, 4, 8)), {}, "key dim"),
        (((1, 4, 8), (4, 4, 8), (3, 4, 8)), {}, "tokens and heads"),
        (((5, 4, 8), (4, 4, 8), (4, 4, 8)), {}, "5 query rows"),
        (((1, 4, 8), (4, 4, 8), (4, 4, 8)), {"window": 0}, "window 0"),
        (((1, 4, 8), (4, 4, 8), (4, 4, 8)), {"softcap": 0.0}, "soft cap"),
        (((1, 4, 8), (4, 4, 8), (4, 4, 8)), {"sinks": np.zeros(3)}, "sinks"),
    ],
)
def test_what_makes_no_sense_is_refused(
    shapes: tuple[tuple[int, int, int], ...], arguments: dict[str, Any], message: str
) -> None:
    query, key, value = (np.ones(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        attend(query, key, value, scale=1.0, **arguments)
