"""The cache: pools of pages on one device, and the sequences that hold them.

Data flows one way: user -> cache and step (pages, slots, plan) -> backend operation -> store. A cache is used from one
thread; it never asks which vendor it runs on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Literal, NoReturn

import torch
from torch import Tensor

from kvport import operators
from kvport.arguments import show, whole_number
from kvport.attention import uncast
from kvport.backend import Backend, Execution, Store, operations
from kvport.body import Body, Fresh
from kvport.errors import (
    ClosedError,
    InvalidArgument,
    KVPortError,
    OutOfMemory,
    OutOfPages,
    ScaleError,
    SequenceError,
    StepError,
    Unsupported,
)
from kvport.features import Answer, ask, undeclared
from kvport.formats import DTYPES, dtype_name
from kvport.graph import Graph
from kvport.image import PageImage, export_sequence, import_sequence
from kvport.layout import CacheLayout
from kvport.pages import SPARE, PagePool
from kvport.prefix import PrefixIndex, PrefixStats
from kvport.rotation import unrotate
from kvport.scales import LayerScales, resolve_scales, scales_digest, warn_unit_scales
from kvport.sequences import Sequence, check_pin
from kvport.step import Step, read_ids
from kvport.tiers import canonical_bytes, make_lanes

FINGERPRINT_VERSION = 1


@dataclass(frozen=True)
class CacheInfo:
    """What was opened: which backend runs, how, and by whose code."""

    backend: str
    device: str
    execution: Execution
    operations: dict[str, Literal["native", "inherited"]]
    format: str
    fingerprint: str
    workspace: str
    capture: str  # how graphs repeat a step: "none", "eager", or the backend's own way
    facts: dict[str, str]


@dataclass(frozen=True)
class PoolStats:
    """One pool of pages: ``free`` + ``evictable`` (only the prefix index holds them) + ``held`` = ``total``."""

    format: str
    total: int
    free: int
    evictable: int
    page_bytes: int
    allocated_bytes: int

    @property
    def held(self) -> int:
        return self.total - self.free - self.evictable


@dataclass(frozen=True)
class CacheStats:
    """Pools (one per group of layers, then one per near tier), live sequences, and the prefix index's counters."""

    pools: tuple[PoolStats, ...]
    sequences: int
    prefix_entries: int
    prefix: PrefixStats

    @property
    def allocated_bytes(self) -> int:
        return sum(pool.allocated_bytes for pool in self.pools)


@dataclass(frozen=True)
class Poisoned:
    """A static integer format met a NaN: the sequence, the model layer and the position of the page's first token."""

    sequence: Sequence
    layer: int
    position: int


@dataclass(frozen=True)
class Clipped:
    """A page had more numbers beyond its static range than it has room for: ``count`` of ``side`` were clipped.

    The sequence, the model layer, ``"key"``, ``"value"`` or ``"latent"``, and the position of the page's first token.
    """

    sequence: Sequence
    layer: int
    side: str
    position: int
    count: int


@dataclass(frozen=True)
class Span:
    """What a gather reads of one sequence: positions start .. length-1, of which head .. sealed-1 are far."""

    start: int
    head: int
    sealed: int
    length: int


