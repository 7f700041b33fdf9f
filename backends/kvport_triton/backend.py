"""The backend object: launches the kernels over the private page layout.

Importing this module imports triton; see :mod:`kvport_triton.availability` for what that decides.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
import triton
from torch import Tensor

from kvport.backend import ATTENTION_FEATURES, Execution, Limits, Plan, StepArrays, Store, Support
from kvport.errors import InvalidArgument, StepError, Unsupported
from kvport.formats import TensorFormat
from kvport.layout import GroupLayout
from kvport.scales import LayerScales, SideScales
from kvport_cpu.base import TorchBackend
from kvport_triton import overrides
from kvport_triton.availability import driver_version
from kvport_triton.kernels.attend import CODES, EXACT, NATIVE, ROUNDED, attend_kernel, merge_kernel
from kvport_triton.kernels.decode import decode_kernel
from kvport_triton.kernels.encode import append_kernel, begin_pages_kernel
from kvport_triton.kernels.latent import latent_kernel
from kvport_triton.kernels.stage import stage_kernel
from kvport_triton.planning import Launch, Prepared, Shape, Staged, cdiv, power_of_two, prepare, prepare_fixed
from kvport_triton.sides import DTYPE_NUMBER, Side, bits_view, code_bytes, sides
from kvport_triton.store import TritonStore, private_dtype, private_shape, to_private
from kvport_triton.tuning import (
    INTERPRETED_PROCESSORS,
    MOST_VERIFY,
    Mode,
    Tuning,
    interpreted,
    latent,
    reads_runs,
    tuning,
)

PAGE_SIZES: Final = (16, 32, 64, 128, 256)
MOST_GROUP: Final = 16
DIMS: Final = range(16, 257)
LATENT_DIMS: Final = range(16, 513)
#: Query heads of a latent layer that a program takes at most, where tensor cores multiply.
LATENT_ROWS: Final = 64
#: The first GPUs that convert E4M3 in hardware.
FP8_CAPABILITY: Final = (8, 9)
#: The window of a layer without one: no position is that far from another.
WIDEST: Final = 1 << 30
POISON: Final = "poison"  # the name of the flag buffer beside the planes
#: Channels a merge program takes, and partials it reads at a time.
MERGE_CHANNELS: Final = 64
MERGE_SPLITS: Final = 16
#: The kinds of launch of a plan.
KINDS: Final = ("decode", "verify", "prefill")
_STAGED_FORMAT: Final = TensorFormat("bf16")
_MODE_NUMBER: Final[dict[Mode, int]] = {
    "codes": CODES.value,
    "native": NATIVE.value,
    "exact": EXACT.value,
    "rounded": ROUNDED.value,
}


class TritonBackend(TorchBackend):
    """Triton kernels on an NVIDIA GPU, or in Triton's interpreter."""

    name: ClassVar[str] = "triton"
    #: Whether the interpreter checks every integer operation of the kernels for overflow, a quarter of its time.
    check_overflow: bool = False
    #: Rows a program of append encodes; None: chosen by the number of rows.
    append_block: int | None = None
    #: Query tokens of a sequence from which its prefill over codes is worth decoding each page once (bf16 only).
    stage_from: int = 256
    #: Bytes of the scratch that a run of pages is decoded into: about the L2 of a large GPU.
    stage_bytes: int = 64 << 20

    def __init__(self, device: str, torch_device: torch.device, *, interpreted: bool) -> None:
        super().__init__(device, torch_device)
        self.interpreted = interpreted
        self.execution: Execution = "interpreter" if interpreted else "hardware"
        self.gpu = "interpreter" if interpreted else torch.cuda.get_device_name(torch_device)
        #: Decode shapes over codes that were found by timing, by overrides.key_of; the fixed table says the others.
        self.tuned: dict[str, Tuning] = {} if interpreted else {k: Tuning(**v) for k, v in overrides.read().items()}
        #: The interpreter can do what any GPU can.
        self.capability = FP8_CAPABILITY if interpreted else torch.cuda.get_device_capability(torch_device)
        #: Bytes that a program may have; None where there is no such limit.
        self.shared_memory = (
            None if interpreted else torch.cuda.get_device_properties(torch_device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        )
        self.capture = "eager" if interpreted else "cuda graph"
        self.processors = (
            INTERPRETED_PROCESSORS
            if interpreted
            else torch.cuda.get_device_properties(torch_device).multi_processor_count
        )

    # -- what is possible ----------------------------------------------------------------------------------------

    def support(self, layout: GroupLayout) -> Support:
        found = _unmet(layout)
        if self.capability < FP8_CAPABILITY and any(side.format.code == "fp8_e4m3" for side in layout.sides):
            found.append(
                "fp8_e4m3 codes: this GPU has compute capability {}.{}, their conversion needs {}.{}; fp8_e5m2 and "
                "int8 work".format(*self.capability, *FP8_CAPABILITY)
            )
        stored = {"latent"} if layout.latent else set()
        return Support(reasons=tuple(found), features=ATTENTION_FEATURES | {"graph"} | stored)

    def page_bytes(self, layout: GroupLayout) -> int:
        # The private layout is a permutation of the canonical planes; static integers add a flag per page and layer.
        return layout.canonical_page_bytes + (layout.layers if _has_flags(layout) else 0)

    def allocate(
        self,
        layout: GroupLayout,
        pages: int,
        *,
        scales: Sequence[LayerScales] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> TritonStore:
        support = self.support(layout)
        if not support.ok:
            raise Unsupported(f"backend {self.name} cannot store {layout.format}", support.reasons)
        wanted = {
            p.name: ((layout.layers, pages, *private_shape(p, layout)), private_dtype(p, layout)) for p in layout.planes
        }
        if _has_flags(layout):
            wanted[POISON] = ((layout.layers, pages), torch.uint8)
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=self.torch_device)
            if storage is None
            else _take(storage, name, shape, dtype, self.torch_device)
            for name, (shape, dtype) in wanted.items()
        }
        poison = tensors.pop(POISON, None)
        if poison is not None:
            poison.zero_()
        moved = tuple(_to_device(s, self.torch_device) for s in scales or [LayerScales()] * layout.layers)
        return TritonStore(layout, pages, tensors, moved, poison)

    def buffers(self, store: Store) -> dict[str, Tensor]:
        assert isinstance(store, TritonStore)
        return store.planes if store.poison is None else {**store.planes, POISON: store.poison}

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, store: Store, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        assert isinstance(store, TritonStore)
        layout, tokens = store.layout, key.shape[0]
        if any(side.format.sealed_only for side in layout.sides):
            raise Unsupported(f"{layout.format} pages are encoded whole: seal them from another store, do not append")
        if tokens == 0:
            return
        flags = store.poison[layer] if store.poison is not None else slots
        with self._on_device():
            if store.poison is not None:
                begin_pages_kernel[(cdiv(tokens, 1024),)](flags, slots, tokens, PAGE=layout.page_size, BLOCK=1024)
            block = self.append_block or _append_block(tokens, layout.page_size, self.interpreted)
            parts = [
                self._encoding(store, layer, side, stored.name, rows.detach())
                for side, stored, rows in zip(sides(layout), layout.sides, _rows(layout, key, value), strict=True)
            ]
            # The parts of a latent row are both stored as K is, V is transposed: K's half of the kernel, twice.
            for pair in [[part, part] for part in parts] if layout.latent else [parts]:
                constants = {f"{p}_{n}": v for p, (_, found) in zip("KV", pair, strict=True) for n, v in found.items()}
                append_kernel[(cdiv(tokens, block), layout.kv_heads, 1 if layout.latent else 2)](
                    *pair[0][0],
                    *pair[1][0],
                    flags,
                    slots,
                    tokens,
                    layout.kv_heads,
                    BT=block,
                    PAGE=layout.page_size,
                    INTERP=self.interpreted,
                    enable_fp_fusion=False,
                    **constants,
                )

    def _encoding(
        self, store: TritonStore, layer: int, side: Side, name: str, rows: Tensor
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arguments and constants (without K_ or V_) by which append encodes one side."""
        codes = store.planes[f"{name}.codes"][layer]
        raw = not side.quantized and rows.dtype == codes.dtype
        if not side.quantized:
            codes = bits_view(codes)
        static = self._static(_static(store.scales[layer], name), codes)
        arguments = [
            bits_view(rows) if raw else rows, *rows.stride(), codes, *self._scales(store, layer, name), *static,
        ]  # fmt: skip
        number = 0 if side.quantized else DTYPE_NUMBER[_plane_dtype(store, name)]
        return arguments, {**side.constants(""), "FLOAT": number, "RAW": raw}

    def seal(
        self, source: Store, target: Store, layer: int, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        assert isinstance(source, TritonStore)
        if not source_pages:
            return
        assert isinstance(target, TritonStore)
        if any(side.format.sealed_only for side in target.layout.sides):
            self._seal_whole(source, target, layer, source_pages, target_pages)
            return
        size = source.layout.page_size
        table = torch.tensor(source_pages, dtype=torch.int64, device=self.torch_device).unsqueeze(0)
        key, value = self.gather(source, layer, table, [len(source_pages) * size], torch.float32)
        first = torch.tensor(target_pages, dtype=torch.int64, device=self.torch_device) * size
        slots = (first.unsqueeze(-1) + torch.arange(size, device=self.torch_device)).flatten()
        self.append(target, layer, key[0], None if target.layout.latent else value[0], slots)

    def _seal_whole(
        self,
        source: TritonStore,
        target: TritonStore,
        layer: int,
        source_pages: Sequence[int],
        target_pages: Sequence[int],
    ) -> None:
        """Seal formats whose scales span the tokens of a page: the codec's definition, vectorized over the pages."""
        old, new = (
            torch.tensor(ids, device=self.torch_device, dtype=torch.int64) for ids in (source_pages, target_pages)
        )
        flagged = torch.zeros(new.shape, dtype=torch.bool, device=self.torch_device)
        planes = {plane.name: plane for plane in target.layout.planes}
        stored = _rows(target.layout, *self._read(source, layer, old))
        for side, rows in zip(target.sides(layer), stored, strict=True):
            encoded = side.encode(rows)
            for name, found in encoded.planes.items():
                plane = planes[f"{side.name}.{name}"]
                target.planes[plane.name][layer][new] = to_private(plane, target.layout, found)
            if encoded.poisoned is not None:
                flagged |= encoded.poisoned.any(-1)
        if target.poison is not None:
            target.poison[layer][new] = flagged.to(torch.uint8)

    def copy_pages(self, store: Store, source: Sequence[int], target: Sequence[int]) -> None:
        if not source:
            return
        old, new = (torch.tensor(ids, device=self.torch_device, dtype=torch.int64) for ids in (source, target))
        for plane in self.buffers(store).values():
            plane[:, new] = plane[:, old]

    # -- reading -------------------------------------------------------------------------------------------------

    def plan(self, store: Store, arrays: StepArrays) -> Plan:
        layout = store.layout
        counts = np.diff(arrays.query_starts.numpy())
        few = counts[counts <= MOST_VERIFY]
        most = {"decode": 1, "verify": int(few.max(initial=1)), "prefill": int(counts.max(initial=1))}
        heads, group = _blocks(layout, layout.query_heads, layout.dtype)
        shapes = self._shapes(layout, most)
        shapes["staged"] = self._tuning(layout, "prefill", "native", group, most["prefill"]).shape(1)
        # bf16 holds what the bound asks of bf16 queries, at any magnitude; float16 has neither room for large values.
        quantized = layout.format.key.quantized and layout.format.value.quantized
        staged = quantized and layout.dtype == torch.bfloat16 and not layout.latent
        device, prepared = prepare(
            arrays,
            self.torch_device,
            group=group,
            kv_heads=heads,
            window=layout.window,
            page_size=layout.page_size,
            shapes=shapes,
            most_verify=MOST_VERIFY,
            stage_from=self.stage_from if staged else None,
            stage_columns=self._stage_columns(layout, shapes["staged"].tile),
        )
        return Plan(arrays, device, prepared)

    def fixed_plan(self, store: Store, limits: Limits) -> Plan:
        """As :meth:`plan` would cut the largest step, but without decoded runs, whose number depends on lengths."""
        layout = store.layout
        most = {"decode": 1, "verify": min(MOST_VERIFY, limits.query_tokens), "prefill": limits.query_tokens}
        heads, group = _blocks(layout, layout.query_heads, layout.dtype)
        device, prepared = prepare_fixed(
            limits,
            self.torch_device,
            group=group,
            kv_heads=heads,
            window=layout.window,
            page_size=layout.page_size,
            shapes=self._shapes(layout, most),
            most_verify=MOST_VERIFY,
        )
        return Plan(limits.padding(), device, prepared)

    def refill(self, store: Store, plan: Plan, arrays: StepArrays) -> None:
        prepared: Prepared = plan.private
        assert prepared.fixed is not None
        self.upload(prepared.fixed.pack(arrays), prepared.fixed.buffer)
        for other in prepared.others.values():
            self.refill(store, other, arrays)

    def _shapes(self, layout: GroupLayout, most: Mapping[str, int]) -> dict[str, Shape]:
        """The kernel shape of each kind of launch, of at most so many query tokens a sequence.

        Work is cut for the layout's own dtype and heads; attend makes a second plan for a query of others.
        """
        _, group = _blocks(layout, layout.query_heads, layout.dtype)
        return {
            kind: self._tuning(layout, kind, self._mode(layout, layout.dtype, kind), group, tokens).shape(
                self.processors
            )
            for kind, tokens in most.items()
        }

    def attend(
        self,
        store: Store,
        layer: int,
        query: Tensor,
        plan: Plan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        partial: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(store, TritonStore)
        layout = store.layout
        if partial and sinks is not None:
            raise InvalidArgument("sinks belong to the merged result: pass them once, not to a partial")
        _, group = _blocks(layout, query.shape[1], query.dtype)
        plan = self._plan_for(store, query, plan)
        prepared: Prepared = plan.private
        out_dtype = torch.float32 if partial else query.dtype
        # The interpreter truncates when it stores bf16, so it stores float32 and torch rounds.
        made = torch.float32 if self.interpreted else out_dtype
        out = torch.empty((query.shape[0], query.shape[1], layout.value_dim), dtype=made, device=self.torch_device)
        lse = torch.empty((query.shape[0], query.shape[1]), dtype=torch.float32, device=self.torch_device)
        if query.shape[0] == 0:
            return out.to(out_dtype), lse
        with self._on_device():
            for launch in prepared.launches:
                self._launch(store, layer, query, plan, launch, group, out, lse, scale, softcap, sinks)
            if prepared.staged is not None:
                self._staged(store, layer, query, plan, prepared.staged, group, out, lse, scale, softcap, sinks)
        return out.to(out_dtype), lse

    def _launch(
        self,
        store: TritonStore,
        layer: int,
        query: Tensor,
        plan: Plan,
        launch: Launch,
        group: int,
        out: Tensor,
        lse: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        layout = store.layout
        mode = self._mode(layout, query.dtype, launch.kind)
        tuned = self._tuning(layout, launch.kind, mode, group, launch.row_count // group)
        if tuned.tile != launch.shape.tile:
            tuned = replace(tuned, tile=launch.shape.tile)
        key, value = sides(layout)
        heads, _ = _blocks(layout, query.shape[1], query.dtype)
        part_out, part_lse = self._scratch(plan.private, launch, layout, heads, lse)
        table = plan.device.page_table
        arguments: list[Any] = [query.detach(), *query.stride()]
        for name in (side.name for side in layout.sides):
            codes = store.planes[f"{name}.codes"][layer]
            static = _static(store.scales[layer], name)
            arguments += [codes, *self._scales(store, layer, name), *self._static(static, codes)]
        if layout.latent:
            del arguments[-2:]  # the rope part has no static scales
        sink = lse if sinks is None else sinks.to(self.torch_device, torch.float32)
        arguments += [table, table.shape[1], launch.items, out, lse, part_out, part_lse, sink]
        arguments += [int(sinks is not None), query.shape[1], heads, group]
        shared = {
            "SOFTCAP": softcap is not None,
            "T": tuned.tile,
            "PAGE": layout.page_size,
            "STAGES": tuned.stages,
            "INTERP": self.interpreted,
            "num_warps": tuned.warps,
            "maxnreg": tuned.registers,
            "enable_fp_fusion": False,
        }
        grid = (launch.item_count * heads,)
        if layout.latent:
            latent_kernel[grid](
                *arguments, float(scale), float(softcap or 1.0),
                MODE=_MODE_NUMBER[mode], M=max(tuned.padded, power_of_two(launch.row_count)),
                **shared, **key.constants("K_"), **value.constants("R_"),
            )  # fmt: skip
        elif mode == "codes" and launch.kind == "decode":
            constants = key.constants("K_") | value.constants("V_")
            del constants["K_QUANTIZED"], constants["V_QUANTIZED"]
            decode_kernel[grid](
                *arguments, float(scale), float(softcap or 1.0),
                RUNS=reads_runs(layout.page_size, tuned.tile, max(key.bits, value.bits)),
                N=max(8, power_of_two(group)), **shared, **constants,
            )  # fmt: skip
        else:
            attend_kernel[grid](
                *arguments, launch.row_count, layout.window or WIDEST, float(scale), float(softcap or 1.0),
                MODE=_MODE_NUMBER[mode],
                MASK_ROWS=launch.kind != "decode",
                CONTINUES=False,
                M=max(16, power_of_two(launch.row_count)),
                **shared, **key.constants("K_"), **value.constants("V_"),
            )  # fmt: skip
        if launch.block_count:
            channels = min(MERGE_CHANNELS, power_of_two(layout.value_dim))
            rows = launch.row_count * cdiv(layout.value_dim, channels)
            merge_kernel[(launch.block_count, heads, rows)](
                launch.blocks, part_out, part_lse, out, lse, sink, int(sinks is not None), heads,
                query.shape[1], group, launch.row_count,
                DIM=layout.value_dim, CHANNELS=channels, SPLITS=MERGE_SPLITS, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip

    def _staged(
        self,
        store: TritonStore,
        layer: int,
        query: Tensor,
        plan: Plan,
        staged: Staged,
        group: int,
        out: Tensor,
        lse: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Long prefill over codes: decode a run of pages into scratch, attend over it, merge with the runs before."""
        layout = store.layout
        key, value = sides(layout)
        keys, values, part_out, part_lse = self._stage_scratch(plan.private, staged, layout)
        arguments: list[Any] = []
        for name in ("key", "value"):
            codes = store.planes[f"{name}.codes"][layer]
            static = _static(store.scales[layer], name)
            arguments += [codes, *self._scales(store, layer, name), *self._static(static, codes)]
        table = plan.device.page_table
        block = min(64, layout.page_size)
        tuned = replace(
            self._tuning(layout, "prefill", "native", group, staged.row_count // group), tile=staged.shape.tile
        )
        sink = lse if sinks is None else sinks.to(self.torch_device, torch.float32)
        for run in staged.runs:
            stage_kernel[(staged.columns * layout.page_size // block, layout.kv_heads, 2)](
                *arguments, bits_view(keys), bits_view(values), table, table.shape[1], run.sequence, run.first_column,
                staged.columns, layout.kv_heads, PAGE=layout.page_size, BT=block, INTERP=self.interpreted,
                enable_fp_fusion=False, **key.constants("K_"), **value.constants("V_"),
            )  # fmt: skip
            attend_kernel[(run.item_count * layout.kv_heads,)](
                query.detach(), *query.stride(), keys, keys, keys, keys, keys, values, values, values, values, values,
                staged.table, staged.table.shape[0], run.items, out, lse, part_out, part_lse, sink,
                int(sinks is not None), query.shape[1], layout.kv_heads, group, staged.row_count,
                layout.window or WIDEST, float(scale), float(softcap or 1.0),
                MODE=_MODE_NUMBER["native"],
                MASK_ROWS=True,
                CONTINUES=True,
                SOFTCAP=softcap is not None,
                M=max(16, power_of_two(staged.row_count)),
                T=tuned.tile,
                PAGE=layout.page_size,
                STAGES=tuned.stages,
                INTERP=self.interpreted,
                num_warps=tuned.warps,
                maxnreg=tuned.registers,
                enable_fp_fusion=False,
                **Side.of(_STAGED_FORMAT, layout.key_dim).constants("K_"),
                **Side.of(_STAGED_FORMAT, layout.value_dim).constants("V_"),
            )  # fmt: skip

    def gather(
        self, store: Store, layer: int, page_table: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(store, TritonStore)
        longest = max(lengths, default=0)
        pages = page_table[:, : store.layout.pages_for(longest)]
        key, value = (
            t.view(pages.shape[0], pages.shape[1] * store.layout.page_size, *t.shape[2:])[:, :longest]
            for t in self._read(store, layer, pages.flatten().to(torch.int64))
        )
        for s, length in enumerate(lengths):
            if length < longest:
                key[s, length:] = 0
                value[s, length:] = 0
        return key.to(dtype), value.to(dtype)

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> dict[str, Tensor]:
        assert isinstance(store, TritonStore)
        index = torch.tensor(pages, device=self.torch_device, dtype=torch.int64)
        return {name: plane.cpu() for name, plane in store.canonical(layer, index).items()}

    def import_pages(self, store: Store, layer: int, pages: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        assert isinstance(store, TritonStore)
        index = torch.tensor(pages, device=self.torch_device, dtype=torch.int64)
        for plane in store.layout.planes:
            given = planes[plane.name].to(self.torch_device)
            store.planes[plane.name][layer][index] = to_private(plane, store.layout, given)
        if store.poison is not None:
            store.poison[layer][index] = 0

    def poisoned(self, store: Store) -> Tensor:
        assert isinstance(store, TritonStore)
        if store.poison is None:
            return torch.zeros((store.layout.layers, store.pages), dtype=torch.bool, device="cpu")
        return store.poison.cpu() > 0

    # -- facts ---------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        found = {"torch": str(torch.__version__), "triton": str(triton.__version__)}
        if self.interpreted:
            found["device_name"] = "Triton interpreter (numpy), no GPU"
        else:
            properties = torch.cuda.get_device_properties(self.torch_device)
            found["device_name"] = properties.name
            found["capability"] = f"{properties.major}.{properties.minor}"
            found["processors"] = str(properties.multi_processor_count)
            found["sdk"] = f"CUDA {torch.version.cuda}"
            if driver := driver_version():
                found["driver"] = driver
        return found

    def tune(self, layout: GroupLayout, *, keep: bool = True) -> Iterator[str]:
        """See :class:`kvport.backend.Tunable`: decode over codes, at most nine shapes (kvport_triton.timing)."""
        if self.interpreted:
            raise Unsupported("triton@cpu is an interpreter: how long it takes says nothing about a GPU")
        if reasons := self.support(layout).reasons:
            raise Unsupported(f"backend {self.name} cannot store {layout.format}", reasons)
        if self._mode(layout, layout.dtype, "decode") != "codes":
            raise Unsupported(f"decode over {layout.format} with {layout.dtype} queries has one kernel shape")
        from kvport_triton import timing

        return timing.tune(self, layout, self.gpu, keep=keep)

    def decode_shape(self, layout: GroupLayout) -> Tuning:
        """The kernel shape that decodes over codes of this layout."""
        return self._tuning(layout, "decode", "codes", layout.group_size, 1)

    # -- graphs --------------------------------------------------------------------------------------------------

    def upload(self, host: Tensor, target: Tensor | None = None) -> Tensor:
        # From pinned memory the copy waits for nothing, and nothing waits for it: torch gives pinned memory out again
        # only when the copy from it is done.
        if not self.interpreted:
            host = host if host.is_pinned() else host.pin_memory()
        if target is None:
            return host.to(self.torch_device, non_blocking=True)
        return target.copy_(host, non_blocking=True)

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        if self.interpreted:
            return run
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        try:
            # A graph that the garbage collector destroys meanwhile would end the recording.
            gc.disable()
            # A stream of this device: torch would share one of whichever device recorded first.
            stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(self.torch_device), torch.cuda.graph(graph, stream=stream):
                result = run()
        except RuntimeError as error:
            raise StepError(
                f"the body cannot be recorded: it waits for the device, copies from pageable memory, or allocates in "
                f"a way that a CUDA graph cannot hold. CUDA said: {error}"
            ) from error
        finally:
            if collecting:
                gc.enable()

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def recording(self) -> bool:
        return not self.interpreted and torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        if not self.interpreted:
            torch.cuda.synchronize(self.torch_device)

    # -- inside --------------------------------------------------------------------------------------------------

    def _on_device(self) -> AbstractContextManager[Any]:
        """Around launches: Triton takes torch's current device."""
        if not self.interpreted:
            return torch.cuda.device(self.torch_device)
        from kvport_triton.interpreter import launching

        return launching(check_overflow=self.check_overflow)

    def _mode(self, layout: GroupLayout, query: torch.dtype, kind: str) -> Mode:
        """How a launch of this kind makes its products; see :mod:`kvport_triton.kernels.attend`."""
        key, value = layout.format.key, layout.format.value
        if query == torch.float32:
            return "exact"
        if layout.latent:
            return "rounded" if query == torch.bfloat16 else "exact"
        if all(side.decodable if kind == "decode" else side.sliceable for side in sides(layout)):
            return "codes"
        if not key.quantized and not value.quantized and key.code_torch_dtype == value.code_torch_dtype == query:
            return "native"
        if query == torch.bfloat16 and (key.quantized or value.quantized):
            return "rounded"
        return "exact"

    def _tuning(self, layout: GroupLayout, kind: str, mode: Mode, group: int, tokens: int) -> Tuning:
        key, value = sides(layout)
        codes = kind == "decode" and mode == "codes"
        found = self.tuned.get(overrides.key_of(self.gpu, layout)) if codes and self.tuned else None
        if found is not None:
            found = replace(found, rows=group).fitted()
        elif layout.latent:
            plain = all(side.format.code == "bf16" for side in layout.sides)
            found = latent(
                mode, group=group, width=power_of_two(key.dim) + power_of_two(value.dim), row_bytes=code_bytes(layout),
                decoded=not plain, shared=self.shared_memory,
            )  # fmt: skip
        elif self.interpreted:
            found = interpreted(kind, group, tokens)
        else:
            found = tuning(
                kind, mode, dim=max(key.dim, value.dim), bits=max(layout.format.key.bits, layout.format.value.bits),
                slices=max(key.slices, value.slices), group=group, most_tokens=tokens,
            )  # fmt: skip
        if codes:
            # A tile lies within the tokens that share scales of channels.
            block = min((-side.groups for side in (key, value) if side.groups < 0), default=found.tile)
            found = replace(found, tile=min(block, found.tile))
        return found

    def _plan_for(self, store: TritonStore, query: Tensor, plan: Plan) -> Plan:
        """The step's plan, or one of its own for a layer that reads these pages with other query heads or another
        dtype than the layout's (its tiles differ); made once and kept beside the first."""
        layout = store.layout
        heads = query.shape[1]
        if heads == layout.query_heads and self._alike(layout, query.dtype):
            return plan
        prepared: Prepared = plan.private
        key = (heads, query.dtype)
        if key not in prepared.others:
            other = TritonStore(replace(layout, query_heads=heads, dtype=query.dtype), 0, {}, (), None)
            if prepared.fixed is None:
                prepared.others[key] = self.plan(other, plan.host)
            else:
                made = prepared.others[key] = self.fixed_plan(other, prepared.fixed.limits)
                self.refill(other, made, prepared.fixed.arrays)
        return prepared.others[key]

    def _alike(self, layout: GroupLayout, query: torch.dtype) -> bool:
        """Whether launches for queries of this dtype are those that the plan was cut for."""
        return query == layout.dtype or all(
            self._mode(layout, query, kind) == self._mode(layout, layout.dtype, kind) for kind in KINDS
        )

    def _scratch(
        self, prepared: Prepared, launch: Launch, layout: GroupLayout, heads: int, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Partials of one launch: float32 output and base-2 LSE, shared by all layers (they run in stream order)."""
        if launch.partials == 0:
            return lse, lse  # never touched; of the dtype that partials have, so that both run the same kernel
        if launch.kind not in prepared.scratch:
            rows = launch.partials * heads * launch.row_count
            prepared.scratch[launch.kind] = (
                torch.empty((rows, layout.value_dim), dtype=torch.float32, device=self.torch_device),
                torch.empty((rows,), dtype=torch.float32, device=self.torch_device),
            )
        return prepared.scratch[launch.kind]

    def _stage_columns(self, layout: GroupLayout, tile: int) -> int:
        """Pages of a run: a power of two of tokens whose bf16 K and V fill at most :attr:`stage_bytes`, and whole
        tiles."""
        per_token = layout.kv_heads * (layout.key_dim + layout.value_dim) * 2
        tokens = 1 << max(0, (self.stage_bytes // per_token).bit_length() - 1)
        return max(tokens, tile, layout.page_size) // layout.page_size

    def _stage_scratch(
        self, prepared: Prepared, staged: Staged, layout: GroupLayout
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """bf16 K and V of one run, float32 running results and their base-2 LSE; shared by all layers of a step."""
        if prepared.stage_scratch is None:
            pages = (staged.columns, layout.kv_heads, layout.page_size)
            rows = staged.blocks * layout.kv_heads * staged.row_count
            prepared.stage_scratch = (
                torch.empty((*pages, layout.key_dim), dtype=torch.bfloat16, device=self.torch_device),
                torch.empty((*pages, layout.value_dim), dtype=torch.bfloat16, device=self.torch_device),
                torch.empty((rows, layout.value_dim), dtype=torch.float32, device=self.torch_device),
                torch.empty((rows,), dtype=torch.float32, device=self.torch_device),
            )
        return prepared.stage_scratch

    def _scales(self, store: TritonStore, layer: int, side: str) -> tuple[Tensor, Tensor]:
        """Bits of the scale and zero planes of one side, or the codes in their place where there are none."""
        codes = store.planes[f"{side}.codes"][layer]
        found = [store.planes.get(f"{side}.{part}") for part in ("scale", "zero")]
        scale, zero = (codes if plane is None else bits_view(plane[layer]) for plane in found)
        return scale, zero

    def _static(self, static: SideScales | None, codes: Tensor) -> tuple[Tensor, Tensor]:
        if static is None:
            return codes, codes
        scale = bits_view(static.scale.reshape(-1))
        return scale, scale if static.zero is None else bits_view(static.zero.reshape(-1))

    def _read(self, store: Any, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Decode pages ``(n,)`` to float32 K ``(n, P, kv_heads, D)`` and V."""
        planes = store.canonical(layer, pages)
        found = []
        for side in store.sides(layer):
            prefix = f"{side.name}."
            found.append(side.decode({n.removeprefix(prefix): p for n, p in planes.items() if n.startswith(prefix)}))
        if store.layout.latent:
            return torch.cat(found, -1), found[0]
        return found[0], found[1]


def _unmet(layout: GroupLayout) -> list[str]:
    """Every reason why these pages cannot be stored and attended here."""
    found = []
    if layout.page_size not in PAGE_SIZES:
        near = min(PAGE_SIZES, key=lambda size: abs(size - layout.page_size))
        found.append(f"page size {layout.page_size}: supported are {_words(PAGE_SIZES)}; nearest is {near}")
    if layout.group_size > MOST_GROUP and not layout.latent:
        found.append(f"{layout.group_size} query heads per KV head: supported are 1 to {MOST_GROUP}")
    for side in layout.sides:
        name, fmt, dim = side.name, side.format, side.dim
        dims = LATENT_DIMS if name == "latent" else DIMS
        if dim not in dims:
            found.append(f"{name} dim {dim}: supported are {dims.start} to {dims.stop - 1}")
        if fmt.kind in ("mx", "nv"):
            found.append(f"{name} code {fmt.code}: supported are int8, int4, int2, fp8_e4m3, fp8_e5m2 and float pages")
        elif fmt.granularity == "group" and fmt.group % (8 // min(fmt.bits, 8)):
            found.append(f"{name} groups of {fmt.group} channels: {fmt.code} needs a multiple of {8 // fmt.bits}")
        if fmt.outliers:
            found.append(f"{name} outliers={fmt.outliers}: outlier channels are not supported, the rest of {fmt} is")
        if fmt.sparse:
            found.append(f"{name} sparse={fmt.sparse}: sparse outliers are not supported, the rest of {fmt} is")
    return found


def _append_block(tokens: int, page_size: int, interpreted: bool) -> int:
    """Rows a program of append encodes, a power of two."""
    if interpreted:  # it pays per program
        return min(512, power_of_two(tokens))
    # Short steps spread over the processors; long ones encode runs that fill whole sectors of a page.
    return min(page_size, 32) if tokens >= 2048 else 8


def _has_flags(layout: GroupLayout) -> bool:
    # Only a static integer format has nowhere to keep a NaN visible.
    return any(side.format.hides_nan for side in layout.sides)


def _blocks(layout: GroupLayout, query_heads: int, query: torch.dtype) -> tuple[int, int]:
    """KV heads and the query heads of each, as programs divide them. A latent layer's query heads are taken by blocks,
    each as if it had a KV head of its own."""
    if not layout.latent:
        return layout.kv_heads, query_heads // layout.kv_heads
    most = LATENT_ROWS if query == torch.bfloat16 else MOST_GROUP
    group = next(n for n in range(min(most, query_heads), 0, -1) if query_heads % n == 0)
    return query_heads // group, group


def _rows(layout: GroupLayout, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of each stored side: K and V, or the latent and rope parts of K."""
    if layout.latent:
        return key[..., : layout.value_dim], key[..., layout.value_dim :]
    assert value is not None
    return key, value


def _static(scales: LayerScales, side: str) -> SideScales | None:
    return scales.key if side in ("key", "latent") else scales.value


def _plane_dtype(store: TritonStore, side: str) -> torch.dtype:
    return store.planes[f"{side}.codes"].dtype


def _words(items: Sequence[int]) -> str:
    return ", ".join(str(item) for item in items)


def _take(
    storage: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if name not in storage:
        raise InvalidArgument(f"storage lacks {name!r}; it needs {shape} of {dtype}")
    tensor = storage[name]
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != device.type:
        raise InvalidArgument(
            f"storage {name!r} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
            f"needs {shape} {dtype} on {device}"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument(f"storage {name!r} has strides {tensor.stride()}; it must be contiguous")
    return tensor


def _to_device(scales: LayerScales, device: torch.device) -> LayerScales:
    def move(side: SideScales | None) -> SideScales | None:
        if side is None:
            return None
        return SideScales(side.scale.to(device), None if side.zero is None else side.zero.to(device))

    return LayerScales(move(scales.key), move(scales.value))
