"""A comparison and a verification as text: for the terminal, and as Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from kvport.reports.comparing import Comparison
from kvport.reports.reading import shown
from kvport.reports.tables import Table, subtitle, tables, warning
from kvport.reports.verifying import Verification

#: Rows of a list that are printed before the rest is only counted.
SHOWN = 10
#: Columns of a terminal that tables keep to, by wrapping their widest columns.
WIDTH = 110


def comparison(found: Comparison, *, markdown: bool = False) -> str:
    """The whole comparison."""
    verdict = shown(found.verdict)
    parts = [f"**{_escaped(verdict)}**\n" if markdown else "\n".join(_wrapped(verdict, WIDTH)) + "\n", subtitle(found)]
    if words := warning(found):
        parts += ["", f"> {_escaped(words)}" if markdown else "\n".join(_wrapped(words, WIDTH))]
    parts.append("")
    for table in tables(found):
        parts.append(_as_markdown(table) if markdown else _as_text(table))
    return "\n".join(parts)


def verification(found: Verification, label: str) -> str:
    """What :func:`kvport.reports.verify` found."""
    lines = [f"{shown(label)}: {'a sound report' if found.sound else 'NOT A SOUND REPORT'}"]
    lines += [f"  {shown(finding)}" for finding in found.findings[: 3 * SHOWN]]
    if len(found.findings) > 3 * SHOWN:
        lines.append(f"  ... and {len(found.findings) - 3 * SHOWN} more")
    lines += [f"  note: {shown(note)}" for note in found.notes]
    if found.profiles:
        rows = [
            [p.name, p.verdict, f"{p.passed} of {p.total}", f"{p.share:.1%}", str(p.failed), str(p.waived),
             str(p.unsupported)]
            for p in found.profiles
        ]  # fmt: skip
        lines += ["", plain(["profile", "verdict", "passed", "share", "failed", "waived", "unsupported"], rows)]
    return "\n".join(lines)


def _as_text(table: Table) -> str:
    rows, left = _cut(table)
    lines = [table.title, "-" * len(table.title)]
    if table.note:
        lines += _wrapped(table.note, WIDTH)
    return "\n".join([*lines, plain(table.head, rows) + (f"... and {left} more\n" if left else "")])


def _as_markdown(table: Table) -> str:
    rows, left = _cut(table)

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(_escaped(text) for text in row) + " |"

    body = [line(table.head), "|" + "---|" * len(table.head), *map(line, rows), ""]
    if left:
        body.append(f"... and {left} more\n")
    note = [table.note, ""] if table.note else []
    if table.listing:
        title = f"<details><summary>{escape(table.title)} ({len(table.rows)})</summary>"
        return "\n".join([title, "", *note, *body, "</details>", ""])
    return "\n".join([f"## {table.title}", "", *note, *body])


def _cut(table: Table) -> tuple[Sequence[Sequence[str]], int]:
    """The rows to print and how many are left. Rows of each first column take turns, so that none hides another."""
    if not table.listing or len(table.rows) <= SHOWN:
        return table.rows, 0
    turns: dict[str, int] = {}
    ranked = []
    for number, row in enumerate(table.rows):
        turns[row[0]] = turns.get(row[0], -1) + 1
        ranked.append((turns[row[0]], number))
    kept = sorted(number for _, number in sorted(ranked)[:SHOWN])
    return [table.rows[number] for number in kept], len(table.rows) - SHOWN


def _escaped(text: str) -> str:
    return escape(text, quote=False).replace("|", "\\|").replace("*", "\\*").replace("`", "\\`").replace("\n", " ")


def plain(head: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """Columns of text within ``width``, the widest ones wrapped where they do not fit."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    gaps = 2 * (len(head) - 1)
    # Short words of a heading are not broken; below that there is nothing to gain.
    floors = [min(max([len(word) for word in head[i].split()] + [min(widths[i], 6)]), 12) for i in range(len(head))]
    while sum(widths) + gaps > width:
        shrinkable = [i for i in range(len(widths)) if widths[i] > floors[i]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    lines: list[str] = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [_wrapped(text, width) for text, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            parts = [
                (cell[line] if line < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True)
            ]
            lines.append("  ".join(parts).rstrip())
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines, broken after a space or one of ``/,:;@=-`` where there is one, else anywhere."""
    lines = [""]
    for piece in re.findall(r"[^\s/,:;@=-]*[\s/,:;@=-]?", text):
        while len(lines[-1]) + len(piece.rstrip()) > width:
            if lines[-1]:
                lines.append("")
            else:
                lines[-1], piece = piece[:width], piece[width:]
                lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
