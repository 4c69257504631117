"""Watches a job of several roles: `allranks watch --tree`. Runs in `allranks watch`, like sidecar.py.

Samples every process below the watched ones. When none makes progress for longer than the job's history allows, it inspects all
processes for some seconds (stacktraces/tree.py), and reports only a job that is stuck. A stuck role is restarted only by its
command in the job file:

    debug:
      restart: ["reward=systemctl --user restart reward"]
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from allranks.blackbox.header import find_header, process_stat
from allranks.blackbox.reader import read_trace
from allranks.channel import web_client
from allranks.diagnosis.process_verdict import explain_processes
from allranks.errors import AllranksError
from allranks.model.debug_options import DebugOptions
from allranks.model.stacks import JobLook, Process, ProcessFinding
from allranks.stacktraces.boxes import LiveBox, find_boxes
from allranks.stacktraces.links import LinkReader
from allranks.stacktraces.procfs import ProcessEntry, read_proc, turns_of_threads, work_done
from allranks.stacktraces.roles import give_roles, with_roles
from allranks.stacktraces.tree import LookOptions, find_tree, is_settled, look_at_processes, write_look
from allranks.watch.role_progress import SAMPLE_S, EngineMetrics, PhaseHistory, RoleWork, parse_metrics
from allranks.watch.samples import RankSample, read_sample
from allranks.watch.sidecar import Sidecar

MAX_RESTARTS, WITHIN_S = 3, 3600.0


def restart_commands(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Role -> command, from ROLE=COMMAND."""
    pairs = (one.partition("=")[::2] for one in given)
    return {role.strip(): tuple(shlex.split(command)) for role, command in pairs}


def choose_restart(
    finding: ProcessFinding,
    commands: Mapping[str, Sequence[str]],
    earlier_s: Sequence[tuple[str, float]],
    now_s: float,
) -> tuple[str, str]:
    """The role to restart ("" for none) and the reason. `earlier_s` are earlier restarts: role and time."""
    if finding.state != "stuck":
        return "", "the job is not stuck"
    roles = {re.sub(r" \d+$", "", one.role) for one in finding.guilty}
    if len(roles) != 1:
        return "", f"{len(roles)} roles are guilty; a restart needs exactly one"
    (role,) = roles
    if role not in commands:
        return "", f"the job file has no restart command for {role}"
    recent = sum(name == role and now_s - at_s < WITHIN_S for name, at_s in earlier_s)
    if recent >= MAX_RESTARTS:
        return "", f"{role} was restarted {recent} times within an hour"
    return role, f"{role} is stuck and may be restarted"


RESCAN_S, RESCAN_LATER_S, YOUNG_S = 5.0, 20.0, 120.0
ENGINE = re.compile(r"(?i)vllm|sglang")
MAX_PORTS, METRICS_LIMIT_S, RESTART_LIMIT_S = 8, 1.0, 600.0
#: Pause after an inspection of a silence without a result: at first, and at most.
INSPECT_AGAIN_S, MAX_INSPECT_AGAIN_S = 30.0, 600.0
#: Processes that are sampled every two seconds; more are sampled less often, and half as often while none moves.
PER_SAMPLE = 50
POLL_S = 1.0
#: A new process is read again after these times: its title may have changed, it may have opened a port or a black box.
AGAIN_S = (10.0, 40.0, 120.0)
#: Polling processes never seem silent. They are inspected at these times, then every CHECK_EVERY_S; two inspections must agree.
CHECKS_S, CHECK_EVERY_S, AGREE_S = (30.0, 60.0, 120.0, 240.0, 480.0), 600.0, 20.0


@dataclass(frozen=True)
class RoleReport:
    """A finding on a job of several roles, and where it was written."""

    reason: str
    folder: Path
    finding: ProcessFinding


