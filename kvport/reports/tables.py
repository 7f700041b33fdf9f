"""The tables of a comparison, once for every rendering. Every one of them names backends with their execution kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvport.reports.comparing import Cell, Column, Comparison, Pair
from kvport.reports.reading import shown


@dataclass(frozen=True)
class Table:
    """``rows`` of text under ``head``. ``listing``: a list that a short rendering may cut and a long one fold."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    listing: bool = False


def tables(found: Comparison) -> list[Table]:
    """Every table that has rows, in reading order."""
    return [
        table
        for table in (
            _backends(found),
            _results(found),
            _matrix(found),
            _chapters(found),
            _profiles(found),
            _pair_profiles(found),
            _worst(found),
            _failed(found),
            _differences(found),
            _answers(found),
            _inputs(found),
            _waived(found),
            _lacks(found),
        )
        if table.rows
    ]


def subtitle(found: Comparison) -> str:
    return f"Suite version {found.suite_version}, tier {found.tier}, seed {found.seed}."


def warning(found: Comparison) -> str:
    """What must be read before any number; empty where everything ran on hardware."""
    soft = [f"{c.number} {shown(c.label)}" for c in found.columns if not c.report.hardware]
    if not soft:
        return ""
    return (
        f"NOT HARDWARE: {', '.join(soft)}. Nothing in these tables says what a chip of that kind computes; "
        "an agreement with it is no agreement of hardware."
    )


def cell(found: Cell) -> str:
    """``12/12``, agreed of shared; a dash where nothing is shared."""
    other = found.relations.get("other inputs", 0)
    return (f"{found.agreed}/{found.shared}" if found.shared else "-") + (f", {other} other inputs" if other else "")


def environment(column: Column) -> dict[str, str]:
    """What a report says about where it came from, by name; "-" where it does not say."""
    record, backend = column.report.record, column.report.backend
    machine, run = record["environment"], record["run"]
    facts = {k: v for k, v in backend["facts"].items() if k not in ("torch", "device_name", "driver", "sdk")}
    entries: dict[str, Any] = {
        "execution": backend["execution"] if column.report.hardware else f"{backend['execution']}, NOT hardware",
        "device": backend["device_name"] or _host(column),
        "driver": backend["driver"],
        "SDK": backend["sdk"],
        "backend": f"{backend['distribution']} {backend['version']}",
        "commit": backend["commit"],
        "kvport": record["kvport"],
        "kvport commit": record["kvport_commit"],
        "torch": machine["packages"]["torch"],
        "python": machine["python"],
        "OS": machine["os"],
        "machine": f"{machine['machine']}, {machine['processor']}",
        "run": f"{record['created']}, {run['seconds']:.0f} s",
        "seed": run["seed"],
        "command": " ".join(run["command"]),
        "other facts": ", ".join(f"{name}: {value}" for name, value in facts.items()),
    }
    return {name: shown(value) if value not in (None, "") else "-" for name, value in entries.items()}


def _host(column: Column) -> str:
    """The processor is the device of what computes on one."""
    on_host = column.report.backend["torch_device"] == "cpu"
    return column.report.record["environment"]["processor"] if on_host else ""


def _backends(found: Comparison) -> Table:
    columns = [environment(column) for column in found.columns]
    names = ("execution", "device", "driver", "SDK", "backend", "commit", "torch", "OS")
    return Table(
        "Backends",
        "",
        ["", *(f"{c.number} {shown(c.label)}" for c in found.columns)],
        [[name, *(_short_commit(column[name]) if name == "commit" else column[name] for column in columns)]
         for name in names],
    )  # fmt: skip


def _short_commit(text: str) -> str:
    commit, plus, rest = text.partition("+")
    return commit[:12] + plus + rest


def _results(found: Comparison) -> Table:
    outcomes = ("pass", "fail", "error", "waived", "unsupported")
    rows = []
    for column in found.columns:
        operations = column.report.backend["operations"]
        native = sum(how == "native" for how in operations.values())
        rows.append(
            [
                column.name,
                *(str(column.counts.get(outcome, 0)) for outcome in outcomes),
                str(column.missing),
                f"{native} of {len(operations)}",
            ]
        )
    return Table(
        "Results",
        "Cases by outcome; native: operations that are the backend's own.",
        ["backend", *outcomes, "not run", "native"],
        rows,
    )


