"""Which token is in which tier at every length, and that attention, gather and bytes follow it."""

from __future__ import annotations

import pytest
import torch
from replay import Replay, open_layout, placed, run, state, tiered

from kvport import CacheFormat, CacheLayout, FormatError, LayerSpec, SequenceError, Unsupported
from kvport.tiers import canonical_bytes, make_lanes

#: P = 4, sink = 3, recent = 6. Length after the step, one token a step -> tiers. Page 0 is the sink's for good; a page
#: [a, a + 4) seals at the begin of the step that follows length a + 4 + 6.
BY_HAND = {
    1: "n",
    4: "nnnn",
    5: "nnnnn",
    13: "nnnnnnnnnnnnn",
    14: "nnnnnnnnnnnnnn",  # 14 - 6 = 8: page 1 is old enough, and seals at the next begin
    15: "nnnnffffnnnnnnn",
    18: "nnnnffffnnnnnnnnnn",
    19: "nnnnffffffffnnnnnnn",
    22: "nnnnffffffffnnnnnnnnnn",
    23: "nnnnffffffffffffnnnnnnn",
}

GRID = [
    # format, page size, pin
    ("int8,recent=0:fp8_e4m3,sink=1", 4, 0),
    ("int8,recent=1", 4, 0),
    ("int8,recent=3", 4, 0),
    ("int8,recent=4", 4, 0),
    ("int8,recent=5", 4, 0),
    ("int4:g8:asym,recent=6,sink=3", 4, 0),
    ("int4:g8,recent=6,sink=4", 4, 0),
    ("int4:g8,recent=6,sink=5", 4, 0),
    ("int8,sink=8", 4, 0),
    ("int8,recent=6", 4, 1),
    ("int8,recent=6,sink=2", 4, 8),
    ("int8,recent=6,sink=9", 4, 5),
    ("k=int2:c4:asym:scale=fp16,v=int2:g16:asym:scale=fp16,recent=6", 4, 0),
    ("int8:c4", 4, 0),
    ("k=int4:c4,v=int8,recent=2", 8, 3),
    ("mxfp4,recent=3", 4, 0),
    ("nvfp4,recent=6:int8", 4, 0),
    ("k=fp8_e5m2,v=int8:asym,recent=5:bf16", 4, 0),
    ("int8,recent=2", 1, 0),
    ("int8,recent=20", 16, 0),
]


def test_the_rule_by_hand() -> None:
    cache = tiered("int8,sink=3,recent=6")
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    for length in range(1, max(BY_HAND) + 1):
        run(cache, {sequence: 1}, {sequence: [oracle]})
        if length in BY_HAND:
            assert placed(cache, sequence) == BY_HAND[length] == oracle.tiers()
    assert sequence.sealed_length() == 16
    run(cache, {sequence: 0}, {sequence: [oracle]})  # a step without new tokens seals as well
    assert placed(cache, sequence) == BY_HAND[23]


