"""What a format does to each layer of a model: errors of K, V and attention, and which layer breaks.

Everything is measured on the Q, K and V that a model really produced. All tokens are taken through the format's sealed
codes, without near tiers: the error of the format itself, which sinks and recent windows then keep from some tokens.
Means hide the damage (it sits in the tail), so cosines are reported by their first percentile and minimum, and the
attention by KL(full || quantized) of its probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvport import codec, codec_stats
from kvport.codec_stats import Counts
from kvport.errors import InvalidArgument
from kvport.formats import CacheFormat, TensorFormat
from kvport.layout import DEFAULT_PAGE_SIZE, CacheLayout, GroupLayout, LayerSpec
from kvport.rotation import rotate, unrotate
from kvport.scales import LayerScales, SideScales, resolve_scales


@dataclass(frozen=True)
class Limits:
    """Beyond these a layer is said to break.

    ``cosine_p1``: least first percentile of the cosine between attention outputs, 0.9 because 4-bit K at 0.908 cost a
    135M model 2.4 % of perplexity, which is about what people still accept. ``saturated``: largest share of clipped
    values of K or V.
    """

    cosine_p1: float = 0.9
    saturated: float = 0.001


@dataclass(frozen=True)
class SideError:
    """K or V of one layer, decoded against the original.

    ``relative``: root mean square error over root mean square value. ``cosine_p1``, ``cosine_min`` over tokens and
    heads. ``counts`` where they were asked for.
    """

    relative: float
    cosine_p1: float
    cosine_min: float
    counts: Counts | None = None


@dataclass(frozen=True)
class LayerError:
    """One layer. ``output_*``: attention outputs per token and query head; ``kl_*``: of attention probabilities, in
    nats. ``broken`` says in words which limits it is beyond; empty for none.
    """

    layer: int
    key: SideError
    value: SideError
    output_cosine_p1: float
    output_cosine_min: float
    kl_mean: float
    kl_max: float
    broken: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def layer_error(
    layer: int,
    format: str | CacheFormat,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    scales: LayerScales | None = None,
    counters: bool = False,
    limits: Limits | None = None,
) -> LayerError:
    """What ``format`` does to one layer of causal attention.

    ``query`` ``(tokens, query_heads, dim)``, ``key`` and ``value`` ``(tokens, kv_heads, dim)``; ``scale`` multiplies
    q.k, default 1/sqrt(dim); ``scales`` for static formats and outlier channels. For cN formats the tokens of the last,
    partial group stay as they are, as they do in a cache; with sparse outliers those of the last, partial page of 128.
    Memory grows with tokens squared, one head at a time.
    """
    fmt = CacheFormat.parse(format)
    if fmt.rope is not None:
        raise InvalidArgument(f"format {fmt} is for latent layers; the report is for K and V apart")
    layout = _layout(fmt, [(query, key, value)])
    [[static]] = resolve_scales(layout, None if scales is None else {0: scales})
    group = layout.groups[0].layout
    full = key.to(torch.float32), value.to(torch.float32)
    stored_key, key_counts = _round_trip(group, fmt.key, key, static.key, static.key_channels, counters, rotated=True)
    stored_value, value_counts = _round_trip(
        group, fmt.value, value, static.value, static.value_channels, counters, rotated=False
    )
    cosines, divergences = [], []
    for head in range(query.shape[1]):
        own = head // group.group_size
        q = query[:, head].to(torch.float32)
        exact = _attend(q, full[0][:, own], full[1][:, own], scale, window)
        lossy = _attend(q, stored_key[:, own], stored_value[:, own], scale, window)
        cosines.append(_cosine(exact[1], lossy[1]))
        logs, other = exact[0], lossy[0]
        seen = logs > -math.inf
        terms = torch.where(seen, logs.exp() * (logs - other), torch.zeros((), device=logs.device))
        divergences.append(terms.sum(-1, dtype=torch.float64))
    cosine, divergence = torch.cat(cosines), torch.cat(divergences)
    found = LayerError(
        layer=layer,
        key=_side_error(full[0], stored_key, key_counts),
        value=_side_error(full[1], stored_value, value_counts),
        output_cosine_p1=_percentile(cosine),
        output_cosine_min=cosine.min().item(),
        kl_mean=divergence.mean().item(),
        kl_max=divergence.max().item(),
    )
    return LayerError(**{**vars(found), "broken": _broken(found, limits or Limits())})


def _layout(fmt: CacheFormat, layers: Iterable[tuple[Tensor, Tensor, Tensor]]) -> CacheLayout:
    """The layout of layers known by their Q, K and V ``(tokens, heads, dim)``."""
    specs = tuple(LayerSpec(k.shape[1], q.shape[1], k.shape[2], v.shape[2]) for q, k, v in layers)
    sides = (fmt.key, fmt.value)
    groups = [side.group for side in sides if side.granularity == "channel_group"]
    # Sparse outliers are so many per page: of the page size that a cache has unless it is asked for another.
    return CacheLayout(specs, fmt, math.lcm(*groups, *(DEFAULT_PAGE_SIZE for side in sides if side.sparse)))


def worst_layer(report: Iterable[LayerError]) -> LayerError:
    """The layer whose attention output suffers most: NaN first, then the smallest first percentile of the cosine."""
    return min(report, key=lambda one: -1.0 if math.isnan(one.output_cosine_p1) else 1 + one.output_cosine_p1)


def _round_trip(
    layout: GroupLayout,
    fmt: TensorFormat,
    rows: Tensor,
    static: SideScales | None,
    channels: Tensor | None,
    counters: bool,
    *,
    rotated: bool,
) -> tuple[Tensor, Counts | None]:
    """Rows through the codec and back, float32; rotated and turned back where the format says so."""
    seed = layout.format.rotate if rotated else None
    x = rows.to(torch.float32)
    if seed is not None:
        x = rotate(x, seed, layout.rotated_dim)
    unit = layout.page_size if fmt.sparse else fmt.group if fmt.sealed_only else 1
    whole = len(x) - len(x) % unit
    pages = x[:whole].reshape(-1, unit, *x.shape[1:]) if fmt.sparse else x[:whole]
    stored = codec.encode(fmt, pages, static, channels).planes
    counts = codec_stats.count(fmt, pages, stored, static, channels) if counters else None
    x = torch.cat([codec.decode(fmt, stored, static, channels=channels).reshape(x[:whole].shape), x[whole:]])
    return (x if seed is None else unrotate(x, seed, layout.rotated_dim)), counts


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Log probabilities ``(tokens, tokens)`` and outputs ``(tokens, dim)`` of one head, causal."""
    scores = query @ key.T * (query.shape[-1] ** -0.5 if scale is None else scale)
    row, column = (torch.arange(len(rows), device=rows.device) for rows in (query, key))
    row = row.unsqueeze(1)
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    logs = scores.masked_fill(hidden, -math.inf).log_softmax(-1)
    return logs, logs.exp() @ value


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine along the last dim; 1 where both are zero."""
    found = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    return torch.where((a == 0).all(-1) & (b == 0).all(-1), torch.ones_like(found), found)


def _percentile(values: Tensor) -> float:
    """The value at the first percentile, nearest rank; NaN where one is."""
    values = values.flatten()
    if bool(values.isnan().any()):
        return math.nan
    return values.kthvalue(max(1, math.ceil(0.01 * values.numel()))).values.item()


def _side_error(exact: Tensor, stored: Tensor, counts: Counts | None) -> SideError:
    cosine = _cosine(exact, stored)
    size = exact.double().square().mean().sqrt()
    error = (stored - exact).double().square().mean().sqrt()
    return SideError((error / size).item() if size > 0 else 0.0, _percentile(cosine), cosine.min().item(), counts)


def _broken(found: LayerError, limits: Limits) -> tuple[str, ...]:
    reasons = []
    if not found.output_cosine_p1 >= limits.cosine_p1:  # NaN too
        reasons.append(f"attention output cosine p1 {found.output_cosine_p1:.4f} < {limits.cosine_p1}")
    for name, side in (("K", found.key), ("V", found.value)):
        if side.counts is not None and side.counts.share("saturated") > limits.saturated:
            reasons.append(f"{name} saturated {side.counts.share('saturated'):.3%} > {limits.saturated:.3%}")
        if side.counts is not None and side.counts.poisoned:
            reasons.append(f"{name} has {side.counts.poisoned} poisoned values")
    return tuple(reasons)


# -- a whole model -----------------------------------------------------------------------------------------------------


def inspect_model(
    model: Any,
    ids: Tensor,
    format: str | CacheFormat,
    *,
    scales: Mapping[int, LayerScales] | None = None,
    counters: bool = False,
    limits: Limits | None = None,
) -> list[LayerError]:
    """Run a transformers model over ``ids`` ``(1, tokens)`` once, and report every layer that attends.

    Layers are numbered by the order in which they attend; ``scales`` likewise (as
    :func:`kvport.calibration.calibrate_model` numbers them).
    """
    from kvport.integrations.observing import observe_attention

    attended = list(observe_attention(model, ids))
    # All layers at once first, so that what is wrong with the scales is said by its layer.
    resolve_scales(_layout(CacheFormat.parse(format), [(a.query, a.key, a.value) for _, a in attended]), scales)
    return [
        layer_error(
            layer,
            format,
            seen.query,
            seen.key,
            seen.value,
            scale=seen.scale,
            window=seen.window,
            scales=None if scales is None else scales.get(layer),
            counters=counters,
            limits=limits,
        )
        for layer, seen in attended
    ]
