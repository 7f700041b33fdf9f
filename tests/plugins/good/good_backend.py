"""What the good plugin loads when asked: the torch base class under the vendor's name, one operation of its own."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvport.backend import Support
from kvport.hookspecs import Probe
from kvport.layout import GroupLayout
from kvport_cpu.base import TorchBackend


class GoodBackend(TorchBackend):
    name: ClassVar[str] = "good"

    def support(self, layout: GroupLayout) -> Support:
        if layout.format.key.code == "int2":
            return Support(reasons=("int2 is not in this chip, nearest is int4",))
        return Support(workspace="history", features=frozenset({"lse", "prefill"}))

    def facts(self) -> dict[str, str]:
        return {"firmware": "7"}


class ExtraBackend(GoodBackend):
    name: ClassVar[str] = "good-extra"


def probe(device_type: str) -> Probe:
    return Probe(usable=True, count=2, facts={"driver": "1.2"})


def load(device: str) -> GoodBackend:
    return GoodBackend(device, torch.device("cpu"))


def load_extra(device: str) -> GoodBackend:
    return ExtraBackend(device, torch.device("cpu"))
