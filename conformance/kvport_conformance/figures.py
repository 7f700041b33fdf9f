"""What a case measured: figures that go into reports beside its verdict."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvport_conformance.oracle_floats import Array


@dataclass
class Figures:
    """Counts, worst ratios and digests, gathered while a case runs.

    Digests cover what the backend stored, in the order the case looked at it: two backends that agree bit for bit have
    equal digests, wherever they ran.
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
    _codes_digest: Any = field(default_factory=hashlib.sha256, repr=False)
    _scales_digest: Any = field(default_factory=hashlib.sha256, repr=False)

    def stored(self, plane: str, observed: Array) -> None:
        """Digest stored planes: codes and scales apart, little endian."""
        digest = self._codes_digest if plane.endswith(".codes") else self._scales_digest
        digest.update(plane.encode())
        digest.update(np.ascontiguousarray(observed.astype(observed.dtype.newbyteorder("<"), copy=False)).tobytes())

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
            found["digests"] = {"codes": self._codes_digest.hexdigest(), "scales": self._scales_digest.hexdigest()}
        for name in ("output_ratio", "lse_ratio", "format_error"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return {**found, **self.more}
