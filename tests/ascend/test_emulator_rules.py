"""Every rule of the emulated Ascend operators refuses the call that breaks it, and nothing else of that call is wrong.

Each case takes a call that is accepted and changes one thing. The calls go through ``torch.ops.npu``, that is through
the recorded schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvport_ascend import emulator
from kvport_ascend.emulator import rules, scatter_rules

Arguments = dict[str, Any]

B, QN, KVN, D, BS, NB, COLUMNS = 2, 8, 2, 64, 32, 7, 3
LENGTHS = [40, 96]


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    emulator.load()


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8)


def floats(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.001).to(dtype)


def triangle() -> torch.Tensor:
    return torch.ones(rules.MASK_SIDE, rules.MASK_SIDE, dtype=torch.bool).triu(1)


# ------------------------------------------------------------------------------------------------ calls that are right

FIA = "npu_fused_infer_attention_score"


def decode() -> Arguments:
    """Paged decode with float32 scales per token and head in pages (mode 5)."""
    return {
        "query": floats(B, QN, 1, D),
        "key": codes(NB, BS, KVN * D),
        "value": codes(NB, BS, KVN * D),
        "num_heads": QN,
        "num_key_value_heads": KVN,
        "scale": D**-0.5,
        "input_layout": "BNSD",
        "block_table": torch.tensor([[3, 1, 0], [2, 6, 5]], dtype=torch.int32),
        "block_size": BS,
        "actual_seq_lengths_kv": list(LENGTHS),
        "key_antiquant_scale": scales(NB, KVN, BS),
        "value_antiquant_scale": scales(NB, KVN, BS) * 2,
        "key_antiquant_mode": 5,
        "value_antiquant_mode": 5,
    }


def channel() -> Arguments:
    """Paged decode with scales per channel (mode 0), in the query's dtype."""
    return decode() | {
        "key_antiquant_scale": scales(1, KVN, 1, D, dtype=torch.float16),
        "value_antiquant_scale": scales(1, KVN, 1, D, dtype=torch.float16) * 2,
        "key_antiquant_mode": 0,
        "value_antiquant_mode": 0,
    }


def mixed() -> Arguments:
    """Paged decode with K per channel and V per token (modes 0 and 1), which takes a float16 query."""
    return channel() | {"value_antiquant_scale": scales(1, B, COLUMNS * BS), "value_antiquant_mode": 1}


def fused() -> Arguments:
    """Paged decode with the older fused scale of shape (2, ...)."""
    call = {name: value for name, value in decode().items() if not name.startswith(("key_anti", "value_anti"))}
    return call | {"antiquant_scale": scales(2, KVN, D, dtype=torch.float16)}


def float_pages() -> Arguments:
    """Paged decode over float16 pages."""
    call = {name: value for name, value in decode().items() if "antiquant" not in name}
    return call | {"key": floats(NB, BS, KVN * D), "value": floats(NB, BS, KVN * D)}


def float_prefill() -> Arguments:
    """Several query tokens over float16 pages of 128."""
    return float_pages() | {
        "query": floats(B, QN, 4, D),
        "key": floats(NB, 128, KVN * D),
        "value": floats(NB, 128, KVN * D),
        "block_size": 128,
        "sparse_mode": 3,
        "atten_mask": triangle(),
    }


def packed() -> Arguments:
    """Prefill over dense float K/V in TND with the triangular mask."""
    return {
        "query": floats(7, QN, 128),
        "key": floats(20, KVN, 128),
        "value": floats(20, KVN, 128),
        "num_heads": QN,
        "num_key_value_heads": KVN,
        "scale": 128**-0.5,
        "input_layout": "TND",
        "actual_seq_lengths": [3, 7],
        "actual_seq_lengths_kv": [8, 20],
        "sparse_mode": 3,
        "atten_mask": triangle(),
    }


def dense() -> Arguments:
    """Prefill over dense float K/V in BSND."""
    return {
        "query": floats(B, 5, QN, D),
        "key": floats(B, 9, KVN, D),
        "value": floats(B, 9, KVN, D),
        "num_heads": QN,
        "num_key_value_heads": KVN,
        "scale": D**-0.5,
        "input_layout": "BSND",
        "actual_seq_lengths": [5, 3],
        "actual_seq_lengths_kv": [9, 7],
        "sparse_mode": 3,
        "atten_mask": triangle(),
    }


def dense_int8() -> Arguments:
    """Several query tokens over dense int8 K/V, per channel, bfloat16."""
    return dense() | {
        "query": floats(B, 5, QN, D, dtype=torch.bfloat16),
        "key": codes(B, 9, KVN, D),
        "value": codes(B, 9, KVN, D),
        "key_antiquant_scale": scales(KVN, D, dtype=torch.bfloat16),
        "value_antiquant_scale": scales(KVN, D, dtype=torch.bfloat16),
    }


def nz() -> Arguments:
    """Decode over the NZ cache (per channel, bfloat16, head dim 128)."""
    return {
        "query": floats(1, 10, 1, 128, dtype=torch.bfloat16),
        "key": codes(3, 1, 4, 128, 32),
        "value": codes(3, 1, 4, 128, 32),
        "num_heads": 10,
        "num_key_value_heads": 1,
        "scale": 128**-0.5,
        "input_layout": "BNSD",
        "block_table": torch.tensor([[2, 1]], dtype=torch.int32),
        "block_size": 128,
        "actual_seq_lengths_kv": [200],
        "key_antiquant_scale": scales(1, 1, 128, dtype=torch.bfloat16),
        "value_antiquant_scale": scales(1, 1, 128, dtype=torch.bfloat16),
        "inner_precise": 1,
    }


def nz_verify() -> Arguments:
    """Several query tokens over the NZ cache."""
    return nz() | {"query": floats(1, 10, 4, 128, dtype=torch.bfloat16), "sparse_mode": 3, "atten_mask": triangle()}


def incremental() -> Arguments:
    """npu_incre_flash_attention over pages, as on the 310P."""
    return {
        "query": floats(B, 1, QN * D),
        "key": codes(NB, BS, KVN * D),
        "value": codes(NB, BS, KVN * D),
        "num_heads": QN,
        "num_key_value_heads": KVN,
        "scale_value": D**-0.5,
        "input_layout": "BSH",
        "block_table": torch.tensor([[3, 1, 0], [2, 6, 5]], dtype=torch.int32),
        "block_size": BS,
        "actual_seq_lengths": list(LENGTHS),
        "antiquant_scale": scales(2, KVN, D, dtype=torch.float16),
    }


