"""For whoever has an Ascend device: run the conformance suite on it, and answer what could not be answered without.

::

    python scripts/ascend_hardware_check.py --out DIR                 # device npu:0
    python scripts/ascend_hardware_check.py --device npu:1 --out DIR
    python scripts/ascend_hardware_check.py --device ascend@cpu --out DIR --skip-conformance     # tries the script

DIR then holds ``questions.json`` (the open questions of docs/ascend.md, each with the numbers seen) and
``conformance.json`` (a report for ``kvport compare``). Each question calls the operator directly, so it is answered
also where kvport refuses the chip; what raises is recorded with its message. On a device each is asked in a process of
its own, since an operator that fails may leave the device's context unusable, crash or hang. The record says
``emulated`` where the operators were: such a record is no evidence about any device.

The exit status is that of the conformance run: 0 passed, 1 some cases failed, 4 the backend is not usable; and 2 where
nothing could be asked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 128, 128, 4
LENGTHS = [200, 77]
TABLE = [[3, 1], [2, 0]]
SCALE = 0.09
TIME_LIMIT = 300
"""Seconds for one question on a device; the first call of an operator may compile it."""

Answer = dict[str, Any]


def case(
    mode: int, dtype: torch.dtype = torch.float16, seed: int = 1, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> dict[str, Tensor]:
    """Codes and scales of a small paged cache on the host; K and V differ in range by a factor of three."""
    generator = torch.Generator().manual_seed(seed)
    shape = {0: (1, kv_heads, 1, DIM), 4: (PAGES, PAGE), 5: (PAGES, kv_heads, PAGE)}[mode]
    own = torch.float32 if mode in (4, 5) else dtype
    scales = [((torch.rand(shape, generator=generator) + 0.1) * size).to(own) for size in (0.05, 0.15)]
    codes = [torch.randint(-127, 128, (PAGES, PAGE, kv_heads * DIM), generator=generator) for _ in range(2)]
    query = torch.randn(len(LENGTHS), heads, 1, DIM, generator=generator).to(dtype)
    return {
        "query": query,
        "key": codes[0].to(torch.int8),
        "value": codes[1].to(torch.int8),
        "key_antiquant_scale": scales[0],
        "value_antiquant_scale": scales[1],
    }


def attend(device: str, mode: int, tensors: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor]:
    """The decode call that kvport makes, on the device; answers come back to the host."""
    options: dict[str, Any] = {
        "input_layout": "BNSD",
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "scale": SCALE,
        "block_table": torch.tensor(TABLE, dtype=torch.int32, device=device),
        "block_size": PAGE,
        "actual_seq_lengths_kv": LENGTHS,
        "key_antiquant_mode": mode,
        "value_antiquant_mode": mode,
        "inner_precise": 0,
        "softmax_lse_flag": True,
    }
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    query, key, value = (moved.pop(name) for name in ("query", "key", "value"))
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(query, key, value, **moved, **(options | more))
    return out.cpu(), lse.cpu()


def expected(mode: int, tensors: dict[str, Tensor], key_offset: float = 0.0, value_offset: float = 0.0) -> Any:
    """Output ``(B, heads, DIM)`` and natural-log LSE ``(B, heads)`` in float64, on the host."""
    heads, kv_heads = tensors["query"].shape[1], tensors["key"].shape[-1] // DIM
    decoded = []
    for side, offset in (("key", key_offset), ("value", value_offset)):
        codes = tensors[side].double().reshape(PAGES, PAGE, kv_heads, DIM) + offset
        scale = tensors[f"{side}_antiquant_scale"].double()
        if mode == 0:
            scale = scale.reshape(1, 1, kv_heads, DIM)
        elif mode == 4:
            scale = scale.reshape(PAGES, PAGE, 1, 1)
        else:
            scale = scale.transpose(1, 2).unsqueeze(-1)
        decoded.append(codes * scale)
    outs, lses = [], []
    for s, length in enumerate(LENGTHS):
        key, value = (side[TABLE[s]].flatten(0, 1)[:length] for side in decoded)
        key, value = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
        scores = torch.einsum("hd,lhd->hl", tensors["query"][s, :, 0].double(), key) * SCALE
        outs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), value))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


def error(seen: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted magnitude."""
    return float((seen.double() - wanted).abs().max() / wanted.abs().max())


