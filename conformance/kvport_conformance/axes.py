"""What cases vary over: formats, geometries, and the tiers that decide how much of their product is run.

Both are names first: a format is its canonical string, a geometry a short word such as ``kv2q4-d64-p16`` (2 KV heads,
4 query heads, head dim 64, page size 16). Case ids are made of these names, so they must never change meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

from kvport.formats import CacheFormat, TensorFormat
from kvport_conformance.oracle_codec import BLOCK_SIZE, FLOAT_PAGES, CodecSpec, plane_shapes
from kvport_conformance.oracle_rotation import block_of

Tier = Literal["quick", "full"]
TIERS: Final[tuple[Tier, ...]] = ("quick", "full")

DTYPE_WORDS: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Geometry:
    """One group of layers. ``dtype`` is the model's float dtype (K, V and queries), a torch name."""

    kv_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    layers: int = 2
    window: int | None = None
    dtype: str = "float32"
    latent: bool = False

    @property
    def name(self) -> str:
        dims = f"d{self.key_dim}" + (f"v{self.value_dim}" if self.value_dim != self.key_dim else "")
        parts = [f"kv{self.kv_heads}q{self.query_heads}", dims, f"p{self.page_size}"]
        if self.layers != 2:
            parts.append(f"L{self.layers}")
        if self.window is not None:
            parts.append(f"w{self.window}")
        if self.dtype != "float32":
            parts.append(DTYPE_WORDS[self.dtype])
        if self.latent:
            parts.append("mla")
        return "-".join(parts)


def geometry(
    kv_heads: int,
    query_heads: int,
    dim: int,
    page_size: int,
    *,
    value_dim: int | None = None,
    layers: int = 2,
    window: int | None = None,
    dtype: str = "float32",
) -> Geometry:
    return Geometry(
        kv_heads, query_heads, dim, dim if value_dim is None else value_dim, page_size, layers, window, dtype
    )


def mla(
    query_heads: int, latent: int, rope: int, page_size: int, *, layers: int = 2, dtype: str = "float32"
) -> Geometry:
    """A latent (MLA) geometry: K is ``latent`` channels and ``rope`` more, V the latent part."""
    return Geometry(1, query_heads, latent + rope, latent, page_size, layers, None, dtype, latent=True)


# --- formats --------------------------------------------------------------------------------------------------------

FLOAT_FORMATS: Final = ("fp32", "fp16", "bf16")

INTEGER_FORMATS: Final = (
    "int8",
    "int8:scale=bf16",
    "int8:scale=fp16",
    "int8:g32",
    "int8:asym",
    "int8:g16:asym:scale=bf16",
    "int4",
    "int4:g16",
    "int4:g32:scale=fp16",
    "int4:g64",
    "int4:g16:asym",
    "int4:g32:asym:scale=bf16",
    "int2:g16",
    "int2:g32:asym:scale=fp16",
)

STATIC_FORMATS: Final = (
    "int8:tensor:static",
    "int8:head:static",
    "int8:channel:static:scale=bf16",
    "int8:head:asym:static",
    "int4:channel:asym:static:scale=fp16",
    "int2:head:static",
)

SMALL_FLOAT_FORMATS: Final = (
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_e4m3:g32:scale=bf16",
    "fp8_e4m3:tensor:static",
    "fp8_e4m3:head:static:scale=fp16",
    "mxfp4",
    "nvfp4",
    "nvfp4:static",
)

PAIR_FORMATS: Final = (
    "k=int4:g64,v=int8",
    "k=int8:asym,v=int4:g32",
    "k=fp16,v=fp8_e4m3",
    "k=int8:channel:static:scale=bf16,v=int4:g16",
)

#: A few channels of each KV head kept in float32.
OUTLIER_FORMATS: Final = (
    "k=int4:g16:outliers=4,v=int4:g16",
    "int8:outliers=3",
    "int2:g16:asym:scale=fp16:outliers=2",
    "k=int8:channel:static:scale=bf16:outliers=2,v=fp8_e4m3:outliers=1",
)

