"""``kvport new-backend``: a complete third-party backend package, conformant as generated.

The templates are files beside this module. In them and in their names ``@NAME@`` is the backend's name, ``@PACKAGE@``
the Python package, ``@CLASS@`` the class and ``@DEVICE@`` the device type.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from kvport.errors import InvalidArgument
from kvport.hookspecs import PROJECT
from kvport.plugins import Plugin, Plugins

SUFFIX = ".template"


def generate(name: str, device: str, folder: Path) -> list[Path]:
    """Write the package of backend ``name`` for device type ``device`` into ``folder``, which must not hold files yet.

    Returns the files written, relative to ``folder``. Raises :class:`InvalidArgument` before anything is written: for
    words that cannot be, names that are kvport's, Python's or an installed plugin's, and a folder that holds files.
    """
    for what, word in (("backend name", name), ("device type", device)):
        if not re.fullmatch(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", word):
            raise InvalidArgument(
                f"the {what} must be lower-case words of letters and digits joined by '-' or '_', such as mychip; "
                f"got {word!r}"
            )
    words = re.split(r"[-_]", name)
    package = f"kvport_{'_'.join(words)}"
    plugins = Plugins()
    driven = _first_party_devices(plugins)
    if reason := _reserved(name, package, plugins, driven):
        raise InvalidArgument(f"the backend name {name!r} {reason}; choose another, such as mychip")
    if device in driven:
        raise InvalidArgument(
            f"the device type {device!r} is driven by kvport's own backend {driven[device]!r}, and two would tie; give "
            "your chip's own word with --device. (A second backend for one device needs a priority: docs/plugins.md.)"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(f"{folder} exists and is not empty; give another folder with --into")
    fields = {
        "@NAME@": name,
        "@PACKAGE@": package,
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


def _first_party_devices(plugins: Plugins) -> dict[str, str]:
    """Device type -> a backend of kvport's own distribution that drives it. Nobody else's module is imported."""
    own = [name for name, entries in plugins.entries().items() if entries[0].distribution == PROJECT]
    outcomes = [plugins.outcome(name) for name in own]
    return {
        device.type: info.name
        for outcome in outcomes
        if isinstance(outcome, Plugin)
        for info in outcome.backends
        for device in info.devices
    }


def _reserved(name: str, package: str, plugins: Plugins, driven: Mapping[str, str]) -> str:
    """Why a well-formed name cannot be a new backend's; "" where it can."""
    plain = name.replace("-", "_")
    if plain == PROJECT or plain.startswith(f"{PROJECT}_"):
        return "belongs to kvport (the package is given that prefix anyway)"
    if name in plugins.entries():
        return f"is taken by the plugin of {plugins.entries()[name][0].provider}"
    if name in driven:
        return f"is the device type that {driven[name]!r} drives"
    if keyword.iskeyword(plain) or keyword.issoftkeyword(plain):
        return "is a word of the Python language"
    if plain in sys.stdlib_module_names or plain == "torch":
        return f"is that of the module {plain!r}, which messages and imports could not be told from"
    if importlib.util.find_spec(package) is not None:
        return f"makes the package {package}, which is installed already"
    return ""


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
