"""What people read: tables that fit, pages that fetch nothing, and no way to take emulated results for a chip's."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_support import FIRST, LAST, MANIFEST, counts, digests_of, edited, executed, of_case, record, waived

from kvport.cli import main
from kvport.reports import Manifest, Report, compare, text
from kvport.reports.comparing import Comparison
from kvport.reports.html import page
from kvport.reports.tables import tables
from kvport.reports.text import WIDTH, plain
from pytest_kvport import reporting

RENDERINGS = {
    "text": text.comparison,
    "markdown": lambda found: text.comparison(found, markdown=True),
    "html": page,
}
SOFT = ["emulated", "interpreter"]


def soft_pair(kind: str, *changes: Any) -> Comparison:
    return compare([Report(record("one")), edited(executed(kind), *changes, name="two")], MANIFEST)


EVERYTHING = (
    digests_of(FIRST, codes="d" * 64),
    digests_of("append/rows/int4/small", inputs="2" * 64),
    waived(),
)


@pytest.mark.parametrize("kind", SOFT)
@pytest.mark.parametrize("rendering", RENDERINGS)
def test_what_did_not_run_on_hardware_is_never_called_a_hardware_agreement(kind: str, rendering: str) -> None:
    found = soft_pair(kind)
    assert found.verdict.startswith("AGREEMENT, BUT NOT OF HARDWARE: two@chip:0 [")
    rendered = RENDERINGS[rendering](found)
    words = re.sub(r"<[^>]*>", "", rendered)
    assert re.search(r"NOT OF HARDWARE", words)
    assert re.search(r"NOT HARDWARE: 2 two@chip:0 ", words), "the warning before any number"
    assert "AGREEMENT OF HARDWARE" not in words
    assert kind in words
    # The cells of the pair carry it too, not the verdict alone.
    assert re.search(r"1 x 2 ?\(?(NOT hardware|NOT)", words)


@pytest.mark.parametrize("kind", SOFT)
@pytest.mark.parametrize("changes", [(), EVERYTHING], ids=["agreeing", "everything"])
def test_every_table_names_a_soft_backend_as_such(kind: str, changes: Any) -> None:
    """In whichever table one looks, a row or column of the second backend says what it is."""
    found = compare([Report(record("one")), edited(executed(kind), *changes, name="two")], MANIFEST)
    shown = tables(found)
    assert len(shown) >= 7
    for table in shown:
        everything = " ".join([*table.head, *(cell for row in table.rows for cell in row)])
        if "two@" in everything or "1 x 2" in everything:
            assert f"[{kind}]" in everything or "NOT hardware" in everything, table.title
        for place in (*table.head, *(row[0] for row in table.rows)):
            if "two@" in place:
                assert f"[{kind}]" in place
            if place.startswith("1 x 2"):
                assert "NOT hardware" in place


@pytest.mark.parametrize("kind", SOFT)
def test_plots_mark_what_is_not_hardware(kind: str) -> None:
    rendered = page(soft_pair(kind))
    [heat] = re.findall(r"<h2>Heat map.*?</div>", rendered, re.S)
    assert heat.count('class="hatch"') == heat.count("NOT hardware agreement") > 0
    [errors] = re.findall(r"<h2>Attention error.*?(?=<h2>)", rendered, re.S)
    assert 'class="hatchbar"' in errors
    assert "2 (not hardware): worst" in errors
    hard = page(compare([Report(record("one")), Report(record("two"))], MANIFEST))
    assert 'class="hatch"' not in hard
    assert 'class="hatchbar"' not in hard
    assert "NOT" not in re.sub(r"<style>.*?</style>", "", hard, flags=re.S)


@pytest.mark.parametrize("kind", SOFT)
def test_a_junit_property_says_what_a_case_ran_on(kind: str) -> None:
    made = {"id": FIRST, "output_ratio": 0.5, "codes": {"compared": 3, "differing": 0}, "profiles": ["core", "int8"]}
    properties = dict(reporting.properties(made, "pass", "", reporting.label("two", "chip:0", kind)))
    assert properties["kvport.backend"] == f"two@chip:0 [{kind}, not hardware]"
    assert properties["kvport.codes.compared"] == 3
    assert properties["kvport.profiles"] == "core,int8"
    assert reporting.label("two", "chip:0", "hardware") == "two@chip:0"


NAMES = ("a-vendor-with-a-rather-long-name", "another-vendor-whose-name-is-longer-still", "third-very-long-vendor-name")


def long_names() -> Comparison:
    def change(r: dict[str, Any]) -> None:
        r["backend"]["device_name"] = "An Accelerator With Ever So Many Words In Its Name 80GB HBM3e"
        r["backend"]["driver"] = "999.99.99.999-build-with-a-long-suffix"
        of_case(LAST, outcome="unsupported", reason="a reason that goes on; " * 30)(r)
        counts(unsupported=1)(r)

    return compare(
        [edited(change, executed(kind), name=name) for name, kind in zip(NAMES, ("hardware", *SOFT), strict=True)],
        MANIFEST,
    )


def test_tables_of_three_reports_with_long_names_fit_a_terminal() -> None:
    said = text.comparison(long_names())
    assert WIDTH <= 120
    assert max(map(len, said.splitlines())) <= WIDTH
    for name in NAMES:  # wrapped, never cut
        assert name in re.sub(r"\s", "", said)


def test_many_pairs_fit_too() -> None:
    found = compare([Report(record(f"backend-number-{n}")) for n in range(4)], MANIFEST)
    assert max(map(len, text.comparison(found).splitlines())) <= WIDTH


def test_wrapping_loses_no_word() -> None:
    said = plain(["case", "why"], [["append/rows/int8/" + "x" * 80, "words " * 40], ["b", "c"]], 60)
    assert max(map(len, said.splitlines())) <= 60
    assert said.count("words") == 40
    assert said.replace("\n", "").count("x") == 80


class _Page(HTMLParser):
    """Checks that tags close in order, and collects what a page would fetch."""

    VOID = ("meta", "br", "path", "rect", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "action", "xlink:href")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("changes", [(), EVERYTHING], ids=["agreeing", "everything"])
def test_the_page_is_well_formed_self_contained_and_escaped(changes: Any) -> None:
    found = compare([Report(record("one")), edited(*changes, name="<script>two</script>")], MANIFEST)
    rendered = page(found)
    parser = _Page()
    parser.feed(rendered)
    assert parser.open == []
    assert parser.fetched == []
    assert "<script" not in rendered
    assert "@import" not in rendered
    assert "url(" not in rendered
    assert "Chip &amp; Co &lt;1&gt;" in rendered
    assert "prefers-color-scheme: dark" in rendered
    assert "http" not in rendered


def test_the_page_has_the_plots_and_the_environment() -> None:
    rendered = page(compare([Report(record("one")), Report(record("two"))], MANIFEST))
    for title in ("Backends and environments", "Heat map of agreement", "Attention error by format",
                  "Worst observed / bound"):  # fmt: skip
        assert f"<h2>{title}</h2>" in rendered
    for fact in ("7.1", "Toolkit 3", "0123456789abcdef", "2.99", "An OS 12", "pytest --backend=x", "fuses: all"):
        assert fact in rendered
    for svg in re.findall(r"<svg.*?</svg>", rendered, re.S):
        ET.fromstring(svg)


def test_every_rendering_counts_what_is_shared_of_what_there_is() -> None:
    found = compare(
        [Report(record("one")), edited(of_case(FIRST, outcome="unsupported", reason="no"), counts(unsupported=1),
                                       name="two")],
        MANIFEST,
    )  # fmt: skip
    for name, render in RENDERINGS.items():
        words = re.sub(r"<[^>]*>", " ", render(found))
        assert re.search(r"append[\s|]+2[\s|]+1/1", words), name


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_what_is_waived_differs_or_had_other_inputs_is_rendered(rendering: str) -> None:
    rendered = RENDERINGS[rendering](compare([Report(record("one")), edited(*EVERYTHING, name="two")], MANIFEST))
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", rendered))
    for title in ("Differences", "Different inputs", "Waived: known failures"):
        assert title in words
    assert "stored codes" in words
    assert "firmware 7" in words


def test_long_lists_are_cut_for_a_terminal_and_every_backend_keeps_some() -> None:
    def declines(r: dict[str, Any]) -> None:
        r["cases"] = [dict(r["cases"][0], id=f"append/rows/int8/n{n}", geometry=f"n{n}", outcome="unsupported",
                           reason=f"reason {n}", digests={}) for n in range(40)]  # fmt: skip

    found = compare([edited(declines), edited(declines, name="two")], MANIFEST)
    said = text.comparison(found).partition("What each lacks")[2]
    assert said.count("reason ") == 10
    assert "... and 70 more" in said
    assert said.count("1 one@") == said.count("2 two@") == 5
    assert page(found).count("reason ") >= 80


def test_the_commands_print_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest.installed()
    paths = []
    for name in ("one", "two"):
        made = record(name)
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(made), encoding="utf-8")
    html, markdown = tmp_path / "out.html", tmp_path / "out.md"
    # The cases of these reports are of no manifest: nothing is shared, and the status says so.
    assert main(["compare", *map(str, paths), "--html", str(html), "--markdown", str(markdown)]) == 1
    assert "NO VERDICT" in capsys.readouterr().out
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"of {sum(t == 'quick' for t in manifest.tiers.values())} in this tier" in markdown.read_text("utf-8")
    assert main(["compare", *map(str, paths), "--markdown", "-"]) == 1
    assert capsys.readouterr().out == markdown.read_text("utf-8")


def test_agreement_and_difference_have_their_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvport.commands.compare.Manifest.installed", lambda: MANIFEST)
    (tmp_path / "one.json").write_text(json.dumps(record("one")), encoding="utf-8")
    (tmp_path / "two.json").write_text(json.dumps(record("two")), encoding="utf-8")
    other = edited(digests_of(FIRST, codes="d" * 64), name="three").record
    (tmp_path / "three.json").write_text(json.dumps(other), encoding="utf-8")
    assert main(["compare", str(tmp_path / "one.json"), str(tmp_path / "two.json")]) == 0
    assert "AGREEMENT OF HARDWARE" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "one.json"), str(tmp_path / "three.json")]) == 1
    assert "NO AGREEMENT" in capsys.readouterr().out
