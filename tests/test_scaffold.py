"""``kvport new-backend`` writes a package that is found, opens a cache and passes the suite as generated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvport.cli import main
from kvport.errors import InvalidArgument
from kvport.scaffold import generate

FILES = {
    ".github/workflows/conformance.yml",
    "README.md",
    "kvport_my_chip/__init__.py",
    "kvport_my_chip/backend.py",
    "pyproject.toml",
    "tests/test_plugin.py",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A generated package with the metadata folder that installing it would leave beside it."""
    folder = tmp_path / "kvport-my-chip"
    generate("my-chip", "chip9", folder)
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / "kvport_my_chip-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["kvport"].items())
    (metadata / "entry_points.txt").write_text(f"[kvport]\n{points}")
    return folder


def _run(package: Path, *command: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_is_written_and_no_field_is_left_open(tmp_path: Path) -> None:
    written = generate("my-chip", "chip9", tmp_path / "new")
    assert {path.as_posix() for path in written} == FILES
    for path in written:
        text = (tmp_path / "new" / path).read_text(encoding="utf-8")
        for field in ("@NAME@", "@PACKAGE@", "@CLASS@", "@DEVICE@"):
            assert field not in text, path
        if path.suffix == ".py":
            compile(text, str(path), "exec")


def test_the_generated_tests_pass(package: Path) -> None:
    assert "1 passed" in _run(package, "pytest", "tests", "-q")


def test_the_generated_backend_passes_the_suite(package: Path) -> None:
    # One chapter and format here; that the inherited operations pass the rest is the reference's own conformance run.
    out = _run(
        package,
        "pytest",
        "--pyargs",
        "kvport_conformance",
        "--backend=chip9",
        "--chapter=append,prefix",
        "--formats=int8",
        "-q",
    )
    assert "my-chip@chip9" in out
    assert " 0 fail, " in out


def test_the_generated_pipeline_fails_where_cases_fail(tmp_path: Path) -> None:
    generate("my-chip", "chip9", tmp_path / "new")
    text = (tmp_path / "new/.github/workflows/conformance.yml").read_text(encoding="utf-8")
    commands = re.findall(r"- run: (.*)", text)
    assert "pytest --pyargs kvport_conformance --backend=chip9 --report=my-chip.json" in commands
    assert "kvport verify-report my-chip.json --require core" in commands
    assert not any("|| true" in command or "continue-on-error" in text for command in commands)


def test_the_generated_backend_is_listed_with_what_it_inherits(package: Path) -> None:
    out = _run(package, "kvport", "backends", KVPORT_PLUGINS="my-chip")
    assert "my-chip" in out
    assert "not allowed by KVPORT_PLUGINS='my-chip'" in out
    assert "inherited" in out


def test_the_command_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "mychip", "--into", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert "pytest --pyargs kvport_conformance --backend=mychip" in out
    assert main(["new-backend", "mychip", "--into", str(tmp_path / "x")]) == 1
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "kvport": "belongs to kvport",
        "kvport_mychip": "belongs to kvport",
        "kvport-mychip": "belongs to kvport",
        "reference": "is taken by the plugin of kvport",
        "triton": "is taken by the plugin of kvport",
        "ascend": "is taken by the plugin of kvport",
        "cpu": "is the device type that ",
        "cuda": "is the device type that ",
        "npu": "is the device type that ",
        "class": "is a word of the Python language",
        "match": "is a word of the Python language",
        "json": "is that of the module 'json'",
        "torch": "is that of the module 'torch'",
        "conformance": "makes the package kvport_conformance, which is installed already",
    }.items(),
)
def test_names_that_are_somebody_elses_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"{name!r} {reason}.*choose another, such as mychip"):
        generate(name, "chip", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_devices_that_kvport_drives_are_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"{device!r} is driven by kvport's own backend .* two would tie"):
        generate("mychip", device, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["MyChip", "my chip", "1chip", "", "a@b", "x:0", "-x"])
def test_names_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="lower-case words"):
        generate(name, "chip", tmp_path / "x")
    assert not (tmp_path / "x").exists()
