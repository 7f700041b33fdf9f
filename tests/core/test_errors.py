"""Every wrong argument a newcomer would try: exactly one class of kvport's tree, and a message with the facts.

Each row of the tables is (name, what is done, the class, facts the message must hold). Nothing may change by a refused
call, and nothing outside the tree may come out of one.
"""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import core_support as support
import numpy as np
import pytest
import torch
from torch import Tensor

import kvport
from kvport import (
    CacheFormat,
    CacheLayout,
    ClosedError,
    FormatError,
    GroupLayout,
    IncompleteStep,
    InvalidArgument,
    KVPortError,
    LayerScales,
    LayerSpec,
    LayoutError,
    OutOfPages,
    PagedCache,
    ScaleError,
    Sequence,
    SequenceError,
    SideScales,
    Step,
    StepError,
    TensorFormat,
    UnknownBackend,
    Unsupported,
)
from kvport_cpu.reference import ReferenceBackend

Row = tuple[str, Callable[..., Any], type[KVPortError], tuple[str, ...]]


def check(row: Row, *args: Any) -> None:
    _, call, error, facts = row
    with pytest.raises(KVPortError) as caught:
        call(*args)
    assert type(caught.value) is error, f"{caught.type.__name__}: {caught.value}"
    for fact in facts:
        assert fact in str(caught.value), f"{fact!r} is not said in: {caught.value}"


def table(rows: list[Row]) -> Any:
    assert len({name for name, *_ in rows}) == len(rows)
    return pytest.mark.parametrize("row", rows, ids=[name for name, *_ in rows])


# --- opening --------------------------------------------------------------------------------------------------------


def opened(**changes: Any) -> Callable[[], PagedCache]:
    """``kvport.open`` of a small cache with some arguments changed (``...`` drops one)."""
    arguments: dict[str, Any] = {"device": "cpu", "layers": 2, "kv_heads": 2, "head_dim": 32, "tokens": 100} | changes
    given = {name: value for name, value in arguments.items() if value is not ...}
    return lambda: kvport.open(given.pop("device"), **given)


def scaled(scale: Any, zero: Any = None, format: str = "int8:head:static") -> Callable[[], PagedCache]:
    side = SideScales(scale, zero)
    return opened(format=format, scales={layer: LayerScales(side, side) for layer in range(2)})


LAYOUT = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=32)
SPEC = LayerSpec(kv_heads=2, query_heads=4, key_dim=32, value_dim=32)

