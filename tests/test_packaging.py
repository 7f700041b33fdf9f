"""What ships, what imports what, and that the documented commands are the ones that CI runs."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: The top level of the wheel, exactly.
PACKAGES = {"kvport", "kvport_cpu", "kvport_triton", "kvport_ascend", "kvport_conformance", "pytest_kvport"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_wheel_holds_exactly_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        top = {name.partition("/")[0] for name in names}
        (metadata,) = {name for name in top if name.endswith(".dist-info")}
        assert top == {*PACKAGES, metadata}
        assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
        assert {f"{package}/__init__.py" for package in PACKAGES} <= set(names)
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{metadata}/entry_points.txt").decode())
    assert points["kvport"]["reference"] == "kvport_cpu"
    assert points["pytest11"]["kvport"] == "pytest_kvport.plugin"
    assert points["console_scripts"]["kvport"] == "kvport.cli:main"
    shipped = [name for name in names if not name.startswith("kvport/scaffold/templates/")]  # a new backend's tests
    assert not [name for name in shipped if name.endswith(".pyc") or "/tests/" in name]


def test_containers_are_no_packages() -> None:
    for folder in ("backends", "conformance"):
        assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/ only holds packages"


def test_importing_kvport_is_light() -> None:
    """Neither vendor libraries nor clients nor backends: whoever needs one imports it when it is needed."""
    unwanted = [
        "triton",
        "torch_npu",
        "transformers",
        "accelerate",
        "gguf",
        "pytest",
        "kvport_cpu",
        "kvport_conformance",
    ]
    code = f"import sys, kvport; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- who may import whom ---------------------------------------------------------------------------------------------


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


def imported(path: Path, *, module_level: bool = False) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything a file imports, ``from a import b`` as "a.b".

    With ``module_level`` only what runs when the file is imported: not inside functions, nor under TYPE_CHECKING.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if module_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                yield from walk(child)
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    for node in walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the package's name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def offences(paths: list[Path], forbidden: tuple[str, ...], *, module_level: bool = False) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for name, line in imported(path, module_level=module_level)
        if any(name == word or name.startswith(f"{word}.") for word in forbidden)
    ]


def test_the_core_knows_no_backend_and_no_suite() -> None:
    forbidden = (
        "kvport_cpu",
        "kvport_triton",
        "kvport_ascend",
        "kvport_conformance",
        "pytest_kvport",
        "pytest",
        "_pytest",
    )
    assert offences(sources("kvport"), forbidden) == []


def test_a_backend_never_calls_up_into_the_cache() -> None:
    modules = ("cache", "step", "sequences", "prefix", "pages", "opening", "integrations", "registry", "plugins")
    public = ("PagedCache", "Step", "Sequence", "open")  # what kvport re-exports of these
    forbidden = tuple(f"kvport.{name}" for name in modules + public)
    assert offences(sources("backends"), (*forbidden, "kvport_conformance", "pytest_kvport", "pytest")) == []


def test_the_judge_shares_no_code_with_the_judged() -> None:
    oracles = sorted((ROOT / "conformance" / "kvport_conformance").rglob("oracle_*.py"))
    assert len(oracles) >= 3
    forbidden = ("torch", "kvport", "kvport_cpu", "kvport_triton", "kvport_ascend")
    assert offences(oracles, forbidden) == []


def test_the_suite_knows_no_backend() -> None:
    forbidden = ("kvport_cpu", "kvport_triton", "kvport_ascend")
    assert offences(sources("conformance"), forbidden) == []


def test_the_pytest_plugin_is_light() -> None:
    """It is imported by every pytest run of an environment in which kvport is installed."""
    forbidden = ("torch", "kvport", "numpy", "kvport_conformance")
    assert offences(sources("conformance/pytest_kvport"), forbidden, module_level=True) == []


def test_the_import_reader_reads() -> None:
    """The judge of imports must see what it forbids."""
    found = {name for name, _ in imported(ROOT / "kvport" / "registry.py")}
    assert {"pkgutil", "kvport.errors.UnknownBackend", "kvport.backend.Backend", "torch"} <= found
    top = {name for name, _ in imported(ROOT / "kvport" / "registry.py", module_level=True)}
    assert "kvport.errors.UnknownBackend" in top
    assert not {"torch", "kvport.backend.Backend"} & top
    assert offences([ROOT / "kvport" / "registry.py"], ("kvport.errors",)) != []


# --- one list of checks, one pair of commands ------------------------------------------------------------------------


def command_of_ci() -> str:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (command,) = re.findall(r'^command="(.*)"$', text, flags=re.MULTILINE)
    return str(command)


def test_ci_runs_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [line.strip() for line in readme.replace("\\\n", "").splitlines()]
    assert command_of_ci() in shown


def test_torch_comes_first_and_is_the_same_everywhere() -> None:
    command = command_of_ci()
    (pin,) = re.findall(r"torch==[\d.]+", command)
    assert command.index(pin) < command.index("pip install -e")
    assert pin in (ROOT / "tox.ini").read_text(encoding="utf-8")


def test_every_check_has_its_tox_environment() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check.py"), "--list"], capture_output=True, text=True, check=True
    )
    checks = set(re.findall(r"^(\w+):", done.stdout, flags=re.MULTILINE))
    environments = {name.strip() for name in tox["tox"]["env_list"].split(",")}
    by_name = {"gallery", "full", "long"}
    assert environments == checks - by_name
    assert {f"testenv:{name}" for name in by_name} <= set(tox)
    for section in ("testenv", *(f"testenv:{name}" for name in checks if f"testenv:{name}" in tox)):
        if commands := tox[section].get("commands"):
            # Where tox installs the wheel itself, the command is the one of scripts/check.py with the backend open.
            pattern = re.sub(r"\{posargs:(\w+)\}", r"\1", commands)
            assert pattern.startswith("python scripts/check.py") or pattern in done.stdout


def test_the_extras_bring_what_the_checks_use() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = {re.split(r"[<>=]", item)[0] for extra in ("test", "lint") for item in extras[extra]}
    assert {"pytest", "pytest-xdist", "hypothesis", "build", "hatchling", "matplotlib", "ruff", "mypy"} <= names
