"""Waivers as data: what they cover, and what a plugin may ship. What pytest makes of them is in test_pytest_plugin."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from kvport import inspection
from kvport.errors import BackendUnavailable, InvalidArgument
from kvport.registry import Registry
from kvport.waivers import Waiver, chosen, from_record, read

PLUGINS = Path(__file__).parent / "plugins"
DAY = datetime.date(2026, 6, 1)
CASES = ("append/rows/int8/a", "append/rows/int4:g16/a", "append/split/int8/b[1]", "pages/rows/int8/a")


def waiver(case: str = "append/rows/int8/a", expires: datetime.date = DAY, backend: str = "chip") -> Waiver:
    return Waiver(backend, case, "known", expires)


@pytest.mark.parametrize(
    "pattern, covered",
    [
        ("append/rows/int8/a", CASES[:1]),
        ("append/*", CASES[:3]),
        ("*/int?/a", (CASES[0], CASES[3])),
        ("append/split/int8/b[1]", CASES[2:3]),
        ("append/split/int8/b[*", CASES[2:3]),
    ],
)
def test_a_pattern_knows_stars_and_question_marks_only(pattern: str, covered: tuple[str, ...]) -> None:
    assert tuple(case for case in CASES if waiver(pattern).covers(case)) == covered


@pytest.mark.parametrize(
    "backend, concerned",
    [("chip", True), ("chip@npu", True), ("chip@emu", False), ("other", False), ("chi", False)],
)
def test_a_waiver_is_about_a_backend_or_one_device_of_it(backend: str, concerned: bool) -> None:
    assert waiver(backend=backend).concerns("chip", "npu:1") is concerned


def test_the_last_day_counts() -> None:
    assert not waiver().expired(DAY)
    assert waiver().expired(DAY + datetime.timedelta(days=1))


def test_of_two_the_one_that_holds_is_chosen() -> None:
    old, new = waiver("append/*", DAY - datetime.timedelta(days=9)), waiver("append/rows/*")
    found = chosen([old, new], backend="chip", device="npu", cases=CASES, today=DAY)
    assert found == {CASES[0]: new, CASES[1]: new, CASES[2]: old}
    assert chosen([old, new], backend="other", device="npu", cases=CASES, today=DAY) == {}


def test_every_entry_is_checked_whoever_it_is_about() -> None:
    with pytest.raises(InvalidArgument, match="no case of the suite is named 'append/rows'"):
        chosen([waiver("append/rows", backend="other")], backend="chip", device="npu", cases=CASES, today=DAY)
    with pytest.raises(InvalidArgument, match="waived twice"):
        chosen([waiver(), waiver()], backend="chip", device="npu", cases=CASES, today=DAY)


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"waiver": [{"backend": "chip", "case": "append/*", "reason": "r", "expires": "2026-06-01"}]}'
    )
    (tmp_path / "a.toml").write_text(
        '[[waiver]]\nbackend = "chip"\ncase = "append/*"\nreason = "r"\nexpires = 2026-06-01\n'
    )
    one, two = (read(tmp_path / name)[0] for name in ("a.json", "a.toml"))
    assert (one.backend, one.case, one.reason, one.expires) == (two.backend, two.case, two.reason, two.expires)
    assert two.source == f"{tmp_path / 'a.toml'}, waiver 1"
    assert from_record(two.to_json()) == two


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in ("good", "waives"):
        monkeypatch.syspath_prepend(PLUGINS / case)


@pytest.mark.usefixtures("on_path")
def test_a_plugin_ships_waivers_for_its_own_backends() -> None:
    plugins = Registry(environ={}).plugins
    assert plugins.waivers("good") == ()
    [known] = plugins.waivers("waives")
    assert (known.backend, known.case) == ("waives", "append/rows/int8/*")
    examined = inspection.examine("waives@waivechip")
    assert examined.waivers == ({**known.to_json(), "source": "plugin waives"},)


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    "how, said",
    [
        ("others", r"waives cases of 'good'; a plugin waives those of its own: waives"),
        ("type", r"must return kvport.waivers.Waiver records, got 'append/\*'"),
        ("raises", r"RuntimeError: no such list"),
        ("malformed", r"'reason' must be text that is not empty"),
    ],
)
def test_a_plugins_bad_waivers_are_its_own_failure(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPORT_TEST_WAIVES", how)
    plugins = Registry(environ={}).plugins
    with pytest.raises(
        BackendUnavailable, match=r"kvport_waivers\(\) of plugin waives \(kvport-test-waives 1.0\).*" + said
    ):
        plugins.waivers("waives")
    assert Registry(environ={}).load("waives@waivechip").name == "waives"  # who only uses it never asks
