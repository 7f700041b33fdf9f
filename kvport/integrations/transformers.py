"""``cache=`` for Hugging Face transformers: a cache whose history lives in kvport's quantized pages.

::

    from kvport.integrations.transformers import KVPortCache

    cache = KVPortCache(model.config, "cpu", format="int8")
    model.generate(**inputs, cache=cache)

This is the dequantizing seam: a layer's new K and V are appended to pages, and the model's own attention gets the
whole history back, decoded. It runs under every attention implementation, and stores little; it does not save the
time of reading dense K and V. Every query, of the first forward too, sees what the pages hold.

One model forward is one kvport step: begun by the first layer that updates, committed by the last. A forward that
stops in between (an exception, an interrupt, a model that skips layers) leaves an open step; the next use rolls it
back and raises :class:`StepError`, and the cache then holds what it held before that forward.

Every row of a batch is one kvport sequence. Left padding is stored like any other token, as in transformers' own
cache; the attention mask hides it. Beams are forks that share pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

import kvport
from kvport.arguments import whole_number
from kvport.cache import PagedCache
from kvport.errors import InvalidArgument, KVPortError, MissingDependency, OutOfPages, StepError, Unsupported
from kvport.formats import DTYPES, CacheFormat
from kvport.layout import DEFAULT_PAGE_SIZE, CacheLayout, LayerSpec
from kvport.scales import LayerScales
from kvport.sequences import Sequence
from kvport.step import Step

#: The oldest version that the tests ran with. Before, caches were asked other questions (crop, masks, layer types).
_OLDEST = (5, 24)
try:
    from transformers import __version__ as _version

    if tuple(int(part) for part in _version.split(".")[:2]) < _OLDEST:
        raise ImportError(f"{_version} is installed")
    from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs
except ImportError as error:
    raise MissingDependency(
        f"kvport.integrations.transformers needs transformers >= {'.'.join(map(str, _OLDEST))} ({error}); install it "
        "with: pip install -U 'kvport[transformers]'"
    ) from error

#: Layer types of transformers whose whole state is K and V by position. Sliding and chunked layers are kept in full;
#: the mask narrows what they see.
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
#: Layers that store nothing: no attention at all, or the K/V of an earlier layer, which the model hands on itself.
_EMPTY = "dummy"


@dataclass(frozen=True)
class KVPortStats:
    """What a :class:`KVPortCache` holds now. Bytes count codes, scales, zeros and the backend's padding.

    ``rows`` sequences of ``length`` tokens. ``bytes_per_token``: one token of one row in all layers, at rest (tokens
    that a format keeps in higher precision for a while take more).
    ``held_bytes``: pages that rows hold, a shared page once, the unfilled part of open pages included.
    ``allocated_bytes``: the pools, free pages included. ``dense_bytes_per_token``: what transformers' own cache takes
    for one token of one row, in the model's dtype.
    """

    rows: int
    length: int
    bytes_per_token: float
    held_bytes: int
    allocated_bytes: int
    dense_bytes_per_token: int


class KVPortCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A drop-in for transformers' DynamicCache with kvport pages behind it.

    Args:
        config: the model's config (``model.config``).
        device: a kvport device string, ``"cpu"``, ``"cuda:0"``, ``"triton@cuda:0"``, ...: where the model runs.
        format: a kvport format string. ``"fp32"`` (or the model's own dtype) stores K and V exactly. A model with
            latent attention (MLA) takes ``"latent=int8:g128,rope=bf16"`` and the like.
        tokens: room for this many tokens in each row, prompt included, reserved at the first forward; a longer row
            raises :class:`OutOfPages` before anything changed. Default None: pages are added as rows grow, each time
            doubling the pools, as one expects of a dynamic cache. Doubling copies all pages once and needs room for
            the old pools beside the new; forked rows (beams) stop sharing their pages then.
        page_size: tokens in a page.
        dtype: the model's float dtype; default: the config's, else that of the first K.
        layers: instead of what the config says, the geometry of every layer that stores K and V, in order.
        scales: static scales for formats that say ``static``: a recipe, or :class:`kvport.LayerScales` by layer, the
            layers that store K and V counted from 0.

    Raises:
        Unsupported: a model with another state than K and V by position (recurrent layers, indexers,
            cross-attention), named; or the backend declines.
        InvalidArgument, UnknownBackend, BackendUnavailable: as :func:`kvport.open`.
    """

    def __init__(
        self,
        config: Any,
        device: str = "cpu",
        *,
        format: str | CacheFormat = "int8",
        tokens: int | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        dtype: torch.dtype | None = None,
        layers: Iterable[LayerSpec] | None = None,
        scales: Mapping[int, LayerScales] | None = None,
    ) -> None:
        if tokens is not None:
            whole_number("tokens", tokens, 1)  # None: a cache that grows
        kinds = _layer_types(config)
        stored = [number for number, kind in enumerate(kinds) if kind != _EMPTY]
        specs = tuple(_geometry(config, stored) if layers is None else layers)
        if len(specs) != len(stored):
            raise InvalidArgument(
                f"layers gives {len(specs)} geometries, the model has {len(stored)} layers that store K and V"
            )
        found: Any = dtype or getattr(config.get_text_config(decoder=True), "dtype", None)
        self._dtype: torch.dtype = found if found in DTYPES.values() else torch.float32
        self._dtype_given = dtype is not None
        self._layout = CacheLayout(specs, CacheFormat.parse(format), page_size, self._dtype)
        self._device, self._tokens = device, tokens
        self._local = {number: local for local, number in enumerate(stored)}
        self._scales = scales
        # The smallest cache that can be: whatever backend and format cannot do shows here, not at the first forward.
        self._paged = self._open(2)
        self._rows: list[Sequence] = []
        self._step: Step | None = None
        self._updated: set[int] = set()  # layers that the open step has
        self._coming = 0  # tokens a row gets in the open step
        super().__init__(
            layers=[DummyLayer() if kind == _EMPTY else _Layer(self, self._local[n]) for n, kind in enumerate(kinds)]
        )

    # -- a forward -----------------------------------------------------------------------------------------------

    def _update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new K ``(rows, kv_heads, tokens, key_dim)`` and V; return its whole history likewise."""
        if self._step is not None and layer in self._updated:
            raise self._abandon(f"layer {layer} was updated again")
        self._check_shape(layer, key, value)
        try:
            step = self._begin(key) if self._step is None else self._step
            latent = self._layout.layers[layer].latent
            if latent:  # transformers passes the latent part as K and the rotary part as V
                step.append(layer, torch.cat((_pack(key), _pack(value)), -1))
            else:
                step.append(layer, _pack(key), _pack(value))
            self._updated.add(layer)
            past_key, past_value = step.gather(layer, key.dtype)
            if latent:
                past_key, past_value = past_value, past_key[..., past_value.shape[-1] :]
            if len(self._updated) == len(self._local):
                step.commit()
                self._step = None
        except BaseException:
            self._roll_back()
            raise
        return past_key.transpose(1, 2), past_value.transpose(1, 2)

    def _begin(self, key: Tensor) -> Step:
        rows, _, tokens, _ = key.shape
        if not self._length:
            self.reset()  # rows of a forward that did not come to an end say nothing
            if key.dtype != self._dtype and not self._dtype_given:
                self._dtype = key.dtype
                self._layout = replace(self._layout, dtype=key.dtype)
                self._paged = self._open(2)
            self._rows = [self._paged.sequence() for _ in range(rows)]
        elif rows != len(self._rows):
            raise InvalidArgument(
                f"the cache holds {len(self._rows)} rows, this forward has {rows}; reset() it, or fit it with "
                "batch_repeat_interleave / batch_select_indices"
            )
        length = self._length + tokens
        if self._tokens is not None and length > self._tokens:
            stats = self._paged.stats().pools[0]
            raise OutOfPages(
                f"this forward would make rows {length} tokens long ({self._length} + {tokens}) and the cache was "
                f"opened with tokens={self._tokens}; give a larger number, or leave tokens out to let it grow",
                needed=len(self._rows) * -(-length // self._layout.page_size),
                free=stats.free,
                total=stats.total,
            )
        counts = dict.fromkeys(self._rows, tokens)
        try:
            self._step = self._paged.step(counts)
        except OutOfPages:
            self._grow(length, tokens)
            self._step = self._paged.step(dict.fromkeys(self._rows, tokens))
        self._updated.clear()
        self._coming = tokens
        return self._step

    def _grow(self, length: int, tokens: int) -> None:
        """Move to larger pools, with room for ``tokens`` more tokens a row, which make rows ``length`` long."""
        size, rows = self._layout.page_size, len(self._rows)
        if self._tokens is not None:
            # Rows that share an open page copy it before the first drops its reference, hence half a page a row more.
            far = rows * -(-self._tokens // size) + rows // 2
        else:
            # One page a row more than asked, so that a prompt that just fits does not make the first token grow again.
            far = max(rows * (-(-length // size) + 1), 2 * self._paged.stats().pools[0].total)
        # Near: what is held now, this forward, and the open pages at both ends.
        near = rows * (-(-tokens // size) + 2)
        larger = self._open([far + 1] * len(self._layout.groups) + [1 + held + near for held in self._held("near")])
        moved = [larger.insert(self._paged.export(row)) for row in self._rows]
        self._paged.close()
        self._paged, self._rows = larger, moved

    def _held(self, tier: Literal["far", "near"]) -> list[int]:
        """Pages that rows hold in each pool of a tier, a shared page once for each row."""
        return [
            sum(1 for row in self._rows for page in row.pages(group, tier) if page)
            for group, members in enumerate(self._layout.groups)
            if tier == "far" or members.layout.format.tiered
        ]

    def _open(self, pages: int | list[int]) -> PagedCache:
        # Tensors made in inference mode could not be written outside it, and a cache outlives the mode it is made in.
        with torch.inference_mode(False):
            return kvport.open(
                self._device, layout=self._layout, pages=pages, scales=self._scales, share_prefixes=False
            )

    def _check_shape(self, layer: int, key: Tensor, value: Tensor) -> None:
        spec = self._layout.layers[layer]
        dims = (spec.value_dim, spec.key_dim - spec.value_dim) if spec.latent else (spec.key_dim, spec.value_dim)
        wanted = [(key.shape[0], spec.kv_heads, *key.shape[2:3], dim) for dim in dims]
        if [tuple(key.shape), tuple(value.shape)] != wanted:
            raise Unsupported(
                f"layer {layer} stores K {tuple(key.shape)} and V {tuple(value.shape)}; from the config, (rows, "
                f"{spec.kv_heads}, tokens, {dims[0]}) and (rows, {spec.kv_heads}, tokens, {dims[1]}) were expected; "
                "give KVPortCache(..., layers=[kvport.LayerSpec(...), ...])"
            )

    def _roll_back(self) -> None:
        if self._step is not None:
            self._step.rollback()
            self._step = None
        self._updated.clear()

    def _abandon(self, what: str) -> StepError:
        """Roll back a forward that stopped half-way; returns the error to raise."""
        missing = [number for number, local in self._local.items() if local not in self._updated]
        self._roll_back()
        return StepError(
            f"{what} while layers {missing} of the last forward were missing: that forward did not finish, or the "
            f"model does not update every layer once. It was rolled back; the cache holds {self._length} tokens a row "
            "and can be used again"
        )

    def _between_forwards(self, action: str) -> None:
        if self._step is not None:
            raise self._abandon(action)

    # -- what transformers asks for --------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a fork of row ``beam_idx[i]``; pages are shared, nothing is copied."""
        self._between_forwards("reorder_cache was called")
        if self._rows:
            self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows (numbers or a mask)."""
        self._between_forwards("batch_select_indices was called")
        if self._rows:
            self._select(torch.arange(len(self._rows), device="cpu")[torch.as_tensor(indices, device="cpu")].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork every row ``repeats - 1`` times."""
        self._between_forwards("batch_repeat_interleave was called")
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row; 0 does nothing."""
        self._between_forwards("crop was called")
        if not -self._length <= tokens_to_remove <= 0:
            raise InvalidArgument(
                f"crop({tokens_to_remove}): give the number of tokens to remove as 0 .. -{self._length}"
            )
        if tokens_to_remove:
            for row in self._rows:
                row.truncate(row.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, a forward that did not finish too; the next forward may have other rows."""
        self._roll_back()
        for row in self._rows:
            row.free()
        self._rows = []

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVPortCache:
        """An independent cache with the same pages, as for reusing a prompt: ``copy.deepcopy(prompt_cache)``."""
        self._between_forwards("the cache was copied")
        twin = KVPortCache.__new__(KVPortCache)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._updated = set()
        # Rows that share pages here do not share them there: room for each row's own, the spare, and never none.
        twin._paged = twin._open([max(2, 1 + held) for held in self._held("far") + self._held("near")])
        twin._rows = [twin._paged.insert(self._paged.export(row)) for row in self._rows]
        twin.layers = [_Layer(twin, one.local) if isinstance(one, _Layer) else DummyLayer() for one in self.layers]
        return twin

    def _select(self, wanted: list[int]) -> None:
        """New rows from old ones: the first user of a row takes it over, further ones fork it."""
        taken: dict[int, Sequence] = {}
        chosen = []
        for number in wanted:
            row = self._rows[number]
            chosen.append(row.fork() if number in taken else taken.setdefault(number, row))
        for number, row in enumerate(self._rows):
            if number not in taken:
                row.free()
        self._rows = chosen

    # -- accounts --------------------------------------------------------------------------------------------------

    @property
    def paged(self) -> PagedCache:
        """The kvport cache behind this one; another object after the pools grew."""
        return self._paged

    @property
    def _length(self) -> int:
        return self._rows[0].length if self._rows else 0

    def stats(self) -> KVPortStats:
        """Rows, lengths and bytes right now."""
        pools = self._paged.stats()
        return KVPortStats(
            rows=len(self._rows),
            length=self._length,
            bytes_per_token=sum(pool.page_bytes for pool in pools.pools[: len(self._layout.groups)])
            / self._layout.page_size,
            held_bytes=sum(pool.held * pool.page_bytes for pool in pools.pools),
            allocated_bytes=pools.allocated_bytes,
            dense_bytes_per_token=sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self._layout.layers)
            * self._dtype.itemsize,
        )

    def bytes(self) -> int:
        """Bytes of the pages that rows hold, scales counted; :meth:`stats` says more."""
        return self.stats().held_bytes

    def __repr__(self) -> str:
        return (
            f"KVPortCache(device={self._device!r}, format={str(self._layout.format)!r}, rows={len(self._rows)}, "
            f"length={self._length})"
        )


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers sees of one layer. All state is the cache's: a step spans the layers."""

    is_sliding = False  # kept in full, whatever the layer's own window is
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: KVPortCache, local: int) -> None:
        self.cache, self.local = cache, local

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the cache begins with its first update

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Further arguments serve caches that talk to the attention function; this one hands it plain K and V.
        return self.cache._update(self.local, key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens this layer holds: in the middle of a forward, layers that have updated are ahead."""
        coming = self.cache._step is not None and self.local in self.cache._updated
        return self.cache._length + (self.cache._coming if coming else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.cache._tokens is None else self.cache._tokens

    @property
    def is_initialized(self) -> bool:
        return self.cache.is_initialized

    @property
    def keys(self) -> Tensor | None:
        """All committed K of this layer, decoded: ``(rows, kv_heads, length, key_dim)``. For looking, not for speed."""
        return self._decoded(0)

    @property
    def values(self) -> Tensor | None:
        """All committed V, likewise."""
        return self._decoded(1)

    def _decoded(self, side: int) -> Tensor | None:
        if not self.cache._rows:
            return None
        self.cache._between_forwards("K and V were read")
        rows = [self.cache._paged.gather(row, self.local, self.cache._dtype)[side] for row in self.cache._rows]
        return torch.stack(rows).transpose(1, 2)

    def reset(self) -> None:
        raise _whole_cache("reset()")

    def crop(self, tokens_to_remove: int) -> None:
        raise _whole_cache("crop(...)")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise _whole_cache("reorder_cache(...)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _whole_cache("batch_repeat_interleave(...)")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise _whole_cache("batch_select_indices(...)")

    def offload(self) -> None:
        raise Unsupported("pages stay on the device that the cache was opened on; they are not offloaded")


def _whole_cache(call: str) -> KVPortError:
    return Unsupported(f"{call} on one layer: the layers of a KVPortCache move together; call it on the cache")


def _pack(states: Tensor) -> Tensor:
    """``(rows, heads, tokens, dim)`` to kvport's ``(rows * tokens, heads, dim)``."""
    return states.transpose(1, 2).flatten(0, 1)


def _layer_types(config: Any) -> list[str]:
    """The layer types by model layer; raises :class:`Unsupported` for a model with another state than K and V."""
    if not hasattr(config, "get_text_config"):
        raise InvalidArgument(f"config must be a transformers model config (model.config), got {type(config).__name__}")
    text = config.get_text_config(decoder=True)
    name = f"KVPortCache cannot hold the state of {type(text).__name__} ({getattr(text, 'model_type', '?')})"
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False) or _cross_attends(text):
        raise Unsupported(f"{name}: it has cross-attention, whose K and V do not grow with the text")
    kinds: list[str] = get_layer_types_and_kwargs(text)[0]
    foreign = sorted(set(kinds) - {*_ATTENTION, _EMPTY})
    if foreign:
        where = {kind: kinds.index(kind) for kind in foreign}
        raise Unsupported(
            f"{name}: " + ", ".join(f"{kind} layers (the first is layer {at})" for kind, at in where.items()),
            (f"kvport stores K and V by position, of {', '.join(_ATTENTION)}",),
        )
    if not set(kinds) & set(_ATTENTION) or getattr(text, "num_attention_heads", None) is None:
        raise Unsupported(f"{name}: its layers are not attention")
    return kinds


