"""What a backend may lack, what needs it, and what a backend says of a whole cache.

Everybody who asks whether a backend can do something asks here: opening a cache, planning one, listing backends, the
requests of a step, and the conformance suite. So all of them refuse the same, and in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvport.backend import Backend, Support, Workspace
    from kvport.layout import GroupLayout
    from kvport.tiers import Lane

#: Every feature that a backend may lack, and what it is needed for. A lacking one is refused by name before any work.
NEEDED_FOR: Final = {
    "window": "a sliding window",
    "softcap": "a soft cap",
    "sinks": "sink logits",
    "lse": "merging tiers, partials or exact fresh tokens",
    "prefill": "several query tokens of a sequence, from its first token on",
    "verify": "several query tokens of a sequence, after stored ones",
    "poison": "flags of NaNs that a static integer format stored as code 0",
    "latent": "latent (MLA) layers",
    "outliers": "outlier channels",
    "sparse": "sparse outliers",
    "graph": "recorded steps",
}
FEATURES: Final = frozenset(NEEDED_FOR)

#: What a page may hold beside K, V, scales and zeros. A layout that needs one of these is stored only by a backend that
#: says so: one that has never heard of it would leave it out and be wrong in silence.
STORAGE_FEATURES: Final = frozenset({"latent", "outliers", "sparse"})

#: What is taken for granted where a backend says nothing. ``graph``, plans of a fixed shape, is not.
ATTENTION_FEATURES: Final = FEATURES - STORAGE_FEATURES - {"graph"}


def undeclared(declared: AbstractSet[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """A reason for each wanted feature that is not declared."""
    return _reasons(declared, {name: NEEDED_FOR[name] for name in wanted})


def needed(layout: GroupLayout, *, tiered: bool = False) -> dict[str, str]:
    """The features without which pages of this layout cannot be kept and attended to, and what each is needed for.

    ``tiered``: the pages are one tier of two.
    """
    formats = [side.format for side in layout.sides]
    found = {
        "window": layout.window is not None,
        "lse": tiered,
        "latent": layout.latent,
        "outliers": any(fmt.outliers for fmt in formats),
        "sparse": any(fmt.sparse for fmt in formats),
    }
    wanted = {name: NEEDED_FOR[name] for name, need in found.items() if need}
    if layout.window is not None:
        wanted["window"] += f" ({layout.window} tokens)"
    return wanted


def unmet(
    support: Support, layout: GroupLayout, *, tiered: bool = False, wanted: Iterable[str] = ()
) -> tuple[str, ...]:
    """Every reason why a backend that answers this cannot do what is asked of ``layout``; empty for none.

    Its own reasons, else the features that it does not declare and that the pages need, or a request does (``wanted``).
    """
    asked = {name: NEEDED_FOR[name] for name in wanted} | needed(layout, tiered=tiered)
    return support.reasons or _reasons(support.features, asked)


def _reasons(declared: AbstractSet[str], wanted: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"feature {name} is not declared, needed for {wanted[name]}"
        for name in NEEDED_FOR
        if name in wanted and name not in declared
    )


@dataclass(frozen=True)
class Answer:
    """What a backend says of all lanes of a cache. ``reasons`` has one tuple per lane, empty where it can keep it."""

    lanes: tuple[Lane, ...]
    supports: tuple[Support, ...]
    reasons: tuple[tuple[str, ...], ...]

    @property
    def refusals(self) -> tuple[str, ...]:
        """Every reason why it cannot keep the cache, each said once."""
        return tuple(dict.fromkeys(reason for found in self.reasons for reason in found))

    @property
    def workspace(self) -> Workspace:
        """``"history"`` where attend's memory grows with the context in any lane."""
        return "history" if any(support.workspace == "history" for support in self.supports) else "bounded"

    @property
    def scale_rule(self) -> str:
        """Which static scales it takes, where it does not take all."""
        return "; ".join(dict.fromkeys(support.scale_rule for support in self.supports if support.scale_rule))

    @property
    def features(self) -> frozenset[str]:
        """The features that it declares for every lane."""
        return frozenset[str].intersection(*(support.features for support in self.supports))

    def features_of(self, group: int) -> frozenset[str]:
        """The features that it declares for every tier of a group of layers."""
        return frozenset[str].intersection(
            *(s.features for lane, s in zip(self.lanes, self.supports, strict=True) if lane.group == group)
        )


def ask(backend: Backend, lanes: Sequence[Lane]) -> Answer:
    """Ask a backend whether it can keep a cache of these lanes (:func:`kvport.tiers.make_lanes`)."""
    supports = tuple(backend.support(lane.layout) for lane in lanes)
    reasons = tuple(
        unmet(support, lane.layout, tiered=lane.tiered) for support, lane in zip(supports, lanes, strict=True)
    )
    return Answer(tuple(lanes), supports, reasons)
