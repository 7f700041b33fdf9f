"""The pytest plugin as users meet it: real pytest runs in child processes, on a tiny suite of the real one's name.

The child finds a stand-in for ``kvport.inspection``, so that a run costs no torch import; the last section runs against
the real library.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file  # here, because pytester takes back what a test imports, and numpy loads once

from kvport import errors, files, waivers
from pytest_kvport import split_formats
from pytest_kvport.reporting import plain
from pytest_kvport.selection import Selected, selected

pytest_plugins = ["pytester"]

#: A day on which a waiver still holds, whenever this runs.
SOON = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)

STAND_IN = {
    "kvport/__init__.py": "",
    "kvport/reports/__init__.py": "",
    "kvport/reports/reading.py": """
        def sealed(record): return {**record, "digest": "a seal"}
    """,
    **{
        f"kvport/{Path(module.__file__).name}": Path(module.__file__).read_text(encoding="utf-8")
        for module in (errors, files, waivers)
    },
    "kvport/formats.py": """
        from kvport.errors import FormatError
        class CacheFormat:
            @staticmethod
            def parse(text):
                if text == "int9":
                    raise FormatError("unknown code 'int9'; known codes: int8")
    """,
    "kvport/inspection.py": """
        from types import SimpleNamespace
        from kvport.errors import KVPortError
        def examine(text):
            if text == "broken@cpu":
                raise KVPortError("backend plugin broken (acme-kv 2.1): OSError: libacme.so is missing")
            capability = {"torch_device": "cpu", "execution": "hardware", "facts": {"driver": "9"}, "formats": [],
                          "operations": {"append": "native", "attend": "inherited"}}
            shipped = [{"backend": "acme", "case": "scales/test_scale", "reason": "ours", "expires": "SOON",
                        "issue": "", "source": "plugin acme"}] if text == "cpu:7" else []
            found = {"request": text, "name": "acme", "distribution": "acme-kv", "version": "2.1", "location": "/x",
                     "device": text, "capability": capability, "waivers": shipped}
            return SimpleNamespace(to_json=lambda: found)
        def list_backends(probe):
            return [SimpleNamespace(name="acme", distribution="acme-kv")]
    """.replace("SOON", str(SOON)),
}

SUITE = {
    "kvport_conformance/__init__.py": "SUITE_VERSION = 7",
    "kvport_conformance/manifest.py": """
        IDS = ("append/test_backend", "append/test_declined", "append/test_length[1]", "append/test_length[2]",
               "scales/test_scale")
        def read():
            return 7, dict.fromkeys(IDS, "quick")
    """,
    "kvport_conformance/conftest.py": """
        import pytest
        @pytest.fixture(autouse=True)
        def case(request):
            record = {"ratio": 0.25, "worst": float("nan")}
            request.node.user_properties.append(("kvport_case", identity(request.node) | record))
            return request.node.user_properties[-1][1]
        def identity(item):
            chapter = item.get_closest_marker("kvport_chapter").args[0]
            return {"id": f"{chapter}/{item.name}", "chapter": chapter}
        @pytest.fixture
        def backend(pytestconfig):
            # By name, whatever was asked for: the run loads that plugin alone.
            assert pytestconfig.getoption("kvport_backend").startswith("acme@")
            return pytestconfig.getoption("kvport_backend").removeprefix("acme@")
    """,
    "kvport_conformance/helper.py": """
        def check(value):
            assert value == "cpu"
    """,
    "kvport_conformance/test_append.py": """
        import pytest
        from pytest_kvport import unsupported
        from kvport_conformance.helper import check
        pytestmark = pytest.mark.kvport_chapter("append")
        def test_backend(backend):
            check(backend)
        def test_declined():
            unsupported("no int4 in this chip")
        @pytest.mark.parametrize("n", [1, 2])
        def test_length(n, case):
            case["length"] = n
    """,
    "kvport_conformance/nested/__init__.py": "",
    "kvport_conformance/nested/test_scales.py": """
        import pytest
        pytestmark = pytest.mark.kvport_chapter("scales")
        def test_scale(pytestconfig):
            assert pytestconfig.getoption("kvport_seed") in (0, 5)
    """,
}

OWNER = {
    "conftest.py": """
        def pytest_addoption(parser):
            parser.addoption("--backend", dest="their_backend", default=None, help="the project's own")
    """,
    "test_own.py": """
        def test_own(pytestconfig):
            assert pytestconfig.getoption("their_backend") == "postgres"
    """,
}


def write(folder: Path, files: dict[str, str]) -> None:
    import textwrap

    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")


class World:
    """``checkout`` has the suite in ``conformance/``; ``elsewhere`` is an empty project; ``site`` is installed."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.checkout, self.elsewhere, self.site = (pytester.mkdir(n) for n in ("checkout", "elsewhere", "site"))
        write(self.site, STAND_IN)
        write(self.checkout / "conformance", SUITE)
        # As in an editable install: the checkout's suite is the importable one.
        self.real = False
        self.path = [str(self.site), str(self.checkout / "conformance"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def pytest(
        self, *arguments: str, cwd: Path | None = None, plugins: Sequence[str] = ("kvport", "xdist")
    ) -> pytest.RunResult:
        # Not "python -m pytest": it would put the working directory on the path, and hide what an install lacks.
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd or self.checkout)
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, self.path)))
            if not self.real:
                # By the names of their entry points, without the other plugins of this environment: hypothesis alone
                # costs a second a run.
                patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
                command += [word for plugin in plugins for word in ("-p", plugin)]
            return self.pytester.run(*command, *arguments)

    def use_the_real_library(self) -> None:
        self.path.remove(str(self.site))
        self.real = True

    def report(self, name: str = "report.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.checkout / name).read_text(encoding="utf-8"))
        return found


@pytest.fixture
def world(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(pytester, monkeypatch)


PASSED = "*4 passed, 1 unsupported*"

INVOCATIONS: dict[str, tuple[str, Sequence[str]]] = {
    "path": ("checkout", ["conformance"]),
    "path with slash": ("checkout", ["conformance/"]),
    "package path": ("checkout", ["conformance/kvport_conformance"]),
    "from above": ("checkout", ["."]),
    "no argument": ("checkout", []),
    "cd conformance": ("checkout/conformance", []),
    "cd package": ("checkout/conformance/kvport_conformance", []),
    "pyargs elsewhere": ("elsewhere", ["--pyargs", "kvport_conformance"]),
    "two workers": ("checkout", ["conformance", "-n2"]),
    "pyargs, two workers": ("elsewhere", ["--pyargs", "kvport_conformance", "-n2"]),
}


@pytest.mark.parametrize("how", INVOCATIONS)
def test_invocations_that_select_the_suite(world: World, how: str) -> None:
    folder, arguments = INVOCATIONS[how]
    result = world.pytest(*arguments, "--backend=cpu", cwd=world.checkout.parent / folder)
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines([PASSED])
    result.stdout.fnmatch_lines(["acme@cpu: 4 pass, 0 fail, 1 unsupported, 0 waived, 0 error"])
    result.stdout.fnmatch_lines(["unsupported 1 x: no int4 in this chip"])
    result.stdout.fnmatch_lines(["kvport backend: acme (acme-kv 2.1) on cpu, execution hardware, 1 of 2 *native"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["conformance/kvport_conformance/nested"],
        ["conformance/kvport_conformance/nested/test_scales.py"],
        ["conformance/kvport_conformance/nested/test_scales.py::test_scale"],
        ["--pyargs", "kvport_conformance.nested.test_scales"],
        ["--pyargs", "kvport_conformance.nested.test_scales::test_scale"],
    ],
)
def test_part_of_the_suite(world: World, arguments: list[str]) -> None:
    result = world.pytest(*arguments, "--backend", "cpu")  # with a space, too
    assert result.ret == 0, result.outlines
    result.assert_outcomes(passed=1)


def test_long_options_work_everywhere(world: World) -> None:
    write(world.elsewhere, {"test_a.py": "def test_a(pytestconfig): assert pytestconfig.getoption('kvport_seed') == 3"})
    result = world.pytest("--kvport-seed=3", "--kvport-backend=whatever", cwd=world.elsewhere)
    assert result.ret == 0, result.outlines
    result.stdout.no_fnmatch_line("*kvport backend*")  # nothing of ours in a run that is not ours
    result.stdout.no_fnmatch_line("*kvport conformance*")


def test_short_options_exist_only_for_the_suite(world: World) -> None:
    write(world.elsewhere, {"test_a.py": "def test_a(): pass"})
    result = world.pytest("--backend=cpu", cwd=world.elsewhere)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*unrecognized arguments: --backend=cpu*"])


def test_another_projects_own_backend_option_is_left_alone(world: World) -> None:
    write(world.elsewhere, OWNER)
    result = world.pytest("--backend=postgres", cwd=world.elsewhere)
    assert result.ret == 0, result.outlines
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["one", "xdist"])
@pytest.mark.parametrize("option", ["--backend=cpu", "--kvport-backend=cpu"])
def test_pyargs_from_a_project_that_owns_the_option(world: World, option: str, workers: list[str]) -> None:
    write(world.elsewhere, OWNER)
    result = world.pytest("--pyargs", "kvport_conformance", option, *workers, cwd=world.elsewhere)
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines([PASSED])


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["one", "xdist"])
@pytest.mark.parametrize("suite_first", [True, False], ids=["suite first", "own tests first"])
def test_both_in_one_run_each_with_its_own_option(world: World, suite_first: bool, workers: list[str]) -> None:
    write(world.elsewhere, OWNER)
    named = ["kvport_conformance", "test_own.py"][:: 1 if suite_first else -1]
    result = world.pytest(
        "--pyargs", *named, "--backend=postgres", "--kvport-backend=cpu", *workers, cwd=world.elsewhere
    )
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines(["*5 passed, 1 unsupported*"])
    result.stdout.fnmatch_lines(["acme@cpu: 4 pass, *"])


