"""Every check of the project, in one place: the README, tox and CI all call this file.

::

    python scripts/check.py                 all that must pass before a change is merged
    python scripts/check.py lint unit       only these
    python scripts/check.py --list          their names and commands

It runs with the interpreter that runs it, in which kvport and its ``test`` and ``lint`` extras are installed, and stops
at the end with one line for each check and an exit status of 1 where any failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Test processes side by side. Each holds torch, so a large machine is not filled to its last core.
WORKERS = min(4, os.cpu_count() or 1)
#: Threads that wait by spinning slow down whatever shares the cores with them, here the other test processes.
ENVIRONMENT = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}


#: What Triton's interpreter runs of the suite: it takes about a quarter of a second a case, so one format of each way
#: that the kernels encode, read or multiply. All cases of int8 are among them, with every geometry, and so the profile
#: core.
INTERPRETED_FORMATS = (
    "int8",
    "int8:g16:asym:scale=bf16",
    "int8:channel:static:scale=bf16",
    "int4:g64",
    "int4:channel:asym:static:scale=fp16",
    "int2:g32:asym:scale=fp16",
    "fp8_e4m3",
    "bf16",
    "k=int8:asym,v=int4:g32",
    "k=int4:c16,v=int4:g16",
    "int8,recent=20",
    "latent=int8,rope=bf16",
    "latent=int4:g16:asym,rope=int8",
    "latent=fp8_e4m3:g32,rope=bf16",
)


@dataclass(frozen=True)
class Check:
    """One check. The commands' first words are modules of this interpreter (``pytest`` is ``python -m pytest``).
    SCRATCH in a command is a folder that is removed afterwards.

    ``installed`` runs them in an empty folder against a wheel; ``default`` is False for those only asked for by name.
    """

    help: str
    commands: tuple[str, ...]
    installed: bool = False
    default: bool = True
    environment: dict[str, str] = field(default_factory=dict)


CHECKS = {
    "lint": Check("style and common mistakes", ("ruff check .",)),
    "types": Check("static types, strict", ("mypy --strict kvport backends conformance",)),
    "unit": Check("kvport's own tests", (f"pytest tests -n {WORKERS}",)),
    "conformance": Check(
        "the suite on the CPU reference and on Ascend's emulated operators, from the checkout",
        tuple(f"pytest conformance --backend={backend} -n {WORKERS}" for backend in ("cpu", "ascend@cpu")),
    ),
    "interpreter": Check(
        "the suite on the NVIDIA kernels in Triton's interpreter, a format of each kind, and the profiles it reaches",
        (
            f"pytest conformance --backend=triton@cpu --formats={','.join(INTERPRETED_FORMATS)} -n {WORKERS}"
            " --report=SCRATCH/triton.json",
            "kvport verify-report SCRATCH/triton.json",
        ),
        environment={"TRITON_INTERPRET": "1"},
    ),
    "installed": Check(
        "the suite on the CPU reference, all of it from a wheel",
        (f"pytest --pyargs kvport_conformance --backend=cpu -n {WORKERS}",),
        installed=True,
    ),
    "gallery": Check(
        "every seeded fault, and the correct backend under all five seeds (otherwise each case meets one of them)",
        (f"pytest tests/faults -n {WORKERS}",),
        default=False,
        environment={"KVPORT_GALLERY": "all"},
    ),
    "full": Check(
        "the suite's full tier on the CPU reference",
        (f"pytest conformance --backend=cpu --tier=full -n {WORKERS}",),
        default=False,
    ),
    "long": Check(
        "kvport's own tests with the long random runs",
        (f"pytest tests -n {WORKERS}",),
        default=False,
        environment={"KVPORT_LONG": "1"},
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the project's checks.")
    by_name = ", ".join(name for name, check in CHECKS.items() if not check.default)
    known = f"of {', '.join(CHECKS)} (default: all but {by_name})"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--list", action="store_true", help="print the checks and their commands")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in CHECKS]:
        parser.error(f"no check is named {', '.join(unknown)}; there are: {', '.join(CHECKS)}")
    if args.list:
        for name, check in CHECKS.items():
            print(f"{name}: {check.help}", *check.commands, sep="\n    ")
        return 0
    results: dict[str, tuple[bool, float]] = {}
    for name in args.names or [name for name, check in CHECKS.items() if check.default]:
        began = time.monotonic()
        print(f"== {name}: {CHECKS[name].help}", flush=True)
        results[name] = run(CHECKS[name]), time.monotonic() - began
    print("== result")
    for name, (passed, seconds) in results.items():
        print(f"{'ok    ' if passed else 'FAILED'}  {name}  ({seconds:.0f} s)")
    return 0 if all(passed for passed, _ in results.values()) else 1


def run(check: Check) -> bool:
    """Run the commands of one check until one fails."""
    environment = {**os.environ, **ENVIRONMENT, **check.environment}
    if not check.installed:
        with tempfile.TemporaryDirectory(prefix="kvport-check-") as scratch:
            commands = [command.replace("SCRATCH", shlex.quote(scratch)) for command in check.commands]
            return all(call(command, ROOT, environment) for command in commands)
    with tempfile.TemporaryDirectory(prefix="kvport-installed-") as folder:
        work, site = Path(folder, "work"), Path(folder, "site")
        work.mkdir()
        if installed_from_checkout():
            # An editable install of the checkout is what is tested here otherwise; the wheel goes in front of it.
            build = (
                f"build --wheel --no-isolation --outdir {shlex.quote(folder)} {shlex.quote(str(ROOT))}",
                f"pip install --quiet --no-deps --no-index --find-links {shlex.quote(folder)}"
                f" --target {shlex.quote(str(site))} kvport",
            )
            if not all(call(command, ROOT, environment) for command in build):
                return False
            environment["PYTHONPATH"] = str(site)
        where = output("import kvport, kvport_conformance as c; print(kvport.__file__, c.__file__)", work, environment)
        print(f"testing {where}", flush=True)
        if str(ROOT / "kvport") in where or str(ROOT / "conformance") in where:
            print("the checkout would be tested instead of the wheel")
            return False
        return all(call(command, work, environment) for command in check.commands)


def installed_from_checkout() -> bool:
    """Whether ``import kvport`` from any folder finds this checkout (editable), rather than an installed wheel."""
    return output("import kvport; print(kvport.__file__)", Path(tempfile.gettempdir()), None).startswith(str(ROOT))


def call(command: str, folder: Path, environment: dict[str, str]) -> bool:
    """Run ``command`` as a module of this interpreter, its output shown; whether it succeeded."""
    module, *arguments = shlex.split(command)
    print(f"$ {command}", flush=True)
    # -P: "python -m" would put the working directory first on the import path, which is not how users run pytest.
    done = subprocess.run([sys.executable, "-P", "-m", module, *arguments], cwd=folder, env=environment, check=False)
    return done.returncode == 0


def output(code: str, folder: Path, environment: dict[str, str] | None) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
