"""``kvport verify-report``: is a conformance report whole and unaltered, and what does it say about each profile?

By itself it judges the report and not the backend: a sound report of failures passes. ``--require`` judges both.
"""

from __future__ import annotations

import argparse
import json
import sys

from kvport.errors import FileError, InvalidArgument
from kvport.reports import Manifest, ReportError, read, text, verify
from kvport.reports.reading import schema, shown


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="*", metavar="REPORT.json", help="written by pytest ... --report=REPORT.json")
    parser.add_argument(
        "--require",
        metavar="PROFILE,...",
        default="",
        help="also fail unless the backend passes all cases of these profiles (waived ones excepted), such as core",
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of reports instead")


def run(args: argparse.Namespace) -> int:
    if args.schema:
        print(json.dumps(schema(), indent=2))
        return 0
    if not args.reports:
        raise ReportError("name the reports to verify, or ask for --schema")
    manifest = Manifest.installed()
    required = [name.strip() for name in args.require.split(",") if name.strip()]
    if unknown := [name for name in required if name not in manifest.profiles]:
        raise InvalidArgument(
            f"--require: no profile is named {', '.join(unknown)}; there are: {', '.join(manifest.profiles)}"
        )
    good = True
    for path in args.reports:
        try:
            report = read(path)
            found = verify(report, manifest)
        except (ReportError, FileError) as error:  # the others are verified all the same
            print(f"kvport verify-report: error: {shown(error)}", file=sys.stderr)
            good = False
            continue
        unmet = [p for p in found.profiles if p.name in required and not p.met]
        # Where the report is not sound there may be no profiles to read.
        good = good and found.sound and not unmet
        print(text.verification(found, f"{path} ({report.label})"))
        for profile in unmet:
            print(f"required profile {profile.name}: {profile.verdict} ({profile.passed} of {profile.total})")
    return 0 if good else 1
