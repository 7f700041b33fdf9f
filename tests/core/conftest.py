"""Options and helpers of the core's tests. KVPORT_LONG=1 runs every combination that CI samples."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The suite runs with --import-mode=importlib, which puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("core_support")


@pytest.fixture
def long_run() -> bool:
    return os.environ.get("KVPORT_LONG", "") not in ("", "0")


@pytest.fixture(scope="session")
def worst(pytestconfig: pytest.Config) -> Iterator[dict[str, float]]:
    """Worst observed / bound by name, printed when the session ends (also without -s)."""
    ratios: dict[str, float] = {}
    yield ratios
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and ratios:
        reporter.write_line("")
        for name, ratio in sorted(ratios.items()):
            reporter.write_line(f"worst observed/bound, {name}: {ratio:.4f}")
