"""A plugin whose library is not installed: it imports, and its probe says why it is not usable."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl


def probe(device_type: str) -> Probe:
    return Probe(usable=False, reason="libabsent 3.2 is not installed")


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="absent",
            devices=(Device("tiechip", torch_type="cpu"),),
            load="good_backend:load",
            probe=probe,
            priority=99,
        )
    ]
