"""pytest runs the chapter "tiers"; its checks are in :mod:`kvport_conformance.chapters.tiers`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "tiers"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_tiers(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
