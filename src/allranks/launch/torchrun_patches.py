"""The private methods and functions of torchrun's agent that we replace, and the rendezvous of its agents. Runs in the agent.

All that we replace is there, in the same shape, from torch 2.4 to 2.13; the tests run on 2.13. One that a later torch no
longer has costs one warning and the comfort behind it: the job runs as it does under plain torchrun.

The rendezvous' address: who listens at a c10d endpoint, and waiting until somebody does. All waiting is done in Python, where
Ctrl-C is heard; torch connects in C++ and hears nothing.

Repeating it: torchrun's rendezvous can end with a node that has already been counted out (its sign of life came late on a
loaded machine). The others then wait for that node's entry in the store, for minutes, and die. A new rendezvous costs
seconds. torchrun's agents restart their ranks when a node wants to join, but not when one has left: they rely on their own
ranks to fail. A rank that computes, or waits in NCCL for a node that is gone, does not fail for a long time. And they
end, and their ranks with them, when etcd does not answer for a moment. Ranks need no etcd to train.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from allranks.channel.frames import HeldPort
from allranks.errors import AllranksError, EtcdError
from allranks.supervise.orphans import Guard, sweep

if TYPE_CHECKING:
    import signal
    import subprocess

    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    Meeting = Callable[[SimpleElasticAgent, WorkerGroup], None]
    Looking = Callable[[SimpleElasticAgent, WorkerGroup], RunResult]
    Waiting = Callable[[DynamicRendezvousHandler], int]


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
HANDLING = "torch.distributed.elastic.multiprocessing.api:_terminate_process_handler"


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
def hearing_signals() -> Iterator[None]:
    """While it is open, no signal is lost. torchrun's handler raises an exception wherever the thread is; code that catches
    everything, such as a log handler, may swallow it. It is raised again at the next look at the ranks."""
    heard: list[int] = []

    def noting(ordinary: Callable[[int, object], None]) -> Callable[[int, object], None]:
        def handler(number: int, frame: object) -> None:
            heard.append(number)
            ordinary(number, frame)

        return handler

    def looking(ordinary: Looking) -> Looking:
        def monitor(agent: SimpleElasticAgent, group: WorkerGroup) -> RunResult:
            if heard:
                from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

                _terminate_process_handler(heard[0], None)
            return ordinary(agent, group)

        return monitor

    lost = "a Ctrl-C that comes while a line is logged may be lost"
    with replaced(HANDLING, noting, lost), replaced(MONITORING, looking, lost):
        yield


@contextlib.contextmanager
def ending_ranks(
    grace_s: int | None,
    on_stop: Callable[[set[int], bool], object],
    on_start: Callable[[subprocess.Popen[bytes]], object] = lambda rank: None,
) -> Iterator[None]:
    """While it is open, ranks end in the time that was asked for, and with all that they have started.

    torchrun obeys --shutdown-timeout only when the whole job ends, and not when it restarts; and it leaves alone what a
    rank that died had started. `grace_s` lies between SIGTERM and SIGKILL, None is torchrun's choice (30 s). `on_stop` gets
    the pids of ranks that are about to be asked to end, which is not an incident, and whether a signal is the reason;
    `on_start` gets each rank.
    """
    guard = Guard()

    def started(ordinary: Starting) -> Starting:
        def popen(handler: SubprocessHandler, *args: object, **kwargs: object) -> subprocess.Popen[bytes]:
            process = ordinary(handler, *args, **kwargs)
            guard.add(process.pid)
            on_start(process)
            return process

        return popen

    def stopped(ordinary: Callable[..., None]) -> Callable[..., None]:
        def close(context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
            ranks = [handler.proc for handler in context.subprocess_handlers.values()]
            asked = {rank.pid for rank in ranks if rank.poll() is None}
            on_stop(asked, _was_signalled())
            limit_s = timeout if grace_s is None else grace_s
            with _saying_who_is_left(ranks, limit_s):
                ordinary(context, death_sig, limit_s)
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


@contextlib.contextmanager
def _saying_who_is_left(ranks: list[subprocess.Popen[bytes]], limit_s: int) -> Iterator[None]:
    note = threading.Timer(_NOTE_S, _say_who_is_left, (ranks, limit_s))
    note.daemon = True
    note.start()
    try:
        yield
    finally:
        note.cancel()


def _was_signalled() -> bool:
    """Whether the launcher ends its ranks because it got a signal itself."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return isinstance(sys.exc_info()[1], SignalException)


def _say_who_is_left(ranks: list[subprocess.Popen[bytes]], limit_s: int) -> None:
    if left := sum(1 for rank in ranks if rank.poll() is None):
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


DEFAULT_PORT = 29400  # torchrun's
POLL_S = 0.2
#: Of one rendezvous; nodes that miss each other more often have another problem.
ATTEMPTS = 10
#: How long agents wait for an etcd that is away, or for a new host of a c10d rendezvous.
AWAY_S = 60.0
PAUSE_S = 0.5


class LaunchError(AllranksError):
    """The job could not be started, or its rendezvous failed."""


def port_in_use(endpoint: str, text: str) -> LaunchError:
    return LaunchError(
        f"the rendezvous port of {endpoint or 'this node'} is in use: {text}",
        hint="Find who holds it (ss -ltnp), or choose another with --rdzv-endpoint HOST:PORT "
        "(port 0 with --standalone takes a free one).",
    )


