"""Latent (MLA) layers: bits equal the reference's, attention stays within the bound, V is not stored again."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from triton_support import DTYPE_NAMES

from kvport import LayerScales, SideScales
from kvport.backend import Backend, StepArrays
from kvport.formats import CacheFormat
from kvport.layout import GroupLayout
from kvport_conformance import inputs, oracle_attention
from kvport_cpu.reference import load as load_reference

FORMATS = [
    ("latent=fp32,rope=fp32", torch.float32),
    ("latent=bf16,rope=bf16", torch.bfloat16),
    ("latent=int8:g32,rope=bf16", torch.bfloat16),
    ("latent=int4:g16:asym,rope=int8", torch.float16),
    ("latent=fp8_e4m3:g32,rope=bf16", torch.bfloat16),
    ("latent=int2:g16,rope=int4", torch.float32),
    ("latent=int8:channel:static,rope=fp16", torch.float16),
]


def layout_of(
    text: str, dtype: torch.dtype, *, heads: int = 6, latent: int = 96, window: int | None = None
) -> GroupLayout:
    return GroupLayout(CacheFormat.parse(text), 2, 1, heads, latent + 32, latent, 16, window, dtype, latent=True)


def check(
    backend: Backend, layout: GroupLayout, rows: tuple[int, ...], lengths: tuple[int, ...], poison: int | None = None
) -> list[bool]:
    """Append to a store of ours and one of the reference, compare bits, attend; which output rows are finite."""
    reference = load_reference("cpu")
    width, page = layout.key_dim, layout.page_size
    scale = torch.from_numpy(inputs.values(3, (1, layout.value_dim), low=0.02, high=0.05))
    scales = [LayerScales(SideScales(scale))] * 2 if layout.format.static else None
    counts = [layout.pages_for(n) for n in lengths]
    ids = iter((inputs.permutation(5, sum(counts)) + 1).tolist())
    table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    slots = []
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for column in range(count):
            table[s, column] = next(ids)
        position = torch.arange(length)
        slots.append(table[s, position // page].long() * page + position % page)
    key = torch.from_numpy(inputs.key(9, (sum(lengths), 1, width))).to(layout.dtype)
    if poison is not None:
        key[poison, 0, 5] = math.nan
    stores = []
    for which in (backend, reference):
        store = which.allocate(layout, sum(counts) + 2, scales=scales)
        for name, buffer in which.buffers(store).items():
            if name != "poison":
                buffer.view(torch.uint8).fill_(0xFF)
        wide = torch.full((key.shape[0], 1, width + 8), math.nan, dtype=key.dtype)
        wide[..., :width] = key
        which.append(store, 1, wide[..., :width].to(which.torch_device), None, torch.cat(slots).to(which.torch_device))
        stores.append(store)
    pages = sorted(set(table.flatten().tolist()) - {0})
    last = {int(table[s, counts[s] - 1]): lengths[s] - (counts[s] - 1) * page for s in range(len(lengths))}
    ours, theirs = (
        which.export_pages(store, 1, pages) for which, store in zip((backend, reference), stores, strict=True)
    )
    assert {name.partition(".")[0] for name in ours} == {"latent", "rope"}
    for name, plane in theirs.items():
        for number, identity in enumerate(pages):
            filled = last.get(identity, page)
            a, b = (p[number, :filled].flatten().clone().view(torch.uint8) for p in (ours[name], plane))
            if not plane.dtype.is_floating_point or not plane[number, :filled].isnan().any():
                assert torch.equal(a, b), name
    arrays = StepArrays(
        page_table=table,
        kv_start=torch.zeros(len(lengths), dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        query_positions=torch.tensor([n - r for n, r in zip(lengths, rows, strict=True)], dtype=torch.int32),
    )
    query = torch.from_numpy(inputs.query(7, (sum(rows), layout.query_heads, width))).to(layout.dtype)
    sinks = torch.from_numpy(inputs.values(4, (layout.query_heads,), low=-1.0, high=2.0))
    device = backend.torch_device
    factor, cap = 0.8 * width**-0.5, 30.0
    out, lse = backend.attend(
        stores[0], 1, query.to(device), backend.plan(stores[0], arrays), scale=factor, softcap=cap,
        sinks=sinks.to(device),
    )  # fmt: skip
    assert out.dtype == layout.dtype
    row = 0
    for s, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        decoded = reference.gather(stores[1], 1, table[s : s + 1], [length], torch.float32)
        k, v = (t[0].numpy() for t in decoded)
        given = (query[row : row + count].float().numpy(), k, v)
        options = {"scale": factor, "softcap": cap, "window": layout.window, "sinks": sinks.numpy()}
        want, want_lse = oracle_attention.attend(*given, **options)
        bound, lse_bound = oracle_attention.attention_bound(*given, query_dtype=DTYPE_NAMES[layout.dtype], **options)
        got, got_lse = (t[row : row + count].float().cpu().numpy() for t in (out, lse))
        assert oracle_attention.observed_over_bound(got, want, bound) <= 1
        assert oracle_attention.observed_over_bound(got_lse, want_lse, lse_bound) <= 1
        row += count
    return [bool(x) for x in torch.isfinite(out.float()).flatten(1).all(1).cpu()]


@pytest.mark.parametrize(("text", "dtype"), FORMATS, ids=str)
def test_formats(backend: Backend, text: str, dtype: torch.dtype) -> None:
    assert all(check(backend, layout_of(text, dtype), (1, 3, 5), (75, 20, 5)))


@pytest.mark.parametrize(("heads", "latent"), [(1, 16), (16, 128), (34, 64), (24, 200)])
def test_geometries(backend: Backend, heads: int, latent: int) -> None:
    """Head counts that fill a block of 16, and those that do not; a latent part that is no power of two."""
    layout = layout_of("latent=int8,rope=bf16", torch.bfloat16, heads=heads, latent=latent, window=30)
    assert all(check(backend, layout, (1, 2), (50, 70)))


def test_a_poisoned_token_reaches_only_rows_that_see_it(backend: Backend) -> None:
    layout = layout_of("latent=int8:g32,rope=bf16", torch.bfloat16)
    assert check(backend, layout, (4, 1), (20, 30), poison=18) == [True, True, False, False, True]


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_full_width(backend: Backend, dtype: torch.dtype) -> None:
    layout = GroupLayout(
        CacheFormat.parse("latent=int8:g128,rope=bf16"), 2, 1, 128, 576, 512, 64, None, dtype, latent=True
    )
    assert all(check(backend, layout, (1, 2), (700, 130)))


@pytest.mark.parametrize(
    ("text", "latent", "needle"),
    [("latent=nvfp4,rope=bf16", 64, "latent code nvfp4"), ("latent=int8,rope=bf16", 576, "latent dim 576")],
)
def test_refusals(backend: Backend, text: str, latent: int, needle: str) -> None:
    assert any(needle in reason for reason in backend.support(layout_of(text, torch.bfloat16, latent=latent)).reasons)
