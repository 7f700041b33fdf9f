"""Returns something else than announcements."""

from __future__ import annotations

from kvport.hookspecs import hookimpl


@hookimpl
def kvport_backends() -> list[dict[str, str]]:
    return [{"name": "wrongtype"}]
