"""Helpers of the tests of reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The suite runs with --import-mode=importlib, which puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("report_support")
