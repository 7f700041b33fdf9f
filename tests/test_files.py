"""One kind of error for files that cannot be read or written, whoever reads and whatever they should hold."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvport
from kvport import FileError, InvalidArgument, KVPortError, LayerScales, MissingFile, PageImage, SideScales
from kvport.checkpoints import import_scales
from kvport.cli import main
from kvport.commands.loading import load_text
from kvport.files import reading, write_atomically
from kvport.model_config import read_model_config
from kvport.recipes import Recipe, load_recipe
from kvport.reports import read as read_report
from kvport.waivers import read as read_waivers

#: What reads a file -> (how, the file's name, what its message calls it, what it says to do).
READERS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "page image": (PageImage.load, "page image", "cache.export(sequence).save(path) writes one"),
    "recipe": (load_recipe, "recipe", "'kvport calibrate -o' writes one"),
    "model config": (read_model_config, "model config", "config.json"),
    "report": (read_report, "report", "--report=FILE writes one"),
    "waivers": (lambda path: read_waivers(path.with_suffix(".toml")), "file of waivers", "docs/conformance.md"),
    "checkpoint": (import_scales, "checkpoint", "give a safetensors file"),
    "text": (lambda path: load_text(path, None, 8), "text", "--text names a file of UTF-8 text"),
}
#: Those whose name may be that of a folder, too.
OF_FOLDERS = {"model config", "checkpoint"}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_not_there(reader: str, tmp_path: Path) -> None:
    read, what, advice = READERS[reader]
    with pytest.raises(MissingFile) as caught:
        read(tmp_path / "absent")
    error = caught.value
    assert isinstance(error, KVPortError)
    assert isinstance(error, FileNotFoundError)
    assert str(error).startswith(f"there is no {what} {tmp_path / 'absent'}")
    assert advice in str(error)
    assert (error.errno, Path(error.filename).stem) == (errno.ENOENT, "absent")


@pytest.mark.parametrize("reader", sorted(READERS.keys() - OF_FOLDERS))
def test_a_folder_where_a_file_should_be(reader: str, tmp_path: Path) -> None:
    read, what, advice = READERS[reader]
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(FileError) as caught:
        read(folder)
    assert isinstance(caught.value, OSError)
    assert not isinstance(caught.value, FileNotFoundError)
    assert str(caught.value).startswith(f"the {what} {folder} cannot be read: it is a folder; ")
    assert advice in str(caught.value)


def test_what_the_system_says_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught, reading("x", "thing", "ask for it"):
        raise PermissionError(errno.EACCES, "Permission denied", "x")
    assert str(caught.value) == "the thing x cannot be read: Permission denied; ask for it"
    assert (caught.value.errno, caught.value.strerror) == (errno.EACCES, "Permission denied")
    assert caught.value.filename == "x"
    with pytest.raises(InvalidArgument), reading("x", "thing", "ask for it"):
        raise InvalidArgument("what a file holds is for others to judge")


def recipe() -> Recipe:
    return Recipe({0: LayerScales(SideScales(0.5), SideScales(0.25))}, {0: "int8:tensor:static"}, {})


def image() -> PageImage:
    cache = kvport.open("cpu", layers=1, kv_heads=1, head_dim=8, tokens=256)
    return cache.export(cache.sequence())


@pytest.mark.parametrize("write", [recipe().save, lambda path: image().save(path), lambda p: write_atomically(p, b"x")])
def test_a_file_that_cannot_be_written(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "absent" / "file"
    with pytest.raises(FileError) as caught:
        write(path)
    assert str(caught.value) == f"{path} cannot be written: there is no folder {tmp_path / 'absent'}"
    assert caught.value.filename == str(path)
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match=r"folder cannot be written: "):
        write(folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]  # and no draft of it


@pytest.mark.parametrize("command", ["calibrate -o x --checkpoint", "compare", "inspect", "plan --tokens 9 --model"])
def test_commands_say_so_in_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), str(tmp_path / "absent")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvport {command.split()[0]}: error: there is no ")
