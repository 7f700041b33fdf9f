"""Static KV-cache scales out of quantized checkpoints, with the sign and the meaning that kvport gives them.

Two families:

:func:`read_modelslim`
    Huawei ModelSlim "C8": ``<layer>.k_proj.kv_cache_scale`` and ``.kv_cache_offset`` with one number per KV channel,
    announced in ``quant_model_description.json``. There x = (code - offset) * scale with codes -128 .. 127.
:func:`read_kv_scales`
    compressed-tensors and vLLM: ``<layer>.self_attn.k_scale`` and ``.v_scale``, one number per layer or per KV head,
    x = code * scale, announced in ``config.json`` under ``quantization_config.kv_cache_scheme``.

Both return the format to open the cache with and the scales by layer, as ``kvport.open(format=..., scales=...)`` takes
them. Nothing is guessed: a checkpoint that announces something else, or that lacks a tensor, is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvport.errors import ScaleError
from kvport.formats import dtype_name
from kvport.scales import LayerScales, SideScales

MODELSLIM_DESCRIPTION = "quant_model_description.json"
MODELSLIM_KINDS = ("C8", "KV8")
_MODELSLIM_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?([kv])_proj\.kv_cache_(scale|offset)$")
_KV_SCALE_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?([kv])_scale$")


@dataclass(frozen=True)
class CheckpointScales:
    """``format`` is a kvport format string, ``scales`` one entry per layer that the checkpoint has scales for."""

    format: str
    scales: dict[int, LayerScales]


def read_modelslim(folder: Path, *, kv_heads: int, round_to: torch.dtype = torch.float32) -> CheckpointScales:
    """Scales of a ModelSlim C8 checkpoint folder.

    ``kv_heads`` cuts the ``(kv_heads * dim,)`` tensors. Scales are rounded to ``round_to`` (nearest); the Ascend
    backend wants the model's dtype, in which vllm-ascend keeps them too. Where every offset is 0 the format is
    symmetric, with scales of that dtype. Else, with the unsigned code u = code + 128, x = u * scale + zero and
    zero = -(offset + 128) * scale, and the format has float32 scales and zeros. That product is exact in float32 for
    bfloat16 and float16 scales, and refused where it is not: the codes would decode to other values than are meant.
    """
    kind = _modelslim_kind(folder)
    if kind not in MODELSLIM_KINDS:
        raise ScaleError(
            f"{folder / MODELSLIM_DESCRIPTION} says kv_cache_type {kind!r}; allowed: {' or '.join(MODELSLIM_KINDS)}"
        )
    found: dict[tuple[int, str, str], Tensor] = {}
    for name, tensor in _tensors(folder, _MODELSLIM_NAME):
        match = _MODELSLIM_NAME.search(name)
        assert match is not None
        found[int(match[1]), match[2], match[3]] = _by_head(name, tensor, kv_heads)
    layers = sorted({layer for layer, _, _ in found})
    if not layers:
        raise ScaleError(f"{folder} has no tensor named '...layers.N...k_proj.kv_cache_scale'")
    if missing := [f"layer {n} {side}_proj" for n in layers for side in "kv" if (n, side, "scale") not in found]:
        raise ScaleError(f"{folder} has kv_cache_scale of other layers, but not of {', '.join(missing)}")
    offsets = [tensor for (_, _, part), tensor in found.items() if part == "offset"]
    symmetric = not any(bool((offset != 0).any()) for offset in offsets)

    def side(layer: int, name: str) -> SideScales:
        where = f"layer {layer} {name.upper()}"
        scale = _rounded(where, found[layer, name, "scale"], round_to)
        if symmetric:
            return SideScales(scale)
        offset = found.get((layer, name, "offset"), torch.zeros_like(found[layer, name, "scale"]))
        exact = -(offset + 128.0) * scale.double()
        zero = exact.float()
        if bool((wrong := zero.double() != exact).any()):
            raise ScaleError(
                f"{where}: {int(wrong.sum())} of {exact.numel()} zeros -(offset + 128) * scale are no float32 numbers, "
                f"e.g. {float(exact[wrong][0])!r}; pass round_to=torch.bfloat16 or torch.float16"
            )
        return SideScales(scale.float(), zero)

    text = f"int8:channel:static:scale={dtype_name(round_to)}" if symmetric else "int8:channel:asym:static:scale=fp32"
    return CheckpointScales(text, {layer: LayerScales(side(layer, "k"), side(layer, "v")) for layer in layers})


def read_kv_scales(folder: Path, *, round_to: torch.dtype = torch.float32) -> CheckpointScales:
    """Scales of a compressed-tensors or vLLM checkpoint folder: int8 or float8 e4m3, one per layer or KV head."""
    scheme = _kv_cache_scheme(folder)
    code = {("int", 8): "int8", ("float", 8): "fp8_e4m3"}.get((str(scheme.get("type")), int(scheme.get("num_bits", 0))))
    if code is None or scheme.get("dynamic") or not scheme.get("symmetric", True):
        raise ScaleError(
            f"{folder / 'config.json'} has kv_cache_scheme {scheme}; static symmetric 8-bit 'int' or 'float' is read"
        )
    found: dict[tuple[int, str], Tensor] = {}
    for name, tensor in _tensors(folder, _KV_SCALE_NAME):
        match = _KV_SCALE_NAME.search(name)
        assert match is not None
        found[int(match[1]), match[2]] = _rounded(name, tensor.double().reshape(-1), round_to)
    layers = sorted({layer for layer, _ in found})
    if not layers:
        raise ScaleError(f"{folder} has no tensor named '...layers.N...k_scale'")
    if missing := [f"layer {n} {side}_scale" for n in layers for side in "kv" if (n, side) not in found]:
        raise ScaleError(f"{folder} lacks {', '.join(missing)}")
    if len(counts := {tensor.numel() for tensor in found.values()}) != 1:
        raise ScaleError(f"{folder} has k_scale and v_scale of {sorted(counts)} numbers; one count for all layers")
    per_tensor = counts == {1}

    def side(layer: int, name: str) -> SideScales:
        return SideScales(found[layer, name].reshape(()) if per_tensor else found[layer, name])

    scales = {layer: LayerScales(side(layer, "k"), side(layer, "v")) for layer in layers}
    granularity = "tensor" if per_tensor else "head"
    return CheckpointScales(f"{code}:{granularity}:static:scale={dtype_name(round_to)}", scales)


def _modelslim_kind(folder: Path) -> str | None:
    description = _json(folder / MODELSLIM_DESCRIPTION)
    kind = description.get("kv_cache_type", description.get("kv_quant_type"))
    return None if kind is None else str(kind)


def _kv_cache_scheme(folder: Path) -> dict[str, Any]:
    config = _json(folder / "config.json")
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        raise ScaleError(f"{folder / 'config.json'} announces no quantization_config.kv_cache_scheme")
    return scheme


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ScaleError(f"{path} is missing; it says how the KV cache is quantized") from error
    except ValueError as error:
        raise ScaleError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ScaleError(f"{path} holds a {type(content).__name__}, an object is needed")
    return content


def _tensors(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of every safetensors file of the folder whose name matches, read one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if pattern.search(name):
                    yield name, file.get_tensor(name)


def _by_head(name: str, tensor: Tensor, kv_heads: int) -> Tensor:
    """``(kv_heads * dim,)`` in float64 as ``(kv_heads, dim)``: channels lie head by head."""
    count = tensor.numel()
    if count % kv_heads:
        raise ScaleError(f"{name} has {count} numbers, which {kv_heads} KV heads do not divide")
    return tensor.double().reshape(kv_heads, count // kv_heads)


def _rounded(where: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if bool((bad := ~(torch.isfinite(scale) & (scale > 0))).any()):
        raise ScaleError(f"{where}: a scale is {float(scale[bad][0])!r}; scales must be positive finite numbers")
    return scale.to(dtype)
