"""The operations a backend implements. This is the whole seam between kvport and a chip.

A backend is an object bound to one device. It stores pages for a :class:`~kvport.layout.GroupLayout`, quantizes and
scatters K/V into them, and attends over them. It never calls up into the cache, and the cache never asks which vendor
it is talking to. :class:`kvport_cpu.base.TorchBackend` implements every operation on any torch device; a vendor
inherits it and overrides one operation at a time, and what is inherited is reported.

Words used below: S sequences, T packed query tokens, P page size, D key_dim, E value_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvport.errors import Unsupported
from kvport.features import ATTENTION_FEATURES as ATTENTION_FEATURES  # part of the interface: backends declare by it
from kvport.layout import GroupLayout
from kvport.scales import LayerScales

Execution = Literal["hardware", "interpreter", "emulated"]
Workspace = Literal["bounded", "history"]

#: The operations of this interface, in the order a vendor usually makes them native.
OPERATIONS: Final = (
    "support",
    "page_bytes",
    "allocate",
    "buffers",
    "append",
    "seal",
    "plan",
    "attend",
    "gather",
    "copy_pages",
    "export_pages",
    "import_pages",
    "poisoned",
)


@dataclass(frozen=True)
class Support:
    """The answer to "can you do this layout?".

    ``reasons`` is empty for yes; else it names every unmet requirement with the value at hand and the nearest
    supported choice. ``workspace`` is ``"history"`` where attend needs memory that grows with the context.
    ``features`` is the subset of :data:`kvport.features.FEATURES` that is honoured for this layout; those of
    ``STORAGE_FEATURES`` and "graph" are not taken for granted. A rotation is done before rows reach a backend and needs
    nothing. ``scale_rule`` says, where not all static scales can be held exactly, which can; :meth:`Backend.allocate`
    raises ``ScaleError`` for others, naming one. Scales that are all 1/64 (zeros -2), numbers of every float dtype,
    must fit any such rule. Nothing else may be decided as late as that.
    """

    reasons: tuple[str, ...] = ()
    workspace: Workspace = "bounded"
    features: frozenset[str] = ATTENTION_FEATURES
    scale_rule: str = ""

    @property
    def ok(self) -> bool:
        return not self.reasons


class Store:
    """Pages of one group on one device. Backends subclass it; the cache only passes it back.

    Page 0 is the spare: it takes padding writes and pads page tables, belongs to no sequence, and is counted in
    ``pages``.
    """

    def __init__(self, layout: GroupLayout, pages: int) -> None:
        self.layout = layout
        self.pages = pages


@dataclass(frozen=True)
class StepArrays:
    """Which pages and positions one step touches, as raw index arrays (never cache objects).

    ``page_table`` ``(S, max_pages)`` int32: entry [s, i] is the page of positions i*P .. i*P+P-1 of sequence s,
    padded with page 0. ``kv_start`` and ``lengths`` ``(S,)`` int32: the store holds positions kv_start <= j < lengths
    of each sequence (kv_start is 0 unless a window freed passed pages, or a tier begins later).
    ``query_starts`` ``(S+1,)`` int32: rows query_starts[s] .. query_starts[s+1]-1 of the packed queries belong to s.
    ``query_positions`` ``(S,)`` int32: the position of each sequence's first query row; row r of s is at
    query_positions[s] + r, and sees stored positions j <= its own, within the window.

    Example, P = 16: a sequence of 20 tokens on pages 7 and 3, of which the last 2 are this step's queries: table row
    [7, 3], kv_start 0, length 20, query_position 18; its next token would go to slot 3 * 16 + 4 = 52.
    """

    page_table: Tensor
    kv_start: Tensor
    lengths: Tensor
    query_starts: Tensor
    query_positions: Tensor

    def to(self, device: torch.device) -> StepArrays:
        """The same arrays on ``device``."""
        return StepArrays(
            *(
                getattr(self, name).to(device, non_blocking=True)
                for name in ("page_table", "kv_start", "lengths", "query_starts", "query_positions")
            )
        )


@dataclass(frozen=True)
class Plan:
    """What a backend prepared from one step's arrays, reused by every layer of the group.

    ``host`` are the arrays in host memory, ``device`` the same beside the pages; ``private`` is the backend's own.
    """

    host: StepArrays
    device: StepArrays
    private: Any = None


@dataclass(frozen=True)
class Limits:
    """The most that a plan of a fixed shape has room for.

    ``sequences``, ``tokens`` (packed query rows), ``query_tokens`` (of one sequence) and ``pages`` (of one sequence:
    columns of its table).
    """

    sequences: int
    tokens: int
    query_tokens: int
    pages: int

    def padding(self) -> StepArrays:
        """Arrays of the full shape that hold no token, for a plan that nobody has filled yet."""
        return StepArrays(
            page_table=torch.zeros((self.sequences, self.pages), dtype=torch.int32, device="cpu"),
            kv_start=torch.zeros(self.sequences, dtype=torch.int32, device="cpu"),
            lengths=torch.zeros(self.sequences, dtype=torch.int32, device="cpu"),
            query_starts=torch.zeros(self.sequences + 1, dtype=torch.int32, device="cpu"),
            query_positions=torch.zeros(self.sequences, dtype=torch.int32, device="cpu"),
        )


class Backend(ABC):
    """A device's implementation of the operations. Instances are created by a plugin's ``load(device)``.

    ``name`` is the backend's name, ``device`` the device string as the user typed it after ``@``,
    ``torch_device`` where its tensors live, ``execution`` whether results come from hardware.
    """

    name: ClassVar[str]
    execution: Execution = "hardware"
    #: What the conformance suite holds the backend to: codes and scales bit for bit, or within its one-code class.
    exactness: Literal["bit-exact", "one-code"] = "bit-exact"
    #: How :meth:`record` repeats a body, for logs: "eager" runs it anew.
    capture: str = "eager"
    device: str
    torch_device: torch.device

    @abstractmethod
    def support(self, layout: GroupLayout) -> Support:
        """Say whether pages of this layout can be stored and attended here. Never accept and ignore."""

    @abstractmethod
    def page_bytes(self, layout: GroupLayout) -> int:
        """Device bytes of one page over all layers of the group, padding and flags included."""

    @abstractmethod
    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> Store:
        """Make storage for ``pages`` pages (the spare included).

        ``scales`` holds one :class:`LayerScales` per layer, on the host, for static formats. ``storage`` hands in
        the tensors to use instead of new ones, by the names of :meth:`buffers`. Contents are undefined. Raises
        :class:`kvport.Unsupported` for a layout that :meth:`support` declines, and :class:`kvport.ScaleError` for
        scales that its ``scale_rule`` leaves out, with the ``layer`` (of 0 .. layers-1) that they are of.
        """

    @abstractmethod
    def buffers(self, store: Store) -> dict[str, Tensor]:
        """Every tensor whose bytes depend on the page count, nothing hidden: their bytes are page_bytes * pages."""

    @abstractmethod
    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Quantize and scatter K and V in one pass.

        ``key`` ``(T, kv_heads, D)``, ``value`` ``(T, kv_heads, E)``: float, any strides; ``value`` is None for latent
        layers, whose V is the first E channels of K. ``slots`` ``(T,)`` int64 on
        the device: page * P + offset, unique, -1 to skip the row.
        """

    @abstractmethod
    def seal(
        self, source: Store, target: Store, layer: int, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        """Encode whole pages of a higher-precision store into a low-bit one, K and V together."""

    @abstractmethod
    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        """Prepare one step from host arrays: split sizes, device copies, scratch. Called once, used by every layer."""

    @abstractmethod
    def attend(
        self,
        store: Store,
        layer: int,
        query: Tensor,
        plan: Plan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        partial: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Attention of packed queries over the stored pages.

        ``query`` ``(T, query_heads, D)``, any strides. Scores are scale * q.k, then softcap * tanh(s / softcap)
        where given. ``sinks`` ``(query_heads,)`` float32 are learned sink logits: one extra column of the softmax
        with value 0. Returns output ``(T, query_heads, E)`` in the query's dtype and natural-log LSE
        ``(T, query_heads)`` float32. Rows that see nothing give zeros and -inf. With ``partial`` the output is
        float32 and must be merged with others by its LSE; sinks are then not allowed. Where the feature "lse" is not
        declared, the LSE is NaN throughout and ``partial`` is never asked for: the cache refuses tiers and exact
        fresh tokens there.
        """

    @abstractmethod
    def gather(
        self, store: Store, layer: int, page_table: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Decode positions 0 .. lengths[s]-1 of each table row to dense K ``(S, max(lengths), kv_heads, D)`` and V.

        ``page_table`` ``(S, max_pages)`` int32 or int64 on the device. Positions past a length are zeros. Strides
        are the backend's choice.
        """

    @abstractmethod
    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages, all layers, codes and scales, bit for bit. Targets are disjoint from sources."""

    @abstractmethod
    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        """The canonical planes of these pages on the host: name -> ``(len(pages), *plane.shape)``."""

    @abstractmethod
    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`export_pages`, bit for bit. The pages are written anew: no flag of theirs stays."""

    @abstractmethod
    def poisoned(self, store: Store) -> Tensor:
        """``(layers, pages)`` bool on the host: where a static integer format met a NaN and stored code 0.

        The flag is sticky from the write until the first slot of the page is written anew. Other formats keep NaN
        visible in their scales or codes and always answer False.
        """

    def flag_pages(self, store: Store, layer: int, pages: Sequence[int]) -> None:
        """Raise the flags that :meth:`poisoned` reads: for imported pages, whose NaNs were met elsewhere.

        :meth:`import_pages` leaves them lowered. Asked for where the feature "poison" is declared, of pages of static
        integer formats alone.
        """
        raise Unsupported(
            f"backend {self.name} cannot flag pages whose NaNs were met by another cache: it has no flag_pages"
        )

    # -- graphs: where the feature "graph" is declared --------------------------------------------------------------

    def fixed_plan(self, store: Store, limits: Limits) -> Plan:
        """A plan that stays where it is: its tensors and launches depend on ``limits`` alone.

        It holds no token until :meth:`refill`. Query rows past the last sequence's, of which a graph's padding
        consists, must give zeros and -inf under such a plan.
        """
        raise Unsupported(f"backend {self.name} has no plans of a fixed shape, which graphs need")

    def refill(self, store: Store, plan: Plan, arrays: StepArrays) -> None:
        """Write one step's host arrays into a fixed plan, in the order of the current stream.

        ``arrays`` have the full shape: padding sequences are empty and have no query rows. The host arrays may change
        as soon as this returns.
        """
        raise Unsupported(f"backend {self.name} has no plans of a fixed shape, which graphs need")

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record the device work of ``run``, which has run before, and return what repeats it with the same results.

        The default repeats by running anew.
        """
        return run

    def recording(self) -> bool:
        """Whether device work is being recorded instead of run, by :meth:`record` or by the user."""
        return False

    def upload(self, host: Tensor, target: Tensor | None = None) -> Tensor:
        """A host tensor on the device, in ``target`` where given, in the order of the current stream.

        The host tensor is not changed afterwards.
        """
        return host.to(self.torch_device) if target is None else target.copy_(host)

    def facts(self) -> dict[str, str]:
        """Versions and names for reports, which show ``device_name``, ``driver`` and ``sdk`` in places of their own."""
        return {}

    def synchronize(self) -> None:  # noqa: B027 - a device without queues has nothing to wait for
        """Wait for the device. Only benchmarks call it."""


@runtime_checkable
class Tunable(Protocol):
    """A backend whose kernel shapes can be chosen by timing them (``kvport tune``)."""

    def tune(self, layout: GroupLayout, *, keep: bool = True) -> Iterator[str]:
        """Time a bounded number of shapes for this layout; with ``keep``, later processes use the fastest.

        Yields lines that say what was tried, what was chosen and why. Raises :class:`kvport.Unsupported` for a layout
        that the backend declines, or where timing means nothing.
        """


def operations(backend: Backend) -> dict[str, Literal["native", "inherited"]]:
    """For each operation, whether the backend's own package implements it or a base class of another package does."""
    own = type(backend).__module__.partition(".")[0]
    found: dict[str, Literal["native", "inherited"]] = {}
    for operation in OPERATIONS:
        owner = next(c for c in type(backend).__mro__ if operation in vars(c))
        found[operation] = "native" if owner.__module__.partition(".")[0] == own else "inherited"
    return found
