"""Each reason why triton cannot drive a device is its own. What imports decide runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = "from kvport_triton import availability as a\n"


def run(code: str, *, preamble: str = PREAMBLE, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, "-c", preamble + code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hook_module_imports_neither_triton_nor_torch() -> None:
    code = "import sys, kvport_triton; print([m for m in ('triton', 'torch') if m in sys.modules])"
    assert run(code, preamble="").strip() == "[]"


def test_probing_decides_nothing() -> None:
    out = run("import os, sys; p = a.probe('cpu'); a.probe('cuda')\n"
              "print(p.usable, 'triton' in sys.modules, os.environ.get('TRITON_INTERPRET'))")  # fmt: skip
    assert out.split() == ["True", "False", "None"]


def test_without_triton(tmp_path: Path) -> None:
    code = (
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "print(a.probe('cuda').reason, a.probe('cpu').reason, sep='|')"
    )
    assert run(code).strip() == "|".join(["triton is not installed; pip install 'kvport[triton]'"] * 2)


def test_interpreter_excludes_the_gpu() -> None:
    code = "b = a.load('cpu')\nprint(b.execution, b.name, b.device, a.probe('cuda').reason, sep='|')"
    execution, name, device, reason = run(code).strip().split("|")
    assert (execution, name, device) == ("interpreter", "triton", "cpu")
    assert "interpreter" in reason


def test_compiling_excludes_the_interpreter() -> None:
    code = (
        "import triton, kvport\nprint(a.probe('cpu').reason)\n"
        "try:\n    a.load('cpu')\nexcept kvport.BackendUnavailable as e:\n    print(e)"
    )
    reason, error = run(code).strip().splitlines()
    assert "already imported without TRITON_INTERPRET=1" in reason
    assert reason in error


def test_variable_asks_for_the_interpreter() -> None:
    assert "unset it" in run("print(a.probe('cuda').reason)", TRITON_INTERPRET="1")


@pytest.mark.skipif("os.environ.get('KVPORT_TRITON_DEVICE', 'cpu') != 'cpu'", reason="there is a GPU here")
def test_no_gpu_is_a_reason() -> None:
    reason = run("p = a.probe('cuda')\nprint(p.usable, p.reason)")
    assert reason.startswith("False")
    assert "without CUDA" in reason or "is_available() is False" in reason


def test_the_driver_is_read_from_where_the_kernel_module_says_it(tmp_path: Path) -> None:
    from kvport_triton.availability import driver_version

    said = tmp_path / "version"
    assert driver_version(said) is None
    for line, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (x)", "570.86.10"),
        ("nothing of the kind", None),
    ):
        said.write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
        assert driver_version(said) == version
