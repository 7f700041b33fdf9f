"""Static scales from the K and V that a model really produces.

A :class:`Calibrator` is fed, layer by layer, with K (after RoPE, as the cache receives it) and V of valid tokens, and
turns their ranges into the scales of a static format. Three methods:

``amax``
    the whole range: nothing saturates that was seen.
``percentile:P``
    the range that P percent of the values of a group lie in (nearest rank, so that P = 100 is amax); for asymmetric
    formats P percent at each end. Outliers saturate, everything else gets a finer step.
``mse``
    the range, of 41 between a fifth of the whole one and all of it, whose squared error is least over the tokens seen,
    encoded and decoded by the cache's own codec.

Scales are rounded up to their dtype, so that rounding saturates nothing. A channel that is always zero (or constant,
in an asymmetric format) has no range to divide: it takes the largest scale of its head, which decodes what was seen
exactly, and is mentioned in the recipe's notes. A head or layer that is zero throughout is refused by name: it is the
mark of a dummy run.

Outlier channels (``outliers=c``) are those of the largest magnitude seen in each head. A scale that others share with
them is made from the others alone.

:func:`calibrate_model` does all this for a transformers model and a text.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvport import codec
from kvport.codec_floats import NVFP4_RANGE
from kvport.errors import InvalidArgument, ScaleError
from kvport.formats import CODES, CacheFormat, TensorFormat
from kvport.layout import CacheLayout, GroupLayout, LayerSpec
from kvport.outliers import choose_channels, mask_channels
from kvport.recipes import Recipe
from kvport.rotation import rotate
from kvport.scales import LayerScales, SideScales, resolve_scales

if TYPE_CHECKING:
    from kvport.integrations.observing import Forward

#: Shares of the whole range that the method ``mse`` tries.
CLIPS: Final = tuple(1.0 - 0.02 * step for step in range(41))
METHODS: Final = "amax, percentile:P with 0 < P <= 100, mse"
#: Tokens that the model reads in one forward, and in one context.
CHUNK: Final = 512
CONTEXT: Final = 2048


@dataclass(frozen=True)
class Method:
    """How a range becomes a scale. ``percentile`` is 100 for the other methods."""

    name: str
    percentile: float = 100.0

    @classmethod
    def parse(cls, text: str) -> Method:
        """``"amax"``, ``"percentile:99.9"`` or ``"mse"``. Raises :class:`InvalidArgument`."""
        name, colon, number = text.partition(":")
        if name in ("amax", "mse") and not colon:
            return cls(name)
        try:
            percentile = float(number)
        except ValueError:
            percentile = math.nan
        if name != "percentile" or not 0 < percentile <= 100:
            raise InvalidArgument(f"unknown calibration method {text!r}; known: {METHODS}")
        return cls(name, percentile)

    def __str__(self) -> str:
        return f"percentile:{self.percentile:g}" if self.name == "percentile" else self.name


class Calibrator:
    """Collects ranges and makes scales.

    ``layout``: the cache to calibrate for: its layers, heads, dims and format; sides that need neither static scales
    nor outlier channels are passed over. ``amax`` keeps two numbers per channel; the other methods keep every value
    they were given, as much memory as an unquantized cache of the same tokens in float32.
    """

    def __init__(self, layout: CacheLayout, method: str = "amax") -> None:
        self.layout = layout
        self.method = Method.parse(method)
        self._sides: dict[tuple[int, str], _Side] = {}
        self._groups: dict[int, GroupLayout] = {}
        for group in layout.groups:
            for layer in group.layers:
                self._groups[layer] = group.layout
                formats = {"K": group.layout.format.key}
                if not group.layout.latent:
                    formats["V"] = group.layout.format.value
                for side, fmt in formats.items():
                    if fmt.calibrated:
                        dim = group.layout.key_dim if side == "K" else group.layout.value_dim
                        dim = group.layout.value_dim if group.layout.latent else dim
                        self._sides[layer, side] = _Side(
                            f"layer {layer} {side}", fmt, group.layout.kv_heads, dim, keep=self.method.name != "amax"
                        )
        if not self._sides:
            raise InvalidArgument(
                f"format {layout.format} has no static scales or outlier channels to calibrate; write e.g. "
                "int8:channel:static or int4:g64:outliers=4"
            )

    def observe(self, layer: int, key: Tensor, value: Tensor | None = None, valid: Tensor | None = None) -> None:
        """Take note of some tokens of one layer.

        ``key`` ``(tokens, kv_heads, key_dim)``, after RoPE and before any rotation of kvport's own; ``value``
        ``(tokens, kv_heads, value_dim)``, None for latent layers; ``valid`` ``(tokens,)`` bool: which rows are real
        tokens, not padding. Raises :class:`ScaleError` where a valid token holds NaN or an infinity.
        """
        if layer not in self._groups:
            raise InvalidArgument(f"layer {layer} is not one of the layers {sorted(self._groups)} that store K and V")
        layout = self._groups[layer]
        if layout.latent != (value is None):
            raise InvalidArgument(f"layer {layer}: value must be given, but for latent layers (latent={layout.latent})")
        if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != tuple(key.shape[:1])):
            raise InvalidArgument(f"valid must be bool ({key.shape[0]},), got {valid.dtype} {tuple(valid.shape)}")
        rows = {"K": (key, layout.key_dim)}
        if value is not None:
            rows["V"] = (value, layout.value_dim)
        for side, (given, dim) in rows.items():
            if tuple(given.shape[1:]) != (layout.kv_heads, dim) or given.shape[0] != key.shape[0]:
                raise InvalidArgument(
                    f"layer {layer} {side} must be ({key.shape[0]}, {layout.kv_heads}, {dim}), got {tuple(given.shape)}"
                )
            collected = self._sides.get((layer, side))
            if collected is None:
                continue
            x = (given if valid is None else given[valid]).detach().to("cpu", torch.float32)
            if side == "K" and layout.format.rotate is not None:
                x = rotate(x, layout.format.rotate, layout.rotated_dim)
            collected.add(x[..., : collected.dim])

    @property
    def tokens(self) -> int:
        """Valid tokens seen by the layer that saw fewest."""
        return min(side.tokens for side in self._sides.values())

    def recipe(self, provenance: Mapping[str, str] | None = None) -> Recipe:
        """The scales, checked as a cache checks them. Raises :class:`ScaleError` naming what was never seen."""
        if missing := [side.where for side in self._sides.values() if not side.tokens]:
            raise ScaleError(f"no valid token was seen by {', '.join(missing)}; every layer must be observed")
        notes: list[str] = []
        layers: dict[int, LayerScales] = {}
        for layer in self._groups:
            found = {side: self._sides.get((layer, side)) for side in ("K", "V")}
            key, value = (s.scales(self.method, notes) if s and s.format.static else None for s in found.values())
            channels = [s.channels() if s else None for s in found.values()]
            if any(found.values()):
                layers[layer] = LayerScales(key, value, *channels)
        formats = {layer: _bare(self._groups[layer].format) for layer in layers}
        said = {"source": "calibrated", "method": str(self.method), "tokens": str(self.tokens)}
        recipe = Recipe(layers, formats, {**said, **(provenance or {})}, tuple(notes))
        resolve_scales(self.layout, recipe)
        return recipe


def _bare(fmt: CacheFormat) -> str:
    """The format without tiers: how many recent tokens are kept near does not change what a scale means."""
    return str(CacheFormat(fmt.key, fmt.value, rope=fmt.rope, rotate=fmt.rotate))


class _Side:
    """K or V of one layer: what was seen, and its scales."""

    def __init__(self, where: str, fmt: TensorFormat, heads: int, dim: int, *, keep: bool) -> None:
        self.where, self.format, self.dim, self.keep = where, fmt, dim, keep
        self.tokens = 0
        self.low = torch.full((heads, dim), math.inf, device="cpu")
        self.high = torch.full((heads, dim), -math.inf, device="cpu")
        self.samples: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """``x`` ``(tokens, heads, dim)`` float32."""
        if not x.shape[0]:
            return
        if bad := int((~torch.isfinite(x)).flatten(1).any(1).sum()):
            raise ScaleError(
                f"{self.where}: {bad} of {x.shape[0]} valid tokens hold NaN or an infinity; run the model in a wider "
                "dtype, or mark padding as not valid"
            )
        x = x.clamp(-codec.INPUT_LIMIT, codec.INPUT_LIMIT)
        self.tokens += x.shape[0]
        self.low = torch.minimum(self.low, x.amin(0))
        self.high = torch.maximum(self.high, x.amax(0))
        if self.keep:
            self.samples.append(x)

    def channels(self) -> Tensor | None:
        """The outlier channels ``(heads, c)``, None for a format without."""
        count = self.format.outliers
        return choose_channels(torch.maximum(self.low.abs(), self.high.abs()), count) if count else None

    def scales(self, method: Method, notes: list[str]) -> SideScales:
        low, high = self.low, self.high
        channels = self.channels()
        if channels is not None and self.format.granularity != "channel":
            mask = mask_channels(channels, self.dim)
            low, high = low.masked_fill(mask, math.inf), high.masked_fill(mask, -math.inf)
        low, high = self._reduce(low, torch.amin), self._reduce(high, torch.amax)
        if method.name == "percentile":
            low, high = self._percentile(method.percentile, low, high)
        first = self._from_range(low, high, notes)
        return self._least_error(low, high, first) if method.name == "mse" else first

    def _reduce(self, per_channel: Tensor, by: Callable[..., Tensor]) -> Tensor:
        """``(heads, dim)`` to the shape of the scale."""
        dims = {"channel": None, "head": (1,)}.get(self.format.granularity, (0, 1))
        return per_channel if dims is None else by(per_channel, dims)

    def _grouped(self, samples: Tensor) -> Tensor:
        """``(tokens, heads, dim)`` to the shape of the scale and one more axis: the values that share it."""
        if self.format.granularity == "channel":
            return samples.permute(1, 2, 0)
        heads, dim = samples.shape[1:]
        channels = self.channels()
        if channels is not None:
            kept = ~mask_channels(channels, dim)
            dim -= channels.shape[1]
            samples = samples[:, kept].view(-1, heads, dim)
        if self.format.granularity == "head":
            return samples.permute(1, 2, 0).reshape(heads, dim * samples.shape[0])
        return samples.reshape(-1)

    def _percentile(self, percent: float, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range of ``percent`` of the values; the whole range of a group whose percentile is no range at all."""
        values = self._grouped(torch.cat(self.samples))
        count = values.shape[-1]
        rank = min(count, max(1, math.ceil(percent / 100 * count)))
        if self.format.symmetric:
            size = values.abs().kthvalue(rank, dim=-1).values
            some = size > 0
            return torch.where(some, -size, low), torch.where(some, size, high)
        upper = values.kthvalue(rank, dim=-1).values
        lower = values.kthvalue(count - rank + 1, dim=-1).values
        some = upper > lower
        return torch.where(some, lower, low), torch.where(some, upper, high)

    def _extent(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.maximum(low.abs(), high.abs()) if self.format.symmetric else high - low

    def _from_range(self, low: Tensor, high: Tensor, notes: list[str]) -> SideScales:
        """Scales that just hold a range. Groups without one take the largest scale of their head, or are refused."""
        fmt = self.format
        dead = self._extent(low, high) == 0
        scale, zero = self._divide(low, high)
        if fmt.granularity == "channel" and bool(dead.any()):
            of_head = scale.masked_fill(dead, 0).amax(-1, keepdim=True).expand_as(scale)
            scale = torch.where(dead, of_head, scale)
            notes.append(
                f"{self.where}: {int(dead.sum())} of {dead.numel()} channels never left "
                f"{'zero' if fmt.symmetric else 'one value'}; they take the largest scale of their head"
            )
            dead = dead & (of_head == 0)
        if bool(dead.any()):
            place = "" if dead.dim() == 0 else f" head {int(dead.nonzero()[0][0])}"
            raise ScaleError(
                f"{self.where}{place}: all of {self.tokens} tokens hold {'zeros' if fmt.symmetric else 'one value'}; "
                "there is no range to calibrate. Feed real text through the real weights"
            )
        return SideScales(scale, zero)

    def _divide(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale (rounded up to its dtype, at least its smallest normal number) and zero of ranges."""
        fmt = self.format
        dtype, info = fmt.scale_torch_dtype, torch.finfo(fmt.scale_torch_dtype)
        zero = None
        if fmt.symmetric:
            largest = {"int": 2.0 ** (fmt.bits - 1) - 1, "nv": NVFP4_RANGE}.get(fmt.kind, CODES[fmt.code].largest)
            extent = self._extent(low, high)
        else:
            if bool((low.abs() > info.max).any()):
                raise ScaleError(f"{self.where}: values down to {float(low.min())!r} exceed {fmt.scale_dtype} zeros")
            largest = 2.0**fmt.bits - 1
            zero = codec.floor_cast(low, dtype).to(torch.float32)
            extent = high - zero
        exact = extent / torch.full_like(extent, largest)
        if bool((exact > info.max).any()):
            raise ScaleError(f"{self.where}: values up to {float(high.max())!r} need scales beyond {fmt.scale_dtype}")
        # Round up, which is floor_cast on the negative side. The quotient itself may have been rounded down.
        scale = -codec.floor_cast(-exact, dtype)
        short = extent / scale.to(torch.float32).clamp(min=info.smallest_normal) > largest
        scale = torch.where(short, _next_up(scale), scale).to(torch.float32)
        floor = torch.full_like(scale, info.smallest_normal)
        return torch.where(extent > 0, torch.maximum(scale, floor), torch.zeros_like(scale)), zero

    def _least_error(self, low: Tensor, high: Tensor, first: SideScales) -> SideScales:
        """Of all clips of the range, the one whose squared error over the samples is least; ties to the wider."""
        samples = torch.cat(self.samples)
        dead = self._extent(low, high) == 0
        best_scale, best_zero = torch.as_tensor(first.scale, device="cpu"), first.zero
        least = self._errors(samples, first)
        middle = torch.zeros_like(low) if self.format.symmetric else low / 2 + high / 2
        for clip in CLIPS[1:]:
            scale, zero = self._divide(middle + (low - middle) * clip, middle + (high - middle) * clip)
            candidate = SideScales(torch.where(dead, best_scale, scale), zero)
            errors = self._errors(samples, candidate)
            better = (errors < least) & ~dead
            least = torch.where(better, errors, least)
            best_scale = torch.where(better, scale, best_scale)
            if zero is not None and best_zero is not None:
                best_zero = torch.where(better, zero, best_zero)
        return SideScales(best_scale, best_zero)

    def _errors(self, samples: Tensor, scales: SideScales) -> Tensor:
        channels = self.channels()
        # Samples are not pages: what sparse outliers will keep of each is not known, and is not left out here.
        fmt = replace(self.format, sparse=0)
        planes = codec.encode(fmt, samples, scales, channels).planes
        decoded = codec.decode(fmt, planes, scales, channels=channels)
        return self._grouped((decoded - samples).double().square()).sum(-1)


def _next_up(x: Tensor) -> Tensor:
    """The next larger number of the dtype, for finite x >= 0: positive floats are ordered as their bits are."""
    bits = x.view(torch.int32 if x.itemsize == 4 else torch.int16)
    return (bits + 1).view(x.dtype)


# -- a whole model -----------------------------------------------------------------------------------------------------


def calibrate_model(
    model: Any,
    ids: Tensor,
    format: str | CacheFormat,
    *,
    method: str = "amax",
    mask: Tensor | None = None,
    chunk: int = CHUNK,
    provenance: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recipe:
    """Run a transformers causal language model over ``ids`` and calibrate a static format.

    Args:
        model: in evaluation mode.
        ids: token ids ``(rows, tokens)``; each row is a context of its own.
        format: the format to calibrate for. With ``sink=`` the first tokens of each row are left out, as they are
            never stored in static codes.
        method: see the module.
        mask: ``(rows, tokens)``, 1 for tokens and 0 for padding, as the tokenizer returns it.
        chunk: tokens in one forward.
        provenance: what the recipe should say beside method, tokens and versions.
        progress: called with (forwards done, forwards to do).

    Layers are numbered as in :class:`kvport.integrations.transformers.KVPortCache`: those that store K and V, in order.

    Latent (MLA) models take a latent format, such as ``latent=int8:tensor:static,rope=bf16``, and others do not: raises
    :class:`LayoutError` where model and format do not go together.
    """
    from kvport.integrations.observing import observe_cache

    fmt = CacheFormat.parse(format)
    calibrator: Calibrator | None = None
    for forward in observe_cache(model, ids, mask=mask, chunk=chunk, progress=progress):
        if calibrator is None:
            calibrator = Calibrator(_layout(fmt, forward), method)
        valid = forward.valid & (forward.positions >= fmt.sink)
        for local, (layer, (key, value)) in enumerate(forward.layers.items()):
            if layer in forward.latent:
                calibrator.observe(local, torch.cat((key, value), -1), None, valid)
            else:
                calibrator.observe(local, key, value, valid)
    assert calibrator is not None
    return calibrator.recipe({**versions(), **(provenance or {})})


def _layout(fmt: CacheFormat, forward: Forward) -> CacheLayout:
    """The layout of a model's layers, read off what its first forward brought."""
    specs = []
    for layer, (key, value) in forward.layers.items():
        heads, dims = key.shape[1], (key.shape[2], value.shape[2])
        if layer in forward.latent:
            specs.append(LayerSpec(1, 1, key_dim=sum(dims), value_dim=dims[0], latent=True))
        else:
            specs.append(LayerSpec(heads, heads, *dims))
    return CacheLayout(tuple(specs), fmt)


def versions() -> dict[str, str]:
    """What a recipe says of the software and the day that made it."""
    import importlib.metadata

    found = [f"python {platform.python_version()}"]
    for name in ("kvport", "torch", "transformers"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": ", ".join(found), "date": time.strftime("%Y-%m-%d", time.gmtime())}
