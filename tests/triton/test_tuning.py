"""Kernel shapes: the fixed table, the file that overrides it, and what ``kvport tune`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from triton_support import Filled, layout_of

from kvport import InvalidArgument, Unsupported
from kvport.backend import Backend, Tunable
from kvport.cli import main

ENTRY = {"tile": 64, "warps": 4, "stages": 2, "waves": 8}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPORT_TRITON_TUNING", str(tmp_path / "deep" / "tuning.json"))
    return tmp_path / "deep" / "tuning.json"


def test_the_file_is_where_the_docs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    from kvport_triton import overrides

    monkeypatch.delenv("KVPORT_TRITON_TUNING", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert overrides.path() == tmp_path / "kvport" / "triton-tuning.json"
    assert overrides.read() == {}


def test_entries_come_back_and_join_those_before(file: Path, backend: Backend) -> None:
    from kvport_triton import overrides
    from kvport_triton.tuning import Tuning

    overrides.write({"a": Tuning(**ENTRY)})
    overrides.write({"b": Tuning(tile=128, warps=2, stages=3, waves=4)})
    assert overrides.read() == {"a": ENTRY, "b": {"tile": 128, "warps": 2, "stages": 3, "waves": 4}}
    assert [p.name for p in file.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        (json.dumps({"a": {"tile": 64}}), "must have exactly tile, warps, stages, waves"),
        (json.dumps({"a": ENTRY | {"tile": 48}}), "tile 48; allowed are 32, 64, 128, 256"),
        (json.dumps({"a": ENTRY | {"warps": True}}), "warps True"),
    ],
)
def test_a_damaged_file_is_named(file: Path, text: str, needle: str, backend: Backend) -> None:
    from kvport_triton import overrides

    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgument, match=needle) as caught:
        overrides.read()
    assert str(file) in str(caught.value)


def test_a_kept_shape_is_used(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry decides the tile of a decode step; its numbers stay right."""

    from kvport_triton import overrides
    from kvport_triton.tuning import Tuning

    layout = layout_of("int8", dtype=torch.float16)
    monkeypatch.setattr(backend, "tuned", {overrides.key_of(backend.gpu, layout): Tuning(**(ENTRY | {"tile": 32}))})
    filled = Filled(backend, layout, (1, 1), (75, 20))
    assert {launch.kind: launch.shape.tile for launch in filled.plan.private.launches} == {"decode": 32}
    assert filled.worst() <= 1
    other = Filled(backend, layout_of("int8", page_size=32, dtype=layout.dtype), (1,), (75,))
    assert other.plan.private.launches[0].shape.tile != 32, "another page size has its own entry"


def test_choice_wants_a_clear_gain(backend: Backend) -> None:
    from kvport_triton.timing import candidates, choose
    from kvport_triton.tuning import Tuning

    present = Tuning(tile=128, warps=2, stages=3, waves=4)
    tried = candidates(present)
    assert tried[0] == present
    assert len(tried) == len(set(tried)) <= 9
    assert choose([(present, 10.0), (tried[1], 9.9)])[0] == present
    best, why = choose([(present, 10.0), (tried[1], 9.0), (tried[2], 12.0)])
    assert best == tried[1]
    assert "10.0% faster" in why
    assert choose([(present, 8.0), (tried[1], 9.0)]) == (present, "the present choice is the fastest")


@pytest.mark.skipif("os.environ.get('KVPORT_TRITON_DEVICE', 'cpu') != 'cpu'", reason="there is a GPU here")
def test_an_interpreter_is_not_timed(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(backend, Tunable)
    with pytest.raises(Unsupported, match="says nothing about a GPU"):
        next(iter(backend.tune(layout_of("int8"))))
    assert main(["tune", "--backend", "cpu"]) == 1
    assert "has nothing to tune" in capsys.readouterr().err


@pytest.mark.hardware
def test_tuning_keeps_what_it_says(backend: Backend, file: Path) -> None:
    assert isinstance(backend, Tunable)
    lines = list(backend.tune(layout_of("int8", heads=8, group=4, dim=128, page_size=64, dtype=torch.bfloat16)))
    assert len(lines) <= 11
    assert any("chosen" in line for line in lines)
    assert file.exists() == any("written to" in line for line in lines)
