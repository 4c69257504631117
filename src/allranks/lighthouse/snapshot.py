"""How everything looks from outside at one moment. Reads only."""

from __future__ import annotations

from allranks import __version__
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session, Sessions
from allranks.lighthouse.state import QuorumState, Replica
from allranks.lighthouse.status import ReplicaStatus, Status
from allranks.lighthouse.training import Scene
from allranks.model.cluster import AGENT, read_health
from allranks.model.job_state import AgentState, OpenIncident


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
        training=service.training.describe(make_scene(service)),
        departed=tuple(one for name, one in service.training.departed.items() if name not in state.replicas),
    )


def make_scene(service: Service) -> Scene:
    """What the first line of the page needs besides steps; spares are not missed."""
    state = service.state
    spares = frozenset(state.last.spares) if state.last else frozenset()
    alive = frozenset(
        name for name, replica in state.replicas.items() if not replica.observer and name not in spares
    )
    opened = tuple(
        OpenIncident(one.kind, one.sentence, one.outcome, one.decided)
        for one in service.agents.incidents
        if not one.closed
    )
    return Scene(
        members=sum(1 for name in state.members if name in state.replicas),
        alive=alive,
        nodes=service.agents.count,
        agents=tuple(
            AgentState(*read_health(each.health))
            for name in service.sessions.observers
            if name.startswith(AGENT)
            for each in service.sessions.of(name)
        ),
        incidents=opened,
        waiting=service.coordinator.waiting,
        over=state.over,
        leading=service.leading,
        leader=service.leader,
        work=service.agents.ranks.work(),
        joining=alive - state.members - state.evicted.keys() - state.cooling.keys(),
    )


def standing_of(state: QuorumState, now: float) -> dict[str, str]:
    """The state of every replica that is here, and of lost members of the last quorum, in the order of their names."""
    members = state.members
    spares = frozenset(state.last.spares) if state.last else frozenset()
    found = {
        name: _standing(replica, state, members, spares, now) for name, replica in state.replicas.items()
    }
    for name, gone in state.gone.items():
        found.setdefault(name, "finished" if gone.finished else "left" if gone.left else "lost")
    return dict(sorted(found.items(), key=lambda item: natural(item[0])))


def natural(name: str) -> tuple[str, int]:
    """Sorts replica-2 before replica-10."""
    digits = len(name) - len(name.rstrip("0123456789"))
    return (name[: len(name) - digits], int(name[-digits:])) if 0 < digits < 19 else (name, -1)


def replica_rows(state: QuorumState, sessions: Sessions, now: float) -> tuple[ReplicaStatus, ...]:
    """One row per living replica and per lost member of the last quorum, sorted by name."""
    rows = []
    for name, standing in standing_of(state, now).items():
        if name in state.replicas:
            rows.append(_row(state.replicas[name], sessions.of(name), standing, now))
        else:
            gone = state.gone[name]
            heard_s = round(now - gone.at, 3)
            rows.append(
                ReplicaStatus(name, gone.session, "", standing, -1, -1, 0.0, gone.reason, heard_s, "", 0)
            )
    return tuple(rows)


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
