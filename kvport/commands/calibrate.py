"""``kvport calibrate``: scales and outlier channels from a model and a text, or scales that a checkpoint brings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvport.errors import InvalidArgument

if TYPE_CHECKING:
    from kvport.recipes import Recipe


def configure(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="DIR", help="run this transformers model over --text (a folder, or smollm2)")
    source.add_argument("--checkpoint", metavar="DIR", help="take the scales that this checkpoint brings")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the recipe to write (safetensors)")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text like what the model will be used for")
    parser.add_argument(
        "--format",
        help="the format to find static scales or outlier channels for, e.g. int8:channel:static, "
        "k=int4:g64:outliers=4,v=int4:g64, or latent=int8:tensor:static,rope=bf16 for MLA models",
    )
    parser.add_argument("--method", default="amax", help="amax, percentile:P or mse (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to read (default %(default)d)")
    parser.add_argument("--context", type=int, default=2048, help="tokens in one context (default %(default)d)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens in one forward (default %(default)d)")
    parser.add_argument("--date", help="the date the recipe says, YYYY-MM-DD (default: today, UTC)")
    parser.add_argument("--code", help="with --checkpoint: what the codes are (fp8_e4m3, int8), where it does not say")
    parser.add_argument(
        "--round-scales", metavar="DTYPE", help="with --checkpoint: round its scales to fp16 or bf16 first"
    )
    parser.add_argument("--prefix", help="with --checkpoint: of its tensors' names, where it holds several models")


def run(args: argparse.Namespace) -> int:
    recipe = _import(args) if args.checkpoint else _calibrate(args)
    recipe.save(args.output)
    layers = list(recipe)
    formats = sorted(set(recipe.formats.values()))
    print(f"{args.output}: {len(layers)} layers, format {', '.join(formats)}")
    for key, value in recipe.provenance.items():
        print(f"  {key}: {value}")
    for note in recipe.notes:
        print(f"note: {note}")
    return 0


def _import(args: argparse.Namespace) -> Recipe:
    from kvport.checkpoints import import_scales

    given = {"--text": args.text, "--format": args.format}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise InvalidArgument(f"{', '.join(wrong)} with --checkpoint: the checkpoint says format and scales itself")
    return import_scales(args.checkpoint, code=args.code, prefix=args.prefix, round_scales=args.round_scales)


def _calibrate(args: argparse.Namespace) -> Recipe:
    if missing := [name for name in ("text", "format") if getattr(args, name) is None]:
        raise InvalidArgument(f"--model needs {' and '.join('--' + name for name in missing)}")
    given = {"--code": args.code, "--round-scales": args.round_scales, "--prefix": args.prefix}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise InvalidArgument(f"{', '.join(wrong)} with --model: these are for the scales of a --checkpoint")
    if args.context < 1 or args.tokens < 1:
        raise InvalidArgument(f"--tokens {args.tokens} and --context {args.context} must be positive")
    if not (parent := Path(args.output).absolute().parent).is_dir():
        raise InvalidArgument(f"--output {args.output}: there is no folder {parent}")  # before the long run, not after
    from kvport.calibration import calibrate_model
    from kvport.commands.loading import load_model, load_text

    loaded = load_model(args.model)
    text = load_text(args.text, loaded.tokenizer, args.tokens)
    ids, mask = rows_of(text.ids, args.context)
    provenance = {"model": f"{loaded.name} ({loaded.source}, sha256 {loaded.sha256})", "text_sha256": text.sha256}
    if args.date is not None:
        provenance["date"] = args.date
    interactive = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if interactive:
            print(f"\rforward {done} of {total}", end="" if done < total else "\n", file=sys.stderr)

    return calibrate_model(
        loaded.model,
        ids,
        args.format,
        method=args.method,
        mask=mask,
        chunk=args.chunk,
        provenance=provenance,
        progress=progress,
    )


def rows_of(ids, context: int):  # type: ignore[no-untyped-def]  # torch is not imported at module level
    """Cut ``(1, tokens)`` into rows of ``context`` tokens, the last one padded; and the mask of real tokens."""
    import torch

    count = ids.shape[1]
    rows = -(-count // context)
    width = min(context, count)
    padded = torch.zeros(rows * width, dtype=ids.dtype)
    padded[:count] = ids[0]
    return padded.view(rows, width), (torch.arange(rows * width) < count).view(rows, width).to(torch.long)
