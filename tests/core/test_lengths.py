"""Every length 1 .. 3 * page size + 1: prefill, decode, chunked prefill and verify agree with the oracle.

One prefill of 3P + 1 rows is checked row by row against the oracle: row t is the answer for length t + 1. Forks of that
sequence, truncated to each length, then decode their next token as one ragged batch, so that each length also meets
its own partly written (and shared) last page. KVPORT_LONG=1 decodes at every length and crosses every head dim with
every GQA ratio; CI decodes around the page boundaries and rotates through the pairs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import core_support as support
import numpy as np
import pytest
import torch
from core_support import FORMATS, Array

from kvport import CacheLayout, PagedCache, Sequence, Step
from kvport_conformance import inputs

PAGE_SIZES = (16, 48, 128)
HEAD_DIMS = (64, 80, 128, 256)
RATIOS = (1, 3, 4, 8)
CASES = [(format, page_size) for format in FORMATS for page_size in PAGE_SIZES]


@dataclass
class Text:
    """A sequence of 3P + 1 tokens, and what attention at each of its positions has to give."""

    layout: CacheLayout

    def __post_init__(self) -> None:
        self.tokens = 3 * self.layout.page_size + 1
        self.key, self.value = support.kv(self.layout, 0, 31, self.tokens)
        self.query = support.queries(self.layout, 0, 32, self.tokens)
        fmt = self.layout.groups[0].layout.format
        key, value = support.decoded(fmt.key, self.key), support.decoded(fmt.value, self.value)
        self.expected = support.attention(support.floats(self.query), key, value)

    def run(self, step: Step, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        step.append(0, self.key[rows], self.value[rows])
        return tuple(step.attend(0, self.query[rows]))  # type: ignore[return-value]

    def ratio(self, result: tuple[torch.Tensor, torch.Tensor], rows: list[int]) -> float:
        out, lse, allowed, allowed_lse = (a[rows] for a in self.expected)
        return max(support.ratio(result[0], out, allowed), support.ratio(result[1], lse, allowed_lse))

    def at(self, cache: PagedCache, whole: Sequence, lengths: list[int], count: int) -> float:
        """Decode (count 1) or verify: forks of the whole text, each cut ``count`` before its length, in one batch."""
        forks = [whole.fork() for _ in lengths]
        for fork, length in zip(forks, lengths, strict=True):
            fork.truncate(length - count)
        rows = [row for length in lengths for row in range(length - count, length)]
        with cache.step({fork: count for fork in forks}) as step:
            found = self.ratio(self.run(step, rows), rows)
        for fork, length in zip(forks, lengths, strict=True):
            assert fork.length == length
            fork.free()
        return found


def pairs(format: str, page_size: int, long_run: bool) -> list[tuple[int, int]]:
    """(head dim, GQA ratio): all sixteen, or two of them such that the cases of CI cover all sixteen together."""
    if long_run:
        return [(dim, ratio) for dim in HEAD_DIMS for ratio in RATIOS]
    first = 2 * CASES.index((format, page_size))
    return [(HEAD_DIMS[n % 4], RATIOS[(n // 4 + n) % 4]) for n in (first, first + 1)]


def test_the_rotation_covers_every_pair_and_every_format_every_value() -> None:
    drawn = {case: pairs(*case, long_run=False) for case in CASES}
    assert {pair for found in drawn.values() for pair in found} == {(d, r) for d in HEAD_DIMS for r in RATIOS}
    for format in FORMATS:
        mine = [pair for (name, _), found in drawn.items() if name == format for pair in found]
        assert {dim for dim, _ in mine} == set(HEAD_DIMS)
        assert {ratio for _, ratio in mine} == set(RATIOS)


@pytest.mark.parametrize("format,page_size", CASES)
def test_every_length(format: str, page_size: int, long_run: bool, worst: dict[str, float]) -> None:
    for dim, ratio in pairs(format, page_size, long_run):
        layout = CacheLayout.uniform(
            layers=1, kv_heads=2, query_heads=2 * ratio, head_dim=dim, format=format, page_size=page_size
        )
        text = Text(layout)
        every = list(range(1, text.tokens + 1))
        near = {page * page_size + offset for page in range(4) for offset in (-2, -1, 0, 1, 2)}
        near |= {page_size // 2, 5 * page_size // 2}
        sampled = sorted(length for length in near if 1 <= length <= text.tokens)
        lengths = every if long_run or page_size == 16 else sampled
        cache = support.open_cache(layout, len(lengths) + 12)
        found: dict[str, float] = {}

        whole = cache.sequence()
        with cache.step({whole: text.tokens}) as step:
            rows = list(range(text.tokens))
            found["prefill"] = text.ratio(text.run(step, rows), rows)
        check_codes(cache, whole, text)
        digests = cache.export(whole).digests()

        support.poison_unowned(cache)
        found["decode"] = text.at(cache, whole, lengths, 1)
        support.poison_unowned(cache)
        found["verify"] = max(
            text.at(cache, whole, [length for length in sampled if length >= count], count) for count in (2, 5, 8)
        )
        assert cache.export(whole).digests() == digests

        for sizes in (1, 7, page_size, 2 * page_size + 3), (page_size - 1, 1, page_size + 1):
            chunked = cache.sequence()
            while chunked.length < text.tokens:
                for size in sizes:
                    rows = list(range(chunked.length, min(chunked.length + size, text.tokens)))
                    support.poison_unowned(cache)
                    with cache.step({chunked: len(rows)}) as step:
                        found["chunked"] = max(found.get("chunked", 0), text.ratio(text.run(step, rows), rows))
            assert cache.export(chunked).digests() == digests
            chunked.free()

        for phase, observed in found.items():
            assert observed < 1, f"{phase}, head dim {dim}, ratio {ratio}: observed/bound {observed}"
            name = f"every length, {phase}"
            worst[name] = max(worst.get(name, 0.0), observed)
        whole.free()
        assert cache.check() == ()
        assert cache.stats().pools[0].free == cache.stats().pools[0].total


def check_codes(cache: PagedCache, sequence: Sequence, text: Text) -> None:
    """Codes, scales and zeros at rest equal the oracle's at every position, and unwritten slots are exported as 0."""
    wanted = support.expected_planes(cache.layout, 0, support.floats(text.key), support.floats(text.value))
    for name, plane in cache.export(sequence).layers[0].items():
        stored = support.to_numpy(plane).reshape(-1, *plane.shape[2:])
        assert (support.bits(stored[: text.tokens]) == support.bits(wanted[name])).all(), name
        assert not stored[text.tokens :].any(), name


