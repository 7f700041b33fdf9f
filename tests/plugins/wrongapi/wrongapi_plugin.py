"""Speaks a backend interface from the future."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="wrongapi",
            devices=(Device("futurechip", torch_type="cpu"),),
            load="good_backend:load",
            probe="good_backend:probe",
            api=99,
        )
    ]
