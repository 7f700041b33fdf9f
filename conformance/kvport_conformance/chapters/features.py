"""Attention features: window, soft cap, sink logits, scale, partials to be merged, alone and together."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvport_conformance import inputs, oracle_attention
from kvport_conformance.axes import (
    BASE,
    FAMILIES,
    FORMATS,
    KINDS,
    MODEL,
    Variant,
    families,
    geometry,
    kinds,
    product,
)
from kvport_conformance.bench import Bench, Held, Row
from kvport_conformance.cases import check
from kvport_conformance.oracle_floats import Float32Array
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "features"

#: Windows around a page of 16: narrower, equal, wider, and wider than two pages.
WINDOWS: Final = tuple(geometry(2, 4, 64, 16, window=window) for window in (1, 2, 15, 16, 17, 40))


def _ready(bench: Bench, length: int) -> tuple[Held, list[int]]:
    layout = bench.layout()
    count = layout.pages_for(length)
    held = bench.held(count + 3, layout)
    pages = bench.shuffled_pages(held.pages, count)
    held.fill_sequence(pages, length)
    return held, pages


def _rows(bench: Bench, pages: list[int], length: int) -> list[Row]:
    """Decode, verify and prefill rows of one sequence."""
    size = bench.geometry.page_size
    return [
        Row(pages, length),
        Row(pages, length, 4),
        Row(pages, size + 1),
        Row(pages, 2, 2),
        Row(pages, length, length),
    ]


def _attend(bench: Bench, **how: Any) -> None:
    layout = bench.layout()
    length = 2 * min(layout.page_size, 32) + 7
    held, pages = _ready(bench, length)
    rows = _rows(bench, pages, length)
    if layout.page_size + 1 > length:
        rows = [row for row in rows if row.length <= length]
    plan = held.plan(rows)
    for layer in range(layout.layers):
        held.attend(layer, plan, bench.queries(layout, sum(row.queries for row in rows)), **how)


def sinks(bench: Bench, low: float = -2.0, high: float = 4.0) -> Float32Array:
    """One sink logit per query head, all different."""
    heads = bench.geometry.query_heads
    return inputs.values(inputs.derive(bench.seed, "sinks"), (heads,), low=low, high=high)


@check(CHAPTER, product(KINDS, WINDOWS) + product(FORMATS, WINDOWS, "full"), requires=("window", "prefill", "verify"))
def window(bench: Bench) -> None:
    """Position p sees p - window < j <= p, for windows narrower than, equal to and wider than a page."""
    _attend(bench)


@check(
    CHAPTER,
    product(KINDS, (geometry(2, 4, 64, 16, window=20),))
    + product(FORMATS, (geometry(2, 4, 64, 16, window=20),), "full"),
    requires=("window", "verify"),
)
def passed_window(bench: Bench) -> None:
    """Pages that a window has passed were freed: their table entries are the spare page, and kv_start says so."""
    layout = bench.layout()
    size = layout.page_size
    length = 4 * size + 3
    held, pages = _ready(bench, length)
    first = (length - 20) // size
    freed = [0] * first + pages[first:]
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, first * size, stream="other")
        held.append(layer, key * np.float32(9), value * np.float32(9), held.slots_of(pages[:first], 0, first * size))
        rows = [Row(freed, length, kv_start=first * size), Row(freed, length, 2, kv_start=first * size)]
        held.attend(layer, rows, bench.queries(layout, 3))


@check(CHAPTER, families(), requires=("softcap", "prefill", "verify"))
def softcap(bench: Bench) -> None:
    """Scores s become cap * tanh(s / cap), after the scale and before the softmax."""
    _attend(bench, softcap=3.5)


@check(CHAPTER, families(), requires=("sinks", "prefill", "verify"))
def sink_logits(bench: Bench) -> None:
    """A sink logit per query head takes its share of the softmax and of the LSE, and adds nothing to the output."""
    _attend(bench, sinks=sinks(bench))


@check(CHAPTER, kinds(), requires=("sinks", "verify"))
def extreme_sinks(bench: Bench) -> None:
    """Sinks far above and far below every score, and on a sequence of one token."""
    layout = bench.layout()
    held, pages = _ready(bench, layout.page_size + 3)
    for low, high in ((-80.0, -60.0), (60.0, 80.0)):
        logits = sinks(bench, low, high)
        held.attend(0, [Row(pages, layout.page_size + 3, 2), Row(pages, 1)], bench.queries(layout, 3), sinks=logits)


@check(CHAPTER, kinds(BASE, MODEL), requires=("prefill", "verify"))
def scaled(bench: Bench) -> None:
    """The scale of the scores is the one given, whatever the head dim."""
    _attend(bench, scale=0.31)
    _attend(bench, scale=1.0 / 64.0)


@check(
    CHAPTER,
    product(FAMILIES[::3], (geometry(2, 6, 64, 16, window=21),))
    + product(FORMATS, (geometry(2, 6, 64, 16, window=21),), "full"),
    requires=("window", "softcap", "sinks", "prefill", "verify"),
)
def together(bench: Bench) -> None:
    """Window, soft cap, sink logits and a scale of one's own at once."""
    _attend(bench, softcap=5.0, sinks=sinks(bench), scale=0.2)


