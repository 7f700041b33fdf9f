"""Draw results of the benchmarks as SVG: what was measured is told from what the file holds.

    python benchmarks/plot.py docs/results/decode-h200.json                          # decode-h200.svg beside it
    python benchmarks/plot.py decode.json page16.json --out figure.svg               # both in one figure

Bars and points are medians, whiskers the least and the greatest replay (10th and 90th percentile where there are more
than 20 rounds). The same matplotlib makes the same bytes of the same file, whose sha256 is in the drawing's
description. Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Legible on white and on near black alike, and so is every colour of a series: the ground is transparent.
INK = "#767d86"
COLOURS = ("#2f80d8", "#d9691e", "#2a9a60", "#a263d6", "#d84a66", "#14929b")
MANY_ROUNDS = 20


class NotDrawn(ValueError):
    """A file that is no result of the benchmarks, or holds no figure yet."""


@dataclass(frozen=True)
class Mark:
    """A median with its range, and the best that the hardware would allow of it, if that is known."""

    value: float
    low: float
    high: float
    best: float | None = None


@dataclass(frozen=True)
class Series:
    """``marks`` has one entry a group, None where nothing was measured. A ``plain`` series is what others stand next
    to: it is drawn in the ink. ``hatched`` tells the second of two series of one colour."""

    name: str
    marks: tuple[Mark | None, ...]
    colour: str
    hatched: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Chart:
    """Groups of bars, or curves over ``at``. ``one`` names the line at 1 and ``best`` the ticks of the marks' best."""

    title: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[Series, ...]
    one: str = ""
    best: str = ""
    at: tuple[float, ...] = ()
    logarithmic: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="one figure of all (default: one beside each)")
    given = parser.parse_args()
    drawings = {given.out: given.results} if given.out else {p.with_suffix(".svg"): [p] for p in given.results}
    for target, paths in drawings.items():
        try:
            svg = drawn(paths)
        except NotDrawn as error:
            print(error, file=sys.stderr)
            return 1
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(svg)
        print(f"wrote {target}")
    return 0


def drawn(paths: Sequence[Path]) -> bytes:
    """One figure of these results, a chart below the other."""
    charts, sources = [], []
    for path in paths:
        content = path.read_bytes()
        try:
            charts.append(chart(json.loads(content)))
        except (NotDrawn, json.JSONDecodeError) as error:
            raise NotDrawn(f"{path}: {error}") from error
        sources.append(source(path.name, content))
    return draw(charts, "; ".join(sources))


def source(name: str, content: bytes) -> str:
    """By what a drawing names the file that it shows."""
    return f"{name} sha256 {hashlib.sha256(content).hexdigest()}"


# -- from a result to a chart --------------------------------------------------------------------------------------


def chart(record: Mapping[str, Any]) -> Chart:
    """What a result shows. Raises :class:`NotDrawn` for anything else."""
    shapes = {name: cells for name, cells in (record.get("shapes") or {}).items() if cells}
    cells = [cell for group in shapes.values() for cell in group.values()]
    name = record.get("benchmark")
    if name == "step" and cells:
        made = _step(record, shapes)
    elif name == "attend_cpu" and record["results"]:
        rounds = {f"{r['length']:,} tokens": r["seconds"] for r in record["results"]}
        made = _rounds("Attend alone on the CPU reference, speed next to SDPA", "sdpa fp32", rounds)
    elif name == "hf_decode" and record["milliseconds"]:
        rounds = {"by the clock": record["milliseconds"], "by the processor": record["processor_milliseconds"]}
        made = _rounds(f"Decode of {record['model']['name']}, speed next to the stock cache", "DynamicCache", rounds)
    elif isinstance(record.get("tokens"), dict) and record["tokens"]:
        made = _append(record["tokens"])
    elif any("bytes" in cell for cell in cells):
        made = _decode(record, shapes)
    elif any("tflops" in cell for cell in cells):
        made = _prefill(shapes)
    else:
        raise NotDrawn("holds no figures of decode, append, prefill, step, attend_cpu or hf_decode")
    return Chart(**{**vars(made), "title": f"{made.title}\n{_machine(record)}"})