def paged_scales(device: str, mode: int) -> Answer:
    tensors = case(mode)
    out, lse = attend(device, mode, tensors)
    wanted, wanted_lse = expected(mode, tensors)
    relative = error(out.squeeze(2), wanted)
    return {"output_error": relative, "lse_error": error(lse[..., 0, 0], wanted_lse), "agrees": relative < 2e-3}


def mode_4(device: str) -> Answer:
    """Do scales per token that live in pages (antiquant mode 4) work? No public user was found."""
    return paged_scales(device, 4)


def mode_5(device: str) -> Answer:
    """Do scales per token and head that live in pages (antiquant mode 5, kvport's int8) work?"""
    return paged_scales(device, 5)


def zero_query_row(device: str) -> Answer:
    """What does an all-zero query row give? The plain average of V is right; the source divides 127 by 0."""
    tensors = case(5)
    tensors["query"][0, 1] = 0
    out, lse = attend(device, 5, tensors)
    wanted, _ = expected(5, tensors)
    row = out[0, 1, 0]
    return {
        "finite": bool(row.isfinite().all()),
        "first_numbers": row[:4].tolist(),
        "error": error(row, wanted[0, 1]),
        "lse": float(lse[0, 1, 0, 0]),
        "lse_wanted": math.log(LENGTHS[0]),
        "other_rows_error": error(out[1].squeeze(1), wanted[1]),
    }


def zero_value_scales(device: str) -> Answer:
    """What do V scales of zero give? Zeros are right; the source divides 127 by the largest weight times scale."""
    tensors = case(5)
    tensors["value_antiquant_scale"][:, 0] = 0
    out, _ = attend(device, 5, tensors)
    wanted, _ = expected(5, tensors)
    group = HEADS // KV_HEADS
    return {
        "zeros": bool((out[:, :group] == 0).all()),
        "first_numbers": out[0, 0, 0, :4].tolist(),
        "other_heads_error": error(out[:, group:].squeeze(2), wanted[:, group:]),
    }


def lse_base(device: str) -> Answer:
    """Is the LSE in natural logarithm, softmax scale included?"""
    tensors = case(5)
    _, lse = attend(device, 5, tensors)
    _, wanted = expected(5, tensors)
    seen = lse[..., 0, 0]
    return {
        "natural": error(seen, wanted),
        "base_2": error(seen, wanted / math.log(2)),
        "seen": seen.flatten().tolist(),
    }


def skipped_slots(device: str) -> Answer:
    """Does slot -1 write nothing (cache_mode "Norm")? The documentation's range begins at 0."""
    caches = [torch.zeros(PAGES, PAGE, KV_HEADS, DIM, dtype=torch.int8, device=device) for _ in range(2)]
    rows = torch.ones(3, KV_HEADS, DIM, dtype=torch.int8, device=device)
    slots = torch.tensor([5, -1, 300], device=device)
    torch.ops.npu.npu_scatter_pa_kv_cache(rows, rows, *caches, slots, cache_mode="Norm")
    written = [
        cache.flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist() for cache in (c.cpu() for c in caches)
    ]
    return {"slots_written": written, "skips": written == [[5, 300], [5, 300]]}


def offset_sign(device: str) -> Answer:
    """Is the decoded number (code + offset) * scale, not (code - offset) * scale?"""
    tensors = case(0)
    offsets = {
        f"{side}_antiquant_offset": torch.full_like(tensors[f"{side}_antiquant_scale"], number)
        for side, number in (("key", 8.0), ("value", 24.0))
    }
    out, _ = attend(device, 0, tensors | offsets)
    added, _ = expected(0, tensors, 8.0, 24.0)
    subtracted, _ = expected(0, tensors, -8.0, -24.0)
    return {"added": error(out.squeeze(2), added), "subtracted": error(out.squeeze(2), subtracted)}


def empty_sequence(device: str) -> Answer:
    """What does a sequence without KV tokens give? Zeros are documented for the output, nothing for the LSE."""
    out, lse = attend(device, 5, case(5), actual_seq_lengths_kv=[LENGTHS[0], 0])
    return {"zeros": bool((out[1] == 0).all()), "lse": [float(x) for x in lse[1].flatten()]}


