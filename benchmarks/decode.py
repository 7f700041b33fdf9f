"""Decode attention on a GPU, next to torch SDPA (bf16, contiguous, enable_gqa) and the measured read ceiling.

python benchmarks/decode.py --json docs/results/decode-h200.json

Columns: microseconds a layer, GB/s of K, V and scales read, percent of the read ceiling, speed against the best SDPA
backend of the same run (above 1 is faster), relative error against float32 attention over the decoded pages.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from gpu_timing import (
    ceilings,
    check_attention,
    filled_store,
    layout_for,
    rotations,
    sdpa_best,
    step_arrays,
    time_calls,
)
from results import machine, saved

from kvport_triton.availability import load

#: name -> (batch, context, KV heads, query heads per KV head)
SHAPES = {
    "b1_32k": (1, 32768, 8, 4),
    "b1_128k": (1, 131072, 8, 4),
    "b8_8k": (8, 8192, 8, 4),
    "b32_4k": (32, 4096, 8, 4),
    "b64_8k": (64, 8192, 8, 4),
    "b128_2k": (128, 2048, 8, 4),
    "g8_b16_8k": (16, 8192, 8, 8),
}
DIM = 128
FORMATS = ("int8", "int4:g64", "fp8_e4m3", "bf16")


def sdpa(shape: tuple[int, int, int, int]) -> tuple[str, Any, dict[str, float]]:
    batch, context, heads, group = shape
    sets = rotations(batch * context * heads * DIM * 4)
    keys, values = (
        [torch.randn(batch, heads, context, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
        for _ in range(2)
    )
    query = torch.randn(batch, heads * group, 1, DIM, dtype=torch.bfloat16, device="cuda")
    return sdpa_best(query, keys, values)


def kvport_cell(backend: Any, text: str, page_size: int, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    batch, context, heads, group = shape
    one = layout_for(text, layers=1, page_size=page_size, heads=heads, group=group)
    nbytes = one.canonical_page_bytes * one.pages_for(context) * batch
    layers = rotations(nbytes)
    layout = layout_for(text, layers=layers, page_size=page_size, heads=heads, group=group)
    lengths = [context] * batch
    store, table = filled_store(backend, layout, lengths)
    plan = backend.plan(store, step_arrays(table, [1] * batch, lengths))
    query = torch.randn(batch, heads * group, DIM, dtype=torch.bfloat16, device="cuda")
    scale = DIM**-0.5
    begin = time.perf_counter()
    error = check_attention(backend, store, layers - 1, query, plan, scale)
    first = time.perf_counter() - begin
    timing = time_calls([lambda n=n: backend.attend(store, n, query, plan, scale=scale) for n in range(layers)])
    items = sum(launch.item_count for launch in plan.private.launches)
    return {
        "us": timing.median, "replays": timing.replays, "bytes": nbytes, "gbps": nbytes / timing.median / 1e3,
        "error": error, "first_call_s": first, "programs": items * heads,
        "partials": sum(launch.partials for launch in plan.private.launches) * heads,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default=";".join(FORMATS), help="format strings, separated by semicolons")
    parser.add_argument("--pages", default="64,16")
    parser.add_argument("--alone", action="store_true", help="without SDPA and the ceilings: pages against pages")
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    backend = load("cuda:0")
    facts = machine()
    print(facts, flush=True)
    ceiling = {} if given.alone else ceilings()
    print({name: round(value) for name, value in ceiling.items()}, flush=True)
    top = max((value for name, value in ceiling.items() if name.startswith("read")), default=float("nan"))
    record: dict[str, Any] = {"machine": facts, "ceilings_gbps": ceiling, "shapes": {}}
    with saved(given.json, record):
        for name in given.shapes.split(","):
            cells = record["shapes"][name] = {}
            reference = float("nan")
            if not given.alone:
                best, base, every = sdpa(SHAPES[name])
                reference = base.median
                torch.cuda.empty_cache()
                others = {k: round(v, 1) for k, v in every.items()}
                print(f"{name:10s} sdpa {base.median:8.1f} us ({best}; {others})", flush=True)
                cells["sdpa"] = {"us": base.median, "backend": best, "replays": base.replays, "all": every}
            for text in given.formats.split(";"):
                for page in map(int, given.pages.split(",")):
                    cell = kvport_cell(backend, text, page, SHAPES[name])
                    torch.cuda.empty_cache()
                    cells[f"{text} p{page}"] = cell
                    print(
                        f"{name:10s} {text:9s} p{page:<3d} {cell['us']:8.1f} us {cell['gbps']:6.0f} GB/s "
                        f"{100 * cell['gbps'] / top:4.0f} % of read  {reference / cell['us']:5.2f}x sdpa  "
                        f"err {cell['error']:.1e}  first call {cell['first_call_s']:.1f} s  "
                        f"{cell['programs']} programs, {cell['partials']} partials",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
