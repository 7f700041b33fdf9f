"""fp8, mxfp4, nvfp4 and cN codes equal the numpy oracle bit for bit, over every code and every kind of group.

Per-token and gN integers are in tests/core/test_codec_bits.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from core_support import Array, bits, floats, spec_of, to_numpy
from torch import Tensor

from kvport import CacheLayout, LayerScales, SideScales, TensorFormat, codec, codec_floats
from kvport.scales import resolve_scales
from kvport_conformance import inputs, oracle_codec

HEADS, DIM = 2, 64
SCALES = ("scale=fp32", "scale=bf16", "scale=fp16")
FP8 = ("fp8_e4m3", "fp8_e5m2")

TOKEN_FORMATS = [
    *(":".join(parts) for parts in itertools.product(FP8, ("token", "g16", "g32"), SCALES)),
    *(":".join(parts) for parts in itertools.product(FP8, ("tensor:static", "head:static", "channel:static"), SCALES)),
    "mxfp4",
    "nvfp4",
    "nvfp4:static",
]
CHANNEL_FORMATS = [
    *(":".join(parts) for parts in itertools.product(("int8", "int4", "int2"), ("c8", "c32"), ("sym", "asym"), SCALES)),
    *(":".join(parts) for parts in itertools.product(FP8, ("c16",), SCALES)),
]


# --- inputs ---------------------------------------------------------------------------------------------------------


def group_rows(dtype: str) -> Array:
    """(rows, 64) float32 groups of every kind: like keys and values, small, large, special, NaN of every payload."""
    parts = [
        inputs.key(1, (48, 1, DIM), dtype=dtype)[:, 0],
        inputs.value(2, (48, 1, DIM), dtype=dtype)[:, 0],
        inputs.round_to(inputs.values(3, (16, DIM), low=-3e-5, high=1e-5), dtype),
        inputs.round_to(inputs.values(4, (16, DIM), low=2.0**13, high=2.0**14), dtype),
        np.stack(list(inputs.special_rows(DIM, dtype=dtype).values())),
    ]
    # A special group of 16 beside ordinary ones.
    mixed = inputs.key(5, (len(parts[-1]), 1, DIM), dtype=dtype)[:, 0]
    mixed[:, 16:32] = parts[-1][:, :16]
    parts.append(mixed)
    if dtype == "float32":
        payloads = inputs.key(6, (6, 1, DIM))[:, 0]
        payloads[:, 40] = inputs.nan_payloads()
        parts.append(payloads)
        parts.append(magnitudes())
    return np.concatenate(parts)


def magnitudes() -> Array:
    """A row for every power of two that float32 has."""
    exponents = np.arange(-149, 128)
    with np.errstate(under="ignore", over="ignore"):
        rows = np.ldexp(inputs.values(7, (len(exponents), DIM), low=-1.0, high=1.0), exponents[:, None])
    return rows.astype(np.float32)


def as_tokens(rows: Array, dtype: str) -> Tensor:
    """Groups along the channels: (tokens, HEADS, DIM)."""
    rows = rows[: len(rows) // HEADS * HEADS]
    return torch.from_numpy(rows.reshape(-1, HEADS, DIM).copy()).to(getattr(torch, dtype))


def as_channels(rows: Array, dtype: str) -> Tensor:
    """The same groups along the tokens: pages (pages, 64 tokens, HEADS, DIM), each row one channel of one head."""
    per_page = HEADS * DIM
    rows = np.concatenate([rows, rows[: -len(rows) % per_page]])
    pages = rows.reshape(-1, HEADS, DIM, 64).transpose(0, 3, 1, 2)
    return torch.from_numpy(pages.copy()).to(getattr(torch, dtype))


@pytest.fixture(scope="module")
def rows() -> dict[str, Array]:
    return {dtype: group_rows(dtype) for dtype in inputs.FLOAT_DTYPES}


def static_of(fmt: TensorFormat) -> tuple[Array | None, SideScales | None]:
    """A scale for the oracle as it was given, and for the codec as a cache would resolve it."""
    if not fmt.static:
        return None, None
    shape = {"tensor": (), "block": (), "head": (HEADS,), "channel": (HEADS, DIM)}[fmt.granularity]
    low = {"fp8_e4m3": 0.004, "fp8_e5m2": 1e-4, "nvfp4": 7e-4}[fmt.code]
    scale = inputs.values(8, shape, low=low, high=3 * low)
    side = SideScales(torch.from_numpy(np.asarray(scale).copy()))
    layout = CacheLayout.uniform(layers=1, kv_heads=HEADS, head_dim=DIM, format=str(fmt), page_size=16)
    return scale, resolve_scales(layout, {0: LayerScales(side, side)})[0][0].key


def check_equal(fmt: TensorFormat, x: Tensor) -> dict[str, Tensor]:
    """Planes and decoded values of ``x`` (..., tokens, heads, dim) equal the oracle's bit for bit."""
    scale, static = static_of(fmt)
    flat = floats(x).reshape(-1, HEADS, DIM)
    expected = oracle_codec.encode(spec_of(fmt), flat, static_scale=scale)
    got = codec.encode(fmt, x, static)
    assert got.poisoned is None  # these formats keep poison visible
    assert set(got.planes) == set(expected.planes)
    for name, plane in got.planes.items():
        observed, wanted = to_numpy(plane), expected.planes[name]
        observed = observed.reshape(wanted.shape)
        assert observed.dtype == wanted.dtype
        differing = np.argwhere(bits(observed) != bits(wanted))
        assert not len(differing), f"{fmt} {name}: {len(differing)} differ, first at {differing[0]}"
    wanted = oracle_codec.decode(spec_of(fmt), expected.planes, DIM, static_scale=scale)
    same_floats(codec.decode(fmt, got.planes, static).numpy().reshape(wanted.shape), wanted)
    return got.planes


