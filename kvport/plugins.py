"""Finding and loading plugin modules, each on its own: one that fails is data, never somebody else's problem.

A plugin is an entry point of group ``kvport``. Finding reads metadata only; loading imports the module, registers it
with pluggy and asks its hook for the backends it announces. Whatever goes wrong becomes a :class:`LoadFailure` of that
plugin.

Three environment variables steer it, read when a :class:`Plugins` first looks:

``KVPORT_PLUGINS=a,b``
    load only these;
``KVPORT_DISABLE_PLUGINS=x``
    never load these, applied before their modules are imported;
``KVPORT_STRICT_PLUGINS=1``
    raise a load failure instead of storing it, with the plugin's own exception as its cause.

A name in either list that matches no entry point is an error, because a misspelt name would otherwise do the opposite
of what was meant.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import threading
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pluggy

from kvport.errors import BackendError, BackendUnavailable, InvalidArgument, PluginConflict, UnknownBackend
from kvport.hookspecs import PROJECT, SUPPORTED_APIS, BackendInfo, Device, Hooks
from kvport.waivers import Waiver

GROUP: Final = "kvport"


@dataclass(frozen=True)
class PluginEntry:
    """An entry point of group ``kvport`` as the metadata has it, nothing imported.

    ``location`` is the folder the distribution was found in: two copies of one distribution differ only there.
    """

    name: str
    module: str
    distribution: str
    version: str
    location: str

    @property
    def provider(self) -> str:
        """ "distribution version", for messages."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class LoadFailure:
    """Why a plugin could not be loaded. ``error`` is one line, ``traceback`` is empty where nothing was raised."""

    name: str
    distribution: str
    version: str
    error: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}): {self.error}"


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin: where it came from and the backends it announced."""

    entry: PluginEntry
    backends: tuple[BackendInfo, ...]


class Refused(Exception):
    """A plugin broke a rule of kvport's; the text says which. Never leaves this module."""


def describe(error: BaseException) -> str:
    """One line for an exception: ``ImportError: libfoo.so: cannot open ...``."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Name and version of a distribution; "unknown" for a metadata folder without its METADATA file."""
    try:
        # Absent fields are None or a KeyError, by the version of Python.
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    except (KeyError, TypeError):
        return "unknown", "unknown"
    return name or "unknown", version or "unknown"


def find_entries() -> list[PluginEntry]:
    """Every entry point of the group, sorted by name and distribution.

    A distribution that appears several times on ``sys.path`` counts once per name, the first copy that has the entry:
    a stale metadata folder without it (an old ``.egg-info`` beside a checkout) does not hide the plugin.
    """
    found: dict[tuple[str, str], PluginEntry] = {}
    for distribution in importlib.metadata.distributions():
        for point in distribution.entry_points:
            if point.group != GROUP:
                continue
            name, version = _identity(distribution)
            key = (point.name, re.sub(r"[-_.]+", "-", name).lower())
            if key not in found:
                location = str(distribution.locate_file(""))
                found[key] = PluginEntry(point.name, point.value, name, version, location)
    return sorted(found.values(), key=lambda entry: (entry.name, entry.distribution))


