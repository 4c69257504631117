"""Looks at all processes of a job for some seconds: who they are, what each thread waits for, and whether it moves.

Runs outside the job. Reads only processes of the job's own user that belong to the given trees; stops none. py-spy is asked
once for every Python process, and again only for those that ran meanwhile.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from allranks.blackbox.header import process_stat
from allranks.errors import InputError
from allranks.model.parsing import from_json
from allranks.model.stacks import (
    GroupCall,
    JobLook,
    Process,
    ProcessCapture,
    ProcessLink,
    Snapshot,
    ThreadFacts,
    ThreadLook,
    ThreadStack,
    is_user_file,
)
from allranks.stacktraces import debuggers, ray_state, source
from allranks.stacktraces.asked import Surroundings, Task
from allranks.stacktraces.boxes import group_calls
from allranks.stacktraces.collect import SourceLines
from allranks.stacktraces.extras import FileLocks, file_locks, read_extras
from allranks.stacktraces.find import Selection, find_targets
from allranks.stacktraces.links import LinkReader
from allranks.stacktraces.patterns import load_patterns
from allranks.stacktraces.procfs import (
    PROC,
    ProcessEntry,
    Work,
    facts_of,
    open_files,
    read_entry,
    read_facts,
    read_proc,
    renumber,
    work_done,
)
from allranks.stacktraces.roles import RoleRule, give_roles, load_roles
from allranks.stacktraces.tasks import read_tasks
from allranks.stacktraces.variables import Variables, counted, read_variables
from allranks.stacktraces.views import Children, view_process
from allranks.stacktraces.waits import look_at_threads

LOOK = "processes.json"
MANY = 48  # processes; of more, those that look alike from outside are sampled
ALIKE = 4  # of each kind
WORKERS = 4  # runs of py-spy at a time
JOINS = ("init_process_group",)
LOOPS = ("asyncio/base_events.py", "asyncio/runners.py", "uvicorn/server.py")


@dataclass(frozen=True)
class LookOptions:
    """How long to look, and how often."""

    for_s: float = 5.0
    rounds: int = 3
    rules: tuple[RoleRule, ...] = ()
    # of an earlier look, and has not run since: its threads are as they were
    known: Mapping[int, Process] = field(default_factory=dict)
    links: LinkReader | None = None  # that of the earlier looks


def find_tree(pids: Sequence[int], known: Mapping[int, ProcessEntry] | None = None) -> list[ProcessEntry]:
    """These processes and all below them, of the same user; never our own. `known` ones are not read again."""
    parents: dict[int, list[int]] = {}
    same: dict[int, ProcessEntry] = {}
    for name in os.listdir(PROC):
        fields = process_stat(int(name)) if name.isdigit() else []
        if len(fields) > 19:
            if known and (one := known.get(int(name))) and one.start_ticks == int(fields[19]):
                same[one.pid] = one
            for above in {int(fields[1]), int(fields[3])}:  # its parent; the leader of its session
                parents.setdefault(above, []).append(int(name))
    users = {_owner(pid) for pid in pids} - {-1}
    if not users:
        raise InputError(f"process {', '.join(map(str, pids))} does not exist on {socket.gethostname()}")
    found: dict[int, ProcessEntry] = {}
    for later in (False, True):
        todo = _detached(found, parents, users) if later else list(pids)
        while todo:
            pid = todo.pop(0)
            if pid in found or pid == os.getpid() or _owner(pid) not in users:
                continue
            if (entry := same.get(pid) or read_entry(pid)) is not None:
                found[pid] = entry
                todo += parents.get(pid, [])
    return list(found.values())


def _detached(
    found: Mapping[int, ProcessEntry], parents: Mapping[int, Sequence[int]], users: set[int]
) -> list[int]:
    """Processes of the same user outside the tree that it is connected with, or that write into a pipe that it reads: those
    that have left it, whose parent now is one above it, or were started beside it."""
    above, pid = {1}, next(iter(found), 0)
    while pid > 1:
        fields = process_stat(pid)
        pid = int(fields[1]) if len(fields) > 1 else 0
        above.add(pid)
    beside = {one for pid in above for one in parents.get(pid, ())} - above - found.keys() - {os.getpid()}
    others = [one for one in beside if _owner(one) in users]
    links = LinkReader("").read_links([*found, *others], {}) if others else {}
    mine = (link for pid in found for link in links.get(pid, ()))
    ends = {one.end for one in mine if one.kind != "pipe" or (one.side == "read" and one.fd)}
    return [one for one in others if any(link.peer in ends for link in links[one])]


def only_roles() -> bool:
    """Whether this node has processes with roles of this user, and no rank but what a title of Ray seems to be."""
    try:
        ranks = find_targets(Selection())
    except InputError:
        ranks = []
    plain = [
        one
        for one in ranks
        if one.child is None and (one.box is not None or not one.title.startswith("ray::"))
    ]
    return not plain and bool(find_roots())


def find_roots(ray: bool = False) -> list[int]:
    """The first processes of the jobs of this user that a role's title tells: engines, servers, actors of Ray; `ray`: only
    those of Ray. A driver that joined a running Ray is known by the session's log that it has open."""
    titles = ("ray::", "sglang::", "VLLM::", "vllm::")
    mine = [int(name) for name in os.listdir(PROC) if name.isdigit() and _owner(int(name)) == os.geteuid()]
    shown = {pid: read_proc(pid, "cmdline").replace("\0", " ") for pid in mine}
    found = [pid for pid, title in shown.items() if title.startswith(titles[:1] if ray else titles)]
    sessions = {match[1] for title in shown.values() if (match := _SESSION.search(title))}
    tops = {_top(pid, shown) for pid in found}
    tops |= {pid for pid in mine if "python" in shown[pid] and _joined(pid, sessions)}
    return sorted(tops - {os.getpid()})


