"""What makes Triton's interpreter affordable changes no bit, and nothing of it stays behind."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from triton_support import LAYER, Filled, layout_of

from kvport.backend import Backend

pytestmark = pytest.mark.skipif(os.environ.get("KVPORT_TRITON_DEVICE", "cpu") != "cpu", reason="compiled here")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("int8", torch.bfloat16), ("k=int4:g16:asym,v=int2:scale=bf16", torch.float16), ("fp8_e4m3", torch.float32)],
    ids=str,
)
def test_as_triton_interprets(backend: Backend, monkeypatch: pytest.MonkeyPatch, text: str, dtype: torch.dtype) -> None:
    """Append, decode, verification and merges by Triton's own interpreter, nothing replaced: the same bits."""
    import triton

    if triton.__version__.startswith("3.6."):
        pytest.skip("its own interpreter needs a numpy that takes arrays of one element for integers")

    def run() -> tuple[Any, ...]:
        layout = layout_of(text, page_size=16, window=90, dtype=dtype)
        filled = Filled(backend, layout, queries=[1, 3], lengths=[150, 70])
        out, lse = filled.attend(filled.query(), scale=0.125)
        pages = filled.arrays.page_table.flatten().unique().tolist()
        return out, lse, *backend.export_pages(filled.store, LAYER, pages).values()

    quick = run()
    with np.errstate(all="ignore"):
        monkeypatch.setattr(backend, "_on_device", lambda: nullcontext())
        plain = run()
    for ours, theirs in zip(quick, plain, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_nothing_stays(backend: Backend) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    from kvport_triton.interpreter import launching

    owners: list[Any] = [tl, tl.core, tl.math, tl.tensor, tl.block_type, tl.dtype, interpreter]
    owners += [interpreter.InterpretedFunction, type(interpreter.interpreter_semantic)]
    options = interpreter.interpreter_builder.options

    def launch() -> None:
        filled = Filled(backend, layout_of("int8"), queries=[1], lengths=[20])
        filled.attend(filled.query(), scale=0.125)

    def nest() -> None:
        with launching(check_overflow=True), launching(check_overflow=False):
            pass

    def fail() -> None:
        with pytest.raises(KeyError), launching(check_overflow=True):
            raise KeyError("a kernel's fault")

    launch()  # a first launch compiles functions, which stay
    for use in (launch, nest, fail):
        before = [dict(vars(owner)) for owner in owners]
        use()
        for owner, names in zip(owners, before, strict=True):
            changed = {n for n in names.keys() | vars(owner).keys() if vars(owner).get(n) is not names.get(n)}
            assert not changed, f"{owner} keeps {changed}"
        assert interpreter.interpreter_builder.options is options


def test_threads_take_turns(backend: Backend) -> None:
    def run() -> torch.Tensor:
        filled = Filled(backend, layout_of("int8"), queries=[1, 3], lengths=[150, 70])
        found: torch.Tensor = filled.attend(filled.query(), scale=0.125)[0]
        return found

    alone = run()
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda _: run(), range(6)):
            assert torch.equal(found, alone)


@pytest.mark.parametrize("checked", [False, True])
def test_overflow_is_checked_where_asked(backend: Backend, checked: bool) -> None:
    from triton.runtime.interpreter import interpreter_builder

    from kvport_triton.interpreter import launching

    with launching(check_overflow=checked):
        assert interpreter_builder.options.sanitize_overflow is checked
