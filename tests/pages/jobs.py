"""A lighthouse full of a job that does not exist: any number of ranks or replicas, healthy, hung or recovered."""

from __future__ import annotations

import json
import math
import time

from allranks.lighthouse.history import Sample
from allranks.lighthouse.messages import Beat, Hello
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session
from allranks.model.cluster import GpuReport, Member, NodeReport, PublishedIncident
from pages.gallery import hang_incident, story_page

HANG = (
    "Rank 1 (gpu-node-000) never entered all_reduce #60 of group default_pg; it sleeps at gallery.py:40 in "
    "load_batch"
)
DECIDED = "Nothing was done: --recovery on would restart the job"


class Silent:
    """A replica that is only there."""

    address = "10.0.0.1:1"

    def deliver(self, message: object, frame: bytes) -> None:
        """Takes it."""

    def close(self) -> None:
        """Goes."""


def enter(service: Service, name: str, node: str, role: str = "replica") -> Session:
    found = service.hello(Silent(), Hello(replica=name, session=f"s-{name}", node=node, role=role))
    assert isinstance(found, Session)
    return found


def whole_job(
    service: Service, ranks: int, state: str = "healthy", steps: bool = True, per_node: int = 8
) -> None:
    """Agents that report their ranks; `state` is healthy, looking, hung or recovered."""
    service.job = "llama-pretrain-42"
    for number in range(math.ceil(ranks / per_node)):
        own = tuple(range(number * per_node, min(ranks, (number + 1) * per_node)))
        node = f"gpu-node-{number:03d}"
        agent = enter(service, f"agent-{number}", node, "observer")
        for step in (1648, 1650, 1652):
            beat = Beat(step if steps else -1, step if steps else 60 * step, health=_health(state, number))
            service.beat(agent, beat)
        service.agents.ranks.note(node_report(number, node, own, state, steps), service.now())
    _history(service, ranks, state, steps)
    if state in ("hung", "recovered"):
        service.agents.report_incident(published(state, time.time() - (130 if state == "recovered" else 73)))


def _health(state: str, node: int) -> str:
    if node or state not in ("looking", "hung"):
        return ""
    waits = "ranks 0, 2-7 wait for rank 1 in all_reduce #60 of default_pg"
    return f"hung: {HANG}" if state == "hung" else f"stalled: {waits}"


def node_report(number: int, node: str, ranks: tuple[int, ...], state: str, steps: bool) -> NodeReport:
    still = state in ("looking", "hung")
    doing = "".join(
        "s" if still and rank == 1 else "w" if still or (rank * 7) % 5 == 0 else "c" for rank in ranks
    )
    return NodeReport(
        agent=f"agent-{number}",
        node=node,
        ranks=ranks,
        pids=tuple(4000 + rank for rank in ranks),
        doing=doing,
        steps=tuple(1652 if steps else -1 for _ in ranks),
        calls=tuple(98_000 + rank for rank in ranks),
        step_s=tuple(0.0 if still or not steps else 0.15 + 0.0003 * (rank % 40) for rank in ranks),
        memory_mb=tuple(14_200 for _ in ranks),
        places=tuple("all_reduce #60 of default_pg" if still and rank != 1 else "" for rank in ranks),
        loss=(2.31,) if steps and not number else (),
        gpus=tuple(GpuReport(i, 97, 61_000, 81_559, 64, 612, (4000 + rank,)) for i, rank in enumerate(ranks)),
        groups={f"tp_{ranks[0]}": ranks} if len(ranks) > 1 and number < 64 else {},
        token_file="/dev/shm/allranks-1000/llama-pretrain-42/token" if not number else "",
    )


def _history(service: Service, ranks: int, state: str, steps: bool) -> None:
    """Fifteen minutes."""
    now = time.time()
    for second in range(900, 0, -1):
        still = (state == "hung" and second < 73) or (state == "recovered" and 100 < second < 130)
        wave = 1 + 0.05 * math.sin(second / 23)
        service.history.note(
            Sample(
                at=now - second,
                step=1652.0 - second * 6 if steps else math.nan,
                steps_per_s=(0.0 if still else 6.6 * wave) if steps else math.nan,
                calls_per_s=math.nan if steps else (0.0 if still else 1234 * wave),
                step_p50_s=math.nan if still or not steps else 0.152 / wave,
                step_p99_s=math.nan if still or not steps else 0.171 / wave,
                loss=2.3 + second / 900 if steps else math.nan,
                alive=float(ranks - (state == "recovered" and 100 < second < 120)),
                total=float(ranks),
                level=2.0 if still else 0.0,
            )
        )


def published(state: str, at: float) -> PublishedIncident:
    incident, evidence = hang_incident(16)
    body = json.dumps(
        {
            "incident": incident.id,
            "advice": ["inspect gallery.py:40"],
            "ranks": [one.to_dict() for one in evidence],
            "timeline": True,
        }
    )
    closed = state == "recovered"
    return PublishedIncident(
        incident.id, HANG, node="gpu-node-000", cause="stuck_before_collective", at=at, kind="hang", ranks=(1,),
        outcome="rank 1 was ended; the launcher restarted the job" if closed else "", decided="" if closed else DECIDED,
        took_s=31.0 if closed else 0.0, closed=closed, story=story_page(16), evidence=body,
        path="/home/me/allranks-incidents/" + incident.id,
    )  # fmt: skip


def replica_job(service: Service, replicas: int) -> None:
    """A job in which one replica is lost and the others train; no agents."""
    service.job = "llama-pretrain-42"
    for i in range(replicas):
        found = enter(service, f"replica-{i}", f"gpu-node-{i // 8:03d}")
        service.beat(found, Beat(step=1650 + i % 3, progress=1650))
        service.join(found, Member(replica=f"replica-{i}", step=1650))
    service.accuse("replica-1", "process 4711 exited")
    service.agents.report_incident(published("recovered", time.time() - 130))
