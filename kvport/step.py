"""One step: a transaction that appends the same new tokens to every layer and attends over them.

Begin reserves every page the step can need, all or nothing, seals what has grown old, and makes the copies that
copy-on-write asks for. The body appends and attends, layer by layer. Commit takes the new pages and lengths into the
sequences and drops what they replaced; rollback gives the new pages back. Sequences are not touched before commit, so
leaving by an exception leaves every one of them, and every reference count, as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvport.arguments import INT32_MAX, show, whole_number
from kvport.attention import Read, attend_sequence
from kvport.backend import Plan, StepArrays
from kvport.errors import IncompleteStep, InvalidArgument, SequenceError, StepError, Unsupported
from kvport.formats import DTYPES
from kvport.layout import GroupLayout, LayerSpec
from kvport.merge import merge
from kvport.rotation import rotate, unrotate
from kvport.sequences import Sequence
from kvport.tiers import Tiers

if TYPE_CHECKING:
    from kvport.cache import PagedCache

Fresh = Literal["stored", "exact"]


class Attention(NamedTuple):
    """What attend returns.

    ``output`` ``(tokens, query_heads, value_dim)`` in the query's dtype; ``lse`` ``(tokens, query_heads)`` float32.
    """

    output: Tensor
    lse: Tensor


@dataclass
class _GroupStep:
    """What the step does in one group."""

    slots: Tensor  # of the new tokens, in the near lane
    tables: dict[int, Tensor]  # by lane, (sequences, max_pages) int32 on the device
    plans: list[tuple[int, Plan]]  # one per range of positions: a tiered group attends to up to three, then merges


class Step:
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
        self._cache = cache
        if fresh == "exact":  # the history and the step's own tokens are merged by their LSE
            for group in range(len(cache._tiers)):
                self._check_features(group, lse=True)
        self.fresh = fresh
        self._exact: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, this step's K and V where fresh is "exact"
        self._sequences, self._counts, self._ids = _read_tokens(cache, tokens)
        starts = [0, *accumulate(self._counts)]
        self.rows = {s: slice(a, b) for s, (a, b) in zip(self._sequences, pairwise(starts), strict=True)}
        self.tokens: int = starts[-1]
        self._appended: set[int] = set()
        self._open = False
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
        self._groups = self._begin(starts)
        self._open = True

    # -- begin ---------------------------------------------------------------------------------------------------

    def _begin(self, starts: list[int]) -> list[_GroupStep]:
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
        size = self._cache.layout.page_size
        first = max(sequence._sealed[group] // size, tiers.head_pages(sequence._pin, size), sequence._passed[group])
        return list(range(first, tiers.sealed(sequence.length, size) // size))

    def _seal(self, group: int, tiers: Tiers, fresh: Iterator[int]) -> None:
        """Encode near pages that have grown old into far pages; sequences that share one share the result."""
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

    def _prepare(self, group: int, tiers: Tiers, starts: list[int]) -> _GroupStep:
        """Slots, tables and plans from the page lists."""
        cache = self._cache
        size, device = cache.layout.page_size, cache.backend.torch_device
        tables = {lane: _table(self._pages[lane]) for lane in (tiers.far, tiers.near)}
        slots = np.empty(self.tokens, dtype=np.int64)
        for s, sequence in enumerate(self._sequences):
            position = np.arange(sequence.length, sequence.length + self._counts[s])
            page = tables[tiers.near][s, position // size].astype(np.int64)
            slots[starts[s] : starts[s + 1]] = page * size + position % size
        query_starts, query_positions = _int32(starts), _int32([s.length for s in self._sequences])
        plans = []
        for lane, ranges in self._ranges(group, tiers):
            arrays = StepArrays(
                page_table=torch.from_numpy(tables[lane]),
                kv_start=_int32([first for first, _ in ranges]),
                lengths=_int32([last for _, last in ranges]),
                query_starts=query_starts,
                query_positions=query_positions,
            )
            plans.append((lane, cache.backend.plan(cache._stores[lane], arrays)))
        on_device = {lane: torch.from_numpy(table).to(device) for lane, table in tables.items()}
        return _GroupStep(torch.from_numpy(slots).to(device), on_device, plans)

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
        ranges = [(lane, r) for lane, r in found if any(a < b for a, b in r)]
        # Without exact fresh tokens the tail is never empty, and keeps the plan that a format without tiers needs.
        if self.fresh == "stored" or not self.tokens or any(a < b for a, b in tail):
            ranges.append((tiers.near, tail))
        return ranges

    # -- body ----------------------------------------------------------------------------------------------------

    def append(self, layer: int, key: Tensor, value: Tensor | None = None) -> None:
        """Quantize and store this step's K and V of one layer, once.

        ``key`` ``(tokens, kv_heads, key_dim)``, ``value`` ``(tokens, kv_heads, value_dim)``, packed in the order of
        :attr:`rows`; fp16, bf16 or fp32, any strides, on the cache's device. A latent (MLA) layer takes no value: it
        is the latent part of the key.
        """
        spec, group, local = self._locate(layer)
        if spec.shares is not None:
            raise StepError(f"layer {layer} reads the K/V of layer {spec.shares}; append there, attend here")
        if layer in self._appended:
            raise StepError(f"layer {layer} was already appended in this step")
        self._check_tensor("key", key, (self.tokens, spec.kv_heads, spec.key_dim))
        if spec.latent and value is not None:
            raise InvalidArgument(f"layer {layer} is latent: its V is the latent part of its K, pass value=None")
        if not spec.latent:
            self._check_tensor("value", value, (self.tokens, spec.kv_heads, spec.value_dim))
        fmt = self._cache.layout.groups[group].layout.format
        if fmt.rotate is not None:
            key = rotate(key, fmt.rotate, self._cache.layout.groups[group].layout.rotated_dim)
        if self.tokens:
            store = self._cache._stores[self._cache._tiers[group].near]
            self._cache.backend.append(store, local, key, value, self._groups[group].slots)
        if self.fresh == "exact":
            # Copies: the caller may write the next layer's K and V over these before attend. A rotation made one.
            key = key.clone() if fmt.rotate is None else key
            self._exact[layer] = (key, key[..., : spec.value_dim] if value is None else value.clone())
        self._appended.add(layer)

    def attend(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Attention:
        """Causal attention of this step's queries over everything stored, this step's tokens included.

        ``query`` ``(tokens, query_heads, key_dim)``. ``scale`` defaults to 1/sqrt(key_dim). ``softcap`` c turns a
        score s into c * tanh(s / c). ``sinks`` ``(query_heads,)`` are learned sink logits. The layer must have been
        appended in this step. A sink of -inf is none; one of NaN or +inf makes its own head's rows NaN and no other.
        """
        spec, group, local = self._locate(layer)
        owner = layer if spec.shares is None else spec.shares
        if owner not in self._appended:
            raise StepError(f"layer {owner} must be appended in this step before layer {layer} attends")
        self._check_tensor("query", query, (self.tokens, spec.query_heads, spec.key_dim))
        scale = 1.0 / math.sqrt(spec.key_dim) if scale is None else _float32("scale must be a finite number", scale)
        if softcap is not None:
            softcap = _float32(wanted := "softcap must be a positive finite number or None", softcap)
            if softcap < torch.finfo(torch.float32).smallest_normal:
                raise InvalidArgument(f"{wanted}, in float32's normal range, got {softcap!r}")
        if sinks is not None:
            self._check_tensor("sinks", sinks, (spec.query_heads,))
        self._check_features(
            group, window=spec.window is not None, softcap=softcap is not None, sinks=sinks is not None
        )
        layout = self._cache.layout.groups[group].layout
        if layout.format.rotate is not None:
            query = rotate(query, layout.format.rotate, layout.rotated_dim).to(query.dtype)
        exact = self._exact.get(owner)
        found = self._attend(group, local, query, exact, scale=scale, softcap=softcap, sinks=sinks)
        if layout.format.rotate is not None and layout.latent:  # V is the rotated latent part
            output = unrotate(found.output, layout.format.rotate, layout.rotated_dim).to(query.dtype)
            return Attention(output, found.lse)
        return found

    def _attend(
        self,
        group: int,
        local: int,
        query: Tensor,
        exact: tuple[Tensor, Tensor] | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Attention:
        """Attend every range of the group, and the step's own tokens where they are exact, and merge."""
        backend, stores, plans = self._cache.backend, self._cache._stores, self._groups[group].plans
        if len(plans) == 1 and (exact is None or not self.tokens):
            [(lane, plan)] = plans
            return Attention(
                *backend.attend(stores[lane], local, query, plan, scale=scale, softcap=softcap, sinks=sinks)
            )
        partials = [
            backend.attend(stores[lane], local, query, plan, scale=scale, softcap=softcap, partial=True)
            for lane, plan in plans
        ]
        if exact is not None and self.tokens:
            partials.append(self._attend_exact(group, query, *exact, scale=scale, softcap=softcap))
        out, lse = merge(partials, sinks)
        return Attention(out.to(query.dtype), lse)

    def _attend_exact(
        self, group: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Each sequence's queries over its own rows of this step's K and V, in float32."""
        layout = self._cache.layout.groups[group].layout
        found = [
            attend_sequence(
                _reader(key[rows], value[rows]),
                query[rows],
                kv_heads=layout.kv_heads,
                value_dim=layout.value_dim,
                page_size=1,
                query_position=0,
                kv_start=0,
                length=rows.stop - rows.start,
                window=layout.window,
                scale=scale,
                softcap=softcap,
                sinks=None,
            )
            for rows in self.rows.values()
            if rows.stop > rows.start
        ]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

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
        return self._cache._gather(group, local, self._groups[group].tables, spans, dtype)

    # -- exit ----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """End the step and keep it. Raises :class:`IncompleteStep`, after rolling back, if a layer was not appended."""
        self._check_open()
        missing = sorted(set(self._cache._stored_layers) - self._appended)
        if missing:
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
        for group, members in enumerate(cache.layout.groups):
            self._free_passed(group, members.layout)
        for sequence, count, ids, digests in zip(self._sequences, self._counts, self._ids, grown, strict=True):
            sequence._length += count
            if count:
                sequence._known_ids(ids)
            sequence._chain += digests
            cache._index(sequence)
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

    def _close(self) -> None:
        self._open = False
        self._cache._step = None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """copy, deepcopy and pickle: a transaction has one owner."""
        raise StepError("a step cannot be copied or pickled; end it and begin another with cache.step(...)")

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

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise StepError("this step has ended; begin a new one with cache.step(...)")

    def _locate(self, layer: int) -> tuple[LayerSpec, int, int]:
        self._check_open()
        group, local = self._cache._locate(layer)
        return self._cache.layout.layers[layer], group, local

    def _check_tensor(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} must be a torch tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise InvalidArgument(f"{name} is a {kind} tensor; give a dense one of shape {shape} (.to_dense())")
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(f"{name} has shape {tuple(tensor.shape)}, this layer and step need {shape}")
        if tensor.dtype not in DTYPES.values():
            raise InvalidArgument(f"{name} has dtype {tensor.dtype}; allowed: float32, bfloat16, float16")
        device = self._cache.backend.torch_device
        if tensor.device.type != device.type or (
            device.index is not None and device.type != "cpu" and tensor.device.index != device.index
        ):
            raise InvalidArgument(
                f"{name} is on {tensor.device}, the cache is on {device}; move it with .to({str(device)!r})"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument(
                f"{name} requires grad; a cache is not differentiable: use torch.no_grad() or .detach()"
            )

    def _check_features(self, group: int, **wanted: bool) -> None:
        lacking = [n for n, used in wanted.items() if used and not self._cache._has_feature(group, n)]
        if lacking:
            raise Unsupported(
                f"backend {self._cache.backend.name} does not honour {', '.join(lacking)} for "
                f"{self._cache.layout.groups[group].layout.format}",
            )


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
            counts.append(whole_number(f"the number of new tokens of {sequence!r}", int(given), 0, most))
            ids.append(None)
        else:
            ids.append(read_ids(given))
            counts.append(len(ids[-1] or ()))
    return list(tokens), counts, ids


def _float32(wanted: str, value: object) -> float:
    """A finite number that float32 can hold; for anything else :class:`InvalidArgument`, which says what is wanted."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, a tensor of many, 10**400
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise InvalidArgument(f"{wanted} that float32 can hold, got {show(value)}")
    return number


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


def _reader(key: Tensor, value: Tensor) -> Read:
    """Rows read as pages of one token."""
    return lambda first, last: (key[first:last, None].float(), value[first:last, None].float())


def _table(pages: list[list[int]]) -> NDArray[np.int32]:
    """Page lists as a table padded with the spare page."""
    table = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, held in zip(table, pages, strict=True):
        row[: len(held)] = held
    return table


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
