"""The prefix index: full pages of token ids already in the cache, found by a hash chain over token blocks.

Block i's digest is sha256(digest of block i-1, token ids of block i), starting from the cache's fingerprint, so that
two caches that differ in format, scales, geometry, page size, dtype, model, adapter or RoPE never agree on a digest.
The index holds one reference to each of its pages. A page that only the index refers to is evictable; eviction takes
the least recently used first, and happens only when a step would otherwise run out of pages and only if it suffices.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvport.pages import PagePool


@dataclass
class PrefixStats:
    """Counters since open. ``hit_tokens / lookup_tokens`` is the hit rate."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    inserted_pages: int = 0
    evicted_pages: int = 0


@dataclass
class _Entry:
    parent: bytes
    pages: list[int | None]  # by group; None where a window group's page was passed or evicted
    children: set[bytes]


class PrefixIndex:
    """Maps chains of token blocks to pages, one page per group and block."""

    def __init__(
        self, fingerprint: str, page_size: int, pools: Sequence[PagePool], windows: Sequence[int | None]
    ) -> None:
        self.root = bytes.fromhex(fingerprint)
        self.stats = PrefixStats()
        self._page_size = page_size
        self._pools = pools
        self._windows = windows
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def extend(self, chain: list[bytes], ids: Sequence[int]) -> None:
        """Append to ``chain`` the digests of the full blocks of ``ids`` that it does not cover yet."""
        size = self._page_size
        for block in range(len(chain), len(ids) // size):
            chain.append(self._digest(chain[-1] if chain else self.root, ids[block * size : (block + 1) * size]))

    def match(self, ids: Sequence[int]) -> tuple[list[bytes], list[list[int]], list[int]]:
        """The longest stored prefix of ``ids``: (chain, pages by group, passed pages by group).

        A window group needs only the pages that the next token's window touches; earlier entries of its list are 0
        and counted as passed. The caller retains the pages.
        """
        chain: list[bytes] = []
        self.extend(chain, ids)
        found: list[_Entry] = []
        for digest in chain:
            entry = self._entries.get(digest)
            if entry is None or any(p is None and w is None for p, w in zip(entry.pages, self._windows, strict=True)):
                break
            found.append(entry)
        while found and not self._window_pages_held(found):
            found.pop()
        count = len(found)
        passed = [self._passed(group, count) for group in range(len(self._pools))]
        pages = [[0] * passed[g] + [int(e.pages[g] or 0) for e in found[passed[g] :]] for g in range(len(self._pools))]
        # Deepest first, so that a leaf is always less recently used than its parents and eviction eats from the tail.
        for digest in reversed(chain[:count]):
            self._entries.move_to_end(digest)
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(ids)
        self.stats.hit_tokens += count * self._page_size
        return chain[:count], pages, passed

    def insert(self, chain: Sequence[bytes], pages: Sequence[Sequence[int]], first: int) -> None:
        """Index blocks first .. len(chain)-1, whose pages are ``pages[group][block]`` (0 where a window passed)."""
        for block in range(first, len(chain)):
            parent = chain[block - 1] if block else self.root
            if block and parent not in self._entries:
                return  # its parent was evicted: the block could never be found
            entry = self._entries.get(chain[block])
            if entry is None:
                entry = self._entries[chain[block]] = _Entry(parent, [None] * len(self._pools), set())
                if block:
                    self._entries[parent].children.add(chain[block])
            for group, pool in enumerate(self._pools):
                page = pages[group][block]
                if entry.pages[group] is None and page:
                    pool.retain([page])
                    entry.pages[group] = page
                    self.stats.inserted_pages += 1
        for digest in reversed(chain):
            if digest in self._entries:
                self._entries.move_to_end(digest)

    def evictable(self, group: int) -> int:
        """Pages of this group that only the index refers to."""
        pool = self._pools[group]
        return sum(1 for e in self._entries.values() if (page := e.pages[group]) and pool.references(page) == 1)

    def evict(self, group: int, count: int) -> None:
        """Free ``count`` pages of this group, least recently used first. The caller has checked :meth:`evictable`."""
        pool = self._pools[group]
        wanted = pool.free + count
        for digest in list(self._entries):
            if pool.free >= wanted:
                return
            entry = self._entries.get(digest)
            if entry is None or not (page := entry.pages[group]) or pool.references(page) != 1:
                continue
            if self._windows[group] is None:
                self._drop(digest)  # without it, its descendants cannot be reached
            else:
                self._release(entry, group)

    def clear(self) -> None:
        """Forget everything; pages that sequences hold stay theirs."""
        for digest in list(self._entries):
            if digest in self._entries:
                self._drop(digest)

    def pages(self, group: int) -> list[int]:
        """Every page of this group that the index refers to."""
        return [page for e in self._entries.values() if (page := e.pages[group])]

    def _drop(self, digest: bytes) -> None:
        parent = self._entries.get(self._entries[digest].parent)
        if parent is not None:
            parent.children.discard(digest)
        doomed = [digest]
        while doomed:
            entry = self._entries.pop(doomed.pop())
            doomed.extend(entry.children)
            for group in range(len(self._pools)):
                self._release(entry, group)

    def _release(self, entry: _Entry, group: int) -> None:
        if page := entry.pages[group]:
            self._pools[group].release([page])
            entry.pages[group] = None
            self.stats.evicted_pages += 1

    def _passed(self, group: int, count: int) -> int:
        """Leading pages that the window of the token after ``count`` pages does not touch."""
        window = self._windows[group]
        return 0 if window is None else max(0, count * self._page_size - window + 1) // self._page_size

    def _window_pages_held(self, found: list[_Entry]) -> bool:
        return all(
            entry.pages[group] is not None
            for group in range(len(self._pools))
            for entry in found[self._passed(group, len(found)) :]
        )

    def _digest(self, parent: bytes, ids: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + array("q", ids).tobytes()).digest()
