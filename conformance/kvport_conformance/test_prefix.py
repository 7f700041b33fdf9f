"""pytest runs the chapter "prefix"; its checks are in :mod:`kvport_conformance.chapters.prefix`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "prefix"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_prefix(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