def nobody_answers(endpoint: str, text: str) -> LaunchError:
    return LaunchError(
        f"no rendezvous server answers at {endpoint}: {text}",
        hint="Is etcd running? `allranks etcd status`, `allranks etcd start`. For c10d, the node that "
        "hosts the endpoint must be started too, and the name must resolve to it.",
    )


def split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":") if ":" in endpoint.rpartition("]")[2] else (endpoint, "", "")
    return host.strip("[]") or "localhost", int(port) if port.isdigit() else DEFAULT_PORT


def who_listens(endpoint: str) -> Literal["nobody", "somebody", "elsewhere"]:
    """What is known of the port from here; `elsewhere` is an address of another machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(split(endpoint))
        except OSError as error:
            return "somebody" if error.errno == errno.EADDRINUSE else "elsewhere"
    return "nobody"


def wait_for_host(endpoint: str, deadline: float) -> bool:
    """Whether somebody listens at the endpoint, or this node may, before the deadline (monotonic)."""
    while True:
        if who_listens(endpoint) != "elsewhere":
            return True
        with contextlib.suppress(OSError), socket.create_connection(split(endpoint), timeout=2.0):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)


def refuse_other_server(endpoint: str, wait_s: float = 10.0) -> None:
    """LaunchError if this node's rendezvous port is held by something that is not a rendezvous store.

    torch would connect to it and wait without limit for an answer. Another agent's store answers at once.
    """
    if who_listens(endpoint) != "somebody":
        return
    import torch.distributed as dist

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # refused or closed: not a store either
            dist.TCPStore(*split(endpoint), is_master=False, timeout=timedelta(seconds=wait_s))
            answered.set()

    asking = threading.Thread(target=ask, name="allranks-ask-endpoint", daemon=True)
    asking.start()
    asking.join(wait_s)
    if not answered.is_set():
        raise port_in_use(endpoint, "what listens there is not a rendezvous store")


@dataclass
class RendezvousRetry:
    """The rendezvous that this agent has completed, and whether its server answers now."""

    held: int = 0
    nodes: int = 0  # in the last one
    away_s: float | None = None  # since when its server does not answer (monotonic)

    def completed(self, group: WorkerGroup) -> None:
        self.held += 1
        self.nodes = int(group.group_world_size)

    def answered(self, error: Exception | None) -> float:
        """Notes whether the server answered; for how long it has been away."""
        now = time.monotonic()
        if error is None:
            if self.away_s is not None:
                log.warning("the rendezvous answers again after %.1f s", now - self.away_s)
            self.away_s = None
            return 0.0
        if self.away_s is None:
            log.warning(
                "the rendezvous does not answer (%s): ranks continue training, nodes can neither join nor leave",
                error,
            )
            self.away_s = now
        return now - self.away_s


@contextlib.contextmanager
def repeating_rendezvous() -> Iterator[RendezvousRetry]:
    """While it is open, torchrun's agents repeat a rendezvous whose members do not all answer, or whose etcd is away."""
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    retry = RendezvousRetry()

    def patient(ordinary: Meeting) -> Meeting:
        def rendezvous(agent: SimpleElasticAgent, group: WorkerGroup) -> None:
            attempt = 1
            while True:
                try:
                    ordinary(agent, group)
                    retry.answered(None)
                    retry.completed(group)
                    return
                except (RendezvousConnectionError, EtcdError) as error:
                    if not _comes_back(group.spec.rdzv_handler) or retry.answered(error) > AWAY_S:
                        raise
                    time.sleep(PAUSE_S)
                except (LookupError, DistStoreError) as error:
                    if attempt == ATTEMPTS:
                        raise
                    attempt += 1
                    log.warning("a node went away during the rendezvous (%s): repeating it", error)

        return rendezvous

    with replaced(MEETING, patient, "a rendezvous that fails will not be repeated"):
        yield retry


@contextlib.contextmanager
def watching_members(retry: RendezvousRetry, restarts: bool) -> Iterator[None]:
    """While it is open, ranks continue training while etcd is away; with `restarts`, a node that leaves starts a new rendezvous."""
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    def watchful(ordinary: Waiting) -> Waiting:
        def num_nodes_waiting(handler: DynamicRendezvousHandler) -> int:
            try:
                waiting = int(ordinary(handler))
            except RendezvousConnectionError as error:
                if not _comes_back(handler):
                    raise
                retry.answered(error)
                return 0
            retry.answered(None)
            state = handler._state_holder.state
            left = count_departed(retry.nodes, len(state.participants), state.closed) if restarts else 0
            if left and not waiting:
                log.warning("%d of %d nodes left: a new rendezvous without them", left, retry.nodes)
            return waiting or left

        return num_nodes_waiting

    with replaced(WAITING, watchful, "a node that leaves is noticed only when ranks fail"):
        yield


def count_departed(met: int, present: int, closed: bool) -> int:
    """How many nodes have left since. At the end of a job they may: a closed rendezvous takes nobody back."""
    return 0 if closed else max(0, met - present)


def _comes_back(handler: RendezvousHandler) -> bool:
    """A server may be restarted; a c10d store is lost with the agent that hosts it."""
    return str(handler.get_backend()).startswith("etcd")
