"""A comparison as one self-contained page: no script, no font, no request to anywhere.

Colours are variables that a dark colour scheme redefines. Plots are inline SVG, with the numbers in their titles and in
tables beside them, so that nothing depends on seeing a colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kvport.reports.comparing import Cell, Column, Comparison
from kvport.reports.text import cell as cell_text

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2024; --dim: #5b6470; --line: #d8dde3; --card: #f6f8fa;
  --good: #1a7f37; --bad: #c0261c; --soft: #9a6700; --bar: #2563b0; --none: #e3e7eb; --low: #f4c7c3; --mid: #f6e3a8;
  --high: #b7e1c1; --on: #16202a; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #e4e8ec; --dim: #9aa4af; --line: #323a43;
  --card: #1c2229; --good: #57ab5a; --bad: #f47067; --soft: #d4a72c; --bar: #6cb0f5; --none: #2a3139; --low: #6b2723;
  --mid: #5f4b12; --high: #1f5130; --on: #f2f5f7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; max-width: 60rem; } .dim { color: var(--dim); }
.verdict { border: 1px solid var(--line); border-left: .4rem solid var(--dim); background: var(--card);
  padding: .75rem 1rem; margin: 1rem 0; font-weight: 600; }
.verdict.good { border-left-color: var(--good); } .verdict.bad { border-left-color: var(--bad); }
.verdict.soft { border-left-color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; } td.id { font-family: ui-monospace, monospace; font-size: 12px;
  overflow-wrap: anywhere; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.heat { color: var(--on); font-variant-numeric: tabular-nums; white-space: nowrap; }
td.none { background: var(--none); }
td.low { background: var(--low); } td.mid { background: var(--mid); } td.high { background: var(--high); }
.tag { border: 1px solid var(--soft); color: var(--soft); border-radius: .25rem; padding: 0 .35rem; font-size: 12px; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; border: 1px solid var(--line);
  background: var(--card); padding: .6rem; } figcaption { font-size: 12.5px; color: var(--dim); max-width: 22rem; }
svg text { fill: var(--dim); font: 10.5px system-ui, sans-serif; } svg .bar { fill: var(--bar); }
svg .axis { stroke: var(--line); } svg .bound { stroke: var(--bad); stroke-dasharray: 3 2; }
"""

#: Histogram bins of log10(observed / bound): from a millionth of the bound up to it, and beyond.
BINS = tuple(x / 2 for x in range(-12, 2))


def page(found: Comparison, title: str = "kvport conformance comparison") -> str:
    """The whole page."""
    mood = "bad" if not found.agreement else "good" if found.verdict == "AGREEMENT" else "soft"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">Suite version {found.suite_version}, tier {escape(found.tier)}, seed {found.seed}.</p>',
        f'<div class="verdict {mood}">{escape(found.verdict)}</div>',
        _backends(found),
        _agreement(found),
        _profiles(found),
        _plots(found),
        _worst(found),
        _differences(found),
        _waived(found),
        _lacks(found),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _backends(found: Comparison) -> str:
    rows = []
    for column in found.columns:
        record, backend = column.report.record, column.report.backend
        native = sum(how == "native" for how in backend["operations"].values())
        facts = ", ".join(f"{name} {value}" for name, value in backend["facts"].items())
        rows.append(
            [
                _label(column),
                escape(f"{backend['distribution']} {backend['version']}"),
                escape(f"{record['environment']['platform']}"),
                escape(facts),
                f"{native} of {len(backend['operations'])}",
                *(str(column.counts.get(o, 0)) for o in ("pass", "fail", "error", "waived", "unsupported")),
                str(column.missing),
            ]
        )
    head = [
        "backend",
        "distribution",
        "platform",
        "facts",
        "native operations",
        "pass",
        "fail",
        "error",
        "waived",
        "unsupported",
        "not run",
    ]
    return f"<h2>Backends</h2>{_table(head, rows)}"


def _agreement(found: Comparison) -> str:
    head = ["", "agreement of", *found.chapters, "all"]
    rows = []
    for pair in found.pairs:
        cells = [*(pair.cells[chapter] for chapter in found.chapters), pair.total]
        kind = "hardware" if pair.hardware else '<span class="tag">not hardware</span>'
        names = f"{_label(found.columns[pair.first])}<br>{_label(found.columns[pair.second])}"
        rows.append(f"<tr><td>{names}</td><td>{kind}</td>{''.join(map(_heat, cells))}</tr>")
    body = "".join(rows)
    return (
        "<h2>Agreement</h2><p>Agreed / shared cases, of those possible in this tier. A case is shared where both ran "
        "and both support it; two backends agree where both pass and what they stored is the same, or differs by no "
        f'more than the one-code class allows.</p><div class="wide"><table><tr>{_heads(head)}</tr>{body}</table></div>'
    )


def _heat(found: Cell) -> str:
    share = found.share
    mood = "none" if share is None else "high" if share == 1 else "mid" if share > 0.95 else "low"
    listed = ", ".join(f"{name} {count}" for name, count in sorted(found.relations.items()))
    return f'<td class="heat {mood}" title="{escape(listed)}">{escape(cell_text(found))}</td>'


