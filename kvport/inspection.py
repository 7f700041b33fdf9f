"""What every installed backend says and can do, found out without trusting any of them.

Vendor libraries crash interpreters and hang on absent drivers, so each plugin is imported, probed and tried in a
process of its own with a time limit; what came of it is a row with its reason. Those child processes run this module
(``python -m kvport.inspection``), report line by line into a file, and so even a child that was killed has said how
far it got.

The clock of the limit starts when the child has imported kvport and torch: a cold disk is not the plugin's fault.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from kvport import errors
from kvport.errors import BackendError, BackendUnavailable, KVPortError
from kvport.features import FEATURES, STORAGE_FEATURES, ask, undeclared
from kvport.hookspecs import BackendInfo, Device
from kvport.plugins import LoadFailure, Plugin, PluginEntry, describe
from kvport.registry import Registry, Selection, parse_device, probe_device

if TYPE_CHECKING:
    from kvport.backend import Backend
    from kvport.layout import CacheLayout

#: Seconds a plugin may take, all its devices together.
TIME_LIMIT: Final = 60.0
#: Seconds the interpreter may take to import kvport itself (torch from a cold network disk).
_START_LIMIT: Final = 180.0

#: Formats that a listing asks a backend about: some of every family.
SAMPLE_FORMATS: Final = (
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int8:asym",
    "int8:g128:scale=fp16",
    "int8:channel:static:scale=bf16",
    "int8:tensor:static",
    "int4:g64",
    "int4:g32:asym:scale=fp16",
    "k=int4:g64,v=int8:token",
    "int2:g32:asym:scale=fp16",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_e4m3:tensor:static",
    "mxfp4",
    "nvfp4",
    "nvfp4:static",
    "kivi2",
    "int8,sink=4,recent=128",
    "int4:g64:asym,recent=128:fp8_e4m3",
    "int4:g64,rotate=7",
    "k=int4:g64:outliers=4,v=int4:g64",
    "int4:g64:sparse=32",
    "latent=bf16,rope=bf16",
    "latent=int8:g128,rope=bf16",
)
#: The geometry they are asked about, in words; :func:`sample` makes it.
SAMPLE_GEOMETRY: Final = "head_dim 128 (latent: 512 + 64), 8 query over 2 KV heads (latent: 1), page size 128, bf16"


@dataclass(frozen=True)
class FormatSupport:
    """A backend's answer for one sample layout; no ``reasons`` means yes.

    ``scale_rule``: which static scales it takes, where it does not take all. ``lacking``: why it would refuse windows
    and requests of a step, beside what the layout needs.
    """

    format: str
    reasons: tuple[str, ...]
    workspace: str
    features: tuple[str, ...]
    scale_rule: str = ""
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capability:
    """What a loaded backend is: how results come about, and which operations are its own."""

    torch_device: str
    execution: str
    operations: dict[str, str]
    facts: dict[str, str]
    formats: tuple[FormatSupport, ...] = ()


@dataclass(frozen=True)
class DeviceListing:
    """One device type of a backend. ``usable`` is None where it was not probed."""

    type: str
    explicit: bool
    usable: bool | None = None
    reason: str = ""
    count: int | None = None
    facts: dict[str, str] | None = None
    capability: Capability | None = None


@dataclass(frozen=True)
class Listing:
    """One backend, or one plugin that gave none: then ``error`` says why and ``traceback`` where."""

    name: str
    distribution: str
    version: str
    location: str
    module: str
    summary: str = ""
    api: int | None = None
    priority: int = 0
    devices: tuple[DeviceListing, ...] = ()
    error: str = ""
    traceback: str = ""

    @property
    def usable(self) -> bool:
        """Whether any of its devices can be used here."""
        return not self.error and any(device.usable for device in self.devices)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "usable": self.usable}


@dataclass(frozen=True)
class Examination:
    """One device string, selected, probed and loaded in a child process."""

    request: str
    name: str
    distribution: str
    version: str
    location: str
    device: str
    capability: Capability
    waivers: tuple[dict[str, str], ...] = ()
    """What the plugin is known to fail in the conformance suite, as :meth:`kvport.waivers.Waiver.to_json` has it."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Plugins without which a bare device had to be examined, and how each ended the process that met it."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def list_backends(
    probe: bool = True, *, registry: Registry | None = None, time_limit: float = TIME_LIMIT
) -> list[Listing]:
    """Every installed backend, usable or not, and every plugin that fails, by name.

    With ``probe`` each plugin is imported, probed and tried in a child process with a time limit of ``time_limit``
    seconds. Without, the modules are only imported, here, and devices come with ``usable=None``.
    """
    plugins = (registry or Registry()).plugins
    entries: list[PluginEntry] = []
    found: list[Listing] = []
    for name, claims in plugins.entries().items():
        if refusal := plugins.refusal(name):
            found += [_row(entry, error=refusal.error) for entry in claims]
        else:
            entries += claims
    if probe:
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            for rows in pool.map(lambda entry: _inspect(entry, time_limit), entries):
                found += rows
    else:
        for entry in entries:
            outcome = plugins.outcome(entry.name)
            if isinstance(outcome, LoadFailure):
                found.append(_row(entry, error=outcome.error, traceback=outcome.traceback))
            else:
                found += [_announced_row(entry, _announcement(info)) for info in outcome.backends]
    return sorted(_mark_conflicts(found), key=lambda row: (row.name, row.distribution))


