"""The job as `diagnose` sees it: ranks, groups, lanes. Plain data made by `align`, read by every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from allranks.diagnose.ops import families, input_bytes
from allranks.model.trace import Frame, RankTrace, Shapes


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
    label: str  # what we call it in sentences: the description when it is unique, else the name
    members: tuple[int, ...]  # ascending
    members_known: bool  # False: inferred from who shows calls
    order: tuple[int, ...] = ()  # the members in the group's own order, which splits and local ranks follow
    lanes: dict[int, Lane] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max((lane.last for lane in self.lanes.values()), default=-1)


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
