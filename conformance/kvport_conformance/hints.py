"""Which common mistake explains what was observed, in words.

Nothing here decides a verdict, and nothing guesses. A mistake is named only where doing the computation with that
mistake in it gives *all* of what was observed: every bit of the stored plane, the right elements included; every output
and LSE of the sequence within the bound of the mistaken computation. Where several mistakes do, all are named; where
more than :data:`MOST` do, the figures are too few to tell and none is.

A hint is a line ``looks like: ...`` after a message, or nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from kvport_conformance import oracle_attention, oracle_codec
from kvport_conformance.content import Content, Ids, Side
from kvport_conformance.oracle_floats import BF16, Array, Float32Array

#: The byte that fills what nobody has written.
FILL: Final = 0xFF
#: Explanations that are worth naming side by side.
MOST: Final = 3

#: Output, LSE, and the bound of each.
Answer: TypeAlias = tuple[Array, Array, Array, Array]
#: A mistake in words, and what it would have left (None where it does not apply).
Guess: TypeAlias = tuple[str, Callable[[], Array | None]]


def _quietly(hint: Callable[..., str]) -> Callable[..., str]:
    """Hints compute with whatever a faulty backend left behind: numpy need not warn about it."""

    @functools.wraps(hint)
    def wrapper(*args: Any, **more: Any) -> str:
        with np.errstate(all="ignore"):
            return hint(*args, **more)

    return wrapper


def _line(words: Iterable[str]) -> str:
    found = list(dict.fromkeys(words))
    return f"\n  looks like: {', or '.join(found)}" if 0 < len(found) <= MOST else ""


# --- stored planes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Tokens at rest: what each must be, and the planes that were found (one row a token, at ``places`` in words).

    ``former`` are the tokens that lay in the same places before pages were copied or imported over them, -1 where none.
    """

    content: Content
    ids: Ids
    observed: Mapping[str, Array]
    places: Sequence[str]
    former: Ids | None = None

    def wanted(self, plane: str) -> Array:
        return self.content.planes[plane][self.ids]

    def source(self, side: Side) -> Float32Array:
        return self.content.source[side.name][self.ids]

    def other(self, side: Side) -> Side:
        return self.content.sides["value" if side.name == "key" else "key"]


@_quietly
def stored(found: Stored, side: Side, plane: str) -> str:
    """Why the plane ``"scale"``, ``"zero"``, ``"codes"`` ... of one side is not what it must be."""
    name = f"{side.name}.{plane}"
    have, want = found.observed[name], found.wanted(name)
    wrong = _differing_rows(want, have)
    if (np.ascontiguousarray(have[wrong]).view(np.uint8) == FILL).all():
        return _line(["never written (the bytes are those the pages were filled with)"])
    if _plain(found.content, side):
        guesses = _code_guesses(found, side) if plane == "codes" else _scale_guesses(found, side, plane)
    else:
        guesses = []
    words = [words for words, guess in guesses if _is(guess, have)]
    return _line(words or [*_left_behind(found, side, plane, wrong), *_moved(found.places, want, have, wrong)])


def _plain(content: Content, side: Side) -> bool:
    """Whether there is a K and a V, and nothing is kept apart from its codes: the guesses below are about these."""
    return not content.latent and not side.spec.outliers and not side.spec.sparse


def _is(guess: Callable[[], Array | None], have: Array) -> bool:
    try:
        made = guess()
    except (ValueError, IndexError):  # a shape that the mistake cannot have
        return False
    if made is None or made.shape != have.shape or made.dtype != have.dtype:
        return False
    return np.ascontiguousarray(made).tobytes() == np.ascontiguousarray(have).tobytes()  # so that NaN equals NaN


def _differing_rows(want: Array, have: Array) -> Ids:
    def rows(array: Array) -> Array:
        return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)

    return np.flatnonzero((rows(want) != rows(have)).any(axis=1))


def _left_behind(found: Stored, side: Side, plane: str, wrong: Ids) -> Iterator[str]:
    """What a copy or an import should have replaced and did not."""
    name = f"{side.name}.{plane}"
    if found.former is None or (found.former[wrong] < 0).any():
        return
    if (found.content.planes[name][found.former[wrong]] == found.observed[name][wrong]).all():
        yield f"the {plane} plane of what lay there before: copying or importing pages left it behind"


