"""Prefill attention on a GPU: new tokens over quantized paged history, next to torch SDPA on contiguous bf16 K/V.

python benchmarks/prefill.py --json docs/results/prefill-h200.json
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from gpu_timing import check_attention, filled_store, layout_for, sdpa_best, step_arrays, time_calls
from results import machine, saved

from kvport_triton.availability import load

#: name -> (new tokens, history)
SHAPES = {"p4k_h0": (4096, 0), "p4k_h28k": (4096, 28672), "p512_h8k": (512, 8192)}
FORMATS = ("int8", "int4:g64", "bf16")
HEADS, GROUP, DIM = 8, 4, 128


def flops(new: int, history: int) -> float:
    """Multiplications and additions of both products over what causal rows see."""
    return 4.0 * HEADS * GROUP * DIM * (new * history + new * (new + 1) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=";".join(FORMATS), help="format strings, separated by semicolons")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    backend = load("cuda:0")
    record: dict[str, Any] = {"machine": machine(), "shapes": {}}
    print(record["machine"], flush=True)
    with saved(given.json, record):
        for name in given.shapes.split(","):
            new, history = SHAPES[name]
            length = new + history
            key, value = (torch.randn(1, HEADS, length, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            query = torch.randn(1, HEADS * GROUP, new, DIM, dtype=torch.bfloat16, device="cuda")
            best, base, every = sdpa_best(query, [key], [value], history=history)
            rate = flops(new, history) / base.median / 1e6
            others = {k: round(v) for k, v in every.items()}
            print(f"{name:9s} sdpa {base.median:8.1f} us {rate:5.0f} TFLOP/s ({best}; {others})")
            cells = record["shapes"][name] = {
                "sdpa": {"us": base.median, "backend": best, "replays": base.replays, "all": every}
            }
            del key, value
            for text in given.formats.split(";"):
                layout = layout_for(text, layers=1, page_size=given.page)
                store, table = filled_store(backend, layout, [length])
                plan = backend.plan(store, step_arrays(table, [new], [length]))
                rows = query[0].transpose(0, 1).contiguous()
                error = check_attention(backend, store, 0, rows, plan, DIM**-0.5)
                timing = time_calls([lambda: backend.attend(store, 0, rows, plan, scale=DIM**-0.5)])  # noqa: B023 - called at once
                cells[text] = {"us": timing.median, "replays": timing.replays, "error": error,
                               "tflops": flops(new, history) / timing.median / 1e6}  # fmt: skip
                print(f"{name:9s} {text:9s} {timing.median:8.1f} us {cells[text]['tflops']:5.0f} TFLOP/s "
                      f"{base.median / timing.median:5.2f}x sdpa  err {error:.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
