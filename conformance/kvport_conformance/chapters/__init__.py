"""The chapters of the suite: one module of checks each. See :mod:`kvport_conformance.cases`."""
