"""What the tier tests share: an oracle that replays the steps of one sequence and one layer, and poisoned caches.

The rule of tiers is stated here a second time, page by page and without the formula of kvport.tiers: at the begin of
a step, a page becomes far when it is whole, lies before the last ``recent`` committed tokens, and touches neither sink
nor pin. Far stays far until it is truncated away.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import core_support as support
import numpy as np
import torch
from core_support import Array
from torch import Tensor

from kvport import Backend, CacheFormat, CacheLayout, PagedCache, Sequence, TensorFormat
from kvport.formats import dtype_name
from kvport.tiers import make_lanes
from kvport_conformance import oracle_codec
from kvport_cpu import reference


class Replay:
    """The oracle of one layer of one sequence.

    ``far`` are the page numbers in the format's own codes, ``at_rest`` the position up to which a page's tier is
    final, ``rows`` what was given to append, float32 ``(heads, dim)`` each, by part: K and V, or latent and rope.
    """

    def __init__(self, layout: CacheLayout, layer: int = 0, pin: int = 0) -> None:
        self.spec = layout.layers[layer]
        self.format: CacheFormat = self.spec.format or layout.format
        self.page_size = layout.page_size
        self.near = self.format.near or TensorFormat(dtype_name(layout.dtype))
        self.parts = (self.format.key, self.format.rope or self.format.value)
        self.pin = pin
        self.rows: tuple[list[Array], list[Array]] = ([], [])
        self.far: set[int] = set()
        self.at_rest = 0
        self._planes: dict[int, tuple[dict[str, Array], ...]] = {}
        self._decoded: dict[int, tuple[Array, ...]] = {}

    def __len__(self) -> int:
        return len(self.rows[0])

    def fork(self) -> Replay:
        twin = copy.copy(self)
        twin.rows = (list(self.rows[0]), list(self.rows[1]))
        twin.far, twin._planes, twin._decoded = set(self.far), dict(self._planes), dict(self._decoded)
        return twin

    def truncate(self, length: int) -> None:
        for part in self.rows:
            del part[length:]
        self.at_rest = min(self.at_rest, length)
        self.far = {page for page in self.far if page * self.page_size < length}
        for page in set(self._planes) - self.far:
            del self._planes[page], self._decoded[page]

    def begin(self) -> None:
        """A step begins: pages that have grown old are encoded."""
        if not self.format.tiered:
            return
        for page in range(len(self) // self.page_size):
            first, end = page * self.page_size, (page + 1) * self.page_size
            if end + self.format.recent > len(self):
                break
            self.at_rest = max(self.at_rest, end)
            if first >= max(self.format.sink, self.pin):
                self.far.add(page)

    def append(self, key: Array, value: Array | None) -> None:
        if self.spec.latent:
            key, value = key[..., : self.spec.value_dim], key[..., self.spec.value_dim :]
        assert value is not None
        self.rows[0].extend(key)
        self.rows[1].extend(value)

    def tiers(self) -> str:
        """One letter per token: n near, f far."""
        return "".join("f" if t // self.page_size in self.far else "n" for t in range(len(self)))

    def planes(self, page: int) -> tuple[dict[str, Array], ...]:
        """The planes of a far page, by part."""
        self._encode(page)
        return self._planes[page]

    def stored(self) -> tuple[Array, Array]:
        """K and V ``(tokens, heads, dim)`` as they read back, float32."""
        found = []
        for part, fmt in enumerate(self.parts):
            x = round_trip(self.near if self.format.tiered else fmt, np.stack(self.rows[part]))
            for page in self.far:
                self._encode(page)
                x[page * self.page_size : (page + 1) * self.page_size] = self._decoded[page][part]
            found.append(x)
        if self.spec.latent:
            return np.concatenate(found, -1), found[0]
        return found[0], found[1]

    def _encode(self, page: int) -> None:
        if page in self._planes:
            return
        planes, decoded = [], []
        for rows, fmt in zip(self.rows, self.parts, strict=True):
            x = round_trip(self.near, np.stack(rows[page * self.page_size : (page + 1) * self.page_size]))
            spec = support.spec_of(fmt, self.page_size)
            planes.append(oracle_codec.encode(spec, x).planes)
            decoded.append(oracle_codec.decode(spec, planes[-1], x.shape[-1]))
        self._planes[page], self._decoded[page] = tuple(planes), tuple(decoded)


def round_trip(fmt: TensorFormat, x: Array) -> Array:
    spec = support.spec_of(fmt)
    return oracle_codec.decode(spec, oracle_codec.encode(spec, x).planes, x.shape[-1])


# --- caches ---------------------------------------------------------------------------------------------------------


def open_layout(
    layout: CacheLayout, pages: int | list[int] = 40, backend: Backend | None = None, **more: Any
) -> PagedCache:
    """A cache on the reference, one page count per lane, free pages in a hashed order and everything poisoned."""
    lanes, _ = make_lanes(layout)
    counts = [pages] * len(lanes) if isinstance(pages, int) else pages
    cache = PagedCache(backend or reference.load("cpu"), layout, counts, **more)
    support.shuffle_free_pages(cache, seed=1)
    poison(cache)
    return cache


def tiered(format: str, *, page_size: int = 4, pages: int | list[int] = 40, **more: Any) -> PagedCache:
    """One layer, two KV heads, four query heads, dim 16."""
    options = {k: more.pop(k) for k in ("scales", "identity", "share_prefixes", "backend") if k in more}
    geometry: dict[str, Any] = {"layers": 1, "kv_heads": 2, "query_heads": 4, "head_dim": 16, **more}
    return open_layout(CacheLayout.uniform(format=format, page_size=page_size, **geometry), pages, **options)


def poison(cache: PagedCache) -> None:
    """NaN, or bytes that no encoder emits, in every page that nobody holds and every slot past a length."""
    size = cache.layout.page_size
    for number, (pool, store) in enumerate(zip(cache._pools, cache._stores, strict=True)):
        unowned = torch.tensor([page == 0 or pool.references(page) == 0 for page in range(pool.pages)])
        written = torch.zeros((pool.pages, size), dtype=torch.bool)
        for sequence in cache.sequences:
            for block, page in enumerate(sequence._pages[number]):
                written[page, : max(0, sequence.length - block * size)] = True
        for name, buffer in cache.backend.buffers(store).items():
            if name == "poison":
                continue
            fill(buffer, name, unowned)
            if number in {tiers.near for tiers in cache._tiers}:  # sealed pages are whole
                unwritten = ~written & ~unowned[:, None]
                unwritten[cache.prefix.pages(number)] = False
                fill(buffer, name, unwritten)


def fill(buffer: Tensor, name: str, where: Tensor) -> None:
    """``where`` (pages,) or (pages, page size) of every layer."""
    if buffer.dtype.is_floating_point:
        buffer[:, where] = math.nan
    else:
        buffer[:, where] = -128 if buffer.dtype == torch.int8 else 0xFF


def run(
    cache: PagedCache, tokens: Mapping[Sequence, Any], oracles: Mapping[Sequence, list[Replay]], seed: int = 0
) -> float:
    """One step on every layer, checked: attention and gather against the oracles. Returns the worst observed/bound.

    Token t of sequence s is row t of the stream of (seed, number of s).
    """
    layout = cache.layout
    poison(cache)
    for sequence in tokens:
        for oracle in oracles[sequence]:
            oracle.begin()
    worst = 0.0
    with cache.step(tokens) as step:
        for layer in range(len(layout.layers)):
            parts = []
            for sequence in tokens:
                count = step.rows[sequence].stop - step.rows[sequence].start
                stream, at = seed * 1000 + sequence.number, sequence.length
                key, value = support.kv(layout, layer, stream, count, at)
                oracles[sequence][layer].append(support.floats(key), support.floats(value))
                parts.append((key, value, support.queries(layout, layer, stream, count, at)))
            key, value, query = (torch.cat(part) for part in zip(*parts, strict=True))
            step.append(layer, key, None if layout.layers[layer].latent else value)
            output, lse = step.attend(layer, query)
            dense = step.gather(layer, torch.float32)
            for index, sequence in enumerate(tokens):
                here, oracle = step.rows[sequence], oracles[sequence][layer]
                if here.start < here.stop:
                    worst = max(worst, attended(layout, layer, oracle, query[here], output[here], lse[here]))
                gathered(cache, layer, sequence, oracle, [side[index, : len(oracle)] for side in dense])
    for sequence in tokens:
        for layer, oracle in enumerate(oracles[sequence]):
            gathered(cache, layer, sequence, oracle, list(cache.gather(sequence, layer, torch.float32)))
    cache.check()
    return worst


def attended(layout: CacheLayout, layer: int, oracle: Replay, query: Tensor, output: Tensor, lse: Tensor) -> float:
    """observed / bound of the last rows of a sequence."""
    key, value = oracle.stored()
    expected, expected_lse, allowed, allowed_lse = support.attention(
        support.floats(query),
        key,
        value,
        query_dtype=support.DTYPE_NAMES[query.dtype],
        window=layout.layers[layer].window,
    )
    found = max(support.ratio(output, expected, allowed), support.ratio(lse, expected_lse, allowed_lse))
    assert found < 1, f"layer {layer}, {len(key)} tokens, {len(query)} new: observed/bound {found}"
    return found


def gathered(cache: PagedCache, layer: int, sequence: Sequence, oracle: Replay, dense: list[Tensor]) -> None:
    """K and V read back bit for bit as the oracle stores them; what a window passed is zeros."""
    if not len(oracle):
        assert all(not len(side) for side in dense)
        return
    group, _ = cache.layout.locate(layer)
    start = sequence._passed[group] * cache.layout.page_size
    for side, wanted in zip(dense, oracle.stored(), strict=True):
        assert not side[:start].any()
        assert (support.bits(side[start:].numpy()) == support.bits(wanted[start:])).all()


def placed(cache: PagedCache, sequence: Sequence, group: int = 0) -> str:
    """One letter per token: n in a near page, f in a far page, - passed by the window; never in both."""
    size = cache.layout.page_size
    letters = []
    for far, near in zip(sequence.pages(group), sequence.pages(group, "near"), strict=True):
        assert not (far and near)
        letters += ["f" if far else "n" if near else "-"] * size
    return "".join(letters[: sequence.length])


def state(cache: PagedCache) -> dict[str, Any]:
    """Everything that a failed operation has to leave as it was."""
    return {
        "sequences": {
            s.number: (
                s.length,
                copy.deepcopy(s._pages),
                list(s._sealed),
                list(s._passed),
                s._pin,
                s._ids,
                len(s._chain),
            )
            for s in cache.sequences
        },
        "references": [[pool.references(page) for page in range(pool.pages)] for pool in cache._pools],
        # As lists of held pages: which free page comes next may change.
        "free": [sorted(pool._free) for pool in cache._pools],
        "sealed as": copy.deepcopy(cache._sealed_as),
        "digests": {s.number: cache.export(s).digests() for s in cache.sequences},
    }
