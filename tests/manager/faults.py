"""Faults from inside a rank, at an exact place of an exact step.

    plan = FaultPlan((Fault("kill", replica="replica-1", at_step=12, at="inside vote"),))
    inject(manager, plan)           # after the manager was made, before the first step

Each fault fires once, and says so (`on_fire`, default: the log) before it strikes. Nothing in the manager knows
of this module: it wraps the methods of the one manager it is given.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from allranks.drill.self_faults import around
from allranks.errors import InputError

if TYPE_CHECKING:
    from allranks.manager.groups.generation import StepAttempt
    from allranks.manager.heal.healing import Healing
    from allranks.manager.manager import Manager
    from allranks.manager.resources import ManagerResources
    from allranks.manager.vote_mesh import VoteMesh

log = logging.getLogger("allranks.drill")

KINDS = ("kill", "stop", "hang", "slow", "leave", "error", "cut")
PLACES = (
    "step start", "before allreduce", "inside allreduce", "before vote", "half vote", "inside vote", "after vote",
    "before apply", "regrouping", "connecting", "sending state", "receiving state", "loading state",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens to which replica, when. `for_s` is the length of hang and slow; None: without end."""

    kind: str
    replica: str
    at_step: int = 0  # first chance: this step or a later one
    at: str = "step start"
    for_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown kind of fault {self.kind!r}", hint=f"one of: {', '.join(KINDS)}")
        if self.at not in PLACES:
            raise InputError(f"unknown place of a fault {self.at!r}", hint=f"one of: {', '.join(PLACES)}")


@dataclass(frozen=True)
class FaultPlan:
    """Faults for all replicas; each rank picks its own."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def of(self, replica: str) -> list[Fault]:
        """The faults of one replica, in order."""
        return [fault for fault in self.faults if fault.replica == replica]


def _tell(fault: Fault) -> None:
    log.warning("fault: %s of %s at step %d, %s", fault.kind, fault.replica, fault.at_step, fault.at)


@dataclass(eq=False)
class Injector:
    """The faults of one rank that have not fired yet."""

    manager: Manager
    left: list[Fault]
    on_fire: Callable[[Fault], None] = _tell
    fired: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reach(self, place: str) -> None:
        """The rank is at `place`: fires what is due there."""
        with self._lock:
            step = self.manager.current_step()
            due = next((f for f in self.left if f.at == place and f.at_step <= step), None)
            if due is None:
                return
            self.left.remove(due)
            self.fired.append(due)
        self.on_fire(due)
        strike(due, self.manager)


def strike(fault: Fault, manager: Manager) -> None:
    """Does it, to this process."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind in ("hang", "slow"):
        time.sleep(fault.for_s if fault.for_s is not None else 1e6)
    elif fault.kind == "leave":
        manager.shutdown(reason="left by plan")
    elif fault.kind == "error":
        manager.report_error(RuntimeError("error by plan"))
    elif fault.kind == "cut":
        manager.group.abort("cut by plan")


def inject(manager: Manager, plan: FaultPlan, on_fire: Callable[[Fault], None] = _tell) -> Injector:
    """Arms the faults of this manager's replica. Call it before the first step."""
    injector = Injector(manager, plan.of(manager.options.replica_id), on_fire)
    reach = injector.reach
    around(manager, "start_quorum", before=lambda: reach("step start"))
    around(
        manager,
        "_allreduce",
        before=lambda: reach("before allreduce"),
        after=lambda: reach("inside allreduce"),
    )
    around(manager, "_vote", before=lambda: reach("before vote"), after=lambda: reach("after vote"))
    around(manager, "should_commit", after=lambda: reach("before apply"))
    around(manager, "_load_healed", before=lambda: reach("loading state"))
    real = manager._vote

    def vote(attempt: StepAttempt) -> bool:
        """Half vote: one other has heard us. Inside the vote: all others have, and we have heard nobody."""
        if attempt.generation is not None:
            _watch_votes(attempt.generation.votes, injector)
        return real(attempt)

    manager._vote = vote  # type: ignore[method-assign]
    _when_open(manager, injector)
    return injector


def _when_open(manager: Manager, injector: Injector) -> None:
    """Regrouping and healing run in objects that exist only once the manager is open."""
    real, reach = manager._open, injector.reach

    def watch_fetch(healing: Healing) -> None:
        if healing.fetch is not None:
            around(healing.fetch, "_receive", before=lambda: reach("receiving state"))

    def opened() -> ManagerResources:
        fresh = manager._opened is None
        found = real()
        if fresh:
            around(found.regrouper, "_regroup", before=lambda: reach("regrouping"))
            around(found.regrouper, "_connect", before=lambda: reach("connecting"))
            around(found.server, "_send_stripe", before=lambda: reach("sending state"))
            healing = found.regrouper.healing
            around(healing, "prepare_fetch", after=lambda: watch_fetch(healing))
        return found

    manager._open = opened  # type: ignore[method-assign]


def _watch_votes(votes: VoteMesh, injector: Injector) -> None:
    """Counts the voters to which we have sent our vote."""
    real, wanted, sent = type(votes)._send, len(votes._lines), [0]

    def send(line: socket.socket, message: bytes) -> None:
        real(votes, line, message)
        sent[0] += 1
        if sent[0] == 1:
            injector.reach("half vote")
        if sent[0] == wanted:
            injector.reach("inside vote")

    votes._send = send  # type: ignore[method-assign]
