"""What a case measured: figures that go into reports beside its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvport.digests import part_of
from kvport.reports.tensors import Digests
from kvport_conformance.oracle_floats import Array
from kvport_conformance.recorded import Recording


@dataclass
class Figures:
    """Counts, worst ratios and digests, gathered while a case runs, and its arrays where a ``recording`` is made.

    Digests cover what the backend stored, in the order the case looked at it, whether it was right or not: two backends
    that agree bit for bit have equal digests, wherever they ran. The digest of the inputs (K, V, queries, static scales
    and imported pages, as they were given) proves that both worked on the same numbers; each
    array counts once, because a backend with fewer features is asked less often about the same ones.
    """

    codes: int = 0
    codes_differing: int = 0
    scales: int = 0
    scales_differing: int = 0
    scale_ulps: int = 0
    output_ratio: float | None = None
    lse_ratio: float | None = None
    format_error: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    recording: Recording | None = field(default=None, repr=False)
    _digests: Digests = field(default_factory=Digests, repr=False)
    _given: set[str] = field(default_factory=set, repr=False)

    def given(self, name: str, array: Array) -> None:
        """Digest what the backend is given, the first time."""
        one = Digests()
        one.add("inputs", f"{name} {array.dtype.str[1:]} {array.shape}", array)
        if (found := one.to_json()["inputs"]) not in self._given:
            self._given.add(found)
            self._digests.note("inputs", found)

    def stored(self, planes: Mapping[str, Array], places: Sequence[str]) -> None:
        """Digest stored planes, by part; ``places`` say in words where each row lies."""
        for plane, array in planes.items():
            self._digests.add(part_of(plane), plane, array)
        if self.recording is not None:
            self.recording.look(planes, places)

    def answered(self, output: Array, lse: Array, who: str) -> None:
        """Keep what attend answered for the query rows of one sequence; ``who`` says in words which, and asked how."""
        if self.recording is not None:
            self.recording.look({"output": output, "lse": lse}, [f"{who}, query row {i}" for i in range(len(output))])

    def worst(self, name: str, value: float) -> None:
        """Keep the largest of a figure."""
        known = getattr(self, name)
        setattr(self, name, value if known is None else max(known, value))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.codes:
            found["codes"] = {"compared": self.codes, "differing": self.codes_differing}
            found["scales"] = {
                "compared": self.scales,
                "differing": self.scales_differing,
                "largest_ulps": self.scale_ulps,
            }
            found["exactness"] = "one-code" if self.codes_differing or self.scales_differing else "bit-exact"
        if digests := self._digests.to_json():
            found["digests"] = digests
        for name in ("output_ratio", "lse_ratio", "format_error"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return {**found, **self.more}