OPENING: list[Row] = [
    ("device empty", opened(device=""), InvalidArgument, ("''", "[backend@]device")),
    ("device number", opened(device=0), InvalidArgument, ("int 0", "'cuda:1'")),
    ("device None", opened(device=None), InvalidArgument, ("None", "'cpu'")),
    ("device torch", opened(device=torch.device("cpu")), InvalidArgument, ("device", "'cpu'")),
    ("device index", opened(device="cuda:one"), InvalidArgument, ("'cuda:one'", "a number from 0")),
    ("device unknown", opened(device="toaster:0"), UnknownBackend, ("'toaster'", "there are")),
    ("backend unknown", opened(device="nosuch@cpu"), UnknownBackend, ("'nosuch'", "there are")),
    ("geometry missing", opened(layers=..., head_dim=...), InvalidArgument, ("layers, head_dim", "layout=")),
    ("layers zero", opened(layers=0), LayoutError, ("layers", "0")),
    ("layers bool", opened(layers=True), LayoutError, ("layers", "True")),
    ("layers float", opened(layers=2.0), LayoutError, ("layers", "2.0")),
    ("layers text", opened(layers="2"), LayoutError, ("layers", "'2'")),
    ("kv_heads zero", opened(kv_heads=0), LayoutError, ("kv_heads", "0")),
    ("kv_heads negative", opened(kv_heads=-2), LayoutError, ("kv_heads", "-2")),
    ("kv_heads float", opened(kv_heads=2.5), LayoutError, ("kv_heads", "2.5")),
    ("query_heads not a multiple", opened(query_heads=3), LayoutError, ("query_heads 3", "kv_heads 2")),
    ("query_heads fewer", opened(query_heads=1), LayoutError, ("query_heads 1", "kv_heads 2")),
    ("head_dim zero", opened(head_dim=0), LayoutError, ("key_dim", "0")),
    ("head_dim bool", opened(head_dim=True), LayoutError, ("key_dim", "True")),
    ("head_dim odd for int4", opened(head_dim=33, format="int4"), LayoutError, ("int4", "33", "2 codes a byte")),
    ("head_dim for int2", opened(head_dim=34, format="int2"), LayoutError, ("int2", "34", "4 codes a byte")),
    ("head_dim and group", opened(head_dim=80, format="int4:g64"), LayoutError, ("64", "80")),
    ("value_dim and group", opened(value_dim=40, format="int8:g16"), LayoutError, ("value", "16", "40")),
    ("value_dim zero", opened(value_dim=0), LayoutError, ("value_dim", "0")),
    ("window zero", opened(window=0), LayoutError, ("window", "0", "None")),
    ("window negative", opened(window=-5), LayoutError, ("window", "-5")),
    ("window bool", opened(window=True), LayoutError, ("window", "True")),
    ("window float", opened(window=8.0), LayoutError, ("window", "8.0")),
    ("page_size zero", opened(page_size=0), LayoutError, ("page_size", "0")),
    ("page_size float", opened(page_size=16.0), LayoutError, ("page_size", "16.0")),
    ("page_size bool", opened(page_size=True), LayoutError, ("page_size", "True")),
    ("dtype int", opened(dtype=torch.int8), LayoutError, ("int8", "bfloat16")),
    ("dtype double", opened(dtype=torch.float64), LayoutError, ("float64", "bfloat16")),
    ("dtype text", opened(dtype="bf16"), LayoutError, ("bf16", "bfloat16")),
    ("format unknown", opened(format="int3"), FormatError, ("int3", "int4")),
    ("format empty", opened(format=""), FormatError, ("int8",)),
    ("format option", opened(format="int8:per_token"), FormatError, ("'per_token'", "token, gN")),
    ("format group zero", opened(format="int8:g0"), FormatError, ("'g0'",)),
    ("format number", opened(format=8), FormatError, ("int", "'int8'")),
    ("format dtype", opened(format=torch.int8), FormatError, ("dtype", "'int8'")),
    ("format K alone", opened(format="k=int8"), FormatError, ("k=", "v=")),
    ("format twice", opened(format="int8:g16:g32"), FormatError, ("granularity", "twice")),
    ("format scale dtype", opened(format="int8:scale=fp8"), FormatError, ("fp8", "bf16")),
    ("format float with options", opened(format="bf16:g16"), FormatError, ("bf16", "not quantized")),
    ("format tensor not static", opened(format="int8:tensor"), FormatError, ("calibrated", "int8:tensor:static")),
    ("format token static", opened(format="int8:token:static"), FormatError, ("tensor, head or channel",)),
    ("capacity missing", opened(tokens=...), InvalidArgument, ("tokens=", "pages=")),
    ("capacity twice", opened(pages=5), InvalidArgument, ("tokens=", "pages=")),
    ("tokens zero", opened(tokens=0), InvalidArgument, ("tokens", "0")),
    ("tokens negative", opened(tokens=-1), InvalidArgument, ("tokens", "-1")),
    ("tokens bool", opened(tokens=True), InvalidArgument, ("tokens", "True")),
    ("tokens float", opened(tokens=1e6), InvalidArgument, ("tokens", "1000000.0")),
    ("requests zero", opened(requests=0), InvalidArgument, ("requests", "0")),
    ("requests True", opened(requests=True), InvalidArgument, ("requests", "True")),
    ("requests with pages", opened(tokens=..., pages=5, requests=2), InvalidArgument, ("requests=", "tokens=")),
    ("chunk without requests", opened(chunk=64), InvalidArgument, ("chunk=", "requests=")),
    ("chunk zero", opened(requests=1, chunk=0), InvalidArgument, ("chunk", "0")),
    ("pin without tiers", opened(requests=1, pin=8), InvalidArgument, ("int8", "recent=N")),
    ("pages one", opened(tokens=..., pages=1), InvalidArgument, (">= 2", "spare", "1")),
    ("pages zero", opened(tokens=..., pages=0), InvalidArgument, (">= 2", "0")),
    ("pages bool", opened(tokens=..., pages=True), InvalidArgument, (">= 2", "True")),
    ("pages float", opened(tokens=..., pages=10.0), InvalidArgument, (">= 2", "10.0")),
    ("pages text", opened(tokens=..., pages="10"), InvalidArgument, (">= 2", "'10'")),
    ("pages for more groups", opened(tokens=..., pages=[5, 5]), InvalidArgument, ("2 counts", "1 pools")),
    ("pages none", opened(tokens=..., pages=[]), InvalidArgument, ("0 counts", "1 pools")),
    ("pages list of floats", opened(tokens=..., pages=[5.0]), InvalidArgument, (">= 2", "5.0")),
    ("layout and geometry", opened(layout=LAYOUT), InvalidArgument, ("layers, kv_heads, head_dim", "one or the other")),
    (
        "layout and format",
        lambda: kvport.open("cpu", layout=LAYOUT, format="int4", tokens=9),
        InvalidArgument,
        ("format", "one or the other"),
    ),
    ("layout of text", lambda: kvport.open("cpu", layout="llama", tokens=9), InvalidArgument, ("layout", "str")),
    ("identity unknown", opened(identity={"vocab": "x"}), InvalidArgument, ("vocab", "model, adapter and rope")),
    ("identity text", opened(identity="llama"), InvalidArgument, ("identity", "model, adapter and rope")),
    ("identity of numbers", opened(identity={"model": 3}), InvalidArgument, ("model", "3", "text")),
    ("layout without layers", lambda: CacheLayout((), CacheFormat.parse("int8")), LayoutError, ("at least one layer",)),
    (
        "sharing a later layer",
        lambda: CacheLayout((LayerSpec(2, 4, 32, 32, shares=1), SPEC), CacheFormat.parse("int8")),
        LayoutError,
        ("layer 0 shares layer 1", "earlier"),
    ),
    (
        "sharing with other dims",
        lambda: CacheLayout((SPEC, LayerSpec(2, 4, 64, 64, shares=0)), CacheFormat.parse("int8")),
        LayoutError,
        ("layer 1 shares layer 0", "differs"),
    ),
    ("static without scales", opened(format="int8:head:static"), ScaleError, ("layer 0 K", "static scales", "scales=")),
    ("scales for a dynamic format", scaled([1.0, 2.0], format="int8"), ScaleError, ("layer 0 K", "does not use")),
    ("scales of a layer that is not there", opened(format="int8:head:static", scales={7: LayerScales()}), ScaleError,
     ("[7]", "0 .. 1")),
    ("scales of one side", opened(format="int8:head:static", scales={0: LayerScales(key=SideScales([1.0, 2.0]))}),
     ScaleError, ("layer 0 V", "none were given")),
    ("scales as a bare tensor", opened(format="int8:head:static", scales={0: torch.ones(2)}), ScaleError,
     ("layer 0", "LayerScales", "Tensor")),
    ("scales as a list", opened(format="int8:head:static", scales=[1.0, 2.0]), ScaleError, ("mapping", "list")),
    ("scales side as a number", opened(format="int8:head:static", scales={0: LayerScales(0.1, 0.1)}), ScaleError,
     ("layer 0 K", "SideScales", "float")),
    ("scale zero", scaled([0.1, 0.0]), ScaleError, ("layer 0 K", "head 1", "0.0", "positive")),
    ("scale negative", scaled([-1.0, 0.1]), ScaleError, ("layer 0 K", "head 0", "-1.0", "positive")),
    ("scale NaN", scaled([0.1, float("nan")]), ScaleError, ("head 1", "nan")),
    ("scale infinite", scaled([0.1, float("inf")]), ScaleError, ("head 1", "inf")),
    ("scale subnormal", scaled([0.1, 1e-40]), ScaleError, ("head 1", "smallest normal")),
    ("scale too small for fp16", scaled([0.1, 1e-6], format="int8:head:static:scale=fp16"), ScaleError,
     ("head 1", "smallest normal fp16")),
    ("scale too large for fp16", scaled([0.1, 1e6], format="int8:head:static:scale=fp16"), ScaleError,
     ("head 1", "fp16")),
    ("scale 0 in fp16", scaled([0.1, 1e-12], format="int8:head:static:scale=fp16"), ScaleError, ("head 1",)),
    ("scales of too many heads", scaled([0.1, 0.1, 0.1]), ScaleError, ("(3,)", "(2,)", "'head'")),
    ("scale per tensor of heads", scaled([0.1, 0.1], format="int8:tensor:static"), ScaleError, ("(2,)", "()")),
    ("scale per channel of heads", scaled([0.1, 0.1], format="int8:channel:static"), ScaleError, ("(2,)", "(2, 32)")),
    ("scale as text", scaled("0.1"), ScaleError, ("layer 0 K", "numbers")),
    ("scale None", scaled(None), ScaleError, ("layer 0 K", "numbers")),
    ("zeros for a symmetric format", scaled([0.1, 0.1], [0.0, 0.0]), ScaleError, ("symmetric",)),
    ("no zeros for an asymmetric format", scaled([0.1, 0.1], format="int8:head:asym:static"), ScaleError,
     ("asymmetric", "zeros")),
    ("zero infinite", scaled([1.0, 2.0], [0, -float("inf")], "int8:head:asym:static"), ScaleError, ("head 1", "-inf")),
    ("zero too large for fp16", scaled([0.1, 0.1], [0.0, 7e4], "int8:head:asym:static:scale=fp16"), ScaleError,
     ("head 1", "fp16")),
    ("tensor format by hand", lambda: TensorFormat("int8", "group"), FormatError, ("group 0",)),
    ("tensor format unknown granularity", lambda: TensorFormat("int8", "row"), FormatError, ("'row'",)),
    ("layer format unknown", lambda: LayerSpec(2, 4, 32, 32, format="int5"), FormatError, ("int5", "int4")),
    ("layout format unknown", lambda: CacheLayout((SPEC,), "int5"), FormatError, ("int5", "int4")),
    ("layers absurd", opened(layers=2**80), LayoutError, ("layers", "65536")),
    ("layers of 5000 digits", opened(layers=10**5000), LayoutError, ("layers", "<int>")),
    ("kv_heads absurd", opened(kv_heads=2**80), LayoutError, ("kv_heads", "2**31")),
    ("query_heads absurd", opened(query_heads=2**80), LayoutError, ("query_heads", "2**31")),
    ("head_dim absurd", opened(head_dim=2**80), LayoutError, ("key_dim", "2**31")),
    ("value_dim absurd", opened(value_dim=2**80), LayoutError, ("value_dim", "2**31")),
    ("window absurd", opened(window=2**80), LayoutError, ("window", "2**31")),
    ("page_size absurd", opened(page_size=2**80), LayoutError, ("page_size", "2**31")),
    ("tokens absurd", opened(tokens=2**80), InvalidArgument, ("tokens", "2**31")),
    ("tokens of 5000 digits", opened(tokens=10**5000), InvalidArgument, ("tokens", "2**31")),
    ("pages absurd", opened(tokens=..., pages=2**80), InvalidArgument, ("pages", "2**31")),
    ("share_prefixes as text", opened(share_prefixes="no"), InvalidArgument, ("share_prefixes", "'no'")),
    ("format group of many digits", opened(format="int8:g" + "9" * 5000), FormatError, ("2**32 - 1",)),
    ("format sink of many digits", opened(format="int8,sink=" + "9" * 5000), FormatError, ("sink=", "2**32 - 1")),
    ("format recent absurd", opened(format="int8,recent=4294967295"), FormatError, ("recent", "2**31")),
    ("format rotate of many digits", opened(format="int8,rotate=" + "9" * 5000), FormatError, ("rotate=",)),
    ("format outliers of many digits", opened(format="int8:outliers=" + "9" * 5000), FormatError, ("outliers=",)),
    ("format digits of another script", opened(format="int8:g\u0661\u0666"), FormatError, ("unknown option",)),
    ("format sink of another script", opened(format="int8,sink=\u0664"), FormatError, ("sink=", "number of tokens")),
    ("format raised digits", opened(format="int8,recent=\u00b2"), FormatError, ("recent=", "number of tokens")),
    ("device index of another script", opened(device="cpu:\u0661"), InvalidArgument, ("a number from 0",)),
    ("device index of many digits", opened(device="cpu:" + "9" * 5000), InvalidArgument, ("a number from 0",)),
    ("cache format of texts", lambda: CacheFormat("int8", "int8"), FormatError, ("key", "'int8'", "CacheFormat.parse")),
    ("cache format of a tensor format and None", lambda: CacheFormat(TensorFormat("int8"), None), FormatError,
     ("value", "None")),
    ("near as text", lambda: CacheFormat(TensorFormat("int8"), TensorFormat("int8"), recent=4, near="bf16"),
     FormatError, ("near", "'bf16'")),
    ("rope as text", lambda: CacheFormat(TensorFormat("int8"), TensorFormat("int8"), rope="bf16"), FormatError,
     ("rope", "'bf16'")),
    ("rotate True", lambda: CacheFormat(TensorFormat("int8"), TensorFormat("int8"), rotate=True), FormatError,
     ("rotate", "True")),
    ("sink True", lambda: CacheFormat(TensorFormat("int8"), TensorFormat("int8"), sink=True), FormatError,
     ("sink", "True")),
    ("code as a list", lambda: TensorFormat(["int8"]), FormatError, ("unknown code", "['int8']")),
    ("scale dtype as a list", lambda: TensorFormat("int8", scale_dtype=["fp32"]), FormatError, ("['fp32']",)),
    ("group as text", lambda: TensorFormat("int8", "group", "16"), FormatError, ("group", "'16'")),
    ("group True", lambda: TensorFormat("int8", "group", True), FormatError, ("group", "True")),
    ("symmetric as a number", lambda: TensorFormat("int8", symmetric=0), FormatError, ("symmetric", "0")),
    ("static as text", lambda: TensorFormat("int8", "head", static="yes"), FormatError, ("static", "'yes'")),
    ("granularity as a list", lambda: TensorFormat("int8", ["token"]), FormatError, ("granularity", "['token']")),
    ("layout of no layers", lambda: CacheLayout(3, "int8"), LayoutError, ("tuple of LayerSpec", "3")),
    ("layout of texts", lambda: CacheLayout(["full"], "int8"), LayoutError, ("tuple of LayerSpec", "'full'")),
    ("shares as text", lambda: LayerSpec(2, 4, 32, 32, shares="0"), LayoutError, ("shares", "'0'")),
    ("shares True", lambda: LayerSpec(2, 4, 32, 32, shares=True), LayoutError, ("shares", "True")),
    ("shares negative", lambda: LayerSpec(2, 4, 32, 32, shares=-1), LayoutError, ("shares", "-1")),
    ("latent as text", lambda: LayerSpec(1, 4, 32, 16, latent="yes"), LayoutError, ("latent", "'yes'")),
    ("scale beyond floats", scaled([0.1, 10**400]), ScaleError, ("layer 0 K", "numbers")),
    ("group layout by hand", lambda: GroupLayout(CacheFormat.parse("int4"), 1, 2, 4, 33, 32, 16), LayoutError, ("33",)),
]  # fmt: skip


