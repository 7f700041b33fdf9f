"""``--tensors``: the arrays of all cases in one file beside the report.

Each process of a run writes a file a case into a spool folder beside the report; the process that reports joins them.
What does not fit is left out, the largest cases first, and is counted in the report.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MIB = 2**20


def tensors_path(report: Path) -> Path:
    return report.with_suffix(".safetensors")


def open_spool(report: Path) -> Path:
    """An empty folder beside the report, so that no other file system has to have room."""
    return Path(tempfile.mkdtemp(dir=report.parent, prefix=f".{report.name}.", suffix=".spool"))


def join(spool: Path, report: Path, mebibytes: int, expected: Iterable[str]) -> dict[str, Any]:
    """Join what was spooled into the file beside ``report``, which is replaced; the spool folder is removed.

    Returns what the report says of it. ``expected`` are the cases that had something to save.
    """
    from safetensors.numpy import load_file, save_file

    files = sorted(spool.glob("*.safetensors"), key=lambda path: (path.stat().st_size, path.name))
    arrays: dict[str, Any] = {}
    room = mebibytes * MIB
    for path in files:
        room -= path.stat().st_size
        if room < 0:
            break
        arrays |= load_file(path)
    target = tensors_path(report)
    joined = spool / "joined"
    save_file(arrays, joined, {"kvport.report": report.name})
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(joined, 0o666 & ~umask)
    with joined.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = joined.stat().st_size
    os.replace(joined, target)
    shutil.rmtree(spool, ignore_errors=True)
    saved = {name.rpartition("#")[0] for name in arrays}
    return {
        "file": target.name,
        "sha256": digest,
        "bytes": size,
        "limit_mib": mebibytes,
        "cases": len(saved),
        "left_out": len(set(expected) - saved),
    }
