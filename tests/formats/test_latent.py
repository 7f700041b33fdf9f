"""Latent (MLA) layers: K is latent plus rope, V is the latent part, and it is stored once."""

from __future__ import annotations

import math

import core_support as support
import numpy as np
import pytest
import torch
from core_support import Array
from replay import Replay, open_layout, placed, round_trip, run

from kvport import (
    CacheFormat,
    CacheLayout,
    FormatError,
    InvalidArgument,
    LayerScales,
    LayerSpec,
    LayoutError,
    PagedCache,
    ScaleError,
    SideScales,
    TensorFormat,
)
from kvport.rotation import rotate
from kvport.tiers import canonical_bytes, make_lanes
from kvport_conformance import inputs

LATENT, ROPE, HEADS = 64, 16, 4
FORMATS = (
    "latent=fp32,rope=fp32",
    "latent=bf16,rope=bf16",
    "latent=int8:g32,rope=bf16",
    "latent=int4:g16:asym,rope=int8",
    "latent=fp8_e4m3:g32,rope=bf16",
    "latent=nvfp4,rope=fp8_e4m3",
)
TIERED = (
    "latent=int8:g32,rope=bf16,recent=5",
    "latent=int4:g16:asym,rope=int8:c4,sink=3,recent=6",
    "latent=int2:c4,rope=bf16,recent=3:fp8_e4m3",
)


