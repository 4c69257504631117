"""The job as `diagnose` sees it: operations, ranks, groups, lanes. Plain data made by `align`, read by every rule.

A thousand ranks run the same script: their rings hold the same operations, sizes, stacks and sequence numbers, record
by record, and differ in times, states and in where they begin and end. Such ranks are slices of one `Program`: what their
calls are, apart from when they were made and how they ended, is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np

from allranks.model.trace import CALL, Flag, Frame, RankTrace, Shapes


class Family(IntEnum):
    """Calls of one family can meet in one collective; those of different families cannot."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SPARSE = 10
    COALESCED = 11
    SEND = 12
    RECV = 13
    P2P_BATCH = 14
    MONITORED_BARRIER = 15
    OTHER = 16  # first of the codes for names we do not know: each name is its own family


#: The names of each family's operations, as torch, NCCL, gloo and torchcomms spell them.
_NAMES = {
    Family.ALL_REDUCE: "all_reduce allreduce_coalesced all_reduce_coalesced",
    Family.BROADCAST: "broadcast _broadcast_oop",
    Family.REDUCE: "reduce _reduce_oop",
    Family.ALL_GATHER: "all_gather _all_gather_base all_gather_single all_gather_into_tensor all_gather_v "
    "all_gather_into_tensor_coalesced ALLGATHER_coalesced all_gather_coalesced",
    Family.REDUCE_SCATTER: "reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_v "
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced REDUCE_SCATTER_coalesced",
    Family.ALL_TO_ALL: "all_to_all all_to_all_single all_to_all_base alltoall alltoall_base all_to_all_v_single",
    Family.GATHER: "gather gather_single",
    Family.SCATTER: "scatter",
    Family.BARRIER: "barrier all_reduce_barrier",
    Family.MONITORED_BARRIER: "monitored_barrier",
    Family.SPARSE: "sparse_all_reduce",
    Family.COALESCED: "coalesced",
    Family.SEND: "send isend",
    Family.RECV: "recv irecv recv_any_source recvAnySource",
    Family.P2P_BATCH: "batch_op_issue",
}
_FAMILIES = {name: family for family, names in _NAMES.items() for name in names.split()}

