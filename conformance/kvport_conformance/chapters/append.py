"""Append: what must be stored for a token, whatever the batch, the split, the strides and the page it comes with."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvport_conformance import inputs
from kvport_conformance.axes import (
    BASE,
    CORE,
    DYNAMIC_FORMATS,
    FORMATS,
    HALF_MODELS,
    MODEL,
    every_format,
    every_geometry,
    half_kinds,
    product,
)
from kvport_conformance.bench import Bench
from kvport_conformance.cases import check
from kvport_conformance.oracle_floats import Array, BoolArray
from kvport_conformance.tensors import FORMS
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "append"

HALVES: Final = ("float16", "bfloat16")


@check(CHAPTER, every_format() + every_geometry())
def rows(bench: Bench) -> None:
    """Codes and scales of every token and layer equal the definition, on shuffled pages, in shuffled slot order."""
    layout = bench.layout()
    size = layout.page_size
    length = 2 * size + 3
    held = bench.held(6)
    pages = bench.shuffled_pages(6, 3)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, length)
        order = inputs.permutation(inputs.derive(bench.seed, "order", layer), length)
        held.append(layer, key[order], value[order], held.slots_of(pages, 0, length)[order])
    held.check()


@check(CHAPTER, every_format())
def special_rows(bench: Bench) -> None:
    """Exact ties, full range, zeros, constants, tiny, huge and non-finite rows, which leave no room for opinion."""
    layout = bench.layout()
    keys, values = (inputs.special_rows(dim, dtype=bench.dtype) for dim in (layout.key_dim, layout.value_dim))
    names = [name for name in keys if name in values]
    key = np.stack([keys[name] for name in names])
    # Another row in V than in K, so that a swap shows; head h starts elsewhere in the list, so that heads differ too.
    value = np.stack([values[name] for name in names])[::-1]
    heads = [np.roll(np.arange(len(names)), 3 * head) for head in range(layout.kv_heads)]
    key, value = (np.stack([x[order] for order in heads], axis=1) for x in (key, value))
    pages = -(-len(names) // layout.page_size)
    held = bench.held(pages + 2)
    order = bench.shuffled_pages(pages + 2, pages)
    held.append(0, key, np.ascontiguousarray(value), held.slots_of(order, 0, len(names)))
    held.check(layers=[0], unambiguous=True)


@check(CHAPTER, every_format())
def split(bench: Bench) -> None:
    """A token's codes and scales do not depend on how its append was split."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(6)
    pages = bench.shuffled_pages(6, 4)
    for layer in range(layout.layers):
        first = 0
        for count in (1, 7, size, 1, size + 3):
            held.append_run(layer, pages, first, first + count)
            first += count
    held.check()


@check(
    CHAPTER,
    [v for dtype in HALVES for v in product(("fp32", "bf16", "int8", "int4:g16:asym"), (BASE,), dtype=dtype)]
    + [v for dtype in ("float32", *HALVES) for v in product(("int8",), HALF_MODELS[:1], dtype=dtype)]
    + [v for dtype in HALVES for v in product(FORMATS, (BASE, MODEL), "full", dtype=dtype)],
)
def input_dtypes(bench: Bench) -> None:
    """K and V in half precision are converted exactly, or to nearest even into float pages."""
    layout = bench.layout()
    held = bench.held(4)
    pages = bench.shuffled_pages(4, 2)
    length = layout.page_size + 3
    for layer in range(layout.layers):
        held.append_run(layer, pages, 0, length, dtype=bench.option("dtype"))
    held.check()


@check(
    CHAPTER,
    [v for form in FORMS[1:] for v in product(("bf16", "int8", "int4:g16"), (BASE,), form=form)]
    + [v for form in FORMS[1:] for v in half_kinds(form=form)]
    + [v for form in FORMS[1:] for v in product(FORMATS, (BASE, MODEL), "full", form=form)],
)
def strided(bench: Bench) -> None:
    """K and V may be views of larger tensors, of any strides, channel stride included."""
    layout = bench.layout()
    held = bench.held(4)
    pages = bench.shuffled_pages(4, 2)
    for layer in range(layout.layers):
        held.append_run(layer, pages, 0, layout.page_size + 3, form=bench.option("form"))
    held.check()


