"""Scales read from checkpoints that these tests write: numbers, signs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvport.cache import PagedCache
from kvport.errors import ScaleError
from kvport.layout import CacheLayout
from kvport_ascend.backend import load_emulated
from kvport_ascend.checkpoints import read_kv_scales, read_modelslim
from kvport_cpu.reference import ReferenceBackend

KV_HEADS, DIM, LAYERS = 2, 64, 3


def modelslim(
    folder: Path, *, offset: bool, kind: str = "C8", drop: str = "", exact: bool = True
) -> dict[str, torch.Tensor]:
    """A C8 checkpoint in two files; scales are bfloat16 numbers if ``exact``, offsets whole numbers."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for number, side in enumerate("kv"):
            name = f"model.layers.{layer}.self_attn.{side}_proj"
            scale = (torch.rand(KV_HEADS * DIM, generator=generator) * 0.03 + 0.01) * (1 + 2 * number)
            tensors[f"{name}.kv_cache_scale"] = scale.bfloat16().float() if exact else scale
            tensors[f"{name}.kv_cache_offset"] = (
                torch.randint(-20, 20, (KV_HEADS * DIM,), generator=generator).float() * offset
            )
            tensors[f"{name}.weight"] = torch.zeros(2)
    tensors.pop(drop, None)
    names = sorted(tensors)
    for part in range(2):
        save_file({n: tensors[n] for n in names[part::2]}, folder / f"model-{part}.safetensors")
    (folder / "quant_model_description.json").write_text(json.dumps({"kv_cache_type": kind}))
    return tensors


def layout(format: str, dtype: torch.dtype = torch.bfloat16) -> CacheLayout:
    return CacheLayout.uniform(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, format=format, page_size=32, dtype=dtype)


@pytest.mark.parametrize("round_to", [torch.bfloat16, torch.float32])
def test_symmetric_c8(tmp_path: Path, round_to: torch.dtype) -> None:
    tensors = modelslim(tmp_path, offset=False)
    read = read_modelslim(tmp_path, kv_heads=KV_HEADS, round_to=round_to)
    word = {torch.bfloat16: "bf16", torch.float32: "fp32"}[round_to]
    assert read.format == f"int8:channel:static:scale={word}"
    assert sorted(read.scales) == [0, 1, 2]
    for layer, sides in read.scales.items():
        for side, scales in (("k", sides.key), ("v", sides.value)):
            assert scales is not None
            assert scales.zero is None
            stored = tensors[f"model.layers.{layer}.self_attn.{side}_proj.kv_cache_scale"]
            assert torch.equal(scales.scale.float().flatten(), stored)
    if round_to == torch.bfloat16:  # what the Ascend backend takes
        PagedCache(load_emulated(), layout(read.format), [4], scales=read.scales)


def test_asymmetric_c8_has_the_checkpoints_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """x = (code - offset) * scale for every code, and the operator's offset is the checkpoint's, negated."""
    tensors = modelslim(tmp_path, offset=True)
    read = read_modelslim(tmp_path, kv_heads=KV_HEADS)
    assert read.format == "int8:channel:asym:static:scale=fp32"
    codes = torch.arange(-128, 128).double()
    for layer, sides in read.scales.items():
        for side, scales in (("k", sides.key), ("v", sides.value)):
            assert scales is not None
            assert scales.zero is not None
            name = f"model.layers.{layer}.self_attn.{side}_proj.kv_cache"
            scale, offset = (tensors[f"{name}_{part}"].double() for part in ("scale", "offset"))
            meant = (codes.unsqueeze(1) - offset) * scale
            ours = (codes + 128).unsqueeze(1) * scales.scale.double().flatten() + scales.zero.double().flatten()
            assert torch.equal(meant, ours)
    monkeypatch.setenv("KVPORT_ASCEND_BY_VALUE", "1")
    for backend in (ReferenceBackend("cpu", torch.device("cpu")), load_emulated()):
        cache = PagedCache(backend, layout(read.format), [4], scales=read.scales)
        if backend.name == "ascend":
            given = cache._stores[0].operands[1]["value_antiquant_offset"].flatten().double()  # type: ignore[attr-defined]
            assert torch.equal(given, -tensors["model.layers.1.self_attn.v_proj.kv_cache_offset"].double())


