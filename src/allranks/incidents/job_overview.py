"""Reads the state of a job from outside: black boxes, the job's file, incidents, the lighthouse. Runs in commands; the agent
uses it to find which ranks wait for which."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from allranks.blackbox.files import hint_at_other_users, job_folders, recorded_users
from allranks.blackbox.header import is_alive
from allranks.channel import web_client
from allranks.diagnosis.context import ranks_wait
from allranks.errors import InputError
from allranks.incidents.folder import Story, read_incidents
from allranks.load import LoadOptions, load_paths
from allranks.model.cluster import DOING, JobView, Motion, RankRow
from allranks.model.formatting import ranks_text, rename
from allranks.model.job_state import (
    AgentState,
    JobFacts,
    OpenIncident,
    StateLine,
    StepWork,
    describe,
    inside_line,
)
from allranks.model.parsing import printable
from allranks.model.trace import Flag, RankTrace, State
from allranks.watch.samples import SILENT_S, RankSample, letter_of, read_sample, read_samples

JOB_FILE, TOKEN_FILE = "job.json", "token"
MAX_JOB_BYTES = 1 << 20
ANSWER_S = 5.0  # limit for a connection to the lighthouse


def write_job(folder: Path, facts: Mapping[str, object]) -> None:
    """Writes the job's file, by which commands find its lighthouse, logs and incidents."""
    (folder / JOB_FILE).write_text(json.dumps(facts))


def set_aside_earlier(folder: Path) -> None:
    """Renames the boxes of dead ranks of an earlier run of the same name, before a new run starts."""
    agent = read_job(folder).get("pid")
    if isinstance(agent, int) and is_alive(agent, 0):
        return  # another agent of this job runs: its dead ranks are evidence
    for path in folder.glob("*.box"):
        sample = read_sample(path)
        if sample is not None and not sample.alive:
            with contextlib.suppress(FileNotFoundError):  # another starting agent of this host was faster
                path.replace(path.with_name(f"{path.name}.earlier"))


def read_job(folder: Path) -> dict[str, object]:
    """The job's file, or {}. The folder may come from another machine: its content is not trusted."""
    path = folder / JOB_FILE
    try:
        if not path.is_file() or path.stat().st_size > MAX_JOB_BYTES:
            return {}
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def incidents_folder(folder: Path) -> Path:
    """Where the incidents of a job go."""
    return Path(str(read_job(folder).get("incidents") or folder / "incidents"))


def find_job(name: str | None) -> Path:
    """The folder of a job: by path, by name or a unique part of it; without a name the newest running job of this user, else
    the newest job."""
    if name and (path := Path(name)).is_dir() and ("/" in name or _last_written(path)):
        return path
    folders = recorded_jobs()
    if not name and not folders:
        raise InputError("no recorded job on this node", hint=_other_jobs(None))
    if not name:
        return next((folder for folder in folders if any(s.alive for s in read_samples(folder))), folders[0])
    exact = [folder for folder in folders if name in (folder.name, read_job(folder).get("job"))]
    part = [folder for folder in folders if name in folder.name]
    if exact or len(part) == 1:
        return (exact or part)[0]
    if part:
        raise InputError(f"{len(part)} jobs match {name!r}", hint=f"One of: {_some(part)}.")
    raise InputError(f"no job {name!r} on this node", hint=_other_jobs(name))


def lighthouse_of(given: str | None) -> tuple[str, Path | None]:
    """(address, folder of the job) for HOST:PORT, or for a job on this node, whose lighthouse must answer."""
    host, _, port = (given or "").rpartition(":")
    if given and host and port.isdigit():
        return given, None
    folder = find_job(given)
    address = str(read_job(folder).get("lighthouse") or "").split(",")[0]
    if not address:
        hint = "`allranks run` starts one unless --no-lighthouse is given. Give HOST:PORT of one elsewhere."
        raise InputError(f"job {folder.name} has no lighthouse", hint=hint)
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise InputError(
            f"the lighthouse of job {folder.name} at {address} does not answer ({why}); the job has probably ended",
            hint=f"`allranks status {folder.name}` shows what its black boxes hold.",
        ) from error
    return address, folder


