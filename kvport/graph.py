"""Steps that are recorded once and replayed: the host begins and commits each, the device repeats what it was told.

A :class:`Graph` owns slots, tables and lengths that stay where they are, sized for the largest step it takes. A replay
begins a step as ever (pages are reserved, all or nothing; what has grown old is sealed; shared pages are copied),
writes its arrays into those buffers, repeats the recorded work over them, and commits. The recording itself runs over
padding alone: it reserves no page, writes no slot and touches no sequence.

Rows past a step's own tokens are padding: their slots are -1, their outputs zeros and their LSE -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from kvport.arguments import show, whole_number
from kvport.backend import Limits, StepArrays
from kvport.body import Body, Fresh, GroupArrays
from kvport.errors import IncompleteStep, InvalidArgument, StepError, Unsupported
from kvport.sequences import Sequence
from kvport.step import Step

if TYPE_CHECKING:
    from kvport.cache import PagedCache


class Replay(NamedTuple):
    """One replayed step.

    ``result`` is what the body returned: tensors that the next replay of the same graph overwrites. ``rows`` says which
    of their rows belong to which sequence, ``tokens`` how many are not padding.
    """

    result: Any
    rows: dict[Sequence, slice]
    tokens: int


class GraphBody(Body):
    """What a graph's body receives: append and attend as in a step, with ``tokens`` rows, the graph's maximum."""

    _fixed = True

    def gather(self, layer: int, dtype: torch.dtype | None = None) -> NoReturn:
        """Refused: what gather returns is as long as the history, which no recording can follow."""
        raise Unsupported(
            "gather has no fixed shape and cannot be part of a graph; gather in an ordinary step, or attend"
        )


class Graph:
    """A recorded step of one cache. Made by :meth:`PagedCache.graph`.

    ::

        graph = cache.graph(max_seqs=8, max_tokens=8, max_pages=32, max_query=1)
        outputs = graph.capture(body)          # body(step) appends and attends every layer over tensors of 8 rows
        ...
        key[:, :2], value[:, :2], query[:, :2] = ...      # inputs stay where they were when the body was recorded
        replay = graph.replay({a: 1, b: 1})    # reserve, fill the buffers, replay, commit
    """

    def __init__(
        self, cache: PagedCache, *, max_seqs: int, max_tokens: int, max_pages: int, max_query: int | None
    ) -> None:
        max_query = max_tokens if max_query is None else max_query
        given = {"max_seqs": max_seqs, "max_tokens": max_tokens, "max_pages": max_pages, "max_query": max_query}
        for name, value in given.items():
            whole_number(name, value, 1)
        for group in range(len(cache.layout.groups)):
            cache._require(group, {"graph"}, "make a graph over")
        self.limits = Limits(max_seqs, max_tokens, min(max_query, max_tokens), max_pages)
        self._cache = cache
        self._body = GraphBody(cache, max_tokens)
        # Every replay writes these, whatever mode it runs in: tensors made in inference mode can only be written there.
        with torch.inference_mode(False):
            self._body._groups = [self._fixed(group) for group in range(len(cache.layout.groups))]
        self._function: Callable[[GraphBody], Any] | None = None
        self._repeat: Callable[[], Any] | None = None

    def capture(self, body: Callable[[GraphBody], Any]) -> Any:
        """Record ``body(step)``, and return what it returned.

        It must append every layer exactly once over tensors of ``max_tokens`` rows that will stay where they are,
        and may do whatever else a recording can hold. It runs more than once before the first replay; nothing it does
        to the cache then has an effect. Sequences, pages and counts stay as they are.

        Raises :class:`IncompleteStep` where a layer is not appended, and :class:`StepError` where the device cannot
        record the body. The graph has nothing to replay then.
        """
        cache = self._cache
        cache._open("capture a graph of")
        cache._outside_step("capture a graph")
        if not callable(body):
            raise InvalidArgument(f"capture takes a function of one argument, the graph's step; got {show(body)}")
        if cache.backend.recording():
            raise StepError("a recording is in progress already; capture the graph outside it")
        self._repeat, self._function = None, body
        for group in range(len(cache.layout.groups)):
            self._empty(group)
        cache._step = self._body
        try:
            result = self._once()  # compiles kernels and makes scratch, which a recording may not
            repeat = cache.backend.record(self._once)
        finally:
            cache._step = None
        self._repeat = repeat
        return result

    def replay(self, tokens: Mapping[Sequence, int | SequenceOf[int]], *, fresh: Fresh = "stored") -> Replay:
        """Take one step: ``{sequence: n}`` or ``{sequence: token ids}``, in the order of the packed rows.

        Reads its inputs from the tensors that the body was recorded over. Raises :class:`OutOfPages` where the pools
        cannot hold it, :class:`InvalidArgument` where it is larger than the graph, and :class:`Unsupported` for
        ``fresh="exact"``; nothing changed then, and nothing ran.
        """
        cache = self._cache
        cache._open("replay a graph of")
        cache._outside_step("replay a graph")
        if self._repeat is None:
            raise StepError("this graph has recorded nothing; call graph.capture(body) first")
        step = _ReplayedStep(self, tokens, fresh)
        cache._step = step
        with step:
            result = self._repeat()
            step._appended.update(cache._stored_layers)  # every one of them, as the recording was checked to do
        return Replay(result, step.rows, step.tokens)

    def _once(self) -> Any:
        """Run the body over what the buffers hold now."""
        body, function = self._body, self._function
        assert function is not None
        body._appended.clear()
        body._open = True
        try:
            result = function(body)
            missing = body._missing()
        finally:
            body._open = False
        if missing:
            raise IncompleteStep(f"the graph's body did not append layers {missing}; every layer is appended once")
        return result

    # -- buffers -------------------------------------------------------------------------------------------------

    def _fixed(self, group: int) -> GroupArrays:
        cache, tiers = self._cache, self._cache._tiers[group]
        # The ranges of Step._ranges, all of them: sink and pinned pages, sealed pages, the rest.
        lanes = [tiers.near, tiers.far, tiers.near] if tiers.tiered else [tiers.near]
        slots = torch.full((self.limits.tokens,), -1, dtype=torch.int64, device="cpu")
        plans = [(lane, cache.backend.fixed_plan(cache._stores[lane], self.limits)) for lane in lanes]
        return GroupArrays(cache.backend.upload(slots), plans)

    def _empty(self, group: int) -> None:
        """Padding alone."""
        no_slots = torch.empty(0, dtype=torch.int64, device="cpu")
        self._fill(group, no_slots, [self.limits.padding()] * len(self._body._groups[group].plans))

    def _fill(self, group: int, slots: Tensor, ranges: SequenceOf[StepArrays]) -> None:
        """Write one step's arrays into the buffers of a group, padded to their shape."""
        backend, stores, buffers = self._cache.backend, self._cache._stores, self._body._groups[group]
        padded = torch.full((self.limits.tokens,), -1, dtype=torch.int64, device="cpu")
        padded[: slots.shape[0]] = slots
        backend.upload(padded, buffers.slots)
        for (lane, plan), arrays in zip(buffers.plans, ranges, strict=True):
            backend.refill(stores[lane], plan, self._pad(arrays))

    def _pad(self, arrays: StepArrays) -> StepArrays:
        full = self.limits.padding()
        sequences, pages = arrays.page_table.shape
        full.page_table[:sequences, :pages] = arrays.page_table
        full.kv_start[:sequences] = arrays.kv_start
        full.lengths[:sequences] = arrays.lengths
        full.query_positions[:sequences] = arrays.query_positions
        full.query_starts[: sequences + 1] = arrays.query_starts
        full.query_starts[sequences + 1 :] = arrays.query_starts[-1]
        return full


