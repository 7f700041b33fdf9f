"""Whether this pytest run was asked for the conformance suite.

``--backend`` and the other short options exist only then: as global options they would break every project whose own
conftest defines one of the same name.
"""

from __future__ import annotations

import glob
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SUITE: Final = "kvport_conformance"
#: The folder that holds the suite's package in a checkout.
CONTAINER: Final = "conformance"


@dataclass(frozen=True)
class Selected:
    """``suite``: tests of the suite may be collected. ``named``: an argument names the suite itself, not a parent."""

    suite: bool
    named: bool


def selected(
    arguments: Sequence[str], *, pyargs: bool, testpaths: Sequence[str], invocation_dir: Path, rootpath: Path
) -> Selected:
    """Judge pytest's positional arguments; without any, what pytest would collect instead of them."""
    if not arguments and invocation_dir == rootpath:
        arguments = (
            testpaths if pyargs else [found for path in testpaths for found in sorted(glob.glob(path, recursive=True))]
        )
    named = above = False
    for argument in arguments or [str(invocation_dir)]:
        target = argument.partition("::")[0]
        if pyargs and target.partition(".")[0] == SUITE:
            named = True
            continue
        path = (invocation_dir / target).resolve()
        named = named or is_inside_suite(path) or _is_suite(path / SUITE)
        above = above or _is_suite(path / CONTAINER / SUITE) or _holds_installed(path)
    return Selected(suite=named or above, named=named)


def is_inside_suite(path: Path) -> bool:
    """Whether a resolved path is the suite's package or lies in it."""
    return any(part.name == SUITE and _is_suite(part) for part in (path, *path.parents))


def _is_suite(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() and folder.name == SUITE


def _holds_installed(path: Path) -> bool:
    """Whether ``path`` is a parent of the importable suite, and pytest would walk down to it.

    A virtual environment below the current folder also has the suite "inside", but pytest does not collect there.
    """
    spec = importlib.util.find_spec(SUITE)  # a top-level name: finds the package without importing it
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        suite = Path(location).resolve()
        if suite.is_relative_to(path):
            return not {"site-packages", "dist-packages"} & set(suite.relative_to(path).parts)
    return False
