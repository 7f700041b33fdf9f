"""Work items: every stored token that a row may see is read once for it, and by no program twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvport.backend import StepArrays
from kvport_triton.planning import Shape, build_items, build_runs, cdiv, power_of_two


def arrays(queries: list[int], lengths: list[int], starts: list[int]) -> StepArrays:
    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepArrays(
        torch.zeros((len(lengths), 1), dtype=torch.int32),
        int32(starts),
        int32(lengths),
        int32([0, *itertools.accumulate(queries)]),
        int32([n - q for n, q in zip(lengths, queries, strict=True)]),
    )


CASES = [
    ([1], [32768], [0], None, 4),
    ([1, 1, 1], [5, 9000, 131], [0, 64, 0], None, 4),
    ([1] * 70, list(range(1, 71)), [0] * 70, 9, 8),
    ([5, 33, 1, 0, 128], [700, 33, 1, 90, 4096], [0] * 5, None, 4),
    ([16, 200], [4000, 900], [512, 0], 100, 3),
    ([1, 2], [0, 10], [0, 0], None, 2),
]


@pytest.mark.parametrize(("queries", "lengths", "starts", "window", "group"), CASES)
@pytest.mark.parametrize("shape", [Shape(16, 128, 1056), Shape(64, 64, 264), Shape(128, 32, 132)], ids=str)
def test_items_cover_every_visible_token_once(
    queries: list[int], lengths: list[int], starts: list[int], window: int | None, group: int, shape: Shape
) -> None:
    given = arrays(queries, lengths, starts)
    items, blocks, partials = build_items(
        given, group=group, kv_heads=8, window=window, chosen=np.array(queries) > 0, shape=shape
    )
    read: dict[int, list[int]] = {row: [] for row in range(sum(queries))}
    used: list[int] = []
    for sequence, row, tokens, position, first, end, low, high, splits, part in items.tolist():
        assert 1 <= tokens <= max(1, shape.rows // group)
        assert position == lengths[sequence] - queries[sequence] + row - int(given.query_starts[sequence])
        positions = [p for p in range(low * shape.tile, high * shape.tile) if first <= p < end]
        for r in range(row, row + tokens):
            at = position + r - row
            read[r] += [p for p in positions if p <= at and (window is None or p > at - window)]
        if splits > 1:
            used.append(part)
    for sequence, (a, b) in enumerate(itertools.pairwise(given.query_starts.tolist())):
        for row in range(a, b):
            at = lengths[sequence] - queries[sequence] + row - a
            lowest = max(starts[sequence], 0 if window is None else at - window + 1)
            assert sorted(read[row]) == list(range(lowest, min(lengths[sequence], at + 1)))
    assert sorted(used) == list(range(partials))
    merged = [n for _, _, first, splits in blocks.tolist() for n in range(first, first + splits)]
    assert sorted(merged) == list(range(partials))


def test_one_long_sequence_fills_the_processors() -> None:
    items, _, _ = build_items(
        arrays([1], [131072], [0]), group=4, kv_heads=8, window=None, chosen=np.array([True]), shape=Shape(4, 128, 1056)
    )
    assert 0.75 * 1056 <= len(items) * 8 <= 1.25 * 1056


def test_a_full_batch_is_not_split() -> None:
    items, blocks, partials = build_items(
        arrays([1] * 256, [2048] * 256, [0] * 256),
        group=4, kv_heads=8, window=None, chosen=np.full(256, True), shape=Shape(4, 128, 1056),
    )  # fmt: skip
    assert len(items) == 256
    assert len(blocks) == partials == 0


@pytest.mark.parametrize(("queries", "lengths", "starts", "window", "group"), CASES)
@pytest.mark.parametrize("columns", [2, 16])
def test_runs_cover_every_visible_token_once(
    queries: list[int], lengths: list[int], starts: list[int], window: int | None, group: int, columns: int
) -> None:
    """Each row's runs begin, continue and end once, in order, and read what it sees once."""
    given = arrays(queries, lengths, starts)
    shape = Shape(64, 32, 1)
    runs, blocks = build_runs(
        given, group=group, window=window, chosen=np.array(queries) > 0, shape=shape, page_size=32, columns=columns
    )
    read: dict[int, list[int]] = {row: [] for row in range(sum(queries))}
    states: dict[int, list[int]] = {block: [] for block in range(blocks)}
    for sequence, column, items in runs:
        for _, row, tokens, position, first, end, low, high, state, block in items.tolist():
            assert column * 32 <= low * shape.tile
            assert high * shape.tile <= (column + columns) * 32
            assert int(given.query_starts[sequence]) <= row < int(given.query_starts[sequence + 1])
            states[block].append(state)
            for r in range(row, row + tokens):
                at = position + r - row
                seen = range(low * shape.tile, high * shape.tile)
                read[r] += [p for p in seen if first <= p < end and p <= at and (window is None or p > at - window)]
    for sequence, (a, b) in enumerate(itertools.pairwise(given.query_starts.tolist())):
        for row in range(a, b):
            at = lengths[sequence] - queries[sequence] + row - a
            lowest = max(starts[sequence], 0 if window is None else at - window + 1)
            assert read[row] == list(range(lowest, min(lengths[sequence], at + 1)))
    for order in states.values():
        assert order == [1] or (order[0] == 2 and order[-1] == 4 and set(order[1:-1]) <= {3})


def test_the_hosts_arithmetic_is_that_of_the_kernels() -> None:
    triton = pytest.importorskip("triton")
    for number in range(1, 1030):
        assert power_of_two(number) == triton.next_power_of_2(number)
        for by in (1, 3, 8, 64, 1024):
            assert cdiv(number, by) == triton.cdiv(number, by)
