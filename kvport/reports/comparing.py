"""Comparing reports: backends that never shared a machine, joined case by case.

Two backends agree on a case where both passed it, and where what they stored is the same: equal digests, or a
difference that the one-code class allows (each was judged against the definition by itself). Only cases that both ran
and both support are shared; how many those are, of all that the run could have had, is printed beside every figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from kvport.reports.reading import Report, ReportError
from kvport.reports.verifying import Manifest, ProfileVerdict, profile_verdicts

Relation = Literal["same bits", "within class", "within bound", "differ"]

#: Worst cases listed for each report.
WORST = 5


@dataclass(frozen=True)
class Cell:
    """Two backends in one chapter: of ``possible`` cases ``shared`` were run and supported by both."""

    possible: int
    shared: int
    relations: Mapping[Relation, int]

    @property
    def agreed(self) -> int:
        return self.shared - self.relations.get("differ", 0)

    @property
    def share(self) -> float | None:
        """Agreed of shared; None where nothing is shared."""
        return self.agreed / self.shared if self.shared else None


@dataclass(frozen=True)
class Pair:
    """Two backends: their cells by chapter, and the cases on which they differ with the reason in words."""

    first: int
    second: int
    cells: Mapping[str, Cell]
    differences: tuple[tuple[str, str], ...]
    hardware: bool

    @property
    def total(self) -> Cell:
        relations: Counter[Relation] = Counter()
        for cell in self.cells.values():
            relations.update(cell.relations)
        return Cell(
            sum(cell.possible for cell in self.cells.values()),
            sum(cell.shared for cell in self.cells.values()),
            dict(relations),
        )

    @property
    def kind(self) -> str:
        """What an agreement of these two may be called."""
        return "hardware" if self.hardware else "not a hardware"


@dataclass(frozen=True)
class Column:
    """One report in a comparison."""

    report: Report
    label: str
    counts: Mapping[str, int]
    profiles: tuple[ProfileVerdict, ...]
    worst: tuple[tuple[str, str, float], ...]  # (figure, case id, observed / bound)
    failed: tuple[tuple[str, str], ...]  # (case id, reason)
    waived: tuple[tuple[str, str], ...]  # (case id, waiver): failures that are known
    lacks: tuple[tuple[str, int], ...]  # (reason, cases)
    missing: int  # cases of the tier that were not run


@dataclass(frozen=True)
class Comparison:
    """Everything that the renderings show."""

    columns: tuple[Column, ...]
    pairs: tuple[Pair, ...]
    chapters: tuple[str, ...]
    tier: str
    seed: int
    suite_version: int

    @property
    def agreement(self) -> bool:
        """No two backends differ on a case that they share, and none failed a case."""
        return not any(pair.differences for pair in self.pairs) and not any(column.failed for column in self.columns)

    @property
    def verdict(self) -> str:
        """One sentence for people who read no tables."""
        failed = [column.label for column in self.columns if column.failed]
        differing = [p for p in self.pairs if p.differences]
        if failed:
            return f"NO AGREEMENT: {', '.join(failed)} failed cases of the suite"
        if differing:
            names = "; ".join(f"{self.columns[p.first].label} and {self.columns[p.second].label}" for p in differing)
            return f"NO AGREEMENT: {names} differ on cases that both pass"
        if self.pairs and not any(pair.total.shared for pair in self.pairs):
            return "NO VERDICT: no two reports share a case"
        known = [f"{len(column.waived)} of {column.label}" for column in self.columns if column.waived]
        but = f", BUT FOR WAIVED FAILURES ({', '.join(known)})" if known else ""
        soft = [column.label for column in self.columns if column.report.execution != "hardware"]
        if soft:
            return f"AGREEMENT{but}, BUT NOT OF HARDWARE: {', '.join(soft)} did not run on a chip of its own"
        return f"AGREEMENT{but}"


def compare(reports: Sequence[Report], manifest: Manifest) -> Comparison:
    """Join reports case by case. Raises :class:`ReportError` for reports that cannot be compared at all."""
    if len(reports) < 2:
        raise ReportError(f"a comparison needs at least two reports, got {len(reports)}")
    for what, values in (
        ("suite versions", [r.record["suite_version"] for r in reports]),
        ("seeds", [r.record["run"]["seed"] for r in reports]),
    ):
        if len(set(values)) > 1:
            listed = ", ".join(f"{r.path or r.label}: {v}" for r, v in zip(reports, values, strict=True))
            raise ReportError(f"reports of different {what} hold different numbers and do not compare: {listed}")
    if reports[0].record["suite_version"] != manifest.suite_version:
        raise ReportError(
            f"the reports are of suite version {reports[0].record['suite_version']}, installed is "
            f"{manifest.suite_version}: compare them with the suite that wrote them"
        )
    # Of a quick and a full run the quick cases are what both can have.
    tier = "full" if all(report.tier == "full" for report in reports) else "quick"
    possible = {i for i, t in manifest.tiers.items() if t == "quick" or tier == "full"}
    chapters = tuple(dict.fromkeys(identity.partition("/")[0] for identity in manifest.tiers))
    labels = _labels(reports)
    columns = tuple(_column(report, label, manifest, possible) for report, label in zip(reports, labels, strict=True))
    pairs = tuple(_pair(a, b, reports, chapters, possible) for a, b in combinations(range(len(reports)), 2))
    run = reports[0].record["run"]
    return Comparison(columns, pairs, chapters, tier, run["seed"], manifest.suite_version)


def _labels(reports: Sequence[Report]) -> list[str]:
    """Labels that tell the reports apart: by backend and device, then by machine, then by number."""
    labels = [report.label for report in reports]
    for number, report in enumerate(reports):
        if [r.label for r in reports].count(report.label) > 1:
            labels[number] = f"{report.label} #{number + 1}"
    return labels


def _column(report: Report, label: str, manifest: Manifest, possible: set[str]) -> Column:
    cases = report.cases.values()
    ratios = [
        (figure.removesuffix("_ratio"), case["id"], float(case[figure]))
        for case in cases
        for figure in ("output_ratio", "lse_ratio")
        if figure in case
    ]
    lacks = Counter(case["reason"] for case in cases if case["outcome"] == "unsupported")
    return Column(
        report,
        label,
        dict(report.record["counts"]),
        profile_verdicts(report, manifest),
        tuple(sorted(ratios, key=lambda entry: -entry[2])[:WORST]),
        tuple((case["id"], case["reason"]) for case in cases if case["outcome"] in ("fail", "error")),
        tuple((case["id"], _waiver(case)) for case in cases if case["outcome"] == "waived"),
        tuple(lacks.most_common()),
        len(possible - set(report.cases)),
    )


def _waiver(case: Mapping[str, Any]) -> str:
    waiver = case.get("waiver", {})
    return f"until {waiver.get('expires', '?')}: {waiver.get('reason', '?')}; fails: {case['reason']}"


def _pair(a: int, b: int, reports: Sequence[Report], chapters: Sequence[str], possible: set[str]) -> Pair:
    first, second = reports[a].cases, reports[b].cases
    relations: dict[str, Counter[Relation]] = {chapter: Counter() for chapter in chapters}
    differences = []
    for identity in sorted(possible & set(first) & set(second)):
        found = _relation(first[identity], second[identity])
        if found is None:
            continue
        relation, why = found
        relations[identity.partition("/")[0]][relation] += 1
        if relation == "differ":
            differences.append((identity, why))
    sizes = Counter(identity.partition("/")[0] for identity in possible)
    cells = {
        chapter: Cell(sizes[chapter], sum(relations[chapter].values()), dict(relations[chapter]))
        for chapter in chapters
    }
    hardware = reports[a].execution == reports[b].execution == "hardware"
    return Pair(a, b, cells, tuple(differences), hardware)


def _relation(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Relation, str] | None:
    """How two results of one case relate, None where it is not shared."""
    outcomes = first["outcome"], second["outcome"]
    if "unsupported" in outcomes or "waived" in outcomes:  # a waived case failed: it agrees with nothing
        return None
    if outcomes != ("pass", "pass"):
        return "differ", f"{outcomes[0]} and {outcomes[1]}: {first['reason'] or second['reason']}"
    one, two = first.get("digests"), second.get("digests")
    if one is None or two is None:
        return "within bound", ""
    if one == two:
        return "same bits", ""
    if "one-code" in (first.get("exactness"), second.get("exactness")):
        return "within class", ""
    parts = [name for name in ("codes", "scales") if one.get(name) != two.get(name)]
    return "differ", f"both pass, and their stored {' and '.join(parts)} are not the same"
