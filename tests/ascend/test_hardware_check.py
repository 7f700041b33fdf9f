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
    assert "no device was used" in record["facts"]["emulated"]
    answers = record["questions"]
    assert set(answers) == {question.__name__ for question in script.QUESTIONS}
    assert answers["mode_5"]["agrees"]
    assert answers["mode_4"]["agrees"]
    assert answers["skipped_slots"]["skips"]
    assert answers["lse_base"]["natural"] < 1e-6 < answers["lse_base"]["base_2"]
    assert answers["offset_sign"]["added"] < 1e-3 < answers["offset_sign"]["subtracted"]
    assert answers["zero_query_row"]["first_numbers"] == ["nan"] * 4  # the emulator's way of saying "not known"
    assert answers["zero_query_row"]["other_rows_error"] < 1e-3
    assert answers["zero_value_scales"]["first_numbers"] == ["nan"] * 4
    assert answers["zero_value_scales"]["other_heads_error"] < 1e-3
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


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "npu:x", "other@cpu", "ascend@cuda:0", "triton@npu:0", ""])
def test_a_device_that_is_no_npu_is_never_asked(
    script: ModuleType, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever other device answered would be recorded as an NPU's word, or as hardware."""
    assert script.main([f"--device={device}", "--out", str(tmp_path / "out")]) == 2
    assert f"--device is {device!r}; npu:0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wrong_settings_and_folders_are_one_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert script.main(["--device=ascend@cpu", "--out", str(file)]) == 2
    for name, value in (("SOC", "910B"), ("NUMERIC", "fast"), ("LAYOUT", "NZ")):
        with monkeypatch.context() as patch:
            patch.setenv(f"KVPORT_ASCEND_{name}", value)
            assert script.main(["--device=ascend@cpu", "--out", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "KVPORT_ASCEND_LAYOUT is 'NZ'; one of nd, nz" in errors[-1]


def test_the_questions_are_asked_of_the_chip_that_is_emulated(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPORT_ASCEND_SOC", "A2")
    assert script.main(["--device=ascend@cpu", "--out", str(tmp_path), "--skip-conformance"]) == 0
    record = json.loads((tmp_path / "questions.json").read_text())
    assert record["facts"]["soc"] == "A2"
    assert "on A2" in record["questions"]["skipped_slots"]["raised"]


def test_a_question_in_a_process_of_its_own(script: ModuleType) -> None:
    """As each is asked on a device: with its answer, or with what became of the process."""
    answer = script.ask_apart("ascend@cpu", script.zero_query_row)
    assert answer["first_numbers"] == ["nan"] * 4
    assert answer["question"].startswith("What does an all-zero query row give?")

    def unheard_of(device: str) -> dict[str, object]:
        """Is this a question?"""
        raise AssertionError

    answer = script.ask_apart("ascend@cpu", unheard_of)
    assert answer["raised"] == "the process ended with exit status 2 and no answer"
    assert "unheard_of" in " ".join(answer["last_output"])
    assert script.ask_apart("ascend@cpu", script.mode_5, limit=0.01)["raised"] == "no answer within 0.01 seconds"


def test_the_record_keeps_what_came_before_an_interruption(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(device: str) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "QUESTIONS", (script.mode_5, interrupted))
    with pytest.raises(KeyboardInterrupt):
        script.main(["--device=ascend@cpu", "--out", str(tmp_path), "--skip-conformance"])
    assert set(json.loads((tmp_path / "questions.json").read_text())["questions"]) == {"mode_5"}
