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


@pytest.fixture
def worst(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """Worst observed / bound by name, printed in the summary (also by xdist's main process)."""
    ratios: dict[str, float] = {}
    yield ratios
    request.node.user_properties.append(("observed/bound", ratios))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines to print in the summary."""
    lines: list[str] = []
    yield lines
    request.node.user_properties.append(("figures", lines))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ratios: dict[str, float] = {}
    lines: list[str] = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, found in getattr(report, "user_properties", ()):
                if name == "figures":
                    lines += found
                elif name == "observed/bound":
                    for what, ratio in found.items():
                        ratios[what] = max(ratio, ratios.get(what, 0.0))
    if ratios or lines:
        terminalreporter.section("figures of the core")
        for line in lines:
            terminalreporter.write_line(line)
        for what, ratio in sorted(ratios.items()):
            terminalreporter.write_line(f"worst observed/bound, {what}: {ratio:.4f}")
