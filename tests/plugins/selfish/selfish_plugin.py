"""Asks for a backend while it is being imported."""

from kvport.registry import load_backend

BACKEND = load_backend("goodchip")
