"""Record the torch_npu operator schemas that kvport's Ascend backend may call.

torch_npu ships the list of its operators as YAML inside every wheel (``YAML_IN_WHEEL``). This script downloads the
wheels (nothing is imported from them, so neither CANN nor an NPU is needed), and writes one JSON file::

    python scripts/ascend_record_schemas.py                 # all of VERSIONS, into kvport_ascend/schemas.json
    python scripts/ascend_record_schemas.py --wheels DIR    # wheels that are already there
    python scripts/ascend_record_schemas.py --check         # fail if the committed file would change

The file says for every version which wheel was read and its SHA-256, and for every operator each distinct schema with
the versions that have it, so that a change between versions is visible in the file itself. Needs PyYAML.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

# Oldest and newest release of each line that kvport's documentation names; 2.13.0 is the one the tests also import.
VERSIONS = ("2.6.0.post5", "2.9.0.post9", "2.12.0.post3", "2.13.0", "2.14.0")

# What the backend calls, could call on another SoC, or is documented as an alternative in docs/ascend.md. The ".out"
# overloads of the attention operators are left out: the YAML's differ from what the wheel registers (2.13.0 has
# "Tensor[] out", the YAML two named outputs), and nothing calls them.
OPERATORS = (
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_incre_flash_attention",
    "npu_prompt_flash_attention",
    "npu_scatter_pa_kv_cache",
    "npu_gather_pa_kv_cache",
    "npu_scatter_nd_update_",
    "npu_quantize",
    "npu_dynamic_quant",
    "npu_quant_scatter_",
)

YAML_IN_WHEEL = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
SECTIONS = ("custom", "symint")  # both define operators, and they repeat each other's entries
TARGET = Path(__file__).resolve().parent.parent / "backends" / "kvport_ascend" / "schemas.json"


def download(version: str, folder: Path) -> None:
    """Fetch one wheel (CPython 3.11, x86_64) without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.11", "--dest", str(folder), f"torch-npu=={version}"]
    subprocess.run(command, check=True)


def wheel_of(version: str, folder: Path) -> Path:
    """The one wheel of this version in the folder; anything else is an error."""
    found = sorted(folder.glob(f"torch_npu-{version}-*.whl"))
    if len(found) != 1:
        raise SystemExit(f"expected one torch_npu {version} wheel in {folder}, found {[path.name for path in found]}")
    return found[0]


def operators_of(wheel: Path) -> dict[str, str]:
    """Operator name -> schema, for OPERATORS that this wheel defines. Two unequal schemas of one name are an error."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    with zipfile.ZipFile(wheel) as archive:
        document = yaml.safe_load(archive.read(YAML_IN_WHEEL))
    found: dict[str, str] = {}
    for section in SECTIONS:
        for entry in document[section]:
            schema = entry.get("func", "") if isinstance(entry, dict) else ""
            name = schema.split("(", 1)[0]
            if name not in OPERATORS:
                continue
            if found.setdefault(name, schema) != schema:
                raise SystemExit(f"{wheel.name} has two different schemas of {name}:\n{found[name]}\n{schema}")
    return found


def record(folder: Path) -> dict[str, Any]:
    """The content of schemas.json for the wheels in ``folder``."""
    wheels: dict[str, dict[str, str]] = {}
    operators: dict[str, list[dict[str, Any]]] = {name: [] for name in OPERATORS}
    for version in VERSIONS:
        wheel = wheel_of(version, folder)
        wheels[version] = {"wheel": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
        for name, schema in operators_of(wheel).items():
            same = [entry for entry in operators[name] if entry["schema"] == schema]
            if same:
                same[0]["versions"].append(version)
            else:
                operators[name].append({"schema": schema, "versions": [version]})
    return {"source": YAML_IN_WHEEL, "wheels": wheels, "operators": operators}


def main() -> int:
    parser = argparse.ArgumentParser(description="record torch_npu operator schemas from its wheels")
    parser.add_argument("--wheels", type=Path, help="folder that holds the wheels (default: download them)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file would change")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.wheels or Path(temporary)
        if arguments.wheels is None:
            for version in VERSIONS:
                download(version, folder)
        text = json.dumps(record(folder), indent=1) + "\n"
    if arguments.check:
        if text != TARGET.read_text():
            print(f"{TARGET} differs from the wheels; run this script without --check", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    print(f"wrote {TARGET} ({len(text)} bytes)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
