"""Reports are judged by their contents: what was edited, left out, doubled or contradicts itself is found by name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvport.cli import main
from kvport.reports import Manifest, Report, ReportError, compare, read, sealed, text, verify
from kvport.reports.html import page
from kvport.reports.reading import digest, schema, schema_faults

IDS = {
    "append/rows/int8/small": ("quick", ("core",)),
    "append/rows/int4/small": ("quick", ()),
    "pages/every_length/int8/small": ("quick", ("core",)),
    "pages/every_length/int8/large": ("full", ("core",)),
}
MANIFEST = Manifest(1, {identity: tier for identity, (tier, _) in IDS.items()}, {"core": {"quick": 2, "full": 1}})


def case(identity: str, **more: Any) -> dict[str, Any]:
    chapter, check, format_text, geometry = identity.split("/")
    tier, profiles = IDS.get(identity, ("quick", ()))
    record: dict[str, Any] = {
        "id": identity, "chapter": chapter, "check": check, "format": format_text, "geometry": geometry, "tier": tier,
        "profiles": list(profiles), "outcome": "pass", "seconds": 0.1, "reason": "",
    }  # fmt: skip
    if chapter == "append":
        record |= {
            "codes": {"compared": 100, "differing": 0},
            "scales": {"compared": 10, "differing": 0, "largest_ulps": 0},
            "exactness": "bit-exact",
            "digests": {"codes": "c" * 64, "scales": "5" * 64},
        }
    else:
        record |= {"output_ratio": 0.25, "lse_ratio": 0.125}
    return {**record, **more}


def record(name: str = "one", **more: Any) -> dict[str, Any]:
    """A sound report of the quick tier."""
    cases = [case(identity) for identity, (tier, _) in sorted(IDS.items()) if tier == "quick"]
    made: dict[str, Any] = {
        "schema_version": 1, "suite_version": 1, "kvport": "0.1.0", "created": "2026-01-01T00:00:00+00:00",
        "backend": {
            "request": name, "name": name, "distribution": name, "version": "1", "device": "chip:0",
            "torch_device": "cpu", "execution": "hardware", "operations": {"append": "native", "seal": "inherited"},
            "facts": {"device_name": "Chip & Co <1>"},
        },
        "environment": {"python": "CPython 3.11", "platform": "Linux", "machine": "x86_64", "packages": {"torch": "2"}},
        "run": {
            "command": ["pytest"], "seed": 0, "formats": None, "chapter": None, "tier": None, "exit_status": 0,
            "seconds": 1.0,
        },
        "counts": {"pass": len(cases), "fail": 0, "unsupported": 0, "error": 0},
        "cases": cases,
    }  # fmt: skip
    return sealed({**made, **more})


def edited(change: Callable[[dict[str, Any]], object], *, reseal: bool = True, name: str = "one") -> Report:
    made = copy.deepcopy(record(name))
    change(made)
    return Report(sealed(made) if reseal else made)


def test_a_sound_report_is_sound_and_its_profile_is_judged() -> None:
    found = verify(Report(record()), MANIFEST)
    assert found.sound
    assert found.findings == ()
    [core] = found.profiles
    assert (core.verdict, core.passed, core.total) == ("conforms", 2, 2)
    assert "inherited, not the backend's own: seal" in found.notes


def _set(identity: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda r: next(c for c in r["cases"] if c["id"] == identity).update(fields)


FIRST = "append/rows/int8/small"
LAST = "pages/every_length/int8/small"


def _waived(expires: str = "2026-02-01") -> Callable[[dict[str, Any]], object]:
    waiver = {"backend": "one", "case": LAST, "reason": "firmware 7", "expires": expires, "issue": "", "source": "w"}

    def change(r: dict[str, Any]) -> None:
        _set(LAST, outcome="waived", reason="off by 3", waiver=waiver, output_ratio=9.0)(r)
        r["counts"].update({"pass": 2, "waived": 1})

    return change


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (
        lambda r: (r["cases"].pop(), r["counts"].update({"pass": 2})),
        r"1 cases are missing: pages/every_length",
    ),
    "doubled": (
        lambda r: (r["cases"].append(r["cases"][0]), r["counts"].update({"pass": 4})),
        r"1 cases appear twice: append/rows/int4",
    ),
    "extra": (
        lambda r: (r["cases"].append(case("append/made_up/int8/small")), r["counts"].update({"pass": 4})),
        r"1 cases are not in the manifest: append/made_up",
    ),
    "of another tier": (
        lambda r: (r["cases"].append(case("pages/every_length/int8/large")), r["counts"].update({"pass": 4})),
        r"1 cases were not asked for: pages/every_length/int8/large",
    ),
    "counts": (lambda r: r["counts"].update({"pass": 30}), r"the counts say"),
    "passes above its bound": (_set(LAST, output_ratio=1.5), r"passes with output_ratio 1.5"),
    "passes with nan": (_set(LAST, lse_ratio="nan"), r"passes with lse_ratio nan"),
    "bit-exact with differences": (_set(FIRST, codes={"compared": 9, "differing": 2}), r"says bit-exact with 2 codes"),
    "declines without a reason": (
        lambda r: (_set(FIRST, outcome="unsupported")(r), r["counts"].update({"pass": 2, "unsupported": 1})),
        r"is unsupported without a reason",
    ),
    "too many codes of a class differ": (
        _set(FIRST, codes={"compared": 2**20, "differing": 6000}, exactness="one-code"),
        r"int8: 6000 of 1048576 codes differ, more than the one-code class's 0.5%",
    ),
    "waived by nothing": (
        lambda r: (_set(LAST, outcome="waived", reason="x")(r), r["counts"].update({"pass": 2, "waived": 1})),
        r"pages/every_length/int8/small is waived without a waiver",
    ),
    "waived too late": (_waived("2025-12-31"), r"is waived by what expired on 2025-12-31, before the run"),
    "chapter": (_set(FIRST, chapter="pages"), r"says chapter 'pages'"),
    "tier": (_set(FIRST, tier="full"), r"says tier 'full', the manifest 'quick'"),
    "suite version": (lambda r: r.update(suite_version=7), r"suite version 7, installed is 1"),
    "schema": (lambda r: r["backend"].update(execution="gpu"), r"backend.execution is 'gpu', allowed: 'hardware'"),
    "field lost": (lambda r: r["run"].pop("seed"), r"report.run lacks 'seed'"),
    "wrong type": (lambda r: r["cases"][0].update(seconds="fast"), r"cases\[0\].seconds is str, must be number"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_a_report_is_found(name: str) -> None:
    change, message = FAULTS[name]
    found = verify(edited(change), MANIFEST)
    assert not found.sound
    assert any(re.search(message, finding) for finding in found.findings), found.findings


def test_a_waived_case_is_no_pass_and_no_failure() -> None:
    found = verify(edited(_waived()), MANIFEST)
    assert found.findings == ()
    [core] = found.profiles
    assert (core.verdict, core.passed, core.waived, core.failed, core.total) == ("conforms but for waivers", 1, 1, 0, 2)
    assert core.share == 0.5
    assert "1 cases fail and are waived, which is no pass (1 x until 2026-02-01: firmware 7)" in found.notes
    assert "waived" in text.verification(found, "x")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small manifest in place of the suite's."""
    monkeypatch.setattr(Manifest, "installed", classmethod(lambda cls: MANIFEST))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "change", "status"),
    [
        ("all pass", lambda r: None, 0),
        ("waived", _waived(), 0),
        (
            "failed",
            lambda r: (_set(LAST, outcome="fail", reason="x")(r), r["counts"].update({"pass": 2, "fail": 1})),
            1,
        ),
        (
            "declined",
            lambda r: (
                _set(LAST, outcome="unsupported", reason="x")(r),
                r["counts"].update({"pass": 2, "unsupported": 1}),
            ),
            1,
        ),
    ],
)
def test_a_required_profile_gates(
    name: str,
    change: Callable[[dict[str, Any]], object],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(edited(change).record))
    assert main(["verify-report", str(path)]) == 0  # a sound report, whatever it says
    assert main(["verify-report", str(path), "--require=core"]) == status
    assert ("required profile core: " in capsys.readouterr().out) == (status == 1)
    assert main(["verify-report", str(path), "--require=corr"]) == 1
    assert "no profile is named corr; there are: core" in capsys.readouterr().err