def same_floats(got: Array, wanted: Array) -> None:
    """Equal bit for bit, the sign of zero included; any NaN is a NaN."""
    nan = np.isnan(wanted)
    assert (np.isnan(got) == nan).all()
    assert (bits(np.where(nan, np.float32(0), got)) == bits(np.where(nan, np.float32(0), wanted))).all()


# --- encoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_codes_and_scales_equal_the_oracle(name: str, rows: dict[str, Array]) -> None:
    for dtype in inputs.FLOAT_DTYPES:
        check_equal(TensorFormat.parse(name), as_tokens(rows[dtype], dtype))


@pytest.mark.parametrize("name", CHANNEL_FORMATS)
def test_channel_groups_equal_the_oracle(name: str, rows: dict[str, Array]) -> None:
    for dtype in inputs.FLOAT_DTYPES:
        check_equal(TensorFormat.parse(name), as_channels(rows[dtype], dtype))


@pytest.mark.parametrize("name", ["int2:c8:asym:scale=fp16", "int8:c16", "fp8_e4m3:c32"])
def test_channel_groups_are_the_token_groups_of_the_transpose(name: str, rows: dict[str, Array]) -> None:
    """cN over tokens is gN over channels with tokens and channels exchanged: said without the oracle."""
    fmt = TensorFormat.parse(name)
    x = as_channels(rows["float32"], "float32")
    along = TensorFormat(fmt.code, "group", fmt.group, fmt.symmetric, False, fmt.scale_dtype)
    turned = codec.encode(along, x.transpose(-1, -3)).planes
    planes = codec.encode(fmt, x).planes
    assert planes["scale"].shape == (*x.shape[:1], 64 // fmt.group, HEADS, DIM)
    for name in set(planes) - {"codes"}:
        assert torch.equal(planes[name].nan_to_num(-1.0), turned[name].transpose(-1, -3).nan_to_num(-1.0))
    back = codec.decode(along, turned).transpose(-1, -3)
    same_floats(codec.decode(fmt, planes).numpy(), back.numpy())


def test_channel_groups_do_not_depend_on_the_page_size(rows: dict[str, Array]) -> None:
    x = as_channels(rows["float32"], "float32")[:2]
    for name in ("int4:c8:asym", "fp8_e5m2:c16"):
        fmt = TensorFormat.parse(name)
        whole = codec.encode(fmt, x).planes
        for size in (16, 32):
            cut = codec.encode(fmt, x.reshape(-1, size, HEADS, DIM)).planes
            for plane, expected in whole.items():
                assert torch.equal(_raw(cut[plane].reshape(expected.shape)), _raw(expected))


@pytest.mark.parametrize("name", [*FP8, "fp8_e4m3:g32:scale=bf16", "mxfp4", "nvfp4", "nvfp4:static"])
def test_a_token_encodes_the_same_however_it_is_split_and_strided(name: str, rows: dict[str, Array]) -> None:
    fmt, x = TensorFormat.parse(name), as_tokens(rows["float32"], "float32")
    _, static = static_of(fmt)
    whole = codec.encode(fmt, x, static).planes
    apart = [codec.encode(fmt, part, static).planes for part in x.split([1, 7, 30, x.shape[0] - 38])]
    padded = torch.full((2 * x.shape[0], HEADS + 2, DIM + 5), torch.nan)[::2, 1 : HEADS + 1, 3 : DIM + 3]
    padded.copy_(x)
    strided = codec.encode(fmt, padded, static).planes
    for plane, expected in whole.items():
        assert torch.equal(_raw(torch.cat([part[plane] for part in apart])), _raw(expected))
        assert torch.equal(_raw(strided[plane]), _raw(expected))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# --- every code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, reference", [("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)]
)
def test_all_256_fp8_codes_decode(name: str, reference: Any) -> None:
    fmt = TensorFormat.parse(name)
    every = np.arange(256, dtype=np.uint8).reshape(4, 1, DIM)
    values = every.view(reference).astype(np.float32)
    for scale in (1.0, 0.3, 2.0**-130, 1e35):
        scales = torch.full((4, 1), scale)
        got = codec.decode(fmt, {"codes": torch.from_numpy(every), "scale": scales}).numpy()
        with np.errstate(over="ignore"):
            same_floats(got, values * np.float32(scale))
        planes = {"codes": every, "scale": scales.numpy()}
        same_floats(got, oracle_codec.decode(spec_of(fmt), planes, DIM))


