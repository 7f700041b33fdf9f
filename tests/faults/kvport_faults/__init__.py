"""Faulty backends, one seeded fault each, on which the conformance suite is tested.

A fault is registered with the chapter that has to reject it and the kind of mistake it stands for. The kinds are those
that users of quantized and paged caches have reported in public, each as the property that was broken.
"""

from __future__ import annotations

from kvport_faults.registry import FAULTS, Fault, fault
from kvport_faults.subject import Subject

__all__ = ["FAULTS", "Fault", "Subject", "fault"]
