"""Between the judge's numpy arrays and the torch tensors a backend takes, and memory that nobody may trust.

The judge's arrays hold half-precision planes as uint16 bit patterns, because numpy has no bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from kvport_conformance.oracle_floats import Array, Float32Array

DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: How a float input may lie in memory: all the same values, none but the first contiguous.
FORMS: Final = ("packed", "fused", "heads_first", "every_other_row", "every_other_channel")


def to_torch(x: Float32Array, dtype: str, device: torch.device, form: str = "packed") -> Tensor:
    """``x`` (tokens, heads, dim), representable in ``dtype``, as a tensor whose memory is laid out as ``form`` says.

    What lies between the elements is NaN, so that a kernel which assumes contiguity reads poison.
    """
    # A copy: what a backend does to its arguments must not reach the judge's own numbers.
    flat = torch.from_numpy(np.ascontiguousarray(x).copy()).to(DTYPES[dtype]).to(device)
    tokens, heads, dim = x.shape
    if form == "packed":
        return flat
    if form == "fused":  # as K inside one (tokens, heads, q + k + v) projection, at an odd offset
        view = flat.new_full((tokens, heads, 2 * dim + 3), torch.nan)[..., 3 : 3 + dim]
    elif form == "heads_first":
        view = flat.new_full((heads, tokens, dim), torch.nan).permute(1, 0, 2)
    elif form == "every_other_row":
        view = flat.new_full((2 * tokens + 1, heads, dim), torch.nan)[1::2]
    elif form == "every_other_channel":
        view = flat.new_full((tokens, heads, 2 * dim), torch.nan)[..., ::2]
    else:
        raise ValueError(f"form {form!r} is none of {', '.join(FORMS)}")
    return view.copy_(flat)


def plane_to_numpy(tensor: Tensor) -> Array:
    """A plane as the judge holds it: half-precision floats as uint16 bits, everything else as it is."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype in (torch.bfloat16, torch.float16):
        return host.view(torch.int16).numpy().view(np.uint16)
    if host.dtype in _FLOAT8:
        return host.view(torch.uint8).numpy()
    array: Array = host.numpy()
    return array


def plane_to_torch(array: Array, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`plane_to_numpy`, as a host tensor of ``dtype``."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


_FLOAT8: Final = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, name)
)


def fill_bytes(tensor: Tensor, byte: int) -> None:
    """Set every byte of a tensor, whatever its dtype and strides: 0xFF is NaN to every float and -1 to integers."""
    tensor.view(torch.uint8).fill_(byte) if tensor.is_contiguous() else tensor.copy_(
        torch.full((tensor.numel() * tensor.itemsize,), byte, dtype=torch.uint8, device=tensor.device)
        .view(tensor.dtype)
        .view(tensor.shape)
    )


def raw_bytes(tensor: Tensor) -> Array:
    """The bytes of a contiguous tensor, on the host: (nbytes,) uint8."""
    array: Array = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return array


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Inside, what torch.empty and its kin (and numpy.empty) return is NaN or the largest integer, not stale zeros.

    An output that an operation leaves unwritten then shows; so does scratch that is read before it is written.
    """

    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            if isinstance(made, Tensor) and made.numel() and made.device.type != "meta":
                with torch.no_grad():
                    if made.dtype.is_floating_point or made.dtype.is_complex:
                        made.fill_(torch.nan)
                    elif made.dtype != torch.bool:
                        made.fill_(torch.iinfo(made.dtype).max)
            return made

        return wrapper

    def poisoning_numpy(make: Callable[..., Array]) -> Callable[..., Array]:
        def wrapper(*args: Any, **kwargs: Any) -> Array:
            made = make(*args, **kwargs)
            if made.dtype.kind == "f":
                made.fill(np.nan)
            elif made.dtype.kind in "iu":
                made.fill(np.iinfo(made.dtype).max)
            return made

        return wrapper

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
        ):
            stack.enter_context(mock.patch.object(owner, name, poisoning(getattr(owner, name))))
        for name in ("empty", "empty_like"):
            stack.enter_context(mock.patch.object(np, name, poisoning_numpy(getattr(np, name))))
        yield
