"""Cache formats as data: what is stored for K and for V, and the strings that name it.

A :class:`CacheFormat` is frozen and hashable. It says how numbers are stored, never how many heads or layers there
are (that is :mod:`kvport.layout`). Its string is canonical: it parses back to itself, and two spellings of one
format print alike (``int8`` and ``int8:token``).

Grammar::

    format  = tensor                      the same for K and V
            | "k=" tensor ",v=" tensor
    tensor  = code [":" granularity] [":asym"] [":static"] [":scale=" dtype]
    code    = fp32 | fp16 | bf16 | int8 | int4 | int2
    granularity = token | gN | head | tensor | channel      (default token)
    dtype   = fp32 | bf16 | fp16                            (default fp32)

``token`` is one scale per token and KV head; ``gN`` one per token, KV head and group of N channels; ``tensor``,
``head`` and ``channel`` (one per KV head and channel) are static: their scales are given or calibrated beforehand.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final, Literal

import torch

from kvport.errors import FormatError

IDENTITY_VERSION: Final = 1

#: Scale and float-page dtypes by the name used in format strings.
DTYPES: Final[dict[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE_ALIASES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Granularity = Literal["token", "group", "head", "tensor", "channel"]
STATIC_ONLY: Final = ("tensor", "head", "channel")


@dataclass(frozen=True)
class Code:
    """One stored number type.

    ``bits`` per number; ``quantized`` is False for float pages, which have no scale.
    """

    name: str
    bits: int
    quantized: bool

    @property
    def per_byte(self) -> int:
        """Codes packed into one byte (1 for whole-byte and wider codes)."""
        return max(1, 8 // self.bits)


CODES: Final[dict[str, Code]] = {
    c.name: c
    for c in (
        Code("fp32", 32, quantized=False),
        Code("fp16", 16, quantized=False),
        Code("bf16", 16, quantized=False),
        Code("int8", 8, quantized=True),
        Code("int4", 4, quantized=True),
        Code("int2", 2, quantized=True),
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

    ``group`` is the group size of granularity ``"group"`` (channels along head_dim) and 0 otherwise.
    ``scale_dtype`` is a name of :data:`DTYPES`. Float codes take none of the options.
    """

    code: str
    granularity: Granularity = "token"
    group: int = 0
    symmetric: bool = True
    static: bool = False
    scale_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise FormatError(f"unknown code {self.code!r}; known codes: {_listing(CODES)}")
        if self.scale_dtype not in DTYPES:
            raise FormatError(f"unknown scale dtype {self.scale_dtype!r}; allowed: {_listing(DTYPES)}")
        if not self.quantized:
            options = (self.granularity, self.group, self.symmetric, self.static, self.scale_dtype)
            if options != ("token", 0, True, False, "fp32"):
                raise FormatError(
                    f"{self.code} pages are not quantized: they take no granularity, asym, static or scale option"
                )
            return
        if self.granularity not in ("token", "group", *STATIC_ONLY):
            raise FormatError(f"unknown granularity {self.granularity!r}")
        if (self.granularity == "group") != (self.group > 0):
            raise FormatError(f"granularity {self.granularity!r} with group {self.group}: gN needs N >= 1, others none")
        if self.granularity in STATIC_ONLY and not self.static:
            raise FormatError(
                f"granularity {self.granularity!r} needs calibrated scales: write "
                f"'{self.code}:{self.granularity}:static', or use token or gN for scales computed at append"
            )
        if self.granularity not in STATIC_ONLY and self.static:
            raise FormatError(
                f"static scales have granularity tensor, head or channel, not {self._granularity_text()!r}"
            )

    @property
    def quantized(self) -> bool:
        """False for float pages."""
        return CODES[self.code].quantized

    @property
    def bits(self) -> int:
        """Stored bits per number, scales not counted."""
        return CODES[self.code].bits

    @property
    def scale_torch_dtype(self) -> torch.dtype:
        return DTYPES[self.scale_dtype]

    @property
    def code_torch_dtype(self) -> torch.dtype:
        """Element dtype of the codes plane: the float dtype, int8 for symmetric 8-bit codes, else uint8."""
        if not self.quantized:
            return DTYPES[self.code]
        return torch.int8 if self.code == "int8" and self.symmetric else torch.uint8

    def misfits(self, dim: int) -> list[str]:
        """Why rows of ``dim`` channels cannot be stored in this format (empty: they can)."""
        per_byte = CODES[self.code].per_byte
        found = []
        if dim % per_byte:
            found.append(f"{self.code} packs {per_byte} codes a byte and dim {dim} is not divisible by {per_byte}")
        if self.group and dim % self.group:
            found.append(f"groups of {self.group} channels do not divide dim {dim}")
        return found

    def _granularity_text(self) -> str:
        return f"g{self.group}" if self.granularity == "group" else self.granularity

    def __str__(self) -> str:
        parts = [self.code]
        if self.granularity != "token":
            parts.append(self._granularity_text())
        if not self.symmetric:
            parts.append("asym")
        if self.static:
            parts.append("static")
        if self.scale_dtype != "fp32":
            parts.append(f"scale={self.scale_dtype}")
        return ":".join(parts)

    @classmethod
    def parse(cls, text: str) -> TensorFormat:
        """Parse the ``tensor`` rule of the grammar above; raises :class:`FormatError`."""
        code, *options = text.strip().split(":")
        granularity: Granularity = "token"
        group = 0
        symmetric, static, scale_dtype = True, False, "fp32"
        seen: set[str] = set()
        for option in options:
            kind = "granularity"
            if re.fullmatch(r"g[1-9]\d*", option):
                granularity, group = "group", int(option[1:])
            elif option in ("token", "tensor", "head", "channel"):
                granularity = option  # type: ignore[assignment]
            elif option in ("sym", "asym"):
                kind, symmetric = "symmetry", option == "sym"
            elif option == "static":
                kind, static = "static", True
            elif option.startswith("scale="):
                kind = "scale"
                scale_dtype = _DTYPE_ALIASES.get(option[6:], option[6:])
            else:
                raise FormatError(
                    f"unknown option {option!r} in format {text!r}; allowed after the code: token, gN, tensor, head, "
                    "channel, asym, static, scale=fp32|bf16|fp16"
                )
            if kind in seen:
                raise FormatError(f"format {text!r} gives its {kind} twice")
            seen.add(kind)
        return cls(code, granularity, group, symmetric, static, scale_dtype)


