"""Ten small shapes that between them launch every kernel of the NVIDIA backend, for compute-sanitizer to watch.

::

    compute-sanitizer --tool memcheck python scripts/nvidia_sanitized_shapes.py
    python scripts/nvidia_sanitized_shapes.py --device triton@cpu      # tries the script

Numbers are judged elsewhere; here each output must only be finite.
"""

from __future__ import annotations

import argparse
import sys

import torch

from kvport.backend import Backend, StepArrays
from kvport.formats import CacheFormat
from kvport.layout import GroupLayout
from kvport.registry import load_backend
from kvport.scales import LayerScales, SideScales

#: (format, page size, dtype, query rows and lengths of each sequence)
SHAPES = (
    ("int8", 64, torch.bfloat16, (1, 1), (700, 90)),
    ("int8", 16, torch.bfloat16, (1, 4), (700, 37)),
    ("int4:g64", 16, torch.bfloat16, (1, 9), (300, 40)),
    ("int2:g64:asym", 32, torch.float16, (1, 16), (130, 70)),
    ("int8:head:static", 16, torch.bfloat16, (1, 3), (100, 33)),
    ("fp8_e4m3", 64, torch.bfloat16, (1, 4), (200, 64)),
    ("bf16", 16, torch.bfloat16, (1, 40), (100, 57)),
    ("int8", 64, torch.bfloat16, (260, 1), (300, 65)),
    ("fp32", 32, torch.float32, (1, 3), (70, 33)),
    ("k=int8:asym,v=int4:g32", 128, torch.float16, (1, 30), (150, 130)),
)
HEADS, GROUP, DIM = 2, 4, 128


def run(backend: Backend, text: str, page: int, dtype: torch.dtype, rows: tuple[int, ...], lengths: tuple[int, ...]):  # type: ignore[no-untyped-def]
    layout = GroupLayout(CacheFormat.parse(text), 1, HEADS, HEADS * GROUP, DIM, DIM, page, None, dtype)
    if reasons := backend.support(layout).reasons:
        return f"declined: {'; '.join(reasons)}"
    static = LayerScales(*(SideScales(torch.full((HEADS,), 0.03)) for _ in range(2)))
    counts = [layout.pages_for(n) for n in lengths]
    store = backend.allocate(layout, sum(counts) + 2, scales=[static] if layout.format.static else None)
    ids = iter(torch.randperm(sum(counts)) + 1)
    table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    slots = []
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for column in range(count):
            table[s, column] = next(ids)
        position = torch.arange(length)
        slots.append(table[s, position // page].long() * page + position % page)
    device = backend.torch_device
    tokens = sum(lengths)
    key, value = (torch.randn(tokens, HEADS, DIM, dtype=dtype).to(device) for _ in range(2))
    backend.append(store, 0, key, value, torch.cat(slots).to(device))
    arrays = StepArrays(
        page_table=table,
        kv_start=torch.zeros(len(lengths), dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.tensor([0, rows[0], sum(rows)], dtype=torch.int32),
        query_positions=torch.tensor([n - r for n, r in zip(lengths, rows, strict=True)], dtype=torch.int32),
    )
    query = torch.randn(sum(rows), HEADS * GROUP, DIM, dtype=dtype).to(device)
    sinks = torch.zeros(HEADS * GROUP).to(device)
    out, lse = backend.attend(store, 0, query, backend.plan(store, arrays), scale=DIM**-0.5, sinks=sinks)
    backend.synchronize()
    finite = bool(torch.isfinite(out.float()).all()) and bool(torch.isfinite(lse).all())
    return "ok" if finite else "an output is not finite"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    backend = load_backend(parser.parse_args().device)
    torch.manual_seed(1)
    failed = 0
    for shape in SHAPES:
        outcome = run(backend, *shape)
        print(*shape[:2], *shape[3:], outcome, flush=True)
        failed += outcome.startswith("an output")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
