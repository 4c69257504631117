"""How everything looks at one moment (`Status`), and what the page of a job shows: one small JSON object per refresh; larger
parts are asked for (web.py). On the loop's thread.

Nothing of the page grows with the number of replicas but one letter for each rank and the list of those that are not well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from allranks import __version__
from allranks.blackbox.files import job_folders
from allranks.lighthouse.history import NONE, Sample, read_jobs, row_of
from allranks.lighthouse.metrics import SPENT
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session, Sessions
from allranks.lighthouse.state import QuorumState, Replica
from allranks.lighthouse.status import ReplicaStatus, Status, TrainingStatus
from allranks.lighthouse.training import Scene
from allranks.model.cluster import AGENT, PublishedIncident, read_health
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
    spares = state.last.spares if state.last else ()
    # with thousands of replicas once a second: operations on whole sets
    alive = frozenset(state.replicas).difference(service.sessions.observers, spares)
    members = len(state.members.intersection(alive))
    others = alive.difference(state.members, state.evicted, state.cooling) if len(alive) > members else ()
    opened = tuple(
        OpenIncident(one.kind, one.sentence, one.outcome, one.decided)
        for one in service.agents.incidents
        if not one.closed
    )
    return Scene(
        members=members,
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
        joining=others,
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
    if replica.asking is None:
        return "member" if name in members else "connected"
    if name in spares:
        return "spare"
    others = [member.session for member in state.last.members] if state.last else []
    apart = state.reach.apart_from(now, replica.session, others)
    return "unreachable" if apart or replica.session in state.reach.unserved else "asking"


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


MAX_INCIDENTS, MAX_EVENTS, MAX_ODD = 50, 30, 24
LEVELS = ("good", "warn", "bad")
_LETTERS = {"member": "c", "asking": "w", "lost": "d", "evicted": "d", "finished": "e", "left": "e"}
_WELL = frozenset({"member", "observer", "spare", "finished", "connected", "asking"})
#: Events that a reader of the page wants to know; the rest is protocol.
NEWS = frozenset(
    {"lost", "left", "finished", "evicted", "let_in", "returned", "incident", "leader", "went_back"}
)
OLD_S = 15.0  # a job that has written nothing for longer has ended


def page_view(service: Service) -> dict[str, object]:
    """Everything that changes from second to second."""
    training = service.training.describe(make_scene(service))
    counts, odd, letters = _replicas(service)
    cells = service.agents.ranks.cells() or letters
    guilty = sorted({rank for one in service.agents.incidents if not one.closed for rank in one.ranks})
    return {
        "job": service.job,
        "now": round(time.time(), 2),
        "line": {"state": training.word, "level": training.state, "text": training.sentence},
        "numbers": _numbers(service, training, cells),
        "sample": row_of(take_sample(service, training, cells)),
        "cells": cells,
        "cell": "rank" if service.agents.ranks.reports else "replica",
        "guilty": guilty,
        "layout": service.agents.ranks.version,
        "incidents": list(_incidents(service.agents.incidents)),
        "replicas": counts,
        "odd": odd,
        "events": [one for one in list(service.event_log.history)[-300:] if one.kind in NEWS][-MAX_EVENTS:],
        "token_file": service.agents.ranks.token_file() or service.token_file,
        "goodput": SPENT[-1]() if SPENT else None,
        "address": service.address,
        "reason": service.coordinator.reason if service.state.number else "",
    }


def take_sample(service: Service, training: TrainingStatus, cells: str) -> Sample:
    """The newest row of the charts."""
    times = service.agents.ranks.step_times()
    loss = service.agents.ranks.loss()
    ranks = len(cells) - cells.count(".")
    alive = training.members if training.replicas else ranks - cells.count("d") - cells.count("e")
    total = training.replicas or ranks
    idle = training.word in ("looking", "hung", "stalled", "recovering", "stopped")
    return Sample(
        at=round(time.time(), 2),
        step=_known(training.step if training.step >= 0 else None),
        steps_per_s=0.0 if idle and training.step >= 0 else _known(training.steps_per_s),
        calls_per_s=0.0 if idle and training.calls else _known(training.calls_per_s),
        step_p50_s=_known(times and times[0]),
        step_p99_s=_known(times and times[1]),
        loss=_known(loss),
        tokens_per_s=0.0 if idle and service.agents.ranks.work().tokens else _known(training.tokens_per_s),
        alive=_known(alive if total else None),
        total=_known(total or None),
        level=float(LEVELS.index(training.state) if training.state in LEVELS else 1),
    )


def _known(value: float | None) -> float:
    return NONE if value is None else float(value)


def _numbers(service: Service, training: TrainingStatus, cells: str) -> dict[str, object]:
    return {
        "step": training.step,
        "steps_per_s": training.steps_per_s,
        "calls": training.calls,
        "calls_per_s": training.calls_per_s,
        "members": training.members,
        "replicas": training.replicas,
        "nodes": service.agents.count,
        "ranks": len(cells) - cells.count("."),
        "up_s": round(service.clock() - service.started, 1),
        "quorum": service.state.number,
    }


def _incidents(incidents: Iterable[PublishedIncident]) -> Iterator[dict[str, object]]:
    """One line each, the newest first, open ones before."""
    newest = list(incidents)[::-1]
    newest.sort(key=lambda one: one.closed)
    for one in newest[:MAX_INCIDENTS]:
        yield {
            "id": one.incident, "kind": one.kind, "at": one.at, "sentence": one.sentence, "cause": one.cause,
            "outcome": one.outcome or one.decided, "closed": one.closed, "took_s": one.took_s, "ranks": one.ranks,
            "node": one.node, "story": one.story, "evidence": one.evidence, "path": one.path,
        }  # fmt: skip


def _replicas(service: Service) -> tuple[dict[str, int], list[dict[str, object]], str]:
    """How many are in each state, those that are not well, and a letter for each in natural order."""
    state, now = service.state, service.now()
    standing = standing_of(state, now)
    gone = service.training.departed
    for name, one in gone.items():
        standing.setdefault(name, one.kind)
    own = (name for name in standing if not name.startswith(AGENT) and standing[name] != "observer")
    names = sorted(own, key=natural) if gone else list(own)
    odd: list[dict[str, object]] = []
    for name in names:
        if standing[name] not in _WELL and len(odd) < MAX_ODD:
            left = gone.get(name)
            why = left.reason if left is not None else state.evicted.get(name, "")
            odd.append({"replica": name, "state": standing[name], "why": why, "at": left.at if left else 0})
    counts = Counter(standing[name] for name in names)
    return dict(counts), odd, "".join(_LETTERS.get(standing[name], "s") for name in names)


def overview(service: Service) -> list[dict[str, object]]:
    """The jobs of this user on this machine, by what their lighthouses wrote last; this one first."""
    now = time.time()
    found = []
    for facts in read_jobs(job_folders()):
        at = facts.get("at")
        old = not isinstance(at, int | float) or now - at > OLD_S
        found.append({**facts, "ended": old, "here": facts.get("address") == service.address})
    return sorted(found, key=lambda one: (not one["here"], bool(one["ended"]), str(one.get("job"))))


def tick(service: Service) -> None:
    """Once a second: a row of the history, and what the job says now."""
    cells = service.agents.ranks.cells()
    training = service.training.describe(make_scene(service))
    service.history.note(take_sample(service, training, cells))
    service.history.describe(
        {
            "job": service.job,
            "address": service.address,
            "at": round(time.time(), 1),
            "level": training.state,
            "text": training.sentence[:1500],
            "ranks": len(cells) or training.replicas,
            "replicas": training.replicas,
        }
    )