def _profiles(found: Comparison) -> str:
    rows = [
        [
            escape(verdicts[0].name),
            *(f"{escape(v.verdict)}<br><span class='dim'>{v.passed} of {v.total}</span>" for v in verdicts),
        ]
        for verdicts in zip(*(column.profiles for column in found.columns), strict=True)
    ]
    return f"<h2>Profiles</h2>{_table(['profile', *(_label(c) for c in found.columns)], rows, raw_head=True)}"


def _plots(found: Comparison) -> str:
    """How far below the bound each format stays, one histogram a format and backend."""
    figures = []
    for column in found.columns:
        ratios: dict[str, list[float]] = {}
        for case in column.report.cases.values():
            if "output_ratio" in case:
                ratios.setdefault(case.get("format", ""), []).append(float(case["output_ratio"]))
        for name, values in sorted(ratios.items()):
            figures.append(_histogram(f"{column.label}, {name}", values))
    if not figures:
        return ""
    return (
        "<h2>Attention error by format</h2><p>Observed error of the output over its bound, one bar a half decade "
        f'(left: exact; the dashed line is the bound).</p><div class="plots">{"".join(figures)}</div>'
    )


def _histogram(title: str, values: Sequence[float]) -> str:
    counts = [0] * (len(BINS) + 1)
    for value in values:
        level = math.inf if math.isnan(value) else math.log10(value) if value > 0 else -math.inf
        counts[sum(level > edge for edge in BINS)] += 1
    width, height, step = 240, 90, 240 / len(counts)
    most = max(counts)
    bars = "".join(
        f'<rect class="bar" x="{i * step + 1:.1f}" y="{height - 70 * n / most:.1f}" width="{step - 2:.1f}" '
        f'height="{70 * n / most:.1f}"><title>{n} cases {_bin(i)}</title></rect>'
        for i, n in enumerate(counts)
        if n
    )
    bound = (BINS.index(0.0) + 1) * step
    labels = "".join(
        f'<text x="{(BINS.index(float(x)) + 1) * step:.1f}" y="{height + 12}" text-anchor="middle">1e{x}</text>'
        for x in (-6, -4, -2, 0)
    )
    worst = max(values)
    return (
        f'<figure><svg viewBox="0 0 {width} {height + 16}" width="{width}" height="{height + 16}" role="img" '
        f'aria-label="{escape(title)}: worst {worst:.3g} in {len(values)} cases">'
        f'<line class="axis" x1="0" y1="{height}" x2="{width}" y2="{height}"/>{bars}'
        f'<line class="bound" x1="{bound:.1f}" y1="8" x2="{bound:.1f}" y2="{height}"/>{labels}</svg>'
        f"<figcaption>{escape(title)}: worst {worst:.3g}, {len(values)} cases</figcaption></figure>"
    )


def _bin(index: int) -> str:
    if index == 0:
        return f"at most 1e{BINS[0]:g}"
    if index == len(BINS):
        return f"above 1e{BINS[-1]:g}"
    return f"in 1e{BINS[index - 1]:g} .. 1e{BINS[index]:g}"


def _worst(found: Comparison) -> str:
    rows = [
        [_label(column), escape(figure), f"{ratio:.3g}", f'<td class="id">{escape(identity)}</td>']
        for column in found.columns
        for figure, identity, ratio in column.worst
    ]
    return f"<h2>Worst observed / bound</h2>{_table(['backend', 'figure', 'observed / bound', 'case'], rows)}"


def _differences(found: Comparison) -> str:
    rows = [
        [
            f"{_label(found.columns[p.first])}<br>{_label(found.columns[p.second])}",
            f'<td class="id">{escape(identity)}</td>',
            escape(why),
        ]
        for p in found.pairs
        for identity, why in p.differences
    ]
    return f"<h2>Differences</h2>{_table(['pair', 'case', 'why'], rows)}" if rows else ""


def _waived(found: Comparison) -> str:
    rows = [[_label(c), escape(identity), escape(why)] for c in found.columns for identity, why in c.waived]
    return f"<h2>Waived: known failures</h2>{_table(['backend', 'case', 'waiver'], rows)}" if rows else ""


def _lacks(found: Comparison) -> str:
    rows = [[_label(c), str(count), escape(reason)] for c in found.columns for reason, count in c.lacks]
    return f"<h2>What each lacks</h2>{_table(['backend', 'cases', 'reason'], rows)}" if rows else ""


def _label(column: Column) -> str:
    name = escape(column.label)
    if column.report.execution == "hardware":
        return name
    tag = f"[{escape(column.report.execution)}]"
    return name.replace(tag, f'<span class="tag">{escape(column.report.execution)}</span>')


def _heads(head: Sequence[str], raw: bool = False) -> str:
    return "".join(f"<th>{text if raw else escape(text)}</th>" for text in head)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, raw_head: bool = False) -> str:
    """``rows`` are HTML already; an entry that is a whole ``<td>`` stays one."""
    body = "".join(
        "<tr>" + "".join(text if text.startswith("<td") else f"<td>{text}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{_heads(head, raw_head)}</tr>{body}</table></div>'
