"""What a benchmark leaves behind: a JSON file with the machine's facts, also where the run was cut short."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def machine(device: torch.device | str = "cuda") -> dict[str, Any]:
    """The device and its software, for the record."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        from kvport.evaluation import machine as of_processor

        return of_processor()
    properties = torch.cuda.get_device_properties(device)
    found = {
        "gpu": properties.name,
        "processors": str(properties.multi_processor_count),
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "python": platform.python_version(),
    }
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    if asked.returncode == 0:
        found |= dict(zip(fields.split(","), (part.strip() for part in asked.stdout.split(",")), strict=False))
    return found


@contextmanager
def saved(path: str, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Write ``record`` to ``path``, if there is one, when the block ends.

    Where it ends by an exception, an interruption above all, the file has what was measured until then, and
    ``incomplete`` says what ended it.
    """
    try:
        yield record
    except BaseException as error:
        record["incomplete"] = f"{type(error).__name__}: {error}".rstrip(": ")
        raise
    finally:
        if path:
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(f"wrote {target}", flush=True)
