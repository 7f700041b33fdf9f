"""Comparing a backend's answer with the oracle's, and saying in words what is wrong with it.

Messages name the place (page, slot, head, channel), the two values and the allowance. Where one of a list of common
mistakes reproduces what was observed, the message names that mistake: most vendors' first failures are among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvport_conformance import bounds, oracle_attention, oracle_codec
from kvport_conformance.content import SIDES, Content, Ids, Side
from kvport_conformance.figures import Figures
from kvport_conformance.oracle_floats import Array, BoolArray, Float32Array
from kvport_conformance.verdicts import Disagreement

FILL: Final = 0xFF

# --- stored planes --------------------------------------------------------------------------------------------------


def judge_planes(
    content: Content,
    ids: Ids,
    observed: dict[str, Array],
    places: Sequence[str],
    figures: Figures,
    *,
    exactness: str,
    unambiguous: bool = False,
) -> None:
    """Compare planes (token-major, one row a token) with what must be stored for these tokens.

    ``exactness`` is the backend's declared class. ``unambiguous`` tokens leave no class any choice. ``places`` say in
    words where each row lies.
    """
    for name in SIDES:
        side = content.sides[name]
        expected = content.side_planes(name, ids)
        seen = {plane: observed[f"{name}.{plane}"] for plane in expected}
        _judge_scales(side, expected, seen, places, figures, exactness, unambiguous)
        _judge_codes(content, side, ids, expected, seen, places, figures, exactness, unambiguous)
        for plane, array in seen.items():
            figures.stored(f"{name}.{plane}", array)


def _judge_scales(
    side: Side,
    expected: dict[str, Array],
    seen: dict[str, Array],
    places: Sequence[str],
    figures: Figures,
    exactness: str,
    exact: bool,
) -> None:
    for plane in expected:
        if plane == "codes":
            continue
        want, have = _bits(expected[plane]), _bits(seen[plane])
        figures.scales += want.size
        differing = want != have
        if not differing.any():
            continue
        figures.scales_differing += int(differing.sum())
        distance = np.abs(_ordered(want) - _ordered(have))
        figures.scale_ulps = max(figures.scale_ulps, int(distance.max()))
        where = _first(differing)
        excusable = exactness == "one-code" and not exact and distance.max() <= bounds.SCALE_ULPS.value
        if not excusable:
            raise Disagreement(
                f"{side.name}.{plane} differs in {int(differing.sum())} of {want.size} at {places[where[0]]}"
                f"{_rest(where)}: stored {_as_float(side, plane, seen, where)!r} (0x{int(have[where]):x}), must be "
                f"{_as_float(side, plane, expected, where)!r} (0x{int(want[where]):x}); "
                f"{int(distance[where])} units in the last place here, "
                f"{int(distance.max())} at most{_scale_hint(side, plane, expected, seen)}"
            )


def _judge_codes(
    content: Content,
    side: Side,
    ids: Ids,
    expected: dict[str, Array],
    seen: dict[str, Array],
    places: Sequence[str],
    figures: Figures,
    exactness: str,
    exact: bool,
) -> None:
    want, have = _bits(expected["codes"]), _bits(seen["codes"])
    figures.codes += want.size
    differing = want != have
    if side.spec.code in oracle_codec.FLOAT_PAGES:  # a NaN may have any payload
        differing &= ~(_is_nan(side, expected["codes"]) & _is_nan(side, seen["codes"]))
    if not differing.any():
        return
    figures.codes_differing += int(differing.sum())
    if exactness == "one-code" and not exact and _within_one_code(content, side, ids, expected, seen):
        return
    where = _first(differing)
    raise Disagreement(
        f"{side.name}.codes differ in {int(differing.sum())} of {want.size} at {places[where[0]]}{_rest(where)}: "
        f"stored {_show(seen['codes'][where])}, must be {_show(expected['codes'][where])}"
        f"{_code_hint(content, side, ids, expected, seen, differing)}"
    )


def _within_one_code(
    content: Content, side: Side, ids: Ids, expected: dict[str, Array], seen: dict[str, Array]
) -> bool:
    """Whether every differing code is the neighbour, and its exact quotient lies within 4 ulp of the tie between."""
    spec, source = side.spec, content.source[side.name][ids]
    if spec.code not in oracle_codec.INTEGER_BITS or np.isnan(source).any():
        return False
    codes = [_integers(side, planes["codes"]) for planes in (expected, seen)]
    differing = codes[0] != codes[1]
    scale = side.element_scale(expected, source.shape).astype(np.float64)
    shifted = source.astype(np.float64)
    if spec.has_zero:
        zero = side.element_zero(expected, source.shape)
        shifted = (source - zero).astype(np.float64)
    quotient = shifted[differing] / np.where(scale == 0, 1.0, scale)[differing]
    tie = (codes[0] + codes[1])[differing] / 2.0
    ulp = np.spacing(np.abs(quotient).astype(np.float32)).astype(np.float64)
    neighbours = np.abs(codes[0] - codes[1])[differing] == 1
    return bool((neighbours & (np.abs(quotient - tie) <= bounds.TIE_ULPS.value * ulp)).all())


def judge_gathered(
    content: Content, name: str, ids: Ids, observed: Float32Array, exactness: str, places: Sequence[str]
) -> None:
    """Compare gathered float32 rows (tokens, heads, dim) with the decoded ones."""
    expected = content.decoded[name][ids]
    same = (observed == expected) | (np.isnan(observed) & np.isnan(expected))
    if same.all():
        return
    distance = np.abs(observed.astype(np.float64) - expected)
    allowed = 0.0
    if exactness == "one-code":
        side = content.sides[name]
        largest = np.abs(expected)
        if side.spec.has_zero:
            zero = side.element_zero(content.side_planes(name, ids), expected.shape)
            largest = np.maximum(largest, np.abs(zero))
        with np.errstate(invalid="ignore"):
            if (same | (distance <= bounds.GATHER_ULPS.value * np.spacing(largest))).all():
                return
        allowed = bounds.GATHER_ULPS.value
    where = _first(~same)
    raise Disagreement(
        f"gathered {name} differs in {int((~same).sum())} of {expected.size} at {places[where[0]]}{_rest(where)}: "
        f"{observed[where]!r}, code * scale (+ zero) is {expected[where]!r}; {allowed:g} ulp are allowed"
        + (_swap_hint(content, name, ids, observed))
    )


# --- attention ------------------------------------------------------------------------------------------------------


def judge_attention(
    *,
    observed: tuple[Array, Array],
    expected: tuple[Array, Array],
    bound: tuple[Array, Array],
    who: str,
    figures: Figures,
    hypotheses: Callable[[], str],
    lse: bool = True,
) -> None:
    """Judge one sequence's output (rows, heads, dim) and, where the backend gives one, its LSE (rows, heads)."""
    for name, seen, want, allowed in zip(("output", "lse"), observed, expected, bound, strict=True):
        if name == "lse" and not lse:
            continue
        ratio = oracle_attention.observed_over_bound(seen, want, allowed)
        figures.worst(f"{name}_ratio", ratio)
        if ratio <= bounds.OUTPUT_RATIO.value:
            continue
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            distance = np.abs(seen.astype(np.float64) - want)
            ranked = np.where((seen == want) | (np.isnan(seen) & np.isnan(want)), 0.0, distance / allowed)
        where = _first(np.isnan(ranked)) if np.isnan(ranked).any() else _unravel(int(ranked.argmax()), ranked.shape)
        names = ("query row", "head", "channel")[: len(where)]
        place = ", ".join(f"{n} {i}" for n, i in zip(names, where, strict=True))
        raise Disagreement(
            f"{name} of {who} is off by {distance[where]:.3g} at {place}: {seen[where]:.9g}, must be {want[where]:.9g} "
            f"within {allowed[where]:.3g} (observed / bound {ratio:.3g}, in "
            f"{int((~(ranked <= 1)).sum())} of {ranked.size} elements){hypotheses()}"
        )