def test_what_is_only_waived_fails_its_profile() -> None:
    def change(r: dict[str, Any]) -> None:
        _waived()(r)
        r["cases"] = [c for c in r["cases"] if c["id"] == LAST]
        r["counts"]["pass"] = 0

    assert verify(edited(change), MANIFEST).profiles[0].verdict == "fails"


def test_a_comparison_names_what_is_waived_and_shares_none_of_it() -> None:
    found = compare([edited(_waived()), Report(record("two"))], MANIFEST)
    assert found.verdict == "AGREEMENT, BUT FOR WAIVED FAILURES (1 of one@chip:0)"
    assert found.pairs[0].total.shared == 2
    for rendered in (text.comparison(found), text.comparison(found, markdown=True), page(found)):
        assert "until 2026-02-01: firmware 7; fails: off by 3" in rendered


def test_an_edited_report_breaks_its_seal() -> None:
    found = verify(edited(_set(FIRST, seconds=0.2), reseal=False), MANIFEST)
    assert found.findings == ("the seal does not match: the report was edited or damaged after it was written",)
    assert record()["digest"] == digest(record())


def test_a_partial_run_is_judged_by_what_was_asked_for() -> None:
    def only_append(r: dict[str, Any]) -> None:
        r["run"]["chapter"] = "append"
        r["cases"] = [c for c in r["cases"] if c["chapter"] == "append"]
        r["counts"]["pass"] = 2

    found = verify(edited(only_append), MANIFEST)
    assert found.sound
    assert any("partial run" in note for note in found.notes)
    assert found.profiles[0].verdict == "conforms in part"


