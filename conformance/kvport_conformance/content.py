"""What the judge knows of every token: what was given, what must be stored, what that decodes to.

Tokens are numbered; a slot of a page, or a position of a sequence, is then just such a number. What is stored for a
token depends on that token's row alone, so one table serves every page, sequence and branch that holds it. (In cN
formats it depends on the N tokens of its group: they are numbered together, and each carries the group's scale.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_conformance import inputs, oracle_codec
from kvport_conformance.axes import spec_of
from kvport_conformance.oracle_codec import CodecSpec
from kvport_conformance.oracle_floats import BF16, FP16, Array, BoolArray, Float32Array
from kvport_conformance.tensors import plane_to_torch

Ids = npt.NDArray[np.int64]

SIDES: Final = ("key", "value")
_SMALL: Final = {"float32": None, "bfloat16": BF16, "float16": FP16}


@dataclass(frozen=True)
class Side:
    """K or V of one layer: its codec, its shape, and its static scales where the format has them."""

    name: str
    spec: CodecSpec
    heads: int
    dim: int
    static_scale: Float32Array | None = None
    static_zero: Float32Array | None = None

    def encode(self, x: Float32Array) -> oracle_codec.Encoded:
        return oracle_codec.encode(self.spec, x, self.static_scale, self.static_zero)

    def decode(self, planes: Mapping[str, Array]) -> Float32Array:
        return oracle_codec.decode(self.spec, planes, self.dim, self.static_scale, self.static_zero)

    @property
    def tokens_per_group(self) -> int:
        """Tokens that share a scale: N of cN, else 1."""
        return self.spec.group if self.spec.granularity == "channel_group" else 1

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
        return tuple(oracle_codec.plane_shapes(self.spec, 1, self.heads, self.dim))

    def scales(self) -> SideScales | None:
        """What a backend is given for this side."""
        if self.static_scale is None:
            return None
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.spec.scale_dtype]
        zero = None if self.static_zero is None else torch.from_numpy(self.static_zero.copy()).to(dtype)
        return SideScales(torch.from_numpy(np.array(self.static_scale)).to(dtype), zero)


def make_side(name: str, fmt: TensorFormat, heads: int, dim: int, seed: int) -> Side:
    """One side with static scales, where its format needs them, calibrated so that about one row in ten saturates."""
    spec = spec_of(fmt)
    if not spec.static:
        return Side(name, spec, heads, dim)
    generate = inputs.key if name == "key" else inputs.value
    sample = generate(seed, (64, heads, dim))
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
        return Side(name, spec, heads, dim, cast(np.maximum(np.abs(low), np.abs(high)) / levels))
    zero = cast(np.asarray(low, np.float32)) + np.float32(0.0)
    return Side(name, spec, heads, dim, cast((high - zero) / levels), zero)


class Content:
    """The tokens of one layer, by number."""

    def __init__(self, key: Side, value: Side) -> None:
        self.sides = {"key": key, "value": value}
        self.count = 0
        self.source = {n: np.zeros((0, s.heads, s.dim), np.float32) for n, s in self.sides.items()}
        self.decoded = {n: array.copy() for n, array in self.source.items()}
        self.flagged: BoolArray = np.zeros(0, np.bool_)
        self.planes: dict[str, Array] = {}
        for name, side in self.sides.items():
            shapes = oracle_codec.plane_shapes(side.spec, side.tokens_per_group, side.heads, side.dim)
            for plane, (shape, dtype) in shapes.items():
                self.planes[f"{name}.{plane}"] = np.zeros((0, *shape[1:]), dtype)

    @classmethod
    def of(cls, layout: GroupLayout, seed: int) -> Content:
        """The content table of one layer of ``layout``, with static scales from ``seed`` where needed."""
        fmt = layout.format
        return cls(
            make_side("key", fmt.key, layout.kv_heads, layout.key_dim, seed),
            make_side("value", fmt.value, layout.kv_heads, layout.value_dim, seed),
        )

    def scales(self) -> LayerScales:
        return LayerScales(self.sides["key"].scales(), self.sides["value"].scales())

    def add(self, key: Float32Array, value: Float32Array) -> Ids:
        """Tokens given as float rows; what must be stored for them is the oracle's encoding."""
        flagged = np.zeros(len(key), np.bool_)
        planes: dict[str, Array] = {}
        for name, x in (("key", key), ("value", value)):
            encoded = self.sides[name].encode(x)
            flagged |= encoded.flagged.any(axis=-1)
            planes |= {f"{name}.{plane}": array for plane, array in encoded.planes.items()}
        return self._extend(planes, {"key": key, "value": value}, flagged)

    def add_planes(self, planes: Mapping[str, Array]) -> Ids:
        """Tokens given as planes (``"key.codes"`` ..., token-major), such as no encoder need have made."""
        count = len(planes["key.codes"])
        unknown = {n: np.full((count, s.heads, s.dim), np.nan, np.float32) for n, s in self.sides.items()}
        return self._extend(dict(planes), unknown, np.zeros(count, np.bool_))

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
        return 1 if short == "codes" else self.sides[side].tokens_per_group

    def by_token(self, plane: str, pages: Array) -> Array:
        """An exported plane (pages, rows, ...) with one row for each slot."""
        repeats = self._repeats(plane)
        return pages if repeats == 1 else np.repeat(pages, repeats, axis=1)

    def _extend(self, planes: dict[str, Array], source: dict[str, Float32Array], flagged: BoolArray) -> Ids:
        first, self.count = self.count, self.count + len(flagged)
        self.planes = {
            n: np.concatenate([a, np.repeat(planes[n], self._repeats(n), axis=0)]) for n, a in self.planes.items()
        }
        for name, side in self.sides.items():
            prefix = f"{name}."
            decoded = side.decode({n.removeprefix(prefix): a for n, a in planes.items() if n.startswith(prefix)})
            self.decoded[name] = np.concatenate([self.decoded[name], decoded])
            self.source[name] = np.concatenate([self.source[name], source[name]])
        self.flagged = np.concatenate([self.flagged, flagged])
        return np.arange(first, self.count, dtype=np.int64)
