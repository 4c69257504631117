"""Runs a command under a fault plan, and reports what was noticed, when, with which verdict, and what it cost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

from allranks.drill.plan import DrillFault, DrillPlan
from allranks.drill.self_faults import FAULTS
from allranks.incidents.folder import Story, read_incidents

SCHEMA = 1
ALARMS = ("hang", "death", "partition")
_REPORTS: tuple[Literal["digest", "state"], ...] = ("digest", "state")
MATCH_S = 600.0  # an incident later than this is not of the fault


class DrillMark(TypedDict, total=False):
    """One line of a rank's report: a step that was begun, or committed."""

    at: float
    pid: int
    step: int  # begun
    at_step: int  # committed
    digest: str  # from the script
    state: str  # hash of the parameters, from the drill
    loss: float
    part: int
    samples: list[int]
    all_samples: int


class FiredFault(TypedDict):
    """When and where a fault fired."""

    at: float
    step: int
    rank: int
    pid: int


Marks = dict[int, list[DrillMark]]  # by rank


@dataclass(frozen=True)
class FaultResult:
    """The result of one fault; None = it did not happen or is not known."""

    kind: str
    rank: int
    step: int | None
    fired: bool
    noticed_s: float | None = None
    verdict: Story | None = None
    verdict_right: bool | None = None
    recovered_s: float | None = None
    incident: str = ""


@dataclass(frozen=True)
class DrillResult:
    """The result of a drill (docs/reference/json.md)."""

    faults: tuple[FaultResult, ...]
    exit_code: int
    identical_replicas: bool | None
    lost_steps: int | None
    lost_samples: int | None
    repeated_samples: int | None
    false_alarms: int
    false_evictions: int
    folder: str = ""
    incidents: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, object]:
        return {"schema": SCHEMA, **asdict(self)}


def run_drill(
    plan: DrillPlan,
    command: list[str],
    folder: Path,
    *,
    timeout_s: float,
    quiet: bool = False,
    until: Callable[[], bool] = lambda: False,
) -> DrillResult:
    """Runs the command with the plan's faults preloaded into its ranks, until its end, the limit, or `until`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    preload = ",".join(filter(None, (os.environ.get("ALLRANKS_PRELOAD"), "allranks.drill.preload")))
    environment = {"ALLRANKS_HISTORY": "off"} | os.environ  # injected faults are not faults of this node
    environment |= {"ALLRANKS_DRILL": str(folder.absolute()), "ALLRANKS_PRELOAD": preload}
    words = with_incidents(command, folder / "incidents")
    with open(folder / "output.log", "wb") as log:
        target = log if quiet else sys.stderr
        process = subprocess.Popen(
            words, env=environment, stdout=target, stderr=target, start_new_session=True
        )
        try:
            with ended_by_signals():
                code = _wait(process, timeout_s, until)
        finally:
            _end(process)
    return judge_drill(plan, folder, code)


def _wait(process: subprocess.Popen[bytes], timeout_s: float, until: Callable[[], bool]) -> int:
    """The exit code; 124 after the timeout, or when `until` became true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not until():
        try:
            return process.wait(timeout=min(0.25, timeout_s))
        except subprocess.TimeoutExpired:
            continue
    return 124


def with_incidents(command: list[str], incidents: Path) -> list[str]:
    """Adds the folder of incidents to `allranks run`; a plain script is started with `allranks run`."""
    words = list(command)
    if words and (words[0].endswith(".py")):
        words = [sys.executable, "-m", "allranks", "run", "--standalone", *words]
    if "run" in words and "--incidents" not in words:
        position = words.index("run") + 1
        words[position:position] = ["--incidents", str(incidents)]
    if words and words[0] == "allranks":
        words[:1] = [sys.executable, "-m", "allranks"]
    return words


def judge_drill(plan: DrillPlan, folder: Path, exit_code: int) -> DrillResult:
    """Compares the files of the ranks and the agent with the plan."""
    incidents = read_incidents(folder / "incidents")
    marks = read_marks(folder)
    fired: list[FiredFault | None] = []
    for index in range(len(plan.faults)):
        try:
            fired.append(json.loads((folder / f"fired.{index}").read_text()))
        except (OSError, ValueError):  # it did not fire
            fired.append(None)
    own = match_incidents(plan.faults, [None if f is None else float(f["at"]) for f in fired], incidents)
    results = [
        _judge_fault(fault, facts, own.get(index), marks)
        for index, (fault, facts) in enumerate(zip(plan.faults, fired, strict=True))
    ]
    claimed = {incident["id"] for incident in own.values()}
    unclaimed = [i for i in incidents if i["id"] not in claimed and i["kind"] in ALARMS]
    evictions = [i for i in unclaimed if (i.get("action") or {}).get("done")]
    return DrillResult(
        faults=tuple(results), exit_code=exit_code, identical_replicas=find_identical(marks), lost_steps=find_lost_steps(marks),
        **_samples(marks), false_alarms=len([i for i in unclaimed if i["kind"] != "death"]), false_evictions=len(evictions),
        folder=str(folder), incidents=tuple(i["id"] for i in incidents),
    )  # fmt: skip


