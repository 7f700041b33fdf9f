"""What the senior plugin loads."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvport_cpu.base import TorchBackend


class SeniorBackend(TorchBackend):
    name: ClassVar[str] = "senior"


def load(device: str) -> SeniorBackend:
    return SeniorBackend(device, torch.device("cpu"))
