"""``kvport inspect``: what a page image or a recipe holds, or what a format does to each layer of a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvport.errors import InvalidArgument
from kvport.files import reading

if TYPE_CHECKING:
    from kvport.image_report import StoredSide
    from kvport.quality import LayerError
    from kvport.recipes import Recipe


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="a page image or a scale recipe (safetensors)")
    parser.add_argument("--model", metavar="DIR", help="run this transformers model over --text (a folder, or smollm2)")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text")
    parser.add_argument("--format", help="the cache format to look at")
    parser.add_argument("--scales", metavar="FILE", help="the recipe of a static format")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the text to read (default %(default)d)")
    parser.add_argument("--counters", action="store_true", help="count saturation and underflow")
    parser.add_argument("--least-cosine", type=float, help="cosine p1 below which a layer is said to break (0.9)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.model is None):
        raise InvalidArgument("give a file (page image or recipe) to look into, or --model with --text and --format")
    record = _model(args) if args.model else _file(args.file)
    if args.json:
        print(json.dumps({"schema_version": 1, **record.pop("json")}, indent=2))
    else:
        print("\n".join(record["lines"]))
    return 0


# -- files -----------------------------------------------------------------------------------------------------------


def _file(path: str) -> dict[str, Any]:
    from kvport.image import PageImage
    from kvport.image_report import inspect_image
    from kvport.recipes import load_recipe

    kind = _kind(path)
    if kind == "kvport.recipe":
        recipe = load_recipe(path)
        return {"lines": _recipe_lines(recipe), "json": {"recipe": _recipe_json(recipe)}}
    image = PageImage.load(path)
    sides = inspect_image(image)
    head: dict[str, Any] = {"format": image.format, "tokens": image.length, "bytes": image.nbytes}
    head |= {"fingerprint": image.fingerprint, "poisoned": {str(n): list(at) for n, at in image.poisoned.items()}}
    flags = [
        f"layer {layer} met a NaN, stored as code 0, in pages that begin at {', '.join(map(str, positions))}"
        for layer, positions in image.poisoned.items()
    ]
    return {
        "lines": [
            f"page image: {image.length} tokens, {image.format}, {image.nbytes} bytes",
            *_image_lines(sides),
            *flags,
        ],
        "json": {"image": {**head, "sides": [side.to_json() for side in sides]}},
    }


def _kind(path: str) -> str:
    """Which of kvport's files this is, by its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path, "file", "give a page image or a recipe"), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, ValueError) as error:
        raise InvalidArgument(f"{path} is not an intact safetensors file: {error}") from error
    for kind in ("kvport.image", "kvport.recipe"):
        if kind in metadata:
            return kind
    raise InvalidArgument(f"{path} is neither a page image nor a recipe of kvport")


def _image_lines(sides: Sequence[StoredSide]) -> list[str]:
    rows = [("layer", "side", "format", "tokens", "at ends", "zeros", "levels", "scales", "kept", "")]
    for one in sides:
        scales = "-" if one.scale_min is None else f"{one.scale_min:.3g} .. {one.scale_max:.3g}"
        cells = (str(one.layer), one.side, one.format, str(one.tokens), _percent(one.extreme), _percent(one.zeros))
        levels = "-" if one.levels is None else str(one.levels)
        kept = "-" if one.kept is None else str(one.kept)
        rows.append((*cells, levels, scales, kept, "; ".join(one.suspicions())))
    return _columns(rows)


def _recipe_json(recipe: Recipe) -> dict[str, Any]:
    from dataclasses import fields

    import torch

    layers: dict[str, Any] = {}
    for layer, scales in recipe.items():
        for side in fields(scales):
            given = getattr(scales, side.name)
            if given is None:
                continue
            if side.name.endswith("_channels"):
                layers.setdefault(str(layer), {})[side.name] = torch.as_tensor(given).tolist()
                continue
            scale = torch.as_tensor(given.scale, dtype=torch.float32)
            found = {"shape": list(scale.shape), "scale_min": scale.min().item(), "scale_max": scale.max().item()}
            if given.zero is not None:
                zero = torch.as_tensor(given.zero, dtype=torch.float32)
                found.update(zero_min=zero.min().item(), zero_max=zero.max().item())
            layers.setdefault(str(layer), {})[side.name] = found
    return {
        "digest": recipe.digest(),
        "formats": {str(layer): fmt for layer, fmt in recipe.formats.items()},
        "provenance": dict(recipe.provenance),
        "notes": list(recipe.notes),
        "layers": layers,
    }


