"""The page allocator of one group: ids, reference counts and a free list. Knows nothing of sequences or devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvport.errors import InvalidArgument

#: The spare page: takes padding writes, pads page tables, never belongs to a sequence.
SPARE = 0


class PagePool:
    """Counts references to pages 1 .. pages-1. A page is free when nobody refers to it."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise InvalidArgument(f"a pool needs at least 2 pages (one spare, one to use), got {pages}")
        self.pages = pages
        self._references = [0] * pages
        self._references[SPARE] = 1
        self._free = list(range(pages - 1, 0, -1))  # popped from the end: low ids first
        self.on_free: Callable[[int], None] | None = None
        """Called with a page that nobody refers to any more."""

    @property
    def free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    @property
    def total(self) -> int:
        """Pages that sequences can ever hold: all but the spare."""
        return self.pages - 1

    def references(self, page: int) -> int:
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """``count`` free pages with one reference each. The caller has checked :attr:`free`."""
        if count > self.free:
            raise AssertionError(f"take({count}) with {self.free} pages free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each page; the spare is skipped (it stands for pages that a window freed)."""
        for page in pages:
            if page == SPARE:
                continue
            if self._references[page] < 1:
                raise AssertionError(f"retain of free page {page}")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; the spare is skipped."""
        for page in pages:
            if page == SPARE:
                continue
            if self._references[page] < 1:
                raise AssertionError(f"release of free page {page}")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                if self.on_free is not None:
                    self.on_free(page)