def explain_attention(
    observed: tuple[Array, Array],
    query: Array,
    key: Array,
    value: Array,
    query_start: int,
    given: dict[str, Any],
) -> str:
    """Which common mistake reproduces the observed output, in words; "" where none does.

    ``given`` are the arguments of ``oracle_attention.attend`` (scale, softcap, window, sinks) as asked for.
    """
    out, lse = observed
    if np.isnan(out).all() or np.isnan(lse).all():
        return "\n  looks like: nothing was written (all NaN)"
    if np.isnan(out).any():
        return "\n  looks like: NaN from a slot that no row may see, or an output left partly unwritten"
    if not np.abs(out).any():
        return "\n  looks like: all zeros, nothing was computed"
    kv_heads, query_heads = key.shape[1], query.shape[1]

    def alternative(q: Array = query, k: Array = key, v: Array = value, start: int = query_start, **more: Any) -> Array:
        return oracle_attention.attend(q, k, v, query_start=start, **{**given, **more})[0]

    def interleaved() -> Array:
        order = np.argsort(np.arange(query_heads) % kv_heads, kind="stable")
        return alternative(query[:, order])[:, np.argsort(order, kind="stable")]

    window = given.get("window")
    tries: list[tuple[str, Callable[[], Array]]] = [
        ("the key that a row stands on is not seen", lambda: alternative(start=query_start - 1)),
        ("one key after the row is seen", lambda: alternative(start=query_start + 1)),
        ("the last key is missing", lambda: alternative(k=key[:-1], v=value[:-1])),
        ("no causal mask", lambda: alternative(start=len(key) - 1)),
        ("scores are scaled by 1 / sqrt(key_dim), not as asked", lambda: alternative(scale=key.shape[2] ** -0.5)),
        ("scores are scaled twice", lambda: alternative(scale=given["scale"] ** 2)),
        ("scores are not scaled", lambda: alternative(scale=1.0)),
        ("query head h reads KV head h % kv_heads, not h // group", interleaved),
    ]
    if given.get("softcap") is not None:
        tries.append(("the soft cap is not applied", lambda: alternative(softcap=None)))
    if given.get("sinks") is not None:
        tries.append(("the sink logits are not applied", lambda: alternative(sinks=None)))
    if window is not None:
        tries += [
            ("the window is not applied", lambda: alternative(window=None)),
            ("the window is one token too wide", lambda: alternative(window=window + 1)),
            ("the window is one token too narrow", lambda: alternative(window=max(1, window - 1))),
        ]
    if key.shape[2] == value.shape[2]:
        tries += [
            ("V is taken from K", lambda: alternative(v=key)),
            ("K and V are swapped", lambda: alternative(k=value, v=key)),
        ]
    scale = max(1e-30, float(np.abs(out).max()))
    plain, plain_lse = oracle_attention.attend(query, key, value, query_start=query_start, **given)
    if np.allclose(plain, out, rtol=1e-4, atol=1e-5 * scale):  # then it is the LSE that is wrong
        return _explain_lse(lse, plain_lse, query, key, value, query_start, given)
    for words, attempt in tries:
        with np.errstate(all="ignore"):
            try:
                guess = attempt()
            except ValueError:
                continue
        if guess.shape == out.shape and np.allclose(guess, out, rtol=1e-4, atol=1e-5 * scale):
            return f"\n  looks like: {words}"
    return ""


