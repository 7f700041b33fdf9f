"""Which cache formats the operators can read, and in which antiquant mode. Pure functions of the layout.

========================================  ====  ==========================================================
format of K and V                         mode  scales given to the operator
========================================  ====  ==========================================================
``int8`` (per token and head, float32)    5     float32 ``(pages, heads, page_size)``, in pages
``int8:channel:static:scale=DTYPE``       0     ``(1, heads, 1, dim)`` in the model's dtype
``int8:tensor:static:scale=DTYPE``        0     ``(1,)`` in the model's dtype
``int8:head:static:scale=DTYPE``          2     ``(heads,)`` in the model's dtype
the model's own dtype (fp16, bf16)        none  none
========================================  ====  ==========================================================

Over NZ pages only mode 0 is read, with bfloat16 scales ``(heads, 1, dim)``; scales per tensor or head are spread over
the channels, which changes no number.

DTYPE is the model's dtype, so that no scale changes on its way to the operator. Other static formats, and asymmetric
ones, can be had ``by_value``: their scales and zeros are then judged number by number when the store is allocated (see
:func:`static_operands`), which is too late for a promise by ``support()``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from kvport.errors import ScaleError
from kvport.formats import TensorFormat, dtype_name
from kvport.layout import GroupLayout
from kvport.scales import SideScales
from kvport_ascend.emulator.rules import ATTENTION, Rule
from kvport_ascend.emulator.scatter_rules import SCATTER_PA
from kvport_ascend.pages import ND, NZ, NZ_FRACTION, PageForm
from kvport_ascend.socs import Soc

QUERY_DTYPES: Final = (torch.float16, torch.bfloat16)
_STATIC_MODES: Final = {"channel": 0, "tensor": 0, "head": 2}
#: Heads (query, KV) that the documentation lists for NZ pages.
NZ_HEADS: Final = ((10, 1), (64, 8), (80, 8), (128, 16))
_RULES: Final[dict[str, Rule[Any]]] = {
    **{rule.name: rule for rule in ATTENTION},
    **{rule.name: rule for rule in SCATTER_PA},
}


def mode_of(fmt: TensorFormat, form: PageForm = ND) -> int | None:
    """Antiquant mode that reads this format; None for float pages and for formats that no mode reads."""
    if fmt.code != "int8" or fmt.outliers or fmt.sparse:
        return None
    if fmt.static and form is NZ:
        return 0
    if fmt.static:
        return _STATIC_MODES.get(fmt.granularity)
    return 5 if fmt.granularity == "token" and fmt.symmetric and fmt.scale_dtype == "fp32" else None


def refusals(layout: GroupLayout, soc: Soc, form: PageForm = ND) -> tuple[str, ...]:
    """Every unmet requirement, with the value at hand, what is allowed, and the rule that says so."""
    if soc.refusal:
        return (f"on {soc.products}: {soc.refusal}",)
    if layout.latent:
        return ("latent (MLA) layers: with query_rope the operator is documented to take no antiquant scales",)
    found = [*_format_refusals(layout), *_size_refusals(layout, soc)]
    if form is NZ:
        found += _nz_refusals(layout, soc)
    if layout.window is not None:
        found.append(
            f"window {layout.window}: the decode operator has no window, and a mask is reported to be wrong past KV "
            f"position 512 ({_quote('decode_takes_no_mask')}); layers without a window are supported"
        )
    return tuple(found)


def _quote(name: str) -> str:
    rule = _RULES[name]
    return f"rule {name}: {rule.text} [{rule.source}]"


def _format_refusals(layout: GroupLayout) -> list[str]:
    found = []
    if layout.dtype not in QUERY_DTYPES:
        found.append(f"model dtype {layout.dtype}: float16 or bfloat16 is allowed ({_quote('query_dtype')})")
    key, value = layout.format.key, layout.format.value
    for side, fmt in (("K and V", key),) if key == value else (("K", key), ("V", value)):
        if not fmt.quantized and fmt.code_torch_dtype != layout.dtype:
            nearest = dtype_name(layout.dtype) if layout.dtype in QUERY_DTYPES else "bf16 with a bfloat16 model"
            found.append(f"{side} pages of {fmt.code}: int8, or {nearest} ({_quote('kv_dtype')})")
        elif fmt.quantized and mode_of(fmt) is None:
            found.append(f"{side} format {fmt}: {_nearest(fmt)}")
    if not found and mode_of(key) != mode_of(value):
        found.append(
            f"K is {key} and V is {value}, antiquant modes {mode_of(key)} and {mode_of(value)}: both need one mode, "
            f"e.g. k={key},v={key} ({_quote('modes_equal')})"
        )
    if not found and (key.symmetric, key.granularity) != (value.symmetric, value.granularity):
        found.append(
            f"K is {key} and V is {value}: scales and offsets of both have one shape, or are absent for both "
            f"({_quote('value_scale_shape')}; {_quote('offsets_in_pairs')})"
        )
    return found


def _nearest(fmt: TensorFormat) -> str:
    if fmt.outliers:
        return f"no operator keeps outlier channels apart; int8 without outliers={fmt.outliers} is the nearest"
    if fmt.sparse:
        return f"no operator keeps sparse outliers apart; int8 without sparse={fmt.sparse} is the nearest"
    if fmt.code != "int8":
        return f"only int8 codes are read from pages; int8 is the nearest ({_quote('int4_not_paged')})"
    if fmt.granularity != "token":
        return (
            f"no antiquant mode has scales of granularity {fmt.granularity}; int8 (per token and head) is the nearest "
            f"({_quote('modes_known')})"
        )
    if not fmt.symmetric:
        return "offsets per token would be 128 + zero / scale, rarely exact in float32; int8 (symmetric) is the nearest"
    return f"scales per token are float32; int8 without scale= is the nearest ({_quote('key_scale_dtype')})"


def scale_rule(layout: GroupLayout) -> str:
    """Which static scales and zeros :func:`static_operands` takes, in words; empty where there are none."""
    sides = [fmt for fmt in (layout.format.key, layout.format.value) if fmt.static]
    if not sides:
        return ""
    dtype = dtype_name(layout.dtype)
    rule = (
        f"each scale is a {dtype} number and decodes to nothing beyond {dtype}'s largest ({_quote('key_scale_dtype')})"
    )
    return rule if all(fmt.symmetric for fmt in sides) else f"{rule}; each 128 + zero / scale is a {dtype} number"


def _nz_refusals(layout: GroupLayout, soc: Soc) -> list[str]:
    """What NZ pages ask for beyond the rest. ND pages, the default, are the nearest choice in every case."""
    found = []
    key, value = layout.format.key, layout.format.value
    if soc.nz_fraction != NZ_FRACTION:
        found.append(
            f"NZ pages on {soc.products}: attention is documented to read rows of {soc.nz_fraction} codes there, and "
            f"page writes to make rows of {NZ_FRACTION} ({_quote('kv_shape_fits')}; {_quote('scatter_cache_shape')})"
        )
    if layout.dtype != torch.bfloat16 or not (key.quantized and value.quantized):
        found.append(
            f"NZ pages of {layout.format} with a model of {layout.dtype}: int8 with a bfloat16 model "
            f"({_quote('nz_dtypes')})"
        )
    for side, fmt in (("K", key), ("V", value)):
        if fmt.quantized and not fmt.static:
            found.append(
                f"{side} format {fmt} in NZ pages: scales per token are not paged there; "
                f"int8:channel:static:scale=bf16 is the nearest ({_quote('nz_modes')})"
            )
        elif fmt.quantized and not fmt.symmetric:
            found.append(f"{side} format {fmt} in NZ pages: symmetric formats only ({_quote('nz_no_offset')})")
    if layout.format.tiered:
        found.append(
            f"{layout.format} in NZ pages: tiers are merged by an LSE, which attention over NZ pages does not give; "
            f"a format without sink and recent tokens is the nearest ({_quote('nz_no_lse')})"
        )
    if layout.key_dim != 128 or layout.page_size not in (128, 512):
        found.append(
            f"NZ pages with head dim {layout.key_dim} and page size {layout.page_size}: 128, and 128 or 512 "
            f"({_quote('nz_geometry')})"
        )
    heads = (layout.query_heads, layout.kv_heads)
    if heads not in NZ_HEADS:
        allowed = ", ".join(map(str, NZ_HEADS))
        found.append(f"NZ pages with {heads} query and KV heads: {allowed} ({_quote('nz_heads')})")
    return found


def static_operands(
    where: str, layout: GroupLayout, fmt: TensorFormat, side: SideScales, form: PageForm = ND
) -> tuple[Tensor, Tensor | None]:
    """The attention operator's scale and offset (None if symmetric) for static scales, in the query's dtype.

    kvport's number is ``u * scale + zero`` with an unsigned code u, or ``code * scale``; the operator's is
    ``(code + offset) * scale`` with a signed code. With ``code = u - 128`` that is ``offset = 128 + zero / scale``.
    Raises :class:`ScaleError` where a cast would change a number: the pages would then decode to other values here
    than anywhere else.
    """
    dtype = layout.dtype
    scale = side.scale.to("cpu", torch.float64)
    cast = scale.to(dtype)
    if bool((wrong := cast.double() != scale).any()):
        raise ScaleError(
            f"{where}: {int(wrong.sum())} of {scale.numel()} scales are not numbers of the model's dtype {dtype}, in "
            f"which the operator takes them, e.g. {float(scale[wrong].flatten()[0])!r}; round them before opening"
        )
    limit = torch.finfo(dtype).max
    if bool((scale * 128 > limit).any()):
        raise ScaleError(
            f"{where}: a scale of {float(scale.max())} decodes to numbers beyond {dtype}'s largest, {limit}, in which "
            "the prefill route holds K and V"
        )
    if form is NZ:
        per_head = cast.reshape(-1, 1, cast.shape[1] if fmt.granularity == "channel" else 1)
        return per_head.expand(layout.kv_heads, 1, layout.key_dim).contiguous(), None
    if side.zero is None:
        return cast.reshape(_operand_shape(fmt, scale)).contiguous(), None
    zero = side.zero.to("cpu", torch.float64)
    offset = (128.0 + zero / scale).to(dtype)
    if bool((wrong := (offset.double() - 128.0) * scale != zero).any()):
        raise ScaleError(
            f"{where}: {int(wrong.sum())} of {scale.numel()} zeros have no exact offset 128 + zero / scale in {dtype}, "
            f"e.g. zero {float(zero[wrong].flatten()[0])!r} with scale {float(scale[wrong].flatten()[0])!r}; whole "
            "multiples of the scale are exact, symmetric formats need no offset"
        )
    shape = _operand_shape(fmt, scale)
    return cast.reshape(shape).contiguous(), offset.reshape(shape).contiguous()


def _operand_shape(fmt: TensorFormat, scale: Tensor) -> tuple[int, ...]:
    return (1, scale.shape[0], 1, scale.shape[1]) if fmt.granularity == "channel" else (-1,)


def _size_refusals(layout: GroupLayout, soc: Soc) -> list[str]:
    found = []
    int8 = layout.format.key.quantized
    dim_unit, page_unit = (soc.int8_dim, soc.int8_page) if int8 else (soc.float_dim, soc.float_page)
    if layout.key_dim != layout.value_dim:
        found.append(f"key_dim {layout.key_dim}, value_dim {layout.value_dim}: equal ones ({_quote('kv_same_shape')})")
    dims = {layout.key_dim, layout.value_dim}
    if any(dim % dim_unit or dim > soc.max_dim for dim in dims):
        found.append(f"head dim {sorted(dims)}: multiples of {dim_unit} up to {soc.max_dim} ({_quote('head_dim')})")
    page = layout.page_size
    if page % page_unit or page > soc.max_page:
        nearest = min(soc.max_page, max(page_unit, round(page / page_unit) * page_unit))
        found.append(
            f"page size {page}: multiples of {page_unit} up to {soc.max_page}, nearest {nearest} "
            f"({_quote('block_size_decode')})"
        )
    if layout.group_size > soc.max_ratio:
        found.append(f"{layout.group_size} query heads per KV head: at most {soc.max_ratio} ({_quote('heads_ratio')})")
    if layout.query_heads > soc.max_heads:
        found.append(f"{layout.query_heads} query heads: at most {soc.max_heads} ({_quote('heads_limit')})")
    if layout.kv_heads * layout.key_dim > soc.max_row:
        found.append(
            f"{layout.kv_heads} KV heads of {layout.key_dim}: at most {soc.max_row} numbers a token "
            f"({_quote('page_row_limit')})"
        )
    return found


def max_pages(layout: GroupLayout) -> int:
    """Pages of one layer whose K still has fewer than 2^31 elements (rule cache_elements)."""
    return int((2**31 - 1) // (layout.page_size * layout.kv_heads * layout.key_dim))