class _ReplayedStep(Step):
    """The host's side of a replay: a step whose arrays go into the graph's buffers."""

    _fixed = True

    def __init__(self, graph: Graph, tokens: Mapping[Sequence, int | SequenceOf[int]], fresh: Fresh) -> None:
        self._graph = graph
        super().__init__(graph._cache, tokens, fresh)

    @property
    def _body(self) -> Body:
        return self._graph._body

    def _admit(self) -> None:
        limits, size = self._graph.limits, self._cache.layout.page_size
        if self.fresh == "exact":
            raise Unsupported('a graph reads its own tokens as they are stored: fresh="exact" needs an ordinary step')
        pages = [-(-(s.length + n) // size) for s, n in zip(self._sequences, self._counts, strict=True)]
        wanted = {
            "max_seqs": (len(self._sequences), limits.sequences, "sequences"),
            "max_tokens": (self.tokens, limits.tokens, "new tokens"),
            "max_query": (max(self._counts), limits.query_tokens, "new tokens of one sequence"),
            "max_pages": (max(pages), limits.pages, "pages of one sequence"),
        }
        if over := [f"{n} {what}, {name} is {most}" for name, (n, most, what) in wanted.items() if n > most]:
            raise InvalidArgument(
                f"this step is larger than the graph ({'; '.join(over)}); make the graph larger, or take an ordinary "
                "step"
            )
        for group in range(len(self._cache.layout.groups)):  # what the recorded body will attend to
            self._cache._require(group, self._phases, "attend to")

    def _place(self, group: int, slots: Tensor, ranges: list[tuple[int, StepArrays]]) -> GroupArrays:
        self._graph._fill(group, slots, [arrays for _, arrays in ranges])
        return self._graph._body._groups[group]
