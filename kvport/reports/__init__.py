"""Conformance reports: reading them, judging one against the manifest, and comparing any number of them.

``reading``
    the JSON file, its schema and its seal.
``verifying``
    one report against the manifest: what is missing, extra, contradictory or edited.
``comparing``
    several reports: who agrees with whom, on how many of how many cases, and what each lacks.
``tensors``
    the arrays beside a report, and the first place where those of two backends differ.
``tables``, ``text``, ``html``
    what a comparison shows; for the terminal, for a pull request, and as one self-contained page.

Nothing here runs a backend, and nothing here needs the machine that a report came from.
"""

from __future__ import annotations

from kvport.reports import text
from kvport.reports.comparing import Comparison, compare
from kvport.reports.reading import Report, ReportError, read, sealed
from kvport.reports.tensors import Tensors, beside
from kvport.reports.verifying import Manifest, Verification, verify

__all__ = [
    "Comparison",
    "Manifest",
    "Report",
    "ReportError",
    "Tensors",
    "Verification",
    "beside",
    "compare",
    "read",
    "sealed",
    "text",
    "verify",
]
