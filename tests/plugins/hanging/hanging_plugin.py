"""A probe that waits for a driver that never answers."""

from __future__ import annotations

import time

from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl


def probe(device_type: str) -> Probe:
    time.sleep(3600)
    return Probe(usable=True)


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="hanging", devices=(Device("hangchip", torch_type="cpu"),), load="good_backend:load", probe=probe
        )
    ]
