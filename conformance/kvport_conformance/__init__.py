"""The kvport conformance suite: what every backend must agree on, and the judge's own numbers.

The judge shares no code with a backend and none with the kvport core:

``oracle_floats``
    bit-level conversions between float32 and the small float encodings.
``oracle_codec``
    quantization, float32, operation by operation: the written definition of codes, scales and zeros.
``oracle_attention``
    float64 attention over decoded values, and the bound an implementation is allowed.
``inputs``
    deterministic inputs from a counter-based integer hash: the same bytes on every machine.

Importing these four needs numpy only, neither torch nor kvport.
"""

SUITE_VERSION = 1
"""Raised by one whenever a case, an input stream or a bound changes: reports of different versions do not compare."""
