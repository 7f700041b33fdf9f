"""Decode speed of a real model through kvport pages, beside transformers' own caches, in one run.

SmolLM2-135M reads ``--context`` tokens of text into every cache; then the caches take turns, one token each, in an
order that rotates every round, so that other load on the machine falls on all of them alike. Reported are the median
milliseconds a token, by the clock and by the processor (all threads), and the median of the per-round ratios to the
stock cache. On a busy machine look at the processor's: the clock then counts the waiting of one thread for another.

    GOMP_SPINCOUNT=0 OMP_WAIT_POLICY=passive python benchmarks/hf_decode.py --json docs/results/hf_decode.json

The quanto cache keeps its newest 128 tokens unquantized and encodes its whole past anew when they are full: its mean
is above its median, so both are given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvport.evaluation import cache_argument, machine, pydoc_text
from kvport.models import load_smollm2

STOCK = "DynamicCache"
QUANTO = "QuantizedCache quanto int4"


def caches(config: Any, formats: list[str], quanto: bool) -> dict[str, Callable[[], Any]]:
    from transformers import DynamicCache, QuantizedCache

    from kvport.integrations.transformers import KVPortCache

    found: dict[str, Callable[[], Any]] = {STOCK: lambda: DynamicCache(config=config)}
    for text in formats:
        found[f"kvport {text}"] = lambda text=text: KVPortCache(config, "cpu", format=text)
    if quanto:
        found[QUANTO] = lambda: QuantizedCache(backend="quanto", config=config, nbits=4)
    return found


Times = dict[str, list[float]]


def measure(model: Any, ids: torch.Tensor, made: dict[str, Any], rounds: int, warm_up: int) -> tuple[Times, Times]:
    """Milliseconds of every decode step after the warm-up, by cache: by the clock, and by the processor."""
    argument = cache_argument(model)
    for name, cache in made.items():
        began = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1, **{argument: cache})
        print(f"  {name}: {ids.shape[1]} tokens read in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    names = list(made)
    taken: Times = {name: [] for name in names}
    worked: Times = {name: [] for name in names}
    token = ids[:, :1]
    for turn in range(warm_up + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began, busy = time.perf_counter(), time.process_time()
            model(token, use_cache=True, **{argument: made[name]})
            if turn >= warm_up:
                taken[name].append((time.perf_counter() - began) * 1e3)
                worked[name].append((time.process_time() - busy) * 1e3)
    return taken, worked


def summarize(taken: Times, worked: Times) -> dict[str, dict[str, float]]:
    def ratio(times: Times, name: str) -> float:
        return statistics.median(s / t for s, t in zip(times[STOCK], times[name], strict=True))

    return {
        name: {
            "median_ms": statistics.median(times),
            "mean_ms": statistics.fmean(times),
            "tokens_per_second": 1e3 / statistics.median(times),
            "speed_vs_stock": ratio(taken, name),
            "processor_median_ms": statistics.median(worked[name]),
            "processor_speed_vs_stock": ratio(worked, name),
        }
        for name, times in taken.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache before decoding (default 2048)")
    parser.add_argument("--rounds", type=int, default=60, help="measured decode steps of every cache (default 60)")
    parser.add_argument("--warm-up", type=int, default=5, help="unmeasured steps first (default 5)")
    parser.add_argument("--formats", default="int8", help="kvport formats, separated by spaces (default int8)")
    parser.add_argument("--no-quanto", action="store_true", help="leave out the stock quantized cache")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads (default all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time measured and the summary")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    loaded = load_smollm2(lambda stage: print(f"  {stage}", file=sys.stderr))
    ids = loaded.tokenizer(pydoc_text(), return_tensors="pt").input_ids[:, : args.context]
    if ids.shape[1] < args.context:
        parser.error(f"the text has {ids.shape[1]} tokens; --context can be at most that")
    load_before = os.getloadavg()
    with torch.inference_mode():
        made = {n: make() for n, make in caches(loaded.model.config, args.formats.split(), not args.no_quanto).items()}
        taken, worked = measure(loaded.model, ids, made, args.rounds, args.warm_up)
    summary = summarize(taken, worked)
    load_after = os.getloadavg()

    print(f"\nSmolLM2-135M, decode at context {args.context}, {args.threads} threads, {args.rounds} rounds in turn")
    print(f"{'':<30}{'by the clock':>39}{'by the processor':>21}")
    print(f"{'cache':<30}{'median ms':>10}{'mean ms':>10}{'tokens/s':>10}{'x stock':>9}{'median ms':>12}{'x stock':>9}")
    for name, row in summary.items():
        print(
            f"{name:<30}{row['median_ms']:>10.1f}{row['mean_ms']:>10.1f}{row['tokens_per_second']:>10.2f}"
            f"{row['speed_vs_stock']:>9.2f}{row['processor_median_ms']:>12.1f}{row['processor_speed_vs_stock']:>9.2f}"
        )
    print(f"load average before {load_before[0]:.2f}, after {load_after[0]:.2f}")
    if args.json:
        record = {
            "benchmark": "hf_decode",
            "model": {"name": loaded.name, "file": loaded.source, "sha256": loaded.sha256},
            "context": args.context,
            "rounds": args.rounds,
            "machine": machine(),
            "load_average": {"before": load_before, "after": load_after},
            "summary": summary,
            "milliseconds": taken,
            "processor_milliseconds": worked,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
