"""What holds for every test of kvport, whichever process of a parallel run gets it."""

from __future__ import annotations

import os

# Triton decides when it is imported whether its kernels are interpreted, for the whole process. Transformers imports
# it too, so whichever test a worker ran first would decide; the variable is set before any test module is loaded.
if "KVPORT_TRITON_DEVICE" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")