def _recipe_lines(recipe: Recipe) -> list[str]:
    found = _recipe_json(recipe)
    lines = [f"recipe: {len(recipe)} layers, {', '.join(sorted(set(recipe.formats.values())))}, {found['digest'][:16]}"]
    lines += [f"  {key}: {value}" for key, value in recipe.provenance.items()]
    lines += [f"note: {note}" for note in recipe.notes]
    rows = [("layer", "side", "scales", "zeros")]
    for layer, sides in found["layers"].items():
        for side, one in sides.items():
            if side.endswith("_channels"):
                rows.append((layer, side, ", ".join(f"head {head}: {row}" for head, row in enumerate(one)), ""))
                continue
            zeros = f"{one['zero_min']:.3g} .. {one['zero_max']:.3g}" if "zero_min" in one else "-"
            rows.append((layer, side, f"{one['scale_min']:.3g} .. {one['scale_max']:.3g}", zeros))
    return [*lines, *_columns(rows)]


# -- a model ---------------------------------------------------------------------------------------------------------


def _model(args: argparse.Namespace) -> dict[str, Any]:
    if missing := [name for name in ("text", "format") if getattr(args, name) is None]:
        raise InvalidArgument(f"--model needs {' and '.join('--' + name for name in missing)}")
    from kvport.commands.loading import load_model, load_text
    from kvport.quality import Limits, inspect_model, worst_layer
    from kvport.recipes import load_recipe

    scales = None if args.scales is None else load_recipe(args.scales)
    loaded = load_model(args.model)
    text = load_text(args.text, loaded.tokenizer, args.tokens)
    limits = Limits() if args.least_cosine is None else Limits(cosine_p1=args.least_cosine)
    report = inspect_model(loaded.model, text.ids, args.format, scales=scales, counters=args.counters, limits=limits)
    worst = worst_layer(report)
    head = {
        "model": loaded.name,
        "format": args.format,
        "tokens": text.ids.shape[1],
        "text_sha256": text.sha256,
        "worst_layer": worst.layer,
        "broken_layers": [one.layer for one in report if one.broken],
    }
    lines = [f"{loaded.name}, {args.format}, {text.ids.shape[1]} tokens of {text.name}", *_error_lines(report)]
    lines.append(f"worst layer: {worst.layer} (attention output cosine p1 {worst.output_cosine_p1:.4f})")
    lines += [f"layer {one.layer} breaks: {'; '.join(one.broken)}" for one in report if one.broken]
    return {"lines": lines, "json": {"report": {**head, "layers": [one.to_json() for one in report]}}}


def _error_lines(report: Sequence[LayerError]) -> list[str]:
    counted = any(one.key.counts is not None for one in report)
    more = ("K sat.", "K underfl.", "V sat.", "V underfl.") if counted else ()
    rows = [("layer", "K error", "K cos p1", "V error", "V cos p1", "out cos p1", "out cos min", "KL", "KL max", *more)]
    for one in report:
        cells = [str(one.layer)]
        for side in (one.key, one.value):
            cells += [f"{side.relative:.4f}", f"{side.cosine_p1:.4f}"]
        cells += [
            f"{one.output_cosine_p1:.4f}",
            f"{one.output_cosine_min:.4f}",
            f"{one.kl_mean:.5f}",
            f"{one.kl_max:.4f}",
        ]
        for side in (one.key, one.value):
            if side.counts is not None:
                cells += [_percent(side.counts.share("saturated")), _percent(side.counts.share("underflow"))]
        rows.append(tuple(cells))
    return _columns(rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.3%}"


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    table = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
