"""pytest runs the chapter "features"; its checks are in :mod:`kvport_conformance.chapters.features`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "features"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_features(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
