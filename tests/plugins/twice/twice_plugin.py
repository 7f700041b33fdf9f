"""Announces one name twice."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(name="twice", devices=(Device("twicechip"),), load="good_backend:load", probe="good_backend:probe")
        for _ in range(2)
    ]
