"""attend against float64 attention over what the store decodes to, within the contract's bound."""

from __future__ import annotations

import math

import pytest
import torch
from triton_support import Filled, layout_of, with_dtypes

from kvport import InvalidArgument
from kvport.backend import Backend
from kvport_conformance import inputs, oracle_attention

HALF = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *HALF]
# (query rows, tokens) of each sequence: decode, verify, prefill of everything, decode of an empty store's first token.
QUERIES, LENGTHS = (1, 3, 5, 1), (37, 20, 5, 1)


FORMATS = [
    "int8",
    "int8:asym",
    "int8:g32:scale=fp16",
    "int4:g32",
    "int4:g16",
    "k=int4:g64:asym,v=int8:token:scale=bf16",
    "int2:asym:scale=fp16",
    "int2:g16:asym",
    "bf16",
    "fp16",
    "k=int8,v=bf16",
    "fp32",
    "int4:channel:static",
    "int8:channel:asym:static:scale=bf16",
    "int8:tensor:static",
    "int8:head:asym:static",
    "int4",
    "fp8_e4m3",
    "fp8_e5m2:g32:scale=fp16",
    "fp8_e5m2",
    "k=fp8_e4m3:head:static,v=fp8_e5m2",
    "fp8_e4m3:g16",
    "k=int4:g16,v=fp8_e4m3:channel:static:scale=bf16",
]


@pytest.mark.parametrize(("text", "dtype"), with_dtypes(FORMATS), ids=str)
def test_formats(backend: Backend, text: str, dtype: torch.dtype) -> None:
    assert Filled(backend, layout_of(text, dtype=dtype), QUERIES, LENGTHS).worst() <= 1


@pytest.mark.parametrize(("text", "dtype"), with_dtypes(["bf16", "fp16", "int8", "int8:channel:static"]), ids=str)
def test_window_softcap_and_sinks(backend: Backend, text: str, dtype: torch.dtype) -> None:
    filled = Filled(backend, layout_of(text, window=9, dtype=dtype), QUERIES, LENGTHS)
    sinks = torch.from_numpy(inputs.values(5, (4,), low=-2.0, high=2.0))
    assert filled.worst() <= 1
    assert filled.worst(softcap=4.0) <= 1
    assert filled.worst(softcap=20.0, sinks=sinks) <= 1


ROUNDED = ["int4:g16", "k=int8,v=bf16", "k=bf16,v=fp8_e4m3:g8", "int2:g16:asym:scale=bf16"]


@pytest.mark.parametrize("text", ROUNDED)
def test_bf16_queries_over_what_is_decoded_first(backend: Backend, text: str) -> None:
    """Formats of many slices are decoded and rounded to bf16, which the bound of bf16 queries leaves room for."""
    poison = {(0, 30, 0, "value"): math.nan, (1, 18, 1, "value"): math.nan}
    assert Filled(backend, layout_of(text, dtype=torch.bfloat16, window=33), QUERIES, LENGTHS).worst() <= 1
    assert Filled(backend, layout_of(text, dtype=torch.bfloat16), (1, 4, 5), (37, 20, 5), poison=poison).worst() <= 1


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("text", ["int8:asym", "int8:g16:asym", "int4:g32:asym", "int2:asym:scale=fp16"])
def test_what_decodes_to_zero_is_zero(backend: Backend, text: str, dtype: torch.dtype) -> None:
    """The bound of a channel that is 0 throughout is 0: scale * code and zero must cancel to nothing at all."""
    assert Filled(backend, layout_of(text, dtype=dtype), QUERIES, LENGTHS, flat=True).worst() <= 1
    assert Filled(backend, layout_of(text, dtype=dtype), (40,), (47,), flat=True).worst() <= 1


