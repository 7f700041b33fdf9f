"""kvport: quantized, paged KV caches that mean the same on every chip.

``kvport.open("cpu", format="int8", ...)`` gives a :class:`PagedCache`; ``cache.step({sequence: n})`` appends and
attends. docs/architecture.md is the map.

Names are imported when they are first used, so that listing backends and asking for help work even where torch itself
cannot be imported (a chip's torch extension that is installed without its driver libraries breaks ``import torch``).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvport.backend import Backend, Limits, Plan, StepArrays, Store, Support
    from kvport.body import Attention
    from kvport.cache import CacheInfo, CacheStats, Clipped, PagedCache, Poisoned, PoolStats
    from kvport.errors import (
        BackendError,
        BackendUnavailable,
        ClosedError,
        FileError,
        FormatError,
        ImageError,
        IncompleteStep,
        InvalidArgument,
        KVPortError,
        LayoutError,
        MissingDependency,
        MissingFile,
        OutOfMemory,
        OutOfPages,
        PluginConflict,
        ScaleError,
        SequenceError,
        StepError,
        UnknownBackend,
        Unsupported,
    )
    from kvport.features import FEATURES
    from kvport.formats import CacheFormat, TensorFormat
    from kvport.graph import Graph, GraphBody, Replay
    from kvport.hookspecs import BACKEND_API, BackendInfo, Device, Probe, hookimpl
    from kvport.image import PageImage
    from kvport.inspection import list_backends
    from kvport.layout import CacheLayout, GroupLayout, LayerSpec
    from kvport.opening import open
    from kvport.recipes import Recipe, load_recipe
    from kvport.registry import load_backend, parse_device
    from kvport.scales import LayerScales, SideScales
    from kvport.sequences import Sequence
    from kvport.step import Step

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_HOME = {
    "Backend": "backend",
    "Limits": "backend",
    "Plan": "backend",
    "StepArrays": "backend",
    "Store": "backend",
    "Support": "backend",
    "Attention": "body",
    "CacheInfo": "cache",
    "CacheStats": "cache",
    "Clipped": "cache",
    "PagedCache": "cache",
    "Poisoned": "cache",
    "PoolStats": "cache",
    "BackendError": "errors",
    "BackendUnavailable": "errors",
    "ClosedError": "errors",
    "FileError": "errors",
    "FormatError": "errors",
    "ImageError": "errors",
    "IncompleteStep": "errors",
    "InvalidArgument": "errors",
    "KVPortError": "errors",
    "LayoutError": "errors",
    "MissingDependency": "errors",
    "MissingFile": "errors",
    "OutOfMemory": "errors",
    "OutOfPages": "errors",
    "PluginConflict": "errors",
    "ScaleError": "errors",
    "SequenceError": "errors",
    "StepError": "errors",
    "UnknownBackend": "errors",
    "Unsupported": "errors",
    "FEATURES": "features",
    "CacheFormat": "formats",
    "TensorFormat": "formats",
    "Graph": "graph",
    "GraphBody": "graph",
    "Replay": "graph",
    "BACKEND_API": "hookspecs",
    "BackendInfo": "hookspecs",
    "Device": "hookspecs",
    "Probe": "hookspecs",
    "hookimpl": "hookspecs",
    "PageImage": "image",
    "CacheLayout": "layout",
    "GroupLayout": "layout",
    "LayerSpec": "layout",
    "open": "opening",
    "list_backends": "inspection",
    "load_backend": "registry",
    "parse_device": "registry",
    "Recipe": "recipes",
    "load_recipe": "recipes",
    "LayerScales": "scales",
    "SideScales": "scales",
    "Sequence": "sequences",
    "Step": "step",
}

__all__ = [
    "list_backends",
    "load_backend",
    "parse_device",
    "Recipe",
    "load_recipe",
    "FEATURES",
    "Backend",
    "Limits",
    "Plan",
    "StepArrays",
    "Store",
    "Support",
    "CacheInfo",
    "CacheStats",
    "Clipped",
    "PagedCache",
    "Poisoned",
    "PoolStats",
    "BackendError",
    "BackendUnavailable",
    "ClosedError",
    "FileError",
    "FormatError",
    "ImageError",
    "IncompleteStep",
    "InvalidArgument",
    "KVPortError",
    "LayoutError",
    "MissingDependency",
    "MissingFile",
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
    "Graph",
    "GraphBody",
    "Replay",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvport' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvport.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
