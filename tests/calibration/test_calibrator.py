"""Scales from ranges: every granularity and method against the definition, padding left out, dummy data refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import kvport
from kvport import codec
from kvport.calibration import CLIPS, Calibrator, Method
from kvport.errors import InvalidArgument, ScaleError
from kvport.layout import CacheLayout, LayerSpec
from kvport.rotation import rotate

HEADS, DIM, TOKENS = 2, 16, 200


def data(seed: int = 0, tokens: int = TOKENS, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """K with an offset and one large channel, V of another size: no two channels alike."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(tokens, HEADS, dim, generator=generator) + torch.arange(dim) / 4
    key[:, 1, 3] *= 12
    return key, torch.randn(tokens, HEADS, dim, generator=generator) * 0.05 - 0.02


def layout(format: str, layers: int = 1, dim: int = DIM) -> CacheLayout:
    return CacheLayout.uniform(layers=layers, kv_heads=HEADS, head_dim=dim, format=format)


def calibrated(format: str, method: str = "amax", dim: int = DIM) -> tuple[kvport.LayerScales, Tensor, Tensor]:
    key, value = data(dim=dim)
    calibrator = Calibrator(layout(format, dim=dim), method)
    calibrator.observe(0, key, value)
    return calibrator.recipe()[0], key, value


LARGEST = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


@pytest.mark.parametrize("code", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("granularity", "dims"), [("tensor", (0, 1, 2)), ("head", (0, 2)), ("channel", (0,))])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_amax_of_symmetric_formats(code: str, granularity: str, dims: tuple[int, ...], dtype: str) -> None:
    scales, key, value = calibrated(f"{code}:{granularity}:static:scale={dtype}")
    for side, x in ((scales.key, key), (scales.value, value)):
        assert side is not None
        amax = x.abs().amax(dims)
        exact = amax.double() / LARGEST[code]
        # Up to the next number of the dtype, never down: what was seen does not saturate.
        step = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}[dtype]
        scale = torch.as_tensor(side.scale).double()
        if exact.min() > 6.2e-5:  # fp16 normal numbers
            assert bool(((scale >= exact * (1 - 2.0**-24)) & (scale <= exact * (1 + 2 * step))).all())
        assert bool((amax / torch.as_tensor(side.scale) <= LARGEST[code]).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("granularity", "dims"), [("tensor", (0, 1, 2)), ("head", (0, 2)), ("channel", (0,))])
def test_amax_of_asymmetric_formats(granularity: str, dims: tuple[int, ...], dtype: str) -> None:
    scales, key, value = calibrated(f"int8:{granularity}:asym:static:scale={dtype}")
    for side, x in ((scales.key, key), (scales.value, value)):
        assert side is not None
        assert side.zero is not None
        low, high = x.amin(dims), x.amax(dims)
        assert bool((side.zero <= low).all())
        assert bool(((high - side.zero) / torch.as_tensor(side.scale) <= 255).all())
        scale = torch.as_tensor(side.scale)
        assert bool((scale <= (high - low) / 255 * 1.2).all())


def test_nvfp4_has_one_tensor_scale() -> None:
    scales, key, _ = calibrated("nvfp4:static")
    assert scales.key is not None
    assert torch.as_tensor(scales.key.scale).shape == ()
    assert float(scales.key.scale) == pytest.approx(float(key.abs().max()) / (6 * 448), rel=1e-6)


@pytest.mark.parametrize(
    "format", ["int8:channel:static", "int4:head:asym:static:scale=fp16", "fp8_e4m3:tensor:static"]
)
def test_nothing_seen_saturates_under_amax(format: str) -> None:
    """Codes of the seen data, encoded and decoded: every error within half a step."""
    scales, key, value = calibrated(format)
    fmt = kvport.CacheFormat.parse(format).key
    for side, x in ((scales.key, key), (scales.value, value)):
        assert side is not None
        decoded = codec.decode(fmt, codec.encode(fmt, x, side).planes, side)
        scale = codec.static_parts(fmt, side)[0]
        step = scale / 2 if fmt.kind == "int" else x.abs() / 16 + scale / 2**9
        assert bool(((decoded - x).abs() <= step * (1 + 1e-4) + 1e-6 * x.abs()).all())


