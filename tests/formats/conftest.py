"""Paths and options of the format tests. KVPORT_LONG=1 makes the random runs long."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The suite runs with --import-mode=importlib, which puts no test folder on the path. The core's helpers are shared.
HERE = Path(__file__).parent
for folder in (HERE.parent / "core", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
pytest.register_assert_rewrite("core_support", "replay")


@pytest.fixture
def long_run() -> bool:
    return os.environ.get("KVPORT_LONG", "") not in ("", "0")