def test_cases_that_are_not_in_the_manifest_add_nothing_to_a_profile() -> None:
    def padded(r: dict[str, Any]) -> None:
        r["cases"] += [case(f"append/made_up/int8/{n}", profiles=["core"]) for n in range(9)]
        r["counts"]["pass"] += 9

    found = verify(edited(padded), MANIFEST)
    assert not found.sound
    assert (found.profiles[0].passed, found.profiles[0].total) == (2, 2)


def test_a_failing_profile_fails_whatever_else_passes() -> None:
    def fails(r: dict[str, Any]) -> None:
        _set(FIRST, outcome="fail", reason="codes differ")(r)
        r["counts"].update({"pass": 2, "fail": 1})

    found = verify(edited(fails), MANIFEST)
    assert found.sound, "a report of a failing backend is a good report"
    assert found.profiles[0].verdict == "fails"


def test_the_schema_is_valid_json_schema_and_agrees_with_the_validator() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(schema())
    assert not list(validator.iter_errors(record()))
    for change, _ in FAULTS.values():
        made = edited(change).record
        assert bool(list(validator.iter_errors(made))) == bool(schema_faults(made))


def test_backends_that_stored_the_same_agree() -> None:
    found = compare([Report(record("one")), Report(record("two"))], MANIFEST)
    assert found.verdict == "AGREEMENT"
    [pair] = found.pairs
    assert pair.total.agreed == pair.total.shared == pair.total.possible == 3
    assert dict(pair.cells["append"].relations) == {"same bits": 2}
    assert dict(pair.cells["pages"].relations) == {"within bound": 1}


def test_different_bits_that_both_pass_are_a_difference_unless_their_class_allows_it() -> None:
    other = {"codes": "d" * 64, "scales": "5" * 64}
    found = compare([Report(record("one")), edited(_set(FIRST, digests=other), name="two")], MANIFEST)
    assert not found.agreement
    assert found.pairs[0].differences == ((FIRST, "both pass, and their stored codes are not the same"),)
    allowed = edited(_set(FIRST, digests=other, exactness="one-code"), name="two")
    assert compare([Report(record("one")), allowed], MANIFEST).agreement


