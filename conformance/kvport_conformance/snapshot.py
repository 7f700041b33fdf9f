"""What a backend says it supports, as a committed record: shrinking it fails a test.

``python -m kvport_conformance.snapshot reference@cpu`` writes the record of one backend into ``snapshots/``, with
``--check`` it compares instead. A backend may grow; what it once supported it must go on supporting.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvport.backend import Backend

FOLDER: Final = Path(__file__).parent / "snapshots"


def take(backend: Backend) -> dict[str, Any]:
    """What is declared (features and workspace, as one string) -> format -> geometries, over all that cases use."""
    from kvport.errors import KVPortError
    from kvport_conformance.bench import group_layout
    from kvport_conformance.cases import all_cases

    found: dict[str, dict[str, str]] = {}
    pairs = {(case.format, case.geometry) for case in all_cases()}
    for format_text, shape in sorted(pairs, key=lambda pair: (pair[0], pair[1].name)):
        try:
            support = backend.support(group_layout(format_text, shape))
        except KVPortError:  # a tiered format is no format of one store; its tiers are asked about by themselves
            continue
        if support.ok:
            declared = " ".join([*sorted(support.features), f"workspace={support.workspace}"])
            shapes = found.setdefault(declared, {})
            shapes[format_text] = f"{shapes[format_text]} {shape.name}" if format_text in shapes else shape.name
    return {"backend": backend.name, "device": backend.device, "supported": found}


def _flat(record: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """(format, geometry) -> what is declared for it."""
    return {
        (format_text, shape): set(declared.split())
        for declared, formats in record["supported"].items()
        for format_text, shapes in formats.items()
        for shape in shapes.split()
    }


def shrunk(committed: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What the committed record has and the present one lacks, in words."""
    before, after = _flat(committed), _flat(now)
    lost = []
    for (format_text, shape), declared in before.items():
        if (format_text, shape) not in after:
            lost.append(f"{format_text} at {shape} is no longer supported")
        elif missing := sorted(declared - after[format_text, shape]):
            lost.append(f"{format_text} at {shape} no longer declares {', '.join(missing)}")
    return lost


def path_of(device: str) -> Path:
    return FOLDER / f"{device.replace(':', '_')}.json"


def main(argv: Sequence[str] | None = None) -> int:
    from kvport.registry import load_backend

    parser = argparse.ArgumentParser(prog="kvport_conformance.snapshot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("device", help="such as reference@cpu")
    parser.add_argument("--check", action="store_true", help="compare with the committed record instead of writing it")
    args = parser.parse_args(argv)
    now = take(load_backend(args.device))
    path = path_of(args.device)
    if not args.check:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        print(f"{len(_flat(now))} layouts written to {path}")
        return 0
    lost = shrunk(json.loads(path.read_text(encoding="utf-8")), now)
    print("\n".join(lost) or f"nothing that {path.name} lists was lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
