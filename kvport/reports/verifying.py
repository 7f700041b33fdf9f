"""Judging one report: is it whole, unaltered, free of contradictions, and what does it say about each profile?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvport.reports.reading import Report, ReportError, digest, schema_faults
from kvport.reports.tensors import beside, stored_digests

#: Outcomes in the order in which a report counts them.
OUTCOMES = ("pass", "fail", "unsupported", "waived", "error")


@dataclass(frozen=True)
class Manifest:
    """Every case of the installed suite: id -> tier; and how many cases each profile has in each tier.

    ``one_code_share``: of at least ``one_code_pool`` codes of a format, the largest share that may differ.
    """

    suite_version: int
    tiers: Mapping[str, str]
    profiles: Mapping[str, Mapping[str, int]]
    one_code_share: float = 0.005
    one_code_pool: int = 2**20

    @classmethod
    def installed(cls) -> Manifest:
        """The manifest of the installed suite. Reads its data file and imports nothing of it."""
        try:
            text = resources.files("kvport_conformance").joinpath("manifest.json").read_text(encoding="utf-8")
        except (ModuleNotFoundError, FileNotFoundError) as error:
            raise ReportError(f"the conformance suite's manifest is not installed: {error}") from error
        record = json.loads(text)
        tiers = {
            f"{check}/{format_text}/{rest}": tier
            for tier, checks in record["cases"].items()
            for check, formats in checks.items()
            for format_text, ids in formats.items()
            for rest in ids.split()
        }
        profiles = {name: profile["cases"] for name, profile in record["profiles"].items()}
        pooled = record["one_code"]
        return cls(record["suite_version"], tiers, profiles, pooled["share"], pooled["pool"])

    def expected(self, report: Report) -> set[str]:
        """The cases that a report must have: those of its tier, and of its formats and chapters where it names any."""
        run = report.record["run"]
        tiers = ("quick",) if report.tier == "quick" else ("quick", "full")
        chapters = {word.strip() for word in (run["chapter"] or "").split(",") if word.strip()}
        formats = set(run["formats"] or ())
        return {
            identity
            for identity, tier in self.tiers.items()
            if tier in tiers
            and (not chapters or identity.split("/")[0] in chapters)
            and (not formats or identity.split("/")[2] in formats)
        }


@dataclass(frozen=True)
class ProfileVerdict:
    """What a report says about one profile: ``passed`` of ``total`` cases of its tier."""

    name: str
    passed: int
    failed: int
    unsupported: int
    total: int
    waived: int = 0

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0

    @property
    def verdict(self) -> str:
        """conforms (nothing failed), with everything, in part or but for waived cases; fails; or nothing was run.

        A waived case has failed: it is no part of the share, and where nothing passed beside it the profile fails.
        """
        if self.failed or (self.waived and not self.passed):
            return "fails"
        if not self.passed:
            return "not supported" if self.unsupported else "not run"
        if self.passed == self.total:
            return "conforms"
        return "conforms but for waivers" if self.passed + self.waived == self.total else "conforms in part"

    @property
    def met(self) -> bool:
        """Every case passed, or is waived as a known failure."""
        return self.verdict in ("conforms", "conforms but for waivers")


@dataclass(frozen=True)
class Verification:
    """``findings`` are what is wrong with the report itself, in words; ``notes`` what a reader should know."""

    findings: tuple[str, ...]
    notes: tuple[str, ...]
    profiles: tuple[ProfileVerdict, ...]

    @property
    def sound(self) -> bool:
        """The report is whole and unaltered (which says nothing about how the backend did)."""
        return not self.findings


def verify(report: Report, manifest: Manifest) -> Verification:
    """Judge a report against the manifest of the suite that it names."""
    record = report.record
    findings = [f"schema: {fault}" for fault in schema_faults(record)]
    if findings:
        return Verification(tuple(findings), (), ())
    if record["digest"] != digest(record):
        findings.append("the seal does not match: the report was edited or damaged after it was written")
    if record["suite_version"] != manifest.suite_version:
        findings.append(
            f"the report is of suite version {record['suite_version']}, installed is {manifest.suite_version}: "
            "verify it with the suite that wrote it"
        )
    ids = [case["id"] for case in record["cases"]]
    findings += _listed("appears twice", "appear twice", [i for i, count in Counter(ids).items() if count > 1])
    counted = Counter(case["outcome"] for case in record["cases"])
    if wrong := [
        f"{outcome} {record['counts'][outcome]}, there are {counted[outcome]}"
        for outcome in OUTCOMES
        if record["counts"][outcome] != counted[outcome]
    ]:
        findings.append(f"the counts do not agree with the cases: {'; '.join(wrong)}")
    expected = manifest.expected(report)
    missing = sorted(expected - set(ids))
    narrowed = f" (the run was narrowed by -k {record['run']['keyword']!r})" if record["run"]["keyword"] else ""
    findings += [f"{line}{narrowed}" for line in _listed("is missing", "are missing", missing)]
    unknown = sorted(set(ids) - set(manifest.tiers))
    findings += _listed("is not in the manifest", "are not in the manifest", unknown)
    unasked = sorted((set(ids) & set(manifest.tiers)) - expected)
    findings += _listed("was not asked for", "were not asked for", unasked)
    findings += _contradictions(report, manifest)
    findings += _memberships(report, manifest, whole=not missing and not record["run"]["formats"])
    findings += _pooled(report, manifest)
    findings += _arrays(report)
    return Verification(tuple(findings), tuple(_notes(report)), profile_verdicts(report, manifest))


def profile_verdicts(report: Report, manifest: Manifest) -> tuple[ProfileVerdict, ...]:
    """One verdict a profile; cases that were not run count as not passed, cases of no manifest not at all."""
    found = []
    tiers = ("quick",) if report.tier == "quick" else ("quick", "full")
    known = [case for identity, case in report.cases.items() if manifest.tiers.get(identity) in tiers]
    for name, sizes in manifest.profiles.items():
        outcomes = Counter(case["outcome"] for case in known if name in case.get("profiles", ()))
        failed = outcomes["fail"] + outcomes["error"]
        total = sizes["quick"] if report.tier == "quick" else sizes["quick"] + sizes["full"]
        found.append(ProfileVerdict(name, outcomes["pass"], failed, outcomes["unsupported"], total, outcomes["waived"]))
    return tuple(found)


def _contradictions(report: Report, manifest: Manifest) -> list[str]:
    """Cases whose fields say something else than their id or their outcome."""
    found = []
    for identity, case in report.cases.items():
        wrong = _mismatch(identity, case)
        if wrong:
            pass
        elif identity in manifest.tiers and case.get("tier") != manifest.tiers[identity]:
            wrong = f"says tier {case.get('tier')!r}, the manifest {manifest.tiers[identity]!r}"
        elif case["outcome"] != "pass" and not case["reason"]:
            wrong = f"is {case['outcome']} without a reason"
        elif case["outcome"] == "pass":
            wrong = _contradiction(case)
        elif case["outcome"] == "waived":
            wrong = _unwaived(case, str(report.record["created"]))
        if wrong:
            found.append(f"{identity} {wrong}")
    return found


def _mismatch(identity: str, case: Mapping[str, Any]) -> str:
    """Which field says something else than the id, ``chapter/check/format/geometry[/option=value]``."""
    for name, part in zip(("chapter", "check", "format", "geometry"), identity.split("/"), strict=False):
        if case.get(name, part) != part:
            return f"says {name} {case[name]!r}"
    return ""


def _memberships(report: Report, manifest: Manifest, *, whole: bool) -> list[str]:
    """Profiles that have more cases than there are, or, in a ``whole`` run of a tier, fewer."""
    tiers = ("quick",) if report.tier == "quick" else ("quick", "full")
    counted = Counter(
        name
        for identity, case in report.cases.items()
        if manifest.tiers.get(identity) in tiers
        for name in case.get("profiles", ())
    )
    found = [f"cases name a profile {name!r}, which there is not" for name in counted if name not in manifest.profiles]
    whole = whole and not report.record["run"]["chapter"]
    for name, sizes in manifest.profiles.items():
        size = sum(sizes[tier] for tier in tiers)
        if counted[name] > size or (whole and counted[name] < size):
            found.append(f"{counted[name]} cases say that they are of profile {name}, it has {size}")
    return found


def _contradiction(case: Mapping[str, Any]) -> str:
    for name in ("output_ratio", "lse_ratio"):
        value = case.get(name, 0.0)
        if isinstance(value, str) or value > 1:
            return f"passes with {name} {value}"
    differing = sum(int(case[name]["differing"]) for name in ("codes", "scales") if name in case)
    if differing and case.get("exactness") == "bit-exact":
        return f"says bit-exact with {differing} codes or scales that differ"
    return ""


def _unwaived(case: Mapping[str, Any], created: str) -> str:
    """Why a case that says it is waived is not; ``created`` is the report's time in ISO form."""
    waiver = case.get("waiver")
    if waiver is None:
        return "is waived without a waiver"
    if not waiver["reason"]:
        return "is waived without a reason"
    # Both are ISO dates, which sort as text.
    if waiver["expires"] < created[: len("2026-01-01")]:
        return f"is waived by what expired on {waiver['expires']}, before the run"
    return ""