@pytest.mark.parametrize("percent", [99.9, 99.0, 90.0, 50.0])
def test_percentile_is_the_nearest_rank(percent: float) -> None:
    scales, key, _ = calibrated("int8:channel:static", f"percentile:{percent}")
    assert scales.key is not None
    expected = np.quantile(key.abs().numpy(), percent / 100, axis=0, method="inverted_cdf")
    assert np.allclose(np.asarray(scales.key.scale) * 127, expected, rtol=1e-6)


def test_percentile_of_both_ends() -> None:
    scales, key, _ = calibrated("int8:head:asym:static", "percentile:99")
    assert scales.key is not None
    assert scales.key.zero is not None
    count = TOKENS * DIM
    values = key.permute(1, 0, 2).reshape(HEADS, -1).sort(-1).values
    rank = math.ceil(0.99 * count)
    assert torch.equal(scales.key.zero, values[:, count - rank])
    high = scales.key.zero + 255 * torch.as_tensor(scales.key.scale)
    assert torch.allclose(high, values[:, rank - 1], rtol=1e-6)


def test_percentile_100_is_amax() -> None:
    for format in ("int8:channel:static", "int8:tensor:asym:static"):
        a, b = calibrated(format, "amax")[0], calibrated(format, "percentile:100")[0]
        assert a.key is not None
        assert b.key is not None
        assert torch.equal(torch.as_tensor(a.key.scale), torch.as_tensor(b.key.scale))


def test_a_percentile_without_extent_falls_back_to_the_whole_range() -> None:
    """A channel that is zero but for one token has a 99th percentile of zero; that is no scale."""
    key, value = data()
    key[:, 0, 5] = 0
    key[7, 0, 5] = 3.0
    calibrator = Calibrator(layout("int8:channel:static"), "percentile:99")
    calibrator.observe(0, key, value)
    side = calibrator.recipe()[0].key
    assert side is not None
    assert float(torch.as_tensor(side.scale)[0, 5]) == pytest.approx(3 / 127)


@pytest.mark.parametrize(
    "format", ["int4:channel:static", "int4:channel:asym:static:scale=fp16", "fp8_e4m3:tensor:static", "nvfp4:static"]
)
def test_mse_is_the_best_of_its_clips(format: str) -> None:
    """Never worse than the whole range, and no other clip beats it: all of them tried here once more."""
    best, key, _ = calibrated(format, "mse")
    whole, _, _ = calibrated(format, "amax")
    fmt = kvport.CacheFormat.parse(format).key

    def error(side: kvport.SideScales | None) -> Tensor:
        assert side is not None
        decoded = codec.decode(fmt, codec.encode(fmt, key, side).planes, side)
        square = (decoded - key).double().square()
        return square.sum(0) if fmt.granularity == "channel" else square.sum()

    assert bool((error(best.key) <= error(whole.key)).all())
    if fmt.symmetric and fmt.granularity == "channel":
        assert whole.key is not None
        assert bool((error(best.key) < error(whole.key)).any())
        for clip in CLIPS:
            other = kvport.SideScales(torch.as_tensor(whole.key.scale) * clip)
            assert bool((error(best.key) <= error(other) * 1.001).all())


def test_mse_clips_an_outlier_that_costs_more_than_it_brings() -> None:
    """One value of 60 among thousands of size 1: at 4 bits the whole range leaves three codes for all the others."""
    key, value = torch.randn(4000, HEADS, DIM, generator=torch.Generator().manual_seed(1)), torch.ones(4000, HEADS, DIM)
    value = value * torch.linspace(-1, 1, 4000).view(-1, 1, 1)
    key[17, 0, 0] = 60.0
    found = {}
    for method in ("amax", "mse"):
        calibrator = Calibrator(layout("int4:tensor:static"), method)
        calibrator.observe(0, key, value)
        side = calibrator.recipe()[0].key
        assert side is not None
        found[method] = float(side.scale)
    assert found["amax"] == pytest.approx(60 / 7, rel=1e-6)
    assert found["mse"] < found["amax"] / 2


def test_padding_does_not_count() -> None:
    key, value = data()
    valid = torch.arange(TOKENS) % 3 != 0
    dirty_key, dirty_value = key.clone(), value.clone()
    dirty_key[~valid], dirty_value[~valid] = 1e4, math.nan
    clean, dirty = Calibrator(layout("int8:channel:static")), Calibrator(layout("int8:channel:static"))
    clean.observe(0, key[valid], value[valid])
    dirty.observe(0, dirty_key, dirty_value, valid)
    assert clean.tokens == dirty.tokens == int(valid.sum())
    assert clean.recipe().digest() == dirty.recipe().digest()