_SESSION = re.compile(r"(/\S*/ray/session_[\w-]+)/sockets/raylet|--session-dir=(\S+)")


def _joined(pid: int, sessions: set[str]) -> bool:
    """Whether a process writes into the log folder of a session of Ray as a driver."""
    files = open_files(pid) or set()
    return any("/logs/python-core-driver" in file and file.split("/logs/")[0] in sessions for file in files)


def _top(pid: int, shown: Mapping[int, str]) -> int:
    """The first Python process above, of the same user; a shell or a service manager is not part of the job."""
    while True:
        fields = read_proc(pid, "stat").rsplit(")", 1)[-1].split()
        above = int(fields[1]) if len(fields) > 1 else 0
        if above not in shown or not re.search(
            r"python|raylet|^(sglang|VLLM|vllm|ray)::", shown[above].split(" ")[0]
        ):
            return pid
        pid = above


def write_look(look: JobLook, folder: Path) -> Path:
    """Keeps a look in a folder, to be joined with those of other nodes."""
    path = folder / LOOK
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(look))
    return path


def read_looks(folders: Sequence[str | Path]) -> JobLook:
    """The looks of several nodes as one: links are joined by their addresses. Of a process in two of them the later one."""
    looks = []
    for folder in folders:
        for path in sorted(Path(folder).rglob(LOOK)):
            try:
                looks.append(from_json(path.read_bytes(), JobLook))
            except (OSError, msgspec.MsgspecError) as error:
                raise InputError(f"cannot read {path}: {error}") from error
    if not looks:
        raise InputError(f"no {LOOK} in {', '.join(map(str, folders))}")
    notes = tuple(dict.fromkeys(note for look in looks for note in look.notes))
    return JobLook(
        tuple({p.where: p for look in looks for p in look.processes}.values()),
        min(look.seconds for look in looks),
        notes,
        tuple(dict.fromkeys(task for look in looks for task in look.tasks)),
    )


def _owner(pid: int) -> int:
    try:
        return os.stat(PROC / str(pid)).st_uid
    except OSError:
        return -1


