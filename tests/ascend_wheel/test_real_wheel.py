"""The recorded schemas and the emulator against a real torch_npu wheel, imported with stand-ins for CANN.

Runs only where torch_npu is importable (tox env ``ascend-wheel``; see docs/ascend.md); no device is involved. The
wheel brings its own dispatcher entries and shape functions ("meta" kernels): the emulator then adds nothing but CPU
implementations, and its shapes and dtypes must be those of the wheel. In that environment all of ``tests/ascend`` runs
on the wheel's own schemas too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch_npu") is None:
    if os.environ.get("KVPORT_ASCEND_WHEEL"):
        raise RuntimeError("KVPORT_ASCEND_WHEEL is set, but torch_npu is not installed: nothing would be tested")
    pytest.skip("torch_npu is not installed; run tox -e ascend-wheel", allow_module_level=True)

import torch
import torch_npu

from kvport_ascend import emulator, schemas
from kvport_ascend.probing import probe

VERSION = str(torch_npu.__version__).partition("+")[0]
FIA = torch.ops.npu.npu_fused_infer_attention_score
FIA_V2 = torch.ops.npu.npu_fused_infer_attention_score_v2

Q, N, D, BS, NB, B = 8, 2, 128, 32, 5, 2


def test_version_is_recorded() -> None:
    assert VERSION in schemas.versions()


def test_no_device() -> None:
    """The stand-ins drive nothing, so nothing here can be taken for a hardware result; the probe says so."""
    assert not torch.npu.is_available()
    answer = probe("npu")
    assert not answer.usable
    assert "no NPU is visible" in answer.reason


def test_without_cann_the_listing_says_so_and_the_reference_stays_usable() -> None:
    """The real wheel and no CANN, as a user has it who only ran pip: torch cannot load it, and kvport still works."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    listing = subprocess.run(
        [sys.executable, "-m", "kvport", "backends", "--json"], capture_output=True, text=True, env=environment
    )
    assert listing.returncode == 0, listing.stderr
    rows = {row["name"]: row for row in json.loads(listing.stdout)["backends"]}
    npu, emulated = rows["ascend"]["devices"]
    assert not npu["usable"]
    assert "CANN's libraries are not found" in npu["reason"]
    assert "without which this error breaks import torch" in npu["reason"]
    assert emulated["usable"]
    assert emulated["facts"]["schemas"].endswith("recorded")
    assert rows["reference"]["usable"]
    program = "import kvport; kvport.open('cpu', layers=1, kv_heads=1, head_dim=64, tokens=64).close()"
    broken = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in broken.stderr, "torch itself names the way out"
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize("name", schemas.schemas(VERSION))
def test_schema_is_the_recorded_one(name: str) -> None:
    base, _, overload = name.partition(".")
    real = str(getattr(getattr(torch.ops.npu, base), overload or "default")._schema)
    recorded = str(torch._C.parse_schema("npu::" + schemas.schemas(VERSION)[name]))
    # The wheel's generator renames the argument "self", which its YAML still has.
    assert real.replace(" input,", " self,") == recorded.replace(" input,", " self,")


def test_emulator_uses_the_schemas_of_the_wheel() -> None:
    emulator.load()
    assert not emulator.owns_schemas()
    assert emulator.loaded() == VERSION


# -- shapes: the same call on CPU tensors (emulated) and on meta tensors (the wheel's shape functions)


def decode(dtype: torch.dtype, lse: bool) -> dict[str, Any]:
    return {
        "query": torch.randn(B, Q, 1, D).to(dtype),
        "key": torch.randint(-127, 128, (NB, BS, N * D), dtype=torch.int8),
        "value": torch.randint(-127, 128, (NB, BS, N * D), dtype=torch.int8),
        "num_heads": Q,
        "num_key_value_heads": N,
        "scale": D**-0.5,
        "input_layout": "BNSD",
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "block_size": BS,
        "actual_seq_lengths_kv": [40, 64],
        "key_antiquant_scale": torch.rand(NB, N, BS),
        "value_antiquant_scale": torch.rand(NB, N, BS),
        "key_antiquant_mode": 5,
        "value_antiquant_mode": 5,
        "softmax_lse_flag": lse,
    }


