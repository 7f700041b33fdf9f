"""Waivers: failures of the conformance suite that are known, owned and on the clock.

A waiver says that a backend is known to fail a case, why, and until when that may be. It is data, in a file::

    [[waiver]]
    backend = "mychip"                           # or "mychip@emu": on that device type only
    case = "append/rows/int4:g16/kv2q4-d64-p16"  # an id, or a pattern with * and ?
    reason = "firmware 7 rounds ties away from zero; fixed in 8"
    expires = 2026-06-30                         # the last day on which it holds
    issue = "https://example.com/mychip/812"     # optional

(TOML, or JSON with the same names), or records that a plugin gives by its hook ``kvport_waivers``. A waived case that
fails is reported as *waived*, which is no pass. One that passes is a failure: then the waiver has done its time. An
expired waiver waives nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvport.errors import InvalidArgument
from kvport.files import reading

#: Days a waiver may run at most: what should hold for longer is what the backend declines in support().
LONGEST: Final = 366
_REQUIRED: Final = ("backend", "case", "reason", "expires")
_KNOWN: Final = (*_REQUIRED, "issue")


@dataclass(frozen=True)
class Waiver:
    """One known failure. ``expires`` is the last day it holds (UTC); ``source`` says where it was read.

    Raises :class:`~kvport.errors.InvalidArgument` for a field that cannot be.
    """

    backend: str
    case: str
    reason: str
    expires: datetime.date
    issue: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("backend", "case", "reason", "issue", "source"):
            value = getattr(self, name)
            if not isinstance(value, str) or (name in _REQUIRED and not value.strip()):
                raise InvalidArgument(f"{self._where}: {name!r} must be text that is not empty, got {value!r}")
        if not re.fullmatch(r"[^@:\s]+(@[^@:\s]+)?", self.backend):
            raise InvalidArgument(
                f"{self._where}: 'backend' is a backend's name or name@device without an index, got {self.backend!r}"
            )
        if not isinstance(self.expires, datetime.date) or isinstance(self.expires, datetime.datetime):
            raise InvalidArgument(
                f"{self._where}: 'expires' is a date such as 2026-06-30, the last day on which the waiver holds, got "
                f"{self.expires!r}"
            )

    @property
    def _where(self) -> str:
        return self.source if isinstance(self.source, str) and self.source else "waiver"

    def concerns(self, backend: str, device: str) -> bool:
        """Whether it is about this backend on this device (``"cuda:1"``)."""
        name, _, kind = self.backend.partition("@")
        return name == backend and kind in ("", device.partition(":")[0])

    def covers(self, case: str) -> bool:
        """Whether it is about this case. ``*`` and ``?`` also stand for a slash; nothing else is special."""
        pattern = re.escape(self.case).replace(r"\*", ".*").replace(r"\?", ".")
        return re.fullmatch(pattern, case) is not None

    def expired(self, today: datetime.date) -> bool:
        return self.expires < today

    def to_json(self) -> dict[str, str]:
        """The same as plain data; :func:`from_record` reads it back."""
        found = {"backend": self.backend, "case": self.case, "reason": self.reason, "expires": str(self.expires)}
        return {**found, "issue": self.issue, "source": self.source}


def from_record(record: object, source: str = "") -> Waiver:
    """A waiver from a mapping of its fields, ``expires`` a date or its ISO text.

    Raises :class:`~kvport.errors.InvalidArgument` that names ``source``, the field and what is allowed.
    """
    where = source or "waiver"
    if not isinstance(record, Mapping):
        raise InvalidArgument(f"{where}: a waiver is a table of {', '.join(_KNOWN)}, got {record!r}")
    if missing := [name for name in _REQUIRED if name not in record]:
        raise InvalidArgument(f"{where}: lacks {', '.join(map(repr, missing))}; a waiver has {', '.join(_REQUIRED)}")
    if unknown := [str(name) for name in record if name not in (*_KNOWN, "source")]:
        raise InvalidArgument(f"{where}: unknown fields {', '.join(map(repr, unknown))}; known: {', '.join(_KNOWN)}")
    fields: dict[str, Any] = {**record, "source": source or record.get("source", "")}
    if isinstance(fields["expires"], str):
        with contextlib.suppress(ValueError):  # the record itself says what a date is
            fields["expires"] = datetime.date.fromisoformat(fields["expires"])
    return Waiver(**fields)


def read(path: str | os.PathLike[str]) -> tuple[Waiver, ...]:
    """The waivers in a file: tables ``[[waiver]]`` in TOML, or ``{"waiver": [...]}`` in JSON, told by its suffix.

    Raises :class:`~kvport.errors.InvalidArgument` for a file that is malformed or has a bad entry, and
    :class:`~kvport.errors.FileError` where there is none that can be read.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise InvalidArgument(f"{path}: a file of waivers ends in .toml or .json")
    try:
        with reading(path, "file of waivers", "docs/conformance.md shows one"):
            text = path.read_text(encoding="utf-8")
        record = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(record, dict) or set(record) != {"waiver"} or not isinstance(record["waiver"], list):
        found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise InvalidArgument(f"{path}: holds a list 'waiver' of waivers and nothing else, found: {found or 'nothing'}")
    return tuple(from_record(entry, f"{path}, waiver {n}") for n, entry in enumerate(record["waiver"], 1))


def chosen(
    waivers: Iterable[Waiver], *, backend: str, device: str, cases: Collection[str], today: datetime.date
) -> dict[str, Waiver]:
    """Case id -> the waiver about it, for one backend on one device. Of several, one that has not expired, the first.

    Every waiver is checked, also those about other backends: it must name at least one of ``cases`` (all ids of the
    suite), expire within :data:`LONGEST` days, and not be there twice. Raises :class:`~kvport.errors.InvalidArgument`.
    """
    waivers = list(waivers)
    seen: dict[tuple[str, str], Waiver] = {}
    found: dict[str, Waiver] = {}
    for waiver in waivers:
        where = waiver.source or "waiver"
        if (twin := seen.setdefault((waiver.backend, waiver.case), waiver)) is not waiver:
            raise InvalidArgument(
                f"{where}: {waiver.case!r} of {waiver.backend} is waived twice, also in {twin.source}: keep one"
            )
        covered = [case for case in cases if waiver.covers(case)]
        if not covered:
            raise InvalidArgument(
                f"{where}: no case of the suite is named {waiver.case!r}; ids are "
                "chapter/check/format/geometry[/option=value], as in a report or in --collect-only"
            )
        if (waiver.expires - today).days > LONGEST:
            raise InvalidArgument(
                f"{where}: expires {waiver.expires}, more than {LONGEST} days from now; what should stay so is "
                "declined in support(), with its reason"
            )
        if waiver.concerns(backend, device):
            for case in covered:
                if case not in found or (found[case].expired(today) and not waiver.expired(today)):
                    found[case] = waiver
    return found
