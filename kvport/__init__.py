"""kvport: quantized, paged KV caches that mean the same on every chip.

``kvport.open("cpu", format="int8", ...)`` gives a :class:`PagedCache`; ``cache.step({sequence: n})`` appends and
attends. docs/architecture.md is the map.
"""

from kvport.backend import FEATURES, Backend, Plan, StepArrays, Store, Support
from kvport.cache import CacheInfo, CacheStats, PagedCache, Poisoned, PoolStats
from kvport.errors import (
    BackendError,
    BackendUnavailable,
    ClosedError,
    FormatError,
    ImageError,
    IncompleteStep,
    InvalidArgument,
    KVPortError,
    LayoutError,
    MissingDependency,
    OutOfMemory,
    OutOfPages,
    PluginConflict,
    ScaleError,
    SequenceError,
    StepError,
    UnknownBackend,
    Unsupported,
)
from kvport.formats import CacheFormat, TensorFormat
from kvport.hookspecs import BACKEND_API, BackendInfo, Device, Probe, hookimpl
from kvport.image import PageImage
from kvport.layout import CacheLayout, GroupLayout, LayerSpec
from kvport.opening import open
from kvport.scales import LayerScales, SideScales
from kvport.sequences import Sequence
from kvport.step import Attention, Step

__version__ = "0.1.0"

__all__ = [
    "FEATURES",
    "Backend",
    "Plan",
    "StepArrays",
    "Store",
    "Support",
    "CacheInfo",
    "CacheStats",
    "PagedCache",
    "Poisoned",
    "PoolStats",
    "BackendError",
    "BackendUnavailable",
    "ClosedError",
    "FormatError",
    "ImageError",
    "IncompleteStep",
    "InvalidArgument",
    "KVPortError",
    "LayoutError",
    "MissingDependency",
    "OutOfMemory",
    "OutOfPages",
    "PluginConflict",
    "ScaleError",
    "SequenceError",
    "StepError",
    "UnknownBackend",
    "Unsupported",
    "CacheFormat",
    "TensorFormat",
    "BACKEND_API",
    "BackendInfo",
    "Device",
    "Probe",
    "hookimpl",
    "PageImage",
    "CacheLayout",
    "GroupLayout",
    "LayerSpec",
    "open",
    "LayerScales",
    "SideScales",
    "Sequence",
    "Attention",
    "Step",
]
