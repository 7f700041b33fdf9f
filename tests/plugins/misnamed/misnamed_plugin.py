"""Announces another name than its entry point's."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="somebody",
            devices=(Device("somechip", torch_type="cpu"),),
            load="good_backend:load",
            probe="good_backend:probe",
        )
    ]
