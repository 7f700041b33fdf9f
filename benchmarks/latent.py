"""Decode over latent (MLA) pages on a GPU, next to torch on contiguous bf16: SDPA, and two batched products.

python benchmarks/latent.py --json docs/results/latent-h200.json

Columns: microseconds a layer, GB/s of codes and scales read, TFLOP/s of both products, speed against the faster of
torch's two ways in the same run (above 1 is faster), relative error against float32 attention over the decoded pages.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from gpu_timing import (
    Timing,
    ceilings,
    check_attention,
    filled_store,
    rotations,
    step_arrays,
    time_calls,
)
from results import machine, saved
from torch import Tensor

from kvport.formats import CacheFormat
from kvport.layout import GroupLayout
from kvport_triton.availability import load

#: name -> (batch, context, query heads)
SHAPES = {"b32_8k_h128": (32, 8192, 128), "b64_4k_h16": (64, 4096, 16), "b1_64k_h128": (1, 65536, 128)}
FORMATS = ("latent=int8:g128,rope=bf16", "latent=int8,rope=bf16", "latent=fp8_e4m3:g128,rope=bf16",
           "latent=int4:g64,rope=bf16", "latent=bf16,rope=bf16")  # fmt: skip
LATENT, ROPE = 512, 64
SCALE = (LATENT + ROPE) ** -0.5


def by_products(query: Tensor, key: Tensor) -> Tensor:
    """softmax(q k) v as two batched products, V being the first channels of K."""
    weights = torch.softmax((query @ key.transpose(1, 2)).float() * SCALE, -1).to(query.dtype)
    return weights @ key[..., :LATENT]


def by_sdpa(query: Tensor, key: Tensor) -> Tensor:
    """All query heads as rows of one head: every one of them reads the same K."""
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, None], key[:, None], key[:, None, :, :LATENT], scale=SCALE
    )


def baselines(shape: tuple[int, int, int]) -> dict[str, Timing]:
    batch, context, heads = shape
    sets = rotations(batch * context * (LATENT + ROPE) * 2)
    keys = [torch.randn(batch, context, LATENT + ROPE, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
    query = torch.randn(batch, heads, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
    found = {}
    for name, way in {"products": by_products, "sdpa": by_sdpa}.items():
        try:
            found[name] = time_calls([lambda k=k, way=way: way(query, k) for k in keys])
        except RuntimeError as error:  # a way that has no room for the shape
            print(f"    {name}: {str(error).splitlines()[0][:80]}", flush=True)
            torch.cuda.synchronize()
    return found


def cell(backend: Any, text: str, page_size: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    batch, context, heads = shape

    def layout_of(layers: int) -> GroupLayout:
        return GroupLayout(
            CacheFormat.parse(text), layers, 1, heads, LATENT + ROPE, LATENT, page_size, None, torch.bfloat16, True
        )

    one = layout_of(1)
    nbytes = one.canonical_page_bytes * one.pages_for(context) * batch
    layout = layout_of(rotations(nbytes))
    store, table = filled_store(backend, layout, [context] * batch)
    plan = backend.plan(store, step_arrays(table, [1] * batch, [context] * batch))
    query = torch.randn(batch, heads, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
    begin = time.perf_counter()
    error = check_attention(backend, store, layout.layers - 1, query, plan, SCALE)
    first = time.perf_counter() - begin
    timing = time_calls(
        [lambda n=n: backend.attend(store, n, query, plan, scale=SCALE) for n in range(layout.layers)], replays=9
    )
    flops = 2.0 * batch * context * heads * (2 * LATENT + ROPE)
    return {
        "us": timing.median, "replays": timing.replays, "bytes": nbytes, "gbps": nbytes / timing.median / 1e3,
        "tflops": flops / timing.median / 1e6, "error": error, "first_call_s": first,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default=";".join(FORMATS), help="format strings, separated by semicolons")
    parser.add_argument("--pages", default="64")
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    backend = load("cuda:0")
    facts = machine()
    print(facts, flush=True)
    record: dict[str, Any] = {"machine": facts, "ceilings_gbps": ceilings((1 << 30,)), "shapes": {}}
    print({name: round(value) for name, value in record["ceilings_gbps"].items()}, flush=True)
    with saved(given.json, record):
        for name in given.shapes.split(","):
            cells = record["shapes"][name] = {}
            for way, timing in baselines(SHAPES[name]).items():
                cells[way] = {"us": timing.median, "replays": timing.replays}
                print(f"{name:12s} {way:9s} {timing.median:8.1f} us", flush=True)
            best = min((found["us"] for found in cells.values()), default=float("nan"))
            torch.cuda.empty_cache()
            for text in given.formats.split(";"):
                for page in map(int, given.pages.split(",")):
                    found = cells[f"{text} p{page}"] = cell(backend, text, page, SHAPES[name])
                    torch.cuda.empty_cache()
                    print(
                        f"{name:12s} {text:30s} p{page:<3d} {found['us']:8.1f} us {found['gbps']:6.0f} GB/s "
                        f"{found['tflops']:5.0f} TFLOP/s {best / found['us']:5.2f}x torch  err {found['error']:.1e}  "
                        f"first call {found['first_call_s']:.1f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