def look_at_processes(entries: Sequence[ProcessEntry], options: LookOptions) -> JobLook:
    """What these processes do for `for_s` seconds."""
    look = TreeLook(entries, options)
    for number in range(options.rounds):
        pause = look.began + options.for_s * number / max(1, options.rounds - 1) - time.monotonic()
        time.sleep(max(0.0, pause))
        look.sample()
    return look.finish()


def is_settled(process: Process) -> bool:
    """Whether what it waits for changes only when it runs: a sleep gets shorter, and a lock on a file changes its holder."""
    waits = [one.wait for one in process.threads]
    return process.alive and not any(one.left_s is not None or one.kind == "file_lock" for one in waits)


@dataclass
class _Case:
    """One process while it is sampled."""

    entry: ProcessEntry
    python: bool
    snapshots: list[Snapshot] = field(default_factory=list)
    variables: dict[int, Variables] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)  # threads in a loop around which a number has changed
    inner: dict[int, int] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)
    ended: bool = False
    exit: str = ""
    tasks: list[Task] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class TreeLook:
    """One look, while it is taken: `sample` at its begin and its end, then `finish`."""

    def __init__(self, entries: Sequence[ProcessEntry], options: LookOptions) -> None:
        self.options = options
        self.began = time.monotonic()
        self.rounds = 0
        self.node = socket.gethostname()
        self.pyspy = debuggers.find_pyspy() or ""
        self.cases = {e.pid: _Case(e, e.python and e.state not in "ZX") for e in entries}
        self.sources = SourceLines()
        self.links = options.links or LinkReader(self.node)
        self.volumes: dict[str, int] = {}

    def sample(self) -> None:
        """One round: counters of all, stacks and facts of those that ran since the last one."""
        moved = [case for case in self.cases.values() if self._count(case)]
        if self.rounds == 0:
            self.volumes = self.links.read_volumes(list(self.cases))
            cases = self.cases.items()
            moved = choose_typical([case for pid, case in cases if pid not in self.options.known])
        self.rounds += 1
        with ThreadPoolExecutor(WORKERS, "allranks-stacks") as pool:
            list(pool.map(self._read, (case for case in moved if not case.ended)))

    def _count(self, case: _Case) -> bool:
        """Reads how much a process has run; whether that is more than before."""
        done = work_done(case.entry.pid)
        if done.start_ticks != case.entry.start_ticks:
            case.ended = True
            return False
        if done.state in "ZX":
            case.ended = True
            case.exit = how_ended(done.ended)
        case.work.append(done)
        return len(case.work) > 1 and case.work[-1] != case.work[-2]

    def _read(self, case: _Case) -> None:
        stacks = self._stacks(case) if self.pyspy and case.python else ()
        if stacks or not case.snapshots:
            case.snapshots.append(
                Snapshot(len(case.snapshots), time.time(), stacks, self._facts(case, stacks))
            )

    def _stacks(self, case: _Case) -> tuple[ThreadStack, ...]:
        run, before = debuggers.run_pyspy(self.pyspy, case.entry.pid, variables=True), case.variables
        try:
            stacks = debuggers.parse_json(run.output) if not run.problem else ()
            case.variables = read_variables(run.output) if stacks else before
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            stacks, run = (), replace(run, problem=f"py-spy printed something unreadable: {str(error)[:100]}")
        if run.problem and run.problem not in case.notes:
            case.notes.append(run.problem)
        found = self.sources.attach(stacks, case.entry.pid)
        case.counted |= counted(found, before, case.variables)
        return found

    def _facts(self, case: _Case, stacks: Iterable[ThreadStack]) -> tuple[ThreadFacts, ...]:
        inside = case.entry.inner_pid not in (0, case.entry.pid)
        only = None if inside else {one.tid for one in stacks if one.tid}
        try:
            facts = facts_of(read_facts(case.entry.pid, only))
        except OSError:
            case.ended = True
            return ()
        case.inner.update(facts.inner)
        return facts.threads

    def finish(self) -> JobLook:
        """Reads what belongs to the last moment, and puts all together."""
        seconds = time.monotonic() - self.began
        alive = [pid for pid, case in self.cases.items() if not case.ended]
        links = self.links.read_links(alive, self.volumes)
        locks = file_locks()
        children: dict[int, list[int]] = {}
        for case in self.cases.values():
            children.setdefault(case.entry.ppid, []).append(case.entry.pid)
        found = [
            self._process(case, links.get(pid, ()), locks, tuple(children.get(pid, ())))
            for pid, case in self.cases.items()
        ]
        rules = self.options.rules or load_roles()
        entries = {pid: case.entry for pid, case in self.cases.items()}
        tasks, note = ray_state.read_tasks(entries.values(), found)
        found = ray_state.with_tasks(found, tasks) if tasks else found
        found += ray_state.ended_actors(entries.values(), self.node)
        named = give_roles(self._with_later(found), entries, rules)
        return JobLook(named, seconds, (*self._notes(), *([note] if note else [])), tasks)

    def _with_later(self, processes: list[Process]) -> list[Process]:
        """Marks threads that would open a FIFO, or join a group, that another one waits for, or have called what it waits for."""
        waits = [t.wait for p in processes for t in p.threads]
        names = {wait.path.rsplit("/", 1)[-1] for wait in waits if wait.kind == "open"}
        joins = any(wait.kind == "rendezvous" for wait in waits)
        calls = {one for p in processes for t in p.threads if t.handles for one in t.wait.setters}
        if not names and not joins and not calls:
            return processes
        return [
            replace(
                p,
                threads=tuple(
                    replace(t, later=self._later(p.pid, t, names, joins), sent=self._sent(p.pid, t, calls))
                    for t in p.threads
                ),
            )
            for p in processes
        ]

    def _sent(self, pid: int, thread: ThreadLook, calls: set[str]) -> tuple[str, ...]:
        user = thread.user
        text = self.sources.text(user.file, pid) if user is not None and calls else ""
        return tuple(n for n in calls if user is not None and source.calls_before(text, user.line, n))

    def _later(self, pid: int, thread: ThreadLook, names: set[str], joins: bool) -> tuple[str, ...]:
        """Of these FIFOs those that its function still mentions; the call that joins a group, if it is ahead of any frame."""
        places = [(self.sources.text(f.file, pid), f.line) for f in thread.frames if is_user_file(f.file)]
        found = [n for n in names if places and source.mentions_later(*places[0], n)]
        return (*found, *(one for one in JOINS if joins and any(source.calls_later(*p, one) for p in places)))

    def _process(
        self,
        case: _Case,
        links: tuple[ProcessLink, ...],
        locks: FileLocks,
        children: tuple[int, ...],
    ) -> Process:
        entry = case.entry
        first, last = (case.work[0], case.work[-1]) if case.work else (Work(), Work())
        known = None if case.snapshots or case.ended else self.options.known.get(entry.pid)
        threads = self._threads(case, links, locks, children) if case.snapshots and not case.ended else ()
        threads = known.threads if known is not None else threads
        read = known.read if known is not None else any(shot.stacks for shot in case.snapshots)
        if case.python and not read:
            threads = tuple(_unread(thread) for thread in threads)
        # what a rank starts has its environment, too
        environ = entry.environ if entry.python else {}
        ranks = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
        calls = group_calls(entry.pid) if case.python and not case.ended and known is None else ()
        calls = known.calls if known is not None else calls
        open_ = next((one for one in calls if one.open), None)
        if open_ is not None:
            threads = tuple(_in_call(thread, open_) for thread in threads)
        return Process(
            pid=entry.pid,
            ppid=entry.ppid,
            node=self.node,
            title=entry.title or entry.comm,
            rank=int(ranks["RANK"]) if ranks["RANK"].isdigit() else None,
            world=int(ranks["WORLD_SIZE"]) if ranks["WORLD_SIZE"].isdigit() else None,
            threads=threads,
            links=links,
            calls=calls,
            ticks=last.ticks - first.ticks,
            switches=last.switches - first.switches,
            alive=not case.ended,
            ended=case.exit,
            started_s=entry.start_ticks / os.sysconf("SC_CLK_TCK"),
            read=read,
            notes=known.notes if known is not None else tuple(case.notes),
        )

    def _threads(
        self,
        case: _Case,
        links: tuple[ProcessLink, ...],
        locks: FileLocks,
        children: tuple[int, ...],
    ) -> tuple[ThreadLook, ...]:
        entry = case.entry
        shots = [replace(s, stacks=renumber(s.stacks, case.inner)) for s in case.snapshots]
        # counters of the last moment
        shots.append(replace(shots[-1], facts=self._facts(case, shots[-1].stacks)))
        known = {case.inner.get(tid, tid): value for tid, value in case.variables.items()}
        extras = read_extras(entry.pid, {f.tid: f for f in shots[-1].facts if f.syscall}, known, locks)
        capture = ProcessCapture(0, None, entry.pid, self.node, entry.title, tuple(shots))
        around = Surroundings(
            view=view_process(capture, Children(bool(children), bool(children))),
            patterns=load_patterns(),
            links={link.fd: link for link in links},
            text=lambda file: self.sources.text(file, entry.pid),
            children=children,
            first=frozenset(f.tid for f in shots[0].facts) | {one.tid for one in shots[0].stacks if one.tid},
            extras=extras,
            lockers=tuple(
                {one for pids in locks.held.values() for one in pids} & self.cases.keys() - {entry.pid}
            ),
            counted=frozenset(case.inner.get(tid, tid) for tid in case.counted),
            seconds=time.time() - (shots[0].at_s or time.time()),
        )
        frames = (frame for one in shots[-1].stacks for frame in one.frames)
        loops = any(frame.file.endswith(LOOPS) for frame in frames) or "/uvloop/" in read_proc(
            entry.pid, "maps"
        )
        return look_at_threads(around, read_tasks(entry.pid) if loops else ())

    def _notes(self) -> tuple[str, ...]:
        """One line for what kept us from looking, however many processes it concerns."""
        problems: dict[str, list[int]] = {}
        for pid, case in self.cases.items():
            for note in case.notes if not case.ended else ():
                problems.setdefault(note.replace(str(pid), "PID"), []).append(pid)
        lines = [
            f"{len(pids)} processes ({', '.join(map(str, pids[:5]))}{' …' if len(pids) > 5 else ''}): {text}"
            for text, pids in problems.items()
        ]
        return (
            *lines,
            *(() if self.pyspy else ("py-spy was not found: only /proc was read. pip install py-spy",)),
        )


