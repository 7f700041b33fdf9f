"""A small manifest and sound reports of it, to be edited by tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvport.reports import Manifest, Report, read, sealed
from kvport.reports.tensors import stored_digests
from kvport_conformance.recorded import Recording
from pytest_kvport import spool

IDS = {
    "append/rows/int8/small": ("quick", ("core",)),
    "append/rows/int4/small": ("quick", ()),
    "pages/every_length/int8/small": ("quick", ("core",)),
    "pages/every_length/int8/large": ("full", ("core",)),
}
MANIFEST = Manifest(1, {identity: tier for identity, (tier, _) in IDS.items()}, {"core": {"quick": 2, "full": 1}})
FIRST = "append/rows/int8/small"
LAST = "pages/every_length/int8/small"

Change = Callable[[dict[str, Any]], object]


def case(identity: str, **more: Any) -> dict[str, Any]:
    chapter, check, format_text, geometry = identity.split("/")
    tier, profiles = IDS.get(identity, ("quick", ()))
    record: dict[str, Any] = {
        "id": identity, "chapter": chapter, "check": check, "format": format_text, "geometry": geometry, "tier": tier,
        "profiles": list(profiles), "outcome": "pass", "seconds": 0.1, "reason": "", "digests": {"inputs": "1" * 64},
    }  # fmt: skip
    if chapter == "append":
        record |= {
            "codes": {"compared": 100, "differing": 0},
            "scales": {"compared": 10, "differing": 0, "largest_ulps": 0},
            "exactness": "bit-exact",
            "digests": {"inputs": "1" * 64, "codes": "c" * 64, "scales": "5" * 64},
        }
    else:
        record |= {"output_ratio": 0.25, "lse_ratio": 0.125}
    return {**record, **more}


def record(name: str = "one", **more: Any) -> dict[str, Any]:
    """A sound report of the quick tier."""
    cases = [case(identity) for identity, (tier, _) in sorted(IDS.items()) if tier == "quick"]
    made: dict[str, Any] = {
        "schema_version": 2, "suite_version": 1, "kvport": "0.1.0", "kvport_commit": None,
        "created": "2026-01-01T00:00:00+00:00",
        "backend": {
            "request": name, "name": name, "distribution": name, "version": "1", "commit": "0123456789abcdef",
            "device": "chip:0", "torch_device": "cpu", "execution": "hardware", "device_name": "Chip & Co <1>",
            "driver": "7.1", "sdk": "Toolkit 3", "operations": {"append": "native", "seal": "inherited"},
            "facts": {"device_name": "Chip & Co <1>", "fuses": "all"},
        },
        "environment": {
            "python": "CPython 3.11", "os": "An OS 12", "platform": "Linux", "machine": "x86_64", "processor": "A CPU",
            "packages": {"torch": "2.99"},
        },
        "run": {
            "command": ["pytest", "--backend=x"], "seed": 0, "formats": None, "chapter": None, "tier": None,
            "keyword": None, "exit_status": 0, "seconds": 1.0,
        },
        "counts": {"pass": len(cases), "fail": 0, "unsupported": 0, "waived": 0, "error": 0},
        "cases": cases,
    }  # fmt: skip
    return sealed({**made, **more})


def edited(*changes: Change, reseal: bool = True, name: str = "one") -> Report:
    made = copy.deepcopy(record(name))
    for change in changes:
        change(made)
    return Report(sealed(made) if reseal else made)


def of_case(identity: str, **fields: Any) -> Change:
    return lambda r: next(c for c in r["cases"] if c["id"] == identity).update(fields)


def digests_of(identity: str, **fields: str) -> Change:
    return lambda r: next(c for c in r["cases"] if c["id"] == identity)["digests"].update(fields)


def counts(**numbers: int) -> Change:
    return lambda r: r["counts"].update({"pass": 3 - sum(numbers.values()), **numbers})


def executed(kind: str) -> Change:
    return lambda r: r["backend"].update(execution=kind)


def waived(expires: str = "2026-02-01") -> Change:
    waiver = {"backend": "one", "case": LAST, "reason": "firmware 7", "expires": expires, "issue": "", "source": "w"}

    def change(r: dict[str, Any]) -> None:
        of_case(LAST, outcome="waived", reason="off by 3", waiver=waiver, output_ratio=9.0)(r)
        counts(waived=1)(r)

    return change


Look = tuple[dict[str, Any], Sequence[str]]


def written(folder: Path, name: str, looks: dict[str, list[Look]], *changes: Change) -> Report:
    """A report in a file, with arrays beside it: looks by case, each its arrays and the words for its rows."""
    path = folder / f"{name}.json"
    made = copy.deepcopy(record(name))
    for change in changes:
        change(made)
    scratch = spool.open_spool(path)
    for identity, taken in looks.items():
        recording = Recording(2**20)
        for arrays, places in taken:
            recording.look(arrays, places)
        recording.save(scratch, identity)
        digests_of(identity, **stored_digests([arrays for arrays, _ in taken]))(made)
    made["tensors"] = spool.join(scratch, path, 1, looks)
    path.write_text(json.dumps(sealed(made)), encoding="utf-8")
    return read(path)


def planes(codes: Any, scale: Any, **more: Any) -> dict[str, Any]:
    """Planes of K of a few tokens."""
    return {"key.codes": np.asarray(codes), "key.scale": np.asarray(scale, np.float32), **more}
