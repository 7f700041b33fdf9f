"""``kvport new-backend``: a complete third-party backend package, conformant as generated.

The templates are files beside this module. In them and in their names ``@NAME@`` is the backend's name, ``@PACKAGE@``
the Python package, ``@CLASS@`` the class and ``@DEVICE@`` the device type.
"""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from kvport.errors import InvalidArgument

SUFFIX = ".template"


def generate(name: str, device: str, folder: Path) -> list[Path]:
    """Write the package of backend ``name`` for device type ``device`` into ``folder``, which must not hold files yet.

    Returns the files written, relative to ``folder``. Raises :class:`InvalidArgument` before anything is written.
    """
    for what, word in (("backend name", name), ("device type", device)):
        if not re.fullmatch(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", word):
            raise InvalidArgument(
                f"the {what} must be lower-case words of letters and digits joined by '-' or '_', such as mychip; "
                f"got {word!r}"
            )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(f"{folder} exists and is not empty; give another folder with --into")
    words = re.split(r"[-_]", name)
    fields = {
        "@NAME@": name,
        "@PACKAGE@": f"kvport_{'_'.join(words)}",
        "@CLASS@": f"{''.join(word.capitalize() for word in words)}Backend",
        "@DEVICE@": device,
    }
    written = []
    for relative, text in _templates(resources.files("kvport.scaffold").joinpath("templates")):
        target = Path(_fill(relative, fields))
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / target).write_text(_fill(text, fields), encoding="utf-8")
        written.append(target)
    return written


def _templates(root: Traversable, prefix: str = "") -> list[tuple[str, str]]:
    """(path of the file to write, its text) of every template, sorted."""
    found: list[tuple[str, str]] = []
    for entry in sorted(root.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            found += _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            found.append((prefix + entry.name.removesuffix(SUFFIX), entry.read_text(encoding="utf-8")))
    return found


def _fill(text: str, fields: dict[str, str]) -> str:
    for field, value in fields.items():
        text = text.replace(field, value)
    return text
