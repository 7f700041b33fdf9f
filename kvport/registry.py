"""Choosing a backend: ``"[backend@]device[:index]"`` is parsed, a backend is selected, and only then loaded.

``"reference@cuda:0"`` imports the plugin ``reference`` alone, so that nobody else's import can hurt. ``"cuda:0"``
imports every plugin module (they are light and isolated, see :mod:`kvport.plugins`), and probes those that claim
``cuda`` without being ``explicit`` about it; the highest priority among the usable wins. Nothing falls back: a tie,
or no usable backend, is an error that lists every candidate and why not.

Device names stay strings until the backend is loaded: ``torch.device("npu")`` raises where torch_npu is absent, and a
chip's name need not be a torch device at all.
"""

from __future__ import annotations

import pkgutil
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from kvport.arguments import show
from kvport.errors import (
    BackendUnavailable,
    InvalidArgument,
    KVPortError,
    PluginConflict,
    UnknownBackend,
)
from kvport.hookspecs import BackendInfo, Device, Probe
from kvport.plugins import LoadFailure, Plugin, PluginEntry, Plugins, describe

if TYPE_CHECKING:
    from kvport.backend import Backend


@dataclass(frozen=True)
class DeviceString:
    """A parsed ``[backend@]device[:index]``; ``backend`` is empty and ``index`` None where not given."""

    backend: str
    type: str
    index: int | None

    @property
    def device(self) -> str:
        """What a backend's ``load`` is given: ``"cuda:1"``, or ``"cpu"`` where no index was given."""
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __str__(self) -> str:
        return f"{self.backend}@{self.device}" if self.backend else self.device


def parse_device(text: str) -> DeviceString:
    """Parse a device string. Says nothing about whether such a backend or device exists.

    ``"triton@cuda:1"`` -> backend "triton", type "cuda", index 1. Raises :class:`InvalidArgument`.
    """
    if not isinstance(text, str):
        raise InvalidArgument(
            f"a device is given as a string such as 'cpu', 'cuda:1' or 'reference@cuda:0', got "
            f"{type(text).__name__} {show(text)}"
        )
    match = re.fullmatch(r"(?:([^@:\s]+)@)?([^@:\s]+)(?::([0-9]{1,6}))?", text)
    if match is None:
        raise InvalidArgument(
            f"{show(text)} is no device string: it is [backend@]device[:index], such as 'cpu', 'cuda:1' or "
            "'reference@cuda:0', the index a number from 0"
        )
    backend, device_type, index = match.groups()
    return DeviceString(backend or "", device_type, None if index is None else int(index))


@dataclass(frozen=True)
class Selection:
    """A backend that was selected and probed, not yet loaded."""

    request: DeviceString
    info: BackendInfo
    device: Device
    entry: PluginEntry
    probe: Probe

    def load(self) -> Backend:
        """Make the backend. What its ``load`` raises comes as :class:`BackendUnavailable`, cause attached."""
        from kvport.backend import Backend, Execution

        who = f"backend {self.info.name!r} ({self.entry.provider})"
        try:
            backend = _resolve(self.info.load)(self.request.device)
        except (KeyboardInterrupt, SystemExit, KVPortError):
            raise
        except BaseException as error:
            raise BackendUnavailable(f"{who} failed to load {self.request.device!r}: {describe(error)}") from error
        if not isinstance(backend, Backend):
            raise BackendUnavailable(f"{who}: load must return a kvport.backend.Backend, got {_a(backend)}")
        # Reports carry these, and the core places tensors by them: a wrong one would be believed.
        for attribute, wanted in (
            ("name", (self.info.name,)),
            ("device", (self.request.device,)),
            ("execution", get_args(Execution)),
        ):
            value = getattr(backend, attribute, None)
            if value not in wanted:
                raise BackendUnavailable(
                    f"{who}: the loaded object's {attribute} is {value!r}, expected {' or '.join(map(repr, wanted))}"
                )
        torch_type = getattr(getattr(backend, "torch_device", None), "type", None)
        if torch_type != self.device.torch_type:
            raise BackendUnavailable(
                f"{who}: the loaded object's torch_device has type {torch_type!r}, announced for {self.device.type!r} "
                f"is {self.device.torch_type!r}"
            )
        return backend


