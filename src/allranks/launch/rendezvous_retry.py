"""Meets again when a meeting falls apart, when a node has left, or when etcd is back. Runs in the agent.

torchrun's rendezvous can end with a node that has already been counted out (its sign of life came late on a loaded
machine). The others then wait for that node's word in the store, for minutes, and die. GroupSpec again costs seconds.

torchrun's agents restart their ranks when a node wants to join, but not when one has left: they rely on their own ranks
to fail. A rank that computes, or waits in NCCL for a node that is no more, does not fail for a long time.

torchrun's agents end, and their ranks with them, when etcd does not answer for a moment. Ranks need no etcd to train.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from allranks.errors import EtcdError
from allranks.launch.torchrun_patches import MEETING, WAITING, replaced

log = logging.getLogger("allranks.agent")

#: In one meeting; nodes that keep missing each other so often have another problem.
ATTEMPTS = 10
#: How long agents that want to meet wait for an etcd that is away, or for a new host of a c10d rendezvous.
AWAY_S = 60.0
PAUSE_S = 0.5


@dataclass
class RendezvousRetry:
    """The meetings that this agent has been to the end of, and whether it could go to one now."""

    held: int = 0
    nodes: int = 0  # that came to the last one
    away_s: float | None = None  # since when the place of the meetings does not answer (monotonic)

    def went_well(self, group: Any) -> None:
        """A meeting has come to its end."""
        self.held += 1
        self.nodes = int(group.group_world_size)

    def answered(self, error: Exception | None) -> float:
        """Notes whether the place of the meetings answered; for how long it has been away."""
        now = time.monotonic()
        if error is None:
            if self.away_s is not None:
                log.warning("the rendezvous answers again after %.1f s", now - self.away_s)
            self.away_s = None
            return 0.0
        if self.away_s is None:
            log.warning(
                "the rendezvous does not answer (%s): ranks train on, nodes can neither come nor go", error
            )
            self.away_s = now
        return now - self.away_s


@contextlib.contextmanager
def meeting_again() -> Iterator[RendezvousRetry]:
    """While it is open, torchrun's agents repeat a rendezvous whose members do not all speak up, or whose etcd is away."""
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    meetings = RendezvousRetry()

    def patient(ordinary: Any) -> Any:
        def rendezvous(agent: Any, group: Any) -> None:
            attempt = 1
            while True:
                try:
                    ordinary(agent, group)
                    meetings.answered(None)
                    meetings.went_well(group)
                    return
                except (RendezvousConnectionError, EtcdError) as error:
                    if not _comes_back(group.spec.rdzv_handler) or meetings.answered(error) > AWAY_S:
                        raise
                    time.sleep(PAUSE_S)
                except (LookupError, DistStoreError) as error:
                    if attempt == ATTEMPTS:
                        raise
                    attempt += 1
                    log.warning("a node went away during the rendezvous (%s): meeting again", error)

        return rendezvous

    with replaced(MEETING, patient, "a rendezvous that falls apart will not be repeated"):
        yield meetings


@contextlib.contextmanager
def between_meetings(meetings: RendezvousRetry, restarts: bool) -> Iterator[None]:
    """While it is open, ranks train on while etcd is away; with `restarts`, a node that leaves makes the others meet."""
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    def watchful(ordinary: Any) -> Any:
        def num_nodes_waiting(handler: Any) -> int:
            try:
                waiting = int(ordinary(handler))
            except RendezvousConnectionError as error:
                if not _comes_back(handler):
                    raise
                meetings.answered(error)
                return 0
            meetings.answered(None)
            state = handler._state_holder.state
            left = count_departed(meetings.nodes, len(state.participants), state.closed) if restarts else 0
            if left and not waiting:
                log.warning("%d of %d nodes left: meeting again in the new world", left, meetings.nodes)
            return waiting or left

        return num_nodes_waiting

    with replaced(WAITING, watchful, "a node that leaves is noticed only when ranks fail"):
        yield


def count_departed(met: int, present: int, closed: bool) -> int:
    """How many of the nodes that met have left. At the end of a job they may: a closed rendezvous takes nobody back."""
    return 0 if closed else max(0, met - present)


def _comes_back(handler: Any) -> bool:
    """A server may be restarted; a c10d store is lost with the agent that hosts it."""
    return str(handler.get_backend()).startswith("etcd")
