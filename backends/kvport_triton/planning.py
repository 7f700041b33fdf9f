"""From a step's index arrays to work items: which program reads which run of which sequence.

Everything is computed on the host with numpy, once per step, and goes to the device in one copy. A run of stored
tokens is split so that the programs fill the GPU a whole number of times; the partials of a split run are merged by
their LSE. Nothing here depends on data, so every layer of a group reuses the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvport.backend import Plan, StepArrays

Int32Array = npt.NDArray[np.int32]

#: Fields of a work item: sequence, first packed query row, query tokens, position of the first, first and end of the
#: stored positions that any row sees, first and end tile, splits of this run, number of the partial (0 if unsplit).
ITEM_FIELDS: Final = 10
#: Fields of a merge block: first packed query row, query tokens, first partial, splits.
BLOCK_FIELDS: Final = 4


@dataclass(frozen=True)
class Shape:
    """A kernel shape: ``rows`` query rows a program takes at most, ``tile`` stored tokens an iteration, ``programs``
    how many programs fill the GPU, ``least`` the fewest tiles worth a split of their own."""

    rows: int
    tile: int
    programs: int
    least: int = 1


@dataclass(frozen=True)
class Launch:
    """One launch of the attend kernel (and of the merge, where ``blocks`` is not empty).

    ``kind`` is "decode" (one query token per sequence), "verify" (a few) or "prefill". ``items`` and ``blocks`` are on
    the device. ``row_count`` is rows a partial has: query tokens of a tile times the heads of a group.
    """

    kind: str
    shape: Shape
    row_count: int
    items: Tensor
    item_count: int
    blocks: Tensor
    block_count: int
    partials: int


@dataclass(frozen=True)
class Run:
    """A run of ``columns`` table columns of one sequence, decoded together, and the items that attend over it."""

    sequence: int
    first_column: int
    items: Tensor
    item_count: int


@dataclass(frozen=True)
class Staged:
    """Prefill over codes by runs: each is decoded into scratch pages, then attended over as float pages are.

    ``table`` maps table columns to scratch pages. ``blocks`` counts running results, ``row_count`` rows of each.
    """

    shape: Shape
    row_count: int
    columns: int
    runs: tuple[Run, ...]
    table: Tensor
    blocks: int


@dataclass
class Prepared:
    """The private part of a plan.

    ``scratch`` (by launch kind) is made for the first layer and serves all others. ``others`` are plans for layers
    that read the same pages with other query heads or another query dtype.
    """

    launches: tuple[Launch, ...]
    staged: Staged | None = None
    scratch: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stage_scratch: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    others: dict[tuple[int, torch.dtype], Plan] = field(default_factory=dict)


def build_items(
    arrays: StepArrays, *, group: int, kv_heads: int, window: int | None, chosen: npt.NDArray[np.bool_], shape: Shape
) -> tuple[Int32Array, Int32Array, int]:
    """Work items ``(n, ITEM_FIELDS)`` and merge blocks ``(m, BLOCK_FIELDS)`` of the ``chosen`` sequences, and the
    number of partials. Longest items first, so that the last programs to finish are short."""
    starts = arrays.query_starts.numpy().astype(np.int64)
    counts = np.diff(starts)
    per_tile = max(1, shape.rows // group)
    pieces = np.where(chosen, -(-counts // per_tile), 0)
    sequence = np.repeat(np.arange(len(counts)), pieces)
    if len(sequence) == 0:
        return np.zeros((0, ITEM_FIELDS), np.int32), np.zeros((0, BLOCK_FIELDS), np.int32), 0
    ordinal = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = ordinal * per_tile
    tokens = np.minimum(counts[sequence] - begin, per_tile)
    position = arrays.query_positions.numpy().astype(np.int64)[sequence] + begin
    first = arrays.kv_start.numpy().astype(np.int64)[sequence]
    if window is not None:
        first = np.maximum(first, position - window + 1)
    end = np.minimum(arrays.lengths.numpy().astype(np.int64)[sequence], position + tokens)
    tile_first = first // shape.tile
    tile_end = np.where(end > first, -(-end // shape.tile), tile_first)
    tiles = tile_end - tile_first

    # One chunk length for the whole launch: programs of about equal work, about as many as fill the GPU. Rounding to
    # the nearest count keeps a run that is a little longer than a chunk whole.
    work = int(tiles.sum()) * kv_heads
    chunk = max(float(shape.least), work / shape.programs)
    splits = np.maximum(1, np.rint(tiles / chunk).astype(np.int64)) if work else np.ones_like(tiles)
    # Splitting a run must not leave a nearly empty last part: cut into parts of equal length, then recount.
    part_length = -(-np.maximum(tiles, 1) // splits)
    splits = np.maximum(1, -(-tiles // part_length))
    split = splits > 1
    first_partial = np.cumsum(np.where(split, splits, 0)) - np.where(split, splits, 0)

    piece = np.repeat(np.arange(len(sequence)), splits)
    index = np.arange(len(piece)) - np.repeat(np.cumsum(splits) - splits, splits)
    low = tile_first[piece] + index * part_length[piece]
    high = np.minimum(low + part_length[piece], tile_end[piece])
    row = starts[sequence] + begin
    items = np.stack(
        [
            sequence[piece], row[piece], tokens[piece], position[piece], first[piece], end[piece], low, high,
            splits[piece], np.where(split[piece], first_partial[piece] + index, 0),
        ],
        axis=1,
    ).astype(np.int32)  # fmt: skip
    items = items[np.argsort(low - high, kind="stable")]
    blocks = np.stack([row, tokens, first_partial, splits], axis=1)[split].astype(np.int32)
    return items, blocks, int(np.where(split, splits, 0).sum())


def build_runs(
    arrays: StepArrays,
    *,
    group: int,
    window: int | None,
    chosen: npt.NDArray[np.bool_],
    shape: Shape,
    page_size: int,
    columns: int,
) -> tuple[list[tuple[int, int, Int32Array]], int]:
    """Runs of ``columns`` table columns, as (sequence, first column, items), and the number of running results.

    The same items as :func:`build_items` without splits, cut at run boundaries. The ninth field says how an item
    continues: 1 alone, 2 first, 3 neither, 4 last of its rows' runs; the tenth numbers the running result.
    """
    unsplit = Shape(shape.rows, shape.tile, programs=1, least=1 << 30)
    items, _, _ = build_items(arrays, group=group, kv_heads=1, window=window, chosen=chosen, shape=unsplit)
    items = items[np.lexsort((items[:, 1], items[:, 0]))].astype(np.int64)
    items[:, 9] = np.arange(len(items))
    length = columns * page_size // shape.tile
    runs = []
    for sequence in np.unique(items[:, 0]):
        own = items[items[:, 0] == sequence]
        begin = int(own[:, 6].min()) // length
        for number in range(begin, max(begin + 1, -(-int(own[:, 7].max()) // length))):
            low, high = number * length, (number + 1) * length
            # Rows that see nothing at all still get their zeros, in the run where they would begin.
            seeing = (own[:, 6] < high) & (own[:, 7] > low)
            seeing |= (own[:, 6] == own[:, 7]) & (own[:, 6] // length == number)
            part = own[seeing].copy()
            first, last = part[:, 6] >= low, part[:, 7] <= high
            part[:, 8] = np.select([first & last, first, ~last], [1, 2, 3], 4)
            part[:, 6], part[:, 7] = np.maximum(part[:, 6], low), np.minimum(part[:, 7], high)
            part[:, 0] = 0  # the scratch pages have one table for all
            part = part[np.argsort(part[:, 6] - part[:, 7], kind="stable")]
            runs.append((int(sequence), number * columns, part.astype(np.int32)))
    return runs, len(items)


def prepare(
    arrays: StepArrays,
    device: torch.device,
    *,
    group: int,
    kv_heads: int,
    window: int | None,
    page_size: int,
    shapes: dict[str, Shape],
    most_verify: int,
    stage_from: int | None = None,
    stage_columns: int = 0,
) -> tuple[StepArrays, Prepared]:
    """Device copies of the arrays and the launches of one step, all in one host-to-device copy.

    Sequences of at least ``stage_from`` query tokens are prefilled by runs of ``stage_columns`` decoded pages.
    """
    counts = np.diff(arrays.query_starts.numpy())
    staged = np.zeros_like(counts, dtype=np.bool_) if stage_from is None else counts >= stage_from
    kinds = {
        "decode": counts == 1,
        "verify": (counts > 1) & (counts <= most_verify) & ~staged,
        "prefill": (counts > most_verify) & ~staged,
    }
    built = {}
    for kind, chosen in kinds.items():
        if bool(chosen.any()):
            built[kind] = build_items(
                arrays, group=group, kv_heads=kv_heads, window=window, chosen=chosen, shape=shapes[kind]
            )
    runs: list[tuple[int, int, Int32Array]] = []
    running = 0
    if bool(staged.any()):
        runs, running = build_runs(
            arrays,
            group=group,
            window=window,
            chosen=staged,
            shape=shapes["staged"],
            page_size=page_size,
            columns=stage_columns,
        )
    names = ("page_table", "kv_start", "lengths", "query_starts", "query_positions")
    pieces = [getattr(arrays, name).numpy().astype(np.int32, copy=False).ravel() for name in names]
    for items, blocks, _ in built.values():
        pieces += [items.ravel(), blocks.ravel()]
    pieces += [items.ravel() for _, _, items in runs]
    if runs:
        pieces.append(np.arange(arrays.page_table.shape[1], dtype=np.int32) % stage_columns)
    # Every piece begins on 16 bytes, so that the kernels' loads stay aligned.
    offsets = np.cumsum([0, *(-(-piece.size // 4) * 4 for piece in pieces)])
    pinned = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = pinned.numpy()
    for piece, offset in zip(pieces, offsets, strict=False):
        flat[offset : offset + piece.size] = piece
    moved = pinned.to(device, non_blocking=True)
    views = iter([moved[offset : offset + piece.size] for piece, offset in zip(pieces, offsets, strict=False)])
    on_device = StepArrays(*(next(views).view(getattr(arrays, name).shape) for name in names))
    launches = [
        Launch(
            kind=kind,
            shape=shapes[kind],
            row_count=_rows(shapes[kind], group),
            items=next(views),
            item_count=len(items),
            blocks=next(views),
            block_count=len(blocks),
            partials=partials,
        )
        for kind, (items, blocks, partials) in built.items()
    ]
    prepared = Prepared(tuple(launches))
    if runs:
        found = tuple(Run(sequence, column, next(views), len(items)) for sequence, column, items in runs)
        shape = shapes["staged"]
        prepared.staged = Staged(shape, _rows(shape, group), stage_columns, found, next(views), running)
    return on_device, prepared


def _rows(shape: Shape, group: int) -> int:
    """Rows a partial result has: the query tokens of a tile times the heads of a group."""
    return max(1, shape.rows // group) * group