@pytest.mark.parametrize("ours_first", [True, False], ids=["kvport first", "theirs first"])
def test_a_plugin_that_owns_the_option_keeps_it_whoever_is_loaded_first(world: World, ours_first: bool) -> None:
    write(world.site, {"owning_plugin.py": OWNER["conftest.py"]})
    write(world.elsewhere, {"test_own.py": OWNER["test_own.py"]})
    loaded = ["kvport", "owning_plugin"]
    result = world.pytest(
        "--pyargs",
        "kvport_conformance",
        "test_own.py",
        "--backend=postgres",
        "--kvport-backend=cpu",
        cwd=world.elsewhere,
        plugins=loaded if ours_first else loaded[::-1],
    )
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines(["*5 passed, 1 unsupported*"])


def test_testpaths_elsewhere_is_no_selection(world: World) -> None:
    write(world.checkout, {"pytest.ini": "[pytest]\ntestpaths = tests\n", "tests/test_a.py": "def test_a(): pass"})
    result = world.pytest()
    assert result.ret == 0, result.outlines
    result.assert_outcomes(passed=1)


def test_without_a_backend(world: World) -> None:
    result = world.pytest("conformance")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*selected without a backend: add --backend=*installed: acme (acme-kv)*"])


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["one", "xdist"])
def test_an_unusable_backend_ends_the_run_with_its_reason(world: World, workers: list[str]) -> None:
    result = world.pytest("conformance", "--backend=broken@cpu", *workers)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--backend=broken@cpu: *broken (acme-kv 2.1): OSError: libacme.so is missing"])


