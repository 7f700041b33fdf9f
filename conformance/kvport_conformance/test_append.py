"""pytest runs the chapter "append"; its checks are in :mod:`kvport_conformance.chapters.append`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "append"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_append(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