def _moved(where: Sequence[str], want: Array, have: Array, wrong: Ids) -> Iterator[str]:
    """Whether every wrong row is what another row of the same comparison must be, and which for the first."""
    place = {row.tobytes(): index for index, row in reversed(list(enumerate(want)))}
    places = [place.get(have[index].tobytes(), -1) for index in wrong]
    # One row alone, or the same one everywhere, may be like another by chance (a scale that is the largest of all).
    if -1 not in places and len(set(places)) == len(places) > 1:
        yield f"rows are mixed up: {where[wrong[0]]} holds what belongs to {where[places[0]]}"


def _scale_guesses(found: Stored, side: Side, plane: str) -> list[Guess]:
    spec, want = side.spec, found.wanted(f"{side.name}.{plane}")
    other = found.other(side)
    own, others = ("K", "V") if side.name == "key" else ("V", "K")
    guesses: list[Guess] = [
        (f"{others}'s {plane} in place of {own}'s", lambda: found.content.planes[f"{other.name}.{plane}"][found.ids]),
        ("K and V rounded to bfloat16 before they are encoded", lambda: _encoded(side, found, plane, BF16.round)),
    ]
    if plane not in ("scale", "zero") or spec.code in oracle_codec.BLOCK_SIZE:
        return guesses
    dtype = spec.scale_dtype
    values = side.plane_values(want)

    def to_plane(x: Array) -> Array:
        return oracle_codec._to_plane(dtype, oracle_codec._cast(dtype, x.astype(np.float32)))

    if plane == "zero":
        return [
            *guesses,
            ("the opposite sign convention (x_hat = code * scale + zero is kvport's)", lambda: to_plane(-values)),
            ("zeros rounded to nearest, not down", lambda: to_plane(_groups(side, found).min(axis=-1) + np.float32(0))),
            ("a zero of -0 where +0 must be", lambda: to_plane(_downward(side, found))),
            ("zeros of 0", lambda: to_plane(np.zeros_like(values))),
        ]
    if dtype == "float32":
        guesses.append(("scales that passed through bfloat16", lambda: BF16.round(values)))
    steps = np.float32(spec.code_range[1]) if spec.code in oracle_codec.INTEGER_BITS else np.float32(0)

    def extent() -> Array:
        return _extent(side, found)

    guesses += [
        ("a scale of 1 in place of the computed one", lambda: to_plane(np.ones_like(values))),
        ("scales are not let below 1", lambda: to_plane(np.maximum(values, np.float32(1)))),
        ("the reciprocal of the scale is stored", lambda: to_plane(np.float32(1) / values)),
        ("the largest magnitude is stored, not divided by the largest code", lambda: to_plane(extent())),
        ("one scale for all heads of a token", lambda: to_plane(_all(values.max(axis=1, keepdims=True), values))),
        ("one scale for all tokens of a call", lambda: to_plane(_all(values.max(axis=0, keepdims=True), values))),
    ]
    if steps:
        guesses += [
            (
                f"the range is divided by {int(steps) + 1}, not by {int(steps)}",
                lambda: to_plane(extent() / (steps + 1)),
            ),
            (
                f"the range is multiplied by the reciprocal of {int(steps)}, not divided by it",
                lambda: to_plane(extent() * (np.float32(1) / steps)),
            ),
        ]
    return guesses


def _code_guesses(found: Stored, side: Side) -> list[Guess]:
    spec, want = side.spec, found.wanted(f"{side.name}.codes")
    source, other = found.source(side), found.other(side)
    own, others = ("K", "V") if side.name == "key" else ("V", "K")
    guesses: list[Guess] = [
        (f"{others} lies where {own} belongs", lambda: found.content.planes[f"{other.name}.codes"][found.ids]),
        ("K and V rounded to bfloat16 before they are encoded", lambda: _encoded(side, found, "codes", BF16.round)),
    ]
    if spec.code == "bf16":
        guesses.append(
            ("upper bits taken, not rounded", lambda: (source.view(np.uint32) >> 16).astype(np.uint16)),
        )
    four = spec.code in ("int4", *oracle_codec.BLOCK_SIZE)
    if four:
        guesses += [
            ("the high nibble comes first (the low one must)", lambda: ((want >> 4) | (want << 4)).astype(np.uint8)),
            ("channel i shares a byte with channel i + dim / 2, not with its neighbour", lambda: _halves(side, want)),
        ]
    if spec.code == "int2":
        guesses.append(
            (
                "the highest bits come first (the lowest must)",
                lambda: ((want >> 6) | ((want >> 2) & 0x0C) | ((want << 2) & 0x30) | (want << 6)).astype(np.uint8),
            )
        )
    if spec.code in ("int4", "int2") and spec.symmetric:
        flip = np.uint8(0x88 if four else 0xAA)
        guesses.append(("codes in excess notation, not in two's complement", lambda: (want ^ flip).astype(np.uint8)))
    if spec.code in oracle_codec.INTEGER_BITS and np.isfinite(source).all():
        guesses += [(words, functools.partial(_packed, side, rule)) for words, rule in _rules(found, side)]
    if spec.code in oracle_codec.FP8 and np.isfinite(source).all():
        small = oracle_codec.FP8[spec.code]
        scale = side.element_scale(found.content.side_planes(side.name, found.ids), source.shape)
        guesses += [
            (words, functools.partial(lambda x: small.encode(np.clip(x, -small.largest, small.largest)), x))
            for words, x in (
                ("codes of the unscaled input (scale 1)", source),
                ("inputs multiplied by the scale, not divided", source * scale),
            )
        ]
    return guesses


