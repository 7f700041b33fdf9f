"""Calibration and reports on a whole transformers model: a tiny one with random weights, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvport
from kvport.calibration import calibrate_model
from kvport.cli import main
from kvport.errors import LayoutError
from kvport.evaluation import cache_argument
from kvport.quality import inspect_model
from kvport.recipes import load_recipe

transformers = pytest.importorskip("transformers")
LAYERS, KV_HEADS, DIM = 3, 2, 16


def config(**more: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=256,
        **more,
    )


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config()).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, 50), generator=torch.Generator().manual_seed(1))


def stored(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V ``(tokens, heads, dim)`` by layer as a cache gets them: out of kvport's own float32 pages."""
    from kvport.integrations.transformers import KVPortCache

    cache = KVPortCache(model.config, format="fp32")
    with torch.inference_mode():
        model(ids, **{cache_argument(model): cache}, use_cache=True)
        layers = [(cache.layers[n].keys, cache.layers[n].values) for n in range(LAYERS)]
    return [(k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)) for k, v in layers]


@pytest.mark.parametrize("chunk", [50, 7])
def test_ranges_are_those_of_what_the_cache_stores(model: Any, ids: torch.Tensor, chunk: int) -> None:
    recipe = calibrate_model(model, ids, "int8:channel:static", chunk=chunk)
    assert sorted(recipe) == list(range(LAYERS))
    assert recipe.provenance["tokens"] == "100"
    for layer, (key, value) in enumerate(stored(model, ids)):
        for side, x in ((recipe[layer].key, key), (recipe[layer].value, value)):
            assert side is not None
            assert torch.allclose(torch.as_tensor(side.scale) * 127, x.abs().amax(0), rtol=1e-4)


def test_padding_is_left_out(model: Any, ids: torch.Tensor) -> None:
    """A row with 20 tokens of padding on the left calibrates as the row without them."""
    short = ids[:1, :30]
    padded = torch.cat([torch.full((1, 20), 96), short], 1)
    mask = torch.cat([torch.zeros(1, 20, dtype=torch.long), torch.ones(1, 30, dtype=torch.long)], 1)
    plain = calibrate_model(model, short, "int8:channel:static")
    with_padding = calibrate_model(model, padded, "int8:channel:static", mask=mask, chunk=16)
    assert with_padding.provenance["tokens"] == "30"
    value = [torch.as_tensor(r[1].value.scale) for r in (plain, with_padding) if r[1].value is not None]
    assert torch.allclose(value[0], value[1], rtol=1e-4)
    unmasked = calibrate_model(model, padded, "int8:channel:static")
    assert unmasked.provenance["tokens"] == "50"


def test_sink_tokens_are_left_out(model: Any, ids: torch.Tensor) -> None:
    recipe = calibrate_model(model, ids, "int8:channel:static,sink=4")
    assert recipe.provenance["tokens"] == str(2 * 46)
    assert recipe.format == "int8:channel:static"
    key = stored(model, ids)[0][0].view(2, 50, KV_HEADS, DIM)[:, 4:].flatten(0, 1)
    side = recipe[0].key
    assert side is not None
    assert torch.allclose(torch.as_tensor(side.scale) * 127, key.abs().amax(0), rtol=1e-4)


@pytest.mark.parametrize(
    "format", ["int8:channel:static", "fp8_e4m3:tensor:static", "nvfp4:static", "int8:head:asym:static"]
)
def test_a_recipe_serves_the_models_cache(model: Any, ids: torch.Tensor, format: str) -> None:
    from kvport.integrations.transformers import KVPortCache

    recipe = calibrate_model(model, ids, format)
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        cache = KVPortCache(model.config, format=format, scales=recipe)
        logits = model(ids, **{cache_argument(model): cache}, use_cache=True).logits
    cosine = torch.nn.functional.cosine_similarity(plain.flatten(), logits.flatten(), 0)
    assert cosine > (0.99 if "nvfp4" in format else 0.9995)


def mla(version: int) -> Any:
    """A tiny DeepSeek-V2 or V3 with random weights."""
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "v_head_dim": 16}
    parts = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    more = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "initializer_range": 0.3}
    made = getattr(transformers, f"DeepseekV{version}Config")(**shape, **heads, **parts, **experts, **more)
    torch.manual_seed(version)
    return getattr(transformers, f"DeepseekV{version}ForCausalLM")(made).eval()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("method", ["amax", "percentile:99.5", "mse"])
