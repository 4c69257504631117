"""How the replicas look from outside. Reads only."""

from __future__ import annotations

from allranks.lighthouse.sessions import Session, Sessions
from allranks.lighthouse.state import Replica, State
from allranks.lighthouse.status import ReplicaStatus


def replica_rows(state: State, sessions: Sessions, now: float) -> tuple[ReplicaStatus, ...]:
    """One row per living replica and per lost member of the last quorum, sorted by name."""
    members = state.members
    spares = frozenset(state.last.spares) if state.last else frozenset()
    rows = []
    for name, replica in state.replicas.items():
        standing = _standing(replica, state, members, spares)
        rows.append(_row(replica, sessions.of(name), standing, now))
    for name, gone in state.gone.items():
        if name not in state.replicas:
            standing = "finished" if gone.finished else "left" if gone.left else "lost"
            heard_s = round(now - gone.at, 3)
            rows.append(
                ReplicaStatus(name, gone.session, "", standing, -1, -1, 0.0, gone.reason, heard_s, "", 0)
            )
    return tuple(sorted(rows, key=lambda row: row.replica))


def _standing(replica: Replica, state: State, members: frozenset[str], spares: frozenset[str]) -> str:
    name = replica.name
    if replica.observer:
        return "observer"
    if name in state.evicted:
        return "evicted"
    if name in state.cooling:
        return "cooling"
    if not replica.connected:
        return "expected"
    if replica.asking is not None:
        return "spare" if name in spares else "asking"
    return "member" if name in members else "connected"


def _row(replica: Replica, ranks: list[Session], standing: str, now: float) -> ReplicaStatus:
    return ReplicaStatus(
        replica=replica.name,
        session=replica.session,
        node=replica.node,
        state=standing,
        step=max((each.step for each in ranks), default=-1),
        progress=min((each.progress for each in ranks), default=-1),
        idle_s=round(max((each.idle_s for each in ranks), default=0.0), 3),
        health=next((each.health for each in ranks if each.health), ""),
        heard_s=round(max(0.0, now - min((each.heard for each in ranks), default=replica.since)), 3),
        address=next((each.peer.address for each in ranks if each.peer), ""),
        ranks=sum(1 for each in ranks if each.peer),
    )