DYNAMIC_FORMATS: Final = (*INTEGER_FORMATS, "fp8_e4m3", "mxfp4", "nvfp4", *PAIR_FORMATS[:2])
FORMATS: Final = (
    *FLOAT_FORMATS, *INTEGER_FORMATS, *STATIC_FORMATS, *SMALL_FLOAT_FORMATS, *PAIR_FORMATS, *OUTLIER_FORMATS,
)  # fmt: skip

#: Latent (MLA) layers: the latent part, which is V too, and the rotary part, each in its own format.
LATENT_FORMATS: Final = (
    "latent=int8,rope=bf16",
    "latent=int4:g16:asym,rope=int8",
    "latent=fp8_e4m3:g32,rope=bf16",
    "latent=int8:tensor:static,rope=fp32",
    "latent=bf16,rope=bf16",
    "latent=int4:g32:outliers=3,rope=fp8_e5m2",
    "latent=nvfp4,rope=fp16",
    "latent=int8:g64:scale=fp16,rope=bf16",
)

#: Codes that exist for whole pages only: one scale over several tokens, and sparse outliers.
SEALED_ONLY: Final = (
    "int2:c16:asym:scale=fp16",
    "k=int4:c16,v=int4:g16",
    "k=int8:c16:scale=bf16,v=int8",
    "int4:g16:sparse=24",
    "k=int8:channel:static:sparse=8,v=int2:c16:asym:scale=fp16:sparse=16",
)

#: Near and far pages.
TIERED: Final = (
    "int8,recent=20",
    "int8,sink=4",
    "int4:g16:asym,sink=20,recent=17",
    "int8,recent=16:fp8_e4m3",
    "int8:head:static,recent=16",
    "k=int2:c16:asym:scale=fp16,v=int2:g16:asym:scale=fp16,recent=32",
    "k=int4:c16,v=int4:g16",
    "mxfp4,recent=1",
    "int4:g16:sparse=24",
    "k=int8:channel:static:sparse=8,v=int2:c16:asym:scale=fp16:sparse=16,recent=3",
    "k=int4:g16:outliers=4,v=int8,recent=20",
    "int4:g16:asym,recent=17,rotate=7",
)
#: Tiers of latent layers.
LATENT_TIERED: Final = (
    "latent=int8,rope=bf16,recent=20",
    "latent=int4:c16:sparse=9,rope=int8",
    "latent=int4:g16,rope=bf16,sink=3,rotate=4",
)

#: K behind a rotation.
ROTATED_FORMATS: Final = ("int4:g16,rotate=7", "k=int8:asym,v=int4:g16,rotate=4294967295")


def _granularities(code: str, symmetries: tuple[str, ...]) -> list[str]:
    """Every granularity of a code, with every symmetry it has."""
    dynamic = [f"{code}{size}{symmetry}" for size in ("", ":g16", ":c16") for symmetry in symmetries]
    static = [f"{code}:{g}{symmetry}:static" for g in ("tensor", "head", "channel") for symmetry in symmetries]
    return [*dynamic, *static]


#: Every code with every granularity and symmetry that it has.
MATRIX: Final = (
    *FLOAT_FORMATS,
    *(text for code in ("int8", "int4", "int2") for text in _granularities(code, ("", ":asym"))),
    *(text for code in ("fp8_e4m3", "fp8_e5m2") for text in _granularities(code, ("",))),
    "mxfp4", "nvfp4", "nvfp4:static",
)  # fmt: skip

#: One format of each way to read a page: what attention's quick cases run with.
FAMILIES: Final = (
    "fp32",
    "bf16",
    "int8",
    "int8:g16:asym:scale=bf16",
    "int4:g16",
    "int4:g32:asym:scale=bf16",
    "int2:g32:asym:scale=fp16",
    "int8:channel:static:scale=bf16",
    "int4:channel:asym:static:scale=fp16",
    "fp8_e4m3",
    "fp8_e5m2",
    "mxfp4",
    "nvfp4",
    "k=int8:asym,v=int4:g32",
    "k=int4:g16:outliers=4,v=int4:g16",
)
#: One format of each kind of arithmetic: what geometry and feature cases run with in the quick tier.
KINDS: Final = ("fp32", "int8", "int4:g16:asym")
#: Formats whose quick cases run at the default page size too.
CORE: Final = ("fp32", "int8", "int4:g64")

