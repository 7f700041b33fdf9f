"""Float64 attention over decoded values, one sequence at a time, and the error an implementation is allowed.

For every query row the oracle walks over the keys that row may see and over no others, so a masked key is never
touched: whatever bits lie there, NaN included, cannot reach a result.

Shapes: query (q_len, query_heads, key_dim), key (kv_len, kv_heads, key_dim), value (kv_len, kv_heads, value_dim);
query head h reads KV head h // (query_heads / kv_heads). Inputs of any float dtype are widened to float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Float64Array: TypeAlias = npt.NDArray[np.float64]

PRODUCT_ERROR = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
"""u by query dtype: relative error of the products of an implementation, its accumulation included.

2**-8 and 2**-11 are the spacings of bfloat16 and float16 just below one; 2**-20 leaves float32 (2**-24) four bits for
accumulation, and is far below TF32 (2**-11), which may not stand in for it.
"""

LSE_FLOOR = 2.0**-20
"""Relative error allowed to the float32 LSE beyond that of the scores."""

VALUE_FLOOR = 2.0**-24
"""Share of the largest |v| below which a float32 accumulator cannot resolve a probability."""


@dataclass(frozen=True)
class _Row:
    """One query row against the keys it may see: index, scaled q·k terms and the softmax over them."""

    index: int
    score_magnitude: Float64Array  # (query_heads,), max over keys of sum over key_dim of |q k|
    probabilities: Float64Array  # (query_heads, keys), sums to one together with the sink
    lse: Float64Array  # (query_heads,)
    value: Float64Array  # (query_heads, keys, value_dim)


def attend(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: npt.NDArray[Any] | None = None,
    query_start: int | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Attention output (q_len, query_heads, value_dim) and natural-log LSE (q_len, query_heads), float64.

    s = scale * q·k, then softcap * tanh(s / softcap). Position p sees keys p - window < j <= p. ``sinks``
    (query_heads,) are logits of one extra partial with output zero, included in the LSE; leave them out for partials
    that are to be merged. A row that sees no key gives zeros and -inf, its sink notwithstanding.

    query_start: position of the first query row, counted from the first key row. By default the query rows are the
    last rows of the sequence: kv_len - q_len. Another value makes a partial over part of the keys: for keys a..b of a
    sequence of n, pass key[a:b], value[a:b] and n - q_len - a.
    """
    q_len, query_heads, _ = query.shape
    out = np.zeros((q_len, query_heads, value.shape[-1]))
    lse = np.full((q_len, query_heads), -np.inf)
    with np.errstate(invalid="ignore"):  # poison of a float page has to stay visible, without a warning
        for row in _rows(query, key, value, scale, softcap, window, sinks, query_start):
            out[row.index] = np.einsum("hj,hjd->hd", row.probabilities, row.value)
            lse[row.index] = row.lse
    return out, lse


def attention_bound(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    *,
    query_dtype: str,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: npt.NDArray[Any] | None = None,
    query_start: int | None = None,
    extra_product_error: float = 0.0,
    weight_error: float = 0.0,
) -> tuple[Float64Array, Float64Array]:
    """The error allowed to each output element and to each LSE; arguments and shapes as `attend`.

    With d = u * scale * max_j sum_d |q_d k_jd|: every score is off by at most d, so every probability by a factor
    within e**(+-2d); rounding probabilities and products adds 2u, storing the output u:
    ``(e**(2d) - 1 + 2u) * sum_j p_j |v_j| + u |out| + 2**-24 * max_j |v_j|``, and for the LSE
    ``d + u + 2**-20 * max(1, |LSE|)``. A soft cap has slope at most one and never widens it.

    query_dtype: 'bfloat16', 'float16' or 'float32' gives u; ``extra_product_error`` is added to u where a backend
    declares such a term (query operands split into integer planes). ``weight_error`` e is likewise declared where the
    softmax weights are held to a fixed step of each row's largest, as by a second matrix product in integer planes:
    every weight may be off by e times the largest, which adds ``e * max_j p_j * sum_j |v_j|``. Rows that see no key
    must be exact: bound 0.
    """
    if query_dtype not in PRODUCT_ERROR:
        raise ValueError(f"query dtype {query_dtype!r} has no bound; choose one of {', '.join(PRODUCT_ERROR)}")
    u = PRODUCT_ERROR[query_dtype] + extra_product_error
    q_len, query_heads, _ = query.shape
    out_bound = np.zeros((q_len, query_heads, value.shape[-1]))
    lse_bound = np.zeros((q_len, query_heads))
    with np.errstate(over="ignore", invalid="ignore"):
        for row in _rows(query, key, value, scale, softcap, window, sinks, query_start):
            d = u * abs(scale) * row.score_magnitude
            magnitude = np.abs(row.value)
            mean_magnitude = np.einsum("hj,hjd->hd", row.probabilities, magnitude)
            out = np.einsum("hj,hjd->hd", row.probabilities, row.value)
            out_bound[row.index] = (
                (np.expm1(2.0 * d) + 2.0 * u)[:, None] * mean_magnitude
                + u * np.abs(out)
                + VALUE_FLOOR * magnitude.max(axis=1)
                + weight_error * row.probabilities.max(axis=1)[:, None] * magnitude.sum(axis=1)
            )
            lse_bound[row.index] = d + u + LSE_FLOOR * np.maximum(1.0, np.abs(row.lse))
    return out_bound, lse_bound


