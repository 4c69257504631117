"""The plan of a new quorum: who heals from whom, who participates, whether a step in doubt was committed.

Pure: every member computes the same plan from the same claims, so no further agreement is needed. A state's position is
(term, step): the term of the group that committed it last, and its number of steps. The state with the most steps wins;
of two with equal steps the one of the later group. A state's lineage lists which group committed which of its steps. A
state that is not in the winner's lineage holds steps that will be dropped: see `find_conflicts`.

Invariants:
- a rank votes only after all its gradients are reduced, so a *pending* rank (it has voted and got no result) holds the
  same gradients as a rank that saw the result: it may roll forward instead of healing;
- no rank commits a step before every member has voted, so no state changes while a member still heals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from allranks.model.parsing import from_json, to_json

Position = tuple[int, int]  # (term, step)
NOWHERE: Position = (-1, -1)  # an unusable state
FRESH: Position = (0, 0)
Lineage = tuple[Position, ...]  # the last step of each group, oldest first; the oldest may be cut off
MAX_LINEAGE = 12
MAX_SOURCES = 4  # members from which one replica fetches its state at once


class StateFacts(msgspec.Struct, frozen=True):
    """One rank's facts about the state that it holds."""

    term: int = 0  # of the group that committed the state; 0: no group of this job
    step: int = 0
    seen: int = 0  # highest term of this rank's groups
    pending: int = 0  # term of the group in which it voted and got no result; 0: none
    torn: bool = False  # some of its bytes were replaced: unusable until healed
    arrived: Position = NOWHERE  # of a complete fetched state that is not loaded yet
    lineage: Lineage = ()  # (): not in a group yet, fresh or from a checkpoint
    arrived_lineage: Lineage = ()

    @property
    def position(self) -> Position:
        """Where the state stands; NOWHERE when it is unusable."""
        return NOWHERE if self.torn else (self.term, self.step)


class Claim(StateFacts, frozen=True):
    """One rank's state and addresses, sent with its request for a quorum."""

    address: str = ""  # host:port of its healing server
    listener: str = ""  # ip:port of gloo's, for gradients
    broken: bool = False  # its group is broken: a new one is needed even with the same members
    global_rank: int = -1  # in the whole job, as in its black box; -1: not known


@dataclass(frozen=True)
class ReplicaClaim:
    """The claims of all ranks of one replica, and its options."""

    ranks: tuple[Claim, ...]
    min_replicas: int = 1
    init_sync: bool = True
    fixed: bool = False  # members beyond min_replicas are spares, which contribute zeros
    # it can heal during its first step, contributing zeros, so that the others need not wait
    beside: bool = False
    prepares: bool = False  # it has no group yet, and can be invited to make one (prepared_group.py)
    prepared: str = ""  # name of the group that it has prepared for this quorum
    backend: str = ""  # for its gradients: nccl or gloo; "": not known

    def encode(self) -> str:
        """As JSON, for the `data` of a lighthouse member."""
        return to_json(self)

    @staticmethod
    def decode(text: str) -> ReplicaClaim:
        """From JSON; ignores unknown fields of a newer version. Raises ValueError."""
        return from_json(text, ReplicaClaim)


@dataclass(frozen=True)
class QuorumPlan:
    """What the members do next. Replicas are given by their index in the quorum."""

    term: int  # of the new group
    top: Position  # the state that all members will hold
    healing: tuple[int, ...]
    sources: tuple[int, ...]  # hold `top`, now or after rolling forward
    participants: tuple[int, ...]  # their gradients count; the others are spares and contribute zeros
    late: tuple[int, ...] = ()  # participants that heal during the first step, and count from the second on
    rolls_forward: frozenset[tuple[int, int]] = field(default_factory=frozenset)  # (replica, rank)
    lineage: Lineage = ()  # of `top`
    reason: str = ""

    def sources_of(self, healer: int) -> tuple[int, ...]:
        """The members from which a healing replica fetches its state; each replica starts with another one."""
        turn = self.healing.index(healer) % len(self.sources)
        return (self.sources[turn:] + self.sources[:turn])[:MAX_SOURCES]

    def transfers_of(self, index: int) -> frozenset[int]:
        """The healing replicas whose state transfer needs this replica as receiver or source."""
        return frozenset(
            healer for healer in self.healing if healer == index or index in self.sources_of(healer)
        )


