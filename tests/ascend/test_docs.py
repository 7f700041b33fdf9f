"""docs/ascend.md prints the rules as they are, and the numbers of the chip table."""

from __future__ import annotations

import json
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


def test_committed_report_is_whole_and_emulated() -> None:
    """No reader can take it for a device's, and the page beside it has its numbers."""
    path = ROOT / "docs" / "reports" / "ascend-emulated.json"
    verify = [sys.executable, "-m", "kvport", "verify-report", str(path)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert "a sound report" in done.stdout, done.stdout + done.stderr
    assert "execution is emulated" in done.stdout
    report = json.loads(path.read_text())
    assert report["backend"]["execution"] == "emulated"
    assert "no device was used" in report["backend"]["facts"]["emulated"]
    counts = report["counts"]
    page = path.with_suffix(".md").read_text()
    assert counts["fail"] == counts["error"] == counts["waived"] == 0
    assert f"| 1 ascend@cpu [emulated] | {counts['pass']} | 0 | 0 | 0 | {counts['unsupported']} |" in page
    assert "NOT OF HARDWARE" in page


def test_documented_versions_and_limits() -> None:
    text = " ".join((ROOT / "docs" / "ascend.md").read_text().split())
    for version in schemas.versions():
        assert version in text
    soc = SOCS["A2"]
    assert f"int8: multiples of {soc.int8_page} up to {soc.max_page}; float: of {soc.float_page}" in text
    assert f"int8: multiples of {soc.int8_dim} up to {soc.max_dim}; float: of {soc.float_dim}" in text
    assert f"up to {soc.max_ratio} |" in text
