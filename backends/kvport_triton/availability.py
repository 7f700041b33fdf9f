"""Whether this process can run the kernels on a GPU, or in Triton's interpreter, and why not.

Triton reads TRITON_INTERPRET once, when it is imported: from then on every kernel of the process is either compiled or
interpreted. So ``cuda`` and ``triton@cpu`` exclude each other in one process. Probing neither imports triton nor sets
the variable; loading ``triton@cpu`` sets it if triton has not been imported yet.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvport.errors import BackendUnavailable
from kvport.hookspecs import Probe

if TYPE_CHECKING:
    from kvport_triton.backend import TritonBackend

VARIABLE: Final = "TRITON_INTERPRET"
#: bfloat16 tensor-core products and asynchronous copies begin with compute capability 8.0.
MIN_CAPABILITY: Final = (8, 0)


#: Where the kernel driver says what it is: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ...".
DRIVER: Final = Path("/proc/driver/nvidia/version")


def driver_version(path: Path = DRIVER) -> str | None:
    """The version of the NVIDIA kernel driver, None where the system does not say."""
    try:
        found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def interpreting() -> bool | None:
    """True where triton was imported as interpreter, False where it compiles, None where it is not imported yet."""
    language = sys.modules.get("triton.language")
    if language is None or not hasattr(language, "sum"):
        return None
    return type(language.sum).__name__ == "InterpretedFunction"


def wants_interpreter() -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter, by the words that triton takes for true."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def probe(device_type: str) -> Probe:
    if importlib.util.find_spec("triton") is None:
        return Probe(usable=False, reason="triton is not installed; pip install 'kvport[triton]'")
    facts = {"torch": str(torch.__version__), "triton": importlib.metadata.version("triton")}
    reason = _interpreter_conflict() if device_type == "cpu" else _hardware_obstacle()
    if reason:
        return Probe(usable=False, reason=reason, facts=facts)
    if device_type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(0)
        return Probe(usable=True, facts=facts, count=torch.cuda.device_count())
    return Probe(usable=True, facts=facts, count=1)


def load(device: str) -> TritonBackend:
    """Make the backend for ``"cuda[:index]"`` or ``"cpu"``. Raises :class:`BackendUnavailable` with the reason."""
    interpreted = device.partition(":")[0] == "cpu"
    if reason := _interpreter_conflict() if interpreted else _hardware_obstacle():
        raise BackendUnavailable(f"triton cannot drive {device!r} in this process: {reason}")
    if interpreted and interpreting() is None:
        os.environ[VARIABLE] = "1"
    from kvport_triton.backend import TritonBackend

    if interpreting() is not interpreted:
        raise BackendUnavailable(
            f"triton was imported {'without' if interpreted else 'with'} {VARIABLE}=1 while {device!r} was loaded; "
            f"start the process with {VARIABLE}={'1' if interpreted else '0'}"
        )
    return TritonBackend(device, torch.device(device), interpreted=interpreted)


def _interpreter_conflict() -> str:
    """Why the interpreter cannot run here; empty where it can."""
    if interpreting() is False:
        return (
            f"triton was already imported without {VARIABLE}=1 and compiles for the GPU from now on; start a process "
            f"of its own for triton@cpu, with {VARIABLE}=1"
        )
    return ""


def _hardware_obstacle() -> str:
    """Why compiled kernels cannot run here; empty where they can."""
    if interpreting():
        return (
            "triton was imported as interpreter (triton@cpu) in this process, which excludes the GPU; use a process of "
            "its own for each"
        )
    if interpreting() is None and wants_interpreter():
        return f"{VARIABLE}={os.environ[VARIABLE]} asks for triton's interpreter; unset it to use the GPU"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install a CUDA build"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: no GPU, or no driver, is visible to this process"
    capability = torch.cuda.get_device_capability(0)
    if capability < MIN_CAPABILITY:
        return "GPU 0 ({}) has compute capability {}.{}; the kernels need {}.{} or later".format(
            torch.cuda.get_device_name(0), *capability, *MIN_CAPABILITY
        )
    return ""