def _rules(found: Stored, side: Side) -> Iterator[tuple[str, Callable[[], Array]]]:
    """Ways to make integer codes from the input, each wrong in one thing. Float32, as a backend would."""
    spec, source, other = side.spec, found.source(side), found.other(side)
    x = np.clip(source, -oracle_codec.INPUT_LIMIT, oracle_codec.INPUT_LIMIT)
    planes = found.content.side_planes(side.name, found.ids)
    scale = side.element_scale(planes, x.shape)
    zero = side.element_zero(planes, x.shape) if spec.has_zero else np.float32(0)
    divisor = np.where(scale == 0, np.float32(1), scale)
    quotient = (x - zero) / divisor
    low, high = spec.code_range
    one = np.float32(1)

    def codes(values: Array, lowest: float = low, highest: float = high) -> Array:
        return np.where(scale == 0, 0, np.clip(values, lowest, highest)).astype(np.int64)

    yield "rounding toward zero, not to nearest even", lambda: codes(np.trunc(quotient))
    yield (
        "rounding half away from zero, not to even",
        lambda: codes(np.sign(quotient) * np.floor(np.abs(quotient) + np.float32(0.5))),
    )
    yield "rounding toward minus infinity, not to nearest even", lambda: codes(np.floor(quotient))
    yield (
        "inputs multiplied by the reciprocal of the scale, not divided",
        lambda: codes(np.rint((x - zero) * (one / divisor))),
    )
    yield "codes of the unscaled input (scale 1)", lambda: np.clip(np.rint(x - zero), low, high).astype(np.int64)
    yield (
        "inputs multiplied by the scale, not divided",
        lambda: np.clip(np.rint((x - zero) * scale), low, high).astype(np.int64),
    )
    yield f"the top code {high} is never used", lambda: codes(np.rint(quotient), low, high - 1)
    if spec.symmetric:
        yield f"codes down to {low - 1}, which no encoder may emit", lambda: codes(np.rint(quotient), low - 1)
    if spec.has_zero:
        yield "codes computed without subtracting the zero", lambda: codes(np.rint(x / divisor))
        yield "codes computed with the zero added, not subtracted", lambda: codes(np.rint((x + zero) / divisor))
    if spec == other.spec and found.source(other).shape == x.shape:
        swapped = other.element_scale(found.content.side_planes(other.name, found.ids), x.shape)
        third = np.where(swapped == 0, one, swapped)
        whose = "V" if other.name == "value" else "K"
        yield f"codes made with {whose}'s scale", lambda: codes(np.rint((x - zero) / third))
    if spec.granularity in ("token", "group") and not spec.static and spec.scale_dtype != "float32":
        yield (
            "codes made with the scale as it was before it was rounded to its dtype",
            lambda: codes(np.rint((x - zero) / _unrounded(side, found, x.shape))),
        )


def _extent(side: Side, found: Stored) -> Float32Array:
    """What the scale of each group spans: the largest magnitude, or the largest value above the zero."""
    groups = _groups(side, found)
    if side.spec.has_zero:
        return np.asarray(groups.max(axis=-1) - side.plane_values(found.wanted(f"{side.name}.zero")), np.float32)
    return np.asarray(np.abs(groups).max(axis=-1), np.float32)


def _unrounded(side: Side, found: Stored, shape: tuple[int, ...]) -> Float32Array:
    scale = oracle_codec._spread(side.spec, _extent(side, found) / np.float32(side.spec.code_range[1]), shape)
    return np.where(scale == 0, np.float32(1), scale)


