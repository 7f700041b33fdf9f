"""What ``kvport demo`` measures: formats of a KV cache on a real model, end to end.

SmolLM2-135M reads a text in chunks through a cache of every format, side by side with transformers' own cache in full
precision; then the caches decode in turns, and each format answers a question. With ``--synthetic``, made-up K and V
take the model's place: bytes, errors and speed, and no word about quality.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

import kvport
from kvport.evaluation import (
    REFERENCE,
    Quality,
    cache_argument,
    decode_speed,
    evaluate,
    machine,
    pydoc_text,
    text_digest,
)
from kvport.formats import CacheFormat
from kvport.models import load_smollm2
from kvport.progress import Progress

#: From exact to cheap: full precision, 8 bits, 8 bits for K only, 4 bits with and without zeros, the recipe of KIVI at
#: 4 bits (K per channel, the last tokens exact), and what careless 4 bits do.
FORMATS: Final = (
    "fp32",
    "bf16",
    "int8",
    "k=int8,v=int4:g64:asym",
    "k=int4:c64:asym,v=int4:g64:asym,recent=128",
    "int4:g64:asym,recent=128",
    "int4:g64:asym",
    "int4:g64",
)
TOKENS: Final = 2048
QUICK_TOKENS: Final = 512
QUESTION: Final = "Why is the sky blue? Answer in one sentence."
SYNTHETIC_FORMATS: Final = ("fp32", "bf16", "int8", "k=int8,v=int4:g64:asym", "int4:g64:asym", "int4:g64")


@dataclass(frozen=True)
class Row:
    """One format. ``quality`` is None for synthetic K and V, ``errors`` for a model.

    ``bytes_per_token``: at rest, scales counted. ``held_bytes``: the pages that hold the text, open ones and tokens
    kept in higher precision included. ``tokens_per_second``: decoding after the text, one sequence.
    """

    format: str
    bytes_per_token: float
    held_bytes: int
    tokens_per_second: float
    quality: Quality | None = None
    answer: str = ""
    errors: dict[str, float] | None = None


@dataclass(frozen=True)
class Report:
    """``stock`` is transformers' own cache (or, for synthetic K and V, None)."""

    source: dict[str, Any]
    tokens: int
    stock: Row | None
    rows: tuple[Row, ...]
    machine: dict[str, Any]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, "demo": True, **asdict(self)}


def run_model(
    formats: tuple[str, ...], *, device: str = "cpu", tokens: int = TOKENS, words: int = 16, rounds: int = 16
) -> Report:
    """The demo on SmolLM2. Raises :class:`kvport.MissingDependency` with the command that brings what is absent."""
    began = time.monotonic()
    progress = Progress()
    try:
        loaded = load_smollm2(lambda stage: progress.stage(stage))
        from transformers import DynamicCache

        from kvport.integrations.transformers import KVPortCache

        model, tokenizer = loaded.model, loaded.tokenizer
        text = pydoc_text()
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
        stock = DynamicCache(config=model.config)
        caches = {name: KVPortCache(model.config, device, format=name) for name in formats}

        progress.stage(f"reading {ids.shape[1]} tokens through {len(formats)} formats")
        found = evaluate(model, ids, caches, reference=stock, progress=progress.update)
        stats = {name: cache.stats() for name, cache in caches.items()}  # before decoding adds tokens

        progress.stage(f"decoding {rounds} tokens from each in turn")
        speed = decode_speed(model, {REFERENCE: stock, **caches}, ids[:, -1:], rounds, progress=progress.update)
        del caches, stock

        answers = {}
        progress.stage("asking each format a question")
        for done, name in enumerate((REFERENCE, *formats)):
            fresh = DynamicCache(config=model.config)
            if name != REFERENCE:
                fresh = KVPortCache(model.config, device, format=name)
            answers[name] = _answer(model, tokenizer, fresh, words)
            progress.update(done + 1, len(formats) + 1)
    finally:
        progress.close()
    dense = next(iter(stats.values())).dense_bytes_per_token

    def row(name: str, bytes_per_token: float, held: int) -> Row:
        return Row(name, bytes_per_token, held, 1.0 / speed[name], found[name], answers[name])

    return Report(
        source={
            "model": loaded.name,
            "file": loaded.source,
            "sha256": loaded.sha256,
            "text": "pydoc_data.topics",
            "text_sha256_16": text_digest(text),
            "question": QUESTION,
        },
        tokens=ids.shape[1],
        stock=row(REFERENCE, dense, dense * (ids.shape[1] - 1)),
        rows=tuple(row(name, stats[name].bytes_per_token, stats[name].held_bytes) for name in formats),
        machine=machine(),
        seconds=time.monotonic() - began,
    )