def _arrays(report: Report) -> list[str]:
    """What is wrong with the arrays beside the report: missing, of another run, or not what the cases' digests say."""
    if not report.path:
        return []
    from safetensors import SafetensorError

    try:
        arrays = beside(report)
        if arrays is None:
            return []
        wrong = [
            identity
            for identity in arrays.names
            if identity not in report.cases
            or any(
                report.cases[identity].get("digests", {}).get(part) != value
                for part, value in stored_digests(arrays.looks(identity)).items()
            )
        ]
    except ReportError as error:
        return [str(error)]
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        return [f"the arrays beside the report cannot be read: {error}"]
    return _listed("has arrays with another digest", "have arrays with another digest", wrong)


def _pooled(report: Report, manifest: Manifest) -> list[str]:
    """The one-code class allows a share of differing codes, pooled by format, that no single case can judge."""
    compared: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    for case in report.cases.values():
        if "codes" in case:
            compared[case.get("format", "")] += case["codes"]["compared"]
            differing[case.get("format", "")] += case["codes"]["differing"]
    return [
        f"{name}: {differing[name]} of {count} codes differ, more than the one-code class's "
        f"{manifest.one_code_share:.1%}"
        for name, count in compared.items()
        if count >= manifest.one_code_pool and differing[name] > manifest.one_code_share * count
    ]


