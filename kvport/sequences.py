"""One sequence: its length, its pages in every group, and the token ids it is known by."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import TYPE_CHECKING

from kvport.errors import SequenceError, StepError

if TYPE_CHECKING:
    from kvport.cache import PagedCache


class Sequence:
    """A run of tokens in a cache. Made by :meth:`PagedCache.sequence`, :meth:`PagedCache.match` or :meth:`fork`.

    A sequence holds references to its pages until :meth:`free` (or the end of a ``with`` block).
    """

    def __init__(self, cache: PagedCache, number: int) -> None:
        groups = len(cache.layout.groups)
        self.number = number
        self._cache = cache
        self._length = 0
        self._alive = True
        # pages[group][i] is the page of positions i*P ..; 0 for the `passed[group]` leading pages a window freed.
        self._pages: list[list[int]] = [[] for _ in range(groups)]
        self._passed = [0] * groups
        self._ids: list[int] | None = []  # None once tokens were appended without ids
        self._chain: list[bytes] = []  # digests of the full blocks of _ids

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length

    @property
    def alive(self) -> bool:
        """False after :meth:`free` or after the cache closed."""
        return self._alive

    def pages(self, group: int = 0) -> tuple[int, ...]:
        """Page ids in this group, in order; 0 stands for a page that the window has passed."""
        return tuple(self._pages[group])

    def fork(self) -> Sequence:
        """A second sequence with the same tokens. Pages are shared; the open page is copied on first write."""
        self._usable("fork")
        child = self._cache._new_sequence()
        for group, pool in enumerate(self._cache._pools):
            pool.retain(self._pages[group])
        child._pages = [list(pages) for pages in self._pages]
        child._passed = list(self._passed)
        child._length = self._length
        child._ids = None if self._ids is None else list(self._ids)
        child._chain = list(self._chain)
        return child

    def truncate(self, length: int) -> None:
        """Forget the tokens from position ``length`` on.

        Refused, before anything changes, when a window group no longer holds the tokens that position ``length``
        would attend to. The last step can always be truncated.
        """
        self._usable("truncate")
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= self._length:
            raise SequenceError(
                f"truncate({length!r}): the sequence has {self._length} tokens; give 0 .. {self._length}"
            )
        for group, passed in zip(self._cache.layout.groups, self._passed, strict=True):
            window, size = group.layout.window, group.layout.page_size
            if window is not None and passed * size > max(0, length - window + 1):
                raise SequenceError(
                    f"truncate({length}): layers {group.layers} with window {window} hold positions from "
                    f"{passed * size} on; the smallest length they can go back to is {passed * size + window - 1}"
                )
        for group_index, pool in enumerate(self._cache._pools):
            keep = self._cache.layout.groups[group_index].layout.pages_for(length)
            pool.release(self._pages[group_index][keep:])
            del self._pages[group_index][keep:]
            self._passed[group_index] = min(self._passed[group_index], keep)
        self._length = length
        if self._ids is not None:
            del self._ids[length:]
            del self._chain[length // self._cache.layout.page_size :]

    def free(self) -> None:
        """Give the pages back. Freeing twice is harmless."""
        if not self._alive:
            return
        self._usable("free")
        for pool, pages in zip(self._cache._pools, self._pages, strict=True):
            pool.release(pages)
        self._alive = False
        self._cache._forget(self)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"<Sequence {self.number}: {self._length} tokens{'' if self._alive else ', freed'}>"

    def _usable(self, action: str) -> None:
        self._cache._open("use a sequence of")
        if not self._alive:
            raise SequenceError(f"cannot {action} {self!r}: it was freed")
        if self._cache._step is not None:
            raise StepError(f"cannot {action} {self!r} inside a step; leave the step first")

    def _known_ids(self, ids: SequenceOf[int] | None) -> None:
        """Record the ids of tokens just committed, or that they are unknown."""
        if ids is None or self._ids is None:
            self._ids = None
        else:
            self._ids.extend(ids)
