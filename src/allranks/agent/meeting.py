"""Meets again when a meeting falls apart, or when a node has left. Runs in the agent.

torchrun's rendezvous can end with a node that has already been counted out (its sign of life came late on a loaded
machine). The others then wait for that node's word in the store, for minutes, and die. Meeting again costs seconds.

torchrun's agents restart their ranks when a node wants to join, but not when one has left: they rely on their own ranks
to fail. A rank that computes, or waits in NCCL for a node that is no more, does not fail for a long time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from allranks.agent.doors import MEETING, WAITING, replaced

log = logging.getLogger("allranks.agent")

#: In one meeting; nodes that keep missing each other so often have another problem.
ATTEMPTS = 10


@dataclass
class Meetings:
    """The meetings that this agent has been to the end of."""

    held: int = 0
    nodes: int = 0  # that came to the last one


@contextlib.contextmanager
def meeting_again() -> Iterator[Meetings]:
    """While it is open, torchrun's agents repeat a rendezvous whose members do not all speak up."""
    from torch.distributed import DistStoreError

    meetings = Meetings()

    def patient(ordinary: Any) -> Any:
        def rendezvous(agent: Any, group: Any) -> None:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    ordinary(agent, group)
                    meetings.held += 1
                    meetings.nodes = int(group.group_world_size)
                    return
                except (LookupError, DistStoreError) as error:
                    if attempt == ATTEMPTS:
                        raise
                    log.warning("a node went away during the rendezvous (%s): meeting again", error)

        return rendezvous

    with replaced(MEETING, patient, "a rendezvous that falls apart will not be repeated"):
        yield meetings


@contextlib.contextmanager
def noticing_departures(meetings: Meetings) -> Iterator[None]:
    """While it is open, a node that gives no more sign of life makes the others meet again, as one that joins does."""

    def watchful(ordinary: Any) -> Any:
        def num_nodes_waiting(handler: Any) -> int:
            waiting = int(ordinary(handler))
            state = handler._state_holder.state
            left = count_departed(meetings.nodes, len(state.participants), state.closed)
            if left and not waiting:
                log.warning("%d of %d nodes left: meeting again in the new world", left, meetings.nodes)
            return waiting or left

        return num_nodes_waiting

    with replaced(WAITING, watchful, "a node that leaves is noticed only when ranks fail"):
        yield


def count_departed(met: int, present: int, closed: bool) -> int:
    """How many of the nodes that met have left. At the end of a job they may: a closed rendezvous takes nobody back."""
    return 0 if closed else max(0, met - present)
