"""Attention: decode, prefill, chunked prefill and verify are one function of what is stored, for every head layout."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from kvport_conformance import inputs, oracle_attention
from kvport_conformance.axes import (
    BASE,
    DEEPSEEK,
    FORMATS,
    HALF_GEOMETRIES,
    KINDS,
    LATENT_FORMATS,
    LATENT_GEOMETRIES,
    LATENT_TIERED,
    MATRIX,
    MLA,
    MODEL,
    OUTLIER_FORMATS,
    ROTATED_FORMATS,
    SEALED_ONLY,
    TIERED,
    Variant,
    every_geometry,
    families,
    geometry,
    half_kinds,
    half_models,
    kinds,
    parse,
    product,
)
from kvport_conformance.bench import Bench, Held, Row
from kvport_conformance.cases import check
from kvport_conformance.served import Served
from kvport_conformance.tensors import FORMS, to_torch
from kvport_conformance.tiered import Tiered
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "attention"

#: Query heads per KV head, primes included: no kernel's tile divides them all.
RATIOS: Final = tuple(
    geometry(kv, kv * ratio, 64, 16) for kv, ratio in ((2, 1), (3, 2), (1, 3), (2, 5), (1, 7), (1, 16))
)
HALF_RATIOS: Final = tuple(
    geometry(kv, kv * ratio, 64, 32, dtype="bfloat16") for kv, ratio in ((2, 1), (1, 3), (2, 5), (1, 16))
)


def _sequence(bench: Bench, length: int, *, spare: int = 2) -> tuple[Held, list[int]]:
    layout = bench.layout()
    count = layout.pages_for(length)
    held = bench.held(1 + count + spare, layout)
    pages = bench.shuffled_pages(held.pages, count)
    held.fill_sequence(pages, length)
    return held, pages


@check(CHAPTER, families() + every_geometry(), requires=("prefill", "verify"))
def phases(bench: Bench) -> None:
    """Prefill, decode, verify and chunks of the same tokens give the same outputs, on local and on imported pages."""
    layout = bench.layout()
    size = layout.page_size
    length = 2 * size + 5 if size <= 16 else size + 5
    held, pages = _sequence(bench, length)
    query = bench.queries(layout, length)
    layer = layout.layers - 1
    whole, _ = held.attend(layer, [Row(pages, length, length)], query)
    single = sorted({0, 1, 7, size - 1, size, size + 1, length - 1})
    outputs = {"decode": (held.attend(layer, [Row(pages, n + 1) for n in single], query[single])[0], whole[single])}
    cuts = [0, 1, 8, size, size + 1, length]
    chunks = [(a, b) for a, b in pairwise(cuts) if a < b]
    outputs["chunks"] = held.attend(layer, [Row(pages, b, b - a) for a, b in chunks], query)[0], whole
    other = bench.held(held.pages, layout)
    other.contents = held.contents
    targets = bench.shuffled_pages(held.pages, len(pages), "imported")
    bench.backend.import_pages(other.store, layer, targets, bench.backend.export_pages(held.store, layer, pages))
    other.slots[layer, other.slots_of(targets, 0, length)] = held.slots[layer, held.slots_of(pages, 0, length)]
    last = slice(length - 3, length)
    outputs["imported"] = other.attend(layer, [Row(targets, length, 3)], query[last])[0], whole[last]
    largest = max(float(np.abs(a - b).max()) for a, b in outputs.values())
    bench.figures.more["phase_difference"] = largest


@check(CHAPTER, kinds(BASE, MODEL), requires=("prefill", "verify"))
def streamed(bench: Bench) -> None:
    """A sequence that grows chunk by chunk sees all that came before, and nothing of what the pages held earlier."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(6)
    pages = bench.shuffled_pages(6, 3)
    length = 0
    for count in (1, 3, size - 4, 1, 2, 14):
        for layer in range(layout.layers):
            held.append_run(layer, pages, length, length + count)
        length += count
        plan = held.plan([Row(pages[: layout.pages_for(length)], length, count)])
        for layer in range(layout.layers):
            held.attend(layer, plan, bench.queries(layout, count, start=length))


@check(CHAPTER, kinds(), requires=("prefill", "verify"))
def verify(bench: Bench) -> None:
    """Batches of 2 to 8 query tokens, around page boundaries, are the single steps they stand for."""
    layout = bench.layout()
    size = layout.page_size
    length = 2 * size + 9
    held, pages = _sequence(bench, length)
    rows = [
        Row(pages, end, count)
        for count in range(1, 9)
        for end in (count, size, size + 1, size + count - 1, 2 * size + count)
        if end >= count
    ]
    held.attend(1, rows, bench.queries(layout, sum(row.queries for row in rows)))


