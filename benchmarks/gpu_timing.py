# ruff: noqa: B023, N803
# Timed lambdas are called before their loop moves on; Triton's compile-time names are capitals.
"""What the GPU benchmarks share: CUDA-graph timing over rotating buffers, ceilings, SDPA baselines, filled stores.

Timing: one call per rotated set of buffers is captured into one CUDA graph, so that launch gaps are those of a real
decode loop and no call finds its data in L2; the graph is replayed, and the median replay divided by its calls is
reported, with every replay kept in the JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvport.backend import Plan, StepArrays, Store
from kvport.formats import CacheFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales

#: Bytes that a rotation touches before it comes back to a buffer: many times the L2 of any GPU.
ROTATION_BYTES = 512 << 20


@dataclass
class Timing:
    """Microseconds of one call: the median over replays, and every replay."""

    median: float
    replays: list[float]


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 15) -> Timing:
    """Capture ``calls`` into one graph and time its replays; microseconds a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles, and allocates what a first call allocates
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for number in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 3:
            found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    graph.reset()
    return Timing(statistics.median(found), found)


def rotations(nbytes: int) -> int:
    """How many sets of ``nbytes`` a rotation needs."""
    return max(1, -(-ROTATION_BYTES // max(1, nbytes)))


@triton.jit
def _read_kernel(X, OUT, words, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    base = tl.program_id(0).to(tl.int64) * (BLOCK * LOOP)
    for i in tl.range(LOOP, num_stages=1, loop_unroll_factor=4):
        total ^= tl.load(X + base + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(OUT + tl.program_id(0), tl.xor_sum(total, 0))


@triton.jit
def _copy_kernel(X, Y, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i))


def ceilings(sizes: Sequence[int] = (4 << 30, 1 << 30, 256 << 20, 64 << 20)) -> dict[str, float]:
    """Measured GB/s: reading ``sizes`` bytes once, and copying (read + written)."""
    found = {}
    for size in sizes:
        words, block, loop = size // 4, 4096, 8
        count = rotations(size)
        data = [torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda") for _ in range(count)]
        programs = words // (block * loop)
        out = torch.empty(programs, dtype=torch.int32, device="cuda")
        timing = time_calls(
            [lambda x=x: _read_kernel[(programs,)](x, out, words, BLOCK=block, LOOP=loop, num_warps=8) for x in data]
        )
        found[f"read_{size >> 20}MB"] = size / timing.median / 1e3
        if size == max(sizes):
            source, target = data[0], torch.empty_like(data[0])
            copy = time_calls([lambda: _copy_kernel[(words // block,)](source, target, BLOCK=block, num_warps=8)])
            found[f"copy_{size >> 20}MB"] = 2 * size / copy.median / 1e3
            source = target = out
        data.clear()
        torch.cuda.empty_cache()
    return found


def sdpa_best(
    queries: Tensor, keys: list[Tensor], values: list[Tensor], *, history: int | None = None
) -> tuple[str, Timing, dict[str, float]]:
    """The fastest SDPA backend on contiguous bf16 K/V: name, timing, and every backend's median.

    ``queries`` (B, Hq, T, D); ``keys`` and ``values``: one (B, Hkv, L, D) per rotation. T > 1 is causal, aligned lower
    right when ``history`` tokens came before.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    attention = torch.nn.functional.scaled_dot_product_attention
    long = queries.shape[2] > 1
    repeat = queries.shape[1] // keys[0].shape[1]
    found: dict[str, Timing] = {}
    choices = {
        "default": None,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    for name, choice in choices.items():
        for grouped in (True, False) if long else (True,):

            def call(k: Tensor, v: Tensor, choice: Any = choice, grouped: bool = grouped) -> Tensor:
                options: dict[str, Any] = {"enable_gqa": grouped}
                if not grouped:
                    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
                if long and history:
                    options["attn_mask"] = causal_lower_right(queries.shape[2], k.shape[2])
                elif long:
                    options["is_causal"] = True
                if choice is None:
                    return attention(queries, k, v, **options)
                with sdpa_kernel([choice]):
                    return attention(queries, k, v, **options)

            label = name if grouped else f"{name}-expanded"
            try:
                pairs = list(zip(keys, values, strict=True))
                if not grouped:  # expanding is not attention: done once, outside the timing
                    pairs = [(k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)) for k, v in pairs]
                    grouped_call = lambda k, v, choice=choice: call(k, v, choice, True)  # noqa: E731
                    found[label] = time_calls([lambda k=k, v=v: grouped_call(k, v) for k, v in pairs])
                else:
                    found[label] = time_calls([lambda k=k, v=v: call(k, v) for k, v in pairs])
            except RuntimeError as error:  # a backend that declines the shape
                print(f"    sdpa {label}: {str(error).splitlines()[0][:80]}", flush=True)
                torch.cuda.synchronize()
    best = min(found, key=lambda n: found[n].median)
    return best, found[best], {n: t.median for n, t in found.items()}


#: Tokens whose rows are drawn and written at a time.
FILL_TOKENS = 1 << 17


def filled_store(backend: Any, layout: GroupLayout, lengths: Sequence[int]) -> tuple[Store, Tensor]:
    """A store whose pages hold normal random rows, encoded by the backend itself, and a shuffled page table.

    Every layer gets the same codes: layers rotate so that no call finds its data in L2, not to differ.
    """
    counts = [layout.pages_for(n) for n in lengths]
    pages = sum(counts) + 1
    store = backend.allocate(layout, pages, scales=unit_scales(layout) if layout.format.static else None)
    size = layout.page_size
    sealed = any(side.format.sealed_only for side in layout.sides)
    step = max(1, FILL_TOKENS // size)
    plain = backend.allocate(replace(layout, format=CacheFormat.parse("bf16"), layers=1), step) if sealed else store
    generator = torch.Generator(device="cuda").manual_seed(11)
    for first in range(0, pages, step):
        ids = range(first, min(first + step, pages))
        shape = (len(ids) * size, layout.kv_heads, layout.key_dim)
        key = torch.randn(shape, dtype=layout.dtype, device="cuda", generator=generator)
        value = None
        if not layout.latent:
            shape = (*shape[:2], layout.value_dim)
            value = torch.randn(shape, dtype=layout.dtype, device="cuda", generator=generator)
        slots = torch.arange(len(ids) * size, device="cuda")
        if sealed:
            backend.append(plain, 0, key, value, slots)
            backend.seal(plain, store, 0, list(range(len(ids))), list(ids))
        else:
            backend.append(store, 0, key, value, slots + first * size)
    for buffer in backend.buffers(store).values():
        buffer[1:] = buffer[:1]
    order = torch.from_numpy(np.random.default_rng(5).permutation(pages - 1) + 1).to(torch.int32)
    table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    at = 0
    for s, count in enumerate(counts):
        table[s, :count] = order[at : at + count]
        at += count
    return store, table


def unit_scales(layout: GroupLayout) -> list[LayerScales]:
    """Static scales under which codes decode to about unit size."""

    def side(fmt: Any, dim: int) -> SideScales | None:
        if not fmt.static:
            return None
        shape = {"tensor": (), "head": (layout.kv_heads,), "channel": (layout.kv_heads, dim)}[fmt.granularity]
        return SideScales(torch.full(shape, 4.0 / 2 ** (fmt.bits - 1), dtype=fmt.scale_torch_dtype))

    scales = LayerScales(side(layout.format.key, layout.key_dim), side(layout.format.value, layout.value_dim))
    return [scales] * layout.layers


def step_arrays(table: Tensor, queries: Sequence[int], lengths: Sequence[int]) -> StepArrays:
    """Arrays of a step whose query rows are the last of each sequence."""

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepArrays(
        table,
        int32([0] * len(lengths)),
        int32(lengths),
        int32([0, *np.cumsum(queries).tolist()]),
        int32([n - q for n, q in zip(lengths, queries, strict=True)]),
    )


def check_attention(
    backend: Any, store: Store, layer: int, query: Tensor, plan: Plan, scale: float, sequence: int = 0
) -> float:
    """Relative error ||out - ref|| / ||ref|| of one sequence against float32 attention over its decoded pages."""
    out, _ = backend.attend(store, layer, query, plan, scale=scale)
    length = int(plan.host.lengths[sequence])
    first, last = (int(plan.host.query_starts[sequence + n]) for n in (0, 1))
    table = plan.device.page_table[sequence : sequence + 1]
    key, value = backend.gather(store, layer, table, [length], torch.float32)
    rows = slice(max(first, last - 64), last)  # the last rows see most
    q = query[rows].float()
    count, heads = q.shape[:2]
    q = q.view(count, key.shape[2], heads // key.shape[2], -1)
    scores = torch.einsum("thgd,jhd->hgtj", q, key[0]) * scale
    position = torch.arange(length - count, length, device=q.device)
    scores.masked_fill_(torch.arange(length, device=q.device) > position[:, None], float("-inf"))
    want = torch.einsum("hgtj,jhd->thgd", scores.softmax(-1), value[0]).reshape(count, heads, -1)
    got = out[rows].float()
    return float((got - want).norm() / want.norm())


def layout_for(
    text: str, *, layers: int, page_size: int, heads: int = 8, group: int = 4, dim: int = 128
) -> GroupLayout:
    return GroupLayout(CacheFormat.parse(text), layers, heads, heads * group, dim, dim, page_size, None, torch.bfloat16)