def observed_over_bound(observed: npt.NDArray[Any], expected: npt.NDArray[Any], bound: npt.NDArray[Any]) -> float:
    """max |observed - expected| / bound over all elements; at most 1 is agreement. 0 for empty arrays.

    Equal values count 0 whatever the bound, so also two infinities of one sign, and two NaN (poison must stay
    visible). A NaN or an infinity on one side only, or any difference where the bound is 0, counts infinite.
    """
    if observed.shape != expected.shape or expected.shape != bound.shape:
        raise ValueError(f"shapes differ: observed {observed.shape}, expected {expected.shape}, bound {bound.shape}")
    seen, wanted = observed.astype(np.float64), expected.astype(np.float64)
    agree = (seen == wanted) | (np.isnan(seen) & np.isnan(wanted))
    comparable = np.isfinite(seen) & np.isfinite(wanted) & (bound > 0)
    ratio = np.where(agree, 0.0, np.inf)
    measured = comparable & ~agree
    ratio[measured] = np.abs(seen[measured] - wanted[measured]) / bound[measured]
    return float(ratio.max(initial=0.0))


def merge(partials: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> tuple[Float64Array, Float64Array]:
    """Merge (output (..., value_dim), LSE (...)) partials over disjoint keys into one, in float64.

    A partial with LSE -inf saw nothing and is left out, whatever its output holds. No partial at all, or none that
    saw anything, gives zeros and -inf.
    """
    outs, lses = [], []
    for out, lse in partials:
        outs.append(np.where(np.isneginf(lse)[..., None], 0.0, out.astype(np.float64)))
        lses.append(lse.astype(np.float64))
    if not outs:
        raise ValueError("nothing to merge: at least one (output, LSE) partial is needed, even if it saw no key")
    stacked = np.stack(lses)
    total, weights = _softmax(stacked, axis=0)
    return np.einsum("p...,p...d->...d", weights, np.stack(outs)), total


def _rows(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: npt.NDArray[Any] | None,
    query_start: int | None,
) -> Iterator[_Row]:
    """The softmax of every query row that sees at least one key."""
    _check(query, key, value, window, softcap, sinks, query_start)
    q_len, query_heads, _ = query.shape
    kv_len, kv_heads, _ = key.shape
    first_position = kv_len - q_len if query_start is None else query_start
    kv_head = np.arange(query_heads) // (query_heads // kv_heads)
    q, k, v = (tensor.astype(np.float64) for tensor in (query, key, value))
    for index in range(q_len):
        position = first_position + index
        start = 0 if window is None else max(0, position - window + 1)
        stop = min(kv_len, position + 1)
        if start >= stop:
            continue
        keys = k[start:stop, kv_head]  # (keys, query_heads, key_dim)
        with np.errstate(invalid="ignore"):  # inf * 0 and inf - inf
            scores = scale * np.einsum("hd,jhd->hj", q[index], keys)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            extended = scores if sinks is None else np.concatenate([scores, sinks.astype(np.float64)[:, None]], axis=1)
            lse, probabilities = _softmax(extended, axis=1)
            score_magnitude = np.einsum("hd,jhd->hj", np.abs(q[index]), np.abs(keys)).max(axis=1)
        yield _Row(
            index=index,
            score_magnitude=score_magnitude,
            probabilities=probabilities[:, : stop - start],
            lse=lse,
            value=np.moveaxis(v[start:stop, kv_head], 0, 1),
        )


def _softmax(scores: Float64Array, axis: int) -> tuple[Float64Array, Float64Array]:
    """log-sum-exp along ``axis`` and the softmax weights; where all scores are -inf: -inf and weights 0."""
    largest = scores.max(axis=axis, keepdims=True)
    nothing = np.isneginf(largest)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(scores - np.where(nothing, 0.0, largest))
        total = weights.sum(axis=axis, keepdims=True)
        lse = np.squeeze(largest + np.log(np.where(nothing, 1.0, total)), axis=axis)
    return lse, weights / np.where(nothing, 1.0, total)


def _check(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    window: int | None,
    softcap: float | None,
    sinks: npt.NDArray[Any] | None,
    query_start: int | None,
) -> None:
    q_len, query_heads, key_dim = query.shape
    kv_len, kv_heads, _ = key.shape
    if key.shape[-1] != key_dim:
        raise ValueError(f"key dim of query is {key_dim}, of key {key.shape[-1]}; they have to be equal")
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(f"key is {key.shape} and value {value.shape}; tokens and heads have to be equal")
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are no multiple of {kv_heads} KV heads")
    if query_start is None and 0 < kv_len < q_len:
        raise ValueError(f"{q_len} query rows are the last rows of a sequence, which has only {kv_len} tokens")
    if window is not None and window < 1:
        raise ValueError(f"window {window} sees nothing; it counts the position itself, so at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"soft cap {softcap} has to be above 0, or None for no cap")
    if sinks is not None and sinks.shape != (query_heads,):
        raise ValueError(f"sinks are one logit per query head, shape ({query_heads},); got {sinks.shape}")
