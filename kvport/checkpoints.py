"""Static scales that a model's checkpoint brings, as a :class:`~kvport.recipes.Recipe`.

Two families of checkpoints, one path: find the scales by name, check that every layer has both K and V, work out the
format from what the checkpoint says of itself and from the shapes, convert to kvport's convention, check as a cache
would.

*vLLM and compressed-tensors* (also ModelOpt and Quark): ``<layer>.self_attn.k_scale`` / ``v_scale``, the same under
``k_proj``, ``v_proj``, ``qkv_proj`` or ``attn``, ``k_proj.output_scale`` / ``v_proj.output_scale``, or one deprecated
``kv_scale`` for both; one value, one per KV head (strategy ``attn_head``), or one per head and channel. What the codes
are stands in ``config.json`` (``quantization_config.kv_cache_scheme``, ``kv_cache_quant_algo``) or in
``hf_quant_config.json``.

*ModelSlim C8* (Ascend): ``<layer>.k_proj.kv_cache_scale`` / ``kv_cache_offset`` and the same for ``v_proj``, one value
per head and channel, declared in ``quant_model_description.json``.

Conventions. A checkpoint's signed code q, in -128 .. 127, with an offset o means x = (q - o) * scale. kvport's
asymmetric code u = q + 128 means x = u * scale + zero, hence zero = -(o + 128) * scale. That product must be exact in
float32: it is, for scales of 16-bit dtypes; a float32 scale that is not is refused, or rounded to a 16-bit dtype on
request (``round_scales``), which is what runtimes with 16-bit parameters do when they load it. Without offsets the
format is symmetric and scales are taken as they are; kvport's encoder then leaves out the code -128.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvport.errors import InvalidArgument, ScaleError, Unsupported
from kvport.files import parse_json, reading
from kvport.formats import DTYPES, CacheFormat, TensorFormat
from kvport.layout import CacheLayout, LayerSpec
from kvport.model_config import ModelGeometry, read_model_config
from kvport.recipes import Recipe
from kvport.scales import LayerScales, SideScales, resolve_scales, warn_unit_scales

_LAYER: Final = r"(?P<prefix>(?:[^.]+\.)*?)(?P<layer>[0-9]+)\."
_MODELSLIM: Final = re.compile(_LAYER + r"(?:.*\.)?(?P<side>[kv])_proj\.kv_cache_(?P<part>scale|offset)")
_VLLM: Final = (
    re.compile(_LAYER + r"(?:.*\.)?(?P<side>[kv]|kv)_(?P<part>scale|zero_point)"),
    re.compile(_LAYER + r"(?:.*\.)?(?P<side>[kv])_proj\.output_(?P<part>scale|zero_point)"),
)
_ALGORITHMS: Final = {"FP8": "fp8_e4m3", "INT8": "int8"}
_C8: Final = ("C8", "KV8")
#: Offsets are in code units; beyond this they could not be zero points of 8-bit codes by a wide margin.
_LARGEST_OFFSET: Final = 2**15


@dataclass(frozen=True)
class _Found:
    """One tensor of a checkpoint that is a scale or an offset (``part``) of a side of a layer."""

    name: str
    prefix: str
    layer: int
    side: str
    part: str
    value: Tensor


def import_scales(
    path: str | os.PathLike[str],
    *,
    code: str | None = None,
    round_scales: str | None = None,
    prefix: str | None = None,
) -> Recipe:
    """The static scales of a checkpoint folder (or of one safetensors file).

    Args:
        path: the folder with ``config.json`` and the weights.
        code: ``"fp8_e4m3"`` or ``"int8"``, where the checkpoint does not say what its codes are.
        round_scales: ``"fp16"`` or ``"bf16"``: round the scales to that dtype first, see the module.
        prefix: take only tensors whose name begins so, for checkpoints of several models.

    Returns a recipe whose ``format`` is what to open the cache with. Raises :class:`ScaleError` naming the tensors or
    layers where scales are missing, half-provided, of an unknown shape, or not exact; :class:`Unsupported` for kinds
    of cache quantization that kvport has no format for.
    """
    if round_scales not in (None, "fp16", "bf16"):
        raise InvalidArgument(f"round_scales must be 'fp16', 'bf16' or None, got {round_scales!r}")
    if code not in (None, "fp8_e4m3", "fp8_e5m2", "int8"):
        raise InvalidArgument(f"code must be 'fp8_e4m3', 'fp8_e5m2' or 'int8', got {code!r}")
    files = _Files(Path(path))
    description = files.description()
    found = files.read(_MODELSLIM, prefix=prefix)
    if found or description is not None:
        kind = "ModelSlim C8"
        _check_description(files, description, found, code)
        code, symmetric = "int8", all(not bool(f.value.any()) for f in found if f.part == "offset")
    else:
        kind = "k_scale and v_scale"
        found = files.read(*_VLLM, prefix=prefix)
        code, symmetric = _scheme(files, code)
        shifted = [f.name for f in found if f.part == "offset" and bool(f.value.to(torch.float64).any())]
        if symmetric and shifted:
            raise ScaleError(f"{files.path} says its cache is symmetric {code}, and has zero points: {_few(shifted)}")
    if not found:
        raise ScaleError(
            f"{files.path} has no tensors that are scales of a KV cache (such as layers.0.self_attn.k_scale or "
            "layers.0.self_attn.k_proj.kv_cache_scale); calibrate with 'kvport calibrate --model'"
        )
    geometry = files.geometry()
    sides = _by_layer(found)
    layers = _numbered(sides, geometry)
    rounded = None if round_scales is None else DTYPES[round_scales]
    scales: dict[int, LayerScales] = {}
    granularity: dict[str, str] = {}
    for layer, spec in layers.items():
        made = {}
        for side, dim in (("K", spec.key_dim), ("V", spec.value_dim)):
            parts = sides[layer][side]
            where = f"layer {layer} {side} ({parts['scale'].name})"
            shape = _granularity(where, parts["scale"].value, spec.kv_heads, dim, known=geometry is not None)
            if granularity.setdefault(side, shape) != shape:
                raise ScaleError(f"{where} is one scale per {shape}, earlier layers have one per {granularity[side]}")
            offset = None if symmetric else parts.get("offset")
            made[side] = _convert(where, parts["scale"].value, offset, shape, spec.kv_heads, dim, rounded)
        scales[_cache_layer(geometry, layer)] = LayerScales(made["K"], made["V"])
    # Zeros are products, which need float32; scales alone keep the dtype that they were rounded to.
    dtype = round_scales if round_scales is not None and symmetric else "fp32"
    formats = {
        side: TensorFormat(code, shape, 0, symmetric, True, dtype)  # type: ignore[arg-type]
        for side, shape in granularity.items()
    }
    fmt = CacheFormat(formats["K"], formats["V"])
    provenance = {"source": f"imported: {kind}", "checkpoint": files.path.name}
    if round_scales is not None:
        provenance["round_scales"] = round_scales
    notes = []
    if any(f.side == "KV" for f in found):
        notes.append("the checkpoint has one kv_scale for K and V; both take it")
    if code == "int8" and symmetric:
        notes.append(
            "kvport's encoder uses codes -127 .. 127: values that the checkpoint's own would code -128 saturate"
        )
    recipe = Recipe(scales, dict.fromkeys(scales, str(fmt)), provenance, tuple(notes))
    warn_unit_scales(resolve_scales(_layout(geometry, fmt, layers), recipe))
    return recipe


# -- reading ---------------------------------------------------------------------------------------------------------


class _Files:
    """The safetensors files of a checkpoint and the JSON beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "checkpoint", "give a safetensors file, or the folder that holds some"):
            path.stat()
        self.folder = path if path.is_dir() else path.parent
        self.files = [path]
        if path.is_dir():
            self.files = self._indexed() or sorted(path.glob("*.safetensors"))
        if not self.files:
            legacy = [name for name in ("kv_cache_scale.npy", "kv_cache_offset.npy") if (path / name).exists()]
            more = f" ({', '.join(legacy)} of an old ModelSlim are not read: export again)" if legacy else ""
            raise ScaleError(f"{path} holds no safetensors files{more}")

    def _indexed(self) -> list[Path]:
        index = self.json("model.safetensors.index.json")
        if index is None:
            return []
        files = sorted({self.folder / str(name) for name in index.get("weight_map", {}).values()})
        if missing := [file.name for file in files if not file.is_file()]:
            raise ScaleError(f"{self.path}: the index names files that are not there: {', '.join(missing)}")
        return files

    def json(self, name: str) -> dict[str, Any] | None:
        file = self.folder / name
        if not file.is_file():
            return None
        try:
            with reading(file, "description", "it belongs to the checkpoint"):
                content = parse_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ScaleError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise ScaleError(f"{file} holds a {type(content).__name__}, not named fields")
        return content

    def description(self) -> dict[str, Any] | None:
        """ModelSlim's description where it says something of the KV cache. Old tools add the weight type to its name.

        The description of a model whose cache is not quantized is None here.
        """
        for file in sorted(self.folder.glob("quant_model_description*.json")):
            content = self.json(file.name)
            if content is not None and (
                {"kv_cache_type", "kv_quant_type", "fa_quant_type"} & set(content)
                or any("kv_cache_scale" in name for name in content)
            ):
                return content
        return None

    def geometry(self) -> ModelGeometry | None:
        return read_model_config(self.folder) if (self.folder / "config.json").is_file() else None

    def read(self, *patterns: re.Pattern[str], prefix: str | None) -> list[_Found]:
        """All tensors whose whole name matches a pattern. Several models in one checkpoint need ``prefix``."""
        found: dict[str, _Found] = {}
        for file in self.files:
            try:
                with (
                    reading(file, "part of the checkpoint", "copy the checkpoint whole"),
                    safe_open(file, framework="pt") as tensors,
                ):
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        match = next((m for p in patterns if (m := p.fullmatch(name))), None)
                        if match is None or (prefix is not None and not name.startswith(prefix)):
                            continue
                        if name in found:
                            raise ScaleError(f"{name} is in two files of {self.path}")
                        part = {"zero_point": "offset"}.get(match["part"], match["part"])
                        value = tensors.get_tensor(name).detach().cpu()
                        found[name] = _Found(
                            name, match["prefix"], int(match["layer"]), match["side"].upper(), part, value
                        )
            except SafetensorError as error:
                raise ScaleError(f"{file} is not an intact safetensors file: {error}") from error
        if len(prefixes := sorted({f.prefix for f in found.values()})) > 1:
            raise ScaleError(
                f"the scales of {self.path} belong to several models: {', '.join(prefixes)}; choose one with prefix="
            )
        return list(found.values())


