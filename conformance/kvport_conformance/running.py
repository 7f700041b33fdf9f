"""The one test function that every test module of the suite is made of."""

from __future__ import annotations

from kvport_conformance.bench import Bench
from kvport_conformance.verdicts import NotSupported
from pytest_kvport import unsupported


def run(bench: Bench) -> None:
    """Run the bench's case as a pytest test: what the backend declines is reported as unsupported, with its reason."""
    try:
        bench.run()
    except NotSupported as refusal:
        unsupported(str(refusal))
