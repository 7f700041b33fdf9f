"""What the pages in a page image hold, layer by layer: code ranges in use, scales, poison; and what looks wrong.

An image has no originals to compare with. What can be seen are the marks of a bad scale: codes crowded at the ends of
their range, codes that are all the same, groups without a range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvport import codec, codec_stats
from kvport.errors import ImageError
from kvport.formats import DTYPES, CacheFormat, TensorFormat, dtype_name
from kvport.image import PageImage
from kvport.layout import planes

#: Share of codes at the ends of their range beyond which a static scale is said to be too small. Gaussian data under
#: its own amax has far fewer: at most one in as many values as were calibrated over.
EXTREME: Final = 0.01
#: Fewer distinct 8-bit codes than this say that a static scale is too large.
FEW_LEVELS: Final = 16
#: Share of groups with scale 0 that is worth a word.
DEAD: Final = 0.5


@dataclass(frozen=True)
class StoredSide:
    """One side of one layer: ``tokens`` of it, in ``format``; near pages have sides named ``near.key``, ...

    ``extreme``: share of codes that are the largest or smallest of their format. A dynamic scale makes at least one a
    group, a static scale few; many mean saturation. ``zeros``: share of codes that stand for zero (symmetric formats).
    ``levels``: distinct codes in use. ``scale_min`` and ``scale_max``: of stored scales above 0, None where there are
    none. ``dead``: share of groups with scale 0. ``poisoned``: groups whose scale is NaN, or NaN and infinities in
    float pages. ``kept``: numbers kept apart as sparse outliers; ``overflow``: those beyond a static range that found
    no room and were clipped; None for formats without.
    """

    layer: int
    side: str
    format: str
    tokens: int
    extreme: float | None = None
    zeros: float | None = None
    levels: int | None = None
    scale_min: float | None = None
    scale_max: float | None = None
    dead: float | None = None
    poisoned: int = 0
    kept: int | None = None
    overflow: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "suspicions": list(self.suspicions())}

    def suspicions(self) -> tuple[str, ...]:
        """What looks wrong, in words; empty for nothing."""
        fmt = TensorFormat.parse(self.format)
        found = []
        if self.poisoned:
            found.append(f"{self.poisoned} poisoned {'groups' if fmt.quantized else 'values'}")
        if self.tokens and self.levels == 1:
            found.append("every code is the same")
        elif fmt.static and fmt.bits == 8 and self.levels is not None and 0 < self.levels < FEW_LEVELS:
            found.append(f"{self.levels} of 256 codes in use: the static scale is too large")
        if fmt.static and fmt.kind != "nv" and self.extreme is not None and self.extreme > EXTREME:
            found.append(f"{self.extreme:.1%} of codes at the ends of their range: the static scale is too small")
        if self.dead is not None and self.dead > DEAD:
            found.append(f"{self.dead:.1%} of groups are all zero")
        if self.overflow:
            found.append(f"{self.overflow} numbers beyond the static range found no room (sparse={fmt.sparse})")
        return tuple(found)


def inspect_image(image: PageImage) -> list[StoredSide]:
    """Look through the codes and scales of a page image.

    Raises :class:`ImageError` for a layer whose planes are not those of the image's format: the format of a layer of
    its own is not written in the image.
    """
    fmt = CacheFormat.parse(image.format)
    found = []
    for layer, stored in image.layers.items():
        tiered = any(name.startswith("near.") for name in stored)
        sides: dict[str, dict[str, Tensor]] = {}
        for name, tensor in stored.items():
            side, _, part = name.rpartition(".")
            sides.setdefault(side, {})[part] = tensor
        for side, parts in sides.items():
            if "codes" not in parts or parts["codes"].ndim != 4:
                raise ImageError(
                    f"layer {layer} {side} of the image has no codes of shape (pages, page size, KV heads, packed dim)"
                )
            # The sequence's last, partly filled page is among the near ones where there are such.
            ends_here = side.startswith("near.") == tiered
            found.append(_stored_side(image, layer, side, _format_of(fmt, side, parts), parts, ends_here=ends_here))
    return found


def _format_of(fmt: CacheFormat, side: str, parts: Mapping[str, Tensor]) -> TensorFormat:
    """The format of a side; near pages without a named one are in the model's dtype, which their codes have."""
    if side.startswith("near."):
        stored = parts["codes"].dtype
        if fmt.near is None and stored not in DTYPES.values():
            raise ImageError(f"the image has {side} in {stored}, which is no model's dtype")
        return fmt.near or TensorFormat(dtype_name(stored))
    own = {"value": fmt.value, "rope": fmt.rope}.get(side, fmt.key)
    if own is None:
        raise ImageError(f"the image has a side {side!r}, which its format {fmt} does not have")
    return own


def _stored_side(
    image: PageImage, layer: int, side: str, fmt: TensorFormat, parts: Mapping[str, Tensor], *, ends_here: bool
) -> StoredSide:
    codes = parts["codes"]
    pages, size, heads, packed = codes.shape
    dim = packed * max(1, 8 // fmt.bits)
    wanted = {p.name.rpartition(".")[2]: ((pages, *p.shape), p.dtype) for p in planes(side, fmt, heads, dim, size)}
    if {name: (tuple(t.shape), t.dtype) for name, t in parts.items()} != wanted:
        raise ImageError(
            f"layer {layer} {side} is not stored as {fmt}: it has a format of its own, which the image does not name"
        )
    tokens = pages * size - (-image.length % size if pages and ends_here else 0)
    flat = codes.flatten(0, 1)[:tokens]
    if not fmt.quantized:
        lost = int((~flat.to(torch.float32).isfinite()).sum())
        return StoredSide(layer, side, str(fmt), tokens, poisoned=lost)
    values = codec.unpack(fmt, flat)
    least, most = codec.code_range(fmt)
    scale = torch.empty(0, device="cpu")
    if "scale" in parts:
        rows = parts["scale"].flatten(0, 1)
        scale = codec_stats.scale_values(fmt, rows if fmt.granularity == "channel_group" else rows[:tokens])
    positive = scale[scale.isfinite() & (scale > 0)]
    return StoredSide(
        layer,
        side,
        str(fmt),
        tokens,
        extreme=_share((values <= least) | (values >= most)),
        zeros=_share(values == 0) if fmt.symmetric else None,
        levels=int(values.flatten().sort().values.diff().count_nonzero()) + 1 if tokens else 0,
        scale_min=positive.min().item() if positive.numel() else None,
        scale_max=positive.max().item() if positive.numel() else None,
        dead=_share(scale == 0) if "scale" in parts else None,
        poisoned=int(scale.isnan().sum()),
        kept=int((parts["sparse_index"] >= 0).sum()) if fmt.sparse else None,
        overflow=int(parts["sparse_overflow"].sum()) if fmt.sparse and fmt.static else None,
    )


def _share(which: Tensor) -> float:
    return which.double().mean().item() if which.numel() else 0.0
