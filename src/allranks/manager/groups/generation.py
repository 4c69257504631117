"""One group: a quorum, its plan, the connected groups, and whether it still works."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
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
    """Guarded by the training state's lock. Once broken or over it never works again."""

    quorum: Quorum
    plan: QuorumPlan
    index: int  # our replica's place in the quorum
    rank: int  # inside the replica
    group: ReconfigurableGroup  # gradients: the ranks of equal place in each replica
    box: VoteMesh  # votes of all ranks
    broken: str = ""  # why, in the words of who noticed
    over: bool = False  # replaced by a later one: its end is not a failure
    loaded: bool = True  # the state to train on is in place; False while healing
    drops: bool = False  # our replica heals, and holds steps that are in no other state
    reported: bool = False  # that learning rates and the like differ in it
    together: bool = False  # its first step is behind it: those who came late hold the state too
    transfers: set[int] = field(init=False)  # healing replicas whose state transfer still needs this rank

    def __post_init__(self) -> None:
        self.transfers = set(self.plan.transfers_of(self.index))

    @property
    def number(self) -> int:
        return self.quorum.number

    @cached_property
    def seats(self) -> list[tuple[int, int]]:
        """(replica's place in the quorum, rank inside it) of every voter."""
        sizes = [member.world_size for member in self.quorum.members]
        return [(replica, rank) for replica, size in enumerate(sizes) for rank in range(size)]

    @property
    def voters(self) -> int:
        return len(self.seats)

    @property
    def place(self) -> int:
        """Ours among the voters."""
        return self.seats.index((self.index, self.rank))

    @cached_property
    def counterparts(self) -> list[list[int]]:
        """The voters that must hold the same state: the ranks of equal number in each replica."""
        places: dict[int, list[int]] = {}
        for voter, (_, rank) in enumerate(self.seats):
            places.setdefault(rank, []).append(voter)
        return list(places.values())

    def replica_of(self, voter: int) -> str:
        """The replica to which a voter belongs."""
        return self.quorum.members[self.seats[voter][0]].replica

    @property
    def heals(self) -> bool:
        """Whether this replica was told to heal in this generation."""
        return self.index in self.plan.healing

    @property
    def participants(self) -> tuple[int, ...]:
        """Whose gradients count in this step."""
        if self.together or not self.plan.late:
            return self.plan.participants
        return tuple(index for index in self.plan.participants if index not in self.plan.late)

    @property
    def participates(self) -> bool:
        return self.index in self.participants

    def holding(self, attempt: StepAttempt) -> set[int]:
        """The replicas whose state transfer holds the next collective of this attempt back.

        Who heals beside the step gives its zeros without a state, up to the end of the first backward: those
        collectives never wait for its transfer, so the transfer may wait for them. Every other collective waits
        for the transfers, so that none of them can wait for it.
        """
        return self.transfers if attempt.reduced else self.transfers.difference(self.plan.late)

    @property
    def usable(self) -> bool:
        return not self.broken and not self.over

    def peer_gone(self) -> bool:
        """Whether a member has left the group, or was cut off from us: its connection for votes is closed."""
        return self.box.peer_gone()

    def exchange_sums(self, sums: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, ...]]:
        """After a vote whose digests differ, by all voters: the sums of the wanted ones."""
        everybody = self.box.exchange_sums(sums)
        return [everybody[place] for place in wanted]

    def break_off(self, reason: str) -> bool:
        """Ends everything that is blocked in it; False when that has happened before."""
        if not self.usable:
            return False
        self.broken = reason
        self.take_down(reason)
        return True

    def take_down(self, reason: str) -> None:
        """Aborts the groups, here and (by the closed sockets) at the peers."""
        self.box.abort(reason)
        self.group.abort(reason)


@dataclass(eq=False)
class StepAttempt:
    """One try at a step by the training thread."""

    opened: bool = False  # by start_quorum; False only before the first step
    generation: Generation | None = None  # bound at the first collective
    gave_zeros: bool = False  # its gradients are of a state before healing, or of no share of the batch
    committed: bool = False
    reduced: bool = False  # a first backward is behind it: from here on the others count on our state
    error: Exception | None = None  # ours alone: we make the collectives and vote no
    spoiled: str = ""  # the group broke, or we computed on an old state: no vote
    issuers: list[object] = field(default_factory=list)  # who issued each collective, in order
    works: list[ManagedWork] = field(default_factory=list)  # to be finished before the vote


@dataclass(eq=False)
class RegroupTimes:
    """Marks since the last commit, from any thread; none unless they will be logged."""

    began: float = field(default_factory=time.monotonic)
    wanted: bool = field(default_factory=lambda: log.isEnabledFor(logging.DEBUG))
    quorum: int = 0  # of the group that was made since the last commit; 0: none, and nothing is logged
    _marks: list[tuple[float, str]] = field(default_factory=list)

    def mark(self, part: str) -> None:
        """This part is behind us, now."""
        if self.wanted:
            self._marks.append((time.monotonic(), part))

    def mark_first(self, part: str) -> None:
        """As `mark`, for a part that happens several times: the first counts."""
        if self.wanted and all(known != part for _, known in self._marks):
            self.mark(part)

    def parts(self) -> str:
        """ "part milliseconds since the last commit", in order of time."""
        return ", ".join(f"{part} {(at - self.began) * 1e3:.0f}" for at, part in sorted(self._marks))

    def log_if_regrouped(self, step: int) -> None:
        """At a commit: a group was made since the one before, and this is what took so long."""
        if self.quorum and self.wanted:
            log.debug("quorum %d, step %d; ms since the last commit: %s", self.quorum, step, self.parts())