@check(CHAPTER, families(), requires=("prefill", "verify"))
def mixed_batch(bench: Bench) -> None:
    """Lengths 0, 1, 17 and 300 in one batch, decoding, verifying and prefilling, equal their single runs."""
    layout = bench.layout()
    lengths = (0, 1, 17, 300, 40)
    counts = (0, 1, 3, 1, 40)
    pages = sum(layout.pages_for(n) for n in lengths)
    held = bench.held(pages + 2, layout)
    free = bench.shuffled_pages(pages + 2, pages)
    rows = []
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [free.pop() for _ in range(layout.pages_for(length))]
        if length:
            held.append_run(0, mine, 0, length, stream=f"s{s}")
        rows.append(Row(mine, length, count))
    query = bench.queries(layout, sum(counts))
    out, lse = held.attend(0, rows, query)
    first = 0
    for row in rows:
        mine_rows = slice(first, first := first + row.queries)
        if row.queries:
            alone, alone_lse = held.attend(0, [row], query[mine_rows])
            difference = float(np.abs(alone - out[mine_rows]).max())
            bench.figures.more["single_difference"] = max(difference, bench.figures.more.get("single_difference", 0.0))
            if bench.gives_lse(layout) and not np.allclose(alone_lse, lse[mine_rows], rtol=1e-2, atol=1e-2):
                raise Disagreement(f"LSE of the sequence of length {row.length} depends on its batch mates")


@check(
    CHAPTER,
    product(("int8", "int4:g16:asym"), RATIOS) + product(("int8",), HALF_RATIOS) + product(FORMATS, RATIOS, "full"),
    requires=("verify",),
)
def head_ratios(bench: Bench) -> None:
    """Query head h reads KV head h // (query_heads / kv_heads), at every ratio from 1 to 16."""
    layout = bench.layout()
    length = layout.page_size + 5
    held, pages = _sequence(bench, length)
    held.attend(0, [Row(pages, length, 2), Row(pages, 3)], bench.queries(layout, 3))


@check(
    CHAPTER,
    product(("int8", "bf16", "int4:g16:asym"), HALF_GEOMETRIES) + product(FORMATS, HALF_GEOMETRIES, "full"),
    requires=("verify",),
)
def half_queries(bench: Bench) -> None:
    """Models in half precision: outputs in the query's dtype, LSE in float32."""
    layout = bench.layout()
    length = layout.page_size + 5
    held, pages = _sequence(bench, length)
    for layer in range(layout.layers):
        held.attend(layer, [Row(pages, length, 3), Row(pages[:1], 2)], bench.queries(layout, 4))


def _few() -> list[Variant]:
    shapes = (BASE, *HALF_GEOMETRIES[::2])
    return [
        *product(("int8", "int4:g16", "int8:channel:static:scale=bf16", "fp8_e4m3"), shapes),
        *half_models(),
        *product(FORMATS, (*shapes, MODEL, *HALF_GEOMETRIES[1::2]), "full"),
    ]