@pytest.mark.parametrize("option", ["--help", "--version", "--markers"])
def test_questions_need_no_backend(world: World, option: str) -> None:
    assert world.pytest("conformance", option).ret == 0


def test_collecting_is_not_judged(world: World) -> None:
    result = world.pytest("conformance", "--backend=cpu", "--collect-only", "-q", "--report=report.json")
    assert result.ret == 0, result.outlines
    assert not (world.checkout / "report.json").exists()


def test_strict_markers_of_the_caller(world: World) -> None:
    write(world.elsewhere, {"pytest.ini": "[pytest]\naddopts = --strict-markers\n"})
    assert world.pytest("--pyargs", "kvport_conformance", "--backend=cpu", cwd=world.elsewhere).ret == 0


def test_helpers_have_rewritten_asserts(world: World) -> None:
    result = world.pytest("conformance", "--backend=cuda")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*AssertionError: assert 'cuda' == 'cpu'*"])


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["one", "xdist"])
def test_nothing_passed_is_a_failure(world: World, workers: list[str]) -> None:
    result = world.pytest("conformance", "--backend=cpu", "-k", "declined", "--report=report.json", *workers)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED: the conformance suite was selected, but none of its cases passed"])
    assert world.report()["run"]["exit_status"] == 1
    assert world.report()["counts"] == {"pass": 0, "fail": 0, "unsupported": 1, "waived": 0, "error": 0}


def test_nothing_collected_is_a_failure(world: World) -> None:
    assert world.pytest("conformance", "--backend=cpu", "-k", "no_such_test").ret == 5


def test_a_suite_without_tests_is_a_failure(world: World) -> None:
    for path in (world.checkout / "conformance").rglob("test_*.py"):
        path.unlink()
    assert world.pytest("conformance", "--backend=cpu").ret == 5


def test_other_tests_do_not_make_up_for_the_suite(world: World) -> None:
    write(world.checkout, {"tests/test_a.py": "def test_a(): pass"})
    assert world.pytest("tests", "conformance", "--backend=cpu", "-k", "test_a.py").ret == 1
    # Where the suite is merely below the folder that was named, deselecting it is the caller's good right.
    assert world.pytest(".", "--backend=cpu", "-k", "test_a.py").ret == 0


@pytest.mark.parametrize(
    "test, said",
    [
        ("import pytest\ndef test_it(): pytest.skip('later')", "no results of this suite*later"),
        ("import pytest\n@pytest.mark.skip(reason='later')\ndef test_it(): pass", "no results of this suite*later"),
        (
            "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert 0",
            "no results of this suite*known",
        ),
        ("import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): pass", "no results of this suite*known"),
    ],
)
def test_a_bare_skip_or_xfail_is_an_error(world: World, test: str, said: str) -> None:
    source = test.replace("import pytest\n", "import pytest\npytestmark = pytest.mark.kvport_chapter('odd')\n")
    write(world.checkout / "conformance", {"kvport_conformance/test_odd.py": source})
    result = world.pytest("conformance", "--backend=cpu", "--report=report.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*{said}*"])
    # A skip by marker comes before any fixture could give the case its id; it is reported by its node id.
    (odd,) = [case for case in world.report()["cases"] if case["id"] in ("odd/test_it", "test_odd.py::test_it")]
    assert odd["outcome"] == "error"
    assert world.report()["counts"]["pass"] == 4


