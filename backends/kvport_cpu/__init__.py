"""The reference backend: every operation in plain torch, on the CPU or (asked for by name) on any torch device."""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="reference",
            # On an accelerator the reference is there to compare with, never to be picked by a bare device string.
            devices=(Device("cpu"), *(Device(name, explicit=True) for name in ("cuda", "npu", "xpu", "mps"))),
            load="kvport_cpu.reference:load",
            probe="kvport_cpu.reference:probe",
            summary="readable torch reference, the base class vendors start from",
        )
    ]
