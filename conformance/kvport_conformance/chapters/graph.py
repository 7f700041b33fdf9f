"""Graphs: a step is recorded once, over padding, and replayed with other lengths, tables, sequences and data."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from kvport.backend import Limits, Plan
from kvport.errors import OutOfPages
from kvport_conformance.axes import (
    BASE,
    FAMILIES,
    FORMATS,
    LATENT_FORMATS,
    LATENT_GEOMETRIES,
    MLA,
    MODEL,
    geometry,
    half_kinds,
    kinds,
    mla,
    product,
)
from kvport_conformance.bench import Bench, Held, Planned, Row
from kvport_conformance.cases import check
from kvport_conformance.chapters.features import sinks
from kvport_conformance.oracle_floats import Float32Array
from kvport_conformance.replayed import Replayed
from kvport_conformance.tensors import poisoned_allocations, to_torch
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "graph"

#: Latent layers of a half-precision model on pages that every kernel takes.
HALF_LATENT: Final = mla(16, 512, 64, 64, dtype="bfloat16")


@check(
    CHAPTER,
    product(FAMILIES, (BASE,))
    + half_kinds()
    + product(FORMATS, (BASE, MODEL), "full")
    + product(LATENT_FORMATS, (*LATENT_GEOMETRIES, HALF_LATENT), "full"),
    requires=("graph", "prefill"),
)
def decode(bench: Bench) -> None:
    """One decode graph: lengths cross pages, sequences come, go and swap rows, freed pages serve others."""
    served = Replayed(bench, 14, seqs=3, tokens=3, query=1)
    size = served.page_size
    a, b = served.sequence(), served.sequence()
    served.step({a: served.make(size - 1, "a"), b: served.make(2 * size, "b")}, attend=False)
    served.replay({a: served.make(1, "a1"), b: served.make(1, "b1")})
    served.replay({a: served.make(1, "a2")})  # the first token of a page, and two rows of padding
    c = served.sequence()
    served.replay({c: served.make(1, "c"), b: served.make(1, "b2"), a: served.make(1, "a3")})
    served.free(b)
    d = served.sequence()
    served.step({d: served.make(size + 3, "d")})  # an ordinary step in between, on the freed pages
    served.replay({d: served.make(1, "d1"), a: served.make(1, "a4")})
    served.replay({a: served.make(1, "a5"), c: served.make(1, "c1"), d: served.make(1, "d2")})
    served.check()


@check(
    CHAPTER,
    kinds() + product(("int8", "int4:g16"), (MODEL,)) + product(LATENT_FORMATS, (MLA,), "full"),
    requires=("graph", "verify"),
)
def verify(bench: Bench) -> None:
    """Drafts are verified by a graph, as many of a sequence as there are, and rejected ones are truncated away."""
    served = Replayed(bench, 14, seqs=3, tokens=9)
    size = served.page_size
    a, b = served.sequence(), served.sequence()
    served.step({a: served.make(size - 2, "a"), b: served.make(3, "b")}, attend=False)
    for turn, (first, second) in enumerate(((4, 4), (1, 5), (5, 0), (2, 1))):
        served.replay({a: served.make(first, f"a{turn}"), b: served.make(second, f"b{turn}")})
        served.truncate(a, len(served.tokens[a]) - first + 1)  # shorter than the replay before it
    served.replay({b: served.make(9, "b9")})
    served.check()


@check(CHAPTER, kinds(), requires=("graph", "prefill", "verify"))
def mixed(bench: Bench) -> None:
    """One graph takes chunks of a prompt beside decode and verification."""
    served = Replayed(bench, 16, seqs=3, tokens=24)
    a, b, c = (served.sequence() for _ in range(3))
    served.replay({a: served.make(20, "a")})
    served.replay({b: served.make(18, "b"), a: served.make(1, "a1"), c: served.make(3, "c")})
    served.replay({c: served.make(1, "c1"), b: served.make(1, "b1")})
    served.replay({a: served.make(2, "a2"), c: served.make(21, "c2"), b: served.make(1, "b2")})
    served.check()


@check(CHAPTER, kinds(), requires=("graph",))
def shared(bench: Bench) -> None:
    """Forks, copies on write, prefix hits and refusals between replays give every sequence what it had alone."""
    served = Replayed(bench, 9, seqs=4, tokens=4, query=1)
    size = served.page_size
    prompt = list(range(500, 500 + size + size // 2))
    numbers = served.make(len(prompt), "prompt")
    parent = served.sequence()
    served.step({parent: numbers}, ids={parent: prompt}, attend=False)
    child = served.fork(parent)
    before = served.digests(parent)
    served.replay({child: served.make(1, "child")})  # copies the open page, then records nothing anew
    if served.digests(parent) != before:
        raise Disagreement("a replay of the child changed codes or scales of its parent")
    hit = served.adopt(served.cache.match(prompt), numbers)
    served.replay({parent: served.make(1, "p1"), hit: served.make(1, "h1"), child: served.make(1, "c1")})
    others = [served.sequence() for _ in range(3)]
    served.step({s: served.make(size, f"o{n}") for n, s in enumerate(others)}, attend=False)
    try:
        served.replay({s: served.make(1, f"o1{n}") for n, s in enumerate(others)})
    except OutOfPages:
        served.check()
    else:
        raise RuntimeError("the pool was meant to be too small: a fault of the suite")
    served.free(others[0])
    served.replay({others[1]: served.make(1, "o2"), hit: served.make(1, "h2"), parent: served.make(1, "p2")})
    served.check()


@check(CHAPTER, kinds(), requires=("graph",))
def other_magnitudes(bench: Bench) -> None:
    """Data many times larger or smaller than at the replay before: dynamic scales are those of the data."""
    served = Replayed(bench, 6, seqs=2, tokens=2, query=1)
    sequence, other = served.sequence(), served.sequence()
    for turn, factor in enumerate((1.0, 64.0, 4.0, 16.0)):  # powers of two: exact in every dtype
        made = []
        for layer, content in enumerate(served.contents):
            key, value = bench.tokens(served.group, layer, 2, stream=f"turn{turn}")
            # Half-precision queries leave K alone: of scores that large a bound could say nothing.
            key = key * np.float32(factor if bench.dtype == "float32" else 1)
            made = [int(n) for n in content.add(key, value * np.float32(factor))]
        served.replay({sequence: made[:1], other: made[1:]})
    served.check()


@check(
    CHAPTER,
    product(FAMILIES[::3], (geometry(2, 6, 64, 16, window=21),))
    + product(FORMATS, (geometry(2, 6, 64, 16, window=21),), "full"),
    requires=("graph", "window", "softcap", "sinks", "verify"),
)
def features(bench: Bench) -> None:
    """Window, soft cap and sink logits in a graph; pages that the window has passed are freed between replays."""
    served = Replayed(bench, 10, seqs=2, tokens=4, softcap=5.0, sinks=sinks(bench))
    a, b = served.sequence(), served.sequence()
    served.step({a: served.make(60, "a"), b: served.make(19, "b")}, attend=False)
    for turn in range(4):
        served.replay({a: served.make(1, f"a{turn}"), b: served.make(3, f"b{turn}")})
    if a.pages()[:2] != (0, 0):
        raise RuntimeError("the window was meant to pass two pages: a fault of the suite")


def _attend(held: Held, layer: int, plan: Plan, rows: list[Row], query: Float32Array) -> None:
    """Attend rows and padding under a fixed plan; judge both."""
    count = sum(row.queries for row in rows)
    padded = np.concatenate([query[:count], np.full_like(query[count:], np.nan)])
    out, lse = held.attend(layer, Planned(plan, tuple(rows)), padded)
    if out[count:].any() or (held.bench.gives_lse(held.layout) and not (lse[count:] == -np.inf).all()):
        raise Disagreement("rows of padding must be zeros with LSE -inf")


@check(CHAPTER, kinds(BASE, MODEL), requires=("graph", "verify"))
def refilled(bench: Bench) -> None:
    """Fixed plans hold the arrays they were filled with last, each its own, and keep their tensors."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(9, layout)
    pages = bench.shuffled_pages(9, 6)
    long, short = pages[:4], pages[4:]
    held.fill_sequence(long, 3 * size + 2)
    held.fill_sequence(short, size + 1, stream="short")
    limits = Limits(sequences=3, tokens=7, query_tokens=4, pages=6)
    one, two = (bench.backend.fixed_plan(held.store, limits) for _ in range(2))
    query = bench.queries(layout, limits.tokens)
    _attend(held, 0, one, [], query)
    first = [Row(long, 3 * size + 2, 2), Row(short, size + 1)]
    second = [Row(short, size, 4)]
    held.refill(one, limits, first)
    held.refill(two, limits, second)
    for layer in range(layout.layers):
        _attend(held, layer, one, first, query)
        _attend(held, layer, two, second, query)
    held.refill(one, limits, second)
    _attend(held, 1, one, second, query)
    _attend(held, 1, two, second, query)
    held.refill(one, limits, [Row(long, 1), *first])
    _attend(held, 0, one, [Row(long, 1), *first], query)


