"""Writing a file whole or not at all, reading what others wrote, and what is said where either cannot be."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvport.errors import FileError, MissingFile


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace ``path`` by ``content``: a reader sees the old file or the whole new one.

    The file gets the permissions that any new file gets (mkstemp's and safetensors' own are for their owner alone).
    Raises :class:`FileError` where it cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            folder = target.absolute().parent
            why = f"there is no folder {folder}" if not folder.is_dir() else error.strerror or str(error)
            raise _described(FileError(f"{path} cannot be written: {why}"), error, path) from error
        raise


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], what: str, advice: str) -> Iterator[None]:
    """Around what opens and reads a file: where the system refuses, :class:`FileError` says what the file should be.

    ``what`` is that in a word or two ("recipe"), ``advice`` where one comes from.
    """
    try:
        yield
    except FileError:  # of another file, named by who read it
        raise
    except FileNotFoundError as error:
        raise _described(MissingFile(f"there is no {what} {os.fspath(path)}; {advice}"), error, path) from None
    except OSError as error:
        why = "it is a folder" if os.path.isdir(path) else error.strerror or str(error)
        found = FileError(f"the {what} {os.fspath(path)} cannot be read: {why}; {advice}")
        raise _described(found, error, path) from error


def _described(found: FileError, error: OSError, path: str | os.PathLike[str]) -> FileError:
    """With what callers look for in an OSError; libraries in other languages leave it out."""
    found.errno = errno.ENOENT if error.errno is None and isinstance(error, FileNotFoundError) else error.errno
    found.strerror, found.filename = error.strerror, os.fspath(path)
    return found


def parse_json(text: str, **hooks: Any) -> Any:
    """The content of a JSON text. Raises ValueError for what is none, or is nested too deeply to be read.

    ``hooks`` are those of :func:`json.loads`; what they raise must be a ValueError.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
