"""A second, independent backend: every operation from scratch in numpy, for a made-up device."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="numpychip",
            devices=(Device("numpychip", torch_type="cpu"),),
            load="numpychip_backend:load",
            probe="numpychip_backend:probe",
            summary="numpy only, pages as runs of bytes",
        )
    ]
