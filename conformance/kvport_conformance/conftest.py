"""Turns the table of cases into pytest tests; everything that judges is elsewhere.

A test module of the suite names its chapter in ``CHAPTER`` and takes the fixtures ``case`` and ``bench``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from kvport.backend import Backend
from kvport_conformance.axes import TIERS
from kvport_conformance.bench import Bench
from kvport_conformance.cases import Case, all_cases, select
from kvport_conformance.recorded import Recording
from pytest_kvport import split_formats
from pytest_kvport.reporting import CASE_KEY

#: Bytes of arrays that this process has spooled for --tensors.
_SPOOLED: Final = pytest.StashKey[int]()


@cache
def load(request: str) -> Backend:
    """The backend under test, once in each process; fixtures of all modules share it."""
    from kvport.registry import load_backend

    return load_backend(request)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend that ``--backend`` names."""
    return load(request.config.getoption("kvport_backend"))


@pytest.fixture
def bench(request: pytest.FixtureRequest, backend: Backend, case: Case) -> Iterator[Bench]:
    """The bench of this case; what it measures goes into the report whatever becomes of the case."""
    option, stash = request.config.option, request.config.stash
    made = Bench(backend, case, seed=option.kvport_seed)
    request.node.user_properties.append((CASE_KEY, made.record))
    spool = getattr(option, "kvport_spool", None)
    if spool:
        made.figures.recording = Recording(option.kvport_tensors * 2**20 - stash.setdefault(_SPOOLED, 0))
    yield made
    if spool and made.figures.recording is not None:
        stash[_SPOOLED] += made.figures.recording.save(Path(spool), case.id)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case of the module's chapter, within ``--tier`` and ``--formats``."""
    if "case" not in metafunc.fixturenames:
        return
    option = metafunc.config.option
    tier = option.kvport_tier or "quick"
    if tier not in TIERS:
        raise pytest.UsageError(f"--tier={tier}: the tiers are {', '.join(TIERS)}")
    formats = split_formats(option.kvport_formats) if option.kvport_formats else []
    if unknown := set(formats) - {case.format for case in all_cases()}:
        raise pytest.UsageError(
            f"--formats: no case of the suite is about {', '.join(sorted(unknown))}; formats with cases: "
            f"{', '.join(sorted({case.format for case in all_cases()}))}"
        )
    cases = select(chapters=[metafunc.module.CHAPTER], tier=tier, formats=formats)
    metafunc.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chapters without a case of the chosen formats are left out: pytest stands a skipped test in for them.

    In a worker of a parallel run, cases of one format and geometry stand together. Workers are dealt runs of
    neighbours. A backend that compiles a kernel for each format and geometry then compiles it in one worker, instead
    of once in each.
    """
    items[:] = [item for item in items if not item.get_closest_marker("kvport_chapter") or _case(item) is not None]
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _case(item: pytest.Item) -> Case | None:
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    return case if isinstance(case, Case) else None


def _place(item: pytest.Item) -> tuple[str, str]:
    case = _case(item)
    return (case.format, case.geometry.name) if case is not None else ("", "")
