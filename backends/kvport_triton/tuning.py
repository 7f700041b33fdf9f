"""Kernel shapes: tile, warps and stages by what is multiplied. A small fixed table, never a search at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from kvport_triton.planning import Shape, power_of_two

Mode = Literal["codes", "native", "exact", "rounded"]

#: The longest run of query tokens that counts as verification of drafts rather than prefill.
MOST_VERIFY: Final = 16
#: The interpreter pays per operation, not per element, and has no multiprocessors to fill: few programs are best.
INTERPRETED_PROCESSORS: Final = 1
#: 32-bit registers of a multiprocessor (of every compute capability from 8.0 to 12.0), and the most of a thread.
REGISTERS: Final = 65536
MOST_REGISTERS: Final = 255


@dataclass(frozen=True)
class Tuning:
    """``tile`` stored tokens an iteration, ``warps`` and ``stages`` of the compiled program, ``waves`` programs per
    multiprocessor that splitting aims at, ``rows`` query rows of a program, ``registers`` a thread may have at most
    (None: as many as the compiler likes), which decides how many programs share a multiprocessor, ``padded`` the rows
    that products have at least."""

    tile: int
    warps: int
    stages: int
    waves: int
    rows: int = 16
    registers: int | None = None
    padded: int = 16

    def fitted(self) -> Tuning:
        """The same shape with no more registers a thread than let ``waves`` programs share a multiprocessor."""
        room = REGISTERS // (self.waves * self.warps * 32) // 8 * 8
        return replace(self, registers=room if room < MOST_REGISTERS else None)

    def shape(self, processors: int) -> Shape:
        return Shape(rows=self.rows, tile=self.tile, programs=processors * self.waves)


def latent(mode: Mode, *, group: int, width: int, row_bytes: int, decoded: bool, shared: int | None) -> Tuning:
    """The shape of one launch over latent pages, whose rows are as long as a tile of others is wide; a program has one
    query token. Measured on an H200 with 16 and 128 heads.

    ``width`` is the channels of both parts, ``row_bytes`` what a token of both occupies, ``decoded`` whether it must be
    decoded, ``shared`` the bytes of shared memory that a program may have (None: interpreted).
    """
    if shared is None:
        return Tuning(tile=32, warps=1, stages=1, waves=2, rows=group)
    warps = 8 if width > 288 else 4
    if mode == "exact":
        return Tuning(tile=16, warps=warps, stages=1, waves=2, rows=group)
    if not decoded and group <= 16:
        return Tuning(tile=32, warps=4, stages=2, waves=2, rows=group)
    # 64 rows are multiplied from shared memory, which few heads profit from too: what lies in registers, codes on their
    # way to floats, is what there is no room for. The query stays there, beside stored tiles on their way and a decoded
    # one.
    for tile, stages in ((64, 2), (32, 2), (32, 1)):
        room = 64 * width * 2 + (stages * tile * row_bytes if stages > 1 else 0) + (tile * width * 2 if decoded else 0)
        if room <= shared:
            break
    return Tuning(tile=tile, warps=warps, stages=stages, waves=1, rows=group, padded=64)


def reads_runs(page_size: int, tile: int, bits: int) -> bool:
    """Whether decode reads V's pages as runs of memory and turns them in shared memory: where rows of a page are only
    16 bytes, and where it measured faster."""
    return page_size <= tile and (page_size == 16 or bits >= 8)


def interpreted(kind: str, group: int, most_tokens: int) -> Tuning:
    """The shape of one launch in the interpreter, which pays per operation and hardly per element: few programs of many
    rows. Tiles stay short, so that small caches have whole tiles, masked ones and several of each."""
    rows = group if kind == "decode" else max(group, min(64, power_of_two(most_tokens * group)))
    # Lone sequences are split, so that merging is met too.
    return Tuning(tile=64, warps=1, stages=1, waves=1 if kind == "prefill" else 4, rows=rows)


def tuning(kind: str, mode: Mode, *, dim: int, bits: int, slices: int, group: int, most_tokens: int) -> Tuning:
    """The shape of one launch.

    ``dim`` is the larger of key and value dim, ``bits`` the wider code of K and V, ``slices`` the most that a row of
    either is cut into, ``most_tokens`` the longest query run of the launch.
    """
    wide = dim > 128
    if mode == "exact":
        # float32 products run on the ordinary lanes and are unrolled: small tiles keep registers and code in bounds.
        return Tuning(tile=32, warps=8 if wide else 4, stages=1, waves=4, rows=group if kind == "decode" else 16)
    if mode == "rounded":
        # Codes become floats one by one, which leaves few registers; not measured.
        return Tuning(tile=32 if wide else 64, warps=4, stages=1, waves=4, rows=group if kind == "decode" else 32)
    if kind == "decode":
        # Measured on an H200 over batches of 1 to 64 and contexts of 4k to 32k (docs/triton.md): the best all round.
        if mode == "native":
            if wide:
                return Tuning(tile=64, warps=4, stages=2, waves=2, rows=group)
            return Tuning(tile=64, warps=4, stages=3, waves=4, rows=group).fitted()
        if wide:
            return Tuning(tile=64, warps=2, stages=3, waves=8 if bits <= 4 else 4, rows=group)
        if slices > 4:
            return Tuning(tile=64, warps=1, stages=3, waves=12, rows=group).fitted()
        if bits <= 4 or slices > 1:
            return Tuning(tile=64, warps=1, stages=3, waves=8, rows=group)
        return Tuning(tile=128, warps=2, stages=3, waves=4, rows=group)
    if kind == "verify":
        rows = min(64, power_of_two(most_tokens * group))
        return Tuning(tile=64, warps=4, stages=2 if wide else 3, waves=2, rows=max(rows, group))
    return Tuning(tile=64 if wide else 128, warps=8, stages=2, waves=1, rows=128)