@pytest.mark.parametrize("name", ["int8", "int8:asym"])
def test_all_256_int8_codes_decode(name: str) -> None:
    fmt = TensorFormat.parse(name)
    every = np.arange(256, dtype=np.uint8)
    codes = torch.from_numpy(every.view(np.int8) if fmt.symmetric else every).reshape(4, 1, DIM)
    planes = {"codes": codes, "scale": torch.full((4, 1), 0.3), "zero": torch.full((4, 1), -7.0)}
    if fmt.symmetric:
        del planes["zero"]
    scale, zero = np.float32(0.3), np.float32(0.0 if fmt.symmetric else -7.0)
    wanted = np.array([np.float32(np.float32(c) * scale) + zero for c in codes.flatten().tolist()], np.float32)
    same_floats(codec.decode(fmt, planes).numpy().reshape(-1), wanted)


E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
NIBBLES = {
    "int4": [*range(8), *range(-8, 0)],
    "int4:asym": list(range(16)),
    "mxfp4": E2M1.tolist(),
    "nvfp4": E2M1.tolist(),
    "nvfp4:static": E2M1.tolist(),
}


@pytest.mark.parametrize("name", NIBBLES)
def test_all_pairs_of_bytes_of_four_bit_codes_decode(name: str) -> None:
    """Every byte next to every byte: low nibble first, each code as its own table says."""
    fmt = TensorFormat.parse(name)
    table = np.asarray(NIBBLES[name], np.float32)
    first, second = (grid.reshape(-1) for grid in np.meshgrid(np.arange(256), np.arange(256), indexing="ij"))
    pairs = np.stack([first, second], -1).astype(np.uint8)  # (65536, 2)
    nibbles = np.stack([pairs & 15, pairs >> 4], -1).reshape(-1, 4)
    codes = torch.from_numpy(np.tile(pairs, (1, 8)).reshape(-1, 1, 16))  # 32 channels
    rows, scale, zero = len(codes), np.float32(0.3), np.float32(-7.0)
    static = None
    if name == "mxfp4":
        planes = {"codes": codes, "scale": torch.full((rows, 1, 1), 124, dtype=torch.uint8)}
        scale = np.float32(2.0**-3)
    elif fmt.kind == "nv":
        planes = {"codes": codes, "scale": torch.full((rows, 1, 2), 0x3C, dtype=torch.uint8)}  # 1.5
        scale = np.float32(np.float32(1.5) * np.float32(0.3))
        if fmt.static:
            static = SideScales(torch.tensor(0.3))
        else:
            planes["tensor_scale"] = torch.full((rows, 1), 0.3)
    else:
        planes = {"codes": codes, "scale": torch.full((rows, 1), 0.3)}
        if not fmt.symmetric:
            planes["zero"] = torch.full((rows, 1), -7.0)
    wanted = table[nibbles] * scale
    if name == "int4:asym":
        wanted = wanted + zero
    got = codec.decode(fmt, planes, static).numpy()
    same_floats(got.reshape(rows, 8, 4), np.repeat(wanted[:, None], 8, axis=1))
    for index in range(0, rows, 4099):  # and one code at a time, by hand
        low, high = int(pairs[index, 0]) & 15, int(pairs[index, 0]) >> 4
        assert got[index, 0, 0] == wanted[index, 0] == table[low] * scale + (zero if name == "int4:asym" else 0)
        assert got[index, 0, 1] == table[high] * scale + (zero if name == "int4:asym" else 0)


