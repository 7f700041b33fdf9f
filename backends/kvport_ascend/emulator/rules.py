"""The rules that the Ascend attention operators put on their arguments, one small function each.

A rule's docstring is the rule. It returns None, or a message with what was given and what is allowed. ``ATTENTION``
lists the rules in the order in which they are checked: a rule may rely on those before it. The rules of the scatter
operators are in :mod:`kvport_ascend.emulator.scatter_rules`. docs/ascend.md prints the same tables; a test keeps them
equal.

``kind`` says who would object on a device:

``host``
    the operator's own parameter check, or a restriction that its documentation states;
``device``
    nobody: the documentation leaves it to the caller, a device would read or write wrong data;
``defect``
    nobody: the call is legal, and publicly reported to compute wrong numbers without an error.

``doubt`` is empty where the rule was read in the operator's documentation or host source. Otherwise it says what is
not known. None of these rules was observed on a device by this project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import torch

from kvport_ascend.emulator.calls import LAYOUTS, AclnnParameterError, AttentionCall, NotModelled

Call = TypeVar("Call")

# Where a rule was read. Snapshots: op-plugin 2026-08, ops-transformer 2025-11.
DOC = "op-plugin documentation of npu_fused_infer_attention_score"
DOC_V2 = "op-plugin documentation of npu_fused_infer_attention_score_v2"
DECODE = "ops-transformer incre_flash_attention_tiling.cpp"
DECODE_CHECK = "ops-transformer incre_flash_attention_tiling_check.cpp"
PREFILL = "ops-transformer prompt_flash_attention_tiling.cpp"
V5 = "ops-transformer aclnnFusedInferAttentionScoreV5.md"

FLOATS = (torch.float16, torch.bfloat16)
INT32_MAX = 2**31 - 1
MASK_SIDE = 2048
"""Side of the one triangular mask that sparse modes 2, 3 and 4 take."""


@dataclass(frozen=True)
class Rule(Generic[Call]):
    """``check`` returns why a call breaks the rule, or None."""

    name: str
    text: str
    source: str
    kind: str
    doubt: str
    check: Callable[[Call], str | None]


def rule_of(
    table: list[Rule[Call]], source: str, kind: str = "host", doubt: str = ""
) -> Callable[[Callable[[Call], str | None]], Callable[[Call], str | None]]:
    def add(check: Callable[[Call], str | None]) -> Callable[[Call], str | None]:
        table.append(Rule(check.__name__, " ".join((check.__doc__ or "").split()), source, kind, doubt, check))
        return check

    return add


def check(operator: str, rules: Sequence[Rule[Call]], call: Call) -> None:
    """Raise :class:`AclnnParameterError` for the first rule that ``call`` breaks."""
    for rule in rules:
        message = rule.check(call)
        if message is not None:
            raise AclnnParameterError(operator, rule.name, message, rule.source, rule.doubt)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


# --------------------------------------------------------------------------------------------------------- attention

ATTENTION: list[Rule[AttentionCall]] = []


@rule_of(ATTENTION, "op-plugin documentation, product support tables")
def operator_on_soc(c: AttentionCall) -> str | None:
    """npu_fused_infer_attention_score (and _v2) runs on A2, A3, 950; npu_incre_flash_attention on A2, A3, 310P."""
    allowed = ("A2", "A3", "310P") if c.operator == "npu_incre_flash_attention" else ("A2", "A3", "950")
    return None if c.soc in allowed else f"{c.operator} was called on {c.soc}; it runs on {', '.join(allowed)}."


@rule_of(ATTENTION, DOC)
def layout_known(c: AttentionCall) -> str | None:
    """input_layout is a documented layout; the emulator models BSH, BSND, BNSD and TND."""
    return None if c.layout in LAYOUTS else f"input_layout is {c.layout!r}; allowed: {', '.join(LAYOUTS)}."


@rule_of(ATTENTION, DECODE)
def query_dtype(c: AttentionCall) -> str | None:
    """The query is float16 or bfloat16 (all-int8 query, key and value is not supported for one query token)."""
    return None if c.query.dtype in FLOATS else f"query is {c.query.dtype}; float16 or bfloat16 is allowed."


@rule_of(ATTENTION, DOC)
def kv_dtypes_equal(c: AttentionCall) -> str | None:
    """Key and value have one dtype."""
    if c.key.dtype != c.value.dtype:
        return f"key is {c.key.dtype}, value is {c.value.dtype}; they must be equal."
    return None


@rule_of(ATTENTION, DOC)
def int4_not_paged(c: AttentionCall) -> str | None:
    """int4 K/V (eight codes in one int32) cannot be combined with a block table on A2 and A3."""
    if c.key.dtype == torch.int32 and c.paged:
        return "key is int32 (packed int4) with a block_table; int4 K/V is not paged on A2 and A3."
    return None


@rule_of(ATTENTION, DOC)
def kv_dtype(c: AttentionCall) -> str | None:
    """K and V are int8, or float16/bfloat16 as the query."""
    if c.key.dtype == torch.int8 or c.key.dtype == c.query.dtype:
        return None
    return f"key is {c.key.dtype}, query is {c.query.dtype}; key and value are int8 or have the query's dtype."


@rule_of(ATTENTION, DOC)
def qkv_contiguous(c: AttentionCall) -> str | None:
    """Query, key and value are contiguous."""
    strided = [n for n, t in (("query", c.query), ("key", c.key), ("value", c.value)) if not t.is_contiguous()]
    return f"{', '.join(strided)} not contiguous; call .contiguous() first." if strided else None


@rule_of(ATTENTION, DOC)
def query_rank(c: AttentionCall) -> str | None:
    """The query has the layout's number of dimensions."""
    rank = 3 if c.layout in ("BSH", "TND") else 4
    if c.query.dim() != rank:
        return f"query has shape {shape_of(c.query)}; {c.layout} takes {rank} dimensions."
    return None