def _answer(model: Any, tokenizer: Any, cache: Any, words: int) -> str:
    chat = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(**ids, max_new_tokens=words, do_sample=False, **{cache_argument(model): cache})
    text: str = tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())


def run_synthetic(
    formats: tuple[str, ...], *, device: str = "cpu", tokens: int = TOKENS, layers: int = 4, rounds: int = 16
) -> Report:
    """The demo on made-up K and V: normal, with a constant offset in some K channels, as models have them."""
    began = time.monotonic()
    progress = Progress()
    kv_heads, query_heads, dim = 3, 9, 64
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(tokens, kv_heads, dim, generator=generator)
    key[..., ::16] += 8.0  # large and nearly constant: what makes K hard to quantize
    value = torch.randn(tokens, kv_heads, dim, generator=generator)
    query = torch.randn(1, query_heads, dim, generator=generator)
    rows: list[Row] = []
    exact: torch.Tensor | None = None
    try:
        progress.stage(f"storing {tokens} made-up tokens in {len(formats)} formats")
        for done, text in enumerate(("fp32", *formats)):
            cache = kvport.open(
                device, format=text, layers=layers, kv_heads=kv_heads, query_heads=query_heads, head_dim=dim,
                tokens=2 * tokens,
            )  # fmt: skip
            with cache:
                row, output = _synthetic_row(text, cache, layers, key, value, query, exact, rounds)
            exact = output if exact is None else exact
            if done:  # the first is there to compare with
                rows.append(row)
            progress.update(done + 1, len(formats) + 1)
    finally:
        progress.close()
    return Report(
        source={"synthetic": True, "layers": layers, "kv_heads": kv_heads, "query_heads": query_heads, "head_dim": dim},
        tokens=tokens,
        stock=None,
        rows=tuple(rows),
        machine=machine(),
        seconds=time.monotonic() - began,
    )


