"""One cache whose layers differ in format, window, tiers and sharing: each group keeps its own rule."""

from __future__ import annotations

import core_support as support
import pytest
import torch
from replay import Replay, open_layout, placed, run, state

from kvport import CacheFormat, CacheLayout, LayerSpec, LayoutError, OutOfPages, SequenceError, StepError
from kvport.tiers import canonical_bytes, make_lanes


def spec(format: str | None = None, *, window: int | None = None, query_heads: int = 4, **more: int) -> LayerSpec:
    fmt = None if format is None else CacheFormat.parse(format)
    shape = {"kv_heads": 2, "query_heads": query_heads, "key_dim": 16, "value_dim": 32, **more}
    return LayerSpec(**shape, window=window, format=fmt)  # type: ignore[arg-type]


def mixed() -> CacheLayout:
    """Boundary layers in full precision, a tiered middle, a windowed tiered layer, cN, and a layer of other dims."""
    layers = (
        spec("fp32"),
        spec(),
        spec("k=int2:c4:asym,v=int2:g16:asym,recent=2"),
        spec(window=7),
        spec(),
        spec("nvfp4,sink=5,recent=3:fp8_e4m3", window=7),
        spec("int8", key_dim=48, value_dim=16, kv_heads=1),
        spec("fp32"),
    )
    return CacheLayout(layers, CacheFormat.parse("int4:g8:asym,recent=6"), 4)


def test_groups_and_lanes_follow_from_what_layers_store() -> None:
    layout = mixed()
    assert [group.layers for group in layout.groups] == [(0, 7), (1, 4), (2,), (3,), (5,), (6,)]
    lanes, tiers = make_lanes(layout)
    assert [lane.group for lane in lanes] == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert [(t.far, t.near) for t in tiers] == [(0, 0), (1, 6), (2, 7), (3, 8), (4, 9), (5, 5)]
    assert str(lanes[6].layout.format) == "fp32"
    assert str(lanes[9].layout.format) == "fp8_e4m3"


def test_every_layer_keeps_its_own_rule() -> None:
    layout = mixed()
    cache = open_layout(layout, 60)
    a, b = cache.sequence(), cache.sequence()
    oracles = {s: [Replay(layout, layer) for layer in range(8)] for s in (a, b)}
    for index, count in enumerate((5, 1, 9, 2, 1, 13, 1, 1)):
        run(cache, {a: count, b: (index * 3) % 4}, oracles)
        for sequence in (a, b):
            for group, members in enumerate(layout.groups):
                oracle = oracles[sequence][members.layers[0]]
                if not members.layout.format.tiered:
                    assert sequence.sealed_length(group) == 0
                    continue
                letters = placed(cache, sequence, group)
                passed = letters.count("-")
                assert letters[passed:] == oracle.tiers()[passed:]
                assert sequence.sealed_length(group) == oracle.at_rest
    sealed = {a.sealed_length(group) for group in range(6)}
    assert len(sealed) > 2


def test_bytes_are_summed_over_groups_and_tiers() -> None:
    layout = mixed()
    alone = sum(canonical_bytes(CacheLayout((layer,), layer.format or layout.format, 4), 29) for layer in layout.layers)
    assert canonical_bytes(layout, 29) == alone


def test_truncate_asks_every_group() -> None:
    layout = CacheLayout((spec("int8,recent=8"), spec("int8,recent=1")), CacheFormat.parse("int8"), 4)
    cache = open_layout(layout, 40)
    sequence = cache.sequence()
    oracles = [Replay(layout, layer) for layer in range(2)]
    for count in (20, 1):
        run(cache, {sequence: count}, {sequence: oracles})
    assert [sequence.sealed_length(g) for g in (0, 1)] == [12, 16]
    before = state(cache)
    with pytest.raises(SequenceError, match=r"layers \(1,\) are sealed up to position 16"):
        sequence.truncate(14)
    assert state(cache) == before
    sequence.truncate(17)
    sequence.truncate(12)
    for oracle in oracles:
        oracle.truncate(12)
    run(cache, {sequence: 9}, {sequence: oracles}, seed=2)
    run(cache, {sequence: 1}, {sequence: oracles}, seed=2)


