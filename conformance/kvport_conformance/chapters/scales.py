"""Scale preservation: what is stored is what is used, bit for bit, through every way in and out of a page."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from kvport.backend import Store
from kvport_conformance import allocation, bounds, inputs, oracle_codec
from kvport_conformance.axes import (
    BASE,
    CORE,
    DYNAMIC_FORMATS,
    FORMATS,
    HALF_FORMATS,
    HALF_MODELS,
    MODEL,
    PAIR_FORMATS,
    SMALL_FLOAT_FORMATS,
    STATIC_FORMATS,
    Variant,
    every_format,
    every_geometry,
    families,
    half_kinds,
    kinds,
    product,
)
from kvport_conformance.bench import Bench, Held, Row
from kvport_conformance.cases import check
from kvport_conformance.content import Content, Ids, Side
from kvport_conformance.oracle_floats import Array
from kvport_conformance.tensors import raw_bytes
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "scales"


def _ready(bench: Bench, pages: int = 5, length: int | None = None) -> tuple[Held, list[int], int]:
    """A store with one sequence on shuffled pages: (store, its pages, its length)."""
    layout = bench.layout()
    count = 2 * layout.page_size + 3 if length is None else length
    held = bench.held(pages, layout)
    ids = bench.shuffled_pages(pages, layout.pages_for(count))
    held.fill_sequence(ids, count)
    return held, ids, count


@check(CHAPTER, every_format() + every_geometry())
def gathered(bench: Bench) -> None:
    """Gathered rows are code * scale (+ zero) of what is stored, within the format's own error of what was given."""
    held, pages, length = _ready(bench)
    for layer in range(held.layout.layers):
        held.gather(layer, [Row(pages, length), Row(pages[:1], 5)])
    content = held.contents[0]
    ids = held.slots[0, held.slots_of(pages, 0, length)]
    for name, side in content.sides.items():
        error = np.abs(content.decoded[name][ids].astype(np.float64) - content.source[name][ids])
        bound = side.round_trip_bound(content.source[name][ids], content.side_planes(name, ids))
        if not (error <= bound).all():
            raise RuntimeError(f"the oracle breaks its own round-trip bound for {name}: a fault of the suite")
        bench.figures.worst("format_error", float(np.sqrt((error[np.isfinite(bound)] ** 2).mean())))


@check(CHAPTER, every_format() + every_geometry())
def moved(bench: Bench) -> None:
    """Pages exported from one store and imported into another, on other ids, are the same bits and attend the same."""
    held, pages, length = _ready(bench)
    layout = held.layout
    other = bench.held(9, layout)
    targets = bench.shuffled_pages(9, len(pages), "targets")
    other.contents = held.contents
    for layer in range(layout.layers):
        planes = bench.backend.export_pages(held.store, layer, pages)
        bench.backend.import_pages(other.store, layer, targets, planes)
        other.slots[layer, other.slots_of(targets, 0, length)] = held.slots[layer, held.slots_of(pages, 0, length)]
    other.check()
    whole, used = length // layout.page_size, layout.page_size
    for layer in range(layout.layers):
        first, second = held.export(layer, pages[:whole]), other.export(layer, targets[:whole])
        if any(first[name].tobytes() != second[name].tobytes() for name in first):
            raise Disagreement(f"{whole} pages of {used} tokens exported, imported and exported again differ")
        other.attend(layer, [Row(targets, length)], bench.queries(layout, 1))
        other.gather(layer, [Row(targets, length)])


def foreign(content: Content, count: int, seed: int) -> Ids:
    """Tokens that no encoder made: every code there is (also -2**(b-1)), and scales of the judge's own making.

    Scales are different for every token, head and group, over a range of 64, never 1 and not related to the codes.
    """
    planes: dict[str, Array] = {}
    for name, side in content.sides.items():
        shapes = oracle_codec.plane_shapes(side.spec, count, side.heads, side.dim)
        for plane, (shape, dtype) in shapes.items():
            stream = inputs.derive(seed, name, plane)
            planes[f"{name}.{plane}"] = _foreign_plane(side, name, plane, shape, dtype, stream)
    return content.add_planes(planes)


