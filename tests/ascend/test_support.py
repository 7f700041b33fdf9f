"""What the backend says it supports, against the rules: each refusal quotes a rule that the layout really breaks."""

from __future__ import annotations

import re

import pytest
import torch

from kvport.backend import Support
from kvport.layout import CacheLayout, GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_ascend.backend import AscendBackend
from kvport_ascend.emulator import rules
from kvport_ascend.formats import mode_of
from kvport_ascend.socs import SOCS


def backend(soc: str = "A3") -> AscendBackend:
    return AscendBackend("cpu", torch.device("cpu"), SOCS[soc], {})


def layout(
    format: str = "int8",
    *,
    kv_heads: int = 2,
    query_heads: int = 4,
    dim: int = 128,
    value_dim: int | None = None,
    page_size: int = 128,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> GroupLayout:
    made = CacheLayout.uniform(
        layers=1,
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=dim,
        value_dim=value_dim,
        page_size=page_size,
        window=window,
        format=format,
        dtype=dtype,
    )
    return made.groups[0].layout


def decode_call(asked: GroupLayout, soc: str) -> rules.AttentionCall:
    """The decode call that this layout would need, on tensors without memory; the block table is real."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pages, heads, dim, page = 3, asked.kv_heads, asked.key_dim, asked.page_size
    mode = mode_of(asked.format.key)
    shapes = {5: (pages, heads, page), 2: (heads,), 0: (1, heads, 1, dim)}
    scale = None if mode is None else empty(*shapes[mode], dtype=torch.float32 if mode == 5 else asked.dtype)
    codes = asked.dtype if mode is None else torch.int8
    return rules.AttentionCall(
        operator="npu_fused_infer_attention_score",
        soc=soc,
        query=empty(1, asked.query_heads, 1, dim, dtype=asked.dtype),
        key=empty(pages, page, heads * dim, dtype=codes),
        value=empty(pages, page, heads * asked.value_dim, dtype=codes),
        q_heads=asked.query_heads,
        kv_heads=heads,
        layout="BNSD",
        softmax_scale=1.0,
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        block_size=page,
        kv_lengths=(page + 1,),
        key_scale=scale,
        value_scale=scale,
        key_mode=mode or 0,
        value_mode=mode or 0,
        lse=True,
    )


def broken_rules(call: rules.AttentionCall) -> set[str]:
    return {rule.name for rule in rules.ATTENTION if rule.check(call)}


@pytest.mark.parametrize("soc", ["A2", "A3", "950"])
@pytest.mark.parametrize(
    "asked",
    [
        layout(),
        layout(dim=64, page_size=32),
        layout(dim=512, page_size=512, kv_heads=1, query_heads=64),
        layout("int8:channel:static:scale=bf16"),
        layout("int8:head:static:scale=bf16"),
        layout("int8:tensor:static:scale=fp16", dtype=torch.float16),
        layout("fp16", dtype=torch.float16, page_size=16, dim=80),
        layout("bf16"),
    ],
    ids=lambda asked: f"{asked.format}-{asked.key_dim}-{asked.page_size}",
)
def test_supported_layouts_break_no_rule(asked: GroupLayout, soc: str) -> None:
    answer = backend(soc).support(asked)
    assert answer.reasons == ()
    assert answer.workspace == "history"
    assert answer.features == {"lse", "prefill", "verify", "poison"}
    assert broken_rules(decode_call(asked, soc)) == set()


@pytest.mark.parametrize(
    ("asked", "quoted"),
    [
        (layout(dim=80), {"head_dim"}),
        (layout(dim=544), {"head_dim"}),
        (layout("bf16", dim=72), {"head_dim"}),
        (layout(page_size=48), {"block_size_decode"}),
        (layout(page_size=16), {"block_size_decode"}),
        (layout(page_size=1024), {"block_size_decode"}),
        (layout("bf16", page_size=24), {"block_size_decode"}),
        (layout(query_heads=130), {"heads_ratio"}),
        (layout(kv_heads=258, query_heads=258, dim=32), {"heads_limit"}),
        (layout(kv_heads=128, query_heads=128, dim=512), {"page_row_limit"}),
        (layout(value_dim=64), {"kv_same_shape"}),
        (layout(dtype=torch.float32), {"query_dtype"}),
        (layout("fp16"), {"kv_dtype"}),
        (layout(dim=80, page_size=48, query_heads=130), {"head_dim", "block_size_decode", "heads_ratio"}),
    ],
)
def test_refusals_quote_the_broken_rules(asked: GroupLayout, quoted: set[str]) -> None:
    """All unmet rules are named, each is broken by the call the layout would need, and the numbers are in the text."""
    answer = backend().support(asked)
    named = [set(re.findall(r"rule (\w+):", reason)) for reason in answer.reasons]
    assert set().union(*named) == quoted
    assert all(re.search(r"\d", reason) for reason in answer.reasons)
    if quoted == {"kv_dtype"}:  # float16 pages with a bfloat16 model
        call = decode_call(layout("bf16"), "A3")
        call = rules.AttentionCall(**{**vars(call), "key": call.key.half(), "value": call.value.half()})
    else:
        call = decode_call(asked, "A3")
    for name in quoted:
        assert next(rule for rule in rules.ATTENTION if rule.name == name).check(call), f"{name} is not broken"


@pytest.mark.parametrize(
    ("format", "part"),
    [
        ("int4", "only int8 codes"),
        ("int2:g32:asym:scale=fp16", "only int8 codes"),
        ("int8:g64", "granularity group"),
        ("int8:asym", "rarely exact"),
        ("int8:scale=bf16", "int8 without scale="),
        ("k=int8:channel:static:scale=bf16,v=int8", "modes_equal"),
        ("k=int8:channel:static:scale=bf16,v=int8:tensor:static:scale=bf16", "value_scale_shape"),
        ("k=int8,v=bf16", "modes_equal"),
    ],
)
def test_refused_formats_name_the_nearest(format: str, part: str) -> None:
    reasons = backend().support(layout(format)).reasons
    assert reasons
    assert part in "; ".join(reasons)


def test_window_is_refused() -> None:
    (reason,) = backend().support(layout(window=256)).reasons
    assert "window 256" in reason
    assert "decode_takes_no_mask" in reason


def test_310p_is_refused_whole() -> None:
    answer = backend("310P").support(layout())
    assert isinstance(answer, Support)
    assert len(answer.reasons) == 1
    assert "310P" in answer.reasons[0]


@pytest.mark.parametrize(("soc", "entry"), SOCS.items())
def test_table_states_the_rules(soc: str, entry: object) -> None:
    """The table's limits are the last values that the rules let pass."""
    row = SOCS[soc]
    assert entry is row
    if row.refusal:
        return
    largest = layout(dim=row.max_dim, page_size=row.max_page, kv_heads=1, query_heads=row.max_ratio)
    assert not broken_rules(decode_call(largest, soc))
    assert "head_dim" in broken_rules(decode_call(layout(dim=row.max_dim + row.int8_dim), soc))
    assert "head_dim" in broken_rules(decode_call(layout(dim=row.int8_dim // 2), soc))
    assert "block_size_decode" in broken_rules(decode_call(layout(page_size=row.max_page + row.int8_page), soc))
    assert "heads_ratio" in broken_rules(decode_call(layout(kv_heads=1, query_heads=row.max_ratio + 1), soc))
    assert "heads_limit" in broken_rules(
        decode_call(layout(kv_heads=row.max_heads + 1, query_heads=row.max_heads + 1), soc)
    )
    for limit, broken in ((row.max_decode_tokens, False), (row.max_decode_tokens + 128, True)):
        call = decode_call(layout(), soc)
        table = torch.zeros(1, limit // 128, dtype=torch.int32)
        call = rules.AttentionCall(**{**vars(call), "block_table": table})
        assert ("decode_kv_limit" in broken_rules(call)) is broken
    packed = {"query": torch.empty(2, 4, 64), "layout": "TND", "q_lengths": (2,), "kv_lengths": (2,)}
    dense = {"key": torch.empty(2, 2, 64), "value": torch.empty(2, 2, 64), "block_table": None, "key_scale": None}
    call = rules.AttentionCall(**{**vars(decode_call(layout(dim=64), soc)), **packed, **dense, "value_scale": None})
    assert ("tnd_head_dim" in broken_rules(call)) is (row.packed_dims is not None)


def test_float32_scales_that_are_numbers_of_the_models_dtype() -> None:
    """They open, and the operator is given bfloat16."""
    asked = layout("int8:channel:static")
    side = SideScales(torch.full((2, 128), 0.0625))
    store = backend().allocate(asked, 3, scales=[LayerScales(side, side)])
    assert store.operands[0]["key_antiquant_scale"].dtype == torch.bfloat16
    assert store.operands[0]["key_antiquant_mode"] == 0
