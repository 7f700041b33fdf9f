"""Transfer: the canonical page image is what the judge says it is, and a sequence goes on from it anywhere."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from kvport.cache import Poisoned
from kvport.image import PageImage
from kvport.sequences import Sequence
from kvport_conformance.axes import (
    BASE,
    CORE,
    FORMATS,
    HALF_FORMATS,
    HALF_MODELS,
    KINDS,
    LATENT_FORMATS,
    MLA,
    MODEL,
    STATIC_FORMATS,
    every_format,
    families,
    geometry,
    half_kinds,
    product,
)
from kvport_conformance.bench import Bench, Row
from kvport_conformance.cases import check
from kvport_conformance.served import Served
from kvport_conformance.tensors import fill_bytes, plane_to_numpy, plane_to_torch, raw_bytes
from kvport_conformance.verdicts import Disagreement

CHAPTER: Final = "transfer"


def expected_image(served: Served, sequence: Sequence) -> dict[int, dict[str, np.ndarray[Any, Any]]]:
    """The canonical image of a sequence, made by the judge: unwritten slots are zero."""
    layout = served.group
    numbers = np.asarray(served.tokens[sequence], np.int64)
    slots = layout.pages_for(len(numbers)) * layout.page_size
    image: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
    for layer, content in enumerate(served.contents):
        image[layer] = {}
        for name, plane in content.planes.items():
            whole = np.zeros((slots, *plane.shape[1:]), plane.dtype)
            whole[: len(numbers)] = plane[numbers]
            image[layer][name] = whole.reshape(-1, layout.page_size, *plane.shape[1:])
    return image


@check(CHAPTER, every_format())
def image(bench: Bench) -> None:
    """An exported image is the judge's own, byte for byte: order, packing, zeros in what was never written."""
    served = Served(bench, 6)
    sequence, other = served.sequence(), served.sequence()
    served.step({other: served.make(3, "other"), sequence: served.make(served.page_size + 5, "mine")}, attend=False)
    exported = served.cache.export(sequence)
    for layer, planes in expected_image(served, sequence).items():
        for name, plane in planes.items():
            found = plane_to_numpy(exported.layers[layer][name])
            if found.shape != plane.shape or found.tobytes() != plane.tobytes():
                same_shape = found.shape == plane.shape
                different = [tuple(w) for w in np.argwhere(found != plane).tolist()] if same_shape else []
                raise Disagreement(
                    f"layer {layer}: image plane {name} is {found.shape}, must be {plane.shape}; differs at "
                    f"{different[:3]} (page, slot, head, ...) of {len(different)}"
                )


@check(CHAPTER, families(), requires=("prefill", "verify"))
def saved(bench: Bench) -> None:
    """Saved to a file, loaded and inserted into a second cache, a sequence goes on as if it had never moved."""
    served, other = Served(bench, 6), Served(bench, 8)
    sequence = served.sequence()
    served.step({sequence: served.make(served.page_size + 5, "mine")})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sequence.safetensors"
        served.cache.export(sequence).save(path)
        loaded = PageImage.load(path)
    other.contents = served.contents
    filler = other.sequence()
    other.step({filler: other.make(2, "filler")}, attend=False)
    moved = other.adopt(other.cache.insert(loaded), served.tokens[sequence])
    if other.digests(moved) != served.digests(sequence):
        raise Disagreement("an inserted sequence has other digests than the exported one")
    other.check()
    other.step({moved: other.make(3, "after"), filler: other.make(1, "mate")})
    other.check()


@check(
    CHAPTER,
    product(KINDS, (BASE,)) + half_kinds() + product(CORE, (MODEL,)) + product(FORMATS, (BASE, MODEL), "full"),
    requires=("verify",),
)
def foreign_image(bench: Bench) -> None:
    """An image that the judge made, with codes no encoder would produce, is inserted, attended to, and comes back."""
    from kvport_conformance import inputs
    from kvport_conformance.chapters.scales import foreign

    served = Served(bench, 8)
    length = served.page_size + 5
    donor = served.sequence()
    served.step({donor: served.make(length, "mine")}, attend=False)
    for layer, content in enumerate(served.contents):
        numbers = foreign(content, length, inputs.derive(bench.seed, "foreign", layer)).tolist()
    template = served.cache.export(donor)
    served.tokens[donor] = numbers
    dtypes = {plane.name: plane.dtype for plane in served.group.planes}
    layers = {
        layer: {name: plane_to_torch(plane, dtypes[name]) for name, plane in planes.items()}
        for layer, planes in expected_image(served, donor).items()
    }
    served.free(donor)
    image = PageImage(**{**vars(template), "layers": layers, "ids": None})
    sequence = served.adopt(served.cache.insert(image), numbers)
    served.check()
    served.step({sequence: served.make(2, "after")})
    served.check()