def test_cases_that_one_declines_are_not_shared_and_say_why() -> None:
    def declines(r: dict[str, Any]) -> None:
        _set(FIRST, outcome="unsupported", reason="no int8 here")(r)
        r["counts"].update({"pass": 2, "unsupported": 1})

    found = compare([Report(record("one")), edited(declines, name="two")], MANIFEST)
    assert found.agreement
    assert (found.pairs[0].cells["append"].shared, found.pairs[0].cells["append"].possible) == (1, 2)
    assert "no int8 here" in text.comparison(found)


@pytest.mark.parametrize("kind", ["emulated", "interpreter"])
def test_what_did_not_run_on_hardware_is_never_called_a_hardware_agreement(kind: str) -> None:
    soft = edited(lambda r: r["backend"].update(execution=kind), name="two")
    found = compare([Report(record("one")), soft], MANIFEST)
    assert found.verdict.startswith("AGREEMENT, BUT NOT OF HARDWARE")
    for rendered in (text.comparison(found), text.comparison(found, markdown=True), page(found)):
        assert kind in rendered
        assert "not hardware" in rendered.lower()


def test_reports_that_hold_other_numbers_do_not_compare() -> None:
    other = edited(lambda r: r["run"].update(seed=4), name="two")
    with pytest.raises(ReportError, match="different seeds"):
        compare([Report(record()), other], MANIFEST)
    with pytest.raises(ReportError, match="at least two"):
        compare([Report(record())], MANIFEST)


class _Page(HTMLParser):
    """Checks that tags close in order, and collects what a page would fetch."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "action")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_self_contained_and_escaped() -> None:
    names = ("one", "<script>two</script>")
    found = compare([Report(record(name)) for name in names], MANIFEST)
    rendered = page(found)
    parser = _Page()
    parser.feed(rendered)
    assert parser.open == []
    assert parser.fetched == []
    assert "<script" not in rendered
    assert "Chip &amp; Co &lt;1&gt;" in rendered
    assert "prefers-color-scheme: dark" in rendered
    assert "http" not in rendered


def test_the_commands_print_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest.installed()
    quick = [identity for identity, tier in manifest.tiers.items() if tier == "quick"]
    paths = []
    for name in ("one", "two"):
        made = record(name)
        made["cases"] = [{**case("/".join(i.split("/")[:4])), "id": i, "tier": "quick"} for i in sorted(quick)]
        made["counts"] = {"pass": len(quick), "fail": 0, "unsupported": 0, "error": 0}
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(sealed(made)), encoding="utf-8")
    assert main(["verify-report", *map(str, paths)]) == 0
    assert "a sound report" in capsys.readouterr().out
    html, markdown = tmp_path / "out.html", tmp_path / "out.md"
    assert main(["compare", *map(str, paths), "--html", str(html), "--markdown", str(markdown)]) == 0
    assert "AGREEMENT" in capsys.readouterr().out
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "| pair |" in markdown.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity", "NaN", pytest.param("9" * 400, id="400 digits"),
                                    pytest.param("9" * 5000, id="5000 digits")])  # fmt: skip
def test_numbers_that_are_none_are_refused(number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    text = json.dumps(record())
    assert text.count('"seconds": 1.0') == 1
    path.write_text(text.replace('"seconds": 1.0', f'"seconds": {number}'), encoding="utf-8")
    for command in (["verify-report", str(path)], ["compare", str(path), str(path)]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"kvport {command[0]}: error: {path}")
        assert "run.seconds" in said or "is no JSON file" in said


@pytest.mark.parametrize(
    "contents", ["", "{", "[]", "{}", '{"schema_version": 2}', pytest.param("[" * 200_000, id="deep")]
)
def test_other_files_are_refused(contents: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(contents, encoding="utf-8")
    with pytest.raises(ReportError, match=r"x\.json"):
        read(path)
    assert main(["verify-report", str(path)]) == 1
    assert "error" in capsys.readouterr().err
    assert main(["verify-report", str(tmp_path / "absent.json")]) == 1
