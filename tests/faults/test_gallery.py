"""A conformance suite is only as good as the faults it catches: every faulty backend is rejected, no correct one is.

In every run each fault meets its chapter's quick cases until the first one that rejects it, and the correct backend
meets every quick case under one of five seeds. ``KVPORT_GALLERY=all`` runs the correct backend under all five.
``tests/faults/survey.py`` measures which cases catch which fault and writes docs/faults.md.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import pytest
import torch
from kvport_faults.expected import HINTS, contradiction
from kvport_faults.gallery import FAULTS, first_rejection, quick_cases
from kvport_faults.registry import Fault
from kvport_faults.subject import Subject

from kvport_conformance.cases import CHAPTERS, run_case

SEEDS = (1, 2, 3, 4, 5)
TABLE = Path(__file__).parents[2] / "docs" / "faults.md"


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """Small tensors: more threads only get into each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_every_fault_is_rejected_by_its_own_chapter(fault: Fault) -> None:
    rejection = first_rejection(fault)
    assert rejection is not None, f"{fault.name} passes the whole chapter {fault.chapter}: {fault.summary}"
    # A judged disagreement, with a message: not a crash of the suite that happens to be red.
    assert rejection.outcome == "fail", f"{rejection.case.id}: {rejection.reason}"
    assert len(rejection.reason) > 20
    assert not contradiction(fault.name, rejection.reason), f"{rejection.case.id}: {rejection.reason}"


@pytest.mark.parametrize("chapter", CHAPTERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_correct_backend_is_never_rejected(chapter: str, seed: int) -> None:
    everything = os.environ.get("KVPORT_GALLERY") == "all"
    for case in quick_cases(chapter):
        if everything or zlib.crc32(case.id.encode()) % len(SEEDS) == SEEDS.index(seed):
            result = run_case(case, Subject(), seed=seed)
            assert result.outcome in ("pass", "unsupported"), f"{case.id}, seed {seed}: {result.reason}"


def test_the_gallery_is_large_and_spans_every_chapter() -> None:
    assert len(FAULTS) >= 60
    assert {fault.chapter for fault in FAULTS.values()} == set(CHAPTERS)
    assert all(fault.summary.endswith(".") for fault in FAULTS.values())


def test_hints_are_expected_of_faults_that_exist() -> None:
    assert set(HINTS) <= set(FAULTS)
    assert contradiction("Truncates", "x\n  looks like: rounding toward zero, not to nearest even, or y") == ""
    assert contradiction("Truncates", "x\n  looks like: the window is not applied") != ""
    assert contradiction("AssumesContiguous", "x\n  looks like: rounding toward zero") != ""


def test_the_documented_table_lists_every_fault() -> None:
    assert f"holds {len(FAULTS)} backends" in TABLE.read_text(encoding="utf-8")
    assert len(FAULTS) > 200  # as docs/conformance.md says
    rows = {
        name: (chapter, kind, summary)
        for name, chapter, kind, summary in re.findall(
            r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert rows == {f.name: (f.chapter, f.kind, f.summary) for f in FAULTS.values()}