def _machine(record: Mapping[str, Any]) -> str:
    facts = record["machine"]
    versions = {**facts, **facts.get("versions", {})}
    said = [facts.get("gpu") or record.get("backend", {}).get("device_name") or facts["processor"]]
    said += [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    if record.get("execution", "hardware") != "hardware":
        said.append(f"{record['execution'].upper()}, NOT HARDWARE")
    if "incomplete" in record:
        said.append(f"INCOMPLETE ({record['incomplete']})")
    return ", ".join(said)


def _mark(cell: Mapping[str, Any], of: Callable[[float], float], best: float | None = None) -> Mark:
    """A timed cell as ``of`` its microseconds."""
    found = [of(us) for us in cell["replays"]]
    return Mark(of(cell["us"]), min(found), max(found), best)


def _series(names: Iterable[str], plain: Iterable[str], mark: Callable[[str], Sequence[Mark | None]]) -> list[Series]:
    """A series for each name: a colour for each format, hatched where a second page size or way shares it."""
    plain, colours, met = set(plain), {}, set()
    made = []
    for name in names:
        fmt = re.sub(r" (p\d+|eager|graph)$", "", name)
        if name not in plain:
            colours.setdefault(fmt, COLOURS[len(colours) % len(COLOURS)])
        colour = INK if name in plain else colours[fmt]
        made.append(Series(name, tuple(mark(name)), colour, hatched=colour in met, plain=name in plain))
        met.add(colour)
    return made


def _names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group))


