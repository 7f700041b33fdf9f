"""append and attend as operators of torch, for functions that torch.compile traces.

A compiled function cannot look into a cache: it sees ``kvport::append`` and ``kvport::attend``, which act on whatever
step of the cache is open when they run. Slots, tables and plans are thus found at run time and never traced; nothing a
compiled function keeps can go stale. Called directly, append and attend do not take this way round: dispatching an
operator costs more than their own checks do.

``order`` is one element per cache, which append declares to change and attend reads, so that a compiler keeps them in
order. Pages themselves are no argument: a compiler that took a copy of one to preserve it would copy the cache.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvport.errors import ClosedError, StepError

if TYPE_CHECKING:
    from kvport.body import Body
    from kvport.cache import PagedCache

_numbers = itertools.count(1)
_caches: weakref.WeakValueDictionary[int, PagedCache] = weakref.WeakValueDictionary()
#: A graph that a compiler records by itself would keep a step's slots and plan.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def register(cache: PagedCache, device: torch.device) -> tuple[int, Tensor]:
    """The number under which operators find the cache, and its ``order``."""
    number = next(_numbers)
    _caches[number] = cache
    with torch.inference_mode(False):
        return number, torch.zeros(1, dtype=torch.uint8, device=device)


def _body(number: int) -> Body:
    cache = _caches.get(number)
    if cache is None:
        raise ClosedError("the cache that this function was compiled with is gone")
    step = cache._step
    if step is None:
        raise StepError("this step has ended; begin a new one with cache.step(...)")
    return step._body


@torch.library.custom_op("kvport::append", mutates_args=("order",), tags=_TAGS)
def append(order: Tensor, cache: int, layer: int, key: Tensor, value: Tensor | None) -> None:
    """:meth:`kvport.body.Body.append` of the step that is open in the cache of this number."""
    _body(cache)._append(layer, key, value)


@torch.library.custom_op("kvport::attend", mutates_args=(), tags=_TAGS)
def attend(
    order: Tensor,
    cache: int,
    layer: int,
    query: Tensor,
    value_dim: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:meth:`kvport.body.Body.attend` of the step that is open in the cache of this number.

    ``value_dim`` is the layer's, for the shape of the output while nothing runs.
    """
    output, lse = _body(cache)._attend(layer, query, scale, softcap, sinks)
    return output, lse


@append.register_fake
def _(order: Tensor, cache: int, layer: int, key: Tensor, value: Tensor | None) -> None:
    return None


@attend.register_fake
def _(
    order: Tensor,
    cache: int,
    layer: int,
    query: Tensor,
    value_dim: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    return query.new_empty((tokens, heads, value_dim)), query.new_empty((tokens, heads), dtype=torch.float32)
