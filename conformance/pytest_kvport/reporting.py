"""The JSON report of a conformance run.

One record a case, keyed by the suite's own case id, because pytest's node ids differ between a checkout and an
installed suite. A report is always written whole and put in place in one move; it is never merged into an old one.

Layout of schema version 2::

    schema_version, suite_version, kvport (version), kvport_commit, created (UTC)
    backend      request, name, distribution, version, commit, device, torch_device, execution, device_name, driver,
                 sdk, operations, facts
    environment  python, os, platform, machine, processor, packages {torch, numpy, pytest, ...}
    run          command, seed, formats, chapter, tier, keyword, exit_status, seconds
    counts       pass, fail, unsupported, waived, error
    cases        [{id, chapter, outcome, seconds, reason, digests, ...what the case measured}], sorted by id;
                 a waived one has its waiver {backend, case, reason, expires, issue, source}
    tensors      file, sha256, bytes, cases, left_out of the arrays saved beside the report, where they were asked for
    digest       sha256 over the canonical JSON of the rest (see kvport.reports.reading, which has the schema too)
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

SCHEMA_VERSION: Final = 2
#: The key under which a case puts its record into ``item.user_properties``.
CASE_KEY: Final = "kvport_case"

Outcome = Literal["pass", "fail", "unsupported", "waived", "error"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("pass", "fail", "unsupported", "waived", "error")


@dataclass
class Results:
    """What the cases of a run came to, gathered from pytest's reports as they arrive."""

    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)

    def add(
        self, nodeid: str, records: Iterable[Mapping[str, Any]], outcome: Outcome, seconds: float, reason: str
    ) -> None:
        """File one finished test under the ids of its cases, or under its node id where it declared none."""
        # "a/b/kvport_conformance/test_x.py::test_y" and "test_x.py::test_y" (--pyargs) are one test.
        path, _, name = nodeid.partition("::")
        fallback = f"{path.rpartition('/')[2]}::{name}"
        for record in list(records) or [{"chapter": ""}]:
            identity = str(record.get("id") or fallback)
            if identity in self.cases:
                self.duplicates.append(identity)
            verdict = {"id": identity, "outcome": outcome, "seconds": round(seconds, 4), "reason": reason}
            self.cases[identity] = {**record, **verdict}

    def counts(self) -> dict[str, int]:
        """Outcome -> number of cases; every outcome is there."""
        found = Counter(case["outcome"] for case in self.cases.values())
        return {outcome: found[outcome] for outcome in OUTCOMES}


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: numpy and torch scalars become numbers, non-finite floats their names."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def label(name: str, device: str, execution: str) -> str:
    """``triton@cuda:0``, with the execution kind where it is not hardware: it must never be read as hardware."""
    return f"{name}@{device}" if execution == "hardware" else f"{name}@{device} [{execution}, not hardware]"


def properties(record: Mapping[str, Any], outcome: Outcome, reason: str, backend: str) -> list[tuple[str, Any]]:
    """A case's record as single properties, for JUnit: every one says in ``kvport.backend`` what it ran on."""
    found: list[tuple[str, Any]] = [("kvport.backend", backend), ("kvport.outcome", outcome)]
    if reason:
        found.append(("kvport.reason", reason))
    for name, value in record.items():
        if isinstance(value, Mapping):
            found += [(f"kvport.{name}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            found.append((f"kvport.{name}", ",".join(map(str, value))))
        else:
            found.append((f"kvport.{name}", value))
    return found


def unwritable(path: Path) -> str:
    """Why a report could not be written to ``path`` (empty: it can). Asked before the run, not after hours of it."""
    if path.is_dir():
        return f"{path} is a folder"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    if not os.access(path.parent, os.W_OK):
        return f"the folder {path.parent} is not writable"
    return ""


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write ``report``, sealed, to ``path`` in one move: a reader sees the old file or the whole new one."""
    from kvport.reports.reading import sealed

    text = json.dumps(sealed(plain(report)), indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes it private; a report is as readable as any other file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
