"""The judge itself: the one-code class allows what it says and no more, and messages name the common mistakes."""

from __future__ import annotations

import pytest
import torch
from kvport_faults.at_rest import Encoded, Integers, ReciprocalScale, Truncates
from kvport_faults.expected import contradiction
from kvport_faults.gallery import FAULTS, quick_cases, results
from kvport_faults.subject import Subject
from torch import Tensor

from kvport.formats import TensorFormat
from kvport.scales import SideScales
from kvport_conformance.cases import run_case


class OneCode(ReciprocalScale):
    """A backend that multiplies by the reciprocal of the scale, and says so."""

    exactness = "one-code"


class OneUlp(Subject):
    """Scales one unit in the last place too large."""

    exactness = "one-code"
    steps = 1

    def encode(self, side: str, fmt: TensorFormat, rows: Tensor, static: SideScales | None) -> Encoded:
        planes, flags = super().encode(side, fmt, rows, static)
        if "scale" in planes and planes["scale"].dtype == torch.float32:
            moved = planes["scale"].view(torch.int32) + self.steps
            fine = (planes["scale"] > 1e-3) & (planes["scale"] < 1)  # not the scales of unambiguous rows
            planes["scale"] = torch.where(fine, moved.view(torch.float32), planes["scale"])
        return planes, flags


class TwoUlp(OneUlp):
    steps = 2


class Claims(Truncates):
    exactness = "one-code"


class WorksNextDoor(Integers):
    """Every code one too large where there is room: neighbours, but far from any tie."""

    exactness = "one-code"

    def requantize(self, fmt: TensorFormat, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        codes = super().requantize(fmt, x, scale, zero)
        return torch.where(codes.abs() < 2, codes + 1, codes) if fmt.bits == 8 and fmt.symmetric else codes


def _rows(backend: Subject, formats: tuple[str, ...] = ("int8", "int8:asym", "int4:g16")) -> dict[str, str]:
    """Outcome by case id of the check ``rows``."""
    cases = [c for c in quick_cases("append") if c.check == "rows" and c.format in formats]
    return {case.id: run_case(case, backend).outcome for case in cases}


def test_a_reciprocal_passes_as_one_code_and_fails_as_bit_exact() -> None:
    assert set(_rows(OneCode()).values()) == {"pass"}
    assert "fail" in _rows(ReciprocalScale()).values()


def test_the_observed_class_is_recorded() -> None:
    cases = [c for c in quick_cases("append") if c.check == "rows" and c.format == "int8"]
    records = [run_case(case, OneCode()).record for case in cases]
    assert {record["exactness"] for record in records} == {"bit-exact", "one-code"}
    assert all(record["declared_exactness"] == "one-code" for record in records)


def test_one_ulp_of_a_scale_is_allowed_and_two_are_not() -> None:
    assert set(_rows(OneUlp(), ("int8",)).values()) == {"pass"}
    assert set(_rows(TwoUlp(), ("int8",)).values()) == {"fail"}


@pytest.mark.parametrize("made", [Claims, WorksNextDoor])
def test_the_class_is_no_licence(made: type[Subject]) -> None:
    assert "fail" in _rows(made()).values()


def test_unambiguous_rows_are_bit_exact_in_every_class() -> None:
    cases = [c for c in quick_cases("append") if c.check == "special_rows" and c.format == "int8"]
    assert all(run_case(case, Claims()).outcome == "fail" for case in cases)


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "Truncates": "rounding toward zero",
        "RoundsDown": "rounding toward minus infinity",
        "MultipliesByScale": "multiplied by the scale, not divided",
        "UnscaledCodes": "codes of the unscaled input",
        "ZeroNotSubtracted": "without subtracting the zero",
        "HighNibbleFirst": "the high nibble comes first",
        "StoredScaleOfOne": "a scale of 1",
        "HeadsInterleaved": "query head h reads KV head h % kv_heads",
        "ValueFromKey": "V is taken from K",
        "NoCausalMask": "no causal mask",
        "LseBaseTwo": "a logarithm to base 2",
        "WindowIgnored": "the window is not applied",
        "WindowOneTooWide": "the window is one token too wide",
        "SoftcapDropped": "the soft cap is not applied",
        "SinksDropped": "the sink logits are not applied",
        "LseWithoutSink": "the LSE leaves out the sink logits",
        "ScaleIgnored": "scaled by 1 / sqrt(key_dim)",
        "GatherSwaps": "K and V are swapped",
        "FloatShadow": "the unquantized K was kept",
        "ReciprocalScale": "inputs multiplied by the reciprocal of the scale",
        "ValueScaleFromKey": "K's scale in place of V's",
        "ValueReadWithKeyScale": "V is read with K's scale",
        "CopyWithoutScales": "the scale plane of what lay there before",
        "ZeroNegated": "the opposite sign convention",
        "ZeroSubtractedOnRead": "zero is subtracted",
        "Int2Reversed": "the highest bits come first",
        "WindowOneTooNarrow": "the window is one token too narrow",
        "DoesNotSeeItself": "the key that a row stands on is not seen",
    }.items(),
)
def test_messages_name_the_mistake(name: str, words: str) -> None:
    """And no other: of the first 40 failures some name it, and none a mistake that it is not."""
    reasons = (r.reason for r in results(FAULTS[name], small=True) if r.outcome == "fail")
    found = False
    for _, reason in zip(range(40), reasons, strict=False):
        assert not contradiction(name, reason), reason
        if found := words in reason:
            break
    assert found, f"no message of {name} says so"


def test_a_callers_arguments_do_not_reach_the_judge() -> None:
    """A backend that spoils its arguments would otherwise spoil what it is compared with."""
    [case] = [c for c in quick_cases("attention") if c.check == "phases" and c.format == "int8"][:1]
    assert "attend changed its query argument" in run_case(case, FAULTS["QueriesScaledInPlace"].make()).reason
