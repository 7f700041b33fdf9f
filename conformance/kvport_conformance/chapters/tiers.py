"""Tiers: sealing encodes whole higher-precision pages as append would, and attention merges the tiers exactly."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvport_conformance import inputs
from kvport_conformance.axes import (
    BASE,
    HALF_FORMATS,
    HALF_MODELS,
    LATENT_TIERED,
    MLA,
    MODEL,
    SEALED_ONLY,
    TIERED,
    Tier,
    Variant,
    families,
    product,
)
from kvport_conformance.bench import Bench, Row
from kvport_conformance.cases import check
from kvport_conformance.tiered import Tiered
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "tiers"

#: Tiers of a half-precision model: near pages in its own dtype.
HALF_TIERED: Final = ("int8,recent=20", "int8:channel:static:scale=bf16,sink=4,recent=33")


def _tiered(tier: Tier = "quick") -> list[Variant]:
    return [
        *product((*TIERED, *LATENT_TIERED), (BASE, MLA), tier),
        *product(HALF_TIERED, HALF_MODELS[:1], tier),
    ]


@check(
    CHAPTER,
    families()
    + product((*SEALED_ONLY, "latent=int4:c16:sparse=9,rope=int8"), (BASE, MLA))
    + product(SEALED_ONLY, (MODEL,), "full"),
)
def sealed(bench: Bench) -> None:
    """Sealing encodes whole pages of a float store, K and V together, as the definition says, and nothing else."""
    layout = bench.layout()
    size = layout.page_size
    for code in ("fp32", "bf16") if bench.dtype == "float32" else (HALF_FORMATS[bench.dtype][-1],):
        near_format = f"latent={code},rope={code}" if layout.latent else code
        near, far = bench.held(6, bench.layout(near_format)), bench.held(7, layout)
        near.fill_sequence([5, 1, 3], 3 * size)
        others = [1, 3, 4, 5]
        before = far.export(0, others)  # what nobody wrote may read as anything, but the same before and after
        for layer in range(layout.layers):
            source, target = [5, 3], [2, 6]
            bench.backend.seal(near.store, far.store, layer, source, target)
            rows = near.slots[layer, near.slots_of(source, 0, 2 * size)]
            decoded = near.contents[layer].decoded
            ids = far.contents[layer].add(decoded["key"][rows], decoded["value"][rows])
            far.slots[layer, far.slots_of(target, 0, 2 * size)] = ids
        far.check()
        near.check()
        bench.backend.seal(near.store, far.store, 0, [], [])
        far.attend(0, [Row([6, 2], 2 * size), Row([2], 3)], bench.queries(layout, 2))
        far.gather(1, [Row([6, 2], 2 * size - 3)])
        after = far.export(0, others)
        if any(before[name].tobytes() != plane.tobytes() for name, plane in after.items()):
            raise Disagreement("sealing wrote pages other than its targets")


@check(CHAPTER, product(SEALED_ONLY, (BASE,)) + product(SEALED_ONLY, (MODEL,), "full"), requires=("verify",))
def sealed_foreign(bench: Bench) -> None:
    """Whole-page groups imported from the judge come back unchanged and are what attention reads."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(5, layout)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 2 * size, stream="foreign")
        ids = held.contents[layer].add(key * np.float32(3), value)
        held.import_tokens(layer, [4, 2], ids)
    held.check()
    held.attend(1, [Row([4, 2], 2 * size - 1, 2), Row([2], 1)], bench.queries(layout, 3))
    held.copy_pages([4], [1])
    held.check()


@check(CHAPTER, _tiered(), requires=("lse", "prefill", "verify"))
def replayed(bench: Bench) -> None:
    """Steps of many sizes: which tokens are near and which far is exactly the rule's, and outputs follow from it."""
    tiered = Tiered(bench, 24, 24)
    size = tiered.page_size
    first, second = tiered.sequence(), tiered.sequence()
    for turn, count in enumerate((size + 3, 1, 5, 2 * size + 1, 1, 1, size - 1, 4)):
        batch = {first: tiered.make(count, f"a{turn}")}
        if turn % 2:
            batch[second] = tiered.make(1 + count % 7, f"b{turn}")
        tiered.step(batch)
        tiered.check()


@check(CHAPTER, _tiered(), requires=("lse", "prefill", "verify"))
def tier_edges(bench: Bench) -> None:
    """Token by token over every length at which a page may seal: one token earlier and it must not, then it must."""
    tiered = Tiered(bench, 24, 24)
    size, recent = tiered.page_size, tiered.format.recent
    sequence = tiered.sequence()
    # The first page that may seal is the one behind the head; it does when `recent` tokens follow its last.
    head = -(-tiered.format.sink // size) * size
    for edge in (head + size + recent, head + 2 * size + recent):
        tiered.step({sequence: tiered.make(edge - 1 - sequence.length, f"to{edge}")})
        for turn in range(3):
            tiered.step({sequence: tiered.make(1, f"{edge}+{turn}")})
            tiered.check()


@check(CHAPTER, _tiered(), requires=("lse", "prefill", "verify"))
def forked_tiers(bench: Bench) -> None:
    """Forks and truncations of tiered sequences: the near tail is each branch's own, sealed pages are shared."""
    tiered = Tiered(bench, 24, 40)
    size = tiered.page_size
    parent = tiered.sequence()
    tiered.step({parent: tiered.make(3 * size + 5, "prompt")})
    child = tiered.fork(parent)
    tiered.step({child: tiered.make(2, "child"), parent: tiered.make(1, "parent")})
    draft = len(tiered.near[child])
    tiered.step({child: tiered.make(6, "draft")})
    tiered.truncate(child, draft + 1)
    for turn in range(2):
        tiered.step({child: tiered.make(size, f"c{turn}"), parent: tiered.make(3, f"p{turn}")})
    tiered.check()


@check(
    CHAPTER,
    product(TIERED[:3], (BASE,)) + product(HALF_TIERED[:1], HALF_MODELS[:1]),
    requires=("lse", "prefill", "verify"),
)
def pinned(bench: Bench) -> None:
    """Pages of pinned tokens stay in higher precision whole, those of another sequence do not."""
    tiered = Tiered(bench, 24, 24)
    size = tiered.page_size
    pinned_one, plain = tiered.sequence(pin=size + 2), tiered.sequence()
    for turn in range(4):
        tiered.step({s: tiered.make(size + 5, f"{n}{turn}") for n, s in (("a", pinned_one), ("b", plain))})
    tiered.check()


@check(
    CHAPTER,
    _tiered("full"),
    requires=("lse",),
)
def long_replay(bench: Bench) -> None:
    """Sixty steps of sizes drawn from the seed."""
    tiered = Tiered(bench, 80, 60)
    sequences = [tiered.sequence() for _ in range(3)]
    for turn, (which, count) in enumerate(
        inputs.integers(inputs.derive(bench.seed, "long"), (60, 2), 0, 2**16).tolist()
    ):
        tiered.step({sequences[which % 3]: tiered.make(1 + count % (tiered.page_size + 3), f"t{turn}")})
    tiered.check()
