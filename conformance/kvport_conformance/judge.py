"""Comparing a backend's answer with the oracle's, and saying in words what is wrong with it.

Messages name the place (page, slot, head, channel) of the first difference, the two values and the allowance. Where a
common mistake explains all that was observed, they name that mistake (:mod:`kvport_conformance.hints`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvport_conformance import bounds, hints, oracle_attention, oracle_codec
from kvport_conformance.content import Content, Ids, Side
from kvport_conformance.figures import Figures
from kvport_conformance.oracle_floats import Array, BoolArray, Float32Array, quiet_nan
from kvport_conformance.verdicts import Disagreement

FILL: Final = hints.FILL

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
    former: Ids | None = None,
) -> None:
    """Compare planes (token-major, one row a token) with what must be stored for these tokens.

    ``exactness`` is the backend's declared class. ``unambiguous`` tokens leave no class any choice. ``places`` say in
    words where each row lies; ``former`` are the tokens that a copy or an import should have replaced there.
    """
    found = hints.Stored(content, ids, observed, places, former)
    expectations = {name: content.side_planes(name, ids) for name in content.sides}
    figures.stored(
        {
            f"{name}.{plane}": _comparable(content.sides[name], plane, observed[f"{name}.{plane}"])
            for name, expected in expectations.items()
            for plane in expected
        },
        places,
    )
    for name, expected in expectations.items():
        side = content.sides[name]
        seen = {plane: observed[f"{name}.{plane}"] for plane in expected}
        _judge_scales(found, side, expected, seen, places, figures, exactness, unambiguous)
        _judge_codes(found, side, expected, seen, places, figures, exactness, unambiguous)


def _judge_scales(
    found: hints.Stored,
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
                f"{int(distance.max())} at most{hints.stored(found, side, plane)}"
            )


def _judge_codes(
    found: hints.Stored,
    side: Side,
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
    if exactness == "one-code" and not exact and _within_one_code(found.content, side, found.ids, expected, seen):
        return
    where = _first(differing)
    raise Disagreement(
        f"{side.name}.codes differ in {int(differing.sum())} of {want.size} at {places[where[0]]}{_rest(where)}: "
        f"stored {_show(seen['codes'][where])}, must be {_show(expected['codes'][where])}"
        f"{hints.stored(found, side, 'codes')}"
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
        side = content.sides.get(name)  # None for K of a latent layer, whose zeros only make it smaller
        largest = np.abs(expected)
        if side is not None and side.spec.has_zero:
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
        + hints.gathered(content, name, ids, observed)
    )


# --- attention ------------------------------------------------------------------------------------------------------


def judge_attention(
    *,
    observed: tuple[Array, Array],
    expected: tuple[Array, Array],
    bound: tuple[Array, Array],
    who: str,
    figures: Figures,
    hint: Callable[[], str],
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
            f"{int((~(ranked <= 1)).sum())} of {ranked.size} elements){hint()}"
        )


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


def _comparable(side: Side, plane: str, array: Array) -> Array:
    """A plane as other backends' are compared with it: a NaN of a float page may have any payload, and gets one."""
    if plane != "codes" or side.spec.code not in oracle_codec.FLOAT_PAGES:
        return array
    small = oracle_codec.FLOAT_PAGES[side.spec.code]
    nan = quiet_nan() if small is None else small.encode(np.full(1, quiet_nan()))[0]
    return np.where(_is_nan(side, array), nan, array)


def _is_nan(side: Side, codes: Array) -> BoolArray:
    small = oracle_codec.FLOAT_PAGES[side.spec.code]
    if small is None or small.infinity is None:
        return np.asarray(np.isnan(codes))
    return np.asarray((codes & (small.sign_bit - 1)) > small.infinity)


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
