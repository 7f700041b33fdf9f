"""kvport.codec equals the numpy oracle bit for bit, for every format, input and split."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from core_support import SCALE_NAMES, bits, floats, spec_of, to_numpy
from torch import Tensor

from kvport import CacheLayout, LayerScales, SideScales, TensorFormat, codec
from kvport.formats import DTYPES
from kvport.scales import resolve_scales
from kvport_conformance import inputs, oracle_codec

HEADS, DIM = 3, 64
INTEGERS = ("int8", "int4", "int2")
FLOATS = ("fp32", "fp16", "bf16")


def _formats() -> list[str]:
    names = list(FLOATS)
    for code, granularity, symmetry, scale in itertools.product(
        INTEGERS,
        ("token", "g16", "g32", "g64", "tensor:static", "head:static", "channel:static"),
        ("sym", "asym"),
        DTYPES,
    ):
        names.append(str(TensorFormat.parse(f"{code}:{granularity}:{symmetry}:scale={scale}")))
    return names


FORMATS = _formats()


def rows_of(dtype: str) -> Tensor:
    """Every kind of row: like real keys and values, special groups, NaN of every payload. (tokens, HEADS, DIM)."""
    parts = [
        inputs.key(11, (40, HEADS, DIM), dtype=dtype),
        inputs.value(12, (40, HEADS, DIM), dtype=dtype),
        inputs.round_to(inputs.values(13, (20, HEADS, DIM), low=-3e-3, high=1e-3), dtype),
        inputs.round_to(inputs.values(14, (20, HEADS, DIM), low=2.0**14, high=2.0**15), dtype),
    ]
    special = np.stack(list(inputs.special_rows(DIM, dtype=dtype).values()))
    special = np.concatenate([special, special[: -len(special) % HEADS]])
    parts.append(special.reshape(-1, HEADS, DIM))
    # Each special row also beside ordinary ones: a group of 16 next to finite groups of the same row.
    mixed = inputs.key(15, (len(special), HEADS, DIM), dtype=dtype)
    mixed[:, 1, 16:32] = special[:, :16]
    parts.append(mixed)
    if dtype == "float32":
        payloads = inputs.key(16, (6, HEADS, DIM))
        payloads[:, 2, 40] = inputs.nan_payloads()
        parts.append(payloads)
    x = np.concatenate(parts)
    return torch.from_numpy(x).to(getattr(torch, dtype))


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    return {dtype: rows_of(dtype) for dtype in inputs.FLOAT_DTYPES}


def static_of(fmt: TensorFormat) -> tuple[Any, Any, SideScales | None]:
    """(scale, zero) for the oracle as they were given, and for the codec as the cache would resolve them."""
    if not fmt.static:
        return None, None, None
    shape = {"tensor": (), "head": (HEADS,), "channel": (HEADS, DIM)}[fmt.granularity]
    unit = 2.0 ** (8 - fmt.bits)
    scale = inputs.values(21, shape, low=0.02 * unit, high=0.09 * unit)
    zero = None if fmt.symmetric else inputs.values(22, shape, low=-6.0, high=-1.0)
    side = SideScales(torch.from_numpy(scale.copy()), None if zero is None else torch.from_numpy(zero.copy()))
    layout = CacheLayout.uniform(layers=1, kv_heads=HEADS, head_dim=DIM, format=str(fmt), page_size=16)
    resolved = resolve_scales(layout, {0: LayerScales(side, side)})[0][0].key
    return scale, zero, resolved


def check_equal(fmt: TensorFormat, x: Tensor) -> None:
    scale, zero, static = static_of(fmt)
    expected = oracle_codec.encode(spec_of(fmt), floats(x), static_scale=scale, static_zero=zero)
    got = codec.encode(fmt, x, static)
    assert set(got.planes) == set(expected.planes)
    for name, plane in got.planes.items():
        observed, wanted = to_numpy(plane), expected.planes[name]
        assert observed.dtype == wanted.dtype
        if not fmt.quantized:  # a float page keeps NaN; which NaN is the processor's choice
            observed, wanted = _one_nan(fmt, observed), _one_nan(fmt, wanted)
        differing = np.argwhere(bits(observed) != bits(wanted))
        assert not len(differing), f"{fmt} {name}: {len(differing)} differ, first at {differing[0]}"
    flagged = np.zeros(x.shape[:1], np.bool_) if got.poisoned is None else got.poisoned.numpy()
    assert (flagged == expected.flagged.any(axis=-1)).all()
    back = codec.decode(fmt, got.planes, static).numpy()
    wanted = oracle_codec.decode(spec_of(fmt), expected.planes, DIM, static_scale=scale, static_zero=zero)
    assert_decoded_equal(back, wanted)


def _one_nan(fmt: TensorFormat, plane: Any) -> Any:
    value = torch.from_numpy(plane.copy())
    value = value if value.dtype == torch.float32 else value.view(DTYPES[fmt.code])
    return to_numpy(torch.where(value.isnan(), torch.full_like(value, torch.nan), value))


def assert_decoded_equal(got: Any, wanted: Any) -> None:
    nan = np.isnan(wanted)
    assert (np.isnan(got) == nan).all()
    assert (bits(np.where(nan, np.float32(0), got)) == bits(np.where(nan, np.float32(0), wanted))).all()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_equal_the_oracle(name: str, rows: dict[str, Tensor]) -> None:
    for dtype in inputs.FLOAT_DTYPES:
        check_equal(TensorFormat.parse(name), rows[dtype])


@pytest.mark.parametrize("scale", DTYPES)
@pytest.mark.parametrize("code", INTEGERS)
@pytest.mark.parametrize("symmetry", ["sym", "asym"])
def test_scales_at_the_ends_of_their_dtype(code: str, symmetry: str, scale: str) -> None:
    """Ranges of every power of two: scales clamp at the largest finite and smallest normal number, zeros too."""
    exponents = np.arange(-149, 128)
    pattern = inputs.values(31, (len(exponents), 1, DIM), low=-1.0, high=1.0)
    shifted = inputs.values(32, (len(exponents), 1, DIM), low=1.0, high=1.5)
    with np.errstate(under="ignore", over="ignore"):
        x = np.concatenate([np.ldexp(pattern, exponents[:, None, None]), np.ldexp(shifted, exponents[:, None, None]),
                            -np.ldexp(shifted, exponents[:, None, None])]).astype(np.float32)  # fmt: skip
    x = np.repeat(x[np.isfinite(x).all(axis=(1, 2))], HEADS, axis=1)
    check_equal(TensorFormat.parse(f"{code}:g16:{symmetry}:scale={scale}"), torch.from_numpy(x))


@pytest.mark.parametrize("name", ["int8", "int4:g16", "int4:g16:asym:scale=fp16", "int2:g32:asym:scale=bf16", "bf16"])
def test_a_token_encodes_the_same_however_it_is_split(name: str, rows: dict[str, Tensor]) -> None:
    fmt, x = TensorFormat.parse(name), rows["float32"]
    whole = codec.encode(fmt, x).planes
    for sizes in ([1] * x.shape[0], [7] * (x.shape[0] // 7) + [x.shape[0] % 7], [x.shape[0] - 1, 1]):
        parts = [codec.encode(fmt, part).planes for part in x.split(sizes)]
        for plane, expected in whole.items():
            joined = torch.cat([part[plane] for part in parts])
            assert torch.equal(_raw(joined), _raw(expected)), (name, plane, sizes[:2])


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", ["fp16", "int8", "int8:asym", "int4:g16", "int4:g32:asym:scale=fp16", "int2:g16"])
def test_strides_do_not_matter(name: str, rows: dict[str, Tensor]) -> None:
    fmt = TensorFormat.parse(name)
    x = rows["float32"][:60]
    wanted = codec.encode(fmt, x).planes
    heads_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    channels_first = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    padded = torch.full((120, HEADS + 2, DIM + 5), torch.nan)[::2, 1 : HEADS + 1, 3 : DIM + 3]
    padded.copy_(x)
    for view in (heads_first, channels_first, padded):
        assert not view.is_contiguous()
        assert torch.equal(_raw(view), _raw(x))
        for plane, expected in wanted.items():
            assert torch.equal(_raw(codec.encode(fmt, view).planes[plane]), _raw(expected))


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in FLOATS])
def test_any_code_and_any_scale_decodes_as_the_oracle_says(name: str) -> None:
    """Codes and scales that no encoder produces: every byte, -2**(b-1), negative and huge scales, zeros without use."""
    fmt = TensorFormat.parse(name)
    scale, zero, static = static_of(fmt)
    wanted = oracle_codec.plane_shapes(spec_of(fmt), 32, HEADS, DIM)
    planes = {}
    for index, (plane, (shape, dtype)) in enumerate(wanted.items()):
        words = inputs.words(inputs.derive("decode", name, index), int(np.prod(shape))).reshape(shape)
        if plane == "codes":
            planes[plane] = (words & np.uint64(0xFF)).astype(np.uint8).view(dtype)
            planes[plane].reshape(-1)[:256] = np.arange(256, dtype=np.uint8).view(dtype)
        else:
            value = np.ldexp(inputs.values(index, shape), (words % np.uint64(24)).astype(np.int32) - 12)
            value = value.astype(np.float32)
            small = oracle_codec.SCALE_DTYPES[SCALE_NAMES[fmt.scale_dtype]]
            planes[plane] = value if small is None else small.encode(value)
    tensors = {n: torch.from_numpy(p.copy()) for n, p in planes.items()}
    tensors = {n: t.view(fmt.scale_torch_dtype) if t.dtype == torch.uint16 else t for n, t in tensors.items()}
    got = codec.decode(fmt, tensors, static).numpy()
    assert_decoded_equal(got, oracle_codec.decode(spec_of(fmt), planes, DIM, static_scale=scale, static_zero=zero))


@pytest.mark.parametrize("code", INTEGERS)
def test_encoders_never_emit_the_smallest_code_and_decoders_take_it(code: str, rows: dict[str, Tensor]) -> None:
    fmt = TensorFormat.parse(code)
    lowest = -(2 ** (fmt.bits - 1))
    emitted = codec.unpack(fmt, codec.encode(fmt, rows["float32"]).planes["codes"])
    assert emitted.min() == lowest + 1
    assert emitted.max() == -lowest - 1
    codes = codec.pack(fmt, torch.full((1, 1, 8), float(lowest)))
    planes = {"codes": codes, "scale": torch.full((1, 1), 0.375)}
    assert torch.equal(codec.decode(fmt, planes), torch.full((1, 1, 8), lowest * 0.375))


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in FLOATS])
def test_round_trip_stays_within_its_promise(name: str, rows: dict[str, Tensor]) -> None:
    fmt = TensorFormat.parse(name)
    scale, zero, static = static_of(fmt)
    x = rows["float32"]
    planes = codec.encode(fmt, x, static).planes
    bound = oracle_codec.round_trip_bound(
        spec_of(fmt), x.numpy(), {n: to_numpy(p) for n, p in planes.items()}, static_scale=scale, static_zero=zero
    )
    promised = np.isfinite(bound)
    assert promised[:80].mean() > (0.2 if fmt.static else 0.99)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(x.numpy().astype(np.float64) - codec.decode(fmt, planes, static).numpy())
    assert (error[promised] <= bound[promised]).all()


def test_one_poisoned_channel_reaches_its_own_group_and_nothing_else() -> None:
    x = torch.from_numpy(inputs.key(41, (5, HEADS, DIM)))
    for poison in (float("nan"), float("inf"), float("-inf")):
        bad = x.clone()
        bad[2, 1, 35] = poison
        for name, reach in (("int8", slice(0, DIM)), ("int4:g16:asym", slice(32, 48)), ("int2:g32", slice(32, 64))):
            fmt = TensorFormat.parse(name)
            clean, dirty = (codec.decode(fmt, codec.encode(fmt, rows).planes) for rows in (x, bad))
            hit = torch.zeros_like(x, dtype=torch.bool)
            hit[2, 1, reach] = True
            assert dirty[hit].isnan().all()
            assert torch.equal(dirty[~hit], clean[~hit])
