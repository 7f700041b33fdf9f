"""Importers: meaning kept exactly, coverage complete, everything that could be silently wrong refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import kvport
from kvport import codec
from kvport.checkpoints import import_scales
from kvport.errors import InvalidArgument, KVPortError, MissingFile, ScaleError, Unsupported
from kvport.model_config import read_model_config

#: Two layers of 2 KV heads with 8 channels.
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "dtype": "bfloat16",
}

FP8 = {**CONFIG, "quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8, "symmetric": True}}}
INT8 = {**CONFIG, "quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8, "symmetric": True}}}
INT8_ASYM = {**CONFIG, "quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8, "symmetric": False}}}
C8 = {"kv_cache_type": "C8", "kv_quant_type": "C8"}
Write = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint folder: tensors, config.json (None for none), and other JSON files by name."""

    def write(tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = CONFIG, **files: Any) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        if tensors:
            safetensors.torch.save_file(dict(tensors), folder / "model.safetensors")
        for name, content in {"config": config, **files}.items():
            if content is not None:
                (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return write


def vllm(pattern: str = "model.layers.{}.self_attn.{}_scale", shape: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """K scales 0.5, 1.5; V scales 0.25, 0.375; different in every head and channel."""
    found = {}
    for layer in range(2):
        for side, base in (("k", 0.5 + layer), ("v", 0.25 + layer / 8)):
            count = int(np.prod(shape))
            values = base * (1 + torch.arange(count, dtype=torch.float32) / 16).reshape(shape)
            found[pattern.format(layer, side)] = values.contiguous()
    return found


def c8(offset: Tensor | None = None, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """ModelSlim: 2 layers, 2 heads x 8 channels; offsets where given (added to per side and layer)."""
    found: dict[str, Tensor] = {}
    for layer in range(2):
        for number, side in enumerate("kv"):
            name = f"model.layers.{layer}.self_attn.{side}_proj.kv_cache"
            found[f"{name}_scale"] = ((1 + torch.arange(16) / 16) * 0.01 * (1 + layer + 3 * number)).to(dtype)
            if offset is not None:
                found[f"{name}_offset"] = offset + layer + 10 * number
    return found


def described(tensors: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    return {**C8, **dict.fromkeys(tensors, "C8"), **more}


# -- compressed-tensors / vLLM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.{}.self_attn.{}_scale",
        "model.layers.{}.self_attn.attn.{}_scale",
        "model.layers.{}.self_attn.{}_proj.{}_scale",
        "model.layers.{}.self_attn.qkv_proj.{}_scale",
        "model.layers.{}.self_attn.{}_proj.output_scale",
        "transformer.h.{}.attn.{}_scale",
    ],
)
def test_names(checkpoint: Write, pattern: str) -> None:
    if pattern.count("{}") == 3:
        tensors = {pattern.format(n, s, s): t for n in range(2) for s, t in zip("kv", _pair(n), strict=True)}
    else:
        tensors = {pattern.format(n, s): t for n in range(2) for s, t in zip("kv", _pair(n), strict=True)}
    recipe = import_scales(checkpoint(tensors, FP8))
    assert recipe.format == "fp8_e4m3:tensor:static"
    assert [float(recipe[n].key.scale) for n in range(2)] == [0.5, 1.5]
    assert [float(recipe[n].value.scale) for n in range(2)] == [0.25, 0.375]


def _pair(layer: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(0.5 + layer), torch.tensor(0.25 + layer / 8)


@pytest.mark.parametrize(
    ("shape", "granularity", "final"),
    [
        ((), "tensor", ()),
        ((1,), "tensor", ()),
        ((2,), "head", (2,)),
        ((2, 1, 1), "head", (2,)),
        ((16,), "channel", (2, 8)),
        ((2, 8), "channel", (2, 8)),
    ],
)
@pytest.mark.parametrize("config", [FP8, INT8], ids=["fp8", "int8"])
def test_shapes(
    checkpoint: Write, shape: tuple[int, ...], granularity: str, final: tuple[int, ...], config: dict[str, Any]
) -> None:
    tensors = vllm(shape=shape)
    recipe = import_scales(checkpoint(tensors, config))
    code = "fp8_e4m3" if config is FP8 else "int8"
    assert recipe.format == f"{code}:{granularity}:static"
    got = recipe[1].value.scale
    assert tuple(got.shape) == final
    assert torch.equal(got.flatten(), tensors["model.layers.1.self_attn.v_scale"].flatten())
    layout = read_model_config(config).layout(recipe.format)
    kvport.open("cpu", layout=layout, tokens=16, scales=recipe).close()


def test_k_and_v_of_different_granularity(checkpoint: Write) -> None:
    tensors = vllm()
    heads = vllm(shape=(2,))
    mixed = {name: heads[name] if ".v_" in name else tensors[name] for name in tensors}
    assert import_scales(checkpoint(mixed, FP8)).format == "k=fp8_e4m3:tensor:static,v=fp8_e4m3:head:static"


def test_one_kv_scale_for_both_is_taken_and_said(checkpoint: Write) -> None:
    tensors = {f"model.layers.{n}.self_attn.kv_scale": torch.tensor(0.5 + n) for n in range(2)}
    recipe = import_scales(checkpoint(tensors, FP8))
    assert float(recipe[1].key.scale) == float(recipe[1].value.scale) == 1.5
    assert any("one kv_scale" in note for note in recipe.notes)


def test_int8_says_that_minus_128_is_not_used(checkpoint: Write) -> None:
    assert any("-127 .. 127" in note for note in import_scales(checkpoint(vllm(), INT8)).notes)


@pytest.mark.parametrize("algorithm", ["FP8", "INT8"])
def test_modelopt_says_its_code_elsewhere(checkpoint: Write, algorithm: str) -> None:
    folder = checkpoint(vllm(), hf_quant_config={"quantization": {"kv_cache_quant_algo": algorithm}})
    assert import_scales(folder).format.startswith({"FP8": "fp8_e4m3", "INT8": "int8"}[algorithm])
    folder = checkpoint(vllm(), {**CONFIG, "quantization_config": {"kv_cache_quant_algo": algorithm}})
    assert import_scales(folder).format.startswith({"FP8": "fp8_e4m3", "INT8": "int8"}[algorithm])


def test_the_code_may_be_filled_in_but_not_contradicted(checkpoint: Write) -> None:
    folder = checkpoint(vllm())
    with pytest.raises(ScaleError, match=r"does not say what its KV codes are.*code='fp8_e4m3'"):
        import_scales(folder)
    assert import_scales(folder, code="fp8_e5m2").format == "fp8_e5m2:tensor:static"
    with pytest.raises(ScaleError, match="says that its KV codes are fp8_e4m3; code='int8' contradicts it"):
        import_scales(checkpoint(vllm(), FP8), code="int8")
    with pytest.raises(InvalidArgument, match="code must be"):
        import_scales(folder, code="int4")


def test_asymmetric_int8_of_compressed_tensors(checkpoint: Write) -> None:
    tensors = vllm()
    for layer in range(2):
        for side in "kv":
            tensors[f"model.layers.{layer}.self_attn.{side}_zero_point"] = torch.tensor(
                3 - 10 * layer, dtype=torch.int8
            )
    recipe = import_scales(checkpoint(tensors, INT8_ASYM))
    assert recipe.format == "int8:tensor:asym:static"
    assert float(recipe[1].key.zero) == -(-7 + 128) * 1.5
    with pytest.raises(ScaleError, match="says its cache is symmetric int8, and has zero points"):
        import_scales(checkpoint(tensors, INT8))


@pytest.mark.parametrize(
    ("scheme", "match"),
    [
        ({"type": "float", "num_bits": 4}, "num_bits 8"),
        ({"type": "float", "num_bits": 8, "dynamic": True}, "dynamic false"),
        ({"type": "float", "num_bits": 8, "symmetric": False}, "asymmetric float"),
    ],
)
def test_schemes_that_are_not_read(checkpoint: Write, scheme: dict[str, Any], match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        import_scales(checkpoint(vllm(), {**CONFIG, "quantization_config": {"kv_cache_scheme": scheme}}))
    with pytest.raises(Unsupported, match="NVFP4"):
        import_scales(checkpoint(vllm(), {**CONFIG, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}}))


def without(tensors: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if not all(part in name for part in parts)}


def test_half_provided_scales_are_refused_by_name(checkpoint: Write) -> None:
    with pytest.raises(ScaleError, match=r"layer 1 K has no scale .* has model\.layers\.1\.self_attn\.v_scale"):
        import_scales(checkpoint(without(vllm(), "layers.1", "k_scale"), FP8))
    with pytest.raises(ScaleError, match="layer 0 V has no scale"):
        import_scales(checkpoint(without(vllm(), "v_scale"), FP8))


def test_every_layer_is_covered_and_no_other(checkpoint: Write) -> None:
    with pytest.raises(ScaleError, match="no scales for layers 1 of 2"):
        import_scales(checkpoint(without(vllm(), "layers.1"), FP8))
    extra = {**vllm(), **{f"model.layers.2.self_attn.{s}_scale": torch.tensor(1.5) for s in "kv"}}
    with pytest.raises(ScaleError, match="scales for layers 2, which the model does not store"):
        import_scales(checkpoint(extra, FP8))


def test_hybrid_models_are_numbered_as_the_cache_does(checkpoint: Write) -> None:
    config = {**FP8, "num_hidden_layers": 4, "layer_types": ["mamba", "full_attention"] * 2}
    tensors = {name.replace(".1.", ".3.").replace(".0.", ".1."): t for name, t in vllm().items()}
    recipe = import_scales(checkpoint(tensors, config))
    assert {n: float(recipe[n].key.scale) for n in recipe} == {0: 0.5, 1: 1.5}
    layout = read_model_config(config).layout(recipe.format)
    kvport.open("cpu", layout=layout, tokens=16, scales=recipe).close()


def test_two_scales_for_one_side_are_refused(checkpoint: Write) -> None:
    tensors = {**vllm(), "model.layers.0.self_attn.attn.k_scale": torch.tensor(0.5)}
    with pytest.raises(ScaleError, match="layer 0 K has two scales"):
        import_scales(checkpoint(tensors, FP8))


def test_two_models_in_one_checkpoint_need_a_prefix(checkpoint: Write) -> None:
    tensors = {**vllm(), **vllm("vision.layers.{}.self_attn.{}_scale")}
    folder = checkpoint(tensors, FP8)
    with pytest.raises(ScaleError, match=r"several models: model\.layers\., vision\.layers\."):
        import_scales(folder)
    assert import_scales(folder, prefix="model.").format == "fp8_e4m3:tensor:static"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_scales_that_cannot_be(checkpoint: Write, value: float) -> None:
    tensors = {**vllm(), "model.layers.1.self_attn.v_scale": torch.tensor(value)}
    with pytest.raises(ScaleError, match="layer 1 V"):
        import_scales(checkpoint(tensors, FP8))


def test_all_scales_one_is_warned_about(checkpoint: Write) -> None:
    tensors = {name: torch.ones(()) for name in vllm()}
    with pytest.warns(UserWarning, match="all 4 static scales are exactly 1.0"):
        import_scales(checkpoint(tensors, FP8))


def test_a_shape_that_fits_nothing_is_refused_with_both_shapes(checkpoint: Write) -> None:
    with pytest.raises(ScaleError, match=r"shape \(3,\); allowed: 1 value, 2 \(one per KV head\) or 16"):
        import_scales(checkpoint(vllm(shape=(3,)), FP8))
    mixed = {**vllm(), **without(vllm(shape=(2,)), "layers.0")}
    with pytest.raises(ScaleError, match="one scale per head, earlier layers have one per tensor"):
        import_scales(checkpoint(mixed, FP8))


def test_without_a_config_only_single_scales_are_clear(checkpoint: Write) -> None:
    assert import_scales(checkpoint(vllm(), None), code="fp8_e4m3").format == "fp8_e4m3:tensor:static"


def test_without_a_config_shapes_are_refused(checkpoint: Write) -> None:
    with pytest.raises(ScaleError, match=r"without a config\.json its heads and channels are not known"):
        import_scales(checkpoint(vllm(shape=(2,)), None), code="fp8_e4m3")


def test_latent_models_are_refused(checkpoint: Write) -> None:
    config = {**FP8, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    with pytest.raises(Unsupported, match="latent"):
        import_scales(checkpoint(vllm(), config))


def test_shards(checkpoint: Write) -> None:
    folder = checkpoint({}, FP8)
    tensors = vllm()
    weight_map = {}
    for layer in range(2):
        part = {name: t for name, t in tensors.items() if f"layers.{layer}." in name}
        file = f"model-{layer + 1}.safetensors"
        safetensors.torch.save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(import_scales(folder)) == 2
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ScaleError, match=r"names files that are not there: model-2\.safetensors"):
        import_scales(folder)


def test_files_that_are_not_there_or_damaged(tmp_path: Path, checkpoint: Write) -> None:
    with pytest.raises(MissingFile, match=r"there is no checkpoint .*; give a safetensors file"):
        import_scales(tmp_path / "absent")
    with pytest.raises(ScaleError, match="no safetensors files"):
        import_scales(checkpoint({}, FP8))
    (tmp_path / "checkpoint" / "kv_cache_scale.npy").touch()
    with pytest.raises(ScaleError, match="old ModelSlim"):
        import_scales(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ScaleError, match="not an intact safetensors file"):
        import_scales(tmp_path / "checkpoint")
    with pytest.raises(ScaleError, match="no tensors that are scales"):
        import_scales(checkpoint({"model.layers.0.self_attn.k_proj.weight": torch.ones(2)}, FP8))


def test_a_scale_that_float32_cannot_hold(checkpoint: Write) -> None:
    tensors = {name: t.double() + 1e-12 for name, t in vllm().items()}
    with pytest.raises(ScaleError, match=r"not exact in float32.*round_scales"):
        import_scales(checkpoint(tensors, FP8))
    rounded = import_scales(checkpoint(tensors, FP8), round_scales="bf16")
    assert rounded.format == "fp8_e4m3:tensor:static:scale=bf16"
    assert float(rounded[0].key.scale) == 0.5


# -- ModelSlim -------------------------------------------------------------------------------------------------------


def test_c8_without_offsets_is_symmetric(checkpoint: Write) -> None:
    for tensors in (c8(), c8(torch.zeros(16))):
        if len(tensors) == 8:
            tensors = {n: torch.zeros(16) if n.endswith("offset") else t for n, t in tensors.items()}
        recipe = import_scales(checkpoint(tensors, quant_model_description=described(tensors)))
        assert recipe.format == "int8:channel:static"
        name = "model.layers.1.self_attn.v_proj.kv_cache_scale"
        assert torch.equal(recipe[1].value.scale, tensors[name].float().view(2, 8))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int32])
def test_c8_with_offsets_means_the_same_number(checkpoint: Write, kind: torch.dtype) -> None:
    """Every code of every channel: kvport's u * scale + zero against (q - offset) * scale in exact fractions."""
    tensors = c8(torch.arange(-8, 8).to(kind))
    recipe = import_scales(checkpoint(tensors, quant_model_description=described(tensors)))
    assert recipe.format == "int8:channel:asym:static"
    for layer in range(2):
        for side, given in (("k", recipe[layer].key), ("v", recipe[layer].value)):
            name = f"model.layers.{layer}.self_attn.{side}_proj.kv_cache"
            for channel in range(16):
                scale = Fraction(float(tensors[f"{name}_scale"][channel]))
                offset = Fraction(float(tensors[f"{name}_offset"][channel]))
                own_scale = Fraction(float(given.scale.view(16)[channel]))
                own_zero = Fraction(float(given.zero.view(16)[channel]))
                for q in (-128, -1, 0, 1, 127):
                    assert (q + 128) * own_scale + own_zero == (q - offset) * scale


def test_c8_codes_are_those_of_the_checkpoints_own_rule(checkpoint: Write) -> None:
    """q = round(x / scale) + offset, clamped: kvport's code is q + 128, also at the ends of the range."""
    tensors = c8(torch.arange(-8, 8).to(torch.int32))
    recipe = import_scales(checkpoint(tensors, quant_model_description=described(tensors)))
    given = recipe[0].key
    scale = tensors["model.layers.0.self_attn.k_proj.kv_cache_scale"].double().view(2, 8)
    offset = tensors["model.layers.0.self_attn.k_proj.kv_cache_offset"].double().view(2, 8)
    # In the middle of each code's interval, where float32 rounding cannot move it.
    q = torch.linspace(-140, 140, 281, dtype=torch.float64).view(-1, 1, 1)
    x = ((q + 0.25) * scale).float()
    expected = ((x.double() / scale).round() + offset).clamp(-128, 127) + 128
    fmt = kvport.CacheFormat.parse(recipe.format).key
    codes = codec.encode(fmt, x, given).planes["codes"]
    assert torch.equal(codes.double(), expected)
    assert int(codes.min()) == 0
    assert int(codes.max()) == 255


def test_offsets_of_one_side_make_both_asymmetric(checkpoint: Write) -> None:
    """Ascend's operator takes offsets for K and V or for neither; an offset of 0 is the zero -128 * scale."""
    tensors = c8(torch.zeros(16))
    tensors = {n: torch.zeros(16) if n.endswith("k_proj.kv_cache_offset") else t for n, t in tensors.items()}
    recipe = import_scales(checkpoint(tensors, quant_model_description=described(tensors)))
    assert recipe.format == "int8:channel:asym:static"
    assert torch.equal(recipe[0].key.zero, recipe[0].key.scale * -128)


def test_a_product_that_is_not_exact_is_refused_or_rounded_on_request(checkpoint: Write) -> None:
    tensors = c8(torch.full((16,), 3.0), torch.float32)
    folder = checkpoint(tensors, quant_model_description=described(tensors))
    with pytest.raises(ScaleError, match=r"layer 0 K .*offset 3 times scale .* not exact in float32.*round_scales"):
        import_scales(folder)
    recipe = import_scales(folder, round_scales="bf16")
    name = "model.layers.1.self_attn.v_proj.kv_cache_scale"
    assert torch.equal(recipe[1].value.scale.view(16), tensors[name].bfloat16().float())
    assert recipe.provenance["round_scales"] == "bf16"
    with pytest.raises(InvalidArgument, match="round_scales must be"):
        import_scales(folder, round_scales="int8")


def test_fused_layer_names(checkpoint: Write) -> None:
    tensors = {n.replace("self_attn", "attention.query_key_value"): t for n, t in c8().items()}
    assert len(import_scales(checkpoint(tensors, quant_model_description=described(tensors)))) == 2


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kv_cache_type": "C4"}, Unsupported, "C4"),
        ({"fa_quant_type": "FAQuant"}, Unsupported, "FAQuant"),
        (
            {"model.layers.2.self_attn.k_proj.kv_cache_scale": "C8"},
            ScaleError,
            r"lists tensors that are not there: .*\.2\.",
        ),
    ],
)
def test_descriptions_that_do_not_fit(
    checkpoint: Write, change: dict[str, str], error: type[KVPortError], match: str
) -> None:
    tensors = c8()
    with pytest.raises(error, match=match):
        import_scales(checkpoint(tensors, quant_model_description={**described(tensors), **change}))


