"""``kvport plan``: bytes per token and per request, and what fits, for one or more formats side by side."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
from collections.abc import Sequence
from typing import Final

from kvport.formats import CacheFormat
from kvport.layout import DEFAULT_PAGE_SIZE
from kvport.model_config import ModelGeometry, read_model_config
from kvport.planning import DEFAULT_CHUNK, Plan, plan

_UNITS: Final = {
    "": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    "B": 1,
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="a Hugging Face config.json, or its folder")
    parser.add_argument("--tokens", required=True, type=int, help="length of a request, prompt and answer together")
    parser.add_argument("--requests", type=int, default=1, help="how many run at once (default 1)")
    parser.add_argument("--memory", type=read_bytes, metavar="SIZE", help="budget for the cache alone, e.g. 80GiB")
    parser.add_argument(
        "--format", action="append", metavar="FORMAT", help="a cache format; give several to compare (default int8)"
    )
    parser.add_argument(
        "--page-size", type=int, default=DEFAULT_PAGE_SIZE, help="tokens in a page (default %(default)d)"
    )
    parser.add_argument(
        "--chunk", type=int, default=DEFAULT_CHUNK, help="prompt tokens read in one step (default %(default)d)"
    )
    parser.add_argument("--pin", type=int, default=0, help="first tokens of each request kept in the near tier")
    parser.add_argument("--backend", metavar="DEVICE", help="count the padding of this backend, e.g. cpu or cuda:0")
    parser.add_argument("--devices", type=int, default=1, help="tensor-parallel devices; figures are for one of them")
    parser.add_argument("--no-windows", action="store_true", help="plan sliding-window layers in full")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")


def run(args: argparse.Namespace) -> int:
    model = read_model_config(args.model, windows=not args.no_windows).split(args.devices)
    backend = None
    if args.backend is not None:
        from kvport.registry import load_backend  # only then are plugins looked for

        backend = load_backend(args.backend)
    formats = [CacheFormat.parse(text) for text in args.format or ["int8"]]
    tiered = any(fmt.tiered for fmt in formats)
    plans = [
        plan(
            model,
            fmt,
            tokens=args.tokens,
            requests=args.requests,
            memory=args.memory,
            page_size=args.page_size,
            chunk=args.chunk,
            pin=args.pin if fmt.tiered or not tiered else 0,  # a baseline without tiers beside one that pins
            backend=backend,
        )
        for fmt in formats
    ]
    if args.json:
        record = {
            "schema_version": 1,
            "kvport": importlib.metadata.version("kvport"),
            "model": describe(model),
            "model_type": model.model_type,
            "devices": args.devices,
            "notes": list(model.notes),
            "plans": [p.to_json() for p in plans],
        }
        print(json.dumps(record, indent=2))
    else:
        print("\n".join(render(model, plans, args.devices)))
    return 0


def read_bytes(text: str) -> int:
    """``"80GiB"``, ``"512 MB"``, ``"1073741824"`` as bytes. Raises :class:`argparse.ArgumentTypeError`."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 80GiB, 80GB, 512MiB or a number of bytes")
    return int(float(match[1]) * units[match[2].lower()])


def show_bytes(count: int | None) -> str:
    """A byte count for people: exact below 10 KiB, else with two decimals of the largest fitting unit."""
    if count is None:
        return "-"
    if count < 10 * 1024:
        return f"{count} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(len(units), (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.2f} {units[power - 1]}"


def describe(model: ModelGeometry) -> str:
    """One line: how many layers of which shape."""
    kinds: dict[str, int] = {}
    for spec in model.layers:
        if spec.shares is not None:
            kind = "that read another layer's K and V"
        elif spec.latent:
            kind = f"latent {spec.value_dim} + {spec.key_dim - spec.value_dim}"
        else:
            dims = str(spec.key_dim) if spec.key_dim == spec.value_dim else f"{spec.key_dim} / {spec.value_dim}"
            kind = f"{spec.kv_heads} KV heads of {dims}"
        if spec.window is not None and spec.shares is None:
            kind += f", window {spec.window}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{count} layers {kind}" for kind, count in kinds.items())


