"""A whole decode step as an engine sees it, through the public API: append and attend of every layer.

    python benchmarks/step.py --json docs/results/step-h200.json
    python benchmarks/step.py --device triton@cpu --tiny          # tries the script without a GPU

Every sequence takes one token, in two ways: ``eager``, an ordinary ``cache.step``, and ``graph``, the same step
recorded and replayed by ``cache.graph``. Of each are reported

* ``wall``: from an idle device to an idle device, by the clock;
* what the host does of it until it is free again: ``begin`` (pages, tables, plan), ``calls`` (append and attend of all
  layers) and ``commit`` of an eager step; ``host``, all of a replay (pages, tables, refill, launch, commit);
* ``device``: by events, of a step that was queued up whole behind a kernel that waits, so that the host adds nothing.

The first step, which compiles, and the recording are timed apart. ``error`` is that of one sequence's output in the
last layer, relative to float32 attention over its decoded pages; ``bytes`` are the codes and scales of the context in
all layers, as whole pages.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from results import machine, saved
from torch import Tensor

import kvport

#: name -> (sequences, tokens of each before the step)
SHAPES = {"b1_2k": (1, 2048), "b8_2k": (8, 2048), "b64_2k": (64, 2048), "b64_8k": (64, 8192)}
FORMATS = ("int8", "int4:g64", "bf16")
WARM_UP = 3
#: Tokens that one step of the filling takes, of all sequences.
FILL_TOKENS = 1 << 16
#: Attempts at queueing a step up before the device is done waiting, each with twice the time.
ATTEMPTS = 6


@dataclass(frozen=True)
class Model:
    layers: int = 32
    kv_heads: int = 8
    query_heads: int = 32
    head_dim: int = 128
    page_size: int = 64


TINY_MODEL = Model(layers=2, kv_heads=2, query_heads=4, head_dim=64, page_size=16)
TINY_SHAPES = {"b2_40": (2, 40)}


class Decode:
    """Sequences of one cache, and the inputs of a step that takes one token of each."""

    def __init__(self, device: str, text: str, model: Model, batch: int, context: int, steps: int) -> None:
        self.model, self.context = model, context
        pages = -(-(context + steps) // model.page_size)
        self.cache = kvport.open(
            device, format=text, layers=model.layers, kv_heads=model.kv_heads, query_heads=model.query_heads,
            head_dim=model.head_dim, page_size=model.page_size, dtype=torch.bfloat16, pages=batch * pages + 1,
        )  # fmt: skip
        self.sequences = [self.cache.sequence() for _ in range(batch)]
        self.torch_device = self.cache.backend.torch_device
        self.generator = torch.Generator(device=self.torch_device).manual_seed(7)
        self._fill()
        self.key, self.value = (self._normal(model.layers, batch, model.kv_heads) for _ in range(2))
        self.query = self._normal(model.layers, batch, model.query_heads)
        self.graph = self.cache.graph(max_seqs=batch, max_tokens=batch, max_query=1, max_pages=pages)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(
            (*shape, self.model.head_dim), dtype=torch.bfloat16, device=self.torch_device, generator=self.generator
        )

    def _fill(self) -> None:
        """Random tokens, the same in every layer, some of each sequence at a time, so that their pages alternate."""
        part = max(1, FILL_TOKENS // len(self.sequences))
        for first in range(0, self.context, part):
            count = min(part, self.context - first)
            rows = count * len(self.sequences)
            key, value = (self._normal(rows, self.model.kv_heads) for _ in range(2))
            with self.cache.step(dict.fromkeys(self.sequences, count)) as step:
                for layer in range(self.model.layers):
                    step.append(layer, key, value)

    def tokens(self) -> dict[kvport.Sequence, int]:
        return dict.fromkeys(self.sequences, 1)

    def body(self, step: Any) -> Tensor:
        """What an engine's layers do with the cache; the output of the last."""
        for layer in range(self.model.layers):
            step.append(layer, self.key[layer], self.value[layer])
            output = step.attend(layer, self.query[layer]).output
        return output

    def rewind(self) -> None:
        for sequence in self.sequences:
            sequence.truncate(self.context)

    def eager(self) -> tuple[Tensor, dict[str, float]]:
        """One ordinary step: the output, and seconds of the host's parts."""
        times = [time.perf_counter()]
        step = self.cache.step(self.tokens())
        times.append(time.perf_counter())
        output = self.body(step)
        times.append(time.perf_counter())
        step.commit()
        times.append(time.perf_counter())
        begin, calls, commit = (b - a for a, b in pairwise(times))
        return output, {"begin": begin, "calls": calls, "commit": commit}

    def replay(self) -> tuple[Tensor, dict[str, float]]:
        """One replayed step: the output, and seconds of the host's part."""
        began = time.perf_counter()
        output = self.graph.replay(self.tokens()).result
        return output, {"host": time.perf_counter() - began}

    def error(self, output: Tensor) -> float:
        """||out - ref|| / ||ref|| of the first sequence in the last layer, ref by float32 over its decoded pages."""
        last = self.model.layers - 1
        key, value = self.cache.gather(self.sequences[0], last, torch.float32)
        query = self.query[last, 0].float().view(self.model.kv_heads, -1, self.model.head_dim)
        weights = torch.einsum("hgd,jhd->hgj", query, key).mul(self.model.head_dim**-0.5).softmax(-1)
        want = torch.einsum("hgj,jhd->hgd", weights, value)
        return float((output[0].float().view_as(want) - want).norm() / want.norm())


