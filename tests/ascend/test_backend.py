"""The Ascend backend on emulated operators against the reference backend and a float64 attention of this file.

Codes and scales are compared bit for bit; attention with the bound of docs/contract.md, to which the decode kernel's
plane arithmetic adds a term. ``pytest -rP`` prints what was observed of it.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvport.backend import Backend, StepArrays, Store, operations
from kvport.cache import PagedCache
from kvport.checkpoints import import_scales
from kvport.errors import ScaleError, Unsupported
from kvport.formats import CacheFormat, dtype_name
from kvport.layout import CacheLayout, GroupLayout, LayerSpec
from kvport.scales import LayerScales, SideScales
from kvport.sequences import Sequence
from kvport.step import Fresh
from kvport.tiers import make_lanes
from kvport_ascend import emulator
from kvport_ascend.backend import AscendBackend, load_emulated
from kvport_ascend.pages import ZERO_MARK, swap_zeros
from kvport_conformance.cases import run_case, select
from kvport_cpu.reference import ReferenceBackend

REFERENCE = ReferenceBackend("cpu", torch.device("cpu"))

#: Half an ulp of the output, and the precision to which products are summed, by query dtype (docs/contract.md).
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Three int8 planes of an operand hold it to 1 / (127 * 254^2 * 2) of its row's largest magnitude.
PLANES = 1 / (127 * 254**2 * 2)

FORMATS = [
    "int8",
    "int8:channel:static:scale=bf16",
    "int8:head:static:scale=bf16",
    "int8:tensor:static:scale=bf16",
    "bf16",
]


@pytest.fixture(params=["planes", "exact"])
def numeric(request: pytest.FixtureRequest) -> str:
    """The emulator's arithmetic: the decode kernel's int8 planes, or float64."""
    return str(request.param)


def make_layout(
    format: str = "int8",
    *,
    layers: int = 2,
    kv_heads: int = 2,
    query_heads: int = 4,
    dim: int = 64,
    page_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> CacheLayout:
    return CacheLayout.uniform(
        layers=layers,
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=dim,
        page_size=page_size,
        format=format,
        dtype=dtype,
    )


def make_scales(layout: CacheLayout) -> dict[int, LayerScales] | None:
    """Different scales for every layer, side, head and channel; bfloat16 numbers, so exact in any of the dtypes."""
    fmt = layout.format.key
    if not fmt.static:
        return None
    found = {}
    for layer, spec in enumerate(layout.layers):
        sides = []
        for side in range(2):
            shape = {"tensor": (), "head": (spec.kv_heads,), "channel": (spec.kv_heads, spec.key_dim)}[fmt.granularity]
            generator = torch.Generator().manual_seed(10 * layer + side)
            scale = ((torch.rand(shape, generator=generator) + 0.5) * 0.03 * (1 + side)).bfloat16().float()
            zero = None if fmt.symmetric else -scale * torch.randint(90, 140, shape, generator=generator)
            sides.append(SideScales(scale, zero))
        found[layer] = LayerScales(*sides)
    return found


def rows(count: int, heads: int, dim: int, seed: int, dtype: torch.dtype, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, heads, dim, generator=generator) * size).to(dtype)


def decoded(layout: GroupLayout, store: Store, layer: int, pages: list[int], length: int) -> tuple[np.ndarray, ...]:
    """K and V of one sequence in float64, from the reference store's planes."""
    found = []
    exported = REFERENCE.export_pages(store, layer, pages)
    for side in store.sides(layer):  # type: ignore[attr-defined]
        planes = {n.partition(".")[2]: t for n, t in exported.items() if n.startswith(side.name)}
        found.append(side.decode(planes).flatten(0, 1)[:length].double().numpy())
    return tuple(found)


