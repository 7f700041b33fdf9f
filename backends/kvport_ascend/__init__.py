"""Huawei Ascend backend of kvport: INT8 pages through torch_npu's operators.

``npu`` and ``npu:0`` drive a device. ``ascend@cpu`` runs the same code on emulated operators (documented rules and
arithmetic on CPU tensors), and says ``emulated`` wherever results are reported. Importing this package imports
no torch_npu, and announces names only.
"""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="ascend",
            devices=(Device("npu"), Device("cpu", explicit=True)),
            load="kvport_ascend.backend:load",
            probe="kvport_ascend.probing:probe",
            summary="Huawei Ascend through torch_npu; ascend@cpu emulates its operators",
        )
    ]
