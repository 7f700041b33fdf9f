"""What a cache format does to a model: perplexity, KL divergence and top-1 agreement against full precision.

The text is read in chunks *through the cache*: a chunk's queries see the earlier chunks as the pages hold them. (One
single forward would never read a stored past in caches that return the new K and V as they came.) The reference cache
and all others walk the text side by side, so the logits of one chunk are all that is ever kept.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvport.errors import InvalidArgument

CHUNK: Final = 64
REFERENCE: Final = "reference"


@dataclass(frozen=True)
class Quality:
    """One cache against the reference over the same tokens.

    ``tokens`` scored; ``perplexity`` = exp(mean negative log likelihood); KL(reference || this) in nats over all
    scored positions: ``kl`` its mean, ``kl_p99`` and ``kl_max`` its tail, where damage to K shows first; ``top1`` the
    share of positions with the same most likely token. ``seconds`` spent in forwards.
    """

    tokens: int
    perplexity: float
    kl: float
    kl_p99: float
    kl_max: float
    top1: float
    seconds: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def evaluate(
    model: Any,
    ids: Tensor,
    caches: Mapping[str, Any],
    *,
    reference: Any,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Quality]:
    """Read ``ids`` ``(1, tokens)`` into the reference cache and every other, in chunks, and compare their logits.

    Args:
        model: a transformers causal language model, in evaluation mode.
        ids: token ids on the model's device, at least 2.
        caches: empty caches by name; afterwards each holds the text.
        reference: an empty full-precision cache, such as transformers' DynamicCache.
        chunk: tokens in a forward.
        progress: called with (forwards done, forwards to do).

    Returns:
        a :class:`Quality` by name, the reference's own under ``"reference"`` (its KL is 0 by definition).
    """
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise InvalidArgument(f"ids must be (1, tokens) with at least 2 tokens, got {tuple(ids.shape)}")
    if chunk < 1:
        raise InvalidArgument(f"chunk must be a positive number of tokens, got {chunk}")
    if REFERENCE in caches:
        raise InvalidArgument(f"the name {REFERENCE!r} is taken by the reference cache")
    argument = cache_argument(model)
    scores = {name: _Score() for name in (REFERENCE, *caches)}
    starts = range(0, ids.shape[1] - 1, chunk)
    done, total = 0, len(starts) * len(scores)
    with torch.inference_mode():
        for start in starts:
            end = min(start + chunk, ids.shape[1] - 1)
            truth = ids[0, start + 1 : end + 1]
            full: Tensor | None = None
            for name, cache in ((REFERENCE, reference), *caches.items()):
                began = time.perf_counter()
                logits = model(ids[:, start:end], use_cache=True, **{argument: cache}).logits[0]
                scores[name].seconds += time.perf_counter() - began
                logs = logits.float().log_softmax(-1)
                full = logs if full is None else full
                scores[name].add(logs, full, truth)
                done += 1
                progress(done, total)
    return {name: score.quality() for name, score in scores.items()}


class _Score:
    """Per-token figures of one cache, gathered chunk by chunk."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.losses: list[Tensor] = []
        self.divergences: list[Tensor] = []
        self.agreements: list[Tensor] = []

    def add(self, logs: Tensor, full: Tensor, truth: Tensor) -> None:
        """Log probabilities ``(tokens, vocabulary)`` of this cache and of the reference, and the true next tokens."""
        self.losses.append(-logs.gather(-1, truth.unsqueeze(-1)).squeeze(-1).double())
        self.divergences.append((full.exp() * (full - logs)).sum(-1, dtype=torch.float64))
        self.agreements.append(logs.argmax(-1) == full.argmax(-1))

    def quality(self) -> Quality:
        losses, divergences, agreements = (
            torch.cat(parts) for parts in (self.losses, self.divergences, self.agreements)
        )
        return Quality(
            tokens=losses.numel(),
            perplexity=losses.mean().exp().item(),
            kl=divergences.mean().item(),
            kl_p99=divergences.quantile(0.99).item(),
            kl_max=divergences.max().item(),
            top1=agreements.double().mean().item(),
            seconds=self.seconds,
        )


def decode_speed(
    model: Any,
    caches: Mapping[str, Any],
    token: Tensor,
    rounds: int,
    *,
    warm_up: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Median seconds of one decode step by cache: one token ``(1, 1)`` each in turn, the order rotating every round.

    The caches keep the tokens they were given.
    """
    argument = cache_argument(model)
    names = list(caches)
    taken: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode():
        for turn in range(warm_up + rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = time.perf_counter()
                model(token, use_cache=True, **{argument: caches[name]})
                if turn >= warm_up:
                    taken[name].append(time.perf_counter() - began)
            progress(turn + 1, warm_up + rounds)
    return {name: torch.tensor(times).median().item() for name, times in taken.items()}


def cache_argument(model: Any) -> str:
    """What this model's forward calls its cache: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def pydoc_text() -> str:
    """A text that every Python brings: the help topics of the language reference, in key order.

    It differs from version to version of Python; :func:`text_digest` says which one was read.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def text_digest(text: str) -> str:
    """The first 16 hex digits of the text's sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What a result depends on: processor, threads, versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("kvport", "torch", "transformers", "numpy", "optimum-quanto"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
