"""What the body of a step may do: append each layer once, attend after it.

:class:`Body` works on slots and plans that are there already. An ordinary :class:`~kvport.step.Step` makes them anew; a
graph's body (:mod:`kvport.graph`) finds them in buffers that stay where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from kvport import operators
from kvport.arguments import show
from kvport.attention import Read, attend_sequence, uncast
from kvport.backend import Plan
from kvport.errors import InvalidArgument, StepError
from kvport.formats import DTYPES
from kvport.layout import LayerSpec
from kvport.merge import merge
from kvport.rotation import rotate, unrotate

if TYPE_CHECKING:
    from kvport.cache import PagedCache
    from kvport.sequences import Sequence

Fresh = Literal["stored", "exact"]


class Attention(NamedTuple):
    """What attend returns.

    ``output`` ``(tokens, query_heads, value_dim)`` in the query's dtype; ``lse`` ``(tokens, query_heads)`` float32.
    """

    output: Tensor
    lse: Tensor


@dataclass
class GroupArrays:
    """What a step touches in one group of layers."""

    slots: Tensor  # of the new tokens, in the near lane, on the device
    plans: list[tuple[int, Plan]]  # one per range of positions: a tiered group attends to up to three, then merges


class Body:
    """Append and attend of one step. ``tokens`` is the number of packed rows that every call takes."""

    #: Whether slots, tables and plans stay where they are, so that a graph that was recorded over them stays right.
    _fixed = False

    def __init__(self, cache: PagedCache, tokens: int, fresh: Fresh = "stored") -> None:
        self._cache = cache
        self.tokens = tokens
        self.fresh = fresh
        self.rows: dict[Sequence, slice] = {}
        self._groups: list[GroupArrays] = []
        self._exact: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, this step's K and V where fresh is "exact"
        self._appended: set[int] = set()
        self._phases: frozenset[str] = frozenset()  # features that its query rows need of a backend
        self._open = False

    @property
    def _body(self) -> Body:
        """What operators of a compiled function append to and attend over while this is open."""
        return self

    def rollback(self) -> None:
        """End it and leave every sequence, page and count as before."""
        self._check_open()
        self._close()

    def _close(self) -> None:
        self._open = False
        self._cache._step = None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """copy, deepcopy and pickle: a transaction has one owner."""
        raise StepError("a step cannot be copied or pickled; end it and begin another with cache.step(...)")

    def _missing(self) -> list[int]:
        """Layers that were not appended."""
        return sorted(set(self._cache._stored_layers) - self._appended)

    # -- what a user calls ---------------------------------------------------------------------------------------

    def append(self, layer: int, key: Tensor, value: Tensor | None = None) -> None:
        """Quantize and store this step's K and V of one layer, once.

        ``key`` ``(tokens, kv_heads, key_dim)``, ``value`` ``(tokens, kv_heads, value_dim)``, packed in the order of
        :attr:`rows`; fp16, bf16 or fp32, any strides, on the cache's device. A latent (MLA) layer takes no value: it
        is the latent part of the key.
        """
        if torch.compiler.is_compiling():
            _refuse_grad("key", key)
            operators.append(self._cache._order, self._cache._number, layer, key, value)
        else:
            self._append(layer, key, value)

    def _append(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        spec, group, local = self._locate(layer)
        if spec.shares is not None:
            raise StepError(f"layer {layer} reads the K/V of layer {spec.shares}; append there, attend here")
        if layer in self._appended:
            raise StepError(f"layer {layer} was already appended in this step")
        self._check_tensor("key", key, (self.tokens, spec.kv_heads, spec.key_dim))
        if spec.latent and value is not None:
            raise InvalidArgument(f"layer {layer} is latent: its V is the latent part of its K, pass value=None")
        if not spec.latent:
            self._check_tensor("value", value, (self.tokens, spec.kv_heads, spec.value_dim))
        fmt = self._cache.layout.groups[group].layout.format
        if fmt.rotate is not None:
            key = rotate(key, fmt.rotate, self._cache.layout.groups[group].layout.rotated_dim)
        if self.tokens:
            store = self._cache._stores[self._cache._tiers[group].near]
            backend = self._cache.backend
            with uncast(backend.torch_device.type):
                backend.append(store, local, key, value, self._groups[group].slots)
        if self.fresh == "exact":
            # Copies: the caller may write the next layer's K and V over these before attend. A rotation made one.
            key = key.clone() if fmt.rotate is None else key
            self._exact[layer] = (key, key[..., : spec.value_dim] if value is None else value.clone())
        self._appended.add(layer)

    def attend(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Attention:
        """Causal attention of this step's queries over everything stored, this step's tokens included.

        ``query`` ``(tokens, query_heads, key_dim)``. ``scale`` defaults to 1/sqrt(key_dim). ``softcap`` c turns a
        score s into c * tanh(s / c). ``sinks`` ``(query_heads,)`` are learned sink logits. The layer must have been
        appended in this step. A sink of -inf is none; one of NaN or +inf makes its own head's rows NaN and no other.
        """
        if torch.compiler.is_compiling():
            _refuse_grad("query", query)
            cache = self._cache
            # A layer number that varies must not be looked up while tracing: each would be compiled by itself.
            width = cache._value_dim or cache.layout.layers[layer].value_dim
            found = operators.attend(cache._order, cache._number, layer, query, width, scale, softcap, sinks)
            return Attention(*found)
        return self._attend(layer, query, scale, softcap, sinks)

    def _attend(
        self, layer: int, query: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None
    ) -> Attention:
        spec, group, local = self._locate(layer)
        owner = layer if spec.shares is None else spec.shares
        if owner not in self._appended:
            raise StepError(f"layer {owner} must be appended in this step before layer {layer} attends")
        self._check_tensor("query", query, (self.tokens, spec.query_heads, spec.key_dim))
        scale = 1.0 / math.sqrt(spec.key_dim) if scale is None else _float32("scale must be a finite number", scale)
        if softcap is not None:
            softcap = _float32(wanted := "softcap must be a positive finite number or None", softcap)
            if softcap < torch.finfo(torch.float32).smallest_normal:
                raise InvalidArgument(f"{wanted}, in float32's normal range, got {softcap!r}")
        if sinks is not None:
            self._check_tensor("sinks", sinks, (spec.query_heads,))
        needs = set(self._phases if self._groups[group].plans else ())  # no plan: nothing stored is attended to
        needs |= {name for name, given in (("softcap", softcap), ("sinks", sinks)) if given is not None}
        if needs:
            self._cache._require(group, needs, "attend to")
        layout = self._cache.layout.groups[group].layout
        if layout.format.rotate is not None:
            query = rotate(query, layout.format.rotate, layout.rotated_dim).to(query.dtype)
        exact = self._exact.get(owner)
        with uncast(self._cache.backend.torch_device.type):
            found = self._attend_group(group, local, query, exact, scale=scale, softcap=softcap, sinks=sinks)
        if layout.format.rotate is not None and layout.latent:  # V is the rotated latent part
            output = unrotate(found.output, layout.format.rotate, layout.rotated_dim).to(query.dtype)
            return Attention(output, found.lse)
        return found

    def _attend_group(
        self,
        group: int,
        local: int,
        query: Tensor,
        exact: tuple[Tensor, Tensor] | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Attention:
        """Attend every range of the group, and the step's own tokens where they are exact, and merge."""
        backend, stores, plans = self._cache.backend, self._cache._stores, self._groups[group].plans
        if len(plans) == 1 and (exact is None or not self.tokens):
            [(lane, plan)] = plans
            return Attention(
                *backend.attend(stores[lane], local, query, plan, scale=scale, softcap=softcap, sinks=sinks)
            )
        partials = [
            backend.attend(stores[lane], local, query, plan, scale=scale, softcap=softcap, partial=True)
            for lane, plan in plans
        ]
        if exact is not None and self.tokens:
            partials.append(self._attend_exact(group, query, *exact, scale=scale, softcap=softcap))
        out, lse = merge(partials, sinks)
        return Attention(out.to(query.dtype), lse)

    def _attend_exact(
        self, group: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Each sequence's queries over its own rows of this step's K and V, in float32."""
        layout = self._cache.layout.groups[group].layout
        found = [
            attend_sequence(
                _reader(key[rows], value[rows]),
                query[rows],
                kv_heads=layout.kv_heads,
                value_dim=layout.value_dim,
                page_size=1,
                query_position=0,
                kv_start=0,
                length=rows.stop - rows.start,
                window=layout.window,
                scale=scale,
                softcap=softcap,
                sinks=None,
            )
            for rows in self.rows.values()
            if rows.stop > rows.start
        ]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise StepError("this step has ended; begin a new one with cache.step(...)")

    def _locate(self, layer: int) -> tuple[LayerSpec, int, int]:
        self._check_open()
        if not self._fixed and self._cache.backend.recording():
            raise StepError(
                "this step's page ids and lengths would be baked into the graph that is being recorded, and stale at "
                "its first replay; record the body of cache.graph(...) instead"
            )
        group, local = self._cache._locate(layer)
        return self._cache.layout.layers[layer], group, local

    def _check_tensor(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} must be a torch tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise InvalidArgument(f"{name} is a {kind} tensor; give a dense one of shape {shape} (.to_dense())")
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(f"{name} has shape {tuple(tensor.shape)}, this layer and step need {shape}")
        if tensor.dtype not in DTYPES.values():
            raise InvalidArgument(f"{name} has dtype {tensor.dtype}; allowed: float32, bfloat16, float16")
        device = self._cache.backend.torch_device
        if tensor.device.type != device.type or (
            device.index is not None and device.type != "cpu" and tensor.device.index != device.index
        ):
            raise InvalidArgument(
                f"{name} is on {tensor.device}, the cache is on {device}; move it with .to({str(device)!r})"
            )
        _refuse_grad(name, tensor)


def _refuse_grad(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(f"{name} requires grad; a cache is not differentiable: use torch.no_grad() or .detach()")


def _float32(wanted: str, value: object) -> float:
    """A finite number that float32 can hold; for anything else :class:`InvalidArgument`, which says what is wanted."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, a tensor of many, 10**400
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise InvalidArgument(f"{wanted} that float32 can hold, got {show(value)}")
    return number


def _reader(key: Tensor, value: Tensor) -> Read:
    """Rows read as pages of one token."""
    return lambda first, last: (key[first:last, None].float(), value[first:last, None].float())