def channel(dtype: torch.dtype, lse: bool) -> dict[str, Any]:
    scale = torch.rand(1, N, 1, D).to(dtype)
    return decode(dtype, lse) | {
        "key_antiquant_scale": scale,
        "value_antiquant_scale": scale,
        "key_antiquant_mode": 0,
        "value_antiquant_mode": 0,
    }


def nz(dtype: torch.dtype, lse: bool) -> dict[str, Any]:
    del dtype, lse  # the NZ cache takes one dtype and gives no LSE
    scale = torch.rand(1, 1, 128).to(torch.bfloat16)
    return {
        "query": torch.randn(1, 10, 1, 128).to(torch.bfloat16),
        "key": torch.randint(-127, 128, (3, 1, 4, 128, 32), dtype=torch.int8),
        "value": torch.randint(-127, 128, (3, 1, 4, 128, 32), dtype=torch.int8),
        "num_heads": 10,
        "num_key_value_heads": 1,
        "input_layout": "BNSD",
        "block_table": torch.tensor([[2, 1]], dtype=torch.int32),
        "block_size": 128,
        "actual_seq_lengths_kv": [200],
        "key_antiquant_scale": scale,
        "value_antiquant_scale": scale,
        "inner_precise": 1,
    }


def packed(dtype: torch.dtype, lse: bool) -> dict[str, Any]:
    return {
        "query": torch.randn(7, Q, D).to(dtype),
        "key": torch.randn(20, N, D).to(dtype),
        "value": torch.randn(20, N, D).to(dtype),
        "num_heads": Q,
        "num_key_value_heads": N,
        "input_layout": "TND",
        "actual_seq_lengths": [3, 7],
        "actual_seq_lengths_kv": [8, 20],
        "sparse_mode": 3,
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        "softmax_lse_flag": lse,
    }


def dense(dtype: torch.dtype, lse: bool) -> dict[str, Any]:
    return packed(dtype, lse) | {
        "query": torch.randn(1, 5, Q, 64).to(dtype),
        "key": torch.randn(1, 9, N, 64).to(dtype),
        "value": torch.randn(1, 9, N, 64).to(dtype),
        "input_layout": "BSND",
        "actual_seq_lengths": [5],
        "actual_seq_lengths_kv": [9],
    }


def to_meta(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("make", [decode, channel, nz, packed, dense], ids=lambda make: make.__name__)
def test_shapes_are_those_of_the_wheel(
    make: Callable[[torch.dtype, bool], dict[str, Any]], dtype: torch.dtype, lse: bool
) -> None:
    emulator.load()
    call = make(dtype, lse)
    emulated, shaped = FIA(**call), FIA(**to_meta(call))
    for ours, theirs in zip(emulated, shaped, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_shapes_of_v2() -> None:
    emulator.load()
    call = decode(torch.float16, True)
    renamed = {
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "key_antiquant_scale": "dequant_scale_key",
        "value_antiquant_scale": "dequant_scale_value",
        "key_antiquant_mode": "key_quant_mode",
        "value_antiquant_mode": "value_quant_mode",
        "softmax_lse_flag": "return_softmax_lse",
    }
    call = {renamed.get(name, name): value for name, value in call.items()}
    for ours, theirs in zip(FIA_V2(**call), FIA_V2(**to_meta(call)), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_shape_functions_do_not_check_what_the_emulator_checks() -> None:
    """Why the emulator carries the rules: a call that it refuses passes the wheel's own shape functions."""
    emulator.load()
    call = channel(torch.float16, True)
    call["key_antiquant_scale"] = call["key_antiquant_scale"].float()
    FIA(**to_meta(call))
    with pytest.raises(emulator.AclnnParameterError, match="key_scale_dtype"):
        FIA(**call)


@pytest.mark.parametrize(("name", "value"), [("num_heads", "8"), ("block_size", 1.5), ("no_such_argument", 1)])
def test_schema_refuses(name: str, value: object) -> None:
    with pytest.raises(RuntimeError, match=name):
        FIA(**(decode(torch.float16, True) | {name: value}))
