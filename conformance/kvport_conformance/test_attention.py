"""pytest runs the chapter "attention"; its checks are in :mod:`kvport_conformance.chapters.attention`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "attention"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_attention(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