@pytest.mark.parametrize("method", ["amax", "percentile:95", "mse"])
def test_the_split_into_calls_does_not_matter(method: str) -> None:
    key, value = data()
    once, split = Calibrator(layout("int8:head:static"), method), Calibrator(layout("int8:head:static"), method)
    once.observe(0, key, value)
    for start in range(0, TOKENS, 37):
        split.observe(0, key[start : start + 37], value[start : start + 37])
    split.observe(0, key[:0], value[:0])
    assert once.recipe().digest() == split.recipe().digest()


def test_a_dummy_pass_before_real_data_changes_nothing() -> None:
    key, value = data()
    plain, warmed = Calibrator(layout("int8:head:static")), Calibrator(layout("int8:head:static"))
    warmed.observe(0, torch.zeros_like(key), torch.zeros_like(value))
    for calibrator in (plain, warmed):
        calibrator.observe(0, key, value)
    assert plain.recipe().digest() == warmed.recipe().digest()


def test_zeros_throughout_are_refused_by_name() -> None:
    key, value = data()
    for format, side, place in (
        ("int8:tensor:static", "K", "layer 0 K"),
        ("int8:head:static", "V", "layer 0 V head 1"),
        ("int8:channel:static", "K", "layer 0 K head 1"),
    ):
        calibrator = Calibrator(layout(format))
        k, v = key.clone(), value.clone()
        (k if side == "K" else v)[:, 1 if "head" in place else slice(None)] = 0
        calibrator.observe(0, k, v)
        with pytest.raises(ScaleError, match=f"{place}: all of 200 tokens hold zeros"):
            calibrator.recipe()


def test_dead_channels_get_a_scale_and_a_note() -> None:
    """Gemma has K channels that are zero everywhere: scale 0 would be refused, and 1.0 would be a magic number."""
    key, value = data()
    key[:, 1, 4] = 0
    calibrator = Calibrator(layout("int8:channel:static"))
    calibrator.observe(0, key, value)
    recipe = calibrator.recipe()
    assert recipe.notes == ("layer 0 K: 1 of 32 channels never left zero; they take the largest scale of their head",)
    side = recipe[0].key
    assert side is not None
    scale = torch.as_tensor(side.scale)
    assert float(scale[1, 4]) == float(scale[1].max())
    fmt = kvport.CacheFormat.parse("int8:channel:static").key
    assert bool((codec.decode(fmt, codec.encode(fmt, key, side).planes, side)[:, 1, 4] == 0).all())


def test_constant_channels_of_asymmetric_formats_decode_to_their_constant() -> None:
    key, value = data()
    key[:, 0, 2] = -7.25
    calibrator = Calibrator(layout("int8:channel:asym:static"))
    calibrator.observe(0, key, value)
    side = calibrator.recipe()[0].key
    assert side is not None
    fmt = kvport.CacheFormat.parse("int8:channel:asym:static").key
    assert bool((codec.decode(fmt, codec.encode(fmt, key, side).planes, side)[:, 0, 2] == -7.25).all())


def test_a_tiny_channel_keeps_a_normal_scale() -> None:
    key, value = data()
    key[:, 0, 2] = 1e-7
    scales, _, _ = calibrated("int8:channel:static:scale=fp16")
    calibrator = Calibrator(layout("int8:channel:static:scale=fp16"))
    calibrator.observe(0, key, value)
    side = calibrator.recipe()[0].key
    assert side is not None
    assert float(torch.as_tensor(side.scale)[0, 2]) == torch.finfo(torch.float16).smallest_normal
    assert scales.key is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_are_refused(bad: float) -> None:
    key, value = data()
    value[5, 0, 0] = bad
    calibrator = Calibrator(layout("int8:channel:static"))
    with pytest.raises(ScaleError, match="layer 0 V: 1 of 200 valid tokens hold NaN or an infinity"):
        calibrator.observe(0, key, value)


def test_a_scale_beyond_its_dtype_is_refused() -> None:
    key, value = data()
    for format, match in (
        ("int8:tensor:static:scale=fp16", "beyond fp16"),
        ("int8:tensor:asym:static:scale=fp16", "exceed fp16"),
    ):
        calibrator = Calibrator(layout(format))
        calibrator.observe(0, key * -1e8, value)
        with pytest.raises(ScaleError, match=f"layer 0 K: .*{match}"):
            calibrator.recipe()


