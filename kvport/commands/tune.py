"""``kvport tune``: time the kernel shapes a backend may choose from on this device, and keep the fastest."""

from __future__ import annotations

import argparse

from kvport.backend import Tunable
from kvport.errors import Unsupported
from kvport.formats import DTYPES, CacheFormat
from kvport.layout import GroupLayout


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="cuda:0", metavar="DEVICE", help="such as cuda:0 (the default)")
    parser.add_argument("--format", action="append", metavar="FORMAT", help="may be given several times (default int8)")
    parser.add_argument("--head-dim", type=int, action="append", metavar="N", help="default 128")
    parser.add_argument("--page-size", type=int, action="append", metavar="N", help="default 16, 64 and 128")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N", help="default %(default)d")
    parser.add_argument(
        "--group", type=int, default=4, metavar="N", help="query heads per KV head, default %(default)d"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the queries, default %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="time and print, but keep nothing")


def run(args: argparse.Namespace) -> int:
    from kvport.registry import load_backend

    layouts = [
        GroupLayout(
            format=CacheFormat.parse(text),
            layers=1,
            kv_heads=args.kv_heads,
            query_heads=args.kv_heads * args.group,
            key_dim=dim,
            value_dim=dim,
            page_size=size,
            dtype=DTYPES[args.dtype],
        )
        for text in args.format or ["int8"]
        for dim in args.head_dim or [128]
        for size in args.page_size or [16, 64, 128]
    ]
    backend = load_backend(args.backend)
    if not isinstance(backend, Tunable):
        raise Unsupported(f"backend {backend.name} has nothing to tune")
    for layout in layouts:
        for line in backend.tune(layout, keep=not args.dry_run):
            print(line, flush=True)
    return 0
