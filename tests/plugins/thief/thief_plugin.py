"""Announces, beside its own, the name of another plugin."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(name=name, devices=(Device("thiefchip"),), load="good_backend:load", probe="good_backend:probe")
        for name in ("thief", "good")
    ]
