"""Triton's interpreter, made affordable: what it does anew around each operation of a kernel is done once.

A launch replaces the operations of ``triton.language`` by numpy ones, and the interpreter does so again, by walking
through all of its names, at every call of a helper function in between. Then each result's shape is described from
scratch, operands of one shape are broadcast to it, and every integer operation is checked for overflow. That is three
quarters of the time a kernel takes; none of it changes a number.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BUILDER = interpreter.interpreter_builder
_SEMANTIC = type(interpreter.interpreter_semantic)
_numpy_dtype_of = interpreter._get_np_dtype
_describe_block = tl.core.block_type.__init__
_describe_tensor = tl.core.tensor.__init__
_broadcast_both = _SEMANTIC.broadcast_impl_value


#: Language, options and place in the grid are one for the whole process, so threads take turns.
_LOCK = threading.RLock()


@contextmanager
def launching(*, check_overflow: bool) -> Iterator[None]:
    """Around launches: numpy does not warn of infinities or of rows that are all NaN, as a graph's padding may be, and
    integer operations are checked only where asked for."""
    with _LOCK:
        scope = interpreter._patch_lang(_SEES_ALL)
        try:
            scope.set_attr(interpreter, "_patch_lang", lambda kernel: interpreter._LangPatchScope())
            scope.set_attr(interpreter.InterpretedFunction, "__call__", _call)
            scope.set_attr(interpreter, "_get_np_dtype", _numpy_dtype)
            scope.set_attr(tl.core.block_type, "__init__", _block_type)
            scope.set_attr(tl.core.tensor, "__init__", _tensor)
            # (triton 3.6 asks numpy for the integer of an array of one element, which newer numpy refuses.)
            scope.set_attr(tl.core.tensor, "__index__", lambda self: int(self.handle.data.item()))
            scope.set_attr(_SEMANTIC, "broadcast_impl_value", _broadcast)
            scope.set_attr(_BUILDER, "options", dataclasses.replace(_BUILDER.options, sanitize_overflow=check_overflow))
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                yield
        finally:
            scope.restore()


def _kernel() -> None: ...


#: Kernels know the language by its first name, Triton's own helper functions by the second.
_SEES_ALL = FunctionType(_kernel.__code__, {"tl": tl, "core": tl.core})


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a helper function from inside a launch, which has prepared the language already."""
    return self.rewrite()(*args, **kwargs)


def _numpy_dtype(dtype: Any) -> Any:
    """The numpy dtype of a type, kept with it."""
    if "_numpy" not in dtype.__dict__:
        dtype._numpy = _numpy_dtype_of(dtype)
    return dtype._numpy


def _block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    """Initialize a block type: those of one element type and shape share one description, kept with the former."""
    known = element_ty.__dict__.setdefault("_blocks", {})
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if sizes not in known:
        _describe_block(self, element_ty, [*sizes])
        self._sizes = sizes
        known[sizes] = self.__dict__
    self.__dict__ = known[sizes]


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """Initialize a tensor: whatever follows from its type is kept with that."""
    if "_of_tensors" not in type.__dict__:
        _describe_tensor(self, handle, type)
        type._of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
    self.__dict__.update(type._of_tensors)
    self.handle = handle


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Broadcast two tensors to one shape, touching only one that has another."""
    left, right = _sizes(lhs), _sizes(rhs)
    if left == right:
        return lhs, rhs
    if left and right:
        if len(left) != len(right) or any(m != n and 1 not in (m, n) for m, n in zip(left, right, strict=True)):
            found: tuple[Any, Any] = _broadcast_both(self, lhs, rhs)
            return found
        shape = tuple(map(max, left, right))
    else:
        shape = left or right
    return (
        lhs if left == shape else _stretched(self, lhs, shape),
        rhs if right == shape else _stretched(self, rhs, shape),
    )


def _sizes(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor, () of a scalar, as plain integers: Triton's own tuples are slow."""
    found: tuple[int, ...] = tensor.type._sizes if tensor.type.is_block() else ()
    return found


def _stretched(self: Any, tensor: Any, shape: tuple[int, ...]) -> Any:
    handle = tensor.handle
    if tensor.type.is_block():
        data = np.broadcast_to(handle.data, shape)
    else:
        data = np.full(shape, handle.data, _numpy_dtype(handle.dtype))
    return self.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), tl.core.block_type(tensor.dtype, shape))