def _synthetic_row(
    text: str,
    cache: kvport.PagedCache,
    layers: int,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    exact: torch.Tensor | None,
    rounds: int,
) -> tuple[Row, torch.Tensor]:
    sequence = cache.sequence()
    with cache.step({sequence: len(key)}) as step:
        for layer in range(layers):
            step.append(layer, key, value)
    held = sum(pool.held * pool.page_bytes for pool in cache.stats().pools)
    stored_key, stored_value = cache.gather(sequence, 0)
    output = query
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        with cache.step({sequence: 1}) as step:
            for layer in range(layers):
                step.append(layer, key[:1], value[:1])
                output = step.attend(layer, query).output
        times.append(time.perf_counter() - start)
    errors = {
        "key": _relative(stored_key, key),
        "value": _relative(stored_value, value),
        "attention": 0.0 if exact is None else _relative(output, exact),
    }
    far = cache.stats().pools[0]
    row = Row(
        format=text,
        bytes_per_token=far.page_bytes / cache.layout.page_size,
        held_bytes=held,
        tokens_per_second=1.0 / torch.tensor(times).median().item(),
        errors=errors,
    )
    return row, output


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square error over root mean square."""
    return float((found - wanted).norm() / wanted.norm())


def render(report: Report) -> str:
    """The report as a table for a terminal of 120 columns."""
    return _render_synthetic(report) if report.stock is None else _render_model(report, report.stock)


def _render_model(report: Report, stock: Row) -> str:
    def line(name: str, row: Row) -> str:
        q = row.quality
        assert q is not None
        assert stock.quality is not None
        change = 100 * (q.perplexity / stock.quality.perplexity - 1)
        return (
            f"{name:<44}{row.bytes_per_token:>9,.0f}{stock.bytes_per_token / row.bytes_per_token:>6.2f}x"
            f"{row.held_bytes / 2**20:>7.1f}{q.perplexity:>9.3f}{change:>+8.2f} %{q.kl:>9.5f}{q.kl_p99:>8.4f}"
            f"{100 * q.top1:>7.1f} %{row.tokens_per_second:>7.2f}"
        )

    source = report.source
    lines = [
        f"{source['model']} on {report.tokens} tokens of {source['text']} ({source['text_sha256_16']}), read in chunks "
        "through each cache",
        "",
        f"{'':<44}{'bytes/':>9}{'less':>7}{'held':>7}{'perplex-':>9}{'':>10}{'KL':>9}{'KL':>8}{'':>9}{'tok/':>7}",
        f"{'format':<44}{'token':>9}{'':>7}{'MiB':>7}{'ity':>9}{'change':>10}{'mean':>9}{'p99':>8}{'top-1':>9}{'s':>7}",
        line("transformers' own cache, fp32", stock),
        *(line(row.format, row) for row in report.rows),
        "",
        "bytes/token: codes, scales and zeros of one token in all layers, at rest.  held: all pages at the end of the",
        "text.  KL: KL(full precision || format) per token, in nats.",
        *_legend(row.format for row in report.rows),
        "Differences of perplexity under about 0.5 % are noise on one text of this length.  tok/s: decoding after the",
        f"text, the caches taking turns, {report.machine['threads']} threads, {report.machine['processor']}.",
        "",
        f"Asked: {source['question']}",
        *(f"  {name:<44}{row.answer}" for name, row in _named(report, stock)),
        "",
        f"{report.seconds:.0f} s in all.",
    ]
    return "\n".join(lines)


def _legend(formats: Iterable[str]) -> list[str]:
    """What the parts of these formats mean, for whoever has not read the page on formats."""
    parsed = [CacheFormat.parse(text) for text in formats]
    sides = [side for fmt in parsed for side in (fmt.key, fmt.value)]
    said = []
    if any(fmt.recent or fmt.sink for fmt in parsed):
        said.append(
            "recent=N: the last N tokens stay in the model's dtype and are encoded when they are older (sink=N: the "
            "first N, for good); bytes/token counts a token at rest, held counts these too"
        )
    if any(side.granularity == "group" for side in sides):
        said.append("gN: one scale per N channels")
    if any(side.granularity == "channel_group" for side in sides):
        said.append("cN: one scale per channel and N tokens")
    if any(not side.symmetric for side in sides):
        said.append("asym: with a zero beside each scale")
    return textwrap.wrap(";  ".join(said) + ".", 112) if said else []


def _named(report: Report, stock: Row) -> list[tuple[str, Row]]:
    return [("transformers' own cache, fp32", stock), *((row.format, row) for row in report.rows)]


def _render_synthetic(report: Report) -> str:
    lines = [
        f"SYNTHETIC K and V ({report.tokens} tokens, {report.source['layers']} layers): bytes, errors and speed; "
        "nothing here says what a model would do",
        "",
        f"{'format':<44}{'bytes/token':>12}{'held MiB':>10}{'K error':>10}{'V error':>10}{'attention':>11}"
        f"{'steps/s':>9}",
    ]
    for row in report.rows:
        assert row.errors is not None
        lines.append(
            f"{row.format:<44}{row.bytes_per_token:>12,.0f}{row.held_bytes / 2**20:>10.2f}"
            f"{100 * row.errors['key']:>8.2f} %{100 * row.errors['value']:>8.2f} %"
            f"{100 * row.errors['attention']:>9.2f} %{row.tokens_per_second:>9.1f}"
        )
    lines += ["", *_legend(row.format for row in report.rows)]
    lines += ["errors: root mean square, of what it is compared with.  attention: the output of one query."]
    return "\n".join(lines)