@pytest.mark.parametrize("format, page_size, pin", GRID)
def test_every_length(format: str, page_size: int, pin: int) -> None:
    """One token a step, past every edge: recent-1, recent, recent+1, page, sink and pin boundaries."""
    cache = tiered(format, page_size=page_size, head_dim=32)
    fmt = cache.layout.format
    sequence, oracle = cache.sequence(), Replay(cache.layout, pin=pin)
    if pin:
        sequence.pin(pin)
    seen = set()
    for _ in range(max(fmt.sink, pin) + fmt.recent + 3 * page_size + 2):
        run(cache, {sequence: 1}, {sequence: [oracle]})
        assert placed(cache, sequence) == oracle.tiers()
        assert sequence.sealed_length() == oracle.at_rest
        seen.add(oracle.tiers())
        lanes, _ = make_lanes(cache.layout)
        # At the next begin what may be sealed is: the bytes are told for that moment.
        after = oracle.fork()
        after.begin()
        far, total = len(after.far), -(-len(after) // page_size)
        wanted = far * lanes[0].layout.canonical_page_bytes + (total - far) * lanes[1].layout.canonical_page_bytes
        assert canonical_bytes(cache.layout, sequence.length, pin) == wanted == cache.canonical_bytes()
    assert "f" in oracle.tiers()
    assert len(seen) == sequence.length


@pytest.mark.parametrize("format, page_size, pin", GRID)
def test_pages_at_rest_do_not_depend_on_the_steps(format: str, page_size: int, pin: int) -> None:
    """Ragged steps: attention equals a replay of the same steps, far pages equal those of any other steps."""
    cache = tiered(format, page_size=page_size, head_dim=32, pages=80)
    fmt = cache.layout.format
    total = max(fmt.sink, pin) + fmt.recent + 4 * page_size + 3
    images = []
    for sizes in ([1] * total, [total], [page_size, 1, page_size + 1, 2, page_size - 1, 5]):
        sequence, oracle = cache.sequence(), Replay(cache.layout, pin=pin)
        sequence.number = 1  # the stream that every split shares
        if pin:
            sequence.pin(pin)
        for size in sizes:
            run(cache, {sequence: min(size, total - sequence.length)}, {sequence: [oracle]})
        run(cache, {sequence: total - sequence.length}, {sequence: [oracle]})
        run(cache, {sequence: 0}, {sequence: [oracle]})  # all that may seal has sealed
        images.append(cache.export(sequence).digests())
        sequence.number = max(cache._sequences)
        sequence.free()
    assert images[0] == images[1] == images[2]


@pytest.mark.parametrize("format", ["int4:g8:asym,recent=6,sink=3", "k=int2:c4:asym,v=int8,recent=3", "nvfp4,recent=4"])
def test_far_pages_hold_the_oracles_codes(format: str) -> None:
    cache = tiered(format)
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    for count in (9, 8, 7, 1):
        run(cache, {sequence: count}, {sequence: [oracle]})
    far = sorted(oracle.far)
    assert len(far) >= 3
    planes = cache.export(sequence).layers[0]
    for index, page in enumerate(far):
        for side, wanted in zip(("key", "value"), oracle.planes(page), strict=True):
            for name, plane in wanted.items():
                got = planes[f"{side}.{name}"][index].contiguous().view(torch.uint8).numpy().tobytes()
                assert got == plane.tobytes(), (page, side, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recent_tokens_are_in_the_models_dtype_or_the_named_one(dtype: torch.dtype) -> None:
    for format in ("int8,sink=2,recent=6", "int8,sink=2,recent=6:fp8_e4m3"):
        cache = tiered(format, dtype=dtype)
        near = make_lanes(cache.layout)[0][1].layout.format.key
        assert near.code == ("fp8_e4m3" if "fp8" in format else {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype])
        sequence, oracle = cache.sequence(), Replay(cache.layout)
        for count in (5, 1, 7, 3, 1):
            run(cache, {sequence: count}, {sequence: [oracle]})
        assert oracle.far


def test_a_step_in_the_window_of_recent_tokens_is_exact() -> None:
    """What is near in float32 is the input itself; the same tokens in int4 pages alone are not."""
    outputs = {}
    for format in ("fp32", "int4:g16,recent=64", "int4:g16"):
        cache = tiered(format)
        sequence = cache.sequence()
        torch.manual_seed(3)
        key, value, query = torch.randn(30, 2, 16), torch.randn(30, 2, 16), torch.randn(30, 4, 16)
        with cache.step({sequence: 30}) as step:
            step.append(0, key, value)
            outputs[format] = step.attend(0, query).output
    assert torch.equal(outputs["fp32"], outputs["int4:g16,recent=64"])
    assert (outputs["fp32"] - outputs["int4:g16"]).abs().max() > 0.01


@pytest.mark.parametrize("format", ["int8,recent=6", "int8,sink=5,recent=6", "k=int2:c4:asym,v=int8,recent=3"])
def test_truncate_to_every_length(format: str) -> None:
    """Down to the sealed length anything, below it whole pages, else refused before anything changes."""
    total, size = 26, 4
    for length in range(total + 1):
        cache = tiered(format)
        sequence, oracle = cache.sequence(), Replay(cache.layout)
        run(cache, {sequence: total - 1}, {sequence: [oracle]})
        run(cache, {sequence: 1}, {sequence: [oracle]})
        sealed = sequence.sealed_length()
        assert sealed == oracle.at_rest >= 16
        if length < sealed and length % size:
            before = state(cache)
            with pytest.raises(SequenceError, match=rf"truncate\({length}\).*sealed up to position {sealed}.* {size}"):
                sequence.truncate(length)
            assert state(cache) == before
            continue
        sequence.truncate(length)
        oracle.truncate(length)
        assert sequence.length == length
        assert sequence.sealed_length() == min(sealed, length)
        assert placed(cache, sequence) == oracle.tiers()
        for count in (1, 6, 1, 9, 1):
            run(cache, {sequence: count}, {sequence: [oracle]}, seed=1)
        assert placed(cache, sequence) == oracle.tiers()


@pytest.mark.parametrize("format", ["int8,recent=1", "int4:g8,recent=5,sink=2", "int8:c4"])
def test_a_verify_step_can_always_be_rolled_back(format: str) -> None:
    """Draft tokens are appended, attended in one step and truncated away, at every length around the seals."""
    cache = tiered(format, pages=60)
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    sealed = set()
    for index in range(24):
        drafted, kept = 1 + index % 6, 1 + (index * 5) % 3
        kept = min(kept, drafted)
        run(cache, {sequence: drafted}, {sequence: [oracle]}, seed=index)
        length = sequence.length - drafted + kept
        sequence.truncate(length)
        oracle.truncate(length)
        assert placed(cache, sequence) == oracle.tiers()
        run(cache, {sequence: 1}, {sequence: [oracle]}, seed=100 + index)
        sealed.add(sequence.sealed_length())
    assert len(sealed) > 5


def test_a_window_group_frees_what_it_passed_in_either_tier() -> None:
    for format in ("int8,recent=5", "int8,sink=3,recent=2", "int2:c4:asym"):
        cache = tiered(format, window=9)
        sequence, oracle = cache.sequence(), Replay(cache.layout)
        for count in (3, 1, 6, 1, 1, 9, 1, 1, 13, 1, 4):
            run(cache, {sequence: count}, {sequence: [oracle]})
            letters = placed(cache, sequence)
            wanted = oracle.tiers()
            passed = letters.count("-")
            assert letters[passed:] == wanted[passed:]
            # Judged at the step's begin: the first new token still saw window - 1 tokens before it.
            assert passed == max(0, sequence.length - count - 9 + 1) // 4 * 4
        held = [pool.held for pool in cache.stats().pools]
        assert sum(held) == len(letters[passed:]) // 4 + (sequence.length % 4 > 0)


# --- pins -----------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_whole_pages_near_for_good() -> None:
    cache = tiered("int8,recent=2")
    for pin in range(10):
        sequence, oracle = cache.sequence(), Replay(cache.layout, pin=pin)
        sequence.pin(pin)
        for count in (5, 6, 7, 1):
            run(cache, {sequence: count}, {sequence: [oracle]})
        kept = -(-pin // 4) * 4
        assert placed(cache, sequence) == "n" * kept + "f" * (16 - kept) + "nnn"
        sequence.free()


def test_a_pin_may_come_later_and_grow_but_not_over_sealed_tokens() -> None:
    cache = tiered("int8,recent=6")
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    run(cache, {sequence: 9}, {sequence: [oracle]})
    sequence.pin(3)
    oracle.pin = 3
    run(cache, {sequence: 5}, {sequence: [oracle]})
    sequence.pin(6)  # page 1 is old enough but has not sealed
    oracle.pin = 6
    run(cache, {sequence: 4}, {sequence: [oracle]})
    run(cache, {sequence: 1}, {sequence: [oracle]})
    assert placed(cache, sequence) == "nnnnnnnnffffnnnnnnn"
    sequence.pin(8)  # within the pages that are near anyway
    before = state(cache)
    with pytest.raises(SequenceError, match=r"pin\(9\): positions 8 .. 11 .*pin before appending"):
        sequence.pin(9)
    with pytest.raises(SequenceError, match=r"pin\(4\).*>= 8"):
        sequence.pin(4)
    assert state(cache) == before
    sequence.truncate(8)
    oracle.truncate(8)
    sequence.pin(9)  # nothing beyond the head is sealed any more
    oracle.pin = 9
    for count in (7, 9, 1):
        run(cache, {sequence: count}, {sequence: [oracle]}, seed=1)
    assert placed(cache, sequence).startswith("nnnnnnnnnnnnf")


@pytest.mark.parametrize("length", [-1, 1.0, True, None])
def test_a_pin_is_a_number_of_tokens(length: object) -> None:
    cache = tiered("int8,recent=6")
    with pytest.raises(SequenceError, match="number of tokens"):
        cache.sequence().pin(length)  # type: ignore[arg-type]


def test_a_pin_needs_a_format_with_tiers() -> None:
    cache = tiered("int8")
    sequence = cache.sequence()
    with pytest.raises(Unsupported, match=r"int8.*recent=N or sink=N"):
        sequence.pin(4)
    with pytest.raises(Unsupported):
        cache.match([1, 2, 3], pin=4)
    assert cache.sequences == (sequence,)  # the refused match left nothing behind


def test_a_fork_keeps_its_parents_pin() -> None:
    cache = tiered("int8,recent=2")
    parent, oracle = cache.sequence(), Replay(cache.layout, pin=5)
    parent.pin(5)
    run(cache, {parent: 7}, {parent: [oracle]})
    child, twin = parent.fork(), oracle.fork()
    for count in (6, 6, 1):
        run(cache, {parent: count, child: count}, {parent: [oracle], child: [twin]})
    assert placed(cache, parent) == placed(cache, child) == "n" * 8 + "f" * 8 + "nnnn"


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_near_format_that_does_not_fit_is_refused_at_open() -> None:
    with pytest.raises(FormatError, match="per-token"):
        CacheFormat.parse("int8,recent=4:int8:c4")
    layout = CacheLayout.uniform(layers=1, kv_heads=1, head_dim=48, format="int8,recent=4:mxfp4", page_size=4)
    with pytest.raises(ValueError, match=r"32.*48"):
        open_layout(layout)


def test_one_page_count_per_tier_is_needed() -> None:
    with pytest.raises(ValueError, match="1 counts, the cache has 2 pools"):
        tiered("int8,recent=4", pages=[20])


def test_the_lanes_of_the_groups_come_first_then_the_near_ones() -> None:
    spec = LayerSpec(kv_heads=1, query_heads=1, key_dim=16, value_dim=16)
    mixed = CacheLayout((spec, LayerSpec(1, 1, 16, 16, window=8)), CacheFormat.parse("int8,recent=4"), 4)
    assert [lane.group for lane in make_lanes(mixed)[0]] == [0, 1, 0, 1]