def test_inexact_zero_is_refused_and_rounding_the_scales_helps(tmp_path: Path) -> None:
    modelslim(tmp_path, offset=True, exact=False)
    with pytest.raises(ScaleError, match="are no float32 numbers"):
        read_modelslim(tmp_path, kv_heads=KV_HEADS)
    read = read_modelslim(tmp_path, kv_heads=KV_HEADS, round_to=torch.bfloat16)
    assert read.format == "int8:channel:asym:static:scale=fp32"


@pytest.mark.parametrize(
    ("options", "heads", "part"),
    [
        ({"kind": "W8A8"}, KV_HEADS, "kv_cache_type 'W8A8'"),
        ({"drop": "model.layers.1.self_attn.v_proj.kv_cache_scale"}, KV_HEADS, "layer 1 v_proj"),
        ({}, 3, "3 KV heads do not divide"),
    ],
)
def test_modelslim_refusals(tmp_path: Path, options: dict[str, Any], heads: int, part: str) -> None:
    modelslim(tmp_path, offset=False, **options)
    with pytest.raises(ScaleError, match=part):
        read_modelslim(tmp_path, kv_heads=heads)


def test_missing_description_is_refused(tmp_path: Path) -> None:
    modelslim(tmp_path, offset=False)
    (tmp_path / "quant_model_description.json").unlink()
    with pytest.raises(ScaleError, match="is missing"):
        read_modelslim(tmp_path, kv_heads=KV_HEADS)


def compressed(
    folder: Path, *, shape: tuple[int, ...], scheme: dict[str, Any], drop: str = "", bad: float = 0.0
) -> None:
    tensors = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.full(shape, 0.01 * (layer + 1) * (1 + 2 * number))
        for layer in range(LAYERS)
        for number, side in enumerate("kv")
    }
    if bad:
        tensors["model.layers.0.self_attn.k_scale"].fill_(bad)
    tensors.pop(drop, None)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"kv_cache_scheme": scheme}}))


INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("shape", "scheme", "format"),
    [
        ((1,), INT8, "int8:tensor:static:scale=bf16"),
        ((), INT8 | {"type": "float"}, "fp8_e4m3:tensor:static:scale=bf16"),
        ((KV_HEADS, 1, 1), INT8 | {"strategy": "attn_head"}, "int8:head:static:scale=bf16"),
    ],
)
def test_kv_scales(tmp_path: Path, shape: tuple[int, ...], scheme: dict[str, Any], format: str) -> None:
    compressed(tmp_path, shape=shape, scheme=scheme)
    read = read_kv_scales(tmp_path, round_to=torch.bfloat16)
    assert read.format == format
    value = read.scales[2].value
    assert value is not None
    assert torch.equal(value.scale.flatten(), torch.full((max(1, len(value.scale.flatten())),), 0.09).bfloat16())
    PagedCache(ReferenceBackend("cpu", torch.device("cpu")), layout(format), [4], scales=read.scales)
    if format.startswith("int8"):
        PagedCache(load_emulated(), layout(format), [4], scales=read.scales)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"scheme": INT8 | {"num_bits": 4}}, "kv_cache_scheme"),
        ({"scheme": INT8 | {"dynamic": True}}, "kv_cache_scheme"),
        ({"scheme": INT8 | {"symmetric": False}}, "kv_cache_scheme"),
        ({"drop": "model.layers.2.self_attn.k_scale"}, "layer 2 k_scale"),
        ({"bad": -1.0}, "positive finite"),
        ({"bad": float("nan")}, "positive finite"),
    ],
)
def test_kv_scale_refusals(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    compressed(tmp_path, **({"shape": (1,), "scheme": INT8} | options))
    with pytest.raises(ScaleError, match=part):
        read_kv_scales(tmp_path)