def _check_description(
    files: _Files, description: Mapping[str, Any] | None, found: Iterable[_Found], code: str | None
) -> None:
    """What ModelSlim says of the cache must be C8, and must list the same tensors as there are."""
    if code not in (None, "int8"):
        raise ScaleError(f"{files.path} holds ModelSlim scales of int8 codes; code={code!r} cannot be")
    if description is None:
        if code is None:
            raise ScaleError(
                f"{files.path} has kv_cache_scale tensors and no quant_model_description.json that says what they are; "
                "give code='int8' if you know that it is C8"
            )
        return
    if description.get("fa_quant_type"):
        raise Unsupported(
            f"{files.path} is quantized for attention itself (fa_quant_type {description['fa_quant_type']!r}): its "
            "scales are of q, k and v inside the operator, not of a cache"
        )
    kinds = {field: description[field] for field in ("kv_cache_type", "kv_quant_type") if description.get(field)}
    if wrong := {field: kind for field, kind in kinds.items() if kind not in _C8}:
        raise Unsupported(f"{files.path}: {wrong}; kvport reads {' and '.join(_C8)}, 8-bit codes per channel")
    listed = {name for name in description if _MODELSLIM.fullmatch(name)}
    present = {f.name for f in found}
    if listed and (missing := sorted(listed - present)):
        raise ScaleError(f"{files.path}: quant_model_description lists tensors that are not there: {_few(missing)}")
    if listed and (extra := sorted(present - listed)):
        raise ScaleError(f"{files.path}: quant_model_description does not list {_few(extra)}")