def test_skips_outside_the_suite_stay_skips(world: World) -> None:
    write(world.checkout, {"tests/test_a.py": "import pytest\ndef test_a(): pytest.skip('later')"})
    result = world.pytest("tests", "conformance", "--backend=cpu")
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines(["*4 passed, 1 skipped, 1 unsupported*"])


def test_two_cases_of_one_id_are_a_failure(world: World) -> None:
    twin = SUITE["kvport_conformance/test_append.py"]
    write(world.checkout / "conformance", {"kvport_conformance/test_append_too.py": twin})
    result = world.pytest("conformance", "--backend=cpu")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED: 4 results share a case id with another: append/test_backend, *"])


def test_a_failure_in_a_fixture_is_an_error_and_in_the_call_a_fail(world: World) -> None:
    source = """
        import pytest
        pytestmark = pytest.mark.kvport_chapter("odd")
        @pytest.fixture
        def before(): raise RuntimeError("no device")
        @pytest.fixture
        def after():
            yield
            raise RuntimeError("leaked")
        def test_before(before): pass
        def test_after(after): pass
        def test_wrong(): assert 1 == 2
        def test_wrong_and_leaking(after): assert 1 == 2
    """
    write(world.checkout / "conformance", {"kvport_conformance/test_odd.py": source})
    assert world.pytest("conformance", "--backend=cpu", "--report=report.json").ret == 1
    odd = {case["id"]: case for case in world.report()["cases"] if case["chapter"] == "odd"}
    assert {name: case["outcome"] for name, case in odd.items()} == {
        "odd/test_before": "error",
        "odd/test_after": "error",
        "odd/test_wrong": "fail",
        "odd/test_wrong_and_leaking": "fail",
    }
    assert "no device" in odd["odd/test_before"]["reason"]
    assert "leaked" in odd["odd/test_after"]["reason"]
    assert "assert 1 == 2" in odd["odd/test_wrong"]["reason"]


def test_a_disagreement_is_a_few_lines_and_an_exception_a_short_traceback(world: World) -> None:
    source = """
        import pytest
        from pytest_kvport import disagreement
        pytestmark = pytest.mark.kvport_chapter("odd")
        def inner():
            raise RuntimeError("driver lost")
        def test_differs():
            try:
                raise ValueError("the suite's own")
            except ValueError:
                disagreement("odd/case", "Codes are right.", "key.codes differ at page 1")
        def test_raises():
            inner()
    """
    write(world.checkout / "conformance", {"kvport_conformance/test_odd.py": source})
    result = world.pytest("conformance/kvport_conformance/test_odd.py", "--backend=cpu", "--report=report.json", "-n2")
    assert result.ret == 1
    text = "\n".join(result.outlines)
    assert "odd/case\n  expected: Codes are right.\n  found: key.codes differ at page 1\n" in text
    assert "the suite's own" not in text
    assert "def test_" not in text  # no source of the suite
    assert "in inner\n    raise RuntimeError" in text
    reasons = {case["id"]: case["reason"] for case in world.report()["cases"]}
    assert reasons["odd/test_differs"] == "key.codes differ at page 1"
    assert reasons["odd/test_raises"] == "RuntimeError: driver lost"


def test_a_worker_that_dies_is_an_error_of_its_case(world: World) -> None:
    source = """
        import os, pytest
        pytestmark = pytest.mark.kvport_chapter("odd")
        def test_dies(): os._exit(11)
    """
    write(world.checkout / "conformance", {"kvport_conformance/test_odd.py": source})
    assert world.pytest("conformance", "--backend=cpu", "-n2", "--report=report.json").ret == 1
    (odd,) = [case for case in world.report()["cases"] if "test_dies" in case["id"]]
    assert odd["outcome"] == "error"
    assert "crashed" in odd["reason"]


def test_a_test_that_never_ran_is_no_pass(world: World) -> None:
    result = world.pytest("conformance", "--backend=cpu", "--setup-only")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["acme@cpu: 0 pass, 0 fail, 0 unsupported, 0 waived, 5 error"])


# --- waivers ---------------------------------------------------------------------------------------------------------

FAILING = """
    import pytest
    pytestmark = pytest.mark.kvport_chapter("scales")
    def test_scale():
        assert 1 == 2, "the scale is off"
"""


