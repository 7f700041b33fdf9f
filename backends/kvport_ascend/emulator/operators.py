"""CPU implementations of the ``torch.ops.npu`` operators, registered only when :func:`load` is called.

Where torch_npu is not imported, :func:`load` defines the recorded schemas of one torch_npu version in the namespace
``npu`` and adds CPU implementations. Where torch_npu *is* imported, the namespace exists, and only CPU implementations
are added to torch_npu's own schemas: calls then go through the vendor's real dispatcher entries.

Operators that are recorded but not emulated have a schema and no implementation: calling one on CPU tensors raises
NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

from kvport_ascend import schemas as recorded
from kvport_ascend.emulator.arithmetic import NUMERICS, attention
from kvport_ascend.emulator.calls import IFA_NAMES, V1_NAMES, V2_NAMES, AttentionCall
from kvport_ascend.emulator.rules import check_attention
from kvport_ascend.emulator.scatter_rules import ScatterCall, ScatterNdCall, check_scatter, check_scatter_nd

SOCS = ("A2", "A3", "950", "310P")


@dataclass
class _State:
    """What is registered in this process."""

    version: str = ""
    own_schemas: bool = False
    libraries: list[Any] = field(default_factory=list)
    """torch.library.Library objects: their registrations end with them, so they are kept."""


_STATE = _State()
_LOCK = Lock()
#: The chip whose rules hold and the arithmetic used, by thread and task; see :func:`settings`.
_SOC: ContextVar[str] = ContextVar("soc", default="A3")
_NUMERIC: ContextVar[str] = ContextVar("numeric", default="exact")


def loaded() -> str:
    """The torch_npu version whose schemas are in force ("" before :func:`load`)."""
    return _STATE.version


def owns_schemas() -> bool:
    """True where the emulator defined the schemas itself, False where torch_npu did (or nothing is loaded)."""
    return _STATE.own_schemas


def load(version: str = recorded.DEFAULT_VERSION) -> None:
    """Register the emulated operators in this process. Loading twice is harmless; a second version is an error.

    A process has one ``torch.ops.npu``: after this, CPU tensors given to its operators are emulated, and NPU tensors go
    where they went before.
    """
    with _LOCK:
        existing = _namespace_exists()
        if _STATE.version:
            if _STATE.own_schemas and version != _STATE.version:
                raise RuntimeError(
                    f"the emulated operators of torch_npu {_STATE.version} are loaded in this process, {version} was "
                    "asked for; a process has one torch.ops.npu, so start another one"
                )
            return
        library: Any = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
        if existing:
            import torch_npu

            version = torch_npu.__version__.partition("+")[0]
        else:
            for schema in recorded.schemas(version).values():
                library.define(schema)
        for name, implementation in IMPLEMENTATIONS.items():
            library.impl(name, implementation, "CPU")
        _STATE.libraries.append(library)
        _STATE.own_schemas, _STATE.version = not existing, version


def _namespace_exists() -> bool:
    return bool(torch._C._dispatch_has_kernel("npu::npu_fused_infer_attention_score")) or bool(
        torch._C._jit_get_schemas_for_operator("npu::npu_fused_infer_attention_score")
    )


@contextmanager
def settings(*, soc: str | None = None, numeric: str | None = None) -> Iterator[None]:
    """Answer calls as this SoC (default A3) and with this arithmetic (default exact) inside the ``with``."""
    if soc is not None and soc not in SOCS:
        raise ValueError(f"soc is {soc!r}; one of {', '.join(SOCS)}")
    if numeric is not None and numeric not in NUMERICS:
        raise ValueError(f"numeric is {numeric!r}; one of {', '.join(NUMERICS)}")
    tokens = _SOC.set(soc or _SOC.get()), _NUMERIC.set(numeric or _NUMERIC.get())
    try:
        yield
    finally:
        _SOC.reset(tokens[0])
        _NUMERIC.reset(tokens[1])


def _ints(values: Sequence[Any] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(int(value) for value in values)


def _given(arguments: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if arguments.get(name) is not None)


V1_UNMODELLED = (
    "dequant_scale1",
    "quant_scale1",
    "dequant_scale2",
    "quant_scale2",
    "quant_offset2",
    "query_rope",
    "key_rope",
    "key_rope_antiquant_scale",
)
V2_UNMODELLED = (
    "query_rope",
    "key_rope",
    "dequant_scale_query",
    "dequant_scale_key_rope",
    "quant_scale_out",
    "quant_offset_out",
    "quant_scale_p",
    "learnable_sink",
    "query_dtype",
    "key_dtype",
    "value_dtype",
    "query_rope_dtype",
    "key_rope_dtype",
    "dequant_scale_query_dtype",
    "dequant_scale_key_dtype",
    "dequant_scale_value_dtype",
    "dequant_scale_key_rope_dtype",
    "out_dtype",
)
EXCLUSIVE = (
    "query_padding_size",
    "kv_padding_size",
    "key_shared_prefix",
    "value_shared_prefix",
    "actual_shared_prefix_len",
)


def _answer(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    check_attention(call)
    return attention(call, _NUMERIC.get())


def fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_fused_infer_attention_score; argument names and defaults are the schema's."""
    get = arguments.get
    return _answer(
        AttentionCall(
            operator="npu_fused_infer_attention_score",
            soc=_SOC.get(),
            query=query,
            key=key,
            value=value,
            q_heads=get("num_heads", 1),
            kv_heads=get("num_key_value_heads", 0),
            layout=get("input_layout", "BSH"),
            softmax_scale=get("scale", 1.0),
            block_table=get("block_table"),
            block_size=get("block_size", 0),
            q_lengths=_ints(get("actual_seq_lengths")),
            kv_lengths=_ints(get("actual_seq_lengths_kv")),
            mask=get("atten_mask"),
            pse=get("pse_shift"),
            sparse_mode=get("sparse_mode", 0),
            inner_precise=get("inner_precise", 0),
            lse=get("softmax_lse_flag", False),
            key_scale=get("key_antiquant_scale"),
            key_offset=get("key_antiquant_offset"),
            value_scale=get("value_antiquant_scale"),
            value_offset=get("value_antiquant_offset"),
            key_mode=get("key_antiquant_mode", 0),
            value_mode=get("value_antiquant_mode", 0),
            fused_scale=get("antiquant_scale"),
            fused_offset=get("antiquant_offset"),
            fused_mode=get("antiquant_mode", 0),
            exclusive_with_paging=_given(arguments, EXCLUSIVE),
            unmodelled=_given(arguments, V1_UNMODELLED),
            names=V1_NAMES,
        )
    )


def fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_fused_infer_attention_score_v2; argument names and defaults are the schema's."""
    get = arguments.get
    return _answer(
        AttentionCall(
            operator="npu_fused_infer_attention_score_v2",
            soc=_SOC.get(),
            query=query,
            key=key,
            value=value,
            q_heads=get("num_query_heads", 1),
            kv_heads=get("num_key_value_heads", 0),
            layout=get("input_layout", "BSH"),
            softmax_scale=get("softmax_scale", 1.0),
            block_table=get("block_table"),
            block_size=get("block_size", 0),
            q_lengths=_ints(get("actual_seq_qlen")),
            kv_lengths=_ints(get("actual_seq_kvlen")),
            mask=get("atten_mask"),
            pse=get("pse_shift"),
            sparse_mode=get("sparse_mode", 0),
            inner_precise=get("inner_precise", 0),
            lse=get("return_softmax_lse", False),
            key_scale=get("dequant_scale_key"),
            key_offset=get("dequant_offset_key"),
            value_scale=get("dequant_scale_value"),
            value_offset=get("dequant_offset_value"),
            key_mode=get("key_quant_mode", 0),
            value_mode=get("value_quant_mode", 0),
            unmodelled=_given(arguments, V2_UNMODELLED),
            names=V2_NAMES,
        )
    )


def incre_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    """npu_incre_flash_attention. Here ``actual_seq_lengths`` are KV lengths, and K and V scales come fused."""
    get = arguments.get
    fused = get("antiquant_scale")
    return _answer(
        AttentionCall(
            operator="npu_incre_flash_attention",
            soc=_SOC.get(),
            query=query,
            key=key,
            value=value,
            q_heads=get("num_heads", 1),
            kv_heads=get("num_key_value_heads", 0),
            layout=get("input_layout", "BSH"),
            softmax_scale=get("scale_value", 1.0),
            block_table=get("block_table"),
            block_size=get("block_size", 0),
            kv_lengths=_ints(get("actual_seq_lengths")),
            mask=get("atten_mask"),
            pse=get("pse_shift"),
            inner_precise=get("inner_precise", 1),
            fused_scale=fused,
            fused_offset=get("antiquant_offset"),
            exclusive_with_paging=_given(arguments, ("kv_padding_size",)),
            unmodelled=_given(
                arguments,
                ("padding_mask", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2"),
            ),
            names=IFA_NAMES,
        )
    )[0]


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    **arguments: Any,
) -> None:
    """npu_scatter_pa_kv_cache: rows of ``key`` and ``value`` go to ``slot = page * block_size + offset``."""
    extras = _given(arguments, ("compress_lens", "compress_seq_offsets", "seq_lens"))
    # torch_npu 2.6 has no cache_mode argument; what its operator assumes is not documented.
    mode = arguments.get("cache_mode", "PA_NZ")
    call = ScatterCall(_SOC.get(), key, value, key_cache, value_cache, slot_mapping, mode, bool(extras))
    check_scatter(call)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    for rows, cache in ((key[kept], key_cache), (value[kept], value_cache)):
        if not call.nz:
            size = cache.shape[1]
            cache[slots // size, slots % size] = rows
            continue
        # (nb, heads*dim/f, bs, f), or the same with heads apart: a token's row is cut into fractions of f elements.
        flat = cache.view(cache.shape[0], -1, cache.shape[-2], cache.shape[-1])
        size, last = flat.shape[2], flat.shape[3]
        flat[slots // size, :, slots % size] = rows.reshape(rows.shape[0], -1, last)


def scatter_nd_update_(self: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """npu_scatter_nd_update_: ``self[indices[i]] = updates[i]``; the last of equal indices wins, nobody says which."""
    check_scatter_nd(ScatterNdCall(_SOC.get(), self, indices, updates))
    self[tuple(indices.long().unbind(-1))] = updates
    return self


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fused_infer_attention_score_v2": fused_infer_attention_score_v2,
    "npu_incre_flash_attention": incre_flash_attention,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_scatter_nd_update_": scatter_nd_update_,
}
