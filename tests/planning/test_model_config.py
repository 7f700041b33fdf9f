"""config.json -> layers: every way models write their heads, windows, hybrids and latents, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvport.errors import KVPortError, LayoutError, MissingFile, Unsupported
from kvport.layout import LayerSpec
from kvport.model_config import ModelGeometry, read_model_config
from kvport.planning import plan

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


def read(**changes: Any) -> ModelGeometry:
    return read_model_config({k: v for k, v in {**LLAMA, **changes}.items() if v != "absent"})


def windows(geometry: ModelGeometry) -> list[int | None]:
    return [spec.window for spec in geometry.layers]


def test_gqa_with_derived_head_dim() -> None:
    found = read()
    assert found.layers == (LayerSpec(2, 8, 64, 64),) * 4
    assert (found.model_layers, found.dtype, found.notes) == ((0, 1, 2, 3), torch.bfloat16, ())


def test_head_dim_goes_before_the_hidden_size() -> None:
    assert read(head_dim=128).layers[0].key_dim == 128
    assert read(head_dim=None).layers[0].key_dim == 64


def test_mha_where_no_kv_heads_are_given_and_says_so() -> None:
    found = read(num_key_value_heads="absent")
    assert found.layers[0].kv_heads == 8
    assert "every one of the 8 query heads" in found.notes[0]


def test_mqa() -> None:
    assert read(num_key_value_heads=1).layers[0].kv_heads == 1
    assert read(num_key_value_heads="absent", model_type="gpt_bigcode", multi_query=True).layers[0].kv_heads == 1


def test_falcon_old_and_new() -> None:
    falcon = {"num_key_value_heads": "absent", "model_type": "falcon", "num_kv_heads": 4}
    assert read(**falcon, multi_query=True).layers[0].kv_heads == 1
    assert read(**falcon, multi_query=True, new_decoder_architecture=True).layers[0].kv_heads == 4
    assert read(**falcon, multi_query=False).layers[0].kv_heads == 4


def test_gpt2_names() -> None:
    found = read_model_config({"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 256, "dtype": "float32"})
    assert found.layers == (LayerSpec(4, 4, 64, 64),) * 3
    assert found.dtype == torch.float32


def test_heads_by_layer() -> None:
    found = read(num_key_value_heads=[1, 2, 4, 8])
    assert [spec.kv_heads for spec in found.layers] == [1, 2, 4, 8]
    with pytest.raises(LayoutError, match=r"lists 2 layers and has none for layer 2"):
        read(num_key_value_heads=[1, 2])


def test_mla() -> None:
    found = read(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128)
    assert found.layers[0] == LayerSpec(1, 8, 576, 512, latent=True)
    with pytest.raises(LayoutError, match="no qk_rope_head_dim"):
        read(kv_lora_rank=512)


def test_an_indexers_keys_are_mentioned() -> None:
    found = read(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert "index_head_dim" in found.notes[0]


def test_value_dim_of_its_own() -> None:
    assert read(head_dim=192, v_head_dim=128).layers[0] == LayerSpec(2, 8, 192, 128)


def test_layer_types() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows(read(layer_types=kinds, sliding_window=1024)) == [1024, None, 1024, None]
    assert windows(read(layer_types=["chunked_attention"] * 4, attention_chunk_size=8192)) == [None] * 4
    with pytest.raises(LayoutError, match="lists 3 layers and says it has 4"):
        read(layer_types=kinds[:3], sliding_window=1024)
    with pytest.raises(Unsupported, match=r"layer_types says layer 1 is 'telepathy'.*known: full_attention"):
        read(layer_types=["full_attention", "telepathy", "full_attention", "full_attention"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "gemma2", "head_dim": 64}, [8, None, 8, None]),
        ({"model_type": "gpt_oss", "head_dim": 64}, [8, None, 8, None]),
        ({"model_type": "cohere2"}, [8, 8, 8, None]),
        ({"model_type": "gemma3_text", "head_dim": 64, "sliding_window_pattern": 2}, [8, None, 8, None]),
        ({"model_type": "exaone4", "sliding_window_pattern": "LG"}, [8, None, 8, None]),
        ({"model_type": "mistral"}, [8, 8, 8, 8]),
        ({"model_type": "qwen2", "use_sliding_window": False}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 8]),
    ],
)
def test_windows_that_the_models_code_decides(fields: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read(sliding_window=8, **fields)) == expected


def test_no_window_where_it_is_null() -> None:
    assert windows(read(model_type="mistral", sliding_window=None)) == [None] * 4
    assert windows(read(model_type="gemma2", head_dim=64, sliding_window=None)) == [None] * 4


def test_a_window_that_may_be_anywhere_is_refused_or_left_out_on_request() -> None:
    with pytest.raises(LayoutError, match=r"no field 'layer_types'.*sliding_window 8"):
        read(model_type="brandnew", sliding_window=8)
    with pytest.raises(LayoutError, match="no field 'sliding_window'"):
        read(model_type="mistral")
    with pytest.raises(LayoutError, match="no sliding_window"):
        read(layer_types=["sliding_attention"] * 4)


def test_windows_can_be_planned_in_full() -> None:
    found = read_model_config({**LLAMA, "layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, windows=False)
    assert windows(found) == [None] * 4


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "mamba", "full_attention"]}, (1, 3)),
        ({"layers_block_type": ["mamba", "attention", "mamba", "attention"], "mamba_d_state": 16}, (1, 3)),
        ({"hybrid_override_pattern": "M*-*"}, (1, 3)),
        ({"attn_type_list": [0, 1, 0, 1]}, (1, 3)),
        ({"attn_layer_indices": [1, 3], "mamba_d_state": 16}, (1, 3)),
        ({"full_attn_idxs": [1, 3]}, (1, 3)),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, (1, 3)),
        ({"full_attention_interval": 2, "linear_num_key_heads": 4}, (1, 3)),
        ({"linear_attn_config": {"full_attn_layers": [2, 4]}}, (1, 3)),
        ({"model_type": "falcon_h1", "mamba_d_state": 16}, (0, 1, 2, 3)),
    ],
)
def test_hybrids_store_their_attention_layers_only(fields: dict[str, Any], stored: tuple[int, ...]) -> None:
    found = read(**fields)
    assert found.model_layers == stored
    assert "recurrent state" in found.notes[0]


def test_recurrent_gemma_attends_locally() -> None:
    found = read(block_types=["recurrent", "attention"], attention_window_size=2048)
    assert found.model_layers == (1, 3)
    assert windows(found) == [2048, 2048]


def test_a_recurrent_part_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"recurrent part \(mamba_d_state\) and no list"):
        read(mamba_d_state=16)


def test_gemma4_full_layers_have_a_shape_of_their_own() -> None:
    fields = {"model_type": "gemma4_text", "head_dim": 64, "sliding_window": 8, "num_hidden_layers": 6}
    found = read(**fields, global_head_dim=128, num_global_key_value_heads=1, attention_k_eq_v=True)
    assert [(s.key_dim, s.kv_heads, s.window) for s in found.layers] == [(64, 2, 8)] * 5 + [(128, 1, None)]
    with pytest.raises(LayoutError, match="no field 'global_head_dim'"):
        read(**fields)


def test_layers_that_read_the_kv_of_others() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    fields = {"model_type": "gemma3n_text", "head_dim": 64, "layer_types": kinds, "sliding_window": 8}
    found = read(**fields, num_kv_shared_layers=2)
    assert [spec.shares for spec in found.layers] == [None, None, 0, 1]
    with pytest.raises(LayoutError, match="no field 'num_kv_shared_layers'"):
        read(**fields)
    with pytest.raises(LayoutError, match="no earlier layer of its kind"):
        read(**fields, num_kv_shared_layers=3)


def test_multimodal_configs_hold_the_language_models() -> None:
    found = read_model_config(
        {"model_type": "llava", "dtype": "float16", "text_config": {**LLAMA, "torch_dtype": None}}
    )
    assert (found.model_type, found.dtype) == ("llama", torch.float16)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"num_hidden_layers": "absent"}, LayoutError, "no num_hidden_layers"),
        ({"num_attention_heads": "absent"}, LayoutError, "no num_attention_heads"),
        ({"hidden_size": "absent"}, LayoutError, "no hidden_size"),
        ({"hidden_size": 500}, LayoutError, "500 hidden channels do not divide into 8 heads"),
        ({"num_key_value_heads": 3}, LayoutError, "layer 0 of llama: query_heads 8 is not a multiple of kv_heads 3"),
        ({"num_key_value_heads": "2"}, LayoutError, "num_key_value_heads of the config is '2'"),
        ({"torch_dtype": "int4"}, LayoutError, "torch_dtype of the config is 'int4'"),
        ({"model_type": "gemma3_text", "sliding_window": 8}, LayoutError, "no field 'head_dim'"),
        ({"is_encoder_decoder": True}, Unsupported, "encoder-decoder"),
        ({"cross_attention_layers": [3]}, Unsupported, "cross_attention_layers"),
        ({"model_type": "mamba"}, Unsupported, "no K and V by position"),
        ({"layer_types": ["mamba"] * 4}, Unsupported, "none of the 4 layers"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], error: type[KVPortError], match: str) -> None:
    with pytest.raises(error, match=match):
        read(**fields)


def test_no_dtype_is_said() -> None:
    found = read(torch_dtype="absent")
    assert found.dtype == torch.bfloat16
    assert "bfloat16 is assumed" in found.notes[0]


def test_from_a_file_and_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_model_config(file) == read_model_config(tmp_path) == read()
    file.write_text("{")
    with pytest.raises(LayoutError, match="cannot be read as JSON"):
        read_model_config(file)
    file.write_text("[]")
    with pytest.raises(LayoutError, match="holds a list"):
        read_model_config(file)
    with pytest.raises(MissingFile, match=r"there is no model config .*; give a Hugging Face config\.json"):
        read_model_config(tmp_path / "absent.json")


def test_tensor_parallel_shares_are_whole_heads() -> None:
    model = read()
    assert model.split(2).layers[0] == LayerSpec(1, 4, 64, 64)
    assert model.split(8).layers[0] == LayerSpec(1, 1, 64, 64)  # 2 KV heads on 8 devices: four keep each
    assert plan(model.split(2), "int8", tokens=128).request_bytes * 2 == plan(model, "int8", tokens=128).request_bytes
    with pytest.raises(LayoutError, match="8 query and 2 KV heads, which cannot be split over 3"):
        model.split(3)
    latent = read(kv_lora_rank=512, qk_rope_head_dim=64)
    assert latent.split(8).layers[0] == LayerSpec(1, 1, 576, 512, latent=True)


def test_sliding_layers_with_heads_of_their_own() -> None:
    kinds = ["hybrid_sliding", "hybrid"] * 2
    found = read(layer_types=kinds, sliding_window_size=8, swa_num_key_value_heads=4, swa_head_dim=32)
    assert [(s.kv_heads, s.key_dim, s.window) for s in found.layers] == [(4, 32, 8), (2, 64, None)] * 2
    assert "4 layers keep a recurrent state" in found.notes[0]


def test_layers_counted_by_their_list() -> None:
    fields = {"num_hidden_layers": "absent", "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    assert read(**fields).model_layers == (2,)


def test_two_attentions_a_layer_and_loops() -> None:
    assert len(read(model_type="longcat_flash", kv_lora_rank=512, qk_rope_head_dim=64).layers) == 8
    with pytest.raises(Unsupported, match="n_recurrent_layers"):
        read(n_recurrent_layers=4)


#: Kinds of layers whose K and V transformers keeps by position; ``dummy`` ones read another layer's.
KEPT = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "hybrid", "hybrid_sliding")


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"),
        *("gemma3n_text", "gemma4_text", "cohere2", "olmo3", "exaone4", "gpt_oss", "llama4_text", "smollm3", "falcon"),
        *("gpt2", "gpt_bigcode", "gpt_neox", "deepseek_v2", "deepseek_v3", "deepseek_v32", "minimax", "qwen3_next"),
        *("jamba", "zamba2", "nemotron_h", "recurrent_gemma", "falcon_h1", "lfm2", "longcat_flash", "kimi_linear"),
    ],
)
def test_agrees_with_transformers_own_reading(name: str) -> None:
    """Default configs, written as config.json: the same layers, windows and head dims as transformers' own classes."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if name not in auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    config = auto.CONFIG_MAPPING[name]()
    text = config.get_text_config(decoder=True)
    kinds, options = cache_utils.get_layer_types_and_kwargs(text)
    found = read_model_config(json.loads(json.dumps(config.to_dict(), default=str)))
    own = {n: spec for n, spec in zip(found.model_layers, found.layers, strict=True) if spec.shares is None}
    theirs = {n: kind for n, kind in enumerate(kinds) if kind in KEPT}
    assert list(own) == list(theirs)
    for number, kind in theirs.items():
        window = options[number]["sliding_window"] if "sliding" in kind else None
        assert own[number].window == window
        layer = text.per_layer_config[number]
        if not own[number].latent and getattr(layer, "head_dim", None):
            assert own[number].key_dim == layer.head_dim
        if not own[number].latent and getattr(layer, "num_key_value_heads", None) and name != "falcon":
            assert own[number].kv_heads == layer.num_key_value_heads
