"""``kvport compare``: the cross-vendor verdict over two or more conformance reports."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvport.reports import Manifest, compare, text
from kvport.reports.html import page
from kvport.reports.reading import read_unaltered


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT.json", help="written by pytest ... --report=REPORT.json")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--markdown", metavar="FILE", help="write tables for a pull request ('-': print them instead)")


def run(args: argparse.Namespace) -> int:
    found = compare([read_unaltered(path) for path in args.reports], Manifest.installed())
    print(text.comparison(found, markdown=args.markdown == "-"))
    if args.markdown and args.markdown != "-":
        Path(args.markdown).write_text(text.comparison(found, markdown=True), encoding="utf-8")
    if args.html:
        Path(args.html).write_text(page(found), encoding="utf-8")
    return 0 if found.agreement else 1
