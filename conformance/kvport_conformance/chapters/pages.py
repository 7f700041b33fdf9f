"""Page boundaries: every length, every fill of the last page, any page ids, and nothing beyond a length ever read."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from kvport_conformance.axes import (
    BASE,
    CORE,
    FORMATS,
    KINDS,
    MODEL,
    STATIC_FORMATS,
    every_geometry,
    families,
    geometry,
    half_models,
    kinds,
    product,
)
from kvport_conformance.bench import Bench, Held, Row
from kvport_conformance.cases import check
from kvport_conformance.tensors import fill_bytes
from kvport_conformance.verdicts import Disagreement, NotSupported

CHAPTER: Final = "pages"

#: Page sizes of the exhaustive sweep, at a small geometry.
SWEEP: Final = tuple(geometry(1, 2, 64, size, layers=1) for size in (16, 48, 128))


@check(
    CHAPTER,
    product(KINDS, SWEEP[:1])
    + product(("int8",), (*SWEEP[1:], geometry(1, 2, 64, 32, layers=1, dtype="bfloat16")))
    + product(FORMATS, (*SWEEP, BASE, MODEL), "full"),
)
def every_length(bench: Bench) -> None:
    """Decode at every length 1 .. 3 * page_size + 1, with later tokens of the same pages in the masked lanes."""
    layout = bench.layout()
    longest = 3 * layout.page_size + 1
    held = bench.held(6)
    pages = bench.shuffled_pages(6, 4)
    held.fill_sequence(pages, longest)
    rows = [Row(pages, length) for length in range(1, longest + 1)]
    held.attend(0, rows, bench.queries(layout, longest))


@check(CHAPTER, families() + every_geometry())
def last_page(bench: Bench) -> None:
    """Decode with the last page filled to its first, last and middle slots; all that is unwritten is NaN."""
    layout = bench.layout()
    size = layout.page_size
    lengths = [1, size - 1, size, size + 1] if size > 16 else [1, 2, size - 1, size, size + 1, 2 * size, 3 * size + 1]
    held = bench.held(1 + sum(layout.pages_for(n) for n in lengths) + 2)
    free = bench.shuffled_pages(held.pages, held.pages - 1)
    rows = []
    for s, length in enumerate(lengths):
        pages = [free.pop() for _ in range(layout.pages_for(length))]
        held.fill_sequence(pages, length, stream=f"s{s}")
        rows.append(Row(pages, length))
    held.attend(1, rows, bench.queries(layout, len(rows)))
    held.check(layers=[1])


@check(CHAPTER, product((*STATIC_FORMATS, "mxfp4", "fp8_e4m3", "int8", "int4"), (BASE,)) + half_models() + kinds(MODEL))
def extreme_bytes(bench: Bench) -> None:
    """Unwritten slots that hold the largest codes, zeros or infinities are never read either."""
    layout = bench.layout()
    size = layout.page_size
    for byte in (0x80, 0x7F, 0x00):
        held = bench.held(5, layout, fill=byte)
        pages = bench.shuffled_pages(5, 3)
        held.fill_sequence(pages, 2 * size + 3)
        held.attend(0, [Row(pages, 2 * size + 3)], bench.queries(layout, 1))
        held.check()


@check(CHAPTER, families())
def any_page_ids(bench: Bench) -> None:
    """The same tokens on other page ids are stored, and attended to, the same."""
    layout = bench.layout()
    size = layout.page_size
    length = 3 * size - 2
    query = bench.queries(layout, 1)
    seen = []
    for pages in ([1, 2, 3], [7, 2, 5], [3, 6, 1]):
        held = bench.held(8, layout)
        held.fill_sequence(pages, length)
        held.check()
        held.attend(1, [Row(pages, length)], query)
        codes = [plane for name, plane in held.export(1, pages).items() if name.endswith(".codes")]
        used = [plane.reshape(3 * size, -1)[:length] for plane in codes]
        seen.append([array.tobytes() for array in used])
    if seen.count(seen[0]) != len(seen):
        raise Disagreement("codes at rest depend on the page ids")


def _far(bench: Bench, held: Held, high: list[int], decoys: list[int]) -> None:
    """Fill a sequence on high page ids and another on the ids that a narrow index would reach; judge both."""
    layout = bench.layout()
    size = layout.page_size
    length = 2 * size + 3
    held.fill_sequence(decoys, length, stream="decoy")
    held.fill_sequence(high, length, stream="high")
    held.check()
    rows = [Row(high, length), Row(decoys, length)]
    plan = held.plan(rows)
    for layer in range(layout.layers):
        held.attend(layer, plan, bench.queries(layout, 2))
    held.gather(0, rows)


#: 65536 pages of it are small enough for any machine, and larger than a 16-bit page id can name.
SMALL: Final = geometry(1, 2, 64, 16, layers=1)
SMALL_HALF: Final = geometry(1, 2, 64, 32, layers=1, dtype="bfloat16")


@check(
    CHAPTER,
    product(("int8", "int4:g16:asym", "fp32"), (SMALL,))
    + product(("int8",), (SMALL_HALF,))
    + product(("int8", "int4:g64"), (MODEL,), "full"),
)
def high_page_ids(bench: Bench) -> None:
    """Page ids past 65535 name pages of their own: nothing wraps at 16 bits, in codes or in scales."""
    layout = bench.layout()
    pages = 65536 + 8
    held = _large(bench, pages)
    _far(bench, held, [65539, 65537, 65542], [3, 1, 6])
    held.copy_pages([65539], [65541])
    held.check(pages=[65541, 65539, 3])
    if layout.page_size * pages > 2**20:
        bench.figures.more["largest_slot"] = layout.page_size * pages - 1


@check(CHAPTER, product(("int8",), (geometry(2, 2, 128, 16, layers=1),)) + product(CORE, (MODEL,), "full"))
def wide_offsets(bench: Bench) -> None:
    """Byte offsets past 2**31 are computed in 64 bits, in codes and in scales."""
    layout = bench.layout()
    plane = next(p for p in layout.planes if p.name == "key.codes")
    pages = 2**31 // plane.nbytes + 8
    held = _large(bench, pages)
    wrap = 2**31 // plane.nbytes  # the page whose offset is 2**31 bytes, which 32 bits would read as negative
    _far(bench, held, [wrap + 3, wrap + 1, wrap + 6], [3, 1, 6])


def _large(bench: Bench, pages: int) -> Held:
    """A store too large to be filled: the spare and unwritten pages hold what the allocator gave."""
    layout = bench.layout()
    size = bench.backend.page_bytes(layout) * pages
    try:
        held = bench.held(pages, layout, fill=None)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise NotSupported(f"the device has no {size / 2**30:.1f} GiB to spare for this case: {error}") from error
    return held


@check(CHAPTER, families(), requires=("verify",))
def empty_sequences(bench: Bench) -> None:
    """A sequence of length 0 gives zeros and LSE -inf, alone and among others."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(6)
    pages = bench.shuffled_pages(6, 4)
    held.fill_sequence(pages[:2], size + 1)
    held.fill_sequence(pages[2:], 2 * size, stream="b")
    # A query row at position 0 of a store that holds nothing of its sequence: a tier that begins later, or padding.
    empty = Row([], 0, queries=1)
    rows = [empty, Row(pages[:2], size + 1), empty, Row(pages[2:], 2 * size, 3), empty]
    out, lse = held.attend(0, rows, bench.queries(layout, sum(row.queries for row in rows)))
    for row in (0, 2, 6):
        if out[row].any() or (bench.gives_lse(layout) and not np.isneginf(lse[row]).all()):
            raise Disagreement(f"query row {row} sees no key: it must give zeros and -inf, got {out[row]}, {lse[row]}")
    held.attend(1, [empty], bench.queries(layout, 1))
    held.attend(1, [Row(pages[:2], size + 1, 0), Row(pages[2:], 2 * size, 0)], bench.queries(layout, 0))


