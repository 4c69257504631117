"""The tables of torchfrtrace's database, with the same names and fields, and those that its documentation promises.

Unlike the original: a collective that lacks ranks has pass_check False; group ids join between the tables;
tracebacks are filled; `collective.profiling_name` and `group.name` exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple


class MatchState(Enum):
    """How the calls of a collective fit together."""

    FULLY_MATCHED = auto()
    COLLECTIVE_TYPE_MISMATCH = auto()
    SIZE_OR_SYNTAX_MISMATCH = auto()
    COLLECTIVE_STATE_MISMATCH = auto()
    COLLECTIVE_DTYPE_MISMATCH = auto()
    UNDECIDED = auto()


class MatchInfo:
    """A MatchState and what the culprit did."""

    def __init__(self, state: MatchState, culprit: str | None = None) -> None:
        self._state = state
        self.culprit = culprit

    @property
    def state(self) -> MatchState:
        return self._state

    def __str__(self) -> str:
        return f"Error type: {self._state.name}" + (f", {self.culprit}" if self.culprit else "")

    def __repr__(self) -> str:
        return f"MatchInfo({self})"


class Group(NamedTuple):
    """A process group. `id` is its name, made unique where two groups share one."""

    id: str
    desc: str
    size: int

    @property
    def name(self) -> str:
        """The group's name as the documentation's samples spell it."""
        return self.id


class Membership(NamedTuple):
    group_id: str
    global_rank: int


class Traceback(NamedTuple):
    """A stack, one frame per line, innermost first."""

    id: int
    frames: str


class Collective(NamedTuple):
    """The calls of all ranks that belong together, described by one of them."""

    id: int
    group_id: str
    pass_check: bool
    collective_seq_id: int
    p2p_seq_id: int
    record_id: int
    pg_desc: str
    collective_name: str
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    expected_ranks: set[int]
    collective_state: str
    collective_frames: list[dict[str, Any]]
    input_numel: int | None = None
    output_numel: int | None = None
    missing_ranks: set[int] | None = None
    mismatch_collectives: dict[int, Collective] | None = None
    type_of_mismatch: MatchInfo | None = None

    @property
    def profiling_name(self) -> str:
        """ "nccl:all_reduce"; the documentation's name for collective_name."""
        return self.collective_name


class NCCLCall(NamedTuple):
    """One rank's part in a collective; `collective_id` is None for calls that belong to none."""

    id: int
    collective_id: int | None
    group_id: str
    global_rank: int
    traceback_id: int
    collective_type: str
    sizes: list[list[int]]


class Database(NamedTuple):
    groups: list[Group]
    memberships: list[Membership]
    tracebacks: list[Traceback]
    collectives: list[Collective]
    ncclcalls: Sequence[NCCLCall]


class TypeInfo(NamedTuple):
    """The name and fields of a table, as stored beside the database in `-o` files."""

    name: str
    fields: list[tuple[str, str]]


#: What `-o` writes in front of the database.
types = [
    TypeInfo(table.__name__, [(field, str(table.__annotations__[field])) for field in table._fields])
    for table in (Database, NCCLCall, Collective, Traceback, Membership, Group)
]
