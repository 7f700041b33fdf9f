"""What the core's tests share: caches, oracles over whole sequences, poisoned storage and exact accounts.

Everything that reaches into private attributes of the core is in this module, in :func:`snapshot`, :func:`stores`,
:func:`shuffle_free_pages` and :func:`references`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvport import Backend, CacheFormat, CacheLayout, LayerScales, LayerSpec, PagedCache, Sequence, Step, TensorFormat
from kvport.backend import Store
from kvport.tiers import make_lanes
from kvport_conformance import inputs, oracle_codec
from kvport_conformance.oracle_attention import LSE_FLOOR, PRODUCT_ERROR, VALUE_FLOOR, observed_over_bound
from kvport_conformance.oracle_codec import CodecSpec
from kvport_cpu import reference

Array = npt.NDArray[Any]

#: The formats every statement about the core is tested for.
FORMATS = ("fp32", "int8", "int4:g16", "int4:g16:asym")

SCALE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


# --- caches ---------------------------------------------------------------------------------------------------------


def open_cache(
    layout: CacheLayout, pages: int | SequenceOf[int], backend: Backend | None = None, **more: Any
) -> PagedCache:
    """A cache on the CPU reference, its free pages in a hashed order and its storage poisoned."""
    counts = [pages] * len(make_lanes(layout)[0]) if isinstance(pages, int) else list(pages)
    cache = PagedCache(backend or reference.load("cpu"), layout, counts, **more)
    shuffle_free_pages(cache, seed=1)
    poison_unowned(cache)
    return cache


def uniform(format: str = "int8", *, pages: int = 32, layers: int = 1, kv_heads: int = 2, query_heads: int = 4,
            head_dim: int = 32, page_size: int = 16, **more: Any) -> PagedCache:  # fmt: skip
    """A cache of equal layers, small unless told otherwise."""
    options = {k: more.pop(k) for k in ("scales", "identity", "share_prefixes", "backend") if k in more}
    layout = CacheLayout.uniform(
        layers=layers, kv_heads=kv_heads, query_heads=query_heads, head_dim=head_dim, page_size=page_size,
        format=format, **more,
    )  # fmt: skip
    return open_cache(layout, pages, **options)


def hybrid_layout(format: str, *, page_size: int = 4, window: int = 6, key_dim: int = 16, value_dim: int = 32,
                  dtype: torch.dtype = torch.float32) -> CacheLayout:  # fmt: skip
    """Layers 0 and 2 with full attention, layer 1 with a window: two groups. K and V differ in dim."""
    full = LayerSpec(kv_heads=2, query_heads=4, key_dim=key_dim, value_dim=value_dim)
    local = LayerSpec(kv_heads=2, query_heads=4, key_dim=key_dim, value_dim=value_dim, window=window)
    return CacheLayout((full, local, full), CacheFormat.parse(format), page_size, dtype)


def stores(cache: PagedCache) -> list[Store]:
    return list(cache._stores)


def references(cache: PagedCache, lane: int, *, index: bool = True) -> list[int]:
    """The reference count of every page of a pool (groups come first, then near tiers), the spare first.

    ``index=False`` leaves out the prefix index's.
    """
    pool = cache._pools[lane]
    counts = [pool.references(page) for page in range(pool.pages)]
    for page in () if index else cache.prefix.pages(lane):
        counts[page] -= 1
    return counts


def shuffle_free_pages(cache: PagedCache, seed: int) -> None:
    """Hand pages out in a hashed order from now on, so that no test can lean on neighbouring ids."""
    for group, pool in enumerate(cache._pools):
        free = pool._free
        order = inputs.permutation(inputs.derive("free", seed, group), len(free))
        free[:] = [free[i] for i in order]


def snapshot(cache: PagedCache) -> dict[str, Any]:
    """Everything that a failed operation has to leave as it was: lengths, pages, ids, counts, codes and scales.

    What the prefix index alone holds is no part of it: a step that fails may have evicted pages before.
    """
    return {
        "sequences": {
            s.number: (s.length, [list(pages) for pages in s._pages], s._pin, s._ids, list(s._chain))
            for s in cache.sequences
        },
        "references": [references(cache, lane, index=False) for lane in range(len(cache._pools))],
        "available": [(g.free + g.evictable, g.held) for g in cache.stats().pools],
        "digests": {s.number: cache.export(s).digests() for s in cache.sequences},
    }


# --- poison ---------------------------------------------------------------------------------------------------------


def owned_slots(cache: PagedCache, lane: int) -> npt.NDArray[np.bool_]:
    """(pages, page size): slots that hold a committed token of a live sequence, or belong to an indexed page."""
    size = cache.layout.page_size
    owned = np.zeros((stores(cache)[lane].pages, size), np.bool_)
    for sequence in cache.sequences:
        for index, page in enumerate(sequence._pages[lane]):
            owned[page, : max(0, sequence.length - index * size)] = True
    owned[cache.prefix.pages(lane)] = True
    owned[0] = False  # the spare: a passed page of a window, or padding
    return owned


def poison_unowned(cache: PagedCache) -> None:
    """Fill every slot that holds no committed token with NaN, or with the code no encoder emits."""
    for lane, store in enumerate(stores(cache)):
        poison_slots(cache.backend, store, ~owned_slots(cache, lane))


def poison_slots(backend: Backend, store: Store, slots: npt.NDArray[np.bool_]) -> None:
    """``slots`` (pages, page size) of every layer: NaN scales, zeros and floats, codes -2**(b-1)."""
    mask = torch.from_numpy(slots)
    for name, buffer in backend.buffers(store).items():
        if buffer.dtype.is_floating_point:
            buffer[:, mask] = math.nan
        elif name.endswith(".codes"):
            buffer[:, mask] = -128 if buffer.dtype == torch.int8 else 0x88


# --- inputs ---------------------------------------------------------------------------------------------------------


def kv(layout: CacheLayout, layer: int, seed: int, tokens: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Hash K and V of one layer in the layout's dtype; token t is the same however many are asked for."""
    spec, name = layout.layers[layer], DTYPE_NAMES[layout.dtype]
    seed = inputs.derive(seed, layer)
    key = inputs.key(seed, (tokens, spec.kv_heads, spec.key_dim), dtype=name, start=start)
    value = inputs.value(seed, (tokens, spec.kv_heads, spec.value_dim), dtype=name, start=start)
    return torch.from_numpy(key).to(layout.dtype), torch.from_numpy(value).to(layout.dtype)


