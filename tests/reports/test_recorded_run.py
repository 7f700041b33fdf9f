"""From a run to the first code that differs: a real case, on the reference and on a backend with one fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from report_support import record
from torch import Tensor

from kvport.backend import Store
from kvport.reports import Manifest, Report, beside, compare, read, sealed
from kvport_conformance.bench import Bench
from kvport_conformance.cases import Case, select
from kvport_conformance.recorded import Recording
from kvport_conformance.verdicts import Disagreement
from kvport_cpu.reference import ReferenceBackend
from pytest_kvport import spool
from pytest_kvport.reporting import plain

NAME = "append/rows/int4:g16/kv2q4-d64-p16"


class OneCode(ReferenceBackend):
    """Answers an export with one wrong code: page slot 3, head 1, channel 9 of the first page."""

    def export_pages(self, store: Store, layer: int, pages: Sequence[int]) -> Mapping[str, Tensor]:
        planes = {name: plane.clone() for name, plane in super().export_pages(store, layer, pages).items()}
        planes["key.codes"][0, 3, 1, 4] ^= 0x10  # the high nibble of byte 4
        return planes


def case() -> Case:
    [found] = [case for case in select() if case.id == NAME]
    return found


def run(backend: ReferenceBackend, folder: Path, name: str, seed: int = 0) -> Report:
    """One case, as the suite runs it with --tensors, as a report with its arrays."""
    path = folder / f"{name}.json"
    bench = Bench(backend, case(), seed=seed)
    bench.figures.recording = Recording(2**26)
    made: dict[str, Any] = copy.deepcopy(record(name))
    outcome = {"outcome": "pass", "reason": "", "seconds": 0.1}
    try:
        bench.run()
    except Disagreement as disagreement:
        outcome = {"outcome": "fail", "reason": str(disagreement), "seconds": 0.1}
    scratch = spool.open_spool(path)
    bench.figures.recording.save(scratch, NAME)
    made["cases"] = [plain({**bench.record, **outcome})]
    made["counts"] |= {"pass": 0, outcome["outcome"]: 1}
    made["tensors"] = spool.join(scratch, path, 64, [NAME])
    path.write_text(json.dumps(sealed(made)), encoding="utf-8")
    return read(path)


def reference() -> ReferenceBackend:
    return ReferenceBackend("cpu", torch.device("cpu"))


def test_the_first_code_that_differs_is_found_where_the_fault_is(tmp_path: Path) -> None:
    right, wrong = run(reference(), tmp_path, "right"), run(OneCode("cpu", torch.device("cpu")), tmp_path, "wrong")
    assert [report.cases[NAME]["outcome"] for report in (right, wrong)] == ["pass", "fail"]
    assert right.cases[NAME]["digests"]["inputs"] == wrong.cases[NAME]["digests"]["inputs"]
    found = compare([right, wrong], Manifest.installed(), [beside(right), beside(wrong)])
    [difference] = found.pairs[0].differences
    assert "slot 3, key.codes, head 1, channel 9: " in difference.where
    # The report's own message names the same place.
    assert "slot 3" in difference.why
    assert "head 1" in difference.why


@pytest.mark.parametrize("seed", [1, 2])
def test_the_inputs_of_another_seed_have_another_digest(seed: int, tmp_path: Path) -> None:
    first, second = run(reference(), tmp_path, "first"), run(reference(), tmp_path, "second", seed)
    again = run(reference(), tmp_path, "again")
    assert first.cases[NAME]["digests"] == again.cases[NAME]["digests"]
    assert first.cases[NAME]["digests"]["inputs"] != second.cases[NAME]["digests"]["inputs"]


def test_a_case_that_has_more_than_its_limit_keeps_nothing(tmp_path: Path) -> None:
    bench = Bench(reference(), case())
    bench.figures.recording = Recording(1000)
    bench.run()
    assert bench.figures.recording.nbytes > 1000
    assert bench.figures.recording.save(tmp_path, NAME) == 0
    assert not list(tmp_path.iterdir())