class Plugins:
    """The plugins of this interpreter: found once, loaded one at a time, each at most once. Thread-safe."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._lock = threading.RLock()
        self._loading = ""
        self._entries: dict[str, tuple[PluginEntry, ...]] | None = None
        self._blocked: dict[str, str] = {}
        self._strict = False
        self._outcomes: dict[str, Plugin | LoadFailure] = {}
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(Hooks)

    def entries(self) -> Mapping[str, tuple[PluginEntry, ...]]:
        """Backend name -> the entry points of that name: one, or several that are in conflict."""
        with self._lock:
            if self._entries is None:
                found: dict[str, tuple[PluginEntry, ...]] = {}
                for entry in find_entries():
                    found[entry.name] = (*found.get(entry.name, ()), entry)
                self._blocked = _blocked(self._environ, found)
                self._strict = _strict(self._environ)
                self._entries = found
            return self._entries

    def refusal(self, name: str) -> LoadFailure | None:
        """Why the entry point ``name`` would not even be imported: blocked, or claimed by two distributions."""
        entries = self.entries()[name]
        first = entries[0]
        if name in self._blocked:
            return LoadFailure(name, first.distribution, first.version, self._blocked[name])
        if len(entries) > 1:
            return LoadFailure(name, first.distribution, first.version, _conflict(name, entries))
        return None

    def load(self, name: str) -> Plugin:
        """Load the plugin of entry point ``name``, that one alone.

        Raises :class:`UnknownBackend` where there is none, :class:`PluginConflict` where two distributions have it,
        :class:`BackendUnavailable` with the stored reason where it is blocked or failed to load.
        """
        entries = self.entries()
        if name not in entries:
            raise UnknownBackend(f"no plugin is named {name!r}; installed: {self.installed()}")
        outcome = self.outcome(name)
        if isinstance(outcome, Plugin):
            return outcome
        if name not in self._blocked and len(entries[name]) > 1:
            raise PluginConflict(outcome.error)
        error = BackendUnavailable(f"backend plugin {outcome}")
        if outcome.traceback:
            error.add_note(f"The plugin's own traceback:\n{outcome.traceback}")
        raise error

    def waivers(self, name: str) -> tuple[Waiver, ...]:
        """The waivers that the plugin of entry point ``name`` ships for its own backends; none where it has no hook.

        Raises :class:`BackendUnavailable` where the hook raises, or gives anything but waivers for its own backends.
        """
        plugin = self.load(name)
        module = self._manager.get_plugin(name)
        found: list[Waiver] = []
        for implementation in self._manager.hook.kvport_waivers.get_hookimpls():
            if implementation.plugin is not module:
                continue
            who = f"kvport_waivers() of plugin {name} ({plugin.entry.provider})"
            try:
                answer: Any = implementation.function()
                found += list(answer)
            except Exception as error:
                raise BackendUnavailable(f"{who}: {describe(error)}") from error
            own = [info.name for info in plugin.backends]
            for waiver in found:
                if not isinstance(waiver, Waiver):
                    raise BackendUnavailable(f"{who} must return kvport.waivers.Waiver records, got {waiver!r}")
                if waiver.backend.partition("@")[0] not in own:
                    raise BackendUnavailable(
                        f"{who} waives cases of {waiver.backend!r}; a plugin waives those of its own: {', '.join(own)}"
                    )
        return tuple(found)

    def load_all(self) -> list[Plugin | LoadFailure]:
        """Load every plugin, each on its own, and return what became of each, by name."""
        return [self.outcome(name) for name in self.entries()]

    def installed(self) -> str:
        """The installed plugins in words, for messages."""
        listed = [f"{entry.name} ({entry.provider})" for entries in self.entries().values() for entry in entries]
        return ", ".join(listed) or "none (is the kvport distribution itself installed?)"

    def outcome(self, name: str) -> Plugin | LoadFailure:
        """The plugin of entry point ``name``, loaded on the first call, or why it could not be."""
        with self._lock:
            if self._loading:
                # The lock is held by this very thread: a plugin's module asked for a backend while being imported.
                raise BackendError(
                    f"plugin {self._loading!r} asks for a backend while its module is being imported; a plugin module "
                    "may only announce, the work belongs into what 'load' and 'probe' name"
                )
            if name not in self._outcomes:
                self._loading = name
                try:
                    self._outcomes[name] = self._attempt(name)
                finally:
                    self._loading = ""
            return self._outcomes[name]

    def _attempt(self, name: str) -> Plugin | LoadFailure:
        if refusal := self.refusal(name):
            if self._strict and name not in self._blocked:
                raise PluginConflict(refusal.error)
            return refusal
        (entry,) = self.entries()[name]
        try:
            return Plugin(entry, self._announced(entry))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a vendor's import may raise anything, e.g. a Rust panic is no Exception
            own_rule = isinstance(error, Refused)
            failure = LoadFailure(
                entry.name,
                entry.distribution,
                entry.version,
                str(error) if own_rule else describe(error),
                "" if own_rule else "".join(traceback.format_exception(error)),
            )
            if self._strict:
                raise BackendUnavailable(f"backend plugin {failure}") from error
            return failure

    def _announced(self, entry: PluginEntry) -> tuple[BackendInfo, ...]:
        """Import, register and ask. Leaves the manager as it was where any of it fails."""
        module: Any = importlib.metadata.EntryPoint(entry.name, entry.module, GROUP).load()
        try:
            self._manager.register(module, entry.name)
            # Per plugin, so that a misspelt hook is this plugin's failure; those before it have passed already.
            self._manager.check_pending()
            implementations = [i for i in self._manager.hook.kvport_backends.get_hookimpls() if i.plugin is module]
            if not implementations:
                raise Refused(f"{entry.module} has no function kvport_backends() marked with @kvport.hookimpl")
            (implementation,) = implementations
            if implementation.wrapper or implementation.hookwrapper:
                raise Refused(f"{entry.module}: kvport_backends() must not be a hook wrapper")
            return self._checked(entry, implementation.function())
        except BaseException:
            if self._manager.get_plugin(entry.name) is not None:
                self._manager.unregister(name=entry.name)
            raise

    def _checked(self, entry: PluginEntry, answer: object) -> tuple[BackendInfo, ...]:
        if isinstance(answer, str | BackendInfo) or not isinstance(answer, Iterable):
            raise Refused(f"kvport_backends() must return a list of BackendInfo, got {type(answer).__name__}")
        backends = tuple(answer)
        for info in backends:
            if not isinstance(info, BackendInfo):
                raise Refused(f"kvport_backends() must return a list of BackendInfo, got one {type(info).__name__}")
            _check_info(entry, info)
        names = [info.name for info in backends]
        for name in names:
            if names.count(name) > 1:
                raise Refused(f"announces the backend name {name!r} twice")
            if name != entry.name and name in self.entries():
                other = self.entries()[name][0]
                raise Refused(f"announces {name!r}, the name of the plugin of {other.provider}")
        if entry.name not in names:
            raise Refused(
                f"announces {', '.join(map(repr, names)) or 'nothing'}, but its entry point is named {entry.name!r}: "
                "one of its backends must have that name"
            )
        return backends


def _check_info(entry: PluginEntry, info: BackendInfo) -> None:
    if not isinstance(info.name, str) or not re.fullmatch(r"[^@:\s]+", info.name):
        raise Refused(f"a backend's name is a word without '@', ':' or spaces, got {info.name!r}")
    if isinstance(info.api, bool) or not isinstance(info.api, int) or info.api not in SUPPORTED_APIS:
        raise Refused(
            f"backend {info.name!r} speaks backend interface {info.api!r}, this kvport supports "
            f"{SUPPORTED_APIS.start} to {SUPPORTED_APIS.stop - 1}: install versions of kvport and "
            f"{entry.distribution} that match"
        )
    if not isinstance(info.devices, tuple) or not info.devices or not all(isinstance(d, Device) for d in info.devices):
        raise Refused(f"backend {info.name!r}: devices must be a tuple of at least one Device, got {info.devices!r}")
    types = [device.type for device in info.devices]
    if len(set(types)) < len(types):
        raise Refused(f"backend {info.name!r} announces a device type twice: {', '.join(types)}")
    if isinstance(info.priority, bool) or not isinstance(info.priority, int):
        raise Refused(f"backend {info.name!r}: priority must be an integer, got {info.priority!r}")
    for role in ("load", "probe"):
        value = getattr(info, role)
        if not callable(value) and not (isinstance(value, str) and re.fullmatch(r"[\w.]+:[\w.]+", value)):
            raise Refused(f"backend {info.name!r}: {role} must be callable or 'module:attribute', got {value!r}")


def _conflict(name: str, entries: tuple[PluginEntry, ...]) -> str:
    providers = " and ".join(f"{entry.provider} ({entry.module}, in {entry.location})" for entry in entries)
    return f"the backend name {name!r} is claimed by {providers}; uninstall all but one"


def _blocked(environ: Mapping[str, str], found: Mapping[str, tuple[PluginEntry, ...]]) -> dict[str, str]:
    """Name -> reason, for the entry points that the two lists forbid. An empty variable counts as not set."""
    blocked: dict[str, str] = {}
    for variable, forbids in (("KVPORT_PLUGINS", False), ("KVPORT_DISABLE_PLUGINS", True)):
        names = [word.strip() for word in environ.get(variable, "").split(",") if word.strip()]
        if unknown := [name for name in names if name not in found]:
            raise UnknownBackend(
                f"{variable}={environ[variable]!r} names {', '.join(map(repr, unknown))}, which no installed plugin "
                f"has; installed: {', '.join(found) or 'none'}"
            )
        for name in found if names else ():
            if (name in names) == forbids:
                blocked[name] = f"{'blocked' if forbids else 'not allowed'} by {variable}={environ[variable]!r}"
    return blocked


def _strict(environ: Mapping[str, str]) -> bool:
    value = environ.get("KVPORT_STRICT_PLUGINS", "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"KVPORT_STRICT_PLUGINS must be 0 or 1, got {value!r}")
    return value == "1"
