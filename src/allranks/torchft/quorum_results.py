"""From a quorum to what one rank of one replica does in it: torchft's rules. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.errors import ManagerError
from allranks.model.cluster import Quorum


@dataclass
class QuorumResult:
    """What a manager is told. Ranks are indices among the replicas, sorted by name."""

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    store_address: str = ""  # of the replica whose store the new group meets in
    max_step: int = 0
    max_replica_rank: int | None = None  # our place among those at the highest step; None: we are behind
    max_world_size: int = 1  # how many are at the highest step
    heal: bool = False  # we take our state from somebody
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list)  # who takes it from us
    commit_failures: int = 0
    replica_ids: list[str] = field(default_factory=list)


def quorum_results(quorum: Quorum, replica_id: str, group_rank: int, init_sync: bool = True) -> QuorumResult:
    """Everybody computes the same assignment from the same quorum; sources take turns by rank."""
    members = sorted(quorum.members, key=lambda member: member.replica)
    names = [member.replica for member in members]
    if replica_id not in names:
        raise ManagerError(f"{replica_id} is not in quorum {quorum.number}: {', '.join(names)}")
    me = names.index(replica_id)
    top = max(member.step for member in members)
    at_top = [place for place, member in enumerate(members) if member.step == top]
    primary = at_top[group_rank % len(at_top)]
    behind = [
        place
        for place, member in enumerate(members)
        if member.step != top or (init_sync and top == 0 and place != primary)
    ]
    sources = [place for place in range(len(members)) if place not in behind]
    source_of = {place: sources[(turn + group_rank) % len(sources)] for turn, place in enumerate(behind)}
    source = source_of.get(me)
    return QuorumResult(
        quorum_id=quorum.number,
        replica_rank=me,
        replica_world_size=len(members),
        store_address=members[primary].store,
        max_step=top,
        max_replica_rank=at_top.index(me) if me in at_top else None,
        max_world_size=len(at_top),
        heal=source is not None,
        recover_src_manager_address="" if source is None else members[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[place for place, src in source_of.items() if src == me],
        commit_failures=max(member.commit_failures for member in members),
        replica_ids=names,
    )
