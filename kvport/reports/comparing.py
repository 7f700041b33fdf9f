"""Comparing reports: backends that never shared a machine, joined case by case.

Two backends agree on a case where both were given the same inputs, both passed it, and where what they stored is the
same: equal digests, or a difference that the one-code class allows (each was judged against the definition by itself).
Only cases that both ran and both support are shared; how many those are, of all that the suite has, is printed beside
every figure. With the arrays of both (``--tensors``), a difference is followed to the first code that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

from kvport.digests import PARTS
from kvport.errors import KVPortError
from kvport.reports.reading import Report, ReportError, shown
from kvport.reports.tensors import Tensors, first_difference, largest_answer_difference
from kvport.reports.verifying import Manifest, ProfileVerdict, profile_verdicts

Relation = Literal["same bits", "within class", "within bound", "differ", "other inputs"]

#: Worst cases listed for each report.
WORST = 5
#: Cases of a pair whose arrays are followed to the first differing code.
FOLLOWED = 50


@dataclass(frozen=True)
class Cell:
    """Two backends in one chapter or profile: of ``possible`` cases, how those that both support relate."""

    possible: int
    relations: Mapping[Relation, int]

    @property
    def shared(self) -> int:
        """Cases that both ran and support, with the same inputs."""
        return sum(self.relations.values()) - self.relations.get("other inputs", 0)

    @property
    def agreed(self) -> int:
        return self.shared - self.relations.get("differ", 0)

    @property
    def share(self) -> float | None:
        """Agreed of shared; None where nothing is shared."""
        return self.agreed / self.shared if self.shared else None


@dataclass(frozen=True)
class CaseDifference:
    """A case on which two backends do not give the same: why, and where their arrays first differ, in words.

    ``allowed``: by the one-code class, so that the two agree all the same.
    """

    case: str
    why: str
    where: str
    allowed: bool


@dataclass(frozen=True, eq=False)
class Pair:
    """Two backends: their cells by chapter and by profile, and what differs.

    ``answers``: the case whose outputs differ most, and by how much of the largest output; None without arrays.
    """

    first: int
    second: int
    chapters: Mapping[str, Cell]
    profiles: Mapping[str, Cell]
    differences: tuple[CaseDifference, ...]
    other_inputs: tuple[str, ...]
    answers: tuple[str, float] | None
    hardware: bool

    @cached_property
    def total(self) -> Cell:
        relations: Counter[Relation] = Counter()
        for cell in self.chapters.values():
            relations.update(cell.relations)
        return Cell(sum(cell.possible for cell in self.chapters.values()), dict(relations))

    @property
    def agrees(self) -> bool:
        return bool(self.total.shared) and not self.other_inputs and not self.total.relations.get("differ", 0)

    @property
    def kind(self) -> str:
        """What an agreement of these two may be called."""
        return "hardware" if self.hardware else "NOT hardware"

    @property
    def name(self) -> str:
        """The pair by the numbers of its reports, with the warning that goes wherever it does."""
        return f"{self.first + 1} x {self.second + 1}" + ("" if self.hardware else " (NOT hardware)")


@dataclass(frozen=True)
class Column:
    """One report in a comparison. ``number`` counts from 1, in the order in which reports were given."""

    report: Report
    number: int
    label: str
    counts: Mapping[str, int]
    profiles: tuple[ProfileVerdict, ...]
    worst: tuple[tuple[str, str, float], ...]  # (figure, case id, observed / bound)
    failed: tuple[tuple[str, str], ...]  # (case id, reason)
    waived: tuple[tuple[str, str], ...]  # (case id, waiver): failures that are known
    lacks: tuple[tuple[str, int], ...]  # (reason, cases)
    missing: int  # cases of the tier that were not run
    arrays: bool

    @property
    def name(self) -> str:
        """Number and label, as every rendering names it."""
        return f"{self.number} {shown(self.label)}"

    @property
    def short(self) -> str:
        """The number, with the execution kind where it is not hardware."""
        return str(self.number) if self.report.hardware else f"{self.number} [{self.report.execution}]"


@dataclass(frozen=True)
class Comparison:
    """Everything that the renderings show."""

    columns: tuple[Column, ...]
    pairs: tuple[Pair, ...]
    tier: str
    seed: int
    suite_version: int

    @property
    def agreement(self) -> bool:
        """Every two backends share cases, differ on none, were given the same inputs, and none failed a case."""
        return all(pair.agrees for pair in self.pairs) and not any(column.failed for column in self.columns)

    @property
    def hardware(self) -> bool:
        return all(pair.hardware for pair in self.pairs)

    @property
    def verdict(self) -> str:
        """One sentence for people who read no tables."""

        def names(pairs: Iterable[Pair]) -> str:
            return "; ".join(f"{self.columns[p.first].label} and {self.columns[p.second].label}" for p in pairs)

        failed = [f"{column.label} ({len(column.failed)})" for column in self.columns if column.failed]
        if failed:
            return f"NO AGREEMENT: {', '.join(failed)} failed cases of the suite"
        if differing := [p for p in self.pairs if p.total.relations.get("differ", 0)]:
            return f"NO AGREEMENT: {names(differing)} differ on cases that both pass"
        if others := [p for p in self.pairs if p.other_inputs]:
            count = max(len(p.other_inputs) for p in others)
            return f"NO VERDICT: {names(others)} were given different inputs in {count} cases, which do not compare"
        if apart := [p for p in self.pairs if not p.total.shared]:
            return f"NO VERDICT: {names(apart)} share no case"
        known = [f"{len(column.waived)} of {column.label}" for column in self.columns if column.waived]
        but = f", BUT FOR WAIVED FAILURES ({', '.join(known)})" if known else ""
        soft = [column.label for column in self.columns if not column.report.hardware]
        if not soft:
            return f"AGREEMENT OF HARDWARE{but}"
        hard = [p for p in self.pairs if p.hardware]
        between = f"; of hardware are only {names(hard)}" if hard else ""
        return f"AGREEMENT{but}, BUT NOT OF HARDWARE: {', '.join(soft)} did not run on a chip of its own{between}"


def compare(reports: Sequence[Report], manifest: Manifest, arrays: Sequence[Tensors | None] = ()) -> Comparison:
    """Join reports case by case; ``arrays`` are what lies beside each, where it was saved and is wanted.

    Raises :class:`ReportError` for reports that cannot be compared at all.
    """
    if len(reports) < 2:
        raise ReportError(f"a comparison needs at least two reports, got {len(reports)}")
    for what, values in (
        ("suite versions", [r.record["suite_version"] for r in reports]),
        ("seeds", [r.record["run"]["seed"] for r in reports]),
    ):
        if len(set(values)) > 1:
            listed = ", ".join(f"{r.path or r.label}: {v}" for r, v in zip(reports, values, strict=True))
            raise ReportError(f"reports of different {what} hold different numbers and do not compare: {listed}")
    if len({report.record["digest"] for report in reports}) < len(reports):
        raise ReportError("the same report was given twice; it agrees with itself, which says nothing")
    if reports[0].record["suite_version"] != manifest.suite_version:
        raise ReportError(
            f"the reports are of suite version {reports[0].record['suite_version']}, installed is "
            f"{manifest.suite_version}: compare them with the suite that wrote them"
        )
    # Of a quick and a full run the quick cases are what both can have.
    tier = "full" if all(report.tier == "full" for report in reports) else "quick"
    possible = {i for i, t in manifest.tiers.items() if t == "quick" or tier == "full"}
    beside = list(arrays) or [None] * len(reports)
    columns = tuple(
        _column(report, number + 1, label, manifest, possible, beside[number] is not None)
        for number, (report, label) in enumerate(zip(reports, _labels(reports), strict=True))
    )
    pairs = tuple(
        _pair(a, b, (reports[a], reports[b]), (beside[a], beside[b]), manifest, possible)
        for a, b in combinations(range(len(reports)), 2)
    )
    return Comparison(columns, pairs, tier, reports[0].record["run"]["seed"], manifest.suite_version)


def _labels(reports: Sequence[Report]) -> list[str]:
    """Labels that tell the reports apart: by backend and device, then by number."""
    labels = [report.label for report in reports]
    return [f"{label} #{n + 1}" if labels.count(label) > 1 else label for n, label in enumerate(labels)]


def _column(report: Report, number: int, label: str, manifest: Manifest, possible: set[str], arrays: bool) -> Column:
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
        number,
        label,
        dict(report.record["counts"]),
        profile_verdicts(report, manifest),
        tuple(sorted(ratios, key=lambda entry: (entry[2] == entry[2], -entry[2]))[:WORST]),  # NaN is worst of all
        tuple((case["id"], case["reason"]) for case in cases if case["outcome"] in ("fail", "error")),
        tuple((case["id"], _waiver(case)) for case in cases if case["outcome"] == "waived"),
        tuple(lacks.most_common()),
        len(possible - set(report.cases)),
        arrays,
    )


def _waiver(case: Mapping[str, Any]) -> str:
    waiver = case.get("waiver", {})
    return f"until {waiver.get('expires', '?')}: {waiver.get('reason', '?')}; fails: {case['reason']}"


def _pair(
    a: int,
    b: int,
    reports: tuple[Report, Report],
    arrays: tuple[Tensors | None, Tensors | None],
    manifest: Manifest,
    possible: set[str],
) -> Pair:
    first, second = reports[0].cases, reports[1].cases
    # Chapters in the order of the manifest, which is the one in which a new backend turns green.
    sizes_by_chapter = Counter(identity.partition("/")[0] for identity in manifest.tiers if identity in possible)
    relations: dict[str, Relation] = {}
    differences: list[CaseDifference] = []
    answers: tuple[str, float] | None = None
    for identity in sorted(possible & set(first) & set(second)):
        found = _relation(first[identity], second[identity])
        if found is None:
            continue
        relations[identity], why = found
        if relations[identity] in ("differ", "within class"):
            where = _where(identity, first[identity], arrays) if len(differences) < FOLLOWED else ""
            differences.append(CaseDifference(identity, why, where, relations[identity] == "within class"))
        if arrays[0] is not None and arrays[1] is not None and relations[identity] != "other inputs":
            apart = largest_answer_difference(arrays[0].looks(identity), arrays[1].looks(identity))
            if apart is not None and (answers is None or apart > answers[1]):
                answers = identity, apart
    full = any(manifest.tiers[identity] == "full" for identity in possible)
    return Pair(
        a,
        b,
        {
            name: Cell(size, Counter(r for i, r in relations.items() if i.startswith(f"{name}/")))
            for name, size in sizes_by_chapter.items()
        },
        {
            name: Cell(
                sizes["quick"] + (sizes["full"] if full else 0),
                Counter(r for i, r in relations.items() if name in first[i].get("profiles", ())),
            )
            for name, sizes in manifest.profiles.items()
        },
        tuple(sorted(differences, key=lambda d: d.allowed)),
        tuple(identity for identity, relation in relations.items() if relation == "other inputs"),
        answers,
        reports[0].hardware and reports[1].hardware,
    )


def _relation(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Relation, str] | None:
    """How two results of one case relate, None where it is not shared."""
    outcomes = first["outcome"], second["outcome"]
    if "unsupported" in outcomes or "waived" in outcomes:  # a waived case failed: it agrees with nothing
        return None
    if outcomes != ("pass", "pass"):
        return "differ", f"{outcomes[0]} and {outcomes[1]}: {first['reason'] or second['reason']}"
    one, two = first.get("digests", {}), second.get("digests", {})
    if one.get("inputs") != two.get("inputs"):
        return "other inputs", ""
    parts = [name for name in PARTS if one.get(name) != two.get(name)]
    if not parts:
        return ("same bits", "") if set(one) & set(PARTS) else ("within bound", "")
    words = f"both pass, and their stored {' and '.join(parts)} are not the same"
    if "one-code" in (first.get("exactness"), second.get("exactness")):
        return "within class", f"{words}, as the one-code class allows"
    return "differ", words


def _where(identity: str, case: Mapping[str, Any], arrays: tuple[Tensors | None, Tensors | None]) -> str:
    """The first differing code (or scale), in words; or how to get the arrays that show it."""
    one, two = (tensors.looks(identity) if tensors is not None else [] for tensors in arrays)
    if not one or not two:
        chapter = identity.partition("/")[0]
        return f"run both with --tensors=256 --chapter={chapter} --formats={case.get('format', '')}"
    bits = _bits(case.get("format", ""))
    found = (f"first differing {part}: {text}" for part in PARTS if (text := first_difference(one, two, part, bits)))
    return next(found, "")


def _bits(text: str) -> dict[str, int]:
    """Bits of a code by side, of a case's format; a format that this kvport does not know has bytes."""
    from kvport.formats import CacheFormat

    try:
        fmt = CacheFormat.parse(text)
    except KVPortError:
        return {}
    # A latent layer stores K's first part, and V is of it.
    sides = {"key": fmt.key, "value": fmt.value, "latent": fmt.key, "rope": fmt.rope or fmt.key}
    return {side: tensor.bits for side, tensor in sides.items() if tensor is not None}