# --- a batch equals its single runs -------------------------------------------------------------------------------

LENGTHS = (0, 1, 17, 300)


@pytest.mark.parametrize("format,page_size", CASES)
def test_a_ragged_batch_equals_its_single_runs_bit_for_bit(format: str, page_size: int) -> None:
    """Prefill of 0, 1, 17 and 300 tokens, then a decode step, together and alone: outputs, LSE, codes and scales."""
    options = {"kv_heads": 2, "query_heads": 6, "head_dim": 80, "page_size": page_size, "layers": 2}
    together = support.uniform(format, pages=3 * 300 // page_size + 12, **options)
    batch = {together.sequence(): 40 + n for n in LENGTHS}  # a seed of its own for each
    prefill = support.run_step(together, dict(zip(batch, LENGTHS, strict=True)), batch)
    counts = dict(zip(batch, (0, 1, 1, 1), strict=True))
    decode = support.run_step(together, counts, batch)
    rows = np.cumsum([0, *LENGTHS])
    for index, (member, length) in enumerate(zip(batch, LENGTHS, strict=True)):
        alone = support.uniform(format, pages=300 // page_size + 3, **options)
        support.shuffle_free_pages(alone, seed=length)
        single = alone.sequence()
        first = support.run_step(alone, {single: length}, 40 + length)
        second = support.run_step(alone, {single: counts[member]}, 40 + length)
        at = slice(int(rows[index]), int(rows[index + 1]))
        after = slice(max(0, index - 1), index)
        for layer in range(2):
            for mine, all_rows, here in ((first, prefill, at), (second, decode, after)):
                for got, wanted in zip(all_rows[layer], mine[layer], strict=True):
                    assert torch.equal(got[here], wanted), f"length {length}, layer {layer}"
        assert support.same_pages((together, member), (alone, single))


def test_a_sequence_without_keys_gives_zeros_and_minus_infinity() -> None:
    """At the operation itself a sequence may be empty; a batch mate's rows are what they are without it."""
    from kvport import StepArrays

    cache = support.uniform("int8", page_size=16, head_dim=64)
    sequence = support.fill(cache, 3, 17)
    backend, store = cache.backend, support.stores(cache)[0]
    query = support.queries(cache.layout, 0, 4, 3)
    pages = sequence.pages()

    def attend(table: list[list[int]], lengths: list[int], starts: list[int], q: torch.Tensor, **more: object) -> Array:
        arrays = StepArrays(
            page_table=torch.tensor(table, dtype=torch.int32),
            kv_start=torch.zeros(len(lengths), dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            query_positions=torch.tensor([max(0, n - 1) for n in lengths], dtype=torch.int32),
        )
        return backend.attend(store, 0, q, backend.plan(store, arrays), scale=0.125, **more)  # type: ignore[return-value]

    for sinks in (None, torch.tensor([0.5, -1.0, 2.0, 0.0])):
        alone = attend([list(pages)], [17], [0, 1], query[:1], sinks=sinks)
        out, lse = attend([list(pages), [0, 0], [0, 0]], [17, 0, 0], [0, 1, 3, 3], query, sinks=sinks)
        assert torch.equal(out[:1], alone[0])
        assert torch.equal(lse[:1], alone[1])
        assert torch.equal(out[1:], torch.zeros_like(out[1:]))
        assert torch.equal(lse[1:], torch.full_like(lse[1:], -torch.inf))


@pytest.mark.parametrize("first,last", [(0, 17), (16, 33), (5, 40), (20, 21), (33, 33), (0, 50)])
@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("format", FORMATS)
def test_a_partial_sees_its_own_positions_only(format: str, window: int | None, first: int, last: int) -> None:
    """Stored positions first .. last-1 of a sequence whose queries come later, as a tier is attended.

    Everything outside is poisoned; the partial and the rest merge to the whole.
    """
    from kvport import StepArrays
    from kvport.merge import merge

    cache = support.uniform(format, window=window)
    sequence = support.fill(cache, 1, 50)
    backend, store = cache.backend, support.stores(cache)[0]
    query = support.queries(cache.layout, 0, 2, 4)  # at positions 46 .. 49

    def attend(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        arrays = StepArrays(
            page_table=torch.tensor([sequence.pages()], dtype=torch.int32),
            kv_start=torch.tensor([begin], dtype=torch.int32),
            lengths=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([0, 4], dtype=torch.int32),
            query_positions=torch.tensor([46], dtype=torch.int32),
        )
        return backend.attend(store, 0, query, backend.plan(store, arrays), scale=0.2, partial=True)

    whole = attend(0, 50)
    rest = [attend(0, first), attend(last, 50)]
    outside = np.zeros((store.pages, 16), np.bool_)
    for position in range(64):
        outside[sequence.pages()[position // 16], position % 16] = not first <= position < last
    support.poison_slots(backend, store, outside)
    out, lse = attend(first, last)
    assert out.dtype == torch.float32
    merged = merge([(out, lse), *rest])
    for got, wanted in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if first == last:
        assert not out.any()
        assert (lse == -torch.inf).all()


# --- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "format", ["fp32", "fp16", "bf16", "int8:scale=bf16", "int4:g16:asym", "k=int8,v=int2:g32:asym"]
)
def test_windows_caps_sinks_scales_and_dtypes(
    format: str, dtype: torch.dtype, page_size: int, worst: dict[str, float]
) -> None:
    tokens = 3 * page_size + 1
    name = support.DTYPE_NAMES[dtype]
    sinks = torch.from_numpy(inputs.values(9, (6,), low=-1.0, high=3.0))
    for window, softcap, with_sinks, scale in (
        (None, None, True, None),
        (1, None, False, 0.25),
        (5, 2.0, True, 0.3),
        (page_size, None, True, -0.2),
        (page_size + 1, 0.5, False, 0.01),
        (2 * page_size + 3, None, True, None),
    ):
        layout = CacheLayout.uniform(
            layers=1, kv_heads=2, query_heads=6, head_dim=64, value_dim=96, window=window, format=format,
            page_size=page_size, dtype=dtype,
        )  # fmt: skip
        cache = support.open_cache(layout, 12)
        key, value = support.kv(layout, 0, 51, tokens)
        query = support.queries(layout, 0, 52, tokens)
        fmt = layout.groups[0].layout.format
        expected = support.attention(
            support.floats(query), support.decoded(fmt.key, key), support.decoded(fmt.value, value),
            query_dtype=name, window=window, softcap=softcap, scale=scale, sinks=sinks.numpy() if with_sinks else None,
        )  # fmt: skip
        sequence = cache.sequence()
        for begin, end in itertools.pairwise((0, page_size + 1, tokens - 3, tokens - 1, tokens)):
            support.poison_unowned(cache)
            with cache.step({sequence: end - begin}) as step:
                step.append(0, key[begin:end], value[begin:end])
                out, lse = step.attend(
                    0, query[begin:end], scale=scale, softcap=softcap, sinks=sinks if with_sinks else None
                )
            assert out.dtype == dtype
            assert lse.dtype == torch.float32
            assert out.shape == (end - begin, 6, 96)
            wanted, wanted_lse, allowed, allowed_lse = (a[begin:end] for a in expected)
            found = max(support.ratio(out, wanted, allowed), support.ratio(lse, wanted_lse, allowed_lse))
            assert found < 1, f"window {window}, softcap {softcap}, scale {scale}: observed/bound {found}"
            worst[f"features, {name} queries"] = max(worst.get(f"features, {name} queries", 0.0), found)


def test_all_rows_at_once_is_the_conformance_oracle() -> None:
    from kvport_conformance import oracle_attention

    query, key = inputs.query(1, (5, 6, 16)), inputs.key(2, (23, 2, 16))
    value, sinks = inputs.value(3, (23, 2, 8)), inputs.values(4, (6,), low=-2.0, high=2.0)
    for window, softcap, use in ((None, None, None), (7, None, sinks), (3, 1.5, None), (None, 2.0, sinks)):
        options = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": use}
        ours = support.attention(query, key, value, **options)
        theirs = (
            *oracle_attention.attend(query, key, value, **options),
            *oracle_attention.attention_bound(query, key, value, query_dtype="float32", **options),
        )
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
