"""Cache formats as data: what is stored for K and for V, and the strings that name it.

A :class:`CacheFormat` is frozen and hashable. It says how numbers are stored, never how many heads or layers there
are (that is :mod:`kvport.layout`). Its string is canonical: it parses back to itself, and two spellings of one
format print alike (``int8`` and ``int8:token``).

Grammar::

    format  = sides {"," tier} [",rotate=" seed]  |  preset
    sides   = tensor                      the same for K and V
            | "k=" tensor ",v=" tensor
            | "latent=" tensor ",rope=" tensor      for latent (MLA) layers
    tensor  = code [":" granularity] [":asym"] [":static"] [":scale=" dtype] [":outliers=" N | ":sparse=" N]
    code    = fp32 | fp16 | bf16 | int8 | int4 | int2 | fp8_e4m3 | fp8_e5m2 | mxfp4 | nvfp4
    granularity = token | gN | cN | head | tensor | channel (default token)
    dtype   = fp32 | bf16 | fp16                            (default fp32)
    tier    = "sink=" N | "recent=" N [":" code]
    preset  = kivi2

``token`` is one scale per token and KV head; ``gN`` one per token, KV head and group of N channels; ``cN`` one per KV
head and channel over N tokens, encoded when a whole page seals; ``tensor``, ``head`` and ``channel`` (one per KV head
and channel) are static: their scales are given or calibrated beforehand. ``mxfp4`` and ``nvfp4`` bring their own
block scales. ``outliers`` channels per KV head, chosen by calibration, are kept in float32 beside the codes
(:mod:`kvport.outliers`); ``sparse`` keeps single numbers likewise, N per page and KV head, chosen when the page seals
(:mod:`kvport.sparse`). ``sink`` first and ``recent`` last tokens stay in the model's dtype, or in the one named
(:mod:`kvport.tiers` has the exact rule). ``rotate`` stores K behind a seeded Hadamard rotation
(:mod:`kvport.rotation`).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final, Literal

import torch

from kvport.arguments import read_number, show, whole_number
from kvport.errors import FormatError

IDENTITY_VERSION: Final = 1

#: Scale and float-page dtypes by the name used in format strings.
DTYPES: Final[dict[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE_ALIASES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Granularity = Literal["token", "group", "channel_group", "block", "head", "tensor", "channel"]
STATIC_ONLY: Final = ("tensor", "head", "channel")


@dataclass(frozen=True)
class Code:
    """One stored number type.

    ``bits`` per number. ``kind``: float pages (no scale), integers, scaled 8-bit floats, or 4-bit float blocks of
    ``block`` channels with an E8M0 (mx) or E4M3 (nv) scale each. ``largest`` is the largest finite code of a float.
    """

    name: str
    bits: int
    kind: Literal["float", "int", "fp8", "mx", "nv"]
    block: int = 0
    largest: float = 0.0

    @property
    def per_byte(self) -> int:
        """Codes packed into one byte (1 for whole-byte and wider codes)."""
        return max(1, 8 // self.bits)


CODES: Final[dict[str, Code]] = {
    c.name: c
    for c in (
        Code("fp32", 32, "float"),
        Code("fp16", 16, "float"),
        Code("bf16", 16, "float"),
        Code("int8", 8, "int"),
        Code("int4", 4, "int"),
        Code("int2", 2, "int"),
        # E4M3 ("fn": no infinities) and E5M2: Micikevicius et al., "FP8 formats for deep learning", 2022.
        Code("fp8_e4m3", 8, "fp8", largest=448.0),
        Code("fp8_e5m2", 8, "fp8", largest=57344.0),
        # E2M1 under one power of two per 32: OCP Microscaling Formats (MX) Specification v1.0.
        Code("mxfp4", 4, "mx", block=32, largest=6.0),
        # E2M1 under an E4M3 scale per 16 and a float32 scale: NVIDIA, "Introducing NVFP4", 2025.
        Code("nvfp4", 4, "nv", block=16, largest=6.0),
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """The format-string name of a float dtype, e.g. ``"bf16"``."""
    for name, candidate in DTYPES.items():
        if candidate == dtype:
            return name
    raise FormatError(f"dtype {dtype} has no name in a format; use one of {_listing(DTYPES.values())}")


@dataclass(frozen=True)
class TensorFormat:
    """How one of K or V is stored.

    ``group`` is the group size of granularity ``"group"`` (channels along head_dim), ``"channel_group"`` (tokens) and
    ``"block"`` (the fixed blocks of mxfp4 and nvfp4), and 0 otherwise. ``scale_dtype`` is a name of :data:`DTYPES`.
    ``outliers`` channels per KV head are kept in float32 beside the codes, or up to ``sparse`` numbers of each page and
    KV head. Float codes take none of the options.
    """

    code: str
    granularity: Granularity = "token"
    group: int = 0
    symmetric: bool = True
    static: bool = False
    scale_dtype: str = "fp32"
    outliers: int = 0
    sparse: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.code, str) or self.code not in CODES:
            raise FormatError(f"unknown code {show(self.code)}; known codes: {_listing(CODES)}")
        if not isinstance(self.scale_dtype, str) or self.scale_dtype not in DTYPES:
            raise FormatError(f"unknown scale dtype {show(self.scale_dtype)}; allowed: {_listing(DTYPES)}")
        whole_number("group", self.group, 0, error=FormatError)
        whole_number("outliers, a number of channels,", self.outliers, 0, error=FormatError)
        whole_number("sparse (entries per page and KV head)", self.sparse, 0, error=FormatError)
        for name in ("symmetric", "static"):
            if not isinstance(getattr(self, name), bool):
                raise FormatError(f"{name} must be True or False, got {show(getattr(self, name))}")
        if self.outliers and self.sparse:
            raise FormatError(
                f"outliers={self.outliers} keeps whole channels apart and sparse={self.sparse} single numbers; a side "
                "takes one of them"
            )
        if not self.quantized:
            options = (self.granularity, self.group, self.symmetric, self.static, self.scale_dtype)
            if options != ("token", 0, True, False, "fp32") or self.outliers or self.sparse:
                raise FormatError(
                    f"{self.code} pages are not quantized: they take no granularity, asym, static, scale, outliers or "
                    "sparse option"
                )
            return
        if self.kind in ("mx", "nv"):
            self._settle_block()
            return
        if self.granularity not in ("token", "group", "channel_group", *STATIC_ONLY):
            raise FormatError(f"unknown granularity {show(self.granularity)} for {self.code}")
        if (self.granularity in ("group", "channel_group")) != (self.group > 0):
            raise FormatError(
                f"granularity {self.granularity!r} with group {self.group}: gN and cN need N >= 1, others none"
            )
        if self.kind == "fp8" and not self.symmetric:
            raise FormatError(f"{self.code} codes are floats and symmetric; asym is for integer codes")
        if self.granularity in STATIC_ONLY and not self.static:
            raise FormatError(
                f"granularity {self.granularity!r} needs calibrated scales: write "
                f"'{self.code}:{self.granularity}:static', or use token or gN for scales computed at append"
            )
        if self.granularity not in STATIC_ONLY and self.static:
            raise FormatError(
                f"static scales have granularity tensor, head or channel, not {self._granularity_text()!r}"
            )

    def _settle_block(self) -> None:
        """mxfp4 and nvfp4 have one granularity of their own; only nvfp4's tensor scale may be static."""
        block = CODES[self.code].block
        given = (self.granularity, self.group, self.symmetric, self.scale_dtype)
        if given not in (("token", 0, True, "fp32"), ("block", block, True, "fp32")):
            raise FormatError(f"{self.code} has its own block scales: it takes no granularity, asym or scale option")
        if self.static and self.kind == "mx":
            raise FormatError("mxfp4 scales come from each block; only nvfp4 has a static form")
        object.__setattr__(self, "granularity", "block")
        object.__setattr__(self, "group", block)

    @property
    def kind(self) -> Literal["float", "int", "fp8", "mx", "nv"]:
        """What the codes are, see :class:`Code`."""
        return CODES[self.code].kind

    @property
    def quantized(self) -> bool:
        """False for float pages."""
        return self.kind != "float"

    @property
    def sealed_only(self) -> bool:
        """True where codes exist only for whole pages (cN, sparse): tokens are appended to a tier and sealed later."""
        return self.granularity == "channel_group" or self.sparse > 0

    @property
    def hides_nan(self) -> bool:
        """True where a NaN can be kept visible in neither scale nor code (static integers): it needs a flag."""
        return self.static and self.kind == "int"

    @property
    def calibrated(self) -> bool:
        """True where something chosen beforehand is needed at open: static scales, or which channels are outliers."""
        return self.static or self.outliers > 0

    @property
    def bits(self) -> int:
        """Stored bits per number, scales not counted."""
        return CODES[self.code].bits

    @property
    def scale_torch_dtype(self) -> torch.dtype:
        return DTYPES[self.scale_dtype]

    @property
    def code_torch_dtype(self) -> torch.dtype:
        """Element dtype of the codes plane: the float dtype, int8 for symmetric 8-bit integers, else raw bytes."""
        if not self.quantized:
            return DTYPES[self.code]
        return torch.int8 if self.code == "int8" and self.symmetric else torch.uint8

    def misfits(self, dim: int, page_size: int) -> list[str]:
        """Why pages of ``page_size`` rows of ``dim`` channels cannot be stored in this format (empty: they can)."""
        per_byte = CODES[self.code].per_byte
        found = []
        if dim % per_byte:
            found.append(f"{self.code} packs {per_byte} codes a byte and dim {dim} is not divisible by {per_byte}")
        if self.granularity in ("group", "block") and dim % self.group:
            found.append(f"groups of {self.group} channels do not divide dim {dim}")
        if self.granularity == "channel_group" and page_size % self.group:
            found.append(f"groups of {self.group} tokens do not divide page size {page_size}")
        if self.outliers >= dim:
            found.append(f"outliers={self.outliers} leaves nothing of dim {dim} to quantize; give less than {dim}")
        if self.sparse >= (numbers := page_size * dim):
            found.append(
                f"sparse={self.sparse} leaves nothing of a page of {page_size} tokens of dim {dim} to quantize; give "
                f"less than {numbers}"
            )
        return found

    def _granularity_text(self) -> str:
        letter = {"group": "g", "channel_group": "c"}.get(self.granularity)
        return f"{letter}{self.group}" if letter else self.granularity

    def __str__(self) -> str:
        parts = [self.code]
        if self.granularity not in ("token", "block"):
            parts.append(self._granularity_text())
        if not self.symmetric:
            parts.append("asym")
        if self.static:
            parts.append("static")
        if self.scale_dtype != "fp32":
            parts.append(f"scale={self.scale_dtype}")
        if self.outliers:
            parts.append(f"outliers={self.outliers}")
        if self.sparse:
            parts.append(f"sparse={self.sparse}")
        return ":".join(parts)

    @classmethod
    def parse(cls, text: str) -> TensorFormat:
        """Parse the ``tensor`` rule of the grammar above; raises :class:`FormatError`."""
        if not isinstance(text, str):
            raise FormatError(f"a side's format is a string such as 'int4:g64', not {type(text).__name__}")
        code, *options = text.strip().split(":")
        granularity: Granularity = "token"
        group = 0
        symmetric, static, scale_dtype, outliers, sparse = True, False, "fp32", 0, 0
        seen: set[str] = set()
        for option in options:
            kind = "granularity"
            if re.fullmatch(r"[gc][1-9][0-9]*", option):
                granularity = "group" if option[0] == "g" else "channel_group"
                group = _read_count(text, option[0], option[1:], "a group size")
            elif option in ("token", "tensor", "head", "channel"):
                granularity = option  # type: ignore[assignment]
            elif option in ("sym", "asym"):
                kind, symmetric = "symmetry", option == "sym"
            elif option == "static":
                kind, static = "static", True
            elif option.startswith("scale="):
                kind = "scale"
                scale_dtype = _DTYPE_ALIASES.get(option[6:], option[6:])
            elif re.fullmatch(r"outliers=[1-9][0-9]*", option):
                kind, outliers = "outliers", _read_count(text, "outliers=", option[9:], "a number of channels")
            elif re.fullmatch(r"sparse=[1-9][0-9]*", option):
                kind, sparse = "sparse", _read_count(text, "sparse=", option[7:], "a number of entries")
            else:
                raise FormatError(
                    f"unknown option {show(option)} in format {show(text)}; allowed after the code: token, gN, cN, "
                    "tensor, head, channel, asym, static, scale=fp32|bf16|fp16, outliers=N, sparse=N"
                )
            if kind in seen:
                raise FormatError(f"format {show(text)} gives its {kind} twice")
            seen.add(kind)
        return cls(code, granularity, group, symmetric, static, scale_dtype, outliers, sparse)


