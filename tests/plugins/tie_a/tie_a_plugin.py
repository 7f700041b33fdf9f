"""One of two plugins that claim the same device with the same priority."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl


def probe(device_type: str) -> Probe:
    return Probe(usable=True)


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(name="tie-a", devices=(Device("tiechip", torch_type="cpu"),), load="good_backend:load", probe=probe)
    ]