@dataclass(frozen=True)
class CacheFormat:
    """A whole cache format: K and V."""

    key: TensorFormat
    value: TensorFormat

    @classmethod
    def parse(cls, text: str | CacheFormat) -> CacheFormat:
        """Parse a format string; a ``CacheFormat`` passes through. Raises :class:`FormatError`."""
        if isinstance(text, CacheFormat):
            return text
        if not isinstance(text, str):
            raise FormatError(f"a format is a string such as 'int8' or a CacheFormat, not {type(text).__name__}")
        parts = [part.strip() for part in text.split(",")]
        if len(parts) == 1 and "=" not in parts[0].split(":")[0]:
            both = TensorFormat.parse(parts[0])
            return cls(both, both)
        sides: dict[str, TensorFormat] = {}
        for part in parts:
            name, equals, rest = part.partition("=")
            if name not in ("k", "v") or not equals:
                raise FormatError(f"cannot read {part!r} in format {text!r}; write 'CODE...' or 'k=CODE...,v=CODE...'")
            if name in sides:
                raise FormatError(f"format {text!r} gives {name}= twice")
            sides[name] = TensorFormat.parse(rest)
        if set(sides) != {"k", "v"}:
            raise FormatError(f"format {text!r} gives only {'='.join(sides)}=; both k= and v= are needed")
        return cls(sides["k"], sides["v"])

    def __str__(self) -> str:
        return str(self.key) if self.key == self.value else f"k={self.key},v={self.value}"

    @property
    def static(self) -> bool:
        """True where K or V needs scales given at open."""
        return self.key.static or self.value.static

    def identity(self) -> str:
        """Versioned canonical JSON: equal for equal formats, whatever their spelling. Stored in page images."""
        record = {"version": IDENTITY_VERSION, "key": _record(self.key), "value": _record(self.value)}
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """sha256 of :meth:`identity`, in hex."""
        return hashlib.sha256(self.identity().encode()).hexdigest()


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
    }


def _listing(items: object) -> str:
    return ", ".join(str(item) for item in items)  # type: ignore[attr-defined]
