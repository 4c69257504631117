"""The private methods and functions of torchrun's agent that we replace, and what is lost where torch no longer has one. Runs in the agent.

All of them are there, in the same shape, from torch 2.4 to 2.13; the tests run on 2.13. One that a later torch no
longer has costs one warning and the comfort behind it: the job runs as it does under plain torchrun.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from allranks.channel.frames import HeldPort
from allranks.supervise.orphans import Guard, sweep

if TYPE_CHECKING:
    import signal
    import subprocess

    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

P = ParamSpec("P")
R = TypeVar("R")
Starting = Callable[..., "subprocess.Popen[bytes]"]

log = logging.getLogger("allranks.agent")

MEETING = "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._rendezvous"
WAITING = "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler.num_nodes_waiting"
STARTING = "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler._popen"
MONITORING = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers"
STOPPING = "torch.distributed.elastic.multiprocessing.api:SubprocessContext._close"
_NOTE_S = 3.0  # after this a line says what is waited for
CHOOSING = "torch.distributed.elastic.rendezvous.api:get_free_port"


@contextlib.contextmanager
def replaced(method: str, make: Callable[[Callable[P, R]], Callable[P, R]], without: str) -> Iterator[None]:
    """While it is open, `make(torch's own method)` is called instead; `without` says what a missing method costs."""
    module, _, place = method.partition(":")
    owner_name, _, name = place.rpartition(".")
    try:
        found = importlib.import_module(module)
        owner = getattr(found, owner_name) if owner_name else found
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


@contextlib.contextmanager
def ending_ranks(grace_s: int | None, on_stop: Callable[[set[int]], object]) -> Iterator[None]:
    """While it is open, ranks end in the time that was asked for, and with all that they have started.

    torchrun obeys --shutdown-timeout only when the whole job ends, and not when it restarts; and it leaves alone what a
    rank that died had started. `grace_s` lies between SIGTERM and SIGKILL, None is torchrun's choice (30 s).

    `on_stop` gets the pids of ranks that are about to be asked to end: that they do is no incident.
    """
    guard = Guard()

    def started(ordinary: Starting) -> Starting:
        def popen(handler: SubprocessHandler, *args: object, **kwargs: object) -> subprocess.Popen[bytes]:
            process = ordinary(handler, *args, **kwargs)
            guard.add(process.pid)
            return process

        return popen

    def stopped(ordinary: Callable[..., None]) -> Callable[..., None]:
        def close(context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
            ranks = [handler.proc for handler in context.subprocess_handlers.values()]
            asked = {rank.pid for rank in ranks if rank.poll() is None}
            on_stop(asked)
            limit_s = timeout if grace_s is None else grace_s
            note = threading.Timer(_NOTE_S, _say_who_is_left, (ranks, limit_s))
            note.daemon = True
            note.start()
            try:
                ordinary(context, death_sig, limit_s)
            finally:
                note.cancel()
            for rank in ranks:
                # one that ended well may have left an upload running
                if rank.pid in asked or rank.poll() != 0:
                    sweep(rank.pid)
                guard.remove(rank.pid)

        return close

    lost = "--shutdown-timeout is not obeyed at restarts, and children of a dead rank may stay"
    with replaced(STARTING, started, lost), replaced(STOPPING, stopped, lost):
        guard.start()
        try:
            yield
        finally:
            guard.close()


def _say_who_is_left(ranks: list[subprocess.Popen[bytes]], limit_s: int) -> None:
    left = sum(1 for rank in ranks if rank.poll() is None)
    if left:
        how = "they are killed after %d s (--shutdown-timeout)"
        log.warning(f"waiting for %d of %d ranks to end; {how}", left, len(ranks), limit_s)


@contextlib.contextmanager
def holding_master_port() -> Iterator[None]:
    """While it is open, nobody else gets the port that the agent chose for the ranks' store.

    torchrun finds a free port and lets it go; rank 0 binds it seconds later, after its imports. Until then the system
    may give it to any other process, and the job ends with "address already in use".
    """
    held: list[HeldPort] = []

    def choosing(ordinary: Callable[[], int]) -> Callable[[], int]:
        def get_free_port() -> int:
            try:
                port = HeldPort("::")  # every address of both families
            except OSError:
                port = HeldPort("0.0.0.0")
            held[:] = [port]
            return port.number

        return get_free_port

    with replaced(CHOOSING, choosing, "another process may take MASTER_PORT before rank 0 does"):
        try:
            yield
        finally:
            held.clear()
