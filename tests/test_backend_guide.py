"""The backend of docs/write-a-backend.md is correct at every step, and docs/conformance.md tells no other numbers."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvport_conformance import bounds
from kvport_conformance.cases import CHAPTERS, all_cases, run_case, select
from kvport_conformance.profiles import PROFILES

DOCS = Path(__file__).parents[1] / "docs"
STEPS = ("MyChip", "Declines", "Copies", "Appends", "Attends")


@pytest.fixture(scope="module")
def guide() -> Iterator[types.ModuleType]:
    """The guide's Python blocks, run in order as one module."""
    module = types.ModuleType("guide")
    text = (DOCS / "write-a-backend.md").read_text(encoding="utf-8")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "write-a-backend.md", "exec"), vars(module))
    yield module
    torch.set_num_threads(before)


@pytest.mark.parametrize("chapter", CHAPTERS)
@pytest.mark.parametrize("step", STEPS)
def test_the_suite_is_green_after_every_step(step: str, chapter: str, guide: types.ModuleType) -> None:
    formats = ("int8",) if step != "Attends" else ("int8", "bf16", "fp32", "int8:head:static")
    cases = select(chapters=[chapter], formats=formats)
    if step != "Attends":
        cases = [c for c in cases if c.geometry.page_size <= 48]
        cases = cases[::5] or cases  # earlier steps differ from the last one by what they inherit
    for case in cases:
        result = run_case(case, getattr(guide, step)("mychip", torch.device("cpu")))
        assert result.outcome in ("pass", "unsupported"), f"{step}: {case.id}: {result.reason}"


def test_the_guide_declines_what_it_says(guide: types.ModuleType) -> None:
    backend = guide.Attends("mychip", torch.device("cpu"))
    [case] = select(chapters=["append"], formats=["int4"], checks=["neighbours"])
    assert run_case(case, backend).outcome == "unsupported"


def test_the_page_on_the_suite_has_the_tables_of_the_code() -> None:
    text = (DOCS / "conformance.md").read_text(encoding="utf-8")
    for name, bound in bounds.TABLE.items():
        limits = bound.limits.replace("|", "\\|")
        assert f"| `{name}` | {bound.value:.6g} | {limits} |" in text
    for profile in PROFILES:
        assert f"| `{profile.name}` | {profile.summary} |" in text
    for chapter in CHAPTERS:
        assert f"\n| {chapter} | " in text
    assert "`append/rows/int4:g16/kv2q4-d64-p16`" in text
    assert "append/rows/int4:g16/kv2q4-d64-p16" in {case.id for case in all_cases()}
