"""The documents name only tests that exist, link only to files that exist, and their code runs."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import kvport

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_there_are_documents() -> None:
    assert {"README.md", "architecture.md", "contract.md"} <= {path.name for path in DOCUMENTS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(path: Path) -> None:
    named = set(re.findall(r"`((?:tests|conformance)/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8")))
    if path.name == "contract.md":
        rows = re.findall(r"^\| (?!statement|---)(.*) \|$", path.read_text(encoding="utf-8"), re.M)
        assert len(rows) > 50
        for row in rows:
            assert re.search(r"`(tests|conformance)/[\w/]+\.py::\w+` *$", row), f"no test holds: {row:.80}"
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


@pytest.mark.parametrize("name", ["README.md", "docs/api.md", "docs/ascend.md", "docs/graphs.md"])
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks of a page, in order, as one program."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S))
    assert blocks
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        # Line numbers as in the page, so that a failure points there.
        exec(compile("\n" * text.count("\n", 0, block.start(1)) + block[1], ROOT / name, "exec"), namespace)


def test_the_users_page_names_what_a_user_can_call() -> None:
    """Public methods and properties of what a user holds, every argument of open, and every error."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    wanted = {name for name in inspect.signature(kvport.open).parameters if name != "device"}
    for owner in (kvport.PagedCache, kvport.Sequence, kvport.Step, kvport.PageImage, kvport.Graph):
        wanted |= {name for name, value in inspect.getmembers(owner, callable) if not name.startswith("_")}
    wanted |= {name for name in kvport.__all__ if isinstance(value := getattr(kvport, name), type)
               and issubclass(value, kvport.KVPortError)}  # fmt: skip
    wanted |= set(inspect.signature(kvport.Step.attend).parameters) - {"self"}
    assert sorted(name for name in wanted if not re.search(rf"\b{name}\b", page)) == []