def _packed(side: Side, codes: Callable[[], Array]) -> Array:
    return oracle_codec._pack_codes(side.spec, codes())


def _encoded(side: Side, found: Stored, plane: str, change: Callable[[Float32Array], Float32Array]) -> Array:
    return side.encode(change(found.source(side))).planes[plane]


def _groups(side: Side, found: Stored) -> Array:
    """The input in groups that share a scale, along the last axis; poisoned groups are 0, as for the encoder."""
    grouped = oracle_codec._to_groups(side.spec, found.source(side))
    finite = np.asarray(np.isfinite(grouped).all(axis=-1))
    return np.where(finite[..., None], grouped, np.float32(0))


def _downward(side: Side, found: Stored) -> Array:
    """The zeros before a -0 among them becomes +0."""
    return oracle_codec._cast(side.spec.scale_dtype, _groups(side, found).min(axis=-1).astype(np.float32), "floor")


def _halves(side: Side, want: Array) -> Array:
    codes = oracle_codec.unpack(want, 4, signed=False)
    half = codes.shape[-1] // 2
    return (codes[..., :half] | (codes[..., half:] << 4)).astype(np.uint8)


def _all(values: Array, like: Array) -> Array:
    return np.broadcast_to(values, like.shape)


# --- decoded values --------------------------------------------------------------------------------------------------


def _decodings(content: Content, name: str, ids: Ids) -> Iterator[tuple[str, Callable[[], Float32Array]]]:
    """Ways to read one side of these tokens, each wrong in one thing: (words, float32 rows)."""
    if content.latent or not _plain(content, content.sides[name]):
        return
    side = content.sides[name]
    other = content.sides["value" if name == "key" else "key"]
    spec, planes = side.spec, content.side_planes(name, ids)
    own, others = ("K", "V") if name == "key" else ("V", "K")
    shape = (len(ids), side.heads, side.dim)
    if spec.code in oracle_codec.FLOAT_PAGES:
        return

    def read(
        *, scale: Array | np.float32 | None = None, zero: Array | np.float32 | None = None, codes: Array | None = None
    ) -> Float32Array:
        values = oracle_codec._code_values(spec, planes["codes"] if codes is None else codes)
        decoded = values * (side.element_scale(planes, shape) if scale is None else scale)
        if spec.has_zero:
            decoded = decoded + (side.element_zero(planes, shape) if zero is None else zero)
        return np.asarray(decoded, np.float32)

    yield f"the unquantized {own} was kept and is used, not what is stored", lambda: content.source[name][ids]
    yield f"{own} is read without its scale", lambda: read(scale=np.float32(1))
    yield (
        f"{own} is divided by its scale, not multiplied",
        lambda: read(scale=np.float32(1) / side.element_scale(planes, shape)),
    )
    if side.heads > 1:
        yield (
            f"every head of {own} takes the first head's scale",
            lambda: read(scale=_all(side.element_scale(planes, shape)[:, :1], np.empty(shape))),
        )
    if spec.granularity == "group" or spec.code in oracle_codec.BLOCK_SIZE:
        yield (
            f"every group of {own} takes the scale of its first",
            lambda: read(scale=_all(side.element_scale(planes, shape)[..., :1], np.empty(shape))),
        )
    if spec.code not in oracle_codec.BLOCK_SIZE and spec.scale_dtype == "float32":
        yield f"{own}'s scale is read in bfloat16", lambda: read(scale=BF16.round(side.element_scale(planes, shape)))
    if spec.has_zero:
        yield f"{own}'s zero is not added back", lambda: read(zero=np.float32(0))
        yield (
            f"{own}'s zero is subtracted (x_hat = code * scale + zero is kvport's)",
            lambda: read(zero=-side.element_zero(planes, shape)),
        )
    if spec == other.spec and side.dim == other.dim:
        theirs = content.side_planes(other.name, ids)
        yield f"{own} is read with {others}'s scale", lambda: read(scale=other.element_scale(theirs, shape))
    if spec.code in ("int4", *oracle_codec.BLOCK_SIZE):
        raw = planes["codes"]
        yield (
            "the high nibble is read first (the low one comes first)",
            lambda: read(codes=((raw >> 4) | (raw << 4)).astype(np.uint8)),
        )
    if spec.code in oracle_codec.INTEGER_BITS and spec.symmetric:
        low = spec.code_range[0]
        yield (
            f"code {low - 1} is read as {low}",
            lambda: read(
                codes=oracle_codec._pack_codes(
                    spec, np.maximum(oracle_codec._code_values(spec, planes["codes"]), low).astype(np.int64)
                )
            ),
        )