def _foreign_plane(
    side: Side, name: str, plane: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], seed: int
) -> Array:
    if plane == "outliers":
        return inputs.values(seed, shape, low=-40.0, high=60.0)
    if plane == "codes":
        if side.spec.code in oracle_codec.FLOAT_PAGES:
            values = inputs.values(seed, shape, low=-3.0, high=5.0)
            small = oracle_codec.FLOAT_PAGES[side.spec.code]
            return values if small is None else small.encode(values)
        raw = inputs.integers(seed, shape, 0, 256).astype(np.uint8)
        if side.spec.code == "fp8_e4m3":
            raw = np.where((raw & 0x7F) == 0x7F, np.uint8(0x7E), raw)  # NaN has a case of its own
        if side.spec.code == "fp8_e5m2":
            raw = np.where((raw & 0x7C) == 0x7C, np.uint8(0x7B), raw)
        return raw.view(np.int8) if dtype == np.int8 else raw
    low, high = (2.0**-7, 2.0**-1) if name == "value" else (2.0**-9, 2.0**-3)
    if side.spec.code == "mxfp4":
        return inputs.integers(seed, shape, 121, 127).astype(np.uint8)
    if side.spec.code == "nvfp4" and plane == "scale":
        return inputs.integers(seed, shape, 0x10, 0x50).astype(np.uint8)
    values = inputs.values(seed, shape, low=low, high=high)
    if plane == "zero":
        values = inputs.values(seed, shape, low=-3.0, high=1.0)
    if dtype == np.float32:
        return values
    small = oracle_codec.SCALE_DTYPES[side.spec.scale_dtype]
    assert small is not None
    return small.encode(values)


@check(CHAPTER, every_format() + every_geometry())
def foreign_codes(bench: Bench) -> None:
    """Imported codes and scales that no encoder would produce come back unchanged and are what attention uses."""
    layout = bench.layout()
    held = bench.held(5, layout)
    pages = bench.shuffled_pages(5, 2)
    length = 2 * layout.page_size
    for layer in range(layout.layers):
        ids = foreign(held.contents[layer], length, inputs.derive(bench.seed, "foreign", layer))
        held.import_tokens(layer, pages, ids)
    held.check()
    rows = [Row(pages, length - 3), Row(pages, length), Row(pages[:1], 2)]
    plan = held.plan(rows)
    for layer in range(layout.layers):
        held.attend(layer, plan, bench.queries(layout, 3))
        held.gather(layer, rows)


@check(CHAPTER, every_format())
def edited_code(bench: Bench) -> None:
    """One code changed between export and import moves the output as predicted, and only where it must."""
    held, pages, length = _ready(bench)
    layout = held.layout
    layer, size = layout.layers - 1, layout.page_size
    query = bench.queries(layout, 1)
    before, _ = held.attend(layer, [Row(pages, length)], query)
    exported = bench.backend.export_pages(held.store, layer, pages)
    content = held.contents[layer]
    token = size + 1  # the second token of the second page
    old = held.slots[layer, held.slots_of(pages, token, token + 1)]
    planes = {name: array[old].copy() for name, array in content.planes.items()}
    for name, side in ((f"{name}.codes", side) for name, side in content.sides.items()):
        head, element = side.heads - 1, _read_code(side, planes[name].shape[-1])
        raw = planes[name][0, head].view(np.uint8)
        width = planes[name].dtype.itemsize
        raw[element * width + width - 1] ^= 0x40 if side.spec.code in oracle_codec.FLOAT_PAGES else 0x11
        exported[name].view(torch.uint8)[1, 1, head].view(-1)[element * width + width - 1] = int(
            raw[element * width + width - 1]
        )
    bench.backend.import_pages(held.store, layer, pages, exported)
    held.slots[layer, held.slots_of(pages, token, token + 1)] = content.add_planes(planes)
    held.check()
    after, _ = held.attend(layer, [Row(pages, length)], query)
    per_head = layout.query_heads // layout.kv_heads
    untouched = slice(0, layout.query_heads - per_head)
    if not np.array_equal(before[:, untouched], after[:, untouched]):
        raise Disagreement("an edited code of the last KV head changed the output of other heads")
    if np.array_equal(before, after):
        raise Disagreement("an edited code did not change the output: attention does not read the stored codes")