@check(CHAPTER, _few())
def few_tokens(bench: Bench) -> None:
    """One to three tokens under a zero query: the mean of V, where a fault of a few percent shows even in bf16."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(4)
    pages = bench.shuffled_pages(4, 2)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, size + 3)
        held.append(layer, key, np.abs(value), held.slots_of(pages, 0, size + 3))
    query = np.zeros_like(bench.queries(layout, 3))
    for layer in range(layout.layers):
        held.attend(layer, [Row(pages[:1], n) for n in (1, 2, 3)], query)


@check(
    CHAPTER,
    [v for form in FORMS[1:] for v in (*product(("int8",), (BASE,), form=form), *half_kinds(form=form))]
    + [v for form in FORMS[1:] for v in product(FORMATS, (BASE, MODEL), "full", form=form)],
    requires=("verify",),
)
def strided_queries(bench: Bench) -> None:
    """Queries may be views of any strides."""
    layout = bench.layout()
    length = layout.page_size + 5
    held, pages = _sequence(bench, length)
    query = bench.queries(layout, 4)
    held.attend(0, [Row(pages, length, 3), Row(pages, 5)], query, form=bench.option("form"))


@check(CHAPTER, kinds(), requires=("verify",))
def plans(bench: Bench) -> None:
    """A plan serves every layer, and stays valid after another plan was made and used."""
    layout = bench.layout()
    size = layout.page_size
    held, pages = _sequence(bench, 2 * size + 3)
    first = held.plan([Row(pages, 2 * size + 3, 2), Row(pages, 5)])
    second = held.plan([Row(pages[:1], 7)])
    for layer in range(layout.layers):
        held.attend(layer, first, bench.queries(layout, 3))
    for layer in range(layout.layers):
        held.attend(layer, second, bench.queries(layout, 1))
        held.attend(layer, first, bench.queries(layout, 3, stream="again"))
    # Made, and not used, before the first is used again: the latest plan is not the one that was asked for.
    held.plan([Row(pages[::-1], 2 * size, 2), Row(pages[1:], 9)])
    held.attend(0, first, bench.queries(layout, 3))
    # The same shape of batch with other lengths and pages: a plan kept by its shape would be the wrong one.
    third = held.plan([Row(pages[::-1][:1] + pages[1:2], size + 1, 2), Row(pages[1:], 3)])
    held.slots[:, held.slots_of([pages[2]], size // 2, size)] = -1  # nobody reads those
    for layer in range(layout.layers):
        held.append_run(layer, [pages[2]], 0, size, stream="c")
        held.attend(layer, third, bench.queries(layout, 3))


@check(CHAPTER, kinds(), requires=("verify",))
def owned_outputs(bench: Bench) -> None:
    """What attend returned stays as it was when attend, append and gather run again."""
    layout = bench.layout()
    length = layout.page_size + 5
    held, pages = _sequence(bench, length)
    plan = held.plan([Row(pages, length, 2)])
    query = to_torch(bench.queries(layout, 2), bench.dtype, bench.backend.torch_device)
    scale = layout.key_dim**-0.5
    out, lse = bench.backend.attend(held.store, 0, query, plan.plan, scale=scale)
    kept = out.clone(), lse.clone(), query.clone()
    bench.backend.attend(held.store, 1, query * 2, plan.plan, scale=scale)
    held.append_run(0, pages, 0, 3, stream="later")
    held.gather(0, [Row(pages, length)])
    for name, now, then in (("output", out, kept[0]), ("LSE", lse, kept[1]), ("query argument", query, kept[2])):
        if not torch.equal(torch.nan_to_num(now), torch.nan_to_num(then)):
            raise Disagreement(f"the {name} of an attend changed when the backend worked again")


@check(CHAPTER, product(KINDS, (BASE,)) + half_kinds() + product(FORMATS, (MODEL,), "full"), requires=("verify",))
def steep(bench: Bench) -> None:
    """Scores of several hundred, of either sign: the softmax neither overflows nor loses its smallest terms."""
    layout = bench.layout()
    length = layout.page_size + 5
    held, pages = _sequence(bench, length)
    query = bench.queries(layout, 3) * np.float32(64)
    query[1] = -np.abs(query[1])
    out, _ = held.attend(0, [Row(pages, length, 3)], query)
    if not np.isfinite(out).all():
        raise Disagreement("large scores gave an output that is not finite")


@check(
    CHAPTER,
    product(("int8", "fp32"), (geometry(1, 1, 64, 128, layers=1),))
    + product(("int8",), (geometry(1, 2, 64, 128, layers=1, dtype="bfloat16"),)),
)
def long_context(bench: Bench) -> None:
    """Four thousand keys of equal weight: the mean of V keeps its precision; and one key among them is found."""
    _long(bench, 4096)


@check(
    CHAPTER,
    product(("int8", "fp8_e4m3", "int4:g32:asym:scale=bf16", "bf16"), (geometry(1, 2, 128, 128, layers=1),), "full"),
)
def longer_context(bench: Bench) -> None:
    """Sixty-four thousand keys of equal weight: the mean of V keeps its precision; and one key among them is found."""
    _long(bench, 65536)


def _long(bench: Bench, length: int) -> None:
    layout = bench.layout()
    held = bench.held(layout.pages_for(length) + 1)
    pages = bench.shuffled_pages(held.pages, held.pages - 1)
    block = 1024
    for first in range(0, length, block):
        held.append_run(0, pages, first, first + block)
    query = bench.queries(layout, 2)
    query[0] = 0
    needle = held.contents[0].decoded["key"][held.slots[0, held.slots_of(pages, length // 3, length // 3 + 1)]][0]
    query[1] = np.repeat(needle, layout.query_heads // layout.kv_heads, axis=0)
    held.attend(0, [Row(pages, length), Row(pages, length)], query)


@check(CHAPTER, kinds(), requires=("verify",))
def read_only(bench: Bench) -> None:
    """plan, attend, gather and export leave every byte of the store as it was."""
    layout = bench.layout()
    length = layout.page_size + 5
    held, pages = _sequence(bench, length)
    before = {name: tensor.clone() for name, tensor in bench.backend.buffers(held.store).items()}
    held.attend(0, [Row(pages, length, 2), Row([], 0)], bench.queries(layout, 3))
    held.gather(1, [Row(pages, length)])
    held.export(0, pages)
    for name, tensor in bench.backend.buffers(held.store).items():
        if not torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)):
            raise Disagreement(f"reading changed buffer {name!r}")


@check(CHAPTER, product(("int8",), (BASE,)) + half_kinds(), requires=("prefill", "verify"))
def shuffled_batch(bench: Bench) -> None:
    """Sequences in another order in the batch, with their pages on other ids, give the same outputs."""
    layout = bench.layout()
    size = layout.page_size
    held, pages = _sequence(bench, 2 * size + 3)
    rows = [Row(pages, n, min(n, 3)) for n in (3, size, size + 2, 2 * size + 3, 1)]
    starts = np.cumsum([0, *(row.queries for row in rows)])
    query = bench.queries(layout, int(starts[-1]))
    out, _ = held.attend(0, rows, query)
    order = inputs.permutation(inputs.derive(bench.seed, "batch"), len(rows)).tolist()
    picked = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    again, _ = held.attend(0, [rows[i] for i in order], query[picked])
    bench.figures.more["order_difference"] = float(np.abs(out[picked] - again).max())


#: What a sequence goes through; "all" is one life with everything in it.
PHASES: Final = ("append", "decode", "prefill", "chunked", "verify", "fork", "moved")


def _lives() -> list[Variant]:
    """Quick: every code with every granularity, and every kind of format, lives once. Full: each phase by itself."""
    formats = (*MATRIX, *TIERED, *SEALED_ONLY, *OUTLIER_FORMATS, *ROTATED_FORMATS, *LATENT_FORMATS, *LATENT_TIERED)
    rotated = ("latent=int8:g32,rope=bf16,rotate=4",)
    model = ("kivi2", "int8:g128:scale=fp16", "int4:g64:sparse=160", "k=int4:g64:outliers=4,v=int4:g64", "mxfp4")
    half = geometry(2, 4, 64, 16, dtype="bfloat16")
    canonical = [str(parse(text)) for text in model]
    return [
        *product((*formats, *rotated), (BASE, MLA), phase="all"),
        *product((*ROTATED_FORMATS, *OUTLIER_FORMATS[:1]), (half,), phase="all"),
        *product(("latent=fp8_e4m3:g128,rope=bf16",), (DEEPSEEK,), phase="all"),
        *half_kinds(phase="all"),
        *product(canonical, (MODEL,), "full", phase="all"),
        *product(formats, (MODEL, *LATENT_GEOMETRIES), "full", phase="all"),
        *(v for phase in PHASES for v in product((*formats, *rotated), (BASE, MLA), "full", phase=phase)),
    ]


@check(CHAPTER, _lives(), requires=("prefill", "verify"))
def lifecycle(bench: Bench) -> None:
    """A sequence is prefilled in one go and in chunks, decoded, verified, rolled back, forked, moved, and goes on."""
    tiered = parse(bench.case.format).tiered
    layout, wanted = bench.layout(tiered=tiered), bench.option("phase")
    size, alone = layout.page_size, wanted != "all"
    cache: Served | Tiered = Tiered(bench, 30, 40) if tiered else Served(bench, 40)
    sequence = cache.sequence()

    def go(*counts: int, name: str) -> None:
        for turn, count in enumerate(counts):
            cache.step({sequence: cache.make(count, f"{name}{turn}")})

    begin = {"append": 2 * size + 3, "decode": size - 2, "prefill": 2 * size + 5, "chunked": 7}
    go(begin.get(wanted, size + 5), name="begin")
    if wanted == "prefill":
        other = cache.sequence()
        cache.step({other: cache.make(size + 1, "other"), sequence: cache.make(2 * size - 1, "more")})
    if wanted in ("chunked", "all"):
        go(*((1, size, size + 2, 2 * size + 1) if alone else (size + 2,)), name="chunk")
    if wanted in ("decode", "all"):
        go(*[1] * (size + 5 if alone else 2), name="decode")
    if wanted in ("verify", "all"):
        for turn in range(3 if alone else 1):
            before = sequence.length
            go(5, name=f"draft{turn}")
            cache.truncate(sequence, before + 1 + turn)
        go(1, name="accepted")
    if wanted in ("fork", "all"):
        child = cache.fork(sequence)
        for turn in range(3 if alone else 1):
            cache.step({child: cache.make(size - 1, f"c{turn}"), sequence: cache.make(2, f"p{turn}")})
    cache.check()
    if wanted in ("moved", "all"):
        before_move = cache.cache.export(sequence).digests()
        there: Served | Tiered
        there, moved = cache.moved(sequence, 40, 30) if isinstance(cache, Tiered) else cache.moved(sequence, 40)
        if there.cache.export(moved).digests() != before_move:
            raise Disagreement("an inserted sequence has other digests than the exported one")
        for turn, count in enumerate((1, size + 1, 2) if alone else (size + 1,)):
            there.step({moved: there.make(count, f"after{turn}")})
        there.check()


@check(
    CHAPTER,
    product((LATENT_FORMATS[0], LATENT_FORMATS[1]), (MLA,)) + product(LATENT_FORMATS, LATENT_GEOMETRIES, "full"),
    requires=("verify",),
)
def absorbed(bench: Bench) -> None:
    """Queries with the up-projection absorbed give what attention over explicitly projected K and V gives."""
    layout = bench.layout()
    latent, rope, heads = layout.value_dim, layout.key_dim - layout.value_dim, layout.query_heads
    nope, value_dim, count = 24, 40, 5
    length = layout.page_size + 7
    held, pages = _sequence(bench, length)
    seed = inputs.derive(bench.seed, "projections")
    up_key = inputs.values(seed, (heads, nope, latent), low=-0.25, high=0.25).astype(np.float64)
    up_value = inputs.values(seed + 1, (heads, value_dim, latent), low=-0.25, high=0.25).astype(np.float64)
    query_nope = inputs.values(seed + 2, (count, heads, nope), low=-1.0, high=1.0).astype(np.float64)
    query_rope = inputs.values(seed + 3, (count, heads, rope), low=-1.0, high=1.0).astype(np.float64)
    wide = np.concatenate([np.einsum("qhn,hnl->qhl", query_nope, up_key), query_rope], axis=-1)
    query = to_torch(wide.astype(np.float32), bench.dtype, torch.device("cpu")).float().numpy()
    scale = 1.0 / math.sqrt(nope + rope)
    layer = layout.layers - 1
    out, _ = held.attend(layer, [Row(pages, length, count)], query, scale=scale)

    ids = held.slots[layer, held.slots_of(pages, 0, length)]
    stored = held.contents[layer].decoded["key"][ids, 0].astype(np.float64)
    key = np.concatenate(
        [
            np.einsum("tl,hnl->thn", stored[:, :latent], up_key),
            np.broadcast_to(stored[:, None, latent:], (length, heads, rope)),
        ],
        axis=-1,
    )
    value = np.einsum("tl,hvl->thv", stored[:, :latent], up_value)
    explicit = np.concatenate([query_nope, query_rope], axis=-1)
    given: dict[str, Any] = {
        "scale": scale,
        "softcap": None,
        "window": None,
        "sinks": None,
        "query_start": length - count,
    }
    wanted, _ = oracle_attention.attend(explicit, key, value, **given)
    found = np.einsum("qhl,hvl->qhv", out.astype(np.float64), up_value)
    # Outputs are off by their bound in latent space, carried through the projection; and queries by their rounding,
    # which moves scores as an error of the products does.
    shared = stored[:, None, :]
    bound, _ = oracle_attention.attention_bound(
        query, shared, shared[..., :latent], query_dtype=bench.dtype,
        extra_product_error=oracle_attention.PRODUCT_ERROR[bench.dtype], **given,
    )  # fmt: skip
    allowed = np.einsum("qhl,hvl->qhv", bound, np.abs(up_value))
    ratio = float((np.abs(found - wanted) / allowed).max())
    bench.figures.worst("output_ratio", ratio)
    if not ratio <= 1:
        raise Disagreement(
            f"attention with absorbed queries, projected up, differs from attention over projected K and V by "
            f"{ratio:.3g} times the bound"
        )
