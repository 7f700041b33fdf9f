"""Small figures that were published or follow by hand, through the public API, and what formats are chosen for."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import kvport
from kvport import LayerScales, PagedCache, SideScales


def open_one(format: str, scales: dict[str, float] | None = None, *, dim: int = 1, **more: object) -> PagedCache:
    """One layer, one head. ``scales`` by side, for static formats."""
    sides = {side: SideScales(torch.tensor(scale)) for side, scale in (scales or {}).items()}
    return kvport.open(
        "reference@cpu", format=format, layers=1, kv_heads=1, head_dim=dim, page_size=4, tokens=64,
        scales={0: LayerScales(**sides)} if sides else None, **more,
    )  # fmt: skip


def attend(cache: PagedCache, query: float, key: list[float], value: list[float]) -> kvport.Attention:
    """Attention of a last query over all tokens, no extra scaling; numbers are channel 0, other channels zero."""
    sequence = cache.sequence()
    dim = cache.layout.layers[0].key_dim

    def rows(numbers: list[float]) -> Tensor:
        found = torch.zeros(len(numbers), 1, dim)
        found[:, 0, 0] = torch.tensor(numbers)
        return found

    with cache.step({sequence: len(key)}) as step:
        step.append(0, rows(key), rows(value))
        found = step.attend(0, rows([query] * len(key)), scale=1.0)
    return kvport.Attention(found.output[-1, 0, 0], found.lse[-1, 0])


def test_two_keys_in_full_precision() -> None:
    found = attend(open_one("fp32"), 1.0, [0.14, 0.26], [1.0, 3.0])
    assert found.output.item() == pytest.approx(2.05993, abs=5e-6)
    assert found.lse.item() == pytest.approx(math.log(math.exp(0.14) + math.exp(0.26)), abs=1e-6)


@pytest.mark.parametrize("code, dim", [("int8", 1), ("int4", 2), ("int2", 4)])
def test_two_keys_on_a_grid_of_0_2(code: str, dim: int) -> None:
    """0.14 and 0.26 both round to 0.2: the weights become equal and the output 2.0."""
    cache = open_one(f"k={code}:tensor:static,v=fp32", {"key": 0.2}, dim=dim)
    found = attend(cache, 1.0, [0.14, 0.26], [1.0, 3.0])
    assert found.output.item() == pytest.approx(2.0, abs=1e-6)
    key, _ = cache.gather(cache.sequences[0], 0)
    assert key[:, 0, 0].tolist() == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("code, dim", [("int8", 1), ("int4", 2)])
def test_two_values_on_a_grid_of_one_half(code: str, dim: int) -> None:
    """With equal weights, 1.0 and 2.8 have mean 1.9; 2.8 becomes 3.0 and the mean 2.0."""
    exact = attend(open_one("fp32"), 0.0, [0.0, 0.0], [1.0, 2.8])
    assert exact.output.item() == pytest.approx(1.9, abs=1e-6)
    cache = open_one(f"k=fp32,v={code}:tensor:static", {"value": 0.5}, dim=dim)
    assert attend(cache, 0.0, [0.0, 0.0], [1.0, 2.8]).output.item() == pytest.approx(2.0, abs=1e-6)


def test_k_and_v_each_have_their_own_scale() -> None:
    scales = {"key": 0.02, "value": 0.5}
    cache = open_one("int8:tensor:static", scales)
    attend(cache, 1.0, [0.14, 0.26], [1.0, 3.0])
    planes = cache.export(cache.sequences[0]).layers[0]
    assert planes["key.codes"].flatten()[:2].tolist() == [7, 13]
    assert planes["value.codes"].flatten()[:2].tolist() == [2, 6]


# --- a scale changed without its codes ------------------------------------------------------------------------------


def test_a_scale_cannot_be_changed_without_its_codes() -> None:
    """Neither through the tensor that was given, nor the record, nor a second cache; no attribute leads to it."""
    given = torch.tensor(0.5)
    side = SideScales(given)
    scales = {0: LayerScales(value=side)}
    options = {"format": "k=fp32,v=int8:tensor:static", "layers": 1, "kv_heads": 1, "head_dim": 1, "page_size": 4}
    cache = kvport.open("reference@cpu", **options, tokens=8, scales=scales)  # type: ignore[arg-type]
    before = attend(cache, 0.0, [0.0, 0.0], [1.0, 3.0]).output
    given.mul_(2)
    scales[0] = LayerScales(value=SideScales(given))
    with pytest.raises(dataclasses.FrozenInstanceError):
        side.scale = torch.tensor(1.0)  # type: ignore[misc]
    assert cache.gather(cache.sequences[0], 0)[1].flatten().tolist() == [1.0, 3.0]
    assert attend(cache, 0.0, [0.0, 0.0], [1.0, 3.0]).output == before == 2.0
    doubled = kvport.open("reference@cpu", **options, tokens=8, scales=scales)  # type: ignore[arg-type]
    with pytest.raises(kvport.ImageError, match="static scales"):
        doubled.insert(cache.export(cache.sequences[0]))
    assert not [name for name in dir(cache) if "scale" in name and not name.startswith("_")]


def test_what_that_would_cost_is_a_factor_of_two() -> None:
    """Below the API the same codes are put under a doubled scale: every value, and so the output, doubles."""
    options = {"format": "k=fp32,v=int8:tensor:static", "layers": 1, "kv_heads": 1, "head_dim": 1, "page_size": 4}
    caches = [
        kvport.open("reference@cpu", **options, tokens=8, scales={0: LayerScales(value=SideScales(torch.tensor(s)))})  # type: ignore[arg-type]
        for s in (0.5, 1.0)
    ]
    outputs = [attend(cache, 0.0, [0.0, 0.0], [1.0, 3.0]).output for cache in caches]
    assert [o.item() for o in outputs] == [2.0, 2.0]
    backend, (right, wrong) = caches[0].backend, (cache._stores[0] for cache in caches)
    [page] = caches[0].sequences[0].pages()
    [other] = caches[1].sequences[0].pages()
    backend.import_pages(wrong, 0, [other], backend.export_pages(right, 0, [page]))
    sequence = caches[1].sequences[0]
    with caches[1].step({sequence: 0}) as step:
        step.append(0, torch.zeros(0, 1, 1), torch.zeros(0, 1, 1))
        assert step.gather(0)[1].flatten().tolist() == [2.0, 6.0]
    with caches[1].step({sequence: 1}) as step:
        step.append(0, torch.full((1, 1, 1), -1e4), torch.zeros(1, 1, 1))
        assert step.attend(0, torch.ones(1, 1, 1), scale=1.0).output.item() == 4.0  # not 2.0


def test_a_dynamic_scale_edited_in_an_image_doubles_its_group_and_nothing_else() -> None:
    cache = open_one("int4:g8", dim=16)
    sequence = cache.sequence()
    torch.manual_seed(2)
    with cache.step({sequence: 3}) as step:
        step.append(0, torch.randn(3, 1, 16), torch.randn(3, 1, 16))
    image = cache.export(sequence)
    planes = {name: plane.clone() for name, plane in image.layers[0].items()}
    planes["value.scale"][0, 1, 0, 1] *= 2
    edited = cache.insert(dataclasses.replace(image, layers={0: planes}))
    key, value = cache.gather(sequence, 0)
    new_key, new_value = cache.gather(edited, 0)
    wanted = value.clone()
    wanted[1, 0, 8:] *= 2
    assert torch.equal(new_key, key)
    assert torch.equal(new_value, wanted)


# --- what a format is chosen for ------------------------------------------------------------------------------------


def levels(format: str, row: Tensor) -> int:
    """Distinct values that a row of 16 reads back as, one group."""
    cache = open_one(format, dim=16)
    sequence = cache.sequence()
    with cache.step({sequence: 1}) as step:
        step.append(0, row.view(1, 1, 16), row.view(1, 1, 16))
    return int(cache.gather(sequence, 0)[0].unique().numel())


@pytest.mark.parametrize(
    "format, usual, collapsed", [("int2", 3, 2), ("int2:asym", 4, 2), ("int4", 15, 4), ("int4:asym", 16, 4)]
)
def test_one_outlier_collapses_the_levels_of_its_group(format: str, usual: int, collapsed: int) -> None:
    """Sixteen values from -1 to 1 use all levels; one of them times twelve leaves the others a few."""
    row = torch.linspace(-1, 1, 16)
    assert levels(format, row) == usual
    row[-1] *= 12
    assert levels(format, row) == collapsed
    apart = f"{format.split(':')[0]}:g8" + (":asym" if "asym" in format else "")
    assert levels(apart, row) > collapsed  # a group that does not hold it keeps its levels


def error(format: str, x: Tensor) -> float:
    """Root mean square error of K (and V, which is the same), relative to that of x."""
    cache = kvport.open("reference@cpu", format=format, layers=1, kv_heads=2, head_dim=64, page_size=32, tokens=256)
    sequence = cache.sequence()
    with cache.step({sequence: len(x)}) as step:
        step.append(0, x, x)
    with cache.step({sequence: 0}) as step:  # what is whole seals
        step.append(0, x[:0], x[:0])
    key, value = cache.gather(sequence, 0)
    assert torch.equal(key, value)
    return ((key - x).square().mean() / x.square().mean()).sqrt().item()


def test_per_channel_wins_where_channels_stand_out_and_per_token_where_tokens_do() -> None:
    """The reason for KIVI's split: keys have channels that are large throughout, values single large tokens."""
    torch.manual_seed(4)
    channels = torch.randn(128, 2, 64)
    channels[..., ::16] += 12
    tokens = torch.randn(128, 2, 64)
    tokens[::16] *= 12
    per_channel, per_token = "int2:c32:asym", "int2:g32:asym"
    assert error(per_channel, channels) < 0.5 * error(per_token, channels)
    assert error(per_token, tokens) < 0.75 * error(per_channel, tokens)
    kivi = kvport.open(
        "reference@cpu", format="kivi2", layers=1, kv_heads=2, head_dim=64, page_size=32, pages=[8, 16]
    )  # fmt: skip
    sequence = kivi.sequence()
    for count in (128, 128, 1):
        with kivi.step({sequence: count}) as step:
            step.append(0, channels[:count], tokens[:count])
    key, value = (side[:128] for side in kivi.gather(sequence, 0))
    for got, x, best in ((key, channels, error(per_channel, channels)), (value, tokens, error(per_token, tokens))):
        relative = ((got - x).square().mean() / x.square().mean()).sqrt().item()
        assert relative == pytest.approx(best, rel=0.02)  # K and V each at its best; scales in fp16 cost little


def test_a_key_bias_per_channel_breaks_per_token_codes_and_not_per_channel_ones() -> None:
    """A large constant per channel and a small signal: what some model families' keys look like."""
    torch.manual_seed(5)
    bias = torch.randn(1, 2, 64) * 20
    x = bias + torch.randn(128, 2, 64) * 0.5
    signal = (x - bias).square().mean().sqrt() / x.square().mean().sqrt()
    assert error("int4", x) > signal  # the signal is gone
    assert error("int4:c32:asym", x) < 0.1 * signal


def test_more_bits_and_smaller_groups_are_better() -> None:
    torch.manual_seed(6)
    x = torch.randn(128, 2, 64)
    for better, worse in (
        ("int8", "int4"), ("int4", "int2"), ("int4:g16", "int4:g64"), ("fp8_e4m3", "fp8_e5m2"), ("int8", "fp8_e4m3"),
        ("nvfp4", "mxfp4"), ("int8", "int8:scale=bf16"), ("int4:c8", "int4:c32"),
    ):  # fmt: skip
        assert error(better, x) < error(worse, x), (better, worse)
