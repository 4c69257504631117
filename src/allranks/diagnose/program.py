"""What calls are, apart from when they were made and how they ended: worked out once for all ranks of one program.

A thousand ranks run the same script: their rings hold the same operations, sizes, stacks and sequence numbers, record
by record, and differ in times, states and in where they begin and end. Such ranks are slices of one Program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from allranks.diagnose.job import JobTables
from allranks.diagnose.ops import is_p2p
from allranks.model.trace import CALL, Flag, RankTrace

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
