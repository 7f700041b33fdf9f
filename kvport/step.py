"""One step: a transaction that appends the same new tokens to every layer and attends over them.

Begin reserves every page the step can need, all or nothing, and makes the copies that copy-on-write asks for. The
body appends and attends, layer by layer. Commit takes the new pages and lengths into the sequences and drops what
they replaced; rollback gives the new pages back. Sequences are not touched before commit, so leaving by an exception
leaves every one of them, and every reference count, as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvport.backend import Plan, StepArrays
from kvport.errors import IncompleteStep, InvalidArgument, SequenceError, StepError, Unsupported
from kvport.formats import DTYPES
from kvport.layout import GroupLayout, LayerSpec
from kvport.sequences import Sequence

if TYPE_CHECKING:
    from kvport.cache import PagedCache


class Attention(NamedTuple):
    """What attend returns.

    ``output`` ``(tokens, query_heads, value_dim)`` in the query's dtype; ``lse`` ``(tokens, query_heads)`` float32.
    """

    output: Tensor
    lse: Tensor


@dataclass
class _GroupStep:
    """What the step does in one group. ``pages[s]`` is sequence s's page list as it will be after commit."""

    pages: list[list[int]]
    taken: list[int]
    replaced: list[int]  # shared open pages that were copied; their references drop at commit
    slots: Tensor
    table: Tensor  # (sequences, max_pages) int32 on the host
    plan: Plan


