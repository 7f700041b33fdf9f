"""Pages as bytes: canonical images, copies, accounts, gather and seal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_support import LAYER, Filled, allocate, layout_of

from kvport import InvalidArgument, Unsupported, codec
from kvport.backend import Backend, operations
from kvport_conformance.cases import run_case, select
from kvport_cpu.reference import load as load_reference

FORMATS = ["fp8_e4m3", "int8", "int4:g32:asym:scale=bf16", "int2:g16", "k=int8:asym,v=bf16", "int8:head:static"]


@pytest.mark.parametrize("text", FORMATS)
def test_images_travel_between_backends(backend: Backend, text: str) -> None:
    """Bits the reference holds come back from here the same, and the other way."""
    layout = layout_of(text, page_size=32)
    reference = load_reference("cpu")
    theirs = reference.allocate(layout, 5, scales=None)
    for n, buffer in enumerate(reference.buffers(theirs).values()):
        raw = buffer.view(torch.uint8)
        raw.copy_((torch.arange(raw.numel()) * (n + 3) % 251).to(torch.uint8).view(raw.shape))
    ours = allocate(backend, layout, 5)
    image = reference.export_pages(theirs, LAYER, [3, 1])
    before = backend.export_pages(ours, LAYER, [0, 1, 3])
    backend.import_pages(ours, LAYER, [2, 4], image)
    back = backend.export_pages(ours, LAYER, [2, 4])
    assert back.keys() == image.keys() == {plane.name for plane in layout.planes}
    for name, plane in image.items():
        assert back[name].dtype == plane.dtype
        assert torch.equal(back[name].view(torch.uint8), plane.view(torch.uint8)), name
        assert back[name].is_contiguous()
    for name, plane in backend.export_pages(ours, LAYER, [0, 1, 3]).items():
        assert torch.equal(plane.view(torch.uint8), before[name].view(torch.uint8)), f"{name} spilled"


def test_flags_of_nans_travel_in_images(backend: Backend) -> None:
    cases = select(tier="full", checks=("flags_travel",))
    assert [run_case(case, backend).outcome for case in cases] == ["pass"] * len(cases)


@pytest.mark.parametrize("text", FORMATS)
def test_bytes_add_up(backend: Backend, text: str) -> None:
    layout = layout_of(text)
    store = backend.allocate(layout, 7)
    held = sum(t.numel() * t.itemsize for t in backend.buffers(store).values())
    assert held == 7 * backend.page_bytes(layout)
    again = backend.allocate(layout, 7, storage=backend.buffers(store))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(
        backend.buffers(store).values(), backend.buffers(again).values(), strict=True
    ))  # fmt: skip
    first = next(iter(backend.buffers(store)))
    with pytest.raises(InvalidArgument, match="needs"):
        backend.allocate(layout, 8, storage=backend.buffers(store))
    with pytest.raises(InvalidArgument, match="lacks"):
        backend.allocate(layout, 7, storage={n: t for n, t in backend.buffers(store).items() if n != first})


@pytest.mark.parametrize("text", FORMATS)
def test_copy_pages(backend: Backend, text: str) -> None:
    filled = Filled(backend, layout_of(text), (1,), (60,))
    a, b, *_ = filled.arrays.page_table[0].tolist()
    free = [page for page in range(1, filled.store.pages) if page not in filled.arrays.page_table[0].tolist()][:2]
    backend.copy_pages(filled.store, [a, b], free)
    old, new = (backend.export_pages(filled.store, LAYER, pages) for pages in ([a, b], free))
    for name, plane in old.items():
        assert torch.equal(plane.view(torch.uint8), new[name].view(torch.uint8)), name


def test_gather_decodes_and_blanks_the_rest(backend: Backend) -> None:
    filled = Filled(backend, layout_of("int4:g32:asym"), (1, 1), (37, 20))
    key, value = backend.gather(
        filled.store, LAYER, filled.arrays.page_table.to(backend.torch_device), [37, 20], torch.float32
    )
    for s, length in enumerate((37, 20)):
        want_key, want_value = filled.decoded(s)
        assert (key[s, :length].cpu().numpy() == want_key).all()
        assert (value[s, :length].cpu().numpy() == want_value).all()
    assert bool((key[1, 20:] == 0).all())
    assert bool((value[1, 20:] == 0).all())


def test_seal_encodes_whole_pages(backend: Backend) -> None:
    source = Filled(backend, layout_of("fp32"), (1,), (48,))
    layout = layout_of("int4:g32")
    target = allocate(backend, layout, 5)
    pages = source.arrays.page_table[0].tolist()
    backend.seal(source.store, target, LAYER, pages, [4, 2, 3])
    sealed = backend.export_pages(target, LAYER, [4, 2, 3])
    for side, rows in zip(layout.sides, source.decoded(0), strict=True):
        for name, plane in codec.encode(side.format, torch.from_numpy(rows)).planes.items():
            got = sealed[f"{side.name}.{name}"].flatten(0, 1)
            assert torch.equal(got.view(torch.uint8), plane.contiguous().view(torch.uint8))


def test_every_operation_is_native(backend: Backend) -> None:
    assert set(operations(backend).values()) == {"native"}


@pytest.mark.parametrize(
    ("given", "needle"),
    [
        ({"text": "mxfp4"}, "key code mxfp4: supported are int8, int4, int2, fp8_e4m3, fp8_e5m2 and float pages"),
        ({"page_size": 24}, "page size 24: supported are 16, 32, 64, 128, 256; nearest is 16"),
        ({"group": 17}, "17 query heads per KV head: supported are 1 to 16"),
        ({"dim": 320}, "key dim 320: supported are 16 to 256"),
    ],
)
def test_refusals_name_value_and_choice(backend: Backend, given: dict[str, Any], needle: str) -> None:
    layout = layout_of(**({"text": "int8"} | given))
    reasons = backend.support(layout).reasons
    assert any(needle in reason for reason in reasons), reasons
    with pytest.raises(Unsupported, match="cannot store"):
        backend.allocate(layout, 4)
