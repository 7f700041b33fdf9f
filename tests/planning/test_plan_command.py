"""``kvport plan`` as people type it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import kvport
from kvport.cli import main
from kvport.commands.plan import read_bytes, show_bytes
from kvport.layout import CacheLayout
from kvport.model_config import read_model_config

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "dtype": "float16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["--format", "fp16", "--format", "int8:g128:scale=fp16", "--format", "int4:g128:scale=fp16,recent=128"]
    assert main(["plan", "--model", model, "--tokens", "4096", "--memory", "80GiB", "--backend", "cpu", *formats]) == 0
    out = capsys.readouterr().out
    assert "32 layers 8 KV heads of 128" in out
    lines = [line for line in out.splitlines() if line.startswith("  total, canonical")]
    assert lines[0].split() == ["total,", "canonical", "512.00", "MiB", "260.00", "MiB", "143.88", "MiB"]
    assert "16.00 MiB (128 tokens)" in out
    assert "padding, reference" in out
    assert "weights and activations come on top" in out


def test_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", model, "--tokens", "4096", "--requests", "4", "--memory", "8GiB", "--json"]
    assert main([*arguments, "--format", "int4:g128:scale=fp16", "--backend", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema_version"] == 1
    [found] = record["plans"]
    assert found["per_request"]["codes"] == 128 * 2**20
    assert found["per_request"]["scales"] == 4 * 2**20
    assert found["per_request"]["device_total"] == 132 * 2**20
    assert found["per_token"]["total"] == 33 * 1024
    assert found["pools"]["pages"] == [4 * 32 + 1]
    assert found["fit"]["requests"] == 62  # 62 * 32 + 1 pages of 4.125 MiB are 8188.1 MiB, 63 * 32 + 1 too many
    assert found["lanes"][0]["tier"] == "all"


def test_devices(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--tokens", "100", "--devices", "8"]) == 0
    assert "1 KV heads of 128" in capsys.readouterr().out
    assert main(["plan", "--model", model, "--tokens", "100", "--devices", "5"]) == 1
    assert "cannot be split over 5 devices" in capsys.readouterr().err


def test_pins_beside_a_baseline(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", "--model", model, "--tokens", "1000", "--pin", "100", "--json", "--format", "fp16"]
    assert main([*common, "--format", "int8,recent=128"]) == 0
    assert [p["pin"] for p in json.loads(capsys.readouterr().out)["plans"]] == [0, 100]
    assert main(common) == 1
    assert "format fp16 has no near tier to pin 100 tokens in" in capsys.readouterr().err


def test_errors_name_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "num_attention_heads": None}))
    assert main(["plan", "--model", str(file), "--tokens", "100"]) == 1
    assert "num_attention_heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1.5kib", 1536), ("7", 7), ("512MiB", 2**29)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["80 Gigs", "-3", "", "GiB"])
def test_sizes_that_cannot_be(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read_bytes(text)


def test_show_bytes() -> None:
    assert [show_bytes(n) for n in (None, 656, 10239, 10240, 2**29, 5 * 2**40)] == [
        "-",
        "656 B",
        "10239 B",
        "10.00 KiB",
        "512.00 MiB",
        "5.00 TiB",
    ]


def test_the_table_says_how_to_open_these_pools(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", model, "--tokens", "700", "--requests", "3", "--chunk", "64", "--pin", "9"]
    assert main([*arguments, "--format", "int4:g64,recent=32"]) == 0
    out = capsys.readouterr().out
    assert "kvport.open(..., tokens=700, requests=3, chunk=64, pin=9) makes these pools" in out
    [line] = [line for line in out.splitlines() if line.startswith("  pages by pool")]
    layout = read_model_config(model).layout("int4:g64,recent=32")
    one = CacheLayout(layout.layers[:1], layout.format, layout.page_size, layout.dtype)  # the counts, without the GiBs
    with kvport.open("cpu", layout=one, tokens=700, requests=3, chunk=64, pin=9) as cache:
        assert line.split()[3:] == [f"{cache.stats().pools[0].total + 1},", str(cache.stats().pools[1].total + 1)]


@pytest.mark.parametrize(
    "size", [pytest.param("9" * 400, id="400 digits"), "1e99", "\u0661GiB", "-1", "80 GiBs", "1.5.5GB", ""]
)
def test_what_is_no_size(size: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--model", model, "--tokens", "4096", f"--memory={size}"])
    assert stopped.value.code == 2
    assert "is no size" in capsys.readouterr().err
