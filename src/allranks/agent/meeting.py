"""Meets again when a meeting falls apart. Runs in the agent.

torchrun's rendezvous can end with a node that has already been counted out (its sign of life came late on a loaded
machine). The others then wait for that node's word in the store, for minutes, and die. Meeting again costs seconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("allranks.agent")

#: In one meeting; nodes that keep missing each other so often have another problem.
ATTEMPTS = 10


@contextlib.contextmanager
def meeting_again() -> Iterator[None]:
    """While it is open, torchrun's agents repeat a rendezvous whose members do not all speak up."""
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    ordinary = SimpleElasticAgent._rendezvous

    def rendezvous(agent: Any, group: Any) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                ordinary(agent, group)
                return
            except (LookupError, DistStoreError) as error:
                if attempt == ATTEMPTS:
                    raise
                log.warning("a node went away during the rendezvous (%s): meeting again", error)

    setattr(SimpleElasticAgent, "_rendezvous", rendezvous)  # noqa: B010 -- mypy refuses to assign to a method
    try:
        yield
    finally:
        setattr(SimpleElasticAgent, "_rendezvous", ordinary)  # noqa: B010
