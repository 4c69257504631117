"""How everything looks from outside at one moment. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks import __version__
from allranks.lighthouse.sessions import Session, Sessions
from allranks.lighthouse.state import QuorumState, Replica
from allranks.lighthouse.status import ReplicaStatus, Status
from allranks.lighthouse.training import Scene
from allranks.model.cluster import LOOKING

if TYPE_CHECKING:
    from allranks.lighthouse.service import Service


def take_snapshot(service: Service) -> Status:
    state, now = service.state, service.now()
    return Status(
        schema=1,
        address=service.address,
        leading=service.leading,
        leader=service.address if service.leading else service.leader,
        epoch=state.epoch,
        number=state.number,
        reason=service.coordinator.reason,
        waiting=service.coordinator.waiting,
        quorum=state.last,
        replicas=replica_rows(state, service.sessions, now),
        lost={name: gone.reason for name, gone in state.gone.items() if not gone.finished},
        evicted=dict(state.evicted),
        history=tuple(service.event_log.history),
        incidents=tuple(service.agents.incidents),
        up_s=round(service.clock() - service.started, 3),
        slept_s=round(service.awake.slept_s, 3),
        connections=sum(1 for each in service.sessions if each.peer is not None),
        over=state.over,
        events=dict(service.event_log.counts),
        job=service.job,
        version=__version__,
        training=service.training.describe(_scene(service)),
        pace=tuple(service.training.samples),
        departed=tuple(one for name, one in service.training.departed.items() if name not in state.replicas),
    )


def _scene(service: Service) -> Scene:
    """What the first line of the page needs besides steps; spares are not missed."""
    state = service.state
    spares = frozenset(state.last.spares) if state.last else frozenset()
    alive = frozenset(
        name for name, replica in state.replicas.items() if not replica.observer and name not in spares
    )
    health = next((each.health for each in service.sessions if each.observer and each.health), "")
    hung = any(one.kind == "hang" and not one.closed for one in service.agents.incidents)
    return Scene(
        sum(1 for name in state.members if name in state.replicas),
        alive,
        service.agents.count,
        service.coordinator.waiting,
        health,
        state.over,
        service.leading,
        service.leader,
        alive - state.members - state.evicted.keys() - state.cooling.keys(),
        hung or any(each.observer and each.health.startswith(LOOKING) for each in service.sessions),
    )


def replica_rows(state: QuorumState, sessions: Sessions, now: float) -> tuple[ReplicaStatus, ...]:
    """One row per living replica and per lost member of the last quorum, sorted by name."""
    members = state.members
    spares = frozenset(state.last.spares) if state.last else frozenset()
    rows = []
    for name, replica in state.replicas.items():
        standing = _standing(replica, state, members, spares, now)
        rows.append(_row(replica, sessions.of(name), standing, now))
    for name, gone in state.gone.items():
        if name not in state.replicas:
            standing = "finished" if gone.finished else "left" if gone.left else "lost"
            heard_s = round(now - gone.at, 3)
            rows.append(
                ReplicaStatus(name, gone.session, "", standing, -1, -1, 0.0, gone.reason, heard_s, "", 0)
            )
    return tuple(sorted(rows, key=lambda row: row.replica))


def _standing(
    replica: Replica, state: QuorumState, members: frozenset[str], spares: frozenset[str], now: float
) -> str:
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
        apart = (
            state.reach.apart_from(now, replica.session, [m.session for m in state.last.members])
            if state.last
            else ()
        )
        return (
            "spare"
            if name in spares
            else "unreachable"
            if apart or replica.session in state.reach.unserved
            else "asking"
        )
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
