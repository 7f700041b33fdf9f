"""Which cases catch which fault: runs the gallery without stopping at the first rejection and writes docs/faults.md.

    python tests/faults/survey.py [--jobs N] [--cases N]

Two faults that fail the identical set of cases count once.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """# The gallery of faulty backends

A conformance suite is only as good as the faults it catches. `tests/faults/` holds {count} backends with one seeded
mistake each, made from a correct one by changing a step of a few lines. Their kinds are mistakes that users of
quantized and paged caches have reported in public. The suite rejects every one of them, through the chapter named
here, and never rejects the correct backend they are made from. Both are tests (`tests/faults/test_gallery.py`).

This table is written by `tests/faults/survey.py`. The last column names the checks that reject the fault, with the
number of cases that do, {scope}. By these alone, {distinct} of the faults
differ in the set of cases that they fail.

| fault | chapter | kind | what is wrong | rejected by |
|---|---|---|---|---|
"""


def failing(name: str, limit: int) -> tuple[str, list[str]]:
    """Ids of the first ``limit`` quick cases of its chapter that reject a fault; at least one, wherever it comes."""
    import torch
    from kvport_faults.gallery import FAULTS, results

    torch.set_num_threads(1)
    found = []
    for number, result in enumerate(results(FAULTS[name])):
        if number >= limit and found:
            break
        if result.outcome in ("fail", "error"):
            found.append(result.case.id)
    return name, found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cases", type=int, default=0, help="cases of each chapter, one of each check first (0: all)")
    args = parser.parse_args()
    from kvport_faults.gallery import FAULTS, quick_cases

    from kvport_conformance.cases import CHAPTERS

    limit = args.cases or max(len(quick_cases(chapter)) for chapter in CHAPTERS)
    with ProcessPoolExecutor(args.jobs) as pool:
        caught = dict(pool.map(failing, FAULTS, repeat(limit)))
    missed = [name for name, ids in caught.items() if not ids]
    distinct = len({tuple(ids) for ids in caught.values()})
    scope = f"among the chapter's first {args.cases}" if args.cases else "among all quick cases of the chapter"
    text = HEAD.format(count=len(FAULTS), distinct=distinct, scope=scope)
    for chapter in CHAPTERS:
        for fault in FAULTS.values():
            if fault.chapter == chapter:
                checks = Counter(identity.split("/")[1] for identity in caught[fault.name])
                by = ", ".join(f"{check} {count}" for check, count in checks.most_common())
                text += f"| `{fault.name}` | {chapter} | {fault.kind} | {fault.summary} | {by} |\n"
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"{len(FAULTS)} faults, {distinct} distinct sets of failing cases, missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
