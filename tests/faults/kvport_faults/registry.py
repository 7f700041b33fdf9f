"""The table of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvport_faults.subject import Subject


@dataclass(frozen=True)
class Fault:
    """One faulty backend: the chapter that rejects it, its kind, and what is wrong in one sentence.

    ``about`` is part of the ids of the few cases that can see it; they come first, so that it is rejected quickly.
    """

    name: str
    chapter: str
    kind: str
    make: Callable[[], Subject]
    about: str = ""

    @property
    def summary(self) -> str:
        return " ".join((self.make.__doc__ or "").split())


FAULTS: Final[dict[str, Fault]] = {}


def fault(chapter: str, kind: str, *, about: str = "") -> Callable[[type[Subject]], type[Subject]]:
    """Register a faulty backend under the name of its class."""

    def register(made: type[Subject]) -> type[Subject]:
        if made.__name__ in FAULTS:
            raise ValueError(f"two faults are named {made.__name__}")
        if not made.__doc__:
            raise ValueError(f"fault {made.__name__} does not say what is wrong")
        FAULTS[made.__name__] = Fault(made.__name__, chapter, kind, made, about)
        return made

    return register