def waive(world: World, *entries: dict[str, Any], name: str = "known.toml") -> str:
    """A file of waivers, and the option that names it. Fields that are not given are those of a good one."""
    good = {"backend": "acme", "case": "scales/test_scale", "reason": "firmware 7", "expires": SOON}
    text = ""
    for entry in entries:
        fields = {key: value for key, value in {**good, **entry}.items() if value is not None}
        text += "[[waiver]]\n" + "".join(
            f"{key} = {value if isinstance(value, datetime.date | int) else json.dumps(value)}\n"
            for key, value in fields.items()
        )
    (world.checkout / name).write_text(text, encoding="utf-8")
    return f"--waivers={world.checkout / name}"


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["one", "xdist"])
def test_a_waived_failure_is_a_result_of_its_own(world: World, workers: list[str]) -> None:
    write(world.checkout / "conformance", {"kvport_conformance/nested/test_scales.py": FAILING})
    option = waive(world, {"issue": "https://example.com/7"}, {"backend": "other", "case": "append/*"})
    result = world.pytest("conformance", "--backend=cpu", option, "--report=report.json", "--junitxml=j.xml", *workers)
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines(["acme@cpu: 3 pass, 0 fail, 1 unsupported, 1 waived, 0 error"])
    result.stdout.fnmatch_lines([f"waived 1 x, until {SOON}: firmware 7 (https://example.com/7)"])
    for count in ("3 passed", "1 waived", "1 unsupported"):  # in no fixed order
        assert count in result.outlines[-1]
    assert world.report()["counts"] == {"pass": 3, "fail": 0, "unsupported": 1, "waived": 1, "error": 0}
    [case] = [case for case in world.report()["cases"] if case["outcome"] == "waived"]
    assert case["id"] == "scales/test_scale"
    assert "the scale is off" in case["reason"]
    assert case["waiver"] == {
        "backend": "acme",
        "case": "scales/test_scale",
        "reason": "firmware 7",
        "expires": str(SOON),
        "issue": "https://example.com/7",
        "source": f"{world.checkout / 'known.toml'}, waiver 1",
    }
    junit = (world.checkout / "j.xml").read_text(encoding="utf-8")
    assert f"waived until {SOON}: firmware 7 (https://example.com/7); fails: " in junit


def test_a_waived_case_that_passes_is_a_failure(world: World) -> None:
    result = world.pytest("conformance", "--backend=cpu", waive(world, {}), "--report=report.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [f"*the case passes, and a waiver (*known.toml, waiver 1) says that it fails until {SOON}*"]
    )
    assert world.report()["counts"] == {"pass": 3, "fail": 1, "unsupported": 1, "waived": 0, "error": 0}


def test_an_expired_waiver_waives_nothing(world: World) -> None:
    write(world.checkout / "conformance", {"kvport_conformance/nested/test_scales.py": FAILING})
    past = datetime.date(2020, 2, 29)
    result = world.pytest("conformance", "--backend=cpu", waive(world, {"expires": past}), "--report=report.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*its waiver (*known.toml, waiver 1) has expired, it held until 2020-02-29: firmware 7"]
    )
    [case] = [case for case in world.report()["cases"] if case["outcome"] == "fail"]
    assert "has expired" in case["reason"]
    assert "waiver" not in case
    # Nor does it forbid anything: what it was about may pass.
    assert (
        world.pytest(
            "conformance", "--backend=cpu", waive(world, {"case": "append/test_b*", "expires": past}), "-k", "append"
        ).ret
        == 0
    )


def test_a_waiver_waives_no_refusal_and_no_error(world: World) -> None:
    source = FAILING.replace(
        "def test_scale():", "@pytest.fixture\n    def broken(): raise OSError\n    def test_scale(broken):"
    )
    write(world.checkout / "conformance", {"kvport_conformance/nested/test_scales.py": source})
    option = waive(world, {}, {"case": "append/test_declined"})
    assert world.pytest("conformance", "--backend=cpu", option, "--report=report.json").ret == 1
    assert world.report()["counts"] == {"pass": 3, "fail": 0, "unsupported": 1, "waived": 0, "error": 1}


def test_waived_alone_is_no_success(world: World) -> None:
    write(world.checkout / "conformance", {"kvport_conformance/nested/test_scales.py": FAILING})
    result = world.pytest("conformance", "--backend=cpu", waive(world, {}), "-k", "test_scale")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED: *none of its cases passed"])


def test_a_plugin_ships_waivers_and_a_file_may_add_to_them(world: World) -> None:
    write(world.checkout / "conformance", {"kvport_conformance/nested/test_scales.py": FAILING})
    result = world.pytest("conformance", "--backend=cpu:7", "-k", "scale or length")
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines([f"waived 1 x, until {SOON}: ours"])
    # The same entry twice is a mistake, wherever the two stand.
    result = world.pytest("conformance", "--backend=cpu:7", waive(world, {}))
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*'scales/test_scale' of acme is waived twice*"])


