"""``kvport backends``: every installed backend, what it can do here, or why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import textwrap
from collections.abc import Iterator

from kvport.inspection import (
    SAMPLE_GEOMETRY,
    TIME_LIMIT,
    Capability,
    DeviceListing,
    FormatSupport,
    Listing,
    list_backends,
)

_OTHERS = "more options and other sizes can be had, or not: kvport.open and 'kvport plan --backend' say"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the whole listing as JSON")
    parser.add_argument("--no-probe", action="store_true", help="only import the plugin modules, ask no device")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        metavar="SECONDS",
        help="for each plugin, which is probed in a process of its own (default %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    rows = list_backends(probe=not args.no_probe, time_limit=args.time_limit)
    if args.json:
        version = importlib.metadata.version("kvport")
        print(json.dumps({"schema_version": 1, "kvport": version, "backends": [r.to_json() for r in rows]}, indent=2))
    elif not rows:
        print("No backend is installed: not even kvport's own is registered, so reinstall kvport with pip.")
    else:
        print("\n\n".join("\n".join(_lines(row)) for row in rows))
        if any(device.capability for row in rows for device in row.devices):
            print()
            print("\n".join(_field("formats", f"a sample of every family, asked at {SAMPLE_GEOMETRY}; {_OTHERS}")))
    broken = [row for row in rows if row.error]
    return 1 if broken and os.environ.get("KVPORT_STRICT_PLUGINS") == "1" else 0


def _lines(row: Listing) -> Iterator[str]:
    yield f"{row.name}  ({row.distribution} {row.version}, module {row.module}, in {row.location})"
    if row.summary:
        yield f"  {row.summary}"
    if row.error:
        yield from _field("not loaded", row.error)
    for device in row.devices:
        yield from _field(device.type, _verdict(row, device))
        if device.capability is not None:
            yield from _capability(device.capability)


def _verdict(row: Listing, device: DeviceListing) -> str:
    if device.usable is None:
        words = ["not probed"]
    elif device.usable:
        words = ["usable"] if device.count is None else [f"usable, {device.count} device(s)"]
    else:
        words = [f"not usable: {device.reason}"]
    if device.explicit:
        words.append(f"only by name, as {row.name}@{device.type}")
    words += [f"{key} {value}" for key, value in (device.facts or {}).items()]
    return "; ".join(words)


def _capability(found: Capability) -> Iterator[str]:
    yield from _field("  execution", f"{found.execution}, tensors on torch device {found.torch_device}")
    yield from _field("  formats", "  ".join(f.format for f in found.formats if not f.reasons) or "none of the sample")
    refused: list[list[FormatSupport]] = []
    for answer in (f for f in found.formats if f.reasons):
        for alike in refused:
            if answer.reasons == alike[0].reasons or _kind_of_refusal(answer) == _kind_of_refusal(alike[0]):
                alike.append(answer)
                break
        else:
            refused.append([answer])
    for alike in refused:  # the reasons of the first speak for all
        yield from _field("  refuses", f"{'  '.join(a.format for a in alike)}: {'; '.join(alike[0].reasons)}")
    supported = [f for f in found.formats if not f.reasons]
    features = sorted({feature for answer in supported for feature in answer.features})
    everywhere = [feature for feature in features if all(feature in answer.features for answer in supported)]
    yield from _field("  features", ", ".join(f if f in everywhere else f"{f} (some formats)" for f in features))
    lacking = dict.fromkeys(reason for answer in supported for reason in answer.lacking)
    lacks = [r if all(r in a.lacking for a in supported) else f"{r} (some formats)" for r in lacking]
    if supported:
        yield from _field("  lacks", "; ".join(lacks) or "nothing")
    if history := [answer.format for answer in supported if answer.workspace == "history"]:
        which = "every format" if len(history) == len(supported) else "  ".join(history)
        yield from _field("  memory", f"attend grows with the history for {which}")
    for rule in dict.fromkeys(answer.scale_rule for answer in supported if answer.scale_rule):
        which = "  ".join(answer.format for answer in supported if answer.scale_rule == rule)
        yield from _field("  static scales", f"{which}: {rule}")
    for kind in ("native", "inherited"):
        names = [name for name, how in found.operations.items() if how == kind]
        yield from _field(f"  {kind}", ", ".join(names) or "none")


def _kind_of_refusal(answer: FormatSupport) -> str:
    """The reasons with what only names the format taken out: equal where one reason has several formats."""
    text = "; ".join(answer.reasons)
    # By the look of the string: parsing it would need torch, without which there still is a listing.
    sides = [re.sub(r"^(k|v|latent|rope)=", "", part) for part in answer.format.split(",")]
    for name in sorted({answer.format, *sides, *(side.split(":")[0] for side in sides)}, key=len, reverse=True):
        text = text.replace(name, "*")
    return text


def _field(label: str, text: str) -> list[str]:
    """``label`` and ``text`` in two columns, wrapped; line breaks in the text are kept."""
    lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, 98, subsequent_indent="  ") or [""]]
    first, *rest = lines or [""]
    return [f"  {label:<16}{first}", *(f"  {'':<16}{line}" for line in rest)]
