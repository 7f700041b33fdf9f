"""The ``kvport`` command: its table of subcommands, its exit statuses, and ``kvport backends``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvport import cli, inspection
from kvport.cli import COMMANDS, Command, main
from kvport.commands import backends, calibrate
from kvport.errors import BackendUnavailable
from kvport.formats import CODES, CacheFormat

PLUGINS = Path(__file__).parent / "plugins"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_row_of_the_table_has_its_module(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(command.module)
    assert callable(module.configure)
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    assert caught.value.code == 0
    assert f"usage: kvport {command.name}" in capsys.readouterr().out


def test_only_the_chosen_subcommand_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (*COMMANDS, Command("absent", "kvport.commands.no_such_module", "never")))
    with pytest.raises(SystemExit) as caught:
        main(["backends", "--help"])
    assert caught.value.code == 0
    with pytest.raises(ModuleNotFoundError):
        main(["absent"])


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["backends", "--no-such-option"]])
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: kvport" in capsys.readouterr().err


def test_an_error_of_kvports_own_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise BackendUnavailable("the chip is on fire")

    monkeypatch.setattr(backends, "run", run)
    assert main(["backends"]) == 1
    assert capsys.readouterr().err == "kvport backends: error: the chip is on fire\n"


@pytest.mark.parametrize(
    ("said", "printed"),
    [
        ("give round_scales='fp16' or 'bf16'", "give --round-scales='fp16' or 'bf16'"),
        ("round_scales must be 'fp16'", "--round-scales must be 'fp16'"),
        ("choose one with prefix=", "choose one with --prefix="),
        ("tokens (of the text) must be a whole number", "--tokens (of the text) must be a whole number"),
        ("no_tokens=3, --tokens=3 and scale=fp16 have nothing to say", None),
        ("layer 3: format int8:head:static,recent=128 needs scales", None),
    ],
)
def test_an_error_names_flags_where_the_library_names_arguments(
    said: str, printed: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise BackendUnavailable(said)

    monkeypatch.setattr(calibrate, "run", run)
    assert main(["calibrate", "--checkpoint", "x", "-o", "y"]) == 1
    assert capsys.readouterr().err == f"kvport calibrate: error: {printed or said}\n"


@pytest.mark.parametrize("module", ["kvport", "kvport.cli"])
def test_either_module_is_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "plan"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: kvport plan")


def _run(*arguments: str, plugins: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*(str(PLUGINS / name) for name in plugins), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "kvport", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **environ},
    )


def test_version() -> None:
    done = _run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kvport 0.")


def test_backends_as_json() -> None:
    done = _run("backends", "--json", plugins=("raising", "importerror"))
    assert done.returncode == 0, done.stderr
    listing = json.loads(done.stdout)
    assert listing["schema_version"] == 1
    rows = {row["name"]: row for row in listing["backends"]}
    assert rows["reference"]["usable"]
    (cpu,) = [device for device in rows["reference"]["devices"] if device["type"] == "cpu"]
    assert cpu["capability"]["execution"] == "hardware"
    assert {"int8", "int4:g64"} <= {a["format"] for a in cpu["capability"]["formats"] if not a["reasons"]}
    assert set(cpu["capability"]["operations"].values()) == {"native"}
    assert "device 0 fell off the bus" in rows["raising"]["devices"][0]["reason"]
    assert "No module named 'vendor_sdk'" in rows["importerror"]["error"]
    assert "importerror_plugin.py" in rows["importerror"]["traceback"]


def test_backends_as_text() -> None:
    done = _run("backends", "--no-probe", plugins=("good", "importerror"))
    assert done.returncode == 0, done.stderr
    for text in (
        "reference  (kvport ",
        "good  (kvport-test-good 1.0, module good_plugin, in ",
        "  a made-up chip",
        "goodchip        not probed",
        "only by name, as good@slowchip",
        "not loaded      ImportError: No module named 'vendor_sdk'",
    ):
        assert text in done.stdout
    assert done.stderr == ""


def test_text_of_a_capability(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGINS / "good")
    monkeypatch.setenv("KVPORT_PLUGINS", "good")
    assert main(["backends"]) == 0
    text = capsys.readouterr().out
    for line in (
        "goodchip        usable, 2 device(s); driver 1.2",
        "execution     hardware, tensors on torch device cpu",
        "refuses       int2:g32:asym:scale=fp16  kivi2: int2 is not in this chip, nearest is int4",
        "features      lse, prefill",
        "lacks         feature window is not declared, needed for a sliding window; feature softcap is not",
        "memory        attend grows with the history for every format",
        "a sample of every family, asked at head_dim 128",
        "inherited     page_bytes, allocate",
        "not loaded      not allowed by KVPORT_PLUGINS='good'",
    ):
        assert line in text


def test_a_rule_for_static_scales_is_shown_once_for_its_formats() -> None:
    def answer(text: str, rule: str) -> inspection.FormatSupport:
        return inspection.FormatSupport(text, (), "bounded", (), rule)

    found = inspection.Capability("cpu", "hardware", {}, {}, (
        answer("int8", ""), answer("int8:channel:static", "each is even"), answer("int8:tensor:static", "each is even"),
    ))  # fmt: skip
    lines = [line.strip() for line in backends._capability(found) if "static scales" in line]
    assert lines == ["static scales int8:channel:static  int8:tensor:static: each is even"]


def test_the_sample_has_some_of_every_family() -> None:
    formats = [CacheFormat.parse(text) for text in inspection.SAMPLE_FORMATS]
    assert {side.code for fmt in formats for side in (fmt.key, fmt.value)} == set(CODES)
    assert {side.granularity for fmt in formats for side in (fmt.key, fmt.value)} >= {
        "token", "group", "channel_group", "tensor", "channel", "block"
    }  # fmt: skip
    assert all(any(getattr(fmt, part) for fmt in formats) for part in ("sink", "recent", "near", "rope", "rotate"))
    assert all(any(getattr(fmt.key, part) for fmt in formats) for part in ("outliers", "sparse", "static"))
    assert not all(fmt.key.symmetric for fmt in formats)
    assert CacheFormat.parse("kivi2") in formats


def test_refusals_that_differ_only_in_the_formats_name_are_one_line() -> None:
    def answer(text: str, reason: str) -> inspection.FormatSupport:
        return inspection.FormatSupport(text, (reason,), "", ())

    found = inspection.Capability("cpu", "hardware", {}, {}, (
        answer("fp8_e4m3", "fp8_e4m3 is too new"), answer("mxfp4", "mxfp4 is too new"), answer("int2", "int2 is odd"),
    ))  # fmt: skip
    refusals = [line.strip() for line in backends._capability(found) if "refuses" in line]
    assert [line.split(maxsplit=1)[1] for line in refusals] == [
        "fp8_e4m3  mxfp4: fp8_e4m3 is too new",
        "int2: int2 is odd",
    ]


@pytest.mark.parametrize(
    "command", ["plan --tokens 9 --model", "compare", "verify-report", "inspect", "calibrate -o x --checkpoint"]
)
@pytest.mark.parametrize("content", ["deep", "digits", "folder", "absent", "long", "binary"])
def test_a_file_that_cannot_be_read_is_one_line_and_exit_1(
    command: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    if content == "deep":
        path.write_text("[" * 200_000)
    elif content == "digits":
        path.write_text('{"num_hidden_layers": ' + "9" * 5000 + "}")
    elif content == "folder":
        path.mkdir()
    elif content == "long":
        path = tmp_path / ("x" * 5000)
    elif content == "binary":
        path.write_bytes(bytes(range(256)))
    assert main([*command.split(), str(path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"kvport {command.split()[0]}: error: ")
    assert "Traceback" not in said.err


def test_a_result_that_cannot_be_written_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "mychip", "--into", "/proc/nowhere/mychip"]) == 1
    assert capsys.readouterr().err.startswith("kvport new-backend: error: /proc/nowhere")


def test_strict_listing_fails_where_a_plugin_does() -> None:
    done = _run("backends", "--no-probe", plugins=("importerror",), KVPORT_STRICT_PLUGINS="1")
    assert done.returncode == 1
    assert "No module named 'vendor_sdk'" in done.stdout + done.stderr


def test_a_list_with_a_wrong_name_is_an_error() -> None:
    done = _run("backends", KVPORT_DISABLE_PLUGINS="refrence")
    assert done.returncode == 1
    assert "KVPORT_DISABLE_PLUGINS='refrence' names 'refrence', which no installed plugin has" in done.stderr
    assert "Traceback" not in done.stderr
