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

from kvport.backend import Limits, Plan, StepArrays

Int32Array = npt.NDArray[np.int32]

#: Fields of a work item: sequence, first packed query row, query tokens, position of the first, first and end of the
#: stored positions that any row sees, first and end tile, splits of this run, number of the partial (0 if unsplit).
ITEM_FIELDS: Final = 10
#: Fields of a merge block: first packed query row, query tokens, first partial, splits.
BLOCK_FIELDS: Final = 4
#: The arrays of a step, in the order in which they lie on the device.
ARRAYS: Final = ("page_table", "kv_start", "lengths", "query_starts", "query_positions")


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


@dataclass(frozen=True)
class Room:
    """The most items, merge blocks and partials that a launch can need."""

    items: int
    blocks: int
    partials: int


@dataclass
class Fixed:
    """What a plan of a fixed shape is filled by: one buffer on the device, with room for any step within ``limits``.

    Launches have as many programs as the largest step could need. How runs are split is written into the buffer anew
    for each step, as an ordinary plan would split them; items that a step does not need have no query tokens.
    """

    limits: Limits
    group: int
    kv_heads: int
    window: int | None
    shapes: dict[str, Shape]
    most_verify: int
    buffer: Tensor
    places: dict[str, slice]
    rooms: dict[str, Room]
    arrays: StepArrays

    def pack(self, arrays: StepArrays) -> Tensor:
        """The buffer's content for one step, on the host (pinned where the buffer is on a GPU)."""
        self.arrays = arrays
        flat = torch.zeros(self.buffer.shape, dtype=torch.int32, device="cpu", pin_memory=self.buffer.is_cuda)
        content = flat.numpy()
        counts = np.diff(arrays.query_starts.numpy())
        for name in ARRAYS:
            content[self.places[name]] = getattr(arrays, name).numpy().ravel()
        for kind, chosen in choose(counts, self.most_verify).items():
            if kind not in self.shapes:
                continue
            items, blocks, partials = build_items(
                arrays,
                group=self.group,
                kv_heads=self.kv_heads,
                window=self.window,
                chosen=chosen,
                shape=self.shapes[kind],
            )
            if kind == "decode":
                items = np.concatenate([items, self._padding_rows(int(arrays.query_starts[-1]))])
            needed, room = Room(len(items), len(blocks), partials), self.rooms[kind]
            if needed.items > room.items or needed.blocks > room.blocks or needed.partials > room.partials:
                raise AssertionError(f"{kind} needs {needed} and has {room}: a fault of the backend")
            for name, rows in ((f"{kind}.items", items), (f"{kind}.blocks", blocks)):
                begin = self.places[name].start
                content[begin : begin + rows.size] = rows.ravel()
        return flat

    def _padding_rows(self, tokens: int) -> Int32Array:
        """Each query row past the step's own as a sequence without keys, which gives zeros and -inf."""
        items = np.zeros((self.limits.tokens - tokens, ITEM_FIELDS), np.int32)
        items[:, 1] = np.arange(tokens, self.limits.tokens)
        items[:, 2] = items[:, 8] = 1
        return items


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
    fixed: Fixed | None = None
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


def choose(counts: npt.NDArray[np.int32], most_verify: int) -> dict[str, npt.NDArray[np.bool_]]:
    """Which sequences each kind of launch takes, by their query tokens."""
    return {
        "decode": counts == 1,
        "verify": (counts > 1) & (counts <= most_verify),
        "prefill": counts > most_verify,
    }


