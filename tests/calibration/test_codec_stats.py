"""Counters of the torch codec against the numpy oracle's own, for every format and for values far out of range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvport import codec, codec_stats
from kvport.codec_stats import Counts
from kvport.formats import TensorFormat
from kvport.scales import SideScales
from kvport_conformance import oracle_codec
from kvport_conformance.oracle_codec import CodecSpec

TOKENS, HEADS, DIM = 8, 2, 32
FORMATS = [
    "fp32",
    "bf16",
    "fp16",
    *(
        f"{code}{granularity}{asym}{scale}"
        for code in ("int8", "int4", "int2")
        for granularity in ("", ":g16", ":c4")
        for asym in ("", ":asym")
        for scale in ("", ":scale=fp16", ":scale=bf16")
    ),
    *(f"{code}{scale}" for code in ("fp8_e4m3", "fp8_e5m2:g16") for scale in ("", ":scale=fp16", ":scale=bf16")),
    "mxfp4",
    "nvfp4",
    *(f"{code}:{g}:static" for code in ("int8", "int4", "fp8_e4m3", "fp8_e5m2") for g in ("tensor", "head", "channel")),
    *(f"{code}:{g}:asym:static" for code in ("int8", "int2") for g in ("tensor", "head", "channel")),
    "int8:channel:static:scale=bf16",
    "int8:head:asym:static:scale=fp16",
    "nvfp4:static",
]


def spec_of(fmt: TensorFormat) -> CodecSpec:
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    block = fmt.kind in ("mx", "nv")
    return CodecSpec(
        fmt.code,
        granularity="token" if block else fmt.granularity,
        group=0 if block else fmt.group,
        symmetric=fmt.symmetric,
        scale_dtype=names[fmt.scale_dtype],
        static=fmt.static,
    )


def rows(kind: str) -> np.ndarray:
    """Values of every size that a counter distinguishes."""
    x = np.random.default_rng(7).standard_normal((TOKENS, HEADS, DIM)).astype(np.float32)
    if kind == "large":
        x *= np.float32(4.0) ** np.arange(-2, 30, 1, dtype=np.float32)[:DIM]
    elif kind == "tiny":
        x *= np.float32(2.0) ** np.arange(-149, -117, 1, dtype=np.float32)[:DIM]
    elif kind == "fp16 edge":
        x *= np.float32(65504 * 8)
    elif kind == "poison":
        x[1, 0, 3], x[2, 1, 5], x[3, 0, 31], x[4] = np.nan, np.inf, -np.inf, np.float32(3e38)
    return x


def static_of(fmt: TensorFormat) -> SideScales | None:
    if not fmt.static:
        return None
    shape = {"head": (HEADS,), "channel": (HEADS, DIM)}.get(fmt.granularity, ())
    count = int(np.prod(shape))
    # Too small for some of the values, and another for each channel.
    scale = (torch.arange(1, count + 1, dtype=torch.float32) / 64).reshape(shape)
    zero = None if fmt.symmetric else codec.floor_cast(-scale * 3, fmt.scale_torch_dtype).float()
    return SideScales(scale.to(fmt.scale_torch_dtype), zero)


@pytest.mark.parametrize("kind", ["plain", "large", "tiny", "fp16 edge", "poison"])
@pytest.mark.parametrize("text", FORMATS)
def test_saturation_agrees_with_the_oracle(text: str, kind: str) -> None:
    fmt, x = TensorFormat.parse(text), rows(kind)
    static = static_of(fmt)
    given = {}
    if static is not None:
        given["static_scale"] = torch.as_tensor(static.scale).float().numpy()
        if static.zero is not None:
            given["static_zero"] = static.zero.numpy()
    expected = oracle_codec.encode(spec_of(fmt), x, **given)
    torch_rows = torch.from_numpy(x)
    encoded = codec.encode(fmt, torch_rows, static)
    elements, zeros = codec_stats.saturated(fmt, torch_rows, encoded.planes, static)
    assert np.array_equal(elements.numpy(), expected.saturated_elements)
    assert zeros == expected.saturated_zeros
    found = codec_stats.count(fmt, torch_rows, encoded.planes, static)
    assert (found.elements, found.saturated) == (x.size, expected.saturated)
    decoded = oracle_codec.decode(spec_of(fmt), expected.planes, DIM, **given)
    assert found.underflow == int(((decoded == 0) & (x != 0) & np.isfinite(x)).sum())
    flagged = np.isnan(x) if fmt.hides_nan else np.zeros(x.shape, bool)
    assert found.poisoned == int((np.isnan(decoded) | flagged).sum())
    assert codec_stats.count(fmt, torch_rows, static=static) == found


def test_the_cases_do_reach_every_counter() -> None:
    total = {kind: Counts() for kind in ("plain", "large", "tiny", "fp16 edge", "poison")}
    for kind in total:
        for text in FORMATS:
            fmt = TensorFormat.parse(text)
            total[kind] += codec_stats.count(fmt, torch.from_numpy(rows(kind)), static=static_of(fmt))
    assert total["large"].saturated > 0
    assert total["fp16 edge"].saturated_zeros > 0
    assert total["tiny"].underflow > 0
    assert total["poison"].poisoned > 0
    assert total["plain"].poisoned == 0


def test_saturation_by_hand() -> None:
    """Scale 0.5: 127 * 0.5 = 63.5 is the largest; 63.7 still rounds to code 127, 63.8 would be 128."""
    fmt = TensorFormat.parse("int8:tensor:static")
    x = torch.tensor([63.5, 63.7, 63.8, -63.8, torch.inf, torch.nan, 0.2, 0.0]).view(1, 1, 8)
    found = codec_stats.count(fmt, x, static=SideScales(torch.tensor(0.5)))
    assert found == Counts(elements=8, saturated=3, saturated_zeros=0, underflow=1, poisoned=1)
    assert found.share("saturated") == 3 / 8


def test_a_key_constant_of_600_under_a_unit_fp8_scale() -> None:
    fmt = TensorFormat.parse("fp8_e4m3:tensor:static")
    x = torch.ones(4, 1, 16)
    x[..., 3] = 600
    assert codec_stats.count(fmt, x, static=SideScales(torch.tensor(1.0))).saturated == 4
    assert codec_stats.count(fmt, x, static=SideScales(torch.tensor(600 / 448))).saturated == 0
    assert codec_stats.count(TensorFormat.parse("fp8_e4m3"), x).saturated == 0


def test_counts_add_up() -> None:
    assert Counts(4, 1, 1, 2, 0) + Counts(6, 0, 0, 1, 3) == Counts(10, 1, 1, 3, 3)
    assert Counts().share("underflow") == 0.0