# --- geometries -----------------------------------------------------------------------------------------------------

BASE: Final = geometry(2, 4, 64, 16)
#: The default page size, 128, and the commonest model shape of today.
MODEL: Final = geometry(2, 8, 128, 128)

GEOMETRIES: Final = (
    BASE,
    MODEL,
    geometry(1, 1, 64, 16),
    geometry(1, 8, 128, 16),
    geometry(2, 6, 80, 48),
    geometry(4, 4, 96, 16),
    geometry(3, 12, 48, 16, layers=3),
    geometry(1, 3, 256, 48),
    geometry(2, 4, 64, 16, value_dim=128),
    geometry(2, 2, 128, 128, value_dim=64),
)

#: Latent layers: a small one, and DeepSeek-V2's 512 + 64.
MLA: Final = mla(4, 64, 16, 16)
DEEPSEEK: Final = mla(8, 512, 64, 16)
LATENT_GEOMETRIES: Final = (MLA, DEEPSEEK, mla(3, 128, 32, 48, dtype="bfloat16"), mla(16, 512, 64, 128, layers=3))

HALF_GEOMETRIES: Final = tuple(
    geometry(2, 4, 64, page_size, dtype=dtype) for dtype in ("bfloat16", "float16") for page_size in (16, 128)
)

#: Half-precision models on pages of 32 and 128 tokens, and the formats of each: what a chip can do whose attention
#: takes 16-bit queries only, pages that are multiples of 32, and static scales only in the query's dtype.
HALF_MODELS: Final = (
    geometry(2, 8, 64, 32, dtype="bfloat16"),
    geometry(2, 8, 128, 32, dtype="float16"),
    geometry(2, 8, 128, 128, dtype="bfloat16"),
    geometry(2, 8, 64, 128, dtype="float16"),
)
HALF_FORMATS: Final = {
    dtype: ("int8", *(f"int8:{granularity}:static:scale={code}" for granularity in ("channel", "head", "tensor")), code)
    for dtype, code in (("bfloat16", "bf16"), ("float16", "fp16"))
}
#: One KV head under ten query heads, which a layout of int8 pages in fractals is documented for.
FRACTAL: Final = geometry(1, 10, 128, 128, dtype="bfloat16")


# --- products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One point of a check's axes. ``options`` are the check's own, by name."""

    format: str
    geometry: Geometry
    tier: Tier
    options: tuple[tuple[str, int | str], ...] = ()


_SCALE_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def spec_of(fmt: TensorFormat, page_size: int = 0) -> CodecSpec:
    """The oracle's description of one side of a cache format, on pages of this many tokens."""
    kept = CodecSpec(fmt.code, outliers=fmt.outliers, sparse=fmt.sparse, page=page_size if fmt.sparse else 0)
    if fmt.code in BLOCK_SIZE or fmt.code in FLOAT_PAGES:
        return replace(kept, static=fmt.static)
    return replace(
        kept,
        granularity=fmt.granularity,
        group=fmt.group,
        symmetric=fmt.symmetric,
        scale_dtype=_SCALE_DTYPES[fmt.scale_dtype],
        static=fmt.static,
    )


@cache
def parse(text: str) -> CacheFormat:
    return CacheFormat.parse(text)


@cache
def fits(format_text: str, shape: Geometry) -> bool:
    """Whether the format divides this geometry's dims; what does not is no case at all."""
    fmt = parse(format_text)
    if shape.latent != (fmt.rope is not None):
        return False
    dims = {"key": shape.key_dim, "value": shape.value_dim}
    sides = [(fmt.key, dims["key"]), (fmt.value, dims["value"])]
    if fmt.rope is not None:
        sides = [(fmt.key, dims["value"]), (fmt.rope, dims["key"] - dims["value"])]
    try:
        for side, dim in sides:
            plane_shapes(spec_of(side, shape.page_size), shape.page_size, shape.kv_heads, dim)
        if fmt.rotate is not None:
            block_of(sides[0][1])
    except ValueError:
        return False
    return all(side.outliers < dim and side.sparse < dim * shape.page_size for side, dim in sides)