def queries(layout: CacheLayout, layer: int, seed: int, tokens: int, start: int = 0) -> Tensor:
    spec = layout.layers[layer]
    shape = (tokens, spec.query_heads, spec.key_dim)
    query = inputs.query(inputs.derive(seed, layer), shape, dtype=DTYPE_NAMES[layout.dtype], start=start)
    return torch.from_numpy(query).to(layout.dtype)


def run_step(
    cache: PagedCache, tokens: Mapping[Sequence, Any], seeds: Mapping[Sequence, int] | int = 0, *, attend: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """One step in which the token at position t of a sequence is token t of the stream of its seed.

    Returns, by layer, output and LSE of the packed rows.
    """
    layout = cache.layout
    begins = {s: s.length for s in tokens}
    results = []
    with cache.step(tokens) as step:
        for layer in range(len(layout.layers)):
            parts = []
            for s in tokens:
                rows = step.rows[s]
                seed = seeds if isinstance(seeds, int) else seeds[s]
                n = rows.stop - rows.start
                parts.append((*kv(layout, layer, seed, n, begins[s]), queries(layout, layer, seed, n, begins[s])))
            key, value, query = (torch.cat(part) for part in zip(*parts, strict=True))
            if layout.layers[layer].shares is None:
                step.append(layer, key, value)
            if attend:
                results.append(tuple(step.attend(layer, query)))
    return results  # type: ignore[return-value]


def fill(cache: PagedCache, seed: int, tokens: int, *, ids: SequenceOf[int] | None = None) -> Sequence:
    """A sequence of ``tokens`` tokens of a seed's stream."""
    sequence = cache.sequence()
    run_step(cache, {sequence: tokens if ids is None else list(ids)}, seed, attend=False)
    return sequence


# --- oracles --------------------------------------------------------------------------------------------------------


def spec_of(fmt: TensorFormat, page_size: int = 0) -> CodecSpec:
    """The oracle's name of a tensor format, on pages of this many tokens where that matters (sparse outliers)."""
    return CodecSpec(
        fmt.code,
        granularity=fmt.granularity,
        group=fmt.group,
        symmetric=fmt.symmetric,
        scale_dtype=SCALE_NAMES[fmt.scale_dtype],
        static=fmt.static,
        sparse=fmt.sparse,
        page=page_size if fmt.sparse else 0,
    )


def to_numpy(tensor: Tensor) -> Array:
    """numpy of the same bits; 16-bit floats as uint16, as the oracle keeps its planes."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.contiguous().view(torch.uint16).numpy()
    return tensor.numpy()


def bits(array: Array) -> Array:
    """The bit patterns, so that NaN equals NaN and -0 differs from +0."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint32) if array.dtype == np.float32 else array


def floats(tensor: Tensor) -> Array:
    """float32 values of a tensor, exact."""
    return tensor.to(torch.float32).numpy()


def decoded(fmt: TensorFormat, rows: Tensor, static: Any = None) -> Array:
    """What rows (tokens, heads, dim) read back as, by the oracle."""
    spec = spec_of(fmt)
    scale, zero = (None, None) if static is None else static
    encoded = oracle_codec.encode(spec, floats(rows), static_scale=scale, static_zero=zero)
    return oracle_codec.decode(spec, encoded.planes, rows.shape[-1], static_scale=scale, static_zero=zero)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_dtype: str = "float32",
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """(output, LSE, allowed error of output, allowed error of LSE), float64, all rows at once.

    The same numbers as ``oracle_attention.attend`` and ``attention_bound``, which go row by row (a test compares
    them); the query rows are the last rows of the sequence. Finite inputs only.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows, query_heads, _ = query.shape
    length, kv_heads, _ = key.shape
    u = PRODUCT_ERROR[query_dtype]
    q = query.astype(np.float64).transpose(1, 0, 2)
    repeat = query_heads // kv_heads
    k = np.repeat(key.astype(np.float64).transpose(1, 2, 0), repeat, axis=0)
    v = np.repeat(value.astype(np.float64).transpose(1, 0, 2), repeat, axis=0)
    position = np.arange(length - rows, length)[:, None]
    j = np.arange(length)
    seen = j <= position
    if window is not None:
        seen &= j > position - window
    scores = scale * (q @ k)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -np.inf)
    logits = scores
    if sinks is not None:
        logits = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (query_heads, rows, 1))], axis=-1)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    lse = (top + np.log(total))[..., 0]
    weights = weights[..., :length] / total
    out = weights @ v
    magnitude = np.where(seen, np.abs(q) @ np.abs(k), 0.0).max(axis=-1)
    d = u * abs(scale) * magnitude
    largest = np.stack([np.abs(v)[:, s].max(axis=1) for s in seen], axis=1)
    with np.errstate(over="ignore"):
        spread = np.expm1(2 * d)[..., None] + 2 * u
    bound = spread * (weights @ np.abs(v)) + u * np.abs(out) + VALUE_FLOOR * largest
    lse_bound = d + u + LSE_FLOOR * np.maximum(1.0, np.abs(lse))
    return tuple(a.swapaxes(0, 1) for a in (out, lse, bound, lse_bound))  # type: ignore[return-value]


def ratio(observed: Tensor, expected: Array, allowed: Array) -> float:
    """max |observed - expected| / allowed; infinite where only one side is finite."""
    return observed_over_bound(observed.to(torch.float64).numpy(), expected, allowed)


def expected_planes(layout: CacheLayout, group: int, key: Array, value: Array) -> dict[str, Array]:
    """The oracle's planes of rows (tokens, heads, dim) by the names of the page image, one row per token."""
    fmt = layout.groups[group].layout.format
    found = {}
    for side, tensor_format, rows in (("key", fmt.key, key), ("value", fmt.value, value)):
        for name, plane in oracle_codec.encode(spec_of(tensor_format), rows).planes.items():
            found[f"{side}.{name}"] = plane
    return found


def unit_scales(layout: CacheLayout, side: Any) -> dict[int, LayerScales]:
    """The same scales for K and V of every stored layer."""
    return {layer: LayerScales(side, side) for group in layout.groups for layer in group.layers}


def all_planes(cache: PagedCache, sequence: Sequence) -> Iterable[tuple[str, Tensor]]:
    for layer, planes in cache.export(sequence).layers.items():
        for name, plane in planes.items():
            yield f"{layer}.{name}", plane


def same_pages(a: tuple[PagedCache, Sequence], b: tuple[PagedCache, Sequence]) -> bool:
    """Codes and scales of two sequences are equal bit for bit."""
    return a[0].export(a[1]).digests() == b[0].export(b[1]).digests()


def append_all(step: Step, seed: int = 0, layers: Iterable[int] | None = None) -> None:
    """Append hash rows to every layer, whatever the positions."""
    layout = step._cache.layout
    for layer in range(len(layout.layers)) if layers is None else layers:
        step.append(layer, *kv(layout, layer, seed, step.tokens))
