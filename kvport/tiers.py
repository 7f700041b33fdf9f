"""Which token is in which tier: the rule, and the lanes of pages that hold them.

A tiered format keeps some tokens of a sequence in *near* pages (the model's dtype or a named one) and the rest in
*far* pages (the format's own codes). With page size P, committed length L at a step's begin, and head = the larger of
``sink`` and the sequence's ``pin``:

* near head: the first ceil(head / P) pages, whole, for good;
* far: the following pages up to ``sealed = max(sealed before, floor((L - recent) / P) * P)``;
* near tail: everything from ``sealed`` on, this step's tokens included.

So the last ``recent`` tokens before the step are always near, only whole pages are ever encoded, sealing happens only
at the begin of a later step, and the last step can always be truncated. P = 16, recent = 20, sink = 4: at L = 51 the
near head is page 0, sealed is floor(31/16)*16 = 16, so nothing is far yet; at L = 52 page 1 seals.

Each tier of a group of layers is a *lane*: its own store, pool and page table. Lane g is group g's own format;
near lanes follow behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvport.formats import CacheFormat, TensorFormat, dtype_name
from kvport.layout import CacheLayout, GroupLayout


@dataclass(frozen=True)
class Lane:
    """One pool of pages: the layers of ``group`` in one format. ``layout`` is what the backend sees.

    ``tiered``: it is one tier of two, which are merged.
    """

    group: int
    layout: GroupLayout
    tiered: bool = False

    @property
    def hides_nan(self) -> bool:
        """Whether its codes may hide a NaN, which flags of pages then tell of."""
        return any(side.format.hides_nan for side in self.layout.sides)


@dataclass(frozen=True)
class Tiers:
    """The tiers of one group: ``far`` and ``near`` are lane numbers, equal where the format has no tiers."""

    far: int
    near: int
    sink: int
    recent: int

    @property
    def tiered(self) -> bool:
        return self.far != self.near

    def head_pages(self, pin: int, page_size: int) -> int:
        """Leading pages that stay near for good."""
        return -(-max(self.sink, pin) // page_size) if self.tiered else 0

    def sealed(self, length: int, page_size: int) -> int:
        """How far a sequence of ``length`` committed tokens may be sealed at the next step's begin."""
        return max(0, (length - self.recent) // page_size * page_size) if self.tiered else 0


def make_lanes(layout: CacheLayout) -> tuple[tuple[Lane, ...], tuple[Tiers, ...]]:
    """The lanes of a cache and, for each group, which of them are its tiers."""
    lanes = [
        Lane(number, replace(group.layout, format=group.layout.format.far()), group.layout.format.tiered)
        for number, group in enumerate(layout.groups)
    ]
    tiers = []
    for number, group in enumerate(layout.groups):
        fmt = group.layout.format
        near = number
        if fmt.tiered:
            near = len(lanes)
            code = fmt.near or TensorFormat(dtype_name(layout.dtype))
            near_format = CacheFormat(code, code, rope=code if group.layout.latent else None)
            lanes.append(Lane(number, replace(group.layout, format=near_format), tiered=True))
        tiers.append(Tiers(number, near, fmt.sink, fmt.recent))
    return tuple(lanes), tuple(tiers)


def canonical_bytes(layout: CacheLayout, length: int, pin: int = 0) -> int:
    """Bytes of the canonical page images that a sequence of ``length`` tokens occupies, all layers and tiers.

    Judged as at the begin of the step after the last token: what may be sealed is, what a window has passed is gone.
    """
    lanes, tiers = make_lanes(layout)
    size = layout.page_size
    total = 0
    for tier in tiers:
        window = lanes[tier.far].layout.window
        passed = 0 if window is None else max(0, length - window + 1) // size
        pages = -(-length // size) - passed
        head = max(tier.head_pages(pin, size), passed)
        far = max(0, tier.sealed(length, size) // size - head) if tier.tiered else pages
        total += far * lanes[tier.far].layout.canonical_page_bytes
        total += (pages - far) * lanes[tier.near].layout.canonical_page_bytes
    return total
