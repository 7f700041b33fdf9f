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


@dataclass
class Prepared:
    """The private part of a plan.

    ``scratch`` (by launch kind) is made for the first layer and serves all others. ``others`` are plans for layers
    that read the same pages with other query heads or another query dtype.
    """

    launches: tuple[Launch, ...]
    scratch: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
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

    # One chunk length for the whole launch: programs of about equal work, as many as fill the GPU.
    work = int(tiles.sum()) * kv_heads
    chunk = max(shape.least, -(-work // shape.programs))
    splits = np.maximum(1, -(-tiles // chunk))
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


def prepare(
    arrays: StepArrays,
    device: torch.device,
    *,
    group: int,
    kv_heads: int,
    window: int | None,
    shapes: dict[str, Shape],
    most_verify: int,
) -> tuple[StepArrays, Prepared]:
    """Device copies of the arrays and the launches of one step, all in one host-to-device copy."""
    counts = np.diff(arrays.query_starts.numpy())
    kinds = {
        "decode": counts == 1,
        "verify": (counts > 1) & (counts <= most_verify),
        "prefill": counts > most_verify,
    }
    built = {}
    for kind, chosen in kinds.items():
        if bool(chosen.any()):
            built[kind] = build_items(
                arrays, group=group, kv_heads=kv_heads, window=window, chosen=chosen, shape=shapes[kind]
            )
    names = ("page_table", "kv_start", "lengths", "query_starts", "query_positions")
    pieces = [getattr(arrays, name).numpy().astype(np.int32, copy=False).ravel() for name in names]
    for items, blocks, _ in built.values():
        pieces += [items.ravel(), blocks.ravel()]
    # Every piece begins on 16 bytes, so that the kernels' loads stay aligned.
    offsets = np.cumsum([0, *(-(-piece.size // 4) * 4 for piece in pieces)])
    staged = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = staged.numpy()
    for piece, offset in zip(pieces, offsets, strict=False):
        flat[offset : offset + piece.size] = piece
    moved = staged.to(device, non_blocking=True)
    views = [moved[offset : offset + piece.size] for piece, offset in zip(pieces, offsets, strict=False)]
    on_device = StepArrays(*(view.view(getattr(arrays, name).shape) for name, view in zip(names, views, strict=False)))
    launches = []
    for n, (kind, (items, blocks, partials)) in enumerate(built.items()):
        shape = shapes[kind]
        launches.append(
            Launch(
                kind=kind,
                shape=shape,
                row_count=max(1, shape.rows // group) * group,
                items=views[len(names) + 2 * n],
                item_count=len(items),
                blocks=views[len(names) + 2 * n + 1],
                block_count=len(blocks),
                partials=partials,
            )
        )
    return on_device, Prepared(tuple(launches))