@pytest.mark.parametrize("symmetry", ["sym", "asym"])
def test_all_bytes_of_two_bit_codes_decode(symmetry: str) -> None:
    fmt = TensorFormat.parse(f"int2:{symmetry}")
    table = [0, 1, -2, -1] if fmt.symmetric else [0, 1, 2, 3]
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 1, DIM)
    planes = {"codes": codes, "scale": torch.full((4, 1), 0.3), "zero": torch.full((4, 1), -7.0)}
    got = codec.decode(fmt, planes).numpy().reshape(256, 4)
    scale, zero = np.float32(0.3), np.float32(0.0 if fmt.symmetric else -7.0)
    for byte in range(256):
        wanted = [np.float32(table[byte >> (2 * i) & 3]) * scale + zero for i in range(4)]
        assert got[byte].tolist() == wanted


def test_every_e8m0_scale_with_every_code() -> None:
    """256 exponents times 16 codes, also those that no encoder emits; 0xFF poisons its block."""
    every = np.arange(256, dtype=np.uint8)
    # Within 32 channels every code occurs: bytes 0x10, 0x32, ... hold the codes 0, 1, 2, 3, ... in order.
    ordered = np.tile(np.arange(8, dtype=np.uint8) * 0x22 + 0x10, 2)
    codes = np.broadcast_to(ordered, (256, 1, 16)).copy()
    planes = {"codes": torch.from_numpy(codes), "scale": torch.from_numpy(every.reshape(256, 1, 1))}
    got = codec.decode(TensorFormat.parse("mxfp4"), planes).numpy()
    power = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (np.tile(E2M1.astype(np.float64), 2)[None, None] * power[:, None, None]).astype(np.float32)
    same_floats(got, wanted)
    assert np.isnan(got[255]).all()
    assert got[0, 0, 7] == 6 * 2.0**-127
    assert got[254, 0, 2] == 2.0**127


@pytest.mark.parametrize("static", [False, True])
def test_every_e4m3_block_scale_with_every_code(static: bool) -> None:
    every = np.arange(256, dtype=np.uint8)
    ordered = np.arange(8, dtype=np.uint8) * 0x22 + 0x10
    codes = np.broadcast_to(ordered, (256, 1, 8)).copy()
    for tensor_scale in (1.0, 0.3, 7e-5, 3e36):
        planes = {"codes": torch.from_numpy(codes), "scale": torch.from_numpy(every.reshape(256, 1, 1))}
        if not static:
            planes["tensor_scale"] = torch.full((256, 1), tensor_scale)
        fmt = TensorFormat.parse("nvfp4:static" if static else "nvfp4")
        got = codec.decode(fmt, planes, SideScales(torch.tensor(tensor_scale)) if static else None).numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            block = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(tensor_scale)
            same_floats(got, E2M1[None, None] * block[:, None, None])


