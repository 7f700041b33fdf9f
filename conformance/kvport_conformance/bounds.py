"""Every number that decides between pass and fail, in one table, with where it comes from.

The attention bound itself is computed in :mod:`kvport_conformance.oracle_attention` from its own three constants, which
are listed here too, so that this table is complete. Tighten a bound where evidence allows; never loosen one silently:
raise ``SUITE_VERSION`` with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvport_conformance.oracle_attention import LSE_FLOOR, PRODUCT_ERROR, VALUE_FLOOR


@dataclass(frozen=True)
class Bound:
    """A number, what it limits, and why it is what it is."""

    value: float
    limits: str
    derivation: str


OUTPUT_RATIO: Final = Bound(
    1.0,
    "largest |output - float64 attention over the decoded codes| / bound, and the same for the LSE",
    "the bound is derived term by term in oracle_attention.attention_bound; a ratio of 1 is the whole allowance",
)
TIE_ULPS: Final = Bound(
    4.0,
    "one-code class: distance of the exact quotient from a tie, in float32 ulp, where the neighbouring code may be",
    "a reciprocal instead of a division and one rounding more of the scale move a quotient by at most 3 ulp",
)
ONE_CODE_SHARE: Final = Bound(
    0.005,
    "one-code class: share of differing codes, pooled over at least 2**20 codes of a format",
    "measured rate of reciprocal arithmetic is 4.5 % of scales and far fewer codes; more is another rounding rule",
)
ONE_CODE_POOL: Final = Bound(2.0**20, "codes of a format over which ONE_CODE_SHARE is judged", "a share needs a number")
SCALE_ULPS: Final = Bound(
    1.0, "one-code class: distance of a stored scale from the definition's, in ulp of its dtype", "one division rounded"
)
GATHER_ULPS: Final = Bound(
    2.0,
    "one-code class: distance of a gathered float32 value from code * scale + zero, in ulp of the larger term",
    "a fused multiply-add saves one rounding; bit-exact backends have 0",
)
ALLOCATION_SLACK: Final = Bound(
    0.01,
    "device memory allocated beyond page_bytes * pages, as a share of it",
    "allocators round each of a handful of buffers up to at most 2 MiB, which is counted apart",
)
ALLOCATION_GRAINS: Final = {
    "cpu": Bound(2.0**14, "bytes of bookkeeping beside each buffer on the host", "a page of each of malloc and Python"),
    "device": Bound(
        2.0**21, "bytes by which a device allocator may round a buffer up", "largest small block of torch's allocators"
    ),
}
WORKSPACE_GROWTH: Final = Bound(
    1.2,
    "peak memory of attend at context 8192 over that at 2048, workspace declared bounded",
    "the contract's own number; a workspace that holds the history would give 4",
)

WEIGHT_ERROR: Final = Bound(
    2.0**-15,
    "the weight_error that a backend may declare: steps of softmax weights, as a share of each row's largest",
    "two int8 planes hold a number to 1 / (2 * 127 * 254) of the largest; see oracle_attention.attention_bound",
)

PRODUCT_ERRORS: Final = {
    dtype: Bound(u, f"relative error u of attention products with {dtype} queries", "see oracle_attention")
    for dtype, u in PRODUCT_ERROR.items()
}
FLOORS: Final = {
    "lse": Bound(LSE_FLOOR, "relative error of a float32 LSE beyond that of its scores", "see oracle_attention"),
    "value": Bound(VALUE_FLOOR, "share of max |v| a float32 accumulator cannot resolve", "see oracle_attention"),
}

TABLE: Final = {
    "output_ratio": OUTPUT_RATIO,
    "tie_ulps": TIE_ULPS,
    "one_code_share": ONE_CODE_SHARE,
    "one_code_pool": ONE_CODE_POOL,
    "scale_ulps": SCALE_ULPS,
    "gather_ulps": GATHER_ULPS,
    "allocation_slack": ALLOCATION_SLACK,
    **{f"allocation_grain_{name}": bound for name, bound in ALLOCATION_GRAINS.items()},
    "workspace_growth": WORKSPACE_GROWTH,
    "weight_error": WEIGHT_ERROR,
    **{f"u_{name}": bound for name, bound in PRODUCT_ERRORS.items()},
    **{f"{name}_floor": bound for name, bound in FLOORS.items()},
}
