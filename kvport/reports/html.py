"""A comparison as one self-contained page: no script, no font, no request to anywhere.

Colours are variables that a dark colour scheme redefines. Plots are inline SVG (:mod:`kvport.reports.plots`), with the
numbers in their titles and in tables beside them, so that nothing depends on seeing a colour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from kvport.reports import plots
from kvport.reports.comparing import Comparison
from kvport.reports.reading import shown
from kvport.reports.tables import Table, environment, subtitle, tables, warning

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2024; --dim: #59626d; --line: #d8dde3; --card: #f6f8fa;
  --good: #1a7f37; --bad: #b3261e; --soft: #8a5a00; --softback: #fff4d6; --none: #e6eaee; --low: #f2b8b2;
  --mid: #f6dfa0; --high: #b4dfbf; --on: #16202a; --hatch: #16202a26; --s0: #2563b0; --s1: #b4540a; --s2: #6b3fa0;
  --s3: #0f766e;
  --s4: #a61e5c; --s5: #5b6470; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #e4e8ec; --dim: #a3adb8; --line: #343c45;
  --card: #1b2128; --good: #57ab5a; --bad: #f47067; --soft: #e0b03a; --softback: #33290d; --none: #2a3139;
  --low: #7a2c26; --mid: #6a5416; --high: #22593a; --on: #f2f5f7; --hatch: #ffffff24; --s0: #6cb0f5; --s1: #f0a35e;
  --s2: #bd9bf0; --s3: #4fc4b8; --s4: #f08ab8; --s5: #a3adb8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0 .75rem; max-width: 62rem; } .dim { color: var(--dim); }
.verdict, .warning { border: 1px solid var(--line); border-left: .4rem solid var(--dim); background: var(--card);
  padding: .75rem 1rem; margin: 1rem 0; overflow-wrap: anywhere; } .verdict { font-weight: 600; }
.verdict.good { border-left-color: var(--good); } .verdict.bad { border-left-color: var(--bad); }
.verdict.soft { border-left-color: var(--soft); }
.warning { border-color: var(--soft); background: var(--softback); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; } tr > :first-child { padding-left: .2rem; }
td { overflow-wrap: anywhere; min-width: 4rem; } td.case, td.command { font-family: ui-monospace, monospace;
  font-size: 12px; min-width: 15rem; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.prose { min-width: 16rem; } td.name { white-space: nowrap; color: var(--dim); }
td.label { min-width: 10rem; }
.tag { border: 1px solid var(--soft); color: var(--soft); background: var(--softback); border-radius: .25rem;
  padding: 0 .35rem; font-size: 12px; white-space: nowrap; font-weight: 600; }
details > summary { cursor: pointer; color: var(--dim); margin: .25rem 0; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; border: 1px solid var(--line);
  background: var(--card); padding: .6rem .75rem; max-width: 100%; overflow-x: auto; }
figcaption { font-size: 12.5px; color: var(--dim); max-width: 22rem; overflow-wrap: anywhere; }
figcaption b { color: var(--text); font-weight: 600; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .25rem 0 .75rem; padding: 0;
  font-size: 13.5px; } ul.legend li { max-width: 100%; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .9rem; height: .9rem; border-radius: .15rem; margin-right: .4rem;
  vertical-align: -.1rem; } .swatch.hatched { background-image: repeating-linear-gradient(135deg, transparent 0 3px,
  var(--card) 3px 5px); }
svg { display: block; } svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg text.on { fill: var(--on); } svg text.strong { font-weight: 600; font-size: 12px; }
svg .axis { stroke: var(--line); } svg .bound { stroke: var(--bad); stroke-dasharray: 3 2; stroke-width: 1.5; }
svg .none { fill: var(--none); } svg .low { fill: var(--low); } svg .mid { fill: var(--mid); }
svg .high { fill: var(--high); } svg .cover { fill: var(--on); opacity: .55; }
svg .hatch { stroke: var(--hatch); stroke-width: 2; }
svg .hatchbar { stroke: var(--card); stroke-width: 2; }
@media (max-width: 40rem) { body { padding: .75rem; } }
@media print { body { max-width: none; } details > * { display: block; } }
"""
STYLE += "".join(f"svg .s{i} {{ fill: var(--s{i}); }} .swatch.s{i} {{ background-color: var(--s{i}); }}\n"
                 for i in range(plots.COLOURS))  # fmt: skip