def test_every_bfloat16_rounds_to_the_nearest_fp8_and_e2m1() -> None:
    """All finite 16-bit inputs and both float32 neighbours of each, against ml_dtypes (which does not saturate)."""
    bf16 = np.arange(2**16, dtype=np.uint32)
    x = (bf16 << 16).view(np.float32)
    x = x[np.isfinite(x)]
    x = np.concatenate([x, np.nextafter(x, np.float32(3e38)), np.nextafter(x, np.float32(-3e38))])
    for name, dtype in (("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)):
        fmt = TensorFormat.parse(name)
        got = codec_floats.encode_fp8(fmt, torch.from_numpy(x)).numpy()
        largest = np.float32(ml_dtypes.finfo(dtype).max)
        assert (got == np.clip(x, -largest, largest).astype(dtype).view(np.uint8)).all()
    got = codec_floats.encode_e2m1(torch.from_numpy(x)).numpy()
    assert (got == x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)).all()


@pytest.mark.parametrize("name, largest", [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_saturates_and_keeps_nan(name: str, largest: float) -> None:
    """Casting alone gives NaN or infinity for large values on some library versions; here they saturate."""
    fmt = TensorFormat.parse(f"{name}:tensor:static")
    x = torch.tensor([500.0, 1e6, torch.inf, largest * 1.01, -1e30, -torch.inf, torch.nan, -0.0]).reshape(1, 1, 8)
    planes = codec.encode(fmt, x, SideScales(torch.tensor(1.0))).planes
    back = codec.decode(fmt, planes, SideScales(torch.tensor(1.0))).flatten()
    wanted = [500.0 if name == "fp8_e5m2" else 448.0, min(1e6, largest), largest, largest, -largest, -largest]
    assert back[:6].tolist() == [512.0 if w == 500.0 else w for w in wanted]
    assert back[6].isnan()
    assert (back[7], back[7].signbit()) == (0.0, True)


def test_dynamic_fp8_uses_its_whole_range() -> None:
    x = torch.from_numpy(inputs.values(9, (64, 1, DIM), low=-0.01, high=0.01))
    for name, top in (("fp8_e4m3", 0x7E), ("fp8_e5m2", 0x7B)):
        codes = codec.encode(TensorFormat.parse(name), x).planes["codes"]
        assert ((codes & 0x7F).amax(-1) == top).all()


# --- blocks by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "amax, exponent, back",
    [
        (6.0, 127, 6.0),
        (4.0, 127, 4.0),
        (3.999, 126, 3.0),  # 3.999 / 0.5 is beyond 6 and saturates, as the specification says
        (8.0, 128, 8.0),
        (7.999, 127, 6.0),
        (1.0, 125, 1.0),
        (2.0**-125, 0, 2.0**-125),
        (2.0**-126, 0, 2.0**-126),
        (2.0**-149, 0, 0.0),
        (0.0, 0, 0.0),
    ],
)
def test_mxfp4_exponent_is_the_floor_of_log2_minus_two(amax: float, exponent: int, back: float) -> None:
    x = torch.zeros(1, 1, 32)
    x[..., 5] = -amax
    planes = codec.encode(TensorFormat.parse("mxfp4"), x).planes
    assert planes["scale"].item() == exponent
    assert codec.decode(TensorFormat.parse("mxfp4"), planes)[0, 0, 5].item() == -back


def test_nvfp4_by_hand() -> None:
    """A block at the token's maximum, one a quarter of it, one of zeros and one too small for any block scale."""
    x = torch.zeros(1, 1, 64)
    x[..., 0] = 2688.0  # 6 * 448: the tensor scale is 1
    x[..., 16:20] = torch.tensor([672.0, -336.0, 111.0, 29.0])  # block scale 672 / 6 = 112
    x[..., 48] = 2.0**-12  # below 6 * 2**-9 / 4: rounds to code 0 under the smallest block scale
    planes = codec.encode(TensorFormat.parse("nvfp4"), x).planes
    assert planes["tensor_scale"].item() == 1.0
    assert planes["scale"].view(torch.float8_e4m3fn).float().flatten().tolist() == [448.0, 112.0, 2.0**-9, 2.0**-9]
    back = codec.decode(TensorFormat.parse("nvfp4"), planes)
    wanted = torch.zeros(64)
    wanted[0] = 2688.0
    wanted[16:20] = torch.tensor([672.0, -336.0, 112.0, 56.0])  # 29 / 112 = 0.259 -> 0.5
    assert torch.equal(back[0, 0], wanted)


@pytest.mark.parametrize(
    "name, hit",
    [
        ("fp8_e4m3", slice(0, 64)),
        ("fp8_e5m2:g16", slice(32, 48)),
        ("mxfp4", slice(32, 64)),
        ("nvfp4", slice(0, 64)),
        ("nvfp4:static", slice(32, 48)),
    ],
)
def test_poison_spoils_its_own_group_and_nothing_else(name: str, hit: slice) -> None:
    fmt = TensorFormat.parse(name)
    _, static = static_of(fmt)
    x = torch.from_numpy(inputs.key(10, (3, HEADS, DIM)))
    clean = codec.decode(fmt, codec.encode(fmt, x, static).planes, static)
    for poison in (torch.nan, torch.inf, -torch.inf):
        bad = x.clone()
        bad[1, 1, 40] = poison
        planes = codec.encode(fmt, bad, static).planes
        dirty = codec.decode(fmt, planes, static)
        where = torch.zeros_like(x, dtype=torch.bool)
        where[1, 1, hit] = True
        assert dirty[where].isnan().all()
        assert torch.equal(dirty[~where], clean[~where])
        codes = codec.unpack(fmt, planes["codes"])
        assert (codes[where] == 0).all()


@pytest.mark.parametrize("name", ["int2:c8:asym", "int8:c16:scale=fp16", "fp8_e4m3:c8"])
def test_poison_of_a_channel_group_spans_its_tokens(name: str) -> None:
    fmt = TensorFormat.parse(name)
    x = torch.from_numpy(inputs.key(11, (32, HEADS, DIM)))
    bad = x.clone()
    bad[9, 1, 7] = torch.nan
    clean, dirty = (codec.decode(fmt, codec.encode(fmt, rows).planes) for rows in (x, bad))
    first = 9 // fmt.group * fmt.group
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[first : first + fmt.group, 1, 7] = True
    assert dirty[hit].isnan().all()
    assert torch.equal(dirty[~hit], clean[~hit])


@pytest.mark.parametrize("name", [*TOKEN_FORMATS, *CHANNEL_FORMATS])
def test_the_round_trip_keeps_its_promise(name: str, rows: dict[str, Array]) -> None:
    fmt = TensorFormat.parse(name)
    scale, static = static_of(fmt)
    make = as_channels if fmt.sealed_only else as_tokens
    x = make(rows["float32"], "float32").reshape(-1, HEADS, DIM)
    planes = codec.encode(fmt, x, static).planes
    bound = oracle_codec.round_trip_bound(
        spec_of(fmt), x.numpy(), {n: to_numpy(p) for n, p in planes.items()}, static_scale=scale
    )
    promised = np.isfinite(bound)
    assert promised.mean() > (0.1 if fmt.static else 0.5)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(x.numpy().astype(np.float64) - codec.decode(fmt, planes, static).numpy())
    assert (error[promised] <= bound[promised]).all()


@pytest.mark.parametrize("name", ["fp8_e4m3:tensor:static", "nvfp4:static", "fp8_e5m2:channel:static:scale=fp16"])
def test_static_float_codes_use_the_given_scale_and_have_no_scale_plane_of_their_own(name: str) -> None:
    fmt = TensorFormat.parse(name)
    _, static = static_of(fmt)
    assert static is not None
    x = torch.from_numpy(inputs.value(12, (20, HEADS, DIM)))
    planes = codec.encode(fmt, x, static).planes
    assert set(planes) == ({"codes", "scale"} if fmt.kind == "nv" else {"codes"})
    once = codec.decode(fmt, planes, static)
    twice = codec.decode(fmt, planes, SideScales(static.scale * 2))
    assert torch.equal(once * 2, twice)
    assert once.abs().max() > 0
