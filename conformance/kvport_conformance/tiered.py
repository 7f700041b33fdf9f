"""A cache whose format keeps some tokens in higher precision, and the judge's replay of which those are.

The rule is replayed from the contract, not asked of the cache: with page size P, committed length L at a step's begin
and head = the larger of sink and pin, the first ceil(head / P) pages stay near, pages after them are far up to
``sealed = max(sealed before, floor((L - recent) / P) * P)``, everything later is near. A page that seals is encoded
from what the near page held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvport.cache import PagedCache
from kvport.formats import CacheFormat, TensorFormat
from kvport.sequences import Sequence as CacheSequence
from kvport_conformance import judge
from kvport_conformance.axes import parse
from kvport_conformance.bench import FILL, Bench, check_answer, judge_rows
from kvport_conformance.content import Content, Ids
from kvport_conformance.oracle_floats import Array
from kvport_conformance.served import cache_layout, recount, turned_queries, turned_values
from kvport_conformance.tensors import DTYPES, fill_bytes, plane_to_numpy, poisoned_allocations, to_torch

FLOAT_CODES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

__tracebackhide__ = True  # as in bench.py


class Tiered:
    """Sequences of a tiered cache. ``near[s]`` and ``far[s]`` are token numbers by position; far is -1 where near."""

    def __init__(self, bench: Bench, pages: int, near_pages: int) -> None:
        self.bench = bench
        self.format = parse(bench.case.format)
        shape = bench.geometry
        near = self.format.near or TensorFormat(FLOAT_CODES[shape.dtype])
        self.far_layout = bench.layout(tiered=True)
        rope = None if self.format.rope is None else near
        self.near_layout = bench.layout(str(CacheFormat(near, near, rope=rope)), tiered=True)
        self.far_contents = [bench.content(self.far_layout, layer) for layer in range(shape.layers)]
        # Rows are turned before they reach a page: near pages hold them turned, and sealing turns nothing.
        self.near_contents = [
            bench.content(self.near_layout, layer, self.format.rotate) for layer in range(shape.layers)
        ]
        layout = cache_layout(bench.case.format, shape)
        scales = {layer: content.scales() for layer, content in enumerate(self.far_contents)}
        given = scales if self.far_layout.format.calibrated else None
        with bench.judging_scales(self.far_layout, None if given is None else given.values()):
            self.cache = PagedCache(bench.backend, layout, [pages, near_pages], scales=given)
        for store in self.cache._stores:
            for buffer in bench.backend.buffers(store).values():
                fill_bytes(buffer, FILL)
        self.near: dict[CacheSequence, list[int]] = {}
        self.far: dict[CacheSequence, list[int]] = {}
        self.pins: dict[CacheSequence, int] = {}
        self.sealed: dict[CacheSequence, int] = {}
        self._encoded: dict[tuple[int, ...], list[int]] = {}
        self._turn = 0

    @property
    def page_size(self) -> int:
        return self.bench.geometry.page_size

    # -- sequences -----------------------------------------------------------------------------------------------

    def sequence(self, pin: int = 0) -> CacheSequence:
        made = self.cache.sequence()
        if pin:
            made.pin(pin)
        self.near[made], self.far[made], self.pins[made], self.sealed[made] = [], [], pin, 0
        return made

    def fork(self, sequence: CacheSequence) -> CacheSequence:
        made = sequence.fork()
        self.near[made], self.far[made] = list(self.near[sequence]), list(self.far[sequence])
        self.pins[made], self.sealed[made] = self.pins[sequence], self.sealed[sequence]
        return made

    def truncate(self, sequence: CacheSequence, length: int) -> None:
        sequence.truncate(length)
        del self.near[sequence][length:], self.far[sequence][length:]
        self.sealed[sequence] = min(self.sealed[sequence], length)

    def make(self, count: int, stream: str) -> list[int]:
        """Numbers of new tokens of a named stream, the same in every layer."""
        numbers: Ids = np.zeros(0, np.int64)
        for layer, content in enumerate(self.near_contents):
            key, value = self.bench.tokens(self.near_layout, layer, count, stream=stream)
            numbers = content.add(key, value)
        return [int(n) for n in numbers]

    def _seal(self, sequence: CacheSequence) -> None:
        """What a step's begin does to a sequence."""
        size, length = self.page_size, len(self.near[sequence])
        head = -(-max(self.format.sink, self.pins[sequence]) // size)
        sealed = max(self.sealed[sequence], max(0, (length - self.format.recent) // size * size))
        for page in range(max(head, self.sealed[sequence] // size), sealed // size):
            where = slice(page * size, (page + 1) * size)
            numbers = tuple(self.near[sequence][where])
            if numbers not in self._encoded:
                ids: Ids = np.zeros(0, np.int64)
                for near, far in zip(self.near_contents, self.far_contents, strict=True):
                    rows = list(numbers)
                    ids = far.add(near.decoded["key"][rows], near.decoded["value"][rows])
                self._encoded[numbers] = ids.tolist()
            self.far[sequence][where] = self._encoded[numbers]
        self.sealed[sequence] = sealed

    def moved(self, sequence: CacheSequence, pages: int, near_pages: int) -> tuple[Tiered, CacheSequence]:
        """The sequence's page image inserted into another cache, which knows the same tokens."""
        other = Tiered(self.bench, pages, near_pages)
        other.far_contents, other.near_contents, other._encoded = self.far_contents, self.near_contents, self._encoded
        made = other.cache.insert(self.cache.export(sequence))
        other.near[made], other.far[made] = list(self.near[sequence]), list(self.far[sequence])
        other.pins[made], other.sealed[made] = self.pins[sequence], self.sealed[sequence]
        return other, made

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, tokens: Mapping[CacheSequence, Sequence[int]]) -> None:
        """Append these tokens in one step, attend in one layer (another one each step), and judge."""
        packed = np.asarray([n for numbers in tokens.values() for n in numbers], np.int64)
        device, dtype = self.bench.backend.torch_device, self.bench.dtype
        with self.cache.step({s: len(numbers) for s, numbers in tokens.items()}) as step:
            for sequence, numbers in tokens.items():
                self._seal(sequence)
                self.near[sequence].extend(numbers)
                self.far[sequence].extend([-1] * len(numbers))
            for layer, content in enumerate(self.near_contents):
                for name in ("key", "value"):
                    self.bench.figures.given(f"{name} {dtype}", content.given[name][packed])
                key, value = (to_torch(content.given[name][packed], dtype, device) for name in ("key", "value"))
                with poisoned_allocations():
                    step.append(layer, key, None if content.latent else value)
                if layer == self._turn % len(self.near_contents):
                    query = self.bench.queries(self.near_layout, len(packed), stream=f"layer{layer}")
                    self.bench.figures.given(f"query {dtype}", query)
                    with poisoned_allocations():
                        answer = step.attend(layer, to_torch(query, dtype, device))
                    self._judge(layer, tokens, query, answer)
        self._turn += 1

    def _judge(self, layer: int, tokens: Mapping[CacheSequence, Sequence[int]], query: Array, answer: object) -> None:
        out, lse = check_answer(answer, len(query), self.near_layout, DTYPES[self.bench.dtype])
        given = {
            "scale": 1.0 / math.sqrt(self.near_layout.key_dim),
            "softcap": None,
            "window": self.near_layout.window,
            "sinks": None,
        }
        content = self.near_contents[layer]
        query = turned_queries(content, query, self.bench.dtype)
        first = 0
        for s, (sequence, numbers) in enumerate(tokens.items()):
            rows = slice(first, first := first + len(numbers))
            near, far = np.asarray(self.near[sequence]), np.asarray(self.far[sequence])
            held = [
                np.where(
                    (far >= 0)[:, None, None],
                    self.far_contents[layer].decoded[name][np.maximum(far, 0)] if self.far_contents[layer].count else 0,
                    content.decoded[name][near],
                )
                for name in ("key", "value")
            ]
            judge_rows(
                (out[rows], lse[rows]),
                query[rows],
                held[0],
                held[1],
                len(near) - len(numbers),
                given,
                self.bench.dtype,
                f"layer {layer}, sequence {s} (length {len(near)}, {int((far >= 0).sum())} tokens far)",
                self.bench.figures,
                weight_error=self.bench.weight_error,
                turned=turned_values(content),
            )

    # -- at rest -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare every sequence's exported pages, far and near, with what they must hold."""
        size = self.page_size
        for sequence, near in self.near.items():
            image = self.cache.export(sequence)
            far = np.asarray(self.far[sequence], np.int64)
            length = len(near)
            padded = np.concatenate([np.asarray(near, np.int64), np.full(-length % size, -1)]).reshape(-1, size)
            is_far = np.concatenate([far, np.full(-length % size, -1)]).reshape(-1, size)
            for layer, planes in image.layers.items():
                for prefix, contents, pages in (
                    ("", self.far_contents, is_far[(is_far >= 0).any(axis=1)]),
                    ("near.", self.near_contents, padded[(is_far < 0).all(axis=1)]),
                ):
                    if pages.size:
                        self._check_pages(sequence, layer, prefix, contents[layer], pages, planes)
        recount(self.cache)

    def _check_pages(
        self,
        sequence: CacheSequence,
        layer: int,
        prefix: str,
        content: Content,
        pages: Ids,
        planes: Mapping[str, object],
    ) -> None:
        written = pages >= 0
        arrays = {
            name: content.by_token(name, plane_to_numpy(planes[prefix + name]))[written]  # type: ignore[arg-type]
            for name in content.planes
        }
        where = [f"{sequence!r}, layer {layer}, {prefix}page {p}, slot {o}" for p, o in np.argwhere(written)]
        judge.judge_planes(content, pages[written], arrays, where, self.bench.figures, exactness=self.bench.exactness)
