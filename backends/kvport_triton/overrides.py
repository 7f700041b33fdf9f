"""Decode shapes found by ``kvport tune`` on this machine: a JSON file that overrides the fixed table.

The file is the one that the variable KVPORT_TRITON_TUNING names, else ``kvport/triton-tuning.json`` in the user's cache
folder (XDG_CACHE_HOME, or ``~/.cache``). It is read once, when the backend is loaded; nothing is timed at run time. A
key names GPU, head dim, format and page size, so one file serves several machines, and what it does not name runs as
the fixed table says. What the file may change is speed alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvport.errors import InvalidArgument, MissingFile
from kvport.files import reading, write_atomically
from kvport.layout import GroupLayout
from kvport_triton.tuning import Tuning

VARIABLE: Final = "KVPORT_TRITON_TUNING"
#: What an entry may say: kernels exist for these alone.
ALLOWED: Final[dict[str, tuple[int, ...]]] = {
    "tile": (32, 64, 128, 256),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4),
    "waves": (1, 2, 4, 8, 12, 16),
}


def path() -> Path:
    """Where the file is, or would be."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvport", "triton-tuning.json")


def key_of(gpu: str, layout: GroupLayout) -> str:
    """Under which name a layout's decode shape is kept."""
    return f"{gpu}|dim {max(layout.key_dim, layout.value_dim)}|{layout.format}|page {layout.page_size}"


def read() -> dict[str, dict[str, int]]:
    """Entries of the file; none where there is no file. A file that is not what :func:`write` made is an error."""
    file = path()
    try:
        with reading(file, "file of tuned shapes", f"unset {VARIABLE}, or run kvport tune again"):
            text = file.read_text(encoding="utf-8")
    except MissingFile:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{file} is not JSON ({error}); delete it, or run kvport tune again") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{file} holds {type(found).__name__}, not an object; delete it")
    for key, entry in found.items():
        _check(file, key, entry)
    return found


def _check(file: Path, key: str, entry: Any) -> None:
    if not isinstance(entry, dict) or set(entry) != set(ALLOWED):
        raise InvalidArgument(f"{file}: {key!r} must have exactly {', '.join(ALLOWED)}, got {entry!r}; delete the file")
    for name, choices in ALLOWED.items():
        if type(entry[name]) is not int or entry[name] not in choices:
            raise InvalidArgument(
                f"{file}: {key!r} has {name} {entry[name]!r}; allowed are {', '.join(map(str, choices))}; delete it"
            )


def write(entries: Mapping[str, Tuning]) -> Path:
    """Add entries to the file, or replace them; whole or not at all."""
    file = path()
    kept = read() | {key: {n: v for n, v in asdict(shape).items() if n in ALLOWED} for key, shape in entries.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(kept, indent=1, sort_keys=True) + "\n").encode())
    return file
