"""Perplexity, KL and top-1 against a plain computation, and that what is measured is the stored past."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

import kvport  # noqa: E402
from kvport.evaluation import (  # noqa: E402
    REFERENCE,
    cache_argument,
    decode_speed,
    evaluate,
    machine,
    pydoc_text,
    text_digest,
)
from kvport.integrations.transformers import KVPortCache  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, 61, (1, 75), generator=torch.Generator().manual_seed(2))


def stock(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def ours(model: Any, text: str) -> KVPortCache:
    return KVPortCache(model.config, format=text, page_size=16)


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_the_reference_is_the_plain_perplexity_of_one_forward(model: Any, ids: torch.Tensor, chunk: int) -> None:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()
    found = evaluate(model, ids, {}, reference=stock(model), chunk=chunk)[REFERENCE]
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    assert (found.tokens, found.kl, found.kl_max, found.top1) == (74, 0.0, 0.0, 1.0)


def test_kl_and_top1_are_those_of_the_logits(model: Any, ids: torch.Tensor) -> None:
    """Against distributions from two separate walks, in float64."""
    walks = []
    for cache in (stock(model), ours(model, "int4:g16")):
        with torch.no_grad():
            parts = [
                model(part, use_cache=True, **{cache_argument(model): cache}).logits[0]
                for part in ids[:, :-1].split(9, 1)
            ]
        walks.append(torch.cat(parts).double().log_softmax(-1))
    full, other = walks
    divergence = (full.exp() * (full - other)).sum(-1)
    found = evaluate(model, ids, {"int4": ours(model, "int4:g16")}, reference=stock(model), chunk=9)["int4"]
    assert found.kl == pytest.approx(divergence.mean().item(), rel=1e-4)
    assert found.kl_p99 == pytest.approx(divergence.quantile(0.99).item(), rel=1e-4)
    assert found.kl_max == pytest.approx(divergence.max().item(), rel=1e-4)
    assert found.top1 == pytest.approx((full.argmax(-1) == other.argmax(-1)).double().mean().item())
    assert found.perplexity == pytest.approx(math.exp(-other.gather(-1, ids[0, 1:, None]).mean().item()), rel=1e-5)
    assert found.kl > 1e-3  # there is something to see


def test_finer_formats_are_closer(model: Any, ids: torch.Tensor) -> None:
    texts = ("fp32", "int8", "int4:g16", "int2:g16")
    caches = {text: ours(model, text) for text in texts}
    calls: list[tuple[int, int]] = []
    found = evaluate(
        model, ids, caches, reference=stock(model), chunk=25, progress=lambda done, total: calls.append((done, total))
    )
    divergences = [found[text].kl for text in texts]
    assert divergences == sorted(divergences)
    assert divergences[0] < 1e-9 < divergences[1]
    assert found["fp32"].top1 == 1.0
    assert calls == [(n + 1, 15) for n in range(15)]  # 3 chunks of 5 caches
    assert {cache.get_seq_length() for cache in caches.values()} == {74}
    assert all(quality.seconds > 0 for quality in found.values())
    assert set(found["int8"].to_json()) == {"tokens", "perplexity", "kl", "kl_p99", "kl_max", "top1", "seconds"}


def test_every_cache_gets_its_turns(model: Any, ids: torch.Tensor) -> None:
    caches = {"stock": stock(model), "int8": ours(model, "int8")}
    found = decode_speed(model, caches, ids[:, :1], 3, warm_up=1)
    assert set(found) == set(caches)
    assert all(seconds > 0 for seconds in found.values())
    assert {cache.get_seq_length() for cache in caches.values()} == {4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.ones(2, 9, dtype=torch.long)}, r"\(1, tokens\)"),
        ({"ids": torch.ones(1, 1, dtype=torch.long)}, "at least 2"),
        ({"chunk": 0}, "chunk must be"),
        ({"caches": {REFERENCE: None}}, "taken by the reference"),
    ],
)
def test_wrong_arguments(model: Any, ids: torch.Tensor, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"ids": ids, "caches": {}, "reference": stock(model), **change}
    with pytest.raises(kvport.InvalidArgument, match=message):
        evaluate(model, **arguments)


def test_the_text_and_the_machine_are_named() -> None:
    text = pydoc_text()
    assert len(text) > 100_000
    assert text_digest(text) == text_digest(pydoc_text()) != text_digest(text + " ")
    assert {"processor", "threads", "versions", "date"} <= set(machine())
