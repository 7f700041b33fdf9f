"""append on a GPU: quantize and scatter K and V of one layer; next to a plain copy of the same rows.

python benchmarks/append.py --json docs/results/append-h200.json

GB/s counts K and V read and codes and scales written. Static scales need no pass over the row before it is quantized;
both kinds are shown.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from gpu_timing import layout_for, rotations, time_calls, unit_scales
from results import machine, saved

from kvport_triton.availability import load

TOKENS = (64, 512, 4096, 16384)
FORMATS = ("int8", "int8:head:static", "int8:asym", "int4:g64", "int4:channel:static", "bf16")
PAGE = 64
HEADS, DIM = 8, 128


def append_cell(backend: Any, text: str, tokens: int) -> dict[str, Any]:
    one = layout_for(text, layers=1, page_size=PAGE)
    written = one.canonical_page_bytes * tokens // PAGE
    nbytes = tokens * HEADS * DIM * 2 * 2 + written
    layers = min(64, rotations(nbytes))
    layout = layout_for(text, layers=layers, page_size=PAGE)
    # Decode appends one token to each of many pages; prefill fills pages whole, in shuffled order.
    pages = max(tokens, 2) if tokens <= 512 else tokens // PAGE
    store = backend.allocate(layout, pages + 1, scales=unit_scales(layout) if layout.format.static else None)
    order = torch.randperm(pages) + 1
    if tokens <= 512:
        slots = order[:tokens] * PAGE + torch.randint(1, PAGE, (tokens,))
    else:
        slots = (order[:, None] * PAGE + torch.arange(PAGE)).flatten()
    slots = slots.cuda()
    rows = [torch.randn(2, tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    timing = time_calls([lambda n=n: backend.append(store, n, rows[n][0], rows[n][1], slots) for n in range(layers)])
    return {"us": timing.median, "replays": timing.replays, "bytes": nbytes, "gbps": nbytes / timing.median / 1e3}


def copy_cell(tokens: int) -> dict[str, Any]:
    nbytes = tokens * HEADS * DIM * 2 * 2 * 2
    sets = min(64, rotations(nbytes))
    source = [torch.randn(2, tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
    target = [torch.empty_like(x) for x in source]
    timing = time_calls([lambda n=n: target[n].copy_(source[n]) for n in range(sets)])
    return {"us": timing.median, "replays": timing.replays, "bytes": nbytes, "gbps": nbytes / timing.median / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=";".join(FORMATS), help="format strings, separated by semicolons")
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    backend = load("cuda:0")
    record: dict[str, Any] = {"machine": machine(), "tokens": {}}
    print(record["machine"], flush=True)
    with saved(given.json, record):
        for tokens in TOKENS:
            cells = record["tokens"][tokens] = {"copy": copy_cell(tokens)}
            for text in given.formats.split(";"):
                cells[text] = append_cell(backend, text, tokens)
                torch.cuda.empty_cache()
            line = "  ".join(f"{name} {cell['us']:.1f} us ({cell['gbps']:.0f} GB/s)" for name, cell in cells.items())
            print(f"T{tokens:<6d} {line}", flush=True)


if __name__ == "__main__":
    main()
