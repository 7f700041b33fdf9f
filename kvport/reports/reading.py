"""Reading a report: the file, its schema (``report.schema.json``, beside this module) and its seal.

The seal is a sha256 over the canonical JSON of everything else. It finds a report that was edited by hand or damaged
on its way; it is no signature, and proves nothing about who ran the suite.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from kvport.arguments import show
from kvport.errors import KVPortError
from kvport.files import parse_json

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


class ReportError(KVPortError):
    """A file that is no readable conformance report."""


@dataclass(frozen=True)
class Report:
    """A report as it was written; ``path`` is where it was read from, for messages."""

    record: Mapping[str, Any]
    path: str = ""

    @cached_property
    def cases(self) -> dict[str, Mapping[str, Any]]:
        """The cases by id (of repeated ids the last one; :func:`kvport.reports.verify` finds repetitions)."""
        return {case["id"]: case for case in self.record["cases"]}

    @property
    def backend(self) -> Mapping[str, Any]:
        backend: Mapping[str, Any] = self.record["backend"]
        return backend

    @property
    def execution(self) -> str:
        return str(self.backend["execution"])

    @property
    def tier(self) -> str:
        return self.record["run"]["tier"] or "quick"

    @property
    def label(self) -> str:
        """``triton@cuda:0``, with the execution kind where it is not hardware: it must never be read as hardware."""
        name = f"{self.backend['name']}@{self.backend['device']}"
        return name if self.execution == "hardware" else f"{name} [{self.execution}]"


def digest(record: Mapping[str, Any]) -> str:
    """sha256 over the canonical JSON of a report without its seal."""
    bare = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The report with its seal, which is its last field. Numbers must be as JSON can hold them."""
    return {**record, "digest": digest(record)}


def read(path: str | os.PathLike[str]) -> Report:
    """Read and check a report against the schema. Raises :class:`ReportError` with the first few faults."""
    try:
        record = parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} is no JSON file: {error}") from error
    faults = schema_faults(record)
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise ReportError(f"{path} is no conformance report of schema version 1: {'; '.join(faults[:3])}{more}")
    return Report(record, str(path))


def read_unaltered(path: str | os.PathLike[str]) -> Report:
    """:func:`read`, refusing a report whose seal does not match: what was edited proves nothing about a chip."""
    report = read(path)
    if report.record["digest"] != digest(report.record):
        raise ReportError(
            f"{path}: the seal does not match, so the report was edited or damaged after it was written; "
            f"'kvport verify-report {path}' says more"
        )
    return report


def schema() -> dict[str, Any]:
    """The published JSON Schema of a report."""
    found: dict[str, Any] = json.loads(
        resources.files("kvport.reports").joinpath("report.schema.json").read_text(encoding="utf-8")
    )
    return found


def schema_faults(record: object) -> list[str]:
    """Where a record breaks the schema, in words; empty where it keeps to it."""
    return _faults(record, schema(), "report")


def _faults(value: Any, rule: Mapping[str, Any], where: str) -> list[str]:
    """The part of JSON Schema that the published schema uses: type, enum, required, properties, items."""
    if "enum" in rule and value not in rule["enum"]:
        return [f"{where} is {show(value)}, allowed: {', '.join(map(repr, rule['enum']))}"]
    if "type" in rule:
        names = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
        allowed = tuple(kind for name in names for kind in _JSON_TYPES[name])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            return [f"{where} is {type(value).__name__}, must be {' or '.join(names)}"]
        if isinstance(value, (int, float)) and not abs(value) < 2**63:  # 1e999 is read as infinity
            return [f"{where} is {show(value)}, must be finite and below 2**63"]
    found = []
    if isinstance(value, dict):
        found += [f"{where} lacks {name!r}" for name in rule.get("required", ()) if name not in value]
        known = rule.get("properties", {})
        others = rule.get("additionalProperties", {})
        for name, item in value.items():
            found += _faults(item, known.get(name, others), f"{where}.{name}")
    elif isinstance(value, list) and "items" in rule:
        for index, item in enumerate(value):
            found += _faults(item, rule["items"], f"{where}[{index}]")
    return found
