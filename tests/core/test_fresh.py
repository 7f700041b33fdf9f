"""``step(fresh="exact")``: this step's own tokens unquantized, everything before them as stored, against an oracle."""

from __future__ import annotations

import core_support as support
import numpy as np
import pytest
import torch

from kvport import CacheLayout

FORMATS = ("int8", "int4:g16:asym", "int8,recent=5", "int8,rotate=3")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [None, 9])
def test_own_tokens_are_exact_and_the_history_is_as_stored(format: str, window: int | None) -> None:
    """A ragged batch: a prompt in chunks, a decode, a sequence without history and one without new tokens."""
    layout = CacheLayout.uniform(
        layers=1, kv_heads=2, query_heads=6, head_dim=32, page_size=4, format=format, window=window
    )
    cache = support.open_cache(layout, 40)
    lengths, counts = [23, 17, 0, 6], [11, 1, 5, 0]
    sequences = [support.fill(cache, seed, n) for seed, n in enumerate(lengths)]
    worst = worst_lse = 0.0
    sinks = np.array([0.5, -3.0, 0.0, 2.0, -1.0, 0.25], np.float32)
    history = [cache.gather(sequence, 0) for sequence in sequences]
    with cache.step(dict(zip(sequences, counts, strict=True)), fresh="exact") as step:
        parts = [
            (*support.kv(layout, 0, seed, n, start), support.queries(layout, 0, seed, n, start))
            for seed, (start, n) in enumerate(zip(lengths, counts, strict=True))
        ]
        key, value, query = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        step.append(0, key, value)
        # What the step's begin sealed is read as sealed.
        stored = step.gather(0)
        output, lse = step.attend(0, query, softcap=7.0, sinks=torch.from_numpy(sinks))
    for s, (sequence, start, n) in enumerate(zip(sequences, lengths, counts, strict=True)):
        if not n:
            continue
        before = [dense[s, :start] for dense in stored]
        if "recent" not in format:
            assert all(torch.equal(a, b) for a, b in zip(before, history[s], strict=True))
        seen = [support.floats(torch.cat([old, own])) for old, own in zip(before, parts[s][:2], strict=True)]
        expected = support.attention(support.floats(parts[s][2]), *seen, window=window, softcap=7.0, sinks=sinks)
        rows = step.rows[sequence]
        worst = max(worst, support.ratio(output[rows], expected[0], expected[2]))
        worst_lse = max(worst_lse, support.ratio(lse[rows], expected[1], expected[3]))
    print(f"{format}, window {window}: output {worst:.3f} of its bound, LSE {worst_lse:.3f}")
    assert worst < 1
    assert worst_lse < 1


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_stored_does_not_depend_on_how_it_was_attended(format: str) -> None:
    digests = []
    for fresh in ("stored", "exact"):
        cache = support.uniform(format, page_size=4)
        sequence = cache.sequence()
        for start, n in ((0, 9), (9, 1), (10, 7)):
            with cache.step({sequence: n}, fresh=fresh) as step:  # type: ignore[arg-type]
                step.append(0, *support.kv(cache.layout, 0, 1, n, start))
                step.attend(0, support.queries(cache.layout, 0, 1, n, start))
        digests.append(cache.export(sequence).digests())
    assert digests[0] == digests[1]


def test_it_differs_from_attending_what_is_stored_and_says_so() -> None:
    cache = support.uniform("int4:g16")
    outputs = {}
    for fresh in ("stored", "exact"):
        step = cache.step({cache.sequence(): 9}, fresh=fresh)  # type: ignore[arg-type]
        step.append(0, *support.kv(cache.layout, 0, 1, 9))
        outputs[step.fresh] = step.attend(0, support.queries(cache.layout, 0, 1, 9)).output
        step.rollback()
    assert not torch.equal(outputs["stored"], outputs["exact"])
