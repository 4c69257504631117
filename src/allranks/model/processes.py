"""The processes of a job and what each thread of theirs waits for, from one look of some seconds.

Pure data. `stacks` fills a `JobLook` from live processes or from bundles; `diagnose.processes` says from it who waits for
whom. A job may hold several worlds of ranks: a process is known by its node and pid, never by its rank alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from allranks.model.stacks import StackFrame

#: What a thread can do. `idle`: waits for its next work; `work`: is in code that waits for no other process.
KINDS = (
    *(
        "idle",
        "work",
        "sleep",
        "stopped",
        "device",
        "stdin",
        "lock",
        "thread",
        "event",
        "queue",
        "child",
        "socket",
    ),
    *("answer", "pipe", "collective", "rendezvous", "store", "ray", "file_lock", "poll", "open", "connect"),
)
#: (node, pid): a process of a job.
Where = tuple[str, int]


@dataclass(frozen=True)
class ProcessLink:
    """One end of a connection, pipe or shared semaphore. Two ends belong together when `peer` of one is `end` of the other."""

    fd: int
    kind: str  # "tcp", "listen", "unix", "pipe", "shared"
    end: str
    peer: str
    side: str = ""  # tcp: "client" or "server"; pipe: "read" or "write"
    turn: str = ""  # tcp: "awaits" (we sent last), "owes" (the other end sent last), "" unknown
    moved: bool = False  # bytes moved while we looked
    owner: str = ""  # "gloo 23", "zmq 7": the library whose thread watches it, and in which set
    volume: int = 0  # bytes so far, both ways


@dataclass(frozen=True)
class WaitFor:
    """What one thread waits for, as far as the thread itself tells."""

    kind: str  # one of KINDS
    says: str = ""  # "waits for a lock": for people
    key: str = ""  # identity inside the process: address of the lock, queue, condition or thread
    lock: str = ""  # the lock's name in the source: "self.lock_kv"
    ends: tuple[str, ...] = ()  # own ends of the links that it waits on
    pids: tuple[int, ...] = ()  # processes of this node that it waits for
    lost: str = ""  # the function that would end it ran beside others, and does not any more
    path: str = ""  # the FIFO that it opens
    setters: tuple[str, ...] = ()  # functions of its file that would end the wait
    tids: tuple[int, ...] = ()  # threads of this process that it waits for
    left_s: float | None = None  # a wait that ends by itself: after so many seconds
    strong: bool = True  # False: a helper's wait, which tells little
    operation: str = ""


@dataclass(frozen=True)
class ThreadLook:
    """One thread, or one suspended task of an event loop (`task`), over the whole look."""

    tid: int
    name: str
    wait: WaitFor
    frames: tuple[StackFrame, ...] = ()  # innermost first
    main: bool = False
    task: bool = False
    moved: bool = False  # other lines, CPU time, or many context switches while we looked
    busy: bool = False  # it ran most of the time
    holds: tuple[str, ...] = ()  # locks that its frames stand inside of, by their names in the source
    handles: bool = False  # it serves a request
    thread_key: str = ""  # address of the Thread object that it runs
    user: StackFrame | None = None  # the innermost line of the user's own code
    later: tuple[str, ...] = ()  # names of FIFOs of the job that its function still mentions

    @property
    def at(self) -> str:
        """ "reward.py:41 in judge"; "" without a line of the user's own."""
        user = self.user
        return f"{user.file.rsplit('/', 1)[-1]}:{user.line} in {user.name.rsplit('.', 1)[-1]}" if user else ""


@dataclass(frozen=True)
class GroupCall:
    """The newest call of a process in one of its process groups, from its black box."""

    key: str  # of the group: where its members meet, and its name
    name: str  # of the group, for people
    op: str
    number: int  # in the group
    open: bool  # it has begun and not ended


@dataclass(frozen=True)
class Process:
    """One process of a job. `role` is for people ("rollout engine"), `number` tells those of one role apart."""

    pid: int
    ppid: int = 0
    node: str = ""
    title: str = ""
    role: str = "process"
    number: int | None = None
    group: str = ""  # of the ranks of a world: "actor"
    rank: int | None = None
    world: int | None = None
    threads: tuple[ThreadLook, ...] = ()
    links: tuple[ProcessLink, ...] = ()
    calls: tuple[GroupCall, ...] = ()  # of a recorded process
    ticks: int = 0  # CPU time during the look, in clock ticks
    switches: int = 0  # context switches of the main thread during the look
    alive: bool = True
    ended: str = ""  # how a dead one ended, where that is known
    started_s: float = 0.0  # since the machine started
    read: bool = True  # its stacks could be read
    ours: bool = False  # a helper of allranks
    system: bool = False  # belongs to the framework, not to the job: raylet, resource tracker
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> Where:
        return self.node, self.pid

    @property
    def does(self) -> tuple[str, str]:
        """What it does, and at which line: as its thread that tells most."""
        if not self.alive:
            return f"has ended {self.ended}".strip(), ""
        if not self.threads:
            return "not read" if self.read else "is not Python", ""
        one = min(
            self.threads,
            key=lambda t: (t.wait.kind == "idle" or not t.wait.strong, not t.handles, not t.main),
        )
        return one.wait.says, one.at

    @property
    def name(self) -> str:
        """`rollout engine 2`."""
        group = f" of {self.group}" if self.group else ""
        return f"{self.role}{'' if self.number is None else f' {self.number}'}{group}"


@dataclass(frozen=True)
class JobLook:
    """A job as it was seen for `seconds`, on one node or joined from several."""

    processes: tuple[Process, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Guilty:
    """A process that must move first, and where it is."""

    pid: int
    role: str
    file: str = ""
    line: int = 0
    function: str = ""
    wait: str | None = None
    node: str = ""


@dataclass(frozen=True)
class ChainLink:
    """Processes that wait alike, and for what."""

    role: str
    pids: tuple[int, ...]
    waits_for: str
    at: str = ""


@dataclass(frozen=True)
class ProcessFinding:
    """The answer for a job of several processes."""

    state: Literal["stuck", "moving", "unclear"]
    sentence: str
    guilty: tuple[Guilty, ...] = ()
    chain: tuple[ChainLink, ...] = ()  # from the guilty one outwards
    edges: tuple[tuple[Where, Where], ...] = ()  # which process waits for which
    reason: str = ""  # what shows it, or what would decide it
    notes: tuple[str, ...] = field(default=())