@check(
    CHAPTER,
    product(STATIC_FORMATS, (BASE,), "full")
    + product(LATENT_FORMATS[3:4], (MLA,), "full")
    + product(HALF_FORMATS["bfloat16"][1:4], HALF_MODELS[:1], "full"),
    requires=("poison",),
)
def flags_travel(bench: Bench) -> None:
    """Flags of NaNs that static integer pages hide are in the image, and are raised where it is inserted."""
    served = Served(bench, 12)
    size = served.page_size
    sequence = served.sequence()
    served.step({sequence: served.make(size - 3, "begin")}, attend=False)
    served.step({sequence: _nan_in(served, 1, 7)}, attend=False)  # its fifth token is the second of the second page
    served.step({sequence: served.make(size, "more")}, attend=False)
    wanted = {1: (size,)}
    image = served.cache.export(sequence)
    if image.poisoned != wanted:
        raise Disagreement(f"a NaN at position {size + 1} of layer 1: the image flags {image.poisoned}, not {wanted}")
    there, moved = served.moved(sequence, 12)
    there.step({moved: there.make(3, "there")}, attend=False)
    for cache, owner in ((served.cache, sequence), (there.cache, moved)):
        found = [(p.sequence, p.layer, p.position) for p in cache.check() if isinstance(p, Poisoned)]
        if found != [(owner, layer, at) for layer, positions in wanted.items() for at in positions]:
            raise Disagreement(f"check() must name the layers and positions {wanted}, names {found}")
    there.check()


def _nan_in(served: Served, layer: int, count: int) -> list[int]:
    """Numbers of ``count`` tokens, the fifth of which has a NaN in the K of this layer."""
    numbers: list[int] = []
    for each, content in enumerate(served.contents):
        key, value = served.bench.tokens(served.group, each, count, stream="nan")
        if each == layer:
            key[4, -1, 3] = np.nan
            value = key[..., : value.shape[-1]] if served.group.latent else value
        numbers = [int(n) for n in content.add(key, value)]
    return numbers


@check(CHAPTER, product(KINDS, (geometry(2, 4, 64, 16, window=20),)), requires=("window", "prefill", "verify"))
def window_image(bench: Bench) -> None:
    """A sequence past its window moves with the pages that it still holds, and goes on the same."""
    served = Served(bench, 10)
    sequence = served.sequence()
    for turn in range(8):
        served.step({sequence: served.make(9, f"turn{turn}")})
    other = Served(bench, 10)
    other.contents = served.contents
    moved = other.adopt(other.cache.insert(served.cache.export(sequence)), served.tokens[sequence])
    for turn in range(3):
        numbers = served.make(5, f"on{turn}")
        served.step({sequence: numbers})
        other.step({moved: numbers})
    if served.digests(sequence) != other.digests(moved):
        raise Disagreement("after a move past its window a sequence's pages differ")


@check(CHAPTER, product(KINDS, (BASE,)) + half_kinds() + product(FORMATS, (BASE, MODEL), "full"))
def detached_image(bench: Bench) -> None:
    """An exported image is the caller's: tokens appended later do not change it, and changing it changes no page."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(4, layout)
    held.fill_sequence([1, 2], size + 3)
    planes = bench.backend.export_pages(held.store, 0, [1, 2])
    kept = {name: tensor.clone() for name, tensor in planes.items()}
    held.append_run(0, [1, 2], 2, size + 2, stream="later")
    for name, tensor in planes.items():
        if not np.array_equal(raw_bytes(tensor), raw_bytes(kept[name])):
            raise Disagreement(f"appending changed plane {name} of an image that was exported before")
        fill_bytes(tensor, 0x5A)
    held.check()


@check(CHAPTER, families())
def partial_import(bench: Bench) -> None:
    """An import writes the pages it names, in the layer it names, and no others."""
    layout = bench.layout()
    size = layout.page_size
    held = bench.held(6, layout)
    held.fill_sequence([1, 2, 3, 4, 5], 5 * size)
    planes = bench.backend.export_pages(held.store, 0, [4, 2])
    bench.backend.import_pages(held.store, 1, [1, 3], planes)
    content = held.contents
    moved = {n: content[0].planes[n][held.slots[0, held.slots_of([4, 2], 0, 2 * size)]] for n in content[0].planes}
    if not layout.format.calibrated:  # static scales are the layer's own: the same codes mean other values there
        held.slots[1, held.slots_of([1, 3], 0, 2 * size)] = content[1].add_planes(moved)
        held.check()
        held.gather(1, [Row([1, 2, 3], 3 * size)])
    else:
        again = bench.backend.export_pages(held.store, 1, [1, 3])
        if any(not torch.equal(again[n], planes[n]) for n in planes):
            raise Disagreement("imported codes did not come back")
        held.check(layers=[0])
        held.check(layers=[1], pages=[2, 4, 5])