def test_a_step_that_one_group_cannot_hold_changes_no_group() -> None:
    layout = CacheLayout((spec("fp32"), spec("int8,recent=2")), CacheFormat.parse("int8"), 4)
    for pages, short in (([3, 40, 40], "fp32 pages for layers [0]"), ([40, 2, 40], "int8 pages for layers [1]"),
                         ([40, 40, 3], "fp32 pages for layers [1]")):  # fmt: skip
        cache = open_layout(layout, pages)
        sequence = cache.sequence()
        with pytest.raises(OutOfPages) as error:  # noqa: PT012 - one of the steps
            for count in (8, 3, 3, 3):
                before = state(cache)
                support.run_step(cache, {sequence: count})
        assert short in str(error.value)
        assert state(cache) == before


def test_layers_that_share_read_their_owners_pages_in_every_tier() -> None:
    """Layer 2 stores nothing: its queries see layer 0's near and far pages."""
    owner = spec("int4:g8,recent=3")
    reader = LayerSpec(2, 4, 16, 32, format=owner.format, shares=0)
    layout = CacheLayout((owner, spec("fp32"), reader), CacheFormat.parse("int8"), 4)
    assert [group.layers for group in layout.groups] == [(0,), (1,)]
    with pytest.raises(LayoutError, match="differs from it"):
        CacheLayout((owner, LayerSpec(2, 8, 16, 32, shares=0)), CacheFormat.parse("int8"), 4)
    cache = open_layout(layout, 40)
    sequence, oracle = cache.sequence(), Replay(layout)
    for count in (9, 5, 1):
        key, value = support.kv(layout, 0, 3, count, sequence.length)
        query = support.queries(layout, 2, 4, count, sequence.length)
        oracle.begin()
        with cache.step({sequence: count}) as step:
            with pytest.raises(StepError, match="layer 0 must be appended"):
                step.attend(2, query)
            step.append(0, key, value)
            step.append(1, key, value)
            with pytest.raises(StepError, match="reads the K/V of layer 0"):
                step.append(2, key, value)
            found = step.attend(2, query)
            dense = step.gather(2)
        oracle.append(key.numpy(), value.numpy())
        stored = oracle.stored()
        expected, expected_lse, allowed, allowed_lse = support.attention(query.numpy(), *stored)
        assert support.ratio(found.output, expected, allowed) < 1
        assert support.ratio(found.lse, expected_lse, allowed_lse) < 1
        for got, wanted in zip(dense, stored, strict=True):
            assert torch.equal(got[0], torch.from_numpy(wanted))
    assert oracle.far


def test_the_fingerprint_sees_every_layers_format() -> None:
    layout = mixed()
    found = {open_layout(layout, 3).fingerprint}
    for index, layer in enumerate(layout.layers):
        changed = spec("int8,recent=9", window=layer.window, key_dim=layer.key_dim, value_dim=layer.value_dim,
                       kv_heads=layer.kv_heads)  # fmt: skip
        layers = (*layout.layers[:index], changed, *layout.layers[index + 1 :])
        found.add(open_layout(CacheLayout(layers, layout.format, 4), 3).fingerprint)
    assert len(found) == 9


def test_prefixes_of_mixed_layers_end_where_the_slowest_group_is_at_rest() -> None:
    layout = CacheLayout((spec("fp32"), spec("int8,recent=2"), spec("int8,recent=9")), CacheFormat.parse("int8"), 4)
    cache = open_layout(layout, 40)
    ids = list(range(30))
    sequence = cache.sequence()
    support.run_step(cache, {sequence: ids[:25]})
    support.run_step(cache, {sequence: ids[25:26]})
    assert [sequence.sealed_length(g) for g in range(3)] == [0, 20, 16]
    with cache.match(ids) as hit:
        assert hit.length == 16
        assert [hit.sealed_length(g) for g in range(3)] == [0, 16, 16]
        assert cache.export(hit).digests()[2] != cache.export(sequence).digests()[2]
        for layer in range(3):
            for got, wanted in zip(cache.gather(hit, layer), cache.gather(sequence, layer), strict=True):
                assert torch.equal(got, wanted[:16])
    with cache.match(ids[:20]) as hit:
        assert hit.length == 8  # floor((20 - 9) / 4) * 4
