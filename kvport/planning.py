"""How much memory a KV cache takes: per token, per request, and what fits a budget. Nothing is allocated.

Counted apart: codes; metadata (scales and zeros); outliers kept in float32 beside the codes; the near tier of formats
with ``sink=`` or ``recent=``; page waste (the unfilled part of last pages, and tokens that a window has passed but
whose page it has not); the backend's padding.

*At rest* is a request of N tokens between two steps. *Pools* are what a running cache must be opened with: a step
takes its pages before it gives old ones back, so near and windowed pools hold more than what is at rest. With page
size P and requests that each take one token a step, while one of them at a time reads its prompt in chunks of c tokens:

* a pool without tier or window: ceil(N / P) pages a request;
* a near pool: ceil((recent + P + 1) / P) pages a request (the recent tokens, this step's and the last one's, and P - 1
  that wait for their page to fill), the pages of sinks and pins, and 2 * ceil((c - 1) / P) for the prompt;
* a windowed pool: ceil((window + P) / P) pages a request, and the same for the prompt;
* never more than ceil(N / P) a request; and one spare page each.

The window's and the near tier's last term follow from :mod:`kvport.step`: pages that a step seals or passes are given
back when it commits, so that it can be rolled back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, Final, Literal

from kvport.arguments import whole_number
from kvport.backend import Backend
from kvport.digests import part_of
from kvport.errors import InvalidArgument
from kvport.features import ask
from kvport.formats import CacheFormat, TensorFormat
from kvport.layout import DEFAULT_PAGE_SIZE, CacheLayout, Group
from kvport.model_config import ModelGeometry, read_model_config
from kvport.tiers import Lane, Tiers, make_lanes

#: Prompt tokens that a step takes of one sequence, where nothing else is said.
DEFAULT_CHUNK: Final = 512

Tier = Literal["all", "sealed", "near"]


@dataclass(frozen=True)
class Content:
    """Bytes by what they are; ``outliers``: channels and single numbers kept in float32, and their places."""

    codes: int = 0
    scales: int = 0
    zeros: int = 0
    outliers: int = 0

    @property
    def metadata(self) -> int:
        return self.scales + self.zeros

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.zeros + self.outliers

    def __add__(self, other: Content) -> Content:
        return Content(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def part(self, share: int, whole: int) -> Content:
        """``share`` of ``whole`` of these bytes, rounded down. They divide: pages by tokens, cN by whole pages."""
        return Content(*(count * share // whole for count in astuple(self)))


@dataclass(frozen=True)
class LanePlan:
    """One pool: the layers of a group in one tier.

    ``page`` is what one canonical page of all these layers holds, ``page_bytes`` its size, ``device_page_bytes`` the
    backend's (None without one). ``tokens`` and ``pages`` of one request at rest; ``pool_pages`` for all requests,
    spare included.
    """

    tier: Tier
    layers: tuple[int, ...]
    format: str
    window: int | None
    page_size: int
    page: Content
    page_bytes: int
    device_page_bytes: int | None
    tokens: int
    pages: int
    pool_pages: int

    @property
    def stored(self) -> Content:
        """Bytes of one request's tokens at rest, in canonical pages."""
        return self.page.part(self.tokens, self.page_size)

    @property
    def waste(self) -> int:
        """Canonical bytes of slots in a request's pages that hold no token of use."""
        return self.pages * self.page_bytes - self.stored.total

    @property
    def padding(self) -> int:
        """What the backend's pages of one request are larger by."""
        return 0 if self.device_page_bytes is None else self.pages * (self.device_page_bytes - self.page_bytes)

    @property
    def size(self) -> int:
        """Bytes of a page where it will lie: the backend's, else the canonical ones."""
        return self.page_bytes if self.device_page_bytes is None else self.device_page_bytes


@dataclass(frozen=True)
class Fit:
    """What fits in ``memory`` bytes. ``tokens`` is None where more tokens cost nothing (every layer has a window)."""

    memory: int
    requests: int
    tokens: int | None


