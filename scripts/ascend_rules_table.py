"""Write the emulator's rules into docs/ascend.md, between the two marker lines.

::

    python scripts/ascend_rules_table.py            # rewrite the tables
    python scripts/ascend_rules_table.py --check    # exit 1 if they are out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvport_ascend.emulator.rules import ATTENTION, Rule
from kvport_ascend.emulator.scatter_rules import SCATTER_ND, SCATTER_PA

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "ascend.md"
BEGIN = "<!-- rules: written by scripts/ascend_rules_table.py -->"
END = "<!-- end of rules -->"


def table(title: str, rules: Sequence[Rule[Any]]) -> list[str]:
    lines = [
        f"**{title}** ({len(rules)})",
        "",
        "| rule | says | read in | who objects | doubt |",
        "|---|---|---|---|---|",
    ]
    for rule in rules:
        cells = (f"`{rule.name}`", rule.text, rule.source, rule.kind, rule.doubt)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def tables() -> str:
    return "\n".join(
        [
            BEGIN,
            "",
            *table("npu_fused_infer_attention_score, its _v2, npu_incre_flash_attention", ATTENTION),
            *table("npu_scatter_pa_kv_cache", SCATTER_PA),
            *table("npu_scatter_nd_update_", SCATTER_ND),
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
