"""One step: a transaction that appends the same new tokens to every layer and attends over them.

Begin reserves every page the step can need, all or nothing, seals what has grown old, and makes the copies that
copy-on-write asks for. The body appends and attends, layer by layer. Commit takes the new pages and lengths into the
sequences and drops what they replaced; rollback gives the new pages back. Sequences are not touched before commit, so
leaving by an exception leaves every one of them, and every reference count, as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, pairwise
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvport.arguments import INT32_MAX, show, whole_number
from kvport.attention import uncast
from kvport.backend import StepArrays
from kvport.body import Body, Fresh, GroupArrays
from kvport.errors import IncompleteStep, InvalidArgument, SequenceError, StepError
from kvport.layout import GroupLayout
from kvport.sequences import Sequence
from kvport.tiers import Tiers

if TYPE_CHECKING:
    from kvport.cache import PagedCache


class Step(Body):
    """Made by :meth:`PagedCache.step`; use it in a ``with`` block, or call :meth:`commit` / :meth:`rollback`.

    Rows of packed tensors follow the order of the mapping given to ``step``: ``rows[sequence]`` is the slice that
    belongs to a sequence. ``fresh`` says how attend reads the step's own tokens: ``"stored"``, as they were encoded,
    or ``"exact"``, unquantized, with everything before them as stored.
    """

    def __init__(
        self, cache: PagedCache, tokens: Mapping[Sequence, int | SequenceOf[int]], fresh: Fresh = "stored"
    ) -> None:
        if not isinstance(fresh, str) or fresh not in ("stored", "exact"):
            raise InvalidArgument(f"fresh must be 'stored' or 'exact', got {show(fresh)}")
        super().__init__(cache, 0, fresh)
        if fresh == "exact":  # the history and the step's own tokens are merged by their LSE
            for group in range(len(cache._tiers)):
                cache._require(group, {"lse"}, "attend to exact fresh tokens of")
        self._sequences, self._counts, self._ids = _read_tokens(cache, tokens)
        starts = [0, *accumulate(self._counts)]
        self.rows = {s: slice(a, b) for s, (a, b) in zip(self._sequences, pairwise(starts), strict=True)}
        self.tokens = starts[-1]
        self._phases = frozenset(
            "verify" if sequence.length else "prefill"
            for sequence, count in zip(self._sequences, self._counts, strict=True)
            if count > 1
        )
        self._admit()
        # What commit takes over and rollback gives back. Sequences are not touched before commit.
        lanes = len(cache._lanes)
        self._pages = [[list(s._pages[lane]) for s in self._sequences] for lane in range(lanes)]
        self._sealed = [list(s._sealed) for s in self._sequences]
        self._taken: list[list[int]] = []
        self._copied: set[tuple[int, Sequence]] = set()  # (lane, sequence) whose shared open page is copied
        self._retained: list[tuple[int, int]] = []  # (lane, page): references added besides taken pages
        self._dropped: list[tuple[int, int]] = []  # (lane, page): references to release at commit
        self._seals: list[tuple[int, int, int]] = []  # (group, near page, far page)
        self._rewritten: list[tuple[int, int]] = []  # (group, near page): open pages that take more tokens in place
        self._tables: dict[int, Tensor] = {}  # by lane, (sequences, max_pages) int32 on the device, for gather
        self._groups = self._begin(starts)
        self._open = True

    # -- begin ---------------------------------------------------------------------------------------------------

    def _begin(self, starts: list[int]) -> list[GroupArrays]:
        cache = self._cache
        self._taken = cache._take_pages(self._needs(), "the step")
        fresh = [iter(pages) for pages in self._taken]
        try:
            for group, tiers in enumerate(cache._tiers):
                self._seal(group, tiers, fresh[tiers.far])
                self._extend(group, tiers, fresh[tiers.near])
            return [self._prepare(group, tiers, starts) for group, tiers in enumerate(cache._tiers)]
        except BaseException:
            self._give_back()
            raise

    def _admit(self) -> None:
        """Refuse, before anything changes, what cannot be begun: anything can, but in a graph."""

    def _needs(self) -> list[int]:
        """Pages that the step takes, by lane."""
        cache = self._cache
        size = cache.layout.page_size
        needs = [0] * len(cache._lanes)
        for group, tiers in enumerate(cache._tiers):
            for sequence, count in zip(self._sequences, self._counts, strict=True):
                held = len(sequence._pages[tiers.near])
                needs[tiers.near] += -(-(sequence.length + count) // size) - held
                if self._must_copy(tiers.near, sequence, count):
                    # Decided here once: an eviction that follows may drop the other reference.
                    self._copied.add((tiers.near, sequence))
                    needs[tiers.near] += 1
            near = {s._pages[tiers.near][i] for s in self._sequences for i in self._to_seal(group, tiers, s)}
            needs[tiers.far] += len(near - cache._sealed_as[group].keys())
        return needs

    def _must_copy(self, lane: int, sequence: Sequence, count: int) -> bool:
        """Whether the page that the first new token goes into is shared."""
        if count == 0 or sequence.length % self._cache.layout.page_size == 0:
            return False
        return self._cache._pools[lane].references(sequence._pages[lane][-1]) > 1

    def _to_seal(self, group: int, tiers: Tiers, sequence: Sequence) -> list[int]:
        """Block numbers that are sealed at this begin."""
        if not tiers.tiered:
            return []
        size = self._cache.layout.page_size
        first = max(sequence._sealed[group] // size, tiers.head_pages(sequence._pin, size), sequence._passed[group])
        return list(range(first, tiers.sealed(sequence.length, size) // size))

    def _seal(self, group: int, tiers: Tiers, fresh: Iterator[int]) -> None:
        """Encode near pages that have grown old into far pages; sequences that share one share the result."""
        if not tiers.tiered:
            return
        cache = self._cache
        done = dict(cache._sealed_as[group])
        new: dict[int, int] = {}
        for s, sequence in enumerate(self._sequences):
            for block in self._to_seal(group, tiers, sequence):
                near = self._pages[tiers.near][s][block]
                if near in done:
                    far = done[near]
                    cache._pools[tiers.far].retain([far])
                    self._retained.append((tiers.far, far))
                else:
                    far = done[near] = new[near] = next(fresh)
                self._pages[tiers.near][s][block], self._pages[tiers.far][s][block] = 0, far
                self._dropped.append((tiers.near, near))
            size = cache.layout.page_size
            self._sealed[s][group] = max(self._sealed[s][group], tiers.sealed(sequence.length, size))
        if new:
            for local in range(cache._lanes[tiers.far].layout.layers):
                source, target = cache._stores[tiers.near], cache._stores[tiers.far]
                with uncast(cache.backend.torch_device.type):
                    cache.backend.seal(source, target, local, list(new), list(new.values()))
        self._seals += [(group, near, far) for near, far in new.items()]

    def _extend(self, group: int, tiers: Tiers, fresh: Iterator[int]) -> None:
        """Copy shared open pages, and add pages for the new tokens."""
        cache = self._cache
        source: list[int] = []
        target: list[int] = []
        for s, (sequence, count) in enumerate(zip(self._sequences, self._counts, strict=True)):
            pages = self._pages[tiers.near][s]
            if (tiers.near, sequence) in self._copied:
                source.append(pages[-1])
                self._dropped.append((tiers.near, pages[-1]))
                pages[-1] = next(fresh)
                target.append(pages[-1])
            elif count and sequence.length % cache.layout.page_size:
                self._rewritten.append((group, pages[-1]))
            more = -(-(sequence.length + count) // cache.layout.page_size) - len(pages)
            pages += [next(fresh) for _ in range(more)]
            if tiers.tiered:
                self._pages[tiers.far][s] += [0] * more
        if source:
            cache.backend.copy_pages(cache._stores[tiers.near], source, target)

    def _prepare(self, group: int, tiers: Tiers, starts: list[int]) -> GroupArrays:
        """Slots, tables and plans from the page lists."""
        size = self._cache.layout.page_size
        tables = {lane: _table(self._pages[lane]) for lane in {tiers.far, tiers.near}}
        row = np.repeat(np.arange(len(self._sequences)), self._counts)
        first = np.array([s.length - start for s, start in zip(self._sequences, starts, strict=False)])
        position = first[row] + np.arange(self.tokens)
        slots = tables[tiers.near][row, position // size].astype(np.int64) * size + position % size
        query_starts, query_positions = _int32(starts), _int32([s.length for s in self._sequences])
        ranges = [
            (
                lane,
                StepArrays(
                    page_table=torch.from_numpy(tables[lane]),
                    kv_start=_int32([first for first, _ in positions]),
                    lengths=_int32([last for _, last in positions]),
                    query_starts=query_starts,
                    query_positions=query_positions,
                ),
            )
            for lane, positions in self._ranges(group, tiers)
        ]
        return self._place(group, torch.from_numpy(slots), ranges)

    def _place(self, group: int, slots: Tensor, ranges: list[tuple[int, StepArrays]]) -> GroupArrays:
        """Bring one group's host arrays to the device, and plan over each range."""
        backend, stores = self._cache.backend, self._cache._stores
        plans = [(lane, backend.plan(stores[lane], arrays)) for lane, arrays in ranges]
        return GroupArrays(backend.upload(slots), plans)

    def _ranges(self, group: int, tiers: Tiers) -> list[tuple[int, list[tuple[int, int]]]]:
        """(lane, positions first .. last-1 by sequence) that together are everything stored, each attended apart."""
        size = self._cache.layout.page_size
        head: list[tuple[int, int]] = []
        far: list[tuple[int, int]] = []
        tail: list[tuple[int, int]] = []
        for s, (sequence, count) in enumerate(zip(self._sequences, self._counts, strict=True)):
            start = sequence._passed[group] * size
            end = sequence.length + (count if self.fresh == "stored" else 0)
            kept = max(start, tiers.head_pages(sequence._pin, size) * size)
            sealed = self._sealed[s][group]
            if sealed > kept:
                head.append((start, kept))
                far.append((kept, sealed))
                tail.append((sealed, end))
            else:  # nothing is far: one run of near pages
                head.append((start, start))
                far.append((start, start))
                tail.append((start, end))
        found = [(tiers.near, head), (tiers.far, far)] if tiers.tiered else []
        ranges = [(lane, r) for lane, r in found if self._fixed or any(a < b for a, b in r)]
        # Without exact fresh tokens the tail is never empty, and keeps the plan that a format without tiers needs.
        if self.fresh == "stored" or not self.tokens or any(a < b for a, b in tail):
            ranges.append((tiers.near, tail))
        return ranges

    def gather(self, layer: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Decode a layer's whole history, this step's tokens included, to dense tensors.

        Returns K ``(sequences, longest, kv_heads, key_dim)`` and V, zeros past each length, in ``dtype`` (default:
        the cache's). Positions that a window has freed are zeros too. This is for clients that bring their own
        attention; its memory grows with the context.
        """
        spec, group, local = self._locate(layer)
        owner = layer if spec.shares is None else spec.shares
        if owner not in self._appended:
            raise StepError(f"layer {owner} must be appended in this step before layer {layer} is gathered")
        spans = []
        for s, (sequence, count) in enumerate(zip(self._sequences, self._counts, strict=True)):
            spans.append(self._cache._span(sequence, group, self._sealed[s][group], sequence.length + count))
        tiers = self._cache._tiers[group]
        for lane in {tiers.far, tiers.near} - self._tables.keys():
            self._tables[lane] = self._cache.backend.upload(torch.from_numpy(_table(self._pages[lane])))
        return self._cache._gather(group, local, self._tables, spans, dtype)

    # -- exit ----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """End the step and keep it. Raises :class:`IncompleteStep`, after rolling back, if a layer was not appended."""
        self._check_open()
        if missing := self._missing():
            self.rollback()
            raise IncompleteStep(
                f"layers {missing} were not appended; every layer takes the step's tokens exactly once. The step was "
                "rolled back"
            )
        cache = self._cache
        try:  # all that can fail comes first
            grown = [
                cache._digests(sequence, ids if count else ())
                for sequence, count, ids in zip(self._sequences, self._counts, self._ids, strict=True)
            ]
        except BaseException:
            self.rollback()
            raise
        for s, sequence in enumerate(self._sequences):
            for lane, pages in enumerate(self._pages):
                sequence._pages[lane] = pages[s]
            sequence._sealed = self._sealed[s]
        for lane, page in self._dropped:
            cache._pools[lane].release([page])
        for group, near in self._rewritten:
            # A sibling may have sealed the page before this sequence was truncated into it: not these tokens.
            cache._forget_seal(group, near)
        for group, near, far in self._seals:
            cache._remember_seal(group, near, far)
        for sequence, count, ids, digests in zip(self._sequences, self._counts, self._ids, grown, strict=True):
            if count:
                sequence._known_ids(ids)
            sequence._chain += digests
            # Before windows pass pages: those that have sealed in this step are at rest only now, and a later match may
            # end where it needs them.
            cache._index(sequence)
        for group, members in enumerate(cache.layout.groups):
            self._free_passed(group, members.layout)
        for sequence, count in zip(self._sequences, self._counts, strict=True):
            sequence._length += count
        self._close()

    def _free_passed(self, group: int, layout: GroupLayout) -> None:
        """Drop pages that the window has passed, judged at the step's begin, so that the step can be truncated."""
        if layout.window is None:
            return
        tiers = self._cache._tiers[group]
        for sequence in self._sequences:
            keep_from = max(0, sequence.length - layout.window + 1) // layout.page_size
            for lane in {tiers.far, tiers.near}:
                pages = sequence._pages[lane]
                for block in range(sequence._passed[group], keep_from):
                    self._cache._pools[lane].release([pages[block]])
                    pages[block] = 0
            sequence._passed[group] = max(sequence._passed[group], keep_from)

    def rollback(self) -> None:
        """End the step and leave every sequence, page and count as before it."""
        self._check_open()
        self._give_back()
        self._close()

    def _give_back(self) -> None:
        for pool, pages in zip(self._cache._pools, self._taken, strict=True):
            pool.release(pages)
        for lane, page in self._retained:
            self._cache._pools[lane].release([page])

    def __enter__(self) -> Step:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return  # committed or rolled back in the body
        if kind is None:
            self.commit()
        else:
            self.rollback()


def _read_tokens(
    cache: PagedCache, tokens: Mapping[Sequence, int | SequenceOf[int]]
) -> tuple[list[Sequence], list[int], list[list[int] | None]]:
    if not isinstance(tokens, Mapping) or not tokens:
        raise InvalidArgument("a step takes a non-empty mapping {sequence: number of new tokens, or their ids}")
    counts: list[int] = []
    ids: list[list[int] | None] = []
    for sequence, given in tokens.items():
        if not isinstance(sequence, Sequence):
            raise InvalidArgument(f"a step's keys are sequences of this cache, got {type(sequence).__name__}")
        if sequence._cache is not cache:
            raise SequenceError(f"{sequence!r} belongs to another cache")
        if not sequence.alive:
            raise SequenceError(f"{sequence!r} takes no tokens any more")
        if isinstance(given, int) and not isinstance(given, bool):
            most = INT32_MAX - sequence.length  # positions are 32-bit
            if not 0 <= given <= most:  # raises
                whole_number(f"the number of new tokens of {sequence!r}", int(given), 0, most)
            counts.append(int(given))
            ids.append(None)
        else:
            ids.append(read_ids(given))
            counts.append(len(ids[-1] or ()))
    return list(tokens), counts, ids


def read_ids(given: object) -> list[int]:
    """Token ids from a list, array or 1-d integer tensor."""
    try:
        if isinstance(given, (list, tuple)) and any(type(i) is bool for i in given):
            raise TypeError
        array = np.asarray(given)
        if array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            ids = [int(i) for i in array]
            if not ids or max(ids) < 2**63:  # only unsigned arrays can hold more
                return ids
    except (TypeError, ValueError, RuntimeError):
        pass
    raise InvalidArgument(f"token ids are a 1-d run of 64-bit integers, or give their number; got {show(given)}")


def _table(pages: list[list[int]]) -> NDArray[np.int32]:
    """Page lists as a table padded with the spare page."""
    table = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, held in zip(table, pages, strict=True):
        row[: len(held)] = held
    return table


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
