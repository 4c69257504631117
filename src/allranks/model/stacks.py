"""Stacks, kernel facts and progress marks of ranks, or of all processes of a job with roles, and their interpretation.

Pure data. `stacktraces` creates a `Capture` or a `JobLook` from live processes or files; `diagnosis`, `report` and the agent
read them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

#: Causes of a rank's wait. The names are public (docs/reference/json.md).
CAUSES = (
    *("collective_wait", "p2p_wait", "rendezvous_wait", "store_wait", "dataloader_wait"),
    *("checkpoint_io", "file_lock_wait", "network_io", "lock_deadlock", "queue_wait"),
    *("gil_held_native", "gil_contention", "native_call", "cuda_wait", "cuda_kernel", "busy_python"),
    "sleep",
    *("subprocess_wait", "child_process_wait", "event_loop_idle", "request_wait"),
    *("pipe_write_blocked", "stdin_wait", "shutdown_join", "stopped", "d_state", "slow"),
    *("healthy", "unknown"),
)

#: Waits for other ranks or for the device.
WAITS = frozenset({"collective_wait", "p2p_wait", "store_wait", "rendezvous_wait", "cuda_wait"})

#: The activity of a rank, as part of a sentence.
VERBS = {
    "sleep": "sleeps",
    "collective_wait": "waits",
    "p2p_wait": "waits for its partner",
    "rendezvous_wait": "waits for its group",
    "store_wait": "waits for a store key",
    "dataloader_wait": "waits for its DataLoader",
    "checkpoint_io": "is stuck in file I/O",
    "file_lock_wait": "waits for a file lock",
    "network_io": "waits for the network",
    "lock_deadlock": "waits for a lock",
    "queue_wait": "waits on a queue",
    "gil_held_native": "holds the GIL in C code",
    "gil_contention": "waits for the GIL",
    "native_call": "is inside native code",
    "cuda_wait": "waits for the device",
    "cuda_kernel": "runs a device kernel that does not end",
    "busy_python": "loops in Python",
    "subprocess_wait": "waits for a command",
    "child_process_wait": "waits for a child process",
    "event_loop_idle": "sits in an idle event loop",
    "request_wait": "waits for a request",
    "pipe_write_blocked": "writes to a full pipe",
    "stdin_wait": "waits for input",
    "shutdown_join": "is exiting and joins threads",
    "stopped": "is stopped",
    "d_state": "is in uninterruptible sleep",
    "slow": "is slow",
    "healthy": "makes progress",
    "unknown": "does something unknown",
}
#: The same for a rank that may still make progress.
PLAIN_VERBS = {
    **VERBS,
    "busy_python": "runs Python code",
    "queue_wait": "waits for an event",
    "event_loop_idle": "waits in its event loop",
    "checkpoint_io": "reads or writes a file",
}

#: Causes of child processes that wait for work, so that their rank does not wait for them.
IDLE_CHILD = frozenset({"queue_wait", "healthy", "request_wait"})


@dataclass(frozen=True)
class StackFrame:
    """One line of a stack. `native` frames are C or C++ symbols; their `file` is a source file or a library."""

    name: str
    file: str
    line: int = 0
    native: bool = False
    source: str = ""  # Python: the text of the line, if readable; native: the library


@dataclass(frozen=True)
class ThreadStack:
    """One thread's stack, innermost frame first. None means unknown."""

    tid: int | None
    name: str
    frames: tuple[StackFrame, ...]
    active: bool | None = None  # running on a CPU when sampled
    owns_gil: bool | None = None


