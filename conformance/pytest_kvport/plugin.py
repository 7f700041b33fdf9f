"""pytest hooks of the conformance suite.

Options. ``--kvport-backend=[backend@]device`` and its sisters exist in every run. The short names (``--backend``,
``--report``, ...) are added only when the suite was selected, after the initial conftests were loaded, so that a
project which owns such a name keeps it; an owned ``--backend`` is read instead of ours.

Verdicts. A case passes, fails, is *unsupported* (:func:`pytest_kvport.unsupported`), is *waived* (it fails, and a
waiver of ``--waivers`` or of the backend's plugin says so, see :mod:`kvport.waivers`) or is an error. A waived case
that passes fails. An ordinary skip or xfail inside the suite is none of these and counts as an error. A run that was
asked for the suite and in which nothing passed fails, although pytest would call it a success.

Tests of the suite read ``config.getoption("kvport_backend")``, by then always ``backend@device`` (and
``kvport_formats``, ``kvport_tier``, ``kvport_seed``), are marked with ``kvport_chapter(name)``, and put their record
into ``item.user_properties`` as ``("kvport_case", {"id": ..., "chapter": ..., ...})``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import shutil
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_kvport import FailedCase, UnsupportedCase, origin, reporting, split_formats, spool
from pytest_kvport.selection import SUITE, Selected, is_inside_suite, selected

# In an editable install the suite's helper modules would otherwise have bare asserts.
pytest.register_assert_rewrite(SUITE)

#: (name, argparse settings). Each is registered as --kvport-NAME, and as --NAME where the suite is selected.
_OPTIONS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("backend", {"metavar": "[BACKEND@]DEVICE", "help": "what the suite tests, such as cpu, cuda:0 or reference@cuda"}),
    ("report", {"metavar": "FILE.json", "help": "write the results here, replacing an old file"}),
    ("tensors", {"metavar": "MIB", "type": int, "help": "save codes, scales and outputs beside the report, up to MIB"}),
    ("formats", {"metavar": "FORMAT,...", "help": "only these cache formats"}),
    ("chapter", {"metavar": "NAME,...", "help": "only these chapters of the suite"}),
    ("tier", {"metavar": "NAME", "help": "how much to run; the suite's documentation names the tiers"}),
    (
        "waivers",
        {"metavar": "FILE", "action": "append", "help": "known failures, as data (.toml or .json); may be repeated"},
    ),
    ("seed", {"metavar": "N", "type": int, "default": 0, "help": "seed of the deterministic inputs (default 0)"}),
)

MARKERS: Final = (
    "kvport_chapter(name): the chapter of the conformance suite that a test belongs to",
    "kvport_requires(feature, ...): what a backend must declare for a test to apply",
)

_SELECTED: Final = pytest.StashKey[Selected]()
_OWNED_BACKEND: Final = pytest.StashKey[bool]()
_RUN: Final = pytest.StashKey["_Run"]()
#: Case id -> its waiver as plain data; in every process that runs tests.
_WAIVED: Final = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvport", "kvport conformance")
    for name, settings in _OPTIONS:
        group.addoption(f"--kvport-{name}", dest=f"kvport_{name}", **settings)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None]:
    yield  # conftests first: what they own stays theirs
    known = early_config.known_args_namespace
    chosen = selected(
        known.file_or_dir,
        pyargs=known.pyargs,
        testpaths=early_config.getini("testpaths"),
        invocation_dir=early_config.invocation_params.dir,
        rootpath=early_config.rootpath,
    )
    early_config.stash[_SELECTED] = chosen
    if not chosen.suite:
        return
    group = parser.getgroup("kvport", "kvport conformance")
    for name, settings in _OPTIONS:
        settings = {**settings, "help": f"short for --kvport-{name}, which every pytest run has"}
        owned = _taken(parser, f"--{name}")
        if not owned:
            try:
                group.addoption(f"--{name}", dest=f"kvport_{name}", **settings)
            except (ValueError, argparse.ArgumentError):
                owned = True
        if owned and name == "backend":
            early_config.stash[_OWNED_BACKEND] = True


def _taken(parser: pytest.Parser, option: str) -> bool:
    """Whether somebody has registered ``option``. Before pytest 9 a conflict shows only when the line is parsed, too
    late to give way, so the parser's own lists are read."""
    groups = [*getattr(parser, "_groups", ()), *filter(None, [getattr(parser, "_anonymous", None)])]
    return any(option in registered.names() for group in groups for registered in group.options)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    chosen = config.stash.get(_SELECTED, Selected(suite=False, named=False))
    if config.stash.get(_OWNED_BACKEND, False) and config.option.kvport_backend is None:
        owned = config.getoption("--backend")
        config.option.kvport_backend = owned if isinstance(owned, str) else None
    informing = ("help", "version", "markers", "show_fixtures", "show_fixtures_per_test")
    if not chosen.suite or any(getattr(config.option, name, False) for name in informing):
        return
    if hasattr(config, "workerinput"):  # an xdist worker: its controller has examined the backend, and reports
        config.stash[_WAIVED] = config.workerinput["kvport_waived"]
        config.option.kvport_backend = config.workerinput["kvport_backend"]
        config.option.kvport_spool = config.workerinput["kvport_spool"]
        return
    if path := config.option.kvport_report:
        if reason := reporting.unwritable(Path(path)):
            raise pytest.UsageError(f"--report={path}: {reason}")
        config.option.kvport_report = str(Path(path).absolute())
    _check_formats(config.option.kvport_formats)
    _check_tensors(config.option.kvport_tensors, config.option.kvport_report)
    examination = _examine(config.option.kvport_backend)
    config.stash[_WAIVED] = _waived(config.option.kvport_waivers or (), examination)
    # By name from here on: tests import that plugin alone, and no other can take this process down.
    config.option.kvport_backend = f"{examination['name']}@{examination['device']}"
    if config.option.kvport_tensors and not config.option.collectonly:
        config.option.kvport_spool = str(spool.open_spool(Path(config.option.kvport_report)))
    run = _Run(config, chosen, examination)
    config.stash[_RUN] = run
    config.pluginmanager.register(run, "kvport-run")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist: what the controller found out, for a worker."""
    node.workerinput["kvport_waived"] = node.config.stash.get(_WAIVED, {})
    node.workerinput["kvport_backend"] = node.config.option.kvport_backend
    node.workerinput["kvport_spool"] = getattr(node.config.option, "kvport_spool", None)


def _check_formats(text: str | None) -> None:
    if text is None:
        return
    from kvport.errors import FormatError
    from kvport.formats import CacheFormat

    for item in split_formats(text):
        try:
            CacheFormat.parse(item)
        except FormatError as error:
            raise pytest.UsageError(f"--formats={text}: {error}") from None


def _check_tensors(mebibytes: int | None, report: str | None) -> None:
    if mebibytes is None:
        return
    if mebibytes < 1:
        raise pytest.UsageError(f"--tensors={mebibytes}: give the most mebibytes to save, at least 1")
    if report is None:
        raise pytest.UsageError(f"--tensors={mebibytes}: arrays are saved beside a report; add --report=FILE.json")
    if spool.tensors_path(Path(report)) == Path(report):
        raise pytest.UsageError(f"--report={report}: this name is the one of the arrays beside it; end it in .json")


def _examine(backend: str | None) -> dict[str, Any]:
    """Load the backend once in a child process, where it may crash or hang; its reason ends the run."""
    from kvport import inspection
    from kvport.errors import KVPortError

    try:
        if backend is None:
            names = ", ".join(f"{row.name} ({row.distribution})" for row in inspection.list_backends(probe=False))
            raise pytest.UsageError(
                "the kvport conformance suite was selected without a backend: add --backend=[BACKEND@]DEVICE, for "
                f"example --backend=cpu (or --kvport-backend, where --backend is taken); installed: {names or 'none'}"
            )
        return inspection.examine(backend).to_json()
    except KVPortError as error:
        raise pytest.UsageError(f"--backend={backend}: {error}") from None


def _waived(paths: Sequence[str], examination: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Case id -> its waiver as plain data, with ``state`` "holds" or "expired"; of files first, then of the plugin."""
    shipped = examination.get("waivers", ())
    if not paths and not shipped:
        return {}
    from kvport import waivers
    from kvport.errors import KVPortError

    manifest = importlib.import_module(f"{SUITE}.manifest")
    today = datetime.datetime.now(datetime.UTC).date()
    try:
        known = [waiver for path in paths for waiver in waivers.read(path)]
        known += [waivers.from_record(record) for record in shipped]
        found = waivers.chosen(
            known,
            backend=examination["name"],
            device=examination["device"],
            cases=manifest.read()[1],
            today=today,
        )
    except KVPortError as error:
        raise pytest.UsageError(f"--waivers: {error}") from None
    return {
        case: {**waiver.to_json(), "state": "expired" if waiver.expired(today) else "holds"}
        for case, waiver in found.items()
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the chapters asked for. A chapter that no collected test has is a mistake, not an empty success."""
    if not config.option.kvport_chapter:
        return
    wanted = {name.strip() for name in config.option.kvport_chapter.split(",") if name.strip()}
    chapters = {
        item: {str(marker.args[0]) for marker in item.iter_markers("kvport_chapter") if marker.args}
        for item in items
        if is_inside_suite(item.path.resolve())
    }
    known = set().union(*chapters.values())
    if not known:  # no test says its chapter by marker: the suite chooses its cases by itself
        return
    if unknown := wanted - known:
        raise pytest.UsageError(
            f"--chapter: no collected test is of {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}"
        )
    dropped = [item for item, names in chapters.items() if not names & wanted]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In the process that ran the test: say what kind of result it is, in attributes that survive xdist."""
    made = yield
    if not is_inside_suite(item.path.resolve()):
        return made
    made.user_properties = [
        (key, reporting.plain(value) if key == reporting.CASE_KEY else value) for key, value in made.user_properties
    ]
    outcome: reporting.Outcome = "pass"
    reason = ""
    raised = call.excinfo
    if raised is not None and raised.errisinstance(UnsupportedCase):
        outcome, reason = "unsupported", str(raised.value)
    elif made.skipped or hasattr(made, "wasxfail"):
        why = getattr(made, "wasxfail", "") or (raised.value if raised is not None else "")
        outcome = "error"
        reason = f"skip and xfail are no results of this suite, use pytest_kvport.unsupported(reason): {why}"
        made.outcome, made.longrepr = "failed", reason
        if hasattr(made, "wasxfail"):
            del made.wasxfail
    elif made.failed:
        outcome = "fail" if call.when == "call" else "error"
        if raised is not None and isinstance(raised.value, FailedCase):
            reason, made.longrepr = raised.value.reason, str(raised.value)
        else:
            reason = raised.exconly(tryshort=True) if raised is not None else str(made.longrepr)
            if raised is not None and item.config.option.tbstyle == "auto":
                # Where in the backend, line by line, instead of pages of the suite's source.
                made.longrepr = raised.getrepr(
                    style="short", tbfilter=lambda info: info.traceback.cut(path=item.path).filter(info)
                )
    if call.when == "call" and (waiver := _waiver(item)):
        outcome, reason = _apply(waiver, made, item, outcome, reason)
    made.kvport_outcome, made.kvport_reason = outcome, reason  # type: ignore[attr-defined]
    return made


def _waiver(item: pytest.Item) -> dict[str, str] | None:
    """The waiver about the case that an item runs."""
    known = item.config.stash.get(_WAIVED, {})
    return next((known.get(v["id"]) for k, v in item.user_properties if k == reporting.CASE_KEY), None)  # type: ignore[index]


def _until(waiver: dict[str, str]) -> str:
    """How long a waiver holds and why, as lines name it."""
    return f"until {waiver['expires']}: {waiver['reason']}" + (f" ({waiver['issue']})" if waiver["issue"] else "")


def _apply(
    waiver: dict[str, str], made: pytest.TestReport, item: pytest.Item, outcome: reporting.Outcome, reason: str
) -> tuple[reporting.Outcome, str]:
    """What a waiver makes of a case's result. It waives failures, not what is declined or breaks around them."""
    until = _until(waiver)
    if waiver["state"] == "expired":
        if outcome == "fail":
            expired = f"\n  its waiver ({waiver['source']}) has expired, it held {until}"
            reason, made.longrepr = f"{reason}{expired}", f"{made.longrepr}{expired}"
    elif outcome == "fail":
        made.outcome = "skipped"
        made.longrepr = str(item.path), item.location[1] or 0, f"waived {until}; fails: {reason}"
        made.kvport_waiver = {key: value for key, value in waiver.items() if key != "state"}  # type: ignore[attr-defined]
        return "waived", reason
    elif outcome == "pass":
        reason = f"the case passes, and a waiver ({waiver['source']}) says that it fails {until}; remove the waiver"
        made.outcome, made.longrepr = "failed", reason
        return "fail", reason
    return outcome, reason


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    outcome = getattr(report, "kvport_outcome", "")
    if outcome in ("unsupported", "waived"):
        return outcome, outcome[0], outcome.upper()
    return None


class _Run:
    """One run of the suite, in the process that reports it: gathers the results, judges, writes."""

    def __init__(self, config: pytest.Config, chosen: Selected, examination: dict[str, Any]) -> None:
        self.config, self.chosen, self.examination = config, chosen, examination
        self.began = time.monotonic()
        self.results = reporting.Results()
        self.unsupported: Counter[str] = Counter()
        self.waived: Counter[str] = Counter()
        self.phases: dict[str, list[Any]] = {}
        self.verdict = ""

    def pytest_report_header(self) -> str:
        found, capability = self.examination, self.examination["capability"]
        execution = capability["execution"] + ("" if capability["execution"] == "hardware" else " (not hardware)")
        native = sum(how == "native" for how in capability["operations"].values())
        return (
            f"kvport backend: {found['name']} ({found['distribution']} {found['version']}) on {found['device']}, "
            f"execution {execution}, {native} of {len(capability['operations'])} operations native"
        )

    @property
    def label(self) -> str:
        """The backend as every line and every JUnit property names it."""
        found = self.examination
        return reporting.label(found["name"], found["device"], found["capability"]["execution"])

    @pytest.hookimpl(tryfirst=True)  # before JUnit's, which is to see a case's figures one by one
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when not in ("setup", "call", "teardown"):  # xdist's word for "the worker died in this test"
            self._file(report.nodeid, [*self.phases.pop(report.nodeid, []), report])
        elif hasattr(report, "kvport_outcome"):
            self.phases.setdefault(report.nodeid, []).append(report)
            if report.when == "teardown":
                self._file(report.nodeid, self.phases.pop(report.nodeid))

    def _file(self, nodeid: str, phases: list[Any]) -> None:
        # A failure outranks an error around it, both outrank a waiver and a decline; passing takes a call that ran to
        # its end.
        found: list[tuple[reporting.Outcome, str]] = [
            (getattr(phase, "kvport_outcome", "error"), getattr(phase, "kvport_reason", str(phase.longrepr)))
            for phase in phases
        ]
        ranking: tuple[reporting.Outcome, ...] = ("fail", "error", "waived", "unsupported", "pass")
        outcome = min((outcome for outcome, _ in found), key=ranking.index)
        reason = next(reason for kind, reason in found if kind == outcome)
        if outcome == "pass" and not any(phase.when == "call" for phase in phases):
            outcome, reason = "error", "the test did not run to its end"
        if outcome == "unsupported":
            self.unsupported[reason] += 1
        records = [value for key, value in phases[-1].user_properties if key == reporting.CASE_KEY] or [
            value for key, value in phases[0].user_properties if key == reporting.CASE_KEY
        ]
        waiver = next((w for phase in phases if (w := getattr(phase, "kvport_waiver", None))), None)
        if outcome == "waived" and waiver:
            self.waived[_until(waiver)] += 1
            records = [{**record, "waiver": waiver} for record in records]
        self.results.add(nodeid, records, outcome, sum(phase.duration for phase in phases), reason)
        others = [(key, value) for key, value in phases[-1].user_properties if key != reporting.CASE_KEY]
        figures = reporting.properties(records[0] if records else {}, outcome, reason, self.label)
        phases[-1].user_properties = [*others, *figures]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.config.option.collectonly:
            return
        for nodeid in list(self.phases):  # interrupted
            self._file(nodeid, self.phases.pop(nodeid))
        if exitstatus == pytest.ExitCode.OK:
            counts = self.results.counts()
            if not counts["pass"] and (self.chosen.named or self.results.cases):
                self.verdict = "the conformance suite was selected, but none of its cases passed"
            elif self.results.duplicates:
                names = ", ".join(sorted(set(self.results.duplicates))[:5])
                self.verdict = f"{len(self.results.duplicates)} results share a case id with another: {names}"
            if self.verdict:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := self.config.option.kvport_report:
            reporting.write(Path(path), self._report(int(session.exitstatus)))

    def _report(self, exit_status: int) -> dict[str, Any]:
        option = self.config.option
        environment = origin.environment()
        # Where the plugin lies is this machine's affair; what it is, its version and commit say.
        apart = ("capability", "waivers", "left_out", "location")
        found = {key: value for key, value in self.examination.items() if key not in apart}
        capability = {key: value for key, value in self.examination["capability"].items() if key != "formats"}
        return {
            "schema_version": reporting.SCHEMA_VERSION,
            "suite_version": getattr(importlib.import_module(SUITE), "SUITE_VERSION", None),
            "kvport": environment["packages"].get("kvport"),
            "kvport_commit": origin.commit("kvport"),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "backend": {
                **found,
                "commit": origin.commit(found["distribution"]),
                **capability,
                **origin.device_facts(capability["facts"]),
            },
            "environment": environment,
            "run": {
                "command": ["pytest", *self.config.invocation_params.args],
                "seed": option.kvport_seed,
                "formats": split_formats(option.kvport_formats) if option.kvport_formats else None,
                "chapter": option.kvport_chapter,
                "tier": option.kvport_tier,
                "keyword": option.keyword or None,
                "exit_status": exit_status,
                "verdict": self.verdict,
                "seconds": round(time.monotonic() - self.began, 3),
            },
            "counts": self.results.counts(),
            "cases": [self.results.cases[identity] for identity in sorted(self.results.cases)],
            **({"tensors": tensors} if (tensors := self._tensors()) else {}),
        }

    def _tensors(self) -> dict[str, Any] | None:
        """Join the arrays of the cases beside the report, where they were asked for."""
        option = self.config.option
        if not (folder := getattr(option, "kvport_spool", None)):
            return None
        saving = [case["id"] for case in self.results.cases.values() if {"codes", "output_ratio"} & set(case)]
        return spool.join(Path(folder), Path(option.kvport_report), option.kvport_tensors, saving)

    def pytest_unconfigure(self) -> None:
        if folder := getattr(self.config.option, "kvport_spool", None):  # where the run did not come to its end
            shutil.rmtree(folder, ignore_errors=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.config.option.collectonly:
            return
        terminalreporter.section("kvport conformance")
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.results.counts().items())
        terminalreporter.line(f"{self.label}: {counts}")
        for name, how in self.examination.get("left_out", {}).items():
            terminalreporter.line(f"plugin {name} was left out: {how}", yellow=True)
        for reason, count in self.unsupported.most_common(20):
            terminalreporter.line(f"unsupported {count} x: {reason}")
        for reason, count in self.waived.most_common():
            terminalreporter.line(f"waived {count} x, {reason}", yellow=True)
        if self.verdict:
            terminalreporter.line(f"FAILED: {self.verdict}", red=True)
        if path := self.config.option.kvport_report:
            terminalreporter.line(f"report: {path}")