@_quietly
def gathered(content: Content, name: str, ids: Ids, observed: Float32Array) -> str:
    """Why gathered rows (tokens, heads, dim) of one side are not the decoded ones."""
    other = "value" if name == "key" else "key"
    guesses: list[Guess] = [("K and V are swapped", lambda: content.decoded[other][ids])]
    guesses += list(_decodings(content, name, ids))
    return _line(
        words
        for words, guess in guesses
        if (made := guess()) is not None
        and made.shape == observed.shape
        and bool(((made == observed) | (np.isnan(made) & np.isnan(observed))).all())
    )


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attended:
    """One sequence's query rows, the keys they may see, and what came back.

    ``given`` are the arguments of ``oracle_attention.attend`` (scale, softcap, window, sinks) as asked for. ``content``
    and ``ids`` are the tokens behind ``key`` and ``value``, where they all lie in one table. ``lse`` says whether the
    backend gives one.
    """

    observed: tuple[Array, Array]
    query: Array
    key: Array
    value: Array
    start: int
    given: Mapping[str, Any]
    query_dtype: str
    weight_error: float = 0.0
    lse: bool = True
    content: Content | None = None
    ids: Ids | None = None

    def answer(self) -> Answer:
        """Output, LSE and the bound of each."""
        arguments = {**self.given, "query_start": self.start}
        out, lse = oracle_attention.attend(self.query, self.key, self.value, **arguments)
        bounds = oracle_attention.attention_bound(
            self.query,
            self.key,
            self.value,
            query_dtype=self.query_dtype,
            weight_error=self.weight_error,
            **arguments,
        )
        return out, lse, *bounds

    def asking(self, **more: Any) -> Attended:
        return replace(self, given={**self.given, **more})


@_quietly
def attended(found: Attended) -> str:
    """Why an output or an LSE is not what it must be."""
    if not (np.isnan(found.key).any() or np.isnan(found.value).any()):
        for seen in found.observed[: 1 + found.lse]:
            bad = np.isnan(seen.reshape(len(seen), -1))
            if bad.any():
                where = "everywhere" if bad.all() else f"in query rows {_few(np.flatnonzero(bad.any(axis=1)))}"
                causes = "never written, read from a slot that nobody wrote, or computed (0 / 0, inf - inf)"
                return f"\n  NaN {where}: {causes}"
    if not found.observed[0].any() and found.value.any():
        return "\n  every element of the output is 0"
    return _line(words for words, answer in _mistakes(found) if _explains(found, answer))


def _few(rows: Ids) -> str:
    return ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")


def _explains(found: Attended, answer: Callable[[], Answer]) -> bool:
    try:
        out, lse, out_bound, lse_bound = answer()
    except ValueError:  # an argument that the mistake cannot have, such as a window of nothing
        return False
    if out.shape != found.observed[0].shape:
        return False
    within = oracle_attention.observed_over_bound(found.observed[0], out, out_bound) <= 1
    return within and (not found.lse or oracle_attention.observed_over_bound(found.observed[1], lse, lse_bound) <= 1)


