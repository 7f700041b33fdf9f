"""Static scales as a file: what calibration and importers write, and ``kvport.open(scales=load_recipe(path))`` reads.

A :class:`Recipe` is a mapping from layer to :class:`~kvport.scales.LayerScales` that also knows the format it was made
for. Opening a cache of another format with it is refused: the same numbers would mean something else.

The file is safetensors. Tensors ``<layer>.key.scale``, ``<layer>.key.zero``, ``<layer>.value.scale`` and
``<layer>.value.zero``, float32, of shape ``()`` for granularity tensor, ``(kv_heads,)`` for head and
``(kv_heads, dim)`` for channel; ``<layer>.key.channels`` and ``<layer>.value.channels``, int64 ``(kv_heads, c)``, for
formats with outlier channels; the metadata has the version, the format by layer, provenance, and a sha256 over all
of it. Loading refuses, and never repairs, a file that is damaged or incomplete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvport.arguments import show
from kvport.errors import InvalidArgument, KVPortError, ScaleError
from kvport.files import parse_json, reading, write_atomically
from kvport.formats import CacheFormat, TensorFormat
from kvport.layout import CacheLayout
from kvport.scales import LayerScales, ScaleSource, SideScales

RECIPE_VERSION: Final = 1
_SIDES: Final = ("key", "value")
_PARTS: Final = ("scale", "zero")


@dataclass(frozen=True, eq=False)
class Recipe(ScaleSource):
    """Static scales and what they were made for.

    ``layers``: scales by cache layer. ``formats``: canonical format string by layer, without tiers. ``provenance``:
    where they come from, in words: ``source``, ``model``, ``text_sha256``, ``tokens``, ``method``, ``date``,
    ``versions`` (JSON). ``notes``: what a reader should know, such as channels that were always zero.
    """

    layers: Mapping[int, LayerScales]
    formats: Mapping[int, str]
    provenance: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or set(self.layers) != set(self.formats):
            raise ScaleError(
                f"a recipe has a format for each of its layers; scales for {sorted(self.layers)}, formats for "
                f"{sorted(self.formats)}"
            )
        for name in ("layers", "formats", "provenance"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __repr__(self) -> str:
        formats = ", ".join(sorted(set(self.formats.values())))
        return f"<Recipe for {formats}: {len(self)} layers, digest {self.digest()[:12]}...>"

    def __getitem__(self, layer: int) -> LayerScales:
        return self.layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def format(self) -> str:
        """The format of all layers. Raises :class:`ScaleError` where layers differ; see :attr:`formats`."""
        found = set(self.formats.values())
        if len(found) > 1:
            raise ScaleError(f"the layers of this recipe have {len(found)} formats: {', '.join(sorted(found))}")
        return next(iter(found))

    def digest(self) -> str:
        """sha256 over scales, zeros and formats, in hex: equal for equal recipes, whatever their provenance."""
        return _digest(self._tensors(), dict(self.formats))

    def check(self, layout: CacheLayout) -> None:
        """Refuse a cache of another format than the recipe was made for, naming the layer.

        The scale dtype may be another one where it holds every number exactly.
        """
        for group in layout.groups:
            wanted = group.layout.format
            for layer in group.layers:
                if layer not in self.formats:
                    continue  # resolve_scales says what is missing, side by side
                made_for = CacheFormat.parse(self.formats[layer])
                if made_for.rotate != wanted.rotate:
                    raise ScaleError(
                        f"layer {layer}: the recipe was made for K with rotate={made_for.rotate}, the cache has "
                        f"rotate={wanted.rotate}; calibrate for the cache's format"
                    )
                for side, made, fmt in (
                    ("K", made_for.key, wanted.key),
                    ("V", made_for.value, wanted.value),
                ):
                    self._check_side(layer, side, made, fmt)

    def _check_side(self, layer: int, side: str, made: TensorFormat, fmt: TensorFormat) -> None:
        if made.outliers != fmt.outliers:
            raise ScaleError(
                f"layer {layer} {side}: the recipe was made for {made}, the cache has {fmt}: outlier channels differ; "
                "calibrate for this one"
            )
        if not (made.static or fmt.static):
            return
        traits = ("code", "granularity", "symmetric", "static")
        if any(getattr(made, trait) != getattr(fmt, trait) for trait in traits):
            raise ScaleError(
                f"layer {layer} {side}: the recipe was made for {made}, the cache has {fmt}; open it with the recipe's "
                "format or calibrate for this one"
            )
        scales = self.layers[layer].key if side == "K" else self.layers[layer].value
        if made.scale_dtype == fmt.scale_dtype or scales is None:
            return
        for part in (scales.scale, scales.zero):
            given = None if part is None else torch.as_tensor(part, dtype=torch.float32, device="cpu")
            if given is not None and not bool((given.to(fmt.scale_torch_dtype).float() == given).all()):
                raise ScaleError(
                    f"layer {layer} {side}: the recipe was made for {made}, and its numbers are not exact in the "
                    f"{fmt.scale_dtype} of the cache's {fmt}; calibrate for {fmt}"
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, atomically: a reader sees the old file or the whole new one."""
        tensors = self._tensors()
        formats = {str(layer): fmt for layer, fmt in self.formats.items()}
        metadata = {
            "kvport.recipe": str(RECIPE_VERSION),
            "formats": json.dumps(formats, sort_keys=True),
            "provenance": json.dumps(dict(self.provenance), sort_keys=True),
            "notes": json.dumps(self.notes),
            "digest": self.digest(),
        }
        write_atomically(path, safetensors.torch.save(tensors, metadata))

    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        for layer, scales in sorted(self.layers.items()):
            for side in _SIDES:
                given: SideScales | None = getattr(scales, side)
                for part in _PARTS:
                    if given is not None and getattr(given, part) is not None:
                        tensor = torch.as_tensor(getattr(given, part), dtype=torch.float32, device="cpu")
                        # A copy: safetensors refuses a tensor that several layers share.
                        found[f"{layer}.{side}.{part}"] = tensor.detach().cpu().clone().contiguous()
                channels = getattr(scales, f"{side}_channels")
                if channels is not None:
                    found[f"{layer}.{side}.channels"] = (
                        torch.as_tensor(channels, device="cpu").detach().to("cpu", torch.int64, copy=True)
                    )
        return found


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe. Raises :class:`ScaleError` for anything but an intact one, and :class:`FileError` where there is
    no file that can be read."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument(f"load_recipe takes a path, got {show(path)}")
    try:
        with (
            reading(path, "recipe", "'kvport calibrate -o' writes one"),
            safe_open(os.fspath(path), framework="pt") as file,
        ):
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, ValueError) as error:
        raise ScaleError(f"{os.fspath(path)} is not an intact safetensors file: {error}") from error
    if metadata.get("kvport.recipe") != str(RECIPE_VERSION):
        raise ScaleError(
            f"{os.fspath(path)} has recipe version {metadata.get('kvport.recipe')!r}; this kvport reads "
            f"{RECIPE_VERSION}. For scales in a model's checkpoint use kvport.checkpoints.import_scales"
        )
    try:
        formats = {int(layer): str(fmt) for layer, fmt in parse_json(metadata["formats"]).items()}
        layers: dict[int, dict[str, dict[str, Tensor]]] = {layer: {} for layer in formats}
        channels: dict[int, dict[str, Tensor]] = {layer: {} for layer in formats}
        for name, tensor in tensors.items():
            layer, side, part = name.split(".")
            if side not in _SIDES or part not in (*_PARTS, "channels"):
                raise ValueError(f"unknown tensor {name}")
            if part == "channels":
                channels[int(layer)][side] = tensor
            else:
                layers[int(layer)].setdefault(side, {})[part] = tensor
        scales = {
            layer: LayerScales(
                key=SideScales(**sides["key"]) if "key" in sides else None,
                value=SideScales(**sides["value"]) if "value" in sides else None,
                key_channels=channels[layer].get("key"),
                value_channels=channels[layer].get("value"),
            )
            for layer, sides in sorted(layers.items())
        }
        provenance = {str(key): str(value) for key, value in parse_json(metadata["provenance"]).items()}
        notes = tuple(str(note) for note in parse_json(metadata["notes"]))
        for fmt in set(formats.values()):
            CacheFormat.parse(fmt)
        recorded = metadata["digest"]
    except (KeyError, ValueError, TypeError, AttributeError, KVPortError) as error:
        raise ScaleError(f"{os.fspath(path)} is a damaged recipe: {error!r}") from error
    if _digest(tensors, formats) != recorded:
        raise ScaleError(f"{os.fspath(path)}: the checksum does not match; the file was damaged or altered")
    return Recipe(scales, formats, provenance, notes)


def _digest(tensors: Mapping[str, Tensor], formats: Mapping[int, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(formats.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}/{tensor.dtype}{tuple(tensor.shape)}".encode())
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(raw.tobytes())
    return digest.hexdigest()