@dataclass(frozen=True)
class _Candidate:
    """A backend that drives the device type, and what its probe says about using it for this request."""

    plugin: Plugin
    info: BackendInfo
    device: Device
    probe: Probe

    def __str__(self) -> str:
        verdict = f"usable, priority {self.info.priority}" if self.probe.usable else self.probe.reason
        return f"{self.info.name} ({self.plugin.entry.provider}): {verdict}"


class Registry:
    """Selects and loads backends. Thread-safe; plugin modules are imported under its lock, probes run outside it.

    ``environ`` replaces ``os.environ`` for the variables of :mod:`kvport.plugins`.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.plugins = Plugins(environ)

    def select(self, text: str | DeviceString) -> Selection:
        """Select and probe the backend for a device string.

        Raises :class:`InvalidArgument` for a string that cannot be, :class:`UnknownBackend` where no plugin has that
        name or none drives that device, :class:`BackendUnavailable` where it is there and not usable, and
        :class:`PluginConflict` for a tie.
        """
        request = text if isinstance(text, DeviceString) else parse_device(text)
        candidate = self._named(request) if request.backend else self._best(request)
        return Selection(request, candidate.info, candidate.device, candidate.plugin.entry, candidate.probe)

    def load(self, text: str | DeviceString) -> Backend:
        """Select, probe and load the backend for a device string; raises as :meth:`select` does."""
        return self.select(text).load()

    def failures(self) -> list[LoadFailure]:
        """The plugins that cannot be loaded. Loads every one that was not yet."""
        return [outcome for outcome in self.plugins.load_all() if isinstance(outcome, LoadFailure)]

    def _named(self, request: DeviceString) -> _Candidate:
        plugin, info = self._find(request.backend)
        device = next((d for d in info.devices if d.type == request.type), None)
        who = f"backend {info.name!r} ({plugin.entry.provider})"
        if device is None:
            drives = ", ".join(f"{info.name}@{d.type}" for d in info.devices)
            raise UnknownBackend(f"{who} does not drive {request.type!r}; it drives: {drives}")
        probe = probe_device(info, device, request.index)
        if not probe.usable:
            raise BackendUnavailable(f"{who} is not usable for {request.device!r}: {probe.reason}")
        return _Candidate(plugin, info, device, probe)

    def _find(self, name: str) -> tuple[Plugin, BackendInfo]:
        """The plugin that announces backend ``name``: by its entry point, else any plugin that announces more."""
        if name in self.plugins.entries():
            plugin = self.plugins.load(name)
            return plugin, next(info for info in plugin.backends if info.name == name)
        outcomes = self.plugins.load_all()
        found = [(p, info) for p in outcomes if isinstance(p, Plugin) for info in p.backends if info.name == name]
        if not found:
            hint = ""
            if any(d.type == name for p in outcomes if isinstance(p, Plugin) for i in p.backends for d in i.devices):
                hint = f" ({name!r} is a device type: write it after the '@', or alone)"
            raise UnknownBackend(f"no backend is named {name!r}{hint}{_known(outcomes)}")
        if len(found) > 1:
            providers = " and ".join(plugin.entry.provider for plugin, _ in found)
            raise PluginConflict(f"the backend name {name!r} is announced by {providers}; uninstall all but one")
        return found[0]

    def _best(self, request: DeviceString) -> _Candidate:
        outcomes = self.plugins.load_all()
        candidates = [
            _Candidate(
                plugin,
                info,
                device,
                Probe(usable=False, reason=f"chosen only by name: write '{info.name}@{request.device}'")
                if device.explicit
                else probe_device(info, device, request.index),
            )
            for plugin in outcomes
            if isinstance(plugin, Plugin)
            for info in plugin.backends
            for device in info.devices
            if device.type == request.type
        ]
        if not candidates:
            hint = ""
            if any(info.name == request.type for p in outcomes if isinstance(p, Plugin) for info in p.backends):
                hint = f" ({request.type!r} is a backend: write '{request.type}@' and a device)"
            raise UnknownBackend(f"no backend drives a device of type {request.type!r}{hint}{_known(outcomes)}")
        usable = [candidate for candidate in candidates if candidate.probe.usable]
        if not usable:
            # Only now are those probed that a bare device never chooses (an interpreter is a choice for the whole
            # process): advice to ask for one by name must not lead to the next refusal.
            candidates = [
                replace(c, probe=_by_name_only(c.info, c.device, request)) if c.device.explicit else c
                for c in candidates
            ]
            raise BackendUnavailable(f"no usable backend for {str(request)!r}:{_listed(candidates, outcomes)}")
        top = max(candidate.info.priority for candidate in usable)
        winners = [candidate for candidate in usable if candidate.info.priority == top]
        if len(winners) > 1:
            choices = " or ".join(f"'{w.info.name}@{request.device}'" for w in winners)
            raise PluginConflict(
                f"{len(winners)} backends tie for {str(request)!r}, write {choices}:{_listed(candidates, outcomes)}"
            )
        return winners[0]


def probe_device(info: BackendInfo, device: Device, index: int | None = None) -> Probe:
    """Probe one backend for one device type, and for ``index`` where given. Whatever goes wrong is the reason."""
    try:
        probe = _resolve(info.probe)(device.type)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a vendor's library may raise anything, e.g. a Rust panic is no Exception
        return Probe(usable=False, reason=f"its probe failed: {describe(error)}")
    if not isinstance(probe, Probe):
        return Probe(usable=False, reason=f"its probe must return a kvport.Probe, got {_a(probe)}")
    if not probe.usable or index is None:
        return probe
    count = _count(device, probe)
    if count is None or index < count:
        return probe
    have = f"has {count} device(s) here, 0 .. {count - 1}" if count else "has no device here"
    return replace(probe, usable=False, reason=f"index {index} is out of range: {device.type} {have}")


def _by_name_only(info: BackendInfo, device: Device, request: DeviceString) -> Probe:
    """What a backend that a bare device never chooses says of itself: how to ask for it, or why that would not help."""
    probe = probe_device(info, device, request.index)
    if probe.usable:
        return Probe(usable=False, reason=f"chosen only by name: write '{info.name}@{request.device}'")
    return replace(probe, reason=f"chosen only by name, and not usable then either: {probe.reason}")


def _count(device: Device, probe: Probe) -> int | None:
    """How many devices of this type there are, None where nobody can say before loading."""
    if probe.count is not None:
        return probe.count
    if device.torch_type != device.type:
        return None
    import torch

    try:
        return int(torch.get_device_module(device.type).device_count())
    except (RuntimeError, AttributeError):
        return None


def _resolve(target: str | Callable[..., Any]) -> Callable[..., Any]:
    found = pkgutil.resolve_name(target) if isinstance(target, str) else target
    if not callable(found):
        raise TypeError(f"{target!r} is {_a(found)}, not a function")
    return found


def _a(value: object) -> str:
    return f"{type(value).__name__} {value!r}"


def _known(outcomes: list[Plugin | LoadFailure]) -> str:
    """What could have been asked for, and the plugins that might have offered more had they loaded."""
    lines = [
        f"{info.name}@{device.type}{' (by name only)' if device.explicit else ''}"
        for plugin in outcomes
        if isinstance(plugin, Plugin)
        for info in plugin.backends
        for device in info.devices
    ]
    text = f"; there are: {', '.join(lines) or 'none'}"
    failures = [f"\n  {outcome}" for outcome in outcomes if isinstance(outcome, LoadFailure)]
    return text + ("\nplugins that did not load:" + "".join(failures) if failures else "")


def _listed(candidates: list[_Candidate], outcomes: list[Plugin | LoadFailure]) -> str:
    ordered = sorted(candidates, key=lambda candidate: (-candidate.info.priority, candidate.info.name))
    lines = [f"\n  {candidate}" for candidate in ordered]
    failures = [f"\n  {outcome}" for outcome in outcomes if isinstance(outcome, LoadFailure)]
    return "".join(lines) + ("\nplugins that did not load:" + "".join(failures) if failures else "")


_default: Registry | None = None
_default_lock = threading.Lock()


def default_registry() -> Registry:
    """The registry of this process, made when first asked for."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Registry()
        return _default


def load_backend(text: str) -> Backend:
    """Load the backend for ``"[backend@]device[:index]"`` with the process's registry; see :class:`Registry`."""
    return default_registry().load(text)
