"""Prefix sharing: forks, copies, prefix hits and reuse give every sequence what it would have had alone."""

from __future__ import annotations

from typing import Final

from kvport.errors import OutOfPages
from kvport_conformance.axes import BASE, FORMATS, GEOMETRIES, HALF_MODELS, families, kinds, product
from kvport_conformance.bench import Bench, Row
from kvport_conformance.cases import check
from kvport_conformance.served import Served
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "prefix"


@check(CHAPTER, families(), requires=("verify",))
def shared_pages(bench: Bench) -> None:
    """Sequences whose tables name the same pages, each with a tail of its own, attend as if they shared nothing."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(8)
    pages = bench.shuffled_pages(8, 5)
    prefix, tails = pages[:2], pages[2:]
    held.fill_sequence(prefix, 2 * size)
    rows = [Row(prefix, 2 * size - 1)]
    for s, tail in enumerate(tails):
        for layer in range(layout.layers):
            key, value = bench.tokens(layout, layer, 3 + s, stream=f"tail{s}")
            held.append(layer, key, value, held.slots_of([tail], 0, 3 + s))
        rows.append(Row([*prefix, tail], 2 * size + 3 + s, queries=1 + s % 2))
    plan = held.plan(rows)
    for layer in range(layout.layers):
        held.attend(layer, plan, bench.queries(layout, sum(row.queries for row in rows)))
    held.check()


@check(
    CHAPTER,
    families() + product(("int8",), GEOMETRIES[2:]) + product(FORMATS, GEOMETRIES, "full"),
    requires=("prefill", "verify"),
)
def forked(bench: Bench) -> None:
    """A fork in mid-page goes its own way: neither branch sees the other's tokens, in any layer."""
    served = Served(bench, 12)
    size = served.page_size
    parent = served.sequence()
    served.step({parent: served.make(size + size // 2, "prompt")})
    before = served.digests(parent)
    child = served.fork(parent)
    if served.cache.stats().pools[0].held != len(parent.pages()):
        raise Disagreement("a fork must share every page until something is written")
    served.step({child: served.make(2, "child")})
    if served.digests(parent) != before:
        raise Disagreement("the child's append changed codes or scales of its parent")
    served.step({parent: served.make(3, "parent"), child: served.make(1, "child2")})
    served.step({parent: served.make(1, "parent2"), child: served.make(size, "child3")})
    served.check()


@check(CHAPTER, families(), requires=("prefill", "verify"))
def branches(bench: Bench) -> None:
    """Three branches of one sequence, forked at different lengths, step in one batch; beams reorder and die."""
    served = Served(bench, 16)
    size = served.page_size
    root = served.sequence()
    served.step({root: served.make(size - 2, "root")})
    beams = [root, served.fork(root), served.fork(root)]
    for turn in range(2):
        served.step({beam: served.make(1, f"beam{turn}.{b}") for b, beam in enumerate(beams)})
        # Reorder [2, 0, 0], as beam search does: one beam dies, one goes twice.
        order = [served.fork(beams[2]), served.fork(beams[0]), served.fork(beams[0])]
        for beam in beams:
            served.free(beam)
        beams = order
    served.step({beam: served.make(3, f"end{b}") for b, beam in enumerate(beams)})
    served.check()


@check(CHAPTER, families(), requires=("prefill", "verify"))
def prefix_hit(bench: Bench) -> None:
    """A prompt found in the prefix index gives the same codes, scales and outputs as one computed anew."""
    served = Served(bench, 16)
    size = served.page_size
    prompt = list(range(1000, 1000 + 2 * size + size // 2))
    numbers = served.make(len(prompt), "prompt")
    miss = served.sequence()
    served.step({miss: numbers}, ids={miss: prompt})
    digests = served.digests(miss)
    for _ in range(2):
        hit = served.adopt(served.cache.match(prompt), numbers)
        if hit.length != 2 * size:
            raise RuntimeError(f"the prefix index found {hit.length} tokens, must find {2 * size}")
        served.step({hit: numbers[hit.length :]}, ids={hit: prompt[hit.length :]})
        if served.digests(hit) != digests:
            raise Disagreement("after a prefix hit the pages differ from those of the miss")
        served.step({hit: served.make(1, "more")})
        served.free(hit)
    served.free(miss)
    late = served.adopt(served.cache.match([*prompt[: size + 3], 5]), numbers)
    served.step({late: served.make(4, "late")})
    served.check()


@check(CHAPTER, families(), requires=("prefill", "verify"))
def truncated(bench: Bench) -> None:
    """Tokens that were truncated away leave no trace in the page: what follows is as if they never were."""
    served = Served(bench, 12)
    size = served.page_size
    sequence = served.sequence()
    served.step({sequence: served.make(2 * size + 5, "draft")})
    for length in (2 * size + 2, 2 * size, size + 3):
        served.truncate(sequence, length)
        served.step({sequence: served.make(2, f"after{length}")})
    served.check()
    twin = served.sequence()
    served.step({twin: served.tokens[sequence]})
    if served.digests(twin) != served.digests(sequence):
        raise Disagreement("after truncations a sequence's pages differ from those of one that never was longer")


@check(CHAPTER, families(), requires=("verify",))
def reused_pool(bench: Bench) -> None:
    """A pool that is full, freed and filled again, three times over, gives the same bits every time."""
    served = Served(bench, 6, share=False)
    size = served.page_size
    numbers = served.make(2 * size + 1, "request")
    digests = None
    for turn in range(3):
        sequence, other = served.sequence(), served.sequence()
        served.step({other: served.make(size + turn + 1, f"other{turn}")}, attend=False)
        served.step({sequence: numbers[:size]}, attend=False)
        served.step({sequence: numbers[size:]})
        if digests not in (None, served.digests(sequence)):
            raise Disagreement(f"the same request gave other codes or scales the {turn + 1}th time")
        digests = served.digests(sequence)
        served.check()
        served.free(sequence)
        served.free(other)


@check(CHAPTER, kinds(), requires=("prefill", "verify"))
def rolled_back(bench: Bench) -> None:
    """A step that is left by an exception, or that lacks pages, leaves every committed token as it was."""
    served = Served(bench, 5)
    size = served.page_size
    sequence = served.sequence()
    served.step({sequence: served.make(size + 3, "prompt")})
    child = served.fork(sequence)
    before = {s: served.digests(s) for s in (sequence, child)}
    lost = served.make(4, "lost")
    try:
        with served.cache.step({child: 4}) as step:
            served.append(step, 0, lost)  # type: ignore[arg-type]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    try:
        served.step({sequence: served.make(4 * size, "too long")})
    except OutOfPages:
        pass
    else:
        raise RuntimeError("a step of four pages fitted into a pool of three: a fault of kvport")
    if {s: served.digests(s) for s in (sequence, child)} != before:
        raise Disagreement("a step that was rolled back changed committed codes or scales")
    served.step({sequence: served.make(2, "on"), child: served.make(1, "on2")})
    served.check()


@check(
    CHAPTER,
    product(("int8", "int4:g16:asym"), (BASE,)) + product(("int8",), HALF_MODELS[:1]),
    requires=("prefill", "verify"),
)
def long_stress(bench: Bench) -> None:
    """A few hundred forks, appends, truncations and frees in a small pool, in an order drawn from the seed."""
    from kvport_conformance import inputs

    served = Served(bench, 24)
    size = served.page_size
    alive = [served.sequence()]
    choices = inputs.integers(inputs.derive(bench.seed, "stress"), (120, 3), 0, 2**16)
    for turn, (what, which, count) in enumerate(choices.tolist()):
        sequence = alive[which % len(alive)]
        room = served.cache.stats().pools[0].free
        if what % 8 < 4 and room > 4:
            batch = {sequence: served.make(1 + count % (size + 3), f"t{turn}")}
            if len(alive) > 1 and (other := alive[(which + 1) % len(alive)]) is not sequence:
                batch[other] = served.make(1 + count % 3, f"u{turn}")
            served.step(batch, attend=turn % 3 == 0)
        elif what % 8 == 4 and len(alive) < 6:
            alive.append(served.fork(sequence))
        elif what % 8 == 5 and sequence.length:
            served.truncate(sequence, count % sequence.length)
        elif len(alive) > 1:
            alive.remove(sequence)
            served.free(sequence)
        elif room <= 4:
            served.truncate(sequence, sequence.length // 2)
    served.check()