def precision(device: str) -> Answer:
    """How far are two planes (inner_precise 1) and three (0) from the exact output?"""
    found: Answer = {}
    for value in (0, 1):
        tensors = case(5)
        out, lse = attend(device, 5, tensors, inner_precise=value)
        wanted, wanted_lse = expected(5, tensors)
        found[f"inner_precise_{value}"] = {
            "output": error(out.squeeze(2), wanted),  # the cast to float16 hides most of it
            "lse": error(lse[..., 0, 0], wanted_lse),
        }
    return found


def lse_when_off(device: str) -> Answer:
    """What shape has the LSE when it is not asked for? Documentation: (1,); shape function: (0,)."""
    _, lse = attend(device, 5, case(5), softmax_lse_flag=False)
    return {"shape": list(lse.shape)}


def packed_head_dim_64(device: str) -> Answer:
    """Is TND with head dim 64 refused on A2 and A3, as documented? kvport takes BSND there."""
    query, key = torch.ones(3, HEADS, 64, dtype=torch.float16), torch.ones(5, KV_HEADS, 64, dtype=torch.float16)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        *(t.to(device) for t in (query, key, key)),
        input_layout="TND",
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=SCALE,
        actual_seq_lengths=[3],
        actual_seq_lengths_kv=[5],
        sparse_mode=3,
        atten_mask=mask.to(device),
    )
    return {"refused": False, "right": bool((out.cpu() == 1).all())}