def test_latent_models_are_calibrated_by_what_they_cache(version: int, method: str, ids: torch.Tensor) -> None:
    """The latent and the rotary part, not K and V expanded from them: the scales are those of the latent."""
    from kvport.integrations.transformers import KVPortCache

    deepseek = mla(version)
    recipe = calibrate_model(deepseek, ids, "latent=int8:channel:static:outliers=2,rope=bf16", method=method)
    cache = KVPortCache(deepseek.config, format="latent=fp32,rope=fp32")
    with torch.inference_mode():
        exact = deepseek(ids, **{cache_argument(deepseek): cache}, use_cache=True).logits
    for layer in range(LAYERS):
        latent = cache.layers[layer].keys[..., :32]  # (rows, 1, tokens, latent and rotary channels)
        assert latent.shape[1:] == (1, 50, 32)
        amax = latent.abs().amax((0, 2))
        chosen = recipe[layer]
        assert chosen.value is None
        assert chosen.key is not None
        if method == "amax":
            torch.testing.assert_close(torch.as_tensor(chosen.key.scale), amax / 127)
        assert chosen.key_channels is not None
        assert set(chosen.key_channels[0].tolist()) == set(amax[0].topk(2).indices.tolist())
    static = KVPortCache(deepseek.config, format=recipe.format, scales=recipe)
    with torch.inference_mode():
        logits = deepseek(ids, **{cache_argument(deepseek): static}, use_cache=True).logits
    # Random experts magnify what is rounded; the first layer, which sees the same tokens, is held to its scale.
    assert torch.nn.functional.cosine_similarity(exact.flatten(), logits.flatten(), 0) > 0.98
    if method == "amax":
        first, scale = recipe[0], torch.as_tensor(recipe[0].key.scale)  # type: ignore[union-attr]
        error = (static.layers[0].keys - cache.layers[0].keys)[..., :32].abs()
        assert (error <= scale * 0.5001).all()
        assert not error[..., first.key_channels[0]].any()  # type: ignore[index]


def test_model_and_format_must_both_be_latent_or_neither(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"does not go with ordinary layers"):
        calibrate_model(model, ids, "latent=int8:channel:static,rope=bf16")
    with pytest.raises(
        LayoutError, match=r"does not go with latent \(MLA\) layers .*: latent layers take 'latent=CODE,rope=CODE'"
    ):
        calibrate_model(mla(3), ids, "int8:channel:static")


def test_the_report_sees_what_the_attention_saw(model: Any, ids: torch.Tensor) -> None:
    before = model.config._attn_implementation
    report = inspect_model(model, ids[:1], "int4", counters=True)
    assert model.config._attn_implementation == before
    assert [one.layer for one in report] == list(range(LAYERS))
    fmt = kvport.TensorFormat.parse("int4")
    for one, (key, _) in zip(report, stored(model, ids[:1]), strict=True):
        decoded = kvport.codec.decode(fmt, kvport.codec.encode(fmt, key).planes)
        relative = ((decoded - key).norm() / key.norm()).item()
        assert one.key.relative == pytest.approx(relative, rel=1e-3)
        assert one.key.counts is not None
        assert one.key.counts.elements == 50 * KV_HEADS * DIM


def test_windows_are_the_layers_own() -> None:
    torch.manual_seed(0)
    fields = {k: v for k, v in config().to_dict().items() if k in ("vocab_size", "hidden_size", "num_hidden_layers")}
    mistral = transformers.MistralConfig(
        **fields, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=8
    )
    from kvport.integrations.observing import observe_attention

    windowed = transformers.MistralForCausalLM(mistral).eval()
    ids = torch.randint(0, 97, (1, 20))
    assert [seen.window for _, seen in observe_attention(windowed, ids)] == [8] * LAYERS
    assert len(inspect_model(windowed, ids, "int8")) == LAYERS


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a tokenizer that knows one word a number."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(97)}, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    (path / "text.txt").write_text(" ".join(str(n * n % 97) for n in range(120)))
    return path


