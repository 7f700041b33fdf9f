"""Steps that are recorded once and replayed, under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvport.sequences import Sequence as CacheSequence
from kvport_conformance.bench import Bench
from kvport_conformance.oracle_floats import Array
from kvport_conformance.served import Served
from kvport_conformance.tensors import DTYPES, poisoned_allocations, to_torch
from kvport_conformance.verdicts import Disagreement

__tracebackhide__ = True  # as in bench.py


class Replayed(Served):
    """A served cache and one graph over it, whose inputs lie in tensors that stay and are NaN wherever they may be."""

    def __init__(
        self,
        bench: Bench,
        pages: int,
        *,
        seqs: int,
        tokens: int,
        query: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        super().__init__(bench, pages)
        shape, device = self.group, bench.backend.torch_device
        self.how: dict[str, Any] = {"softcap": softcap, "sinks": sinks}
        self.logits = None if sinks is None else torch.from_numpy(sinks.copy()).to(device)
        made: dict[str, tuple[int, int]] = {
            "key": (shape.kv_heads, shape.key_dim),
            "value": (shape.kv_heads, shape.value_dim),
            "query": (shape.query_heads, shape.key_dim),
        }
        self.inputs = {
            name: torch.full((shape.layers, tokens, *dims), torch.nan, dtype=DTYPES[bench.dtype], device=device)
            for name, dims in made.items()
        }
        self.graph = self.cache.graph(max_seqs=seqs, max_tokens=tokens, max_query=query, max_pages=pages)
        before = [plane.clone() for plane in self._beyond_the_spare()]
        with poisoned_allocations():
            self.graph.capture(self._body)
        for old, new in zip(before, self._beyond_the_spare(), strict=True):
            if not torch.equal(old, new):
                raise Disagreement("recording a step, which holds no token, changed pages")

    def _beyond_the_spare(self) -> list[torch.Tensor]:
        """Every byte but those of page 0."""
        buffers = self.bench.backend.buffers(self.cache._stores[0]).values()
        return [b.narrow(1, 1, b.shape[1] - 1).contiguous().view(torch.uint8) for b in buffers]

    def _body(self, step: Any) -> list[Any]:
        found = []
        for layer in range(self.layout_layers):
            key, value, query = (self.inputs[name][layer] for name in ("key", "value", "query"))
            step.append(layer, key, None if self.group.latent else value)
            found.append(step.attend(layer, query, softcap=self.how["softcap"], sinks=self.logits))
        return found

    def replay(
        self,
        tokens: Mapping[CacheSequence, Sequence[int]],
        *,
        ids: Mapping[CacheSequence, Sequence[int]] | None = None,
    ) -> None:
        """As :meth:`step`, by the graph: write the inputs, replay, judge one layer's rows and all layers' padding."""
        given = {s: (list(ids[s]) if ids and s in ids else len(numbers)) for s, numbers in tokens.items()}
        packed = np.asarray([n for numbers in tokens.values() for n in numbers], np.int64)
        count, device = len(packed), self.bench.backend.torch_device
        queries = [
            self.bench.queries(self.group, count, stream=f"layer{layer}.{self._turn}")
            for layer in range(self.layout_layers)
        ]
        for name, rows in self.inputs.items():
            rows.fill_(torch.nan)
            for layer in range(self.layout_layers):
                source = queries[layer] if name == "query" else self.contents[layer].given[name][packed]
                rows[layer, :count] = to_torch(source, self.bench.dtype, device)
        with poisoned_allocations():
            replay = self.graph.replay(given)
        if replay.tokens != count or list(replay.rows) != list(tokens):
            raise RuntimeError("the graph took other rows than it was given: a fault of kvport")
        for layer, (out, lse) in enumerate(replay.result):
            gives = self.bench.gives_lse(self.group)
            if bool((out[count:] != 0).any()) or (gives and not bool((lse[count:] == -torch.inf).all())):
                raise Disagreement(f"layer {layer}: rows of padding must be zeros with LSE -inf")
        judged = self._turn % self.layout_layers
        answer = tuple(part[:count] for part in replay.result[judged])
        self.judge(answer, judged, tokens, queries[judged], **self.how)
        self._turn += 1
        for sequence, numbers in tokens.items():
            self.tokens[sequence].extend(numbers)
