"""KVPortCache against transformers' own cache, on tiny random models: the same tokens from fp32 pages, whatever is
done to the cache; clean errors and an unchanged cache where something is refused or stops half-way."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

import kvport  # noqa: E402
from kvport import codec  # noqa: E402
from kvport.evaluation import cache_argument  # noqa: E402
from kvport.formats import CacheFormat  # noqa: E402
from kvport.integrations.transformers import KVPortCache  # noqa: E402

#: max |difference| of logits between fp32 pages and the stock cache. K and V are the same bits; only the strides in
#: which attention reads them differ, so its sums may round differently.
LOGIT_BOUND = 1e-4

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.15,
}
GQA = {"num_key_value_heads": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, **GQA),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, **GQA),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, **GQA, head_dim=32),
    "mistral-sliding": lambda: transformers.MistralConfig(**SHAPE, **GQA, sliding_window=6),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=64, n_layer=3, n_head=4, initializer_range=0.15, pad_token_id=0, eos_token_id=None
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, **GQA, head_dim=16, sliding_window=6),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE, **GQA),
    "falcon-multi-query": lambda: transformers.FalconConfig(
        **{k: v for k, v in SHAPE.items() if k != "intermediate_size"}, multi_query=True
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=97, hidden_size=64, n_layer=3, n_head=4, initializer_range=0.15, pad_token_id=0, eos_token_id=None
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SHAPE,
        **GQA,
        head_dim=16,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **SHAPE,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
FP32 = {"deepseek-v3": "latent=fp32,rope=fp32"}
PROMPT = torch.tensor([[11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13]])
PADDED = torch.tensor([[0, 0, 0, 21, 22, 23, 24, 25, 26], list(range(31, 40)), [0] * 8 + [41]])
MODES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "greedy": (PROMPT, {}),
    "left-padded batch": (PADDED, {}),
    "4 beams": (PROMPT, {"num_beams": 4}),
    "3 beams, 2 returns, left-padded": (PADDED, {"num_beams": 3, "num_return_sequences": 2}),
    "prompt lookup": (PROMPT, {"prompt_lookup_num_tokens": 3}),
    "chunked prefill": (PROMPT, {"prefill_chunk_size": 4}),
}

_models: dict[str, Any] = {}


def model_of(name: str) -> Any:
    if name not in _models:
        torch.manual_seed(7)
        attention = "eager" if name in ("gemma2", "gpt-oss") else "sdpa"  # soft cap and sink logits
        config = CONFIGS[name]()
        if name in ("falcon-multi-query", "bloom"):
            attention = config._attn_implementation or "eager"
        _models[name] = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    return _models[name]


def stock(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def ours(model: Any, **options: Any) -> KVPortCache:
    options.setdefault("format", FP32.get(next(n for n, m in _models.items() if m is model), "fp32"))
    options.setdefault("page_size", 4)
    return KVPortCache(model.config, "cpu", **options)


def generate(model: Any, ids: torch.Tensor, cache: Any, new: int = 14, **options: Any) -> torch.Tensor:
    return model.generate(
        ids,
        attention_mask=(ids != 0).long(),
        max_new_tokens=new,
        do_sample=False,
        **{cache_argument(model): cache},
        **options,
    )


def forward(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=True, **{cache_argument(model): cache}, **options).logits


@pytest.fixture
def llama() -> Any:
    return model_of("llama")


# -- the same tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_pages_give_the_same_tokens_as_the_stock_cache(name: str, mode: str) -> None:
    model, (ids, options) = model_of(name), MODES[mode]
    expected = generate(model, ids, stock(model), **options)
    cache = ours(model)
    found = generate(model, ids, cache, **options)
    assert expected.shape[1] > ids.shape[1] + 10  # it did generate
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    cache.paged.check()
    assert cache.stats().rows == ids.shape[0] * options.get("num_beams", 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_pages_give_the_same_logits_in_chunks(name: str) -> None:
    model = model_of(name)
    expected, cache = stock(model), ours(model)
    ids = torch.arange(1, 42).remainder(96).add(1).unsqueeze(0)
    worst = 0.0
    for chunk in ids.split([7, 1, 1, 16, 5, 1, 10], dim=1):
        worst = max(worst, (forward(model, chunk, cache) - forward(model, chunk, expected)).abs().max().item())
    print(f"{name}: max |logit difference| {worst:.2e} (bound {LOGIT_BOUND:.0e})")
    assert worst <= LOGIT_BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_exact_in_pages_of_its_dtype(dtype: torch.dtype) -> None:
    model = copy.deepcopy(model_of("llama")).to(dtype)
    cache = KVPortCache(model.config, format=kvport.formats.dtype_name(dtype), page_size=4)
    torch.testing.assert_close(generate(model, PROMPT, cache), generate(model, PROMPT, stock(model)), rtol=0, atol=0)
    assert cache.layers[0].keys.dtype == dtype
    assert cache.stats().bytes_per_token == cache.stats().dense_bytes_per_token == 3 * 2 * 2 * 16 * 2


def test_a_second_turn_reuses_the_cache(llama: Any) -> None:
    expected, cache = stock(llama), ours(llama)
    for turn in (expected, cache):
        first = generate(llama, PROMPT, turn, new=5)
        assert turn.get_seq_length() == first.shape[1] - 1
        follow_up = torch.cat([first, torch.tensor([[50, 51, 52]])], 1)
        turn.second = generate(llama, follow_up, turn, new=6)
    assert torch.equal(cache.second, expected.second)


def test_an_assistant_model_proposes_and_the_cache_crops(llama: Any) -> None:
    assistant = model_of("qwen2")
    expected = generate(llama, PROMPT, stock(llama), assistant_model=assistant)
    assert torch.equal(generate(llama, PROMPT, ours(llama), assistant_model=assistant), expected)


def test_the_old_argument_name_works_too(llama: Any) -> None:
    with pytest.warns(FutureWarning, match="past_key_values"):
        found = llama.generate(PROMPT, past_key_values=ours(llama), max_new_tokens=6, do_sample=False)
    assert torch.equal(found, generate(llama, PROMPT, stock(llama), new=6))


def test_a_cache_made_in_inference_mode_is_usable_outside_it(llama: Any) -> None:
    cache = ours(llama, tokens=64)  # made in the first forward, written in the second
    with torch.inference_mode():
        forward(llama, PROMPT, cache)
    expected = stock(llama)
    forward(llama, PROMPT, expected)
    torch.testing.assert_close(
        forward(llama, PROMPT, cache), forward(llama, PROMPT, expected), rtol=0, atol=LOGIT_BOUND
    )


def test_a_copied_prompt_cache_continues_on_its_own(llama: Any) -> None:
    prompt = ours(llama, format="int8")
    forward(llama, PROMPT, prompt)
    before = prompt.layers[1].keys
    twin = copy.deepcopy(prompt)
    assert torch.equal(twin.layers[1].keys, before)
    forward(llama, PROMPT[:, :3], twin)
    assert (twin.get_seq_length(), prompt.get_seq_length()) == (14, 11)
    assert torch.equal(prompt.layers[1].keys, before)


# -- quantized ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["int8", "int4:g16", "int4:g16:asym", "k=int8,v=int4:g8:scale=fp16"])
def test_every_query_sees_what_the_pages_hold(llama: Any, text: str) -> None:
    """Also in the first forward: what comes back is encoded and decoded K and V, never the new ones as given."""
    cache = ours(llama, format=text)
    fmt = CacheFormat.parse(text)
    torch.manual_seed(3)
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tokens in (5, 1, 9):
        key, value = torch.randn(2, 2, tokens, 16), 3 * torch.randn(2, 2, tokens, 16)
        given.append((key, value))
        for layer in range(3):
            found = cache.update(key, value, layer)
            for got, side, parts in zip(found, (fmt.key, fmt.value), zip(*given, strict=True), strict=True):
                whole = torch.cat(parts, 2)
                expected = codec.decode(side, codec.encode(side, whole.transpose(1, 2)).planes).transpose(1, 2)
                assert torch.equal(got, expected)
                assert not torch.equal(got, whole)
    assert torch.equal(cache.layers[2].values, found[1])


def test_bytes_count_codes_and_scales(llama: Any) -> None:
    layers, heads, dim, size = 3, 2, 16, 4
    for text, per_head in [("int8", dim + 4), ("int4:g16", dim // 2 + 4), ("int4:g8:asym:scale=fp16", dim // 2 + 8)]:
        cache = ours(llama, format=text)
        forward(llama, PROMPT, cache)  # 11 tokens: 3 pages of 4
        stats = cache.stats()
        assert stats.bytes_per_token == layers * heads * 2 * per_head
        assert stats.held_bytes == cache.bytes() == 3 * size * stats.bytes_per_token
        assert stats.dense_bytes_per_token == layers * heads * 2 * dim * 4
        assert stats.allocated_bytes >= stats.held_bytes
        assert (stats.rows, stats.length) == (1, 11)


@pytest.mark.parametrize("text", ["kivi2", "int4:g16:asym,sink=2,recent=8", "k=int4:c4:asym,v=int4:g16:asym"])
@pytest.mark.parametrize("mode", ["left-padded batch", "4 beams", "prompt lookup"])
def test_formats_with_tiers_run(llama: Any, text: str, mode: str) -> None:
    ids, options = MODES[mode]
    if text == "kivi2":
        options = {**options}
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SHAPE, **GQA, head_dim=32), attn_implementation="sdpa"
        ).eval()
        cache = KVPortCache(model.config, format=text, page_size=32)
    else:
        model, cache = llama, ours(llama, format=text)
    found = generate(model, ids, cache, new=40, **options)
    assert found.shape[1] > ids.shape[1] + 30
    cache.paged.check()
    cache.reset()
    assert cache.bytes() == 0


def test_static_scales_are_handed_through(llama: Any) -> None:
    text = "int8:head:static"
    side = kvport.SideScales(torch.tensor([0.02, 0.03]))
    scales = {layer: kvport.LayerScales(side, side) for layer in range(3)}
    cache = ours(llama, format=text, scales=scales)
    torch.manual_seed(1)
    key = torch.randn(1, 2, 6, 16)
    for layer in range(3):
        found, _ = cache.update(key, key, layer)
    scale = torch.tensor([0.02, 0.03]).view(1, 2, 1, 1)
    torch.testing.assert_close(found, (key / scale).round().clamp(-127, 127) * scale, rtol=0, atol=0)
    with pytest.raises(kvport.ScaleError):
        ours(llama, format=text)


def test_mla_latents_quantize() -> None:
    model = model_of("deepseek-v3")
    cache = ours(model, format="latent=int8:g16,rope=bf16")
    forward(model, PROMPT, cache)
    assert cache.stats().bytes_per_token == 3 * (32 + 2 * 4 + 8 * 2)
    with pytest.raises(kvport.LayoutError, match="latent=CODE,rope=CODE"):
        KVPortCache(model.config, format="int8")


# -- rows -----------------------------------------------------------------------------------------------------------


def filled(model: Any, rows: int = 3, length: int = 10, **options: Any) -> tuple[KVPortCache, torch.Tensor]:
    """A cache of random K and V, and the K of layer 1."""
    torch.manual_seed(5)
    cache = ours(model, **options)
    keys = torch.randn(3, rows, 2, length, 16)
    for layer in range(3):
        cache.update(keys[layer], -keys[layer], layer)
    return cache, keys[1]


def test_reorder_select_repeat_crop_and_reset(llama: Any) -> None:
    cache, keys = filled(llama)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    keys = keys[[2, 2, 0]]
    assert torch.equal(cache.layers[1].keys, keys)
    cache.batch_repeat_interleave(2)
    keys = keys.repeat_interleave(2, 0)
    assert torch.equal(cache.layers[1].keys, keys)
    cache.crop(-3)
    keys = keys[:, :, :7]
    assert torch.equal(cache.layers[1].keys, keys)
    assert torch.equal(cache.layers[1].values, -keys)
    more = torch.randn(6, 2, 2, 16)
    for layer in range(3):
        cache.update(more, more, layer)
    keys = torch.cat([keys, more], 2)  # forks part where they are written
    assert torch.equal(cache.layers[1].keys, keys)
    cache.batch_select_indices(torch.tensor([5, 0]))
    assert torch.equal(cache.layers[1].keys, keys[[5, 0]])
    cache.batch_select_indices(torch.tensor([False, True]))
    assert torch.equal(cache.layers[1].keys, keys[[0]])
    assert (cache.batch_size, cache.get_seq_length()) == (1, 9)
    cache.crop(0)
    cache.paged.check()
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length(), cache.bytes(), cache.is_initialized) == (-1, 0, 0, False)
    forward(llama, PROMPT, cache)
    assert cache.batch_size == 1


def test_rows_before_the_first_forward_are_no_rows(llama: Any) -> None:
    cache = ours(llama)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    cache.reset()
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.layers[0].keys is None


def test_beams_share_pages(llama: Any) -> None:
    cache, _ = filled(llama, rows=4, length=16)
    apart = cache.bytes()
    cache.reorder_cache(torch.tensor([1, 1, 1, 1]))
    assert cache.bytes() * 4 == apart


# -- capacity -------------------------------------------------------------------------------------------------------


def test_pools_grow_by_doubling_and_keep_every_bit(llama: Any) -> None:
    cache = ours(llama, format="int8")
    torch.manual_seed(9)
    keys = torch.randn(2, 2, 100, 16)
    allocated = []
    for chunk in keys.split(3, dim=2):
        for layer in range(3):
            cache.update(chunk, chunk, layer)
        allocated.append(cache.stats().allocated_bytes)
    side = CacheFormat.parse("int8").key
    expected = codec.decode(side, codec.encode(side, keys.transpose(1, 2)).planes).transpose(1, 2)
    assert torch.equal(cache.layers[2].keys, expected)
    assert len(set(allocated)) <= 6  # 34 forwards
    assert cache.get_max_length() == -1
    cache.paged.check()


def test_flags_of_nans_outlive_growth_and_copies(llama: Any) -> None:
    """A NaN that static integers store as code 0 is known of for as long as its page is held."""
    side = kvport.SideScales(torch.tensor([0.02, 0.03]))
    cache = ours(llama, format="int8:head:static", scales={n: kvport.LayerScales(side, side) for n in range(3)})
    torch.manual_seed(2)
    pools = set()
    for turn in range(30):
        for layer in range(3):
            key = torch.randn(2, 2, 2, 16)
            if (turn, layer) == (3, 1):  # the second row's tokens 6 and 7, of its second page
                key[1, 0, 1, 5] = torch.nan
            cache.update(key, key, layer)
        pools.add(cache.stats().allocated_bytes)
    assert len(pools) > 2
    twin = copy.deepcopy(cache)
    for held in (cache, twin):
        [found] = held.paged.check()
        assert isinstance(found, kvport.Poisoned)
        assert (found.sequence, found.layer, found.position) == (held._rows[1], 1, 4)


def test_tokens_reserves_and_limits_each_row(llama: Any) -> None:
    cache, keys = filled(llama, rows=3, length=10, tokens=12)
    first = cache.paged
    one = torch.randn(3, 2, 1, 16)
    for _ in range(2):
        for layer in range(3):
            cache.update(one, one, layer)
    assert cache.paged is first  # nothing moved: the room was there
    held = cache.bytes()
    with pytest.raises(kvport.OutOfPages, match=r"13 tokens long \(12 \+ 1\).*tokens=12.*let it grow") as caught:
        cache.update(one, one, 0)
    assert (caught.value.needed, caught.value.total) == (3 * 4, first.stats().pools[0].total)
    assert (cache.bytes(), cache.get_seq_length(), cache.get_max_length()) == (held, 12, 12)
    cache.crop(-4)
    for layer in range(3):
        cache.update(one, one, layer)
    assert torch.equal(cache.layers[1].keys[:, :, :8], keys[:, :, :8])


def test_full_rows_that_share_pages_have_room_to_part(llama: Any) -> None:
    cache, _ = filled(llama, rows=4, length=7, tokens=8)
    cache.reorder_cache(torch.tensor([0, 0, 1, 1]))
    first, one = cache.paged, torch.randn(4, 2, 1, 16)
    for layer in range(3):
        cache.update(one, one, layer)
    assert cache.paged is first


# -- half a forward, and other wrong uses ---------------------------------------------------------------------------


class Stop(Exception):
    pass


def stopped(model: Any, ids: torch.Tensor, cache: Any, layer: int) -> None:
    """A forward that raises before this layer."""

    def stop(*_: Any) -> None:
        raise Stop

    hook = model.model.layers[layer].register_forward_pre_hook(stop)
    try:
        with pytest.raises(Stop):
            forward(model, ids, cache)
    finally:
        hook.remove()


@pytest.mark.parametrize("layer", [1, 2])
def test_a_forward_that_stops_is_rolled_back_at_the_next_use(llama: Any, layer: int) -> None:
    cache, untouched = ours(llama, format="int8"), ours(llama, format="int8")
    for each in (cache, untouched):
        forward(llama, PROMPT, each)
    held = cache.bytes()
    stopped(llama, PROMPT, cache, layer)
    with pytest.raises(kvport.StepError, match=r"layers \[.*2\] .*did not finish.*rolled back.*11 tokens"):
        forward(llama, PROMPT, cache)
    assert (cache.get_seq_length(), cache.bytes()) == (11, held)
    cache.paged.check()
    assert torch.equal(forward(llama, PROMPT, cache), forward(llama, PROMPT, untouched))


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.crop(-1),
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        lambda cache: copy.deepcopy(cache),
        lambda cache: cache.layers[0].keys,
    ],
)
def test_other_uses_after_half_a_forward_say_so_too(llama: Any, use: Callable[[KVPortCache], Any]) -> None:
    cache = ours(llama)
    forward(llama, PROMPT, cache)
    stopped(llama, PROMPT, cache, 1)
    with pytest.raises(kvport.StepError, match="did not finish"):
        use(cache)
    assert cache.get_seq_length() == 11
    use(cache)
    cache.paged.check()


def test_reset_after_half_a_forward_just_resets(llama: Any) -> None:
    cache = ours(llama)
    stopped(llama, PROMPT, cache, 1)
    cache.reset()
    assert (cache.bytes(), cache.get_seq_length()) == (0, 0)


def test_rows_of_a_first_forward_that_stopped_bind_nobody(llama: Any) -> None:
    cache = ours(llama)
    stopped(llama, PADDED, cache, 1)
    with pytest.raises(kvport.StepError, match="0 tokens"):
        forward(llama, PROMPT, cache)
    forward(llama, PROMPT, cache)
    assert (cache.batch_size, cache.get_seq_length()) == (1, 11)


def test_a_layer_updated_twice_is_refused(llama: Any) -> None:
    cache, one = ours(llama), torch.randn(1, 2, 1, 16)
    cache.update(one, one, 0)
    with pytest.raises(kvport.StepError, match=r"layer 0 was updated again while layers \[1, 2\]"):
        cache.update(one, one, 0)
    assert cache.get_seq_length() == 0


def test_layers_in_another_order_are_one_forward_all_the_same(llama: Any) -> None:
    cache = ours(llama)
    one = torch.randn(1, 2, 1, 16)
    for layer in (2, 0, 1):
        cache.update(one + layer, one, layer)
    assert torch.equal(cache.layers[2].keys, one + 2)


def test_lengths_run_ahead_in_the_middle_of_a_forward_as_in_the_stock_cache(llama: Any) -> None:
    cache, one = ours(llama), torch.randn(1, 2, 3, 16)
    cache.update(one, one, 0)
    assert [cache.get_seq_length(layer) for layer in range(3)] == [3, 0, 0]


def test_wrong_arguments_change_nothing(llama: Any) -> None:
    cache = ours(llama)
    forward(llama, PROMPT, cache)
    free = cache.paged.stats().pools[0].free
    good = torch.randn(1, 2, 1, 16)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (kvport.InvalidArgument, "holds 1 rows, this forward has 2", lambda: forward(llama, PADDED[:2], cache)),
        (kvport.Unsupported, r"expected; give .*LayerSpec", lambda: cache.update(good[..., :8], good, 0)),
        (kvport.Unsupported, "stores K", lambda: cache.update(good[0], good[0], 0)),
        (kvport.InvalidArgument, "requires grad", lambda: cache.update(good.clone().requires_grad_(), good, 0)),
        (kvport.InvalidArgument, "dtype", lambda: cache.update(good.double(), good.double(), 0)),
        (kvport.InvalidArgument, r"0 \.\. -11", lambda: cache.crop(-12)),
        (kvport.InvalidArgument, r"0 \.\. -11", lambda: cache.crop(3)),
        (kvport.Unsupported, "on one layer", lambda: cache.layers[0].crop(-1)),
        (kvport.Unsupported, "on one layer", lambda: cache.layers[0].reset()),
        (kvport.InvalidArgument, "tokens must be", lambda: KVPortCache(llama.config, tokens=0)),
        (kvport.InvalidArgument, "model.config", lambda: KVPortCache(llama)),
        (kvport.InvalidArgument, "layers gives 1 geometries", lambda: KVPortCache(llama.config, layers=[SPEC])),
        (kvport.FormatError, "int9", lambda: KVPortCache(llama.config, format="int9")),
        (kvport.LayoutError, "64", lambda: KVPortCache(llama.config, format="int4:g64")),
        (kvport.UnknownBackend, "tpu", lambda: KVPortCache(llama.config, "tpu:0")),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
        assert (cache.get_seq_length(), cache.paged.stats().pools[0].free) == (11, free), message


SPEC = kvport.LayerSpec(kv_heads=2, query_heads=4, key_dim=16, value_dim=16)


def test_the_geometry_can_be_given(llama: Any) -> None:
    cache = ours(llama, layers=[kvport.LayerSpec(2, 4, 16, 16, format=CacheFormat.parse("int8")), SPEC, SPEC])
    forward(llama, PROMPT, cache)
    assert cache.stats().bytes_per_token == 2 * 2 * (16 + 4) + 2 * 2 * 2 * 16 * 4


# -- models that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.MambaConfig(), "MambaConfig.*linear_attention layers"),
        (lambda: transformers.JambaConfig(), "JambaConfig.*linear_attention layers"),
        (lambda: transformers.Zamba2Config(), "Zamba2Config.*hybrid layers"),
        (lambda: transformers.RwkvConfig(), "RwkvConfig.*not attention"),
        (lambda: transformers.T5Config(), "T5Config.*cross-attention"),
        (lambda: transformers.GPT2Config(add_cross_attention=True), "GPT2Config.*cross-attention"),
    ],
)
def test_models_with_another_state_are_refused_by_name(config: Callable[[], Any], message: str) -> None:
    with pytest.raises(kvport.Unsupported, match=message):
        KVPortCache(config())


@pytest.mark.parametrize(
    ("stand_in", "why"), [("None", "halted"), ("types.SimpleNamespace(__version__='5.23.1')", "5.23.1 is installed")]
)
def test_without_transformers_the_error_has_the_install_command(stand_in: str, why: str) -> None:
    script = (
        f"import sys, types; sys.modules['transformers'] = {stand_in}\n"
        "import kvport\n"
        "try:\n    import kvport.integrations.transformers\n"
        "except kvport.MissingDependency as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert why in done.stdout
    assert "pip install -U 'kvport[transformers]'" in done.stdout