def _unread(thread: ThreadLook) -> ThreadLook:
    """A thread of Python without its frames: where the kernel does not name its wait, nothing is known of it."""
    unknown = replace(thread.wait, kind="unread", says="could not be read")
    return replace(thread, wait=unknown) if thread.wait.kind == "work" else thread


def _in_call(thread: ThreadLook, call: GroupCall) -> ThreadLook:
    """A thread in a collective, or in a wait for the device, with the call that its black box names."""
    if thread.wait.kind not in ("collective", "device"):
        return thread
    says = f"waits in {call.op} #{call.number} of group {call.name or 'without a name'}"
    return replace(thread, wait=replace(thread.wait, says=says, operation=call.op))


def how_ended(status: int) -> str:
    """What /proc says of a process that has ended and was not waited for; "" for a clean end."""
    if status & 127:
        return f"killed by {signal.Signals(status & 127).name}"
    return f"exit code {status >> 8}" if status else ""


def _kind(entry: ProcessEntry) -> tuple[object, ...]:
    """What processes that look alike from outside have in common."""
    words = read_proc(entry.pid, "syscall").split()[:1]
    return entry.ppid, re.sub(r"\d+", "#", entry.title[:200]), *words, read_proc(entry.pid, "wchan")


def choose_typical(cases: list[_Case]) -> list[_Case]:
    """All, or of many some of each kind: 200 workers that wait alike need not all be read."""
    if len(cases) <= MANY:
        return cases
    kinds: dict[tuple[object, ...], list[_Case]] = {}
    for case in cases:
        kinds.setdefault(_kind(case.entry), []).append(case)
    return [case for group in kinds.values() for case in group[:ALIKE]]