def test_calibrate_and_inspect_from_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(tmp_path / "recipe.safetensors")
    common = ["--model", str(folder), "--text", str(folder / "text.txt"), "--format", "int8:channel:static"]
    arguments = [*common, "--tokens", "100", "--context", "40", "--date", "2025-01-02", "-o", recipe]
    assert main(["calibrate", *arguments]) == 0
    out = capsys.readouterr().out
    assert "3 layers, format int8:channel:static" in out
    made = load_recipe(recipe)
    assert made.provenance["tokens"] == "100"  # 40 + 40 + 20, the padding of the last row left out
    assert made.provenance["date"] == "2025-01-02"
    assert len(made.provenance["text_sha256"]) == 64
    assert "torch" in made.provenance["versions"]

    assert main(["inspect", recipe]) == 0
    assert "recipe: 3 layers, int8:channel:static" in capsys.readouterr().out
    assert main(["inspect", recipe, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["recipe"]["layers"]) == {"0", "1", "2"}

    assert main(["inspect", *common, "--scales", recipe, "--tokens", "60", "--counters"]) == 0
    assert "worst layer: " in capsys.readouterr().out
    assert main(["inspect", *common, "--scales", recipe, "--tokens", "60", "--json", "--least-cosine", "1.1"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["broken_layers"] == [0, 1, 2]
    assert report["tokens"] == 60

    assert main(["inspect", *common[:4], "--format", "int8:head:static", "--scales", recipe]) == 1
    assert "the recipe was made for int8:channel:static" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["amax", "percentile:99", "mse"])
@pytest.mark.parametrize("format", ["k=int4:g8:outliers=2,v=int8:tensor:static", "int4:channel:asym:static:scale=fp16"])
def test_every_method_from_the_command_line(
    folder: Path, tmp_path: Path, format: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(tmp_path / "recipe.safetensors")
    arguments = ["--model", str(folder), "--text", str(folder / "text.txt"), "--format", format]
    assert main(["calibrate", *arguments, "--method", method, "-o", recipe]) == 0
    assert f"method: {method}" in capsys.readouterr().out
    made = load_recipe(recipe)
    assert made.format == format
    assert len(made) == LAYERS
    assert main(["inspect", recipe]) == 0
    assert ("head 0: [" in capsys.readouterr().out) == ("outliers" in format)
    assert main(["inspect", recipe, "--json"]) == 0
    capsys.readouterr()
    assert main(["inspect", *arguments, "--scales", recipe, "--counters", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    saturated = sum(one["value"]["counts"]["saturated"] for one in report["layers"])
    assert (saturated == 0) == (method == "amax")


def test_the_help_of_calibrate_names_all_that_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for named in ("int8:channel:static", "outliers=4", "latent=int8:tensor:static,rope=bf16", "percentile:P", "mse"):
        assert named in out


def test_inspect_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "image.safetensors")
    with kvport.open("cpu", layers=1, kv_heads=1, head_dim=16, tokens=64, page_size=16) as cache:
        sequence = cache.sequence()
        with cache.step({sequence: 5}) as step:
            step.append(0, torch.zeros(5, 1, 16), torch.ones(5, 1, 16))
        cache.export(sequence).save(path)
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "5 tokens, int8" in out
    assert "every code is the same" in out
    assert main(["inspect", path, "--json"]) == 0
    sides = json.loads(capsys.readouterr().out)["image"]["sides"]
    assert [side["side"] for side in sides] == ["key", "value"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["inspect"], "give a file"),
        (["inspect", "absent.safetensors"], "there is no file"),
        (["inspect", "--model", "x"], "--model needs --text and --format"),
        (["calibrate", "--model", "x", "-o", "y"], "--model needs --text and --format"),
        (
            ["calibrate", "--model", "absent", "--text", "t", "--format", "int8", "-o", "y"],
            "give the folder of a model",
        ),
        (["calibrate", "--model", "x", "--text", "t", "--format", "f", "-o", "no/such/y"], "there is no folder"),
        (
            ["calibrate", "--model", "x", "--text", "t", "--format", "f", "-o", "y", "--code", "int8"],
            "--code with --model",
        ),
        (["calibrate", "--checkpoint", "absent", "-o", "y"], "there is no checkpoint"),
        (["calibrate", "--checkpoint", "x", "-o", "y", "--round-scales", "fp8"], "--round-scales must be 'fp16'"),
        (["calibrate", "--checkpoint", "x", "--text", "t", "-o", "y"], "says format and scales itself"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert match in capsys.readouterr().err


def test_import_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import safetensors.torch

    safetensors.torch.save_file(
        {f"model.layers.0.self_attn.{s}_scale": torch.tensor(0.5) for s in "kv"}, tmp_path / "model.safetensors"
    )
    output = str(tmp_path / "recipe.safetensors")
    command = ["calibrate", "--checkpoint", str(tmp_path), "--code", "fp8_e4m3", "-o", output]
    assert main(command) == 0
    assert "imported: k_scale and v_scale" in capsys.readouterr().out
    assert load_recipe(output).format == "fp8_e4m3:tensor:static"
    safetensors.torch.save_file(
        {f"draft.model.layers.0.self_attn.{s}_scale": torch.tensor(0.25) for s in "kv"}, tmp_path / "draft.safetensors"
    )
    assert main(command) == 1
    assert "several models: draft.model.layers., model.layers.; choose one with --prefix=" in capsys.readouterr().err
    assert main([*command, "--prefix", "draft."]) == 0
    key = load_recipe(output)[0].key
    assert key is not None
    assert key.scale == 0.25