def _scheme(files: _Files, code: str | None) -> tuple[str, bool]:
    """Code and symmetry from what the checkpoint says, which ``code`` may fill in but not contradict."""
    config = files.json("config.json") or {}
    quantization = config.get("quantization_config") or {}
    stated: str | None = None
    symmetric = True
    scheme = quantization.get("kv_cache_scheme")
    hf = (files.json("hf_quant_config.json") or {}).get("quantization") or {}
    algorithm = quantization.get("kv_cache_quant_algo") or hf.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        kind = (scheme.get("type"), scheme.get("num_bits"))
        stated = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}.get(kind)  # type: ignore[arg-type]
        if stated is None or scheme.get("dynamic"):
            raise Unsupported(
                f"{files.path}: kv_cache_scheme {scheme}; kvport reads static 8-bit floats and integers (type float or "
                "int, num_bits 8, dynamic false)"
            )
        symmetric = bool(scheme.get("symmetric", True))
        if stated != "int8" and not symmetric:
            raise Unsupported(f"{files.path}: kv_cache_scheme is an asymmetric float, which has no meaning here")
    elif algorithm:
        stated = _ALGORITHMS.get(str(algorithm).upper())
        if stated is None:
            raise Unsupported(f"{files.path}: kv_cache_quant_algo {algorithm!r}; kvport reads {', '.join(_ALGORITHMS)}")
    if stated is None and code is None:
        raise ScaleError(
            f"{files.path} does not say what its KV codes are (quantization_config.kv_cache_scheme in config.json); "
            "give code='fp8_e4m3' or code='int8'"
        )
    if stated is not None and code is not None and stated != code:
        raise ScaleError(f"{files.path} says that its KV codes are {stated}; code={code!r} contradicts it")
    return stated or str(code), symmetric