def _explain_lse(
    lse: Array, expected: Array, query: Array, key: Array, value: Array, query_start: int, given: dict[str, Any]
) -> str:
    """Which common mistake reproduces an LSE whose output is right."""
    without = oracle_attention.attend(query, key, value, query_start=query_start, **{**given, "sinks": None})[1]
    guesses = (
        ("a logarithm to base 2 (natural is asked for)", expected / np.log(2.0)),
        ("a log-sum-exp without the sink logits", without),
        ("the sum of exponentials, not its logarithm", np.exp(expected)),
        ("the opposite sign", -expected),
    )
    for words, guess in guesses:
        with np.errstate(all="ignore"):
            if np.allclose(guess, lse, rtol=1e-4, atol=1e-4) and not np.allclose(guess, expected, rtol=1e-4, atol=1e-4):
                return f"\n  looks like: {words}"
    return ""


def _quietly(hint: Callable[..., str]) -> Callable[..., str]:
    """Hints compare whatever a faulty backend left behind: numpy need not warn about it."""

    @functools.wraps(hint)
    def wrapper(*args: Any) -> str:
        with np.errstate(all="ignore"):
            return hint(*args)

    return wrapper


# --- hints ----------------------------------------------------------------------------------------------------------


@_quietly
def _scale_hint(side: Side, plane: str, expected: dict[str, Array], seen: dict[str, Array]) -> str:
    have = seen[plane]
    if (raw := np.ascontiguousarray(have).view(np.uint8)).size and (raw == FILL).all():
        return "\n  looks like: never written (the bytes are those the pages were filled with)"
    values = _floats(side, have)
    if (values == 1).all():
        return "\n  looks like: a scale of 1 in place of the computed one"
    wanted = _floats(side, expected[plane])
    usable = np.isfinite(values) & np.isfinite(wanted) & (wanted != 0)
    if usable.any():
        ratio = values[usable].astype(np.float64) / wanted[usable]
        factor = float(ratio.mean())
        if np.ptp(ratio) <= 1e-2 * abs(factor) and abs(factor - 1) > 1e-2:
            return f"\n  looks like: every {plane} is {factor:.6g} times what it must be"
    if plane == "zero" and np.allclose(values, -wanted):
        return "\n  looks like: the opposite sign convention (x_hat = code * scale + zero is kvport's)"
    return _moved_hint(expected[plane], have)