def examine(text: str, *, time_limit: float = TIME_LIMIT) -> Examination:
    """Select, probe and load a device string in a child process, so that a bad driver cannot take this one down.

    A bare device imports every plugin and probes some. Where that crashes or hangs, each plugin is tried by itself, and
    the device examined once more without those that do: a broken plugin has a verdict on itself alone.

    Raises what :meth:`kvport.registry.Registry.load` raises, and :class:`BackendUnavailable` where the child crashed
    or ran out of time.
    """
    request = parse_device(text)
    end, lines = _run_child({"examine": text}, time_limit)
    answer = {key: value for line in lines for key, value in line.items()}
    left_out: dict[str, str] = {}
    if not request.backend and not {"examined", "error"} & set(answer):
        left_out = _fatal(time_limit)
        if left_out:
            end, lines = _run_child({"examine": text}, time_limit, without=tuple(left_out))
            answer = {key: value for line in lines for key, value in line.items()}
    if "examined" in answer:
        examined = answer["examined"]
        return Examination(
            **{
                **examined,
                "capability": _capability(examined["capability"]),
                "waivers": tuple(examined.get("waivers", ())),
                "left_out": left_out,
            }
        )
    if "error" in answer:
        kind = getattr(errors, answer["error"], None)
        if isinstance(kind, type) and issubclass(kind, BackendError | errors.InvalidArgument):
            raise kind(answer["message"])
        raise BackendUnavailable(f"{answer['error']}: {answer['message']}")
    others = "".join(f"; without {name}, which {how}" for name, how in left_out.items())
    raise BackendUnavailable(f"{text!r} is not usable: {end} while {answer.get('stage', 'starting')}{others}")


# --- the parent's side -----------------------------------------------------------------------------------------------


def _inspect(entry: PluginEntry, time_limit: float) -> list[Listing]:
    """The rows of one plugin: its modules and probes in one child, every further usable device in its own."""
    end, lines = _run_child({"plugin": entry.name}, time_limit)
    rows: dict[str, Listing] = {}
    stage = "starting"
    for line in lines:
        stage = line.get("stage", stage)
        if "failure" in line:
            return [_row(entry, error=line["failure"], traceback=line["traceback"])]
        for announced in line.get("announced", ()):
            rows[announced["name"]] = _announced_row(entry, announced)
        if "device" in line:
            row = rows[line["backend"]]
            rows[row.name] = _with_device(row, line["device"])
    if not rows:
        return [_row(entry, error=f"{end} while {stage}")]
    # In one process some devices exclude each other (an interpreter mode is chosen at import), hence a child for each.
    for row in list(rows.values()):
        for device in row.devices:
            if device.usable is None:
                rows[row.name] = _with_device(
                    rows[row.name], {"type": device.type, "usable": False, "reason": f"{end} while {stage}"}
                )
            elif device.usable and device.capability is None:
                rows[row.name] = _with_device(rows[row.name], _tried_apart(entry, row.name, device.type, time_limit))
    return list(rows.values())


def _tried_apart(entry: PluginEntry, name: str, device_type: str, time_limit: float) -> dict[str, Any]:
    end, lines = _run_child({"plugin": entry.name, "backend": name, "device": device_type}, time_limit)
    stage = "starting"
    for line in lines:
        stage = line.get("stage", stage)
        if "device" in line:
            tried: dict[str, Any] = line["device"]
            return tried
    return {"type": device_type, "usable": False, "reason": f"{end} while {stage}"}


def _fatal(time_limit: float) -> dict[str, str]:
    """The plugins that take down, or hold up, the process that imports and probes them: name -> how it ended."""
    plugins = Registry().plugins
    names = [name for name in plugins.entries() if plugins.refusal(name) is None]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        ends = pool.map(lambda name: _run_child({"plugin": name}, time_limit), names)
    return {
        name: f"{end} while {next((line['stage'] for line in reversed(lines) if 'stage' in line), 'starting')}"
        for name, (end, lines) in zip(names, ends, strict=True)
        if end != _ending(0)
    }


