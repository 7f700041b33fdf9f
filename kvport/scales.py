"""Static scales: given or calibrated before the cache opens, checked once, digested into page identity.

A static format without scales refuses to open, and a scale that is zero, negative, NaN or infinite is refused by
name (layer, K or V, head). There is no magic value for "unset": a scale is here, or it is absent. Nothing can change a
scale after open, because the codes at rest mean nothing without the scale that made them.
"""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvport.codec import floor_cast
from kvport.errors import ScaleError
from kvport.formats import TensorFormat
from kvport.layout import CacheLayout, Group


@dataclass(frozen=True)
class SideScales:
    """Scales of K or of V of one layer.

    ``scale`` has shape ``()`` for granularity tensor, ``(kv_heads,)`` for head, ``(kv_heads, dim)`` for channel.
    ``zero`` has the same shape, in value units (x_hat = code * scale + zero), for asymmetric formats only.
    Plain numbers and lists are taken too.
    """

    scale: Tensor
    zero: Tensor | None = None


@dataclass(frozen=True)
class LayerScales:
    """What is chosen beforehand for one layer. A latent layer's ``key`` is its latent part.

    ``key`` and ``value``: scales; None for a side whose format is not static. ``key_channels`` and
    ``value_channels``: the outlier channels of each KV head, integers ``(kv_heads, c)`` in any order; None for a side
    whose format has none (see :mod:`kvport.outliers`). Lists are taken too.
    """

    key: SideScales | None = None
    value: SideScales | None = None
    key_channels: Tensor | None = None
    value_channels: Tensor | None = None


class ScaleSource(Mapping[int, LayerScales], ABC):
    """Scales by layer that know what they were made for, such as :class:`kvport.recipes.Recipe`."""

    @abstractmethod
    def check(self, layout: CacheLayout) -> None:
        """Raise :class:`ScaleError` where they were made for another format than the layout's."""


