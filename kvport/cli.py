"""The ``kvport`` command. Every subcommand is one line in :data:`COMMANDS`.

A subcommand's module has ``configure(parser)``, which adds its arguments, and ``run(args) -> int``, which does the
work and returns the exit status. It is imported only when its command is asked for; what is heavy (torch models, a
GPU's libraries) it imports inside ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvport.errors import KVPortError


@dataclass(frozen=True)
class Command:
    """One subcommand: what the user types, the module that does it, the line in ``kvport --help``."""

    name: str
    module: str
    help: str


COMMANDS: Final = (
    Command("backends", "kvport.commands.backends", "list the installed backends: usable or why not, what they do"),
    Command("demo", "kvport.commands.demo", "what each cache format does to a real model, measured on this machine"),
    Command("plan", "kvport.commands.plan", "how much memory a model's KV cache takes, and what fits, by format"),
    Command("calibrate", "kvport.commands.calibrate", "static scales from a model and a text, or from a checkpoint"),
    Command("tune", "kvport.commands.tune", "time a backend's kernel shapes on this device, and keep the fastest"),
    Command("new-backend", "kvport.commands.new_backend", "start a backend package for a new chip"),
    Command("compare", "kvport.commands.compare", "conformance reports of several backends: who agrees with whom"),
    Command("verify-report", "kvport.commands.verify_report", "is a conformance report whole, and what does it say"),
    Command("inspect", "kvport.commands.inspect", "look into a page image or a recipe, or a format's error by layer"),
)


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser with every subcommand's name and help, and the arguments of ``chosen``."""
    top = argparse.ArgumentParser(prog="kvport", description="Hardware-portable quantized, paged KV caches.")
    top.add_argument("--version", action="version", version=f"kvport {importlib.metadata.version('kvport')}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name == chosen:
            module = importlib.import_module(command.module)
            module.configure(sub)
            sub.set_defaults(run=module.run, flags=_flags(sub))
    return top


def _flags(sub: argparse.ArgumentParser) -> dict[str, str]:
    """An option's name in Python -> its long flag."""
    return {
        action.dest: flag
        for action in sub._actions  # argparse lists them nowhere else
        for flag in action.option_strings
        if flag.startswith("--")
    }


def _as_typed(message: str, flags: dict[str, str]) -> str:
    """An error of a library function that names its arguments, in the words of who typed flags instead.

    ``round_scales='fp16'`` becomes ``--round-scales='fp16'``, ``page_size must be`` becomes ``--page-size must be``.
    """
    for name, flag in flags.items():
        message = re.sub(rf"(?<![\w-]){re.escape(name)}(?==| (?:\([^)]*\) )?must be )", flag, message)
    return message


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvport ARGV``; returns the exit status: 0 done, 1 an error of kvport's own, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The top level takes no option with a value, so the first word that is no option names the subcommand.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    args = parser(chosen).parse_args(arguments)
    try:
        status: int = args.run(args)
    except KVPortError as error:
        print(f"kvport {args.command}: error: {_as_typed(str(error), args.flags)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # "kvport ... | head": the reader has what it wanted
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.filename is None:  # not about a file that was named
            raise
        print(f"kvport {args.command}: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":  # "python -m kvport.cli" would say nothing otherwise
    raise SystemExit(main())
