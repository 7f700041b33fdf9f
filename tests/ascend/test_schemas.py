"""The recorded torch_npu schemas: well formed in every version, and what the backend relies on in them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from kvport_ascend import schemas

VERSIONS = schemas.versions()


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas_parse(version: str) -> None:
    found = schemas.schemas(version)
    assert len(found) >= 9
    for name, text in found.items():
        parsed = torch._C.parse_schema(f"npu::{text}")
        assert parsed.name == "npu::" + name.partition(".")[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_is_named_with_its_digest(version: str) -> None:
    record = schemas.wheel(version)
    assert record["wheel"].startswith(f"torch_npu-{version}-")
    assert re.fullmatch(r"[0-9a-f]{64}", record["sha256"])


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas_define(version: str) -> None:
    """torch.library takes every schema. In a namespace of its own: a process has only one ``npu``."""
    namespace = "kvport_test_" + version.replace(".", "_")
    library = torch.library.Library(namespace, "DEF")
    for name, text in schemas.schemas(version).items():
        library.define(text)
        base, _, overload = name.partition(".")
        assert getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")._schema is not None


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu brings its own schemas")
def test_oldest_version_is_emulated() -> None:
    """2.6 has no cache_mode; the emulator takes its schemas in a process of their own, and no second version's."""
    program = (
        "import torch\n"
        "from kvport_ascend import emulator\n"
        "emulator.load('2.6.0.post5')\n"
        "assert emulator.loaded() == '2.6.0.post5' and emulator.owns_schemas()\n"
        "try:\n"
        "    emulator.load('2.13.0')\n"
        "except RuntimeError as error:\n"
        "    assert '2.6.0.post5' in str(error)\n"
        "else:\n"
        "    raise SystemExit('a second version was loaded')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2\.13\.0"):
        schemas.schemas("1.0")


def test_drift_that_matters() -> None:
    """What docs/ascend.md says about differences between versions."""
    assert "cache_mode" not in schemas.schemas("2.6.0.post5")["npu_scatter_pa_kv_cache"]
    assert "npu_gather_pa_kv_cache" not in schemas.schemas("2.6.0.post5")
    for version in VERSIONS[1:]:
        assert "cache_mode='PA_NZ'" in schemas.schemas(version)["npu_scatter_pa_kv_cache"]
    name = "npu_fused_infer_attention_score"
    assert len({schemas.schemas(version)[name] for version in VERSIONS}) == 1


def test_emulator_is_not_loaded_by_importing() -> None:
    program = (
        "import torch\n"
        "import kvport_ascend, kvport_ascend.schemas, kvport_ascend.emulator\n"
        "defined = torch._C._jit_get_schemas_for_operator('npu::npu_incre_flash_attention')\n"
        "assert not defined or hasattr(torch, 'npu')  # torch_npu brings its own\n"
        "assert kvport_ascend.emulator.loaded() == ''\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
