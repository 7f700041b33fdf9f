"""How pages lie in memory, in the operators' two forms, and the way from and to kvport's canonical planes.

==== =============================================== ==================================================== =========
form codes of one layer                              as the attention operator takes them                 scatter
==== =============================================== ==================================================== =========
nd   ``(pages, page_size, heads, dim)``              ``(pages, page_size, heads * dim)``, called BnBsH    Norm
nz   ``(pages, heads, dim / 32, page_size, 32)``     the same, 5 dimensions                               PA_NZ
==== =============================================== ==================================================== =========

Scales per token and head are ``(pages, heads, page_size)`` in either (only ``nd`` has them). The canonical planes are
``(pages, page_size, heads, dim)`` and ``(pages, page_size, heads)``, and unsigned where the format is asymmetric;
the operators read signed codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kvport.errors import InvalidArgument
from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport_cpu.base import POISON, TorchStore

NZ_FRACTION: Final = 32
"""int8 codes in the last axis of an NZ page: 32 bytes, by the scatter operator's documentation."""


class PageForm(ABC):
    """One of the two forms. ``cache_mode`` is the scatter operator's name for it.

    ``lse`` and ``inner_precise`` are what the attention operator allows, or is asked for, over such pages.
    """

    name: str
    cache_mode: str
    lse: bool
    inner_precise: int

    @abstractmethod
    def shape(self, page_size: int, heads: int, dim: int) -> tuple[int, ...]:
        """Of the codes of one page."""

    @abstractmethod
    def native(self, codes: Tensor) -> Tensor:
        """Codes ``(n, page_size, heads, dim)`` as pages of this form."""

    @abstractmethod
    def canonical(self, pages: Tensor) -> Tensor:
        """The inverse of :meth:`native`."""

    @abstractmethod
    def for_scatter(self, pages: Tensor) -> Tensor:
        """One layer's pages as the scatter operator takes them: a view."""

    @abstractmethod
    def for_attention(self, pages: Tensor) -> Tensor:
        """One layer's pages as the attention operator takes them: a view."""


class _TokenMajor(PageForm):
    name, cache_mode = "nd", "Norm"
    lse, inner_precise = True, 0  # three int8 planes of the query: float32 noise

    def shape(self, page_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return page_size, heads, dim

    def native(self, codes: Tensor) -> Tensor:
        return codes

    def canonical(self, pages: Tensor) -> Tensor:
        return pages

    def for_scatter(self, pages: Tensor) -> Tensor:
        return pages

    def for_attention(self, pages: Tensor) -> Tensor:
        return pages.flatten(2)  # with 4 dimensions the operator would read (pages, heads, page_size, dim)


class _Fractal(PageForm):
    name, cache_mode = "nz", "PA_NZ"
    lse, inner_precise = False, 1  # rules nz_no_lse, nz_inner_precise

    def shape(self, page_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return heads, dim // NZ_FRACTION, page_size, NZ_FRACTION

    def native(self, codes: Tensor) -> Tensor:
        return codes.reshape(*codes.shape[:-1], -1, NZ_FRACTION).permute(0, 2, 3, 1, 4)

    def canonical(self, pages: Tensor) -> Tensor:
        return pages.permute(0, 3, 1, 2, 4).flatten(-2)

    def for_scatter(self, pages: Tensor) -> Tensor:
        return pages.flatten(1, 2)

    def for_attention(self, pages: Tensor) -> Tensor:
        return pages


ND: Final[PageForm] = _TokenMajor()
NZ: Final[PageForm] = _Fractal()
FORMS: Final = {form.name: form for form in (ND, NZ)}


def buffers(layout: GroupLayout, pages: int, form: PageForm) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of every tensor of a store."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for plane in layout.planes:
        shape, dtype = plane.shape, plane.dtype
        if plane.name.endswith(".scale"):
            shape = shape[::-1]  # (page_size, heads) -> (heads, page_size)
        else:
            page_size, heads, dim = shape
            shape = form.shape(page_size, heads, dim)
            dtype = torch.int8 if dtype == torch.uint8 else dtype
        found[plane.name] = ((layout.layers, pages, *shape), dtype)
    if any(side.format.hides_nan for side in layout.sides):
        found[POISON] = ((layout.layers, pages), torch.uint8)
    return found


def own_or_given(
    storage: Mapping[str, Tensor] | None, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A new tensor, or the one handed in under this name if it fits."""
    if storage is None:
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = storage.get(name)
    if tensor is None:
        raise InvalidArgument(f"storage lacks {name!r}; it needs {shape} of {dtype}")
    fits = tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device.type == device.type
    if not fits or not tensor.is_contiguous():
        raise InvalidArgument(
            f"storage {name!r} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, contiguous: "
            f"{tensor.is_contiguous()}; needs contiguous {shape} {dtype} on {device}"
        )
    return tensor


def signed_codes(fmt: TensorFormat, codes: Tensor) -> Tensor:
    """Canonical codes to what the operators read: unsigned u becomes signed u - 128, the byte with bit 7 turned."""
    return (codes ^ 0x80).view(torch.int8) if fmt.quantized and not fmt.symmetric else codes


#: A float32 of 1.24 * 2^-100, by its bits. What stands for a V scale of zero in a store, see :func:`swap_zeros`.
ZERO_MARK: Final = 0x0D9E3779


def swap_zeros(scales: Tensor) -> Tensor:
    """V scales (float32) with 0 and :data:`ZERO_MARK` exchanged, bit for bit; its own inverse.

    The decode kernel divides by the largest softmax weight times V scale, and what it answers for 127 / 0, where every
    V of a sequence is zero, is not known. So no zero lies in a store. The codes beside it are zero, so any scale
    decodes to the same; a number that is the mark itself (nothing but an imported image could hold it) is kept as zero.
    """
    bits = scales.view(torch.int32)
    mark = torch.full_like(bits, ZERO_MARK)
    zero = torch.zeros_like(bits)
    return torch.where(bits == 0, mark, torch.where(bits == mark, zero, bits)).view(torch.float32)


def to_canonical(store: TorchStore, form: PageForm, name: str, pages: Tensor) -> Tensor:
    """Pages ``(n, ...)`` of the buffer ``name`` as the canonical plane."""
    if name.endswith(".scale"):
        return (swap_zeros(pages) if name.startswith("value.") else pages).transpose(1, 2)
    fmt = _format_of(store, name)
    codes = form.canonical(pages)
    return codes.view(torch.uint8) ^ 0x80 if fmt.quantized and not fmt.symmetric else codes


def to_native(store: TorchStore, form: PageForm, name: str, plane: Tensor) -> Tensor:
    """The inverse of :func:`to_canonical`."""
    if name.endswith(".scale"):
        return (swap_zeros(plane) if name.startswith("value.") else plane).transpose(1, 2)
    return form.native(signed_codes(_format_of(store, name), plane))


def _format_of(store: TorchStore, name: str) -> TensorFormat:
    return store.layout.format.key if name.startswith("key.") else store.layout.format.value
