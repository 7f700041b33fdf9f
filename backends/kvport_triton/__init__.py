"""The NVIDIA backend: Triton kernels that read codes.

``cuda`` and ``cuda:1`` run on hardware; ``triton@cpu`` is Triton's interpreter, a slow model of the same kernels that
must be asked for by name. One process can do only one of the two, see :mod:`kvport_triton.availability`.
"""

from __future__ import annotations

from kvport.hookspecs import BackendInfo, Device, hookimpl


@hookimpl
def kvport_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="triton",
            devices=(Device("cuda"), Device("cpu", explicit=True)),
            load="kvport_triton.availability:load",
            probe="kvport_triton.availability:probe",
            summary="Triton kernels for NVIDIA GPUs; triton@cpu is Triton's interpreter",
        )
    ]
