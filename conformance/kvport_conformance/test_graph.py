"""pytest runs the chapter "graph"; its checks are in :mod:`kvport_conformance.chapters.graph`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "graph"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_graph(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
