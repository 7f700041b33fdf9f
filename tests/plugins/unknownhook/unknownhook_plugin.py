"""Misspells its hook."""

from __future__ import annotations

from kvport.hookspecs import hookimpl


@hookimpl
def kvport_backend() -> list[object]:
    return []
