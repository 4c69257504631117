"""The private doors of torchrun's agent that we use, and what is lost where torch has closed one. Runs in the agent.

All of them are there, in the same shape, from torch 2.4 to 2.13; the tests run on 2.13. A door that a later torch no
longer has costs one warning and the comfort behind it: the job runs as it does under plain torchrun.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger("allranks.agent")

MEETING = "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._rendezvous"
WAITING = "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler.num_nodes_waiting"
STARTING = "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler._popen"
MONITORING = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers"
STOPPING = "torch.distributed.elastic.multiprocessing.api:SubprocessContext._close"


@contextlib.contextmanager
def replaced(door: str, make: Callable[[Any], Any], without: str) -> Iterator[None]:
    """While it is open, `make(torch's own method)` stands at the door; `without` says what a missing door costs."""
    module, _, place = door.partition(":")
    owner_name, _, name = place.rpartition(".")
    try:
        owner = getattr(importlib.import_module(module), owner_name)
        ordinary = getattr(owner, name)
    except (ImportError, AttributeError):
        log.warning("this torch has no %s: %s", place, without)
        yield
        return
    setattr(owner, name, make(ordinary))
    try:
        yield
    finally:
        setattr(owner, name, ordinary)