@rule_of(ATTENTION, DECODE_CHECK)
def heads_positive(c: AttentionCall) -> str | None:
    """The query head count is positive and the KV head count is not negative (0 means as many as query heads)."""
    if c.q_heads < 1 or c.kv_heads < 0:
        return f"{c.name('q_heads')} is {c.q_heads}, num_key_value_heads is {c.kv_heads}; positive counts are needed."
    return None


@rule_of(ATTENTION, DOC)
def heads_match_query(c: AttentionCall) -> str | None:
    """The query's head axis (or, in BSH, a multiple of it) agrees with the query head count."""
    axis = {"BSH": 2, "BSND": 2, "BNSD": 1, "TND": 1}[c.layout]
    size = c.query.shape[axis]
    fits = size % c.q_heads == 0 if c.layout == "BSH" else size == c.q_heads
    return None if fits else f"query of shape {shape_of(c.query)} in {c.layout} does not hold {c.q_heads} heads."


@rule_of(ATTENTION, DECODE_CHECK)
def heads_divide(c: AttentionCall) -> str | None:
    """Query heads are a multiple of KV heads."""
    kv_heads = c.kv_heads or c.q_heads
    return f"{c.q_heads} query heads are no multiple of {kv_heads} KV heads." if c.q_heads % kv_heads else None


@rule_of(ATTENTION, DECODE + ", CheckInputQKVTypeMatch")
def heads_ratio(c: AttentionCall) -> str | None:
    """At most 64 query heads per KV head."""
    ratio = c.q_heads // (c.kv_heads or c.q_heads)
    return f"{ratio} query heads per KV head; at most 64 are allowed." if ratio > 64 else None


@rule_of(ATTENTION, DOC)
def heads_limit(c: AttentionCall) -> str | None:
    """At most 256 query heads and 256 KV heads."""
    if max(c.q_heads, c.kv_heads) > 256:
        return f"{c.q_heads} query heads and {c.kv_heads} KV heads; at most 256 of each are allowed."
    return None


@rule_of(ATTENTION, DOC)
def kv_same_shape(c: AttentionCall) -> str | None:
    """Key and value have one shape (TND without pages may have head dims 192 and 128)."""
    if c.layout == "TND" and not c.paged:
        same = c.key.dim() == c.value.dim() == 3 and c.key.shape[:2] == c.value.shape[:2]
    else:
        same = c.key.shape == c.value.shape
    return None if same else f"key has shape {shape_of(c.key)}, value {shape_of(c.value)}; they must be equal."


@rule_of(ATTENTION, DOC)
def block_table_dtype(c: AttentionCall) -> str | None:
    """The block table is int32."""
    if c.block_table is not None and c.block_table.dtype != torch.int32:
        return f"block_table is {c.block_table.dtype}; int32 is allowed."
    return None


@rule_of(ATTENTION, DOC)
def block_table_rank(c: AttentionCall) -> str | None:
    """The block table has two dimensions: sequences and pages."""
    if c.block_table is not None and c.block_table.dim() != 2:
        return f"block_table has shape {shape_of(c.block_table)}; (sequences, pages) is needed."
    return None


@rule_of(ATTENTION, DECODE)
def cache_rank(c: AttentionCall) -> str | None:
    """A paged cache has 3 dimensions (nb, bs, KV_N*D), 4 (nb, KV_N, bs, D) or 5 (NZ)."""
    if c.paged and c.key.dim() not in (3, 4, 5):
        return f"key cache has shape {shape_of(c.key)}; 3, 4 or 5 dimensions are needed with a block_table."
    return None


@rule_of(ATTENTION, DOC)
def kv_rank(c: AttentionCall) -> str | None:
    """Key and value without pages have the layout's number of dimensions."""
    rank = 3 if c.layout in ("BSH", "TND") else 4
    if not c.paged and c.key.dim() != rank:
        return f"key has shape {shape_of(c.key)}; {c.layout} takes {rank} dimensions."
    return None


@rule_of(ATTENTION, DOC)
def tnd_needs_lengths(c: AttentionCall) -> str | None:
    """TND needs the lengths of the query and of the KV."""
    if c.layout == "TND" and (c.q_lengths is None or c.kv_lengths is None):
        return f"TND without {c.name('q_lengths')} or {c.name('kv_lengths')}; both are needed."
    return None


@rule_of(ATTENTION, DOC)
def cache_layout(c: AttentionCall) -> str | None:
    """Queries in BSH or BSND take only the (nb, bs, KV_N*D) page layout among the ND ones."""
    if c.paged and c.key.dim() == 4 and c.layout in ("BSH", "BSND"):
        return f"4-dimensional key cache with {c.layout}; view it as (blocks, block_size, heads * dim)."
    return None


