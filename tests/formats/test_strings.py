"""Format strings: every row of the table parses back to itself, and what cannot be is refused with its facts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvport import CacheFormat, CacheLayout, FormatError, LayerSpec, LayoutError, TensorFormat
from kvport.formats import CODES, DTYPES, IDENTITY_VERSION

KIVI = "k=int2:c32:asym:scale=fp16,v=int2:g32:asym:scale=fp16,recent=128"

#: What one may write -> what it prints. The left column has every row of the table in docs/formats.md.
CANONICAL = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "int8": "int8",
    "int8:token": "int8",
    "int8:sym": "int8",
    "int8:scale=fp32": "int8",
    "int8:scale=float32": "int8",
    "k=int8,v=int8": "int8",
    "int4:g64": "int4:g64",
    "int8:g128:scale=fp16": "int8:g128:scale=fp16",
    "int8:scale=float16:g128": "int8:g128:scale=fp16",
    "k=int4:g64,v=int8:token": "k=int4:g64,v=int8",
    "v=int8,k=int4:g64": "k=int4:g64,v=int8",
    " k=int4:g64 , v=int8 ": "k=int4:g64,v=int8",
    KIVI: KIVI,
    "kivi2": KIVI,
    "int8:channel:static:scale=bf16": "int8:channel:static:scale=bf16",
    "int8:scale=bfloat16:static:channel": "int8:channel:static:scale=bf16",
    "int4:static:asym:head": "int4:head:asym:static",
    "fp8_e4m3:tensor:static": "fp8_e4m3:tensor:static",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2:g32:scale=bf16": "fp8_e5m2:g32:scale=bf16",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "nvfp4:static": "nvfp4:static",
    "int8,sink=4,recent=128": "int8,sink=4,recent=128",
    "int8,recent=128,sink=4": "int8,sink=4,recent=128",
    "int8,sink=0,recent=0": "int8",
    "int8,recent=128:fp8_e4m3": "int8,recent=128:fp8_e4m3",
    "int8,sink=4,recent=0:fp8_e4m3": "int8,sink=4,recent=0:fp8_e4m3",
    "int2:c16,recent=0:int8:g32:scale=fp16": "int2:c16,recent=0:int8:g32:scale=fp16",
    "latent=int8:g128,rope=bf16": "latent=int8:g128,rope=bf16",
    "rope=bf16,latent=int8:g128,recent=3": "latent=int8:g128,rope=bf16,recent=3",
    "int4:g64,rotate=7": "int4:g64,rotate=7",
    "rotate=0,recent=2,k=int8,v=bf16": "k=int8,v=bf16,recent=2,rotate=0",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_a_format_prints_canonically_and_parses_back_to_itself(text: str) -> None:
    fmt = CacheFormat.parse(text)
    assert str(fmt) == CANONICAL[text]
    again = CacheFormat.parse(str(fmt))
    assert again == fmt
    assert hash(again) == hash(fmt)
    assert again.identity() == fmt.identity()
    assert again.digest() == fmt.digest()
    assert CacheFormat.parse(fmt) is fmt


def test_what_the_canonical_strings_mean() -> None:
    kivi = CacheFormat.parse("kivi2")
    assert kivi.key == TensorFormat("int2", "channel_group", 32, symmetric=False, scale_dtype="fp16")
    assert kivi.value == TensorFormat("int2", "group", 32, symmetric=False, scale_dtype="fp16")
    assert (kivi.sink, kivi.recent, kivi.near, kivi.rotate) == (0, 128, None, None)
    assert CacheFormat.parse("int8,recent=9:fp8_e4m3").near == TensorFormat("fp8_e4m3")
    mla = CacheFormat.parse("latent=int8:g128,rope=bf16")
    assert (mla.key, mla.value, mla.rope) == (mla.key, mla.key, TensorFormat("bf16"))
    block = TensorFormat.parse("nvfp4")
    assert (block.granularity, block.group) == ("block", 16)
    assert TensorFormat.parse("mxfp4").group == 32


# Each refusal with the facts that its message must give: what was read, what is allowed or what to do.
REFUSED = {
    "int3": ["'int3'", "int2", "int4", "nvfp4"],
    "INT8": ["'INT8'", "int8"],
    "": ["''", "int8"],
    "int8:g0": ["'g0'", "gN"],
    "int8:c0": ["'c0'", "cN"],
    "int8:g-4": ["'g-4'"],
    "int8:per_token": ["'per_token'", "token", "channel"],
    "int8:g16:g32": ["granularity twice"],
    "int8:sym:asym": ["symmetry twice"],
    "int8:static:static": ["static twice"],
    "int8:scale=fp16:scale=fp16": ["scale twice"],
    "int8:scale=fp64": ["'fp64'", "fp32", "bf16", "fp16"],
    "int8:tensor": ["'int8:tensor:static'", "token or gN"],
    "int8:head": ["'int8:head:static'"],
    "int8:channel": ["'int8:channel:static'"],
    "int8:static": ["tensor, head or channel", "'token'"],
    "int8:g16:static": ["tensor, head or channel", "'g16'"],
    "int8:c16:static": ["'c16'"],
    "bf16:g32": ["bf16", "not quantized"],
    "fp32:asym": ["fp32", "not quantized"],
    "fp16:scale=fp16": ["fp16", "not quantized"],
    "bf16:tensor:static": ["bf16", "not quantized"],
    "fp8_e4m3:asym": ["fp8_e4m3", "integer codes"],
    "mxfp4:g16": ["mxfp4", "block scales"],
    "mxfp4:static": ["mxfp4", "nvfp4"],
    "nvfp4:scale=fp16": ["nvfp4", "block scales"],
    "nvfp4:tensor:static": ["nvfp4", "block scales"],
    "k=int8": ["both k= and v="],
    "v=int8": ["both k= and v="],
    "rope=bf16": ["latent= and rope="],
    "latent=int8": ["latent= and rope="],
    "k=int8,v=int8,rope=bf16": ["both latent= and rope="],
    "int8,k=int4": ["one code for K and V"],
    "int8,int4": ["its code twice"],
    "k=int8,k=int8,v=int8": ["k= twice"],
    "int8,recent=1,recent=2": ["recent= twice"],
    "int8,sink=1,sink=1": ["sink= twice"],
    "int8,rotate=1,rotate=1": ["rotate= twice"],
    "int8,recent": ["its code twice"],
    "recent": ["unknown code 'recent'"],
    "int8,recent=": ["recent=", "number of tokens", "''"],
    "int8,recent=-1": ["recent=", "'-1'"],
    "int8,sink=four": ["sink=", "'four'"],
    "int8,sink=4:bf16": ["'sink=4:bf16'", "recent=N:CODE"],
    "int8,recent=4:int3": ["'int3'"],
    "int8,recent=4:int8:c16": ["int8:c16", "per-token"],
    "int8,recent=4:int8:tensor:static": ["int8:tensor:static", "per-token"],
    "int8,recent=0:bf16": ["near", "sink= or recent="],
    "bf16,recent=4": ["bf16", "full precision already"],
    "fp32,sink=4": ["fp32", "full precision already"],
    "latent=bf16,rope=bf16,recent=4": ["full precision already"],
    "latent=int8,rope=int8:tensor:static": ["rope part without static scales"],
    "bf16,rotate=1": ["rotate=1", "quantized K"],
    "int8,rotate=4294967296": ["4294967296", "2**32 - 1"],
    "int8,rotate=-1": ["rotate=", "'-1'"],
    "int8,window=4": ["'window=4'", "sink=N, recent=N, rotate=SEED"],
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_is_refused_with_the_facts(text: str) -> None:
    with pytest.raises(FormatError) as error:
        CacheFormat.parse(text)
    for fact in REFUSED[text]:
        assert fact in str(error.value)


@pytest.mark.parametrize("given", [8, None, b"int8", TensorFormat("int8")])
def test_only_strings_and_formats_are_parsed(given: object) -> None:
    with pytest.raises(FormatError, match=type(given).__name__):
        CacheFormat.parse(given)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=type(given).__name__):
        TensorFormat.parse(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, 1.5, True, "4"])
def test_tier_counts_are_whole_numbers_of_tokens(count: object) -> None:
    int8 = TensorFormat("int8")
    for name in ("sink", "recent"):
        with pytest.raises(FormatError, match=name):
            CacheFormat(int8, int8, **{name: count})  # type: ignore[arg-type]


def test_a_format_cannot_be_changed() -> None:
    fmt = CacheFormat.parse("int4:g32,recent=8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.recent = 9  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.key.scale_dtype = "fp16"  # type: ignore[misc]


def test_identity_is_versioned_json_and_differs_for_every_field() -> None:
    """Two formats that store anything differently never share a page."""
    names = [
        *CODES,
        "int4:g16", "int4:g32", "int4:c16", "int4:c32", "int4:asym", "int4:scale=fp16", "int4:scale=bf16",
        "int4:head:static", "int4:tensor:static", "int4:channel:static", "int4:channel:asym:static", "nvfp4:static",
        "k=int4,v=int8", "k=int8,v=int4", "int4,sink=4", "int4,recent=4", "int4,sink=4,recent=4", "int4,sink=8",
        "int4,recent=4:bf16", "int4,recent=4:fp16", "int4,recent=4:fp8_e4m3", "int4,recent=4:fp8_e4m3:scale=fp16",
        "latent=int4,rope=bf16", "latent=int4,rope=fp16", "latent=int4,rope=int4", "latent=bf16,rope=int4",
        "int4,rotate=0", "int4,rotate=1",
    ]  # fmt: skip
    formats = [CacheFormat.parse(name) for name in names]
    for fmt in formats:
        record = json.loads(fmt.identity())
        assert record["version"] == IDENTITY_VERSION
        assert set(record) >= {field.name for field in dataclasses.fields(CacheFormat)}
        assert fmt.identity() == json.dumps(record, sort_keys=True, separators=(",", ":"))
    for a, b in itertools.combinations(formats, 2):
        assert a != b
        assert a.identity() != b.identity(), (a, b)
        assert a.digest() != b.digest()
        assert str(a) != str(b)


def test_the_quantized_record_has_every_field() -> None:
    """A field added to TensorFormat and forgotten in the identity would let different pages be shared."""
    record = json.loads(CacheFormat.parse("int4").identity())["key"]
    assert set(record) == {field.name for field in dataclasses.fields(TensorFormat)}


def tensor_formats(*, near: bool = False) -> st.SearchStrategy[TensorFormat]:
    scale = st.sampled_from(sorted(DTYPES))
    grouped = st.tuples(st.sampled_from(["group"] if near else ["group", "channel_group"]), st.integers(1, 256))
    dynamic = st.one_of(st.just(("token", 0)), grouped)
    integers = st.builds(
        lambda code, where, symmetric, dtype: TensorFormat(code, where[0], where[1], symmetric, False, dtype),
        st.sampled_from(["int8", "int4", "int2"]), dynamic, st.booleans(), scale,
    )  # fmt: skip
    floats = st.builds(
        lambda code, where, dtype: TensorFormat(code, where[0], where[1], True, False, dtype),
        st.sampled_from(["fp8_e4m3", "fp8_e5m2"]), dynamic, scale,
    )  # fmt: skip
    plain = st.sampled_from([TensorFormat(name) for name in ("fp32", "fp16", "bf16", "mxfp4", "nvfp4")])
    if near:
        return st.one_of(integers, floats, plain)
    static = st.builds(
        lambda code, where, dtype: TensorFormat(code, where, 0, True, True, dtype),
        st.sampled_from(["int8", "int4", "fp8_e4m3"]), st.sampled_from(["tensor", "head", "channel"]), scale,
    )  # fmt: skip
    found = st.one_of(integers, floats, plain, static, st.just(TensorFormat("nvfp4", static=True)))
    kept = st.one_of(
        st.just({}),
        st.builds(lambda count: {"outliers": count}, st.integers(1, 8)),
        st.builds(lambda count: {"sparse": count}, st.integers(1, 10**4)),
    )
    return st.builds(lambda fmt, more: dataclasses.replace(fmt, **more) if fmt.quantized else fmt, found, kept)


@st.composite
def cache_formats(draw: st.DrawFn) -> CacheFormat:
    key, value = draw(tensor_formats()), draw(tensor_formats())
    rope = draw(st.none() | tensor_formats(near=True))
    if rope is not None:
        value = key
    sides = [side for side in (key, value, rope) if side is not None]
    tokens = st.integers(0, 10**6) if any(side.quantized for side in sides) else st.just(0)
    sink, recent = draw(tokens), draw(tokens)
    tiered = bool(sink or recent or any(side.sealed_only for side in sides))
    near = draw(st.none() | tensor_formats(near=True)) if tiered else None
    rotate = draw(st.none() | st.integers(0, 2**32 - 1)) if key.quantized and not key.outliers else None
    return CacheFormat(key, value, sink, recent, near, rope, rotate)


@settings(max_examples=150, deadline=None)
@given(cache_formats())
def test_every_format_is_its_string(fmt: CacheFormat) -> None:
    assert CacheFormat.parse(str(fmt)) == fmt
    assert str(CacheFormat.parse(str(fmt))) == str(fmt)


# --- where a format meets a geometry --------------------------------------------------------------------------------

MISFITS = {
    ("int4", 33, 16): ["int4", "2 codes a byte", "33"],
    ("int2", 34, 16): ["int2", "4 codes a byte", "34"],
    ("int4:g64", 80, 16): ["64", "80"],
    ("fp8_e4m3:g48", 64, 16): ["48", "64"],
    ("mxfp4", 80, 16): ["32", "80"],
    ("nvfp4", 24, 16): ["16", "24"],
    ("int2:c32", 64, 16): ["32 tokens", "page size 16"],
    ("kivi2", 64, 48): ["32 tokens", "page size 48"],
    ("int8,rotate=1", 24, 16): ["16", "24"],
}


@pytest.mark.parametrize("format, dim, page_size", MISFITS)
def test_what_does_not_divide_is_refused_with_both_numbers(format: str, dim: int, page_size: int) -> None:
    with pytest.raises(LayoutError) as error:
        CacheLayout.uniform(layers=1, kv_heads=1, head_dim=dim, format=format, page_size=page_size)
    for fact in MISFITS[format, dim, page_size]:
        assert fact in str(error.value)


def test_the_other_side_has_its_own_dim() -> None:
    shape = {"layers": 1, "kv_heads": 1, "page_size": 16}
    CacheLayout.uniform(**shape, head_dim=80, value_dim=64, format="k=int4:g16,v=int4:g64")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"value.*64.*80"):
        CacheLayout.uniform(**shape, head_dim=64, value_dim=80, format="k=int4:g16,v=int4:g64")  # type: ignore[arg-type]


@pytest.mark.parametrize("format, latent", [("int8", True), ("latent=int8,rope=bf16", False)])
def test_latent_layers_and_latent_formats_belong_together(format: str, latent: bool) -> None:
    spec = LayerSpec(kv_heads=1, query_heads=2, key_dim=48, value_dim=32, latent=latent)
    with pytest.raises(LayoutError, match="latent=CODE,rope=CODE"):
        CacheLayout((spec,), CacheFormat.parse(format), 16, torch.float32)


# --- the page that documents them -----------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table whose head begins with ``heading``."""
    lines = iter(DOCS.read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"| {heading}"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), itertools.islice(lines, 1, None))
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_strings_is_right() -> None:
    rows = table("you write")
    assert len(rows) > 15
    for written, canonical, _ in rows:
        assert str(CacheFormat.parse(written)) == canonical


def test_the_table_of_bytes_is_right() -> None:
    rows = table("format")
    assert len(rows) > 5
    for format, codes, metadata, total in rows:
        layout = CacheLayout.uniform(
            layers=1, kv_heads=1, head_dim=128, format=format, page_size=32, dtype=torch.bfloat16
        )
        found = {True: 0, False: 0}
        for plane in layout.groups[0].layout.planes:
            found[plane.name.endswith(".codes")] += plane.nbytes
        assert (found[True], found[False]) == (int(codes) * 32, int(metadata) * 32), format
        assert int(total) == int(codes) + int(metadata)


def test_the_table_of_tiers_is_the_one_that_is_tested() -> None:
    from test_tier_rule import BY_HAND

    rows = table("length")
    assert len(rows) > 4
    for length, tiers in rows:
        assert BY_HAND[int(length)] == tiers
