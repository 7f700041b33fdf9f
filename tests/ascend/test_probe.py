"""Every way in which an NPU is not usable has its own reason, and none of them raises.

A stand-in ``torch_npu`` package, with its own distribution metadata, is put on the search path; what it does when
imported is the case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvport_ascend.probing import EMULATED, installed_software, pairing_error, probe
from kvport_ascend.socs import SOCS, soc_of

TORCH = version("torch").partition("+")[0]

NO_CANN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")\n'
DEVICE = """
import torch
class npu:
    is_available = staticmethod(lambda: {count} > 0)
    device_count = staticmethod(lambda: {count})
    get_device_name = staticmethod(lambda index: {name!r})
torch.npu = npu
"""

NO_DRIVER = """
import torch
class npu:
    @staticmethod
    def is_available():
        raise RuntimeError("dcmi")
torch.npu = npu
"""

CASES = {
    # case: (version of torch_npu, its __init__.py, whether torch loads it by itself, expected parts of the answer)
    "wrong-torch": ("2.6.0.post5", "", False, ["unusable", "torch_npu 2.6.0.post5 is built for torch 2.6.0", TORCH]),
    "no-cann": (TORCH, NO_CANN, False, ["unusable", "CANN's libraries are not found", "libhccl.so"]),
    "autoload": (TORCH, NO_CANN, True, ["unusable", "without which this error breaks import torch", "CANN"]),
    "broken": (TORCH, "undefined_name\n", False, ["unusable", "it fails to import", "NameError"]),
    "no-device": (TORCH, DEVICE.format(count=0, name=""), False, ["unusable", "no NPU is visible"]),
    "no-driver": (
        TORCH,
        NO_DRIVER,
        False,
        ["unusable", "cannot ask the driver", "dcmi"],
    ),
    "unknown-chip": (TORCH, DEVICE.format(count=1, name="Ascend777"), False, ["unusable", "Ascend777", "Ascend910B*"]),
    "310P": (TORCH, DEVICE.format(count=1, name="Ascend310P3"), False, ["unusable", "scatter_on_soc"]),
    "910B": (TORCH, DEVICE.format(count=2, name="Ascend910B3"), False, ["usable", "'soc': 'A2'"]),
    "910_93": (TORCH, DEVICE.format(count=1, name="Ascend910_9382"), False, ["usable", "'soc': 'A3'"]),
}


def install(folder: Path, npu_version: str, source: str, autoload: bool) -> None:
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(source)
    info = folder / f"torch_npu-{npu_version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {npu_version}\n")
    if autoload:
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="a real torch_npu is installed")
@pytest.mark.parametrize("case", CASES)
def test_reason(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu_version, source, autoload, expected = CASES[case]
    install(tmp_path, npu_version, source, autoload)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "npu", None, raising=False)  # what the stand-in puts there goes when the test ends
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0" if autoload else "1")
    try:
        answer = probe("npu")
    finally:
        sys.modules.pop("torch_npu", None)
    text = f"{'usable' if answer.usable else 'unusable'} {answer.reason} {answer.facts}"
    assert text.startswith(expected[0] + " ")
    for part in expected[1:]:
        assert part in text
    assert answer.usable or answer.reason.endswith(EMULATED)


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="a real torch_npu is installed")
def test_autoload_is_what_breaks_torch(tmp_path: Path) -> None:
    """Why the reason above says so: with autoload on, nothing that imports torch can be imported, kvport neither."""
    install(tmp_path, TORCH, NO_CANN, autoload=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="a real torch_npu is installed")
def test_package_absent() -> None:
    answer = probe("npu")
    assert not answer.usable
    assert "torch-npu is not installed" in answer.reason
    assert "pip install" in answer.reason


def test_emulated_is_always_usable_and_says_which_schemas() -> None:
    answer = probe("cpu")
    assert answer.usable
    own = "torch_npu" in sys.modules
    assert answer.facts["schemas"].endswith("its own" if own else "recorded")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="a real torch_npu is installed")
def test_installed_is_not_taken_for_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_npu cannot be imported, the emulated operators have the recorded schemas, and say so."""
    install(tmp_path, TORCH, NO_CANN, autoload=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not probe("npu").usable
    assert probe("cpu").facts["schemas"].endswith("recorded")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="a real torch_npu is installed")
def test_conformance_without_a_device_stops_with_the_reason() -> None:
    """``--backend=npu`` is a usage error that says why, and what to type instead; no case is run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "kvport_conformance",
        "--backend=npu",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--backend=npu: no usable backend for 'npu'" in done.stderr
    assert "the package torch-npu is not installed" in done.stderr
    assert "ascend@cpu runs the same code on emulated operators" in done.stderr
    assert "passed" not in done.stdout


def test_reasons_are_distinct() -> None:
    texts = [parts[1] for parts in (case[3] for case in CASES.values()) if parts[0] == "unusable"]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("torch_version", "npu_version", "fits"),
    [
        ("2.13.0+cpu", "2.13.0", True),
        ("2.9.0", "2.9.0.post9", True),
        ("2.13.0", "2.12.0.post3", False),
        ("2.6.0+cpu", "2.6.0.post5", True),
        ("2.14.0a0+git1", "2.14.0", False),
    ],
)
def test_pairing(torch_version: str, npu_version: str, fits: bool) -> None:
    assert (pairing_error(torch_version, npu_version) == "") is fits


@pytest.mark.parametrize(
    ("name", "soc"),
    [
        ("Ascend910B1", "A2"),
        ("Ascend910_9391", "A3"),
        ("Ascend310P3", "310P"),
        ("Ascend950PR", "950"),
        ("Ascend910A", ""),
    ],
)
def test_families(name: str, soc: str) -> None:
    assert soc_of(name) is (SOCS[soc] if soc else None)


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch loads an installed torch_npu by itself")
def test_importing_the_plugin_does_not_import_torch_npu_nor_its_own_machinery() -> None:
    program = (
        "import sys, kvport_ascend\n"
        "kvport_ascend.kvport_backends()\n"
        "assert not [m for m in sys.modules if m.startswith(('torch_npu', 'kvport_ascend.'))]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_driver_and_cann_are_read_from_their_version_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the installers write them (package_name=..., version=..., path=...); what is not there is not made up."""
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert installed_software(tmp_path) == {}
    toolkit = tmp_path / "ascend-toolkit" / "latest" / "aarch64-linux"
    toolkit.mkdir(parents=True)
    (toolkit / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\narch=aarch64"
    )
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=24.1.rc3\nascendhal_version=7.35.23\n")
    assert installed_software(tmp_path) == {"sdk": "CANN 8.5.0", "driver": "24.1.rc3"}
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "elsewhere"))
    assert installed_software(tmp_path) == {"driver": "24.1.rc3"}