@dataclass(frozen=True)
class Plan:
    """The bytes of one format. See the module for the words.

    ``static_bytes``: calibrated scales, once for the cache. ``refusals``: why the backend that was asked cannot store
    this; its bytes are unknown then. ``scale_rule``: which static scales it takes, where it does not take all.
    """

    format: str
    layout: CacheLayout
    tokens: int
    requests: int
    chunk: int
    pin: int
    backend: str | None
    refusals: tuple[str, ...]
    lanes: tuple[LanePlan, ...]
    static_bytes: int
    fit: Fit | None
    scale_rule: str = ""

    # -- per token ---------------------------------------------------------------------------------------------------

    @property
    def per_token(self) -> Content:
        """Bytes of one token in all layers, at rest (sealed, where the format has tiers), not rounded to pages."""
        pages = sum((lane.page for lane in self.lanes if lane.tier != "near"), Content())
        return pages.part(1, self.layout.page_size)

    @property
    def growth(self) -> int:
        """Bytes of one further token, once every window is full."""
        size = self.layout.page_size
        return sum(lane.page_bytes for lane in self.lanes if lane.tier != "near" and lane.window is None) // size

    # -- per request, at rest ------------------------------------------------------------------------------------------

    @property
    def stored(self) -> Content:
        """One request's tokens outside the near tier."""
        return sum((lane.stored for lane in self.lanes if lane.tier != "near"), Content())

    @property
    def near(self) -> int:
        """One request's tokens in the near tier."""
        return sum(lane.stored.total for lane in self.lanes if lane.tier == "near")

    @property
    def near_tokens(self) -> int:
        """How many of a request's tokens are near: the most of any layer."""
        return max((lane.tokens for lane in self.lanes if lane.tier == "near"), default=0)

    @property
    def waste(self) -> int:
        """Page waste of one request."""
        return sum(lane.waste for lane in self.lanes)

    @property
    def request_bytes(self) -> int:
        """Canonical bytes of one request's pages: what it stores and the waste."""
        return self.stored.total + self.near + self.waste

    @property
    def padding(self) -> int | None:
        """What the backend adds to one request; None where no backend was asked or it refused."""
        return None if self._no_device else sum(lane.padding for lane in self.lanes)

    @property
    def request_device_bytes(self) -> int | None:
        """Backend's bytes of one request's pages."""
        return None if self.padding is None else self.request_bytes + self.padding

    # -- the cache -----------------------------------------------------------------------------------------------------

    @property
    def pool_bytes(self) -> int:
        """Bytes of pools for all requests, spare pages and static scales included, where they will lie."""
        return sum(lane.pool_pages * lane.size for lane in self.lanes) + self.static_bytes

    @property
    def near_pool_tokens(self) -> int:
        """Tokens that the near pools of all requests hold: 0 without tiers."""
        pages = max((lane.pool_pages - 1 for lane in self.lanes if lane.tier == "near"), default=0)
        return pages * self.layout.page_size

    @property
    def open_arguments(self) -> str:
        """The arguments of :func:`kvport.open` that make these pools, as they are typed."""
        pin = f", pin={self.pin}" if self.pin else ""
        return f"tokens={self.tokens}, requests={self.requests}, chunk={self.chunk}{pin}"

    @property
    def pages(self) -> tuple[int, ...]:
        """The page count of each pool: what :func:`kvport.open` makes of the same tokens, requests, chunk and pin."""
        return tuple(lane.pool_pages for lane in self.lanes)

    @property
    def _no_device(self) -> bool:
        return self.backend is None or bool(self.refusals)

    def to_json(self) -> dict[str, Any]:
        """Every figure, in bytes and tokens."""
        token, stored = self.per_token, self.stored
        return {
            "format": self.format,
            "page_size": self.layout.page_size,
            "tokens": self.tokens,
            "requests": self.requests,
            "chunk": self.chunk,
            "pin": self.pin,
            "backend": self.backend,
            "refusals": list(self.refusals),
            "scale_rule": self.scale_rule,
            "per_token": {**asdict(token), "total": token.total, "growth_past_windows": self.growth},
            "per_request": {
                **asdict(stored),
                "near": self.near,
                "near_tokens": self.near_tokens,
                "page_waste": self.waste,
                "total": self.request_bytes,
                "padding": self.padding,
                "device_total": self.request_device_bytes,
            },
            "pools": {
                "pages": list(self.pages),
                "near_tokens": self.near_pool_tokens,
                "static_scales": self.static_bytes,
                "total": self.pool_bytes,
            },
            "fit": None if self.fit is None else asdict(self.fit),
            "lanes": [
                {**asdict(lane), "stored": asdict(lane.stored), "page_waste": lane.waste, "padding": lane.padding}
                for lane in self.lanes
            ],
        }


