"""scripts/nvidia_hardware_check.py leaves its results, whatever becomes of its parts. No GPU is needed to see that."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from kvport.commands import tune

SCRIPT = Path(__file__).parent.parent / "scripts" / "nvidia_hardware_check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nvidia_hardware_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_part_ends_and_is_recorded(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say = "import os; print('ran with', os.environ['KVPORT_TRITON_DEVICE'])"
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    parts = {
        "good": check.Part("", 1, 60, (("-c", "print('one')"), ("-c", say)), environment={"KVPORT_TRITON_DEVICE": "x"}),
        "bad": check.Part("", 1, 60, (("-c", "raise SystemExit(3)"), ("-c", "print('never')"))),
        "slow": check.Part("", 1, 2, (("-c", "import time; time.sleep(60)"),)),
        "stubborn": check.Part("", 2, 1, (("-c", stubborn),)),
        "absent": check.Part("", 2, 60, (("SANITIZER", "--tool", "memcheck"),)),
    }
    monkeypatch.setattr(check, "PARTS", parts)
    monkeypatch.setattr(check, "GRACE", 2)
    monkeypatch.setattr(check.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path / "out"), "--parts", ",".join(parts)])
    began = time.monotonic()
    assert check.main() == 1
    assert time.monotonic() - began < 50
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert {name: part["outcome"] for name, part in summary["parts"].items()} == {
        "good": "ok",
        "bad": "failed (3)",
        "slow": "out of time",
        "stubborn": "out of time",
        "absent": "skipped",
    }
    texts = {name: (tmp_path / "out" / f"{name}.txt").read_text(encoding="utf-8") for name in parts}
    assert "ran with x" in texts["good"]
    assert "never" not in texts["bad"].splitlines()
    assert "KeyboardInterrupt" in texts["slow"]
    assert "compute-sanitizer is neither on PATH" in texts["absent"]
    assert "ran with x" in capsys.readouterr().out, "the ends of what the parts printed are shown"


def test_names_are_checked(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["--out", "x", "--parts", "conformence"], ["--out", "x", "--limit", "test=3"], []):
        monkeypatch.setattr(sys, "argv", ["check", *argv])
        with pytest.raises(SystemExit):
            check.main()
    shown = capsys.readouterr().err
    assert "no part is named conformence" in shown
    assert "no part is named test" in shown
    assert "--out=DIR is needed" in shown


def test_paths_that_the_parts_name_exist(check: ModuleType) -> None:
    for part in check.PARTS.values():
        for word in (
            word for command in part.commands for word in command if word.startswith(str(SCRIPT.parent.parent))
        ):
            assert Path(word).exists(), word


def test_what_is_timed_runs_alone_and_first(check: ModuleType) -> None:
    timed = {"decode", "prefill", "append", "latent", "step", "page16", "tune"}
    stages = [check.PARTS[name].stage for name in timed]
    assert len(set(stages)) == len(timed)
    assert max(stages) < min(part.stage for name, part in check.PARTS.items() if name not in timed)


def test_scripts_and_commands_know_the_options_that_the_parts_give(check: ModuleType) -> None:
    for part in check.PARTS.values():
        for program, *words in part.commands:
            if program.endswith(".py"):
                source = Path(program).read_text(encoding="utf-8")
                for option in (word for word in words if word.startswith("--")):
                    assert f'"{option}"' in source, f"{program} has no {option}"
    _, kvport, *words = check.PARTS["tune"].commands[0]
    assert (kvport, words[0]) == ("kvport", "tune")
    parser = argparse.ArgumentParser()
    tune.configure(parser)
    assert parser.parse_args(words[1:]).dry_run


def test_the_parts_are_listed(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--list"])
    assert check.main() == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == list(check.PARTS)


def test_a_benchmark_whose_time_is_up_leaves_what_it_measured(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results.py").write_text(
        (SCRIPT.parent.parent / "benchmarks" / "results.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "timed.py").write_text(
        "import sys, time\nfrom results import saved\nrecord = {}\nwith saved(sys.argv[2], record):\n"
        "    record['first'] = 1\n    time.sleep(600)\n",
        encoding="utf-8",
    )
    commands = ((str(tmp_path / "timed.py"), "--json", "OUT/timed.json"),)
    monkeypatch.setattr(check, "PARTS", {"timed": check.Part("", 1, 4, commands)})
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path / "out"), "--parts", "timed"])
    assert check.main() == 1
    found = json.loads((tmp_path / "out" / "timed.json").read_text(encoding="utf-8"))
    assert found == {"first": 1, "incomplete": "KeyboardInterrupt"}


def test_a_script_finds_the_modules_beside_it(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour.py").write_text("SAID = 'found'\n", encoding="utf-8")
    (tmp_path / "timed.py").write_text("from neighbour import SAID\nprint(SAID)\n", encoding="utf-8")
    monkeypatch.setattr(check, "PARTS", {"timed": check.Part("", 1, 60, ((str(tmp_path / "timed.py"),),))})
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path / "out"), "--parts", "timed"])
    assert check.main() == 0
    assert "found" in (tmp_path / "out" / "timed.txt").read_text(encoding="utf-8").splitlines()