@dataclass(frozen=True)
class ThreadFacts:
    """The kernel's information about one thread."""

    tid: int
    comm: str = ""
    state: str = ""  # one letter: R S D T t Z X
    wchan: str = ""
    syscall: str = ""  # name, "running", or "" when unreadable
    args: tuple[int, ...] = ()
    ticks: int = 0  # user + system clock ticks since the start of the thread
    kernel_stack: tuple[str, ...] = ()  # function names, innermost first
    mutex_owner: int | None = None  # the thread that holds the native mutex that this one waits for
    switches: int = 0  # context switches since the start of the thread
    wait_s: float | None = None  # timeout of its system call; -1: none, None: unknown
    ended: int | None = None  # wait status of a zombie
    file: str = ""  # what the call waits on: "pipe:[7]", "socket:[8]"; "epoll 3": three descriptors

    @property
    def left_s(self) -> float | None:
        """Seconds until its system call ends by itself; None: never, unknown, or only the timeout of one of many tries."""
        flags = self.args[1] if len(self.args) > 1 else 0
        sleeps = self.syscall == "clock_nanosleep" and flags & 1
        sleeps |= self.syscall == "pselect6" and not any(self.args[:4])  # time.sleep() in Python 3.10
        absolute = sleeps or (self.syscall == "futex" and flags & 0x7F == 9)
        return self.wait_s if absolute and self.wait_s is not None and self.wait_s >= 0 else None


@dataclass(frozen=True)
class Snapshot:
    """One sample of a process. `at_s` is epoch seconds, None if unknown."""

    number: int
    at_s: float | None = None
    stacks: tuple[ThreadStack, ...] = ()
    facts: tuple[ThreadFacts, ...] = ()


@dataclass(frozen=True)
class ProcessCapture:
    """The collected data of one process. `child` is None for the rank itself, else counts from 0."""

    rank: int
    child: int | None = None
    pid: int | None = None
    host: str = ""
    title: str = ""
    snapshots: tuple[Snapshot, ...] = ()
    native: tuple[ThreadStack, ...] = ()  # stacks with native frames, from a slower sample
    kernels: tuple[str, ...] = ()  # device kernels from cuda-gdb
    notes: tuple[str, ...] = ()  # what could not be collected, with the reason
    parallel: tuple[tuple[str, int], ...] = ()  # ("tp", 0), ("pp", 1) from the process title

    @property
    def is_helper(self) -> bool:
        """Whether it is a helper process of allranks, and not a fork of the rank."""
        return self.child is not None and " -m allranks." in self.title and ".launch." not in self.title


@dataclass(frozen=True)
class Mark:
    """One progress mark of a rank. `calls` counts completed collectives, -1 unknown."""

    at_s: float
    step: int
    phase: str = ""
    calls: int = -1


@dataclass(frozen=True)
class RankMarks:
    """The marks of one rank in time order. `seen_s`: time of the last sample; None if unknown."""

    rank: int
    marks: tuple[Mark, ...] = ()
    seen_s: float | None = None
    expect_until_s: float = 0.0  # no progress is expected until then
    closed: str = ""  # how the rank shut down, "" while running


@dataclass(frozen=True)
class RasReply:
    """One answer of NCCL's RAS service."""

    address: str
    at_s: float
    text: str


@dataclass(frozen=True)
class Capture:
    """One collection of a whole job; several nodes are joined."""

    processes: tuple[ProcessCapture, ...] = ()
    marks: tuple[RankMarks, ...] = ()
    ras: tuple[RasReply, ...] = ()
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    path: str = ""


@dataclass(frozen=True)
class ChildState:
    child: int
    pid: int | None
    cause: str
    where: str
    evidence: str


@dataclass(frozen=True)
class RankState:
    """What one rank is doing. `where` is the user's line: "data.py:31 in load_batch"."""

    rank: int
    cause: str
    where: str
    evidence: str
    children: tuple[ChildState, ...] = ()
    threads: int = 0
    operation: str = ""  # the collective or library call in which it waits: "all_reduce"
    thread: str = ""  # the thread that decided the cause, if it is not the main one
    stack: tuple[StackFrame, ...] = ()  # of the deciding thread, innermost first
    host: str = ""
    pid: int | None = None
    confidence: float = 0.0
    notes: tuple[str, ...] = ()
    held_by: int | None = None  # the rank that holds the lock on a file for which it waits

    @property
    def command_works(self) -> bool:
        """Whether it waits for a command, such as a compiler, that uses CPU time."""
        waits = self.cause in ("subprocess_wait", "child_process_wait")
        return waits and any(child.cause == "busy_python" for child in self.children)


