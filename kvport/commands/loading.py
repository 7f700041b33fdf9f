"""A model and a text, as subcommands name them: ``--model`` and ``--text``."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvport.errors import InvalidArgument, MissingDependency
from kvport.files import reading
from kvport.models import Model, load_smollm2

#: What ``--model`` takes besides a folder.
SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Text:
    """Token ids ``(1, tokens)`` of a text, and the sha256 of the whole file."""

    ids: Any
    sha256: str
    name: str


def load_model(name: str) -> Model:
    """A transformers model folder, or ``smollm2``. Nothing is downloaded."""
    if name == SMOLLM2:
        return load_smollm2()
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"--model {name}: give the folder of a model (config.json, weights), or {SMOLLM2!r}")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingDependency(
            f"running a model needs transformers ({error}); install it with: pip install -U 'kvport[transformers]'"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return Model(model, tokenizer, model.config._name_or_path or folder.name, str(folder), digest)


def load_text(path: str | os.PathLike[str], tokenizer: Any, tokens: int) -> Text:
    """The first ``tokens`` tokens of a UTF-8 file, without special tokens. A shorter text is refused by its length."""
    import torch

    with reading(path, "text", "--text names a file of UTF-8 text"):
        raw = Path(path).read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"--text {os.fspath(path)} cannot be read as UTF-8: {error}") from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < min(tokens, 2):
        raise InvalidArgument(f"--text {os.fspath(path)} holds {len(ids)} tokens, at least 2 are needed")
    return Text(torch.tensor([ids]), hashlib.sha256(raw).hexdigest(), Path(path).name)
