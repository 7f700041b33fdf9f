"""Claims the tied device with a higher priority."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl


def probe(device_type: str) -> Probe:
    return Probe(usable=True)


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="senior",
            devices=(Device("tiechip", torch_type="cpu"),),
            load="senior_backend:load",
            probe=probe,
            priority=10,
        )
    ]
