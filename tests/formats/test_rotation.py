"""The Hadamard rotation: its definition in exact arithmetic, and that scores do not notice it."""

from __future__ import annotations

import math

import core_support as support
import numpy as np
import pytest
import torch
from core_support import Array
from replay import tiered

from kvport import CacheFormat, CacheLayout, ImageError, LayerSpec, LayoutError
from kvport.rotation import rotate, rotation_signs, rotation_size, unrotate
from kvport_conformance import inputs

DIMS = {16: 16, 32: 32, 48: 16, 64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 192: 64, 256: 256}


def hadamard(n: int) -> Array:
    """Sylvester's matrix, by its entries: (-1) to the number of common ones of row and column."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])


def matrix(seed: int, dim: int) -> Array:
    """The whole rotation as a float64 matrix: signs first, then a block of n channels at a time, 1/sqrt(n)."""
    n = DIMS[dim]
    found = np.zeros((dim, dim))
    for block in range(0, dim, n):
        found[block : block + n, block : block + n] = hadamard(n) / math.sqrt(n)
    return found * signs(seed, dim)


def signs(seed: int, dim: int) -> Array:
    """One bit per channel: the top bit of word seed * 2**32 + channel of a SplitMix64 stream from state 0."""
    words = inputs.words(0, dim, start=seed << 32)
    return np.where(words >> np.uint64(63), -1.0, 1.0)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**32 - 1])
@pytest.mark.parametrize("dim", DIMS)
def test_the_transform_is_the_explicit_matrix(dim: int, seed: int) -> None:
    assert rotation_size(dim) == DIMS[dim]
    assert list(rotation_signs(seed, dim)) == signs(seed, dim).tolist()
    x = inputs.key(3, (50, 2, dim))
    wanted = x.astype(np.float64) @ matrix(seed, dim).T
    # log2 n additions and one product, each rounded: far below n ulp of the largest partial sum.
    allowed = 2.0**-24 * (math.log2(DIMS[dim]) + 2) * np.abs(x).sum(-1, keepdims=True)
    assert (np.abs(rotate(torch.from_numpy(x), seed, dim).numpy() - wanted) <= allowed).all()
    back = unrotate(rotate(torch.from_numpy(x), seed, dim), seed, dim).numpy()
    assert np.abs(back - x).max() <= 2e-6 * np.abs(x).max() * math.sqrt(dim)


@pytest.mark.parametrize("dim", DIMS)
def test_the_transform_bit_for_bit(dim: int) -> None:
    """float32, strides 1, 2, 4 ..., one multiplication at the end: what every backend has to do."""
    x = inputs.key(4, (20, 2, dim))
    expected = x * signs(5, dim).astype(np.float32)
    n = DIMS[dim]
    stride = 1
    while stride < n:
        before = expected.copy()
        for channel in range(dim):
            low, high = before[..., channel & ~stride], before[..., channel | stride]
            expected[..., channel] = low - high if channel & stride else low + high
        stride *= 2
    expected = expected * np.float32(n**-0.5)
    got = rotate(torch.from_numpy(x), 5, dim).numpy()
    assert (support.bits(got) == support.bits(expected)).all()


def test_16_bit_inputs_are_rotated_in_float32() -> None:
    x = torch.from_numpy(inputs.key(4, (20, 2, 64), dtype="bfloat16")).to(torch.bfloat16)
    assert torch.equal(rotate(x, 5, 64), rotate(x.float(), 5, 64))
    assert rotate(x, 5, 64).dtype == torch.float32


def test_signs_depend_on_the_seed_and_are_balanced() -> None:
    found = {rotation_signs(seed, 128) for seed in range(64)}
    assert len(found) == 64
    assert abs(sum(sum(s) for s in found)) < 4 * math.sqrt(64 * 128)
    assert rotation_signs(9, 128)[:64] == rotation_signs(9, 64)


@pytest.mark.parametrize("dim", [1, 8, 24, 40, 100])
def test_dims_without_a_block_of_16_are_refused(dim: int) -> None:
    power = dim & -dim
    with pytest.raises(LayoutError, match=rf"divisible by 16, got {dim}.* {power} only"):
        CacheLayout.uniform(layers=1, kv_heads=1, head_dim=dim, format="int8,rotate=1", page_size=4)


@pytest.mark.parametrize("dim", [16, 80, 128])
@pytest.mark.parametrize("format", ["fp32-like", "int8", "int4:g16", "fp8_e4m3,recent=6", "int8:c4"])
def test_scores_do_not_notice_the_rotation(dim: int, format: str) -> None:
    """Attention over rotated K with rotated queries is attention over K as it reads back, unrotated."""
    name = "k=int8,v=fp32" if format == "fp32-like" else format
    cache = tiered(f"{name},rotate=11", head_dim=dim)
    sequence = cache.sequence()
    for first, end in ((0, 13), (13, 20)):
        key, value = support.kv(cache.layout, 0, 1, end - first, first)
        query = support.queries(cache.layout, 0, 1, end - first, first)
        with cache.step({sequence: end - first}) as step:
            step.append(0, key, value)
            output, lse = step.attend(0, query)
            dense = [side[0] for side in step.gather(0)]
        stored = [side.numpy() for side in dense]
        expected, expected_lse, allowed, allowed_lse = support.attention(query.numpy(), *stored)
        # Rotating twice costs a few more float32 roundings than the bound has room for in one product.
        assert support.ratio(output, expected, 3 * allowed) < 1
        assert support.ratio(lse, expected_lse, 3 * allowed_lse) < 1
    plain, _ = support.kv(cache.layout, 0, 1, 20)
    step_size = {"fp32-like": 0.01, "int8": 0.01, "int4:g16": 0.16, "fp8_e4m3,recent=6": 0.07, "int8:c4": 0.01}[format]
    assert (dense[0] - plain).abs().max() < step_size * plain.abs().max() * 1.5


def test_v_is_not_rotated() -> None:
    plain, turned = tiered("k=int8,v=int4:g16"), tiered("k=int8,v=int4:g16,rotate=2")
    images = []
    for cache in (plain, turned):
        sequence = cache.sequence()
        support.run_step(cache, {sequence: 9})
        images.append(cache.export(sequence).layers[0])
    for name in images[0]:
        assert torch.equal(images[0][name], images[1][name]) == name.startswith("value.")


def test_the_stored_codes_are_those_of_the_rotated_key() -> None:
    cache = tiered("int4:g16,rotate=6", head_dim=32)
    sequence = cache.sequence()
    support.run_step(cache, {sequence: 4})
    key, value = support.kv(cache.layout, 0, 0, 4)
    planes = cache.export(sequence).layers[0]
    expected = support.expected_planes(cache.layout, 0, rotate(key, 6, 32).numpy(), value.numpy())
    for name, wanted in expected.items():
        assert (support.bits(planes[name][0].numpy()) == support.bits(wanted)).all()


def test_an_outlier_channel_is_spread() -> None:
    """One channel forty times as large ruins int4 per token; rotated, the error falls to a fraction of it."""
    errors = {}
    torch.manual_seed(1)
    key = torch.randn(32, 2, 64)
    key[..., 5] = 40.0
    for format in ("k=int4,v=fp32", "k=int4,v=fp32,rotate=3"):
        cache = tiered(format, head_dim=64)
        sequence = cache.sequence()
        with cache.step({sequence: 32}) as step:
            step.append(0, key, key)
        back, _ = cache.gather(sequence, 0)
        others = [channel for channel in range(64) if channel != 5]
        errors[format] = (back - key)[..., others].square().mean().sqrt().item()
    plain, turned = errors.values()
    assert plain > 0.9  # everything but the outlier was lost: its deviation is 1
    assert turned < plain / 2


def test_the_seed_is_part_of_the_identity() -> None:
    caches = {seed: tiered(f"int8,rotate={seed}") for seed in (1, 2)}
    caches[-1] = tiered("int8")
    sequence = caches[1].sequence()
    support.run_step(caches[1], {sequence: list(range(9))})
    image = caches[1].export(sequence)
    assert len({cache.fingerprint for cache in caches.values()}) == 3
    for seed in (2, -1):
        with pytest.raises(ImageError, match="belongs to another kind"):
            caches[seed].insert(image)
    twin = tiered("int8,rotate=1")
    copy = twin.insert(image)
    assert torch.equal(twin.gather(copy, 0)[0], caches[1].gather(sequence, 0)[0])


def test_a_rotated_key_with_tiers_is_rotated_once() -> None:
    """Near pages hold rotated rows, and sealing does not rotate again."""
    cache = tiered("int8,recent=4,rotate=9")
    sequence = cache.sequence()
    for first, end in ((0, 12), (12, 13)):
        key, value = support.kv(cache.layout, 0, 1, end - first, first)
        with cache.step({sequence: end - first}) as step:
            step.append(0, key, value)
    whole, _ = support.kv(cache.layout, 0, 1, 13)
    planes = cache.export(sequence).layers[0]
    expected = support.expected_planes(cache.layout, 0, rotate(whole, 9, 16).numpy(), whole.numpy())
    assert (planes["key.codes"].reshape(8, 2, 16).numpy() == expected["key.codes"][:8]).all()
    near = planes["near.key.codes"].reshape(-1, 2, 16)[:5]
    assert torch.equal(near, rotate(whole, 9, 16)[8:])


def test_per_layer_seeds() -> None:
    spec = {"kv_heads": 1, "query_heads": 1, "key_dim": 32, "value_dim": 32}
    layers = tuple(LayerSpec(**spec, format=CacheFormat.parse(f"int8,rotate={seed}")) for seed in (1, 2, 1))
    layout = CacheLayout(layers, CacheFormat.parse("int8"), 4)
    assert [group.layers for group in layout.groups] == [(0, 2), (1,)]