def plan(
    model: ModelGeometry | CacheLayout | Mapping[str, Any] | str | os.PathLike[str],
    format: str | CacheFormat | None = None,
    *,
    tokens: int,
    requests: int = 1,
    memory: int | None = None,
    page_size: int | None = None,
    chunk: int = DEFAULT_CHUNK,
    pin: int = 0,
    backend: Backend | None = None,
) -> Plan:
    """Plan a cache.

    Args:
        model: a ``config.json`` (path, folder or content), a :class:`ModelGeometry`, or a whole :class:`CacheLayout`,
            which says format and page size itself.
        format: a format string, default ``"int8"``.
        tokens: length of a request, prompt and answer together.
        requests: how many run at once.
        memory: a budget for the KV cache in bytes; fills :attr:`Plan.fit`.
        page_size: default 128.
        chunk: prompt tokens that one step takes of one sequence.
        pin: tokens that every sequence keeps near, see :meth:`kvport.Sequence.pin`.
        backend: counts its padding, and says whether it can store this.

    Raises :class:`LayoutError` where the format does not fit the model.
    """
    for name, value, least in (("tokens", tokens, 1), ("requests", requests, 1), ("chunk", chunk, 1), ("pin", pin, 0)):
        whole_number(name, value, least)
    if memory is not None:
        whole_number("memory (bytes)", memory, 0, 2**63 - 1)
    if isinstance(model, CacheLayout):
        if format is not None or page_size is not None:
            raise InvalidArgument("a CacheLayout says format and page size itself; give one or the other")
        layout = model
    else:
        geometry = model if isinstance(model, ModelGeometry) else read_model_config(model)
        layout = geometry.layout(format or "int8", DEFAULT_PAGE_SIZE if page_size is None else page_size)
    if pin and not any(group.layout.format.tiered for group in layout.groups):
        raise InvalidArgument(f"format {layout.format} has no near tier to pin {pin} tokens in; add recent=N or sink=N")
    return _Planner(layout, chunk, pin, backend).plan(tokens, requests, memory)


