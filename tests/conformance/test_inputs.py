"""The input streams: recorded bytes, the published hash, exactness, and the properties the cases rely on."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvport_conformance
from kvport_conformance import inputs

Array = np.ndarray[Any, Any]


def digest(x: Array) -> str:
    """sha256 of the little-endian bytes of an array in C order."""
    return hashlib.sha256(np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<")).tobytes()).hexdigest()


def test_the_hash_is_splitmix64() -> None:
    """First outputs published with the reference implementation, seeds 0 and 1234567."""
    assert int(inputs.words(0, 1)[0]) == 0xE220A8397B1DCDAF
    assert inputs.words(1234567, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


STREAMS: dict[str, Callable[[], Array]] = {
    "words": lambda: inputs.words(1, 1000),
    "uniform": lambda: inputs.values(2, (10, 100), low=-3.0, high=0.7),
    "bell": lambda: inputs.bell(3, (10, 100), mean=0.1, deviation=2.0),
    "integers": lambda: inputs.integers(4, (1000,), -5, 70000),
    "permutation": lambda: inputs.permutation(5, 1000),
    "key": lambda: inputs.key(6, (17, 3, 64)),
    "key bfloat16": lambda: inputs.key(6, (17, 3, 64), dtype="bfloat16"),
    "value": lambda: inputs.value(6, (17, 3, 64)),
    "value float16": lambda: inputs.value(6, (17, 3, 64), dtype="float16"),
    "query": lambda: inputs.query(6, (5, 6, 64)),
    "special rows": lambda: np.stack([inputs.special_rows(32)[name] for name in sorted(inputs.special_rows(32))]),
}
SHA256 = {
    "words": "59e303618e1f1760bec1685f6c69fb1118eb3405a1b4f0a397e6e74f3eec78f0",
    "uniform": "b64c33510c11333556102361a962abf7d709ace0a52df07abffd251e76314b27",
    "bell": "59c52ba0bac48a209436a6992ed3d9a7b960f9e78689499e8ee7db831d8f77c5",
    "integers": "a627d7a1ccade2fd56f1d2efb2609fa1f30469858ed1c769cd430603cf5ef5d1",
    "permutation": "8db1a67a070054896e52b8d40f0130b99b4c07009cd2fcdbbc81c6581bbe7450",
    "key": "4a34fb3bcf9f6740a4903216f7d8db382c7d49aecbcd267f7a791a5eb3cc4145",
    "key bfloat16": "bdc265e92f505fefd4882ad1d146adb22f9ab9c4a8d07039a9c753646ce5499e",
    "value": "88af04ce593db1ac3e51d6f76a4490b569e82d6d0ecceb56a46c048f5db3ae2c",
    "value float16": "3f792ec68d5d67e070e63221de4cbae8b27006e792f0219e58f7cfcfa8d4bf4d",
    "query": "621a667509d3997b0e46d06c2df20d89faf85f5a3454cc4393ff9f6f1860c827",
    "special rows": "5f20a02ac270b75f931998a2e50231d8ab5e765a931dff9d1cefd02cd982d9f4",
}


@pytest.mark.parametrize("stream", STREAMS)
def test_streams_have_their_recorded_bytes(stream: str) -> None:
    """A changed digest changes every report: raise SUITE_VERSION with it."""
    assert digest(STREAMS[stream]()) == SHA256[stream]


def test_seeds_from_names_are_recorded_and_order_matters() -> None:
    assert inputs.derive("append", 3, "key") == 0xB10C7A668FCFFC03
    seeds = [
        inputs.derive(*parts)
        for parts in ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), (97,), (0,), (0, 0), (-1,), ("é",), ("a", 0))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_longer_stream_continues_a_shorter_one() -> None:
    np.testing.assert_array_equal(inputs.words(1, 50)[20:30], inputs.words(1, 10, start=20))
    for distribution in ("uniform", "bell"):
        whole = inputs.values(1, (50,), distribution=distribution)
        part = inputs.values(1, (10,), distribution=distribution, start=20)
        np.testing.assert_array_equal(whole[20:30], part)


@pytest.mark.parametrize("make", [inputs.key, inputs.value, inputs.query])
def test_a_token_does_not_depend_on_how_many_are_asked_for(make: Callable[..., Array]) -> None:
    whole = make(1, (40, 2, 64))
    np.testing.assert_array_equal(make(1, (7, 2, 64)), whole[:7])
    np.testing.assert_array_equal(make(1, (9, 2, 64), start=13), whole[13:22])


def test_uniform_values_are_what_the_words_say() -> None:
    words = inputs.words(8, 6)
    expected = [np.float32(-2.0 + 4.0 * (int(word) >> 40) / 2**24) for word in words]
    assert inputs.values(8, (2, 3), low=-2.0, high=2.0).ravel().tolist() == [float(x) for x in expected]
    assert inputs.values(8, (2, 3)).dtype == np.float32


def test_bell_values_are_sums_of_twelve_uniforms() -> None:
    words = [int(word) for word in inputs.words(8, 6)]
    for index in range(2):
        sums = sum((word >> shift) & 0xFFFF for word in words[3 * index : 3 * index + 3] for shift in (0, 16, 32, 48))
        fraction = sums / (12 * 65535)
        assert inputs.bell(8, (2,))[index] == np.float32(-6.0 + 12.0 * fraction)


def test_distributions_have_their_moments() -> None:
    uniform = inputs.values(1, (100_000,), low=2.0, high=4.0).astype(np.float64)
    assert uniform.mean() == pytest.approx(3.0, abs=0.01)
    assert uniform.std() == pytest.approx(2 / 12**0.5, abs=0.01)
    assert 2.0 <= uniform.min() < 2.001 < 3.999 < uniform.max() <= 4.0
    bell = inputs.bell(1, (100_000,), mean=-1.0, deviation=0.5).astype(np.float64)
    assert bell.mean() == pytest.approx(-1.0, abs=0.01)
    assert bell.std() == pytest.approx(0.5, abs=0.01)
    assert (np.abs(bell + 1.0) < 0.5).mean() == pytest.approx(0.683, abs=0.01)
    assert np.abs(bell + 1.0).max() <= 3.0
    counts = np.bincount(inputs.integers(1, (70_000,), 0, 7))
    assert counts.shape == (7,)
    assert np.abs(counts - 10_000).max() < 400


@pytest.mark.parametrize("count", [0, 1, 2, 17, 1000])
def test_permutations_hold_each_index_once(count: int) -> None:
    permutation = inputs.permutation(3, count)
    assert sorted(permutation.tolist()) == list(range(count))
    if count > 10:
        assert permutation.tolist() != sorted(permutation.tolist())
        assert permutation.tolist() != inputs.permutation(4, count).tolist()


def test_keys_and_values_of_one_seed_differ_in_numbers_and_in_kind() -> None:
    shape = (400, 2, 128)
    key, value = inputs.key(1, shape), inputs.value(1, shape)
    assert (key == value).mean() < 1e-3
    assert np.abs(key).max() > 4 * np.abs(value).max()
    # Keys: most of the variance is a fixed offset per channel, and four channels in 128 are outliers.
    channel_mean = np.abs(key.mean(axis=0))
    assert np.median(channel_mean) > 0.5
    spread = key.std(axis=0)
    assert ((spread > 4.0).sum(axis=1) == 4).all()
    assert ((spread < 1.0).sum(axis=1) == 124).all()
    # Values: no such channels, but tokens of very different size.
    assert value.std(axis=0).max() < 2 * value.std(axis=0).min()
    size = np.abs(value).max(axis=-1)
    assert size.max() > 8 * size.min()
    assert (value.mean(axis=(0, 2)) > 0.3).all()


def test_keys_values_and_queries_of_one_seed_come_from_unrelated_streams() -> None:
    """With the fixed offsets and token sizes removed, what is left must not be correlated."""
    shape = (200, 2, 64)
    key, value, query = (make(1, shape).astype(np.float64) for make in (inputs.key, inputs.value, inputs.query))
    key = (key - key.mean(axis=0)) / key.std(axis=0)
    value = (value - value.mean(axis=-1, keepdims=True)) / value.std(axis=-1, keepdims=True)
    for a, b in ((key, value), (key, query), (value, query)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("make", [inputs.key, inputs.value, inputs.query])
def test_heads_and_seeds_differ(make: Callable[..., Array]) -> None:
    x = make(1, (4, 2, 64))
    assert (x[:, 0] == x[:, 1]).mean() < 0.01
    assert (x == make(2, (4, 2, 64))).mean() < 0.01
    np.testing.assert_array_equal(x, make(1, (4, 2, 64)))


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_rounded_inputs_are_exact_in_their_dtype(dtype: str, digits: int) -> None:
    for make in (inputs.key, inputs.value, inputs.query):
        x = make(1, (16, 2, 64), dtype=dtype)
        assert x.dtype == np.float32
        mantissa, _ = np.frexp(x.astype(np.float64))
        scaled = mantissa * 2.0**digits
        exact = scaled == np.rint(scaled)
        # float16 subnormals have fewer digits, on the grid of 2**-24
        assert (exact | ((np.abs(x) < 2.0**-14) & (dtype == "float16"))).all()
        np.testing.assert_array_equal(inputs.round_to(x, dtype), x)
    original = inputs.key(1, (16, 2, 64))
    rounded = inputs.key(1, (16, 2, 64), dtype=dtype)
    np.testing.assert_allclose(rounded, original, rtol=2.0**-digits)
    if dtype == "float16":
        np.testing.assert_array_equal(rounded, original.astype(np.float16).astype(np.float32))


# --- special rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_special_rows_are_exact_in_their_dtype(dtype: str) -> None:
    rows = inputs.special_rows(64, dtype=dtype)
    for name, x in rows.items():
        assert x.shape == (64,), name
        assert x.dtype == np.float32, name
        np.testing.assert_array_equal(inputs.round_to(x, dtype), x)
        np.testing.assert_array_equal(x[:16].view(np.uint32), x[48:].view(np.uint32))
    everywhere = {"zeros", "negative_zeros", "constant", "ties_int8", "ties_int4", "ties_int2", "ties_int8_asym",
                  "ties_mxfp4", "ties_nvfp4", "qmax_int8", "infinity", "negative_infinity", "nan"}  # fmt: skip
    assert everywhere <= set(rows)
    assert ("huge" in rows) == (dtype == "float32")
    assert ("at_limit" in rows) == (dtype != "float16")


def test_special_rows_are_what_their_names_say() -> None:
    rows = inputs.special_rows(16)
    assert set(rows["negative_zeros"].view(np.uint32).tolist()) == {0x80000000}
    assert len(set(rows["constant_third"].tolist())) == 1
    assert np.abs(rows["smallest_subnormal"]).view(np.uint32).tolist() == [1] * 16
    assert np.abs(rows["subnormal"]).min() > 0
    assert np.abs(rows["subnormal"]).max() < 2.0**-126
    assert np.abs(rows["subnormal_scale"]).max() / 127 < 2.0**-126 < np.abs(rows["subnormal_scale"]).min()
    assert np.abs(rows["huge"]).tolist() == [float(np.float32(1e30))] * 16
    assert np.abs(rows["at_limit"]).tolist() == [2.0**125] * 16
    assert np.abs(rows["below_limit"]).max() < 2.0**125
    assert sorted(set((np.abs(rows["beyond_limit"]) > 2.0**125).tolist())) == [False, True]
    assert np.isfinite(rows["largest_finite"]).all()
    assert np.isnan(rows["nan"]).sum() == np.isposinf(rows["infinity"]).sum() == 4
    assert np.isneginf(rows["negative_infinity"]).sum() == 4
    for name, levels in (("int8", 127), ("int4", 7), ("int2", 1), ("int8_asym", 255), ("int4_asym", 15)):
        quotients = rows[f"ties_{name}"].astype(np.float64) * 64
        assert np.abs(quotients).max() == levels
        assert (np.abs(quotients) % 1 == 0.5).sum() >= 8, "at least half of the row are ties"
    assert np.isnan(inputs.nan_payloads()).all()
    assert len(set(inputs.nan_payloads().view(np.uint32).tolist())) == 6
    with pytest.raises(ValueError, match="24"):
        inputs.special_rows(24)


# --- refusals and independence --------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="below"):
        inputs.values(1, (3,), low=1.0, high=1.0)
    with pytest.raises(ValueError, match="cauchy"):
        inputs.values(1, (3,), distribution="cauchy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float64"):
        inputs.round_to(np.zeros(1, np.float32), "float64")
    with pytest.raises(ValueError, match="low < high"):
        inputs.integers(1, (3,), 5, 5)


def test_the_judge_imports_neither_torch_nor_kvport() -> None:
    modules = ", ".join(f"kvport_conformance.{name}" for name in ("inputs", "oracle_attention", "oracle_codec"))
    code = f"import sys; import {modules}; print(sorted({{'torch', 'kvport', 'ml_dtypes'}} & set(sys.modules)))"
    root = str(kvport_conformance.__path__[0] + "/..")
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"]
    result = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"


def test_the_suite_has_a_version() -> None:
    assert isinstance(kvport_conformance.SUITE_VERSION, int)
    assert kvport_conformance.SUITE_VERSION >= 1
