"""The one test function that every test module of the suite is made of."""

from __future__ import annotations

from kvport_conformance.bench import Bench
from kvport_conformance.verdicts import Disagreement, NotSupported
from pytest_kvport import disagreement, unsupported


def run(bench: Bench) -> None:
    """Run the bench's case as a pytest test.

    What the backend declines is unsupported, with its reason. A disagreement is a short text; whatever else escapes
    comes with its traceback, without the suite's own frames.
    """
    __tracebackhide__ = True
    try:
        bench.run()
    except NotSupported as refusal:
        unsupported(str(refusal))
    except Disagreement as found:
        disagreement(bench.case.id, bench.case.summary, str(found))