# -- by layer --------------------------------------------------------------------------------------------------------


def _by_layer(found: Iterable[_Found]) -> dict[int, dict[str, dict[str, _Found]]]:
    """layer -> "K" / "V" -> "scale" / "offset". Twice the same, or a half, is refused by name."""
    sides: dict[int, dict[str, dict[str, _Found]]] = {}
    for one in found:
        for side in one.side:  # "KV" is both
            parts = sides.setdefault(one.layer, {}).setdefault(side, {})
            if one.part in parts:
                raise ScaleError(f"layer {one.layer} {side} has two {one.part}s: {parts[one.part].name} and {one.name}")
            parts[one.part] = one
    for layer, given in sorted(sides.items()):
        for side in "KV":
            if "scale" not in given.get(side, {}):
                other = next(iter(given[next(iter(given))].values())).name
                raise ScaleError(
                    f"layer {layer} {side} has no scale in the checkpoint, which has {other}; K and V both need theirs"
                )
    with_offset = {(layer, side) for layer, given in sides.items() for side in "KV" if "offset" in given[side]}
    if with_offset:
        without = sorted({(layer, side) for layer in sides for side in "KV"} - with_offset)
        if without:
            raise ScaleError(
                f"{len(with_offset)} scales have an offset and these have none: "
                + _few([f"layer {layer} {side}" for layer, side in without])
            )
    return sides


