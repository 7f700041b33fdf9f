"""pytest runs the chapter "scales"; its checks are in :mod:`kvport_conformance.chapters.scales`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "scales"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_scales(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
