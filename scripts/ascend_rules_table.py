"""Write the emulator's rules into docs/ascend.md, between the two marker lines, each with the calls that break it.

The calls are those of tests/ascend/test_emulator_rules.py, which therefore has to be there, and pytest with it.

::

    python scripts/ascend_rules_table.py            # rewrite the tables
    python scripts/ascend_rules_table.py --check    # exit 1 if they are out of date
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvport_ascend.emulator.rules import ATTENTION, Rule
from kvport_ascend.emulator.scatter_rules import SCATTER_ND, SCATTER_PA

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "ascend.md"
CALLS = ROOT / "tests" / "ascend" / "test_emulator_rules.py"
BEGIN = "<!-- rules: written by scripts/ascend_rules_table.py -->"
END = "<!-- end of rules -->"


def wrong_calls() -> Mapping[str, Sequence[str]]:
    """Rule -> what is wrong with each call that the tests break it by."""
    spec = importlib.util.spec_from_file_location(CALLS.stem, CALLS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, list[str]] = defaultdict(list)
    for rule, wrong, *_ in (*module.WRONG, *module.ALONE.items(), *module.ON_META.items()):
        found[rule].append(wrong)
    return found


def table(title: str, rules: Sequence[Rule[Any]], broken: Mapping[str, Sequence[str]]) -> list[str]:
    calls = sum(len(broken[rule.name]) for rule in rules)
    lines = [
        f"**{title}** ({len(rules)} rules, broken by {calls} calls)",
        "",
        "| rule | says | read in | who objects | doubt | broken in the tests by |",
        "|---|---|---|---|---|---|",
    ]
    for rule in rules:
        calls_of = "; ".join(broken[rule.name])
        cells = (f"`{rule.name}`", rule.text, rule.source, rule.kind, rule.doubt, calls_of)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def tables() -> str:
    broken = wrong_calls()
    return "\n".join(
        [
            BEGIN,
            "",
            *table("npu_fused_infer_attention_score, its _v2, npu_incre_flash_attention", ATTENTION, broken),
            *table("npu_scatter_pa_kv_cache", SCATTER_PA, broken),
            *table("npu_scatter_nd_update_", SCATTER_ND, broken),
            END,
        ]
    )


def updated(document: str) -> str:
    """``document`` with the text between the markers replaced."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT} lacks the lines {BEGIN!r} and {END!r}")
    return before + tables() + after


def main() -> int:
    parser = argparse.ArgumentParser(description="write the emulator's rules into docs/ascend.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the tables are out of date")
    old = DOCUMENT.read_text()
    new = updated(old)
    if parser.parse_args().check:
        if new != old:
            print(f"{DOCUMENT} is out of date; run scripts/ascend_rules_table.py", file=sys.stderr)
        return int(new != old)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
