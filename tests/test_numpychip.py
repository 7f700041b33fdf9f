"""A second, independent plugin (numpy only, pages of bytes, no torch base class) passes the suite that judges us.

It proves three things at once: that the interface needs nothing of the base class, that the suite does not lean on the
reference's memory layout, and that the definition of the codes can be written twice and still agree bit for bit.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvport.backend import operations
from kvport_conformance.cases import CHAPTERS, run_case, select

FOLDER = Path(__file__).parent / "plugins" / "numpychip"
#: One format of each kind of arithmetic that the chip has; tiered formats only in their own chapter.
FORMATS = ("bf16", "int8", "int8:channel:static:scale=bf16", "int4:g16:asym", "int2:g32:asym:scale=fp16")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(FOLDER))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    import numpychip_backend

    yield numpychip_backend.load("numpychip")
    torch.set_num_threads(before)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_it_passes_the_quick_cases(chapter: str, backend) -> None:  # type: ignore[no-untyped-def]
    cases = select(chapters=[chapter], formats=() if chapter == "tiers" else FORMATS)
    results = [run_case(case, backend) for case in cases if case.geometry.page_size <= 48]
    assert [(r.case.id, r.reason) for r in results if r.outcome in ("fail", "error")] == []
    passed = sum(r.outcome == "pass" for r in results)
    assert passed == 0 if chapter == "graph" else passed > len(results) // 3  # it declares no graphs


def test_what_it_cannot_do_it_declines_with_reasons(backend) -> None:  # type: ignore[no-untyped-def]
    [case] = select(chapters=["append"], formats=["mxfp4"], checks=["neighbours"])
    result = run_case(case, backend)
    assert result.outcome == "unsupported"
    assert "mxfp4" in result.reason
    assert "this chip has" in result.reason


def test_it_inherits_nothing_and_imports_no_other_backend(backend) -> None:  # type: ignore[no-untyped-def]
    assert set(operations(backend).values()) == {"native"}
    tree = ast.parse((FOLDER / "numpychip_backend.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {"kvport.codec", "kvport.attention", "kvport_cpu.base"} & imported


def test_the_suite_runs_on_it_as_a_user_would(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvport_conformance", "--backend=numpychip"]
    done = subprocess.run(
        [*command, "--chapter=append", "--formats=int8,int4:g64", "-q", f"--report={tmp_path / 'numpychip.json'}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numpychip@numpychip" in done.stdout
    assert (tmp_path / "numpychip.json").is_file()