def capacity(
    kind: str, limits: Limits, group: int, kv_heads: int, page_size: int, shape: Shape, most_verify: int
) -> Room:
    """Room for whatever :func:`build_items` can make, in one kind of launch, of a step within ``limits``.

    A run of x chunks becomes rint(x) parts, where the x of all runs add up to at most programs / kv_heads. Splitting
    adds at most x - 1/2 items to a run, and a split run (x >= 3/2) has at most 4/3 x partials. No part is shorter than
    a tile.
    """
    per_tile = max(1, shape.rows // group)
    fewest = {"decode": 1, "verify": 2, "prefill": most_verify + 1}[kind]
    runs = min(limits.sequences, limits.tokens // fewest)
    if kind == "decode":
        pieces = limits.tokens  # padding rows too
    else:
        pieces = runs = runs + limits.tokens // per_tile
    tiles = -(-limits.pages * page_size // shape.tile)
    return Room(
        items=pieces + min(shape.programs // kv_heads, runs * (tiles - 1)),
        blocks=min(2 * shape.programs // (3 * kv_heads), runs if tiles > 1 else 0),
        partials=min(4 * shape.programs // (3 * kv_heads), runs * tiles if tiles > 1 else 0),
    )


def prepare_fixed(
    limits: Limits,
    device: torch.device,
    *,
    group: int,
    kv_heads: int,
    window: int | None,
    page_size: int,
    shapes: dict[str, Shape],
    most_verify: int,
) -> tuple[StepArrays, Prepared]:
    """A plan's device arrays and launches for any step within ``limits``, filled with padding."""
    kinds = ["decode"]
    if limits.query_tokens > 1:
        kinds.append("verify")
    if limits.query_tokens > most_verify:
        kinds.append("prefill")
    padding = limits.padding()
    sizes = {name: getattr(padding, name).numel() for name in ARRAYS}
    rooms = {kind: capacity(kind, limits, group, kv_heads, page_size, shapes[kind], most_verify) for kind in kinds}
    for kind, room in rooms.items():
        sizes |= {f"{kind}.items": room.items * ITEM_FIELDS, f"{kind}.blocks": room.blocks * BLOCK_FIELDS}
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = slice(end, end + size)
        end += _aligned(size)
    buffer = torch.empty(end, dtype=torch.int32, device=device)
    chosen = {kind: shapes[kind] for kind in kinds}
    fixed = Fixed(limits, group, kv_heads, window, chosen, most_verify, buffer, places, rooms, padding)
    buffer.copy_(fixed.pack(padding))
    launches = tuple(
        Launch(
            kind=kind,
            shape=shapes[kind],
            row_count=_rows(shapes[kind], group),
            items=buffer[places[f"{kind}.items"]],
            item_count=room.items,
            blocks=buffer[places[f"{kind}.blocks"]],
            block_count=room.blocks,
            partials=room.partials,
        )
        for kind, room in rooms.items()
    )
    on_device = StepArrays(*(buffer[places[name]].view(getattr(padding, name).shape) for name in ARRAYS))
    return on_device, Prepared(launches, fixed=fixed)


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
    built = {}
    for kind, among in choose(counts, most_verify).items():
        chosen = among & ~staged
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
    pieces = [getattr(arrays, name).numpy().astype(np.int32, copy=False).ravel() for name in ARRAYS]
    for items, blocks, _ in built.values():
        pieces += [items.ravel(), blocks.ravel()]
    pieces += [items.ravel() for _, _, items in runs]
    if runs:
        pieces.append(np.arange(arrays.page_table.shape[1], dtype=np.int32) % stage_columns)
    offsets = np.cumsum([0, *(_aligned(piece.size) for piece in pieces)])
    pinned = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = pinned.numpy()
    for piece, offset in zip(pieces, offsets, strict=False):
        flat[offset : offset + piece.size] = piece
    moved = pinned.to(device, non_blocking=True)
    views = iter([moved[offset : offset + piece.size] for piece, offset in zip(pieces, offsets, strict=False)])
    on_device = StepArrays(*(next(views).view(getattr(arrays, name).shape) for name in ARRAYS))
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


def cdiv(number: int, by: int) -> int:
    """Rounded up. Triton's own is a compile-time function: 3 us at a time, several times a launch."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The least power of two from ``number`` on; likewise."""
    return 1 << (number - 1).bit_length()


def _aligned(size: int) -> int:
    """int32 words of a piece: every piece begins on 16 bytes, so that the kernels' loads stay aligned."""
    return -(-size // 4) * 4


def _rows(shape: Shape, group: int) -> int:
    """Rows a partial result has: the query tokens of a tile times the heads of a group."""
    return max(1, shape.rows // group) * group