@check(CHAPTER, kinds())
def padded_tables(bench: Bench) -> None:
    """Columns of the page table beyond a sequence's pages name the spare page and are never read."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(7)
    pages = bench.shuffled_pages(7, 5)
    held.fill_sequence(pages[:1], 5)
    held.fill_sequence(pages[1:], 3 * size + 1, stream="b")
    rows = [Row(pages[:1], 5), Row(pages[1:], 3 * size + 1)]
    for columns in (0, 1, 5):
        held.attend(0, held.plan(rows, columns=columns), bench.queries(layout, 2))
    held.gather(0, rows)


@check(CHAPTER, families())
def recycled_pages(bench: Bench) -> None:
    """Pages that held a longer sequence of larger values serve a shorter one as fresh pages would."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(5)
    pages = bench.shuffled_pages(5, 4)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 4 * size, stream="old")
        held.append(layer, key * np.float32(32), -value * np.float32(32), held.slots_of(pages, 0, 4 * size))
        held.attend(layer, [Row(pages, 4 * size)], bench.queries(layout, 1))  # whoever keeps what it read, keeps it now
    reused = pages[::-1]
    held.fill_sequence(reused, size + 3, stream="new")
    rows = [Row(reused[:2], size + 3)]
    for layer in range(layout.layers):
        held.attend(layer, rows, bench.queries(layout, 1))
    held.gather(0, rows)
    held.check()


@check(CHAPTER, kinds(BASE, MODEL))
def poison_elsewhere(bench: Bench) -> None:
    """Pages that turn to NaN while a sequence lives (freed ones, the spare, other sequences') do not reach it."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(6)
    pages = bench.shuffled_pages(6, 5)
    mine, others = pages[:2], pages[2:]
    held.fill_sequence(mine, size + 2)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 3 * size, stream="nan")
        key[...] = np.nan
        value[...] = np.nan
        held.append(layer, key, value, held.slots_of(others, 0, 3 * size))
        # The rest of the open page too: a token that was appended there and then truncated away.
        tail = 2 * size - (size + 2)
        held.append(layer, key[:tail], value[:tail], held.slots_of(mine, size + 2, 2 * size))
        held.attend(layer, [Row(mine, size + 2)], bench.queries(layout, 1))
    spare = bench.held(3)
    for buffer in bench.backend.buffers(spare.store).values():
        fill_bytes(buffer, 0xFF)
    spare.fill_sequence([2], 3)
    spare.attend(0, spare.plan([Row([2], 3)], columns=2), bench.queries(layout, 1))
