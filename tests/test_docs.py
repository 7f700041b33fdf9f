"""The documents name only tests that exist, and link only to files that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_there_are_documents() -> None:
    assert {"README.md", "architecture.md", "contract.md"} <= {path.name for path in DOCUMENTS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(path: Path) -> None:
    named = set(re.findall(r"`((?:tests|conformance)/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8")))
    if path.name == "contract.md":
        assert named, "the contract names the tests that hold it"
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assignments = {t.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets
                       if isinstance(t, ast.Name)}  # fmt: skip
        assert name in functions | assignments, f"{path.name} names {file}::{name}, which does not exist"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"
