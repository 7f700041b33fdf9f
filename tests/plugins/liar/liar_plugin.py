"""A vendor's plugin that claims what it cannot do: int4 is declined when it comes to it, int8 is stored unscaled."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvport.backend import Store
from kvport.errors import Unsupported
from kvport.hookspecs import BackendInfo, Device, Probe, hookimpl
from kvport_cpu.base import TorchBackend


class Liar(TorchBackend):
    name: ClassVar[str] = "liar"
    execution = "hardware"

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        code = store.layout.format.key.code
        if code == "int4":
            raise Unsupported("int4 is not in this chip after all")
        super().append(store, layer, key * 1.5 if code == "int8" else key, value, slots)


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="liar",
            devices=(Device("liarchip", torch_type="cpu"),),
            load=lambda device: Liar(device, torch.device("cpu")),
            probe=lambda device_type: Probe(usable=True, count=1),
        )
    ]
