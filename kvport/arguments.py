"""Judging arguments: what a message shows of them, and whole numbers within bounds."""

from __future__ import annotations

import re
from typing import Final

from kvport.errors import InvalidArgument

#: Positions, page ids and dims are 32-bit on every device, see :class:`kvport.backend.StepArrays`.
INT32_MAX: Final = 2**31 - 1


def show(value: object, longest: int = 80) -> str:
    """``repr`` for an error message, cut, whatever the value is: Python refuses to print integers of many digits."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def whole_number(
    name: str, value: object, least: int, most: int = INT32_MAX, error: type[InvalidArgument] = InvalidArgument
) -> int:
    """``value`` if it is an int (a bool is none) in ``least .. most``; else ``error`` that says so."""
    if type(value) is not int or not least <= value <= most:
        limit = "below 2**31" if most == INT32_MAX else f"at most {show(most)}"
        raise error(f"{name} must be a whole number >= {least} and {limit}, got {show(value)}")
    return value


def read_number(text: str) -> int | None:
    """A decimal number below 2**32 of ASCII digits, None for anything else (signs, other scripts, more digits)."""
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) and int(text) < 2**32 else None