def _cross_attends(text: Any) -> bool:
    return bool(getattr(text, "cross_attention_layers", None))


def _geometry(config: Any, stored: list[int]) -> list[LayerSpec]:
    """Heads and dims of each layer that stores K and V. Checked against the tensors when they come."""
    layers = config.get_text_config(decoder=True).per_layer_config
    return [_layer_geometry(layers[number]) for number in stored]


def _layer_geometry(layer: Any) -> LayerSpec:
    query_heads = layer.num_attention_heads
    if rank := getattr(layer, "kv_lora_rank", None):  # multi-head latent attention stores the latent and rotary parts
        return LayerSpec(1, query_heads, key_dim=rank + layer.qk_rope_head_dim, value_dim=rank, latent=True)
    kv_heads = getattr(layer, "num_key_value_heads", None)
    if kv_heads is None and getattr(layer, "num_kv_heads", None) is not None:
        # Falcon: num_kv_heads counts only in its new architecture; before, multi_query meant one head.
        one = getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False)
        kv_heads = 1 if one else layer.num_kv_heads
    if kv_heads is None:
        kv_heads = query_heads
    dim = getattr(layer, "head_dim", None) or layer.hidden_size // query_heads
    return LayerSpec(kv_heads=kv_heads, query_heads=query_heads, key_dim=dim, value_dim=dim)
