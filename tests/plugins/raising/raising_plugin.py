"""A probe that raises what is no Exception."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl


class DriverPanic(BaseException):
    pass


def probe(device_type: str) -> Probe:
    raise DriverPanic("device 0 fell off the bus")


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="raising", devices=(Device("raisechip"), Device("tiechip")), load="good_backend:load", probe=probe
        )
    ]
