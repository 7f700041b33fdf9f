"""Make empty stand-ins for the CANN libraries, so that a real torch_npu wheel can be imported without CANN.

torch_npu's shared libraries need ``libascendcl.so`` and a few others, which come with Huawei's CANN and not with the
wheel. What is imported here is only meant to answer questions about schemas and shape functions: this script reads
which symbols are undefined (``nm``), and compiles one library in which each of them is a function that returns 0, plus
one empty library for every other missing name. Nothing of CANN is used or copied, and no device can be driven: with
these libraries ``torch.npu.is_available()`` is False.

::

    python scripts/ascend_make_stubs.py DIR
    LD_LIBRARY_PATH=DIR python -c "import torch, torch_npu"

Needs torch and torch_npu installed (neither is imported), ``gcc`` and binutils' ``nm`` and ``readelf``.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

# The library that carries the symbols. Which of the missing names does is of no matter to the loader.
CARRIER = "libascendcl.so"
# Undefined in extension modules, and defined by the interpreter or the C library rather than by CANN.
ELSEWHERE = re.compile(r"^(_?Py|pthread_|dl[a-z]+$)")
# NNAL's library: without it the atb operators are missing, which is what a plain CANN install looks like too.
OPTIONAL = {"libatb.so"}


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed in {sys.prefix}")
    return Path(next(iter(spec.submodule_search_locations)))


def tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library: Path, kind: str) -> set[str]:
    """Names without a version tag that ``library`` defines ("--defined-only") or lacks ("--undefined-only")."""
    found = set()
    for line in tool("nm", "-D", kind, str(library)).splitlines():
        *_, letter, name = line.split()
        # A weak undefined symbol ("w") may stay undefined; a versioned one is the C or C++ library's.
        if kind == "--defined-only" or (letter == "U" and "@" not in name):
            found.add(name.partition("@")[0])
    return found


def needed(library: Path) -> set[str]:
    """Library names in the dynamic section's NEEDED entries."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", tool("readelf", "-d", str(library))))


def compile_library(folder: Path, name: str, functions: set[str]) -> None:
    source = folder / f"{name}.c"
    source.write_text("".join(f"long {function}(void) {{ return 0; }}\n" for function in sorted(functions)))
    command = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
    subprocess.run(command, check=True)


def make(folder: Path) -> dict[str, int]:
    """Write the stand-ins into ``folder``; library name -> number of functions in it."""
    npu, torch = package_folder("torch_npu"), package_folder("torch")
    own = [*npu.glob("_C*.so"), *npu.glob("lib/*.so*")]
    known = {path.name for path in (*own, *torch.glob("lib/*.so*"))}
    importing = [path for path in own if not OPTIONAL & needed(path)]
    missing = {name for path in importing for name in needed(path) if name not in known and not _on_system(name)}
    undefined = set().union(*(symbols(path, "--undefined-only") for path in importing))
    defined = set().union(*(symbols(path, "--defined-only") for path in (*own, *torch.glob("lib/*.so*"))))
    functions = {name for name in undefined - defined if not ELSEWHERE.match(name)}
    if not missing or not functions:
        raise SystemExit(f"nothing is missing in {npu}: is CANN installed here?")
    folder.mkdir(parents=True, exist_ok=True)
    missing.add(CARRIER)
    made = {name: functions if name == CARRIER else set[str]() for name in sorted(missing)}
    for name, content in made.items():
        compile_library(folder, name, content)
    return {name: len(content) for name, content in made.items()}


def _on_system(name: str) -> bool:
    return name in tool("/sbin/ldconfig", "-p") or bool(
        re.match(r"lib(c|m|dl|rt|gcc_s|stdc\+\+|pthread)\.so|ld-", name)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="make empty stand-ins for the CANN libraries torch_npu links to")
    parser.add_argument("folder", type=Path)
    for name, count in make(parser.parse_args().folder).items():
        print(f"{name}: {count} functions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