def product(
    formats: Iterable[str], geometries: Iterable[Geometry], tier: Tier = "quick", **options: int | str
) -> list[Variant]:
    """Every format with every geometry it fits."""
    shapes = list(geometries)
    chosen = tuple(sorted(options.items()))
    return [Variant(f, g, tier, chosen) for f in formats for g in shapes if fits(f, g)]


def half_models(**options: int | str) -> list[Variant]:
    """Quick: int8 per token and per channel of half-precision models on small pages. Full: all their formats."""
    first, second = HALF_MODELS[:2]
    shapes = (*HALF_MODELS, FRACTAL)
    return [
        *product(HALF_FORMATS[first.dtype][:2], (first,), "quick", **options),
        *product(HALF_FORMATS[second.dtype][1:2], (second,), "quick", **options),
        *(v for shape in shapes for v in product(HALF_FORMATS[shape.dtype], (shape,), "full", **options)),
    ]


def every_half_model(**options: int | str) -> list[Variant]:
    """Quick: int8 per token and per channel of every half-precision model, float pages of one. Full: as above."""
    return [
        *(v for shape in HALF_MODELS for v in product(HALF_FORMATS[shape.dtype][:2], (shape,), "quick", **options)),
        *product(HALF_FORMATS[HALF_MODELS[0].dtype][-1:], HALF_MODELS[:1], "quick", **options),
        *product(HALF_FORMATS[FRACTAL.dtype][1:2], (FRACTAL,), "quick", **options),
        *half_models(**options),
    ]


def every_format(**options: int | str) -> list[Variant]:
    """Quick: every format at the base geometry, the core formats at the model geometry. Full: everything."""
    return [
        *product(FORMATS, (BASE,), "quick", **options),
        *product(CORE, (MODEL,), "quick", **options),
        *product(LATENT_FORMATS[:3], (MLA,), "quick", **options),
        *half_models(**options),
        *product((*FORMATS, *LATENT_FORMATS), (*GEOMETRIES, *LATENT_GEOMETRIES), "full", **options),
    ]


def families(**options: int | str) -> list[Variant]:
    """Quick: one format of each way to read a page at the base geometry, core formats at the model geometry, and two of
    latent layers."""
    return [
        *product(FAMILIES, (BASE,), "quick", **options),
        *product(CORE, (MODEL,), "quick", **options),
        *product(LATENT_FORMATS[:2], (MLA,), "quick", **options),
        *half_models(**options),
        *product((*FORMATS, *LATENT_FORMATS), (*GEOMETRIES, *LATENT_GEOMETRIES), "full", **options),
    ]


def every_geometry(**options: int | str) -> list[Variant]:
    """Quick: int8 at every geometry and int4 at odd ones, and the base geometry in half precision. Full: everything."""
    return [
        *product(("int8",), GEOMETRIES, "quick", **options),
        *product(("int4:g16:asym",), GEOMETRIES[3:7], "quick", **options),
        *product(("int8",), HALF_GEOMETRIES[::2], "quick", **options),
        *product((LATENT_FORMATS[0], "latent=fp8_e4m3:g128,rope=bf16"), LATENT_GEOMETRIES[1:3], "quick", **options),
        *every_half_model(**options),
        *product(FORMATS, (*GEOMETRIES, *HALF_GEOMETRIES), "full", **options),
    ]


def half_kinds(**options: int | str) -> list[Variant]:
    """Quick: dynamic and static int8 of one half-precision model each."""
    first, second = HALF_MODELS[:2]
    return [
        *product(HALF_FORMATS[first.dtype][:1], (first,), "quick", **options),
        *product(HALF_FORMATS[second.dtype][1:2], (second,), "quick", **options),
    ]


def kinds(*geometries: Geometry, **options: int | str) -> list[Variant]:
    """Quick: one format of each kind at these geometries. Full: every format."""
    return [
        *product(KINDS, geometries or (BASE,), "quick", **options),
        *half_kinds(**options),
        *product(FORMATS, geometries or (BASE, MODEL), "full", **options),
    ]
