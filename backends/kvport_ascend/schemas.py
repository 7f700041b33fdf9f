"""The recorded torch_npu operator schemas (``schemas.json``, written by ``scripts/ascend_record_schemas.py``)."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

# The version whose wheel the real-wheel tests import, hence the emulator's default.
DEFAULT_VERSION = "2.13.0"


@cache
def _recorded() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files(__package__).joinpath("schemas.json").read_text())
    return content


def versions() -> tuple[str, ...]:
    """torch_npu versions whose schemas are recorded, oldest first."""
    return tuple(_recorded()["wheels"])


def wheel(version: str) -> dict[str, str]:
    """``wheel`` (file name) and ``sha256`` that the schemas of ``version`` were read from."""
    found: dict[str, str] = _recorded()["wheels"][_known(version)]
    return found


def schemas(version: str = DEFAULT_VERSION) -> dict[str, str]:
    """Operator name (namespace ``npu``) -> schema text, for the operators that ``version`` has."""
    _known(version)
    return {
        name: entry["schema"]
        for name, entries in _recorded()["operators"].items()
        for entry in entries
        if version in entry["versions"]
    }


def _known(version: str) -> str:
    if version not in versions():
        raise ValueError(f"no schemas recorded for torch_npu {version!r}; recorded: {', '.join(versions())}")
    return version
