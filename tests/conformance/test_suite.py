"""The suite's own records: the committed manifest and support snapshots, and ids that never repeat or move."""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.util import find_spec

import pytest

from kvport.registry import load_backend
from kvport_conformance import bounds, manifest, snapshot
from kvport_conformance.axes import GEOMETRIES, HALF_GEOMETRIES, TIERS
from kvport_conformance.cases import CHAPTERS, MANDATORY, all_cases, select
from kvport_conformance.profiles import PROFILES, profiles_of


def test_the_committed_manifest_is_the_table_of_cases() -> None:
    assert json.loads(manifest.PATH.read_text(encoding="utf-8")) == json.loads(json.dumps(manifest.build())), (
        "cases, tiers or profiles changed: run python -m kvport_conformance.manifest and commit the result"
    )


def test_every_case_of_the_manifest_is_read_back_with_its_tier() -> None:
    _, tiers = manifest.read()
    assert tiers == {case.id: case.tier for case in all_cases()}


def test_case_ids_are_unique_and_made_of_chapter_check_format_and_geometry() -> None:
    ids = [case.id for case in all_cases()]
    assert max(Counter(ids).values()) == 1
    for case in all_cases():
        assert case.id.startswith(f"{case.chapter}/{case.check}/{case.format}/{case.geometry.name}")


def test_geometry_names_tell_geometries_apart() -> None:
    shapes = {case.geometry for case in all_cases()} | {*GEOMETRIES, *HALF_GEOMETRIES}
    assert len({shape.name for shape in shapes}) == len(shapes)


def test_mandatory_chapters_have_quick_cases_of_every_profile_they_can() -> None:
    assert MANDATORY == ("append", "pages", "scales", "prefix")
    for chapter in CHAPTERS:
        assert select(chapters=[chapter], tier="quick")
    found = {name for case in all_cases() if case.tier == "quick" for name in profiles_of(case)}
    assert found == {profile.name for profile in PROFILES}


def test_a_16_bit_chip_is_asked_in_its_profile_whatever_core_asks() -> None:
    """Beyond what needs memory without bound, or is asked by another profile."""
    checks: dict[str, set[str]] = {"core": set(), "half": set()}
    for case in select(tier="quick"):
        for name in set(profiles_of(case)) & set(checks):
            checks[name].add(f"{case.chapter}/{case.check}")
    assert checks["core"] - checks["half"] == {"pages/wide_offsets"}


def test_the_full_tier_contains_the_quick_one() -> None:
    assert TIERS == ("quick", "full")
    assert {c.id for c in select(tier="quick")} < {c.id for c in select(tier="full")}


def test_bounds_all_have_a_derivation() -> None:
    for name, bound in bounds.TABLE.items():
        assert bound.value > 0, name
        assert bound.limits, name
        assert bound.derivation, name


SNAPSHOTS = {path.stem: path for path in snapshot.FOLDER.glob("*.json")}
#: Triton has no wheels for some systems, and its interpreter is one choice for the whole process.
INTERPRETED = find_spec("triton") is not None and "KVPORT_TRITON_DEVICE" not in os.environ


def test_every_first_party_backend_has_a_snapshot_of_what_it_supports() -> None:
    assert set(SNAPSHOTS) == {"reference@cpu", "ascend@cpu", "triton@cpu"}


@pytest.mark.parametrize("name", sorted(SNAPSHOTS))
def test_no_first_party_backend_supports_less_than_it_did(name: str) -> None:
    if name == "triton@cpu" and not INTERPRETED:
        pytest.skip("Triton's interpreter is not there, or not chosen")
    committed = json.loads(SNAPSHOTS[name].read_text(encoding="utf-8"))
    assert f"{committed['backend']}@{committed['device']}" == name
    assert snapshot.shrunk(committed, snapshot.take(load_backend(name))) == []


def test_a_shrunk_snapshot_is_noticed() -> None:
    committed = {"supported": {"lse prefill workspace=bounded": {"int8": "a b"}}}
    now = {"supported": {"prefill workspace=bounded": {"int8": "a"}}}
    assert snapshot.shrunk(committed, now) == [
        "int8 at a no longer declares lse",
        "int8 at b is no longer supported",
    ]
