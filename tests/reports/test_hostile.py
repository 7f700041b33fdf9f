"""Files that are no reports, by accident or on purpose: one clear error each, and never a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from report_support import FIRST, LAST, MANIFEST, case, edited, of_case, record

from kvport.cli import main
from kvport.reports import Report, ReportError, compare, read, sealed, text, verify
from kvport.reports.html import page

WHOLE = json.dumps(record())
HOSTILE = {
    "empty": (b"", "no JSON"),
    "cut": (WHOLE[:-20].encode(), "no JSON"),
    "a list": (b"[]", "is list, must be object"),
    "nothing in it": (b"{}", "lacks 'schema_version'"),
    "of an older schema": (b'{"schema_version": 1}', "schema version 1, this kvport reads 2"),
    "of a later schema": (b'{"schema_version": 9}', "schema version 9, this kvport reads 2"),
    "not UTF-8": (b"\xff\xfe" + WHOLE.encode("utf-16-le"), "no JSON"),
    "deep lists": (b"[" * 200_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested too deeply"),
    "deep inside an unknown field": (
        WHOLE.replace('"suite_version"', '"more": ' + "[" * 100_000 + "]" * 100_000 + ', "suite_version"').encode(),
        "nested too deeply",
    ),
    "NaN": (WHOLE.replace('"seconds": 1.0', '"seconds": NaN').encode(), "NaN is no JSON"),
    "infinity": (WHOLE.replace('"seconds": 1.0', '"seconds": -Infinity').encode(), "-Infinity is no JSON"),
    "beyond a double": (WHOLE.replace('"seconds": 1.0', '"seconds": 1e999').encode(), "beyond a double's range"),
    "a huge integer": (WHOLE.replace('"seed": 0', f'"seed": {"9" * 10_000}').encode(), "has 10000 digits"),
    "a field twice": (WHOLE.replace('"seed": 0', '"seed": 0, "seed": 1').encode(), "an object has 'seed' twice"),
    "cases no list": (json.dumps({**record(), "cases": {}}).encode(), "cases is dict, must be array"),
    "a case no object": (json.dumps({**record(), "cases": [None]}).encode(), "cases[0] is NoneType, must be object"),
    "an id that is no text": (
        json.dumps({**record(), "cases": [{**case(FIRST), "id": ["x"]}]}).encode(),
        "cases[0].id is list, must be string",
    ),
    "true for a number": (WHOLE.replace('"seed": 0', '"seed": true').encode(), "seed is bool, must be integer"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["verify-report", "compare"])
def test_other_files_are_refused(name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents, message = HOSTILE[name]
    path, good = tmp_path / "x.json", tmp_path / "good.json"
    path.write_bytes(contents)
    good.write_text(WHOLE, encoding="utf-8")
    with pytest.raises(ReportError, match=r"x\.json"):
        read(path)
    assert main([command, str(path), str(good)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert len(said) < 1000


def test_nesting_that_parses_but_does_not_seal_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ReportError, match="nested too deeply to be sealed"):
        verify(Report({**record(), "more": deep}), MANIFEST)
    while deep:  # taken apart here, because freeing it recursively is not for every interpreter
        deep = deep.pop()


def test_absent_files_and_folders_are_refused_and_the_others_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-report", str(tmp_path / "absent.json"), str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"there is no report {tmp_path / 'absent.json'}; pytest" in said
    assert f"the report {tmp_path} cannot be read: it is a folder" in said


def test_a_page_or_table_that_cannot_be_written_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvport.commands.compare.Manifest.installed", lambda: MANIFEST)
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        path.write_text(json.dumps(record(path.stem)), encoding="utf-8")
    assert main(["compare", *map(str, paths), "--html", str(tmp_path / "no" / "x.html")]) == 1
    assert "x.html cannot be written" in capsys.readouterr().err


ESCAPE = "\x1b[2Jmoved\ud800\u202e"


def test_control_characters_reach_no_terminal_and_markup_no_page() -> None:
    """A report may say of itself what it likes; it cannot clear a screen, start a table row or run a script."""

    def change(r: dict[str, Any]) -> None:
        r["backend"]["name"] = "<b>|evil"
        r["backend"]["facts"] = {"note": ESCAPE, "device_name": "x"}
        r["backend"]["device_name"] = f"a|b{ESCAPE}<img src=x>"
        of_case(LAST, outcome="unsupported", reason=f"{ESCAPE}\n| injected | row |<script>")(r)
        r["counts"].update({"pass": 2, "unsupported": 1})

    soft = edited(change, name="two")
    found = compare([Report(record()), soft], MANIFEST)
    for rendered in (text.comparison(found), text.comparison(found, markdown=True), page(found),
                     text.verification(verify(soft, MANIFEST), soft.label)):  # fmt: skip
        assert not {"\x1b", "\ud800", "\u202e"} & set(rendered)
        rendered.encode("utf-8")
    assert "<img" not in page(found)
    assert "<script" not in page(found)
    table = text.comparison(found, markdown=True)
    assert "<img" not in table
    assert "| injected | row |" not in table
    rows = [line for line in table.splitlines() if "evil" in line and line.startswith("|")]
    assert rows
    assert all("\\|evil" in row for row in rows)


def test_sealing_a_hostile_report_again_does_not_change_what_is_found() -> None:
    made = copy.deepcopy(record())
    made["cases"][0]["codes"] = {"compared": -1, "differing": 0}
    assert any("must be at least 0" in finding for finding in verify(Report(sealed(made)), MANIFEST).findings)
