"""Probes well and loads wrongly, in a different way for each of its devices."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl


def probe(device_type: str) -> Probe:
    return Probe(usable=True)


def load(device: str) -> object:
    import torch
    from good_backend import GoodBackend

    if device == "raises":
        raise RuntimeError("firmware 7 is too old")
    if device == "wrongname":
        return GoodBackend(device, torch.device("cpu"))
    if device == "wrongdevice":
        return NamedRight("elsewhere", torch_device=torch.device("cpu"))
    if device == "wrongtorch":
        return NamedRight(device, torch_device=torch.device("meta"))
    return object()


def NamedRight(device: str, torch_device: object) -> object:  # noqa: N802 - stands for a class
    from good_backend import GoodBackend

    return type("NamedRight", (GoodBackend,), {"name": "badload"})(device, torch_device)


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    words = ("raises", "wrongname", "wrongdevice", "wrongtorch", "wrongtype")
    devices = tuple(Device(word, torch_type="cpu") for word in words)
    return [BackendInfo(name="badload", devices=devices, load=load, probe=probe)]