SLICED = ["int4:g16:asym", "int4:g8", "int2:g16:asym:scale=fp16", "int8:g8", "fp8_e4m3:g8"]
SEALED = [
    "k=int2:c32:asym:scale=fp16,v=int2:g16:asym:scale=fp16",
    "k=int4:c16,v=int4:c32:asym",
    "k=int8:c32:asym,v=int8",
    "k=int8:c16:scale=bf16,v=int4:c16:scale=bf16",
]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("text", SLICED)
def test_decode_of_many_slices(backend: Backend, text: str, dtype: torch.dtype) -> None:
    """Up to 16 slices of a row, shorter than a product takes; float16 queries have no room for rounded K and V."""
    poison = {(0, 30, 0, "value"): math.nan}
    layout = layout_of(text, dtype=dtype, window=33)
    assert Filled(backend, layout, (1, 1, 1), (70, 20, 1), flat=True).worst(softcap=20.0) <= 1
    assert Filled(backend, layout, (1, 1, 1), (70, 31, 1), flat=True, poison=poison).worst() <= 1


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("text", SEALED)
def test_decode_over_scales_of_channels(backend: Backend, text: str, dtype: torch.dtype) -> None:
    """A block of tokens has a scale for each channel, which may be NaN, or 0 where the channel has no range."""
    layout = layout_of(text, dtype=dtype, page_size=32)
    assert Filled(backend, layout, (1, 1), (96, 32), flat=True).worst() <= 1
    assert Filled(backend, layout, (1, 1), (96, 32), flat=True).worst(scale=-0.3, softcap=20.0) <= 1
    # Windows that begin within a block leave the NaN before them out only if its block is.
    narrow = layout_of(text, dtype=dtype, page_size=32, window=50)
    for token in (5, 40):
        poison = {(0, token, 0, "key"): math.nan, (1, 3, 1, "value"): math.nan}
        assert Filled(backend, narrow, (1, 1), (96, 32), flat=True, poison=poison).worst() <= 1