def _read_code(side: Side, width: int) -> int:
    """An element of the codes of the last head, near the middle, that decoding reads: no outlier channel's."""
    per_element = max(1, 8 // side.spec.code_bits)
    kept = set() if side.channels is None else set(side.channels[-1].tolist())
    return next(e for e in range(width // 2, width) if not kept & set(range(e * per_element, (e + 1) * per_element)))


def _scaled() -> list[Variant]:
    return [
        *product((*DYNAMIC_FORMATS, *SMALL_FLOAT_FORMATS[:2]), (BASE,)),
        *product(CORE[1:], (MODEL,)),
        *product(("int8",), HALF_MODELS[:2]),
    ]


@check(CHAPTER, _scaled())
def edited_scale(bench: Bench) -> None:
    """One stored scale changed by a few percent, then by one unit in the last place, moves the output as predicted."""
    held, pages, length = _ready(bench)
    layout = held.layout
    size = layout.page_size
    query = bench.queries(layout, 1)
    content = held.contents[0]
    for step in (16, 1):
        exported = bench.backend.export_pages(held.store, 0, pages)
        token = size + 2
        where = held.slots_of(pages, token, token + 1)
        planes = {name: array[held.slots[0, where]].copy() for name, array in content.planes.items()}
        for name in (f"{side}.scale" for side in content.sides):
            plane = planes.get(name)
            if plane is None:
                continue
            unsigned = plane.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[plane.dtype.itemsize])
            unsigned += np.array(step if plane.dtype.itemsize < 4 else step << 12 if step > 1 else 1, unsigned.dtype)
            exported[name][1, 2] = torch.from_numpy(plane[0].copy()).view(exported[name].dtype)
        bench.backend.import_pages(held.store, 0, pages, exported)
        held.slots[0, where] = content.add_planes(planes)
        held.check(layers=[0])
        held.attend(0, [Row(pages, length)], query)
        held.gather(0, [Row(pages, length)])


@check(
    CHAPTER,
    product((*STATIC_FORMATS, "fp8_e4m3:tensor:static", "nvfp4:static", PAIR_FORMATS[3]), (BASE, MODEL))
    + [v for shape in HALF_MODELS[:2] for v in product(HALF_FORMATS[shape.dtype][1:4], (shape,))],
)
def static_scales(bench: Bench) -> None:
    """Static scales are those of the layer, K's for K and V's for V: other scales, other codes, other outputs."""
    layout = bench.layout()
    length = layout.page_size + 3
    pages = bench.shuffled_pages(4, 2)
    for factor in (1.0, 2.0):
        held = bench.held(4, layout)
        if factor != 1:
            held = _rescaled(bench, held, factor)
        held.fill_sequence(pages, length)
        held.check()
        for layer in range(layout.layers):
            held.attend(layer, [Row(pages, length)], bench.queries(layout, 1))


def _rescaled(bench: Bench, held: Held, factor: float) -> Held:
    """A store like this one whose static V scales are ``factor`` times as large, K's unchanged."""
    from dataclasses import replace

    contents = []
    for content in held.contents:
        value = content.sides["value"]
        if value.static_scale is not None:
            value = replace(value, static_scale=np.asarray(value.static_scale * np.float32(factor), np.float32))
        contents.append(Content([content.sides["key"], value]))
    return Held(bench, held.layout, held.pages, contents=contents)


@check(CHAPTER, every_format())
def owned_bytes(bench: Bench) -> None:
    """buffers() holds page_bytes * pages bytes, and allocating the store takes no more than that."""
    layout = bench.layout()
    page_bytes = bench.backend.page_bytes(layout)
    canonical = layout.layers * sum(int(np.prod(plane.shape)) * plane.dtype.itemsize for plane in layout.planes)
    if page_bytes < canonical:
        raise Disagreement(f"page_bytes is {page_bytes}, less than the {canonical} bytes that one page image has")
    stores: list[Store] = []
    taken: list[int | None] = []
    counts = (7, 135)
    for pages in counts:
        contents = [bench.content(layout, layer) for layer in range(layout.layers)]
        scales = [content.scales() for content in contents] if layout.format.calibrated else None
        with allocation.held(bench.backend.torch_device) as measured:
            stores.append(bench.allocate(layout, pages, scales))
        taken.append(measured.bytes)
        buffers = bench.backend.buffers(stores[-1])
        owned = sum(tensor.numel() * tensor.itemsize for tensor in buffers.values())
        if owned != page_bytes * pages:
            listed = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in buffers.items())
            raise Disagreement(
                f"buffers() holds {owned} bytes for {pages} pages, page_bytes * pages is {page_bytes * pages}: {listed}"
            )
    bench.figures.more["page_bytes"] = page_bytes
    bench.figures.more["padding_bytes"] = page_bytes - canonical
    if taken[0] is None or taken[1] is None:
        return
    grown, expected = taken[1] - taken[0], page_bytes * (counts[1] - counts[0])
    grain = bounds.ALLOCATION_GRAINS["cpu" if bench.backend.torch_device.type == "cpu" else "device"].value
    allowed = expected * (1 + bounds.ALLOCATION_SLACK.value) + grain * (1 + len(bench.backend.buffers(stores[0])))
    if grown > allowed:
        raise Disagreement(
            f"{counts[1] - counts[0]} more pages took {grown} bytes from the allocator, and buffers() accounts for "
            f"{expected} of them: something else is kept per page (a copy in full precision?)"
        )


@check(CHAPTER, families())
def nothing_hidden(bench: Bench) -> None:
    """The bytes of buffers() are the whole state: put back as they were, they bring the old tokens back."""
    held, pages, length = _ready(bench)
    layout = held.layout
    old = held.slots.copy()
    buffers = bench.backend.buffers(held.store)
    saved = {name: tensor.clone() for name, tensor in buffers.items()}
    held.fill_sequence(pages, length, stream="other")
    held.check()
    for name, tensor in bench.backend.buffers(held.store).items():
        tensor.copy_(saved[name])
    held.slots[:] = old
    held.check()
    for layer in range(layout.layers):
        held.attend(layer, [Row(pages, length)], bench.queries(layout, 1))
        held.gather(layer, [Row(pages, length)])
    for name, tensor in bench.backend.buffers(held.store).items():
        if not np.array_equal(raw_bytes(tensor), raw_bytes(saved[name])):
            raise Disagreement(f"export, attend or gather changed buffer {name!r}")


@check(
    CHAPTER,
    product((*DYNAMIC_FORMATS, *SMALL_FLOAT_FORMATS), (BASE,))
    + product(CORE, (MODEL,))
    + product(("int8",), HALF_MODELS[:2]),
)
def poison_stays(bench: Bench) -> None:
    """A NaN or infinity given to append is NaN in its own group for good, and nowhere else."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(4)
    pages = bench.shuffled_pages(4, 2)
    length = size + 4
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, length)
        key[2, 0, 1] = np.nan
        key[5, -1, -1] = -np.inf
        value[3, 0, 0] = np.inf
        value[size, -1, 2] = np.nan
        held.append(layer, key, value, held.slots_of(pages, 0, length))
    held.check()
    held.gather(0, [Row(pages, length)])
    held.attend(0, [Row(pages, 2), Row(pages, length)], bench.queries(layout, 2))


@check(CHAPTER, product(STATIC_FORMATS, (BASE,)) + half_kinds()[1:], requires=("poison",))
def flagged_pages(bench: Bench) -> None:
    """A NaN that a static integer format stores as code 0 raises its page's flag, until the page begins anew."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(5)
    for layer in range(layout.layers):
        held.append_run(layer, [1, 2, 3, 4], 0, 4 * size)
    _flags(bench, held, set())
    key, value = bench.tokens(layout, 1, 2, stream="nan")
    key[0, 0, 3] = np.nan
    held.append(1, key, value, [2 * size + 1, 3 * size + 5])
    _flags(bench, held, {(1, 2)})
    key, value = bench.tokens(layout, 0, 1, stream="nan")
    value[0, -1, 0] = np.nan
    held.append(0, key, value, [4 * size - 1])
    held.append_run(1, [2], 3, 5, stream="more")  # other slots of a flagged page
    _flags(bench, held, {(1, 2), (0, 3)})
    held.append_run(1, [2], 0, 1, stream="again")  # its first slot: the page begins anew
    held.append(0, np.full_like(key, np.nan), value, [-1])  # a skipped row has no page
    _flags(bench, held, {(0, 3)})
    held.check()


def _flags(bench: Bench, held: Held, wanted: set[tuple[int, int]]) -> None:
    flags = bench.backend.poisoned(held.store)
    shape = (held.layout.layers, held.pages)
    if tuple(flags.shape) != shape or flags.dtype != torch.bool or flags.device.type != "cpu":
        raise Disagreement(f"poisoned() must be {shape} bool on the host, got {tuple(flags.shape)} {flags.dtype}")
    found = {(int(layer), int(page)) for layer, page in flags.nonzero().tolist() if page}
    if found != wanted:
        raise Disagreement(f"poisoned() flags (layer, page) {sorted(found)}, must be {sorted(wanted)}")


@check(CHAPTER, product(("fp32", "int8", "nvfp4"), (BASE,)) + product(("int8", "bf16"), HALF_MODELS[:1]))
def never_poisoned(bench: Bench) -> None:
    """Formats that keep NaN visible in scale or code never raise a flag."""
    held, pages, _ = _ready(bench)
    key, value = bench.tokens(held.layout, 0, 1)
    held.append(0, np.full_like(key, np.nan), value, held.slots_of(pages, 1, 2))
    _flags(bench, held, set())


@check(CHAPTER, kinds())
def copied(bench: Bench) -> None:
    """Copied pages have the codes and scales of their source in every layer, bit for bit, and are their own pages."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(8)
    held.fill_sequence([1, 2, 3], 3 * size)
    held.fill_sequence([4, 5, 6, 7], 4 * size, stream="b")
    before = held.snapshot([1, 2, 3, 5, 7])
    held.copy_pages([3, 1], [4, 6])
    held.check()
    if held.snapshot([1, 2, 3, 5, 7]) != before:
        raise Disagreement("copy_pages changed pages other than its targets")
    for layer in range(layout.layers):
        held.append_run(layer, [4], 2, size, stream="c")
        held.append_run(layer, [1], 0, 2, stream="d")
    held.check()
    held.copy_pages([], [])
    held.check()


@check(CHAPTER, product([f for f in FORMATS if f not in ("fp32", "bf16", "fp16")], (BASE,), "full"))
def wide_range(bench: Bench) -> None:
    """K of a thousand and V of a thousandth in one store: each keeps its own scale."""
    layout = bench.layout()
    held = bench.held(4)
    pages = bench.shuffled_pages(4, 2)
    length = layout.page_size + 3
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, length)
        held.append(layer, key * np.float32(64), value * np.float32(2.0**-10), held.slots_of(pages, 0, length))
        held.gather(layer, [Row(pages, length)])
    held.check()
