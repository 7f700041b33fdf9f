"""One sequence: its length, its pages in every group, and the token ids it is known by."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn

from kvport.arguments import INT32_MAX, show
from kvport.errors import LayoutError, SequenceError, StepError, Unsupported

if TYPE_CHECKING:
    from kvport.cache import PagedCache


class Sequence:
    """A run of tokens in a cache. Made by :meth:`PagedCache.sequence`, :meth:`PagedCache.match` or :meth:`fork`.

    A sequence holds references to its pages until :meth:`free` (or the end of a ``with`` block).
    """

    def __init__(self, cache: PagedCache, number: int) -> None:
        groups, lanes = len(cache.layout.groups), len(cache._lanes)
        self.number = number
        self._cache = cache
        self._length = 0
        self._alive = True
        # pages[lane][i] is the page of positions i*P ..; 0 where those positions are in the group's other lane, and
        # for the passed[group] leading pages that a window freed. All lanes' lists are equally long.
        self._pages: list[list[int]] = [[] for _ in range(lanes)]
        self._passed = [0] * groups
        self._sealed = [0] * groups  # positions before it are at rest; see kvport.tiers
        self._pin = 0
        self._ids: list[int] | None = []  # None once tokens were appended without ids
        self._chain: list[bytes] = []  # digests of the full blocks of _ids
        self._indexed = 0  # blocks of _chain that were offered to the prefix index,
        self._offered_at = 0  # when it had lost so many pages

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length

    @property
    def alive(self) -> bool:
        """False after :meth:`free` or after the cache closed."""
        return self._alive

    def pages(self, group: int = 0, tier: Literal["far", "near"] = "far") -> tuple[int, ...]:
        """Page ids of a group's tier, in order; 0 stands for a page in the other tier, or passed by the window.

        A format without tiers has all its pages in ``far``, which is then ``near`` too.
        """
        self._held("read the pages of")
        if tier not in ("far", "near"):
            raise SequenceError(f"tier must be 'far' or 'near', got {show(tier)}")
        tiers = self._cache._tiers[self._group(group)]
        return tuple(self._pages[tiers.far if tier == "far" else tiers.near])

    def sealed_length(self, group: int = 0) -> int:
        """Positions of a group that are at rest in the format's own codes (0 without tiers, see kvport.tiers)."""
        self._held("read the sealed length of")
        return self._sealed[self._group(group)]

    def pin(self, length: int) -> None:
        """Keep the first ``length`` tokens (a system prompt) in higher precision, in whole pages, for good.

        May be called before they are appended. Refused once any of them has been sealed, and for formats without
        tiers.
        """
        self._usable("pin")
        check_pin(self._cache, length, self._pin)
        size = self._cache.layout.page_size
        for tiers, sealed in zip(self._cache._tiers, self._sealed, strict=True):
            head, wanted = tiers.head_pages(self._pin, size), tiers.head_pages(length, size)
            if wanted > head and sealed > head * size:
                raise SequenceError(
                    f"pin({length}): positions {head * size} .. {sealed - 1} were already sealed in low-bit codes; "
                    "pin before appending"
                )
        self._pin = length
        self._chain, self._indexed = [], 0  # the pin is part of the prefix namespace

    def fork(self) -> Sequence:
        """A second sequence with the same tokens. Pages are shared; the open page is copied on first write."""
        self._usable("fork")
        child = self._cache._new_sequence()
        for pool, pages in zip(self._cache._pools, self._pages, strict=True):
            pool.retain(pages)
        child._pages = [list(pages) for pages in self._pages]
        child._passed, child._sealed, child._pin = list(self._passed), list(self._sealed), self._pin
        child._length = self._length
        child._ids = None if self._ids is None else list(self._ids)
        child._chain, child._indexed, child._offered_at = list(self._chain), self._indexed, self._offered_at
        return child

    def truncate(self, length: int) -> None:
        """Forget the tokens from position ``length`` on.

        Refused, before anything changes, when a window group no longer holds the tokens that position ``length``
        would attend to, or when it would cut a sealed page (below the sealed length only whole pages can go). The
        last step can always be truncated.
        """
        self._usable("truncate")
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= self._length:
            raise SequenceError(
                f"truncate({show(length)}): the sequence has {self._length} tokens; give 0 .. {self._length}"
            )
        for group, passed in zip(self._cache.layout.groups, self._passed, strict=True):
            window, size = group.layout.window, group.layout.page_size
            if window is not None and passed * size > max(0, length - window + 1):
                raise SequenceError(
                    f"truncate({length}): layers {group.layers} with window {window} hold positions from "
                    f"{passed * size} on; the smallest length they can go back to is {passed * size + window - 1}"
                )
        size = self._cache.layout.page_size
        for group, sealed in zip(self._cache.layout.groups, self._sealed, strict=True):
            if length < sealed and length % size:
                raise SequenceError(
                    f"truncate({length}): layers {group.layers} are sealed up to position {sealed}; below it give a "
                    f"multiple of the page size {size}"
                )
        keep = -(-length // size)
        for pool, pages in zip(self._cache._pools, self._pages, strict=True):
            pool.release(pages[keep:])
            del pages[keep:]
        self._sealed = [min(sealed, length) for sealed in self._sealed]
        self._length = length
        del self._chain[length // size :]
        self._indexed = min(self._indexed, len(self._chain))
        if self._ids is not None:
            del self._ids[length:]

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

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """copy, deepcopy and pickle would make a second owner that its pages do not know of."""
        raise SequenceError(
            f"{self!r} cannot be copied or pickled: fork() makes a second one in this cache, cache.export(sequence) a "
            "page image that can be kept and inserted elsewhere"
        )

    def __repr__(self) -> str:
        return f"<Sequence {self.number}: {self._length} tokens{'' if self._alive else ', freed'}>"

    def _usable(self, action: str) -> None:
        self._held(action)
        if self._cache._step is not None:
            raise StepError(f"cannot {action} {self!r} inside a step; leave the step first")

    def _held(self, action: str) -> None:
        self._cache._open("use a sequence of")
        if not self._alive:
            raise SequenceError(f"cannot {action} {self!r}: it was freed")

    def _group(self, group: int) -> int:
        groups = len(self._passed)
        if type(group) is not int or not 0 <= group < groups:
            raise LayoutError(f"group {show(group)} is not one of the cache's groups of layers 0 .. {groups - 1}")
        return group

    def _known_ids(self, ids: SequenceOf[int] | None) -> None:
        """Record the ids of tokens just committed, or that they are unknown."""
        if ids is None or self._ids is None:
            self._ids = None
        else:
            self._ids.extend(ids)


def check_pin(cache: PagedCache, length: object, least: int = 0) -> None:
    """Refuse what cannot be pinned in this cache, whatever the sequence."""
    if type(length) is not int or not least <= length <= INT32_MAX:
        raise SequenceError(
            f"pin({show(length)}): give a number of tokens >= {least}"
            f"{', what is pinned already,' if least else ''} and below 2**31"
        )
    if not any(tiers.tiered for tiers in cache._tiers):
        raise Unsupported(
            f"format {cache.layout.format} has no higher precision to pin tokens in; add recent=N or sink=N"
        )
