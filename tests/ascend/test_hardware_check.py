"""The script for people with a device, tried on the emulated operators: every question runs and says ``emulated``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "ascend_hardware_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ascend_hardware_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_questions_on_emulated_operators(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["--device", "ascend@cpu", "--out", str(tmp_path), "--skip-conformance"]) == 0
    record = json.loads((tmp_path / "questions.json").read_text())
    assert record["execution"] == "emulated"
    answers = record["questions"]
    assert answers["mode_5"]["agrees"]
    assert answers["mode_4"]["agrees"]
    assert answers["skipped_slots"]["skips"]
    assert answers["lse_base"]["natural"] < 1e-6 < answers["lse_base"]["base_2"]
    assert answers["offset_sign"]["added"] < 1e-3 < answers["offset_sign"]["subtracted"]
    assert answers["zero_query_row"]["first_numbers"] == ["nan"] * 4  # the emulator's way of saying "not known"
    assert answers["zero_query_row"]["other_rows_error"] < 1e-3
    assert answers["precision"]["inner_precise_0"]["lse"] < answers["precision"]["inner_precise_1"]["lse"]
    assert "tnd_head_dim" in answers["packed_head_dim_64"]["raised"]
    assert answers["nz_pages"]["agrees"]
    assert "nz_heads" in answers["nz_other_heads"]["raised"]
    assert "nz_no_lse" in answers["nz_lse"]["raised"]


def test_without_a_device_it_stops_with_the_reason(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--out", str(tmp_path / "out")]) == 2
    assert "npu:0 is not usable for kvport" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
