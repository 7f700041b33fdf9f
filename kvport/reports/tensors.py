"""The arrays beside a report: what cases stored and answered, so that two chips can be compared code by code.

A run with ``--tensors`` writes ``NAME.safetensors`` beside ``NAME.json``. Tensor ``ID#00003.key.codes`` belongs to the
fourth look that the case ``ID`` took at what its backend holds: planes of pages (``key.codes``, ``value.scale``, ...,
one row a token, half precision as uint16 bit patterns), or an ``output`` and ``lse`` of attend. ``ID#00003.places`` are
the words, one line a row, that say where each row lies. The report has the file's sha256 and is sealed, so that arrays
and report cannot be mixed up.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvport.digests import part_of
from kvport.reports.reading import Report, ReportError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]
    #: One look: its arrays by name.
    Look = Mapping[str, Array]


def is_plane(name: str) -> bool:
    """Whether an array of a look is a stored plane (and not an answer, nor the words that go with it)."""
    return "." in name


class Digests:
    """sha256 over arrays in the order in which they are seen, by part: names, and bytes in little endian."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, Any] = defaultdict(hashlib.sha256)

    def note(self, part: str, words: str) -> None:
        self._parts[part].update(words.encode())

    def add(self, part: str, name: str, array: Array) -> None:
        import numpy as np

        self.note(part, name)
        self._parts[part].update(
            np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).tobytes()
        )

    def to_json(self) -> dict[str, str]:
        return {part: digest.hexdigest() for part, digest in self._parts.items()}


def stored_digests(looks: Iterable[Look]) -> dict[str, str]:
    """What a report must have as the digests of stored planes, from the planes themselves."""
    digests = Digests()
    for look in looks:
        for name, array in look.items():
            if is_plane(name):
                digests.add(part_of(name), name, array)
    return digests.to_json()


@dataclass(frozen=True)
class Tensors:
    """The arrays of one report, read case by case."""

    path: Path

    @cached_property
    def _file(self) -> Any:
        """The open file: its header names every tensor, and is read once."""
        from safetensors import safe_open

        return safe_open(self.path, framework="np")

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """Case id -> names of its tensors, in order."""
        found: dict[str, list[str]] = {}
        for name in sorted(self._file.keys()):
            found.setdefault(name.rpartition("#")[0], []).append(name)
        return found

    def looks(self, identity: str) -> list[Look]:
        """The looks of one case in order; empty where its arrays were not saved."""
        found: dict[str, dict[str, Array]] = {}
        for name in self.names.get(identity, ()):
            number, _, short = name.rpartition("#")[2].partition(".")
            found.setdefault(number, {})[short] = self._file.get_tensor(name)
        return [found[number] for number in sorted(found)]


def beside(report: Report) -> Tensors | None:
    """The arrays of a report, checked against the digest it has of them; None where it has none.

    Raises :class:`ReportError` where they are missing, damaged, or those of another run.
    """
    entry = report.record.get("tensors")
    if entry is None:
        return None
    path = Path(report.path).with_name(entry["file"]) if Path(entry["file"]).name == entry["file"] else None
    if path is None:
        raise ReportError(f"{report.path} names {entry['file']!r} for its arrays; they must lie beside it")
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise ReportError(f"{path} has {size} bytes, the report says {entry['bytes']}: it is that of another run")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ReportError(
            f"the arrays of {report.path} cannot be read ({error}); put {entry['file']} beside it, or compare without"
        ) from None
    if digest != entry["sha256"]:
        raise ReportError(f"{path} is not what the report has the digest of: it was altered, or is of another run")
    from safetensors import SafetensorError

    found = Tensors(path)
    try:
        _ = found.names
    except (SafetensorError, OSError, ValueError) as error:
        raise ReportError(f"{path} is no intact safetensors file: {error}") from None
    return found


# --- the first difference ---------------------------------------------------------------------------------------------


def first_difference(first: Iterable[Look], second: Iterable[Look], part: str, bits: Mapping[str, int]) -> str:
    """The first stored element of ``part`` that differs between two backends' looks at one case, in words.

    ``bits`` are the bits of a code by side (``{"key": 4, "value": 8}``), to count channels in packed bytes.
    """
    import numpy as np

    for number, (one, two) in enumerate(zip(first, second, strict=False)):
        if not _same_place(one, two):
            return f"look {number} is at {_place(one, 0)} against {_place(two, 0)}"
        for name in one:
            if not is_plane(name) or part_of(name) != part or name not in two:
                continue
            a, b = one[name], two[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"look {number}, {name}: {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
            width = bits.get(name.rpartition(".")[0].rpartition(".")[2], 8) if part == "codes" else 8
            a, b = _unpacked(a, width), _unpacked(b, width)
            raw = [x.view(f"u{x.dtype.itemsize}") for x in (a, b)]
            differing = raw[0] != raw[1]
            if differing.any():
                where = np.unravel_index(int(np.argmax(differing)), differing.shape)
                place = f"look {number}, {_place(one, int(where[0]))}, {name}{_inside(part, where[1:])}"
                counted = f"{int(differing.sum())} of {differing.size} there differ"
                return f"{place}: {_shown(a[where])} against {_shown(b[where])}; {counted}"
    return ""


def largest_answer_difference(first: Iterable[Look], second: Iterable[Look]) -> float | None:
    """max |output - output'| / max |output| over the looks at answers that two backends share; None without any.

    Backends of different features are not asked the same: looks are compared up to the first that is at another place.
    """
    import numpy as np

    found: float | None = None
    for one, two in zip(first, second, strict=False):
        if not _same_place(one, two):
            break
        a, b = one.get("output"), two.get("output")
        if a is None or b is None or a.shape != b.shape or not a.size:
            continue
        usable = np.isfinite(a) & np.isfinite(b)
        if usable.any():
            scale = max(float(np.abs(a[usable]).max()), float(np.finfo(np.float32).tiny))
            found = max(found or 0.0, float(np.abs(a.astype(np.float64) - b)[usable].max()) / scale)
    return found


def _unpacked(array: Array, bits: int) -> Array:
    """One element a code: bytes that hold several are taken apart, lowest bits first."""
    import numpy as np

    array = np.ascontiguousarray(array)
    if bits >= 8 or array.dtype.itemsize > 1:
        return array
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    split = (array.view(np.uint8)[..., None] >> shifts) & np.uint8(2**bits - 1)
    return split.reshape(*array.shape[:-1], -1)


def _same_place(one: Look, two: Look) -> bool:
    return _words(one) == _words(two)


def _words(look: Look) -> bytes:
    return bytes(look["places"]) if "places" in look else b""


def _place(look: Look, row: int) -> str:
    lines = _words(look).decode("utf-8", "replace").split("\n")
    return lines[row] if row < len(lines) and lines[row] else f"row {row}"


def _inside(part: str, where: Iterable[Any]) -> str:
    names = ("head", "channel" if part == "codes" else "group" if part == "scales" else "outlier")
    return "".join(f", {name} {int(index)}" for name, index in zip(names, where, strict=False))


def _shown(value: Any) -> str:
    """A stored element: integers as they are, floats with their bits."""
    number = value.item()
    if isinstance(number, int):
        return f"{number} (0x{number & (2 ** (8 * value.dtype.itemsize) - 1):x})"
    return f"{number!r} (0x{int.from_bytes(value.tobytes(), sys.byteorder):x})"
