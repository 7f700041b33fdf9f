"""``kvport demo``: what each cache format does to a real model, on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvport.errors import InvalidArgument, MissingDependency
from kvport.files import write_atomically


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="512 tokens of text instead of 2048")
    parser.add_argument("--tokens", type=int, help="tokens of text to read")
    parser.add_argument("--formats", metavar="F F ...", help="formats to compare, separated by spaces")
    parser.add_argument("--device", default="cpu", help="where the pages live: [backend@]device (default %(default)s)")
    parser.add_argument("--synthetic", action="store_true", help="made-up K and V instead of a model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured, too")


def run(args: argparse.Namespace) -> int:
    if args.tokens is not None and args.tokens < 2:
        raise InvalidArgument(f"--tokens {args.tokens}: give at least 2")
    if args.json is not None and not args.json.absolute().parent.is_dir():  # before the long run, not after
        raise InvalidArgument(f"--json {args.json}: there is no folder {args.json.absolute().parent}")
    from kvport import demo

    default = demo.QUICK_TOKENS if args.quick else demo.TOKENS
    tokens = default if args.tokens is None else args.tokens
    if args.synthetic:
        formats = tuple(args.formats.split()) if args.formats else demo.SYNTHETIC_FORMATS
        report = demo.run_synthetic(formats, device=args.device, tokens=tokens)
    else:
        formats = tuple(args.formats.split()) if args.formats else demo.FORMATS
        try:
            report = demo.run_model(formats, device=args.device, tokens=tokens)
        except MissingDependency as error:
            raise MissingDependency(f"{error}\n(kvport demo --synthetic runs on made-up K and V instead)") from error
    print(demo.render(report))
    if args.json is not None:
        write_atomically(args.json, (json.dumps(report.to_json(), indent=1) + "\n").encode())
    return 0
