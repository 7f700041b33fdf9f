"""Tests of the Triton backend. In CI the kernels run in Triton's interpreter, on small shapes.

On a GPU: ``KVPORT_TRITON_DEVICE=cuda pytest tests/triton`` runs the same tests on hardware, and those marked
``hardware`` as well. One process can do one of the two, because triton decides when it is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The suite runs with --import-mode=importlib, which puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("triton_support")

DEVICE = os.environ.get("KVPORT_TRITON_DEVICE", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hardware: needs a GPU (KVPORT_TRITON_DEVICE=cuda)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hardware") and DEVICE == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs a GPU: set KVPORT_TRITON_DEVICE=cuda"))


@pytest.fixture(scope="session")
def backend():  # type: ignore[no-untyped-def]  # the type's module must not be imported before the backend is loaded
    """The Triton backend: interpreted, or on the GPU that KVPORT_TRITON_DEVICE names."""
    pytest.importorskip("triton", exc_type=ImportError) if DEVICE != "cpu" else _installed()
    from kvport_triton.availability import load

    loaded = load(DEVICE)
    loaded.check_overflow = True
    return loaded


def _installed() -> None:
    # importorskip would import triton, and that before TRITON_INTERPRET is set.
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