def _last_written(folder: Path) -> float:
    """Time of the last write to a box or the file of the job; 0.0 for a folder without them."""
    return max(
        (path.stat().st_mtime for path in (*folder.glob("*.box"), *folder.glob(JOB_FILE))), default=0.0
    )


def read_job_token(folder: Path) -> str:
    """The job token, for commands of the same user; "" when there is none."""
    try:
        return (folder / TOKEN_FILE).read_text().strip()
    except OSError:
        return ""


def _other_jobs(name: str | None) -> str:
    """A hint: similar names, or all jobs."""
    known = recorded_jobs()
    near = get_close_matches(name or "", [folder.name for folder in known], 3, 0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    ours = f"Jobs on this node: {_some(known)}." if known else ""
    hint = f"{ours} {hint_at_other_users(recorded_users())}".strip()
    return hint or "Start one with `allranks run …`, or give the folder of its black boxes."


def recorded_jobs() -> list[Path]:
    """The folders of recorded jobs, the newest first."""
    written = {folder: _last_written(folder) for folder in job_folders()}
    return sorted(filter(written.__getitem__, written), key=written.__getitem__, reverse=True)


def _some(folders: list[Path]) -> str:
    more = f" and {len(folders) - 8} older ones" if len(folders) > 8 else ""
    return ", ".join(folder.name for folder in folders[:8]) + more


@dataclass(frozen=True)
class LighthouseView:
    """The lighthouse's view of the job; empty when it does not answer."""

    line: StateLine | None = None
    incidents: tuple[Story, ...] = ()
    nodes: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Overview:
    """Repeated views of one job. The last one gives the speed."""

    folder: Path
    _before: dict[int, tuple[float, int]] = field(default_factory=dict)  # rank -> time, step

    def look(self) -> JobView:
        now = time.time()
        facts = read_job(self.folder)
        samples = read_samples(self.folder)
        paths = [sample.path for sample in samples]
        loaded = load_paths(paths, LoadOptions(allow_nothing=True)).traces if paths else []
        traces = {trace.header.rank: trace for trace in loaded if trace.header.rank is not None}
        absent = cache(partial(find_absent, traces))
        rows = [self._row(sample, now, traces.get(sample.rank), absent) for sample in samples]
        lighthouse = str(facts.get("lighthouse", ""))
        job = str(facts.get("job", self.folder.name))
        seen = ask_lighthouse(lighthouse) if any(row.alive for row in rows) else LighthouseView()
        incidents: Sequence[Story] = seen.incidents
        if seen.line is None:
            known = read_incidents(incidents_folder(self.folder))
            incidents = [incident for incident in known if incident.get("job") == job]
        pid = facts.get("pid")
        watched = isinstance(pid, int) and is_alive(pid)
        line = seen.line or describe(local_facts(rows, incidents, watched=watched))
        if seen.line is None and lighthouse and any(row.alive for row in rows):
            line = replace(line, text=f"{line.text} (the lighthouse at {lighthouse} does not answer)")
        return JobView(
            job=job, folder=str(self.folder), at=now, rows=with_nodes(rows, seen.nodes), lighthouse=lighthouse,
            line=line.text, level=line.level, state=line.state,
            incidents=incident_texts(incidents, running=any(row.alive for row in rows))[-8:],
        )  # fmt: skip

    def _row(
        self,
        sample: RankSample,
        now: float,
        trace: RankTrace | None,
        absent: Callable[[Call], tuple[int, ...]],
    ) -> RankRow:
        mine = find_open(trace) if trace is not None else {}
        waits_for: tuple[int, ...] = ()
        silent = None if not sample.last_ns else max(0.0, now - sample.last_ns / 1e9)
        unusual = silent is not None and silent >= SILENT_S
        letter = letter_of(sample, now)
        doing = sample.closed or DOING[letter]
        if letter not in "ed" and mine:
            call, doing = next(iter(mine.items()))
            waits_for = absent(call) if unusual else ()
        before = self._before.get(sample.rank)
        speed = None
        if before and now > before[0] and sample.step >= before[1] >= 0:
            speed = (sample.step - before[1]) / (now - before[0])
        self._before[sample.rank] = (now, sample.step)
        host = trace.header.host if trace is not None else ""
        phase = trace.progress.phase if trace is not None else ""
        return RankRow(
            sample.rank, sample.pid, host, sample.alive, sample.step, sample.calls_completed, silent, doing, waits_for, speed, phase,
            box=sample.path, name=sample.name, tokens=sample.tokens,
        )  # fmt: skip


Call = tuple[str, int]  # group, sequence
_UNNUMBERED = int(Flag.CAPTURED | Flag.COALESCED_PART | Flag.P2P)


def find_open(trace: RankTrace) -> dict[Call, str]:
    """The unfinished calls of a rank, oldest first, each with a short text."""
    calls = trace.calls
    chosen = np.flatnonzero((calls["state"] <= State.STARTED) & ((calls["flags"] & _UNNUMBERED) == 0))
    found = {}
    for call in calls[chosen[:4]]:
        group, seq = trace.groups[int(call["group"])], int(call["seq"])
        name = group.desc if group.desc not in ("", "undefined") else group.name
        found[group.name, seq] = f"{trace.names[int(call['op'])]} #{seq} of {name}"
    return found


def find_absent(traces: Mapping[int, RankTrace], call: Call) -> tuple[int, ...]:
    """Members of the group that have not begun the call."""
    members = next((g.ranks for t in traces.values() for g in t.groups if g.name == call[0]), ())
    return tuple(rank for rank in members if rank in traces and not _has_begun(traces[rank], *call))


def _has_begun(trace: RankTrace, group: str, sequence: int) -> bool:
    """Whether a rank has begun, and perhaps finished, a call of a group."""
    calls, numbers = trace.calls, [index for index, one in enumerate(trace.groups) if one.name == group]
    numbered = (calls["flags"] & _UNNUMBERED) == 0
    return bool((numbered & np.isin(calls["group"], numbers) & (calls["seq"] >= sequence)).any())


def find_open_hang(folder: Path) -> Path | None:
    """The folder of the newest open hang or stall of a job; None when there is none."""
    facts = read_job(folder)
    known = read_incidents(incidents_folder(folder)) if facts else []
    known = [i for i in known if i.get("job") == facts.get("job") and not i.get("closed")]
    open_ = [i for i in known if i.get("kind") in ("hang", "stall")]
    return Path(str(open_[-1].get("folder"))) if open_ else None


def ask_lighthouse(address: str) -> LighthouseView:
    """The facts of the lighthouse's page."""
    if not address:
        return LighthouseView()
    try:
        first = address.split(",")[0]
        view = web_client.get(first, "/api/page", timeout_s=2.0).object()
        layout = web_client.get(first, "/api/nodes", timeout_s=2.0).object()
        line = view["line"]
        state = StateLine(*(printable(str(line[key])) for key in ("state", "level", "text")))  # type: ignore[arg-type]
        incidents = tuple(one for one in reversed(view["incidents"]) if one.get("kind") != "request")
        return LighthouseView(state, incidents, tuple(layout["nodes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return LighthouseView()


def local_facts(rows: Sequence[RankRow], incidents: Iterable[Story], watched: bool) -> JobFacts:
    """The facts of a job without a lighthouse, from black boxes and the folder of incidents. `watched`: the agent runs."""
    opened = tuple(
        OpenIncident(str(one.get("kind")), _sentence(one), _result(one))
        for one in incidents
        if not one.get("closed")
    )
    alive = [row for row in rows if row.alive]
    speeds = sorted(row.steps_per_s for row in alive if row.steps_per_s)
    motion = find_motion(opened)
    cause = next((one.sentence for one in reversed(opened) if one.kind == "hang"), "")
    begun = any(row.calls_completed or row.step >= 0 for row in rows)
    return JobFacts(
        agents=(AgentState(motion, cause),) if watched and alive else (),
        incidents=opened if alive else (),
        step=max((row.step for row in rows), default=-1),
        steps_per_s=speeds[len(speeds) // 2] if speeds else None,
        calls=sum(row.calls_completed for row in rows),
        silent_s=min((row.silent_s for row in alive if row.silent_s is not None), default=0.0),
        begun=begun,
        over=bool(rows) and not alive and all(row.doing == "exit" for row in rows),
        gone="" if alive or (watched and not begun) else "ended",
        work=StepWork(sum(row.tokens for row in alive)),
    )


def with_nodes(rows: Sequence[RankRow], nodes: Iterable[Mapping[str, Any]]) -> tuple[RankRow, ...]:
    """Adds the ranks of other nodes, as their agents report them, and each rank's GPU."""
    known, found = {row.rank: row for row in rows}, {row.rank: row for row in rows}
    for node in nodes:
        gpus = {pid: gpu for gpu in node.get("gpus", ()) for pid in gpu.get("pids", ())}
        for at, rank in enumerate(node.get("ranks", ())):
            if rank not in known:
                letter, place = node["doing"][at], node["places"][at]
                doing = place or DOING.get(letter, "")
                found[rank] = RankRow(
                    rank, node["pids"][at], node["node"], letter not in "de", node["steps"][at], node["calls"][at], None, doing
                )  # fmt: skip
            gpu = gpus.get(found[rank].pid)
            if gpu is not None:
                found[rank] = replace(found[rank], gpu=f"{gpu['busy']} %, {gpu['used_mb'] / 1000:.1f} GB")
    return tuple(found[rank] for rank in sorted(found))


def _sentence(incident: Story) -> str:
    verdict = incident.get("verdict")
    sentence = isinstance(verdict, dict) and verdict.get("sentence")
    return str(sentence or incident.get("sentence") or incident.get("reason") or "")


def _result(incident: Story) -> str:
    action = incident.get("action")
    return str(action.get("result") or "") if isinstance(action, dict) else ""


def incident_texts(incidents: Iterable[Story], *, running: bool) -> tuple[str, ...]:
    """A line for each, oldest first. `running`: the job, and so an incident that is not closed, continues."""
    lines = []
    for one in sorted(incidents, key=lambda story: str(story.get("id"))):
        state = "closed" if one.get("closed") else "open" if running else "open at the end"
        plain = inside_line(_sentence(one), waits=state == "open")
        lines.append(f"{one.get('id')} ({one.get('kind')}, {state}): {plain}")
    return tuple(lines)


def find_motion(opened: Iterable[OpenIncident]) -> Motion:
    """The motion of a job by its open incidents."""
    kinds = {incident.kind for incident in opened if not incident.outcome}
    return "hung" if "hang" in kinds else "stalled" if "stall" in kinds else "moving"


def who_waits(traces: Iterable[RankTrace]) -> str:
    """ "ranks 0, 1 wait for rank 2 in all_reduce #12 of default_pg", for the call in which most ranks wait."""
    known = {trace.header.rank: trace for trace in traces if trace.header.rank is not None}
    waiters: dict[Call, list[int]] = {}
    texts: dict[Call, str] = {}
    for rank, trace in known.items():
        for call, text in find_open(trace).items():
            waiters.setdefault(call, []).append(rank)
            texts[call] = text
    best = ""
    for call, ranks in sorted(waiters.items(), key=lambda one: -len(one[1])):
        if absent := find_absent(known, call):
            best = f"{ranks_wait(ranks)} for {ranks_text(absent)} in {texts[call]}"
            break
    return rename(best, next((trace.header.worlds for trace in known.values()), ()))
