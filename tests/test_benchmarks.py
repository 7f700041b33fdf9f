"""The benchmarks run where there is no GPU as far as they can, and leave files that say what they are."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODULES = ("results", "step")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the benchmarks by name, which find each other as scripts do; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in MODULES:
        assert name not in sys.modules
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_decode_step_is_timed_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    target = tmp_path / "new" / "step.json"
    options = ["--device", "triton@cpu", "--tiny", "--formats", "int4:g64;bf16", "--json", str(target)]
    command = [sys.executable, str(BENCHMARKS / "step.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "triton@cpu [interpreter]" in done.stdout
    record = json.loads(target.read_text(encoding="utf-8"))
    assert (record["benchmark"], record["execution"]) == ("step", "interpreter")
    assert "incomplete" not in record
    assert "no GPU" in record["backend"]["device_name"]
    assert list(record["shapes"]["b2_40"]) == ["int4:g64", "bf16"]
    for text, cell in record["shapes"]["b2_40"].items():
        assert (cell["sequences"], cell["context"], cell["capture"]) == (2, 40, "eager")
        for way, parts in {"eager": {"wall", "begin", "calls", "commit"}, "graph": {"wall", "host"}}.items():
            timings = {name: part for name, part in cell[way].items() if isinstance(part, dict)}
            assert set(timings) == parts, "an interpreter has no device time"
            for part in timings.values():
                assert len(part["replays"]) == 2
                assert min(part["replays"]) <= part["us"] <= max(part["replays"])
            assert cell[way]["error"] < 4e-3, f"{text} {way}: bf16 outputs are rounded to 2**-9"


@pytest.mark.parametrize("too_short", [0, 2, 99])
def test_a_step_counts_only_if_it_was_queued_while_the_device_waited(
    load: Any, monkeypatch: pytest.MonkeyPatch, too_short: int
) -> None:
    step, waits = load("step"), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:  # whether the device has come by here already
            return len(waits) <= too_short

        def elapsed_time(self, end: Event) -> float:
            return float(len(waits))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    found = step.device_times(lambda: None, 4, 0.5e-3)
    assert waits[: too_short + 1] == [int((2 * 0.5e-3 + 2e-3) * 2e9) << n for n in range(len(waits[: too_short + 1]))]
    if too_short == 99:
        assert found == [], "something in the step waits for the device"
        assert len(waits) == step.ATTEMPTS
    else:
        assert found == [1e3 * (too_short + step.WARM_UP + n) for n in (1, 2, 3, 4)]


def test_a_run_that_was_cut_short_leaves_what_it_measured(load: Any, tmp_path: Path) -> None:
    results: ModuleType = load("results")
    record: dict[str, Any] = {"shapes": {}}

    def measure() -> None:
        with results.saved(str(tmp_path / "cut.json"), record):
            record["shapes"]["first"] = 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert json.loads((tmp_path / "cut.json").read_text(encoding="utf-8")) == {
        "shapes": {"first": 1},
        "incomplete": "KeyboardInterrupt",
    }
    with results.saved("", {}):
        pass  # nothing was asked for, nothing is written
    with results.saved(str(tmp_path / "whole.json"), {"shapes": {}}):
        pass
    assert json.loads((tmp_path / "whole.json").read_text(encoding="utf-8")) == {"shapes": {}}
