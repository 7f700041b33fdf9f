"""A comparison and a verification as text: for the terminal, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from kvport.reports.comparing import Cell, Comparison
from kvport.reports.verifying import Verification

#: Rows of a list that are printed before the rest is only counted.
SHOWN = 10


def comparison(found: Comparison, *, markdown: bool = False) -> str:
    """The whole comparison."""
    table = _markdown if markdown else _plain

    def title(words: str) -> str:
        return f"## {words}\n" if markdown else f"{words}\n{'-' * len(words)}\n"

    parts = [f"**{found.verdict}**\n" if markdown else f"{found.verdict}\n"]
    parts.append(
        f"Suite version {found.suite_version}, tier {found.tier}, seed {found.seed}. "
        "Agreed / shared cases (of those possible); shared: both ran and both support.\n"
    )
    parts.append(title("Backends"))
    parts.append(
        table(
            [
                "",
                "backend",
                "execution",
                "distribution",
                "machine",
                "pass",
                "fail",
                "error",
                "waived",
                "unsupported",
                "not run",
            ],
            [
                [
                    str(number + 1),
                    column.label,
                    column.report.execution,
                    f"{column.report.backend['distribution']} {column.report.backend['version']}",
                    f"{column.report.record['environment']['machine']}, {_device(column.report.backend['facts'])}",
                    *(str(column.counts.get(o, 0)) for o in ("pass", "fail", "error", "waived", "unsupported")),
                    str(column.missing),
                ]
                for number, column in enumerate(found.columns)
            ],
        )
    )
    parts.append(title("Agreement"))
    parts.append(
        table(
            ["pair", "agreement of", *found.chapters, "all"],
            [
                [
                    f"{found.columns[p.first].label} and {found.columns[p.second].label}",
                    "hardware" if p.hardware else "NOT hardware",
                    *(cell(p.cells[chapter]) for chapter in found.chapters),
                    cell(p.total),
                ]
                for p in found.pairs
            ],
        )
    )
    parts.append(title("Profiles"))
    parts.append(
        table(
            ["profile", *(column.label for column in found.columns)],
            [
                [
                    verdicts[0].name,
                    *(f"{v.verdict} ({v.passed} of {v.total})" for v in verdicts),
                ]
                for verdicts in zip(*(column.profiles for column in found.columns), strict=True)
            ],
        )
    )
    parts.append(title("Worst observed / bound"))
    parts.append(
        table(
            ["backend", "figure", "observed / bound", "case"],
            [
                [column.label, figure, f"{ratio:.3g}", identity]
                for column in found.columns
                for figure, identity, ratio in column.worst
            ],
        )
    )
    differences = [
        [f"{found.columns[p.first].label} and {found.columns[p.second].label}", identity, _line(why)]
        for p in found.pairs
        for identity, why in p.differences
    ]
    if differences:
        parts.append(title("Differences"))
        parts.append(table(["pair", "case", "why"], differences[:SHOWN]))
        parts += _rest(differences)
    waived = [[column.label, identity, _line(why)] for column in found.columns for identity, why in column.waived]
    if waived:
        parts.append(title("Waived: known failures"))
        parts.append(table(["backend", "case", "waiver"], waived[:SHOWN]))
        parts += _rest(waived)
    lacking = [[column.label, str(count), _line(why)] for column in found.columns for why, count in column.lacks]
    if lacking:
        parts.append(title("What each lacks"))
        parts.append(table(["backend", "cases", "reason"], lacking[:SHOWN]))
        parts += _rest(lacking)
    return "\n".join(parts)


def verification(found: Verification, label: str) -> str:
    """What verify-report prints."""
    lines = [f"{label}: {'a sound report' if found.sound else 'NOT a sound report'}"]
    lines += [f"  fault: {finding}" for finding in found.findings[: 3 * SHOWN]]
    if len(found.findings) > 3 * SHOWN:
        lines.append(f"  ... and {len(found.findings) - 3 * SHOWN} more")
    lines += [f"  note: {note}" for note in found.notes]
    if found.profiles:
        rows = [
            [
                p.name,
                p.verdict,
                f"{p.passed} of {p.total}",
                f"{p.share:.1%}",
                str(p.failed),
                str(p.waived),
                str(p.unsupported),
            ]
            for p in found.profiles
        ]
        lines += ["", _plain(["profile", "verdict", "passed", "share", "failed", "waived", "unsupported"], rows)]
    return "\n".join(lines)


def cell(found: Cell) -> str:
    """``12 / 12 (of 40)``, or a dash where nothing is shared."""
    return f"{found.agreed} / {found.shared} (of {found.possible})" if found.shared else f"- (of {found.possible})"


def _device(facts: dict[str, str]) -> str:
    return facts.get("device_name") or facts.get("device") or facts.get("torch", "")


def _line(text: str) -> str:
    first = text.split("\n")[0]
    return first if len(first) <= 160 else f"{first[:157]}..."


def _rest(rows: Sequence[object]) -> list[str]:
    return [f"... and {len(rows) - SHOWN} more\n"] if len(rows) > SHOWN else []


def _plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]) + "\n"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in row) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)]) + "\n"
