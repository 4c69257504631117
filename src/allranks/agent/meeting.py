"""Meets again when a meeting falls apart. Runs in the agent.

torchrun's rendezvous can end with a node that has already been counted out (its sign of life came late on a loaded
machine). The others then wait for that node's word in the store, for minutes, and die. Meeting again costs seconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from allranks.agent.doors import MEETING, replaced

log = logging.getLogger("allranks.agent")

#: In one meeting; nodes that keep missing each other so often have another problem.
ATTEMPTS = 10


@dataclass
class Meetings:
    """How many meetings this agent has been to the end of."""

    held: int = 0


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
                    return
                except (LookupError, DistStoreError) as error:
                    if attempt == ATTEMPTS:
                        raise
                    log.warning("a node went away during the rendezvous (%s): meeting again", error)

        return rendezvous

    with replaced(MEETING, patient, "a rendezvous that falls apart will not be repeated"):
        yield meetings