def _without(figure: str, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the cells that lack a figure: what kvport is compared with."""
    groups = list(groups)
    return [n for n in _names(groups) if all(figure not in cells[n] for cells in groups if n in cells)]


def _decode(record: Mapping[str, Any], shapes: Mapping[str, Any]) -> Chart:
    """Speed next to the fastest baseline (a cell that reads no pages), or GB/s where there is none."""
    read = max((v for k, v in record.get("ceilings_gbps", {}).items() if k.startswith("read")), default=None)
    plain = _without("bytes", shapes.values())
    against = bool(plain) and all(any(name in cells for name in plain) for cells in shapes.values())
    groups = []
    for shape, cells in shapes.items():
        fastest = min((name for name in plain if name in cells), key=lambda name: cells[name]["us"], default="")
        groups.append(f"{shape}\n{fastest} {cells[fastest]['us']:.3g} us" if against else shape)

    def mark(name: str) -> list[Mark | None]:
        marks: list[Mark | None] = []
        for cells in shapes.values():
            if name not in cells:
                marks.append(None)
                continue
            cell = cells[name]
            if against:
                base = min(cells[other]["us"] for other in plain if other in cells)
                best = base * read * 1e3 / cell["bytes"] if read and "bytes" in cell else None
                marks.append(_mark(cell, lambda us, base=base: base / us, best))
            else:
                marks.append(_mark(cell, lambda us, cell=cell: cell["bytes"] / us / 1e3, read))
        return marks

    return Chart(
        title="Decode attention, speed next to the fastest of torch" if against else "Decode attention, bytes read",
        unit="x the fastest of torch" if against else "GB/s of K, V and scales",
        groups=tuple(groups),
        series=tuple(_series(_names(shapes.values()), plain, mark)),
        one="as fast" if against else "",
        best=f"reading at {read:,.0f} GB/s, as measured" if read else "",
    )


def _prefill(shapes: Mapping[str, Any]) -> Chart:
    def mark(name: str) -> list[Mark | None]:
        marks: list[Mark | None] = []
        for cells in shapes.values():
            work = next((c["tflops"] * c["us"] for c in cells.values() if "tflops" in c), None)
            missing = name not in cells or work is None
            marks.append(None if missing else _mark(cells[name], lambda us, work=work: work / us))
        return marks

    names = _names(shapes.values())
    return Chart(
        title="Prefill attention",
        unit="TFLOP/s",
        groups=tuple(shapes),
        series=tuple(_series(names, _without("tflops", shapes.values()), mark)),
    )


def _append(tokens: Mapping[str, Any]) -> Chart:
    def mark(name: str) -> list[Mark | None]:
        return [
            _mark(cells[name], lambda us, cell=cells[name]: cell["bytes"] / us / 1e3) if name in cells else None
            for cells in tokens.values()
        ]

    return Chart(
        title="append: K and V read, codes and scales written",
        unit="GB/s",
        groups=tuple(f"{int(count):,}" for count in tokens),
        series=tuple(_series(_names(tokens.values()), ["copy"], mark)),
        at=tuple(float(count) for count in tokens),
    )


def _step(record: Mapping[str, Any], shapes: Mapping[str, Any]) -> Chart:
    ways = ("eager", "graph")

    def mark(name: str) -> list[Mark | None]:
        text, way = name.rsplit(" ", 1)
        marks: list[Mark | None] = []
        for cells in shapes.values():
            parts = cells.get(text, {}).get(way, {})
            device = parts["device"]["us"] / 1e3 if "device" in parts else None
            marks.append(_mark(parts["wall"], lambda us: us / 1e3, device) if parts else None)
        return marks

    names = [f"{text} {way}" for text in _names(shapes.values()) for way in ways]
    return Chart(
        title=f"One decode step of {record['model']['layers']} layers, by the clock",
        unit="ms a step",
        groups=tuple(shapes),
        series=tuple(_series(names, [], mark)),
        best="the device's part",
        logarithmic=True,
    )


def _rounds(title: str, base: str, groups: Mapping[str, Mapping[str, Sequence[float]]]) -> Chart:
    """Contenders that took turns: the ratio of each round to ``base``."""

    def mark(name: str) -> list[Mark | None]:
        marks: list[Mark | None] = []
        for times in groups.values():
            ratios = sorted(b / t for b, t in zip(times[base], times[name], strict=True))
            cut = len(ratios) // 10 if len(ratios) > MANY_ROUNDS else 0
            marks.append(Mark(statistics.median(ratios), ratios[cut], ratios[-1 - cut]))
        return marks

    names = [name for name in _names(groups.values()) if name != base]
    return Chart(title, f"x {base}", tuple(groups), tuple(_series(names, [], mark)), one=base)


# -- drawing -------------------------------------------------------------------------------------------------------


def draw(charts: Sequence[Chart], description: str) -> bytes:
    """The charts as one SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    settings = {
        "svg.hashsalt": "kvport", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "hatch.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are
        matplotlib.rcParams.update(settings)
        figure = Figure(figsize=(11, 3.8 * len(charts)), layout="constrained")
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure)
        for axes, shown in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
            axes.patch.set_alpha(0)
            (_curves if shown.at else _bars)(axes, shown)
            axes.set_title(shown.title, loc="left", fontsize=9)
            axes.set_ylabel(shown.unit)
            if shown.logarithmic:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_locator(NullLocator())
                axes.yaxis.set_major_formatter("{x:g}")
            else:
                axes.set_ylim(bottom=0)
            axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": None, "Description": description}
        figure.savefig(out, format="svg", metadata=metadata)
    return out.getvalue()


def _whiskers(marks: Sequence[Mark]) -> list[list[float]]:
    return [[m.value - m.low for m in marks], [m.high - m.value for m in marks]]


def _bars(axes: Any, shown: Chart) -> None:
    count, groups = len(shown.series), len(shown.groups)
    width = min(0.84 / count, 0.06 * groups)  # a lone group has no bars as wide as a hand
    small = width / groups < 0.025
    top = max(max(m.high, m.best or 0) for series in shown.series for m in series.marks if m is not None)
    for number, series in enumerate(shown.series):
        found = [(group, mark) for group, mark in enumerate(series.marks) if mark is not None]
        marks = [mark for _, mark in found]
        x = [group + (number + 0.5 - count / 2) * width for group, _ in found]
        axes.bar(
            x, [m.value for m in marks], width * 0.86, label=series.name, linewidth=0.9, edgecolor=series.colour,
            color="none" if series.hatched else (series.colour, 0.45), hatch="////" if series.hatched else None,
        )  # fmt: skip
        axes.errorbar(
            x, [m.value for m in marks], _whiskers(marks), fmt="none", ecolor=series.colour, elinewidth=1.1, capsize=1.8
        )
        for place, mark in zip(x, marks, strict=True):
            height = mark.high
            if mark.best is not None:
                axes.plot([place - width * 0.43, place + width * 0.43], [mark.best] * 2, color=series.colour, lw=1.8)
                if mark.high <= mark.best < mark.high + 0.12 * top:
                    height = mark.best
            if not (series.plain and mark.value == 1):
                axes.annotate(
                    f"{mark.value:.2f}" if mark.value < 10 else f"{mark.value:,.0f}", (place, height), (0, 3),
                    textcoords="offset points", ha="center", va="bottom", fontsize=6.5 if small else 7.5,
                    rotation=90 if small else 0,
                )  # fmt: skip
    axes.set_xticks(range(groups), shown.groups, fontsize=8)
    axes.set_xlim(-0.5, groups - 0.5)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.12)
    if shown.one:
        axes.axhline(1, color=INK, linewidth=1, linestyle="--", zorder=0.6, label=f"1 = {shown.one}")
    if any(mark is not None and mark.best is not None for series in shown.series for mark in series.marks):
        axes.plot([], [], color=INK, lw=1.8, label=shown.best)


def _curves(axes: Any, shown: Chart) -> None:
    for series in shown.series:
        found = [(x, mark) for x, mark in zip(shown.at, series.marks, strict=True) if mark is not None]
        marks = [mark for _, mark in found]
        axes.errorbar(
            [x for x, _ in found], [m.value for m in marks], _whiskers(marks), label=series.name, color=series.colour,
            elinewidth=1.1, capsize=2, linewidth=1.6, linestyle="--" if series.plain else "-", marker="o",
            markersize=3.5,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown.at, shown.groups)
    axes.set_xlabel("tokens")


if __name__ == "__main__":
    raise SystemExit(main())
