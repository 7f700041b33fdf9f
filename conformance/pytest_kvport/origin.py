"""Where a run took place and what code it ran: the facts that a reader of a report will ask for.

Everything comes from metadata and files; nothing of the code under test is imported for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: Packages whose versions a reader of a report will ask for.
PACKAGES: Final = ("kvport", "torch", "numpy", "pluggy", "safetensors", "pytest", "triton", "torch-npu")
#: Facts of a backend that every report names, null where the backend does not say.
DEVICE_FACTS: Final = ("device_name", "driver", "sdk")


def environment() -> dict[str, Any]:
    """The machine and the versions of what is installed."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "os": _os(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "byteorder": sys.byteorder,
        "packages": packages,
    }


def device_facts(facts: Mapping[str, str]) -> dict[str, str | None]:
    """The device's name, driver and SDK, as the backend's facts have them."""
    return {name: facts.get(name) for name in DEVICE_FACTS}


def commit(distribution: str) -> str | None:
    """The commit that a distribution was installed from, or is run from; None where nothing says (a plain wheel).

    ``+changes`` is appended where files of the checkout differ from that commit.
    """
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    source = json.loads(found.read_text("direct_url.json") or "{}")
    if installed := source.get("vcs_info", {}).get("commit_id"):
        return str(installed)
    for point in found.entry_points.select(group="kvport"):
        spec = importlib.util.find_spec(point.value.partition(":")[0].partition(".")[0])
        if spec is not None and spec.origin:
            return _checked_out(Path(spec.origin).parent)
    return None


def _checked_out(folder: Path) -> str | None:
    """The commit of the work tree that tracks ``folder``; None where none does."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        # An installed copy may lie inside somebody's work tree, which then does not track it.
        if not git("ls-files", "--", "."):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _os() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _processor() -> str:
    """The processor's name: what Linux says of the first one, or what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor()
