"""One rank's recorded calls, in memory, whatever file they came from. Pure data; no process of its own.

`load` makes a `RankTrace` out of every kind of dump; `diagnose` and `report` read nothing else.
Calls are columns of one numpy array (`CALL`), because 16,384 ranks x 2,000 calls must be matched in
seconds. Everything of variable length (names, sizes, stacks) is interned once per file and referred
to by index into the tuples of the trace; index 0 always means "unknown / none".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import numpy as np


class State(IntEnum):
    """How far a call got. TIMED_OUT and FAILED are final but not completed."""

    SCHEDULED = 0
    STARTED = 1
    COMPLETED = 2
    FAILED = 3
    TIMED_OUT = 4


class Flag(IntFlag):
    """Facts about a call that are true or false."""

    P2P = 1  # send or recv
    COALESCED_PART = 2  # inside a coalesced group; its own state says nothing
    COALESCED_END = 4  # the entry that stands for a whole coalesced group
    RETIRED = 8  # the library has put it away: finished, failed or timed out
    CAPTURED = 16  # recorded under CUDA graph capture; completion is unknowable
    STATE_UNKNOWN = 32  # the source cannot tell scheduled from completed (gloo's own recorder)
    COMPLETION_UNRELIABLE = 64  # completed may have been set by an abort (NCCL after a peer died)
    ENDED_UNSEEN = 128  # put away when it was issued: whether it ended is not recorded (torch's hook)


#: One call. The on-disk record of a black box is exactly this row. Times are epoch nanoseconds, 0 = not yet.
CALL = np.dtype(
    [
        ("begin", "<u8"),  # record id + 1, written first; 0 = empty slot
        ("created_ns", "<i8"),
        ("started_ns", "<i8"),
        ("completed_ns", "<i8"),
        ("seq", "<i8"),  # per-group collective sequence, from 1; not advanced by p2p; -1 unknown
        ("p2p_seq", "<i8"),  # per-group p2p sequence, from 1; 0 for collectives
        ("op_id", "<i8"),  # per-group count of logical operations
        ("step", "<i8"),  # user's training step, -1 unknown
        ("in_numel", "<i8"),  # elements over all input tensors; -1 unknown
        ("out_numel", "<i8"),
        ("timeout_ms", "<i4"),  # 0 unknown; longer ones are written as the longest, 24 days
        ("tag", "<i4"),  # of a send or recv; -1 unknown, and for collectives
        ("group", "<u4"),  # index into RankTrace.groups
        ("op", "<u4"),  # index into RankTrace.names: "all_reduce", "send", ... (no backend prefix)
        ("shapes", "<u4"),  # index into RankTrace.shapes
        ("stack", "<u4"),  # index into RankTrace.stacks
        ("label", "<u4"),  # index into RankTrace.names: user's label
        ("thread", "<u4"),  # native thread id; its name is in RankTrace.threads
        ("peer", "<i4"),  # GLOBAL rank of the partner of a send/recv; -1 none or any source
        ("root", "<i4"),  # GLOBAL rank of the root of broadcast/reduce/gather/scatter; -1 none or unknown
        ("reduce_op", "<u2"),  # index into REDUCE_OPS
        ("state", "u1"),
        ("_pad", "u1"),
        ("flags", "<u2"),
        ("_pad2", "<u2"),
        ("end", "<u8"),  # equals `begin` when the record is whole
    ]
)
assert CALL.itemsize == 136

#: Functions of torch.distributed that wait for other ranks and are no collectives; Progress tells of them.
SETUP_CALLS = ("init_process_group", "new_group", "destroy_process_group")

REDUCE_OPS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "other")


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack, innermost first in a stack."""

    name: str
    file: str
    line: int


@dataclass(frozen=True)
class Group:
    """A process group as one rank knows it."""

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()  # global ranks in group order; () = unknown
    backend: str = ""  # "nccl", "gloo", ...
    #: of a group that does not meet where the rank's world does, where it meets; its `ranks` count its own members
    store: str = ""
    own: int = -1  # the rank's number among them


@dataclass(frozen=True)
class Shapes:
    """Sizes and dtypes of one call. dtypes are c10 names: Float, Half, BFloat16, Long, ..."""

    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Progress:
    """The progress mark: what the rank last said of itself. Times are epoch nanoseconds, 0 = never."""

    step: int = -1
    step_ns: int = 0
    calls_started: int = 0
    calls_completed: int = 0
    phase: str = ""  # user's word: "train", "eval", "checkpoint"
    expect_until_ns: int = 0  # silence is declared normal until then
    #: "" while running or killed; "exit", "exception: ...", "signal 15" when it shut down by itself
    closed: str = ""
    inside: str = ""  # the function that it has entered and not left: see SETUP_CALLS
    inside_ns: int = 0  # when it entered or last left one of them; entered, where init_process_group failed
    setups: int = -1  # how many of them it has finished; -1 unknown
    #: `begin` of the first call that raised in the rank, and what: "ValueError: …"; (0, "") when none is known to have
    first_error: tuple[int, str] = (0, "")
    members: tuple[int, ...] = ()  # of the group that it makes inside new_group; () all ranks, or unknown
    alone: bool = False  # only these members make it (use_local_synchronization)


@dataclass(frozen=True)
class Rendezvous:
    """Where a rank meets the others, and how many it expects there. "" and 0: unknown."""

    address: str = ""  # "host:port", or the path of a file
    world_size: int = 0
    line: str = ""  # of the user's call of init_process_group, "train.py:12"
    store: str = ""  # the address of a store that the program brings


