"""How much memory an operation takes, as an allocator sees it and not as a backend says.

On an accelerator torch's caching allocator counts. On the CPU the C library counts, for torch, numpy and everybody
else; for the peak of an operation a dispatch mode watches the tensors that it makes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass
class Measured:
    """Bytes; None where the device's allocator cannot be asked."""

    bytes: int | None = None


@contextlib.contextmanager
def held(device: torch.device) -> Iterator[Measured]:
    """Bytes allocated on ``device`` at the end of the body that were not at its start."""
    found = Measured()
    count = _counter(device)
    before = count()
    yield found
    after = count()
    if before is not None and after is not None:
        found.bytes = after - before


@contextlib.contextmanager
def peak(device: torch.device) -> Iterator[Measured]:
    """The most bytes that were alive on ``device`` inside the body and not at its start."""
    found = Measured()
    if device.type == "cpu":
        storages = _storages()
        with storages:
            yield found
        found.bytes = storages.peak
        return
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "max_memory_allocated"):
        yield found
        return
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    yield found
    module.synchronize(device)
    found.bytes = module.max_memory_allocated(device) - before


def _counter(device: torch.device) -> Callable[[], int | None]:
    if device.type == "cpu":
        return _malloced
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "memory_allocated"):
        return lambda: None
    return lambda: int(module.memory_allocated(device))


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


@cache
def _mallinfo() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # another C library: nobody to ask
        return None
    function.restype = _MallInfo
    return function


def _malloced() -> int | None:
    """Bytes in use on the C heap, mapped blocks included."""
    function = _mallinfo()
    if function is None:
        return None
    info = function()
    return int(info.uordblks + info.hblkhd)


def _storages() -> Any:  # torch's dispatch machinery is not typed
    """A dispatch mode that counts the storages which operations make. Made on demand: its imports take seconds."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.peak = 0
            self.made: dict[int, tuple[StorageWeakRef, int]] = {}

        def __torch_dispatch__(
            self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            answer = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(answer):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in given:
                        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                        self.made[storage.data_ptr()] = (reference, storage.nbytes())
            self.made = {
                key: entry
                for key, entry in self.made.items()
                if not entry[0].expired()  # type: ignore[no-untyped-call]
            }
            self.peak = max(self.peak, sum(size for _, size in self.made.values()))
            return answer

    return Storages()
