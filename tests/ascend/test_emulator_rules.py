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


def drop(*names: str) -> Change:
    """Leave arguments out."""
    return lambda call: dict.fromkeys(names)


WRONG: list[tuple[str, Callable[[], Arguments], Change, str]] = [
    # rule, right call, what is changed, SoC
    ("operator_on_soc", decode, put(), "310P"),
    ("operator_on_soc", incremental, put(), "950"),
    ("layout_known", decode, put(input_layout="NBSD"), "A3"),
    ("query_dtype", decode, put(query=codes(B, QN, 1, D)), "A3"),
    ("query_dtype", decode, put(query=floats(B, QN, 1, D, dtype=torch.float32)), "A3"),
    ("kv_dtypes_equal", decode, put(value=floats(NB, BS, KVN * D)), "A3"),
    ("int4_not_paged", decode, lambda c: {n: c[n].int() for n in ("key", "value")}, "A3"),
    ("kv_dtype", float_pages, lambda c: {n: c[n].bfloat16() for n in ("key", "value")}, "A3"),
    ("qkv_contiguous", decode, strided("query"), "A3"),
    ("qkv_contiguous", decode, strided("key"), "A3"),
    ("qkv_contiguous", decode, strided("value"), "A3"),
    ("query_rank", decode, put(query=floats(B, 1, QN * D)), "A3"),
    ("heads_positive", decode, put(num_heads=0), "A3"),
    ("heads_match_query", decode, put(num_heads=QN // 2), "A3"),
    ("heads_divide", decode, put(num_key_value_heads=3), "A3"),
    (
        "heads_ratio",
        decode,
        put(query=floats(B, 130, 1, D), num_heads=130, num_key_value_heads=2),
        "A3",
    ),
    ("heads_limit", decode, put(query=floats(B, 258, 1, D), num_heads=258, num_key_value_heads=258), "A3"),
    ("kv_same_shape", decode, put(value=codes(NB, BS, KVN * D // 2)), "A3"),
    ("block_table_dtype", decode, half("block_table", torch.int64), "A3"),
    ("block_table_rank", decode, lambda c: {"block_table": c["block_table"].flatten()}, "A3"),
    ("cache_rank", decode, lambda c: {n: c[n].flatten(0, 1) for n in ("key", "value")}, "A3"),
    ("kv_rank", dense, lambda c: {n: c[n].flatten(2) for n in ("key", "value")}, "A3"),
    ("tnd_needs_lengths", packed, drop("actual_seq_lengths"), "A3"),
    ("tnd_needs_lengths", packed, drop("actual_seq_lengths_kv"), "A3"),
    (
        "cache_layout",
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
    ("kv_shape_fits", decode, lambda c: {n: c[n].unflatten(2, (KVN, D)) for n in ("key", "value")}, "A3"),
    ("kv_shape_fits", nz, put(), "950"),
    ("head_dim", decode, put(query=floats(B, QN, 1, 48), key=codes(NB, BS, 96), value=codes(NB, BS, 96)), "A3"),
    (
        "head_dim",
        decode,
        put(query=floats(B, QN, 1, 544), key=codes(NB, BS, 1088), value=codes(NB, BS, 1088)),
        "A3",
    ),
    ("tnd_head_dim", packed, lambda c: {n: c[n][..., :64].contiguous() for n in ("query", "key", "value")}, "A3"),
    (
        "batch_limit",
        packed,
        put(actual_seq_lengths=[0] * 4096 + [7], actual_seq_lengths_kv=[0] * 4096 + [20]),
        "A3",
    ),
    ("tnd_query_lengths", packed, put(actual_seq_lengths=[3, 4]), "A3"),
    ("tnd_query_lengths", packed, put(actual_seq_lengths=[8, 7]), "A3"),
    ("tnd_kv_lengths", packed, put(actual_seq_lengths_kv=[8, 12, 20]), "A3"),
    ("tnd_kv_lengths", packed, put(actual_seq_lengths_kv=[12, 8]), "A3"),
    ("kv_lengths_given", decode, drop("actual_seq_lengths_kv"), "A3"),
    (
        "kv_lengths_count",
        decode,
        put(
            query=floats(3, QN, 1, D),
            block_table=torch.zeros(3, COLUMNS, dtype=torch.int32),
            actual_seq_lengths_kv=[4, 5],
        ),
        "A3",
    ),
    ("lengths_not_negative", decode, put(actual_seq_lengths_kv=[40, -1]), "A3"),
    ("kv_lengths_fit", decode, put(actual_seq_lengths_kv=[40, COLUMNS * BS + 1]), "A3"),
    ("query_lengths_fit", dense, put(actual_seq_lengths=[5, 6]), "A3"),
    (
        "decode_kv_limit",
        decode,
        put(block_table=torch.zeros(B, 262144 // BS + 1, dtype=torch.int32)),
        "A3",
    ),
    ("block_table_batch", decode, put(block_table=torch.zeros(B + 1, COLUMNS, dtype=torch.int32)), "A3"),
    ("block_size_given", decode, put(block_size=0, actual_seq_lengths_kv=[0, 0]), "A3"),
    ("block_size_given", decode, put(block_size=2 * BS), "A3"),
    (
        "block_size_decode",
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
        float_prefill,
        lambda c: {n: c[n][:, :64].contiguous() for n in ("key", "value")} | {"block_size": 64},
        "A3",
    ),
    (
        "page_row_limit",
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
    ("paging_is_exclusive", decode, put(kv_padding_size=torch.tensor([1])), "A3"),
    ("paging_is_exclusive", decode, put(key_shared_prefix=codes(1, KVN, 4, D)), "A3"),
    ("inner_precise", decode, put(inner_precise=2), "A3"),
    ("inner_precise", dense, put(inner_precise=4), "A3"),
    ("sparse_mode_known", dense, put(sparse_mode=5), "A3"),
    ("mask_dtype", dense, lambda c: {"atten_mask": c["atten_mask"].half()}, "A3"),
    ("compressed_mask", dense, put(atten_mask=torch.ones(9, 9, dtype=torch.bool).triu(1)), "A3"),
    ("compressed_mask", packed, drop("atten_mask"), "A3"),
    ("full_mask", dense, put(sparse_mode=1, atten_mask=None), "A3"),
    ("full_mask", dense, put(sparse_mode=0, atten_mask=torch.zeros(5, 8, dtype=torch.bool)), "A3"),
    ("decode_takes_no_mask", decode, put(atten_mask=torch.zeros(1, 1, 1, 96, dtype=torch.bool)), "A3"),
    ("decode_takes_no_mask", decode, put(pse_shift=floats(1, QN, 1, 96)), "A3"),
    ("tnd_needs_mask", packed, put(sparse_mode=0, atten_mask=None), "A3"),
    ("scales_in_pairs", decode, drop("value_antiquant_scale"), "A3"),
    ("scales_in_pairs", decode, drop("key_antiquant_scale"), "A3"),
    ("offsets_in_pairs", decode, put(key_antiquant_offset=scales(NB, KVN, BS)), "A3"),
    (
        "offset_needs_scale",
        decode,
        put(
            key_antiquant_scale=None,
            value_antiquant_scale=None,
            key_antiquant_offset=scales(NB, KVN, BS),
            value_antiquant_offset=scales(NB, KVN, BS),
        ),
        "A3",
    ),
    ("int8_needs_scale", decode, drop("key_antiquant_scale", "value_antiquant_scale"), "A3"),
    (
        "float_takes_no_scale",
        float_pages,
        put(
            key_antiquant_scale=scales(1, KVN, 1, D, dtype=torch.float16),
            value_antiquant_scale=scales(1, KVN, 1, D, dtype=torch.float16),
        ),
        "A3",
    ),
    (
        "tnd_takes_no_int8",
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
    ("modes_known", decode, put(key_antiquant_mode=9, value_antiquant_mode=9), "A3"),
    ("modes_known", decode, put(key_antiquant_mode=6, value_antiquant_mode=6), "A3"),
    ("modes_equal", decode, put(key_antiquant_mode=4), "A3"),
    ("modes_equal", channel, put(key_antiquant_mode=1), "A3"),
    (
        "mixed_modes_need_fp16",
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
    ("key_scale_shape", channel, put(key_antiquant_scale=scales(KVN, 1, D, dtype=torch.float16)), "A3"),
    ("key_scale_shape", dense_int8, put(key_antiquant_scale=scales(1, KVN, D, dtype=torch.bfloat16)), "A3"),
    (
        "key_scale_shape",
        decode,
        put(key_antiquant_mode=1, value_antiquant_mode=1, key_antiquant_scale=scales(1, B, COLUMNS * BS - 1)),
        "A3",
    ),
    (
        "key_scale_shape",
        channel,
        put(key_antiquant_mode=2, value_antiquant_mode=2, key_antiquant_scale=scales(QN, dtype=torch.float16)),
        "A3",
    ),
    (
        "key_scale_shape",
        decode,
        put(key_antiquant_mode=3, value_antiquant_mode=3, key_antiquant_scale=scales(B, KVN, COLUMNS * BS - 1)),
        "A3",
    ),
    (
        "key_scale_shape",
        decode,
        put(key_antiquant_mode=4, value_antiquant_mode=4, key_antiquant_scale=scales(NB - 1, BS)),
        "A3",
    ),
    ("key_scale_shape", decode, put(key_antiquant_scale=scales(NB, BS, KVN)), "A3"),
    ("value_scale_shape", decode, put(value_antiquant_scale=scales(NB, BS, KVN)), "A3"),
    ("value_scale_shape", channel, put(value_antiquant_scale=scales(1, KVN, D, dtype=torch.float16)), "A3"),
    ("key_scale_dtype", channel, half("key_antiquant_scale", torch.float32), "A3"),
    ("key_scale_dtype", decode, half("key_antiquant_scale", torch.float16), "A3"),
    ("value_scale_dtype", channel, half("value_antiquant_scale", torch.float32), "A3"),
    ("value_scale_dtype", decode, half("value_antiquant_scale", torch.float16), "A3"),
    (
        "offsets_like_scales",
        channel,
        put(
            key_antiquant_offset=scales(1, KVN, 1, D),
            value_antiquant_offset=scales(1, KVN, 1, D, dtype=torch.float16),
        ),
        "A3",
    ),
    (
        "offsets_like_scales",
        channel,
        put(
            key_antiquant_offset=scales(1, KVN, 1, D, dtype=torch.float16),
            value_antiquant_offset=scales(1, KVN, D, dtype=torch.float16),
        ),
        "A3",
    ),
    ("scales_contiguous", decode, strided("value_antiquant_scale"), "A3"),
    ("fused_mode", fused, put(antiquant_mode=2), "A3"),
    ("fused_scale_shape", fused, put(antiquant_scale=scales(2, KVN, D)), "A3"),
    ("fused_scale_shape", fused, put(antiquant_scale=scales(1, KVN, D, dtype=torch.float16)), "A3"),
    ("fused_scale_shape", fused, put(antiquant_scale=scales(2, B, COLUMNS * BS - 1), antiquant_mode=1), "A3"),
    (
        "prefill_int8",
        dense_int8,
        put(
            query=floats(B, 5, QN, D),
            key_antiquant_scale=scales(KVN, D, dtype=torch.float16),
            value_antiquant_scale=scales(KVN, D, dtype=torch.float16),
        ),
        "A3",
    ),
    ("prefill_int8", dense_int8, put(query=floats(B, 17, QN, D, dtype=torch.bfloat16)), "A3"),
    (
        "nz_dtypes",
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
        nz_verify,
        put(query=floats(1, 10, 17, 128, dtype=torch.bfloat16)),
        "A3",
    ),
    (
        "nz_geometry",
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
        nz,
        put(key=codes(3, 1, 4, 256, 32), value=codes(3, 1, 4, 256, 32), block_size=256),
        "A3",
    ),
    (
        "nz_modes",
        nz,
        put(
            key_antiquant_scale=scales(1, dtype=torch.bfloat16),
            value_antiquant_scale=scales(1, dtype=torch.bfloat16),
            key_antiquant_mode=2,
            value_antiquant_mode=2,
        ),
        "A3",
    ),
    ("nz_inner_precise", nz, put(inner_precise=0), "A3"),
    (
        "nz_no_offset",
        nz,
        put(
            key_antiquant_offset=scales(1, 1, 128, dtype=torch.bfloat16),
            value_antiquant_offset=scales(1, 1, 128, dtype=torch.bfloat16),
        ),
        "A3",
    ),
    ("nz_no_lse", nz, put(softmax_lse_flag=True), "A3"),
    ("nz_no_extras", nz, put(actual_seq_lengths=[1]), "A3"),
    ("nz_mask", nz, put(sparse_mode=3, atten_mask=triangle()), "A3"),
    ("nz_mask", nz_verify, put(sparse_mode=2), "A3"),
    ("nz_heads", nz, put(query=floats(1, 8, 1, 128, dtype=torch.bfloat16), num_heads=8), "A3"),
    (
        "p310_limits",
        incremental,
        put(query=floats(B, 1, 66 * D), num_heads=66),
        "310P",
    ),
    ("block_ids_in_range", decode, put(block_table=torch.tensor([[3, 1, 0], [2, 6, NB]], dtype=torch.int32)), "A3"),
    ("scatter_on_soc", scatter, put(), "310P"),
    ("scatter_dtypes", scatter, put(key=floats(4, KVN, D), value=floats(4, KVN, D)), "A3"),
    ("scatter_contiguous", scatter, strided("key"), "A3"),
    ("scatter_contiguous", scatter, strided("key_cache"), "A3"),
    ("scatter_slot_dtype", scatter, half("slot_mapping", torch.int16), "A3"),
    ("scatter_token_shape", scatter, put(slot_mapping=torch.tensor([5, 6, 7])), "A3"),
    ("scatter_cache_mode", scatter, put(cache_mode="ND"), "A3"),
    # The schema's default is PA_NZ: an ND cache without an explicit mode is refused by shape.
    ("scatter_cache_shape", scatter, lambda c: {"cache_mode": "PA_NZ"}, "A3"),
    ("scatter_cache_shape", scatter_nz, put(cache_mode="Norm"), "A3"),
    ("scatter_cache_shape", scatter, put(value_cache=codes(NB + 1, BS, KVN, D)), "A3"),
    (
        "scatter_not_empty",
        scatter,
        put(key=codes(0, KVN, D), value=codes(0, KVN, D), slot_mapping=torch.zeros(0, dtype=torch.int64)),
        "A3",
    ),
    ("scatter_skip_slots", scatter, put(), "A2"),
    ("scatter_skip_slots", scatter_nz, put(slot_mapping=torch.tensor([5, -1, 1, 33])), "A3"),
    ("scatter_slots_in_range", scatter, put(slot_mapping=torch.tensor([5, NB * BS, -1, 33])), "A3"),
    ("scatter_slots_in_range", scatter, put(slot_mapping=torch.tensor([5, -2, -1, 33])), "A3"),
    ("scatter_slots_unique", scatter, put(slot_mapping=torch.tensor([5, 33, -1, 33])), "A3"),
    ("nd_dtypes", scatter_nd, half("updates", torch.float16), "A3"),
    ("nd_dtypes", scatter_nd, put(self=codes(50), updates=codes(3)), "310P"),
    ("nd_index_dtype", scatter_nd, half("indices", torch.int16), "A3"),
    ("nd_shapes", scatter_nd, put(updates=scales(4)), "A3"),
    ("nd_contiguous", scatter_nd, strided("updates"), "A3"),
    ("nd_indices_in_range", scatter_nd, put(indices=torch.tensor([[5], [-1], [7]])), "A3"),
]

# Rules that the operators' own dispatch, or an earlier rule, keeps from ever being reached through a call; they are
# broken by handing the rule a call directly (test_rule_alone).
ALONE = ("nz_query_tokens", "nz_layout")
# A cache of 2^31 elements does not fit a test; see test_cache_elements.
ON_META = ("cache_elements",)


@pytest.mark.parametrize(
    ("rule", "good", "change", "soc"),
    WRONG,
    ids=[f"{rule}-{good.__name__}-{number}" for number, (rule, good, _, _) in enumerate(WRONG)],
)
def test_wrong_call_is_refused(rule: str, good: Callable[[], Arguments], change: Change, soc: str) -> None:
    call = good()
    call |= change(call)
    with emulator.settings(soc=soc), pytest.raises(emulator.AclnnParameterError) as caught:
        run(CALLS[good], {name: value for name, value in call.items() if value is not None})
    assert caught.value.rule == rule, caught.value
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
