"""Every exception kvport raises on purpose, in one tree.

::

    KVPortError
    ├── InvalidArgument (ValueError)     a wrong value, shape, dtype or device, before anything changed
    │   ├── FormatError                  a cache format string or record that cannot be
    │   ├── LayoutError                  a geometry that cannot be, or that the format does not fit
    │   └── ScaleError                   static scales absent, incomplete or not positive finite numbers
    ├── Unsupported                      a backend (or the core) declines, naming every unmet reason
    ├── BackendError                     choosing or loading a backend
    │   ├── UnknownBackend               no plugin of that name, or none claims that device
    │   ├── BackendUnavailable           the plugin is there, its device or library is not
    │   └── PluginConflict               two plugins with one name, or a tie in priority
    ├── OutOfMemory                      the device has no room for the pages asked for
    ├── OutOfPages                       the pool cannot hold the step; nothing changed
    ├── StepError                        the rules of a step were broken
    │   └── IncompleteStep               a layer was not appended; the step was rolled back
    ├── SequenceError                    a sequence that is freed, foreign, or cannot do what was asked
    ├── ClosedError                      the cache is closed
    ├── FileError (OSError)              a file that the system does not let be read or written
    │   └── MissingFile (FileNotFoundError)  there is no such file
    ├── ImageError                       a page image that is damaged or belongs to another cache
    └── MissingDependency (ImportError)  an optional package is needed; the message has the install command

Messages say what was given, what is allowed and what to do.
"""

from __future__ import annotations


class KVPortError(Exception):
    """Base of everything kvport raises on purpose."""


class InvalidArgument(KVPortError, ValueError):
    """An argument has a wrong value, shape, dtype or device. Nothing was changed."""


class FormatError(InvalidArgument):
    """A cache format that cannot be."""


class LayoutError(InvalidArgument):
    """A geometry that cannot be, or that the format does not fit."""


class ScaleError(InvalidArgument):
    """Static scales are absent, incomplete, of the wrong shape, or not positive finite numbers.

    ``layer``: whose, where a backend declines the scales of one: its index in the group that the backend was given. The
    cache names the model's layer, there and in the message.
    """

    def __init__(self, message: str, *, layer: int | None = None) -> None:
        self.layer = layer
        super().__init__(message)


class Unsupported(KVPortError):
    """A valid request that this backend declines.

    ``reasons`` holds every unmet requirement, with the values at hand and the nearest supported choice.
    """

    def __init__(self, what: str, reasons: tuple[str, ...] = ()) -> None:
        self.reasons = reasons
        super().__init__(what if not reasons else f"{what}: " + "; ".join(reasons))


class BackendError(KVPortError):
    """A backend could not be chosen or loaded."""


class UnknownBackend(BackendError):
    """No plugin has that name, or none claims that device."""


class BackendUnavailable(BackendError):
    """The plugin is installed, but its library or device is not usable here."""


class PluginConflict(BackendError):
    """Two plugins claim one name, or tie for one device."""


class OutOfMemory(KVPortError):
    """The device could not allocate the pages that were asked for at open."""


class OutOfPages(KVPortError):
    """A step needs more pages than are free. Raised before anything changed.

    ``needed``, ``free`` and ``total`` are page counts of the pool that ran short; ``free`` includes the pages that
    only the prefix index still holds.
    """

    def __init__(self, message: str, *, needed: int, free: int, total: int) -> None:
        self.needed, self.free, self.total = needed, free, total
        super().__init__(message)


class StepError(KVPortError):
    """The order of a step was broken (append twice, attend before append, fork inside, ...)."""


class IncompleteStep(StepError):
    """A step ended without every layer appended; it was rolled back."""


class SequenceError(KVPortError):
    """A sequence that is freed, belongs to another cache, or cannot do what was asked in its state."""


class ClosedError(KVPortError):
    """The cache was closed."""


class FileError(KVPortError, OSError):
    """The system does not let a file be read or written; ``filename`` is its path, ``errno`` what the system said.

    What a file holds is judged by other errors (:class:`ImageError`, :class:`ScaleError`, ...).
    """

    def __str__(self) -> str:
        return str(self.args[0])  # and not what OSError makes of errno and filename


class MissingFile(FileError, FileNotFoundError):
    """There is no such file; the message says what would make one."""


class ImageError(KVPortError):
    """A page image that is damaged, or that belongs to a cache with another fingerprint."""


class MissingDependency(KVPortError, ImportError):
    """An optional package is needed for this; the message names the command that installs it."""