@pytest.mark.parametrize(
    "entry, said",
    [
        ({"case": "scales/test_scael"}, "*known.toml, waiver 1: no case of the suite is named 'scales/test_scael'*"),
        ({"case": "append/test_length[12]"}, "*no case of the suite is named*"),  # brackets are no pattern
        ({"case": None}, "*known.toml, waiver 1: lacks 'case'*"),
        ({"reason": " "}, "*'reason' must be text that is not empty*"),
        ({"expires": "soon"}, "*'expires' is a date such as 2026-06-30*got 'soon'*"),
        ({"expires": 2027}, "*'expires' is a date*got 2027*"),
        ({"expires": SOON.replace(year=SOON.year + 3)}, "*more than 366 days from now*"),
        ({"until": "2027-01-01"}, "*unknown fields 'until'; known: backend, case, reason, expires, issue*"),
        ({"backend": "acme@cpu:0"}, "*'backend' is a backend's name or name@device without an index*"),
    ],
)
def test_a_bad_waiver_ends_the_run_with_its_reason(world: World, entry: dict[str, Any], said: str) -> None:
    result = world.pytest("conformance", "--backend=cpu", waive(world, entry))
    assert result.ret == 4
    result.stderr.fnmatch_lines([said])


def test_a_file_of_waivers_that_cannot_be(world: World) -> None:
    for name, text, said in (
        ("a.toml", "[[waiver]", "a.toml cannot be read as TOML*"),
        ("a.json", "{", "a.json cannot be read as JSON*"),
        ("a.txt", "", "a.txt: a file of waivers ends in .toml or .json"),
        ("a.toml", "x = 1", "*a.toml: holds a list 'waiver' of waivers and nothing else, found: 'x'"),
        ("a.json", '{"waiver": ["x"]}', "*a.json, waiver 1: a waiver is a table of *got 'x'"),
    ):
        (world.checkout / name).write_text(text)
        result = world.pytest("conformance", "--backend=cpu", f"--waivers={name}")
        assert result.ret == 4
        result.stderr.fnmatch_lines([f"*--waivers: *{said}"])
    result = world.pytest("conformance", "--backend=cpu", "--waivers=absent.toml")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--waivers: there is no file of waivers absent.toml; *"])


# --- choosing and reporting ------------------------------------------------------------------------------------------


def test_report(world: World) -> None:
    (world.checkout / "report.json").write_text("an old one")
    result = world.pytest("conformance", "--backend=cpu", "--seed=5", "--report=report.json", "--tier=quick")
    assert result.ret == 0, result.outlines
    found = world.report()
    assert (found["schema_version"], found["suite_version"]) == (2, 7)
    assert found["backend"] == {
        "request": "cpu",
        "name": "acme",
        "distribution": "acme-kv",
        "version": "2.1",
        "device": "cpu",
        "torch_device": "cpu",
        "execution": "hardware",
        "commit": None,
        "device_name": None,
        "driver": "9",
        "sdk": None,
        "facts": {"driver": "9"},
        "operations": {"append": "native", "attend": "inherited"},
    }
    assert {"kvport", "torch", "numpy", "pytest"} <= set(found["environment"]["packages"])
    assert found["environment"]["python"].startswith("CPython 3.")
    assert (found["run"]["seed"], found["run"]["tier"], found["run"]["exit_status"]) == (5, "quick", 0)
    assert {"os", "platform", "machine", "processor"} <= set(found["environment"])
    assert found["run"]["keyword"] is None
    assert found["run"]["command"][0] == "pytest"
    assert "--report=report.json" in found["run"]["command"]
    assert found["counts"] == {"pass": 4, "fail": 0, "unsupported": 1, "waived": 0, "error": 0}
    cases = {case["id"]: case for case in found["cases"]}
    assert list(cases) == sorted(cases)
    length = cases["append/test_length[2]"]
    assert (length["outcome"], length["length"], length["ratio"], length["worst"]) == ("pass", 2, 0.25, "nan")
    declined = cases["append/test_declined"]
    assert (declined["outcome"], declined["reason"]) == ("unsupported", "no int4 in this chip")
    assert [path.name for path in world.checkout.glob("*report*")] == ["report.json"]  # no temporary file left


# --- arrays beside a report ------------------------------------------------------------------------------------------

