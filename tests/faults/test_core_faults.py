"""Faults seeded in the core, where no backend could make them: the suite rejects these too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvport import body, rotation, tiers
from kvport_conformance.cases import run_case, select
from kvport_cpu import reference

ROTATED = ("int4:g16,rotate=7", "k=int8:asym,v=int4:g16,rotate=4294967295", "int4:g16:asym,recent=17,rotate=7")
LATENT = ("latent=int8:g32,rope=bf16,rotate=4", "latent=int4:g16,rope=bf16,sink=3,rotate=4")
TIERED = ("int8,recent=20", "int4:g16:asym,sink=20,recent=17", "latent=int8,rope=bf16,recent=20")


def seed_ignored(x: Tensor, seed: int, dim: int) -> Tensor:
    return rotation.rotate(x, 0, dim)


def queries_only(x: Tensor, seed: int, dim: int) -> Tensor:
    return x.to(torch.float32) if x.shape[1] in (1, 2) else rotation.rotate(x, seed, dim)  # K has 1 or 2 heads here


def keys_only(x: Tensor, seed: int, dim: int) -> Tensor:
    return rotation.rotate(x, seed, dim) if x.shape[1] in (1, 2) else x.to(torch.float32)


def signs_forgotten(x: Tensor, seed: int, dim: int) -> Tensor:
    turned = rotation._transform(x[..., :dim].to(torch.float32))
    return torch.cat([turned, x[..., dim:].to(torch.float32)], -1)


def rope_part_too(x: Tensor, seed: int, dim: int) -> Tensor:
    return rotation.rotate(x, seed, x.shape[-1])


def rejected(formats: tuple[str, ...], check: str = "lifecycle") -> None:
    cases = select(chapters=["attention"], formats=formats, checks=[check])
    assert {case.format for case in cases} == set(formats)
    for case in cases:
        result = run_case(case, reference.load("cpu"))
        assert result.outcome == "fail", f"{case.id}: {result.outcome} {result.reason}"


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fault", [seed_ignored, queries_only, keys_only, signs_forgotten])
def test_a_wrong_rotation_is_rejected(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "rotate", fault)
    rejected(ROTATED)


@pytest.mark.parametrize("fault", [seed_ignored, keys_only, rope_part_too])
def test_a_wrong_rotation_of_latent_layers_is_rejected(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "rotate", fault)
    rejected(LATENT)


def test_values_that_are_not_turned_back_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "unrotate", lambda x, seed, dim: x)
    rejected(LATENT)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_tier_that_begins_elsewhere_is_rejected(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a page in the recent window counts, or not."""
    rule = tiers.Tiers.sealed
    monkeypatch.setattr(tiers.Tiers, "sealed", lambda self, length, size: rule(self, max(0, length + shift), size))
    for format in TIERED:
        cases = select(chapters=["tiers"], formats=[format], checks=["tier_edges"])
        outcomes = [run_case(case, reference.load("cpu")).outcome for case in cases]
        assert set(outcomes) <= {"fail", "error"}, (format, outcomes)
