"""What a transformers model hands its cache and its attention, for calibration and for reports by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvport.errors import InvalidArgument, MissingDependency, Unsupported
from kvport.evaluation import cache_argument

_INSTALL: Final = "pip install -U 'kvport[transformers]'"
try:
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise MissingDependency(
        f"running a model needs transformers >= 5.24 ({error}); install it with: {_INSTALL}"
    ) from error

_WATCHED: Final = "kvport_watched_sdpa"


@dataclass(frozen=True)
class Forward:
    """One forward: K (after RoPE) and V ``(tokens, kv_heads, dim)`` by model layer, in order.

    Layers in ``latent`` are latent (MLA) ones, of which a cache gets the latent part as K and the rotary part as V.
    ``valid`` ``(tokens,)`` bool: real tokens; ``positions`` ``(tokens,)``: how many real tokens of the row go before.
    Rows of a batch lie one after the other.
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    valid: Tensor
    positions: Tensor
    latent: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Attended:
    """What one layer's attention got: Q, K and V ``(tokens, heads, dim)`` and the factor on q.k.

    ``window``: the layer's sliding window in tokens, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None


class _Recorder(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A cache that remembers what its last forward brought."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in self.seen:
            raise Unsupported(f"layer {layer_idx} updated the cache twice in one forward; kvport takes K and V once")
        self.seen[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def observe_cache(
    model: Any,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    chunk: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Forward]:
    """Run ``ids`` ``(rows, tokens)`` through the model in chunks, and yield what each forward brought to the cache.

    ``mask`` ``(rows, tokens)``: 1 for tokens, 0 for padding.
    """
    if ids.dim() != 2 or not ids.numel():
        raise InvalidArgument(f"ids must be (rows, tokens) with at least one token, got {tuple(ids.shape)}")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.device)
    if mask.shape != ids.shape:
        raise InvalidArgument(f"mask must have the shape of ids {tuple(ids.shape)}, got {tuple(mask.shape)}")
    if chunk < 1:
        raise InvalidArgument(f"chunk must be a positive number of tokens, got {chunk}")
    argument = cache_argument(model)
    cache = _Recorder(model.config)
    counted = mask.cumsum(1) - 1
    starts = range(0, ids.shape[1], chunk)
    with torch.inference_mode():
        for done, start in enumerate(starts, 1):
            end = min(start + chunk, ids.shape[1])
            cache.seen.clear()
            model(ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **{argument: cache})
            if not cache.seen:
                raise Unsupported(f"{type(model).__name__} does not update a cache of K and V")
            layers = {layer: (_rows(k), _rows(v)) for layer, (k, v) in sorted(cache.seen.items())}
            yield Forward(
                layers,
                mask[:, start:end].reshape(-1).bool().cpu(),
                counted[:, start:end].reshape(-1).cpu(),
                frozenset(layer for layer, states in layers.items() if _is_latent(model.config, layer, *states)),
            )
            progress(done, len(starts))


def _is_latent(config: Any, layer: int, key: Tensor, value: Tensor) -> bool:
    """Whether a layer caches a latent and a rotary part, as transformers' own MLA models do since 5.24: by what its
    configuration says and by the shapes that came, since a model with code of its own may cache expanded K and V."""
    own = config.get_text_config(decoder=True).per_layer_config[layer]
    parts = (getattr(own, "kv_lora_rank", None), getattr(own, "qk_rope_head_dim", None))
    return key.shape[1] == value.shape[1] == 1 and (key.shape[-1], value.shape[-1]) == parts


def observe_attention(model: Any, ids: Tensor) -> Iterator[tuple[int, Attended]]:
    """Run ``ids`` ``(1, tokens)`` through the model once, and yield what each layer's attention got, in order.

    Raises :class:`Unsupported` for a model whose attention cannot be chosen by name in transformers.
    """
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.numel():
        raise InvalidArgument(f"ids must be (1, tokens), got {tuple(ids.shape)}")
    seen: dict[int, Attended] = {}

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        scale = options.get("scaling")
        seen[len(seen)] = Attended(
            _rows(query),
            _rows(key),
            _rows(value),
            float(query.shape[-1] ** -0.5 if scale is None else scale),
            options.get("sliding_window"),
        )
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(_WATCHED, watched)
    AttentionMaskInterface.register(_WATCHED, sdpa_mask)
    before = model.config._attn_implementation
    try:
        try:
            model.set_attn_implementation(_WATCHED)
        except ValueError as error:
            raise Unsupported(f"{type(model).__name__} does not let its attention be watched: {error}") from error
        with torch.inference_mode():
            model(ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    if not seen:
        raise Unsupported(f"{type(model).__name__} does not call transformers' attention functions")
    yield from seen.items()


def _rows(states: Tensor) -> Tensor:
    """``(rows, heads, tokens, dim)`` to ``(rows * tokens, heads, dim)``, on the host."""
    return states.transpose(1, 2).flatten(0, 1).cpu()
