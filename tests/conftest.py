"""What holds for every test of kvport, whichever process of a parallel run gets it."""

from __future__ import annotations

import os


def pytest_collect_file() -> None:
    """Called for files below this folder alone, before they are imported: pytest loads this conftest also for runs that
    only began in the project's folder, such as the conformance suite's on a GPU.

    Triton decides when it is imported whether its kernels are interpreted, for the whole process. Transformers imports
    it too, so whichever test a worker ran first would decide.
    """
    if "KVPORT_TRITON_DEVICE" not in os.environ:
        os.environ.setdefault("TRITON_INTERPRET", "1")