def render(model: ModelGeometry, plans: Sequence[Plan], devices: int = 1) -> list[str]:
    """The table, a column for each format, and the notes below it."""
    first = plans[0]
    lines = [f"{model.model_type or 'model'}: {describe(model)}"]
    each = f", one of {devices} devices" if devices > 1 else ""
    lines += [f"{first.requests} requests of {first.tokens} tokens, pages of {first.layout.page_size}{each}", ""]
    lines += _table(plans)
    notes = [*model.notes]
    notes += [f"{p.format}: backend {p.backend} cannot store this: {reason}" for p in plans for reason in p.refusals]
    notes += [f"{p.format}: static scales that {p.backend} takes: {p.scale_rule}" for p in plans if p.scale_rule]
    if any(p.near_tokens for p in plans):
        notes.append(
            f"near pool: a request holds recent + page size + 1 tokens and its sinks, the one whose prompt is read "
            f"2 x {first.chunk - 1} more; a smaller --chunk makes it smaller"
        )
    notes.append(f"kvport.open(..., {first.open_arguments}) makes these pools")
    if first.fit is not None:
        notes.append("the budget is for the KV cache alone: weights and activations come on top")
    return [*lines, *(f"note: {note}" for note in dict.fromkeys(notes))]


def _table(plans: Sequence[Plan]) -> list[str]:
    rows: list[tuple[str, list[str]]] = [("", [p.format for p in plans])]

    def row(name: str, cells: Sequence[str]) -> None:
        rows.append((name, list(cells)))

    def section(name: str) -> None:
        rows.append((name, []))

    backend = next((p.backend for p in plans if p.backend is not None), None)
    section("one token, all layers")
    row("  codes", [show_bytes(p.per_token.codes) for p in plans])
    row("  scales and zeros", [show_bytes(p.per_token.metadata) for p in plans])
    if any(p.per_token.outliers for p in plans):
        row("  outliers", [show_bytes(p.per_token.outliers) for p in plans])
    row("  total", [show_bytes(p.per_token.total) for p in plans])
    if any(p.growth != p.per_token.total for p in plans):
        row("  total past the windows", [show_bytes(p.growth) for p in plans])
    section("one request, at rest")
    row("  codes", [show_bytes(p.stored.codes) for p in plans])
    row("  scales and zeros", [show_bytes(p.stored.metadata) for p in plans])
    if any(p.stored.outliers for p in plans):
        row("  outliers", [show_bytes(p.stored.outliers) for p in plans])
    if any(p.near for p in plans):
        row("  near tier", [f"{show_bytes(p.near)} ({p.near_tokens} tokens)" if p.near else "-" for p in plans])
    row("  page waste", [show_bytes(p.waste) for p in plans])
    row("  total, canonical", [show_bytes(p.request_bytes) for p in plans])
    if backend is not None:
        row(f"  padding, {backend}", [show_bytes(p.padding) for p in plans])
        row(f"  total, {backend}", [show_bytes(p.request_device_bytes) for p in plans])
    section(f"cache for {plans[0].requests} requests")
    if any(p.static_bytes for p in plans):
        row("  static scales", [show_bytes(p.static_bytes) for p in plans])
    row("  pages by pool", [", ".join(str(n) for n in p.pages) for p in plans])
    if any(p.near_tokens for p in plans):
        row("  near pool", [f"{p.near_pool_tokens} tokens" if p.near_tokens else "-" for p in plans])
    row("  total", [show_bytes(p.pool_bytes) for p in plans])
    if plans[0].fit is not None:
        section(f"in {show_bytes(plans[0].fit.memory)}")
        fits = [p.fit for p in plans if p.fit is not None]
        row(f"  requests of {plans[0].tokens} tokens", [str(fit.requests) for fit in fits])
        row(
            f"  tokens each of {plans[0].requests}",
            ["no limit" if fit.tokens is None else str(fit.tokens) for fit in fits],
        )
    widths = [max(len(r[0]) for r in rows)]
    widths += [max(len(r[1][i]) for r in rows if r[1]) for i in range(len(plans))]
    lines = []
    for name, cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return lines