def _matrix(found: Comparison) -> Table:
    cells: Mapping[tuple[int, int], Pair] = {(p.first, p.second): p for p in found.pairs}

    def entry(a: int, b: int) -> str:
        pair = cells.get((min(a, b), max(a, b)))
        return "" if pair is None else cell(pair.total) + ("" if pair.hardware else " NOT hardware")

    count = range(len(found.columns))
    possible = found.pairs[0].total.possible
    return Table(
        "Agreement, backend by backend",
        f"Agreed / shared cases, of {possible} in this tier. Shared: both ran it and both support it. Agreed: both "
        "pass, and what they stored is the same or differs by no more than the one-code class allows.",
        ["", *(column.short for column in found.columns)],
        [[f"{found.columns[a].number} {shown(found.columns[a].label)}", *(entry(a, b) for b in count)] for a in count],
    )


def _by_pair(title: str, note: str, head: str, found: Comparison, rows: Sequence[tuple[str, list[Cell]]]) -> Table:
    """One row a name, one column a pair; how many cases are possible is the same for every pair."""
    return Table(
        title,
        note,
        [head, "of", *(pair.name for pair in found.pairs)],
        [[name, str(cells[0].possible), *map(cell, cells)] for name, cells in rows],
    )


def _chapters(found: Comparison) -> Table:
    rows = [(name, [pair.chapters[name] for pair in found.pairs]) for name in found.pairs[0].chapters]
    rows.append(("all", [pair.total for pair in found.pairs]))
    return _by_pair("Agreement by chapter", "Agreed / shared cases; of: those in the manifest.", "chapter", found, rows)


def _profiles(found: Comparison) -> Table:
    rows = [
        [verdicts[0].name, *(f"{v.verdict} ({v.passed} of {v.total})" for v in verdicts)]
        for verdicts in zip(*(column.profiles for column in found.columns), strict=True)
    ]
    return Table("Verdict by profile", "", ["profile", *(f"{c.number} {shown(c.label)}" for c in found.columns)], rows)


def _pair_profiles(found: Comparison) -> Table:
    rows = [(name, [pair.profiles[name] for pair in found.pairs]) for name in found.pairs[0].profiles]
    return _by_pair("Agreement by profile", "Agreed / shared cases; of: those of the profile.", "profile", found, rows)


def _worst(found: Comparison) -> Table:
    rows = [
        [column.name, figure, f"{ratio:.3g}", shown(identity)]
        for column in found.columns
        for figure, identity, ratio in column.worst
    ]
    return Table("Worst observed / bound", "", ["backend", "of", "observed / bound", "case"], rows)


def _failed(found: Comparison) -> Table:
    rows = [
        [column.name, shown(identity), _line(reason)] for column in found.columns for identity, reason in column.failed
    ]
    return Table("Failed", "", ["backend", "case", "reason"], rows, listing=True)


def _differences(found: Comparison) -> Table:
    rows = [[pair.name, shown(d.case), _line(d.why), shown(d.where)] for pair in found.pairs for d in pair.differences]
    note = "Where: the first code or scale that differs, or the run that would show it (arrays are saved by --tensors)."
    return Table("Differences", note, ["pair", "case", "what", "where"], rows, listing=True)


def _answers(found: Comparison) -> Table:
    rows = [
        [pair.name, f"{pair.answers[1]:.3g}", shown(pair.answers[0])]
        for pair in found.pairs
        if pair.answers is not None
    ]
    return Table(
        "Largest difference of outputs",
        "Between the arrays of the two, as a share of the largest output of that call; each was judged by its bound.",
        ["pair", "share", "case"],
        rows,
    )


def _inputs(found: Comparison) -> Table:
    rows = [[pair.name, shown(identity)] for pair in found.pairs for identity in pair.other_inputs]
    return Table(
        "Different inputs",
        "These cases were given other numbers, so that their results do not compare and count for nothing here.",
        ["pair", "case"],
        rows,
        listing=True,
    )


def _waived(found: Comparison) -> Table:
    rows = [[column.name, shown(identity), _line(why)] for column in found.columns for identity, why in column.waived]
    return Table("Waived: known failures", "", ["backend", "case", "waiver"], rows, listing=True)


def _lacks(found: Comparison) -> Table:
    rows = [[column.name, str(count), _line(why)] for column in found.columns for why, count in column.lacks]
    return Table("What each lacks", "Cases declined, by the backend's reason.", ["backend", "cases", "reason"], rows,
                 listing=True)  # fmt: skip


def _line(text: str) -> str:
    """The first line, cut where it goes on and on."""
    first = shown(text.split("\n")[0])
    return first if len(first) <= 300 else f"{first[:297]}..."
