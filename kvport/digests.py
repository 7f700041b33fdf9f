"""What of a stored page is digested apart from what, so that two chips can be compared on each."""

from __future__ import annotations

from typing import Final

#: Codes; scales (zeros count as such); and numbers kept beside the codes: outlier channels and sparse outliers.
PARTS: Final = ("codes", "scales", "outliers")


def part_of(plane: str) -> str:
    """The part of :data:`PARTS` that a plane such as ``key.codes``, ``value.zero``, ``near.key.codes`` belongs to.

    The planes are those of :func:`kvport.layout.planes`.
    """
    name = plane.rpartition(".")[2]
    if name == "codes":
        return "codes"
    return "outliers" if name == "outliers" or name.startswith("sparse_") else "scales"
