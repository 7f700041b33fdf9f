"""pytest runs the chapter "pages"; its checks are in :mod:`kvport_conformance.chapters.pages`."""

from __future__ import annotations

import pytest

from kvport_conformance.bench import Bench
from kvport_conformance.running import run

CHAPTER = "pages"

pytestmark = pytest.mark.kvport_chapter(CHAPTER)


def test_pages(bench: Bench) -> None:
    __tracebackhide__ = True
    run(bench)
