"""``kvport new-backend``: start a backend package that passes the conformance suite as generated."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvport.scaffold import generate


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the backend's name, such as mychip")
    parser.add_argument("--device", help="the device type users will type before the colon (default: the name)")
    parser.add_argument("--into", metavar="FOLDER", help="where to write it (default: ./kvport-NAME)")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.into or f"kvport-{args.name}")
    device = args.device or args.name
    for path in generate(args.name, device, folder):
        print(f"wrote {folder / path}")
    print(
        f"\nnext:\n  pip install -e '{folder}[test]'\n  kvport backends\n"
        f"  pytest --pyargs kvport_conformance --backend={device}\n"
        "then make one operation native after the other: docs/write-a-backend.md has the order"
    )
    return 0
