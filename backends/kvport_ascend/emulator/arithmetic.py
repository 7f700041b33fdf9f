"""What the attention operators compute, on CPU tensors.

Two arithmetics, chosen by name:

``exact``
    float64 on the decoded numbers, ``K = (code + key_offset) * key_scale``. What the operator means.
``planes``
    the decode kernel's way with int8 K/V (ops-transformer incre_flash_attention_split_Bbn2s2_Us2.h): it does not
    decode K and V, it splits the *other* operand of each matrix product into 2 or 3 int8 planes and multiplies int8 by
    int8 into int32. Two planes with inner_precise 1, three with 0. It is a model of the published source: block-wise
    rescaling of the softmax and the NZ kernel are not modelled bit for bit. Everything that is not decode over int8
    is computed as in ``exact``.

A row that is all zeros makes the planes' scale ``127 / 0``, and one below 2^-121 makes it infinite. What a device
answers then is not known; ``planes`` answers NaN, and both count such rows, in ``OBSERVED["faint_query_rows"]`` and,
where every V scale of a sequence and head is that small, in ``OBSERVED["faint_value_scales"]``.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from kvport_ascend.emulator.calls import AttentionCall

NUMERICS = ("exact", "planes")
HOST = torch.device("cpu")
"""Where emulated operators work, whatever torch's default device is."""
OBSERVED: Counter[str] = Counter()
"""Calls that were legal but whose result on a device is not known. Tests read and clear it."""

PLANE_BASE = 254.0
"""Each further plane holds 1/254 of the previous one's rounding error; 127 * 2, so that it fills int8 again."""
PLANES = {0: 3, 1: 2}
"""inner_precise -> planes."""


@dataclass(frozen=True)
class Side:
    """K or V of one sequence and one KV head: codes ``(L, D)``, scale and offset ``(L | 1, D | 1)`` or None.

    ``per_token`` is true where each token has its own scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    offset: torch.Tensor | None
    per_token: bool

    def decoded(self) -> torch.Tensor:
        """``(L, D)`` float64."""
        number = self.codes.double()
        if self.offset is not None:
            number = number + self.offset.double()
        return number if self.scale is None else number * self.scale.double()


def round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Nearest integer, halves away from zero (the device's CAST_ROUND)."""
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def split_product(a: torch.Tensor, codes: torch.Tensor, planes: int) -> torch.Tensor:
    """``a @ codes`` with ``a`` ``(R, X)`` float32 split into int8 planes per row, ``codes`` ``(X, Y)`` int8.

    ``a * 127 / max|a|`` is rounded to plane 0, its rounding error times 254 to plane 1, and so on; every plane times
    the codes is exact in int32 (float64 here).
    """
    largest = a.abs().amax(dim=-1, keepdim=True)
    factor = 127.0 / largest
    rest = a * torch.where(factor.isinf(), math.nan, factor)
    total = torch.zeros(a.shape[0], codes.shape[1], dtype=torch.float32, device=HOST)
    weight = 1.0
    for _ in range(planes):
        plane = round_half_away(rest)
        total += ((plane.double() @ codes.double()) * weight).float()
        rest = (rest - plane) * PLANE_BASE
        weight /= PLANE_BASE
    return total * (largest / 127.0)


