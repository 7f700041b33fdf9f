"""The rules of the operators that write pages: npu_scatter_pa_kv_cache and npu_scatter_nd_update_.

Written as the attention rules are, see :mod:`kvport_ascend.emulator.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvport_ascend.emulator.calls import NotModelled
from kvport_ascend.emulator.rules import Rule, check, rule_of, shape_of

DOC_SCATTER = "op-plugin documentation of npu_scatter_pa_kv_cache"
DOC_ND = "op-plugin documentation of npu_scatter_nd_update_"


@dataclass(frozen=True)
class ScatterCall:
    """Arguments of npu_scatter_pa_kv_cache."""

    soc: str
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    cache_mode: str | None
    compressed: bool

    @property
    def nz(self) -> bool:
        return self.cache_mode == "PA_NZ"

    @property
    def total_slots(self) -> int:
        axis = (3 if self.key_cache.dim() == 5 else 2) if self.nz else 1
        return int(self.key_cache.shape[0] * self.key_cache.shape[axis])


SCATTER_PA: list[Rule[ScatterCall]] = []
SCATTER_DTYPES = (
    torch.float16,
    torch.float32,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
)


@rule_of(SCATTER_PA, DOC_SCATTER)
def scatter_on_soc(c: ScatterCall) -> str | None:
    """npu_scatter_pa_kv_cache runs on A2, A3 and 950."""
    return f"called on {c.soc}; it runs on A2, A3 and 950." if c.soc == "310P" else None


@rule_of(SCATTER_PA, DOC_SCATTER)
def scatter_dtypes(c: ScatterCall) -> str | None:
    """Key, value and both caches have one (listed) dtype: quantize before scattering."""
    dtypes = [t.dtype for t in (c.key, c.value, c.key_cache, c.value_cache)]
    if len(set(dtypes)) != 1 or dtypes[0] not in SCATTER_DTYPES:
        return f"key, value, key_cache, value_cache are {dtypes}; one dtype for all four is needed."
    return None


@rule_of(SCATTER_PA, DOC_SCATTER)
def scatter_contiguous(c: ScatterCall) -> str | None:
    """All tensors are contiguous."""
    names = ("key", "value", "key_cache", "value_cache", "slots")
    strided = [n for n in names if not getattr(c, n).is_contiguous()]
    return f"{', '.join(strided)} not contiguous." if strided else None


@rule_of(SCATTER_PA, DOC_SCATTER)
def scatter_slot_dtype(c: ScatterCall) -> str | None:
    """slot_mapping is int32 or int64."""
    return None if c.slots.dtype in (torch.int32, torch.int64) else f"slot_mapping is {c.slots.dtype}; int32 or int64."


@rule_of(SCATTER_PA, DOC_SCATTER)
def scatter_token_shape(c: ScatterCall) -> str | None:
    """Key and value are (tokens, heads, dim) with equal tokens and heads, slot_mapping is (tokens,)."""
    if c.compressed:
        return None
    good = c.key.dim() == c.value.dim() == 3 and c.key.shape[:2] == c.value.shape[:2]
    if not good or shape_of(c.slots) != (c.key.shape[0],):
        return f"key {shape_of(c.key)}, value {shape_of(c.value)}, slot_mapping {shape_of(c.slots)}."
    return None


@rule_of(SCATTER_PA, DOC_SCATTER)
def scatter_cache_mode(c: ScatterCall) -> str | None:
    """cache_mode is None, 'Norm' or 'PA_NZ'. The default is 'PA_NZ', so it should always be passed."""
    return None if c.cache_mode in (None, "Norm", "PA_NZ") else f"cache_mode is {c.cache_mode!r}; 'Norm' or 'PA_NZ'."


@rule_of(SCATTER_PA, DOC_SCATTER)
def scatter_cache_shape(c: ScatterCall) -> str | None:
    """A 'Norm' cache is (nb, bs, heads, dim); a 'PA_NZ' cache is (nb, heads*dim/f, bs, f), f = 32 bytes of elements."""
    for cache, tokens in ((c.key_cache, c.key), (c.value_cache, c.value)):
        heads, dim, shape = tokens.shape[1], tokens.shape[2], shape_of(cache)
        if not c.nz:
            good = len(shape) == 4 and shape[2:] == (heads, dim)
            wanted = f"(blocks, block_size, {heads}, {dim})"
        else:
            last = 32 // cache.element_size()
            flat = (heads * dim // last, last)
            split = (heads, dim // last, last)
            good = (len(shape) == 4 and (shape[1], shape[3]) == flat) or (
                len(shape) == 5 and (shape[1], shape[2], shape[4]) == split
            )
            wanted = f"(blocks, {flat[0]}, block_size, {last})"
        if not good:
            return f"a cache of shape {shape} in mode {c.cache_mode!r}; {wanted} is needed."
    if c.key_cache.shape[0] != c.value_cache.shape[0]:
        return f"key_cache has {c.key_cache.shape[0]} pages, value_cache {c.value_cache.shape[0]}."
    return None


@rule_of(SCATTER_PA, DOC_SCATTER, doubt="an empty call fails in the ATB operator; here it is not known")
def scatter_not_empty(c: ScatterCall) -> str | None:
    """There is at least one token."""
    return "no tokens to scatter." if c.slots.numel() == 0 else None


@rule_of(
    SCATTER_PA,
    "vllm-ascend test_pa_kv_cache_ops.py",
    doubt="-1 is outside the documented range; it is skipped on A3 in mode 'Norm' by that test, elsewhere not known",
)
def scatter_skip_slots(c: ScatterCall) -> str | None:
    """-1 (skip) is used on the A3 in mode 'Norm' only."""
    if bool((c.slots == -1).any()) and (c.nz or c.soc != "A3"):
        return f"slot -1 on {c.soc} with cache_mode {c.cache_mode!r}; drop those rows, or use a spare page."
    return None


@rule_of(SCATTER_PA, DOC_SCATTER, kind="device")
def scatter_slots_in_range(c: ScatterCall) -> str | None:
    """Slots are below blocks * block_size."""
    if c.slots.numel() == 0:
        return None
    low, high = int(c.slots.min()), int(c.slots.max())
    if low < -1 or high >= c.total_slots:
        return f"slots from {low} to {high} with {c.total_slots} slots in the cache."
    return None


@rule_of(SCATTER_PA, DOC_SCATTER, kind="device")
def scatter_slots_unique(c: ScatterCall) -> str | None:
    """Slots are unique."""
    used = c.slots[c.slots >= 0].tolist()
    return "a slot occurs twice." if len(set(used)) != len(used) else None


def check_scatter(call: ScatterCall) -> None:
    """All rules of npu_scatter_pa_kv_cache, then what is not modelled."""
    check("npu_scatter_pa_kv_cache", SCATTER_PA, call)
    if call.compressed:
        raise NotModelled("npu_scatter_pa_kv_cache: the emulator does not model compress_lens and its relatives")


# ------------------------------------------------------------------------------------------------- scatter of scales


@dataclass(frozen=True)
class ScatterNdCall:
    """Arguments of npu_scatter_nd_update_: ``self[indices[i]] = updates[i]``."""

    soc: str
    target: torch.Tensor
    indices: torch.Tensor
    updates: torch.Tensor


SCATTER_ND: list[Rule[ScatterNdCall]] = []


@rule_of(SCATTER_ND, DOC_ND)
def nd_dtypes(c: ScatterNdCall) -> str | None:
    """Target and updates have one dtype; int8 not on the 310P."""
    if c.target.dtype != c.updates.dtype or (c.soc == "310P" and c.target.dtype == torch.int8):
        return f"target is {c.target.dtype}, updates {c.updates.dtype} on {c.soc}."
    return None


@rule_of(SCATTER_ND, DOC_ND)
def nd_index_dtype(c: ScatterNdCall) -> str | None:
    """Indices are int32 or int64."""
    return None if c.indices.dtype in (torch.int32, torch.int64) else f"indices are {c.indices.dtype}; int32 or int64."


@rule_of(SCATTER_ND, DOC_ND)
def nd_shapes(c: ScatterNdCall) -> str | None:
    """Updates have the shape indices.shape[:-1] + target.shape[indices.shape[-1]:]."""
    depth = c.indices.shape[-1] if c.indices.dim() else 0
    expected = (*c.indices.shape[:-1], *c.target.shape[depth:])
    if not 1 <= depth <= c.target.dim() or shape_of(c.updates) != expected:
        return f"target {shape_of(c.target)}, indices {shape_of(c.indices)}, updates {shape_of(c.updates)}."
    return None


@rule_of(SCATTER_ND, DOC_ND)
def nd_contiguous(c: ScatterNdCall) -> str | None:
    """All tensors are contiguous."""
    good = c.target.is_contiguous() and c.indices.is_contiguous() and c.updates.is_contiguous()
    return None if good else "target, indices or updates are not contiguous."


@rule_of(SCATTER_ND, DOC_ND, kind="device")
def nd_indices_in_range(c: ScatterNdCall) -> str | None:
    """Indices are inside the target."""
    limits = torch.tensor(c.target.shape[: c.indices.shape[-1]], device=c.indices.device)
    if bool(((c.indices < 0) | (c.indices >= limits)).any()):
        return f"indices outside a target of shape {shape_of(c.target)}."
    return None


def check_scatter_nd(call: ScatterNdCall) -> None:
    """All rules of npu_scatter_nd_update_."""
    check("npu_scatter_nd_update_", SCATTER_ND, call)
