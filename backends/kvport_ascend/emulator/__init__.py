"""Ascend operators on CPU tensors: the documented rules, and the documented numbers. No device is involved.

:func:`load` registers them as ``torch.ops.npu.*`` in this process; nothing here happens on import. The files:
:mod:`~kvport_ascend.emulator.calls` (arguments in one normal form), :mod:`~kvport_ascend.emulator.rules` (what is
refused), :mod:`~kvport_ascend.emulator.arithmetic` (what is computed), :mod:`~kvport_ascend.emulator.operators` (the
registration).

An emulated result says that a call is legal by the published rules and what it should compute. It says nothing about
what a device does.
"""

from kvport_ascend.emulator.arithmetic import NUMERICS, OBSERVED
from kvport_ascend.emulator.calls import AclnnParameterError, NotModelled
from kvport_ascend.emulator.operators import SOCS, load, loaded, owns_schemas, settings

__all__ = [
    "NUMERICS",
    "OBSERVED",
    "SOCS",
    "AclnnParameterError",
    "NotModelled",
    "load",
    "loaded",
    "owns_schemas",
    "settings",
]
