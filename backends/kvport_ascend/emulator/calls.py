"""One normal form for the attention operators' arguments, and the geometry read out of their shapes.

``npu_fused_infer_attention_score`` (v1), its ``_v2`` and ``npu_incre_flash_attention`` say the same things under
different argument names. :class:`AttentionCall` holds them under one name each; ``names`` gives back the operator's own
name for messages. Letters: B sequences, Q_S query tokens per sequence, Q_N query heads, KV_N KV heads, D head dim,
T packed query tokens, nb pages (Ascend: blocks), bs page size (Ascend: block size).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

LAYOUTS = ("BSH", "BSND", "BNSD", "TND")

V1_NAMES = {
    "q_lengths": "actual_seq_lengths",
    "kv_lengths": "actual_seq_lengths_kv",
    "key_scale": "key_antiquant_scale",
    "value_scale": "value_antiquant_scale",
    "key_offset": "key_antiquant_offset",
    "value_offset": "value_antiquant_offset",
    "key_mode": "key_antiquant_mode",
    "value_mode": "value_antiquant_mode",
    "q_heads": "num_heads",
}
V2_NAMES = {
    "q_lengths": "actual_seq_qlen",
    "kv_lengths": "actual_seq_kvlen",
    "key_scale": "dequant_scale_key",
    "value_scale": "dequant_scale_value",
    "key_offset": "dequant_offset_key",
    "value_offset": "dequant_offset_value",
    "key_mode": "key_quant_mode",
    "value_mode": "value_quant_mode",
    "q_heads": "num_query_heads",
}
IFA_NAMES = {"kv_lengths": "actual_seq_lengths", "q_heads": "num_heads"}


class AclnnParameterError(RuntimeError):
    """A call that the operator's host checks refuse, or that its documentation rules out.

    ``rule`` is the broken rule's name in :mod:`kvport_ascend.emulator.rules`. 561002 is the code that aclnn returns
    when the host-side (tiling) check of an operator fails; the wording is the emulator's own.
    """

    def __init__(self, operator: str, rule: str, message: str, source: str, doubt: str) -> None:
        self.operator, self.rule = operator, rule
        note = f"; {doubt}" if doubt else ""
        super().__init__(
            f"{operator} [emulated], error 561002: the parameter check failed. {message} (rule {rule}; {source}{note})"
        )


class NotModelled(NotImplementedError):
    """A call that may be right on a device, but that this emulator does not model. It never guesses."""


@dataclass(frozen=True)
class Geometry:
    """Sizes read from a call. ``form`` is how K and V lie: dense, BnBsH, BnNBsD or NZ."""

    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    dim: int
    value_dim: int
    form: str
    kv_len: int
    blocks: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call, under the names of the module docstring."""

    operator: str
    soc: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    q_heads: int
    kv_heads: int
    layout: str
    softmax_scale: float
    block_table: torch.Tensor | None = None
    block_size: int = 0
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    mask: torch.Tensor | None = None
    pse: torch.Tensor | None = None
    sparse_mode: int = 0
    inner_precise: int = 0
    lse: bool = False
    key_scale: torch.Tensor | None = None
    key_offset: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    value_offset: torch.Tensor | None = None
    key_mode: int = 0
    value_mode: int = 0
    fused_scale: torch.Tensor | None = None
    fused_offset: torch.Tensor | None = None
    fused_mode: int = 0
    exclusive_with_paging: tuple[str, ...] = ()
    """Names of arguments that were given and that paging rules out: shared prefix, left padding."""
    unmodelled: tuple[str, ...] = ()
    """Names of arguments that were given and that the emulator does not model: rope, output quantization, sinks."""
    names: dict[str, str] = field(default_factory=dict)

    def name(self, argument: str) -> str:
        """The operator's own name of an argument."""
        return self.names.get(argument, argument)

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    @property
    def quantized(self) -> bool:
        return self.key.dtype == torch.int8

    @property
    def decode(self) -> bool:
        """Whether the decode (IncreFlashAttention) kernel is taken.

        Non-TND layouts with one query token, or with 2 .. 16 and the 5-D NZ cache (ops-transformer
        fused_infer_attention_score_tiling.cpp, IsUsingIFA); everything else is the prefill kernel.
        """
        if self.operator == "npu_incre_flash_attention":
            return True
        if self.layout == "TND":
            return False
        length = self.geometry.q_len
        return length == 1 or (self.geometry.form == "NZ" and length <= 16)

    @cached_property
    def geometry(self) -> Geometry:
        """The sizes. Only to be read once the shape rules passed; they name what does not fit."""
        shape, kv = self.query.shape, self.key.shape
        kv_heads = self.kv_heads or self.q_heads
        if self.layout == "BSH":
            batch, q_len, dim = shape[0], shape[1], shape[2] // self.q_heads
        elif self.layout == "BSND":
            batch, q_len, dim = shape[0], shape[1], shape[3]
        elif self.layout == "BNSD":
            batch, q_len, dim = shape[0], shape[2], shape[3]
        else:
            batch, q_len, dim = len(self.q_lengths or ()), shape[0], shape[2]
        value_dim = dim
        if self.block_table is not None:
            form = {3: "BnBsH", 4: "BnNBsD", 5: "NZ"}[self.key.dim()]
            return Geometry(batch, q_len, self.q_heads, kv_heads, dim, value_dim, form, 0, kv[0])
        if self.layout == "TND":
            value_dim = self.value.shape[2]
            kv_len = kv[0]
        else:
            kv_len = kv[2] if self.layout == "BNSD" else kv[1]
        return Geometry(batch, q_len, self.q_heads, kv_heads, dim, value_dim, "dense", kv_len, 0)

    def lengths_kv(self) -> list[int]:
        """KV tokens of every sequence (a single length is shared; TND without paging is cumulative)."""
        g = self.geometry
        if self.kv_lengths is None:
            return [g.kv_len] * g.batch
        if self.layout == "TND" and not self.paged:
            ends = list(self.kv_lengths)
            return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        if len(self.kv_lengths) == 1:
            return list(self.kv_lengths) * g.batch
        return list(self.kv_lengths[: g.batch])

    def lengths_q(self) -> list[int]:
        """Query tokens of every sequence. Ignored by the decode kernel, as on the device."""
        g = self.geometry
        if self.layout == "TND":
            ends = list(self.q_lengths or ())
            return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        if self.q_lengths is None or self.decode:
            return [g.q_len] * g.batch
        if len(self.q_lengths) == 1:
            return list(self.q_lengths) * g.batch
        return list(self.q_lengths[: g.batch])
