"""The table of cases: what the suite consists of, independent of pytest.

A *check* is a plain function ``check(bench)`` in a module of :mod:`kvport_conformance.chapters`; the decorator
:func:`check` registers it with the variants it runs over. A *case* is one check at one variant. pytest only runs cases;
so does :func:`run_case`, which the gallery of faulty backends uses, in-process and without pytest.

Case ids are ``chapter/check/format/geometry[/option=value]``. Reports join on them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvport_conformance.axes import TIERS, Geometry, Tier, Variant
from kvport_conformance.verdicts import Disagreement, NotSupported

if TYPE_CHECKING:
    from kvport.backend import Backend
    from kvport_conformance.bench import Bench

#: Chapters in the order in which a new backend usually turns green.
CHAPTERS: Final = (
    "append",
    "pages",
    "scales",
    "prefix",
    "attention",
    "features",
    "transfer",
    "tiers",
    "graph",
    "robustness",
)
#: What every backend must pass; the others count by what a backend declares.
MANDATORY: Final = CHAPTERS[:4]

Function = Callable[["Bench"], None]


@dataclass(frozen=True)
class Case:
    """One check at one variant. ``requires`` are attention features a backend must have declared."""

    id: str
    chapter: str
    check: str
    format: str
    geometry: Geometry
    tier: Tier
    options: tuple[tuple[str, int | str], ...]
    requires: frozenset[str]
    function: Function = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The id without its chapter."""
        return self.id.partition("/")[2]

    @property
    def summary(self) -> str:
        """What the check is about: the first line of its docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


_TABLE: Final[dict[str, Case]] = {}


def check(chapter: str, variants: Iterable[Variant], *, requires: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Register a check. Where a variant appears in two tiers, it belongs to the earlier one."""
    if chapter not in CHAPTERS:
        raise ValueError(f"chapter {chapter!r} is none of {', '.join(CHAPTERS)}")

    def register(function: Function) -> Function:
        if not (function.__doc__ or "").strip():
            raise ValueError(f"check {function.__name__} has no docstring; its first line is shown in reports and docs")
        for variant in sorted(variants, key=lambda v: TIERS.index(v.tier)):
            name = getattr(function, "__name__", "")
            identity = "/".join(
                [chapter, name, variant.format, variant.geometry.name, *(f"{k}={v}" for k, v in variant.options)]
            )
            known = _TABLE.get(identity)
            if known is not None and known.function is not function:
                raise ValueError(f"two checks are named {chapter}/{name}")
            if known is None:
                _TABLE[identity] = Case(
                    identity,
                    chapter,
                    name,
                    variant.format,
                    variant.geometry,
                    variant.tier,
                    variant.options,
                    frozenset(requires),
                    function,
                )
        return function

    return register


def all_cases() -> tuple[Case, ...]:
    """Every case, by chapter and then in the order of its module."""
    for chapter in CHAPTERS:
        importlib.import_module(f"kvport_conformance.chapters.{chapter}")
    return tuple(sorted(_TABLE.values(), key=lambda case: CHAPTERS.index(case.chapter)))


def select(
    *, chapters: Iterable[str] = (), tier: str = "quick", formats: Iterable[str] = (), checks: Iterable[str] = ()
) -> list[Case]:
    """Cases of these chapters, formats and checks (all where empty), of the tier or an earlier one."""
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r} is none of {', '.join(TIERS)}")
    tiers = TIERS[: TIERS.index(tier) + 1]
    wanted_chapters, wanted_formats, wanted_checks = set(chapters), set(formats), set(checks)
    return [
        case
        for case in all_cases()
        if case.tier in tiers
        and (not wanted_chapters or case.chapter in wanted_chapters)
        and (not wanted_formats or case.format in wanted_formats)
        and (not wanted_checks or case.check in wanted_checks)
    ]


Outcome = Literal["pass", "fail", "unsupported", "error"]


@dataclass(frozen=True)
class Result:
    """What became of one case. ``record`` is what goes into a report: id, chapter, tier and measured figures."""

    case: Case
    outcome: Outcome
    reason: str
    seconds: float
    record: dict[str, Any]


def run_case(case: Case, backend: Backend, *, seed: int = 0) -> Result:
    """Run one case in this process and say what became of it; never raises for what the backend did."""
    from kvport_conformance.bench import Bench

    began = time.process_time()
    bench = Bench(backend, case, seed=seed)
    outcome: Outcome = "pass"
    reason = ""
    try:
        bench.run()
    except NotSupported as refusal:
        outcome, reason = "unsupported", str(refusal)
    except Disagreement as disagreement:
        outcome, reason = "fail", str(disagreement)
    except Exception as error:
        outcome, reason = "error", f"{type(error).__name__}: {error}"
    return Result(case, outcome, reason, time.process_time() - began, bench.record)
