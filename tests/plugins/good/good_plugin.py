"""A vendor's plugin as it should be: two chips of its own, a second backend, all work inherited."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="good",
            devices=(Device("goodchip", torch_type="cpu"), Device("slowchip", torch_type="cpu", explicit=True)),
            load="good_backend:load",
            probe="good_backend:probe",
            summary="a made-up chip",
        ),
        BackendInfo(
            name="good-extra",
            devices=(Device("extrachip", torch_type="cpu"),),
            load="good_backend:load_extra",
            probe="good_backend:probe",
        ),
    ]
