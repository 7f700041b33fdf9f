"""Reading a report: the file, its schema (``report.schema.json``, beside this module) and its seal.

The seal is a sha256 over the canonical JSON of everything else. It finds a report that was edited by hand or damaged
on its way; it is no signature, and proves nothing about who ran the suite.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from kvport.arguments import show
from kvport.errors import KVPortError
from kvport.files import parse_json, reading

#: What this kvport reads; see :data:`pytest_kvport.reporting.SCHEMA_VERSION`.
SCHEMA_VERSION = 2
#: Bytes of a report. That of the full tier has 20 MB.
LARGEST = 2**29

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
    def hardware(self) -> bool:
        return self.execution == "hardware"

    @property
    def tier(self) -> str:
        return self.record["run"]["tier"] or "quick"

    @property
    def label(self) -> str:
        """``triton@cuda:0``, with the execution kind where it is not hardware: it must never be read as hardware."""
        name = f"{self.backend['name']}@{self.backend['device']}"
        return name if self.hardware else f"{name} [{self.execution}]"


def digest(record: Mapping[str, Any]) -> str:
    """sha256 over the canonical JSON of a report without its seal."""
    bare = {key: value for key, value in record.items() if key != "digest"}
    try:
        text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except RecursionError:
        raise ReportError("the report's lists and objects are nested too deeply to be sealed") from None
    return hashlib.sha256(text.encode()).hexdigest()


def shown(text: object) -> str:
    """``text`` as one line that a terminal only prints: control characters and stray surrogates become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The report with its seal, which is its last field. Numbers must be as JSON can hold them."""
    return {**record, "digest": digest(record)}


def read(path: str | os.PathLike[str]) -> Report:
    """Read and check a report against the schema. Raises :class:`ReportError` with the first few faults, and
    :class:`~kvport.errors.FileError` where there is no file that can be read."""
    try:
        with reading(path, "report", "pytest --pyargs kvport_conformance --report=FILE writes one"):
            if (size := os.stat(path).st_size) > LARGEST:
                raise ReportError(f"{path} has {size} bytes; a report has at most {LARGEST}")
            record = _parse(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is no JSON file: {error}") from None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if type(version) is int and version != SCHEMA_VERSION:
        raise ReportError(
            f"{path} is a report of schema version {version}, this kvport reads {SCHEMA_VERSION}: "
            "run the suite again, or use the kvport that wrote it"
        )
    faults = schema_faults(record)
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise ReportError(
            f"{path} is no conformance report of schema version {SCHEMA_VERSION}: {'; '.join(faults[:3])}{more}"
        )
    return Report(record, str(path))


def _parse(text: str) -> Any:
    """JSON as reports have it: no NaN, no number beyond a double's range, no name twice in an object."""
    return parse_json(
        text, parse_constant=_no_constant, parse_int=_integer, parse_float=_float, object_pairs_hook=_object
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON; a report writes numbers that are not finite as strings")


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"the number {digits[:20]}... has {len(digits)} digits")
    return int(digits)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is beyond a double's range")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has {name!r:.60} twice")
    return found


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
    """The part of JSON Schema that the published schema uses; a test compares it with a whole implementation."""
    if not rule:
        return []
    if "anyOf" in rule:
        tried = [_faults(value, one, where) for one in rule["anyOf"]]
        return [] if [] in tried else [" or ".join(faults[0] for faults in tried)]
    if "enum" in rule and not any(value == one and type(value) is type(one) for one in rule["enum"]):
        return [f"{where} is {show(value)}, allowed: {', '.join(map(repr, rule['enum']))}"]
    if "type" in rule:
        names = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
        if not any(_is(value, name) for name in names):
            return [f"{where} is {type(value).__name__}, must be {' or '.join(names)}"]
    if "minimum" in rule and value < rule["minimum"]:
        return [f"{where} is {show(value)}, must be at least {rule['minimum']}"]
    if "pattern" in rule and isinstance(value, str) and not re.search(rule["pattern"], value):
        return [f"{where} is {show(value)}, must match {rule['pattern']}"]
    found = []
    if isinstance(value, dict):
        found += [f"{where} lacks {name!r}" for name in rule.get("required", ()) if name not in value]
        known = rule.get("properties", {})
        others = rule.get("additionalProperties", {})
        for name, item in value.items():
            found += _faults(item, known.get(name, others), f"{where}.{name:.60}")
    elif isinstance(value, list) and "items" in rule:
        for index, item in enumerate(value):
            found += _faults(item, rule["items"], f"{where}[{index}]")
    return found


def _is(value: Any, name: str) -> bool:
    """Whether a value is of a JSON type; 3.0 is an integer to JSON Schema, true is no number."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _JSON_TYPES[name])