def resolve_scales(layout: CacheLayout, given: Mapping[int, LayerScales] | None) -> list[tuple[LayerScales, ...]]:
    """Check ``given`` (by model layer) against the layout and cast to the formats' scale dtypes.

    Returns, for each group, one :class:`LayerScales` per layer of the group. Raises :class:`ScaleError` naming the
    layer and the side where a static format has none, a dynamic one has some, a shape differs, or a value is not a
    positive finite number that its dtype can hold; likewise for outlier channels, which are sorted.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ScaleError(f"scales are a mapping {{layer: LayerScales}}, got {type(given).__name__}")
    if isinstance(given, ScaleSource):
        given.check(layout)
    given = {} if given is None else dict(given)
    stored = {layer for group in layout.groups for layer in group.layers}
    if unknown := sorted(set(given) - stored, key=str):
        raise ScaleError(f"scales given for layers {unknown}, but the cache stores layers {_ranges(stored)}")
    resolved = [
        tuple(_resolve_layer(group, layer, given.get(layer, LayerScales())) for layer in group.layers)
        for group in layout.groups
    ]
    return resolved


def warn_unit_scales(resolved: list[tuple[LayerScales, ...]]) -> None:
    """Warn where every scale is exactly 1.0, the sign of an exporter that wrote defaults."""
    sides = [side for group in resolved for layer in group for side in (layer.key, layer.value) if side is not None]
    if len(sides) > 1 and all(bool((side.scale == 1).all()) for side in sides):
        warnings.warn(
            f"all {len(sides)} static scales are exactly 1.0, as an exporter writes that has calibrated nothing",
            stacklevel=4,  # whoever called kvport.open
        )


def scales_digest(resolved: list[tuple[LayerScales, ...]]) -> str:
    """sha256 over every static scale, zero and outlier channel, in order; "" where there is none."""
    digest, found = hashlib.sha256(), False
    for group_index, group in enumerate(resolved):
        for layer_index, layer in enumerate(group):
            parts = {"key.channels": layer.key_channels, "value.channels": layer.value_channels}
            for name, side in (("key", layer.key), ("value", layer.value)):
                if side is not None:
                    parts |= {f"{name}.scale": side.scale, f"{name}.zero": side.zero}
            for part, tensor in sorted(parts.items()):
                if tensor is not None:
                    found = True
                    where = f"{group_index}/{layer_index}/{part}/{tensor.dtype}{tuple(tensor.shape)}"
                    digest.update(where.encode())
                    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""


def _resolve_layer(group: Group, layer: int, given: LayerScales) -> LayerScales:
    if not isinstance(given, LayerScales):
        raise ScaleError(f"scales of layer {layer} must be a LayerScales, got {type(given).__name__}")
    layout = group.layout
    first, second = layout.sides
    heads, k, v = layout.kv_heads, f"layer {layer} K", f"layer {layer} V"
    key = _resolve_side(k, first.format, heads, first.dim, given.key)
    key_channels = _resolve_channels(k, first.format, heads, first.dim, given.key_channels)
    if layout.latent:
        if given.value is not None or given.value_channels is not None:
            raise ScaleError(f"{v}: a latent layer's V is its K's latent part; give scales for key alone")
        return LayerScales(key, key_channels=key_channels)
    return LayerScales(
        key,
        _resolve_side(v, second.format, heads, second.dim, given.value),
        key_channels,
        _resolve_channels(v, second.format, heads, second.dim, given.value_channels),
    )


def _resolve_channels(where: str, fmt: TensorFormat, heads: int, dim: int, given: object) -> Tensor | None:
    if not fmt.outliers:
        if given is not None:
            raise ScaleError(f"{where}: outlier channels given, but its format {fmt} has none; add outliers=N")
        return None
    if given is None:
        raise ScaleError(
            f"{where}: format {fmt} keeps {fmt.outliers} outlier channels per head and none were chosen; calibrate or "
            "give them in scales="
        )
    try:
        channels = torch.as_tensor(given, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ScaleError(f"{where}: cannot read the outlier channels as numbers: {error}") from error
    if channels.dtype.is_floating_point or channels.dtype.is_complex or channels.dtype == torch.bool:
        raise ScaleError(f"{where}: outlier channels are integers, not {channels.dtype}")
    if tuple(channels.shape) != (heads, fmt.outliers):
        raise ScaleError(
            f"{where}: outlier channels have shape {tuple(channels.shape)}, format {fmt} needs {(heads, fmt.outliers)}"
        )
    channels = channels.to(torch.int64).sort(-1).values
    for head, row in enumerate(channels.tolist()):
        if len(set(row)) < len(row) or row[0] < 0 or row[-1] >= dim:
            raise ScaleError(f"{where}: outlier channels {row} of head {head} must differ and be in 0 .. {dim - 1}")
    return channels


def _resolve_side(where: str, fmt: TensorFormat, heads: int, dim: int, given: SideScales | None) -> SideScales | None:
    if not fmt.static:
        if given is not None:
            raise ScaleError(f"{where}: scales given, but its format {fmt} does not use static scales")
        return None
    if given is None:
        raise ScaleError(f"{where}: format {fmt} needs static scales and none were given; calibrate or pass scales=")
    if not isinstance(given, SideScales):
        raise ScaleError(f"{where}: needs a SideScales(scale, zero), got {type(given).__name__}")
    shape = {"tensor": (), "block": (), "head": (heads,), "channel": (heads, dim)}[fmt.granularity]
    given_scale = _read(where, "scale", given.scale, shape, fmt)
    scale = given_scale.to(fmt.scale_torch_dtype)
    smallest = torch.finfo(fmt.scale_torch_dtype).smallest_normal
    if bool((under := (given_scale > 0) & (scale < smallest)).any()):
        raise ScaleError(
            f"{where}: {_first(under, given_scale, 'scale')} is below the smallest normal {fmt.scale_dtype}"
        )
    if bool((bad := ~(torch.isfinite(scale) & (scale > 0))).any()):
        raise ScaleError(
            f"{where}: {_first(bad, scale, 'scale')}; scales must be positive and finite in {fmt.scale_dtype}"
        )
    if fmt.symmetric:
        if given.zero is not None:
            raise ScaleError(f"{where}: zeros given, but format {fmt} is symmetric; use {fmt}:asym or drop them")
        return SideScales(scale)
    if given.zero is None:
        raise ScaleError(f"{where}: format {fmt} is asymmetric and needs zeros beside its scales")
    zero = _read(where, "zero", given.zero, shape, fmt)
    if bool((bad := ~(zero.abs() <= torch.finfo(fmt.scale_torch_dtype).max)).any()):
        raise ScaleError(f"{where}: {_first(bad, zero, 'zero')}; zeros must be finite in {fmt.scale_dtype}")
    # Toward minus infinity, as the codec casts the zeros it computes itself: the minimum keeps code 0.
    return SideScales(scale, floor_cast(zero, fmt.scale_torch_dtype))


def _read(where: str, part: str, given: object, shape: tuple[int, ...], fmt: TensorFormat) -> Tensor:
    try:
        # A copy: whoever keeps the given tensor must not be able to change the scale under the codes.
        tensor = torch.as_tensor(given, device="cpu").detach().to(torch.float32, copy=True)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ScaleError(f"{where}: cannot read the {part} as numbers: {error}") from error
    if shape == () and tensor.numel() == 1:
        tensor = tensor.reshape(())
    if tuple(tensor.shape) != shape:
        raise ScaleError(
            f"{where}: {part} has shape {tuple(tensor.shape)}, granularity {fmt.granularity!r} needs {shape}"
        )
    return tensor


def _first(bad: Tensor, values: Tensor, part: str) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0])
    names = ", ".join(f"{name} {i}" for name, i in zip(("head", "channel"), index, strict=False))
    return f"{part}{' of ' + names if names else ''} is {float(values[index])!r}"


def _ranges(layers: set[int]) -> str:
    ordered = sorted(layers)
    contiguous = ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{ordered[0]} .. {ordered[-1]}" if contiguous else str(ordered)
