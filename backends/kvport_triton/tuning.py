"""Kernel shapes: tile, warps and stages by what is multiplied. A small fixed table, never a search at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import triton

from kvport_triton.planning import Shape

Mode = Literal["codes", "native", "exact", "rounded"]

#: The longest run of query tokens that counts as verification of drafts rather than prefill.
MOST_VERIFY: Final = 16
#: The interpreter pays per operation, not per element, and has no multiprocessors to fill: few programs are best.
INTERPRETED_PROCESSORS: Final = 1


@dataclass(frozen=True)
class Tuning:
    """``tile`` stored tokens an iteration, ``warps`` and ``stages`` of the compiled program, ``waves`` programs per
    multiprocessor that splitting aims at, ``rows`` query rows of a program, ``registers`` a thread may have at most
    (None: as many as the compiler likes), which decides how many programs share a multiprocessor."""

    tile: int
    warps: int
    stages: int
    waves: int
    rows: int = 16
    registers: int | None = None

    def shape(self, processors: int) -> Shape:
        return Shape(rows=self.rows, tile=self.tile, programs=processors * self.waves)


def latent(mode: Mode, *, wide: bool, decoding: bool, group: int) -> Tuning:
    """The shape of one launch over latent pages: rows are as long as a tile of others is wide."""
    import os
    rows = group
    if mode == "exact":
        return Tuning(tile=16, warps=8 if wide else 4, stages=1, waves=2, rows=rows)
    env = os.environ.get("LATENT")
    if env:
        t, w, st, wv = map(int, env.split(","))
        return Tuning(tile=t, warps=w, stages=st, waves=wv, rows=rows)
    return Tuning(tile=64, warps=8 if wide else 4, stages=2, waves=1, rows=rows)


def interpreted(kind: str, group: int, most_tokens: int) -> Tuning:
    """The shape of one launch in the interpreter, which pays per operation and hardly per element: few programs of many
    rows. Tiles stay short, so that small caches have whole tiles, masked ones and several of each."""
    rows = group if kind == "decode" else max(group, min(64, triton.next_power_of_2(most_tokens * group)))
    # Lone sequences are split, so that merging is met too.
    return Tuning(tile=64, warps=1, stages=1, waves=1 if kind == "prefill" else 4, rows=rows)


def tuning(kind: str, mode: Mode, *, dim: int, bits: int, group: int, most_tokens: int) -> Tuning:
    """The shape of one launch.

    ``dim`` is the larger of key and value dim, ``bits`` the wider code of K and V, ``most_tokens`` the longest query
    run of the launch.
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
            # Four programs of 128 threads share a multiprocessor's 65536 registers, and one wave is then enough.
            return Tuning(tile=64, warps=4, stages=3, waves=4, rows=group, registers=128)
        if bits <= 4:
            return Tuning(tile=64, warps=1 if not wide else 2, stages=3, waves=8, rows=group)
        return Tuning(tile=64 if wide else 128, warps=2, stages=3, waves=4, rows=group)
    if kind == "verify":
        rows = min(64, triton.next_power_of_2(most_tokens * group))
        return Tuning(tile=64, warps=4, stages=2 if wide else 3, waves=2, rows=max(rows, group))
    return Tuning(tile=64 if wide else 128, warps=8, stages=2, waves=1, rows=128)
