"""Triton's interpreter, made affordable.

A launch replaces the operations of ``triton.language`` by numpy ones, and the interpreter does so again, by walking
through all of its names, at every call of a helper function in between: a third of the time a kernel takes, for
nothing. Another quarter goes into checking every integer operation for overflow.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder


class _Helper(InterpretedFunction):  # type: ignore[misc]  # triton is not typed
    """A function called from inside a launch, which has prepared the language already."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.rewrite()(*args, **kwargs)


def quicken(*modules: ModuleType) -> None:
    """Let the jitted functions that these modules define be called as plain functions inside a launch."""
    for module in modules:
        for value in vars(module).values():
            if type(value) is InterpretedFunction and value.fn.__module__ == module.__name__:
                value.__class__ = _Helper


@contextmanager
def launching(*, check_overflow: bool) -> Iterator[None]:
    """Around a launch: numpy does not warn of infinities or of rows that are all NaN, as a graph's padding may be, and
    integer operations are checked only where asked for."""
    options = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=check_overflow)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            yield
    finally:
        interpreter_builder.options = options
