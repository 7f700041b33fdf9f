"""The pytest side of kvport's conformance suite: options, markers, verdicts and the JSON report.

It is installed as a pytest plugin, so every pytest run of the environment imports it: it must stay light, and imports
neither torch nor kvport at module level.
"""

from __future__ import annotations

import re
from typing import NoReturn

import pytest

__all__ = ["UnsupportedCase", "disagreement", "split_formats", "unsupported"]


class UnsupportedCase(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # pytest types it as a variable
    """The backend declines this case. Reported as its own outcome, neither a pass nor an ordinary skip."""


class FailedCase(pytest.fail.Exception):  # type: ignore[name-defined,misc]  # pytest types it as a variable
    """The backend's answer is not what it must be. ``reason`` is what reports keep: they have the rest already."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text, pytrace=False)
        self.reason = reason


def unsupported(reason: str) -> NoReturn:
    """End the running case as *unsupported*, with the backend's reason. Call it before any work is judged."""
    __tracebackhide__ = True
    if not reason:
        raise ValueError("an unsupported case needs the backend's reason")
    raise UnsupportedCase(reason)


def disagreement(case: str, expected: str, found: str) -> NoReturn:
    """End the running case as failed: its id, what it expects in a sentence, and where the answer first differs.

    There is no traceback: a disagreement lies in numbers, and the line of the suite that compared them says nothing.
    """
    __tracebackhide__ = True
    raise FailedCase(f"{case}\n  expected: {expected}\n  found: {found}", found) from None


def split_formats(text: str) -> list[str]:
    """The formats in a comma-separated list, where a format may itself hold commas.

    ``"int8,k=int4:g64,v=int8,recent=128,fp32"`` -> ``["int8", "k=int4:g64,v=int8,recent=128", "fp32"]``: a piece that
    starts with ``word=`` goes on with the format before it, unless the word begins one (``k=``, ``latent=``).
    """
    found: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        word = re.match(r"([a-z]+)=", piece)
        if found and word is not None and word[1] not in ("k", "latent"):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found
