"""Device strings, plugin isolation and selection, with plugins that are really discovered (``tests/plugins``)."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvport import inspection, plugins, registry
from kvport.backend import operations
from kvport.errors import BackendUnavailable, InvalidArgument, KVPortError, PluginConflict, UnknownBackend
from kvport.hookspecs import SUPPORTED_APIS, Device, Hooks, Probe
from kvport.plugins import LoadFailure, Plugin
from kvport.registry import DeviceString, Registry, load_backend, parse_device

PLUGINS = Path(__file__).parent / "plugins"

Install = Callable[..., Registry]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install("good", "tie_a", KVPORT_X="...")``: put these plugins on the import path, give a fresh registry.

    The environment's own variables and whatever the test imported are undone.
    """
    before = set(sys.modules)

    def installed(*cases: str, **environ: str) -> Registry:
        for case in cases:
            assert (PLUGINS / case).is_dir()
            monkeypatch.syspath_prepend(PLUGINS / case)
        return Registry(environ=environ)

    yield installed
    for name in set(sys.modules) - before:
        if name.endswith(("_plugin", "_backend")):
            del sys.modules[name]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("cpu", DeviceString("", "cpu", None)),
        ("cuda:1", DeviceString("", "cuda", 1)),
        ("reference@cuda:0", DeviceString("reference", "cuda", 0)),
        ("triton@cpu", DeviceString("triton", "cpu", None)),
        ("my-chip.v2@npu:15", DeviceString("my-chip.v2", "npu", 15)),
    ],
)
def test_parse_device(text: str, expected: DeviceString) -> None:
    assert parse_device(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@cpu",
        "cpu@",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:1.0",
        "a@b@c",
        "cuda:0:1",
        "cuda 0",
        " cpu",
        "cuda:9999999",
    ],
)
def test_a_string_that_cannot_be_a_device(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_device(text)
    assert repr(text) in str(caught.value)
    assert "[backend@]device[:index]" in str(caught.value)


@pytest.mark.parametrize("value", [None, 0, b"cpu", pytest.param(10**5000, id="long")])
def test_a_device_must_be_a_string(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="given as a string"):
        parse_device(value)


def test_first_party_backend_comes_through_the_entry_point(install: Install) -> None:
    selection = install().select("cpu")
    assert (selection.info.name, selection.entry.distribution, selection.request.device) == (
        "reference",
        "kvport",
        "cpu",
    )
    backend = selection.load()
    assert (backend.name, backend.device, backend.torch_device.type) == ("reference", "cpu", "cpu")


def test_a_third_partys_backend_loads_by_device_and_by_name(install: Install) -> None:
    found = install("good")
    assert found.load("goodchip:1").device == "goodchip:1"
    assert found.load("good@goodchip").name == "good"
    assert found.load("good-extra@extrachip").name == "good-extra"
    assert found.load("extrachip").name == "good-extra"
    assert found.select("goodchip").entry.provider == "kvport-test-good 1.0"


def test_a_name_loads_that_plugin_alone(install: Install) -> None:
    found = install("good", "importerror", "senior")
    found.load("good@goodchip")
    assert "good_plugin" in sys.modules
    assert "senior_plugin" not in sys.modules
    found.load("goodchip")
    assert "senior_plugin" in sys.modules


def test_explicit_devices_only_by_name(install: Install) -> None:
    found = install("good")
    assert found.load("good@slowchip").device == "slowchip"
    with pytest.raises(BackendUnavailable, match="chosen only by name: write 'good@slowchip'"):
        found.select("slowchip")


def _second_by_name_only(found: Registry, monkeypatch: pytest.MonkeyPatch, probes: list[str]) -> None:
    """The good plugin's second backend also drives goodchip and lonelychip, by name only, and cannot be used."""
    plugin = found.plugins.load("good")

    def probe(device_type: str) -> Probe:
        probes.append(device_type)
        return Probe(usable=False, reason="it is switched off")

    first, second = plugin.backends
    devices = tuple(Device(name, torch_type="cpu", explicit=True) for name in ("goodchip", "lonelychip"))
    edited = dataclasses.replace(plugin, backends=(first, dataclasses.replace(second, devices=devices, probe=probe)))
    monkeypatch.setitem(found.plugins._outcomes, "good", edited)


def test_advice_to_ask_by_name_leads_to_no_second_refusal(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    found = install("good")
    _second_by_name_only(found, monkeypatch, [])
    with pytest.raises(BackendUnavailable) as caught:
        found.select("lonelychip")
    assert "chosen only by name, and not usable then either: it is switched off" in str(caught.value)
    assert "write" not in str(caught.value)


def test_a_bare_device_that_works_probes_nobody_who_must_be_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kvport.open("cpu")`` must not wake an interpreter."""
    found, probes = install("good"), []  # type: tuple[Registry, list[str]]
    _second_by_name_only(found, monkeypatch, probes)
    assert found.select("goodchip").info.name == "good"
    assert probes == []


BROKEN = {
    "importerror": "ImportError: No module named 'vendor_sdk'",
    "oserror": "OSError: libvendor.so.2: cannot open shared object file",
    "panics": "PanicException: called `Option::unwrap()` on a `None` value",
    "wrongtype": "must return a list of BackendInfo, got one dict",
    "unknownhook": "unknown hook 'kvport_backend'",
    "extraarg": "{'context'} are declared in the hookimpl but can not be found in the hookspec",
    "nohook": "has no function kvport_backends() marked with @kvport.hookimpl",
    "wrapper": "must not be a hook wrapper",
    "wrongapi": f"interface 99, this kvport supports {SUPPORTED_APIS.start} to {SUPPORTED_APIS.stop - 1}",
    "misnamed": "announces 'somebody', but its entry point is named 'misnamed'",
    "twice": "announces the backend name 'twice' twice",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_gives_its_reason_by_name(install: Install, case: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        install(case).load(f"{case}@somechip")
    assert BROKEN[case] in str(caught.value)
    assert f"{case} (kvport-test-{case} 1.0)" in str(caught.value)


def test_broken_plugins_harm_nobody_else(install: Install) -> None:
    found = install("good", "twin_a", "twin_b", "raising", *BROKEN)
    assert found.load("goodchip:0").name == "good"
    assert found.load("cpu").name == "reference"
    failures = {failure.name: failure for failure in found.failures()}
    assert set(failures) == {*BROKEN, "twin"}
    for case, reason in BROKEN.items():
        assert reason in failures[case].error
        assert (failures[case].distribution, failures[case].version) == (f"kvport-test-{case}", "1.0")
    assert "importerror_plugin.py" in failures["importerror"].traceback
    assert failures["nohook"].traceback == ""


def test_a_thief_of_names_fails_and_the_owner_does_not(install: Install) -> None:
    found = install("good", "thief")
    assert found.load("good@goodchip").name == "good"
    with pytest.raises(BackendUnavailable, match=r"announces 'good', the name of the plugin of kvport-test-good 1.0"):
        found.load("thief@thiefchip")


def test_two_distributions_with_one_name_conflict(install: Install) -> None:
    found = install("good", "twin_a", "twin_b")
    with pytest.raises(PluginConflict) as caught:
        found.load("twin@cpu")
    assert "kvport-test-twin_a 1.0" in str(caught.value)
    assert "kvport-test-twin_b 2.0" in str(caught.value)
    assert found.load("goodchip").name == "good"


def test_a_failed_plugin_can_be_asked_again_with_the_same_answer(install: Install) -> None:
    found = install("importerror")
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="No module named 'vendor_sdk'"):
            found.load("importerror@somechip")


def test_a_tie_is_an_error_that_lists_every_candidate(install: Install) -> None:
    found = install("tie_a", "tie_b", "absent", "raising", "oserror")
    with pytest.raises(PluginConflict) as caught:
        found.select("tiechip:0")
    for text in (
        "'tie-a@tiechip:0' or 'tie-b@tiechip:0'",
        "tie-a (kvport-test-tie_a 1.0): usable, priority 0",
        "tie-b (kvport-test-tie_b 1.0): usable, priority 0",
        "absent (kvport-test-absent 1.0): libabsent 3.2 is not installed",
        "raising (kvport-test-raising 1.0): its probe failed: DriverPanic: device 0 fell off the bus",
        "oserror (kvport-test-oserror 1.0): OSError: libvendor.so.2",
    ):
        assert text in str(caught.value)


def test_the_highest_priority_among_the_usable_wins(install: Install) -> None:
    found = install("tie_a", "tie_b", "absent", "senior")
    assert found.load("tiechip").name == "senior"  # "absent" has a higher priority and is not usable


def test_none_usable_lists_every_candidate(install: Install) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        install("absent", "raising", "importerror").select("tiechip")
    for text in ("libabsent 3.2 is not installed", "device 0 fell off the bus", "No module named 'vendor_sdk'"):
        assert text in str(caught.value)


@pytest.mark.parametrize("text", ["gpu", "gpu:0", "CUDA", "good"])
def test_an_unknown_device_lists_what_there_is(install: Install, text: str) -> None:
    with pytest.raises(UnknownBackend) as caught:
        install("good", "importerror").load(text)
    for expected in ("reference@cpu", "reference@cuda (by name only)", "good@goodchip", "No module named 'vendor_sdk'"):
        assert expected in str(caught.value)
    assert ("'good' is a backend: write 'good@' and a device" in str(caught.value)) == (text == "good")


def test_an_unknown_name_lists_what_there_is(install: Install) -> None:
    found = install("good")
    with pytest.raises(UnknownBackend, match=r"no backend is named 'trition'; there are: .*good@goodchip"):
        found.load("trition@cuda")
    with pytest.raises(UnknownBackend, match="'goodchip' is a device type: write it after the '@'"):
        found.load("goodchip@good")


def test_a_device_the_named_backend_does_not_drive(install: Install) -> None:
    with pytest.raises(UnknownBackend, match=r"does not drive 'npu'; it drives: good@goodchip, good@slowchip"):
        install("good").load("good@npu:0")


def test_an_unusable_named_backend_gives_the_probes_reason(install: Install) -> None:
    with pytest.raises(BackendUnavailable, match=r"kvport-test-absent 1.0\) is not usable .* libabsent 3.2"):
        install("absent").load("absent@tiechip")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("goodchip:2", "index 2 is out of range: goodchip has 2 device(s) here, 0 .. 1"),
        ("good@goodchip:7", "index 7 is out of range: goodchip has 2 device(s) here, 0 .. 1"),
        ("cpu:1", "index 1 is out of range: cpu has 1 device(s) here, 0 .. 0"),
    ],
)
def test_an_index_out_of_range(install: Install, text: str, expected: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        install("good").load(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "device, expected",
    [
        ("raises", "failed to load 'raises': RuntimeError: firmware 7 is too old"),
        ("wrongname", "name is 'good', expected 'badload'"),
        ("wrongdevice", "device is 'elsewhere', expected 'wrongdevice'"),
        ("wrongtorch", "torch_device has type 'meta', announced for 'wrongtorch' is 'cpu'"),
        ("wrongtype", "load must return a kvport.backend.Backend, got object"),
    ],
)
def test_a_load_that_goes_wrong(install: Install, device: str, expected: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        install("good", "badload").load(device)
    assert expected in str(caught.value)


@pytest.mark.parametrize("answer", [None, True, {"usable": True}])
def test_a_probe_of_the_wrong_type(answer: object) -> None:
    info = registry.BackendInfo("x", (Device("x"),), load="a:b", probe=lambda _: answer)  # type: ignore[arg-type,return-value]
    assert "its probe must return a kvport.Probe" in registry.probe_device(info, Device("x")).reason


def test_a_probe_that_is_not_there() -> None:
    info = registry.BackendInfo("x", (Device("x"),), load="a:b", probe="kvport.errors:nothing_here")
    assert "nothing_here" in registry.probe_device(info, Device("x")).reason


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_users_interrupt_is_no_reason(stop: type[BaseException]) -> None:
    def probe(device_type: str) -> Probe:
        raise stop

    info = registry.BackendInfo("x", (Device("x"),), load="a:b", probe=probe)
    with pytest.raises(stop):
        registry.probe_device(info, Device("x"))


def test_probe_and_device_records_are_checked() -> None:
    with pytest.raises(ValueError, match="must give its reason"):
        Probe(usable=False)
    with pytest.raises(ValueError, match="count"):
        Probe(usable=True, count=-1)
    for word in ("", "a b", "a@b", "a:b"):
        with pytest.raises(ValueError, match="device type"):
            Device(word)


# --- the environment's lists -----------------------------------------------------------------------------------------


def test_block_list_applies_before_the_import(install: Install) -> None:
    found = install("good", "senior", KVPORT_DISABLE_PLUGINS="senior")
    assert found.load("goodchip").name == "good"
    assert "senior_plugin" not in sys.modules
    with pytest.raises(BackendUnavailable, match="blocked by KVPORT_DISABLE_PLUGINS='senior'"):
        found.load("senior@tiechip")


def test_block_list_resolves_a_tie(install: Install) -> None:
    found = install("good", "tie_a", "tie_b", "senior", KVPORT_DISABLE_PLUGINS="senior, tie-b")
    assert found.select("tiechip").info.name == "tie-a"


def test_allow_list(install: Install) -> None:
    found = install("good", "senior", KVPORT_PLUGINS="good")
    assert found.load("goodchip").name == "good"
    assert "senior_plugin" not in sys.modules
    with pytest.raises(UnknownBackend, match="not allowed by KVPORT_PLUGINS='good'"):
        found.load("cpu")


@pytest.mark.parametrize("variable", ["KVPORT_PLUGINS", "KVPORT_DISABLE_PLUGINS"])
def test_a_list_with_a_name_nobody_has(install: Install, variable: str) -> None:
    with pytest.raises(UnknownBackend, match=rf"{variable}='good,godo' names 'godo', .*installed: .*good, .*reference"):
        install("good", **{variable: "good,godo"}).load("cpu")


def test_empty_lists_count_as_unset(install: Install) -> None:
    assert install("good", KVPORT_PLUGINS="", KVPORT_DISABLE_PLUGINS=" ").load("goodchip").name == "good"


def test_strict_raises_with_the_plugins_own_exception(install: Install) -> None:
    found = install("good", "importerror", KVPORT_STRICT_PLUGINS="1")
    assert found.load("good@goodchip").name == "good"
    with pytest.raises(BackendUnavailable) as caught:
        found.load("goodchip")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(InvalidArgument, match="must be 0 or 1, got 'yes'"):
        install(KVPORT_STRICT_PLUGINS="yes").load("cpu")


# --- discovery, threads, imports -------------------------------------------------------------------------------------


def test_stale_metadata_earlier_on_the_path_does_not_hide_a_plugin(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = install("good")
    stale = tmp_path / "kvport_test_good.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: kvport-test-good\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert found.select("goodchip").entry.version == "1.0"


def test_a_distribution_twice_on_the_path_is_no_conflict(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    found = install("good")
    monkeypatch.syspath_prepend(os.path.join(PLUGINS, "senior", "..", "good"))
    assert found.load("good@goodchip").name == "good"


def test_metadata_without_a_name_is_still_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bare-1.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("[kvport]\nbare = bare_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [entry.module for entry in plugins.find_entries() if entry.name == "bare"] == ["bare_plugin"]


def test_a_plugin_that_asks_for_a_backend_while_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    found = install("good", "selfish")
    monkeypatch.setattr(registry, "_default", found)
    assert load_backend("goodchip").name == "good"
    (failure,) = found.failures()
    assert "plugin 'selfish' asks for a backend while its module is being imported" in failure.error


def test_threads_load_each_plugin_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    found = install("good", "tie_a", "senior", "importerror")
    attempts: list[str] = []
    attempt = plugins.Plugins._attempt

    def counted(self: plugins.Plugins, name: str) -> Plugin | LoadFailure:
        attempts.append(name)
        return attempt(self, name)

    monkeypatch.setattr(plugins.Plugins, "_attempt", counted)
    results: list[object] = []
    start = threading.Barrier(8)

    def ask(index: int) -> None:
        start.wait()
        try:
            results.append(found.load(("goodchip", "good@goodchip", "tiechip", "importerror@cpu")[index % 4]).name)
        except KVPortError as error:
            results.append(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["BackendUnavailable"] * 2 + ["good"] * 4 + ["senior"] * 2
    assert sorted(attempts) == sorted(found.plugins.entries())


def test_importing_kvport_looks_up_no_plugin() -> None:
    code = "import sys, kvport.registry as r; print(r._default, 'kvport_cpu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


# --- listing from child processes ------------------------------------------------------------------------------------


def test_listing_survives_everything(install: Install) -> None:
    broken = ("hanging", "crashing", "raising", "importerror", "twin_a", "twin_b")
    found = install("good", *broken, KVPORT_DISABLE_PLUGINS="reference,triton,ascend")
    rows = {}
    for row in inspection.list_backends(registry=found, time_limit=2.0):
        rows.setdefault(row.name, []).append(row)
    (good,) = rows["good"]
    assert (good.usable, good.distribution, good.version, good.error) == (True, "kvport-test-good", "1.0", "")
    goodchip, slowchip = good.devices
    assert (goodchip.usable, goodchip.count, goodchip.facts) == (True, 2, {"driver": "1.2"})
    assert (slowchip.usable, slowchip.explicit) == (True, True)
    assert goodchip.capability is not None
    assert goodchip.capability.execution == "hardware"
    assert goodchip.capability.facts == {"driver": "1.2", "firmware": "7"}
    assert goodchip.capability.operations["support"] == "native"
    assert goodchip.capability.operations["append"] == "inherited"
    refused = {answer.format: answer.reasons for answer in goodchip.capability.formats if answer.reasons}
    why = ("int2 is not in this chip, nearest is int4",)
    assert refused == {
        "int2:g32:asym:scale=fp16": why,
        "kivi2": why,
        "k=int4:g64:outliers=4,v=int4:g64": ("feature outliers is not declared, needed for outlier channels",),
        "int4:g64:sparse=32": ("feature sparse is not declared, needed for sparse outliers",),
        "latent=bf16,rope=bf16": ("feature latent is not declared, needed for latent (MLA) layers",),
        "latent=int8:g128,rope=bf16": ("feature latent is not declared, needed for latent (MLA) layers",),
    }
    assert {answer.features for answer in goodchip.capability.formats if not answer.reasons} == {("lse", "prefill")}
    assert rows["good-extra"][0].usable

    assert not rows["raising"][0].usable
    assert rows["raising"][0].devices[0].reason == "its probe failed: DriverPanic: device 0 fell off the bus"
    (hanging,) = rows["hanging"]
    assert hanging.devices[0].reason == "gave no answer within 2 s while probing hanging@hangchip"
    (crashing,) = rows["crashing"]
    assert "killed by SIGSEGV" in crashing.error
    assert "while importing the plugin module" in crashing.error
    assert "ImportError: No module named 'vendor_sdk'" in rows["importerror"][0].error
    assert "importerror_plugin.py" in rows["importerror"][0].traceback
    assert len(rows["twin"]) == 2
    for twin in rows["twin"]:
        assert "kvport-test-twin_a 1.0" in twin.error
        assert "kvport-test-twin_b 2.0" in twin.error
    assert rows["reference"][0].error == "blocked by KVPORT_DISABLE_PLUGINS='reference,triton,ascend'"
    assert "good_plugin" not in sys.modules  # nothing of it happened in this process


def test_listing_without_probing(install: Install) -> None:
    found = install("good", "hanging", "oserror", "senior", KVPORT_DISABLE_PLUGINS="senior")
    rows = {row.name: row for row in inspection.list_backends(probe=False, registry=found)}
    assert [device.usable for device in rows["hanging"].devices] == [None]
    assert [device.type for device in rows["good"].devices] == ["goodchip", "slowchip"]
    assert "OSError: libvendor.so.2" in rows["oserror"].error
    assert rows["senior"].error == "blocked by KVPORT_DISABLE_PLUGINS='senior'"


def test_examine_loads_in_a_child(install: Install) -> None:
    install("good", "crashing", "hanging")
    found = inspection.examine("good@goodchip:1")
    assert (found.name, found.distribution, found.version, found.device) == (
        "good",
        "kvport-test-good",
        "1.0",
        "goodchip:1",
    )
    assert found.capability.torch_device == "cpu"
    assert "good_plugin" not in sys.modules
    with pytest.raises(UnknownBackend, match="does not drive 'npu'"):
        inspection.examine("good@npu")
    with pytest.raises(BackendUnavailable, match=r"killed by SIGSEGV.* while selecting"):
        inspection.examine("crashing@cpu")
    with pytest.raises(BackendUnavailable, match=r"gave no answer within 1 s while selecting"):
        inspection.examine("hanging@hangchip", time_limit=1.0)
    with pytest.raises(InvalidArgument, match="no device string"):
        inspection.examine("cuda:x")


def test_a_plugin_that_kills_or_hangs_has_a_verdict_on_itself_alone(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good", "crashing", "hanging")
    # Each plugin costs a process three times over, and the limit has to be what the slowest of them may need.
    monkeypatch.setenv("KVPORT_DISABLE_PLUGINS", "reference,triton,ascend")
    found = inspection.examine("goodchip", time_limit=5.0)  # a bare device imports them all
    assert found.name == "good"
    assert set(found.left_out) == {"crashing", "hanging"}
    assert "killed by SIGSEGV while importing the plugin module" in found.left_out["crashing"]
    assert "gave no answer within 5 s while probing hanging@hangchip" in found.left_out["hanging"]
    with pytest.raises(UnknownBackend, match="no backend drives a device of type 'nochip'"):
        inspection.examine("nochip", time_limit=5.0)


def test_every_plugin_of_the_folder_is_used_here() -> None:
    """A folder that no test installs would be dead weight."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for folder in PLUGINS.iterdir():
        assert f'"{folder.name}"' in text, folder.name


# --- documentation ---------------------------------------------------------------------------------------------------

DOCUMENT = (Path(__file__).parent.parent / "docs" / "plugins.md").read_text(encoding="utf-8")


def test_the_documented_plugin_works(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, announcement, work = re.findall(
        r"^```(?:toml|python)\n(.*?)^```", DOCUMENT, flags=re.DOTALL | re.MULTILINE
    )
    described = tomllib.loads(project)["project"]
    ((name, module),) = described["entry-points"]["kvport"].items()
    metadata = tmp_path / "acme_kvport-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[kvport]\n{name} = {module}\n")
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(announcement)
    (tmp_path / module / "backend.py").write_text(work)
    monkeypatch.syspath_prepend(tmp_path)
    found = install()
    for key in ("acme_kvport", "acme_kvport.backend"):
        monkeypatch.delitem(sys.modules, key, raising=False)
    backend = found.load("acme:0")
    assert (backend.name, backend.device, backend.torch_device.type) == ("acme", "acme:0", "cpu")
    assert set(operations(backend).values()) == {"inherited"}
    with pytest.raises(BackendUnavailable, match="index 1 is out of range"):
        found.load("acme@acme:1")


def test_every_hook_field_and_variable_is_documented() -> None:
    for name, hook in vars(Hooks).items():
        if name.startswith("kvport_"):
            arguments = ", ".join(list(inspect.signature(hook).parameters)[1:])
            assert f"`{name}({arguments})`" in DOCUMENT
    for record in (registry.BackendInfo, Device, Probe):
        for field in dataclasses.fields(record):
            assert re.search(rf"`{field.name}[`(]", DOCUMENT), field.name
    for variable in re.findall(r"KVPORT_[A-Z_]+", Path(plugins.__file__).read_text(encoding="utf-8")):
        assert f"`{variable}=" in DOCUMENT