class PagedCache:
    """A quantized, paged KV cache on one device. Open one with :func:`kvport.open`."""

    def __init__(
        self,
        backend: Backend,
        layout: CacheLayout,
        pages: SequenceOf[int],
        *,
        scales: Mapping[int, LayerScales] | None = None,
        identity: Mapping[str, str] | None = None,
        share_prefixes: bool = True,
    ) -> None:
        """``pages`` has one count per lane, spare included (:func:`kvport.tiers.make_lanes`: one per group of layers,
        then one per near tier); ``identity`` names model, adapter and RoPE."""
        self._closed = False
        self._sequences: dict[int, Sequence] = {}
        self.backend = backend
        self.layout = layout
        check_sharing(identity, share_prefixes)
        self.share_prefixes = share_prefixes
        resolved = resolve_scales(layout, scales)
        warn_unit_scales(resolved)
        self._lanes, self._tiers = make_lanes(layout)
        self._answer = ask(backend, self._lanes)
        _check_supported(backend, layout, self._answer)
        self._features = [self._answer.features_of(group) for group in range(len(layout.groups))]
        self.fingerprint = _fingerprint(layout, scales_digest(resolved), identity or {})
        if len(pages) != len(self._lanes):
            raise InvalidArgument(f"pages has {len(pages)} counts, the cache has {len(self._lanes)} pools of pages")
        for count in pages:
            whole_number("pages (of a pool, one of them the spare)", count, 2)
        self._page_bytes = [backend.page_bytes(lane.layout) for lane in self._lanes]
        self._stores = self._allocate(pages, resolved)
        self._pools = [PagePool(count) for count in pages]
        self.prefix = PrefixIndex(self.fingerprint, layout.page_size, self._pools, self._lanes)
        # By group: near page -> the far page it was sealed into, while other sequences still hold the near one.
        self._sealed_as: list[dict[int, int]] = [{} for _ in layout.groups]
        for group, tiers in enumerate(self._tiers):
            if tiers.tiered:
                self._pools[tiers.near].on_free = partial(self._forget_seal, group)
        self._where = [layout.locate(layer) for layer in range(len(layout.layers))]
        self._stored_layers = [layer for group in layout.groups for layer in group.layers]
        self._made = 0
        self._step: Body | None = None
        # What compiled functions know the cache by; see kvport.operators.
        self._number, self._order = operators.register(self, backend.torch_device)
        widths = {spec.value_dim for spec in layout.layers}
        self._value_dim = widths.pop() if len(widths) == 1 else 0  # 0: layers differ

    # -- sequences -----------------------------------------------------------------------------------------------

    def sequence(self) -> Sequence:
        """A new empty sequence."""
        self._open("make a sequence in")
        self._outside_step("make a sequence")
        return self._new_sequence()

    def match(self, ids: SequenceOf[int], *, pin: int = 0) -> Sequence:
        """A new sequence that begins with the longest stored prefix of these token ids, in whole pages.

        ``length`` of the result says how many tokens were found (0 where none). To have at least one token left to
        compute, pass all but the last id. With a recent window the match ends before it, so that the last tokens are
        computed in full precision. ``pin`` is the pinned length to look under, see :meth:`Sequence.pin`.
        """
        self._open("match a prefix in")
        self._outside_step("match a prefix")
        known = read_ids(ids)
        if type(pin) is not int or pin != 0:
            check_pin(self, pin)
        found = None
        if self.share_prefixes:
            recent = max(tiers.recent for tiers in self._tiers)
            found = self.prefix.match(known, max(0, len(known) - recent), pin)
        # Nothing below can fail.
        sequence = self._new_sequence()
        sequence._pin = pin
        if found is not None:
            for pool, held in zip(self._pools, found.pages, strict=True):
                pool.retain(held)
            sequence._chain, sequence._pages, sequence._passed = found.chain, found.pages, found.passed
            sequence._length = len(found.chain) * self.layout.page_size
            sequence._sealed = [sequence._length if tiers.tiered else 0 for tiers in self._tiers]
            sequence._indexed, sequence._offered_at = len(found.chain), self.prefix.losses
            sequence._ids = known[: sequence._length]
        return sequence

    def step(self, tokens: Mapping[Sequence, int | SequenceOf[int]], *, fresh: Fresh = "stored") -> Step:
        """Begin a step: ``{sequence: n}`` or ``{sequence: token ids}``. Token ids make full pages findable by
        :meth:`match`.

        With ``fresh="exact"`` this step's own tokens are attended unquantized (they are stored quantized all the
        same), as engines do that prefill from the float K and V at hand. Outputs then depend on how tokens were
        split into steps.

        Raises :class:`OutOfPages` (nothing changed) where the pools cannot hold it.
        """
        self._open("step")
        self._outside_step("begin a step")
        step = Step(self, tokens, fresh)
        self._step = step
        return step

    def graph(self, *, max_seqs: int, max_tokens: int, max_pages: int, max_query: int | None = None) -> Graph:
        """Buffers for steps that are recorded once and replayed, see :class:`kvport.graph.Graph`.

        A replay has at most ``max_seqs`` sequences, ``max_tokens`` new tokens in all, ``max_query`` of one sequence
        (default: ``max_tokens``; 1 makes the leanest decode graph) and ``max_pages`` pages of one sequence, its new
        tokens included. Raises :class:`Unsupported` where the backend has no plans of a fixed shape.
        """
        self._open("make a graph of")
        self._outside_step("make a graph")
        return Graph(self, max_seqs=max_seqs, max_tokens=max_tokens, max_pages=max_pages, max_query=max_query)

    def gather(self, sequence: Sequence, layer: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Decode a sequence's committed tokens of one layer to K ``(length, kv_heads, key_dim)`` and V.

        Positions that a window has freed are zeros. ``dtype`` defaults to the cache's.
        """
        self._open("gather from")
        self._own(sequence)
        sequence._usable("gather")
        group, local = self._locate(layer)
        tables = {
            lane: torch.tensor([sequence._pages[lane]], dtype=torch.int32, device=self.backend.torch_device)
            for lane in (self._tiers[group].far, self._tiers[group].near)
        }
        span = self._span(sequence, group, sequence._sealed[group], sequence.length)
        key, value = self._gather(group, local, tables, [span], dtype)
        return key[0], value[0]

    def export(self, sequence: Sequence) -> PageImage:
        """The canonical page image of a sequence's committed tokens, on the host."""
        return export_sequence(self, sequence)

    def insert(self, image: PageImage) -> Sequence:
        """A new sequence from a page image of a cache with the same fingerprint, bit for bit, on any backend.

        Raises :class:`ImageError` where anything differs and :class:`OutOfPages` where it does not fit; nothing
        changed then.
        """
        return import_sequence(self, image)

    # -- accounts ------------------------------------------------------------------------------------------------

    @property
    def info(self) -> CacheInfo:
        """What was opened, for logs and reports."""
        return CacheInfo(
            backend=self.backend.name,
            device=self.backend.device,
            execution=self.backend.execution,
            operations=operations(self.backend),
            format=str(self.layout.format),
            fingerprint=self.fingerprint,
            workspace=self._answer.workspace,
            capture=self.backend.capture if "graph" in self._answer.features else "none",
            facts=self.backend.facts(),
        )

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Live sequences, oldest first (none once the cache is closed)."""
        return tuple(self._sequences.values())

    def stats(self) -> CacheStats:
        """Pages, bytes and prefix counters right now."""
        self._open("read the statistics of")
        pools = tuple(
            PoolStats(str(lane.layout.format), pool.total, pool.free, self.prefix.evictable(n), size, size * pool.pages)
            for n, (lane, pool, size) in enumerate(zip(self._lanes, self._pools, self._page_bytes, strict=True))
        )
        return CacheStats(pools, len(self._sequences), len(self.prefix), replace(self.prefix.stats))

    def canonical_bytes(self) -> int:
        """Bytes of the canonical page images of all live sequences (a shared page counts once per sequence)."""
        self._open("count the bytes of")
        return sum(canonical_bytes(self.layout, s.length, s._pin) for s in self._sequences.values())

    def check(self) -> tuple[Poisoned | Clipped, ...]:
        """Recount every page reference, and report what sequences hold that is not what was given: NaNs that a static
        integer format had to store as code 0, and numbers that found no room among a page's sparse outliers.

        Raises :class:`KVPortError` if a count is wrong, which would be a fault of kvport itself, and then
        :class:`Unsupported` where the backend does not know which pages met a NaN.
        """
        self._open("check")
        self._outside_step("check the cache")
        for lane, pool in enumerate(self._pools):
            counted = [0] * pool.pages
            counted[SPARE] = 1
            sealed = [
                far
                for tiers, pairs in zip(self._tiers, self._sealed_as, strict=True)
                if tiers.far == lane
                for far in pairs.values()
            ]
            for held in (*(s._pages[lane] for s in self._sequences.values()), self.prefix.pages(lane), sealed):
                for page in held:
                    counted[page] += page != SPARE
            wrong = [p for p in range(pool.pages) if counted[p] != pool.references(p)]
            if wrong or pool.free != sum(1 for c in counted if c == 0):
                raise KVPortError(f"page counts of pool {lane} are wrong for pages {wrong}: a fault of kvport")
        found: list[Poisoned | Clipped] = []
        for number, (members, store) in enumerate(zip(self._lanes, self._stores, strict=True)):
            if members.hides_nan:
                self._require(members.group, {"poison"}, "say what NaNs met of")
                flags = self._flags(number)
                found += [Poisoned(s, *at) for s in self._sequences.values() for at in self._flagged(number, flags, s)]
            found += self._clipped(number, store)
        return tuple(found)

    def _flags(self, lane: int) -> set[tuple[int, int]]:
        """(layer of the group, page) where a NaN was stored as code 0; none where the backend does not say."""
        members = self._lanes[lane]
        if not members.hides_nan or "poison" not in self._features[members.group]:
            return set()
        return {(local, page) for local, page in self.backend.poisoned(self._stores[lane]).nonzero().tolist()}

    def _flagged(self, lane: int, flags: set[tuple[int, int]], sequence: Sequence) -> list[tuple[int, int]]:
        """(model layer, first position) of a sequence's flagged pages."""
        if not flags:
            return []
        return [
            (layer, index * self.layout.page_size)
            for index, page in enumerate(sequence._pages[lane])
            for local, layer in enumerate(self.layout.groups[self._lanes[lane].group].layers)
            if page != SPARE and (local, page) in flags
        ]

    def _clipped(self, lane: int, store: Store) -> list[Clipped]:
        counted = [s.name for s in self._lanes[lane].layout.sides if s.format.sparse and s.format.static]
        held = sorted({page for s in self._sequences.values() for page in s._pages[lane] if page != SPARE})
        if not counted or not held:
            return []
        layers = self.layout.groups[self._lanes[lane].group].layers
        counts: dict[tuple[int, str, int], int] = {}
        for local in range(len(layers)):
            planes = self.backend.export_pages(store, local, held)
            for side in counted:
                per_page = planes[f"{side}.sparse_overflow"].flatten(1).sum(-1).tolist()
                counts |= {(local, side, page): count for page, count in zip(held, per_page, strict=True)}
        return [
            Clipped(sequence, layer, side, index * self.layout.page_size, count)
            for sequence in self._sequences.values()
            for index, page in enumerate(sequence._pages[lane])
            for local, layer in enumerate(layers)
            for side in counted
            if (count := counts.get((local, side, page), 0))
        ]

    def close(self) -> None:
        """Give the device memory back. Every later use of the cache or its sequences raises :class:`ClosedError`."""
        if self._closed:
            return
        self._outside_step("close the cache")
        for sequence in self._sequences.values():
            sequence._alive = False
        self._sequences.clear()
        self.prefix.clear()
        self._stores.clear()
        self._closed = True

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._step is not None:
            self._step.rollback()
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """copy, deepcopy and pickle: a cache is device memory, not a value."""
        raise KVPortError(
            "a cache cannot be copied or pickled; fork its sequences, or open a second cache and move sequences there "
            "with export and insert"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._sequences)} sequences"
        return f"<PagedCache {self.layout.format} on {self.backend.name}@{self.backend.device}: {state}>"

    # -- shared with steps and sequences ------------------------------------------------------------------------

    def _new_sequence(self) -> Sequence:
        self._made += 1
        sequence = self._sequences[self._made] = Sequence(self, self._made)
        return sequence

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.number]

    def _allocate(self, pages: SequenceOf[int], scales: SequenceOf[tuple[LayerScales, ...]]) -> list[Store]:
        """A store for every lane."""
        stores = []
        for lane, count, size in zip(self._lanes, pages, self._page_bytes, strict=True):
            scales_of_lane = scales[lane.group] if lane.layout.format.calibrated else None
            try:
                # Tensors made in inference mode could not be written to outside of it.
                with torch.inference_mode(False):
                    stores.append(self.backend.allocate(lane.layout, count, scales=scales_of_lane))
            except ScaleError as error:  # the backend counts the layers of a group, users those of the model
                members = self.layout.groups[lane.group].layers
                layer = None if error.layer is None else members[error.layer]
                of = f"layers {list(members)}" if layer is None else f"layer {layer}"
                raise ScaleError(
                    f"backend {self.backend.name} on {self.backend.device} cannot take the static scales of {of}: "
                    f"{error}",
                    layer=layer,
                ) from error
            except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError on CPUs, a subclass on GPUs
                stores.clear()
                raise OutOfMemory(
                    f"{self.backend.device} could not allocate {count} {lane.layout.format} pages of {size:,} bytes "
                    f"({count * size / 2**30:.2f} GiB); open with fewer tokens or pages. It said: {error}"
                ) from error
        return stores

    def _take_pages(self, needs: SequenceOf[int], who: str) -> list[list[int]]:
        """Take pages in every lane, all or nothing, evicting unreferenced prefix pages only if that suffices."""
        for number, (lane, pool, need) in enumerate(zip(self._lanes, self._pools, needs, strict=True)):
            free = pool.free
            if need > free and need > (free := free + self.prefix.evictable(number)):
                raise OutOfPages(
                    f"{who} needs {need} {lane.layout.format} pages for layers "
                    f"{list(self.layout.groups[lane.group].layers)}, {free} of {pool.total} are free; free or truncate "
                    "sequences, make the step smaller, or open the cache with more pages",
                    needed=need,
                    free=free,
                    total=pool.total,
                )
        for number, (pool, need) in enumerate(zip(self._pools, needs, strict=True)):
            if need > pool.free:
                self.prefix.evict(number, need - pool.free)
        return [pool.take(need) for pool, need in zip(self._pools, needs, strict=True)]

    def _digests(self, sequence: Sequence, ids: SequenceOf[int] | None) -> list[bytes]:
        """What a sequence's chain of digests grows by when tokens of these ids follow; nothing is changed."""
        if not self.share_prefixes or sequence._ids is None or ids is None:
            return []
        chain = sequence._chain
        rest = [*sequence._ids[len(chain) * self.layout.page_size :], *ids]
        return self.prefix.digests(rest, sequence._pin, chain[-1] if chain else None)

    def _index(self, sequence: Sequence) -> None:
        """Make the pages at rest of a sequence whose token ids are known findable."""
        if not self.share_prefixes:
            return
        if sequence._offered_at != self.prefix.losses:  # some of what it offered may have been evicted
            sequence._indexed, sequence._offered_at = 0, self.prefix.losses
        size = self.layout.page_size
        at_rest = len(sequence._chain)
        for tiers, sealed in zip(self._tiers, sequence._sealed, strict=True):
            if tiers.tiered:
                at_rest = min(at_rest, max(sealed // size, tiers.head_pages(sequence._pin, size)))
        if at_rest > sequence._indexed:
            self.prefix.insert(sequence._chain, sequence._pages, sequence._indexed, at_rest)
            sequence._indexed = at_rest

    def _remember_seal(self, group: int, near: int, far: int) -> None:
        """Sequences that still hold the near page will seal into the same far page."""
        tiers = self._tiers[group]
        if self._pools[tiers.near].references(near):
            self._pools[tiers.far].retain([far])
            self._sealed_as[group][near] = far

    def _forget_seal(self, group: int, near: int) -> None:
        if (far := self._sealed_as[group].pop(near, None)) is not None:
            self._pools[self._tiers[group].far].release([far])

    def _own(self, sequence: Sequence) -> None:
        if not isinstance(sequence, Sequence):
            raise InvalidArgument(f"needs a sequence of this cache, got {type(sequence).__name__}")
        if sequence._cache is not self:
            raise SequenceError(f"{sequence!r} belongs to another cache")

    def _locate(self, layer: int) -> tuple[int, int]:
        if type(layer) is not int or not 0 <= layer < len(self._where):
            self.layout.locate(layer)  # raises with the allowed range
        return self._where[layer]

    def _require(self, group: int, wanted: AbstractSet[str], action: str) -> None:
        """Refuse a request that needs features which the backend does not declare for a group of layers."""
        if reasons := undeclared(self._features[group], wanted):
            members = self.layout.groups[group]
            raise Unsupported(
                f"backend {self.backend.name} on {self.backend.device} cannot {action} layers {list(members.layers)} "
                f"in {members.layout.format}",
                reasons,
            )

    def _span(self, sequence: Sequence, group: int, sealed: int, length: int) -> Span:
        size = self.layout.page_size
        start = sequence._passed[group] * size
        head = self._tiers[group].head_pages(sequence._pin, size) * size
        return Span(start, min(max(start, head), length), sealed, length)

    def _gather(
        self,
        group: int,
        local: int,
        tables: Mapping[int, Tensor],
        spans: SequenceOf[Span],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        if dtype is not None and dtype not in DTYPES.values():
            raise InvalidArgument(f"dtype must be torch.float32, bfloat16 or float16, got {show(dtype)}")
        tiers, lengths = self._tiers[group], [span.length for span in spans]
        members, wanted = self.layout.groups[group].layout, dtype or self.layout.dtype
        # A rotation is undone in float32, and rounded once.
        read = wanted if members.format.rotate is None else torch.float32

        def gather(lane: int) -> tuple[Tensor, Tensor]:
            with uncast(self.backend.torch_device.type):
                return self.backend.gather(self._stores[lane], local, tables[lane], lengths, read)

        key, value = gather(tiers.near)
        if tiers.tiered and any(span.sealed > span.head for span in spans):
            for dense, far in zip((key, value), gather(tiers.far), strict=True):
                for s, span in enumerate(spans):
                    dense[s, span.head : span.sealed] = far[s, span.head : span.sealed]
        if members.format.rotate is not None:
            key = unrotate(key, members.format.rotate, members.rotated_dim).to(wanted)
            value = key[..., : members.value_dim] if members.latent else value.to(wanted)
        for s, span in enumerate(spans):
            if span.start:  # these columns point at the spare page, whose bytes mean nothing
                key[s, : span.start] = 0
                value[s, : span.start] = 0
        return key, value

    def _open(self, action: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {action} a closed cache; open a new one with kvport.open")

    def _outside_step(self, action: str) -> None:
        if self._step is not None:
            raise StepError(f"cannot {action} while a step is open; leave its with block (or commit it) first")


def _check_supported(backend: Backend, layout: CacheLayout, answer: Answer) -> None:
    """Refuse a cache that the backend cannot keep, with every reason in any of its lanes."""
    if not answer.refusals:
        return
    declined = " and ".join(
        f"layers {list(layout.groups[lane.group].layers)} as {lane.layout.format}"
        for lane, reasons in zip(answer.lanes, answer.reasons, strict=True)
        if reasons
    )
    raise Unsupported(f"backend {backend.name} on {backend.device} cannot hold {declined}", answer.refusals)


def check_sharing(identity: Mapping[str, str] | None, share_prefixes: bool) -> None:
    """Refuse an identity that is not a mapping of model, adapter and rope to text, and other than true or false."""
    if not isinstance(share_prefixes, bool):
        raise InvalidArgument(f"share_prefixes must be True or False, got {show(share_prefixes)}")
    if identity is None:
        return
    if not isinstance(identity, Mapping) or (set(identity) - {"model", "adapter", "rope"}):
        raise InvalidArgument(f"identity is a mapping of model, adapter and rope to text, got {show(identity)}")
    for name, text in identity.items():
        if not isinstance(text, str):
            raise InvalidArgument(f"identity {name} must be text, got {show(text)}")


def _fingerprint(layout: CacheLayout, scales: str, identity: Mapping[str, str]) -> str:
    """sha256 over everything that must agree before two caches may share or exchange a page."""
    record = {
        "version": FINGERPRINT_VERSION,
        "page_size": layout.page_size,
        "dtype": dtype_name(layout.dtype),
        "layers": [
            {**asdict(spec), "format": json.loads((spec.format or layout.format).identity())} for spec in layout.layers
        ],
        "static_scales": scales,
        "model": identity.get("model", ""),
        "adapter": identity.get("adapter", ""),
        "rope": identity.get("rope", ""),
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
