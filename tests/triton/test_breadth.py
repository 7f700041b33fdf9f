"""What support() promises, walked: every promised value works, and the values next to them are refused by name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from triton_support import Filled, layout_of

from kvport.backend import Backend
from kvport.layout import GroupLayout

DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
PAGES = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("int8", "int4:g16", "int2:g32:asym", "fp8_e4m3", "fp8_e5m2:channel:static", "int4:head:static", "bf16")


def test_the_whole_product_is_promised(backend: Backend) -> None:
    for text, dim, group, page, dtype in itertools.product(FORMATS, DIMS, GROUPS, PAGES, DTYPES):
        if "g32" in text and dim % 32:
            continue
        layout = layout_of(text, heads=2, group=group, dim=dim, page_size=page, dtype=dtype)
        assert backend.support(layout).ok, (layout, backend.support(layout).reasons)


# Each value of each axis, in combinations that differ from case to case; verification of 2 to 16 tokens beside decode.
WALK = [
    (FORMATS[n % 7], DIMS[n % 6], GROUPS[n % 8], PAGES[n % 5], DTYPES[(n + n // 6) % 3], 2 + (7 * n) % 15)
    for n in range(16)
]


@pytest.mark.parametrize(("text", "dim", "group", "page", "dtype", "tokens"), WALK, ids=str)
def test_promised_values_work(
    backend: Backend, text: str, dim: int, group: int, page: int, dtype: torch.dtype, tokens: int
) -> None:
    text = text.replace("g32", "g16")  # 80 channels
    layout = layout_of(text, heads=1, group=group, dim=dim, page_size=page, dtype=dtype)
    assert Filled(backend, layout, (1, tokens), (page + 1, tokens + 3)).worst() <= 1


def test_the_walk_meets_every_value() -> None:
    for number, axis in enumerate((FORMATS, DIMS, GROUPS, PAGES, DTYPES, range(2, 17))):
        assert {case[number] for case in WALK} >= set(axis)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"page_size": 8}, "page size 8"),
        ({"page_size": 48}, "page size 48"),
        ({"page_size": 512}, "page size 512"),
        ({"query_heads": 34}, "17 query heads per KV head"),
        ({"key_dim": 8}, "key dim 8"),
        ({"value_dim": 272}, "value dim 272"),
    ],
)
def test_what_lies_beyond_is_refused_by_name(backend: Backend, change: dict[str, int], needle: str) -> None:
    layout: GroupLayout = replace(layout_of("int8"), **change)  # type: ignore[arg-type]
    reasons = backend.support(layout).reasons
    assert len(reasons) == 1
    assert needle in reasons[0]
    assert "supported are" in reasons[0]