def latent_cache(
    format: str, *, latent: int = LATENT, rope: int = ROPE, page_size: int = 4, **more: object
) -> PagedCache:
    spec = LayerSpec(kv_heads=1, query_heads=HEADS, key_dim=latent + rope, value_dim=latent, latent=True)
    return open_layout(CacheLayout((spec,), CacheFormat.parse(format), page_size), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", [*FORMATS, *TIERED])
def test_attention_and_planes_follow_the_replay(format: str) -> None:
    cache = latent_cache(format)
    sequence, oracle = cache.sequence(), Replay(cache.layout)
    for count in (5, 1, 7, 4, 1):
        run(cache, {sequence: count}, {sequence: [oracle]})
        if cache.layout.format.tiered:
            assert placed(cache, sequence) == oracle.tiers()
    assert ("f" in oracle.tiers()) == cache.layout.format.tiered
    planes = cache.export(sequence).layers[0]
    assert {name.removeprefix("near.").split(".")[0] for name in planes} == {"latent", "rope"}  # V is not there again
    for index, page in enumerate(sorted(oracle.far)):
        for part, wanted in zip(("latent", "rope"), oracle.planes(page), strict=True):
            for name, plane in wanted.items():
                got = planes[f"{part}.{name}"][index].contiguous().view(torch.uint8).numpy().tobytes()
                assert got == plane.tobytes()


@pytest.mark.parametrize("format", [*FORMATS, *TIERED, "latent=int8:g32,rope=bf16,rotate=4"])
def test_absorbed_queries_equal_the_explicit_up_projection(format: str) -> None:
    """K_h = W_uk,h c and V_h = W_uv,h c in float64, against queries with W_uk absorbed and outputs put through W_uv."""
    nope, value_dim, tokens = 24, 20, 26
    up_key = inputs.values(1, (HEADS, nope, LATENT)).astype(np.float64) / math.sqrt(LATENT)
    up_value = inputs.values(2, (HEADS, value_dim, LATENT)).astype(np.float64)
    scale = 1 / math.sqrt(nope + ROPE)
    cache = latent_cache(format)
    sequence = cache.sequence()
    for first, end in ((0, 17), (17, 25), (25, tokens)):
        count = end - first
        key = inputs.key(3, (count, 1, LATENT + ROPE), start=first)
        query = inputs.query(4, (count, HEADS, nope + ROPE), start=first).astype(np.float64)
        absorbed = np.concatenate([np.einsum("thn,hnl->thl", query[..., :nope], up_key), query[..., nope:]], -1)
        with cache.step({sequence: count}) as step:
            step.append(0, torch.from_numpy(key))
            found = step.attend(0, torch.from_numpy(absorbed.astype(np.float32)), scale=scale)
            stored, again = (side[0].numpy().astype(np.float64) for side in step.gather(0, torch.float32))
        assert (stored[..., :LATENT] == again).all()
        got = np.einsum("thl,hdl->thd", found.output.numpy().astype(np.float64), up_value)
        want, lse = explicit(query, stored[:, 0], up_key, up_value, scale)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
        assert np.abs(found.lse.numpy() - lse).max() <= 2e-5 * np.abs(lse).max()


def explicit(query: Array, stored: Array, up_key: Array, up_value: Array, scale: float) -> tuple[Array, Array]:
    """Multi-head attention with K and V of every head built from the latents, float64, last rows causal."""
    nope = up_key.shape[1]
    outs, lses = [], []
    for head in range(HEADS):
        key = np.concatenate([stored[:, :LATENT] @ up_key[head].T, stored[:, LATENT:]], -1)
        value = stored[:, :LATENT] @ up_value[head].T
        assert key.shape[-1] == nope + ROPE
        scores = scale * query[:, head] @ key.T
        position = np.arange(len(key) - len(query), len(key))[:, None]
        scores = np.where(np.arange(len(key)) <= position, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(weights / weights.sum(-1, keepdims=True) @ value)
        lses.append(np.log(weights.sum(-1)) + scores.max(-1))
    return np.stack(outs, 1), np.stack(lses, 1)


@pytest.mark.parametrize(
    "format, per_token",
    [
        ("latent=bf16,rope=bf16", 1152),  # (512 + 64) * 2
        ("latent=fp8_e4m3:g128,rope=bf16", 656),  # 512 + 4 float32 scales + 64 * 2, the published FP8 layout
        ("latent=int8:g128,rope=bf16", 656),
        ("latent=int8,rope=bf16", 512 + 4 + 128),
        ("latent=int4:g128:scale=fp16,rope=bf16", 256 + 8 + 128),
        ("latent=fp8_e4m3,rope=fp8_e4m3", 576 + 8),
        ("latent=fp32,rope=fp32", 2304),
    ],
)
def test_bytes_per_token(format: str, per_token: int) -> None:
    spec = LayerSpec(kv_heads=1, query_heads=128, key_dim=576, value_dim=512, latent=True)
    layout = CacheLayout((spec,) * 3, CacheFormat.parse(format), 64, torch.bfloat16)
    assert canonical_bytes(layout, 640) == 640 * per_token * 3
    cache = open_layout(layout, 3)
    stored = sum(b.numel() * b.itemsize for s in cache._stores for b in cache.backend.buffers(s).values())
    assert stored == 3 * 3 * 64 * per_token
    [pool] = cache.stats().pools
    assert pool.page_bytes == 3 * 64 * per_token


def test_bytes_of_a_tiered_latent_layer() -> None:
    spec = LayerSpec(kv_heads=1, query_heads=2, key_dim=576, value_dim=512, latent=True)
    layout = CacheLayout((spec,), CacheFormat.parse("latent=fp8_e4m3:g128,rope=bf16,recent=128"), 64, torch.bfloat16)
    assert canonical_bytes(layout, 640) == 512 * 656 + 128 * 1152


@pytest.mark.parametrize(
    "format", ["latent=int8:g32,rope=fp32,rotate=5", "latent=int8:g32,rope=fp32,rotate=5,recent=4"]
)
def test_the_rope_part_is_never_rotated(format: str) -> None:
    cache = latent_cache(format)
    sequence = cache.sequence()
    whole = torch.from_numpy(inputs.key(6, (13, 1, LATENT + ROPE)))
    for first, end in ((0, 12), (12, 13)):
        with cache.step({sequence: end - first}) as step:
            step.append(0, whole[first:end])
            output = step.attend(0, torch.ones(end - first, HEADS, LATENT + ROPE)).output
    planes = cache.export(sequence).layers[0]
    turned = rotate(whole[..., :LATENT], 5, LATENT).numpy()
    far = 8 if "recent" in format else 12
    expected = round_trip(TensorFormat.parse("int8:g32"), turned)
    key, value = cache.gather(sequence, 0)
    assert torch.equal(key[..., LATENT:], whole[..., LATENT:])
    assert torch.equal(key[..., :LATENT], value)
    rope = torch.cat([planes[n] for n in ("rope.codes", "near.rope.codes") if n in planes])
    assert torch.equal(rope.reshape(-1, 1, ROPE)[:13], whole[..., LATENT:])
    codes = planes["latent.codes"].reshape(-1, 1, LATENT)[:far].float()
    scale = planes["latent.scale"].reshape(-1, 1, 2)[:far].repeat_interleave(32, -1)
    assert np.array_equal((codes * scale).numpy(), expected[:far])
    # The output is V as it was given, not as it is stored: equal weights would give its mean.
    assert (output[0, 0] - value[:, 0].mean(0)).abs().max() < (value.abs().max() * 2)
    wanted, _, allowed, _ = support.attention(
        np.ones((1, HEADS, LATENT + ROPE), np.float32), key.numpy(), value.numpy()
    )
    assert support.ratio(output, wanted, 5 * allowed) < 1


def test_the_value_is_not_appended_twice() -> None:
    cache = latent_cache("latent=int8,rope=bf16")
    sequence = cache.sequence()
    step = cache.step({sequence: 2})
    with pytest.raises(InvalidArgument, match="value=None"):
        step.append(0, torch.ones(2, 1, LATENT + ROPE), torch.ones(2, 1, LATENT))
    step.append(0, torch.ones(2, 1, LATENT + ROPE))
    step.commit()
    assert sequence.length == 2


def test_other_layers_need_their_value() -> None:
    cache = open_layout(CacheLayout.uniform(layers=1, kv_heads=1, head_dim=16, format="int8", page_size=4))
    step = cache.step({cache.sequence(): 2})
    with pytest.raises(InvalidArgument, match="value must be a torch tensor, got NoneType"):
        step.append(0, torch.ones(2, 1, 16))
    step.rollback()


def test_static_scales_of_a_latent_layer_are_those_of_its_latent_part() -> None:
    format = "latent=int8:channel:static,rope=bf16"
    scale = torch.from_numpy(inputs.values(7, (1, LATENT), low=0.05, high=0.2))
    with pytest.raises(ScaleError, match="layer 0 K"):
        latent_cache(format)
    with pytest.raises(ScaleError, match="latent part; give scales for key alone"):
        latent_cache(format, scales={0: LayerScales(SideScales(scale), SideScales(scale))})
    cache = latent_cache(format, scales={0: LayerScales(SideScales(scale))})
    sequence = cache.sequence()
    key = torch.from_numpy(inputs.key(8, (5, 1, LATENT + ROPE)))
    with cache.step({sequence: 5}) as step:
        step.append(0, key)
    wanted = (key[..., :LATENT] / scale).round().clamp(-127, 127) * scale
    assert torch.equal(cache.gather(sequence, 0)[1], wanted)


@pytest.mark.parametrize("changes", [{"kv_heads": 2}, {"key_dim": LATENT}, {"key_dim": LATENT - 16}])
def test_geometries_that_cannot_be(changes: dict[str, int]) -> None:
    shape = {"kv_heads": 1, "query_heads": HEADS, "key_dim": LATENT + ROPE, "value_dim": LATENT}
    with pytest.raises(LayoutError, match="kv_heads 1 and key_dim = latent \\+ rope > value_dim"):
        LayerSpec(**{**shape, **changes}, latent=True)


def test_formats_that_do_not_fit_the_parts() -> None:
    with pytest.raises(LayoutError, match=r"latent.*48.*64"):
        latent_cache("latent=int8:g48,rope=bf16")
    with pytest.raises(LayoutError, match=r"rope.*32.*16"):
        latent_cache("latent=mxfp4,rope=mxfp4")
    with pytest.raises(LayoutError, match=r"divisible by 16, got 24"):
        latent_cache("latent=int8,rope=bf16,rotate=1", latent=24)
    with pytest.raises(FormatError, match="rope part without static"):
        latent_cache("latent=int8,rope=int8:tensor:static")


def test_latent_and_other_layers_live_in_one_cache() -> None:
    latent = LayerSpec(1, HEADS, LATENT + ROPE, LATENT, latent=True, format=CacheFormat.parse("latent=int8,rope=bf16"))
    dense = LayerSpec(2, HEADS, 32, 32)
    cache = open_layout(CacheLayout((latent, dense, latent), CacheFormat.parse("int4:g16,recent=6"), 4))
    assert [lane.layout.latent for lane in make_lanes(cache.layout)[0]] == [True, False, False]
    sequence = cache.sequence()
    oracles = [Replay(cache.layout, layer) for layer in range(3)]
    for count in (9, 4, 1):
        run(cache, {sequence: count}, {sequence: oracles})
