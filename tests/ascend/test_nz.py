"""NZ pages: an option of the backend with rules of its own, the same bits and numbers as everywhere else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvport.backend import Store
from kvport.cache import PagedCache
from kvport.errors import InvalidArgument, Unsupported
from kvport.layout import CacheLayout, GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_ascend.backend import AscendBackend, load, load_emulated
from kvport_ascend.emulator import rules, scatter_rules
from kvport_conformance import oracle_attention
from kvport_conformance.axes import FRACTAL
from kvport_conformance.cases import Case, run_case, select
from kvport_cpu.reference import ReferenceBackend

REFERENCE = ReferenceBackend("cpu", torch.device("cpu"))
CHANNEL = "int8:channel:static:scale=bf16"


def make_layout(
    format: str = CHANNEL,
    *,
    heads: tuple[int, int] = (10, 1),
    dim: int = 128,
    page_size: int = 128,
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> CacheLayout:
    return CacheLayout.uniform(
        layers=layers,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dim,
        page_size=page_size,
        format=format,
        dtype=dtype,
    )


def group(*arguments: Any, **more: Any) -> GroupLayout:
    return make_layout(*arguments, **more).groups[0].layout


def make_scales(layout: GroupLayout, number: int = 0) -> LayerScales:
    """Another scale for every side, head and channel."""
    generator = torch.Generator().manual_seed(number)
    shape = {"tensor": (), "head": (layout.kv_heads,), "channel": (layout.kv_heads, layout.key_dim)}
    sides = [
        SideScales(
            ((torch.rand(shape[layout.format.key.granularity], generator=generator) + 0.5) * size).bfloat16().float()
        )
        for size in (0.03, 0.07)
    ]
    return LayerScales(*sides)


def rows(count: int, heads: int, seed: int, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, heads, 128, generator=generator) * size).bfloat16()


@pytest.mark.parametrize("numeric", ["planes", "exact"])
@pytest.mark.parametrize(
    ("format", "heads", "page_size", "soc"),
    [
        (CHANNEL, (10, 1), 128, "A2"),
        (CHANNEL, (64, 8), 128, "A3"),
        (CHANNEL, (10, 1), 512, "A3"),
        ("int8:head:static:scale=bf16", (64, 8), 128, "A2"),
        ("int8:tensor:static:scale=bf16", (10, 1), 128, "A3"),
    ],
)
def test_steps_agree(format: str, heads: tuple[int, int], page_size: int, soc: str, numeric: str) -> None:
    """Prefill, decode, verify and a fork: pages bit for bit those of the reference, attention within the bound."""
    layout = make_layout(format, heads=heads, page_size=page_size)
    scales = {layer: make_scales(layout.groups[0].layout, layer) for layer in range(2)}
    backend = load_emulated(soc=soc, numeric=numeric, layout="nz")
    caches = [PagedCache(b, layout, [8], scales=scales) for b in (REFERENCE, backend)]
    sequences = [[c.sequence(), c.sequence()] for c in caches]
    worst = 0.0
    for number, counts in enumerate([[page_size + 3, 1], [1, 1], [2, 1]]):
        if number == 2:
            for held in sequences:
                held[1] = held[0].fork()
        total = sum(counts)
        key, value = rows(total, heads[1], 10 * number), rows(total, heads[1], 10 * number + 1, 3.0) + 1
        query = rows(total, heads[0], 10 * number + 2)
        results, dense = [], []
        for cache, held in zip(caches, sequences, strict=True):
            with cache.step(dict(zip(held, counts, strict=True))) as step:
                for layer in range(2):
                    step.append(layer, key, value)
                    results.append(step.attend(layer, query))
                    dense.append(step.gather(layer, torch.float32))
        assert all(torch.equal(a, b) for a, b in zip(dense[0], dense[2], strict=True))
        for layer in range(2):
            got, row = results[2 + layer], 0
            assert got.lse.isnan().all(), "the operator gives no LSE here, so no number may look like one"
            for s, count in enumerate(counts):
                length = sequences[0][s].length
                at = slice(max(row, row + count - 2), row + count)  # the last two rows, which see most
                given = (query[at].float().numpy(), *(t[s, :length].numpy() for t in dense[layer]))
                exact, _ = oracle_attention.attend(*given, scale=128**-0.5)
                bound, _ = oracle_attention.attention_bound(*given, scale=128**-0.5, query_dtype="bfloat16")
                ratio = oracle_attention.observed_over_bound(got.output[at].float().numpy(), exact, bound)
                assert ratio <= 1, f"step {number}, sequence {s}"
                worst, row = max(worst, ratio), row + count
    print(f"{format} {heads} page {page_size} {soc} {numeric}: observed/bound {worst:.3f}")
    for ours, theirs in zip(sequences[1], sequences[0], strict=True):
        assert caches[1].export(ours).digests() == caches[0].export(theirs).digests()


@pytest.mark.parametrize("case", [c for c in select(tier="quick") if c.geometry == FRACTAL], ids=lambda case: case.id)
def test_conformance(case: Case) -> None:
    """The suite's quick cases of a geometry that NZ pages are documented for; the full tier has more."""
    result = run_case(case, load_emulated(layout="nz"))
    assert result.outcome == "pass", result.reason