SPOOLING = """
    from pathlib import Path
    import pytest
    from kvport_conformance.recorded import save
    pytestmark = pytest.mark.kvport_chapter("append")
    @pytest.mark.parametrize("n", range(4))
    def test_saved(n, case, pytestconfig):
        case["codes"] = {"compared": 1, "differing": 0}
        save(Path(pytestconfig.option.kvport_spool), case["id"], n)
"""
RECORDED = """
    def save(folder, identity, n):
        import numpy
        from safetensors.numpy import save_file
        size = 2**20 if n == 3 else 8
        save_file({f"{identity}#00000.key.codes": numpy.full(size, n, numpy.int8)}, folder / f"{n}.safetensors")
"""


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["one", "xdist"])
def test_arrays_are_joined_beside_the_report_up_to_their_limit(world: World, workers: list[str]) -> None:
    write(world.checkout / "conformance", {"kvport_conformance/test_saved.py": SPOOLING,
                                           "kvport_conformance/recorded.py": RECORDED})  # fmt: skip
    result = world.pytest("conformance", "--backend=cpu", "--report=r.json", "--tensors=1", "-k", "saved", *workers)
    assert result.ret == 0, result.outlines
    entry = world.report("r.json")["tensors"]
    file = world.checkout / "r.safetensors"
    assert (entry["file"], entry["cases"], entry["left_out"], entry["limit_mib"]) == ("r.safetensors", 3, 1, 1)
    assert entry["bytes"] == file.stat().st_size
    assert entry["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sorted(load_file(file)) == [f"append/test_saved[{n}]#00000.key.codes" for n in range(3)]
    assert not list(world.checkout.glob(".*spool"))


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--tensors=4"], "arrays are saved beside a report; add --report=FILE.json"),
        (["--tensors=0", "--report=r.json"], "give the most mebibytes to save, at least 1"),
        (["--tensors=4", "--report=r.safetensors"], "this name is the one of the arrays beside it; end it in .json"),
    ],
)
def test_arrays_that_have_no_place_are_refused_before_the_run(world: World, options: list[str], reason: str) -> None:
    result = world.pytest("conformance", "--backend=cpu", *options)
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*{reason}"])
    assert not list(world.checkout.glob(".*spool"))


# --- JUnit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["one", "xdist"])
@pytest.mark.parametrize("kind", ["hardware", "emulated", "interpreter"])
def test_junit_has_a_case_s_figures_and_what_it_ran_on(world: World, kind: str, workers: list[str]) -> None:
    inspection = world.site / "kvport" / "inspection.py"
    inspection.write_text(inspection.read_text().replace('"execution": "hardware"', f'"execution": "{kind}"'))
    result = world.pytest("conformance", "--backend=cpu", "--junitxml=j.xml", *workers)
    assert result.ret == 0, result.outlines
    cases = {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in ET.parse(world.checkout / "j.xml").iter("testcase")
    }
    label = "acme@cpu" if kind == "hardware" else f"acme@cpu [{kind}, not hardware]"
    assert {found["kvport.backend"] for found in cases.values()} == {label}
    assert cases["test_length[2]"] == {
        "kvport.backend": label,
        "kvport.outcome": "pass",
        "kvport.ratio": "0.25",
        "kvport.worst": "nan",
        "kvport.id": "append/test_length[2]",
        "kvport.chapter": "append",
        "kvport.length": "2",
    }
    assert cases["test_declined"]["kvport.outcome"] == "unsupported"
    assert cases["test_declined"]["kvport.reason"] == "no int4 in this chip"
    result.stdout.fnmatch_lines([f"{label.replace('[', '[[]')}: 4 pass, *"])
    if kind != "hardware":
        result.stdout.fnmatch_lines([f"kvport backend: acme *execution {kind} (not hardware), *"])


def test_reports_agree_however_the_suite_was_run(world: World) -> None:
    def cases(name: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in case.items() if k != "seconds"} for case in world.report(name)["cases"]]

    write(world.checkout / "conformance", {"kvport_conformance/test_plain.py": PLAIN})
    assert world.pytest("conformance", "--backend=cpu", "--report=a.json").ret == 0
    assert world.pytest("conformance", "--backend=cpu", "--report=b.json", "-n2").ret == 0
    target = f"--report={world.checkout / 'c.json'}"
    assert world.pytest("--pyargs", "kvport_conformance", "--backend=cpu", target, cwd=world.elsewhere).ret == 0
    assert cases("a.json") == cases("b.json") == cases("c.json")
    assert len(cases("a.json")) == 6


PLAIN = """
    import pytest
    pytestmark = pytest.mark.kvport_chapter("plain")
    @pytest.fixture(autouse=True)
    def case(): pass
    def test_without_a_record(): pass
"""


@pytest.mark.parametrize("path, reason", [("no/such/r.json", "does not exist"), ("conformance", "is a folder")])
def test_an_unwritable_report_is_refused_before_the_run(world: World, path: str, reason: str) -> None:
    result = world.pytest("conformance", "--backend=cpu", f"--report={path}")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*--report={path}: *{reason}"])


def test_chapter(world: World) -> None:
    result = world.pytest("conformance", "--backend=cpu", "--chapter=scales")
    assert result.ret == 0, result.outlines
    result.assert_outcomes(passed=1, deselected=4)
    result = world.pytest("conformance", "--backend=cpu", "--chapter=scales,apend")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*no collected test is of apend; there are: append, scales"])