@pytest.mark.parametrize("text", ["int8", "fp16"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_scale(backend: Backend, text: str, scale: float) -> None:
    filled = Filled(backend, layout_of(text, dtype=torch.float16), QUERIES, LENGTHS)
    assert filled.worst(scale=scale) <= 1


@pytest.mark.parametrize(
    ("dim", "value_dim", "group", "page_size"),
    [(80, 96, 1, 16), (128, 128, 7, 32), (192, 128, 3, 64), (256, 64, 16, 128), (16, 256, 5, 256)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_geometries(backend: Backend, dim: int, value_dim: int, group: int, page_size: int, dtype: torch.dtype) -> None:
    layout = layout_of(
        "k=int8,v=int8:g16" if dtype == torch.float32 else "int8",
        heads=1, group=group, dim=dim, value_dim=value_dim, page_size=page_size, dtype=dtype,
    )  # fmt: skip
    assert Filled(backend, layout, (1, 2, 18), (page_size + 3, 2 * page_size, 18)).worst() <= 1


@pytest.mark.parametrize("text", ["int8", "bf16"])
def test_every_length_to_three_pages(backend: Backend, text: str) -> None:
    """Decode at every length, one batch: page boundaries, and splits of every kind."""
    lengths = tuple(range(1, 3 * 16 + 2))
    layout = layout_of(text, heads=1, group=2, dim=16, dtype=torch.bfloat16)
    assert Filled(backend, layout, (1,) * len(lengths), lengths).worst() <= 1


def test_long_contexts_are_split_and_merged(backend: Backend) -> None:
    layout = layout_of("int8", heads=1, group=4, dim=32, page_size=32, dtype=torch.float16)
    filled = Filled(backend, layout, (1, 4), (700, 517))
    splits = {launch.kind: launch.partials for launch in filled.plan.private.launches}
    assert splits["decode"] > 1, "the shape was meant to be split"
    assert filled.worst() <= 1
    sinks = torch.from_numpy(inputs.values(5, (4,), low=3.0, high=6.0))
    assert filled.worst(sinks=sinks) <= 1


def test_partials_merge_to_the_whole(backend: Backend) -> None:
    """Two stores hold the front and the back of one sequence; their partials merge by LSE."""
    layout = layout_of("int8", dtype=torch.float16)
    filled = Filled(backend, layout, (2,), (60,))
    query = filled.query()
    whole, lse = filled.attend(query, scale=0.2, partial=True)
    halves = []
    for start, length in ((0, 32), (32, 60)):
        arrays = filled.arrays
        part = type(arrays)(
            arrays.page_table,
            torch.tensor([start], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            arrays.query_starts,
            arrays.query_positions,
        )
        plan = backend.plan(filled.store, part)
        out, part_lse = backend.attend(filled.store, 1, query, plan, scale=0.2, partial=True)
        halves.append((out.cpu().numpy(), part_lse.cpu().numpy()))
    merged, merged_lse = oracle_attention.merge(halves)
    assert abs(merged - whole.cpu().numpy()).max() < 2e-3
    assert abs(merged_lse - lse.cpu().numpy()).max() < 1e-3
    with pytest.raises(InvalidArgument, match="sinks"):
        backend.attend(filled.store, 1, query, plan, scale=1.0, sinks=torch.zeros(4), partial=True)


def test_freed_pages_behind_a_window(backend: Backend) -> None:
    """Passed pages are gone: their table entries name the spare page, which holds NaN."""
    layout = layout_of("int4:g32", window=20, dtype=torch.bfloat16)
    filled = Filled(backend, layout, (1, 3), (61, 40), kv_start=(32, 16))
    filled.arrays.page_table[0, :2] = 0
    filled.arrays.page_table[1, :1] = 0
    filled.plan = backend.plan(filled.store, filled.arrays)
    assert filled.worst() <= 1


def test_empty_sequences_and_rows(backend: Backend) -> None:
    """No stored token, no query row: zeros and -inf, sinks notwithstanding."""
    layout = layout_of("int8", dtype=torch.bfloat16)
    filled = Filled(backend, layout, (1, 0, 2), (20, 17, 30))
    filled.arrays.lengths[0] = 0
    filled.plan = backend.plan(filled.store, filled.arrays)
    out, lse = filled.attend(filled.query(), scale=1.0, sinks=torch.zeros(4))
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -math.inf).all())
    assert bool(torch.isfinite(lse[1:]).all())


POISONED = ["int4:g32:asym", "fp16", "fp32", "bf16", "int8", "fp8_e5m2", "fp8_e4m3:g16", "fp8_e4m3", "int4:g8"]


@pytest.mark.parametrize(("text", "dtype"), with_dtypes(POISONED), ids=str)
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_poison_reaches_only_rows_that_see_it(backend: Backend, text: str, what: float, dtype: torch.dtype) -> None:
    """In verify rows before the token stay clean; in decode and prefill it is visible."""
    poison = {(0, 30, 0, "value"): what, (1, 18, 1, "value"): what, (2, 2, 0, "key"): math.nan}
    filled = Filled(backend, layout_of(text, dtype=dtype), (1, 4, 5), (37, 20, 5), poison=poison)
    assert filled.worst() <= 1
    out, _ = filled.attend(filled.query(), scale=0.1)
    bad = ~torch.isfinite(out.float()).flatten(1).all(1).cpu()
    assert bad.tolist() == [True, False, False, True, True, False, False, True, True, True]


def test_codes_no_encoder_writes(backend: Backend) -> None:
    """-128 and scales of the caller's making, imported."""
    layout = layout_of("int8", dtype=torch.float16)
    filled = Filled(backend, layout, (1, 3), (37, 20))
    pages = sorted(set(filled.arrays.page_table.flatten().tolist()) - {0})
    planes = backend.export_pages(filled.store, 1, pages)
    planes["key.codes"][:, ::3] = -128
    planes["value.codes"][:, 1::3] = -128
    planes["value.scale"] *= 0.37
    backend.import_pages(filled.store, 1, pages, planes)
    assert filled.worst() <= 1


@pytest.mark.parametrize("magnitude", [1e-20, 1e-4, 1e20])
def test_values_far_from_one(backend: Backend, magnitude: float) -> None:
    """V scales that float16 weights could not hold, and channels much smaller than others."""
    layout = layout_of("int8", dtype=torch.bfloat16)
    filled = Filled(backend, layout, (1, 3), (37, 20))
    pages = sorted(set(filled.arrays.page_table.flatten().tolist()) - {0})
    planes = backend.export_pages(filled.store, 1, pages)
    planes["value.scale"] *= magnitude
    backend.import_pages(filled.store, 1, pages, planes)
    assert filled.worst() <= 1


def test_other_query_heads_and_dtype_than_the_layout(backend: Backend) -> None:
    """A layer that shares another's K/V may have other query heads; a plan serves both."""
    layout = layout_of("int8", group=2, dtype=torch.bfloat16)
    filled = Filled(backend, layout, (1, 3), (37, 20))
    query = torch.from_numpy(inputs.query(9, (4, 6, 64))).to(backend.torch_device)
    assert filled.worst() <= 1
    assert filled.worst(query=query) <= 1
    assert filled.worst(query=query.half()) <= 1


@pytest.mark.hardware
@pytest.mark.parametrize("text", ["int8", "int4:g64", "bf16"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_prefill_over_history(backend: Backend, text: str, dtype: torch.dtype) -> None:
    layout = layout_of(text, heads=2, group=4, dim=128, page_size=64, dtype=dtype)
    assert Filled(backend, layout, (300, 1, 70), (900, 3000, 70)).worst() <= 1


@pytest.mark.hardware
@pytest.mark.parametrize(("text", "page_size"), [("int8", 64), ("int8", 16), ("bf16", 64)])
def test_big_pool_is_read(backend: Backend, text: str, page_size: int) -> None:
    """Decode, verification and prefill over pages whose offsets within a layer pass 2**32."""
    layout = layout_of(text, heads=8, group=4, dim=128, page_size=page_size, dtype=torch.bfloat16)
    filled = Filled(backend, layout, (1, 4, 300), (700, 90, 300), beyond=4_500_000 // page_size)
    assert filled.worst() <= 1


@pytest.mark.hardware
@pytest.mark.parametrize("text", ["int8", "int8:asym", "int4:g64", "int4", "int2:g64", "bf16", "fp16", "int4:g32"])
def test_decode_at_full_width(backend: Backend, text: str) -> None:
    for dtype in ALL:
        for page_size in (16, 128):
            layout = layout_of(text, heads=8, group=4, dim=128, page_size=page_size, dtype=dtype)
            assert Filled(backend, layout, (1,) * 3, (2000, 777, 4100)).worst() <= 1


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("text", ["int8", "k=int4:g32:asym,v=int2:g16"])
def test_prefill_by_decoded_runs(
    backend: Backend, text: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 prefill over codes goes run by run through a scratch buffer, here of one tile of tokens."""
    monkeypatch.setattr(backend, "stage_from", 4)
    monkeypatch.setattr(backend, "stage_bytes", 64 * 2 * (64 + 32) * 2)
    layout = layout_of(text, value_dim=32, window=window, dtype=torch.bfloat16)
    poison = {(0, 170, 1, "value"): math.nan, (2, 15, 0, "key"): math.nan}
    filled = Filled(backend, layout, (40, 1, 18, 0, 5), (300, 37, 18, 30, 133), poison=poison)
    staged = filled.plan.private.staged
    assert staged.columns * 16 == staged.shape.tile
    assert len(staged.runs) > 3
    assert filled.worst() <= 1
    sinks = torch.from_numpy(inputs.values(5, (4,), low=-1.0, high=4.0))
    assert filled.worst(sinks=sinks, softcap=30.0) <= 1


def test_decoded_runs_of_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see no stored token get zeros and -inf there, too."""
    monkeypatch.setattr(backend, "stage_from", 2)
    monkeypatch.setattr(backend, "stage_bytes", 64 * 2 * (64 + 64) * 2)  # the interpreter decodes all of it
    filled = Filled(backend, layout_of("int8", dtype=torch.bfloat16), (3, 4), (20, 30))
    filled.arrays.lengths[0] = 0
    filled.plan = backend.plan(filled.store, filled.arrays)
    out, lse = filled.attend(filled.query(), scale=1.0)
    assert bool((out[:3] == 0).all())
    assert bool((lse[:3] == -math.inf).all())
    assert bool(torch.isfinite(lse[3:]).all())
