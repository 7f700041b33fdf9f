"""What a backend does not declare is refused in the same words by all who ask: open, plan, listing, steps, suite."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import core_support as support
import pytest
import torch

from kvport import (
    CacheFormat,
    CacheLayout,
    GroupLayout,
    LayerScales,
    LayerSpec,
    PagedCache,
    SideScales,
    Support,
    Unsupported,
)
from kvport.features import ATTENTION_FEATURES, FEATURES, NEEDED_FOR, STORAGE_FEATURES, needed
from kvport.inspection import answer
from kvport.planning import plan
from kvport.tiers import make_lanes
from kvport_conformance.bench import group_layout
from kvport_conformance.cases import Case, run_case, select
from kvport_cpu.reference import ReferenceBackend


class Lacking(ReferenceBackend):
    """A backend that declares all features but one."""

    def __init__(self, feature: str) -> None:
        super().__init__("cpu", torch.device("cpu"))
        self.feature = feature

    def support(self, layout: GroupLayout) -> Support:
        found = super().support(layout)
        return replace(found, features=FEATURES - {self.feature})

    def attend(self, *given: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().attend(*given, **how)
        return out, torch.full_like(lse, torch.nan) if self.feature == "lse" else lse


def one_layer(format: str = "int8", **spec: Any) -> CacheLayout:
    dims = {"kv_heads": 1, "query_heads": 2, "key_dim": 32, "value_dim": 32} | spec
    return CacheLayout((LayerSpec(**dims),), CacheFormat.parse(format), 16)


#: Layouts that cannot be kept without the feature.
LAYOUTS = {
    "window": one_layer(window=5),
    "lse": one_layer("int8,recent=16"),
    "latent": one_layer("latent=int8,rope=bf16", key_dim=48, latent=True),
    "outliers": one_layer("int8:outliers=2"),
    "sparse": one_layer("int8:sparse=2"),
}


def scales_of(layout: CacheLayout) -> dict[int, LayerScales] | None:
    channels = torch.tensor([[1, 2]])
    if any(side.format.outliers for side in layout.groups[0].layout.sides):
        return {0: LayerScales(key_channels=channels, value_channels=channels)}
    if layout.format.static:
        return support.unit_scales(layout, SideScales([0.25]))
    return None


def opened(layout: CacheLayout, backend: ReferenceBackend) -> PagedCache:
    return PagedCache(backend, layout, [6] * len(make_lanes(layout)[0]), scales=scales_of(layout))


def attended(cache: PagedCache, *counts: int, fresh: Any = "stored", **how: Any) -> None:
    """One step of each of these counts of tokens, on a sequence of its own."""
    sequence = cache.sequence()
    for count in counts:
        with cache.step({sequence: count}, fresh=fresh) as step:
            step.append(0, *support.kv(cache.layout, 0, 1, count))
            step.attend(0, support.queries(cache.layout, 0, 1, count), **how)


def graph(cache: PagedCache) -> None:
    cache.graph(max_seqs=1, max_tokens=1, max_pages=2)


@dataclass(frozen=True)
class Request:
    """What needs a feature of a backend that keeps the layout, and the same without that need."""

    needs: Callable[[PagedCache], object]
    does_not: Callable[[PagedCache], object] = lambda cache: attended(cache, 1, 1)
    format: str = "int8"


REQUESTS = {
    "softcap": Request(lambda cache: attended(cache, 1, softcap=2.0)),
    "sinks": Request(lambda cache: attended(cache, 1, sinks=torch.zeros(2))),
    "lse": Request(lambda cache: attended(cache, 1, 1, fresh="exact")),
    # Exact tokens of a new sequence are attended to by the core, and nothing is asked of the backend.
    "prefill": Request(lambda cache: attended(cache, 3), lambda cache: attended(cache, 3, 3, fresh="exact")),
    "verify": Request(lambda cache: attended(cache, 3, 3), lambda cache: attended(cache, 3, 1, 1)),
    "graph": Request(graph),
    "poison": Request(PagedCache.check, format="int8:head:static"),
}


def test_every_feature_is_asked_for_below() -> None:
    assert LAYOUTS.keys() | REQUESTS.keys() == FEATURES == NEEDED_FOR.keys()
    assert ATTENTION_FEATURES | STORAGE_FEATURES | {"graph"} == FEATURES
    assert not ATTENTION_FEATURES & STORAGE_FEATURES


def test_the_page_for_authors_lists_them_as_they_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "backend-api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (?:at|by) ", page, re.M)
    assert dict(rows) == NEEDED_FOR
    assert [name for name, _ in rows][:7] == [name for name in NEEDED_FOR if name in ATTENTION_FEATURES]


@pytest.mark.parametrize("feature", LAYOUTS)
def test_a_layout_is_refused_by_open_plan_and_listing_in_the_same_words(feature: str) -> None:
    layout, backend = LAYOUTS[feature], Lacking(feature)
    reason = f"feature {feature} is not declared, needed for {NEEDED_FOR[feature]}"
    reason += " (5 tokens)" if feature == "window" else ""
    with pytest.raises(Unsupported) as caught:
        opened(layout, backend)
    assert caught.value.reasons == (reason,)
    assert f"backend {backend.name} on cpu cannot hold layers [0] as {layout.format.far()}" in str(caught.value)
    assert plan(layout, tokens=32, backend=backend).refusals == (reason,)
    assert answer(backend, "", layout).reasons == (reason,)
    whole = ReferenceBackend("cpu", torch.device("cpu"))
    opened(layout, whole)
    assert plan(layout, tokens=32, backend=whole).refusals == answer(whole, "", layout).reasons == ()


@pytest.mark.parametrize("feature", REQUESTS)
def test_a_request_is_refused_in_the_words_of_the_listing(feature: str) -> None:
    request, backend = REQUESTS[feature], Lacking(feature)
    layout = one_layer(request.format)
    reason = f"feature {feature} is not declared, needed for {NEEDED_FOR[feature]}"
    assert plan(layout, tokens=32, backend=backend).refusals == ()
    listed = answer(backend, "", layout)
    assert (listed.reasons, listed.lacking) == ((), (reason,))
    cache = opened(layout, backend)
    request.does_not(cache)
    with pytest.raises(Unsupported) as caught:
        request.needs(cache)
    assert caught.value.reasons == (reason,)
    assert "layers [0] in" in str(caught.value)
    request.does_not(cache)  # the refusal left no step open
    request.needs(opened(layout, ReferenceBackend("cpu", torch.device("cpu"))))


def test_a_replay_of_several_tokens_is_refused_like_an_ordinary_step() -> None:
    cache = opened(one_layer(), Lacking("verify"))
    rows = (*support.kv(cache.layout, 0, 1, 2), support.queries(cache.layout, 0, 1, 2))

    def body(step: Any) -> Any:
        step.append(0, *rows[:2])
        return step.attend(0, rows[2])

    recorded = cache.graph(max_seqs=1, max_tokens=2, max_pages=2)
    recorded.capture(body)
    sequence = cache.sequence()
    recorded.replay({sequence: 2})
    with pytest.raises(Unsupported, match="feature verify is not declared"):
        recorded.replay({sequence: 2})
    assert sequence.length == 2
    recorded.replay({sequence: 1})


def test_all_reasons_of_all_lanes_are_named_once() -> None:
    specs = tuple(LayerSpec(1, 2, 32, 32, window=window) for window in (5, None, 7))
    layout = CacheLayout(specs, CacheFormat.parse("int8,recent=16"), 16)

    class Bare(ReferenceBackend):
        def support(self, layout: GroupLayout) -> Support:
            return Support(features=frozenset())

    backend = Bare("cpu", torch.device("cpu"))
    with pytest.raises(Unsupported) as caught:
        opened(layout, backend)
    window, lse = (f"feature {name} is not declared, needed for {NEEDED_FOR[name]}" for name in ("window", "lse"))
    assert caught.value.reasons == (f"{window} (5 tokens)", lse, f"{window} (7 tokens)")
    assert plan(layout, tokens=32, backend=backend).refusals == caught.value.reasons
    for layers in ("layers [0] as int8", "layers [1] as int8", "layers [2] as int8", "layers [0] as fp32"):
        assert layers in str(caught.value)


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_the_suite_counts_what_is_not_declared_as_unsupported_in_the_same_words(feature: str) -> None:
    def asks(case: Case) -> bool:
        layout = group_layout(case.format, case.geometry)
        return feature in case.requires | needed(layout).keys()

    cases = [case for case in select(formats=("int8", "int8,recent=20", "int8:outliers=3", "latent=int8,rope=bf16"))
             if case.chapter != "robustness"]  # fmt: skip
    cases += select(chapters=("tiers",), formats=("int4:g16:sparse=24",)) + select(checks=("flagged_pages",))
    asking = [case for case in cases if asks(case)]
    assert asking
    backend = Lacking(feature)
    for case in {case.check: case for case in asking}.values():
        found = run_case(case, backend)
        reason = f"feature {feature} is not declared, needed for {NEEDED_FOR[feature]}"
        assert (found.outcome, reason in found.reason) == ("unsupported", True), (case.id, found.reason)
    others = {case.check: case for case in cases if not asks(case) and case.chapter in ("append", "pages", "graph")}
    for case in others.values():
        assert run_case(case, backend).outcome == "pass", case.id