class _Planner:
    def __init__(self, layout: CacheLayout, chunk: int, pin: int, backend: Backend | None) -> None:
        self.layout, self.chunk, self.pin, self.backend = layout, chunk, pin, backend
        self.lanes, self.tiers = make_lanes(layout)
        self.tier_of: list[tuple[Tier, Tiers]] = [("all", self.tiers[lane.group]) for lane in self.lanes]
        for tiers in self.tiers:
            if tiers.tiered:
                self.tier_of[tiers.far], self.tier_of[tiers.near] = ("sealed", tiers), ("near", tiers)
        self.static_bytes = sum(_static_bytes(group) for group in layout.groups)
        self.refusals: tuple[str, ...] = ()
        self.scale_rule = ""
        if backend is not None:
            answer = ask(backend, self.lanes)
            self.refusals, self.scale_rule = answer.refusals, answer.scale_rule
        asked = backend is not None and not self.refusals
        self.device_bytes = [backend.page_bytes(lane.layout) if asked and backend else None for lane in self.lanes]
        self.sizes = [
            lane.layout.canonical_page_bytes if size is None else size
            for lane, size in zip(self.lanes, self.device_bytes, strict=True)
        ]

    def plan(self, tokens: int, requests: int, memory: int | None) -> Plan:
        return Plan(
            format=str(self.layout.format),
            layout=self.layout,
            tokens=tokens,
            requests=requests,
            chunk=self.chunk,
            pin=self.pin,
            backend=None if self.backend is None else self.backend.name,
            refusals=self.refusals,
            lanes=tuple(self._lane(number, tokens, requests) for number in range(len(self.lanes))),
            static_bytes=self.static_bytes,
            fit=None if memory is None else self._fit(memory, tokens, requests),
            scale_rule=self.scale_rule,
        )

    def _lane(self, number: int, tokens: int, requests: int) -> LanePlan:
        lane, (tier, _) = self.lanes[number], self.tier_of[number]
        pages, held = self._at_rest(number, tokens)
        return LanePlan(
            tier=tier,
            layers=self.layout.groups[lane.group].layers,
            format=str(lane.layout.format),
            window=lane.layout.window,
            page_size=self.layout.page_size,
            page=_page_content(lane),
            page_bytes=lane.layout.canonical_page_bytes,
            device_page_bytes=self.device_bytes[number],
            tokens=held,
            pages=pages,
            pool_pages=self._pool_pages(number, tokens, requests) + 1,
        )

    def _at_rest(self, number: int, tokens: int) -> tuple[int, int]:
        """Pages of one request in a lane, and how many of its tokens there are still of use."""
        size = self.layout.page_size
        tier, tiers = self.tier_of[number]
        window = self.lanes[number].layout.window
        seen = 0 if window is None else max(0, tokens - window + 1)  # the first position that the next token sees
        passed, pages = seen // size, -(-tokens // size)
        head = min(tiers.head_pages(self.pin, size), pages)
        sealed = max(head, tiers.sealed(tokens, size) // size)
        ranges = {"all": [(0, pages)], "near": [(0, head), (sealed, pages)], "sealed": [(head, sealed)]}[tier]
        held = [(max(first, passed), last) for first, last in ranges if last > max(first, passed)]
        of_use = sum(min(last * size, tokens) - max(first * size, seen) for first, last in held)
        return sum(last - first for first, last in held), of_use

    def _pool_pages(self, number: int, tokens: int, requests: int) -> int:
        """Pages that ``requests`` running requests may hold at once in a lane, spare not counted."""
        size = self.layout.page_size
        tier, tiers = self.tier_of[number]
        window = self.lanes[number].layout.window
        whole = -(-tokens // size)
        most_prompt = prompt = 2 * -(-(min(self.chunk, tokens) - 1) // size)
        head = min(tiers.head_pages(self.pin, size), whole)
        if tier == "near":
            each = head + -(-(tiers.recent + size + 1) // size)
        elif tier == "sealed":
            each, prompt = max(0, tiers.sealed(tokens, size) // size - head), 0
        else:
            each, prompt = whole, 0
        if window is not None and each > (most := -(-(window + size) // size)):
            each, prompt = most, most_prompt
        return max(1, min(requests * each + prompt, requests * whole))  # a pool has a page beside the spare

    def _bytes(self, tokens: int, requests: int) -> int:
        pages = [self._pool_pages(number, tokens, requests) + 1 for number in range(len(self.lanes))]
        return sum(count * size for count, size in zip(pages, self.sizes, strict=True)) + self.static_bytes

    def _fit(self, memory: int, tokens: int, requests: int) -> Fit:
        unbounded = all(lane.layout.window is not None for lane in self.lanes)
        longest = None if unbounded else _largest(lambda n: self._bytes(n, requests) <= memory)
        if unbounded and self._bytes(tokens, requests) > memory:
            longest = 0
        return Fit(memory, _largest(lambda r: self._bytes(tokens, r) <= memory), longest)


def _largest(fits: Any) -> int:
    """The largest n >= 0 that fits, where everything below what fits does so too."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _page_content(lane: Lane) -> Content:
    """What one page of all layers of a lane holds."""
    found = {"codes": 0, "scales": 0, "zeros": 0, "outliers": 0}
    for plane in lane.layout.planes:
        zero = plane.name.endswith(".zero")
        found["zeros" if zero else part_of(plane.name)] += plane.nbytes * lane.layout.layers
    return Content(**found)


def _static_bytes(group: Group) -> int:
    """Static scales and zeros of a group's layers: once per cache, not per page."""
    layout = group.layout
    return len(group.layers) * sum(_static_side(side.format, layout.kv_heads, side.dim) for side in layout.sides)


def _static_side(fmt: TensorFormat, heads: int, dim: int) -> int:
    if not fmt.static:
        return 0
    count = {"tensor": 1, "block": 1, "head": heads, "channel": heads * dim}[fmt.granularity]
    return count * fmt.scale_torch_dtype.itemsize * (1 if fmt.symmetric else 2)
