"""Whether torch_npu and a device are usable here, and if not, which of the many ways of failing it is.

Where torch_npu is installed and CANN is not, ``import torch`` itself fails, and kvport with it, because torch loads
installed device extensions by itself. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps torch usable for other devices; the
probe then reports what would have broken the import.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvport.hookspecs import Probe
from kvport_ascend.socs import SOCS, soc_of

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
#: Where the driver and, by default, CANN are installed.
ROOT = Path("/usr/local/Ascend")
INSTALL = "pip install torch-npu (of exactly torch's version), after installing CANN from Huawei"
EMULATED = "ascend@cpu runs the same code on emulated operators, without a device"


def probe(device_type: str) -> Probe:
    """``"cpu"``: the emulated operators, always there. ``"npu"``: a device driven by torch_npu."""
    return _probe_emulated() if device_type == "cpu" else _probe_npu()


def _probe_emulated() -> Probe:
    # Only an imported torch_npu has registered its own schemas; one that is installed may be unable to load.
    if "torch_npu" in sys.modules:
        return Probe(usable=True, facts={"schemas": f"torch_npu {version('torch_npu')}, its own"})
    from kvport_ascend.schemas import DEFAULT_VERSION

    return Probe(usable=True, facts={"schemas": f"torch_npu {DEFAULT_VERSION}, recorded"})


def _probe_npu() -> Probe:
    if find_spec("torch_npu") is None:
        return _no(f"the package torch-npu is not installed: {INSTALL}")
    facts = {name: _installed(name) for name in ("torch", "torch_npu")}
    if mismatch := pairing_error(facts["torch"], facts["torch_npu"]):
        return _no(mismatch, facts)
    import torch

    try:
        import torch_npu  # noqa: F401 - registers the device
    except Exception as error:
        missing = "cannot open shared object file" in str(error)
        why = (
            "CANN's libraries are not found; install CANN and source its set_env.sh"
            if missing
            else "it fails to import"
        )
        held = os.environ.get(AUTOLOAD) == "0"
        note = f" (with {AUTOLOAD}=0, without which this error breaks import torch)" if held else ""
        return _no(f"torch_npu is installed, but {why}: {_first(error)}{note}", facts)
    npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
    try:
        count = npu.device_count() if npu.is_available() else 0
    except Exception as error:
        return _no(f"torch_npu is imported, but cannot ask the driver for devices: {_first(error)}", facts)
    if count == 0:
        return _no("torch_npu is imported, but no NPU is visible (see npu-smi info, ASCEND_RT_VISIBLE_DEVICES)", facts)
    name = str(npu.get_device_name(0))
    facts |= {"device_name": name, **installed_software()}
    soc = soc_of(name)
    if soc is None:
        known = ", ".join(prefix + "*" for entry in SOCS.values() for prefix in entry.device_names)
        return _no(f"the chip {name!r} is not in the table of known ones ({known}), so its limits are not known", facts)
    facts["soc"] = soc.name
    return _no(soc.refusal, facts) if soc.refusal else Probe(usable=True, facts=facts)


def pairing_error(torch_version: str, npu_version: str) -> str:
    """Why these two versions cannot go together ("" if they can): torch_npu is built for one release of torch."""
    if _release(torch_version) == _release(npu_version):
        return ""
    return (
        f"torch_npu {npu_version} is built for torch {_release(npu_version)}, installed is torch {torch_version}; "
        "install matching versions"
    )


def _release(text: str) -> str:
    """ "2.9.0.post9" and "2.9.0+cpu" -> "2.9.0"."""
    return ".".join(text.partition("+")[0].split(".")[:3])


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _first(error: Exception) -> str:
    """Type and the first line of a message, the part that names the cause."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def installed_software(root: Path = ROOT) -> dict[str, str]:
    """What Huawei's installers left in their version files: ``driver`` and ``sdk`` (CANN), each where it is found."""
    home = os.environ.get("ASCEND_TOOLKIT_HOME")
    toolkits = [Path(home)] if home else [root / "cann", root / "ascend-toolkit" / "latest"]
    infos = [info for folder in toolkits for info in sorted(folder.glob("*-linux/ascend_toolkit_install.info"))]
    found: dict[str, str] = {}
    if cann := next(filter(None, map(_version_line, infos)), None):
        found["sdk"] = f"CANN {cann}"
    if driver := _version_line(root / "driver" / "version.info"):
        found["driver"] = driver
    return found


def _version_line(path: Path) -> str | None:
    """``Version=24.1.rc3`` in one of those files."""
    try:
        found = re.search(r"^version=(\S+)", path.read_text(encoding="utf-8", errors="replace"), re.I | re.M)
    except OSError:
        return None
    return found[1] if found else None


def _no(reason: str, facts: dict[str, str] | None = None) -> Probe:
    return Probe(usable=False, reason=f"{reason}; {EMULATED}", facts=facts or {})