def scatter() -> Arguments:
    """Quantized rows into ND pages; one row is skipped."""
    return {
        "key": codes(4, KVN, D),
        "value": codes(4, KVN, D),
        "key_cache": codes(NB, BS, KVN, D),
        "value_cache": codes(NB, BS, KVN, D),
        "slot_mapping": torch.tensor([5, 200, -1, 33]),
        "cache_mode": "Norm",
    }


def scatter_nz() -> Arguments:
    """Quantized rows into NZ pages."""
    pages = {"key_cache": codes(NB, KVN * D // 32, BS, 32), "value_cache": codes(NB, KVN * D // 32, BS, 32)}
    return scatter() | pages | {"cache_mode": "PA_NZ", "slot_mapping": torch.tensor([5, 200, 1, 33])}


def scatter_nd() -> Arguments:
    """Scales into their pages."""
    return {"self": scales(NB * KVN * BS), "indices": torch.tensor([[5], [0], [7]]), "updates": scales(3)}


CALLS: dict[Callable[[], Arguments], str] = {
    decode: FIA,
    channel: FIA,
    mixed: FIA,
    fused: FIA,
    float_pages: FIA,
    float_prefill: FIA,
    packed: FIA,
    dense: FIA,
    dense_int8: FIA,
    nz: FIA,
    nz_verify: FIA,
    incremental: "npu_incre_flash_attention",
    scatter: "npu_scatter_pa_kv_cache",
    scatter_nz: "npu_scatter_pa_kv_cache",
    scatter_nd: "npu_scatter_nd_update_",
}


def run(operator: str, call: Arguments) -> Any:
    """Dispatch; ``self`` cannot be a keyword in torch.ops, so tensors named so go first."""
    arguments = dict(call)
    leading = [arguments.pop("self")] if "self" in arguments else []
    return getattr(torch.ops.npu, operator)(*leading, **arguments)


@pytest.mark.parametrize("good", CALLS, ids=lambda good: good.__name__)
def test_right_call_is_accepted(good: Callable[[], Arguments]) -> None:
    soc = "310P" if good is incremental else "A3"
    with emulator.settings(soc=soc):
        answer = run(CALLS[good], good())
    if good not in (scatter, scatter_nz):
        first = answer[0] if isinstance(answer, tuple) else answer
        assert first.numel() > 0


# ------------------------------------------------------------------------------------------------ calls that are wrong

Change = Callable[[Arguments], Arguments]


def put(**changes: Any) -> Change:
    """Replace arguments."""
    return lambda call: changes


def half(name: str, dtype: torch.dtype) -> Change:
    """Convert one argument to another dtype."""
    return lambda call: {name: call[name].to(dtype)}


def strided(name: str) -> Change:
    """The same numbers of one argument, not contiguous."""

    def change(call: Arguments) -> Arguments:
        tensor = call[name]
        return {name: torch.stack([tensor, tensor], dim=-1)[..., 0]}

    return change


def halves(*shape: int) -> torch.Tensor:
    """float16 scales."""
    return scales(*shape, dtype=torch.float16)


def pages(make: Callable[..., torch.Tensor], *shape: int) -> Arguments:
    """K and V of ``NB`` pages."""
    return {"key": make(NB, *shape), "value": make(NB, *shape)}


def moved(call: Arguments, old: str, new: str) -> Arguments:
    """One argument under another's name."""
    return {new: call[old], old: None}


def drop(*names: str) -> Change:
    """Leave arguments out."""
    return lambda call: dict.fromkeys(names)


WRONG: list[tuple[str, str, Callable[[], Arguments], Change, str]] = [
    # rule, what is wrong (docs/ascend.md lists it), right call, what is changed, SoC
    ("operator_on_soc", "the fused attention on the 310P", decode, put(), "310P"),
    ("operator_on_soc", "the incremental attention on the 950", incremental, put(), "950"),
    ("layout_known", "an unknown layout", decode, put(input_layout="NBSD"), "A3"),
    ("query_dtype", "an int8 query", decode, put(query=codes(B, QN, 1, D)), "A3"),
    ("query_dtype", "a float32 query", decode, put(query=floats(B, QN, 1, D, dtype=torch.float32)), "A3"),
    ("kv_dtypes_equal", "int8 K with float16 V", decode, put(value=floats(NB, BS, KVN * D)), "A3"),
    ("int4_not_paged", "packed int4 pages", decode, lambda c: {n: c[n].int() for n in ("key", "value")}, "A3"),
    (
        "kv_dtype",
        "bfloat16 pages under a float16 query",
        float_pages,
        lambda c: {n: c[n].bfloat16() for n in ("key", "value")},
        "A3",
    ),
    ("qkv_contiguous", "a strided query", decode, strided("query"), "A3"),
    ("qkv_contiguous", "strided K", decode, strided("key"), "A3"),
    ("qkv_contiguous", "strided V", decode, strided("value"), "A3"),
    ("query_rank", "a three-dimensional query in BNSD", decode, put(query=floats(B, 1, QN * D)), "A3"),
    ("heads_positive", "no query heads", decode, put(num_heads=0), "A3"),
    ("heads_match_query", "half the query heads", decode, put(num_heads=QN // 2), "A3"),
    ("heads_divide", "8 query heads over 3 KV heads", decode, put(num_key_value_heads=3), "A3"),
    (
        "heads_ratio",
        "65 query heads per KV head",
        decode,
        put(query=floats(B, 130, 1, D), num_heads=130, num_key_value_heads=2),
        "A3",
    ),
    ("heads_limit", "258 heads", decode, put(query=floats(B, 258, 1, D), num_heads=258, num_key_value_heads=258), "A3"),
    ("kv_same_shape", "V narrower than K", decode, put(value=codes(NB, BS, KVN * D // 2)), "A3"),
    ("block_table_dtype", "an int64 block table", decode, half("block_table", torch.int64), "A3"),
    ("block_table_rank", "a flat block table", decode, lambda c: {"block_table": c["block_table"].flatten()}, "A3"),
    (
        "cache_rank",
        "a two-dimensional cache",
        decode,
        lambda c: {n: c[n].flatten(0, 1) for n in ("key", "value")},
        "A3",
    ),
    ("kv_rank", "three-dimensional K in BSND", dense, lambda c: {n: c[n].flatten(2) for n in ("key", "value")}, "A3"),
    ("tnd_needs_lengths", "TND without query lengths", packed, drop("actual_seq_lengths"), "A3"),
    ("tnd_needs_lengths", "TND without KV lengths", packed, drop("actual_seq_lengths_kv"), "A3"),
    (
        "cache_layout",
        "a BnNBsD cache under BSND",
        decode,
        lambda c: {
            "query": c["query"].transpose(1, 2).contiguous(),
            "input_layout": "BSND",
            "key": codes(NB, KVN, BS, D),
            "value": codes(NB, KVN, BS, D),
        },
        "A3",
    ),
    # The (nb, bs, heads, dim) cache as it lies, without the view to three dimensions: read as (nb, heads, bs, dim).
    (
        "kv_shape_fits",
        "a (pages, page size, heads, dim) cache, not viewed",
        decode,
        lambda c: {n: c[n].unflatten(2, (KVN, D)) for n in ("key", "value")},
        "A3",
    ),
    ("kv_shape_fits", "an NZ cache with rows of 32 on the 950", nz, put(), "950"),
    (
        "head_dim",
        "head dim 48 of int8",
        decode,
        put(query=floats(B, QN, 1, 48), key=codes(NB, BS, 96), value=codes(NB, BS, 96)),
        "A3",
    ),
    (
        "head_dim",
        "head dim 544",
        decode,
        put(query=floats(B, QN, 1, 544), key=codes(NB, BS, 1088), value=codes(NB, BS, 1088)),
        "A3",
    ),
    (
        "tnd_head_dim",
        "head dim 64 in TND",
        packed,
        lambda c: {n: c[n][..., :64].contiguous() for n in ("query", "key", "value")},
        "A3",
    ),
    (
        "batch_limit",
        "4097 sequences in TND",
        packed,
        put(actual_seq_lengths=[0] * 4096 + [7], actual_seq_lengths_kv=[0] * 4096 + [20]),
        "A3",
    ),
    ("tnd_query_lengths", "query lengths that end before the tokens do", packed, put(actual_seq_lengths=[3, 4]), "A3"),
    ("tnd_query_lengths", "query lengths that fall", packed, put(actual_seq_lengths=[8, 7]), "A3"),
    ("tnd_kv_lengths", "more KV lengths than sequences in TND", packed, put(actual_seq_lengths_kv=[8, 12, 20]), "A3"),
    ("tnd_kv_lengths", "KV lengths that fall in TND", packed, put(actual_seq_lengths_kv=[12, 8]), "A3"),
    ("kv_lengths_given", "no KV lengths with pages", decode, drop("actual_seq_lengths_kv"), "A3"),
    (
        "kv_lengths_count",
        "2 KV lengths for 3 sequences",
        decode,
        put(
            query=floats(3, QN, 1, D),
            block_table=torch.zeros(3, COLUMNS, dtype=torch.int32),
            actual_seq_lengths_kv=[4, 5],
        ),
        "A3",
    ),
    ("lengths_not_negative", "a negative KV length", decode, put(actual_seq_lengths_kv=[40, -1]), "A3"),
    ("kv_lengths_fit", "a KV length past its pages", decode, put(actual_seq_lengths_kv=[40, COLUMNS * BS + 1]), "A3"),
    ("query_lengths_fit", "a query length past the queries", dense, put(actual_seq_lengths=[5, 6]), "A3"),
    (
        "decode_kv_limit",
        "more than 262144 KV tokens",
        decode,
        put(block_table=torch.zeros(B, 262144 // BS + 1, dtype=torch.int32)),
        "A3",
    ),
    (
        "block_table_batch",
        "a block table row too many",
        decode,
        put(block_table=torch.zeros(B + 1, COLUMNS, dtype=torch.int32)),
        "A3",
    ),
    ("block_size_given", "block size 0", decode, put(block_size=0, actual_seq_lengths_kv=[0, 0]), "A3"),
    ("block_size_given", "twice the cache's block size", decode, put(block_size=2 * BS), "A3"),
    (
        "block_size_decode",
        "page size 48 of int8",
        decode,
        put(
            key=codes(NB, 48, KVN * D),
            value=codes(NB, 48, KVN * D),
            block_size=48,
            key_antiquant_scale=scales(NB, KVN, 48),
            value_antiquant_scale=scales(NB, KVN, 48),
        ),
        "A3",
    ),
    (
        "block_size_decode",
        "page size 544",
        decode,
        put(
            key=codes(NB, 544, KVN * D),
            value=codes(NB, 544, KVN * D),
            block_size=544,
            key_antiquant_scale=scales(NB, KVN, 544),
            value_antiquant_scale=scales(NB, KVN, 544),
        ),
        "A3",
    ),
    (
        "block_size_prefill",
        "page size 64 for several tokens",
        float_prefill,
        lambda c: {n: c[n][:, :64].contiguous() for n in ("key", "value")} | {"block_size": 64},
        "A3",
    ),
    (
        "page_row_limit",
        "rows of 65536 numbers",
        decode,
        put(
            query=floats(B, 128, 1, 512),
            num_heads=128,
            num_key_value_heads=128,
            key=codes(NB, BS, 65536),
            value=codes(NB, BS, 65536),
            key_antiquant_scale=scales(NB, 128, BS),
            value_antiquant_scale=scales(NB, 128, BS),
        ),
        "A3",
    ),
    ("paging_is_exclusive", "left padding with pages", decode, put(kv_padding_size=torch.tensor([1])), "A3"),
    ("paging_is_exclusive", "a shared prefix with pages", decode, put(key_shared_prefix=codes(1, KVN, 4, D)), "A3"),
    ("inner_precise", "inner_precise 2 in decode", decode, put(inner_precise=2), "A3"),
    ("inner_precise", "inner_precise 4 in prefill", dense, put(inner_precise=4), "A3"),
    ("sparse_mode_known", "sparse mode 5", dense, put(sparse_mode=5), "A3"),
    ("mask_dtype", "a float16 mask", dense, lambda c: {"atten_mask": c["atten_mask"].half()}, "A3"),
    (
        "compressed_mask",
        "a 9 x 9 mask in sparse mode 3",
        dense,
        put(atten_mask=torch.ones(9, 9, dtype=torch.bool).triu(1)),
        "A3",
    ),
    ("compressed_mask", "sparse mode 3 without a mask", packed, drop("atten_mask"), "A3"),
    ("full_mask", "sparse mode 1 without a mask", dense, put(sparse_mode=1, atten_mask=None), "A3"),
    (
        "full_mask",
        "a mask shorter than the KV",
        dense,
        put(sparse_mode=0, atten_mask=torch.zeros(5, 8, dtype=torch.bool)),
        "A3",
    ),
    (
        "decode_takes_no_mask",
        "paged decode with a mask",
        decode,
        put(atten_mask=torch.zeros(1, 1, 1, 96, dtype=torch.bool)),
        "A3",
    ),
    ("decode_takes_no_mask", "paged decode with pse_shift", decode, put(pse_shift=floats(1, QN, 1, 96)), "A3"),
    ("tnd_needs_mask", "TND without a mask", packed, put(sparse_mode=0, atten_mask=None), "A3"),
    ("scales_in_pairs", "no V scale", decode, drop("value_antiquant_scale"), "A3"),
    ("scales_in_pairs", "no K scale", decode, drop("key_antiquant_scale"), "A3"),
    ("offsets_in_pairs", "a K offset alone", decode, put(key_antiquant_offset=scales(NB, KVN, BS)), "A3"),
    (
        "offset_needs_scale",
        "offsets without scales",
        decode,
        put(
            key_antiquant_scale=None,
            value_antiquant_scale=None,
            key_antiquant_offset=scales(NB, KVN, BS),
            value_antiquant_offset=scales(NB, KVN, BS),
        ),
        "A3",
    ),
    ("int8_needs_scale", "int8 without scales", decode, drop("key_antiquant_scale", "value_antiquant_scale"), "A3"),
    (
        "float_takes_no_scale",
        "scales over float pages",
        float_pages,
        put(
            key_antiquant_scale=scales(1, KVN, 1, D, dtype=torch.float16),
            value_antiquant_scale=scales(1, KVN, 1, D, dtype=torch.float16),
        ),
        "A3",
    ),
    (
        "tnd_takes_no_int8",
        "int8 in TND",
        packed,
        put(
            key=codes(20, KVN, 128),
            value=codes(20, KVN, 128),
            key_antiquant_scale=scales(KVN, 128, dtype=torch.float16),
            value_antiquant_scale=scales(KVN, 128, dtype=torch.float16),
        ),
        "A3",
    ),
    (
        "prefill_takes_no_int8_pages",
        "several tokens over int8 pages",
        float_prefill,
        put(
            key=codes(NB, 128, KVN * D),
            value=codes(NB, 128, KVN * D),
            key_antiquant_scale=scales(NB, KVN, 128),
            value_antiquant_scale=scales(NB, KVN, 128),
            key_antiquant_mode=5,
            value_antiquant_mode=5,
        ),
        "A3",
    ),
    ("modes_known", "mode 9", decode, put(key_antiquant_mode=9, value_antiquant_mode=9), "A3"),
    ("modes_known", "mode 6", decode, put(key_antiquant_mode=6, value_antiquant_mode=6), "A3"),
    ("modes_equal", "K mode 4 with V mode 5", decode, put(key_antiquant_mode=4), "A3"),
    ("modes_equal", "K mode 1 with V mode 0", channel, put(key_antiquant_mode=1), "A3"),
    (
        "mixed_modes_need_fp16",
        "modes (0, 1) with a bfloat16 query",
        channel,
        put(
            query=floats(B, QN, 1, D, dtype=torch.bfloat16),
            key_antiquant_scale=scales(1, KVN, 1, D, dtype=torch.bfloat16),
            value_antiquant_scale=scales(1, B, COLUMNS * BS),
            value_antiquant_mode=1,
        ),
        "A3",
    ),
    (
        "paged_scales_need_pages",
        "mode 5 without pages",
        dense_int8,
        put(
            query=floats(B, 1, QN, D, dtype=torch.bfloat16),
            actual_seq_lengths=None,
            sparse_mode=0,
            atten_mask=None,
            key_antiquant_mode=5,
            value_antiquant_mode=5,
        ),
        "A3",
    ),
    # Mode 0: a shape that one query token does not take (it is the one for several), and one scale per head only.
    (
        "key_scale_shape",
        "mode 0: the shape for several tokens, in decode",
        channel,
        put(key_antiquant_scale=scales(KVN, 1, D, dtype=torch.float16)),
        "A3",
    ),
    (
        "key_scale_shape",
        "mode 0: the shape for decode, with several tokens",
        dense_int8,
        put(key_antiquant_scale=scales(1, KVN, D, dtype=torch.bfloat16)),
        "A3",
    ),
    (
        "key_scale_shape",
        "mode 1: scales shorter than the table",
        decode,
        put(key_antiquant_mode=1, value_antiquant_mode=1, key_antiquant_scale=scales(1, B, COLUMNS * BS - 1)),
        "A3",
    ),
    (
        "key_scale_shape",
        "mode 2: a scale per query head",
        channel,
        put(key_antiquant_mode=2, value_antiquant_mode=2, key_antiquant_scale=scales(QN, dtype=torch.float16)),
        "A3",
    ),
    (
        "key_scale_shape",
        "mode 3: scales shorter than the table",
        decode,
        put(key_antiquant_mode=3, value_antiquant_mode=3, key_antiquant_scale=scales(B, KVN, COLUMNS * BS - 1)),
        "A3",
    ),
    (
        "key_scale_shape",
        "mode 4: scales of a page too few",
        decode,
        put(key_antiquant_mode=4, value_antiquant_mode=4, key_antiquant_scale=scales(NB - 1, BS)),
        "A3",
    ),
    ("key_scale_shape", "mode 5: K scales token-major", decode, put(key_antiquant_scale=scales(NB, BS, KVN)), "A3"),
    ("value_scale_shape", "mode 5: V scales token-major", decode, put(value_antiquant_scale=scales(NB, BS, KVN)), "A3"),
    (
        "value_scale_shape",
        "mode 0: K and V scales of different shapes",
        channel,
        put(value_antiquant_scale=scales(1, KVN, D, dtype=torch.float16)),
        "A3",
    ),
    ("key_scale_dtype", "mode 0: float32 K scales", channel, half("key_antiquant_scale", torch.float32), "A3"),
    ("key_scale_dtype", "mode 5: float16 K scales", decode, half("key_antiquant_scale", torch.float16), "A3"),
    ("value_scale_dtype", "mode 0: float32 V scales", channel, half("value_antiquant_scale", torch.float32), "A3"),
    ("value_scale_dtype", "mode 5: float16 V scales", decode, half("value_antiquant_scale", torch.float16), "A3"),
    (
        "offsets_like_scales",
        "an offset of another dtype than its scale",
        channel,
        put(
            key_antiquant_offset=scales(1, KVN, 1, D),
            value_antiquant_offset=scales(1, KVN, 1, D, dtype=torch.float16),
        ),
        "A3",
    ),
    (
        "offsets_like_scales",
        "an offset of another shape than its scale",
        channel,
        put(
            key_antiquant_offset=scales(1, KVN, 1, D, dtype=torch.float16),
            value_antiquant_offset=scales(1, KVN, D, dtype=torch.float16),
        ),
        "A3",
    ),
    ("scales_contiguous", "a strided scale", decode, strided("value_antiquant_scale"), "A3"),
    ("fused_mode", "fused mode 2", fused, put(antiquant_mode=2), "A3"),
    ("fused_scale_shape", "fused mode 0: float32 scales", fused, put(antiquant_scale=scales(2, KVN, D)), "A3"),
    (
        "fused_scale_shape",
        "fused scales of one side only",
        fused,
        put(antiquant_scale=scales(1, KVN, D, dtype=torch.float16)),
        "A3",
    ),
    (
        "fused_scale_shape",
        "fused mode 1: scales shorter than the table",
        fused,
        put(antiquant_scale=scales(2, B, COLUMNS * BS - 1), antiquant_mode=1),
        "A3",
    ),
    (
        "prefill_int8",
        "several float16 tokens over dense int8",
        dense_int8,
        put(
            query=floats(B, 5, QN, D),
            key_antiquant_scale=scales(KVN, D, dtype=torch.float16),
            value_antiquant_scale=scales(KVN, D, dtype=torch.float16),
        ),
        "A3",
    ),
    (
        "prefill_int8",
        "17 tokens over dense int8",
        dense_int8,
        put(query=floats(B, 17, QN, D, dtype=torch.bfloat16)),
        "A3",
    ),
    (
        "nz_dtypes",
        "a float16 query over NZ pages",
        nz,
        put(
            query=floats(1, 10, 1, 128),
            key_antiquant_scale=scales(1, 1, 128, dtype=torch.float16),
            value_antiquant_scale=scales(1, 1, 128, dtype=torch.float16),
        ),
        "A3",
    ),
    (
        "prefill_takes_no_int8_pages",
        "17 tokens over NZ pages",
        nz_verify,
        put(query=floats(1, 10, 17, 128, dtype=torch.bfloat16)),
        "A3",
    ),
    (
        "nz_geometry",
        "NZ pages of head dim 64",
        nz,
        put(
            query=floats(1, 10, 1, 64, dtype=torch.bfloat16),
            key=codes(3, 1, 2, 128, 32),
            value=codes(3, 1, 2, 128, 32),
            key_antiquant_scale=scales(1, 1, 64, dtype=torch.bfloat16),
            value_antiquant_scale=scales(1, 1, 64, dtype=torch.bfloat16),
        ),
        "A3",
    ),
    (
        "nz_geometry",
        "NZ pages of 256 tokens",
        nz,
        put(key=codes(3, 1, 4, 256, 32), value=codes(3, 1, 4, 256, 32), block_size=256),
        "A3",
    ),
    (
        "nz_modes",
        "NZ pages in mode 2",
        nz,
        put(
            key_antiquant_scale=scales(1, dtype=torch.bfloat16),
            value_antiquant_scale=scales(1, dtype=torch.bfloat16),
            key_antiquant_mode=2,
            value_antiquant_mode=2,
        ),
        "A3",
    ),
    ("nz_inner_precise", "inner_precise 0 over NZ pages", nz, put(inner_precise=0), "A3"),
    (
        "nz_no_offset",
        "offsets over NZ pages",
        nz,
        put(
            key_antiquant_offset=scales(1, 1, 128, dtype=torch.bfloat16),
            value_antiquant_offset=scales(1, 1, 128, dtype=torch.bfloat16),
        ),
        "A3",
    ),
    ("nz_no_lse", "the LSE over NZ pages", nz, put(softmax_lse_flag=True), "A3"),
    ("nz_no_extras", "query lengths over NZ pages", nz, put(actual_seq_lengths=[1]), "A3"),
    ("nz_mask", "decode with a mask over NZ pages", nz, put(sparse_mode=3, atten_mask=triangle()), "A3"),
    ("nz_mask", "several tokens in sparse mode 2 over NZ pages", nz_verify, put(sparse_mode=2), "A3"),
    (
        "nz_heads",
        "(8, 1) heads over NZ pages",
        nz,
        put(query=floats(1, 8, 1, 128, dtype=torch.bfloat16), num_heads=8),
        "A3",
    ),
    (
        "p310_limits",
        "33 query heads per KV head on the 310P",
        incremental,
        put(query=floats(B, 1, 66 * D), num_heads=66),
        "310P",
    ),
    (
        "block_ids_in_range",
        "a block id past the cache",
        decode,
        put(block_table=torch.tensor([[3, 1, 0], [2, 6, NB]], dtype=torch.int32)),
        "A3",
    ),
    ("scatter_on_soc", "the page write on the 310P", scatter, put(), "310P"),
    (
        "scatter_dtypes",
        "float16 rows into int8 pages",
        scatter,
        put(key=floats(4, KVN, D), value=floats(4, KVN, D)),
        "A3",
    ),
    ("scatter_contiguous", "strided rows", scatter, strided("key"), "A3"),
    ("scatter_contiguous", "a strided cache", scatter, strided("key_cache"), "A3"),
    ("scatter_slot_dtype", "int16 slots", scatter, half("slot_mapping", torch.int16), "A3"),
    ("scatter_token_shape", "a slot too few", scatter, put(slot_mapping=torch.tensor([5, 6, 7])), "A3"),
    ("scatter_cache_mode", "an unknown cache mode", scatter, put(cache_mode="ND"), "A3"),
    # The schema's default is PA_NZ: an ND cache without an explicit mode is refused by shape.
    ("scatter_cache_shape", "an ND cache in the default mode", scatter, lambda c: {"cache_mode": "PA_NZ"}, "A3"),
    ("scatter_cache_shape", "an NZ cache in mode Norm", scatter_nz, put(cache_mode="Norm"), "A3"),
    (
        "scatter_cache_shape",
        "a V cache of another page count",
        scatter,
        put(value_cache=codes(NB + 1, BS, KVN, D)),
        "A3",
    ),
    (
        "scatter_not_empty",
        "no rows",
        scatter,
        put(key=codes(0, KVN, D), value=codes(0, KVN, D), slot_mapping=torch.zeros(0, dtype=torch.int64)),
        "A3",
    ),
    ("scatter_skip_slots", "slot -1 on the A2", scatter, put(), "A2"),
    ("scatter_skip_slots", "slot -1 in mode PA_NZ", scatter_nz, put(slot_mapping=torch.tensor([5, -1, 1, 33])), "A3"),
    (
        "scatter_slots_in_range",
        "a slot past the cache",
        scatter,
        put(slot_mapping=torch.tensor([5, NB * BS, -1, 33])),
        "A3",
    ),
    ("scatter_slots_in_range", "slot -2", scatter, put(slot_mapping=torch.tensor([5, -2, -1, 33])), "A3"),
    ("scatter_slots_unique", "a slot twice", scatter, put(slot_mapping=torch.tensor([5, 33, -1, 33])), "A3"),
    ("nd_dtypes", "float16 scales into float32 pages", scatter_nd, half("updates", torch.float16), "A3"),
    ("nd_dtypes", "int8 on the 310P", scatter_nd, put(self=codes(50), updates=codes(3)), "310P"),
    ("nd_index_dtype", "int16 indices", scatter_nd, half("indices", torch.int16), "A3"),
    ("nd_shapes", "more updates than indices", scatter_nd, put(updates=scales(4)), "A3"),
    ("nd_contiguous", "strided updates", scatter_nd, strided("updates"), "A3"),
    ("nd_indices_in_range", "a negative index", scatter_nd, put(indices=torch.tensor([[5], [-1], [7]])), "A3"),
    (
        "head_dim",
        "head dim 24 of float16",
        float_pages,
        put(**pages(floats, BS, KVN * 24), query=floats(B, QN, 1, 24)),
        "A3",
    ),
    (
        "block_size_decode",
        "page size 24 of float16",
        float_pages,
        put(**pages(floats, 24, KVN * D), block_size=24, actual_seq_lengths_kv=[40, 60]),
        "A3",
    ),
    (
        "block_size_prefill",
        "page size 24 in TND",
        packed,
        put(
            **pages(floats, 24, KVN * 128),
            block_table=torch.ones(2, 1, dtype=torch.int32),
            block_size=24,
            actual_seq_lengths_kv=[8, 12],
        ),
        "A3",
    ),
    (
        "batch_limit",
        "65537 sequences",
        decode,
        put(query=floats(65537, QN, 1, D), block_table=torch.zeros(65537, 1, dtype=torch.int32)),
        "A3",
    ),
    (
        "batch_limit",
        "257 sequences on the 310P",
        incremental,
        put(query=floats(257, 1, QN * D), block_table=torch.zeros(257, 1, dtype=torch.int32)),
        "310P",
    ),
    (
        "decode_kv_limit",
        "more than 65536 KV tokens on the 310P",
        incremental,
        put(block_table=torch.zeros(B, 65536 // BS + 1, dtype=torch.int32)),
        "310P",
    ),
    (
        "p310_limits",
        "pages of head dim 160 on the 310P",
        incremental,
        put(
            query=floats(B, 1, QN * 160),
            **pages(codes, BS, KVN * 160),
            antiquant_scale=scales(2, KVN, 160, dtype=torch.float16),
        ),
        "310P",
    ),
    (
        "p310_limits",
        "pages under BNSD on the 310P",
        incremental,
        put(query=floats(B, QN, 1, D), input_layout="BNSD"),
        "310P",
    ),
    (
        "key_scale_shape",
        "mode 0: scales of another head count",
        channel,
        put(key_antiquant_scale=halves(1, 1, 1, D)),
        "A3",
    ),
    ("key_scale_shape", "modes (0, 1): one K scale for all channels", mixed, put(key_antiquant_scale=halves(1)), "A3"),
    (
        "value_scale_shape",
        "modes (0, 1): V scales of two dimensions",
        mixed,
        put(value_antiquant_scale=scales(B, COLUMNS * BS)),
        "A3",
    ),
    ("prefill_int8", "left padding over dense int8", dense_int8, put(query_padding_size=torch.tensor([1])), "A3"),
    (
        "prefill_int8",
        "several tokens over dense int8 in mode 2",
        dense_int8,
        put(
            key_antiquant_scale=scales(KVN, dtype=torch.bfloat16),
            value_antiquant_scale=scales(KVN, dtype=torch.bfloat16),
            key_antiquant_mode=2,
            value_antiquant_mode=2,
        ),
        "A3",
    ),
    (
        "fused_mode",
        "fused mode 1 for several tokens",
        dense_int8,
        put(
            key_antiquant_scale=None,
            value_antiquant_scale=None,
            antiquant_scale=scales(2, B, 9),
            antiquant_mode=1,
        ),
        "A3",
    ),
    (
        "offset_needs_scale",
        "a fused offset without its scale",
        fused,
        lambda c: moved(c, "antiquant_scale", "antiquant_offset"),
        "A3",
    ),
    (
        "float_takes_no_scale",
        "fused scales over float pages",
        float_pages,
        put(antiquant_scale=halves(2, KVN, D)),
        "A3",
    ),
    ("mask_dtype", "a strided mask", dense, lambda c: {"atten_mask": c["atten_mask"].T}, "A3"),
    (
        "nz_dtypes",
        "bfloat16 NZ pages",
        nz,
        lambda c: (
            {n: c[n].bfloat16() for n in ("key", "value")}
            | {"key_antiquant_scale": None, "value_antiquant_scale": None}
        ),
        "A3",
    ),
    ("scatter_contiguous", "strided V rows", scatter, strided("value"), "A3"),
    ("scatter_contiguous", "a strided V cache", scatter, strided("value_cache"), "A3"),
    ("scatter_contiguous", "strided slots", scatter, strided("slot_mapping"), "A3"),
    ("scatter_dtypes", "a V cache of another dtype", scatter, half("value_cache", torch.int16), "A3"),
]

# Rules that the operators' own dispatch, or an earlier rule, keeps from ever being reached through a call; they are
# broken by handing the rule a call directly (test_rule_alone).
ALONE = {"nz_query_tokens": "17 tokens", "nz_layout": "TND"}
# A cache of 2^31 elements does not fit a test; see test_cache_elements.
ON_META = {"cache_elements": "2^31 elements"}


@pytest.mark.parametrize(
    ("rule", "wrong", "good", "change", "soc"), WRONG, ids=[f"{rule}-{wrong}" for rule, wrong, *_ in WRONG]
)
def test_wrong_call_is_refused(rule: str, wrong: str, good: Callable[[], Arguments], change: Change, soc: str) -> None:
    call = good()
    call |= change(call)
    with emulator.settings(soc=soc), pytest.raises(emulator.AclnnParameterError) as caught:
        run(CALLS[good], {name: value for name, value in call.items() if value is not None})
    assert caught.value.rule == rule, f"{wrong}: {caught.value}"
    assert "561002" in str(caught.value)


def _attention_call(**changes: Any) -> rules.AttentionCall:
    base: Arguments = {
        "operator": FIA,
        "soc": "A3",
        "query": floats(1, 10, 1, 128, dtype=torch.bfloat16),
        "key": codes(3, 1, 4, 128, 32),
        "value": codes(3, 1, 4, 128, 32),
        "q_heads": 10,
        "kv_heads": 1,
        "layout": "BNSD",
        "softmax_scale": 1.0,
        "block_table": torch.tensor([[2, 1]], dtype=torch.int32),
        "block_size": 128,
        "kv_lengths": (200,),
    }
    return rules.AttentionCall(**(base | changes))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("nz_query_tokens", {"query": floats(1, 10, 17, 128, dtype=torch.bfloat16)}),
        ("nz_layout", {"layout": "TND", "query": floats(1, 10, 128, dtype=torch.bfloat16), "q_lengths": (1,)}),
    ],
)
def test_rule_alone(rule: str, changes: Arguments) -> None:
    check = next(entry.check for entry in rules.ATTENTION if entry.name == rule)
    assert check(_attention_call(**changes))
    assert check(_attention_call()) is None


def test_cache_elements() -> None:
    """The limit of 2^31 - 1 elements, on tensors without memory."""
    check = next(entry.check for entry in rules.ATTENTION if entry.name == "cache_elements")
    fits, large = (torch.empty(pages, 128, 1024, dtype=torch.int8, device="meta") for pages in (2**14 - 1, 2**14))
    assert check(_attention_call(key=fits, value=fits)) is None
    assert check(_attention_call(key=large, value=large))


def test_every_rule_has_a_wrong_call() -> None:
    tables = (*rules.ATTENTION, *scatter_rules.SCATTER_PA, *scatter_rules.SCATTER_ND)
    names = [rule.name for rule in tables]
    assert len(names) == len(set(names))
    assert set(names) == {case[0] for case in WRONG} | set(ALONE) | set(ON_META)
    assert all(rule.text and rule.source and rule.kind in ("host", "device", "defect") for rule in tables)


#: What the operators' documentation and host sources state, read statement by statement and apart from the rules:
#: the wrong calls above that show each to be enforced.
STATED: dict[str, tuple[str, ...]] = {
    # -- antiquant modes
    "mode 0 per channel has four shapes for one query token, others for several": (
        "mode 0: the shape for several tokens, in decode",
        "mode 0: the shape for decode, with several tokens",
        "mode 0: scales of another head count",
    ),
    "scales of modes 0 and 2 have the query's dtype": (
        "mode 0: float32 K scales",
        "mode 0: float32 V scales",
    ),
    "scales per token are float32": ("mode 5: float16 K scales", "mode 5: float16 V scales"),
    "mode 1 scales are batch-indexed and reach to the end of the table": ("mode 1: scales shorter than the table",),
    "mode 2 has one scale per KV head": ("mode 2: a scale per query head",),
    "mode 3 scales are batch-indexed per head": ("mode 3: scales shorter than the table",),
    "mode 4 scales are (pages, page size)": ("mode 4: scales of a page too few",),
    "mode 5 scales are (pages, KV heads, page size)": (
        "mode 5: K scales token-major",
        "mode 5: V scales token-major",
    ),
    "modes 4 and 5 need a block table": ("mode 5 without pages",),
    "modes (0, 1): K per channel, V (1, B, S), float16 query": (
        "modes (0, 1): one K scale for all channels",
        "modes (0, 1): V scales of two dimensions",
        "modes (0, 1) with a bfloat16 query",
    ),
    "modes 6 and 7 are for other dtypes, the rest does not exist": ("mode 6", "mode 9"),
    "the K mode is the V mode, except (0, 1)": ("K mode 4 with V mode 5", "K mode 1 with V mode 0"),
    "scales come for both or neither": ("no V scale", "no K scale"),
    "offsets come for both or neither": ("a K offset alone",),
    "no offset without its scale": ("offsets without scales", "a fused offset without its scale"),
    "an offset has its scale's dtype and dimensions": (
        "an offset of another dtype than its scale",
        "an offset of another shape than its scale",
    ),
    "K and V scales have one shape": ("mode 0: K and V scales of different shapes",),
    "float K/V takes no scales": ("scales over float pages", "fused scales over float pages"),
    "int8 K/V needs scales": ("int8 without scales",),
    "the fused form is (2, ...), mode 0 or 1, and 0 for several tokens": (
        "fused scales of one side only",
        "fused mode 0: float32 scales",
        "fused mode 1: scales shorter than the table",
        "fused mode 2",
        "fused mode 1 for several tokens",
    ),
    # -- several query tokens over int8
    "int8 pages take one query token": ("several tokens over int8 pages",),
    "dense int8: 16 bfloat16 tokens, modes 0/0 and 1/1, no left padding": (
        "17 tokens over dense int8",
        "several float16 tokens over dense int8",
        "several tokens over dense int8 in mode 2",
        "left padding over dense int8",
    ),
    "TND takes no int8": ("int8 in TND",),
    "inner_precise is 0 or 1 in decode": ("inner_precise 2 in decode", "inner_precise 4 in prefill"),
    # -- pages
    "the dimensions of a cache say its layout": (
        "a two-dimensional cache",
        "a (pages, page size, heads, dim) cache, not viewed",
    ),
    "BSH and BSND queries read BnBsH pages only": ("a BnNBsD cache under BSND",),
    "KV heads * head dim is at most 65535": ("rows of 65536 numbers",),
    "the block size is given": ("block size 0", "twice the cache's block size"),
    "decode: at most 512, multiples of 32 for int8, of 16 for float": (
        "page size 544",
        "page size 48 of int8",
        "page size 24 of float16",
    ),
    "prefill: multiples of 128, in TND of 16": ("page size 64 for several tokens", "page size 24 in TND"),
    "the block table is int32, two-dimensional, a row per sequence, wide enough": (
        "an int64 block table",
        "a flat block table",
        "a block table row too many",
        "a KV length past its pages",
    ),
    "nobody checks block ids": ("a block id past the cache",),
    "KV lengths: mandatory with pages, one or one each": ("no KV lengths with pages", "2 KV lengths for 3 sequences"),
    "TND lengths: both, cumulative, to the last token": (
        "TND without query lengths",
        "TND without KV lengths",
        "query lengths that end before the tokens do",
        "query lengths that fall",
        "KV lengths that fall in TND",
        "more KV lengths than sequences in TND",
    ),
    "head dim: at most 512, multiples of 16, of 32 for int8": (
        "head dim 544",
        "head dim 24 of float16",
        "head dim 48 of int8",
    ),
    "heads: at most 256, KV heads divide, at most 64 to one": (
        "258 heads",
        "8 query heads over 3 KV heads",
        "65 query heads per KV head",
    ),
    "sequences: 65536, in TND 4096": ("65537 sequences", "4097 sequences in TND"),
    "decode reaches 262144 tokens": ("more than 262144 KV tokens",),
    "a paged K has fewer than 2^31 elements": ("2^31 elements",),
    "queries are float16 or bfloat16": ("an int8 query", "a float32 query"),
    "query, K and V are contiguous": ("a strided query", "strided K", "strided V"),
    "K and V have one dtype and one shape": ("int8 K with float16 V", "V narrower than K"),
    "K/V are int8 or as the query": ("bfloat16 pages under a float16 query",),
    "pages exclude shared prefixes and left padding": ("left padding with pages", "a shared prefix with pages"),
    "int4 is not paged": ("packed int4 pages",),
    # -- chips
    "the fused operator is not on the 310P, the incremental one not on the 950": (
        "the fused attention on the 310P",
        "the incremental attention on the 950",
    ),
    "310P: 256 sequences, 65536 tokens, 32 rows per KV head, pages of head dim 128 in BSH or BSND": (
        "257 sequences on the 310P",
        "more than 65536 KV tokens on the 310P",
        "33 query heads per KV head on the 310P",
        "pages of head dim 160 on the 310P",
        "pages under BNSD on the 310P",
    ),
    # -- NZ pages
    "NZ rows are 16 on the 950": ("an NZ cache with rows of 32 on the 950",),
    "NZ: bfloat16 query, int8 pages": ("a float16 query over NZ pages", "bfloat16 NZ pages"),
    "NZ: head dim 128, pages of 128 or 512": ("NZ pages of head dim 64", "NZ pages of 256 tokens"),
    "NZ: modes 0/0 or 1/1, inner_precise 1, no offsets, no LSE, no lengths": (
        "NZ pages in mode 2",
        "inner_precise 0 over NZ pages",
        "offsets over NZ pages",
        "the LSE over NZ pages",
        "query lengths over NZ pages",
    ),
    "NZ: BSH, BSND or BNSD, at most 16 tokens, sparse mode 3 from 2": (
        "TND",
        "17 tokens",
        "17 tokens over NZ pages",
        "several tokens in sparse mode 2 over NZ pages",
        "decode with a mask over NZ pages",
    ),
    "NZ: four pairs of head counts": ("(8, 1) heads over NZ pages",),
    # -- defects that are publicly reported
    "decode with a mask or pse_shift is wrong past position 512": (
        "paged decode with a mask",
        "paged decode with pse_shift",
    ),
    "TND in sparse mode 0 without a mask is a plain average": ("TND without a mask",),
    # -- writing pages
    "rows and caches have one dtype: quantize first": ("float16 rows into int8 pages", "a V cache of another dtype"),
    "all of a page write is contiguous": (
        "strided rows",
        "strided V rows",
        "a strided cache",
        "a strided V cache",
        "strided slots",
    ),
    "slots are int32 or int64, in range and unique": (
        "int16 slots",
        "a slot past the cache",
        "slot -2",
        "a slot twice",
    ),
    "-1 is known to be skipped on A3 in mode Norm only": ("slot -1 on the A2", "slot -1 in mode PA_NZ"),
    "the cache mode is Norm or PA_NZ, by default PA_NZ": (
        "an unknown cache mode",
        "an ND cache in the default mode",
        "an NZ cache in mode Norm",
    ),
    "an empty write may fail": ("no rows",),
    "scattering int8 by index is not on the 310P": ("int8 on the 310P",),
}


def test_everything_stated_has_a_wrong_call() -> None:
    known = [case[1] for case in WRONG] + [*ALONE.values(), *ON_META.values()]
    assert len(known) == len(set(known)), "two wrong calls under one name"
    missing = {label: statement for statement, labels in STATED.items() for label in labels if label not in known}
    assert not missing


def test_message_names_rule_source_and_doubt() -> None:
    call = decode() | {"value_antiquant_scale": scales(NB, KVN, BS).half()}
    with pytest.raises(emulator.AclnnParameterError, match=r"value_antiquant_scale is torch\.float16") as caught:
        run(FIA, call)
    assert "rule value_scale_dtype" in str(caught.value)
    assert "checks only the K scale's dtype" in str(caught.value)


@pytest.mark.parametrize("argument", ["query_rope", "dequant_scale1"])
def test_unmodelled_argument_is_refused(argument: str) -> None:
    with pytest.raises(emulator.NotModelled, match=argument):
        run(FIA, decode() | {argument: floats(1)})


def test_schema_refuses_before_the_emulator() -> None:
    """Unknown names and wrong types are refused by the recorded schema, by torch's dispatcher itself."""
    with pytest.raises(RuntimeError, match="antiquant_scales"):
        run(FIA, decode() | {"antiquant_scales": floats(1)})
    with pytest.raises(RuntimeError, match="block_size"):
        run(FIA, decode() | {"block_size": 1.5})
    with pytest.raises(NotImplementedError):
        torch.ops.npu.npu_dynamic_quant(floats(2, 4))