#: Families in which nobody can finish before everybody has entered.
SYNCHRONISING = frozenset(
    {Family.ALL_REDUCE, Family.ALL_GATHER, Family.REDUCE_SCATTER, Family.ALL_TO_ALL}
    | {Family.BARRIER, Family.MONITORED_BARRIER}
)
ROOTED = frozenset({Family.BROADCAST, Family.REDUCE, Family.GATHER, Family.SCATTER})
REDUCING = frozenset({Family.ALL_REDUCE, Family.REDUCE, Family.REDUCE_SCATTER})
#: One tensor per rank of equal length: an uneven variant does not exist.
EVEN_ONLY = frozenset(
    {"_all_gather_base", "all_gather_into_tensor", "all_gather_single"}
    | {"_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single"}
)
#: One call with several tensors, each of which is a collective of its own.
TENSOR_BY_TENSOR = frozenset(
    {"allreduce_coalesced", "all_reduce_coalesced"}
    | {"all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
)

_SYNCHRONISING = np.isin(np.arange(int(Family.OTHER) + 1), [int(family) for family in SYNCHRONISING])


def is_synchronising(codes: np.ndarray) -> np.ndarray:
    """Per family code: whether nobody can finish such a call before everybody has entered it."""
    found: np.ndarray = _SYNCHRONISING[np.minimum(codes, int(Family.OTHER))]
    return found


def is_p2p(codes: np.ndarray) -> np.ndarray:
    """Per family code: whether it is a send, a receive, or a batch of them."""
    found: np.ndarray = (codes >= int(Family.SEND)) & (codes <= int(Family.P2P_BATCH))
    return found


def families(names: tuple[str, ...]) -> np.ndarray:
    """The family code of every name of a table; unknown names get codes of their own, from OTHER up."""
    codes = np.zeros(max(1, len(names)), np.int32)
    others: dict[str, int] = {}
    for index, name in enumerate(names):
        family = _FAMILIES.get(name)
        if family is not None:
            codes[index] = family
        elif name:
            codes[index] = others.setdefault(name, int(Family.OTHER) + len(others))
    return codes


_DTYPES_OF = {
    16: "ComplexDouble",
    8: "Double Long ComplexFloat UInt64",
    4: "Float Int UInt32",
    2: "Half BFloat16 Short UInt16",
    1: "Byte Char Bool Float8_e4m3fn Float8_e5m2",
}
_DTYPE_BYTES = {name: size for size, names in _DTYPES_OF.items() for name in names.split()}


def input_bytes(elements: int, dtypes: tuple[str, ...]) -> int:
    """Bytes of the input of a call; unknown dtypes count as four bytes an element."""
    return elements * max((_DTYPE_BYTES.get(dtype, 4) for dtype in dtypes), default=4)


#: A sequence number that falls by more than this means that the group began anew (reset, new quorum).
RESET_DROP = 64
#: So many programs, those used last, are compared with a rank before it is given one of its own.
COMPARED = 8

_NOT_A_COLLECTIVE = int(Flag.P2P | Flag.COALESCED_PART)
#: A row as words of eight bytes: which word holds a field.
_WORDS = CALL.itemsize // 8
_SEQ, _OP, _SHAPES, _PEER, _STATE = (
    int(CALL.fields[name][1]) // 8  # type: ignore[index]
    for name in ("seq", "group", "shapes", "peer", "reduce_op")
)
_WHOLE = 0xFFFFFFFFFFFFFFFF
#: (word, mask of its bits that ranks of one program share): the root without the peer, flags without the state.
_SHARED = (
    (_SEQ, _WHOLE),
    (_OP, _WHOLE),  # group and operation
    (_SHAPES, _WHOLE),  # sizes and stack
    (_PEER, 0xFFFFFFFF00000000),
    (_STATE, 0x000000000000FFFF | _NOT_A_COLLECTIVE << 32),
)

#: (group's index in the rank's own list, rows, sequence numbers) of the collectives of one group.
Part = tuple[int, np.ndarray, np.ndarray]


@dataclass
class Program:
    """Calls in the order of their record ids, as columns. Complete once all ranks have been placed."""

    trace: RankTrace  # whose tables the columns speak of
    first: int  # record id of the first row
    columns: list[np.ndarray]  # one per entry of _SHARED
    dense: bool  # no record is missing in between
    tables: JobTables
    _parts: dict[tuple[int, int, tuple[int, ...]], tuple[Part, ...]] = field(default_factory=dict)
    _steady: dict[tuple[int, ...], frozenset[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns[0])

    def takes(self, first: int, words: np.ndarray) -> bool:
        """Whether the rows are the same calls wherever both know them; the program grows by what it did not know."""
        start, end = max(first, self.first), min(first + len(words), self.first + len(self))
        if start >= end:
            return False
        mine, theirs = slice(start - self.first, end - self.first), slice(start - first, end - first)
        for own, (word, mask) in zip(self.columns, _SHARED, strict=True):
            other = words[theirs, word]
            if not (own[mine] == (other if mask == _WHOLE else other & np.uint64(mask))).all():
                return False
        if theirs.start or theirs.stop < len(words):
            before, after = columns_of(words[: theirs.start]), columns_of(words[theirs.stop :])
            self.columns = list(map(np.concatenate, zip(before, self.columns, after, strict=True)))
            self.first -= theirs.start
        return True

    @cached_property
    def local(self) -> np.ndarray:
        """Index into the rank's own groups, per call."""
        return (self.columns[1] & np.uint64(0xFFFFFFFF)).astype(np.int32)

    @cached_property
    def _names(self) -> np.ndarray:
        numbers: np.ndarray = self.tables.number(0, self.trace.names)[
            (self.columns[1] >> np.uint64(32)).astype(np.int64)
        ]
        return numbers

    @cached_property
    def family(self) -> np.ndarray:
        """Family per call."""
        names = self._names  # the table of codes grows with it
        codes: np.ndarray = self.tables.family_codes()[names]
        return codes

    @cached_property
    def sig(self) -> np.ndarray:
        """Packed (operation, sizes, root, reduce op) per call."""
        sizes = (self.columns[2] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        root = (self.columns[3] >> np.uint64(32)).astype(np.uint32).view(np.int32).astype(np.int64)
        sig: np.ndarray = self._names << 51 | self.tables.number(1, self.trace.shapes)[sizes] << 24
        sig |= (root + 1 & 0x7FFFF) << 5
        return sig | (self.columns[4] & np.uint64(0x1F)).astype(np.int64)

    @cached_property
    def stack(self) -> np.ndarray:
        """Stack number per call, comparable across ranks; 0 unknown."""
        numbers = self.tables.number(2, self.trace.stacks).astype(np.int32)
        stacks: np.ndarray = numbers[(self.columns[2] >> np.uint64(32)).astype(np.int64)]
        return stacks

    @cached_property
    def has_p2p(self) -> bool:
        """Whether there is a send or a receive."""
        return bool(self._p2p.any())

    @cached_property
    def has_batches(self) -> bool:
        """Whether there may be coalesced batches of collectives."""
        names = [index for index, name in enumerate(self.tables.names) if name.endswith("coalesced")]
        flags = self.columns[4] >> np.uint64(32)
        return bool((flags == int(Flag.COALESCED_PART)).any() or np.isin(self._names, names).any())

    @cached_property
    def _p2p(self) -> np.ndarray:
        """Which calls are no collective whatever their flags say (torchcomms does not mark them)."""
        return is_p2p(self.family)

    @cached_property
    def _seqs(self) -> np.ndarray:
        return self.columns[0].view(np.int64)

    @cached_property
    def _collective(self) -> np.ndarray:
        """Which calls are collectives with a number."""
        flags = self.columns[4] >> np.uint64(32)
        counted: np.ndarray = (flags == 0) & ~self._p2p & (self._seqs >= 0)
        return counted

    def parts(self, start: int, end: int, groups: tuple[int, ...]) -> tuple[Part, ...]:
        """The collectives of calls start … end-1, by group. `groups` names, for every own index, the index that
        stands for the same group of the job (-1: left out)."""
        key = (start, end, groups)
        found = self._parts.get(key)
        if found is None:
            cut = slice(start, end)
            found = self._parts[key] = tuple(
                (number, *since_reset(rows, seqs))
                for number, rows, seqs in _split(
                    self.local[cut], self._seqs[cut], self._collective[cut], groups
                )
            )
        return found

    def steady(self, groups: tuple[int, ...]) -> frozenset[int]:
        """Groups whose numbers only ascend: here a number means the same call on all ranks of the program."""
        found = self._steady.get(groups)
        if found is None:
            # Other ranks of the program may have more groups than those who ask.
            known = (*groups, *(-1 for _ in range(len(groups), int(self.local.max(initial=0)) + 1)))
            split = _split(self.local, self._seqs, self._collective, known) if self.dense else ()
            found = frozenset(number for number, _, seqs in split if not (seqs[1:] <= seqs[:-1]).any())
            self._steady[groups] = found
        return found


@dataclass
class Programs:
    """All programs of a job; ranks are placed one by one."""

    tables: JobTables
    recent: list[Program] = field(default_factory=list)

    def place(self, trace: RankTrace) -> Program:
        """The program of a rank: a known one, or a new one."""
        words = np.ascontiguousarray(trace.calls).view(np.uint64).reshape(-1, _WORDS)
        first, dense = 0, False
        if len(words):
            first = int(words[0, 0])
            dense = int(words[-1, 0]) - first == len(words) - 1
        for index, program in enumerate(self.recent if dense else ()):
            if program.dense and _same_tables(program.trace, trace) and program.takes(first, words):
                if index:
                    self.recent.insert(0, self.recent.pop(index))
                return program
        program = Program(trace, first, columns_of(words), dense, self.tables)
        if dense:
            self.recent = [program, *self.recent[: COMPARED - 1]]
        return program


def columns_of(words: np.ndarray) -> list[np.ndarray]:
    """What ranks of one program share of some rows."""
    return [words[:, word] & np.uint64(mask) for word, mask in _SHARED]


def _same_tables(one: RankTrace, two: RankTrace) -> bool:
    return one.names is two.names and one.shapes is two.shapes and one.stacks is two.stacks


def _split(
    local: np.ndarray, seqs: np.ndarray, collective: np.ndarray, groups: tuple[int, ...]
) -> Iterable[Part]:
    """Collectives by group, in the order of their rows."""
    number = np.array(groups, np.int32)[local]
    mine = np.flatnonzero(collective & (number >= 0))
    number = number[mine]
    order = np.argsort(number, kind="stable")
    mine, number = mine[order], number[order]
    ends = [*(np.flatnonzero(number[1:] != number[:-1]) + 1).tolist(), len(mine)] if len(mine) else []
    start = 0
    for end in ends:
        yield int(number[start]), mine[start:end], seqs[mine[start:end]]
        start = end


def since_reset(rows: np.ndarray, seqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Only the calls since the group last began anew; ascending, the last record of each number kept."""
    if bool((seqs[1:] <= seqs[:-1]).any()):
        steps = np.diff(seqs)
        resets = np.flatnonzero((steps < -RESET_DROP) | ((steps < 0) & (seqs[1:] <= 1)))
        if len(resets):
            rows, seqs = rows[resets[-1] + 1 :], seqs[resets[-1] + 1 :]
        order = np.argsort(seqs, kind="stable")
        rows, seqs = rows[order], seqs[order]
        keep = np.append(np.diff(seqs) > 0, True)
        rows, seqs = rows[keep], seqs[keep]
    return rows, seqs


class Now(IntEnum):
    """What is known of a call's end. LEFT: put away, but finished or failed cannot be told."""

    UNKNOWN = 0
    OPEN = 1
    DONE = 2
    FAILED = 3
    LEFT = 4


@dataclass(frozen=True)
class Lane:
    """One rank's collectives in one group, ascending and without gaps unless `seqs` says so."""

    rank: int
    rows: np.ndarray  # indices into the rank's calls
    seqs: np.ndarray
    wrapped: bool  # earlier calls may have been overwritten
    cut: bool  # later calls may be missing: the file is damaged

    first: int = 0
    last: int = -1  # the last sequence number entered; -1 when none is known
    kin: object = None  # lanes with an equal one made equal calls at equal numbers; None: unknown

    @staticmethod
    def of(
        rank: int, rows: np.ndarray, seqs: np.ndarray, wrapped: bool, cut: bool, kin: object = None
    ) -> Lane:
        """The lane with its ends worked out once: they are asked for millions of times."""
        if not len(seqs):
            return Lane(rank, rows, seqs, wrapped, cut)
        return Lane(rank, rows, seqs, wrapped, cut, int(seqs[0]), int(seqs[-1]), kin)

    def row(self, seq: int) -> int:
        """The row of a sequence number, -1 when it is not in the ring."""
        if seq == self.last and len(self.rows):
            return int(self.rows[-1])
        at = int(np.searchsorted(self.seqs, seq))
        return int(self.rows[at]) if at < len(self.seqs) and self.seqs[at] == seq else -1


@dataclass(frozen=True)
class GroupView:
    """A process group as the whole job knows it."""

    index: int
    name: str
    desc: str
    backend: str
    label: str  # in sentences: the description (with the members where several have it), else the name
    members: tuple[int, ...]  # ascending
    members_known: bool  # False: inferred from who shows calls
    order: tuple[int, ...] = ()  # the members in the group's own order, which splits and local ranks follow
    lanes: dict[int, Lane] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max((lane.last for lane in self.lanes.values()), default=-1)

    @property
    def is_world(self) -> bool:
        """Whether this is the group of all ranks."""
        return self.desc == "default_pg" or self.name == "0"


class JobTables:
    """Numbers that mean the same on all ranks. Traces of one load share their tables, so this is mostly a no-op."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.shapes: list[Shapes] = [Shapes()]
        self.stacks: list[tuple[Frame, ...]] = [()]
        self._ids: tuple[dict[object, int], ...] = ({"": 0}, {Shapes(): 0}, {(): 0})
        self._maps: dict[tuple[int, int], tuple[object, np.ndarray]] = {}
        self._codes = np.zeros(0, np.int32)

    def number(self, which: int, table: Sequence[object]) -> np.ndarray:
        """index in the trace's table → number in ours; which is 0 names, 1 shapes, 2 stacks."""
        key = (which, id(table))
        found = self._maps.get(key)
        if found is None or found[0] is not table:
            found = self._maps[key] = (table, self._add(which, table))
        return found[1]

    def family_codes(self) -> np.ndarray:
        """Family code by name number."""
        if len(self._codes) != len(self.names):
            self._codes = families(tuple(self.names))
        return self._codes

    def _add(self, which: int, table: Sequence[object]) -> np.ndarray:
        ids = self._ids[which]
        items: list[object] = (self.names, self.shapes, self.stacks)[which]  # type: ignore[assignment]
        numbers = np.zeros(max(1, len(table)), np.int64)
        for index, item in enumerate(table):
            found = ids.get(item)
            if found is None:
                found = ids[item] = len(items)
                items.append(item)
            numbers[index] = found
        return numbers


@dataclass(frozen=True)
class RankCalls:
    """One rank's calls with what does not depend on other ranks worked out."""

    rank: int
    trace: RankTrace
    now: np.ndarray  # Now per call
    family: np.ndarray  # Family per call
    sig: np.ndarray  # packed (op, shapes, root, reduce op); equal means: nothing to compare
    stack: np.ndarray  # stack number, comparable across ranks; 0 unknown
    group: np.ndarray  # index into Job.groups per call; -1 none
    cut: bool
    snapshot_ns: int  # when this state was seen; 0 unknown
    has_p2p: bool = True  # False: there is no send or receive among the calls
    has_batches: bool = True  # False: there is no coalesced batch of collectives among the calls

    @cached_property
    def meets(self) -> np.ndarray:
        """`sig` without the sizes of a gather or scatter: in one call the root and the others pass different ones."""
        one_sided = np.isin(self.family, (Family.GATHER, Family.SCATTER))
        return np.where(one_sided, self.sig & ~(0x7FFFFFF << 24), self.sig)


@dataclass(frozen=True)
class Job:
    """All ranks, aligned."""

    ranks: dict[int, RankCalls]
    groups: tuple[GroupView, ...]
    tables: JobTables
    world_size: int | None
    missing_ranks: tuple[int, ...]  # expected, but without a readable trace
    now_ns: int
    ended: bool = False  # all processes are gone

    def frames(self, rank: int, row: int) -> tuple[Frame, ...]:
        """The stack of a call, innermost first; () when unknown."""
        view = self.ranks[rank]
        return self.tables.stacks[int(view.stack[row])]

    def op(self, rank: int, row: int) -> str:
        trace = self.ranks[rank].trace
        return trace.names[int(trace.calls["op"][row])]

    def shapes(self, rank: int, row: int) -> Shapes:
        trace = self.ranks[rank].trace
        return trace.shapes[int(trace.calls["shapes"][row])]

    def input_bytes(self, rank: int, row: int) -> int:
        """How much a rank gives in a call."""
        elements = int(self.ranks[rank].trace.calls["in_numel"][row])
        return input_bytes(max(0, elements), self.shapes(rank, row).input_dtypes)

    def host(self, rank: int) -> str:
        view = self.ranks.get(rank)
        return view.trace.header.host if view else ""
