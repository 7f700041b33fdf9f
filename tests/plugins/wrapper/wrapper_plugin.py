"""Wraps the hook instead of implementing it."""

from __future__ import annotations

from collections.abc import Generator

from kvport.hookspecs import hookimpl


@hookimpl(wrapper=True)
def kvport_backends() -> Generator[None, list[object], list[object]]:
    return (yield)