class Step:
    """Made by :meth:`PagedCache.step`; use it in a ``with`` block, or call :meth:`commit` / :meth:`rollback`.

    Rows of packed tensors follow the order of the mapping given to ``step``: ``rows[sequence]`` is the slice that
    belongs to a sequence.
    """

    def __init__(self, cache: PagedCache, tokens: Mapping[Sequence, int | SequenceOf[int]]) -> None:
        self._cache = cache
        self._sequences, self._counts, self._ids = _read_tokens(cache, tokens)
        starts = np.concatenate([[0], np.cumsum(self._counts, dtype=np.int64)]).tolist()
        self.rows = {s: slice(a, b) for s, a, b in zip(self._sequences, starts, starts[1:], strict=False)}
        self.tokens: int = starts[-1]
        self._appended: set[int] = set()
        self._open = False
        self._groups = self._begin(starts)
        self._open = True

    # -- begin ---------------------------------------------------------------------------------------------------

    def _begin(self, starts: list[int]) -> list[_GroupStep]:
        cache = self._cache
        needs = [self._pages_needed(group) for group in range(len(cache.layout.groups))]
        taken = cache._take_pages(needs, "the step")
        try:
            return [self._prepare(group, list(pages), starts) for group, pages in enumerate(taken)]
        except BaseException:
            for pool, pages in zip(cache._pools, taken, strict=True):
                pool.release(pages)
            raise

    def _pages_needed(self, group: int) -> int:
        layout = self._cache.layout.groups[group].layout
        return sum(
            layout.pages_for(s.length + n) - layout.pages_for(s.length) + self._must_copy(group, s, n)
            for s, n in zip(self._sequences, self._counts, strict=True)
        )

    def _must_copy(self, group: int, sequence: Sequence, count: int) -> bool:
        """Whether the page that the first new token goes into is shared."""
        if count == 0 or sequence.length % self._cache.layout.page_size == 0:
            return False
        return self._cache._pools[group].references(sequence._pages[group][-1]) > 1

    def _prepare(self, group: int, taken: list[int], starts: list[int]) -> _GroupStep:
        cache = self._cache
        layout, store = cache.layout.groups[group].layout, cache._stores[group]
        fresh = iter(taken)
        replaced: list[int] = []
        copies: list[int] = []
        pages: list[list[int]] = []
        for sequence, count in zip(self._sequences, self._counts, strict=True):
            held = list(sequence._pages[group])
            if self._must_copy(group, sequence, count):
                replaced.append(held[-1])
                held[-1] = next(fresh)
                copies.append(held[-1])
            held.extend(next(fresh) for _ in range(layout.pages_for(sequence.length + count) - len(held)))
            pages.append(held)
        if replaced:
            cache.backend.copy_pages(store, replaced, copies)
        table = np.zeros((len(pages), max((len(p) for p in pages), default=0)), dtype=np.int32)
        slots = np.empty(self.tokens, dtype=np.int64)
        for s, (held, sequence) in enumerate(zip(pages, self._sequences, strict=True)):
            table[s, : len(held)] = held
            position = np.arange(sequence.length, sequence.length + self._counts[s])
            slots[starts[s] : starts[s + 1]] = (
                table[s, position // layout.page_size].astype(np.int64) * layout.page_size + position % layout.page_size
            )
        lengths = [s.length for s in self._sequences]
        host = StepArrays(
            page_table=torch.from_numpy(table),
            kv_start=_int32([s._passed[group] * layout.page_size for s in self._sequences]),
            lengths=_int32([n + c for n, c in zip(lengths, self._counts, strict=True)]),
            query_starts=_int32(starts),
            query_positions=_int32(lengths),
        )
        return _GroupStep(
            pages,
            taken,
            replaced,
            torch.from_numpy(slots).to(cache.backend.torch_device),
            host.page_table,
            cache.backend.plan(store, host),
        )

    # -- body ----------------------------------------------------------------------------------------------------

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Quantize and store this step's K and V of one layer, once.

        ``key`` ``(tokens, kv_heads, key_dim)``, ``value`` ``(tokens, kv_heads, value_dim)``, packed in the order of
        :attr:`rows`; fp16, bf16 or fp32, any strides, on the cache's device.
        """
        spec, group, local = self._locate(layer)
        if spec.shares is not None:
            raise StepError(f"layer {layer} reads the K/V of layer {spec.shares}; append there, attend here")
        if layer in self._appended:
            raise StepError(f"layer {layer} was already appended in this step")
        self._check_tensor("key", key, (self.tokens, spec.kv_heads, spec.key_dim))
        self._check_tensor("value", value, (self.tokens, spec.kv_heads, spec.value_dim))
        if self.tokens:
            self._cache.backend.append(self._cache._stores[group], local, key, value, self._groups[group].slots)
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
        appended in this step.
        """
        spec, group, local = self._locate(layer)
        owner = layer if spec.shares is None else spec.shares
        if owner not in self._appended:
            raise StepError(f"layer {owner} must be appended in this step before layer {layer} attends")
        self._check_tensor("query", query, (self.tokens, spec.query_heads, spec.key_dim))
        if scale is None:
            scale = 1.0 / math.sqrt(spec.key_dim)
        elif not math.isfinite(scale):
            raise InvalidArgument(f"scale must be a finite number, got {scale!r}")
        if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
            raise InvalidArgument(f"softcap must be a positive finite number or None, got {softcap!r}")
        if sinks is not None:
            self._check_tensor("sinks", sinks, (spec.query_heads,))
        self._check_features(
            group, window=spec.window is not None, softcap=softcap is not None, sinks=sinks is not None
        )
        state = self._groups[group]
        out, lse = self._cache.backend.attend(
            self._cache._stores[group], local, query, state.plan, scale=scale, softcap=softcap, sinks=sinks
        )
        return Attention(out, lse)

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
        lengths = [s.length + n for s, n in zip(self._sequences, self._counts, strict=True)]
        starts = [s._passed[group] * self._cache.layout.page_size for s in self._sequences]
        return self._cache._gather(group, local, self._groups[group].plan.device.page_table, starts, lengths, dtype)

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
        for group, state in enumerate(self._groups):
            for sequence, pages in zip(self._sequences, state.pages, strict=True):
                sequence._pages[group] = pages
            cache._pools[group].release(state.replaced)
            self._free_passed(group, cache.layout.groups[group].layout)
        for sequence, count, ids in zip(self._sequences, self._counts, self._ids, strict=True):
            sequence._length += count
            if count:
                sequence._known_ids(ids)
                cache._index(sequence)
        self._close()

    def _free_passed(self, group: int, layout: GroupLayout) -> None:
        """Drop pages that the window has passed, judged at the step's begin, so that the step can be truncated."""
        if layout.window is None:
            return
        for sequence in self._sequences:
            keep_from = max(0, sequence.length - layout.window + 1) // layout.page_size
            pages = sequence._pages[group]
            for index in range(sequence._passed[group], keep_from):
                self._cache._pools[group].release([pages[index]])
                pages[index] = 0
            sequence._passed[group] = max(sequence._passed[group], keep_from)

    def rollback(self) -> None:
        """End the step and leave every sequence, page and count as before it."""
        self._check_open()
        for pool, state in zip(self._cache._pools, self._groups, strict=True):
            pool.release(state.taken)
        self._close()

    def _close(self) -> None:
        self._open = False
        self._cache._step = None

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

    def _check_tensor(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} must be a torch tensor, got {type(tensor).__name__}")
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(f"{name} has shape {tuple(tensor.shape)}, this layer and step need {shape}")
        if tensor.dtype not in DTYPES.values():
            raise InvalidArgument(f"{name} has dtype {tensor.dtype}; allowed: float32, bfloat16, float16")
        device = self._cache.backend.torch_device
        if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
            raise InvalidArgument(
                f"{name} is on {tensor.device}, the cache is on {device}; move it with .to({str(device)!r})"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument(
                f"{name} requires grad; a cache is not differentiable: use torch.no_grad() or .detach()"
            )

    def _check_features(self, group: int, **wanted: bool) -> None:
        lacking = [n for n, used in wanted.items() if used and n not in self._cache._supports[group].features]
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
            if given < 0:
                raise InvalidArgument(f"{sequence!r}: the number of new tokens must be >= 0, got {given}")
            counts.append(given)
            ids.append(None)
        else:
            ids.append(_read_ids(given))
            counts.append(len(ids[-1] or ()))
    return list(tokens), counts, ids


def _read_ids(given: object) -> list[int]:
    """Token ids from a list, array or 1-d integer tensor."""
    try:
        array = np.asarray(given)
        if array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            return [int(i) for i in array]
    except (TypeError, ValueError, RuntimeError):
        pass
    raise InvalidArgument(f"token ids are a 1-d run of integers, or give their number; got {given!r:.80}")


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
