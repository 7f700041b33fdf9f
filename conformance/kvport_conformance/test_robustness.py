"""pytest runs the chapter "robustness"; its checks are in :mod:`kvport_conformance.chapters.robustness`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "robustness"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_robustness(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
