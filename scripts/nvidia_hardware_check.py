"""For whoever has an NVIDIA GPU: all that only hardware can show, by one command that always leaves its results.

::

    python scripts/nvidia_hardware_check.py --out DIR                              # every part
    python scripts/nvidia_hardware_check.py --out DIR --parts conformance,decode   # only these
    python scripts/nvidia_hardware_check.py --list

Each part has a time limit of its own and runs in processes of its own; what it prints goes to ``DIR/PART.txt``, how it
ended to ``DIR/summary.json``, which is written anew after every part. Parts of one stage run side by side, as nearly
all of their time is compilation on the host; what is timed runs first, and alone, and when its time is up it leaves
what it has measured. Nothing is downloaded. kvport must be
installed (a wheel on PYTHONPATH will do), with pytest and pytest-xdist; kernels compiled by one part are found by the
next in ``DIR/kernels``, unless TRITON_CACHE_DIR names another folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Seconds that an interrupted part has to write what it knows, such as the report of a partial run.
GRACE = 12


@dataclass(frozen=True)
class Part:
    """``commands`` run in turn, each an argument list for this Python; OUT, WORKERS and SANITIZER stand for the
    given folder, a number of test processes and the sanitizer's path. Parts of equal ``stage`` run side by side."""

    help: str
    stage: int
    limit: int
    commands: tuple[tuple[str, ...], ...]
    share: float = 0.0  # of the processors, as test processes
    environment: dict[str, str] = field(default_factory=dict)


SHAPES = str(ROOT / "scripts" / "nvidia_sanitized_shapes.py")
TESTS = str(ROOT / "tests" / "triton")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
SPREAD = ("-n", "WORKERS", "--dist", "worksteal")
ON_GPU = {"KVPORT_TRITON_DEVICE": "cuda"}


def benchmark(script: str, result: str, *options: str) -> tuple[tuple[str, ...], ...]:
    return ((str(ROOT / "benchmarks" / script), *options, "--json", f"OUT/{result}"),)


