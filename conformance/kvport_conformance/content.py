"""What the judge knows of every token: what was given, what must be stored, what that decodes to.

Tokens are numbered; a slot of a page, or a position of a sequence, is then just such a number. What is stored for a
token depends on that token's row alone, so one table serves every page, sequence and branch that holds it. (In cN
formats it depends on the N tokens of its group, with sparse outliers on all of its page: they are numbered together,
and each carries what they share.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_conformance import inputs, oracle_codec, oracle_rotation
from kvport_conformance.axes import spec_of
from kvport_conformance.oracle_codec import CodecSpec
from kvport_conformance.oracle_floats import BF16, FP16, Array, BoolArray, Float32Array
from kvport_conformance.tensors import plane_to_torch

Ids = npt.NDArray[np.int64]

_SMALL: Final = {"float32": None, "bfloat16": BF16, "float16": FP16}


@dataclass(frozen=True)
class Side:
    """One stored part of one layer, K or V, or the latent or rope part: its codec, its shape, and what its format has
    chosen beforehand: static scales, outlier channels (ascending, by head)."""

    name: str
    spec: CodecSpec
    heads: int
    dim: int
    static_scale: Float32Array | None = None
    static_zero: Float32Array | None = None
    channels: Ids | None = None

    def encode(self, x: Float32Array) -> oracle_codec.Encoded:
        return oracle_codec.encode(self.spec, x, self.static_scale, self.static_zero, self.channels)

    def decode(self, planes: Mapping[str, Array]) -> Float32Array:
        return oracle_codec.decode(self.spec, planes, self.dim, self.static_scale, self.static_zero, self.channels)

    def round_trip_bound(self, x: Float32Array, planes: Mapping[str, Array]) -> npt.NDArray[np.float64]:
        """The allowed error of each element."""
        return oracle_codec.round_trip_bound(self.spec, x, planes, self.static_scale, self.static_zero, self.channels)

    @property
    def tokens_together(self) -> int:
        """Tokens that must be encoded together: N of cN, those of a page for sparse outliers, else 1."""
        return max(self.repeats("scale"), self.spec.page, 1)

    def repeats(self, plane: str) -> int:
        """How many tokens share one row of this plane."""
        if plane.startswith("sparse_"):
            return self.spec.page
        return self.spec.group if plane in ("scale", "zero") and self.spec.granularity == "channel_group" else 1

    def element_scale(self, planes: Mapping[str, Array], shape: tuple[int, ...]) -> Float32Array:
        """The float32 scale of each element (tokens, heads, dim)."""
        return oracle_codec._element_scale(self.spec, planes, shape, self.static_scale)

    def element_zero(self, planes: Mapping[str, Array], shape: tuple[int, ...]) -> Float32Array:
        """The float32 zero of each element; for specs that have one."""
        return oracle_codec._element_zero(self.spec, planes, shape, self.static_zero)

    def plane_values(self, plane: Array) -> Float32Array:
        """A scale or zero plane as float32."""
        return oracle_codec._from_plane(self.spec.scale_dtype, plane)

    def plane_names(self) -> tuple[str, ...]:
        return tuple(oracle_codec.plane_shapes(self.spec, self.tokens_together, self.heads, self.dim))

    def scales(self) -> SideScales | None:
        """What a backend is given for this side."""
        if self.static_scale is None:
            return None
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.spec.scale_dtype]
        zero = None if self.static_zero is None else torch.from_numpy(self.static_zero.copy()).to(dtype)
        return SideScales(torch.from_numpy(np.array(self.static_scale)).to(dtype), zero)


def make_side(name: str, fmt: TensorFormat, heads: int, dim: int, page_size: int, seed: int) -> Side:
    """One side with what its format needs beforehand: static scales, calibrated so that about one row in ten saturates,
    and as outlier channels those of the largest magnitude."""
    spec = spec_of(fmt, page_size)
    generate = inputs.value if name == "value" else inputs.key
    sample = generate(seed, (64, heads, dim))
    channels = None
    if spec.outliers:
        largest = np.argsort(-np.abs(sample).max(axis=0), axis=-1, kind="stable")[:, : spec.outliers]
        channels = np.sort(largest, axis=-1).astype(np.int64)
    if not spec.static:
        return Side(name, spec, heads, dim, channels=channels)
    granularity = "tensor" if spec.code in oracle_codec.BLOCK_SIZE else spec.granularity
    axes = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[granularity]
    low, high = sample.min(axis=axes) * np.float32(0.9375), sample.max(axis=axes) * np.float32(0.9375)
    small = _SMALL[spec.scale_dtype]

    def cast(x: Float32Array) -> Float32Array:
        x = np.asarray(x, np.float32)
        return x if small is None else small.round(x)

    if spec.code in oracle_codec.BLOCK_SIZE:
        levels = oracle_codec.NVFP4_RANGE
    elif spec.code in oracle_codec.FP8:
        levels = oracle_codec.FP8[spec.code].largest
    else:
        levels = np.float32(spec.code_range[1])
    if not spec.has_zero:
        scale = cast(np.maximum(np.abs(low), np.abs(high)) / levels)
        return Side(name, spec, heads, dim, scale, channels=channels)
    zero = np.asarray(cast(np.asarray(low, np.float32)) + np.float32(0.0))
    return Side(name, spec, heads, dim, cast((high - zero) / levels), zero, channels)


class Content:
    """The tokens of one layer, by number.

    By the name of a side and as ``key`` and ``value``, which a latent layer makes of its latent and rope parts:
    ``source`` is what was encoded, ``decoded`` what it reads back as. ``given`` is what was given as key and value,
    which differs from the source where K is rotated.
    """

    def __init__(self, sides: Sequence[Side], *, latent: bool = False, rotate: int | None = None) -> None:
        self.sides = {side.name: side for side in sides}
        self.latent, self.rotate = latent, rotate
        self.count = 0
        first, second = sides
        dims = {"key": (first.heads, first.dim + second.dim if latent else first.dim)}
        dims["value"] = (first.heads, first.dim) if latent else (second.heads, second.dim)
        dims |= {side.name: (side.heads, side.dim) for side in sides}
        self.source = {name: np.zeros((0, *shape), np.float32) for name, shape in dims.items()}
        self.decoded = {name: array.copy() for name, array in self.source.items()}
        self.given = {name: self.source[name].copy() for name in ("key", "value")}
        self.flagged: BoolArray = np.zeros(0, np.bool_)
        self.planes: dict[str, Array] = {}
        for side in sides:
            shapes = oracle_codec.plane_shapes(side.spec, side.tokens_together, side.heads, side.dim)
            for plane, (shape, dtype) in shapes.items():
                self.planes[f"{side.name}.{plane}"] = np.zeros((0, *shape[1:]), dtype)

    @classmethod
    def of(cls, layout: GroupLayout, seed: int, rotate: int | None = None) -> Content:
        """The content table of one layer of ``layout``, with what its format needs beforehand made from ``seed``.

        ``rotate``: the seed of the rotation that rows go through before they are stored here, None for none.
        """
        fmt, dims = layout.format, (layout.key_dim, layout.value_dim)
        parts = {"key": (fmt.key, dims[0]), "value": (fmt.value, dims[1])}
        if fmt.rope is not None:
            parts = {"latent": (fmt.key, dims[1]), "rope": (fmt.rope, dims[0] - dims[1])}
        sides = [
            make_side(name, side, layout.kv_heads, dim, layout.page_size, seed) for name, (side, dim) in parts.items()
        ]
        return cls(sides, latent=fmt.rope is not None, rotate=rotate)

    @property
    def tokens_together(self) -> int:
        """Tokens that must be added together, or a multiple of them."""
        return math.lcm(*(side.tokens_together for side in self.sides.values()))

    @property
    def rotated_dim(self) -> int:
        """Leading channels of K that a rotation turns: never MLA's rope part."""
        return next(iter(self.sides.values())).dim

    def scales(self) -> LayerScales:
        first, second = self.sides.values()
        channels = [None if side.channels is None else torch.from_numpy(side.channels) for side in (first, second)]
        if self.latent:
            return LayerScales(first.scales(), key_channels=channels[0])
        return LayerScales(first.scales(), second.scales(), *channels)

    def turned(self, key: Float32Array) -> Float32Array:
        """K or queries as they are stored, or attend what is stored."""
        return key if self.rotate is None else oracle_rotation.rotate(key, self.rotate, self.rotated_dim)

    def add(self, key: Float32Array, value: Float32Array) -> Ids:
        """Tokens given as float rows; what must be stored for them is the oracle's encoding. A latent layer's value is
        its key's latent part, whatever is given."""
        given = {"key": key, "value": key[..., : self.rotated_dim] if self.latent else value}
        source = self._parts(self.turned(key), value)
        flagged = np.zeros(len(key), np.bool_)
        planes: dict[str, Array] = {}
        for name, side in self.sides.items():
            encoded = side.encode(source[name])
            flagged |= encoded.flagged.any(axis=-1)
            planes |= {f"{name}.{plane}": array for plane, array in encoded.planes.items()}
        return self._extend(planes, given, source, flagged)

    def _parts(self, key: Float32Array, value: Float32Array) -> dict[str, Float32Array]:
        """K and V, and a latent layer's two parts of K."""
        if not self.latent:
            return {"key": key, "value": value}
        latent, rope = key[..., : self.rotated_dim], key[..., self.rotated_dim :]
        return {"key": key, "value": latent, "latent": latent, "rope": rope}

    def add_planes(self, planes: Mapping[str, Array]) -> Ids:
        """Tokens given as planes (``"key.codes"`` ..., token-major), such as no encoder need have made."""
        count = len(planes[f"{next(iter(self.sides))}.codes"])
        unknown = {n: np.full((count, *x.shape[1:]), np.nan, np.float32) for n, x in self.source.items()}
        given = {name: unknown[name] for name in self.given}
        return self._extend(dict(planes), given, unknown, np.zeros(count, np.bool_))

    def side_planes(self, name: str, ids: Ids) -> dict[str, Array]:
        """Planes of one side by short name, for these tokens."""
        prefix = f"{name}."
        return {n.removeprefix(prefix): a[ids] for n, a in self.planes.items() if n.startswith(prefix)}

    def torch_planes(self, ids: Ids, shape: tuple[int, ...], layout: GroupLayout) -> dict[str, torch.Tensor]:
        """Every plane for these tokens as host tensors, leading dims ``shape`` (pages, page size)."""
        dtypes = {plane.name: plane.dtype for plane in layout.planes}
        return {
            n: plane_to_torch(a[ids].reshape(*shape, *a.shape[1:])[:, :: self._repeats(n)], dtypes[n])
            for n, a in self.planes.items()
        }

    def _repeats(self, plane: str) -> int:
        """How many tokens share one row of this plane."""
        side, _, short = plane.partition(".")
        return self.sides[side].repeats(short)

    def by_token(self, plane: str, pages: Array) -> Array:
        """An exported plane (pages, rows, ...) with one row for each slot."""
        repeats = self._repeats(plane)
        return pages if repeats == 1 else np.repeat(pages, repeats, axis=1)

    def _extend(
        self,
        planes: dict[str, Array],
        given: dict[str, Float32Array],
        source: dict[str, Float32Array],
        flagged: BoolArray,
    ) -> Ids:
        first, self.count = self.count, self.count + len(flagged)
        self.planes = {
            n: np.concatenate([a, np.repeat(planes[n], self._repeats(n), axis=0)]) for n, a in self.planes.items()
        }
        decoded = {}
        for name, side in self.sides.items():
            prefix = f"{name}."
            decoded[name] = side.decode({n.removeprefix(prefix): a for n, a in planes.items() if n.startswith(prefix)})
        if self.latent:
            decoded |= {"key": np.concatenate([*decoded.values()], axis=-1), "value": decoded["latent"]}
        for known, new in ((self.given, given), (self.source, source), (self.decoded, decoded)):
            for name in known:
                known[name] = np.concatenate([known[name], new[name]])
        self.flagged = np.concatenate([self.flagged, flagged])
        return np.arange(first, self.count, dtype=np.int64)
