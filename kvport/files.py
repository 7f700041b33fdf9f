"""Writing a file whole or not at all, and reading JSON that others wrote."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace ``path`` by ``content``: a reader sees the old file or the whole new one.

    The file gets the permissions that any new file gets (mkstemp's and safetensors' own are for their owner alone).
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def parse_json(text: str, **hooks: Any) -> Any:
    """The content of a JSON text. Raises ValueError for what is none, or is nested too deeply to be read.

    ``hooks`` are those of :func:`json.loads`; what they raise must be a ValueError.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
