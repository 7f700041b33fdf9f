"""A report is judged by its contents: what was edited, left out, doubled or contradicts itself is found by name."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_support import (
    FIRST,
    IDS,
    LAST,
    MANIFEST,
    Change,
    case,
    counts,
    digests_of,
    edited,
    executed,
    of_case,
    planes,
    record,
    waived,
    written,
)

from kvport.cli import main
from kvport.reports import Manifest, Report, compare, sealed, text, verify
from kvport.reports.reading import digest, read, schema, schema_faults

ROOT = Path(__file__).parents[2]


def test_a_sound_report_is_sound_and_its_profile_is_judged() -> None:
    found = verify(Report(record()), MANIFEST)
    assert found.sound
    assert found.findings == ()
    [core] = found.profiles
    assert (core.verdict, core.passed, core.total) == ("conforms", 2, 2)
    assert "inherited, not the backend's own: seal" in found.notes


FAULTS: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda r: (r["cases"].pop(), r["counts"].update({"pass": 2})),
        r"^1 case is missing: pages/every_length/int8/small$",
    ),
    "missing by -k": (
        lambda r: (r["cases"].clear(), r["counts"].update({"pass": 0}), r["run"].update(keyword="int9")),
        r"^3 cases are missing: append/rows/.*\(the run was narrowed by -k 'int9'\)$",
    ),
    "doubled": (
        lambda r: (r["cases"].append(r["cases"][0]), r["counts"].update({"pass": 4})),
        r"^1 case appears twice: append/rows/int4/small$",
    ),
    "extra": (
        lambda r: (r["cases"].append(case("append/made_up/int8/small")), r["counts"].update({"pass": 4})),
        r"^1 case is not in the manifest: append/made_up/int8/small$",
    ),
    "of another tier": (
        lambda r: (r["cases"].append(case("pages/every_length/int8/large")), r["counts"].update({"pass": 4})),
        r"^1 case was not asked for: pages/every_length/int8/large$",
    ),
    "counts": (lambda r: r["counts"].update({"pass": 30}), r"^the counts do not agree .*: pass 30, there are 3$"),
    "passes above its bound": (of_case(LAST, output_ratio=1.5), r"passes with output_ratio 1.5"),
    "passes with nan": (of_case(LAST, lse_ratio="nan"), r"passes with lse_ratio nan"),
    "bit-exact with differences": (of_case(FIRST, codes={"compared": 9, "differing": 2}), r"bit-exact with 2 codes"),
    "declines without a reason": (
        lambda r: (of_case(FIRST, outcome="unsupported")(r), counts(unsupported=1)(r)),
        r"is unsupported without a reason",
    ),
    "too many codes of a class differ": (
        of_case(FIRST, codes={"compared": 2**20, "differing": 6000}, exactness="one-code"),
        r"int8: 6000 of 1048576 codes differ, more than the one-code class's 0.5%",
    ),
    "waived by nothing": (
        lambda r: (of_case(LAST, outcome="waived", reason="x")(r), counts(waived=1)(r)),
        r"pages/every_length/int8/small is waived without a waiver",
    ),
    "waived too late": (waived("2025-12-31"), r"is waived by what expired on 2025-12-31, before the run"),
    "chapter": (of_case(FIRST, chapter="pages"), r"says chapter 'pages'"),
    "format": (of_case(FIRST, format="int4"), r"says format 'int4'"),
    "geometry": (of_case(FIRST, geometry="large"), r"says geometry 'large'"),
    "tier": (of_case(FIRST, tier="full"), r"says tier 'full', the manifest 'quick'"),
    "a profile padded": (
        of_case("append/rows/int4/small", profiles=["core"]),
        r"^3 cases say that they are of profile core, it has 2$",
    ),
    "a profile thinned": (of_case(FIRST, profiles=[]), r"^1 cases say that they are of profile core, it has 2$"),
    "a profile made up": (of_case(FIRST, profiles=["core", "gold"]), r"name a profile 'gold', which there is not"),
    "suite version": (lambda r: r.update(suite_version=7), r"suite version 7, installed is 1"),
    "schema": (executed("gpu"), r"backend.execution is 'gpu', allowed: 'hardware'"),
    "field lost": (lambda r: r["run"].pop("seed"), r"report.run lacks 'seed'"),
    "wrong type": (lambda r: r["cases"][0].update(seconds="fast"), r"cases\[0\].seconds is str, must be number"),
    "no digest": (digests_of(FIRST, codes="abc"), r"digests.codes is 'abc', must match"),
    "a figure in words": (of_case(LAST, output_ratio="small"), r"output_ratio is str, must be number or .*'small'"),
    "less than nothing": (of_case(LAST, output_ratio=-1), r"output_ratio is -1, must be at least 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_a_report_is_found(name: str) -> None:
    change, message = FAULTS[name]
    found = verify(edited(change), MANIFEST)
    assert not found.sound
    assert any(re.search(message, finding) for finding in found.findings), found.findings
    assert all("\n" not in finding for finding in found.findings)


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_report_gives_an_exit_status_and_one_line_a_cause(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, _ = FAULTS[name]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(edited(change).record), encoding="utf-8")
    assert main(["verify-report", str(path)]) == 1
    said = capsys.readouterr()
    assert "NOT A SOUND REPORT" in said.out or "error: " in said.err


def test_an_edited_report_breaks_its_seal() -> None:
    found = verify(edited(of_case(FIRST, seconds=0.2), reseal=False), MANIFEST)
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
    found = verify(edited(of_case(FIRST, outcome="fail", reason="codes differ"), counts(fail=1)), MANIFEST)
    assert found.sound, "a report of a failing backend is a good report"
    assert found.profiles[0].verdict == "fails"


def test_a_waived_case_is_no_pass_and_no_failure() -> None:
    found = verify(edited(waived()), MANIFEST)
    assert found.findings == ()
    [core] = found.profiles
    assert (core.verdict, core.passed, core.waived, core.failed, core.total) == ("conforms but for waivers", 1, 1, 0, 2)
    assert core.share == 0.5
    assert "1 cases fail and are waived, which is no pass (1 x until 2026-02-01: firmware 7)" in found.notes
    assert "waived" in text.verification(found, "x")


@pytest.mark.parametrize(
    "changes, status",
    [
        ([], 0),
        ([waived()], 0),
        ([of_case(LAST, outcome="fail", reason="x"), counts(fail=1)], 1),
        ([of_case(LAST, outcome="unsupported", reason="x"), counts(unsupported=1)], 1),
    ],
    ids=["all pass", "waived", "failed", "declined"],
)
def test_a_required_profile_gates(
    changes: list[Change],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Manifest, "installed", classmethod(lambda cls: MANIFEST))
    path = tmp_path / "r.json"
    path.write_text(json.dumps(edited(*changes).record))
    assert main(["verify-report", str(path)]) == 0  # a sound report, whatever it says
    assert main(["verify-report", str(path), "--require=core"]) == status
    assert ("required profile core: " in capsys.readouterr().out) == (status == 1)
    assert main(["verify-report", str(path), "--require=corr"]) == 1
    assert "no profile is named corr; there are: core" in capsys.readouterr().err


def test_what_is_only_waived_fails_its_profile() -> None:
    def change(r: dict[str, Any]) -> None:
        waived()(r)
        r["cases"] = [c for c in r["cases"] if c["id"] == LAST]
        r["counts"]["pass"] = 0

    assert verify(edited(change), MANIFEST).profiles[0].verdict == "fails"


@pytest.mark.parametrize("kind", ["emulated", "interpreter"])
def test_what_did_not_run_on_hardware_says_so(kind: str) -> None:
    report = edited(executed(kind))
    said = text.verification(verify(report, MANIFEST), report.label)
    assert f"[{kind}]" in said
    assert f"NOT HARDWARE: execution is {kind}" in said


# --- arrays beside a report -------------------------------------------------------------------------------------------


def arrays(folder: Path) -> Report:
    stored = planes([[[1, 2]], [[3, 4]]], [[0.5], [0.25]], **{"key.outliers": np.ones((2, 1, 1), np.float32)})
    return written(folder, "one", {FIRST: [(stored, ["slot 0", "slot 1"])]})


def test_arrays_that_are_those_of_the_report_are_sound(tmp_path: Path) -> None:
    report = arrays(tmp_path)
    assert set(report.cases[FIRST]["digests"]) == {"inputs", "codes", "scales", "outliers"}
    found = verify(report, MANIFEST)
    assert found.findings == ()
    assert "arrays of 1 cases lie in one.safetensors" in found.notes


def test_altered_or_lost_arrays_are_found(tmp_path: Path) -> None:
    report = arrays(tmp_path)
    file = tmp_path / "one.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "is not what the report has the digest of" in verify(report, MANIFEST).findings[0]
    file.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes, the report says {len(whole)}" in verify(report, MANIFEST).findings[0]
    file.unlink()
    assert "cannot be read" in verify(report, MANIFEST).findings[0]


def test_arrays_whose_case_has_another_digest_are_found(tmp_path: Path) -> None:
    made = copy.deepcopy(dict(arrays(tmp_path).record))
    digests_of(FIRST, codes="d" * 64)(made)
    path = tmp_path / "one.json"
    path.write_text(json.dumps(sealed(made)), encoding="utf-8")
    assert verify(read(path), MANIFEST).findings == (f"1 case has arrays with another digest: {FIRST}",)


def test_a_report_cannot_name_arrays_elsewhere(tmp_path: Path) -> None:
    made = copy.deepcopy(dict(arrays(tmp_path).record))
    made["tensors"]["file"] = "../one.safetensors"
    (tmp_path / "one.json").write_text(json.dumps(sealed(made)), encoding="utf-8")
    assert "they must lie beside it" in verify(read(tmp_path / "one.json"), MANIFEST).findings[0]


def test_arrays_that_are_no_safetensors_file_are_found(tmp_path: Path) -> None:
    import hashlib

    made = copy.deepcopy(dict(arrays(tmp_path).record))
    hostile = (2**62).to_bytes(8, "little") + b"{}"
    (tmp_path / "one.safetensors").write_bytes(hostile)
    made["tensors"] |= {"bytes": len(hostile), "sha256": hashlib.sha256(hostile).hexdigest()}
    (tmp_path / "one.json").write_text(json.dumps(sealed(made)), encoding="utf-8")
    assert "is no intact safetensors file" in verify(read(tmp_path / "one.json"), MANIFEST).findings[0]


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_schema_is_valid_json_schema_and_agrees_with_the_validator() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(schema())
    assert not list(validator.iter_errors(record()))
    values = [None, True, 0, -1, 1.0, 2.5, "", "x", [], {}, "f" * 64, [None], {"x": {}}]

    def agree(made: Any) -> None:
        assert bool(list(validator.iter_errors(made))) == bool(schema_faults(made)), made

    for change, _ in FAULTS.values():
        agree(edited(change).record)
    for value in values:  # every field once as everything
        agree(value)
        for outer, inner in record().items():
            agree({**record(), outer: value})
            for key in inner if isinstance(inner, dict) else ():
                agree({**record(), outer: {**inner, key: value}})
        for key in (*case(FIRST), *case(LAST), "waiver"):
            agree({**record(), "cases": [{**case(FIRST), key: value}]})


def test_the_schema_uses_only_what_the_validator_knows() -> None:
    known = {"$schema", "$id", "title", "description", "type", "enum", "anyOf", "minimum", "pattern", "required",
             "properties", "additionalProperties", "items"}  # fmt: skip

    def check(rule: dict[str, Any]) -> None:
        assert set(rule) <= known
        for inner in (*rule.get("properties", {}).values(), *rule.get("anyOf", ())):
            check(inner)
        for name in ("items", "additionalProperties"):
            if name in rule:
                check(rule[name])

    check(schema())


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-report", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    assert main(["verify-report"]) == 1


COMMITTED = sorted((ROOT / "docs" / "reports").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.name)
def test_every_committed_report_is_sound_and_listed_as_what_it_is(path: Path) -> None:
    report = read(path)
    assert verify(report, Manifest.installed()).findings == ()
    page = (ROOT / "docs" / "reports" / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| [{path.name}]({path.name})")]
    counts = report.record["counts"]
    assert row.endswith(f"| {counts['pass']} | {counts['fail'] + counts['error']} | {counts['unsupported']} |")
    assert f"| {'hardware' if report.hardware else f'**{report.execution}**'}" in row


def test_the_committed_reports_agree_where_both_ran() -> None:
    found = compare([read(path) for path in COMMITTED], Manifest.installed())
    assert found.agreement
    assert "NOT OF HARDWARE" in found.verdict
    assert found.pairs[0].total.shared >= 234


def test_a_report_of_the_installed_manifest_is_verified_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvport_conformance.cases import select
    from kvport_conformance.profiles import profiles_of

    made = record()
    made["cases"] = [
        {**case("/".join(c.id.split("/")[:4])), "id": c.id, "tier": c.tier, "profiles": list(profiles_of(c))}
        for c in sorted(select(), key=lambda c: c.id)
    ]
    made["counts"]["pass"] = len(made["cases"])
    path = tmp_path / "one.json"
    path.write_text(json.dumps(sealed(made)), encoding="utf-8")
    assert main(["verify-report", str(path)]) == 0
    assert "a sound report" in capsys.readouterr().out
    assert set(IDS.values())  # the small manifest is another one
