"""What a plugin module says about itself: the hooks, and the record a backend is announced with.

A plugin is a module named by an entry point of group ``kvport``; the entry point's name is the backend's name. The
module must import quickly and without its chip's libraries: what it announces are names, and ``"module:attribute"``
strings that are resolved only when the backend is probed or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from kvport.backend import Backend
    from kvport.waivers import Waiver

PROJECT: Final = "kvport"
#: The backend interface this kvport speaks (see docs/backend-api.md for the changes by number).
BACKEND_API: Final = 1
#: The interface numbers that this kvport still loads.
SUPPORTED_APIS: Final = range(1, BACKEND_API + 1)

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Device:
    """One kind of device a backend drives.

    ``type`` is the word users type before the colon ("cuda", "npu", "mychip"). ``torch_type`` is the torch device
    type that holds its tensors (a chip without a torch device says "cpu"). ``explicit`` devices are never chosen by
    a bare device string, only as ``backend@device``: interpreters, emulators, slow references.
    """

    type: str
    torch_type: str = ""
    explicit: bool = False

    def __post_init__(self) -> None:
        if not self.type or any(c in self.type for c in "@: "):
            raise ValueError(f"device type must be a word without '@', ':' or spaces, got {self.type!r}")
        if not self.torch_type:
            object.__setattr__(self, "torch_type", self.type)


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run here. ``reason`` says why not; ``facts`` are versions and device names for reports.

    ``count`` is the number of devices of the probed type (indices 0 .. count-1), so that "mychip:7" can be refused
    before anything is loaded; None leaves the check to torch, or for a chip without a torch device to ``load``.
    """

    usable: bool
    reason: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    count: int | None = None

    def __post_init__(self) -> None:
        if not self.usable and not self.reason:
            raise ValueError("a probe that says unusable must give its reason")
        if self.count is not None and (not isinstance(self.count, int) or self.count < 0):
            raise ValueError(f"a probe's count is the number of devices or None, got {self.count!r}")


@dataclass(frozen=True)
class BackendInfo:
    """A backend's announcement.

    ``load(device)`` takes a device string such as ``"cuda:1"`` and returns a :class:`kvport.backend.Backend`;
    ``probe(device_type)`` returns a :class:`Probe` and must not raise for a missing library or device. Both may be
    ``"module:attribute"`` strings. Higher ``priority`` wins where two backends claim one device; a tie is an error.
    """

    name: str
    devices: tuple[Device, ...]
    load: str | Callable[[str], Backend]
    probe: str | Callable[[str], Probe]
    api: int = BACKEND_API
    priority: int = 0
    summary: str = ""


class Hooks:
    """The hooks a plugin module may implement, each with ``@kvport.hookimpl``."""

    @hookspec
    def kvport_backends(self) -> Iterable[BackendInfo]:  # type: ignore[empty-body]
        """Announce the backends of this module. One of them has the entry point's name."""

    @hookspec
    def kvport_waivers(self) -> Iterable[Waiver]:  # type: ignore[empty-body]
        """Cases of the conformance suite that this module's backends are known to fail (:mod:`kvport.waivers`).

        Optional, and asked for by the suite alone. ``kvport.waivers.read(path)`` gives the records of a file.
        """
