"""Profiles: what a verdict is about. A chip conforms to a profile, and passes a share of its cases.

A profile is a rule over cases, so that it holds for cases that are added later. ``core`` is what every backend is
expected to reach first; the others say what more it can do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvport.formats import TensorFormat
from kvport_conformance.axes import FLOAT_FORMATS, HALF_FORMATS, parse
from kvport_conformance.cases import MANDATORY, Case


@dataclass(frozen=True)
class Profile:
    """A named set of cases."""

    name: str
    summary: str
    holds: Callable[[Case], bool]


def _sides(case: Case) -> list[TensorFormat]:
    fmt = parse(case.format)
    return [side for side in (fmt.key, fmt.value, fmt.rope) if side is not None]


def _kept(case: Case) -> bool:
    return any(side.outliers or side.sparse for side in _sides(case))


def _codes(case: Case) -> set[str]:
    """Codes of K and V; of none where pages hold more than these, or steps are recorded, which has its own profiles."""
    apart = case.geometry.latent or _kept(case) or case.chapter == "graph"
    return set() if apart else {side.code for side in _sides(case)}


def _core(case: Case) -> bool:
    shape = case.geometry
    return (
        case.format == "int8"
        and case.chapter in (*MANDATORY, "attention", "transfer", "robustness")
        and shape.key_dim == shape.value_dim
        and shape.key_dim in (64, 128)
        and shape.page_size in (16, 128)
        and shape.window is None
        and not case.requires - {"prefill", "verify"}
        # Memory that grows with the history is for a backend to declare, not for core to forbid.
        and case.check != "bounded_workspace"
    )


def _half(case: Case) -> bool:
    shape = case.geometry
    return (
        case.format in HALF_FORMATS.get(shape.dtype, ())
        and shape.key_dim == shape.value_dim
        and shape.key_dim in (64, 128)
        and shape.page_size in (32, 128)
        and shape.window is None
        and not case.requires - {"prefill", "verify", "lse", "poison"}
    )


PROFILES: Final = (
    Profile("core", "int8 pages of 16 and 128 tokens, head dims 64 and 128, GQA: append, share, attend, move", _core),
    Profile(
        "half",
        "bf16 and fp16 models: int8 per token and calibrated, and float pages, of 32 and 128 tokens, for 16-bit chips",
        _half,
    ),
    Profile(
        "float",
        "fp32, fp16 and bf16 pages: the paging without the quantization",
        lambda c: bool(_codes(c)) and _codes(c) <= set(FLOAT_FORMATS),
    ),
    Profile("int8", "every int8 format: groups, zeros, scale dtypes, calibrated scales", lambda c: "int8" in _codes(c)),
    Profile("kv4", "4-bit and 2-bit integers", lambda c: bool(_codes(c) & {"int4", "int2"})),
    Profile("fp8", "8-bit floats", lambda c: any(code.startswith("fp8") for code in _codes(c))),
    Profile("fp4", "4-bit float blocks: mxfp4 and nvfp4", lambda c: bool(_codes(c) & {"mxfp4", "nvfp4"})),
    Profile("static", "calibrated scales", lambda c: bool(_codes(c)) and parse(c.format).static),
    Profile("mla", "latent layers: latent and rotary part apart, V stored once", lambda c: c.geometry.latent),
    Profile(
        "outliers",
        "numbers kept apart from the codes: outlier channels, sparse outliers",
        _kept,
    ),
    Profile("rotation", "K behind a seeded Hadamard rotation", lambda c: parse(c.format).rotate is not None),
    Profile(
        "tiers",
        "sealing, sink and recent tokens in higher precision",
        lambda c: bool(_codes(c)) and c.chapter == "tiers",
    ),
    Profile("graph", "steps that are recorded once and replayed", lambda c: c.chapter == "graph"),
    Profile(
        "features", "window, soft cap, sink logits, partials", lambda c: bool(_codes(c)) and c.chapter == "features"
    ),
)


def profiles_of(case: Case) -> tuple[str, ...]:
    """Names of the profiles a case belongs to."""
    return tuple(profile.name for profile in PROFILES if profile.holds(case))