Run = Callable[[], tuple[Tensor, dict[str, float]]]


def timed(decode: Decode, run: Run, repeats: int) -> dict[str, Any]:
    """Microseconds of every part of ``run``, repeated after a warm-up."""
    wait = decode.cache.backend.synchronize
    found: dict[str, list[float]] = {"wall": []}
    for number in range(WARM_UP + repeats):
        wait()
        began = time.perf_counter()
        _, parts = run()
        wait()
        parts = {"wall": time.perf_counter() - began, **parts}
        if number >= WARM_UP:
            for name, seconds in parts.items():
                found.setdefault(name, []).append(seconds * 1e6)
    if decode.torch_device.type == "cuda":
        found["device"] = device_times(run, repeats, statistics.median(found["wall"]) * 1e-6)
    return {name: {"us": statistics.median(times), "replays": times} for name, times in found.items() if times}


def device_times(run: Run, repeats: int, seconds: float) -> list[float]:
    """Microseconds between events around steps that were queued while the device was waiting.

    Empty where no wait was long enough: something in the step waits for the device.
    """
    found: list[float] = []
    wait, failures = 2 * seconds + 2e-3, 0
    while len(found) < WARM_UP + repeats and failures < ATTEMPTS:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(wait * 2e9))  # cycles, at about 2 GHz
        begin.record()
        run()
        end.record()
        queued = not begin.query()
        torch.cuda.synchronize()
        if queued:
            found.append(begin.elapsed_time(end) * 1e3)
        else:
            wait, failures = 2 * wait, failures + 1
    return found[WARM_UP:] if failures < ATTEMPTS else []


def cell(device: str, text: str, model: Model, shape: tuple[int, int], repeats: int) -> dict[str, Any]:
    batch, context = shape
    decode = Decode(device, text, model, batch, context, steps=2 * (WARM_UP + repeats) + ATTEMPTS + 2)
    cache = decode.cache
    record: dict[str, Any] = {
        "sequences": batch, "context": context, "capture": cache.info.capture, "bytes": cache.canonical_bytes()
    }  # fmt: skip

    began = time.perf_counter()
    output, _ = decode.eager()
    cache.backend.synchronize()
    first = time.perf_counter() - began
    error = decode.error(output)
    record["eager"] = {"first_call_s": first, "error": error, **timed(decode, decode.eager, repeats)}

    decode.rewind()
    began = time.perf_counter()
    decode.graph.capture(decode.body)
    cache.backend.synchronize()
    first = time.perf_counter() - began
    output, _ = decode.replay()
    error = decode.error(output)
    record["graph"] = {"capture_s": first, "error": error, **timed(decode, decode.replay, repeats)}
    cache.close()
    return record


def shown(name: str, text: str, record: dict[str, Any]) -> str:
    lines = []
    for way in ("eager", "graph"):
        parts = record[way]
        times = "  ".join(
            f"{part} {parts[part]['us']:.0f}" for part in ("wall", "begin", "calls", "commit", "host", "device")
            if part in parts
        )  # fmt: skip
        first = parts.get("first_call_s", parts.get("capture_s"))
        rate = f"  {record['bytes'] / parts['device']['us'] / 1e3:.0f} GB/s" if "device" in parts else ""
        lines.append(f"{name:8s} {text:9s} {way}: {times} us{rate}  err {parts['error']:.1e}  first {first:.2f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--formats", default=";".join(FORMATS), help="format strings, separated by semicolons")
    parser.add_argument("--layers", type=int, help=f"default {Model.layers}")
    parser.add_argument("--page", type=int, help=f"tokens of a page (default {Model.page_size})")
    parser.add_argument("--repeats", type=int, help="measured steps of each way (default 15, with --tiny 2)")
    parser.add_argument("--tiny", action="store_true", help="a shape and a model that an interpreter can afford")
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    shapes, model = (TINY_SHAPES, TINY_MODEL) if given.tiny else (SHAPES, Model())
    model = replace(model, layers=given.layers or model.layers, page_size=given.page or model.page_size)
    names = given.shapes.split(",") if given.shapes else list(shapes)
    if unknown := [name for name in names if name not in shapes]:
        parser.error(f"no shape is named {', '.join(unknown)}; there are: {', '.join(shapes)}")
    repeats = given.repeats or (2 if given.tiny else 15)
    with torch.inference_mode():
        backend = kvport.load_backend(given.device)
        if backend.torch_device.type == "cuda":
            torch.cuda.set_device(backend.torch_device)
        facts = machine(backend.torch_device)
        print(facts, f"{given.device} [{backend.execution}]", sep="\n", flush=True)
        record: dict[str, Any] = {
            "benchmark": "step", "execution": backend.execution, "machine": facts, "backend": backend.facts(),
            "model": asdict(model), "shapes": {},
        }  # fmt: skip
        with saved(given.json, record):
            for name in names:
                cells = record["shapes"][name] = {}
                for text in given.formats.split(";"):
                    try:
                        found = cell(given.device, text, model, shapes[name], repeats)
                    except (kvport.OutOfMemory, torch.OutOfMemoryError) as error:
                        print(f"{name:8s} {text:9s} no room: {str(error).splitlines()[0]}", flush=True)
                        continue
                    finally:
                        gc.collect()  # a graph and its body hold each other, and the graph its memory
                    cells[text] = found
                    print(shown(name, text, found), flush=True)


if __name__ == "__main__":
    main()
