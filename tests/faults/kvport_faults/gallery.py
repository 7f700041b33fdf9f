"""Running the suite on faulty backends, in this process and without pytest."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Final

from kvport_conformance.cases import Case, Result, run_case, select
from kvport_faults.registry import FAULTS, Fault

MODULES: Final = ("at_rest", "reading", "keeping", "sharing", "attending", "moving", "kept", "replaying", "declaring")

#: The largest page of a survey's cases.
SMALL_PAGE: Final = 48

for _module in MODULES:
    importlib.import_module(f"kvport_faults.{_module}")


@cache
def quick_cases(chapter: str) -> tuple[Case, ...]:
    """The chapter's quick cases, one of each check first, then the second of each, so that any check is soon met."""
    place: dict[str, int] = defaultdict(int)
    ordered = []
    for index, case in enumerate(select(chapters=[chapter], tier="quick")):
        ordered.append((place[case.check], index, case))
        place[case.check] += 1
    return tuple(case for _, _, case in sorted(ordered, key=lambda entry: entry[:2]))


def results(fault: Fault, *, small: bool = False) -> Iterator[Result]:
    """What each quick case of the fault's own chapter says about it. The backend is made anew for every case.

    ``small`` leaves out pages of more than 48 tokens, which take most of the time.
    """
    for case in sorted(quick_cases(fault.chapter), key=lambda case: fault.about not in case.id):
        if not small or case.geometry.page_size <= SMALL_PAGE:
            yield run_case(case, fault.make())


def first_rejection(fault: Fault) -> Result | None:
    """The first case of the fault's chapter that does not pass it, None where all do."""
    return next((r for r in results(fault) if r.outcome in ("fail", "error")), None)


__all__ = ["FAULTS", "first_rejection", "quick_cases", "results"]
