"""Compile what a step launches for compute capability 9.0, without a GPU, and print what each kernel needs.

Run by ``test_compiles.py`` in a process of its own, as the tests' process interprets. The arguments are one JSON list
of steps ``[format, page size, dtype, dim, query rows, lengths]``; the output is a line of JSON for each kernel. In
latent layers dim is the latent part's, and 64 rotary channels follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvport.backend import StepArrays
from kvport.formats import CacheFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales

ROPE = 64


class NoGpu:
    """Just enough of a driver to say what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(NoGpu())
    launch = JITFunction.run
    compiled: list[dict[str, Any]] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        began = time.perf_counter()
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        took = time.perf_counter() - began
        compiled.append({"kernel": self.__name__, "shared": kernel.metadata.shared, "seconds": round(took, 2)})
        return kernel

    JITFunction.run = compile_only

    from kvport_triton.backend import TritonBackend

    class Compiling(TritonBackend):
        """The backend with tensors on the host and nothing launched; numbers mean nothing."""

        def __init__(self) -> None:
            self.device, self.torch_device = "cuda:0", torch.device("cpu")
            self.interpreted, self.execution = False, "hardware"
            self.processors, self.capability, self.gpu, self.tuned = 132, (9, 0), "none", {}
            self.shared_memory = 232_448

        def _on_device(self) -> Any:
            return contextlib.nullcontext()

    backend = Compiling()
    for text, page, dtype_name, dim, rows, lengths in json.loads(sys.argv[1]):
        dtype = getattr(torch, dtype_name)
        latent = text.startswith("latent=")
        heads, width = (1, dim + ROPE) if latent else (2, dim)
        layout = GroupLayout(CacheFormat.parse(text), 1, heads, 8, width, dim, page, None, dtype, latent)
        assert backend.support(layout).ok, backend.support(layout).reasons
        static = LayerScales(*(SideScales(torch.full((2,), 0.03)) for _ in range(2)))
        counts = [layout.pages_for(n) for n in lengths]
        store = backend.allocate(layout, sum(counts) + 1, scales=[static] if layout.format.static else None)
        tokens = sum(lengths)
        if not any(side.format.sealed_only for side in layout.sides):
            data = torch.zeros(tokens, heads, width, dtype=dtype)
            backend.append(store, 0, data, None if latent else data, torch.arange(tokens))
        arrays = StepArrays(
            page_table=torch.zeros((len(lengths), max(counts)), dtype=torch.int32),
            kv_start=torch.zeros(len(lengths), dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            query_starts=torch.cumsum(torch.tensor([0, *rows]), 0).int(),
            query_positions=torch.tensor([n - r for n, r in zip(lengths, rows, strict=True)], dtype=torch.int32),
        )
        query = torch.zeros(sum(rows), 8, width, dtype=dtype)
        backend.attend(store, 0, query, backend.plan(store, arrays), scale=0.1)
        for entry in compiled:
            print(json.dumps({"step": text, **entry}), flush=True)
        compiled.clear()


if __name__ == "__main__":
    main()