def nz_decode(device: str, heads: int, kv_heads: int, *, lse: bool = False) -> Answer:
    """Pages written by the scatter operator in mode PA_NZ and decoded from five dimensions, kvport's NZ route."""
    tensors = case(0, torch.bfloat16, heads=heads, kv_heads=kv_heads)
    caches = [torch.zeros(PAGES, kv_heads * DIM // 32, PAGE, 32, dtype=torch.int8, device=device) for _ in range(2)]
    rows = [tensors[side].reshape(-1, kv_heads, DIM).to(device) for side in ("key", "value")]
    slots = torch.arange(PAGES * PAGE, device=device)
    torch.ops.npu.npu_scatter_pa_kv_cache(*rows, *caches, slots, cache_mode="PA_NZ")
    pages = [cache.unflatten(1, (kv_heads, DIM // 32)) for cache in caches]
    scales = {f"{side}_antiquant_scale": tensors[f"{side}_antiquant_scale"][0] for side in ("key", "value")}
    given = {"query": tensors["query"], "key": pages[0], "value": pages[1], **scales}
    counts = {"num_heads": heads, "num_key_value_heads": kv_heads}
    out, seen = attend(device, 0, given, inner_precise=1, softmax_lse_flag=lse, **counts)
    wanted, wanted_lse = expected(0, tensors)
    relative = error(out.squeeze(2), wanted)
    answer: Answer = {"output_error": relative, "agrees": relative < 1e-2}
    return {**answer, "lse_error": error(seen[..., 0, 0], wanted_lse)} if lse else answer


def nz_pages(device: str) -> Answer:
    """Do NZ pages (KVPORT_ASCEND_LAYOUT=nz) work with a documented pair of head counts, (10, 1)?"""
    return nz_decode(device, 10, 1)


def nz_other_heads(device: str) -> Answer:
    """Do NZ pages work with (16, 2) heads? The documentation lists four other pairs; a user reports this one."""
    return nz_decode(device, 16, 2)


def nz_lse(device: str) -> Answer:
    """Is the LSE over NZ pages refused, as the host source does on A2 and A3? The 950 is not known."""
    return nz_decode(device, 10, 1, lse=True)


QUESTIONS: tuple[Callable[[str], Answer], ...] = (
    mode_5,
    mode_4,
    zero_query_row,
    zero_value_scales,
    lse_base,
    skipped_slots,
    offset_sign,
    empty_sequence,
    precision,
    lse_when_off,
    packed_head_dim_64,
    nz_pages,
    nz_other_heads,
    nz_lse,
)


def ask(device: str, question: Callable[[str], Answer]) -> Answer:
    """One answer. What raises is an answer too: the operator's message is what is wanted then."""
    try:
        return {"question": text_of(question), **question(device)}
    except Exception as raised:
        last = traceback.format_exception_only(raised)[-1].strip()
        return {"question": text_of(question), "raised": last}


def ask_apart(device: str, question: Callable[[str], Answer], limit: float = TIME_LIMIT) -> Answer:
    """The same in a process of its own, which may crash or hang."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        command = [sys.executable, __file__, f"--device={device}", f"--question={question.__name__}", f"--out={path}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"question": text_of(question), "raised": f"no answer within {limit} seconds"}
        if path.exists():
            answer: Answer = json.loads(path.read_text())
            return answer
        last = (done.stderr or done.stdout).strip().splitlines()[-5:]
        return {
            "question": text_of(question),
            "raised": f"the process ended with exit status {done.returncode} and no answer",
            "last_output": last,
        }


def text_of(question: Callable[[str], Answer]) -> str:
    return " ".join((question.__doc__ or "").split())


def plain(value: Any) -> Any:
    """The same with NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def versions(device: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine(), "torch": str(torch.__version__)}
    if device != "cpu":
        import torch_npu

        npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
        found["torch_npu"] = str(torch_npu.__version__)
        found["device_name"] = str(npu.get_device_name(device))
        found["cann"] = str(getattr(torch.version, "cann", None))
    return found


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(plain(content), indent=1, allow_nan=False) + "\n")


def prepare(device: str) -> tuple[str, dict[str, str]]:
    """The torch device that answers, and what is known of the operators. Raises ValueError with what is wrong."""
    if device == "ascend@cpu":
        from kvport_ascend.backend import load

        return "cpu", load("cpu").facts()
    match = re.fullmatch(r"(?:ascend@)?npu(?::(\d+))?", device)
    if match is None:
        raise ValueError(f"--device is {device!r}; npu:0 or another NPU, or ascend@cpu to try this script without one")
    from kvport_ascend.probing import probe

    answer = probe("npu")
    if not answer.usable:
        if "device_name" not in answer.facts:
            raise ValueError(f"{device} is not usable for kvport: {answer.reason}")
        print(f"{device} is not usable for kvport: {answer.reason}\nasking the questions all the same", file=sys.stderr)
    return f"npu:{match[1] or 0}", dict(answer.facts)


def answer_all(device: str, out: Path, facts: dict[str, str]) -> None:
    """Ask everything; the record is written after each answer, so that an interruption keeps what came before."""
    emulated = device == "cpu"
    execution = "emulated" if emulated else "hardware"
    answers: dict[str, Answer] = {}
    record = {"schema": 1, "execution": execution, "versions": versions(device), "facts": facts, "questions": answers}
    for question in QUESTIONS:
        found = answers[question.__name__] = ask(device, question) if emulated else ask_apart(device, question)
        write(out / "questions.json", record)
        print(question.__name__, {key: value for key, value in found.items() if key != "question"}, flush=True)
    print(f"execution: {execution}; wrote {out / 'questions.json'}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="conformance and open questions on an Ascend device")
    parser.add_argument("--device", default="npu:0", help="npu:0, or ascend@cpu to try this script")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two JSON files")
    parser.add_argument("--skip-conformance", action="store_true", help="ask the questions only")
    parser.add_argument("--question", choices=[q.__name__ for q in QUESTIONS], help="ask one, and write it to --out")
    given = parser.parse_args(arguments)
    try:
        device, facts = prepare(given.device)
        if given.question is None:
            given.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if device == "cpu":
        from kvport_ascend import emulator

        numeric = os.environ.get("KVPORT_ASCEND_NUMERIC", "planes")
        with emulator.settings(soc=facts["soc"], numeric=numeric):
            return run(given, device, facts)
    return run(given, device, facts)


def run(given: argparse.Namespace, device: str, facts: dict[str, str]) -> int:
    if given.question is not None:
        write(given.out, ask(device, next(q for q in QUESTIONS if q.__name__ == given.question)))
        return 0
    answer_all(device, given.out, facts)
    if given.skip_conformance:
        return 0
    report = given.out / "conformance.json"
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvport_conformance", f"--backend={given.device}"]
    status = subprocess.run([*command, f"--report={report}"], check=False).returncode
    print(
        f"conformance ended with exit status {status}; {report} {'is its report' if report.exists() else 'is missing'}"
    )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
