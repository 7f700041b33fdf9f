"""append: codes, scales and zeros equal the reference codec and the oracle, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_support import LAYER, allocate, layout_of, scales_of, spec_of, static_arguments, to_numpy, with_dtypes

from kvport import codec
from kvport.backend import Backend
from kvport_conformance import inputs, oracle_codec

FORMATS = [
    "int8",
    "int8:asym:scale=bf16",
    "int8:g32:scale=fp16",
    "int4:g32",
    "int4:g16:asym:scale=fp16",
    "int4:asym:scale=bf16",
    "int2:g16:asym",
    "int2:scale=bf16",
    "k=int4:g64:asym,v=int8:token",
    "k=bf16,v=fp16",
    "fp32",
    "int8:tensor:static",
    "int8:head:asym:static:scale=fp16",
    "int4:channel:static:scale=bf16",
    "int2:channel:asym:static",
    "fp8_e4m3",
    "fp8_e5m2:g16:scale=bf16",
    "fp8_e5m2",
    "fp8_e4m3:channel:static",
    "fp8_e5m2:head:static:scale=fp16",
    "k=fp16,v=fp8_e4m3:tensor:static:scale=bf16",
]


def rows(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """K and V as strided views: K with slack behind each row (NaN), V with heads outermost in memory.

    The first rows sit on the formats' edges: zeros, ties, subnormals, the input limit, infinities and NaN.
    """
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype]
    special = list(inputs.special_rows(dim, dtype=name).values())
    key = inputs.key(1, (tokens, heads, dim), dtype=name)
    value = inputs.value(2, (tokens, heads, dim), dtype=name)
    for n, row in enumerate(special[:tokens]):
        key[n, n % heads] = row
        value[n, (n + 1) % heads] = row
    wide = torch.full((tokens, heads, dim + 3), float("nan"), dtype=dtype)
    wide[..., :dim] = torch.from_numpy(key).to(dtype)
    return wide[..., :dim], torch.from_numpy(value).to(dtype).transpose(0, 1).contiguous().transpose(0, 1)


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("text", "dtype"), with_dtypes(FORMATS), ids=str)
def test_bits_equal_codec_and_oracle(backend: Backend, text: str, dtype: torch.dtype) -> None:
    layout = layout_of(text, page_size=16)
    tokens, pages = 53, 6
    key, value = rows(dtype, tokens, layout.kv_heads, layout.key_dim)
    slots = torch.from_numpy(inputs.permutation(3, pages * 16)[:tokens])
    slots[7] = -1
    store = allocate(backend, layout, pages)
    before = [backend.export_pages(store, layer, list(range(pages))) for layer in range(2)]
    device = backend.torch_device
    backend.append(store, LAYER, key.to(device), value.to(device), slots.to(device))

    stored = backend.export_pages(store, LAYER, list(range(pages)))
    kept = slots >= 0
    static = scales_of(layout)[LAYER]
    for side, given, scales in zip(layout.sides, (key, value), (static.key, static.value), strict=True):
        # The oracle sees float32; both agree on every bit but a float page's NaN, written differently by each.
        expected = codec.encode(side.format, given, scales).planes
        oracle = oracle_codec.encode(spec_of(side.format), given.float().numpy(), **static_arguments(scales)).planes
        for name, plane in expected.items():
            got = stored[f"{side.name}.{name}"].flatten(0, 1)[slots[kept]]
            number = torch.ones_like(got, dtype=torch.bool) if side.format.quantized else ~plane[kept].isnan()
            assert torch.equal(got.isnan(), plane[kept].isnan())
            written = to_numpy(got)[number.numpy()]
            assert same_bits(written, to_numpy(plane[kept])[number.numpy()]), f"{side.name}.{name}: not the codec"
            assert same_bits(written, oracle[name][kept.numpy()][number.numpy()]), f"{side.name}.{name}: not the oracle"
    untouched = torch.ones(pages * 16, dtype=torch.bool)
    untouched[slots[kept]] = False
    for name in stored:
        kept_bits, old_bits = (p[name].flatten(0, 1)[untouched].contiguous() for p in (stored, before[LAYER]))
        assert torch.equal(kept_bits.view(torch.uint8), old_bits.view(torch.uint8)), f"{name} spilled"
    for name, plane in backend.export_pages(store, 0, list(range(pages))).items():
        assert torch.equal(plane.view(torch.uint8), before[0][name].view(torch.uint8)), "wrote into another layer"


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_odd_dims(backend: Backend, dim: int) -> None:
    layout = layout_of("k=int8,v=int4:g16", dim=dim, heads=1, page_size=32)
    key, value = rows(torch.float32, 20, 1, dim)
    slots = torch.arange(20) + 35
    store = allocate(backend, layout, 3)
    device = backend.torch_device
    backend.append(store, LAYER, key.to(device), value.to(device), slots.to(device))
    stored = backend.export_pages(store, LAYER, [0, 1, 2])
    for side, given in zip(layout.sides, (key, value), strict=True):
        for name, plane in codec.encode(side.format, given).planes.items():
            assert same_bits(to_numpy(stored[f"{side.name}.{name}"].flatten(0, 1)[slots]), to_numpy(plane))


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("block", [8, 16, 64])
def test_runs_of_whole_pages(backend: Backend, page_size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive slots take the store path for aligned runs; one split of the same rows gives the same bytes, and so
    does any number of rows a program, also more than a page has."""
    monkeypatch.setattr(backend, "append_block", block)
    layout = layout_of("int8", dim=16, heads=1, page_size=page_size)
    tokens = 2 * page_size + 5
    key, value = rows(torch.float32, tokens, 1, 16)
    slots = torch.arange(tokens) + page_size
    device = backend.torch_device
    images = []
    for cuts in ([0, tokens], [0, 1, page_size // 2, tokens]):
        store = allocate(backend, layout, 4)
        for a, b in itertools.pairwise(cuts):
            backend.append(store, LAYER, key[a:b].to(device), value[a:b].to(device), slots[a:b].to(device))
        images.append(backend.export_pages(store, LAYER, [1, 2, 3]))
    for name in images[0]:
        assert same_bits(to_numpy(images[0][name]), to_numpy(images[1][name]))
        flat = images[0][name].flatten(0, 1)[:tokens]
        side = layout.sides[0 if name.startswith("key") else 1]
        given = key if name.startswith("key") else value
        assert same_bits(to_numpy(flat), to_numpy(codec.encode(side.format, given).planes[name.partition(".")[2]]))


def test_nan_flags_of_static_integers(backend: Backend) -> None:
    layout = layout_of("int8:head:static")
    store = allocate(backend, layout, 4)
    device = backend.torch_device

    def append(slots: list[int], poisoned: int | None = None) -> list[bool]:
        key, value = torch.ones(len(slots), 2, 64), torch.ones(len(slots), 2, 64)
        if poisoned is not None:
            value[poisoned, 1, 63] = float("nan")
        backend.append(store, LAYER, key.to(device), value.to(device), torch.tensor(slots, device=device))
        flags = backend.poisoned(store)
        assert not flags[0].any(), "another layer was flagged"
        return [bool(f) for f in flags[LAYER]]

    assert append([16, 17, 33], poisoned=2) == [False, False, True, False]
    assert append([34, 18]) == [False, False, True, False]  # sticky
    assert append([19, -1], poisoned=1) == [False, False, True, False]  # a skipped row flags nothing
    assert append([48, 32]) == [False, False, False, False]  # the page begins anew
    assert append([32, 33], poisoned=0) == [False, False, True, False]  # begun and poisoned in one append


@pytest.mark.hardware
def test_big_pool_is_written(backend: Backend) -> None:
    """Offsets above 2**31 and 2**32 within one layer of one pool."""
    layout = layout_of("int8", heads=8, group=4, dim=128, page_size=64, dtype=torch.bfloat16)
    pages = 70_000  # * 64 tokens * 8 heads * 128 = 4.6e9 bytes of K codes a layer, and as many of V
    store = backend.allocate(layout, pages)
    key, value = rows(torch.bfloat16, 64, 8, 128)
    slots = torch.arange(64) + (pages - 1) * 64
    backend.append(store, LAYER, key.cuda(), value.cuda(), slots.cuda())
    stored = backend.export_pages(store, LAYER, [pages - 1])
    for side, given in zip(layout.sides, (key, value), strict=True):
        for name, plane in codec.encode(side.format, given).planes.items():
            assert same_bits(to_numpy(stored[f"{side.name}.{name}"][0]), to_numpy(plane))
    assert np.isfinite(to_numpy(stored["key.scale"])).sum() > 0
