"""Asks for an argument that this kvport's hook does not have."""

from __future__ import annotations

from kvport.hookspecs import hookimpl


@hookimpl
def kvport_backends(context: object) -> list[object]:
    return []
