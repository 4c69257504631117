"""The recorded calls of one rank, independent of the file format. Pure data.

`load` converts every kind of dump into a `RankTrace`; `diagnose` and `report` read nothing else. Calls are rows of one numpy
array (`CALL`), because 16,384 ranks with 2,000 calls each must be compared in seconds. Names, sizes and stacks are interned;
rows contain indices into the tuples of the trace. Index 0 means unknown or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag

import numpy as np


class State(IntEnum):
    """The state of a call. TIMED_OUT and FAILED are final, but not completed."""

    SCHEDULED = 0
    STARTED = 1
    COMPLETED = 2
    FAILED = 3
    TIMED_OUT = 4


class Flag(IntFlag):
    """Boolean facts about a call."""

    P2P = 1  # send or recv
    COALESCED_PART = 2  # inside a coalesced group; its state is meaningless
    COALESCED_END = 4  # the entry that represents a whole coalesced group
    RETIRED = 8  # removed from the library's list: finished, failed or timed out
    CAPTURED = 16  # recorded during CUDA graph capture; completion cannot be known
    STATE_UNKNOWN = 32  # the source does not distinguish scheduled from completed (gloo's recorder)
    COMPLETION_UNRELIABLE = 64  # an abort may have set it to completed (NCCL after the death of a peer)
    ENDED_UNSEEN = 128  # retired when it was issued, so its end is not recorded (torch's hook)


#: One call, as stored in a black box. Times are epoch nanoseconds, 0 = not yet.
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
        ("timeout_ms", "<i4"),  # 0 unknown; at most 24 days
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
        ("end", "<u8"),  # equals `begin` if the record is whole
    ]
)
assert CALL.itemsize == 136

#: Functions of torch.distributed that wait for other ranks, but are not collectives; see Progress.
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
    """A process group, as known to one rank."""

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()  # global ranks in group order; () = unknown
    backend: str = ""  # "nccl", "gloo", ...
    #: address of the store if it is not that of the rank's world; `ranks` then number the members from 0
    store: str = ""
    own: int = -1  # the rank's index among those members


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
    """The progress of a rank, as last recorded. Times are epoch nanoseconds, 0 = never."""

    step: int = -1
    step_ns: int = 0
    calls_started: int = 0
    calls_completed: int = 0
    phase: str = ""  # set by the user: "train", "eval", "checkpoint"
    expect_until_ns: int = 0  # no progress is expected until then
    #: "" while running or after a kill; "exit", "exception: ...", "signal 15" after a shutdown
    closed: str = ""
    inside: str = ""  # the function in SETUP_CALLS that the rank is in
    inside_ns: int = 0  # when it entered or last left one; when it entered, if init_process_group failed
    setups: int = -1  # finished calls of SETUP_CALLS; -1 unknown
    #: `begin` of the first call that raised, and the error: "ValueError: …"; (0, "") if none
    first_error: tuple[int, str] = (0, "")
    members: tuple[int, ...] = ()  # of the group that it makes inside new_group; () all ranks, or unknown
    alone: bool = False  # only these members make it (use_local_synchronization)


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a rank. "" and 0: unknown."""

    address: str = ""  # "host:port", or the path of a file
    world_size: int = 0
    line: str = ""  # the user's call of init_process_group, "train.py:12"
    store: str = ""  # the address of a store passed by the program


@dataclass(frozen=True)
class World:
    """One of several worlds of a job: the job's ranks first … first + size - 1."""

    role: str  # "rollout"
    first: int
    size: int


@dataclass(frozen=True)
class TraceHeader:
    """The writer of a trace. Unknown fields are None, "" or 0."""

    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    pid: int = 0
    job: str = ""
    attempt: int = 0
    start_ns: int = 0
    written_ns: int = 0  # when the dump was taken; of a black box, the last write
    backend: str = ""
    versions: tuple[tuple[str, str], ...] = ()  # ("torch", "2.13.0"), ("nccl", "2.28.9")
    dropped: int = 0  # records overwritten by the ring
    rendezvous: Rendezvous = Rendezvous()  # from the call of init_process_group
    launched: Rendezvous = Rendezvous()  # from the environment when recording started
    role: str = ""  # "trainer"
    worlds: tuple[World, ...] = ()  # of a job with several worlds; `rank` is then the number in the job
    dated: bool = False  # `written_ns` is the modification time of the file, which may be a later copy
    start_ticks: int = 0  # start time of the process, which distinguishes it from another one with its pid
    taken_ns: int = 0  # when a black box was copied while its process was running

    @property
    def name(self) -> str:
        """ "rollout 1" in a job with several worlds, else "rank 1"."""
        number = -1 if self.rank is None else self.rank
        found = (w for w in self.worlds if w.first <= number < w.first + w.size)
        return next((f"{world.role} {number - world.first}" for world in found), f"rank {number}")


@dataclass(frozen=True)
class RankTrace:
    """The content of one file of one rank."""

    header: TraceHeader
    calls: np.ndarray  # dtype CALL, in the order of record ids, only whole records
    groups: tuple[Group, ...] = (Group(""),)
    names: tuple[str, ...] = ("",)
    shapes: tuple[Shapes, ...] = (Shapes(),)
    stacks: tuple[tuple[Frame, ...], ...] = ((),)
    progress: Progress = field(default_factory=Progress)
    path: str = ""
    kind: str = ""  # "black box 2", "torch pickle 2.10", "torch json 2.10", "torchcomms pickle 2.10"
    notes: tuple[str, ...] = ()  # problems of the file; each lowers the confidence
    torn: int = 0  # records skipped because they were being written
    last_completed: dict[str, int] = field(default_factory=dict)  # group name -> seq, from pg_status
    threads: dict[int, str] = field(default_factory=dict)  # native id -> name, of threads with calls
    destroyed: dict[int, int] = field(default_factory=dict)  # group -> time of destroy_process_group
    older: int = 0  # earlier calls in the file that were not read
    damaged: bool = False  # the file is incomplete or partly unreadable
    rank_hint: int | None = None  # the rank in the names of its own sends and receives

    @property
    def is_box(self) -> bool:
        """Whether the source is a black box."""
        return self.kind.startswith("black box")

    @property
    def is_hook(self) -> bool:
        """Whether torch's hook recorded it, which is used for backends without their own recorder."""
        return self.kind.startswith("torch hook")

    def parts(self, index: int) -> np.ndarray:
        """Indices of the calls in the coalesced batch that ends with call `index`, in order; empty for other calls."""
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

    def with_tables(
        self,
        names: tuple[str, ...],
        shapes: tuple[Shapes, ...],
        stacks: tuple[tuple[Frame, ...], ...],
        path: str,
    ) -> RankTrace:
        """This trace with the tables that its rows refer to."""
        return replace(self, names=names, shapes=shapes, stacks=stacks, path=path)

    def last_event_ns(self) -> int:
        """The latest time in the file; 0 if there is none."""
        times = [self.header.start_ns, self.header.written_ns, self.progress.step_ns]
        if len(self.calls):
            times += [int(self.calls[name].max()) for name in ("created_ns", "started_ns", "completed_ns")]
        return max(times)