class RoleSidecar(Sidecar):
    """A watched job of several roles. `on_report` gets every finding that the job is stuck."""

    def __init__(
        self,
        options: DebugOptions,
        folder: Path,
        say: Callable[[str], None] = lambda text: None,
        on_report: Callable[[RoleReport], None] = lambda report: None,
    ) -> None:
        super().__init__(replace(options, rank_lost=False), folder, say)
        self._on_report = on_report
        self._rules = with_roles(options.roles)
        self._commands = restart_commands(options.restart)
        self._restarts: list[tuple[str, float]] = []  # role, when
        self._processes: list[Process] = []
        self._entries: dict[int, ProcessEntry] = {}
        self._words: dict[int, str] = {}  # pid -> command line at the last scan
        self._all: set[int] = set()  # pids of the machine at the last scan
        self._again: tuple[float, ...] = ()  # times at which titles, ports and boxes are read again
        self._boxes: dict[int, LiveBox] = {}
        self._ports: dict[int, str] = {}  # pid -> address of an engine's metrics
        self._other_ports: set[str] = set()  # addresses without metrics of an engine
        self._work_of: dict[int, RoleWork] = {}
        self._numbers: dict[int, int] = {}
        self._phases = PhaseHistory()
        self._phase_names: dict[tuple[str, int], str] = {}
        self._samples: list[RankSample] = []
        self._fresh, self._moves = False, True  # new samples since the last decision; samples differ
        self._sampled_s = -SAMPLE_S
        # results of the last inspection: pid -> (start and turns of its threads before it, the process)
        self._inspected: dict[int, tuple[tuple[int, dict[int, int]], Process]] = {}
        self._links = LinkReader(socket.gethostname())
        self._inspect_from_s = 0.0  # no inspection of a silence before this time
        self._suspect: frozenset[tuple[int, str, int]] = (
            frozenset()
        )  # of the last inspection: pid, file, line
        self._reported: frozenset[tuple[int, str, int]] = frozenset()
        self._points = tuple(sorted({*self._points, *CHECKS_S}))
        self._poll_s = min(self._poll_s, POLL_S) if options.slow_ms else POLL_S

    def _observe(self, now: float) -> list[RankSample]:
        every = RESCAN_S if now < YOUNG_S else RESCAN_LATER_S
        if now - self._scanned_s >= every or not self._processes:
            self._rescan(now)
            self._scanned_s = now
        rest = 1.0 if self._moves else 2.0
        if now - self._sampled_s >= SAMPLE_S * rest * max(1.0, len(self._processes) / PER_SAMPLE):
            before = [sample.mark for sample in self._samples]
            found = [self._sample_role(now, one) for one in self._processes]
            self._samples = [sample for sample, sure in found if sure] or [sample for sample, _ in found]
            self._fresh, self._moves = True, before != [sample.mark for sample in self._samples]
            self._sampled_s = now
            self._follow_phases(now)
        return self._samples

    def _rescan(self, now: float) -> None:
        """Reads new processes, and for some time those that may change. Later this only lists /proc."""
        new = self._has_new()
        if new or not self._processes:
            self._again = tuple(now + after for after in AGAIN_S)
        elif not self._again or now < self._again[0]:
            return
        else:
            self._again = tuple(at for at in self._again if at > now)
        words = {pid: read_proc(pid, "cmdline") for pid in self._entries}
        same = {pid: e for pid, e in self._entries.items() if words[pid] == self._words.get(pid)}
        if new or len(same) < len(self._entries) or not same:
            self._read_tree(same)
        self._find_boxes()
        self._find_metrics([one for one in self._processes if ENGINE.search(one.title)])

    def _has_new(self) -> bool:
        """Whether a process that may belong to the job has started since the last scan."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        new, self._all = pids - self._all, pids
        mine = {*self._roots, *self._entries}
        stats = [fields for pid in new if len(fields := process_stat(pid)) > 3]
        return any(int(fields[1]) in mine or int(fields[3]) in mine for fields in stats)

    def _read_tree(self, same: dict[int, ProcessEntry]) -> None:
        """Reads the processes of the job and their roles, except the `same` ones."""
        known = {one.pid: one for one in self._processes if one.pid in same}
        self._entries = {one.pid: one for one in find_tree(self._roots, same)}
        self._words = {pid: read_proc(pid, "cmdline") for pid in self._entries}
        bare = [
            Process(e.pid, e.ppid, title=e.title, started_s=float(e.start_ticks))
            for e in self._entries.values()
        ]
        named = give_roles(bare, self._entries, self._rules)
        ours = [one for one in named if not (one.system or one.ours)]
        self._processes = [
            known.get(one.pid, one) for one in ours
        ]  # an inspection knows roles better than titles do

    def _find_boxes(self) -> None:
        entries = self._entries.values()
        folders = {Path(e.environ["ALLRANKS_DIR"]) for e in entries if "ALLRANKS_DIR" in e.environ}
        users = {os.stat(f"/proc/{pid}").st_uid for pid in self._roots}
        starts = {(e.pid, e.start_ticks): e.pid for e in entries}
        boxes = find_boxes(tuple(folders), uids=users)
        self._boxes = {starts[b.pid, b.start_ticks]: b for b in boxes if (b.pid, b.start_ticks) in starts}

    def _find_metrics(self, engines: Sequence[Process]) -> None:
        """Finds the metrics of engines among the ports that they listen on. No other process is queried."""
        new = [one.pid for one in engines if one.pid not in self._ports]
        for pid, links in self._links.read_links(new, {}).items() if new else ():
            ports = [link.end.rsplit(" ", 1)[-1] for link in links if link.kind == "listen"]
            for address in (f"127.0.0.1:{port}" for port in ports[:MAX_PORTS]):
                if address not in self._other_ports and _read_metrics(address) is not None:
                    self._ports[pid] = address
                    break
                self._other_ports.add(address)

    def _sample_role(self, now: float, process: Process) -> tuple[RankSample, bool]:
        """One process as a sample, and whether its signs of progress are certain."""
        pid, number = process.pid, self._numbers.setdefault(process.pid, len(self._numbers))
        done = work_done(pid)
        alive = done.state not in ("", "Z", "X")
        box = self._boxes.get(pid)
        sample = read_sample(box.path) if box is not None else None
        if sample is not None and sample.takes_part:
            return replace(sample, rank=number, pid=pid, alive=alive), True
        address, work = self._ports.get(pid, ""), self._work_of.get(pid, RoleWork())
        metrics = _read_metrics(address) if address else None
        if metrics is not None or not address:  # an engine that does not answer makes no progress
            work = work.after(now, (done.ticks, done.switches), _log_bytes(pid), metrics)
        self._work_of[pid] = work
        calls = work.moves + 1
        start = self._entries[pid].start_ticks if pid in self._entries else 0
        return RankSample(number, pid, "", alive, -1, calls, calls, 0, start, joined=True), work.certain

    def _follow_phases(self, now: float) -> None:
        """Reports a phase of a role that lasts much longer than usual."""
        names = {one.pid: one.role for one in self._processes}
        phases = {pid: (names[pid], self._phase(box)) for pid, box in self._boxes.items() if pid in names}
        self._phases, lines = self._phases.after(now, phases).unusual(now)
        for line in lines:
            self._say(line)

    def _phase(self, box: LiveBox) -> str:
        head = find_header(box.path)
        if head is None or not head.phase:
            return ""
        key = (str(box.path), head.phase)
        if key not in self._phase_names:
            try:
                self._phase_names[key] = read_trace(box.path).progress.phase
            except AllranksError:
                return ""
        return self._phase_names[key]

    def _decide(self, now: float, samples: list[RankSample]) -> str:
        if not self._points:
            self._points = (now + CHECK_EVERY_S,)
        if not (self._fresh or self.options.slow_ms or now >= self._points[0]):
            return ""
        self._fresh = False
        reason = super()._decide(now, samples)
        if reason.startswith("no progress") and now < self._inspect_from_s:
            self._stalls = 0
            return ""
        return reason

    def _collect(self, reason: str) -> None:
        """Inspects all processes; reports when they are stuck, or on request."""
        look = self._inspect()
        self._processes = [one for one in look.processes if not (one.system or one.ours) and one.alive]
        finding = explain_processes(look)
        now, silent = time.monotonic() - self._began_s, reason.startswith("no progress")
        pause = INSPECT_AGAIN_S if now < YOUNG_S else min(MAX_INSPECT_AGAIN_S, now / 4)
        self._inspect_from_s, self._stalls = now + pause, 0
        suspect = frozenset((one.pid, one.file, one.line) for one in finding.guilty)
        agree, self._suspect = suspect == self._suspect, suspect
        if reason == "asked for" and finding.state != "stuck":
            self._say(f"{finding.state}: {finding.sentence}")
        elif finding.state == "stuck" and not (silent or agree or reason == "asked for"):
            self._points = tuple(sorted((*self._points, now + AGREE_S)))
        elif finding.state == "stuck" and suspect != self._reported:
            self._reported = suspect
            self._report(reason, finding, look)
        elif finding.state == "moving":
            self._reported = frozenset()

    def _inspect(self) -> JobLook:
        """Inspects all processes, except those that have not run since the last inspection."""
        entries = find_tree(self._roots, self._entries)
        turns = {one.pid: (one.start_ticks, turns_of_threads(one.pid)) for one in entries}
        same = (pid for pid, (before, _) in self._inspected.items() if before[1] and turns.get(pid) == before)
        known = {pid: self._inspected[pid][1] for pid in same}
        options = LookOptions(self.options.interval_s, rules=self._rules, known=known, links=self._links)
        look = look_at_processes(entries, options)
        self._inspected = {
            one.pid: (turns[one.pid], one) for one in look.processes if one.pid in turns and is_settled(one)
        }
        return look

    def _report(self, reason: str, finding: ProcessFinding, look: JobLook) -> None:
        folder = self.folder / f"{time.strftime('%Y%m%d-%H%M%S')}-roles"
        write_look(look, folder)  # for `allranks stacks FOLDER …`
        (folder / "finding.json").write_text(json.dumps({"reason": reason, **asdict(finding)}, indent=1))
        self._on_report(RoleReport(reason, folder, finding))
        if self._commands:
            self._restart(finding)

    def _restart(self, finding: ProcessFinding) -> None:
        """Runs the role's restart command, and reports its exit code."""
        now = time.monotonic()
        role, why = choose_restart(finding, self._commands, self._restarts, now)
        if not role:
            self._say(f"no restart: {why}")
            return
        self._restarts.append((role, now))
        words = self._commands[role]
        env = {**os.environ, "ALLRANKS_ROLE": role, "ALLRANKS_PID": str(finding.guilty[0].pid)}
        try:
            done = subprocess.run(words, env=env, timeout=RESTART_LIMIT_S, check=False).returncode
            self._say(f"{why}: `{shlex.join(words)}` ended with exit code {done}")
        except (OSError, subprocess.TimeoutExpired) as error:
            self._say(f"{why}: `{shlex.join(words)}` failed: {error}")


def _read_metrics(address: str) -> EngineMetrics | None:
    try:
        answer = web_client.get(address, "/metrics", METRICS_LIMIT_S)
    except (OSError, AllranksError):
        return None
    return parse_metrics(answer.body.decode("utf-8", "replace")) if answer.status == 200 else None


def _log_bytes(pid: int) -> int:
    """Size of the files that hold the output of a process; 0 for a terminal or a pipe."""
    total = 0
    for fd in (1, 2):
        try:
            facts = os.stat(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        total += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return total