@_quietly
def _code_hint(
    content: Content,
    side: Side,
    ids: Ids,
    expected: dict[str, Array],
    seen: dict[str, Array],
    differing: BoolArray,
) -> str:
    have = np.ascontiguousarray(seen["codes"])
    rows = differing.reshape(len(differing), -1).any(axis=1)
    if (have[rows].view(np.uint8) == FILL).all():
        return "\n  looks like: never written (the bytes are those the pages were filled with)"
    spec = side.spec
    if spec.code in oracle_codec.INTEGER_BITS:
        if spec.code == "int4" and (((have >> 4) | (have << 4)).astype(np.uint8) == expected["codes"]).all():
            return "\n  looks like: the high nibble comes first (the low one must)"
        source = content.source[side.name][ids]
        if not np.isnan(source).any():
            found = _rounding_hint(side, source, expected, _integers(side, have))
            if found:
                return found
    return _moved_hint(expected["codes"], have)


def _rounding_hint(side: Side, x: Float32Array, expected: dict[str, Array], have: Array) -> str:
    spec = side.spec
    scale = side.element_scale(expected, x.shape)
    with np.errstate(all="ignore"):
        shifted = x - side.element_zero(expected, x.shape) if spec.has_zero else x
        quotient = np.where(scale == 0, 0, shifted / np.where(scale == 0, np.float32(1), scale)).astype(np.float64)
        low, high = spec.code_range
        rules: list[tuple[str, Any]] = [
            ("rounding toward zero, not to nearest even", np.trunc(quotient)),
            ("rounding half away from zero, not to even", np.sign(quotient) * np.floor(np.abs(quotient) + 0.5)),
            ("rounding toward minus infinity, not to nearest even", np.floor(quotient)),
            ("codes of the unscaled input (scale 1)", np.rint(x.astype(np.float64))),
            ("inputs multiplied by the scale, not divided", np.rint(x.astype(np.float64) * scale)),
            ("codes computed without subtracting the zero", np.rint(x / np.where(scale == 0, 1, scale))),
        ]
        for words, codes in rules:
            if (np.clip(codes, low, high) == have).all():
                return f"\n  looks like: {words}"
    return ""


def _moved_hint(expected: Array, have: Array) -> str:
    """Whether the first wrong row is what another token of the same comparison must have."""
    want, got = expected.reshape(len(expected), -1), have.reshape(len(have), -1)
    wrong = np.flatnonzero((want != got).any(axis=1))
    if len(wrong) == 0:
        return ""
    matches = np.flatnonzero((want == got[wrong[0]]).all(axis=1))
    if len(matches):
        return f"\n  looks like: row {wrong[0]} of the comparison holds what belongs to row {matches[0]}"
    return ""


@_quietly
def _swap_hint(content: Content, name: str, ids: Ids, observed: Float32Array) -> str:
    other = content.decoded["value" if name == "key" else "key"][ids]
    if other.shape == observed.shape and np.allclose(other, observed, equal_nan=True):
        return "\n  looks like: K and V are swapped"
    source = content.source[name][ids]
    if np.allclose(source, observed, rtol=1e-6, atol=0, equal_nan=False):
        return "\n  looks like: the unquantized input was kept and returned, not what is stored"
    return ""


# --- small helpers --------------------------------------------------------------------------------------------------


def _integers(side: Side, codes: Array) -> Array:
    if side.spec.code == "int8":
        return codes.astype(np.int64)
    return oracle_codec.unpack(codes, side.spec.code_bits, signed=side.spec.symmetric)


def _bits(array: Array) -> Array:
    """Bit patterns as unsigned integers."""
    return np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def _ordered(bits: Array) -> Array:
    """Float bit patterns as integers in the order of the floats, so that a difference counts representable steps."""
    signed = bits.astype(np.int64)
    sign = np.int64(1) << (8 * bits.dtype.itemsize - 1)
    return np.where(signed >= sign, sign - signed, signed)


def _floats(side: Side, plane: Array) -> Float32Array:
    """A scale or zero plane as float32."""
    if plane.dtype == np.float32:
        return plane
    if plane.dtype == np.uint16:
        return side.plane_values(plane)
    return plane.astype(np.float32)


def _is_nan(side: Side, codes: Array) -> BoolArray:
    small = oracle_codec.FLOAT_PAGES[side.spec.code]
    return np.asarray(np.isnan(codes if small is None else small.decode(codes)))


def _as_float(side: Side, plane: str, planes: dict[str, Array], where: tuple[int, ...]) -> float:
    return float(_floats(side, planes[plane])[where])


def _show(value: Any) -> str:
    number = value.item()
    return f"{number} (0x{number & 0xFF:02x})" if isinstance(number, int) else repr(number)


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, shape))


def _first(mask: Array) -> tuple[int, ...]:
    return _unravel(int(np.argmax(mask)), mask.shape)


def _rest(where: tuple[int, ...]) -> str:
    names = ("head", "element")
    return "".join(f", {name} {index}" for name, index in zip(names, where[1:], strict=False))
