"""Geometry: layers, heads, dims, page size, and the groups of layers that share a page pool.

A :class:`CacheLayout` describes a model. Layers whose format, heads, dims and window are equal form a
:class:`GroupLayout`, which is all that a backend ever sees: hybrid, sliding-window and per-layer-format models need no
special case, because each group has its own pool, page ids and page table.

:func:`planes` is the one place that says which arrays a page consists of. The canonical page image, the byte counts
and the reference store all follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch

from kvport.arguments import show, whole_number
from kvport.errors import LayoutError
from kvport.formats import CODES, DTYPES, CacheFormat, TensorFormat
from kvport.rotation import rotation_size

#: The one page size that every first-party backend takes in every phase.
DEFAULT_PAGE_SIZE: Final = 128

#: More layers than this are a mistake, which would show as an endless loop.
MOST_LAYERS: Final = 2**16


@dataclass(frozen=True)
class Plane:
    """One array of a page: ``shape`` is per page and layer, token-major then head.

    ``name`` is ``"key.codes"``, ``"key.scale"``, ``"key.zero"``, ``"value.codes"``, ...
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Side:
    """One stored part of a token: ``key`` and ``value``, or ``latent`` and ``rope`` of a latent (MLA) layer."""

    name: str
    format: TensorFormat
    dim: int


