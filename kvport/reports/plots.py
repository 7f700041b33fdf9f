"""The plots of a comparison, as inline SVG. Colours are classes that the page's style defines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from kvport.reports.comparing import Cell, Comparison, Pair
from kvport.reports.reading import shown

#: Series that have a colour of their own.
COLOURS = 6
#: Histogram bins of log10(observed / bound): up to a millionth of the bound, half decades up to it, and beyond.
BINS = tuple(x / 2 for x in range(-12, 1))
#: Share of agreed cases from which a square is no longer red. One case in twenty differing is a systematic difference.
MIDDLING = 0.95


def colour(number: int) -> int:
    """The colour class of a backend by its number, which counts from 1."""
    return (number - 1) % COLOURS


def heat(found: Comparison, cells: Mapping[Pair, Cell], name: str) -> str:
    """One chapter: a square for every two backends."""
    count, width, height, left, top = len(found.columns), 78, 46, 22, 36
    by_place = {place: (p, c) for p, c in cells.items() for place in ((p.first, p.second), (p.second, p.first))}
    parts = [f'<text class="strong" x="0" y="12">{escape(name)}</text>']
    for i in range(count):
        parts.append(f'<text x="{left + i * width + width / 2}" y="{top - 6}" text-anchor="middle">{i + 1}</text>')
        parts.append(f'<text x="{left - 12}" y="{top + i * height + height / 2 + 4}">{i + 1}</text>')
        for j in range(count):
            x, y = left + j * width, top + i * height
            square = f'x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" rx="3"'
            if i == j:
                parts.append(f'<rect class="none" opacity=".45" {square}/>')
                continue
            pair, cell = by_place[i, j]
            parts.append(_square(found, pair, cell, square, x, y, width, height))
    size = left + count * width, top + count * height
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}" role="img" '
        f'aria-label="agreement in chapter {escape(name)}">{"".join(parts)}</svg>'
    )


def _square(found: Comparison, pair: Pair, cell: Cell, square: str, x: int, y: int, width: int, height: int) -> str:
    share = cell.share
    mood = "none" if share is None else "high" if share == 1 else "mid" if share >= MIDDLING else "low"
    names = " and ".join(shown(found.columns[n].label) for n in (pair.first, pair.second))
    relations = ", ".join(f"{name} {count}" for name, count in sorted(cell.relations.items()))
    title = f"{names}: {pair.kind} agreement; {relations or 'no case shared'}; of {cell.possible} in the manifest"
    hatch = "" if pair.hardware else _hatching(x, y, width - 2, height - 2, 9)
    # Rounded down: 999 of 1000 is not 100 %.
    percent = "-" if share is None else f"{math.floor(share * 1000) / 10:g} %"
    lines = "".join(
        f'<text class="on{strong}" x="{x + width / 2 - 1}" y="{y + dy}" text-anchor="middle">{text}</text>'
        for text, dy, strong in (
            (percent, 17, " strong"),
            (f"{cell.shared} of {cell.possible}", 32, ""),
        )
    )
    covered = (width - 14) * cell.shared / max(1, cell.possible)
    bar = f'<rect class="cover" x="{x + 6}" y="{y + height - 10}" width="{covered:.1f}" height="3"/>'
    return f'<g><title>{escape(title)}</title><rect class="{mood}" {square}/>{hatch}{lines}{bar}</g>'


def _hatching(x: float, y: float, width: float, height: float, step: int, name: str = "hatch") -> str:
    """Diagonal lines that stay inside a rectangle."""
    lines = []
    for offset in range(step, int(width + height), step):
        x0, y0 = (x + offset, y) if offset <= width else (x + width, y + offset - width)
        x1, y1 = (x, y + offset) if offset <= height else (x + offset - height, y + height)
        lines.append(f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}")
    return f'<path class="{name}" d="{"".join(lines)}"/>' if lines else ""


def errors(found: Comparison) -> Iterator[str]:
    """One histogram a format: a row for every backend that has results of it."""
    ratios: dict[str, dict[int, list[float]]] = {}
    for column in found.columns:
        for case in column.report.cases.values():
            if "output_ratio" in case:
                by_backend = ratios.setdefault(case.get("format", ""), {})
                by_backend.setdefault(column.number, []).append(float(case["output_ratio"]))
    for name, rows in sorted(ratios.items()):
        yield _histogram(found, name, rows)


def _histogram(found: Comparison, name: str, rows: Mapping[int, Sequence[float]]) -> str:
    left, row, bars, width = 16, 44, 36, 300
    step = width / (len(BINS) + 1)
    parts = []
    for place, (number, values) in enumerate(rows.items()):
        base = place * row + row
        counts = _counts(values)
        most = max(counts)
        soft = not found.columns[number - 1].report.hardware
        parts.append(f'<text class="strong" x="0" y="{base - 2}">{number}</text>')
        for i, n in enumerate(counts):
            if n:
                x, high = left + i * step + 1, max(2.0, bars * n / most)
                hatch = _hatching(x, base - high, step - 2, high, 6, "hatchbar") if soft else ""
                parts.append(
                    f'<g><title>{n} cases {_bin(i)}</title><rect class="s{colour(number)}" x="{x:.1f}" '
                    f'y="{base - high:.1f}" width="{step - 2:.1f}" height="{high:.1f}"/>{hatch}</g>'
                )
        parts.append(f'<line class="axis" x1="{left}" y1="{base}" x2="{left + width}" y2="{base}"/>')
    bottom = len(rows) * row
    bound = left + len(BINS) * step
    parts.append(f'<line class="bound" x1="{bound:.1f}" y1="4" x2="{bound:.1f}" y2="{bottom}"/>')
    for level in (-6, -4, -2, 0):
        x = left + (BINS.index(float(level)) + 1) * step
        name_of_level = f"1e{level}" if level else "1"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{name_of_level}</text>')
    said = "; ".join(
        f"{number}{'' if found.columns[number - 1].report.hardware else ' (not hardware)'}: worst {_worst(values)} in "
        f"{len(values)} cases"
        for number, values in rows.items()
    )
    size = f'viewBox="0 0 {left + width} {bottom + 18}" width="{left + width}" height="{bottom + 18}"'
    return (
        f'<svg {size} role="img" aria-label="{escape(shown(name))}: {said}">{"".join(parts)}</svg>'
        f"<figcaption><b>{escape(shown(name))}</b><br>{said}</figcaption>"
    )


def _counts(values: Sequence[float]) -> list[int]:
    counts = [0] * (len(BINS) + 1)
    for value in values:
        level = math.inf if math.isnan(value) else math.log10(value) if value > 0 else -math.inf
        counts[sum(level > edge for edge in BINS)] += 1
    return counts


def _worst(values: Sequence[float]) -> str:
    return "nan" if any(map(math.isnan, values)) else f"{max(values):.3g}"


def _bin(index: int) -> str:
    if index == 0:
        return f"at most 1e{BINS[0]:g} of the bound"
    if index == len(BINS):
        return "above the bound"
    return f"in 1e{BINS[index - 1]:g} .. 1e{BINS[index]:g} of the bound"