def test_a_description_must_list_every_scale_if_any(checkpoint: Write) -> None:
    tensors = c8()
    listed = described(without(tensors, "layers.1", "v_proj"))
    with pytest.raises(ScaleError, match=r"does not list model\.layers\.1\.self_attn\.v_proj"):
        import_scales(checkpoint(tensors, quant_model_description=listed))


def test_c8_without_a_description_must_be_asked_for(checkpoint: Write) -> None:
    folder = checkpoint(c8())
    with pytest.raises(ScaleError, match=r"no quant_model_description\.json.*code='int8'"):
        import_scales(folder)
    assert import_scales(folder, code="int8").format == "int8:channel:static"
    with pytest.raises(ScaleError, match="int8 codes; code='fp8_e4m3' cannot be"):
        import_scales(folder, code="fp8_e4m3")


def test_a_description_of_weights_alone_is_not_about_the_cache(checkpoint: Write) -> None:
    folder = checkpoint(vllm(), FP8, quant_model_description={"model.layers.0.self_attn.k_proj.weight": "W8A8"})
    assert import_scales(folder).format == "fp8_e4m3:tensor:static"


def test_half_provided_c8(checkpoint: Write) -> None:
    tensors = without(c8(), "layers.1", "k_proj")
    with pytest.raises(ScaleError, match="layer 1 K has no scale"):
        import_scales(checkpoint(tensors, quant_model_description=described(tensors)))


def test_offsets_missing_in_some_layers(checkpoint: Write) -> None:
    tensors = without(c8(torch.full((16,), 3.0)), "layers.1", "v_proj", "offset")
    with pytest.raises(ScaleError, match="3 scales have an offset and these have none: layer 1 V"):
        import_scales(checkpoint(tensors, quant_model_description=described(tensors)))


@pytest.mark.parametrize("value", [0.5, float("nan"), 1e6])
def test_offsets_that_cannot_be(checkpoint: Write, value: float) -> None:
    tensors = c8(torch.full((16,), 3.0))
    tensors["model.layers.0.self_attn.v_proj.kv_cache_offset"][5] = value
    with pytest.raises(ScaleError, match=r"layer 0 V .*whole numbers of codes"):
        import_scales(checkpoint(tensors, quant_model_description=described(tensors)))


def test_offsets_of_another_shape(checkpoint: Write) -> None:
    tensors = {**c8(torch.full((16,), 3.0)), "model.layers.0.self_attn.v_proj.kv_cache_offset": torch.ones(8)}
    with pytest.raises(ScaleError, match="16 scales and 8 offsets"):
        import_scales(checkpoint(tensors, quant_model_description=described(tensors)))
