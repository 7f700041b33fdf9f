"""pytest runs the chapter "transfer"; its checks are in :mod:`kvport_conformance.chapters.transfer`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "transfer"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_transfer(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