@check(CHAPTER, kinds(BASE, MODEL), requires=("graph",))
def recorded(bench: Bench) -> None:
    """What record() returns repeats the work on the data of the day: other rows, other slots, other history."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(8, layout)
    pages = bench.shuffled_pages(8, 5)
    backend, device = bench.backend, held.device
    limits = Limits(sequences=2, tokens=2, query_tokens=1, pages=4)
    plan, scale = backend.fixed_plan(held.store, limits), layout.key_dim**-0.5
    shapes = (
        (layout.kv_heads, layout.key_dim),
        (layout.kv_heads, layout.value_dim),
        (layout.query_heads, layout.key_dim),
    )
    key, value, query = (to_torch(np.zeros((2, *s), np.float32), bench.dtype, device) for s in shapes)
    slots = backend.upload(torch.full((2,), -1, dtype=torch.int64))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        backend.append(held.store, 0, key, value, slots)
        return backend.attend(held.store, 0, query, plan, scale=scale)

    with poisoned_allocations():
        run()
        repeat = backend.record(run)
    held.fill_sequence(pages[:2], size + 3)
    for turn, rows in enumerate(
        ([Row(pages[:2], size + 4)], [Row(pages[2:3], 1), Row(pages[:2], size + 5)], [Row(pages[2:3], 2)])
    ):
        count = len(rows)
        where = np.concatenate([held.slots_of(row.pages, row.length - 1, row.length) for row in rows])
        made = bench.tokens(layout, 0, count, stream=f"turn{turn}")
        asked = bench.queries(layout, count, stream=f"turn{turn}")
        for buffer, content in zip((key, value, query), (*made, asked), strict=True):
            buffer.fill_(torch.nan)
            buffer[:count] = to_torch(content, bench.dtype, device)
        backend.upload(torch.from_numpy(np.concatenate([where, np.full(2 - count, -1)])), slots)
        held.refill(plan, limits, rows)
        held.slots[0, where] = held.contents[0].add(*made)
        with poisoned_allocations():
            answer = repeat()
        held.judge(
            tuple(part[:count] for part in answer), 0, rows, asked, given={"scale": scale, "window": layout.window}
        )
    held.check(layers=[0])
