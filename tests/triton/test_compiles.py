"""The kernels compile for a Hopper GPU, where there is none: what the interpreter cannot show.

Types that only the compiler checks, inline assembly that ptxas reads, and shared memory within what a program may have.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Bytes of shared memory a program may have on compute capability 9.0 (227 KiB).
MOST_SHARED = 232_448

# [format, page size, dtype, dim, query rows, lengths], by the process that compiles them one after the other.
STEPS: dict[str, list[list[Any]]] = {
    "codes": [
        ["int8", 16, "bfloat16", 128, [1, 1], [2000, 90]],
        ["fp8_e4m3", 64, "float16", 128, [1, 4], [200, 64]],
        ["k=int4:g64:asym,v=int2:g64", 32, "bfloat16", 128, [1], [200]],
        ["int8:head:static", 64, "bfloat16", 128, [256], [300]],  # prefill by decoded runs
    ],
    "other ways": [
        ["k=int2:c32:asym:scale=fp16,v=int8", 32, "bfloat16", 64, [1], [100]],
        ["latent=int8:g128,rope=bf16", 64, "bfloat16", 512, [1, 2], [300, 70]],
        ["latent=int4:g128,rope=bf16", 64, "float16", 512, [1], [70]],
        ["fp8_e5m2", 16, "float32", 256, [1], [70]],
    ],
}


@pytest.mark.skipif("os.environ.get('KVPORT_TRITON_DEVICE', 'cpu') != 'cpu'", reason="there is a GPU here")
@pytest.mark.parametrize("way", STEPS)
def test_what_a_step_launches_compiles(way: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_without_gpu.py")), json.dumps(STEPS[way])],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    for text, *_ in STEPS[way]:
        launched = {entry["kernel"] for entry in kernels if entry["step"] == text}
        assert launched & {"decode_kernel", "attend_kernel", "latent_kernel"}, text
    for entry in kernels:
        assert entry["shared"] <= MOST_SHARED, entry
