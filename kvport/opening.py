"""``kvport.open``: from a device string and a geometry to a cache."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import torch

from kvport.arguments import whole_number
from kvport.cache import PagedCache, check_sharing
from kvport.errors import InvalidArgument
from kvport.formats import CacheFormat
from kvport.layout import DEFAULT_PAGE_SIZE, CacheLayout
from kvport.planning import DEFAULT_CHUNK, plan
from kvport.scales import LayerScales, resolve_scales
from kvport.tiers import make_lanes


def open(
    device: str,
    *,
    format: str | CacheFormat | None = None,
    layers: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    query_heads: int | None = None,
    value_dim: int | None = None,
    window: int | None = None,
    page_size: int | None = None,
    dtype: torch.dtype | None = None,
    layout: CacheLayout | None = None,
    tokens: int | None = None,
    requests: int | None = None,
    chunk: int | None = None,
    pin: int | None = None,
    pages: int | SequenceOf[int] | None = None,
    scales: Mapping[int, LayerScales] | None = None,
    identity: Mapping[str, str] | None = None,
    share_prefixes: bool = True,
) -> PagedCache:
    """Open a paged KV cache.

    Args:
        device: ``"cpu"``, ``"cuda:1"``, ``"npu:0"``, or ``backend@device`` such as ``"reference@cuda:0"``.
        format: a format string (default ``"int8"``), see :mod:`kvport.formats`.
        layers, kv_heads, head_dim, query_heads, value_dim, window, page_size, dtype: a model of equal layers;
            ``query_heads`` defaults to ``kv_heads``, ``value_dim`` to ``head_dim``, ``page_size`` to 128, ``dtype``
            (the model's own, in which K and V arrive) to torch.float32.
        layout: instead of those, a :class:`CacheLayout` for hybrid, windowed or per-layer geometries.
        tokens: capacity. Alone, of all sequences together: every pool (one per group of layers, one more per near
            tier) gets ceil(tokens / page_size) pages and the spare, so that any tier or window could hold everything.
            A sequence occupies whole pages: N running sequences want up to N * (page_size - 1) tokens more.
        requests: how many sequences run at once. ``tokens`` is then the length of each, prompt and answer together,
            and the pools are those that :mod:`kvport.planning` (``kvport plan``) counts: near tiers hold recent +
            page_size + 1 tokens a sequence and the step's prompt tokens twice, windows what they see, no more.
        chunk: with ``requests``, prompt tokens that a step takes of one sequence, while the others take one each
            (default 512).
        pin: with ``requests``, tokens that every sequence pins (default 0).
        pages: instead of all those, the page count (spare included), one for all pools or one per pool in the order of
            ``cache.stats().pools``.
        scales: static scales by layer, for formats that say ``static``.
        identity: ``{"model": ..., "adapter": ..., "rope": ...}``: part of the fingerprint that pages are shared under.
        share_prefixes: whether full pages of known token ids are kept findable for :meth:`PagedCache.match`.

    Raises:
        InvalidArgument: arguments that cannot be, before any backend is loaded.
        UnknownBackend, BackendUnavailable: nothing usable drives the device; the message lists every candidate.
        Unsupported: the backend declines the layout, with every reason.
    """
    equal = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    others = {
        "format": format,
        "query_heads": query_heads,
        "value_dim": value_dim,
        "window": window,
        "page_size": page_size,
        "dtype": dtype,
    }
    if layout is None:
        if missing := [name for name, value in equal.items() if value is None]:
            raise InvalidArgument(f"open needs {', '.join(missing)} (or a layout=CacheLayout(...))")
        assert layers is not None
        assert kv_heads is not None
        assert head_dim is not None
        layout = CacheLayout.uniform(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query_heads=query_heads,
            value_dim=value_dim,
            window=window,
            format="int8" if format is None else format,
            page_size=DEFAULT_PAGE_SIZE if page_size is None else page_size,
            dtype=torch.float32 if dtype is None else dtype,
        )
    elif given := [name for name, value in {**equal, **others}.items() if value is not None]:
        raise InvalidArgument(f"layout= already says {', '.join(given)}; give one or the other")
    elif not isinstance(layout, CacheLayout):
        raise InvalidArgument(f"layout must be a CacheLayout, got {type(layout).__name__}")
    # All that can be judged without a backend is, so that a wrong argument is reported on any machine.
    counts = _page_counts(layout, tokens, pages, requests, chunk, pin)
    check_sharing(identity, share_prefixes)
    resolve_scales(layout, scales)
    from kvport.registry import load_backend  # plugins are looked up when a cache is opened, not at import

    return PagedCache(
        load_backend(device),
        layout,
        counts,
        scales=scales,
        identity=identity,
        share_prefixes=share_prefixes,
    )


def _page_counts(
    layout: CacheLayout,
    tokens: int | None,
    pages: int | SequenceOf[int] | None,
    requests: int | None,
    chunk: int | None,
    pin: int | None,
) -> list[int]:
    if (tokens is None) == (pages is None):
        raise InvalidArgument("open needs exactly one of tokens= (capacity in tokens) and pages= (page count)")
    load = {"requests=": requests, "chunk=": chunk, "pin=": pin}
    given = [name for name, value in load.items() if value is not None]
    if given and (requests is None or tokens is None):
        raise InvalidArgument(
            f"{', '.join(given)} goes with tokens= and requests=: the length of a sequence, and how many run at once"
        )
    if requests is not None and tokens is not None:
        chunk, pin = DEFAULT_CHUNK if chunk is None else chunk, 0 if pin is None else pin
        return list(plan(layout, tokens=tokens, requests=requests, chunk=chunk, pin=pin).pages)
    lanes, _ = make_lanes(layout)
    if tokens is not None:
        whole_number("tokens", tokens, 1)
        return [lane.layout.pages_for(tokens) + 1 for lane in lanes]
    several = isinstance(pages, SequenceOf) and not isinstance(pages, str)
    counts: list[int] = list(pages) if several else [pages] * len(lanes)  # type: ignore[arg-type, list-item]
    if len(counts) != len(lanes):
        raise InvalidArgument(f"pages gives {len(counts)} counts, the layout has {len(lanes)} pools of pages")
    for count in counts:
        whole_number("pages (of a pool, one of them the spare)", count, 2)
    return counts
