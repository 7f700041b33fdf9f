"""``kvport verify-report``: is a conformance report whole and unaltered, and what does it say about each profile?"""

from __future__ import annotations

import argparse

from kvport.reports import Manifest, read, text, verify


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", metavar="REPORT.json", help="written by pytest ... --report=REPORT.json")


def run(args: argparse.Namespace) -> int:
    manifest = Manifest.installed()
    sound = True
    for path in args.reports:
        report = read(path)
        found = verify(report, manifest)
        sound = sound and found.sound
        print(text.verification(found, f"{path} ({report.label})"))
    return 0 if sound else 1
