"""Which cases catch which fault: runs the whole gallery without stopping early and writes docs/faults.md.

    python tests/faults/survey.py [--jobs N]

Two faults that fail the identical set of cases count once.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """# The gallery of faulty backends

A conformance suite is only as good as the faults it catches. `tests/faults/` holds {count} backends with one seeded
mistake each, made from a correct one by changing a step of a few lines. Their kinds are mistakes that users of
quantized and paged caches have reported in public. The suite rejects every one of them, through the chapter named
here; {distinct} of them differ in the set of cases that they fail. The correct backend they are made from is never
rejected. Both are tests (`tests/faults/test_gallery.py`); this table is written by `tests/faults/survey.py`.

The last column names the checks of the chapter that reject the fault, with the number of quick cases that do, counted
over those with pages of at most 48 tokens ({totals}).

| fault | chapter | kind | what is wrong | rejected by |
|---|---|---|---|---|
"""


def failing(name: str) -> tuple[str, list[str]]:
    """Ids of the quick cases of its chapter that reject a fault."""
    import torch
    from kvport_faults.gallery import FAULTS, results

    torch.set_num_threads(1)
    return name, [r.case.id for r in results(FAULTS[name], small=True) if r.outcome in ("fail", "error")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    from kvport_conformance.cases import CHAPTERS
    from kvport_faults.gallery import FAULTS, SMALL_PAGE, quick_cases

    with ProcessPoolExecutor(args.jobs) as pool:
        caught = dict(pool.map(failing, FAULTS))
    missed = [name for name, ids in caught.items() if not ids]
    distinct = len({tuple(ids) for ids in caught.values()})
    totals = ", ".join(
        f"{chapter} {sum(c.geometry.page_size <= SMALL_PAGE for c in quick_cases(chapter))}" for chapter in CHAPTERS
    )
    text = HEAD.format(count=len(FAULTS), distinct=distinct, totals=totals)
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
