"""Makes the traces of small imaginary jobs: a program per rank is run by a simple scheduler until nothing moves.

A collective ends when every member is in it with the same sequence number and, unless said otherwise, with the same
operation and size; a send ends with its receive. `flavour` decides what the recorder can see of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from allranks.model.diagnosis import Diagnosis, Finding
from allranks.model.trace import (
    CALL,
    REDUCE_OPS,
    Flag,
    Frame,
    Group,
    Progress,
    RankTrace,
    Shapes,
    State,
    TraceHeader,
)

START_NS = 1_700_000_000_000_000_000
STEP_NS = 10_000_000


@dataclass(frozen=True)
class Do:
    """One instruction: a collective, a send or receive, or one of "stuck", "die"."""

    op: str
    group: str = "world"
    size: int = 8
    dtype: str = "Float"
    line: int = 10
    root: int = -1
    reduce_op: str = ""
    peer: int = -1
    out: int | None = None  # elements taken, when not as many as given
    take_s: float = 0.0  # computation before the call


STUCK, DIE = Do("stuck"), Do("die")
Program = list[Do]


@dataclass
class Flavour:
    """What the recorder sees: gloo has no states, some recorders no stacks or members, rings are short."""

    backend: str = "nccl"
    stacks: bool = True
    members: bool = True
    ring: dict[int, int] = field(default_factory=dict)  # rank → ring size; absent: everything is kept
    ahead: int = 0  # calls that a rank may issue without waiting (a device queue)
    strict: bool = True  # a collective of unequal calls hangs; else it ends with garbage
    kind: str = "torch pickle 2.10"
    host: bool = False


@dataclass
class _Call:
    do: Do
    seq: int
    created: int
    state: State = State.SCHEDULED
    completed: int = 0


class World:
    """Runs programs. `members` are the groups; every rank of a group runs its own list."""

    def __init__(
        self, members: dict[str, tuple[int, ...]], programs: dict[int, Program], flavour: Flavour
    ) -> None:
        self.members = members
        self.programs = programs
        self.flavour = flavour
        self.calls: dict[int, list[_Call]] = {rank: [] for rank in programs}
        self.at = dict.fromkeys(programs, 0)
        self.clock = dict.fromkeys(programs, START_NS)
        self.dead: set[int] = set()
        self._seq: dict[tuple[int, str], int] = defaultdict(int)

    def run(self) -> World:
        """Until nobody can move."""
        while True:
            moved = [self._issue(rank) for rank in sorted(self.programs)]
            ended = self._end_collectives() | self._end_p2p()
            if not any(moved) and not ended:
                return self

    def _issue(self, rank: int) -> bool:
        program, at = self.programs[rank], self.at[rank]
        if at >= len(program) or rank in self.dead or program[at].op == "stuck":
            return False
        if program[at].op == "die":
            self.dead.add(rank)
            return True
        waiting = sum(call.state == State.SCHEDULED for call in self.calls[rank])
        if waiting > self.flavour.ahead:
            return False
        do = program[at]
        p2p = do.op in ("send", "recv")
        if not p2p:
            self._seq[(rank, do.group)] += 1
        self.clock[rank] += STEP_NS + int(do.take_s * 1e9)
        self.calls[rank].append(_Call(do, self._seq[(rank, do.group)], self.clock[rank]))
        self.at[rank] += 1
        return True

    def _end_collectives(self) -> bool:
        ended = False
        for group, ranks in self.members.items():
            fronts = {}
            for rank in ranks:
                waiting = [c for c in self.calls.get(rank, []) if c.do.group == group and c.state == State.SCHEDULED
                           and c.do.op not in ("send", "recv")]  # fmt: skip
                if waiting and self._is_first(rank, waiting[0]):
                    fronts[rank] = waiting[0]
            if len(fronts) < len(ranks) or len({c.seq for c in fronts.values()}) > 1:
                continue
            if self.flavour.strict and len({_meets(c.do) for c in fronts.values()}) > 1:
                continue
            end = max(c.created for c in fronts.values()) + 1_000_000
            for rank, call in fronts.items():
                call.state, call.completed = State.COMPLETED, end
                self.clock[rank] = max(self.clock[rank], end)
            ended = True
        return ended

    def _is_first(self, rank: int, call: _Call) -> bool:
        """A device queue runs in order."""
        return next(c for c in self.calls[rank] if c.state == State.SCHEDULED) is call

    def _end_p2p(self) -> bool:
        ended = False
        for rank, calls in self.calls.items():
            for call in calls:
                if call.do.op != "send" or call.state != State.SCHEDULED or not self._is_first(rank, call):
                    continue
                peer = call.do.peer
                wanted = [c for c in self.calls.get(peer, []) if c.do.op == "recv" and c.do.peer == rank
                          and c.state == State.SCHEDULED]  # fmt: skip
                if wanted and self._is_first(peer, wanted[0]) and wanted[0].do.size == call.do.size:
                    end = max(call.created, wanted[0].created) + 1_000_000
                    for one, other in ((rank, call), (peer, wanted[0])):
                        other.state, other.completed = State.COMPLETED, end
                        self.clock[one] = max(self.clock[one], end)
                    ended = True
        return ended

    def traces(self, *, lost: frozenset[int] = frozenset()) -> list[RankTrace]:
        """One trace per rank that is not dead or with_lost_call, in rank order."""
        return [self.trace(rank) for rank in sorted(self.programs) if rank not in self.dead | lost]

    def trace(self, rank: int) -> RankTrace:
        flavour = self.flavour
        mine = [name for name, ranks in self.members.items() if rank in ranks]
        groups = [Group("")] + [
            Group(str(i), "default_pg" if name == "world" else name, self.members[name] if flavour.members else (),
                  flavour.backend)
            for i, name in enumerate(self.members)
            if name in mine
        ]  # fmt: skip
        names, shapes, stacks = [""], [Shapes()], [()]
        rows = np.zeros(len(self.calls[rank]), CALL)
        p2p_seq: dict[str, int] = defaultdict(int)
        for i, call in enumerate(self.calls[rank]):
            do, row = call.do, rows[i]
            p2p = do.op in ("send", "recv")
            p2p_seq[do.group] += p2p
            out = do.out if do.out is not None else do.size
            shape = (
                Shapes(((do.size,),), ((out,),), (do.dtype,), (do.dtype,)) if do.op != "barrier" else Shapes()
            )
            stack = (
                Frame(do.op, "/opt/lib/torch/distributed/c10d.py", 1),
                Frame("step", "/home/me/train.py", do.line),
            )
            row["begin"] = row["end"] = i + 1
            row["created_ns"], row["completed_ns"] = call.created, call.completed
            row["seq"], row["p2p_seq"], row["op_id"], row["step"] = (
                call.seq,
                p2p_seq[do.group] if p2p else 0,
                i + 1,
                -1,
            )
            row["in_numel"], row["out_numel"] = (do.size, out) if do.op != "barrier" else (0, 0)
            row["group"] = 1 + mine.index(do.group)
            row["op"], row["shapes"] = _intern(names, do.op), _intern(shapes, shape)
            row["stack"] = _intern(stacks, stack) if flavour.stacks else 0
            row["peer"], row["root"], row["timeout_ms"] = do.peer, do.root, 600_000
            row["reduce_op"] = REDUCE_OPS.index(do.reduce_op)
            row["state"] = call.state
            row["flags"] = Flag.P2P if p2p else 0
            if call.state == State.COMPLETED:
                row["flags"] |= Flag.RETIRED
            if flavour.backend == "gloo":
                row["flags"] |= Flag.STATE_UNKNOWN
                row["state"] = State.SCHEDULED
                row["completed_ns"] = 0
        ring = flavour.ring.get(rank, len(rows))
        kept = rows[max(0, len(rows) - ring) :]
        world = len(self.members["world"]) if flavour.members else None
        header = TraceHeader(
            rank=rank, world_size=world, host=f"node{rank // 8}" if flavour.host else "", backend=flavour.backend,
            dropped=len(rows) - len(kept),
        )  # fmt: skip
        return RankTrace(
            header, kept, tuple(groups), tuple(names), tuple(shapes), tuple(stacks), Progress(),
            f"trace_{rank}", flavour.kind,
        )  # fmt: skip


def _meets(do: Do) -> tuple[object, ...]:
    """What must be equal for a collective to end; uneven operations only agree on their name."""
    if do.op in ("all_to_all", "all_gather", "reduce_scatter", "barrier"):
        return (do.op,)
    return (do.op, do.size, do.dtype, do.root)


def _intern(table: list, item: object) -> int:
    if item not in table:
        table.append(item)
    return table.index(item)


@dataclass(frozen=True)
class Layout:
    """A job of `world` ranks in tensor-parallel blocks of `tp`; data-parallel groups go across."""

    world: int
    tp: int = 2

    def members(self) -> dict[str, tuple[int, ...]]:
        groups = {"world": tuple(range(self.world))}
        for block in range(self.world // self.tp):
            groups[f"tp_{block}"] = tuple(range(block * self.tp, (block + 1) * self.tp))
        for lane in range(self.tp):
            groups[f"dp_{lane}"] = tuple(range(lane, self.world, self.tp))
        return groups

    def tp_of(self, rank: int) -> str:
        return f"tp_{rank // self.tp}"

    def dp_of(self, rank: int) -> str:
        return f"dp_{rank % self.tp}"

    def programs(self, steps: int) -> dict[int, Program]:
        """Each step: two tensor-parallel all_reduces, an uneven all_gather, the gradients, a world all_reduce."""
        return {
            rank: [
                do
                for _ in range(steps)
                for do in (
                    Do("all_reduce", self.tp_of(rank), 16, line=20),
                    Do("all_reduce", self.tp_of(rank), 16, line=21),
                    Do("reduce_scatter", self.dp_of(rank), 32, line=30, out=32 // (self.world // self.tp)),
                    Do("all_gather", self.dp_of(rank), 32 // (self.world // self.tp), line=31, out=32),
                    Do("broadcast", self.dp_of(rank), 4, line=32, root=rank % self.tp),
                    Do("all_reduce", "world", 1, line=40, reduce_op="sum"),
                )
            ]
            for rank in range(self.world)
        }


def run(groups: dict[str, tuple[int, ...]], programs: dict[int, Program], **flavour: object) -> World:
    """Runs programs to their end."""
    return World(groups, programs, Flavour(**flavour)).run()  # type: ignore[arg-type]


def with_change(
    programs: dict[int, Program], rank: int, at: int, *new: Do, drop: int = 1
) -> dict[int, Program]:
    """The programs with `drop` instructions of one rank replaced."""
    changed = list(programs[rank])
    changed[at : at + drop] = list(new)
    return {**programs, rank: changed}


def edit(do: Do, **changes: object) -> Do:
    """The instruction with some fields replaced."""
    return replace(do, **changes)  # type: ignore[arg-type]


def on_shared_tables(traces: list[RankTrace]) -> list[RankTrace]:
    """The same traces as a load gives them: all speak of the same tables of names, sizes and stacks."""
    names, shapes, stacks = [""], [Shapes()], [()]
    rows = []
    for trace in traces:
        calls = trace.calls.copy()
        for column, table, own in (("op", names, trace.names), ("shapes", shapes, trace.shapes),
                                   ("stack", stacks, trace.stacks)):  # fmt: skip
            calls[column] = [_intern(table, own[number]) for number in calls[column].tolist()]
        rows.append(calls)
    tables = {"names": tuple(names), "shapes": tuple(shapes), "stacks": tuple(stacks)}
    return [replace(trace, calls=calls, **tables) for trace, calls in zip(traces, rows, strict=True)]


def verdict_of(result: Diagnosis) -> Finding:
    """The verdict, which there must be."""
    assert result.verdict is not None, result.findings
    return result.verdict


def expect(result: Diagnosis, cause: str, *ranks: int) -> Finding:
    """The verdict, which must name this cause and these ranks and no others."""
    verdict = verdict_of(result)
    assert (verdict.cause, verdict.ranks) == (cause, ranks), verdict.sentence
    return verdict


FLAVOURS = {
    "nccl": {"backend": "nccl"},
    "nccl running ahead": {"backend": "nccl", "ahead": 5},
    "gloo": {"backend": "gloo"},
    "gloo without members": {"backend": "gloo", "members": False},
    "nccl without stacks": {"backend": "nccl", "stacks": False},
}
LAYOUT = Layout(8, 2)
AT = 6 * 4 + 2  # the reduce_scatter of the fifth round


def traces_of(programs: dict[int, Program], flavour: str, layout: Layout = LAYOUT) -> list[RankTrace]:
    return run(layout.members(), programs, **FLAVOURS[flavour]).traces()


def tail(calls: np.ndarray, **columns: int) -> np.ndarray:
    """The calls with the last one's columns changed."""
    calls = calls.copy()
    for name, value in columns.items():
        calls[name][-1] = value
    return calls


def with_lost_call(calls: np.ndarray, took_s: float) -> np.ndarray:
    ended_ns = int(calls["created_ns"][-1]) + int(took_s * 1e9)
    return tail(calls, state=int(State.FAILED), completed_ns=ended_ns)