# What is timed has a stage of its own each, before all others: a neighbour on the GPU would show in the figures.
PARTS = {
    "decode": Part("decode next to SDPA; decode.json", 1, 150, benchmark("decode.py", "decode.json")),
    "prefill": Part("prefill next to SDPA; prefill.json", 2, 60, benchmark("prefill.py", "prefill.json")),
    "append": Part("append next to a copy; append.json", 3, 60, benchmark("append.py", "append.json")),
    "latent": Part("decode over latent (MLA) pages; latent.json", 4, 150, benchmark("latent.py", "latent.json")),
    "step": Part("whole decode steps, eager and as graphs; step.json", 5, 150, benchmark("step.py", "step.json")),
    "page16": Part(
        "decode over pages of 16 tokens next to pages of 64; page16.json",
        6,
        60,
        benchmark("decode.py", "page16.json", "--alone", "--pages", "64,16", "--formats", "int8;int4:g64",
                  "--shapes", "b64_8k,b8_8k,b1_32k"),
    ),
    "tune": Part(
        "kvport tune: whether the fixed table is right for this GPU; keeps nothing",
        7,
        150,
        (("-m", "kvport", "tune", "--backend", "cuda:0", "--format", "int8", "--format", "int4:g64",
          "--head-dim", "128", "--page-size", "16", "--page-size", "64", "--dry-run"),),
    ),
    "conformance": Part(
        "the suite; its report is conformance.json",
        8,
        180,
        ((*PYTEST, *SPREAD, "--pyargs", "kvport_conformance", "--backend=cuda:0", "--report=OUT/conformance.json"),),
        share=1.0,
    ),
    "tests": Part(
        "the backend's own tests that need a GPU; tests.xml",
        9,
        140,
        ((*PYTEST, *SPREAD, TESTS, "-m", "hardware", "-k", "not big_pool", "--junitxml=OUT/tests.xml"),),
        share=0.75,
        environment=ON_GPU,
    ),
    "sanitizer": Part(
        "compute-sanitizer's memcheck and racecheck over ten small shapes",
        9,
        120,
        (
            (SHAPES,),  # compiles, so that the sanitizer watches the kernels alone
            ("SANITIZER", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-P", SHAPES),
            ("SANITIZER", "--tool", "racecheck", "--error-exitcode", "9", sys.executable, "-P", SHAPES),
        ),
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    "bigpool": Part(
        "page ids times stride beyond 2**31 and 2**32, written and attended",
        9,
        40,
        ((*PYTEST, TESTS, "-k", "big_pool"),),
        environment=ON_GPU,
    ),
}  # fmt: skip


@dataclass
class Running:
    """A part under way, or ended (``outcome`` is not empty then)."""

    name: str
    began: float
    deadline: float
    commands: list[list[str]]
    log: Any
    process: subprocess.Popen[bytes] | None = None
    interrupted: bool = False
    skipped: bool = False
    outcome: str = ""
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description="All that only an NVIDIA GPU can show.")
    parser.add_argument("--out", metavar="DIR", help="where results go; made if need be")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, by name (default: all)")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="another time limit")
    parser.add_argument(
        "--total", type=int, default=0, metavar="SECONDS", help="cut every part so that all end by then"
    )
    parser.add_argument("--list", action="store_true", help="print the parts")
    args = parser.parse_args()
    if args.list:
        print(f"{'part':<12}{'stage':>5}{'limit':>8}  what, and its file in DIR beside the log")
        for name, part in PARTS.items():
            print(f"{name:<12}{part.stage:>5}{part.limit:>6} s  {part.help}")
        return 0
    names = [name.strip() for name in args.parts.split(",") if name.strip()]
    limits = dict(item.partition("=")[::2] for item in args.limit)
    if unknown := [name for name in (*names, *limits) if name not in PARTS]:
        parser.error(f"no part is named {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    if not args.out:
        parser.error("--out=DIR is needed")
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    end = began + args.total if args.total else float("inf")
    summary: dict[str, Any] = {"command": sys.argv, "parts": {}}
    for stage in sorted({PARTS[name].stage for name in names}):
        group = [
            start(name, out, int(limits.get(name, PARTS[name].limit)), end)
            for name in names
            if PARTS[name].stage == stage
        ]
        while any(not part.outcome for part in group):
            for part in group:
                if not part.outcome and step(part):
                    summary["parts"][part.name] = {"outcome": part.outcome, "seconds": round(part.seconds, 1)}
                    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
                    print(f"{part.outcome:>12}  {part.name}  ({part.seconds:.0f} s)", flush=True)
            time.sleep(0.2)
    summary["seconds"] = round(time.monotonic() - began, 1)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name in names:
        print(f"-- {name}", *tail(out / f"{name}.txt"), sep="\n", flush=True)
    return 0 if all(part["outcome"] in ("ok", "skipped") for part in summary["parts"].values()) else 1


def start(name: str, out: Path, limit: int, end: float) -> Running:
    """A part whose first command is about to run; one that cannot run here has its outcome already."""
    part, now = PARTS[name], time.monotonic()
    log = (out / f"{name}.txt").open("wb")
    running = Running(name, now, min(now + limit, end - GRACE), [], log)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )
    needs = any("SANITIZER" in command for command in part.commands)
    if needs and sanitizer is None:
        log.write(b"compute-sanitizer is neither on PATH nor under /usr/local/cuda: it comes with the CUDA toolkit\n")
        running.skipped = True
        return running
    workers = max(1, int((os.cpu_count() or 1) * part.share))
    for command in part.commands:
        words = [
            word.replace("OUT", str(out)) if "=OUT" in word or word.startswith("OUT/") else word for word in command
        ]
        words = [str(workers) if word == "WORKERS" else word for word in words]
        # A module must not find the checkout beside the installed kvport; a script needs the modules in its own folder.
        python = [sys.executable, "-P"] if words[0] == "-m" else [sys.executable]
        running.commands.append([sanitizer or "", *words[1:]] if words[0] == "SANITIZER" else [*python, *words])
    return running


def step(part: Running) -> bool:
    """Bring a part forward: start its next command, or see to its time limit. True when it has ended."""
    now = time.monotonic()
    if part.process is None:
        if not part.commands:
            return finish(part, "skipped" if part.skipped else "ok")
        if now >= part.deadline:
            return finish(part, "out of time")
        command = part.commands.pop(0)
        part.log.write(f"$ {' '.join(command)}\n".encode())
        part.log.flush()
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | PARTS[part.name].environment
        environment.setdefault("TRITON_CACHE_DIR", str(Path(part.log.name).parent / "kernels"))
        environment["PYTHONUNBUFFERED"] = "1"
        part.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=part.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        return False
    code = part.process.poll()
    if code is None:
        if now >= part.deadline + GRACE:
            os.killpg(part.process.pid, signal.SIGKILL)
            part.process.wait()
            return finish(part, "out of time")
        if now >= part.deadline and not part.interrupted:
            part.process.send_signal(signal.SIGINT)  # pytest ends its run, and the report says what was not run
            part.interrupted = True
        return False
    part.process = None
    if part.interrupted:
        return finish(part, "out of time")
    return code != 0 and finish(part, f"failed ({code})")


def finish(part: Running, outcome: str) -> bool:
    part.outcome, part.seconds = outcome, time.monotonic() - part.began
    part.log.close()
    return True


def tail(path: Path, lines: int = 25) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]


if __name__ == "__main__":
    raise SystemExit(main())
