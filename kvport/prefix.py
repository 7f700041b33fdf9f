"""The prefix index: full pages of token ids already in the cache, found by a hash chain over token blocks.

Block i's digest is sha256(digest of block i-1, token ids of block i), starting from the cache's fingerprint (and the
pinned length), so that two caches that differ in format, scales, geometry, page size, dtype, model, adapter or RoPE
never agree on a digest. The index holds one reference to each of its pages. A page that only the index refers to is
evictable; eviction takes the least recently used first, and happens only when a step would otherwise run out of pages
and only if it suffices.

Only pages at rest are indexed: with tiers, those that are sealed or stay near for good. What was evicted while a
sequence still holds it is offered again at that sequence's next commit; :attr:`PrefixIndex.losses` says that there is
something to offer.

An entry holds a page in every group without a window, else it could not be used; entries that hold nothing at all are
deleted, so that the index is never larger than the pools.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvport.pages import PagePool
from kvport.tiers import Lane


@dataclass
class PrefixStats:
    """Counters since open. ``hit_tokens / lookup_tokens`` is the hit rate."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    inserted_pages: int = 0
    evicted_pages: int = 0


@dataclass(frozen=True)
class Match:
    """What was found: ``chain`` of digests, ``pages[lane][block]`` (0 where not in that lane), ``passed`` by group."""

    chain: list[bytes]
    pages: list[list[int]]
    passed: list[int]


@dataclass
class _Entry:
    parent: bytes  # kept, as children are, where a group has no window: its pages are of no use without their parents
    pages: list[int]  # by lane; 0 where the block is not in that lane, or its page was passed or evicted
    children: set[bytes]


class PrefixIndex:
    """Maps chains of token blocks to pages: for each group of layers, one page in one of its lanes."""

    def __init__(self, fingerprint: str, page_size: int, pools: Sequence[PagePool], lanes: Sequence[Lane]) -> None:
        self.stats = PrefixStats()
        self.losses = 0
        """Pages that were taken out of the index since open."""
        self._fingerprint = bytes.fromhex(fingerprint)
        self._page_size = page_size
        self._pools = pools
        self._windows = {lane.group: lane.layout.window for lane in lanes}
        self._whole = [group for group, window in self._windows.items() if window is None]
        self._lanes = {group: [n for n, lane in enumerate(lanes) if lane.group == group] for group in self._windows}
        self._group = [lane.group for lane in lanes]
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def digests(self, ids: Sequence[int], pin: int = 0, after: bytes | None = None) -> list[bytes]:
        """The digests of the full blocks of ``ids``, which follow the block of digest ``after`` (None: nothing)."""
        size = self._page_size
        last = hashlib.sha256(self._fingerprint + pin.to_bytes(8, "little")).digest() if after is None else after
        found = []
        for block in range(len(ids) // size):
            tokens = array("q", ids[block * size : (block + 1) * size]).tobytes()
            last = hashlib.sha256(last + tokens).digest()
            found.append(last)
        return found

    def match(self, ids: Sequence[int], limit: int, pin: int = 0) -> Match:
        """The longest stored prefix of ``ids``, of at most ``limit`` tokens. The caller retains the pages.

        A window group needs only the pages that the next token's window touches; earlier ones are passed.
        """
        chain = self.digests(ids[:limit], pin)
        found = [self._entries.get(digest) for digest in chain]
        if self._whole and None in found:
            del found[found.index(None) :]
        while found and not self._windows_held(found):
            found.pop()
        count = len(found)
        passed = [self._passed(group, count) for group in self._windows]
        pages = [
            [entry.pages[lane] if entry and block >= passed[group] else 0 for block, entry in enumerate(found)]
            for lane, group in enumerate(self._group)
        ]
        self._touch(chain[:count])
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(ids)
        self.stats.hit_tokens += count * self._page_size
        return Match(chain[:count], pages, passed)

    def insert(self, chain: Sequence[bytes], pages: Sequence[Sequence[int]], first: int, last: int) -> None:
        """Index blocks first .. last-1 of a chain, whose pages are ``pages[lane][block]``; those before are indexed."""
        for block in range(first, last):
            entry = self._entries.get(chain[block])
            if entry is None:
                if not any(held[block] for held in pages):
                    continue  # passed by the window of every group
                parent = chain[block - 1] if block and self._whole else b""
                entry = self._entries[chain[block]] = _Entry(parent, [0] * len(self._pools), set())
                if parent:
                    self._entries[parent].children.add(chain[block])
            for lane, group in enumerate(self._group):
                page = pages[lane][block]
                if page and not self._held(entry, group):
                    self._pools[lane].retain([page])
                    entry.pages[lane] = page
                    self.stats.inserted_pages += 1
        self._touch(chain[:last])

    def evictable(self, lane: int) -> int:
        """Pages of this lane that only the index refers to."""
        pool = self._pools[lane]
        return sum(1 for e in self._entries.values() if e.pages[lane] and pool.references(e.pages[lane]) == 1)

    def evict(self, lane: int, count: int) -> None:
        """Free ``count`` pages of this lane, least recently used first. The caller has checked :meth:`evictable`."""
        pool = self._pools[lane]
        wanted = pool.free + count
        for digest in list(self._entries):
            if pool.free >= wanted:
                return
            entry = self._entries.get(digest)
            if entry is None or not entry.pages[lane] or pool.references(entry.pages[lane]) != 1:
                continue
            if self._windows[self._group[lane]] is None:
                self._drop(digest)  # without it, its descendants cannot be reached
            else:
                self._release(entry, lane)
                if not any(entry.pages):
                    self._drop(digest)

    def clear(self) -> None:
        """Forget everything; pages that sequences hold stay theirs.

        Like an eviction, this forgets what the index holds, not what sequences know: at its next commit a live
        sequence offers its pages anew. To have something never found again, free its sequences first. (K and V of
        other weights belong in a cache of another ``identity``.)
        """
        for digest in list(self._entries):
            if digest in self._entries:
                self._drop(digest)

    def pages(self, lane: int) -> list[int]:
        """Every page of this lane that the index refers to."""
        return [entry.pages[lane] for entry in self._entries.values() if entry.pages[lane]]

    def _touch(self, chain: Sequence[bytes]) -> None:
        # Deepest first, so that a leaf is always less recently used than its parents and eviction eats from the tail.
        for digest in reversed(chain):
            if digest in self._entries:
                self._entries.move_to_end(digest)

    def _drop(self, digest: bytes) -> None:
        parent = self._entries.get(self._entries[digest].parent)
        if parent is not None:
            parent.children.discard(digest)
        doomed = [digest]
        while doomed:
            entry = self._entries.pop(doomed.pop())
            doomed.extend(entry.children)
            for lane in range(len(self._pools)):
                self._release(entry, lane)

    def _release(self, entry: _Entry, lane: int) -> None:
        if page := entry.pages[lane]:
            self._pools[lane].release([page])
            entry.pages[lane] = 0
            self.losses += 1
            self.stats.evicted_pages += 1

    def _held(self, entry: _Entry, group: int) -> bool:
        return any(entry.pages[lane] for lane in self._lanes[group])

    def _passed(self, group: int, count: int) -> int:
        """Leading pages that the window of the token after ``count`` pages does not touch."""
        window = self._windows[group]
        return 0 if window is None else max(0, count * self._page_size - window + 1) // self._page_size

    def _windows_held(self, found: Sequence[_Entry | None]) -> bool:
        return all(
            entry is not None and self._held(entry, group)
            for group, window in self._windows.items()
            if window is not None
            for entry in found[self._passed(group, len(found)) :]
        )
