"""A vendor's plugin that ships what it is known to fail; KVPORT_TEST_WAIVES says how its list is wrong."""

from __future__ import annotations

import datetime
import os
from typing import Any, ClassVar

import torch

from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl
from kvport.waivers import Waiver
from kvport_cpu.base import TorchBackend


class Waives(TorchBackend):
    name: ClassVar[str] = "waives"


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="waives",
            devices=(Device("waivechip", torch_type="cpu"),),
            load=lambda device: Waives(device, torch.device("cpu")),
            probe=lambda device_type: Probe(usable=True, count=1),
        )
    ]


@hookimpl
def kvport_waivers() -> Any:
    how = os.environ.get("KVPORT_TEST_WAIVES", "")
    if how == "raises":
        raise RuntimeError("no such list")
    if how == "type":
        return ["append/*"]
    soon = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)
    backend, reason = ("good" if how == "others" else "waives"), ("" if how == "malformed" else "a known rounding")
    return [Waiver(backend, "append/rows/int8/*", reason, soon)]