def test_formats_are_checked_at_once(world: World) -> None:
    assert world.pytest("conformance", "--backend=cpu", "--formats=int8,int4:g64").ret == 0
    result = world.pytest("conformance", "--backend=cpu", "--formats=int8,int9")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--formats=int8,int9: unknown code 'int9'*"])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("int8", ["int8"]),
        ("int8, int4:g64:scale=fp16,fp32", ["int8", "int4:g64:scale=fp16", "fp32"]),
        ("k=int4:g64,v=int8,int8", ["k=int4:g64,v=int8", "int8"]),
        (
            "int8,k=int4,v=int8,sink=4,recent=128,k=int8,v=fp16",
            ["int8", "k=int4,v=int8,sink=4,recent=128", "k=int8,v=fp16"],
        ),
        ("latent=int8:g128,rope=bf16,latent=int8,rope=fp16", ["latent=int8:g128,rope=bf16", "latent=int8,rope=fp16"]),
        ("", []),
    ],
)
def test_split_formats(text: str, expected: list[str]) -> None:
    assert split_formats(text) == expected


def test_plain() -> None:
    np = pytest.importorskip("numpy")
    raw = {
        "a": np.float32(0.5),
        "b": np.arange(2),
        "c": float("-inf"),
        4: (True, None),
        "p": Path("x"),
        "n": np.bool_(1),
    }
    assert plain(raw) == {"a": 0.5, "b": [0, 1], "c": "-inf", "4": [True, None], "p": "x", "n": True}


def test_selection_ignores_a_virtual_environment_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / ".venv" / "lib" / "site-packages"
    write(site, {"kvport_conformance/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delitem(sys.modules, "kvport_conformance", raising=False)
    ask: dict[str, Any] = {"pyargs": False, "testpaths": [], "invocation_dir": tmp_path, "rootpath": tmp_path}
    assert selected([], **ask) == Selected(suite=False, named=False)
    assert selected([str(site)], **ask) == Selected(suite=True, named=True)
    write(tmp_path, {"src/kvport_conformance/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "src")])
    assert selected([], **ask) == Selected(suite=True, named=False)


# --- against the real library ----------------------------------------------------------------------------------------


def test_the_real_library_examines_the_real_reference(world: World) -> None:
    world.use_the_real_library()
    result = world.pytest("conformance", "--backend=reference@cpu", "--report=report.json", "-k", "length")
    assert result.ret == 0, result.outlines
    backend = world.report()["backend"]
    assert (backend["name"], backend["distribution"], backend["execution"]) == ("reference", "kvport", "hardware")
    assert Counter(backend["operations"].values()).keys() == {"native"}
    assert "torch" in backend["facts"]


@pytest.mark.parametrize(
    "backend, reason",
    [
        ("nosuch@cpu", "no backend is named 'nosuch'"),
        ("gpu", "no backend drives a device of type 'gpu'"),
        ("cuda:x", "is no device string"),
    ],
)
def test_the_real_library_gives_its_reasons(world: World, backend: str, reason: str) -> None:
    world.use_the_real_library()
    result = world.pytest("conformance", f"--backend={backend}")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*{reason}*"])


@pytest.fixture
def with_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real suite in an environment where some plugins lie, crash, raise and fail to import."""
    folders = [Path(__file__).parent / "plugins" / name for name in ("good", "liar", "crashing", "raising", "oserror")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]))
    # Each costs a process wherever a bare device is examined; what is asked here is asked of the others.
    monkeypatch.setenv("KVPORT_DISABLE_PLUGINS", "triton,ascend")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _real_suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "kvport_conformance"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.usefixtures("with_plugins")
def test_a_lying_plugin_is_judged_by_what_it_does(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    done = _real_suite("--backend=liar@liarchip", "--chapter=append", "-k", "neighbours", f"--report={report}")
    assert done.returncode == 1, done.stdout + done.stderr
    cases = {c["format"]: c for c in json.loads(report.read_text())["cases"] if c["geometry"] == "kv2q4-d64-p16"}
    assert cases["int8"]["outcome"] == "fail"
    assert "key.scale differs" in cases["int8"]["reason"]
    assert cases["int4"]["outcome"] == "fail"
    assert "support() accepted the layout, and then an operation declined it" in cases["int4"]["reason"]
    assert cases["fp32"]["outcome"] == "pass"


@pytest.mark.usefixtures("with_plugins")
@pytest.mark.parametrize("backend", ["good@goodchip", "goodchip", "cpu"])
def test_broken_and_lying_plugins_change_nothing_for_others(backend: str) -> None:
    done = _real_suite(f"--backend={backend}", "--chapter=append", "--formats=int8", "-k", "neighbours")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 fail, " in done.stdout
    assert ("plugin crashing was left out: the interpreter was killed by SIGSEGV" in done.stdout) == (
        "@" not in backend
    )


def test_chapters_without_a_case_of_the_format_are_no_result() -> None:
    done = _real_suite("--backend=reference@cpu", "--formats=latent=bf16,rope=bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 pass, 0 fail, 0 unsupported, 0 waived, 0 error" in done.stdout


def test_the_plugin_is_light() -> None:
    code = (
        "import sys, pytest_kvport.plugin; print({'torch', 'kvport', 'numpy', 'kvport_conformance'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