def _decode_planes(
    query: torch.Tensor, key: Side, value: Side, scale: float, planes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One KV head: query ``(R, D)`` float32 -> output ``(R, D)`` float32 and LSE ``(R,)``; no mask."""
    assert key.scale is not None
    assert value.scale is not None
    key_scale, value_scale = key.scale.float(), value.scale.float()
    lse_shift = torch.zeros(query.shape[0], 1, dtype=torch.float32, device=HOST)
    if key.per_token:
        scores = split_product(query, key.codes.T, planes)
        if key.offset is not None:
            scores = scores + query.sum(-1, keepdim=True) * key.offset.float().reshape(1, -1)
        scores = scores * key_scale.reshape(1, -1)
    else:
        scores = split_product(query * key_scale, key.codes.T, planes)
        if key.offset is not None:  # shifts all scores of a row alike: only the LSE is corrected
            lse_shift = (query * key.offset.float() * key_scale).sum(-1, keepdim=True) * scale
    scores = scores * scale
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if value.per_token:
        scaled = weights * value_scale.reshape(1, -1)
        out = split_product(scaled, value.codes, planes)
        if value.offset is not None:
            out = out + (scaled * value.offset.float().reshape(1, -1)).sum(-1, keepdim=True)
        out = out / total
    else:
        out = split_product(weights, value.codes, planes) / total
        if value.offset is not None:
            out = out + value.offset.float()
        out = out * value_scale
    return out, (torch.log(total) + top + lse_shift).squeeze(-1)


def _observe(query: torch.Tensor, key: Side, value: Side) -> None:
    """Count what the planes would divide 127 by and get no finite number. ``query`` ``(rows, heads, D)`` float32."""
    assert key.scale is not None
    assert value.scale is not None
    operand = query if key.per_token else query * key.scale.float()
    OBSERVED["faint_query_rows"] += int((127.0 / operand.abs().amax(-1)).isinf().sum())
    if value.per_token:
        OBSERVED["faint_value_scales"] += int((127.0 / value.scale.float().abs().max()).isinf())


def _exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, masked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One KV head in float64: query ``(R, D)``, key ``(L, D)``, value ``(L, E)``, ``masked`` ``(R, L)`` bool."""
    scores = (query.double() @ key.T) * scale
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    # A masked lane may hold anything: take its value row out instead of multiplying it by a weight of zero.
    out = torch.stack([w[w != 0] @ value[w != 0] for w in weights]) if masked is not None else weights @ value
    return out, lse


def _side(call: AttentionCall, which: str, sequence: int, head: int, length: int) -> Side:
    """K (``which`` "key") or V of one sequence and KV head, read through the block table where there is one."""
    g = call.geometry
    tensor = getattr(call, which)
    table = call.block_table
    pages = torch.zeros(0, dtype=torch.long, device=HOST)
    offsets = torch.zeros(0, dtype=torch.long, device=HOST)
    if table is not None:
        positions = torch.arange(length, device=HOST)
        pages = table[sequence].long()[positions // call.block_size]
        offsets = positions % call.block_size
        if g.form == "BnBsH":
            codes = tensor.unflatten(2, (g.kv_heads, g.dim))[pages, offsets, head]
        elif g.form == "BnNBsD":
            codes = tensor[pages, head, offsets]
        else:
            codes = tensor[pages, head, :, offsets].reshape(length, g.dim)
    elif call.layout == "TND":
        starts = [0, *(call.kv_lengths or ())]
        codes = tensor[starts[sequence] : starts[sequence] + length, head]
    elif call.layout == "BNSD":
        codes = tensor[sequence, head, :length]
    else:
        codes = tensor.reshape(g.batch, g.kv_len, g.kv_heads, -1)[sequence, :length, head]
    scale, offset, mode = scales_of(call, which)

    def pick(parameter: torch.Tensor | None) -> torch.Tensor | None:
        if parameter is None:
            return None
        if mode == 0:
            if parameter.numel() == 1:
                return parameter.reshape(1, 1)
            return parameter.reshape(g.kv_heads, g.dim)[head].reshape(1, -1)
        if mode == 1:
            return parameter.reshape(g.batch, -1)[sequence, :length].reshape(-1, 1)
        if mode == 2:
            return parameter[head].reshape(1, 1)
        if mode == 3:
            return parameter[sequence, head, :length].reshape(-1, 1)
        if mode == 4:
            return parameter[pages, offsets].reshape(-1, 1)
        return parameter[pages, head, offsets].reshape(-1, 1)

    return Side(codes, pick(scale), pick(offset), mode in (1, 3, 4, 5))


def scales_of(call: AttentionCall, which: str) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Scale, offset and mode of K or V; the separate form wins over the fused ``(2, ...)`` one."""
    scale = getattr(call, f"{which}_scale")
    if scale is not None or call.fused_scale is None:
        return scale, getattr(call, f"{which}_offset"), getattr(call, f"{which}_mode")
    index = 0 if which == "key" else 1
    offset = None if call.fused_offset is None else call.fused_offset[index].contiguous()
    return call.fused_scale[index].contiguous(), offset, call.fused_mode


def _query_rows(call: AttentionCall, sequence: int, count: int, starts: list[int]) -> torch.Tensor:
    """``(count, Q_N, D)`` of one sequence."""
    g, query = call.geometry, call.query
    if call.layout == "TND":
        return query[starts[sequence] : starts[sequence] + count]
    if call.layout == "BNSD":
        return query[sequence, :, :count].transpose(0, 1)
    return query.reshape(g.batch, g.q_len, g.q_heads, g.dim)[sequence, :count]


def _masked(call: AttentionCall, sequence: int, rows: int, length: int) -> torch.Tensor | None:
    """``(rows, length)`` bool, True where the score is left out."""
    row, column = torch.arange(rows, device=HOST).unsqueeze(1), torch.arange(length, device=HOST)
    if call.sparse_mode == 3:  # causal, aligned at the lower right
        return column > row + (length - rows)
    if call.sparse_mode == 2:  # causal, aligned at the upper left
        return column > row
    if call.mask is None:
        return None
    mask = call.mask.bool()
    if mask.dim() == 2 and call.geometry.q_len == 1:
        mask = mask.unsqueeze(1)  # (B, KV_S)
    while mask.dim() < 4:
        mask = mask.unsqueeze(1 if mask.dim() == 3 else 0)
    return mask[sequence if mask.shape[0] > 1 else 0, 0, :rows, :length]


def attention(call: AttentionCall, numeric: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the query's layout and dtype, and LSE ``(B, Q_N, Q_S, 1)`` (TND: ``(T, Q_N, 1)``) float32.

    Sequences without KV tokens give zeros; their LSE is NaN, for it is not documented. Query rows past a sequence's
    length are NaN, for they are not documented either. Without the LSE asked for, its shape is (0,), as the shape
    functions of torch_npu say (its documentation says (1,)).
    """
    g = call.geometry
    lengths_q, lengths_kv = call.lengths_q(), call.lengths_kv()
    starts = [0, *(call.q_lengths or ())] if call.layout == "TND" else []
    rows_total = g.q_len if call.layout == "TND" else g.batch * g.q_len
    out = torch.full((rows_total, g.q_heads, g.value_dim), math.nan, dtype=torch.float64, device=HOST)
    lse = torch.full((rows_total, g.q_heads), math.nan, dtype=torch.float64, device=HOST)
    int8_decode = call.decode and call.quantized
    for sequence, (rows, length) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        first = starts[sequence] if call.layout == "TND" else sequence * g.q_len
        if length == 0:
            out[first : first + rows] = 0
            continue
        query = _query_rows(call, sequence, rows, starts)
        masked = _masked(call, sequence, rows, length)
        for head in range(g.kv_heads):
            heads = slice(head * g.group, (head + 1) * g.group)
            key, value = _side(call, "key", sequence, head, length), _side(call, "value", sequence, head, length)
            if int8_decode:
                _observe(query[:, heads].float(), key, value)
            if int8_decode and numeric == "planes" and masked is None:
                flat = query[:, heads].reshape(-1, g.dim).float()
                part, part_lse = _decode_planes(flat, key, value, call.softmax_scale, PLANES[call.inner_precise])
                part, part_lse = part.double(), part_lse.double()
            else:
                flat = query[:, heads].reshape(-1, g.dim)
                spread = None if masked is None else masked.repeat_interleave(g.group, dim=0)
                part, part_lse = _exact(flat, key.decoded(), value.decoded(), call.softmax_scale, spread)
            out[first : first + rows, heads] = part.reshape(rows, g.group, g.value_dim)
            lse[first : first + rows, heads] = part_lse.reshape(rows, g.group)
    return _in_layout(call, out), _lse_in_layout(call, lse)


def _in_layout(call: AttentionCall, out: torch.Tensor) -> torch.Tensor:
    g = call.geometry
    # float64 -> float32 -> 16 bits, as on the device. The device rounds halves away from zero for float16.
    rounded = out.float().to(call.query.dtype)
    if call.layout == "TND":
        return rounded
    dense = rounded.reshape(g.batch, g.q_len, g.q_heads, g.value_dim)
    if call.layout == "BNSD":
        return dense.transpose(1, 2).contiguous()
    return dense if call.layout == "BSND" else dense.flatten(2)


def _lse_in_layout(call: AttentionCall, lse: torch.Tensor) -> torch.Tensor:
    g = call.geometry
    if not call.lse:
        return torch.empty(0, dtype=torch.float32, device=HOST)
    if call.layout == "TND":
        return lse.float().unsqueeze(-1)
    return lse.float().reshape(g.batch, g.q_len, g.q_heads).transpose(1, 2).unsqueeze(-1).contiguous()
