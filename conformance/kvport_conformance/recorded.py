"""The arrays that a case saw, kept for ``--tensors``: what the backend stored and what it answered.

Every case writes a file of its own into a spool folder, in whichever process it ran; at the end of the run the plugin
joins those that fit into one file beside the report (``pytest_kvport.spool``). :mod:`kvport.reports.tensors` reads it
and says how it is laid out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kvport_conformance.oracle_floats import Array


class Recording:
    """The looks of one case, up to ``limit`` bytes; a case that has more keeps none, so that none is half."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.looks = 0
        self.arrays: dict[str, Array] = {}

    def look(self, arrays: Mapping[str, Array], places: Sequence[str]) -> None:
        """Keep a copy of these arrays; ``places`` say in words where each row lies."""
        words = np.frombuffer("\n".join(places).encode(), np.uint8)
        self.nbytes += words.nbytes + sum(array.nbytes for array in arrays.values())
        if self.nbytes <= self.limit:
            for name, array in {**arrays, "places": words}.items():
                little = array.astype(array.dtype.newbyteorder("<"), copy=True)
                self.arrays[f"{self.looks:05d}.{name}"] = np.ascontiguousarray(little)
        else:
            self.arrays.clear()
        self.looks += 1

    def save(self, folder: Path, identity: str) -> int:
        """Write what was kept, if anything, as a file of the spool folder. Returns its bytes."""
        if self.arrays:
            from safetensors.numpy import save_file

            stem = hashlib.sha256(identity.encode()).hexdigest()[:32]
            arrays = {f"{identity}#{name}": array for name, array in self.arrays.items()}
            save_file(arrays, folder / f"{stem}.safetensors")
        return sum(array.nbytes for array in self.arrays.values())
