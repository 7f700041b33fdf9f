"""docs/ascend.md prints the rules as they are, and the numbers of the chip table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvport_ascend import schemas
from kvport_ascend.socs import SOCS

ROOT = Path(__file__).parents[2]


def test_rule_tables_are_current() -> None:
    script = ROOT / "scripts" / "ascend_rules_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_documented_versions_and_limits() -> None:
    text = " ".join((ROOT / "docs" / "ascend.md").read_text().split())
    for version in schemas.versions():
        assert version in text
    soc = SOCS["A2"]
    assert f"int8: multiples of {soc.int8_page} up to {soc.max_page}; float: of {soc.float_page}" in text
    assert f"int8: multiples of {soc.int8_dim} up to {soc.max_dim}; float: of {soc.float_dim}" in text
    assert f"up to {soc.max_ratio} |" in text