def read_marks(folder: Path) -> Marks:
    """Rank -> its marks in order of time, of all its processes."""
    found: Marks = {}
    for path in folder.glob("steps.*"):
        _, rank, pid = path.name.split(".")
        for line in path.read_text().splitlines():
            try:
                entry: DrillMark = json.loads(line)
            except ValueError:
                continue  # truncated by a kill
            entry["pid"] = int(pid)
            found.setdefault(int(rank), []).append(entry)
    for entries in found.values():
        entries.sort(key=lambda entry: entry["at"])
    return found


def match_incidents(
    faults: Sequence[DrillFault], fired_at: Sequence[float | None], incidents: Sequence[Story]
) -> dict[int, Story]:
    """Fault -> its incident. Incidents with the rank and cause of a fault are matched first, so that a fault without an incident
    does not take that of the next fault."""
    own: dict[int, Story] = {}
    for exact in (True, False):
        for index, (fault, at) in enumerate(zip(faults, fired_at, strict=True)):
            if at is None or index in own or not FAULTS[fault.kind].causes:
                continue
            taken = {incident["id"] for incident in own.values()}
            free = [
                i
                for i in incidents
                if i["id"] not in taken
                and i["kind"] in ALARMS
                and 0 <= _noticed(i) - at < MATCH_S
                and (not exact or is_right(fault, i.get("verdict")))
            ]
            if free:
                own[index] = min(free, key=_noticed)
    return own


def is_right(fault: DrillFault, verdict: Story | None) -> bool:
    """Whether the verdict names only the fault's rank, and a cause of the fault."""
    found = verdict or {}
    ranks = found.get("ranks")
    # no rank is guilty of a partition between all remaining ranks
    named = ranks == [fault.rank] or (fault.kind == "partition" and ranks == [])
    # a rank that restores its state has made no call yet
    causes = FAULTS[fault.kind].causes | ({"not_started"} if fault.at == "heal" else set())
    return named and found.get("cause") in causes


def _judge_fault(
    fault: DrillFault, fired: FiredFault | None, incident: Story | None, marks: Marks
) -> FaultResult:
    if fired is None:
        return FaultResult(fault.kind, fault.rank, None, False)
    at, step = float(fired["at"]), fired["step"]
    recovered = _recovered(fault, at, marks)
    if incident is None:
        right = None if FAULTS[fault.kind].causes else True
        return FaultResult(fault.kind, fault.rank, step, True, None, None, right, recovered)
    verdict, noticed_s = incident.get("verdict") or None, _noticed(incident) - at
    right = is_right(fault, verdict)
    return FaultResult(
        fault.kind, fault.rank, step, True, noticed_s, verdict, right, recovered, incident["id"]
    )


def _noticed(incident: Story) -> float:
    times = [moment["at"] for moment in incident["timeline"] if moment["name"] == "noticed"]
    return float(min(times or [incident["opened"]]))


def _recovered(fault: DrillFault, at: float, marks: Marks) -> float | None:
    """Seconds from the fault until a survivor began a new step."""
    times = []
    for rank, entries in marks.items():
        if rank == fault.rank:
            continue
        before = max((e["step"] for e in entries if "step" in e and e["at"] <= at), default=-1)
        new = max(before, fault.at_step) + 1
        times += [e["at"] for e in entries if "step" in e and e["at"] > at and e["step"] >= new][:1]
    return min(times) - at if times else None


def find_identical(marks: Marks) -> bool | None:
    """Whether all reports of a step agree, for `digest` (from the script) and `state` (from the drill); None without two
    reports of a step."""
    seen: dict[tuple[str, int, int], list[str]] = {}
    for entry in itertools.chain.from_iterable(marks.values()):
        for name in _REPORTS:
            if name in entry and "at_step" in entry:
                seen.setdefault((name, entry.get("part", 0), entry["at_step"]), []).append(entry[name])
    compared = [reports for reports in seen.values() if len(reports) > 1]
    return all(len(set(reports)) == 1 for reports in compared) if compared else None


def find_lost_steps(marks: Marks) -> int | None:
    """Number of steps that no rank began, below the last begun step."""
    steps = {entry["step"] for entry in itertools.chain.from_iterable(marks.values()) if "step" in entry}
    return (max(steps) - min(steps) + 1 - len(steps)) if steps else None


def _samples(marks: Marks) -> dict[str, int | None]:
    """Lost and repeated samples, from the scripts' reports of committed samples."""
    steps: dict[int, set[int]] = {}  # by sample
    total: int | None = None
    for entry in itertools.chain.from_iterable(marks.values()):
        for sample in entry.get("samples", ()):
            steps.setdefault(sample, set()).add(entry.get("at_step", -1))
        total = entry.get("all_samples", total)
    if not steps:
        return {"lost_samples": None, "repeated_samples": None}
    expected = total if total is not None else max(steps) + 1
    lost = sum(sample not in steps for sample in range(expected))
    return {"lost_samples": lost, "repeated_samples": sum(len(seen) - 1 for seen in steps.values())}


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the command like Ctrl-C, through `finally`, so that its job ends too. Ctrl-C works even if
    the command was started with SIGINT ignored, as a shell's background job is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, leave) for number in ends}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole session of the command, with SIGTERM first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