def decide(members: Sequence[ReplicaClaim], number: int = 0) -> QuorumPlan:
    """The plan for a quorum of these members (in quorum order)."""
    rolls = _rolls_forward(members)
    places = [_effective(member, index, rolls) for index, member in enumerate(members)]
    top = max(places, key=by_age)
    sources = _sources(members, places, top)
    healing = [
        index
        for index, member in enumerate(members)
        if index not in sources and (places[index] != top or member.init_sync)
    ]
    participants = _participants(members)
    late = () if top == FRESH else _late(members, healing)
    term = max(1 + max(claim.seen for member in members for claim in member.ranks), number)
    rolls = {(replica, rank) for replica, rank in rolls if replica not in healing}
    steady = [index for index in sources if not any(replica == index for replica, _ in rolls)]
    reason = _reason(members, top, steady or sources, healing, participants, late, rolls)
    return QuorumPlan(
        term=term,
        top=top,
        healing=tuple(healing),
        sources=tuple(steady or sources),
        participants=tuple(participants),
        late=late,
        rolls_forward=frozenset(rolls),
        lineage=_lineage(members, sources, rolls, top),
        reason=reason,
    )


def by_age(position: Position) -> tuple[int, int]:
    """The newer of two states has the greater key."""
    return position[1], position[0]


@dataclass(frozen=True)
class Conflict:
    """A complete state that is dropped although the winning state lacks some of its steps."""

    replica: int
    step: int  # of its state
    since: int  # the steps after this one are dropped


def find_conflicts(members: Sequence[ReplicaClaim], plan: QuorumPlan) -> list[Conflict]:
    """The healing members that hold steps which the winning state lacks."""
    found = []
    for index in plan.healing:
        claim = members[index].ranks[0]
        if any(one.torn for one in members[index].ranks) or not claim.lineage:
            continue
        since = count_common(claim.lineage, plan.lineage)
        if claim.step > since:
            found.append(Conflict(index, claim.step, since))
    return found


def count_common(own: Lineage, other: Lineage) -> int:
    """How many steps two states have in common: up to the last that one group committed for both."""
    mine, theirs = dict(own), dict(other)
    if both := mine.keys() & theirs.keys():
        return max(min(mine[term], theirs[term]) for term in both)
    # the later one began from a checkpoint, or its lineage is cut off: assume that the older steps are common
    first = max(own[0], other[0])
    return min(first[1], own[-1][1])


def extend(lineage: Lineage, position: Position) -> Lineage:
    """The lineage after this step."""
    before = lineage[:-1] if lineage and lineage[-1][0] == position[0] else lineage
    return (*before, position)[-MAX_LINEAGE:]


def describe_conflict(conflict: Conflict, plan: QuorumPlan, names: Sequence[str]) -> str:
    """A sentence about both states and their steps."""
    sources = ", ".join(names[index] for index in plan.sources)
    return (
        f"{names[conflict.replica]} drops its {conflict.step - conflict.since} steps after step {conflict.since}"
        f" (it holds step {conflict.step}): {sources} holds step {plan.top[1]}, and the two have trained"
        f" separately since step {conflict.since}"
    )


def find_mismatch(members: Sequence[ReplicaClaim], names: Sequence[str], source: int) -> tuple[int, str]:
    """The first replica that cannot train with the source, and why; (-1, "") for none."""
    held = members[source]
    for index, member in enumerate(members):
        if len(member.ranks) != len(held.ranks):
            return index, (
                f"replica {names[index]} has {len(member.ranks)} ranks and {names[source]} has {len(held.ranks)}:"
                " start all replicas with the same --nproc-per-node"
            )
        if member.backend and held.backend and member.backend != held.backend:
            return index, (
                f"replica {names[index]} communicates over {member.backend} and {names[source]} over {held.backend}: a script that"
                " asks torch.cuda.is_available() may have found no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES there"
            )
    return -1, ""