#: Names for formats of the literature. KIVI: Liu et al., "KIVI: a tuning-free asymmetric 2bit quantization for KV
#: cache", 2024: K per channel over 32 tokens, V per token in groups of 32, the last 128 tokens in full precision.
PRESETS: Final = {"kivi2": "k=int2:c32:asym:scale=fp16,v=int2:g32:asym:scale=fp16,recent=128"}


@dataclass(frozen=True)
class CacheFormat:
    """A whole cache format: K, V, and the tokens kept in higher precision.

    ``sink`` first and ``recent`` last tokens are kept in ``near``, a float or per-token format; None stands for the
    model's own dtype. A format whose K or V is sealed only (cN, sparse) has a near tier for the open page even without
    them.
    ``rope``, where given, is the format of a latent (MLA) layer's rotary part; ``key`` and ``value`` are then both
    the latent part's. ``rotate`` is the seed of a Hadamard rotation of K, None for none.
    """

    key: TensorFormat
    value: TensorFormat
    sink: int = 0
    recent: int = 0
    near: TensorFormat | None = None
    rope: TensorFormat | None = None
    rotate: int | None = None

    def __post_init__(self) -> None:
        for name in ("key", "value", "near", "rope"):
            side = getattr(self, name)
            if not isinstance(side, TensorFormat) and (side is not None or name in ("key", "value")):
                raise FormatError(
                    f"{name} must be a TensorFormat such as TensorFormat.parse('int8'), got {show(side)}; "
                    "CacheFormat.parse reads a whole format string"
                )
        if self.rotate is not None:
            whole_number("rotate, a seed where it is not None,", self.rotate, 0, 2**32 - 1, FormatError)
        if self.rope is not None and (self.key != self.value or self.rope.calibrated):
            raise FormatError(
                "a latent format has one latent part for K and V, and a rope part without static scales or outliers"
            )
        if self.rotate is not None and not self.key.quantized:
            raise FormatError(f"rotate={self.rotate} needs a quantized K, and {self.key} pages are not")
        if self.rotate is not None and self.key.outliers:
            raise FormatError(
                f"rotate spreads K's outliers over all channels, and {self.key} keeps single channels apart; choose one"
            )
        for name in ("sink", "recent"):
            whole_number(f"{name} (tokens)", getattr(self, name), 0, error=FormatError)
        if self.near is not None:
            if not self.tiered:
                raise FormatError(f"a near format ({self.near}) needs sink= or recent= tokens to keep in it")
            if self.near.calibrated or self.near.sealed_only:
                raise FormatError(
                    f"recent tokens are kept in a float or a per-token format such as bf16 or fp8_e4m3, not {self.near}"
                )
        if self.tiered and not any(side.quantized for side in (self.key, self.value, self.rope) if side is not None):
            raise FormatError(f"{self.key} pages are full precision already: sink= and recent= have nothing to keep")

    @classmethod
    def parse(cls, text: str | CacheFormat) -> CacheFormat:
        """Parse a format string; a ``CacheFormat`` passes through. Raises :class:`FormatError`."""
        if isinstance(text, CacheFormat):
            return text
        if not isinstance(text, str):
            raise FormatError(f"a format is a string such as 'int8' or a CacheFormat, not {type(text).__name__}")
        sides: dict[str, TensorFormat] = {}
        tiers: dict[str, int] = {}
        rotate: int | None = None
        near: TensorFormat | None = None
        for part in PRESETS.get(text.strip(), text).split(","):
            name, equals, rest = part.strip().partition("=")
            if not equals or ":" in name:
                name, rest = "", part
            if name in sides or name in tiers or (name == "rotate" and rotate is not None):
                raise FormatError(f"format {show(text)} gives {name + '=' if name else 'its code'} twice")
            if name in ("", "k", "v", "latent", "rope"):
                sides[name] = TensorFormat.parse(rest)
            elif name in ("sink", "recent"):
                count, colon, code = rest.partition(":")
                tiers[name] = _read_count(text, f"{name}=", count, "a number of tokens")
                if colon and name == "sink":
                    raise FormatError(
                        f"{show(part)} in format {show(text)}: the tier's own code is given once, as recent=N:CODE"
                    )
                near = TensorFormat.parse(code) if colon else near
            elif name == "rotate":
                rotate = _read_count(text, "rotate=", rest, "a seed")
            else:
                raise FormatError(
                    f"cannot read {show(part)} in format {show(text)}; write 'CODE...', 'k=CODE...,v=CODE...' or "
                    "'latent=CODE...,rope=CODE...', then sink=N, recent=N, rotate=SEED"
                )
        if set(sides) not in ({""}, {"k", "v"}, {"latent", "rope"}):
            raise FormatError(
                f"format {show(text)} needs one code for K and V, or both k= and v=, or both latent= and rope="
            )
        names = {"": ("", ""), "k": ("k", "v"), "latent": ("latent", "latent")}[next(iter(sorted(sides)))]
        key, value = (sides[name] for name in names)
        return cls(key, value, tiers.get("sink", 0), tiers.get("recent", 0), near, sides.get("rope"), rotate)

    def __str__(self) -> str:
        if self.rope is not None:
            parts = [f"latent={self.key}", f"rope={self.rope}"]
        else:
            parts = [str(self.key)] if self.key == self.value else [f"k={self.key}", f"v={self.value}"]
        if self.sink:
            parts.append(f"sink={self.sink}")
        if self.recent or self.near is not None:
            parts.append(f"recent={self.recent}" + ("" if self.near is None else f":{self.near}"))
        if self.rotate is not None:
            parts.append(f"rotate={self.rotate}")
        return ",".join(parts)

    @property
    def static(self) -> bool:
        """True where K or V needs scales given at open."""
        return self.key.static or self.value.static

    @property
    def calibrated(self) -> bool:
        """True where K or V needs scales or outlier channels given at open."""
        return self.key.calibrated or self.value.calibrated

    @property
    def tiered(self) -> bool:
        """True where some tokens are kept in a near tier: sink, recent, or the open page of a sealed-only format."""
        sealed_only = any(side.sealed_only for side in (self.key, self.value, self.rope) if side is not None)
        return bool(self.sink or self.recent or sealed_only)

    def far(self) -> CacheFormat:
        """The format of sealed pages alone: no tiers, and no rotation, which is done before rows reach a page."""
        return CacheFormat(self.key, self.value, rope=self.rope)

    def identity(self) -> str:
        """Versioned canonical JSON: equal for equal formats, whatever their spelling. Stored in page images."""
        record = {
            "version": IDENTITY_VERSION,
            "key": _record(self.key),
            "value": _record(self.value),
            "sink": self.sink,
            "recent": self.recent,
            "near": None if self.near is None else _record(self.near),
            "rope": None if self.rope is None else _record(self.rope),
            "rotate": self.rotate,
        }
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """sha256 of :meth:`identity`, in hex."""
        return hashlib.sha256(self.identity().encode()).hexdigest()


def _read_count(text: str, name: str, count: str, what: str) -> int:
    if (number := read_number(count)) is None:
        raise FormatError(f"{name} in format {show(text)} takes {what} in 0 .. 2**32 - 1, got {show(count)}")
    return number


def _record(fmt: TensorFormat) -> dict[str, object]:
    if not fmt.quantized:
        return {"code": fmt.code}
    return {
        "code": fmt.code,
        "granularity": fmt.granularity,
        "group": fmt.group,
        "symmetric": fmt.symmetric,
        "static": fmt.static,
        "scale_dtype": fmt.scale_dtype,
        "outliers": fmt.outliers,
        "sparse": fmt.sparse,
    }


def _listing(items: object) -> str:
    return ", ".join(str(item) for item in items)  # type: ignore[attr-defined]