def _numbered(sides: Mapping[int, object], geometry: ModelGeometry | None) -> dict[int, LayerSpec]:
    """The spec of each model layer that stores K and V. Refuses layers without scales and scales without layers."""
    if geometry is None:
        specs = dict.fromkeys(range(max(sides) + 1), LayerSpec(1, 1, 1, 1))
    else:
        pairs = zip(geometry.model_layers, geometry.layers, strict=True)
        specs = {number: spec for number, spec in pairs if spec.shares is None}
        if latent := [number for number, spec in specs.items() if spec.latent]:
            raise Unsupported(
                f"layer {latent[0]} is latent (MLA): the checkpoint's scale covers latent and rope part together, "
                "kvport's rope part has no static scale"
            )
    if missing := sorted(set(specs) - set(sides)):
        raise ScaleError(
            f"the checkpoint has no scales for layers {_few(missing)} of {len(specs)}; they need both K and V"
        )
    if extra := sorted(set(sides) - set(specs)):
        raise ScaleError(
            f"the checkpoint has scales for layers {_few(extra)}, which the model does not store K and V of"
        )
    return specs


def _cache_layer(geometry: ModelGeometry | None, layer: int) -> int:
    """The cache's number of a model layer: layers that store nothing are not counted."""
    return layer if geometry is None else geometry.model_layers.index(layer)


def _layout(geometry: ModelGeometry | None, fmt: CacheFormat, layers: Mapping[int, LayerSpec]) -> CacheLayout:
    if geometry is not None:
        return geometry.layout(fmt)
    return CacheLayout(tuple(layers.values()), fmt)


def _granularity(where: str, scale: Tensor, heads: int, dim: int, *, known: bool) -> str:
    count = scale.numel()
    if count == 1:
        return "tensor"
    if not known:
        raise ScaleError(f"{where} has {count} values, and without a config.json its heads and channels are not known")
    if count == heads:
        return "head"
    if count == heads * dim:
        return "channel"
    raise ScaleError(
        f"{where} has shape {tuple(scale.shape)}; allowed: 1 value, {heads} (one per KV head) or {heads * dim} (one "
        f"per head and channel, {heads} x {dim})"
    )


# -- converting ------------------------------------------------------------------------------------------------------


def _convert(
    where: str, scale: Tensor, offset: _Found | None, shape: str, heads: int, dim: int, rounded: torch.dtype | None
) -> SideScales:
    """To kvport's scale and zero, of the shape of the granularity, float32."""
    if not scale.dtype.is_floating_point:
        raise ScaleError(f"{where} is {scale.dtype}, scales are floats")
    exact = scale.to(torch.float64)
    value = exact.to(torch.float32)
    if rounded is not None:
        value = value.to(rounded).to(torch.float32)
    elif bool((value.to(torch.float64) != exact).logical_and(~exact.isnan()).any()):
        raise ScaleError(f"{where} is {scale.dtype} and not exact in float32; give round_scales='fp16' or 'bf16'")
    final = {"tensor": (), "head": (heads,), "channel": (heads, dim)}[shape]
    value = value.reshape(final)
    if offset is None:
        return SideScales(value)
    if offset.value.numel() != scale.numel():
        raise ScaleError(f"{where}: {scale.numel()} scales and {offset.value.numel()} offsets ({offset.name})")
    shift = offset.value.to(torch.float64).reshape(final)
    if bool((bad := ~(shift.abs() <= _LARGEST_OFFSET) | (shift != shift.round())).any()):
        raise ScaleError(
            f"{where}: {offset.name} holds {float(shift[bad].reshape(-1)[0])!r}; offsets are whole numbers of codes, "
            f"at most {_LARGEST_OFFSET}"
        )
    # Exact in float64: 24 bits of scale times at most 16 of offset.
    zero = -(shift + 128) * value.to(torch.float64)
    if bool((bad := (zero.to(torch.float32).to(torch.float64) != zero) & value.isfinite()).any()):
        raise ScaleError(
            f"{where}: offset {int(shift[bad].reshape(-1)[0])} times scale {float(value[bad].reshape(-1)[0])!r} is not "
            "exact in float32; give round_scales='bf16' or 'fp16' to round the scales first, as runtimes with 16-bit "
            "parameters do"
        )
    return SideScales(value, zero.to(torch.float32))


def _few(items: Iterable[object]) -> str:
    """At most eight of them, and how many more."""
    listed = [str(item) for item in items]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