def open_store(backend: Any, layout: GroupLayout, pages: int) -> Store:
    store: Store = backend.allocate(layout, pages, scales=[make_scales(layout, n) for n in range(layout.layers)])
    return store


def test_where_a_code_lies() -> None:
    """Channel c of head h of the token in slot s: page[h, c // 32, s, c % 32]."""
    backend, layout = load_emulated(layout="nz"), group(heads=(64, 8), layers=1)
    store = open_store(backend, layout, 3)
    buffers = backend.buffers(store)
    assert buffers["key.codes"].shape == (1, 3, 8, 4, 128, 32)
    assert sum(t.nbytes for t in buffers.values()) == 3 * backend.page_bytes(layout)
    for buffer in buffers.values():
        buffer.zero_()
    key, value = rows(2, 8, 1), rows(2, 8, 2)
    backend.append(store, 0, key, value, torch.tensor([2 * 128 + 77, 128]))
    exported = backend.export_pages(store, 0, [2, 1])
    for head, channel in ((0, 0), (3, 31), (3, 32), (7, 127)):
        for page, slot in ((2, 77), (1, 0)):
            code = buffers["value.codes"][0, page, head, channel // 32, slot, channel % 32]
            assert code == exported["value.codes"][2 - page, slot, head, channel]
    assert exported["key.codes"][0, 77].any()
    assert (buffers["key.codes"] != 0).any(-1).any(3).any(2)[0, :, :].sum() == 2, "two tokens were written, no others"


def test_export_import_copy_and_gather_keep_every_bit() -> None:
    backend, layout = load_emulated(layout="nz"), group(heads=(64, 8))
    first, second, nd = open_store(backend, layout, 5), open_store(backend, layout, 5), load_emulated()
    other, reference = open_store(nd, layout, 5), open_store(REFERENCE, layout, 5)
    generator = torch.Generator().manual_seed(3)
    for buffer in backend.buffers(first).values():
        buffer.view(torch.uint8).random_(0, 256, generator=generator)
    backend.copy_pages(first, [4], [2])
    for layer in range(2):
        image = backend.export_pages(first, layer, [4, 2, 3])
        assert {name: t.shape[1:] for name, t in image.items()} == {p.name: p.shape for p in layout.planes}
        assert all(torch.equal(t[0], t[1]) and not torch.equal(t[0], t[2]) for t in image.values())
        nd.import_pages(other, layer, [1, 3, 2], image)
        REFERENCE.import_pages(reference, layer, [1, 3, 2], nd.export_pages(other, layer, [1, 3, 2]))
        backend.import_pages(second, layer, [3, 1, 4], REFERENCE.export_pages(reference, layer, [1, 3, 2]))
        for name, plane in backend.export_pages(second, layer, [3, 1, 4]).items():
            assert torch.equal(plane, image[name])
        table = torch.tensor([[3, 4]], dtype=torch.int32)
        ours = backend.gather(second, layer, table, [200], torch.float32)
        theirs = REFERENCE.gather(reference, layer, torch.tensor([[1, 2]], dtype=torch.int32), [200], torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Recorded(TorchDispatchMode):
    """The calls of ``npu`` operators made inside the ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.calls.append((func._schema.name.partition("::")[2], args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_calls() -> None:
    """Pages are written as PA_NZ and decoded from five dimensions; a prefill sees decoded rows only."""
    layout = make_layout(layers=1)
    cache = PagedCache(load_emulated(layout="nz"), layout, [4], scales={0: make_scales(layout.groups[0].layout)})
    sequence = cache.sequence()
    for count, pages in ((5, False), (1, True)):
        with Recorded() as recorded, cache.step({sequence: count}) as step:
            step.append(0, rows(count, 1, 1), rows(count, 1, 2))
            step.attend(0, rows(count, 10, 3))
        (write, written, how), (read, given, arguments) = recorded.calls
        assert write == "npu_scatter_pa_kv_cache"
        assert how.get("cache_mode", "PA_NZ") == "PA_NZ"  # torch leaves out what equals the schema's default
        assert written[2].shape == written[3].shape == (4, 4, 128, 32)
        assert read == "npu_fused_infer_attention_score"
        if pages:
            assert given[1].shape == given[2].shape == (4, 1, 4, 128, 32)
            assert given[1].dtype == torch.int8
            assert arguments["inner_precise"] == 1
            assert arguments["key_antiquant_scale"].shape == (1, 1, 128)
            assert not arguments.get("softmax_lse_flag")
        else:
            assert given[1].dtype == torch.bfloat16
            assert "block_table" not in arguments


def nz_call(asked: GroupLayout, soc: str) -> rules.AttentionCall:
    """The decode call over NZ pages that this layout would need, on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, dim, page, fmt = asked.kv_heads, asked.key_dim, asked.page_size, asked.format.key
    cache = empty(3, heads, dim // 32, page, 32, dtype=torch.int8 if fmt.quantized else asked.dtype)
    mode = 0 if fmt.static else 5
    scale = empty(heads, 1, dim, dtype=asked.dtype) if fmt.static else empty(3, heads, page, dtype=torch.float32)
    return rules.AttentionCall(
        operator="npu_fused_infer_attention_score",
        soc=soc,
        query=empty(1, asked.query_heads, 1, dim, dtype=asked.dtype),
        key=cache,
        value=cache,
        q_heads=asked.query_heads,
        kv_heads=heads,
        layout="BNSD",
        softmax_scale=1.0,
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        block_size=page,
        kv_lengths=(page + 1,),
        inner_precise=1,
        key_scale=scale,
        value_scale=scale,
        key_offset=None if fmt.symmetric else scale,
        value_offset=None if fmt.symmetric else scale,
        key_mode=mode,
        value_mode=mode,
    )


def broken(call: rules.AttentionCall) -> set[str]:
    return {rule.name for rule in rules.ATTENTION if rule.check(call)}


@pytest.mark.parametrize("soc", ["A2", "A3"])
@pytest.mark.parametrize("heads", [(10, 1), (64, 8), (80, 8), (128, 16)])
@pytest.mark.parametrize("page_size", [128, 512])
def test_supported_layouts_break_no_rule(soc: str, heads: tuple[int, int], page_size: int) -> None:
    asked = group(heads=heads, page_size=page_size)
    answer = load_emulated(soc=soc, layout="nz").support(asked)
    assert answer.reasons == ()
    assert answer.features == {"prefill", "verify", "poison"}
    assert broken(nz_call(asked, soc)) == set()


@pytest.mark.parametrize(
    ("asked", "soc", "quoted"),
    [
        (group("int8:channel:static:scale=fp16", dtype=torch.float16), "A3", {"nz_dtypes"}),
        (group("bf16"), "A3", {"nz_dtypes"}),
        (group("int8"), "A3", {"nz_modes"}),
        (group(dim=64), "A3", {"nz_geometry"}),
        (group(page_size=256), "A2", {"nz_geometry"}),
        (group(page_size=32), "A2", {"nz_geometry"}),
        (group(heads=(8, 2)), "A2", {"nz_heads"}),
        (group(heads=(16, 2), page_size=64), "A3", {"nz_heads", "nz_geometry"}),
        (group(), "950", {"kv_shape_fits", "scatter_cache_shape"}),
    ],
)
def test_refusals_quote_the_broken_rules(asked: GroupLayout, soc: str, quoted: set[str]) -> None:
    reasons = load_emulated(soc=soc, layout="nz").support(asked).reasons
    assert set().union(*(re.findall(r"rule (\w+):", reason) for reason in reasons)) == quoted
    assert all(re.search(r"\d", reason) for reason in reasons)
    assert quoted & broken(nz_call(asked, soc)) == quoted - {"scatter_cache_shape"}
    assert load_emulated(soc=soc).support(asked).ok, "ND pages, the default, take all of these"


def test_950_page_write_and_read_disagree() -> None:
    """Rows of 16 codes, which attention reads on the 950, are no PA_NZ cache of int8 for the page write."""
    tokens, cache = torch.empty(1, 1, 128, dtype=torch.int8), torch.empty(3, 1, 8, 128, 16, dtype=torch.int8)
    call = scatter_rules.ScatterCall("950", tokens, tokens, cache, cache, torch.tensor([5]), "PA_NZ", False)
    shape_rule = next(rule for rule in scatter_rules.SCATTER_PA if rule.name == "scatter_cache_shape")
    assert shape_rule.check(call)
    assert not broken(replace(nz_call(group(), "950"), key=cache, value=cache))


def test_asymmetric_formats_are_refused() -> None:
    asked = group("int8:channel:static:asym")
    reasons = load_emulated(layout="nz").support(asked).reasons
    assert ["rule nz_no_offset" in reason for reason in reasons] == [True, True]
    assert "nz_no_offset" in broken(nz_call(asked, "A3"))
    assert load_emulated().support(asked).ok


def test_tiers_partials_and_exact_tokens_are_refused() -> None:
    """All three merge parts by an LSE, which there is none of."""
    backend, layout = load_emulated(layout="nz"), make_layout(layers=1)
    scales = {0: make_scales(layout.groups[0].layout)}
    (reason,) = backend.support(group(f"{CHANNEL},recent=128")).reasons
    assert "rule nz_no_lse" in reason
    with pytest.raises(Unsupported, match=r"layers \[0\] as int8:channel:static:scale=bf16 and .*lse .*merging tiers"):
        PagedCache(backend, make_layout(f"{CHANNEL},recent=128", layers=1), [4, 4], scales=scales)
    cache = PagedCache(backend, layout, [4], scales=scales)
    sequence = cache.sequence()
    with pytest.raises(Unsupported, match=r"exact fresh tokens .* feature lse is not declared"):
        cache.step({sequence: 1}, fresh="exact")
    with cache.step({sequence: 1}) as step:  # the refusal left no step open
        step.append(0, rows(1, 1, 1), rows(1, 1, 2))
        plan = step._groups[0].plans[0][1]
        with pytest.raises(Unsupported, match="no partials over NZ"):
            backend.attend(cache._stores[0], 0, rows(1, 10, 3), plan, scale=0.1, partial=True)


def test_asked_for_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """ND unless KVPORT_ASCEND_LAYOUT or layout= says nz; the choice is among the facts that reports carry."""
    backend = load("cpu")
    assert isinstance(backend, AscendBackend)
    assert backend.facts()["page layout"] == "ND"
    monkeypatch.setenv("KVPORT_ASCEND_LAYOUT", "nz")
    assert load("cpu").facts()["page layout"] == "NZ"
    assert backend.facts()["page layout"] == "ND", "an open backend keeps its layout"
    monkeypatch.setenv("KVPORT_ASCEND_LAYOUT", "BnNBsD")
    with pytest.raises(InvalidArgument, match="KVPORT_ASCEND_LAYOUT is 'BnNBsD'; one of nd, nz"):
        load("cpu")
