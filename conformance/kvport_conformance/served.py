"""A cache under test and the judge's own account of every sequence in it.

:class:`Served` opens a :class:`kvport.cache.PagedCache` on the backend of a bench, runs steps through it, and judges
everything that comes back: the pages at rest, and every output and LSE. It replays the rules of tiers for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvport.cache import PagedCache
from kvport.errors import KVPortError, Unsupported
from kvport.layout import CacheLayout, LayerSpec
from kvport.sequences import Sequence as CacheSequence
from kvport_conformance import judge
from kvport_conformance.axes import Geometry, parse
from kvport_conformance.bench import FILL, Bench, check_answer, judge_rows
from kvport_conformance.content import Content, Ids
from kvport_conformance.oracle_floats import BF16, FP16, Array
from kvport_conformance.tensors import DTYPES, fill_bytes, plane_to_numpy, poisoned_allocations, to_torch

__tracebackhide__ = True  # as in bench.py


def cache_layout(format_text: str, shape: Geometry) -> CacheLayout:
    """Equal layers of a geometry in a format."""
    spec = LayerSpec(
        kv_heads=shape.kv_heads,
        query_heads=shape.query_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        window=shape.window,
        latent=shape.latent,
    )
    return CacheLayout((spec,) * shape.layers, parse(format_text), shape.page_size, DTYPES[shape.dtype])


def turned_queries(content: Content, query: Array, dtype: str) -> Array:
    """Queries as they attend: behind the rotation of K where there is one, in float32, rounded to their dtype."""
    if content.rotate is None:
        return query
    small = {"float32": None, "float16": FP16, "bfloat16": BF16}[dtype]
    turned = content.turned(query)
    return turned if small is None else small.round(turned)


def turned_values(content: Content) -> tuple[int, int] | None:
    """The rotation that V is behind: a latent layer's is that of its K's latent part."""
    return (content.rotate, content.rotated_dim) if content.latent and content.rotate is not None else None


def recount(cache: PagedCache) -> None:
    """Have a cache compare its page counts with what holds them."""
    try:
        cache.check()
    except Unsupported:  # raised after the counts agreed: which pages met a NaN is not declared, and asked elsewhere
        pass
    except KVPortError as error:
        raise RuntimeError(str(error)) from error


class Served:
    """A cache of equal layers without tiers, and the tokens that each of its sequences must hold.

    ``tokens[sequence]`` are token numbers by position, the same numbers in every layer's table.
    """

    def __init__(self, bench: Bench, pages: int, *, geometry: Geometry | None = None, share: bool = True) -> None:
        self.bench = bench
        self.group = bench.layout(geometry=geometry)
        shape = geometry or bench.geometry
        self.layout = cache_layout(bench.case.format, shape)
        rotate = self.layout.format.rotate
        self.contents = [bench.content(self.group, layer, rotate) for layer in range(shape.layers)]
        scales = {layer: content.scales() for layer, content in enumerate(self.contents)}
        given = scales if self.group.format.calibrated else None
        with bench.judging_scales(self.group, None if given is None else given.values()):
            self.cache = PagedCache(bench.backend, self.layout, [pages], scales=given, share_prefixes=share)
        # Suites may look behind the curtain where users may not: nothing unwritten is to be trusted.
        for store in self.cache._stores:
            for buffer in bench.backend.buffers(store).values():
                fill_bytes(buffer, FILL)
        self.tokens: dict[CacheSequence, list[int]] = {}
        self._turn = 0

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    # -- sequences -----------------------------------------------------------------------------------------------

    def sequence(self) -> CacheSequence:
        made = self.cache.sequence()
        self.tokens[made] = []
        return made

    def fork(self, sequence: CacheSequence) -> CacheSequence:
        made = sequence.fork()
        self.tokens[made] = list(self.tokens[sequence])
        return made

    def adopt(self, sequence: CacheSequence, tokens: Sequence[int]) -> CacheSequence:
        """Take a sequence that the cache made by itself (a prefix match, an import) and say what it must hold."""
        self.tokens[sequence] = list(tokens[: sequence.length])
        return sequence

    def truncate(self, sequence: CacheSequence, length: int) -> None:
        sequence.truncate(length)
        del self.tokens[sequence][length:]

    def free(self, sequence: CacheSequence) -> None:
        sequence.free()
        del self.tokens[sequence]

    def moved(self, sequence: CacheSequence, pages: int) -> tuple[Served, CacheSequence]:
        """The sequence's page image inserted into another cache, which knows the same tokens."""
        other = Served(self.bench, pages)
        other.contents = self.contents
        return other, other.adopt(other.cache.insert(self.cache.export(sequence)), self.tokens[sequence])

    # -- tokens --------------------------------------------------------------------------------------------------

    def make(self, count: int, stream: str, start: int = 0) -> list[int]:
        """Numbers of ``count`` new tokens of a named stream, the same in every layer."""
        numbers: Ids | None = None
        for layer, content in enumerate(self.contents):
            key, value = self.bench.tokens(self.group, layer, count, start=start, stream=stream)
            numbers = content.add(key, value)
        assert numbers is not None
        return [int(n) for n in numbers]

    def step(
        self,
        tokens: Mapping[CacheSequence, Sequence[int]],
        *,
        ids: Mapping[CacheSequence, Sequence[int]] | None = None,
        attend: bool = True,
        **how: Any,
    ) -> None:
        """Append these token numbers to their sequences in one step, attend and judge.

        Every layer is appended; one attends, another one each step (the pages of all are judged by :meth:`check`).
        ``ids`` are the token ids by which the cache may know them.
        """
        given = {s: (list(ids[s]) if ids and s in ids else len(numbers)) for s, numbers in tokens.items()}
        packed = np.asarray([n for numbers in tokens.values() for n in numbers], np.int64)
        with self.cache.step(given) as step:
            for layer in range(self.layout_layers):
                self.append(step, layer, packed)
                if attend and layer == self._turn % self.layout_layers:
                    self.attend(step, layer, tokens, **how)
        self._turn += 1
        for sequence, numbers in tokens.items():
            self.tokens[sequence].extend(numbers)

    @property
    def layout_layers(self) -> int:
        return len(self.layout.layers)

    def append(self, step: Any, layer: int, numbers: Ids) -> None:
        device = self.bench.backend.torch_device
        given = self.contents[layer].given
        for name in ("key", "value"):
            self.bench.figures.given(f"{name} {self.bench.dtype}", given[name][numbers])
        key, value = (to_torch(given[name][numbers], self.bench.dtype, device) for name in ("key", "value"))
        with poisoned_allocations():
            step.append(layer, key, None if self.group.latent else value)

    def attend(
        self,
        step: Any,
        layer: int,
        tokens: Mapping[CacheSequence, Sequence[int]],
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        """Attend this step's queries of one layer and judge them, each sequence over its own tokens."""
        count = sum(len(numbers) for numbers in tokens.values())
        query = self.bench.queries(self.group, count, stream=f"layer{layer}")
        self.bench.figures.given(f"query {self.bench.dtype}", query)
        device = self.bench.backend.torch_device
        logits = None if sinks is None else torch.from_numpy(sinks.copy()).to(device)
        with poisoned_allocations():
            answer = step.attend(
                layer, to_torch(query, self.bench.dtype, device), scale=scale, softcap=softcap, sinks=logits
            )
        self.judge(answer, layer, tokens, query, scale=scale, softcap=softcap, sinks=sinks)

    def judge(
        self,
        answer: Any,
        layer: int,
        tokens: Mapping[CacheSequence, Sequence[int]],
        query: Array,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        """Judge what attend gave for these queries, each sequence over its own tokens."""
        out, lse = check_answer(answer, len(query), self.group, DTYPES[self.bench.dtype])
        given = {
            "scale": 1.0 / math.sqrt(self.group.key_dim) if scale is None else scale,
            "softcap": softcap,
            "window": self.group.window,
            "sinks": sinks,
        }
        content = self.contents[layer]
        query = turned_queries(content, query, self.bench.dtype)
        first = 0
        for s, (sequence, numbers) in enumerate(tokens.items()):
            rows = slice(first, first := first + len(numbers))
            held = [*self.tokens[sequence], *numbers]
            judge_rows(
                (out[rows], lse[rows]),
                query[rows],
                content.decoded["key"][held],
                content.decoded["value"][held],
                len(held) - len(numbers),
                given,
                self.bench.dtype,
                f"layer {layer}, sequence {s} of {len(tokens)} (length {len(held)}, {len(numbers)} query rows)",
                self.bench.figures,
                lse=self.bench.gives_lse(self.group),
                weight_error=self.bench.weight_error,
                tokens=(content, np.asarray(held, np.int64)),
                turned=turned_values(content),
            )

    # -- at rest -------------------------------------------------------------------------------------------------

    def check(self, *sequences: CacheSequence) -> None:
        """Compare the exported pages of these sequences (all, where none is named) with what they must hold."""
        for sequence in sequences or tuple(self.tokens):
            held = np.asarray(self.tokens[sequence], np.int64)
            if sequence.length != len(held):
                raise RuntimeError(f"{sequence!r} must hold {len(held)} tokens: a fault of kvport or of the suite")
            image = self.cache.export(sequence)
            for layer, planes in image.layers.items():
                arrays = {name: plane_to_numpy(tensor) for name, tensor in planes.items()}
                places = [f"{sequence!r}, layer {layer}, position {p}" for p in range(len(held))]
                judge.judge_planes(
                    self.contents[layer],
                    held,
                    {n: a.reshape(-1, *a.shape[2:])[: len(held)] for n, a in arrays.items()},
                    places,
                    self.bench.figures,
                    exactness=self.bench.exactness,
                )
        recount(self.cache)

    def digests(self, sequence: CacheSequence) -> Any:
        """Digests of a sequence's codes and scales by layer."""
        return self.cache.export(sequence).digests()
