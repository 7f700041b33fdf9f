"""The committed list of all cases, against which reports are verified.

``python -m kvport_conformance.manifest`` rewrites it from the table of cases; a test compares the two, so that a case
can neither vanish nor change its tier or profiles unnoticed. Raise ``SUITE_VERSION`` when it changes after a release.

The file is nested to stay readable: tier, then chapter/check, then format, then the rest of the ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvport_conformance import SUITE_VERSION

PATH: Final = Path(__file__).parent / "manifest.json"


def build() -> dict[str, Any]:
    """The manifest of the table of cases."""
    from kvport_conformance.axes import TIERS
    from kvport_conformance.bounds import ONE_CODE_POOL, ONE_CODE_SHARE
    from kvport_conformance.cases import all_cases
    from kvport_conformance.profiles import PROFILES, profiles_of

    cases: dict[str, dict[str, dict[str, str]]] = {}
    counts = {profile.name: dict.fromkeys(TIERS, 0) for profile in PROFILES}
    for case in all_cases():
        check = cases.setdefault(case.tier, {}).setdefault(f"{case.chapter}/{case.check}", {})
        rest = case.id.removeprefix(f"{case.chapter}/{case.check}/{case.format}/")
        check[case.format] = f"{check[case.format]} {rest}" if case.format in check else rest
        for name in profiles_of(case):
            counts[name][case.tier] += 1
    return {
        "suite_version": SUITE_VERSION,
        "profiles": {profile.name: {"summary": profile.summary, "cases": counts[profile.name]} for profile in PROFILES},
        "one_code": {"share": ONE_CODE_SHARE.value, "pool": int(ONE_CODE_POOL.value)},
        "cases": cases,
    }


def read(path: Path = PATH) -> tuple[int, dict[str, str]]:
    """The suite version, and the tier of every case by id."""
    record = json.loads(path.read_text(encoding="utf-8"))
    tiers = {
        f"{check}/{format_text}/{rest}": tier
        for tier, checks in record["cases"].items()
        for check, formats in checks.items()
        for format_text, ids in formats.items()
        for rest in ids.split()
    }
    return int(record["suite_version"]), tiers


def write(path: Path = PATH) -> int:
    """Write the manifest; returns the number of cases."""
    path.write_text(json.dumps(build(), indent=1) + "\n", encoding="utf-8")
    return len(read(path)[1])


if __name__ == "__main__":
    print(f"{write()} cases written to {PATH}")
