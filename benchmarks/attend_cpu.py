"""Attend alone on the CPU reference, against torch's SDPA over contiguous float32 K and V: decode of one token.

    python benchmarks/attend_cpu.py [--json docs/results/attend_cpu.json] [--threads N] [--seconds 2]

All contenders see the same tokens and are measured in one process, interleaved round by round, so that whatever else
the machine does meets all of them. A figure is the median over rounds; the ratio of a round divides two neighbours in
time, and the printed ratio is the median of those. SDPA reads K and V laid out as it likes them best; kvport reads
pages in a hashed order and decodes them on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvport
from kvport import CacheLayout, PagedCache
from kvport_cpu import reference

#: SmolLM2-135M's attention layer.
GEOMETRY = {"kv_heads": 3, "query_heads": 9, "head_dim": 64}
FORMATS = ("fp32", "int8", "int4:g64")
LENGTHS = (2048, 8192)
PAGE_SIZE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw times here")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=2.0, help="least time spent on each length")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        results = [measure(length, options.seconds) for length in LENGTHS]
    print_table(results)
    if options.json:
        record = {
            "benchmark": "attend_cpu",
            "machine": machine(options.threads),
            "geometry": {**GEOMETRY, "page_size": PAGE_SIZE, "query_rows": 1, "dtype": "float32"},
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"raw times: {options.json}")


def measure(length: int, seconds: float) -> dict[str, Any]:
    """Times of every contender at one length, in seconds, by round."""
    heads, dim = GEOMETRY["kv_heads"], GEOMETRY["head_dim"]
    key, value = torch.randn(length, heads, dim), torch.randn(length, heads, dim)
    query = torch.randn(1, GEOMETRY["query_heads"], dim)
    contenders: dict[str, Callable[[], Tensor]] = {"sdpa fp32": sdpa(key, value, query)}
    for fmt in FORMATS:
        contenders[f"kvport {fmt}"] = paged(fmt, key, value, query)
    # What runs faster because it computes something else would show here.
    expected = contenders["sdpa fp32"]()
    errors = {name: float((call() - expected).abs().max()) for name, call in contenders.items()}
    assert errors["kvport fp32"] < 1e-4
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3):
        for call in contenders.values():
            call()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times["sdpa fp32"]) < 21:
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {"length": length, "largest_difference_from_sdpa": errors, "seconds": times}


def sdpa(key: Tensor, value: Tensor, query: Tensor) -> Callable[[], Tensor]:
    q, k, v = (t.transpose(0, 1).contiguous().unsqueeze(0) for t in (query, key, value))

    def call() -> Tensor:
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out[0].transpose(0, 1)

    return call


def paged(fmt: str, key: Tensor, value: Tensor, query: Tensor) -> Callable[[], Tensor]:
    """Attend of the last of these tokens, inside its step."""
    length = key.shape[0]
    layout = CacheLayout.uniform(layers=1, format=fmt, page_size=PAGE_SIZE, **GEOMETRY)
    cache = PagedCache(reference.load("cpu"), layout, [2 * (length // PAGE_SIZE) + 4])
    # Pages in no order: single pages are taken alternately by two sequences, one of which is then given back.
    sequence, other = cache.sequence(), cache.sequence()
    for begin in range(0, length - 1, PAGE_SIZE):
        rows = slice(begin, min(begin + PAGE_SIZE, length - 1))
        count = rows.stop - rows.start
        for s in (other, sequence) if begin // PAGE_SIZE % 3 else (sequence, other):
            with cache.step({s: count}) as step:
                step.append(0, key[rows], value[rows])
    other.free()
    step = cache.step({sequence: 1})
    step.append(0, key[-1:], value[-1:])
    return lambda: step.attend(0, query).output


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'context':>8}  {'contender':<18}{'median ms':>10}  {'times sdpa':>10}  {'largest difference':>18}")
    for result in results:
        base = result["seconds"]["sdpa fp32"]
        for name, times in result["seconds"].items():
            ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
            error = result["largest_difference_from_sdpa"][name]
            median = statistics.median(times) * 1e3
            print(f"{result['length']:>8}  {name:<18}{median:>10.3f}  {ratio:>10.2f}  {error:>18.2e}")


def machine(threads: int) -> dict[str, Any]:
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "kvport": kvport.__version__,
        "cores": os.cpu_count(),
        "threads": threads,
        "load_at_end": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def processor() -> str:
    """The processor's name: platform.processor() is empty on most Linux systems."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