@dataclass(frozen=True)
class World:
    """Ranks of a job of several worlds that are a world of their own: numbers first … first + size - 1 of the job."""

    role: str  # "rollout"
    first: int
    size: int


@dataclass(frozen=True)
class TraceHeader:
    """Who wrote the trace. Fields that a source does not know are None, '' or 0."""

    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    pid: int = 0
    job: str = ""
    attempt: int = 0
    start_ns: int = 0
    written_ns: int = 0  # when the dump was taken; for a black box the last write
    backend: str = ""
    versions: tuple[tuple[str, str], ...] = ()  # ("torch", "2.13.0"), ("nccl", "2.28.9")
    dropped: int = 0  # records overwritten by the ring
    rendezvous: Rendezvous = Rendezvous()  # as init_process_group was called; unknown before that
    launched: Rendezvous = Rendezvous()  # as its environment said when recording started
    role: str = ""  # what its process is called: "trainer"
    worlds: tuple[World, ...] = ()  # of a job of several worlds; `rank` is the number in the job then
    dated: bool = False  # `written_ns` is the modification time of the file, which may be a later copy
    start_ticks: int = 0  # of its process: another process with its number has another
    taken_ns: int = 0  # when a copy of a black box was made whose process still ran

    @property
    def name(self) -> str:
        """ "rollout 1" in a job of several worlds, else "rank 1"."""
        number = -1 if self.rank is None else self.rank
        found = (w for w in self.worlds if w.first <= number < w.first + w.size)
        return next((f"{world.role} {number - world.first}" for world in found), f"rank {number}")


@dataclass(frozen=True)
class RankTrace:
    """Everything known of one rank, from one file."""

    header: TraceHeader
    calls: np.ndarray  # dtype CALL, in the order of record ids, only whole records
    groups: tuple[Group, ...] = (Group(""),)
    names: tuple[str, ...] = ("",)
    shapes: tuple[Shapes, ...] = (Shapes(),)
    stacks: tuple[tuple[Frame, ...], ...] = ((),)
    progress: Progress = field(default_factory=Progress)
    path: str = ""
    kind: str = ""  # "black box 2", "torch pickle 2.10", "torch json 2.10", "torchcomms pickle 2.10"
    notes: tuple[str, ...] = ()  # what was wrong with the file: each lowers confidence
    torn: int = 0  # records skipped because they were being written
    last_completed: dict[str, int] = field(default_factory=dict)  # group name -> seq, from pg_status, if any
    threads: dict[int, str] = field(default_factory=dict)  # native id -> name, of threads that made calls
    destroyed: dict[int, int] = field(default_factory=dict)  # group -> when destroy_process_group was called
    older: int = 0  # earlier calls that are in the file and were not read

    @property
    def is_box(self) -> bool:
        """Whether it is a black box, which is read live."""
        return self.kind.startswith("black box")

    @property
    def is_hook(self) -> bool:
        """Whether torch's hook recorded it, which records backends without a recorder of their own."""
        return self.kind.startswith("torch hook")

    def parts(self, index: int) -> np.ndarray:
        """Indices of the calls inside the coalesced batch that ends with call `index`, in order; empty for others."""
        calls, end = self.calls, self.calls[index]
        if not int(end["flags"]) & Flag.COALESCED_END:
            return np.zeros(0, np.int64)
        before = calls[:index]
        mine = (before["group"] == end["group"]) & (before["flags"] & Flag.COALESCED_PART != 0)
        other_ends = np.flatnonzero(
            (before["group"] == end["group"]) & (before["flags"] & Flag.COALESCED_END != 0)
        )
        if len(other_ends):
            mine[: other_ends[-1]] = False
        found: np.ndarray = np.flatnonzero(mine)
        return found


@dataclass
class Raw:
    """One file's content before the shared tables are final and the rank is settled."""

    header: TraceHeader
    calls: np.ndarray
    groups: tuple[Group, ...]
    kind: str
    progress: Progress = field(default_factory=Progress)
    notes: tuple[str, ...] = ()
    torn: int = 0
    last_completed: dict[str, int] = field(default_factory=dict)
    damaged: bool = False
    threads: dict[int, str] = field(default_factory=dict)
    destroyed: dict[int, int] = field(default_factory=dict)
    older: int = 0
    rank_hint: int | None = None  # the rank that its own sends and receives give away

    @property
    def is_box(self) -> bool:
        return self.kind.startswith("black box")

    def as_trace(
        self,
        names: tuple[str, ...],
        shapes: tuple[Shapes, ...],
        stacks: tuple[tuple[Frame, ...], ...],
        path: str,
    ) -> RankTrace:
        """The trace of this file, whose rows refer to these tables."""
        rows = (self.header, self.calls, self.groups, names, shapes, stacks)
        known = (self.progress, path, self.kind, self.notes, self.torn, self.last_completed)
        return RankTrace(*rows, *known, self.threads, self.destroyed, self.older)

    def last_event_ns(self) -> int:
        """The latest time mentioned anywhere in the file, 0 when none."""
        times = [self.header.start_ns, self.header.written_ns, self.progress.step_ns]
        if len(self.calls):
            times += [int(self.calls[name].max()) for name in ("created_ns", "started_ns", "completed_ns")]
        return max(times)