def assert_attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    seen: list[int],
    channels: list[int] | None = None,
) -> float:
    """Every row within the contract's bound; returns the largest observed / bound. ``channels``: those of ``out``."""
    u, worst = UNIT[query.dtype], 0.0
    q = query.double().numpy()
    group = q.shape[1] // key.shape[1]
    for r, tokens in enumerate(seen):
        for h in range(q.shape[1]):
            k, v = key[:tokens, h // group], value[:tokens, h // group]
            v = v if channels is None else v[:, channels]
            if tokens == 0:
                assert (out[r, h] == 0).all()
                assert lse[r, h] == -math.inf
                continue
            scores = scale * (k @ q[r, h])
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            p, exact_lse = weights / total, top + math.log(total)
            exact = p @ v
            # The plane term: the query row (times the scales) and the weights, each to PLANES of its largest entry.
            plane_scores = PLANES * scale * np.abs(q[r, h]).max() * np.abs(k).max() * k.shape[1]
            d = u * scale * (np.abs(k) @ np.abs(q[r, h])).max() + plane_scores
            bound = (math.exp(2 * d) - 1 + 2 * u) * (p @ np.abs(v)) + u * np.abs(exact)
            bound += (2.0**-24 + 2 * PLANES * len(p)) * np.abs(v).max() + 1e-300  # where all V are zero, 0 / 0
            observed = np.abs(out[r, h].double().numpy() - exact)
            worst = max(worst, float((observed / bound).max()))
            lse_bound = d + u + 2.0**-20 * max(1.0, abs(exact_lse))
            worst = max(worst, abs(float(lse[r, h]) - exact_lse) / lse_bound)
    assert worst <= 1.0, f"observed / bound is {worst}"
    return worst


# --------------------------------------------------------------------------------------------------------- whole caches


@pytest.mark.parametrize(("soc", "dtype"), [("A2", torch.bfloat16), ("A3", torch.float16), ("950", torch.bfloat16)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_steps_agree_with_the_reference(format: str, dim: int, soc: str, dtype: torch.dtype, numeric: str) -> None:
    """Prefill, decode, verify and a fork in mid-page, on ragged batches: pages bit for bit, attention in the bound."""
    format = format.replace("bf16", dtype_name(dtype))
    layout = make_layout(format, dim=dim, dtype=dtype)
    scales = make_scales(layout)
    backend = load_emulated(soc=soc, numeric=numeric)
    assert backend.execution == "emulated"
    caches = [PagedCache(b, layout, [24], scales=scales) for b in (REFERENCE, backend)]
    sequences = [[c.sequence() for _ in range(3)] for c in caches]
    # tokens of each of the three sequences by step: prefill of ragged lengths, decode, a mixed step, verify
    for number, counts in enumerate([[33, 1, 70], [1, 1, 1], [5, 1, 0], [3, 3, 3]]):
        if number == 3:
            sequences[0][1], sequences[1][1] = sequences[0][0].fork(), sequences[1][0].fork()
        total = sum(counts)
        results = []
        for cache, seqs in zip(caches, sequences, strict=True):
            with cache.step(dict(zip(seqs, counts, strict=True))) as step:
                found = []
                for layer in range(2):
                    seed = 100 * number + 10 * layer
                    step.append(
                        layer,
                        rows(total, 2, dim, seed, layout.dtype),
                        rows(total, 2, dim, seed + 1, layout.dtype, size=3.0) + 1,
                    )
                    found.append(step.attend(layer, rows(total, 4, dim, seed + 2, layout.dtype)))
                results.append(found)
        for ours, theirs in zip(sequences[1], sequences[0], strict=True):
            assert ours.length == theirs.length
            for mine, reference in zip(
                *(planes_of(c, s) for c, s in zip(caches, (theirs, ours), strict=True)), strict=True
            ):
                assert mine.keys() == reference.keys()
                for name in mine:
                    assert torch.equal(mine[name], reference[name]), f"step {number}, {name} differs"
        for layer in range(2):
            seed, row = 100 * number + 10 * layer, 0
            query = rows(total, 4, dim, seed + 2, layout.dtype)
            for s, count in enumerate(counts):
                sequence = sequences[0][s]
                key, value = decoded(
                    layout.groups[0].layout, caches[0]._stores[0], layer, sequence._pages[0], sequence.length
                )
                at = slice(row, row + count)
                seen = [sequence.length - count + r + 1 for r in range(count)]
                got = results[1][layer]
                worst = assert_attention(got.output[at], got.lse[at], query[at], key, value, 1 / math.sqrt(dim), seen)
                if count:
                    print(f"{format} D{dim} {soc} {numeric} step {number} layer {layer}: observed/bound {worst:.3f}")
                row += count


def planes_of(cache: PagedCache, sequence: object) -> list[dict[str, torch.Tensor]]:
    """The canonical planes of a sequence by layer, cut to its length."""
    pages, length = sequence._pages[0], sequence.length  # type: ignore[attr-defined]
    found = []
    for layer in range(len(cache.layout.layers)):
        exported = cache.backend.export_pages(cache._stores[0], layer, pages)
        found.append({name: plane.flatten(0, 1)[:length].contiguous() for name, plane in exported.items()})
    return found


@pytest.mark.parametrize("fresh", ["stored", "exact"])
@pytest.mark.parametrize(
    "format",
    ["int8", "int8:channel:static:scale=bf16", "int8,recent=32", "int8:head:static:scale=bf16,sink=4,recent=40"],
)
def test_partials_merge_within_the_bound(format: str, fresh: Fresh, numeric: str) -> None:
    """Float pages, sealed pages and this step's own rows are attended apart and merged through the LSE.

    The operator gives each part in the query's dtype, so it is rounded once before it is merged in float32: that costs
    at most u of every part's own sum of p|v|, which the bound's rounding of probabilities leaves room for. The third
    sequence is new in every step but the last, so its history is empty; with exact tokens its part has no keys.
    """
    layout = make_layout(format)
    scales = make_scales(layout)
    caches = [
        PagedCache(b, layout, [24] * len(make_lanes(layout)[0]), scales=scales)
        for b in (REFERENCE, load_emulated(numeric=numeric))
    ]
    pairs = [[c.sequence() for c in caches] for _ in range(2)]
    third: list[Sequence] = []
    worst = 0.0
    for number, counts in enumerate([[70, 9, 33], [1, 1, 1], [40, 3, 2], [1, 1, 1]]):
        total, results, held = sum(counts), [], []
        if number < 3:
            third = [c.sequence() for c in caches]
        batch = [*pairs, third]
        key, value, query = (rows(total, n, 64, 100 * number + i, layout.dtype) for i, n in enumerate((2, 2, 4)))
        for index, cache in enumerate(caches):
            with cache.step({p[index]: n for p, n in zip(batch, counts, strict=True)}, fresh=fresh) as step:
                for layer in range(2):
                    step.append(layer, key, value * (layer + 1))
                    results.append(step.attend(layer, query))
                    held.append(step.gather(layer, torch.float32))
        for layer in range(2):
            got, (k, v) = results[2 + layer], held[layer]
            row = 0
            for s, count in enumerate(counts):
                at, length = slice(row, row + count), batch[s][0].length
                dense = [t[s, :length].double().numpy() for t in (k, v)]
                if fresh == "exact":
                    dense[0][length - count :] = key[at].double().numpy()
                    dense[1][length - count :] = (value[at] * (layer + 1)).double().numpy()
                seen = [length - count + r + 1 for r in range(count)]
                worst = max(worst, assert_attention(got.output[at], got.lse[at], query[at], *dense, 0.125, seen))
                row += count
    print(f"{format} {fresh} {numeric}: observed/bound {worst:.3f}")
    images = [[c.export(p[index]) for p in pairs] for index, c in enumerate(caches)]
    for ours, theirs in zip(images[1], images[0], strict=True):
        assert ours.digests() == theirs.digests()


# ------------------------------------------------------------------------------------------------------- one operation


def group_layout(format: str = "int8", **more: object) -> GroupLayout:
    return make_layout(format, **more).groups[0].layout  # type: ignore[arg-type]


def open_store(backend: Backend, layout: GroupLayout, pages: int, scales: dict[int, LayerScales] | None) -> Store:
    given = None if scales is None else [scales[layer] for layer in range(layout.layers)]
    return backend.allocate(layout, pages, scales=given)


def arrays(
    table: list[list[int]],
    lengths: list[int],
    counts: list[int],
    positions: list[int],
    kv_start: list[int] | None = None,
) -> StepArrays:
    starts = [0, *np.cumsum(counts).tolist()]
    fields = (kv_start or [0] * len(lengths), lengths, starts, positions)
    return StepArrays(torch.tensor(table, dtype=torch.int32), *(torch.tensor(f, dtype=torch.int32) for f in fields))


@pytest.mark.parametrize("count", [3, 40])
def test_skipped_rows_write_nothing_that_is_read(count: int) -> None:
    """Slot -1, fewer and more of them than the spare page has slots."""
    backend, layout = load_emulated(), group_layout(layers=1)
    stores = [open_store(b, layout, 5, None) for b in (backend, REFERENCE)]
    slots = torch.full((count,), -1)
    slots[1], slots[2] = 70, 64
    for b, store in zip((backend, REFERENCE), stores, strict=True):
        for buffer in b.buffers(store).values():
            buffer.view(torch.uint8).fill_(7)
        b.append(store, 0, rows(count, 2, 64, 1, torch.bfloat16), rows(count, 2, 64, 2, torch.bfloat16), slots)
    ours, theirs = (b.export_pages(s, 0, [1, 2, 3, 4]) for b, s in zip((backend, REFERENCE), stores, strict=True))
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("format", [*FORMATS, "int8:channel:static:asym"])
def test_export_and_import_keep_every_bit(format: str) -> None:
    """Pages of arbitrary bytes go from one store to another and to the reference and back."""
    layout = group_layout(format)
    scales = make_scales(make_layout(format))
    backend = load_emulated()
    first, second = (open_store(backend, layout, 6, scales) for _ in range(2))
    reference = open_store(REFERENCE, layout, 6, scales)
    generator = torch.Generator().manual_seed(5)
    for buffer in backend.buffers(first).values():
        buffer.view(torch.uint8).random_(0, 256, generator=generator)
    for layer in range(2):
        image = backend.export_pages(first, layer, [4, 2])
        assert {name: t.shape[1:] for name, t in image.items()} == {p.name: p.shape for p in layout.planes}
        REFERENCE.import_pages(reference, layer, [1, 5], image)
        backend.import_pages(second, layer, [3, 1], REFERENCE.export_pages(reference, layer, [1, 5]))
        again = backend.export_pages(second, layer, [3, 1])
        for name, plane in image.items():
            assert torch.equal(plane.contiguous().view(torch.uint8), again[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("format", FORMATS)
def test_copy_seal_and_gather(format: str) -> None:
    layout, scales = group_layout(format), make_scales(make_layout(format))
    float_layout = group_layout("bf16")
    key, value = rows(64, 2, 64, 1, torch.bfloat16), rows(64, 2, 64, 2, torch.bfloat16)
    images = []
    for backend in (load_emulated(), REFERENCE):
        source, target = open_store(backend, float_layout, 4, None), open_store(backend, layout, 6, scales)
        for layer in range(2):
            backend.append(source, layer, key, value, torch.arange(32, 96))
            backend.seal(source, target, layer, [1, 2], [5, 3])
        backend.copy_pages(target, [5], [2])
        images.append([backend.export_pages(target, layer, [5, 3, 2]) for layer in range(2)])
        gathered = backend.gather(target, 1, torch.tensor([[2, 3], [3, 0]], dtype=torch.int32), [40, 7], torch.float32)
        images.append([dict(zip("kv", gathered, strict=True))])
    for ours, theirs in zip(images[:2], images[2:], strict=True):
        for mine, reference in zip(ours, theirs, strict=True):
            for name in mine:
                assert torch.equal(mine[name], reference[name]), name


@pytest.mark.parametrize("format", ["int8:channel:static:asym", "int8:head:static:asym", "int8:tensor:static:asym"])
def test_asymmetric_static_scales(format: str, numeric: str) -> None:
    """Zeros that are whole multiples of their scale: the operator's offset has the opposite place and is exact."""
    layout, scales = group_layout(format, layers=1), make_scales(make_layout(format, layers=1))
    backend = load_emulated(numeric=numeric)
    assert scales is not None
    ours, theirs = (open_store(b, layout, 5, scales) for b in (backend, REFERENCE))
    key, value = rows(50, 2, 64, 1, torch.bfloat16), rows(50, 2, 64, 2, torch.bfloat16) + 1
    slots = torch.cat([torch.arange(96, 128), torch.arange(32, 50)])
    for b, store in ((backend, ours), (REFERENCE, theirs)):
        b.append(store, 0, key, value, slots)
    for name, plane in backend.export_pages(ours, 0, [3, 1]).items():
        assert torch.equal(plane.flatten(0, 1)[:50], REFERENCE.export_pages(theirs, 0, [3, 1])[name].flatten(0, 1)[:50])
    query = rows(1, 4, 64, 3, torch.bfloat16)
    plan = backend.plan(ours, arrays([[3, 1]], [50], [1], [49]))
    out, lse = backend.attend(ours, 0, query, plan, scale=0.125)
    k, v = decoded(layout, theirs, 0, [3, 1], 50)
    assert_attention(out, lse, query, k, v, 0.125, [50])


def test_offset_that_is_not_exact_is_refused() -> None:
    layout = group_layout("int8:channel:static:asym", layers=1)
    scale = torch.full((2, 64), 0.0625)
    sides = SideScales(scale, torch.full((2, 64), -3.3))
    with pytest.raises(ScaleError, match="no exact offset"):
        load_emulated().allocate(layout, 4, scales=[LayerScales(sides, sides)])


def test_scale_that_is_not_exact_in_the_models_dtype_is_refused() -> None:
    layout = group_layout("int8:channel:static", layers=1)
    exact, inexact = SideScales(torch.full((2, 64), 0.0625)), SideScales(torch.full((2, 64), 0.1))
    load_emulated().allocate(layout, 4, scales=[LayerScales(exact, exact)])
    with pytest.raises(ScaleError, match=r"value: .* not numbers of the model's dtype"):
        load_emulated().allocate(layout, 4, scales=[LayerScales(exact, inexact)])


def test_flags_of_nans_travel_in_images() -> None:
    outcomes = [run_case(case, load_emulated()).outcome for case in select(tier="full", checks=("flags_travel",))]
    assert set(outcomes) == {"pass", "unsupported"}
    assert outcomes.count("pass") == 3


def test_a_scale_that_is_refused_is_named_by_the_models_layer() -> None:
    """A group counts its own layers: layer 3 of the model is the second that has four KV heads."""
    specs = tuple(LayerSpec(heads, 8, 64, 64) for heads in (2, 4, 2, 4))
    layout = CacheLayout(specs, CacheFormat.parse("int8:head:static"), 128, torch.bfloat16)
    scales = {n: LayerScales(*[SideScales(torch.full((spec.kv_heads,), 0.0625))] * 2) for n, spec in enumerate(specs)}
    PagedCache(load_emulated(), layout, [4, 4], scales=scales)
    scales[3] = LayerScales(scales[3].key, SideScales(torch.full((4,), 0.1)))
    with pytest.raises(ScaleError, match=r"static scales of layer 3: value: 4 of 4 scales") as caught:
        PagedCache(load_emulated(), layout, [4, 4], scales=scales)
    assert caught.value.layer == 3
    with pytest.raises(ScaleError) as caught:
        load_emulated().allocate(layout.groups[1].layout, 4, scales=[scales[1], scales[3]])
    assert caught.value.layer == 1


@pytest.mark.parametrize(
    ("format", "part"),
    [("int8:channel:static", "bf16 number"), ("int8:channel:static:asym", "zero / scale"), ("int8", ""), ("bf16", "")],
)
def test_support_says_which_static_scales_fit(format: str, part: str) -> None:
    support = load_emulated().support(group_layout(format, layers=1))
    assert support.ok
    assert part in support.scale_rule
    assert bool(support.scale_rule) == bool(part)


def test_an_asymmetric_c8_checkpoint_opens_and_keeps_its_meaning(tmp_path: Path) -> None:
    """The operator's offset is the checkpoint's, negated; the codes decode to the checkpoint's numbers."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for side, factor in (("k", 1), ("v", 3)):
        name = f"model.layers.0.self_attn.{side}_proj"
        scale = ((torch.rand(128, generator=generator) * 0.03 + 0.01) * factor).bfloat16()
        tensors[f"{name}.kv_cache_scale"] = scale.float()
        tensors[f"{name}.kv_cache_offset"] = torch.randint(-20, 20, (128,), generator=generator).float()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "quant_model_description.json").write_text(json.dumps({"kv_cache_type": "C8"}))
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 64, "hidden_size": 256}))
    recipe = import_scales(tmp_path)
    (format,) = set(recipe.formats.values())
    layout = make_layout(format, layers=1)
    backend = load_emulated()
    for each in (backend, REFERENCE):
        PagedCache(each, layout, [4], scales=recipe)
    store = open_store(backend, layout.groups[0].layout, 4, dict(recipe))
    given = store.operands[0]["value_antiquant_offset"].flatten()  # type: ignore[attr-defined]
    assert torch.equal(given.double(), -tensors["model.layers.0.self_attn.v_proj.kv_cache_offset"].double())


def test_scale_beyond_float16_is_refused() -> None:
    layout = group_layout("int8:tensor:static:scale=fp16", layers=1, dtype=torch.float16)
    large = SideScales(torch.tensor(1024.0).half())
    with pytest.raises(ScaleError, match="beyond"):
        load_emulated().allocate(layout, 4, scales=[LayerScales(large, large)])


def test_float16_at_its_limit() -> None:
    """127 * (65504 / 127) may round above 65504; the dense route must not make it infinite."""
    backend, layout = load_emulated(), group_layout(layers=1, dtype=torch.float16)
    ours, theirs = (open_store(b, layout, 4, None) for b in (backend, REFERENCE))
    generator = torch.Generator().manual_seed(4)
    value = (torch.rand(9, 2, 64, generator=generator) * 3e4 + 3.5e4).half()
    value[:, :, 5] = 65504.0
    key = rows(9, 2, 64, 1, torch.float16)
    for b, store in ((backend, ours), (REFERENCE, theirs)):
        b.append(store, 0, key, value, torch.arange(32, 41))
        planes = b.export_pages(store, 0, [1])
        planes["value.codes"][:, :, :, 9] = -128  # no encoder emits it, every decoder takes it
        planes["key.codes"][:, :, :, 9] = -128
        b.import_pages(store, 0, [1], planes)
    query = rows(3, 4, 64, 3, torch.float16)
    step = arrays([[1]], [9], [3], [6])
    out, lse = backend.attend(ours, 0, query, backend.plan(ours, step), scale=0.125, partial=True)
    k, v = decoded(layout, theirs, 0, [1], 9)
    kept = [c for c in range(64) if c != 9]  # channel 9 itself is below -65504: the answer is infinite in float16
    assert torch.isfinite(out[..., kept]).all()
    assert_attention(out[..., kept], lse, query, k, v, 0.125, [7, 8, 9], channels=kept)


@pytest.mark.parametrize(
    ("kv_start", "length", "count", "position"),
    [
        (0, 50, 1, 60),  # a tier that ends before the query
        (0, 50, 4, 60),
        (0, 62, 4, 60),  # a tier that ends inside the query rows
        (32, 61, 1, 60),  # one that begins later, at a page and inside one
        (40, 61, 1, 60),
        (32, 64, 4, 60),
        (40, 64, 4, 60),
        (62, 64, 4, 60),  # the first rows see nothing
        (60, 60, 2, 60),  # nobody sees anything
        (0, 64, 1, 50),  # the store holds later positions than the query's
        (0, 64, 3, 50),
    ],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_partial_views(kv_start: int, length: int, count: int, position: int, dim: int, numeric: str) -> None:
    """A store that holds positions kv_start .. length-1 only, merged by the caller through the LSE."""
    backend, layout = load_emulated(numeric=numeric), group_layout(layers=1, dim=dim)
    ours, theirs = (open_store(b, layout, 6, None) for b in (backend, REFERENCE))
    key, value = rows(64, 2, dim, 1, torch.bfloat16), rows(64, 2, dim, 2, torch.bfloat16)
    slots = torch.cat([torch.arange(96, 128), torch.arange(32, 64)])
    for b, store in ((backend, ours), (REFERENCE, theirs)):
        b.append(store, 0, key, value, slots)
    step = arrays([[3, 1]], [length], [count], [position], [kv_start])
    query = rows(count, 4, dim, 3, torch.bfloat16)
    out, lse = backend.attend(ours, 0, query, backend.plan(ours, step), scale=0.1, partial=True)
    assert out.dtype == torch.float32
    k, v = decoded(layout, theirs, 0, [3, 1], length)
    for r in range(count):
        seen = max(0, min(length, position + r + 1) - kv_start)
        assert_attention(out[r : r + 1], lse[r : r + 1], query[r : r + 1], k[kv_start:], v[kv_start:], 0.1, [seen])


@pytest.mark.parametrize(
    ("key_size", "query_size", "scale_size"),
    [
        (1.0, 0.0, None),
        (2.0**90, 0.0, None),  # what stands for a zero must not move the scores of large keys
        (1.0, 2.0**-122, None),  # 127 / 2^-122 is no float32
        (1.0, 2.0**-133, None),  # the smallest that bfloat16 has
        (2.0**-90, 2.0**-40, 2.0**-96),  # the kernel multiplies by static scales before it divides
        (2.0**-110, 0.0, 2.0**-116),
        (2.0**90, 0.0, 2.0**84),
    ],
)
def test_faint_query_rows_are_answered(
    key_size: float, query_size: float, scale_size: float | None, numeric: str
) -> None:
    """The decode kernel divides by a query row's largest magnitude; it is never sent a row where that is not finite."""
    format = "int8" if scale_size is None else "int8:channel:static:scale=bf16"
    backend, layout = load_emulated(numeric=numeric), group_layout(format, layers=1)
    side = SideScales(torch.full((2, 64), scale_size or 0.0))
    scales = None if scale_size is None else {0: LayerScales(side, SideScales(torch.full((2, 64), 0.03125)))}
    ours, theirs = (open_store(b, layout, 4, scales) for b in (backend, REFERENCE))
    key = rows(3, 2, 64, 1, torch.bfloat16, key_size)
    for b, store in ((backend, ours), (REFERENCE, theirs)):
        b.append(store, 0, key, rows(3, 2, 64, 2, torch.bfloat16), torch.arange(32, 35))
    query = rows(1, 4, 64, 3, torch.bfloat16)
    query[0, 1:3] = rows(2, 64, 1, 4, torch.bfloat16, query_size).squeeze(-1)
    if key_size != 1:
        query[0, [0, 3]] *= 1 / key_size
    emulator.OBSERVED.clear()
    out, lse = backend.attend(ours, 0, query, backend.plan(ours, arrays([[1]], [3], [1], [2])), scale=0.125)
    assert emulator.OBSERVED["faint_query_rows"] == 0
    k, v = decoded(layout, theirs, 0, [1], 3)
    assert_attention(out, lse, query, k, v, 0.125, [3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_heads", [[0], [1], [0, 1]])
def test_values_of_zero_are_answered(zero_heads: list[int], dtype: torch.dtype, numeric: str) -> None:
    """The kernel divides by the largest weight times V scale too, so no V scale of zero lies in a store."""
    backend, layout = load_emulated(numeric=numeric), group_layout(layers=1, dtype=dtype)
    ours, theirs = (open_store(b, layout, 4, None) for b in (backend, REFERENCE))
    value = rows(40, 2, 64, 2, dtype)
    value[:, zero_heads] = 0
    value[7] = 0  # and a token of zeros among others
    for b, store in ((backend, ours), (REFERENCE, theirs)):
        b.append(store, 0, rows(40, 2, 64, 1, dtype), value, torch.arange(32, 72))
    images = [b.export_pages(store, 0, [1, 2]) for b, store in ((backend, ours), (REFERENCE, theirs))]
    assert (images[0]["value.scale"][0, :, zero_heads] == 0).all()
    for name in ("value.scale", "value.codes", "key.scale"):
        assert torch.equal(images[0][name].flatten(0, 1)[:40], images[1][name].flatten(0, 1)[:40])
    query = rows(2, 4, 64, 3, dtype)
    emulator.OBSERVED.clear()
    for count in (1, 2):  # both routes
        step = arrays([[1, 2]], [40], [count], [40 - count])
        out, lse = backend.attend(ours, 0, query[:count], backend.plan(ours, step), scale=0.125)
        k, v = decoded(layout, theirs, 0, [1, 2], 40)
        assert_attention(out, lse, query[:count], k, v, 0.125, [40 - count + 1 + r for r in range(count)])
    assert emulator.OBSERVED["faint_value_scales"] == 0


def test_what_stands_for_a_scale_of_zero_is_exchanged_bit_for_bit() -> None:
    backend, layout = load_emulated(), group_layout(layers=1)
    bits = torch.tensor([0, ZERO_MARK, 1, -(2**31), 0x7FC00000, 0x7F800000, 0x3F800000, 0x00800000], dtype=torch.int32)
    assert not (swap_zeros(bits.view(torch.float32)) == 0)[[0, 2, 4]].any()
    assert torch.equal(swap_zeros(swap_zeros(bits.view(torch.float32))).view(torch.int32), bits)
    store = open_store(backend, layout, 3, None)
    planes = backend.export_pages(store, 0, [1])
    planes["value.scale"] = bits.view(torch.float32).repeat(8).reshape(planes["value.scale"].shape).contiguous()
    backend.import_pages(store, 0, [1], planes)
    assert not (backend.buffers(store)["value.scale"][0, 1].view(torch.int32) == 0).all(-1).any()
    again = backend.export_pages(store, 0, [1])["value.scale"]
    assert torch.equal(again.view(torch.int32), planes["value.scale"].view(torch.int32))


@pytest.mark.parametrize("dim", [64, 128])  # the dense route sequence by sequence, and packed
@pytest.mark.parametrize("format", ["int8", "int8:channel:asym:static", "bf16", "int8,sink=4,recent=32"])
def test_what_torch_takes_by_default_changes_nothing(format: str, dim: int, numeric: str) -> None:
    """Default device and dtype, autocast and inference mode, over all routes, masks, sealing and page images."""
    layout = make_layout(format, layers=1, dim=dim)
    scales = make_scales(layout)
    key, value, query = (rows(80, heads, dim, seed, torch.bfloat16) for heads, seed in ((2, 1), (2, 2), (4, 3)))

    def run() -> list[torch.Tensor]:
        cache = PagedCache(load_emulated(numeric=numeric), layout, [8] * len(make_lanes(layout)[0]), scales=scales)
        sequence, found = cache.sequence(), []
        for start, end in ((0, 33), (33, 34), (34, 74), (74, 75)):
            with cache.step({sequence: end - start}) as step:
                step.append(0, key[start:end], value[start:end])
                found += step.attend(0, query[start:end])
        copied = cache.insert(cache.export(sequence))
        assert cache.check() == ()
        return [*found, *cache.gather(copied, 0)]

    expected = run()
    before = torch.get_default_dtype()
    for scope in (
        torch.device("meta"),
        torch.autocast("cpu", dtype=torch.float16),
        torch.inference_mode(),
    ):
        with scope:
            found = run()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), scope
    torch.set_default_dtype(torch.float64)
    try:
        found = run()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_caches_of_several_chips_live_side_by_side() -> None:
    """In threads, and step by step in turn: each follows its own chip's rules and its own arithmetic."""
    layout = make_layout(layers=1)
    key, value, query = (rows(61, heads, 64, seed, torch.bfloat16) for heads, seed in ((2, 1), (2, 2), (4, 3)))
    kinds = [(soc, numeric) for soc in ("A2", "A3", "950") for numeric in ("planes", "exact")]
    spans = ((0, 33), (33, 34), (34, 60), (60, 61))

    def make(kind: tuple[str, str]) -> PagedCache:
        return PagedCache(load_emulated(soc=kind[0], numeric=kind[1]), layout, [8])

    def run(kind: tuple[str, str]) -> list[torch.Tensor]:
        cache = make(kind)
        sequence, found = cache.sequence(), []
        for start, end in spans:
            with cache.step({sequence: end - start}) as step:
                step.append(0, key[start:end], value[start:end])
                found += step.attend(0, query[start:end])
        return found

    alone = {kind: run(kind) for kind in kinds}
    assert not torch.equal(alone["A3", "planes"][3], alone["A3", "exact"][3])
    with ThreadPoolExecutor(len(kinds)) as pool:
        together = list(pool.map(run, kinds * 3))
    caches = {kind: make(kind) for kind in kinds}
    sequences = {kind: cache.sequence() for kind, cache in caches.items()}
    in_turn: dict[tuple[str, str], list[torch.Tensor]] = {kind: [] for kind in kinds}
    for start, end in spans:
        steps = {kind: cache.step({sequences[kind]: end - start}) for kind, cache in caches.items()}
        for step in steps.values():
            step.append(0, key[start:end], value[start:end])
        for kind, step in steps.items():
            in_turn[kind] += step.attend(0, query[start:end])
        for step in steps.values():
            step.commit()
    for kind, found in [*zip(kinds * 3, together, strict=True), *in_turn.items()]:
        assert all(torch.equal(a, b) for a, b in zip(found, alone[kind], strict=True)), kind


def test_poison_reaches_its_own_head_only(numeric: str) -> None:
    backend, layout = load_emulated(numeric=numeric), group_layout(layers=1)
    store = open_store(backend, layout, 4, None)
    value = rows(5, 2, 64, 2, torch.bfloat16)
    value[3, 1, 7] = math.nan
    backend.append(store, 0, rows(5, 2, 64, 1, torch.bfloat16), value, torch.arange(32, 37))
    query = rows(1, 4, 64, 3, torch.bfloat16)
    out, _ = backend.attend(store, 0, query, backend.plan(store, arrays([[1]], [5], [1], [4])), scale=0.125)
    assert out[0, :2].isfinite().all()
    assert out[0, 2:].isnan().all()


def test_poison_flags_of_static_formats() -> None:
    format = "int8:tensor:static:scale=bf16"
    layout, scales = group_layout(format), make_scales(make_layout(format))
    key = rows(40, 2, 64, 1, torch.bfloat16)
    key[37] = math.nan
    flags = []
    for backend in (load_emulated(), REFERENCE):
        store = open_store(backend, layout, 5, scales)
        backend.append(store, 1, key, key.clone(), torch.arange(64, 104))
        flags.append(backend.poisoned(store)[:, 1:])
        assert bool(flags[-1][1, 2])
        backend.append(store, 1, key[:1], key[:1], torch.tensor([96]))  # the page begins anew
        flags.append(backend.poisoned(store)[:, 1:])
        assert not flags[-1].any()
    assert torch.equal(flags[0], flags[2])


def test_refuses_what_the_operator_lacks() -> None:
    backend, layout = load_emulated(), group_layout(layers=1)
    store = open_store(backend, layout, 4, None)
    backend.append(store, 0, rows(3, 2, 64, 1, torch.bfloat16), rows(3, 2, 64, 2, torch.bfloat16), torch.arange(32, 35))
    plan = backend.plan(store, arrays([[1]], [3], [1], [2]))
    query = rows(1, 4, 64, 3, torch.bfloat16)
    with pytest.raises(Unsupported, match="soft cap"):
        backend.attend(store, 0, query, plan, scale=0.1, softcap=30.0)
    with pytest.raises(Unsupported, match="sink"):
        backend.attend(store, 0, query, plan, scale=0.1, sinks=torch.zeros(4))
    with pytest.raises(Unsupported, match="float16"):
        backend.attend(store, 0, query.half(), plan, scale=0.1)
    long = arrays([[1] * 8193], [262145], [1], [262144])
    with pytest.raises(Unsupported, match="decode_kv_limit"):
        backend.plan(store, long)
    with pytest.raises(Unsupported, match="cache_elements"):
        backend.allocate(layout, 2**20)


def test_operations_are_reported() -> None:
    found = operations(load_emulated())
    native = {"support", "allocate", "append", "seal", "plan", "attend", "export_pages", "import_pages"}
    assert {name for name, kind in found.items() if kind == "native"} == native
    facts = load_emulated(soc="A2").facts()
    assert "no device was used" in facts["emulated"]
    assert facts["soc"] == "A2"


def test_storage_is_used_as_it_is() -> None:
    backend, layout = load_emulated(), group_layout(layers=1)
    pages = 4
    storage = {
        "key.codes": torch.zeros(1, pages, 32, 2, 64, dtype=torch.int8),
        "key.scale": torch.zeros(1, pages, 2, 32),
        "value.codes": torch.zeros(1, pages, 32, 2, 64, dtype=torch.int8),
        "value.scale": torch.zeros(1, pages, 2, 32),
    }
    store = backend.allocate(layout, pages, storage=storage)
    assert {n: t.data_ptr() for n, t in backend.buffers(store).items()} == {n: t.data_ptr() for n, t in storage.items()}
    assert sum(t.nbytes for t in storage.values()) == backend.page_bytes(layout) * pages
    backend.append(store, 0, rows(1, 2, 64, 1, torch.bfloat16), rows(1, 2, 64, 2, torch.bfloat16), torch.tensor([33]))
    assert storage["key.scale"][0, 1, :, 1].gt(0).all()
    assert isinstance(backend, AscendBackend)