def planes(side: str, fmt: TensorFormat, heads: int, dim: int, page_size: int) -> tuple[Plane, ...]:
    """The arrays that hold one page of one :class:`Side` of one layer.

    Codes are ``(page_size, heads, packed_dim)``. Scales computed at append are ``(page_size, heads)`` per token,
    ``(page_size, heads, groups)`` per group and ``(page_size / N, heads, dim)`` for cN, zeros likewise; static scales
    belong to the layer, not to its pages. mxfp4 has E8M0 bytes per block; nvfp4 E4M3 bytes per block and a float32
    tensor scale per token and head. Outlier channels are ``(page_size, heads, c)`` float32. Sparse outliers have one
    row per page: ``(1, heads, N)`` int32 indices and float32 values, and overflow counts ``(1, heads)`` if static.
    """
    code = CODES[fmt.code]
    found = [Plane(f"{side}.codes", fmt.code_torch_dtype, (page_size, heads, dim // code.per_byte))]
    per_token = (page_size, heads)
    if fmt.granularity == "block":
        found.append(Plane(f"{side}.scale", torch.uint8, (*per_token, dim // fmt.group)))
        if fmt.kind == "nv" and not fmt.static:
            found.append(Plane(f"{side}.tensor_scale", torch.float32, per_token))
    elif fmt.quantized and not fmt.static:
        shape: tuple[int, ...] = per_token
        if fmt.granularity == "group":
            shape = (*per_token, dim // fmt.group)
        elif fmt.granularity == "channel_group":
            shape = (page_size // fmt.group, heads, dim)
        found.append(Plane(f"{side}.scale", fmt.scale_torch_dtype, shape))
        if not fmt.symmetric:
            found.append(Plane(f"{side}.zero", fmt.scale_torch_dtype, shape))
    if fmt.outliers:
        found.append(Plane(f"{side}.outliers", torch.float32, (*per_token, fmt.outliers)))
    if fmt.sparse:
        found.append(Plane(f"{side}.sparse_index", torch.int32, (1, heads, fmt.sparse)))
        found.append(Plane(f"{side}.sparse_value", torch.float32, (1, heads, fmt.sparse)))
        if fmt.static:
            found.append(Plane(f"{side}.sparse_overflow", torch.int32, (1, heads)))
    return tuple(found)


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer.

    ``window`` is the sliding window in tokens (position p sees p-window < j <= p), None for full attention.
    ``format`` overrides the cache's format for this layer. ``shares`` names an earlier layer whose K/V this layer
    reads instead of storing its own. ``latent`` is multi-head latent attention with absorbed projections: K is the
    latent vector of ``value_dim`` channels followed by ``key_dim - value_dim`` rotary channels, V is the latent part,
    stored once (DeepSeek-V2, 2024; 512 + 64 there).
    """

    kv_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    format: CacheFormat | None = None
    shares: int | None = None
    latent: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_heads", "query_heads", "key_dim", "value_dim"):
            whole_number(name, getattr(self, name), 1, error=LayoutError)
        if self.query_heads % self.kv_heads:
            raise LayoutError(f"query_heads {self.query_heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.window is not None:
            whole_number("window, in tokens where it is not None,", self.window, 1, error=LayoutError)
        if self.shares is not None:
            whole_number("shares, a layer where it is not None,", self.shares, 0, error=LayoutError)
        if not isinstance(self.latent, bool):
            raise LayoutError(f"latent must be True or False, got {show(self.latent)}")
        if self.format is not None:
            object.__setattr__(self, "format", CacheFormat.parse(self.format))
        if self.latent and (self.kv_heads != 1 or self.key_dim <= self.value_dim):
            raise LayoutError(
                f"a latent layer has kv_heads 1 and key_dim = latent + rope > value_dim = latent; got kv_heads "
                f"{self.kv_heads}, key_dim {self.key_dim}, value_dim {self.value_dim}"
            )


@dataclass(frozen=True)
class GroupLayout:
    """What a backend stores for one group of equal layers.

    ``layers`` is the number of layers; a backend addresses them as 0 .. layers-1. ``dtype`` is the model's float
    dtype (that of K, V and queries), which some chips need to know to choose a kernel.
    """

    format: CacheFormat
    layers: int
    kv_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    window: int | None = None
    dtype: torch.dtype = torch.float32
    latent: bool = False

    def __post_init__(self) -> None:
        whole_number("page_size (tokens)", self.page_size, 1, error=LayoutError)
        if self.dtype not in DTYPES.values():
            raise LayoutError(f"dtype must be torch.float32, bfloat16 or float16, got {show(self.dtype)}")
        if self.latent != (self.format.rope is not None):
            raise LayoutError(
                f"format {self.format} does not go with {'latent (MLA)' if self.latent else 'ordinary'} layers "
                f"(latent={self.latent}): latent layers take 'latent=CODE,rope=CODE', others 'CODE' or 'k=CODE,v=CODE'"
            )
        for side in self.sides:
            if misfits := side.format.misfits(side.dim, self.page_size):
                raise LayoutError(f"format {self.format} does not fit the {side.name}: " + "; ".join(misfits))
        if self.format.rotate is not None:
            rotation_size(self.rotated_dim)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def sides(self) -> tuple[Side, ...]:
        """What is stored of a token: K and V, or the latent and rope parts that K consists of."""
        if self.format.rope is not None:
            return (
                Side("latent", self.format.key, self.value_dim),
                Side("rope", self.format.rope, self.key_dim - self.value_dim),
            )
        return Side("key", self.format.key, self.key_dim), Side("value", self.format.value, self.value_dim)

    @property
    def rotated_dim(self) -> int:
        """Leading channels of K that a rotation turns: all of them, or the latent part (never MLA's rope part)."""
        return self.value_dim if self.latent else self.key_dim

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays of one page of one layer, K first: the canonical page image."""
        return tuple(
            plane
            for side in self.sides
            for plane in planes(side.name, side.format, self.kv_heads, side.dim, self.page_size)
        )

    @property
    def canonical_page_bytes(self) -> int:
        """Bytes of one page over all layers of the group in the canonical image, no padding."""
        return self.layers * sum(plane.nbytes for plane in self.planes)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens. With page size 16: 0 -> 0, 1 -> 1, 16 -> 1, 17 -> 2."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class Group:
    """A group inside a cache: its layout and the model's layer numbers, in order."""

    layout: GroupLayout
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """A model's attention layers, the page size, the default format and the model's float dtype."""

    layers: tuple[LayerSpec, ...]
    format: CacheFormat
    page_size: int = DEFAULT_PAGE_SIZE
    dtype: torch.dtype = torch.float32
    groups: tuple[Group, ...] = field(init=False)

    def __post_init__(self) -> None:
        given: object = self.layers
        if not isinstance(given, (tuple, list)) or not all(isinstance(spec, LayerSpec) for spec in given):
            raise LayoutError(f"layers must be a tuple of LayerSpec, got {show(given)}")
        object.__setattr__(self, "layers", tuple(given))  # a list is taken too
        if not self.layers:
            raise LayoutError("a cache needs at least one layer")
        object.__setattr__(self, "format", CacheFormat.parse(self.format))
        for index, spec in enumerate(self.layers):
            _check_sharing(self.layers, index, spec)
        object.__setattr__(self, "groups", self._make_groups())

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        query_heads: int | None = None,
        value_dim: int | None = None,
        window: int | None = None,
        format: str | CacheFormat = "int8",
        page_size: int = DEFAULT_PAGE_SIZE,
        dtype: torch.dtype = torch.float32,
    ) -> CacheLayout:
        """A layout of ``layers`` equal layers. ``query_heads`` defaults to ``kv_heads``, ``value_dim`` to head_dim."""
        whole_number("layers", layers, 1, MOST_LAYERS, LayoutError)
        spec = LayerSpec(
            kv_heads=kv_heads,
            query_heads=kv_heads if query_heads is None else query_heads,
            key_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
            window=window,
        )
        return cls((spec,) * layers, CacheFormat.parse(format), page_size, dtype)

    def _make_groups(self) -> tuple[Group, ...]:
        members: dict[GroupLayout, list[int]] = {}
        for index, spec in enumerate(self.layers):
            if spec.shares is not None:
                continue
            layout = GroupLayout(
                format=spec.format or self.format,
                layers=1,
                kv_heads=spec.kv_heads,
                query_heads=spec.query_heads,
                key_dim=spec.key_dim,
                value_dim=spec.value_dim,
                page_size=self.page_size,
                window=spec.window,
                dtype=self.dtype,
                latent=spec.latent,
            )
            members.setdefault(layout, []).append(index)
        return tuple(Group(replace(layout, layers=len(indices)), tuple(indices)) for layout, indices in members.items())

    def locate(self, layer: int) -> tuple[int, int]:
        """(group index, layer index inside the group) that hold the K/V of model layer ``layer``."""
        if type(layer) is not int or not 0 <= layer < len(self.layers):
            raise LayoutError(f"layer {show(layer)} is not one of the cache's layers 0 .. {len(self.layers) - 1}")
        owner = self.layers[layer].shares
        owner = layer if owner is None else owner
        for index, group in enumerate(self.groups):
            if owner in group.layers:
                return index, group.layers.index(owner)
        raise AssertionError(f"layer {owner} is in no group")  # pragma: no cover - _make_groups covers every owner


def _check_sharing(layers: tuple[LayerSpec, ...], index: int, spec: LayerSpec) -> None:
    if spec.shares is None:
        return
    if spec.shares >= index or layers[spec.shares].shares is not None:
        raise LayoutError(
            f"layer {index} shares layer {spec.shares}; it must name an earlier layer that stores its own K/V"
        )
    if replace(spec, shares=None) != layers[spec.shares]:
        raise LayoutError(
            f"layer {index} shares layer {spec.shares} but differs from it: {spec} and {layers[spec.shares]}"
        )