#: Rows beyond which a list is folded.
FOLDED = 12


def page(found: Comparison, title: str = "kvport conformance comparison") -> str:
    """The whole page."""
    mood = "bad" if not found.agreement else "good" if found.hardware else "soft"
    caution = warning(found)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(subtitle(found))}</p>',
        f'<div class="verdict {mood}">{_marked(shown(found.verdict))}</div>',
        f'<div class="warning">{_marked(caution)}</div>' if caution else "",
        _legend(found),
    ]
    for table in tables(found):
        if table.title == "Backends":
            parts.append(_environment(found))
            continue
        parts.append(_section(table))
        if table.title == "Agreement by chapter":
            parts.append(_heat(found))
        if table.title == "Agreement by profile":
            parts.append(_errors(found))
    return "\n".join(part for part in [*parts, "</body></html>"] if part) + "\n"


def _legend(found: Comparison) -> str:
    items = "".join(
        f'<li><span class="swatch s{plots.colour(c.number)}{"" if c.report.hardware else " hatched"}"></span>'
        f"<b>{c.number}</b> {_marked(shown(c.label))}</li>"
        for c in found.columns
    )
    return f'<ul class="legend">{items}</ul>'


def _environment(found: Comparison) -> str:
    """More than the short table has: everything that a report says about where it came from."""
    columns = [environment(column) for column in found.columns]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    head = ["", *(column.name for column in found.columns)]
    return f"<h2>Backends and environments</h2>{_table(Table('', '', head, rows))}"


def _heat(found: Comparison) -> str:
    maps = "".join(
        f"<figure>{plots.heat(found, {p: p.chapters[name] for p in found.pairs}, name)}</figure>"
        for name in found.pairs[0].chapters
    )
    return (
        "<h2>Heat map of agreement</h2><p>One square a pair of backends, in every chapter: agreed of shared cases, and "
        "how many are shared of those in the manifest (the bar below). Hatched: <b>not an agreement of hardware</b>. "
        f'Grey: no case is shared.</p><div class="plots">{maps}</div>'
    )


def _errors(found: Comparison) -> str:
    figures = "".join(f"<figure>{figure}</figure>" for figure in plots.errors(found))
    if not figures:
        return ""
    return (
        "<h2>Attention error by format</h2><p>Observed error of the output over its bound, one bar a half decade, one "
        "row a backend (hatched: not hardware). The dashed line is the bound; what lies right of it fails; the bar at "
        f"the left edge has every smaller error, exact results among them.</p>{_legend(found)}"
        f'<div class="plots">{figures}</div>'
    )


def _section(table: Table) -> str:
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    body = _table(table)
    if table.listing and len(table.rows) > FOLDED:
        body = f"<details><summary>{len(table.rows)} rows</summary>{body}</details>"
    return f"<h2>{escape(table.title)}</h2>{note}{body}"


def _table(table: Table) -> str:
    head = "".join(f"<th>{_marked(text)}</th>" for text in table.head)
    body = "".join(f"<tr>{_cells(table.head, row)}</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(head: Sequence[str], row: Sequence[str]) -> str:
    cells = []
    for name, text in zip(head, row, strict=True):
        kind = (
            "case" if name == "case"
            else "command" if row[0] == "command" and text != "command"
            else "prose" if name in ("reason", "waiver", "what", "where")
            else "label" if name in ("backend", "pair") or "@" in text
            else "name" if name in ("", "chapter", "profile")
            else "number" if re.fullmatch(r"[\d./ of-]+", text)
            else ""
        )  # fmt: skip
        cells.append(f'<td class="{kind}">{_marked(text)}</td>' if kind else f"<td>{_marked(text)}</td>")
    return "".join(cells)


def _marked(text: str) -> str:
    """Escaped text, in which what says that something did not run on hardware stands out."""
    return re.sub(
        r"\[(emulated|interpreter)\]|\(?\bNOT (?:OF )?(?:hardware|HARDWARE)\b\)?",
        lambda found: f'<span class="tag">{found[0].strip("[]()")}</span>',
        escape(text),
    )
