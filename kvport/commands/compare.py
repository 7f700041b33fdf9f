"""``kvport compare``: the cross-vendor verdict over two or more conformance reports."""

from __future__ import annotations

import argparse
import sys

from kvport.files import write_atomically
from kvport.reports import Manifest, beside, compare, text
from kvport.reports.html import page
from kvport.reports.reading import read_unaltered


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT.json", help="written by pytest ... --report=REPORT.json")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--markdown", metavar="FILE", help="write tables for a pull request ('-': print them instead)")
    parser.add_argument(
        "--no-tensors", action="store_true", help="do not open the arrays that lie beside reports (--tensors)"
    )


def run(args: argparse.Namespace) -> int:
    reports = [read_unaltered(path) for path in args.reports]
    found = compare(reports, Manifest.installed(), [None if args.no_tensors else beside(r) for r in reports])
    if args.html:
        _write(args.html, page(found))
    if args.markdown and args.markdown != "-":
        _write(args.markdown, text.comparison(found, markdown=True))
    sys.stdout.write(text.comparison(found, markdown=args.markdown == "-"))
    return 0 if found.agreement else 1


def _write(path: str, content: str) -> None:
    write_atomically(path, content.encode("utf-8", "backslashreplace"))