def _mistakes(found: Attended) -> Iterator[tuple[str, Callable[[], Answer]]]:
    given, key, value, start = found.given, found.key, found.value, found.start
    query_heads, kv_heads = found.query.shape[1], key.shape[1]
    group = query_heads // kv_heads

    def but(**fields: Any) -> Callable[[], Answer]:
        return lambda: replace(found, **fields).answer()

    def asking(**fields: Any) -> Callable[[], Answer]:
        return lambda: found.asking(**fields).answer()

    yield "the key that a row stands on is not seen", but(start=start - 1)
    yield "one key after the row is seen", but(start=start + 1)
    yield "the last key is missing", but(key=key[:-1], value=value[:-1])
    yield "the first key is missing", but(key=key[1:], value=value[1:], start=start - 1)
    yield "no causal mask", but(start=len(key) - 1)
    yield "rows are masked as if the first of them stood at position 0", but(start=0)
    default = found.query.shape[2] ** -0.5
    if given["scale"] != default:
        yield "scores are scaled by 1 / sqrt(key_dim), not as asked", asking(scale=default)
    yield "scores are scaled twice", asking(scale=given["scale"] ** 2)
    yield "scores are not scaled", asking(scale=1.0)
    if 1 < kv_heads < query_heads:
        yield "query head h reads KV head h % kv_heads, not h // group", lambda: _interleaved(found, kv_heads)
    if kv_heads > 1:
        first = np.zeros(kv_heads, np.int64)
        yield "every query head reads KV head 0", but(key=key[:, first], value=value[:, first])
    if given.get("softcap") is not None:
        yield "the soft cap is not applied", asking(softcap=None)
    if (sinks := given.get("sinks")) is not None:
        yield "the sink logits are not applied", asking(sinks=None)
        yield "the sink logits are scaled like scores", asking(sinks=sinks * given["scale"])
        if group > 1:
            yield (
                "query head h takes the sink logit of its KV head",
                asking(sinks=sinks[np.arange(query_heads) // group]),
            )
    if (window := given.get("window")) is not None:
        yield "the window is not applied", asking(window=None)
        yield "the window is one token too wide", asking(window=window + 1)
        yield "the window is one token too narrow", asking(window=window - 1)
    if key.shape[2] == value.shape[2]:
        yield "V is taken from K", but(value=key)
        yield "K and V are swapped", but(key=value, value=key)
    if found.content is not None and found.ids is not None:
        for name in ("key", "value"):
            for words, decode in _decodings(found.content, name, found.ids):
                yield words, functools.partial(_read_as, found, name, decode)
        yield from _both_sides(found, found.content, found.ids)
    if found.lse:
        yield from _lse_mistakes(found)


def _both_sides(found: Attended, content: Content, ids: Ids) -> Iterator[tuple[str, Callable[[], Answer]]]:
    """The same mistake in reading K and V."""
    keys, values = ([*_decodings(content, name, ids)] for name in ("key", "value"))
    for words, key in keys:
        # Of one mistake the words differ in which side they name.
        swapped = words.translate(str.maketrans("KV", "VK"))
        for other, value in values:
            if other == swapped:
                yield f"{words}; the same for V", functools.partial(_read_both, found, key, value)


def _read_both(found: Attended, key: Callable[[], Float32Array], value: Callable[[], Float32Array]) -> Answer:
    return replace(found, key=key(), value=value()).answer()


def _read_as(found: Attended, name: str, decode: Callable[[], Float32Array]) -> Answer:
    return (replace(found, key=decode()) if name == "key" else replace(found, value=decode())).answer()


def _interleaved(found: Attended, kv_heads: int) -> Answer:
    order = np.argsort(np.arange(found.query.shape[1]) % kv_heads, kind="stable")
    sinks = found.given.get("sinks")
    moved = replace(found.asking(sinks=None if sinks is None else sinks[order]), query=found.query[:, order])
    back = np.argsort(order, kind="stable")
    out, lse, out_bound, lse_bound = (array[:, back] for array in moved.answer())
    return out, lse, out_bound, lse_bound


def _lse_mistakes(found: Attended) -> Iterator[tuple[str, Callable[[], Answer]]]:
    """Mistakes in the LSE alone, the output being right."""

    def instead(change: Callable[[Array, Array], tuple[Array, Array]]) -> Callable[[], Answer]:
        def answer() -> Answer:
            out, lse, out_bound, lse_bound = found.answer()
            changed, changed_bound = change(lse, lse_bound)
            return out, changed, out_bound, changed_bound

        return answer

    if not len(found.key):
        seen = ", ".join(f"{x:g}" for x in np.unique(found.observed[1])[:3])
        yield (
            f"an LSE of {seen} for rows that see nothing, where -inf must be",
            instead(lambda x, b: (found.observed[1], b)),
        )
        return
    two = np.log(2.0)
    yield "the LSE is a logarithm to base 2 (natural is asked for)", instead(lambda x, b: (x / two, b / two))
    yield (
        "the LSE is the sum of exponentials, not its logarithm",
        instead(lambda x, b: (np.exp(x), np.exp(x) * np.expm1(b))),
    )
    yield "the LSE has the opposite sign", instead(lambda x, b: (-x, b))
    if found.given.get("sinks") is not None:

        def without(lse: Array, bound: Array) -> tuple[Array, Array]:
            _, bare, _, bare_bound = found.asking(sinks=None).answer()
            return bare, bare_bound

        yield "the LSE leaves out the sink logits", instead(without)
