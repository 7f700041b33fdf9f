"""How a case ends other than by passing.

A case returns, or raises one of these. Anything else that escapes is an error of the backend (or of the suite), and
counts against the backend just the same: a case is green only if it returned.
"""

from __future__ import annotations


class Disagreement(AssertionError):
    """The backend's answer is outside what the contract allows. The message says where, and how far."""


class NotSupported(Exception):
    """The backend declines what the case needs, as it said beforehand. ``str()`` is its reason."""
