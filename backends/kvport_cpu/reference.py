"""The reference backend itself: the torch base class under its own name, and how it is probed and loaded."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvport.errors import BackendUnavailable
from kvport.hookspecs import Probe
from kvport_cpu.base import TorchBackend


class ReferenceBackend(TorchBackend):
    """Readable rather than fast; the numbers every other backend is compared with."""

    name: ClassVar[str] = "reference"

    def facts(self) -> dict[str, str]:
        found = {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}
        if self.torch_device.type == "cuda":
            found["device_name"] = torch.cuda.get_device_name(self.torch_device)
        return found


def probe(device_type: str) -> Probe:
    facts = {"torch": str(torch.__version__)}
    if device_type == "cpu":
        return Probe(usable=True, facts=facts)
    module = getattr(torch, device_type, None)
    if module is None:
        return Probe(usable=False, reason=f"this torch ({torch.__version__}) has no device type {device_type!r}")
    if not module.is_available():
        return Probe(usable=False, reason=f"torch.{device_type}.is_available() is False")
    return Probe(usable=True, facts=facts)


def load(device: str) -> ReferenceBackend:
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise BackendUnavailable(f"torch does not know the device {device!r}: {error}") from error
    return ReferenceBackend(device, torch_device)