@table(OPENING)
def test_opening(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are judged before any backend is loaded, except for the device string itself."""
    if "device" not in row[0] and "backend" not in row[0]:
        from kvport import registry

        def load(text: str) -> Any:
            raise AssertionError("a backend was loaded before the arguments were judged")

        monkeypatch.setattr(registry, "load_backend", load)
    check(row)


# --- sequences ------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """A cache with one sequence of 20 tokens (page size 16), another cache, and tensors that fit."""

    cache: PagedCache
    sequence: Sequence
    other: PagedCache
    stranger: Sequence
    freed: Sequence

    def kv(self, tokens: int = 3) -> tuple[Tensor, Tensor]:
        return support.kv(self.cache.layout, 0, 1, tokens)

    def query(self, tokens: int = 3) -> Tensor:
        return support.queries(self.cache.layout, 0, 1, tokens)


@pytest.fixture
def bench() -> Bench:
    cache, other = support.uniform(layers=2), support.uniform(layers=2)
    freed = support.fill(cache, 3, 5)
    freed.free()
    return Bench(cache, support.fill(cache, 1, 20), other, support.fill(other, 1, 20), freed)


SEQUENCES: list[Row] = [
    ("step of nothing", lambda b: b.cache.step({}), InvalidArgument, ("non-empty mapping",)),
    ("step of a list", lambda b: b.cache.step([b.sequence]), InvalidArgument, ("mapping", "{sequence:")),
    ("step of a sequence", lambda b: b.cache.step(b.sequence), InvalidArgument, ("mapping",)),
    ("step of None", lambda b: b.cache.step(None), InvalidArgument, ("mapping",)),
    ("step by number", lambda b: b.cache.step({1: 3}), InvalidArgument, ("sequences of this cache", "int")),
    ("negative count", lambda b: b.cache.step({b.sequence: -1}), InvalidArgument, (">= 0", "-1")),
    ("float count", lambda b: b.cache.step({b.sequence: 2.0}), InvalidArgument, ("1-d run of", "2.0")),
    ("bool count", lambda b: b.cache.step({b.sequence: True}), InvalidArgument, ("1-d run of", "True")),
    ("count None", lambda b: b.cache.step({b.sequence: None}), InvalidArgument, ("None",)),
    ("float ids", lambda b: b.cache.step({b.sequence: [1.0, 2.0]}), InvalidArgument, ("integers", "[1.0, 2.0]")),
    ("float tensor of ids", lambda b: b.cache.step({b.sequence: torch.ones(3)}), InvalidArgument, ("integers",)),
    ("ids of two rows", lambda b: b.cache.step({b.sequence: [[1, 2], [3, 4]]}), InvalidArgument, ("1-d run",)),
    ("ragged ids", lambda b: b.cache.step({b.sequence: [[1], [3, 4]]}), InvalidArgument, ("1-d run",)),
    ("text as ids", lambda b: b.cache.step({b.sequence: "hello"}), InvalidArgument, ("integers", "hello")),
    ("huge ids", lambda b: b.cache.step({b.sequence: [2**63]}), InvalidArgument, ("64-bit",)),
    ("ids on meta", lambda b: b.cache.step({b.sequence: torch.ones(3, dtype=torch.int64, device="meta")}),
     InvalidArgument, ("1-d run",)),
    ("a generator of ids", lambda b: b.cache.step({b.sequence: (i for i in range(3))}), InvalidArgument, ("1-d run",)),
    ("absurd count", lambda b: b.cache.step({b.sequence: 2**80}), InvalidArgument, ("new tokens", "2147483627")),
    ("count of 5000 digits", lambda b: b.cache.step({b.sequence: 10**5000}), InvalidArgument, ("new tokens",)),
    ("bools as ids", lambda b: b.cache.step({b.sequence: [1, True]}), InvalidArgument, ("integers", "True")),
    ("ids of 5000 digits", lambda b: b.cache.step({b.sequence: [10**5000]}), InvalidArgument, ("64-bit",)),
    ("fresh unknown", lambda b: b.cache.step({b.sequence: 1}, fresh="new"), InvalidArgument, ("'exact'", "'new'")),
    ("fresh a list", lambda b: b.cache.step({b.sequence: 1}, fresh=["exact"]), InvalidArgument, ("'exact'",)),
    ("foreign sequence", lambda b: b.cache.step({b.stranger: 1}), SequenceError, ("another cache",)),
    ("freed sequence", lambda b: b.cache.step({b.freed: 1}), SequenceError, ("freed",)),
    ("more than the pool", lambda b: b.cache.step({b.sequence: 10_000}), OutOfPages, ("needs", "free", "more pages")),
    ("fork of a freed one", lambda b: b.freed.fork(), SequenceError, ("cannot fork", "freed")),
    ("truncate of a freed one", lambda b: b.freed.truncate(0), SequenceError, ("cannot truncate", "freed")),
    ("truncate too long", lambda b: b.sequence.truncate(21), SequenceError, ("truncate(21)", "20 tokens", "0 .. 20")),
    ("truncate negative", lambda b: b.sequence.truncate(-1), SequenceError, ("truncate(-1)", "0 .. 20")),
    ("truncate float", lambda b: b.sequence.truncate(3.0), SequenceError, ("truncate(3.0)",)),
    ("truncate bool", lambda b: b.sequence.truncate(True), SequenceError, ("truncate(True)",)),
    ("truncate None", lambda b: b.sequence.truncate(None), SequenceError, ("truncate(None)",)),
    ("pin without tiers", lambda b: b.sequence.pin(3), Unsupported, ("int8", "recent=N")),
    ("match of a number", lambda b: b.cache.match(5), InvalidArgument, ("1-d run",)),
    ("match of floats", lambda b: b.cache.match([0.5]), InvalidArgument, ("integers",)),
    ("match of text", lambda b: b.cache.match("hello"), InvalidArgument, ("integers",)),
    ("match with pin None", lambda b: b.cache.match([1], pin=None), SequenceError, ("pin(None)",)),
    ("match with pin True", lambda b: b.cache.match([1], pin=True), SequenceError, ("pin(True)",)),
    ("match with a negative pin", lambda b: b.cache.match([1], pin=-1), SequenceError, ("pin(-1)", ">= 0")),
    ("match with an absurd pin", lambda b: b.cache.match([1], pin=2**80), SequenceError, ("2**31",)),
    ("match with a pin of 5000 digits", lambda b: b.cache.match([1], pin=10**5000), SequenceError, ("2**31",)),
    ("match with a pin without tiers", lambda b: b.cache.match([1], pin=1), Unsupported, ("int8", "recent=N")),
    ("pages of a group past the end", lambda b: b.sequence.pages(1), LayoutError, ("group 1", "0 .. 0")),
    ("pages of group True", lambda b: b.sequence.pages(True), LayoutError, ("group True",)),
    ("pages of the middle", lambda b: b.sequence.pages(0, "middle"), SequenceError, ("'far' or 'near'", "'middle'")),
    ("pages of a freed one", lambda b: b.freed.pages(), SequenceError, ("freed",)),
    ("sealed length of a group past the end", lambda b: b.sequence.sealed_length(-1), LayoutError, ("group -1",)),
    ("truncate to 5000 digits", lambda b: b.sequence.truncate(10**5000), SequenceError, ("0 .. 20",)),
    ("gather of a foreign one", lambda b: b.cache.gather(b.stranger, 0), SequenceError, ("another cache",)),
    ("gather of a freed one", lambda b: b.cache.gather(b.freed, 0), SequenceError, ("freed",)),
    ("gather of a number", lambda b: b.cache.gather(1, 0), InvalidArgument, ("sequence", "int")),
    ("gather of a layer past the end", lambda b: b.cache.gather(b.sequence, 2), LayoutError, ("layer 2", "0 .. 1")),
    ("gather to int", lambda b: b.cache.gather(b.sequence, 0, torch.int8), InvalidArgument, ("int8", "bfloat16")),
    ("gather to text", lambda b: b.cache.gather(b.sequence, 0, "fp32"), InvalidArgument, ("fp32", "bfloat16")),
    ("export of a foreign one", lambda b: b.cache.export(b.stranger), SequenceError, ("another cache",)),
    ("export of a freed one", lambda b: b.cache.export(b.freed), SequenceError, ("freed",)),
    ("export of a number", lambda b: b.cache.export(1), InvalidArgument, ("sequence", "int")),
    ("insert of a path", lambda b: b.cache.insert("image.safetensors"), InvalidArgument, ("PageImage.load", "str")),
    ("a deep copy", lambda b: copy.deepcopy(b.cache), KVPortError, ("fork", "second cache")),
    ("a copy", lambda b: copy.copy(b.cache), KVPortError, ("fork", "second cache")),
    ("a pickle", lambda b: pickle.dumps(b.cache), KVPortError, ("fork", "export and insert")),
    ("a copy of a sequence", lambda b: copy.copy(b.sequence), SequenceError, ("fork()", "export")),
    ("a deep copy of a sequence", lambda b: copy.deepcopy(b.sequence), SequenceError, ("fork()", "export")),
    ("a pickle of a sequence", lambda b: pickle.dumps([b.sequence]), SequenceError, ("fork()", "export")),
]  # fmt: skip


@table(SEQUENCES)
def test_sequences(row: Row, bench: Bench) -> None:
    before = support.snapshot(bench.cache), support.snapshot(bench.other)
    check(row, bench)
    assert (support.snapshot(bench.cache), support.snapshot(bench.other)) == before
    assert bench.cache.check() == ()
    support.run_step(bench.cache, {bench.sequence: 1}, 1)


# --- inside a step --------------------------------------------------------------------------------------------------


def append(
    key: Callable[[Tensor], Any] = lambda t: t, value: Callable[[Tensor], Any] = lambda t: t, layer: Any = 0
) -> Any:
    def call(b: Bench, step: Step) -> None:
        k, v = b.kv()
        step.append(layer, key(k), value(v))

    return call


def attend(query: Callable[[Tensor], Any] = lambda t: t, layer: Any = 0, **more: Any) -> Any:
    def call(b: Bench, step: Step) -> None:
        step.append(0, *b.kv())
        step.attend(layer, query(b.query()), **more)

    return call


def twice(b: Bench, step: Step) -> None:
    step.append(0, *b.kv())
    step.append(0, *b.kv())


def needing_grad(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


STEPS: list[Row] = [
    ("key of rank 2", append(lambda t: t[0]), InvalidArgument, ("key", "(2, 32)", "(3, 2, 32)")),
    ("key of rank 4", append(lambda t: t[None]), InvalidArgument, ("key", "(1, 3, 2, 32)", "(3, 2, 32)")),
    ("key heads first", append(lambda t: t.transpose(0, 1)), InvalidArgument, ("key", "(2, 3, 32)", "(3, 2, 32)")),
    ("key of query heads", append(lambda t: t.repeat(1, 2, 1)), InvalidArgument, ("key", "(3, 4, 32)", "(3, 2, 32)")),
    ("key of another dim", append(lambda t: t[..., :16]), InvalidArgument, ("key", "(3, 2, 16)", "(3, 2, 32)")),
    ("key of fewer tokens", append(lambda t: t[:2]), InvalidArgument, ("key", "(2, 2, 32)", "(3, 2, 32)")),
    ("value of fewer tokens", append(value=lambda t: t[:2]), InvalidArgument, ("value", "(2, 2, 32)", "(3, 2, 32)")),
    ("value of another dim", append(value=lambda t: t[..., :16]), InvalidArgument, ("value", "(3, 2, 16)")),
    ("value missing", append(value=lambda t: None), InvalidArgument, ("value", "NoneType")),
    ("key as numpy", append(lambda t: t.numpy()), InvalidArgument, ("key", "torch tensor", "ndarray")),
    ("key as list", append(lambda t: t.tolist()), InvalidArgument, ("key", "torch tensor", "list")),
    ("key double", append(lambda t: t.double()), InvalidArgument, ("key", "float64", "bfloat16")),
    ("key int8", append(lambda t: t.to(torch.int8)), InvalidArgument, ("key", "int8", "bfloat16")),
    ("value complex", append(value=lambda t: t.to(torch.complex64)), InvalidArgument, ("value", "complex64")),
    ("key on meta", append(lambda t: t.to("meta")), InvalidArgument, ("key", "meta", ".to('cpu')")),
    ("value on meta", append(value=lambda t: t.to("meta")), InvalidArgument, ("value", "meta", ".to('cpu')")),
    ("key with grad", append(needing_grad), InvalidArgument, ("key", "grad", "no_grad")),
    ("value with grad", append(value=needing_grad), InvalidArgument, ("value", "grad", "no_grad")),
    ("append twice", twice, StepError, ("layer 0", "already appended")),
    ("layer past the end", append(layer=2), LayoutError, ("layer 2", "0 .. 1")),
    ("layer negative", append(layer=-1), LayoutError, ("layer -1", "0 .. 1")),
    ("layer float", append(layer=0.0), LayoutError, ("layer 0.0", "0 .. 1")),
    ("layer bool", append(layer=True), LayoutError, ("layer True", "0 .. 1")),
    ("layer None", append(layer=None), LayoutError, ("layer None", "0 .. 1")),
    ("attend before append", attend(layer=1), StepError, ("layer 1", "appended", "before")),
    ("attend past the end", attend(layer=2), LayoutError, ("layer 2", "0 .. 1")),
    ("gather before append", lambda b, s: s.gather(0), StepError, ("layer 0", "appended", "before")),
    ("gather to int in a step", lambda b, s: (append()(b, s), s.gather(0, torch.int8)), InvalidArgument, ("int8",)),
    ("query of KV heads", attend(lambda t: t[:, :2]), InvalidArgument, ("query", "(3, 2, 32)", "(3, 4, 32)")),
    ("query of rank 2", attend(lambda t: t[0]), InvalidArgument, ("query", "(4, 32)", "(3, 4, 32)")),
    ("query of fewer tokens", attend(lambda t: t[:1]), InvalidArgument, ("query", "(1, 4, 32)", "(3, 4, 32)")),
    ("query double", attend(lambda t: t.double()), InvalidArgument, ("query", "float64")),
    ("query on meta", attend(lambda t: t.to("meta")), InvalidArgument, ("query", "meta")),
    ("query with grad", attend(needing_grad), InvalidArgument, ("query", "grad")),
    ("query None", attend(lambda t: None), InvalidArgument, ("query", "NoneType")),
    ("scale NaN", attend(scale=float("nan")), InvalidArgument, ("scale", "finite", "nan")),
    ("scale infinite", attend(scale=float("inf")), InvalidArgument, ("scale", "finite", "inf")),
    ("scale text", attend(scale="0.1"), InvalidArgument, ("scale", "finite", "'0.1'")),
    ("scale a tensor of many", attend(scale=torch.ones(2)), InvalidArgument, ("scale", "finite")),
    ("softcap zero", attend(softcap=0.0), InvalidArgument, ("softcap", "positive", "0.0")),
    ("softcap negative", attend(softcap=-1.0), InvalidArgument, ("softcap", "positive", "-1.0")),
    ("softcap NaN", attend(softcap=float("nan")), InvalidArgument, ("softcap", "nan")),
    ("softcap text", attend(softcap="50"), InvalidArgument, ("softcap", "'50'")),
    ("sinks of KV heads", attend(sinks=torch.zeros(2)), InvalidArgument, ("sinks", "(2,)", "(4,)")),
    ("sinks as numbers", attend(sinks=[0.0] * 4), InvalidArgument, ("sinks", "list")),
    ("sinks int", attend(sinks=torch.zeros(4, dtype=torch.int64)), InvalidArgument, ("sinks", "int64")),
    ("sinks on meta", attend(sinks=torch.zeros(4, device="meta")), InvalidArgument, ("sinks", "meta")),
    ("sinks with grad", attend(sinks=torch.zeros(4, requires_grad=True)), InvalidArgument, ("sinks", "grad")),
    ("key sparse", append(lambda t: t.to_sparse()), InvalidArgument, ("key", "sparse_coo", "to_dense")),
    ("value sparse", append(value=lambda t: t.reshape(6, 32).to_sparse_csr()), InvalidArgument, ("value", "sparse")),
    ("key nested", append(lambda t: torch.nested.nested_tensor([t[0], t[1]])), InvalidArgument, ("key", "nested")),
    ("key quantized", append(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)), InvalidArgument,
     ("key", "qint8")),
    ("key complex", append(lambda t: t.to(torch.complex64)), InvalidArgument, ("key", "complex64")),
    ("query sparse", attend(lambda t: t.to_sparse()), InvalidArgument, ("query", "sparse")),
    ("scale beyond floats", attend(scale=10**400), InvalidArgument, ("scale", "finite")),
    ("scale of 5000 digits", attend(scale=10**5000), InvalidArgument, ("scale", "finite")),
    ("scale beyond float32", attend(scale=1e300), InvalidArgument, ("scale", "float32", "1e+300")),
    ("scale bool", attend(scale=True), InvalidArgument, ("scale", "True")),
    ("scale complex", attend(scale=1j), InvalidArgument, ("scale", "1j")),
    ("softcap beyond floats", attend(softcap=10**400), InvalidArgument, ("softcap", "positive")),
    ("softcap subnormal", attend(softcap=1e-42), InvalidArgument, ("softcap", "normal", "1e-42")),
    ("softcap bool", attend(softcap=True), InvalidArgument, ("softcap", "True")),
    ("sinks sparse", attend(sinks=torch.zeros(4).to_sparse()), InvalidArgument, ("sinks", "sparse")),
    ("a copy of a step", lambda b, s: copy.copy(s), StepError, ("cannot be copied", "cache.step")),
    ("a deep copy of a step", lambda b, s: copy.deepcopy(s), StepError, ("cannot be copied",)),
    ("a pickle of a step", lambda b, s: pickle.dumps(s), StepError, ("cannot be copied",)),
    ("a step in a step", lambda b, s: b.cache.step({b.sequence: 1}), StepError, ("begin a step", "step is open")),
    ("a sequence in a step", lambda b, s: b.cache.sequence(), StepError, ("make a sequence",)),
    ("a match in a step", lambda b, s: b.cache.match([1]), StepError, ("match",)),
    ("fork in a step", lambda b, s: b.sequence.fork(), StepError, ("cannot fork", "inside a step")),
    ("truncate in a step", lambda b, s: b.sequence.truncate(3), StepError, ("cannot truncate", "inside a step")),
    ("free in a step", lambda b, s: b.sequence.free(), StepError, ("cannot free", "inside a step")),
    ("gather a sequence in a step", lambda b, s: b.cache.gather(b.sequence, 0), StepError, ("inside a step",)),
    ("export in a step", lambda b, s: b.cache.export(b.sequence), StepError, ("inside a step",)),
    ("insert in a step", lambda b, s: b.cache.insert(b.other.export(b.stranger)), StepError, ("import", "is open")),
    ("check in a step", lambda b, s: b.cache.check(), StepError, ("check",)),
    ("close in a step", lambda b, s: b.cache.close(), StepError, ("close",)),
    ("commit too early", lambda b, s: (append()(b, s), s.commit()), IncompleteStep, ("layers [1]", "rolled back")),
]  # fmt: skip


@table(STEPS)
@pytest.mark.filterwarnings("ignore:(torch.quantize_per_tensor|Sparse CSR|The PyTorch API of nested)")
def test_steps(row: Row, bench: Bench) -> None:
    before = support.snapshot(bench.cache)
    step = bench.cache.step({bench.sequence: 3})
    check(row, bench, step)
    if row[2] is not IncompleteStep:  # the step is still open and can be finished
        for layer in set(range(2)) - step._appended:
            step.append(layer, *bench.kv())
        step.attend(0, bench.query())
        step.rollback()
    assert support.snapshot(bench.cache) == before
    assert bench.cache.check() == ()


def test_grad_is_fine_where_it_is_off(bench: Bench) -> None:
    key, value = (t.requires_grad_() for t in bench.kv())
    query = bench.query().requires_grad_()
    with torch.no_grad(), bench.cache.step({bench.sequence: 3}) as step:
        for layer in range(2):
            step.append(layer, key, value)
        assert not step.attend(0, query).output.requires_grad


def test_a_step_that_ended_takes_nothing(bench: Bench) -> None:
    with bench.cache.step({bench.sequence: 3}) as step:
        support.append_all(step)
    rows: list[Row] = [
        ("append", lambda: step.append(0, *bench.kv()), StepError, ("has ended", "cache.step")),
        ("attend", lambda: step.attend(0, bench.query()), StepError, ("has ended",)),
        ("gather", lambda: step.gather(0), StepError, ("has ended",)),
        ("commit", step.commit, StepError, ("has ended",)),
        ("rollback", step.rollback, StepError, ("has ended",)),
        ("enter", step.__enter__, StepError, ("has ended",)),
    ]
    for row in rows:
        check(row)
    assert bench.sequence.length == 23


def test_layers_that_share_kv_are_appended_once() -> None:
    specs = (SPEC, LayerSpec(kv_heads=2, query_heads=4, key_dim=32, value_dim=32, shares=0))
    cache = support.open_cache(CacheLayout(specs, CacheFormat.parse("int8"), 16), 8)
    with cache.step({cache.sequence(): 3}) as step:
        key, value = support.kv(cache.layout, 0, 1, 3)
        check(("", lambda: step.append(1, key, value), StepError, ("layer 1", "layer 0", "attend here")))
        check(("", lambda: step.attend(1, support.queries(cache.layout, 1, 1, 3)), StepError, ("layer 0", "before")))
        step.append(0, key, value)
        assert step.attend(1, support.queries(cache.layout, 1, 1, 3)).output.shape == (3, 4, 32)


# --- the end of a cache ---------------------------------------------------------------------------------------------


CLOSED: list[Row] = [
    ("sequence", lambda b, i: b.cache.sequence(), ClosedError, ("closed cache", "kvport.open")),
    ("match", lambda b, i: b.cache.match([1]), ClosedError, ("closed cache",)),
    ("step", lambda b, i: b.cache.step({b.sequence: 1}), ClosedError, ("closed cache",)),
    ("gather", lambda b, i: b.cache.gather(b.sequence, 0), ClosedError, ("closed cache",)),
    ("export", lambda b, i: b.cache.export(b.sequence), ClosedError, ("closed cache",)),
    ("insert", lambda b, i: b.cache.insert(i), ClosedError, ("closed cache",)),
    ("stats", lambda b, i: b.cache.stats(), ClosedError, ("closed cache",)),
    ("check", lambda b, i: b.cache.check(), ClosedError, ("closed cache",)),
    ("fork", lambda b, i: b.sequence.fork(), ClosedError, ("closed cache",)),
    ("truncate", lambda b, i: b.sequence.truncate(0), ClosedError, ("closed cache",)),
    ("pin", lambda b, i: b.sequence.pin(0), ClosedError, ("closed cache",)),
    ("pages", lambda b, i: b.sequence.pages(), ClosedError, ("closed cache",)),
    ("sealed length", lambda b, i: b.sequence.sealed_length(), ClosedError, ("closed cache",)),
    ("canonical bytes", lambda b, i: b.cache.canonical_bytes(), ClosedError, ("closed cache",)),
]


@table(CLOSED)
def test_closed(row: Row, bench: Bench) -> None:
    image = bench.cache.export(bench.sequence)
    bench.cache.close()
    bench.cache.close()  # twice is harmless
    check(row, bench, image)
    assert not bench.sequence.alive
    assert bench.cache.sequences == ()
    assert len(bench.cache.prefix) == 0
    assert bench.cache.info.format == "int8"  # what was opened can still be read, and printed
    assert "closed" in repr(bench.cache)
    assert "20 tokens" in repr(bench.sequence)
    bench.sequence.free()


def test_leaving_a_cache_by_an_exception_closes_it(bench: Bench) -> None:
    def use() -> None:
        with bench.cache as cache:
            cache.step({bench.sequence: 1})
            raise LookupError

    with pytest.raises(LookupError):
        use()
    with pytest.raises(ClosedError):
        bench.cache.sequence()


# --- what a backend declines ----------------------------------------------------------------------------------------


class Poor(ReferenceBackend):
    """A backend that stores int8 only, and honours neither soft caps nor sinks."""

    name = "poor"

    def support(self, layout: GroupLayout) -> kvport.Support:
        reasons = []
        if layout.format != CacheFormat.parse("int8"):
            reasons.append(f"format {layout.format} is not int8")
        if layout.page_size != 16:
            reasons.append(f"page size {layout.page_size} is not 16")
        return kvport.Support(tuple(reasons), features=kvport.FEATURES - {"softcap", "sinks", "window"})


def test_a_layout_is_refused_with_every_reason() -> None:
    backend = Poor("cpu", torch.device("cpu"))
    layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=32, format="int4", page_size=32)
    with pytest.raises(Unsupported) as caught:
        PagedCache(backend, layout, [4])
    assert caught.value.reasons == ("format int4 is not int8", "page size 32 is not 16")
    for fact in ("backend poor on cpu", "layers [0, 1]", *caught.value.reasons):
        assert fact in str(caught.value)
    windowed = CacheLayout.uniform(layers=1, kv_heads=2, head_dim=32, window=5, page_size=16)
    with pytest.raises(Unsupported, match=r"poor.*window.*5 tokens"):
        PagedCache(backend, windowed, [4])
    with pytest.raises(Unsupported, match="int4"):
        backend.allocate(layout.groups[0].layout, 3)


@pytest.mark.parametrize("option,value", [("softcap", 2.0), ("sinks", torch.zeros(2))])
def test_a_feature_that_is_lacking_is_refused_not_ignored(option: str, value: Any) -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=2, head_dim=32, page_size=16)
    cache = PagedCache(Poor("cpu", torch.device("cpu")), layout, [4])
    with cache.step({cache.sequence(): 1}) as step:
        step.append(0, *support.kv(layout, 0, 1, 1))
        with pytest.raises(Unsupported, match=f"poor on cpu .* attend to .* int8: feature {option} is not declared"):
            step.attend(0, support.queries(layout, 0, 1, 1), **{option: value})


def test_storage_that_does_not_fit_is_refused() -> None:
    backend = support.uniform().backend
    layout = CacheLayout.uniform(layers=1, kv_heads=2, head_dim=32, page_size=16).groups[0].layout
    good = {n: b.clone() for n, b in backend.buffers(backend.allocate(layout, 4)).items()}
    for name, tensor, fact in (
        ("key.codes", None, "lacks 'key.codes'"),
        ("key.codes", good["key.codes"][:, :3], "(1, 3, 16, 2, 32)"),
        ("value.scale", good["value.scale"].double(), "float64"),
        ("value.scale", good["value.scale"].to("meta"), "meta"),
    ):
        storage = {n: t for n, t in (good | {name: tensor}).items() if t is not None}
        with pytest.raises(InvalidArgument, match=re.escape(fact)):
            backend.allocate(layout, 4, storage=storage)
    assert backend.allocate(layout, 4, storage=good)


# --- the tree itself ------------------------------------------------------------------------------------------------


def test_every_error_is_exported_documented_and_of_the_right_builtin_kind() -> None:
    from kvport import errors

    classes = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    for name, cls in classes.items():
        assert issubclass(cls, KVPortError)
        assert getattr(kvport, name) is cls
        assert name in (errors.__doc__ or "")
    assert issubclass(InvalidArgument, ValueError)
    assert issubclass(kvport.MissingDependency, ImportError)


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import kvport\n"
        "try:\n    import kvport.integrations.transformers\n"
        "except kvport.MissingDependency as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("MissingDependency")
    assert "pip install" in done.stdout


def test_scales_that_are_all_one_are_warned_about() -> None:
    layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=32, page_size=16, format="int8:tensor:static")
    with pytest.warns(UserWarning, match=r"all 4 static scales are exactly 1\.0"):
        support.open_cache(layout, 4, scales=support.unit_scales(layout, SideScales(1.0)))


def test_scales_may_be_numbers_lists_arrays_or_tensors() -> None:
    """One value in several clothes gives one fingerprint, so one set of scales."""
    layout = CacheLayout.uniform(layers=2, kv_heads=2, head_dim=32, page_size=16, format="int8:tensor:static")
    found = set()
    values: tuple[Any, ...] = (0.25, np.float32(0.25), [0.25], torch.tensor(0.25), torch.tensor([0.25]), np.array(0.25))
    for value in values:
        found.add(support.open_cache(layout, 4, scales=support.unit_scales(layout, SideScales(value))).fingerprint)
    assert len(found) == 1


def test_scales_do_not_follow_the_tensor_they_came_from() -> None:
    layout = CacheLayout.uniform(layers=1, kv_heads=2, head_dim=32, page_size=16, format="int8:tensor:static")
    scale = torch.tensor(0.25)
    cache = support.open_cache(layout, 4, scales=support.unit_scales(layout, SideScales(scale)))
    sequence = support.fill(cache, 1, 3)
    before = cache.gather(sequence, 0)[0]
    scale.fill_(99.0)
    assert torch.equal(cache.gather(sequence, 0)[0], before)