def _rolls_forward(members: Sequence[ReplicaClaim]) -> set[tuple[int, int]]:
    """Ranks whose step in doubt counts as committed: a rank saw the result, or all ranks of that group have voted.

    A rank that has voted holds the reduced gradients, equal on all ranks. So the step can be committed if every
    continuing member voted; it must be if one saw the result, because that one's state has changed already.
    """
    everyone = [
        (replica, rank, claim)
        for replica, member in enumerate(members)
        for rank, claim in enumerate(member.ranks)
    ]
    found = set()
    for replica, rank, claim in everyone:
        if claim.torn or not claim.pending or claim.pending < claim.term:
            continue
        after = (claim.pending, claim.step + 1)
        seen = any(other.position == after for _, _, other in everyone)
        unanimous = all(
            other.position == after or (other.pending == claim.pending and other.step == claim.step)
            for _, _, other in everyone
            if other.seen >= claim.pending  # other ranks were not in that group
        )
        if seen or unanimous:
            found.add((replica, rank))
    return found


def _sources(members: Sequence[ReplicaClaim], places: Sequence[Position], top: Position) -> list[int]:
    """The replicas that hold the winning state; only one of fresh ones, so that all start equal."""
    sources = [index for index, place in enumerate(places) if place == top and top != NOWHERE]
    if top == FRESH and any(member.init_sync for member in members):
        # a replica that has trained in a group already wins over one that has just started
        return [max(sources, key=lambda index: (members[index].ranks[0].seen, -index))]
    return sources


def _effective(member: ReplicaClaim, index: int, rolls: set[tuple[int, int]]) -> Position:
    """The newest state that all ranks of a replica hold once steps in doubt are decided; NOWHERE: none."""
    held = [
        {(claim.pending, claim.step + 1) if (index, rank) in rolls else claim.position, claim.arrived}
        for rank, claim in enumerate(member.ranks)
    ]
    return max(set.intersection(*held) or {NOWHERE}, key=by_age)


def _lineage(
    members: Sequence[ReplicaClaim], sources: Sequence[int], rolls: set[tuple[int, int]], top: Position
) -> Lineage:
    """The lineage of the winning state; a new one if no source was in a group yet."""
    for index in sources:
        claim = members[index].ranks[0]
        if lineage := claim.arrived_lineage if claim.arrived == top else claim.lineage:
            return extend(lineage, top) if (index, 0) in rolls else lineage
    return (top,)


def _participants(members: Sequence[ReplicaClaim]) -> list[int]:
    """The members whose gradients count: all, or as many as configured."""
    everyone = list(range(len(members)))
    wanted = max(member.min_replicas for member in members)
    return everyone[:wanted] if any(member.fixed for member in members) else everyone


def _late(members: Sequence[ReplicaClaim], healing: Sequence[int]) -> tuple[int, ...]:
    """The members that heal during the first step: those that can, if the others are enough without them."""
    late = tuple(index for index in healing if members[index].beside)
    enough = len(members) - len(late) >= max(member.min_replicas for member in members)
    return late if enough and not any(member.fixed for member in members) else ()


def _reason(
    members: Sequence[ReplicaClaim],
    top: Position,
    sources: Sequence[int],
    healing: Sequence[int],
    participants: Sequence[int],
    late: Sequence[int],
    rolls: set[tuple[int, int]],
) -> str:
    if top == NOWHERE:
        return "no member holds a complete state: restart from a checkpoint"
    parts = [f"{len(members)} members continue from step {top[1]}"]
    if rolls:
        parts.append(f"step {top[1]} was committed before the failure: {len(rolls)} ranks roll forward")
    if healing:
        during = " during their first step" if late else ""
        parts.append(f"{_names(healing)} heal from {_names(sources)}{during}")
    if len(participants) < len(members):
        parts.append(f"gradients of {_names(participants)} count")
    return "; ".join(parts)


def _names(indexes: Sequence[int]) -> str:
    return ", ".join(str(index) for index in indexes)