@dataclass(frozen=True)
class StacksReport:
    """The result for a whole job. `hung` is None if unknown."""

    hung: bool | None
    culprits: tuple[int, ...]
    sentence: str
    ranks: dict[int, RankState] = field(default_factory=dict)
    reason: str = ""  # why `hung` is what it is
    notes: tuple[str, ...] = ()
    ras: tuple[str, ...] = ()  # reports of NCCL RAS, one sentence each

    @property
    def status(self) -> Literal["ok", "fault", "unclear"]:
        """The status as in a Diagnosis."""
        if self.hung is None:
            return "unclear"
        return "fault" if self.hung else "ok"


INSTALLED = ("/site-packages/", "/dist-packages/")
_LIBRARY_PARTS = (
    *(
        *INSTALLED,
        "/lib/python3",
        "/lib64/python3",
        "<frozen",
        "/_pytest/",
        "/src/allranks/",
        "/torchinductor_",
    ),
    # torch built from source, or in another folder
    *(
        f"/torch/{part}"
        for part in ("nn/", "distributed/", "autograd/", "utils/", "optim/", "overrides.py", "_")
    ),
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# these count as a user's script, in a drill or the demo
_STAND_INS = ("/allranks/drill/demo_train.py", "/allranks/drill/self_faults.py")
# py-spy's text contains only the end of a path, whose first part may be one of these libraries
PACKAGES_TEXT = (
    "torch torchvision torchaudio numpy zmq uvloop transformers accelerate datasets deepspeed "
    "megatron vllm sglang ray lightning pytorch_lightning triton requests urllib3 httpx httpcore "
    "aiohttp anyio boto3 botocore s3transfer fsspec s3fs grpc filelock huggingface_hub "
    "safetensors tqdm wandb redis psutil pandas pyarrow scipy PIL cv2 debugpy pydevd ipdb IPython "
    "tornado uvicorn starlette fastapi gevent trio allranks pydantic torchdata webdataset"
)
PACKAGES = frozenset(PACKAGES_TEXT.split())


@lru_cache(maxsize=100_000)
def is_user_file(file: str) -> bool:
    """Whether a Python file is the user's own, and not part of the interpreter or an installed package."""
    if file.endswith(_STAND_INS):
        return True
    if not file or file.startswith(_OURS) or any(part in file for part in _LIBRARY_PARTS):
        return False
    if file.startswith("/"):
        return True
    first = file.split("/")[0]
    if "/" in file:
        return first not in PACKAGES and first not in sys.stdlib_module_names
    return first.removesuffix(".py") not in sys.stdlib_module_names


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
    turn: str = ""  # "awaits" (this end sent last), "owes" (the other end sent last), "" unknown
    moved: bool = False  # data was transferred between the samples
    # "gloo 23", "zmq 7": the library whose thread watches it, and its set of descriptors; "signals": writes never block
    owner: str = ""
    volume: int = 0  # bytes so far, both directions
    quiet_s: float | None = None  # since the last transfer in either direction

    @property
    def named(self) -> str:
        """The path of a named pipe, into which processes outside of the job may write, too; "" for anything else."""
        path = self.end.split(" ", 2)[2].rsplit(" ", 1)[0] if self.kind == "pipe" else ""
        return path if path.startswith("/") else ""


@dataclass(frozen=True)
class WaitFor:
    """What one thread waits for, from its stack and the kernel."""

    # idle (waits for its next work), work (is in code that waits for no other process), unread (unknown), sleep, stopped,
    # device, stdin, signal,
    # lock, thread, event, queue, child, socket, answer, pipe, output (of a process that has exited), collective, rendezvous,
    # store, ray, file_lock, poll, open, connect
    kind: str
    says: str = ""  # the description for users: "waits for a lock"
    key: str = ""  # identity inside the process: address of the lock, queue, condition or thread
    lock: str = ""  # the lock's name in the source: "self.lock_kv"
    ends: tuple[str, ...] = ()  # own ends of the links that it waits on
    pids: tuple[int, ...] = ()  # processes of this node that it waits for
    lost: str = ""  # the function that would end the wait ran in another thread, but no longer runs
    path: str = ""  # the FIFO that it opens
    setters: tuple[str, ...] = ()  # functions of its file that would end the wait
    tids: tuple[int, ...] = ()  # threads of this process that it waits for
    left_s: float | None = None  # seconds until the wait ends by itself
    members: int = 0  # of the process group that it creates; 0 unknown
    strong: bool = True  # False: the wait of a helper thread, which is weak evidence
    operation: str = ""


@dataclass(frozen=True)
class ThreadLook:
    """One thread, or one suspended task of an event loop (`task`), over all samples."""

    tid: int
    name: str
    wait: WaitFor
    frames: tuple[StackFrame, ...] = ()  # innermost first
    main: bool = False
    task: bool = False
    moved: bool = False  # other lines, CPU time, or many context switches between the samples
    busy: bool = False  # it was running most of the time
    holds: tuple[str, ...] = ()  # names in the source of locks that it holds
    handles: bool = False  # it handles a request
    thread_key: str = ""  # address of its Thread object
    user: StackFrame | None = None  # the innermost line of the user's code
    caller: str = ""  # "reward.py:62", if other roles are at the same line
    later: tuple[str, ...] = ()  # FIFOs and joins later in its code that other threads wait for
    sent: tuple[str, ...] = ()  # methods that others wait for, which its function has called before its line

    @property
    def at(self) -> str:
        """ "reward.py:41 in judge"; "" without a line of the user's code."""
        user = self.user
        called = f", called at {self.caller}" if self.caller else ""
        where = f"{user.file.rsplit('/', 1)[-1]}:{user.line}" if user else ""
        return f"{where} in {user.name.rsplit('.', 1)[-1]}{called}" if user else ""


@dataclass(frozen=True)
class GroupCall:
    """The newest call of a process in one of its process groups, from its black box."""

    key: str  # of the group: address of its store, and its name
    name: str  # of the group, for users
    op: str
    number: int  # in the group
    open: bool  # it has started, but not ended


@dataclass(frozen=True)
class Process:
    """One process of a job. `role` is for users ("rollout engine"); `number` distinguishes processes of one role."""

    pid: int
    ppid: int = 0
    node: str = ""
    title: str = ""
    role: str = "process"
    number: int | None = None
    group: str = ""  # name of the world of its rank: "actor"
    rank: int | None = None
    world: int | None = None
    threads: tuple[ThreadLook, ...] = ()
    links: tuple[ProcessLink, ...] = ()
    calls: tuple[GroupCall, ...] = ()  # of a recorded process
    ticks: int = 0  # CPU time between the samples, in clock ticks
    switches: int = 0  # context switches of the main thread between the samples
    alive: bool = True
    ended: str = ""  # how it exited, if known
    started_s: float = 0.0  # start time since boot
    read: bool = True  # its stacks could be read
    ours: bool = False  # a helper of allranks
    system: bool = False  # part of the framework and not of the job: raylet, resource tracker
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> Where:
        return self.node, self.pid

    @property
    def does(self) -> tuple[str, str]:
        """(activity, line) of its most informative thread."""
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
class RayTask:
    """A running or pending call of Ray, from Ray's state API."""

    name: str  # "Reward.score"
    caller: Where
    worker: Where | None = None  # the process that runs it; None: not assigned yet
    state: str = ""
    needs: str = ""  # "64 CPU"


@dataclass(frozen=True)
class JobLook:
    """Samples of a job over `seconds`, from one node or joined from several."""

    processes: tuple[Process, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    tasks: tuple[RayTask, ...] = ()


@dataclass(frozen=True)
class Guilty:
    """A process that must make progress first, and its position."""

    pid: int
    role: str
    file: str = ""
    line: int = 0
    function: str = ""
    wait: str | None = None
    node: str = ""


@dataclass(frozen=True)
class ChainLink:
    """Processes with the same wait."""

    role: str
    pids: tuple[int, ...]
    waits_for: str
    at: str = ""


@dataclass(frozen=True)
class ProcessFinding:
    """The result for a job with several processes."""

    state: Literal["stuck", "moving", "unclear"]
    sentence: str
    guilty: tuple[Guilty, ...] = ()
    chain: tuple[ChainLink, ...] = ()  # starting with the guilty process
    edges: tuple[tuple[Where, Where], ...] = ()  # (waiting process, process that it waits for)
    reason: str = ""  # the evidence, or the missing evidence
    notes: tuple[str, ...] = field(default=())
