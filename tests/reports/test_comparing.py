"""Backends that never shared a machine, joined case by case: what agrees, differs (and where), is not shared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_support import (
    FIRST,
    LAST,
    MANIFEST,
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
from kvport.reports import Report, ReportError, beside, compare, text


def both(*changes: Any) -> Any:
    """A sound report and one with these changes."""
    return compare([Report(record("one")), edited(*changes, name="two")], MANIFEST)


def test_backends_that_stored_the_same_agree() -> None:
    found = both()
    assert found.verdict == "AGREEMENT OF HARDWARE"
    [pair] = found.pairs
    assert pair.total.agreed == pair.total.shared == pair.total.possible == 3
    assert dict(pair.chapters["append"].relations) == {"same bits": 2}
    assert dict(pair.chapters["pages"].relations) == {"within bound": 1}
    assert dict(pair.profiles["core"].relations) == {"same bits": 1, "within bound": 1}
    assert pair.profiles["core"].possible == 2


def test_different_bits_that_both_pass_are_a_difference_unless_their_class_allows_it() -> None:
    other = digests_of(FIRST, codes="d" * 64)
    found = both(other)
    assert not found.agreement
    [difference] = found.pairs[0].differences
    assert (difference.case, difference.allowed) == (FIRST, False)
    assert difference.why == "both pass, and their stored codes are not the same"
    allowed = both(other, of_case(FIRST, exactness="one-code"))
    assert allowed.agreement
    assert allowed.pairs[0].differences[0].allowed


@pytest.mark.parametrize("part", ["codes", "scales", "outliers"])
def test_each_part_that_differs_is_named(part: str) -> None:
    [difference] = both(digests_of(FIRST, **{part: "d" * 64})).pairs[0].differences
    assert f"stored {part} are not" in difference.why


def test_cases_that_one_declines_are_not_shared_and_say_why() -> None:
    found = both(of_case(FIRST, outcome="unsupported", reason="no int8 here"), counts(unsupported=1))
    assert found.agreement
    assert (found.pairs[0].chapters["append"].shared, found.pairs[0].chapters["append"].possible) == (1, 2)
    assert found.columns[1].lacks == (("no int8 here", 1),)
    assert "no int8 here" in text.comparison(found)


def test_results_on_different_inputs_are_never_compared_as_if_equal() -> None:
    """The same codes, digest by digest, of other numbers: that is no agreement, and no difference either."""
    found = both(digests_of(FIRST, inputs="2" * 64))
    [pair] = found.pairs
    assert pair.other_inputs == (FIRST,)
    assert (pair.total.shared, pair.total.agreed) == (2, 2)
    assert dict(pair.chapters["append"].relations) == {"same bits": 1, "other inputs": 1}
    assert not found.agreement
    assert found.verdict.startswith("NO VERDICT")
    assert "different inputs in 1 cases" in found.verdict
    for markdown in (False, True):
        said = text.comparison(found, markdown=markdown)
        assert "1 other inputs" in said
        assert "Different inputs" in said


def test_other_inputs_hide_no_difference_elsewhere() -> None:
    found = both(digests_of(FIRST, inputs="2" * 64), digests_of("append/rows/int4/small", codes="d" * 64))
    assert found.verdict.startswith("NO AGREEMENT")


def test_a_comparison_names_what_is_waived_and_shares_none_of_it() -> None:
    found = compare([edited(waived()), Report(record("two"))], MANIFEST)
    assert found.verdict == "AGREEMENT OF HARDWARE, BUT FOR WAIVED FAILURES (1 of one@chip:0)"
    assert found.pairs[0].total.shared == 2


def test_a_failure_is_no_agreement() -> None:
    found = both(of_case(LAST, outcome="fail", reason="off"), counts(fail=1))
    assert found.verdict == "NO AGREEMENT: two@chip:0 (1) failed cases of the suite"
    assert found.columns[1].failed == ((LAST, "off"),)


def test_reports_that_share_no_case_have_no_verdict() -> None:
    found = both(lambda r: [c.update(outcome="unsupported", reason="no") for c in r["cases"]], counts(unsupported=3))
    assert found.verdict == "NO VERDICT: one@chip:0 and two@chip:0 share no case"
    assert not found.agreement


def test_every_two_of_three_are_compared() -> None:
    third = edited(digests_of(FIRST, codes="d" * 64), name="three")
    found = compare([Report(record("one")), Report(record("two")), third], MANIFEST)
    assert [(p.first, p.second, p.agrees) for p in found.pairs] == [(0, 1, True), (0, 2, False), (1, 2, False)]
    assert "one@chip:0 and three@chip:0; two@chip:0 and three@chip:0 differ" in found.verdict


def test_the_verdict_names_the_pairs_that_are_of_hardware() -> None:
    soft = edited(executed("emulated"), name="three")
    found = compare([Report(record("one")), Report(record("two")), soft], MANIFEST)
    assert found.agreement
    assert found.verdict == (
        "AGREEMENT, BUT NOT OF HARDWARE: three@chip:0 [emulated] did not run on a chip of its own; "
        "of hardware are only one@chip:0 and two@chip:0"
    )
    assert [p.kind for p in found.pairs] == ["hardware", "NOT hardware", "NOT hardware"]


def test_reports_that_hold_other_numbers_do_not_compare() -> None:
    with pytest.raises(ReportError, match="different seeds"):
        both(lambda r: r["run"].update(seed=4))
    with pytest.raises(ReportError, match="at least two"):
        compare([Report(record())], MANIFEST)
    with pytest.raises(ReportError, match="given twice"):
        compare([Report(record()), Report(record())], MANIFEST)


def test_an_edited_report_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        path.write_text(json.dumps(record(path.stem)), encoding="utf-8")
    paths[1].write_text(json.dumps(edited(executed("hardware"), of_case(FIRST, seconds=9), reseal=False).record))
    assert main(["compare", *map(str, paths)]) == 1
    assert "the seal does not match" in capsys.readouterr().err


# --- the first code that differs --------------------------------------------------------------------------------------

INT4 = "append/rows/int4/small"


def differing(folder: Path, identity: str, first: Any, second: Any) -> str:
    reports = [written(folder, name, {identity: looks}) for name, looks in (("one", first), ("two", second))]
    [pair] = compare(reports, MANIFEST, [beside(report) for report in reports]).pairs
    [found] = [d for d in pair.differences if d.case == identity]
    return found.where


def test_the_first_differing_code_is_found(tmp_path: Path) -> None:
    """Look, row in words, head and channel, both values, and how many differ."""
    codes = np.arange(12, dtype=np.int8).reshape(3, 2, 2)
    other = codes.copy()
    other[1, 1, 0], other[2, 0, 1] = -7, 99
    places = ["layer 0, page 4, slot 0", "layer 0, page 4, slot 1", "layer 0, page 9, slot 0"]
    same = (planes(codes, [[1.5, 2.5]] * 3), places)
    found = differing(tmp_path, FIRST, [same, same], [same, (planes(other, [[1.5, 2.5]] * 3), places)])
    assert found == (
        "first differing codes: look 1, layer 0, page 4, slot 1, key.codes, head 1, channel 0: "
        "6 (0x6) against -7 (0xf9); 2 of 12 there differ"
    )


def test_packed_codes_are_counted_in_channels(tmp_path: Path) -> None:
    codes = np.array([[[0x21, 0x43]]], np.uint8)
    other = np.array([[[0x21, 0x53]]], np.uint8)
    found = differing(tmp_path, INT4, [(planes(codes, [[1.5]]), ["a"])], [(planes(other, [[1.5]]), ["a"])])
    assert "key.codes, head 0, channel 3: 4 (0x4) against 5 (0x5); 1 of 4 there differ" in found


def test_a_differing_scale_shows_its_bits(tmp_path: Path) -> None:
    codes = np.zeros((1, 1, 2), np.int8)
    up = np.nextafter(np.float32(1.5), np.float32(2))
    found = differing(tmp_path, FIRST, [(planes(codes, [[1.5]]), ["a"])], [(planes(codes, [[up]]), ["a"])])
    assert found.startswith("first differing scales: look 0, a, key.scale, head 0: 1.5 (0x3fc00000) against 1.50000")
    assert "(0x3fc00001)" in found


def test_without_arrays_it_is_said_how_to_get_them(tmp_path: Path) -> None:
    [difference] = both(digests_of(FIRST, codes="d" * 64)).pairs[0].differences
    assert difference.where == "run both with --tensors=256 --chapter=append --formats=int8"


def test_the_largest_difference_of_outputs_is_found(tmp_path: Path) -> None:
    def answers(value: float) -> Any:
        output = np.array([[[value, 2.0]]], np.float32)
        return [({"output": output, "lse": np.zeros((1, 1), np.float32)}, ["row"])]

    reports = [written(tmp_path, name, {LAST: answers(v)}) for name, v in (("one", 1.0), ("two", 1.5))]
    found = compare(reports, MANIFEST, [beside(report) for report in reports])
    assert found.agreement
    assert found.pairs[0].answers == (LAST, 0.25)
    said = text.comparison(found)
    assert re.search(r"1 x 2 +0.25 +pages/every_length/int8/small", said)
    assert "Differences" not in said


def test_arrays_of_another_run_are_refused(tmp_path: Path) -> None:
    looks = {FIRST: [(planes(np.zeros((1, 1, 2), np.int8), [[1.5]]), ["a"])]}
    one = written(tmp_path, "one", looks)
    (tmp_path / "one.safetensors").write_bytes(b"x" * one.record["tensors"]["bytes"])
    with pytest.raises(ReportError, match="altered, or is of another run"):
        beside(one)