def _partials() -> list[Variant]:
    return families() + product(("int8",), (geometry(2, 4, 64, 16, window=40),))


@check(CHAPTER, _partials(), requires=("lse", "verify"))
def partials(bench: Bench) -> None:
    """Partials over parts of the keys are float32 and, merged by their LSE, are attention over all of them."""
    layout = bench.layout()
    size = layout.page_size
    length = 3 * min(size, 32) + 5
    held, pages = _ready(bench, length)
    query = bench.queries(layout, 3)
    content = held.contents[0]
    ids = held.slots[0, held.slots_of(pages, 0, length)]
    cut = size if length > size else length - 5
    parts = [
        Row(pages, cut, 3, first=length - 3),  # the queries stand after the last key of this part
        Row([0] * (cut // size) + pages[cut // size :], length, 3, kv_start=cut),
        Row([], 0, 3, first=length - 3),  # a part without keys
    ]
    found = []
    for part in parts:
        found.append(held.attend(0, [part], query, partial=True))
    if np.isfinite(found[2][1]).any() or found[2][0].any():
        raise Disagreement("a partial over no keys must be zeros with LSE -inf")
    together_out, together_lse = held.attend(0, parts, np.concatenate([query] * 3), partial=True)
    for s, (out, lse) in enumerate(found):
        rows = slice(3 * s, 3 * s + 3)
        if not np.allclose(out, together_out[rows], rtol=1e-3, atol=1e-4) or not np.allclose(lse, together_lse[rows]):
            raise Disagreement(f"partial {s} differs between a batch of its own and one of three")
    merged = oracle_attention.merge(found)
    given: dict[str, Any] = {"scale": layout.key_dim**-0.5, "window": layout.window}
    key, value = content.decoded["key"][ids], content.decoded["value"][ids]
    expected = oracle_attention.attend(query, key, value, **given)
    allowed = oracle_attention.attention_bound(query, key, value, query_dtype=bench.dtype, **given)
    for name, seen, want, bound in zip(("output", "lse"), merged, expected, allowed, strict=True):
        ratio = oracle_attention.observed_over_bound(seen, want, bound)
        bench.figures.worst(f"{name}_ratio", ratio)
        if ratio > 1:
            raise Disagreement(f"merged partials: {name} is {ratio:.3g} times its bound off")


@check(CHAPTER, kinds(), requires=("verify",))
def inherited_arguments(bench: Bench) -> None:
    """An option of one call does not stay for the next: plain attention after a capped one, and after sinks."""
    layout = bench.layout()
    held, pages = _ready(bench, layout.page_size + 3)
    plan = held.plan([Row(pages, layout.page_size + 3, 2)])
    query = bench.queries(layout, 2)
    declared = bench.require(layout).features
    if "softcap" in declared:
        held.attend(0, plan, query, softcap=2.0)
    if "sinks" in declared:
        held.attend(0, plan, query, sinks=sinks(bench))
    held.attend(0, plan, query, scale=0.4)
    if "lse" in declared:
        held.attend(0, plan, query, partial=True)
    held.attend(0, plan, query)