@rule_of(ATTENTION, DECODE)
def kv_shape_fits(c: AttentionCall) -> str | None:
    """The K and V axes agree with batch, heads, head dim and block size; nothing is inferred from what is left."""
    g, shape = c.geometry, shape_of(c.key)
    if g.form == "NZ":
        last = nz_fraction(c)
        expected: tuple[int, ...] = (shape[0], g.kv_heads, g.dim // last, shape[3], last)
    elif g.form == "BnBsH":
        expected = (shape[0], shape[1], g.kv_heads * g.dim)
    elif g.form == "BnNBsD":
        expected = (shape[0], g.kv_heads, shape[2], g.dim)
    elif c.layout == "TND":
        expected = (shape[0], g.kv_heads, g.dim)
    else:
        expected = {
            "BSH": (g.batch, g.kv_len, g.kv_heads * g.dim),
            "BSND": (g.batch, g.kv_len, g.kv_heads, g.dim),
            "BNSD": (g.batch, g.kv_heads, g.kv_len, g.dim),
        }[c.layout]
    if shape != expected:
        return f"key has shape {shape}; {g.form} K/V of {g.kv_heads} heads of {g.dim} needs {expected}."
    return None


def nz_fraction(c: AttentionCall) -> int:
    """Last axis of the NZ cache: 32 bytes of int8 on A2/A3, 16 on the 950 (V5 documentation)."""
    return 16 if c.soc == "950" else 32


@rule_of(ATTENTION, DOC)
def head_dim(c: AttentionCall) -> str | None:
    """The head dim is at most 512, and a multiple of 16 for float, of 32 for int8 K/V."""
    dim, unit = c.geometry.dim, 32 if c.quantized else 16
    if dim > 512 or dim % unit or dim == 0:
        return f"head dim {dim}; multiples of {unit} up to 512 are allowed for {c.key.dtype} K/V."
    return None


@rule_of(ATTENTION, DOC)
def tnd_head_dim(c: AttentionCall) -> str | None:
    """TND on A2/A3 takes head dim 128, or 192 with value dim 128 or 192 (512 only with rope)."""
    g = c.geometry
    if c.layout != "TND" or c.soc == "950" or (g.dim, g.value_dim) in ((128, 128), (192, 128), (192, 192)):
        return None
    return f"head dims {g.dim} and {g.value_dim} in TND; 128/128, 192/128 and 192/192 are allowed. Use BSND or BNSD."


@rule_of(ATTENTION, DOC)
def batch_limit(c: AttentionCall) -> str | None:
    """At most 65536 sequences, 4096 in TND, 256 on the 310P."""
    limit = 256 if c.soc == "310P" else 4096 if c.layout == "TND" else 65536
    return f"{c.geometry.batch} sequences; at most {limit} are allowed." if c.geometry.batch > limit else None


@rule_of(ATTENTION, DOC)
def tnd_query_lengths(c: AttentionCall) -> str | None:
    """In TND the query lengths are cumulative, never decrease, and end at the number of packed tokens."""
    if c.layout != "TND":
        return None
    ends = list(c.q_lengths or ())
    if not ends or ends != sorted(ends) or ends[0] < 0 or ends[-1] != c.query.shape[0]:
        return f"{c.name('q_lengths')} is {ends}; a rising cumulative list that ends at {c.query.shape[0]} is needed."
    return None


@rule_of(ATTENTION, DOC)
def tnd_kv_lengths(c: AttentionCall) -> str | None:
    """In TND without pages the KV lengths are cumulative too, one per sequence, and end at the packed KV tokens."""
    if c.layout != "TND" or c.paged:
        return None
    ends = list(c.kv_lengths or ())
    if len(ends) != c.geometry.batch or ends != sorted(ends) or min(ends) < 0 or ends[-1] > c.key.shape[0]:
        return (
            f"{c.name('kv_lengths')} is {ends}; {c.geometry.batch} rising cumulative lengths up to {c.key.shape[0]} "
            "are needed."
        )
    return None


@rule_of(ATTENTION, DOC)
def kv_lengths_given(c: AttentionCall) -> str | None:
    """With a block table the KV lengths are mandatory."""
    if c.paged and c.kv_lengths is None:
        return f"block_table without {c.name('kv_lengths')}; it is mandatory with pages."
    return None


@rule_of(ATTENTION, DOC)
def kv_lengths_count(c: AttentionCall) -> str | None:
    """There is one KV length for all sequences, or at least one for each."""
    if c.kv_lengths is None or (c.layout == "TND" and not c.paged):
        return None
    count = len(c.kv_lengths)
    if count != 1 and count < c.geometry.batch:
        return f"{c.name('kv_lengths')} has {count} entries for {c.geometry.batch} sequences; one, or one each."
    return None


@rule_of(ATTENTION, DOC)
def lengths_not_negative(c: AttentionCall) -> str | None:
    """Lengths are not negative."""
    bad = [length for length in (*(c.kv_lengths or ()), *(c.q_lengths or ())) if length < 0]
    return f"negative lengths {bad}." if bad else None


@rule_of(ATTENTION, DOC)
def kv_lengths_fit(c: AttentionCall) -> str | None:
    """No KV length exceeds the pages of its block table row, or the K/V's own sequence axis."""
    if c.kv_lengths is None or (c.layout == "TND" and not c.paged):
        return None
    longest = max(c.lengths_kv(), default=0)
    capacity = c.block_table.shape[1] * c.block_size if c.block_table is not None else c.geometry.kv_len
    return f"a KV length of {longest} exceeds the capacity of {capacity} tokens." if longest > capacity else None


@rule_of(ATTENTION, DOC)
def query_lengths_fit(c: AttentionCall) -> str | None:
    """Query lengths (outside TND and the decode kernel) are one or one each, and at most Q_S."""
    if c.q_lengths is None or c.layout == "TND" or c.decode:
        return None
    count = len(c.q_lengths)
    if (count != 1 and count < c.geometry.batch) or max(c.q_lengths) > c.geometry.q_len:
        return f"{c.name('q_lengths')} is {list(c.q_lengths)} for {c.geometry.batch} sequences of {c.geometry.q_len}."
    return None


@rule_of(ATTENTION, DOC)
def decode_kv_limit(c: AttentionCall) -> str | None:
    """The decode kernel takes at most 262144 KV tokens a sequence (65536 on the 310P)."""
    limit = 65536 if c.soc == "310P" else 262144
    capacity = c.block_table.shape[1] * c.block_size if c.block_table is not None else c.geometry.kv_len
    return f"{capacity} KV tokens; at most {limit} are allowed." if c.decode and capacity > limit else None


@rule_of(ATTENTION, DOC)
def block_table_batch(c: AttentionCall) -> str | None:
    """The block table has one row per sequence."""
    if c.block_table is not None and c.block_table.shape[0] != c.geometry.batch:
        return f"block_table has {c.block_table.shape[0]} rows for {c.geometry.batch} sequences."
    return None


@rule_of(ATTENTION, DECODE + ", CheckPABlockSize")
def block_size_given(c: AttentionCall) -> str | None:
    """With a block table the block size is not 0 and equals the cache's own axis."""
    if not c.paged:
        return None
    axis = {"BnBsH": 1, "BnNBsD": 2, "NZ": 3}[c.geometry.form]
    if c.block_size == 0 or c.block_size != c.key.shape[axis]:
        return (
            f"block_size is {c.block_size}, the key cache of shape {shape_of(c.key)} has pages of {c.key.shape[axis]}."
        )
    return None


@rule_of(ATTENTION, DECODE + ", CheckPABlockSize")
def block_size_decode(c: AttentionCall) -> str | None:
    """For one query token the block size is at most 512, and a multiple of 32 (int8) or 16 (float)."""
    unit = 32 if c.quantized else 16
    if c.paged and c.decode and (c.block_size > 512 or c.block_size % unit):
        return f"block_size {c.block_size}; multiples of {unit} up to 512 are allowed for {c.key.dtype} K/V."
    return None


@rule_of(ATTENTION, DOC, doubt="the host source has 1024 as its own upper limit")
def block_size_prefill(c: AttentionCall) -> str | None:
    """For several query tokens the block size is 128, 256, 384 or 512 (TND: a multiple of 16 up to 1024)."""
    if not c.paged or c.decode:
        return None
    unit, limit = (16, 1024) if c.layout == "TND" else (128, 512)
    if c.block_size % unit or c.block_size > limit:
        return f"block_size {c.block_size}; multiples of {unit} up to {limit} are allowed in {c.layout} prefill."
    return None


@rule_of(ATTENTION, DECODE)
def page_row_limit(c: AttentionCall) -> str | None:
    """In the (nb, bs, KV_N*D) layout KV_N*D is at most 65535."""
    if c.paged and c.geometry.form == "BnBsH" and c.key.shape[2] > 65535:
        return f"KV heads * head dim is {c.key.shape[2]}; at most 65535 are allowed. Use the 4-dimensional layout."
    return None


@rule_of(ATTENTION, DOC_V2)
def cache_elements(c: AttentionCall) -> str | None:
    """With a block table the whole K (and V) cache has fewer than 2^31 elements."""
    count = prod(shape_of(c.key))
    return f"the key cache has {count} elements; at most {INT32_MAX} are allowed." if count > INT32_MAX else None


@rule_of(ATTENTION, DOC)
def paging_is_exclusive(c: AttentionCall) -> str | None:
    """A block table excludes shared prefixes and left padding."""
    if c.paged and c.exclusive_with_paging:
        return f"block_table together with {', '.join(c.exclusive_with_paging)}."
    return None


@rule_of(ATTENTION, DECODE_CHECK)
def inner_precise(c: AttentionCall) -> str | None:
    """inner_precise is 0 or 1 in the decode kernel, 0 .. 3 in the prefill kernel."""
    allowed = (0, 1) if c.decode else (0, 1, 2, 3)
    return None if c.inner_precise in allowed else f"inner_precise is {c.inner_precise}; allowed: {allowed}."


@rule_of(ATTENTION, DOC)
def sparse_mode_known(c: AttentionCall) -> str | None:
    """sparse_mode is 0 .. 4."""
    return None if 0 <= c.sparse_mode <= 4 else f"sparse_mode is {c.sparse_mode}; 0 .. 4 are allowed."


@rule_of(ATTENTION, DOC)
def mask_dtype(c: AttentionCall) -> str | None:
    """The mask is bool, int8 or uint8 and contiguous."""
    if c.mask is None or (c.mask.dtype in (torch.bool, torch.int8, torch.uint8) and c.mask.is_contiguous()):
        return None
    return f"atten_mask is {c.mask.dtype}, contiguous: {c.mask.is_contiguous()}; contiguous bool, int8 or uint8."


@rule_of(ATTENTION, DOC)
def compressed_mask(c: AttentionCall) -> str | None:
    """Sparse modes 2, 3 and 4 take the 2048 x 2048 triangular mask, and nothing else."""
    if c.sparse_mode not in (2, 3, 4):
        return None
    side = MASK_SIDE
    shapes = ((side, side), (1, side, side), (1, 1, side, side))
    if c.mask is None or shape_of(c.mask) not in shapes:
        given = None if c.mask is None else shape_of(c.mask)
        return f"sparse_mode {c.sparse_mode} with a mask of shape {given}; ({side}, {side}) is needed."
    return None


@rule_of(ATTENTION, DOC)
def full_mask(c: AttentionCall) -> str | None:
    """Sparse mode 1 needs a mask; in modes 0 and 1 a mask covers Q_S x KV_S."""
    if c.sparse_mode not in (0, 1) or (c.mask is None and c.sparse_mode == 0):
        return None
    if c.mask is None:
        return "sparse_mode 1 without atten_mask."
    g = c.geometry
    columns = c.block_table.shape[1] * c.block_size if c.block_table is not None else g.kv_len
    shape = shape_of(c.mask)
    rows_fit = shape[-2] >= g.q_len or (g.q_len == 1 and len(shape) == 2)
    if len(shape) not in (2, 3, 4) or not rows_fit or shape[-1] < columns:
        return f"atten_mask has shape {shape} for {g.q_len} query and {columns} KV tokens."
    return None


@rule_of(ATTENTION, "vllm-ascend issue 15503", kind="defect", doubt="reported upstream, not reproduced here")
def decode_takes_no_mask(c: AttentionCall) -> str | None:
    """Paged decode with a mask in sparse mode 0, or with pse_shift, is wrong past KV position 512; use KV lengths."""
    if c.paged and c.decode and ((c.mask is not None and c.sparse_mode == 0) or c.pse is not None):
        return f"paged decode with atten_mask or pse_shift; pass {c.name('kv_lengths')} and no mask."
    return None


@rule_of(ATTENTION, "vllm-ascend issue 13699", kind="defect", doubt="reported upstream, not reproduced here")
def tnd_needs_mask(c: AttentionCall) -> str | None:
    """TND in sparse mode 0 without a mask returns a plain average; use sparse mode 3 and the triangular mask."""
    if c.layout == "TND" and c.sparse_mode == 0 and c.mask is None:
        return "TND with sparse_mode 0 and no atten_mask."
    return None


# -- scales of int8 K/V


def _given(*tensors: torch.Tensor | None) -> list[bool]:
    return [tensor is not None for tensor in tensors]


def _separate(c: AttentionCall) -> bool:
    """Whether the separate scales count: where both forms are given, the separate one wins."""
    return c.key_scale is not None or c.value_scale is not None


@rule_of(ATTENTION, DECODE_CHECK)
def scales_in_pairs(c: AttentionCall) -> str | None:
    """The K and the V scale are both given or both absent."""
    if len(set(_given(c.key_scale, c.value_scale))) == 2:
        return f"only one of {c.name('key_scale')} and {c.name('value_scale')} is given."
    return None


@rule_of(ATTENTION, DECODE_CHECK)
def offsets_in_pairs(c: AttentionCall) -> str | None:
    """The K and the V offset are both given or both absent."""
    if len(set(_given(c.key_offset, c.value_offset))) == 2:
        return f"only one of {c.name('key_offset')} and {c.name('value_offset')} is given."
    return None


@rule_of(ATTENTION, DECODE_CHECK)
def offset_needs_scale(c: AttentionCall) -> str | None:
    """An offset needs a scale."""
    if (c.key_offset is not None and not _separate(c)) or (c.fused_offset is not None and c.fused_scale is None):
        return "an antiquant offset without its scale."
    return None


@rule_of(ATTENTION, DECODE_CHECK + ", CheckAntiQuantParam")
def int8_needs_scale(c: AttentionCall) -> str | None:
    """int8 K/V need scales."""
    if c.quantized and not _separate(c) and c.fused_scale is None:
        return "int8 key and value without dequantization scales."
    return None


@rule_of(ATTENTION, DECODE_CHECK + ", CheckAntiQuantParam")
def float_takes_no_scale(c: AttentionCall) -> str | None:
    """K/V of the query's dtype take no scales."""
    if not c.quantized and (_separate(c) or c.fused_scale is not None):
        return f"dequantization scales for key and value of {c.key.dtype}, the query's dtype."
    return None


@rule_of(ATTENTION, PREFILL)
def tnd_takes_no_int8(c: AttentionCall) -> str | None:
    """TND takes no int8 K/V."""
    return "int8 key and value in TND; gather and dequantize them first." if c.quantized and c.layout == "TND" else None


@rule_of(
    ATTENTION, DOC, doubt="the host source also lets a float16 per-channel path through, against the documentation"
)
def prefill_takes_no_int8_pages(c: AttentionCall) -> str | None:
    """Several query tokens cannot attend int8 pages (except the NZ form with at most 16 of them)."""
    if c.quantized and c.paged and not c.decode:
        return f"{c.geometry.q_len} query tokens over int8 pages; gather and dequantize them first."
    return None


@rule_of(ATTENTION, DECODE + ", CheckKVAntiQuantMode")
def modes_known(c: AttentionCall) -> str | None:
    """Antiquant modes are 0 .. 5 (6 and 7 exist on the 950 for fp4 and fp8 and are not modelled)."""
    bad = [mode for mode in (c.key_mode, c.value_mode) if not 0 <= mode <= 5]
    return f"antiquant modes {bad}; 0 .. 5 are allowed." if bad else None


@rule_of(ATTENTION, DECODE + ", CheckKVAntiQuantMode")
def modes_equal(c: AttentionCall) -> str | None:
    """The K mode equals the V mode, except K 0 (per channel) with V 1 (per token)."""
    if c.key_mode != c.value_mode and (c.key_mode, c.value_mode) != (0, 1):
        return f"{c.name('key_mode')} {c.key_mode} with {c.name('value_mode')} {c.value_mode}."
    return None


@rule_of(ATTENTION, DOC)
def mixed_modes_need_fp16(c: AttentionCall) -> str | None:
    """K per channel with V per token (0, 1) on int8 needs a float16 query."""
    if c.quantized and (c.key_mode, c.value_mode) == (0, 1) and c.query.dtype != torch.float16:
        return f"antiquant modes (0, 1) with a {c.query.dtype} query; float16 is needed."
    return None


@rule_of(ATTENTION, DOC)
def paged_scales_need_pages(c: AttentionCall) -> str | None:
    """Modes 4 and 5 keep their scales in pages and need a block table."""
    if _separate(c) and c.key_mode in (4, 5) and not c.paged:
        return f"antiquant mode {c.key_mode} without block_table."
    return None


def _per_channel_shapes(c: AttentionCall) -> list[tuple[int, ...]]:
    g = c.geometry
    n, d = g.kv_heads, g.dim
    if g.form == "NZ":
        return [{"BNSD": (n, 1, d), "BSND": (n, d), "BSH": (n * d,)}[c.layout]]
    if not c.decode:
        return [(n, 1, d), (n, d), (n * d,)]
    return [(1, n, 1, d), (1, 1, n, d), (1, n, d), (1, n * d)]


def _scale_shape_ok(c: AttentionCall, scale: torch.Tensor, mode: int) -> str | None:
    """None, or the shapes that this mode allows."""
    g, shape = c.geometry, shape_of(scale)
    mixed = (c.key_mode, c.value_mode) == (0, 1)
    table = c.block_table
    capacity = table.shape[1] * c.block_size if table is not None else g.kv_len
    if mode == 0:
        allowed = _per_channel_shapes(c)
        if g.form != "NZ" and c.decode and not mixed:
            allowed.append((1,))  # a 1-D scale means one for the whole tensor
        return None if shape in allowed else " or ".join(map(str, allowed))
    if mode == 1:
        if g.form == "NZ" or not c.decode:
            return None if shape == (g.batch, capacity) else str((g.batch, capacity))
        leading = ((1, g.batch),) if mixed else ((1, g.batch), (g.batch,))
        fits = (
            shape[:-1] in leading
            and len(shape) in (2, 3)
            and (shape[-1] >= capacity if c.paged else shape[-1] == capacity)
        )
        forms = " or ".join(f"({', '.join(map(str, axes))}, S)" for axes in leading)
        return None if fits else f"{forms} with S of at least {capacity}"
    if mode == 2:
        return None if shape == (g.kv_heads,) else str((g.kv_heads,))
    if mode == 3:
        fits = len(shape) == 3 and shape[:2] == (g.batch, g.kv_heads) and shape[2] >= capacity
        return None if fits else f"({g.batch}, {g.kv_heads}, S) with S of at least {capacity}"
    expected = (g.blocks, c.block_size) if mode == 4 else (g.blocks, g.kv_heads, c.block_size)
    return None if shape == expected else str(expected)


@rule_of(ATTENTION, DECODE_CHECK + ", CheckKVAntiQuantPerChannel/PerHead; " + DECODE + ", CheckKVAntiQuantPerToken")
def key_scale_shape(c: AttentionCall) -> str | None:
    """The K scale has a shape of its mode; in modes (0, 1) it is per channel, not one for the whole tensor."""
    if c.key_scale is None:
        return None
    allowed = _scale_shape_ok(c, c.key_scale, c.key_mode)
    if allowed:
        return f"{c.name('key_scale')} has shape {shape_of(c.key_scale)}; mode {c.key_mode} needs {allowed}."
    return None


@rule_of(ATTENTION, DECODE_CHECK + ", CheckKVAntiQuantPerChannel/PerHead; " + DECODE + ", CheckKVAntiQuantPerToken")
def value_scale_shape(c: AttentionCall) -> str | None:
    """The V scale has a shape of its mode, and the K scale's; in modes (0, 1) it is (1, B, S)."""
    if c.value_scale is None or c.key_scale is None:
        return None
    allowed = _scale_shape_ok(c, c.value_scale, c.value_mode)
    if allowed:
        return f"{c.name('value_scale')} has shape {shape_of(c.value_scale)}; mode {c.value_mode} needs {allowed}."
    if c.key_mode == c.value_mode and c.key_scale.shape != c.value_scale.shape:
        return f"K and V scales have shapes {shape_of(c.key_scale)} and {shape_of(c.value_scale)}; they must be equal."
    return None


def _scale_dtype(c: AttentionCall, mode: int) -> torch.dtype:
    """Per channel, tensor and head: the query's dtype. Per token: float32."""
    return c.query.dtype if mode in (0, 2) else torch.float32


@rule_of(ATTENTION, DECODE_CHECK)
def key_scale_dtype(c: AttentionCall) -> str | None:
    """The K scale has the query's dtype in modes 0 and 2, float32 in modes 1, 3, 4 and 5."""
    if c.key_scale is not None and c.key_scale.dtype != _scale_dtype(c, c.key_mode):
        return f"{c.name('key_scale')} is {c.key_scale.dtype}; mode {c.key_mode} needs {_scale_dtype(c, c.key_mode)}."
    return None


@rule_of(
    ATTENTION,
    DOC,
    doubt="the host source checks only the K scale's dtype, so a device would misread the V scale without an error",
)
def value_scale_dtype(c: AttentionCall) -> str | None:
    """The V scale has the query's dtype in modes 0 and 2, float32 in modes 1, 3, 4 and 5."""
    wanted = _scale_dtype(c, c.value_mode)
    if c.value_scale is not None and c.value_scale.dtype != wanted:
        return f"{c.name('value_scale')} is {c.value_scale.dtype}; mode {c.value_mode} needs {wanted}."
    return None


@rule_of(ATTENTION, DECODE_CHECK)
def offsets_like_scales(c: AttentionCall) -> str | None:
    """An offset has its scale's dtype and shape."""
    pairs = ((c.key_offset, c.key_scale), (c.value_offset, c.value_scale), (c.fused_offset, c.fused_scale))
    for offset, scale in pairs:
        if offset is not None and scale is not None and (offset.dtype, offset.shape) != (scale.dtype, scale.shape):
            given = f"{offset.dtype} {shape_of(offset)}"
            return f"an antiquant offset is {given}, its scale {scale.dtype} {shape_of(scale)}; they must be equal."
    return None


@rule_of(ATTENTION, DECODE_CHECK)
def scales_contiguous(c: AttentionCall) -> str | None:
    """Scales and offsets are contiguous."""
    tensors = (c.key_scale, c.value_scale, c.key_offset, c.value_offset, c.fused_scale, c.fused_offset)
    if any(tensor is not None and not tensor.is_contiguous() for tensor in tensors):
        return "an antiquant scale or offset is not contiguous."
    return None


@rule_of(ATTENTION, DOC)
def fused_mode(c: AttentionCall) -> str | None:
    """The fused form's antiquant_mode is 0 or 1, and 0 for several query tokens."""
    if c.fused_scale is None or _separate(c):
        return None
    allowed = (0, 1) if c.decode else (0,)
    return None if c.fused_mode in allowed else f"antiquant_mode is {c.fused_mode}; allowed: {allowed}."


@rule_of(ATTENTION, DOC)
def fused_scale_shape(c: AttentionCall) -> str | None:
    """A fused scale is (2,), (2, KV_N, 1, D), (2, KV_N, D) or (2, KV_N*D) in mode 0, (2, B, S) float32 in mode 1."""
    if c.fused_scale is None or _separate(c):
        return None
    g, shape, dtype = c.geometry, shape_of(c.fused_scale), c.fused_scale.dtype
    n, d = g.kv_heads, g.dim
    if c.fused_mode == 0:
        allowed = [(2,), (2, n, 1, d), (2, n, d), (2, n * d)]
        fits, wanted = shape in allowed, c.query.dtype
    else:
        capacity = c.block_table.shape[1] * c.block_size if c.block_table is not None else g.kv_len
        allowed = [(2, g.batch, capacity)]
        fits, wanted = len(shape) == 3 and shape[:2] == (2, g.batch) and shape[2] >= capacity, torch.float32
    if not fits or dtype != wanted:
        return f"antiquant_scale is {dtype} {shape}; mode {c.fused_mode} needs {wanted} {allowed}."
    return None


@rule_of(ATTENTION, DOC_V2 + "; " + PREFILL)
def prefill_int8(c: AttentionCall) -> str | None:
    """Several query tokens over dense int8 K/V: at most 16, bfloat16, separate scales, modes 0/0 or 1/1, no padding."""
    if not c.quantized or c.decode or not _separate(c):
        return None
    if padding := [name for name in c.exclusive_with_paging if name.endswith("padding_size")]:
        return f"int8 key and value of several query tokens with left padding ({', '.join(padding)})."
    if c.geometry.q_len > 16 or c.query.dtype != torch.bfloat16 or (c.key_mode, c.value_mode) not in ((0, 0), (1, 1)):
        return (
            f"{c.geometry.q_len} {c.query.dtype} query tokens with antiquant modes {(c.key_mode, c.value_mode)}; "
            "at most 16 bfloat16 ones with modes (0, 0) or (1, 1) are allowed."
        )
    return None


# -- the NZ cache (5 dimensions)


def _nz(c: AttentionCall) -> bool:
    return c.paged and c.geometry.form == "NZ"


@rule_of(ATTENTION, DOC)
def nz_dtypes(c: AttentionCall) -> str | None:
    """The NZ cache takes a bfloat16 query and int8 K/V (float NZ pages exist with rope only)."""
    if _nz(c) and not (c.query.dtype == torch.bfloat16 and c.quantized):
        return f"NZ cache with a {c.query.dtype} query and {c.key.dtype} K/V; bfloat16 and int8 are needed."
    return None


@rule_of(ATTENTION, DOC)
def nz_query_tokens(c: AttentionCall) -> str | None:
    """The NZ cache takes 1 .. 16 query tokens."""
    if _nz(c) and c.geometry.q_len > 16:
        return f"NZ cache with {c.geometry.q_len} query tokens; 1 .. 16 are allowed."
    return None


@rule_of(ATTENTION, DOC)
def nz_geometry(c: AttentionCall) -> str | None:
    """The NZ cache takes head dim 128 and block size 128 or 512."""
    if _nz(c) and (c.geometry.dim != 128 or c.block_size not in (128, 512)):
        return f"NZ cache with head dim {c.geometry.dim} and block_size {c.block_size}; 128, and 128 or 512."
    return None


@rule_of(ATTENTION, DOC)
def nz_modes(c: AttentionCall) -> str | None:
    """The NZ cache takes separate scales in modes 0/0 or 1/1."""
    if _nz(c) and (not _separate(c) or (c.key_mode, c.value_mode) not in ((0, 0), (1, 1))):
        return f"NZ cache with antiquant modes {(c.key_mode, c.value_mode)}; separate scales, (0, 0) or (1, 1)."
    return None


@rule_of(ATTENTION, DOC)
def nz_layout(c: AttentionCall) -> str | None:
    """The NZ cache takes queries in BSH, BSND or BNSD."""
    return f"NZ cache with {c.layout}." if _nz(c) and c.layout not in ("BSH", "BSND", "BNSD") else None


@rule_of(ATTENTION, DOC)
def nz_inner_precise(c: AttentionCall) -> str | None:
    """The NZ cache takes inner_precise 1 only."""
    return f"NZ cache with inner_precise {c.inner_precise}; 1 is needed." if _nz(c) and c.inner_precise != 1 else None


@rule_of(ATTENTION, DOC)
def nz_no_offset(c: AttentionCall) -> str | None:
    """The NZ cache takes no offsets."""
    return "NZ cache with antiquant offsets." if _nz(c) and c.key_offset is not None else None


@rule_of(ATTENTION, "ops-transformer, CheckGqa*", doubt="whether the 950 allows the LSE here is not known")
def nz_no_lse(c: AttentionCall) -> str | None:
    """The NZ cache gives no LSE."""
    return "NZ cache with the LSE asked for." if _nz(c) and c.lse else None


@rule_of(ATTENTION, DOC)
def nz_no_extras(c: AttentionCall) -> str | None:
    """The NZ cache takes no pse_shift and no query lengths."""
    if _nz(c) and (c.pse is not None or c.q_lengths is not None):
        return f"NZ cache with pse_shift or {c.name('q_lengths')}."
    return None


@rule_of(ATTENTION, DOC)
def nz_mask(c: AttentionCall) -> str | None:
    """The NZ cache takes sparse mode 0 without a mask for one query token, sparse mode 3 for 2 .. 16."""
    if not _nz(c):
        return None
    good = (c.sparse_mode == 0 and c.mask is None) if c.geometry.q_len == 1 else c.sparse_mode == 3
    if not good:
        return f"NZ cache, {c.geometry.q_len} query tokens, sparse_mode {c.sparse_mode}, mask: {c.mask is not None}."
    return None


@rule_of(ATTENTION, DOC, doubt="vllm-ascend pull request 9721 reports (16, 2) at work, outside this list")
def nz_heads(c: AttentionCall) -> str | None:
    """The NZ cache takes (query, KV) heads (10, 1), (64, 8), (80, 8) and (128, 16)."""
    heads = (c.geometry.q_heads, c.geometry.kv_heads)
    if _nz(c) and heads not in ((10, 1), (64, 8), (80, 8), (128, 16)):
        return f"NZ cache with {heads} heads; (10, 1), (64, 8), (80, 8) and (128, 16) are allowed."
    return None


@rule_of(ATTENTION, "op-plugin documentation of npu_incre_flash_attention, 310P")
def p310_limits(c: AttentionCall) -> str | None:
    """On the 310P: at most 32 query rows per KV head, and with pages head dim 128 at most in BSH or BSND."""
    if c.soc != "310P":
        return None
    g = c.geometry
    if g.group * g.q_len > 32 and g.group > 1:
        return f"{g.group} query heads per KV head times {g.q_len} tokens on the 310P; at most 32."
    if c.paged and (g.dim > 128 or c.layout not in ("BSH", "BSND")):
        return f"pages with head dim {g.dim} in {c.layout} on the 310P; at most 128, in BSH or BSND."
    return None


@rule_of(ATTENTION, DOC, kind="device")
def block_ids_in_range(c: AttentionCall) -> str | None:
    """The block ids that the KV lengths reach are pages of the cache. Nobody checks them on a device."""
    if c.block_table is None:
        return None
    for row, length in zip(c.block_table.tolist(), c.lengths_kv(), strict=False):
        used = row[: -(-length // c.block_size)]
        if any(not 0 <= block < c.geometry.blocks for block in used):
            return f"block ids {used} with a cache of {c.geometry.blocks} pages."
    return None


def check_attention(call: AttentionCall) -> None:
    """All rules of an attention call, then what the emulator does not model."""
    check(call.operator, ATTENTION, call)
    unmodelled = [*call.unmodelled]
    if call.sparse_mode == 4:
        unmodelled.append("sparse_mode 4 (band)")
    if call.pse is not None:
        unmodelled.append("pse_shift")
    if call.key.dtype == torch.int32:
        unmodelled.append("int4 K/V")
    if call.exclusive_with_paging:
        unmodelled.extend(call.exclusive_with_paging)
    if unmodelled:
        raise NotModelled(f"{call.operator}: the emulator does not model {', '.join(unmodelled)}")