@check(CHAPTER, every_format())
def skipped_rows(bench: Bench) -> None:
    """A row with slot -1 is written nowhere: not to the last slot, not to any page but the spare."""
    layout = bench.layout()
    size, pages = layout.page_size, 5
    held = bench.held(pages)
    others = list(range(1, pages))
    held.fill_sequence(others, len(others) * size)
    before = held.snapshot(others)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 7, stream="skipped")
        held.append(layer, key, value, np.full(7, -1))
    if held.snapshot(others) != before:
        raise Disagreement("an append of skipped rows alone (all slots -1) changed pages 1 .. 4")
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 5, stream="mixed")
        held.append(layer, key, value, [-1, 2 * size + 1, -1, 3 * size, -1])
    held.check()


@check(CHAPTER, every_format())
def neighbours(bench: Bench) -> None:
    """Appending one token changes its own slot in its own layer, and not one bit anywhere else."""
    layout = bench.layout()
    size, pages = layout.page_size, 4
    held = bench.held(pages)
    every = [1, 2, 3]
    held.fill_sequence(every, 3 * size)
    before = {layer: held.export(layer, every) for layer in range(layout.layers)}
    slot = 2 * size + size // 2  # in the middle of page 2
    key, value = bench.tokens(layout, 1, 1, stream="one")
    held.append(1, key * np.float32(4), value * np.float32(4), [slot])
    held.check()
    after = {layer: held.export(layer, every) for layer in range(layout.layers)}
    for layer, planes in before.items():
        for name, array in planes.items():
            changed = np.argwhere((array != after[layer][name]) & ~(_nan(array) & _nan(after[layer][name])))
            for where in changed:
                if not (layer == 1 and where[0] == 1 and where[1] == size // 2):
                    raise Disagreement(
                        f"appending a token of layer 1 at page 2, slot {size // 2} changed {name} of layer {layer} at "
                        f"page {every[where[0]]}, slot {where[1]}"
                    )


@check(CHAPTER, every_format())
def overwritten(bench: Bench) -> None:
    """A slot written anew holds the new token alone: no scale, zero or code of the old one survives."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(4)
    pages = bench.shuffled_pages(4, 3)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 3 * size, stream="old")
        held.append(layer, key * np.float32(16), value * np.float32(16), held.slots_of(pages, 0, 3 * size))
    held.fill_sequence(pages[::-1], 2 * size + 5, stream="new")
    held.check()


@check(CHAPTER, product(DYNAMIC_FORMATS, (BASE,)) + half_kinds() + product(CORE, (MODEL,), "full"))
def batch_mates(bench: Bench) -> None:
    """Tokens a million times larger, or not finite, in the same call leave a token's codes and scales alone."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(5)
    pages = bench.shuffled_pages(5, 4)
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 2 * size)
        key[1::4] *= np.float32(2.0**20)
        value[2::4] *= np.float32(2.0**20)
        key[3::8, 0, 5] = np.nan
        value[5::8, -1, 3] = np.inf
        held.append(layer, key, value, held.slots_of(pages, 0, 2 * size))
    held.check()


@check(CHAPTER, product(("int8", "int4:g16:asym", "int8:channel:static:scale=bf16"), (BASE,)) + half_kinds())
def nothing(bench: Bench) -> None:
    """An append of no tokens is allowed and changes nothing."""
    layout = bench.layout()
    held = bench.held(3)
    held.fill_sequence([1, 2], 2 * layout.page_size)
    before = held.snapshot([1, 2])
    for layer in range(layout.layers):
        key, value = bench.tokens(layout, layer, 0)
        held.append(layer, key, value, [])
    if held.snapshot([1, 2]) != before:
        raise Disagreement("an append of no tokens changed a page")
    held.check()


def _nan(array: Array) -> BoolArray:
    return np.asarray(np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, np.bool_))