def test_layers_that_were_not_seen_are_named() -> None:
    calibrator = Calibrator(layout("int8:channel:static", layers=3))
    calibrator.observe(1, *data())
    with pytest.raises(ScaleError, match="no valid token was seen by layer 0 K, layer 0 V, layer 2 K, layer 2 V"):
        calibrator.recipe()


def test_rotated_k_is_calibrated_as_it_is_stored() -> None:
    key, value = data()
    turned, _, _ = calibrated("int8:channel:static,rotate=5")
    calibrator = Calibrator(layout("int8:channel:static"))
    calibrator.observe(0, rotate(key, 5, DIM), value)
    assert turned.key is not None
    plain = calibrator.recipe()[0].key
    assert plain is not None
    assert torch.equal(torch.as_tensor(turned.key.scale), torch.as_tensor(plain.scale))


def test_one_side_static() -> None:
    scales, _, _ = calibrated("k=int8:channel:static,v=int8")
    assert scales.key is not None
    assert scales.value is None


def test_latent_layers() -> None:
    spec = LayerSpec(1, 4, 32 + 16, 32, latent=True)
    one = CacheLayout((spec,), kvport.CacheFormat.parse("latent=int8:channel:static,rope=bf16"), dtype=torch.bfloat16)
    calibrator = Calibrator(one)
    key = torch.randn(50, 1, 48, generator=torch.Generator().manual_seed(0))
    key[..., 32:] *= 1000  # the rope part has no static scale
    calibrator.observe(0, key)
    recipe = calibrator.recipe()
    side = recipe[0].key
    assert side is not None
    assert torch.allclose(torch.as_tensor(side.scale) * 127, key[..., :32].abs().amax(0))
    kvport.open("cpu", layout=one, tokens=16, scales=recipe).close()
    with pytest.raises(InvalidArgument, match="latent"):
        calibrator.observe(0, key, key)


def test_a_recipe_opens_its_cache_and_survives_a_file(tmp_path: object) -> None:
    key, value = data()
    for format in (
        "int8:channel:static",
        "nvfp4:static",
        "fp8_e4m3:tensor:static",
        "int8:channel:static,sink=2,recent=8",
    ):
        one = layout(format)
        calibrator = Calibrator(one)
        calibrator.observe(0, key, value)
        recipe = calibrator.recipe({"model": "none"})
        assert recipe.provenance == {"source": "calibrated", "method": "amax", "tokens": "200", "model": "none"}
        with kvport.open("cpu", layout=one, tokens=300, scales=recipe) as cache:
            sequence = cache.sequence()
            with cache.step({sequence: TOKENS}) as step:
                step.append(0, key, value)
            got, _ = cache.gather(sequence, 0)
            assert torch.nn.functional.cosine_similarity(got.flatten(), key.flatten(), 0) > 0.98


@pytest.mark.parametrize(
    "text", ["max", "percentile", "percentile:0", "percentile:101", "percentile:x", "amax:3", "mse:2"]
)
def test_methods_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="known: amax"):
        Method.parse(text)


def test_methods_print_as_they_are_written() -> None:
    assert [str(Method.parse(text)) for text in ("amax", "percentile:99.9", "mse")] == [
        "amax",
        "percentile:99.9",
        "mse",
    ]


@pytest.mark.parametrize(
    ("layer", "key", "value", "valid", "match"),
    [
        (3, (5, 2, 16), (5, 2, 16), None, "layer 3 is not one"),
        (0, (5, 3, 16), (5, 2, 16), None, r"layer 0 K must be \(5, 2, 16\)"),
        (0, (5, 2, 16), (4, 2, 16), None, r"layer 0 V must be \(5, 2, 16\)"),
        (0, (5, 2, 16), None, None, "value must be given"),
        (0, (5, 2, 16), (5, 2, 16), torch.ones(5), "valid must be bool"),
        (0, (5, 2, 16), (5, 2, 16), torch.ones(4, dtype=torch.bool), "valid must be bool"),
    ],
)
def test_wrong_arguments(
    layer: int, key: tuple[int, ...], value: tuple[int, ...] | None, valid: Tensor | None, match: str
) -> None:
    calibrator = Calibrator(layout("int8:channel:static"))
    with pytest.raises(InvalidArgument, match=match):
        calibrator.observe(layer, torch.ones(key), None if value is None else torch.ones(value), valid)


def test_a_format_without_static_scales_has_nothing_to_calibrate() -> None:
    with pytest.raises(InvalidArgument, match="format int8 has no static scales"):
        Calibrator(layout("int8"))
