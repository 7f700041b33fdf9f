"""The benchmarks run where there is no GPU as far as they can, and leave files that say what they are."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODULES = ("plot", "results", "step")
DOCS = BENCHMARKS.parent / "docs"
RESULTS = sorted((DOCS / "results").glob("*.json"))
#: What `kvport demo` wrote: a table of text and figures, which nothing draws.
NOT_DRAWN = {"demo.json"}


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


# -- drawings ------------------------------------------------------------------------------------------------------


def timing(*replays: float) -> dict[str, Any]:
    return {"us": sorted(replays)[len(replays) // 2], "replays": list(replays)}


#: One of each kind that no committed result is of yet, and runs that were cut short.
MADE_UP: dict[str, dict[str, Any]] = {
    "latent": {
        "machine": {"gpu": "none"},
        "ceilings_gbps": {"read_1024MB": 4000.0},
        "shapes": {
            "b2_1k_h16": {
                "products": timing(90, 100, 120),
                "sdpa": timing(70, 80, 90),
                "latent=int8,rope=bf16 p64": {**timing(30, 40, 50), "bytes": 40_000_000, "tflops": 1.0},
            },
            "b1_1k_h16": {"sdpa": timing(1, 2, 3)},
        },
    },
    "step": {
        "benchmark": "step",
        "execution": "interpreter",
        "machine": {"processor": "none"},
        "model": {"layers": 2},
        "shapes": {
            "b1": {
                "int8": {
                    "eager": {"wall": timing(4000, 5000), "device": timing(400, 500)},
                    "graph": {"wall": timing(600, 700), "device": timing(400, 500)},
                },
                "bf16": {"eager": {"wall": timing(4000, 5000)}},
            }
        },
    },
    "decode cut short": {
        "machine": {"gpu": "none"},
        "ceilings_gbps": {"read_64MB": 3000.0, "copy_64MB": 9000.0},
        "shapes": {"b1_32k": {"sdpa": timing(50), "int8 p64": {**timing(40), "bytes": 1_000_000}}, "b1_128k": {}},
        "incomplete": "KeyboardInterrupt",
    },
}


def text_of(svg: bytes) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg.decode().replace("&amp;", "&"))


def test_a_drawing_is_of_the_result_beside_it_and_on_a_page(load: Any) -> None:
    plot = load("plot")
    drawings = sorted((DOCS / "results").glob("*.svg"))
    assert {path.stem for path in RESULTS if path.stem.endswith("-h200")} <= {path.stem for path in drawings}
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    for drawing in drawings:
        result = drawing.with_suffix(".json")
        made_of = plot.source(result.name, result.read_bytes())
        assert made_of in drawing.read_text(encoding="utf-8"), f"{drawing.name} is out of date: draw {result.name} anew"
        assert f"](results/{drawing.name})" in pages, f"no page shows {drawing.name}"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_committed_result_is_drawn(load: Any, path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra bench")
    plot = load("plot")
    if path.name in NOT_DRAWN:
        with pytest.raises(plot.NotDrawn, match=r"demo\.json: holds no figures of"):
            plot.drawn([path])
        return
    svg = plot.drawn([path])
    assert svg == plot.drawn([path]), "the same file gives the same bytes"
    shown, chart = text_of(svg), plot.chart(json.loads(path.read_text(encoding="utf-8")))
    for label in (*chart.title.split("\n"), chart.unit, *(s.name for s in chart.series), *chart.groups):
        for line in label.split("\n"):
            assert line in shown
    for mark in (mark for series in chart.series for mark in series.marks):
        assert mark is None or 0 < mark.low <= mark.value <= mark.high


@pytest.mark.parametrize("name", MADE_UP)
def test_other_results_are_drawn(load: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra bench")
    plot, path = load("plot"), tmp_path / "made-up.json"
    path.write_text(json.dumps(MADE_UP[name]), encoding="utf-8")
    shown = text_of(plot.drawn([path]))
    chart = plot.chart(MADE_UP[name])
    marks = {series.name: series.marks for series in chart.series}
    if name == "latent":
        assert [marks[n][0].value for n in ("products", "sdpa")] == [0.8, 1.0], "the faster of torch's ways is 1"
        (found, missing) = marks["latent=int8,rope=bf16 p64"]
        assert (found.value, found.low, found.high, found.best) == (2.0, 80 / 50, 80 / 30, 8.0)
        assert missing is None
        assert "reading at 4,000 GB/s, as measured" in shown
    elif name == "step":
        assert marks["int8 graph"][0] == plot.Mark(0.7, 0.6, 0.7, 0.5)
        assert marks["bf16 eager"][0].best is None
        assert marks["bf16 graph"] == (None,)
        assert any("INTERPRETER, NOT HARDWARE" in line for line in shown)
    else:
        assert chart.groups == ("b1_32k\nsdpa 50 us",)
        assert math.isclose(marks["int8 p64"][0].best, 50 / (1e6 / 3000e9 * 1e6)), "copies are no ceiling of reading"
        assert any("INCOMPLETE (KeyboardInterrupt)" in line for line in shown)


def test_results_are_drawn_together_or_one_by_one(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="drawings need the extra bench")
    plot, paths = load("plot"), [tmp_path / "a.json", tmp_path / "b.json"]
    for path, name in zip(paths, ("latent", "step"), strict=True):
        path.write_text(json.dumps(MADE_UP[name]), encoding="utf-8")

    def main(*words: str) -> int:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", ["plot.py", *words])
            return plot.main()

    assert main(*map(str, paths)) == 0
    alone = [path.with_suffix(".svg").read_bytes() for path in paths]
    assert main(*map(str, paths), "--out", str(tmp_path / "new" / "both.svg")) == 0
    both = (tmp_path / "new" / "both.svg").read_bytes()
    assert set(text_of(both)) >= {*text_of(alone[0]), *text_of(alone[1])}
    for path in paths:
        assert plot.source(path.name, path.read_bytes()).encode() in both
    paths[1].write_text("{", encoding="utf-8")
    assert main(str(paths[1])) == 1
    assert "b.json: Expecting" in capsys.readouterr().err


def test_drawings_are_legible_on_light_and_on_dark(load: Any) -> None:
    """Contrast by the WCAG's formula: 4 for text and 3 for shapes, on white and on GitHub's black."""
    plot = load("plot")

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for ground in ("#ffffff", "#0d1117"):
        assert contrast(plot.INK, ground) >= 4
        for colour in plot.COLOURS:
            assert contrast(colour, ground) >= 3, f"{colour} on {ground}"