def _notes(report: Report) -> list[str]:
    run = report.record["run"]
    found = []
    if report.execution != "hardware":
        found.append(f"NOT HARDWARE: execution is {report.execution}, these results are not those of a chip")
    if run["formats"] or run["chapter"]:
        found.append(
            "a partial run (formats or chapters were chosen): profiles are judged as if the rest had not passed"
        )
    if waived := [case for case in report.cases.values() if case["outcome"] == "waived"]:
        known = Counter(
            f"until {w['expires']}: {w['reason']}" for case in waived if (w := case.get("waiver")) is not None
        )
        listed = "; ".join(f"{count} x {why}" for why, count in known.most_common())
        found.append(f"{len(waived)} cases fail and are waived, which is no pass ({listed})")
    if arrays := report.record.get("tensors"):
        left = f", {arrays['left_out']} did not fit" if arrays["left_out"] else ""
        found.append(f"arrays of {arrays['cases']} cases lie in {arrays['file']}{left}")
    inherited = [name for name, how in report.backend["operations"].items() if how == "inherited"]
    if inherited:
        found.append(f"inherited, not the backend's own: {', '.join(inherited)}")
    return found


def _listed(one: str, several: str, ids: list[str]) -> list[str]:
    if not ids:
        return []
    count = f"1 case {one}" if len(ids) == 1 else f"{len(ids)} cases {several}"
    return [f"{count}: {', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''}"]
