"""What the page of a job shows, as one small JSON object per refresh; larger parts are asked for (web.py). On the loop's thread.

Nothing here grows with the number of replicas but one letter for each rank and the list of those that are not well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from allranks.blackbox.files import job_folders
from allranks.lighthouse.history import NONE, Sample, read_jobs, row_of
from allranks.lighthouse.metrics import SPENT
from allranks.lighthouse.service import Service
from allranks.lighthouse.snapshot import make_scene, natural, standing_of
from allranks.lighthouse.status import TrainingStatus
from allranks.model.cluster import AGENT, PublishedIncident

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