def _run_child(
    request: dict[str, str], time_limit: float, *, without: tuple[str, ...] = ()
) -> tuple[str, list[dict[str, Any]]]:
    """Run one child, ``without`` these plugins. Returns how it ended, in words, and the records it wrote."""
    # The child sees the parent's import path, so that both talk of the same plugins; -P keeps the working directory
    # out of it, which "python -m" would put first. Strictness is the caller's affair: a child reports failures.
    # A chip's torch extension that cannot load breaks `import torch` for everybody; without its autoload the others
    # can be probed, and its own backend says what is wrong.
    environ = {**os.environ, "KVPORT_STRICT_PLUGINS": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if without:
        blocked = [environ.get("KVPORT_DISABLE_PLUGINS", ""), *without]
        environ["KVPORT_DISABLE_PLUGINS"] = ",".join(filter(None, blocked))
    with tempfile.TemporaryDirectory(prefix="kvport-inspect-") as folder:
        answers, noise = Path(folder, "answers"), Path(folder, "noise")
        command = [sys.executable, "-P", "-m", "kvport.inspection", json.dumps({**request, "answers": str(answers)})]
        with noise.open("wb") as sink:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ, start_new_session=True
            )
            try:
                end = _wait(child, answers, time_limit)
            finally:
                _kill(child)
        lines = list(_records(answers))
        if child.returncode and end == "ended" and (said := noise.read_text(errors="replace").strip()):
            end = f"{_ending(child.returncode)} ({said.splitlines()[-1][:300]})"
        elif end == "ended":
            end = _ending(child.returncode)
        return end, lines


