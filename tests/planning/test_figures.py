"""Byte figures that others published or that follow by arithmetic, and the accounts that make them up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvport
from kvport.backend import Support
from kvport.errors import InvalidArgument, LayoutError
from kvport.features import ATTENTION_FEATURES
from kvport.layout import CacheLayout, GroupLayout, LayerSpec
from kvport.planning import Plan, plan
from kvport_cpu.base import TorchBackend

MIB = 2**20


def uniform(format: str, *, layers: int = 32, kv_heads: int = 8, page_size: int = 128, tokens: int = 4096) -> Plan:
    layout = CacheLayout.uniform(
        layers=layers, kv_heads=kv_heads, head_dim=128, format=format, page_size=page_size, dtype=torch.float16
    )
    return plan(layout, tokens=tokens)


@pytest.mark.parametrize(
    ("format", "codes", "metadata"),
    [("fp16", 512, 0), ("bf16", 512, 0), ("int8:g128:scale=fp16", 256, 4), ("int4:g128:scale=fp16", 128, 4)],
)
def test_32_layers_8_heads_4096_tokens(format: str, codes: int, metadata: int) -> None:
    found = uniform(format)
    assert found.stored.codes == codes * MIB
    assert found.stored.metadata == metadata * MIB
    assert found.request_bytes == (codes + metadata) * MIB
    assert found.per_token.total * 4096 == (codes + metadata) * MIB


def test_last_128_tokens_in_16_bit_and_the_rest_int4() -> None:
    found = uniform("int4:g128:scale=fp16,recent=128")
    assert (found.near, found.near_tokens) == (16 * MIB, 128)
    assert found.stored.codes == 124 * MIB
    assert found.stored.metadata == 124 * MIB // 32  # 2 bytes beside 64 of codes
    assert found.waste == 0


@pytest.mark.parametrize(
    ("format", "kv_heads", "codes", "total"),
    [
        ("fp16", 32, 1024, 1024),
        ("int4:g64", 32, 256, 288),
        ("int4:g128", 32, 256, 272),
        ("fp16", 4, 128, 128),
        ("int8", 4, 64, 66),
        ("int4:g64", 4, 32, 36),
    ],
)
def test_32_layers_2048_tokens(format: str, kv_heads: int, codes: int, total: int) -> None:
    found = uniform(format, kv_heads=kv_heads, tokens=2048)
    assert (found.stored.codes, found.request_bytes) == (codes * MIB, total * MIB)


@pytest.mark.parametrize(("format", "size"), [("latent=bf16,rope=bf16", 1152), ("latent=int8:g128,rope=bf16", 656)])
def test_mla_bytes_per_token_and_layer(format: str, size: int) -> None:
    spec = LayerSpec(1, 128, 576, 512, latent=True)
    layout = CacheLayout((spec,), kvport.CacheFormat.parse(format), dtype=torch.bfloat16)
    assert plan(layout, tokens=1).per_token.total == size


def test_codes_scales_and_zeros_are_apart() -> None:
    token = uniform("int4:g32:asym:scale=fp16", layers=1, kv_heads=1).per_token
    assert (token.codes, token.scales, token.zeros) == (2 * 64, 2 * 4 * 2, 2 * 4 * 2)


def test_kivi_counts_k_by_channel_and_v_by_token() -> None:
    """K: 2 x 128 channels x fp16 over 32 tokens; V: 4 groups x 2 x fp16. Both 16 bytes a token and head."""
    token = uniform("kivi2", layers=1, kv_heads=1).per_token
    assert (token.codes, token.scales, token.zeros) == (64, 16, 16)


def test_mxfp4_and_nvfp4_block_scales() -> None:
    assert uniform("mxfp4", layers=1, kv_heads=1).per_token.scales == 2 * 128 // 32
    assert uniform("nvfp4", layers=1, kv_heads=1).per_token.scales == 2 * (128 // 16 + 4)
    static = uniform("nvfp4:static", layers=3, kv_heads=2)
    assert static.per_token.scales == 3 * 2 * 2 * 128 // 16
    assert static.static_bytes == 3 * 2 * 4


def test_static_scales_are_counted_once_for_the_cache() -> None:
    found = uniform("int8:channel:static:asym:scale=bf16", layers=2, kv_heads=4)
    assert found.per_token.metadata == 0
    assert found.static_bytes == 2 * 2 * 4 * 128 * 2 * 2  # layers, sides, heads, channels, scale and zero, bytes
    assert found.pool_bytes == 33 * found.lanes[0].page_bytes + found.static_bytes


def test_page_waste_is_the_unfilled_part() -> None:
    found = uniform("int8", layers=1, kv_heads=1, page_size=16, tokens=17)
    per_token = 2 * (128 + 4)
    assert (found.stored.total, found.waste) == (17 * per_token, 15 * per_token)
    assert found.request_bytes == 32 * per_token


def test_a_window_keeps_its_pages_only() -> None:
    """Window 20, pages of 16, 100 tokens: position 81 is the first the next token sees; page 5 begins at 80."""
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=64, window=20, format="int8", page_size=16)
    [lane] = plan(layout, tokens=100).lanes
    assert (lane.tokens, lane.pages) == (19, 2)
    assert lane.waste == 2 * lane.page_bytes - 19 * 2 * 68


def test_hybrid_layers_and_growth() -> None:
    full, window = LayerSpec(1, 1, 64, 64), LayerSpec(1, 1, 64, 64, window=512)
    layout = CacheLayout((window,) * 5 + (full,), kvport.CacheFormat.parse("int8"))
    found = plan(layout, tokens=4096)
    assert found.per_token.total == 6 * 2 * 68
    assert found.growth == 2 * 68


def test_layers_that_read_another_layers_kv_cost_nothing() -> None:
    spec = LayerSpec(1, 1, 64, 64)
    shared = CacheLayout((spec, replace(spec, shares=0)), kvport.CacheFormat.parse("int8"))
    alone = CacheLayout((spec,), kvport.CacheFormat.parse("int8"))
    assert plan(shared, tokens=100).request_bytes == plan(alone, tokens=100).request_bytes


class Padded(TorchBackend):
    name = "padded"

    def page_bytes(self, layout: GroupLayout) -> int:
        return -(-layout.canonical_page_bytes // 4096) * 4096

    def support(self, layout: GroupLayout) -> Support:
        return Support(
            ("page size 64: only 128",) if layout.page_size == 64 else (),
            features=ATTENTION_FEATURES - ({"lse"} if layout.page_size == 32 else set()),
            scale_rule="each is even" if layout.format.static else "",
        )


def test_the_backends_padding_is_counted_beside_the_canonical_bytes() -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=64, format="int8", page_size=16)
    found = plan(layout, tokens=32, backend=Padded("cpu", torch.device("cpu")))
    assert found.request_bytes == 2 * 16 * 2 * 68
    assert found.padding == 2 * (4096 - 16 * 2 * 68)
    assert found.request_device_bytes == 2 * 4096
    assert found.pool_bytes == 3 * 4096
    assert found.refusals == ()


def test_what_a_backend_does_not_declare_is_refused_as_at_open() -> None:
    backend = Padded("cpu", torch.device("cpu"))
    for format, page_size, feature in (("int8:outliers=4", 16, "outliers"), ("int8,recent=32", 32, "lse")):
        layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=64, format=format, page_size=page_size)
        [refusal] = plan(layout, tokens=32, backend=backend).refusals
        assert refusal.startswith(f"feature {feature} is not declared, needed for ")


def test_a_rule_for_static_scales_is_passed_on() -> None:
    backend = Padded("cpu", torch.device("cpu"))
    for format, rule in (("int8:channel:static", "each is even"), ("int8", "")):
        layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=64, format=format, page_size=16)
        found = plan(layout, tokens=32, backend=backend)
        assert found.refusals == ()
        assert found.scale_rule == found.to_json()["scale_rule"] == rule


def test_a_backend_that_refuses_is_quoted_and_its_bytes_are_unknown() -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=64, format="int8", page_size=64)
    found = plan(layout, tokens=32, backend=Padded("cpu", torch.device("cpu")))
    assert found.refusals == ("page size 64: only 128",)
    assert (found.padding, found.request_device_bytes) == (None, None)


def test_what_fits_is_the_most_that_fits() -> None:
    layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=64, format="int4:g32,sink=4,recent=32", page_size=16)
    memory = 3_000_000
    fit = plan(layout, tokens=500, requests=3, memory=memory).fit
    assert fit is not None
    assert fit.tokens is not None
    for requests, tokens in ((fit.requests, 500), (3, fit.tokens)):
        assert plan(layout, tokens=tokens, requests=requests).pool_bytes <= memory
    assert plan(layout, tokens=500, requests=fit.requests + 1).pool_bytes > memory
    assert plan(layout, tokens=fit.tokens + 1, requests=3).pool_bytes > memory


def test_nothing_fits_nothing() -> None:
    layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=64)
    fit = plan(layout, tokens=500, memory=1000).fit
    assert fit is not None
    assert (fit.requests, fit.tokens) == (0, 0)


def test_windows_alone_set_no_limit_to_tokens() -> None:
    layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=64, window=128)
    fit = plan(layout, tokens=500, memory=10**9).fit
    assert fit is not None
    assert fit.tokens is None
    tight = plan(layout, tokens=500, memory=1000).fit
    assert tight is not None
    assert tight.tokens == 0


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"tokens": 5, "requests": 0}, {"tokens": 5, "chunk": 0}])
def test_numbers_that_cannot_be(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="must be a whole number"):
        plan(CacheLayout.uniform(layers=1, kv_heads=1, head_dim=64), **bad)


def test_a_format_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match="groups of 48 channels do not divide dim 128"):
        plan(
            {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 1024},
            "int4:g48",
            tokens=10,
        )


def test_a_layout_says_its_format_itself() -> None:
    with pytest.raises(InvalidArgument, match="one or the other"):
        plan(CacheLayout.uniform(layers=1, kv_heads=1, head_dim=64), "int8", tokens=10)


def test_outliers_are_no_scales() -> None:
    sparse = uniform("int4:g64:sparse=160", layers=1, kv_heads=1)
    assert sparse.per_token.metadata == 2 * 2 * 4  # sides, groups, float32
    assert sparse.per_token.outliers == 2 * 160 * 8 // 128
    assert sparse.per_token.total == 128 + 16 + 20
    channels = uniform("k=int4:g64:outliers=4,v=int4:g64", layers=1, kv_heads=1)
    assert (channels.per_token.metadata, channels.per_token.outliers) == (16, 16)
