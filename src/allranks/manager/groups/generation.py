"""A generation: a quorum, its plan, its process group and votes, and whether they still work."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import cached_property

from allranks.manager.groups.group import ReconfigurableGroup
from allranks.manager.plan import QuorumPlan
from allranks.manager.vote_mesh import VoteMesh
from allranks.manager.work import ManagedWork
from allranks.model.cluster import Quorum

log = logging.getLogger("allranks.manager")


@dataclass(eq=False)
class Generation:
    """Guarded by the training state's lock. Once broken or replaced it never works again."""

    quorum: Quorum
    plan: QuorumPlan
    index: int  # our replica's index in the quorum
    rank: int  # inside the replica
    group: ReconfigurableGroup  # for gradients: the same rank of each replica
    votes: VoteMesh  # of all ranks
    broken: str = ""  # why
    replaced: bool = False  # by a later generation: its end is not a failure
    loaded: bool = True  # the state to train on is in place; False while healing
    drops: bool = False  # our replica heals, and holds steps that no other state has
    reported: bool = False  # differing learning rates were reported
    together: bool = False  # its first step is committed: late members hold the state too
    transfers: set[int] = field(init=False)  # healing replicas whose state transfer still needs this rank

    def __post_init__(self) -> None:
        self.transfers = set(self.plan.transfers_of(self.index))

    @property
    def number(self) -> int:
        return self.quorum.number

    @cached_property
    def seats(self) -> list[tuple[int, int]]:
        """(replica's index in the quorum, rank inside it) of every voter."""
        sizes = [member.world_size for member in self.quorum.members]
        return [(replica, rank) for replica, size in enumerate(sizes) for rank in range(size)]

    @property
    def voters(self) -> int:
        return len(self.seats)

    @property
    def place(self) -> int:
        """Our index among the voters."""
        return self.seats.index((self.index, self.rank))

    @cached_property
    def counterparts(self) -> list[list[int]]:
        """Groups of voters that must hold the same state: the same rank of each replica."""
        places: dict[int, list[int]] = {}
        for voter, (_, rank) in enumerate(self.seats):
            places.setdefault(rank, []).append(voter)
        return list(places.values())

    def replica_of(self, voter: int) -> str:
        return self.quorum.members[self.seats[voter][0]].replica

    @property
    def heals(self) -> bool:
        """Whether this replica must heal in this generation."""
        return self.index in self.plan.healing

    @property
    def participants(self) -> tuple[int, ...]:
        """The replicas whose gradients count in this step."""
        if self.together or not self.plan.late:
            return self.plan.participants
        return tuple(index for index in self.plan.participants if index not in self.plan.late)

    @property
    def participates(self) -> bool:
        return self.index in self.participants

    def holding(self, attempt: StepAttempt) -> set[int]:
        """The replicas whose state transfer delays the next collective of this attempt.

        A replica that heals during the step contributes zeros without a state, up to the end of the first backward: those
        collectives never wait for its transfer, so the transfer may wait for them. Every other collective waits for the
        transfers, so that no transfer can wait for it.
        """
        return self.transfers if attempt.reduced else self.transfers.difference(self.plan.late)

    @property
    def usable(self) -> bool:
        return not self.broken and not self.replaced

    def peer_gone(self) -> bool:
        """Whether a member has left the group, or was cut off: its vote connection is closed."""
        return self.votes.peer_gone()

    def break_off(self, reason: str) -> bool:
        """Aborts group and votes, here and, by the closed sockets, at the peers; False if not usable before."""
        if not self.usable:
            return False
        self.broken = reason
        self.votes.abort(reason)
        self.group.abort(reason)
        return True


@dataclass(eq=False)
class StepAttempt:
    """One attempt at a step by the training thread."""

    opened: bool = False  # by start_quorum; False only before the first step
    generation: Generation | None = None  # bound at the first collective
    gave_zeros: bool = False  # computed before healing, or without a share of the batch
    committed: bool = False
    reduced: bool = False  # the first backward is done: from now on the others rely on our state
    error: Exception | None = None  # of this rank only: it still joins the collectives, and votes no
    invalid: str = ""  # the group broke, or it computed on an old state: no vote
    issuers: list[object] = field(default_factory=list)  # the issuer of each collective, in order
    works: list[ManagedWork] = field(default_factory=list)  # must end before the vote


@dataclass(eq=False)
class RegroupTimes:
    """Times since the last commit, from any thread; empty unless debug logging is on."""

    began: float = field(default_factory=time.monotonic)
    wanted: bool = field(default_factory=lambda: log.isEnabledFor(logging.DEBUG))
    quorum: int = 0  # of the group made since the last commit; 0: none
    _marks: list[tuple[float, str]] = field(default_factory=list)

    def mark(self, part: str) -> None:
        """This part ended now."""
        if self.wanted:
            self._marks.append((time.monotonic(), part))

    def mark_first(self, part: str) -> None:
        """As `mark`, but only the first time."""
        if self.wanted and all(known != part for _, known in self._marks):
            self.mark(part)

    def parts(self) -> str:
        """ "part milliseconds since the last commit", in order of time."""
        return ", ".join(f"{part} {(at - self.began) * 1e3:.0f}" for at, part in sorted(self._marks))

    def log_if_regrouped(self, step: int) -> None:
        """At a commit: logs the times if a group was made since the last commit."""
        if self.quorum and self.wanted:
            log.debug("quorum %d, step %d; ms since the last commit: %s", self.quorum, step, self.parts())