def _wait(child: subprocess.Popen[bytes], answers: Path, time_limit: float) -> str:
    began = time.monotonic()
    ready = 0.0
    while True:
        try:
            child.wait(timeout=0.05)
            return "ended"
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if not ready and answers.exists():
            ready = now
        if ready and now - ready > time_limit:
            return f"gave no answer within {time_limit:g} s"
        if not ready and now - began > _START_LIMIT:
            return f"could not import kvport within {_START_LIMIT:g} s"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started, and collect it."""
    if child.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
        child.wait()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"the interpreter was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"the interpreter was killed by signal {-code}"
    return f"the interpreter ended with exit code {code}"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the last line of a child that was killed while writing it
            return


def _row(entry: PluginEntry, **fields: Any) -> Listing:
    return Listing(
        **{
            "name": entry.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "location": entry.location,
            "module": entry.module,
            **fields,
        }
    )


def _announced_row(entry: PluginEntry, announced: dict[str, Any]) -> Listing:
    devices = tuple(DeviceListing(d["type"], d["explicit"]) for d in announced["devices"])
    return _row(entry, **{**announced, "devices": devices})


def _with_device(row: Listing, update: dict[str, Any]) -> Listing:
    if (raw := update.get("capability")) is not None:
        update = {**update, "capability": _capability(raw)}
    devices = tuple(replace(d, **update) if d.type == update["type"] else d for d in row.devices)
    return replace(row, devices=devices)


def _capability(raw: dict[str, Any]) -> Capability:
    formats = tuple(
        FormatSupport(
            f["format"],
            tuple(f["reasons"]),
            f["workspace"],
            tuple(f["features"]),
            f["scale_rule"],
            tuple(f["lacking"]),
        )
        for f in raw["formats"]
    )
    return Capability(**{**raw, "formats": formats})


def _mark_conflicts(rows: list[Listing]) -> list[Listing]:
    """Rows of one name from several plugins (a second backend that two modules announce) cannot be asked for."""
    counts = Counter(row.name for row in rows)
    marked = []
    for row in rows:
        if counts[row.name] > 1 and not row.error:
            others = ", ".join(f"{r.distribution} {r.version}" for r in rows if r.name == row.name)
            row = replace(row, error=f"the backend name {row.name!r} is claimed by {others}")
        marked.append(row)
    return marked


# --- the child's side ------------------------------------------------------------------------------------------------


def _announcement(info: BackendInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "summary": info.summary,
        "api": info.api,
        "priority": info.priority,
        "devices": [{"type": d.type, "explicit": d.explicit} for d in info.devices],
    }


def sample(selection: Selection, *, formats: tuple[str, ...] = SAMPLE_FORMATS) -> Capability:
    """Load a selected backend and ask what it is and which of the sample layouts it supports."""
    import torch

    from kvport.backend import operations
    from kvport.formats import CacheFormat
    from kvport.layout import CacheLayout, LayerSpec

    backend = selection.load()
    answers = []
    for text in formats:
        fmt = CacheFormat.parse(text)
        spec = LayerSpec(kv_heads=2, query_heads=8, key_dim=128, value_dim=128)
        if fmt.rope is not None:
            spec = LayerSpec(kv_heads=1, query_heads=8, key_dim=512 + 64, value_dim=512, latent=True)
        answers.append(answer(backend, text, CacheLayout((spec,), fmt, page_size=128, dtype=torch.bfloat16)))
    return Capability(
        torch_device=str(backend.torch_device),
        execution=backend.execution,
        operations=dict(operations(backend)),
        facts={**selection.probe.facts, **backend.facts()},
        formats=tuple(answers),
    )


def answer(backend: Backend, format: str, layout: CacheLayout) -> FormatSupport:
    """What a backend says of a layout in this format."""
    from kvport.tiers import make_lanes

    try:
        found = ask(backend, make_lanes(layout)[0])
    except Exception as error:
        return FormatSupport(format, (f"support() raised {describe(error)}",), "", ())
    return FormatSupport(
        format,
        found.refusals,
        found.workspace,
        tuple(sorted(found.features)),
        found.scale_rule,
        undeclared(found.features, FEATURES - STORAGE_FEATURES),
    )


class _Child:
    """Answers one request, one JSON record a line, flushed at once because the next thing may be a crash."""

    def __init__(self, request: dict[str, str], answers: TextIO) -> None:
        self.request, self.file = request, answers
        self.registry = Registry()
        self.say(stage="importing")

    def say(self, **record: Any) -> None:
        self.file.write(json.dumps(record, default=str) + "\n")
        self.file.flush()

    def run(self) -> None:
        if "examine" in self.request:
            self.examine(self.request["examine"])
            return
        # Never through Registry.select: it may import other plugins, and one of those may crash.
        self.say(stage="importing the plugin module")
        outcome = self.registry.plugins.outcome(self.request["plugin"])
        if not isinstance(outcome, Plugin):
            self.say(failure=outcome.error, traceback=outcome.traceback)
        elif "device" not in self.request:
            self.list_plugin(outcome)
        else:
            info = next(info for info in outcome.backends if info.name == self.request["backend"])
            self.try_device(outcome, info, next(d for d in info.devices if d.type == self.request["device"]))

    def list_plugin(self, outcome: Plugin) -> None:
        self.say(announced=[_announcement(info) for info in outcome.backends])
        announced = [(info, device) for info in outcome.backends for device in info.devices]
        usable: list[tuple[BackendInfo, Device]] = []
        for info, device in announced:
            self.say(stage=f"probing {info.name}@{device.type}")
            probe = probe_device(info, device)
            if probe.usable:
                usable.append((info, device))
            self.say(
                backend=info.name,
                device={
                    "type": device.type,
                    "usable": probe.usable,
                    "reason": probe.reason,
                    "count": probe.count,
                    "facts": probe.facts,
                },
            )
        if len(announced) == 1 and usable:  # no other device was probed here, so nothing can be in its way
            self.try_device(outcome, *announced[0])

    def try_device(self, plugin: Plugin, info: BackendInfo, device: Device) -> None:
        self.say(stage=f"loading {info.name}@{device.type}")
        request = parse_device(f"{info.name}@{device.type}")
        try:
            probe = probe_device(info, device)
            found: dict[str, Any] = {
                "capability": asdict(sample(Selection(request, info, device, plugin.entry, probe)))
            }
        except Exception as error:
            found = {"usable": False, "reason": str(error) if isinstance(error, KVPortError) else describe(error)}
        self.say(backend=info.name, device={"type": device.type, **found})

    def examine(self, text: str) -> None:
        try:
            self.say(stage=f"selecting and probing a backend for {text!r}")
            selection = self.registry.select(text)
            self.say(stage=f"loading {selection.info.name}@{selection.request.device}")
            capability = sample(selection, formats=())
            self.say(stage=f"reading the waivers of {selection.entry.name}")
            examined = Examination(
                request=text,
                name=selection.info.name,
                distribution=selection.entry.distribution,
                version=selection.entry.version,
                location=selection.entry.location,
                device=selection.request.device,
                capability=capability,
                waivers=tuple(
                    {**waiver.to_json(), "source": waiver.source or f"plugin {selection.entry.name}"}
                    for waiver in self.registry.plugins.waivers(selection.entry.name)
                ),
            )
        except Exception as error:
            self.say(error=type(error).__name__, message=str(error))
        else:
            self.say(examined=examined.to_json())


if __name__ == "__main__":
    _request = json.loads(sys.argv[1])
    # The clock starts when the answers file is there. Importing torch takes seconds and is not the plugin's fault;
    # where it fails, the backends that need it say so.
    with contextlib.suppress(Exception):
        importlib.import_module("torch")
    with Path(_request["answers"]).open("w", encoding="utf-8") as _answers:
        _Child(_request, _answers).run()
