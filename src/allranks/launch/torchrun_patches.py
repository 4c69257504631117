"""The private methods of torchrun's agent that we replace, and the endpoint of its rendezvous. Runs in the agent.

They have the same form from torch 2.4 to 2.13; the tests run on 2.13. If a later torch lacks one, a warning is logged, and
that part of the job runs as under plain torchrun.

Endpoint: whether a process listens at a c10d endpoint, and waiting until one does. We wait in Python, where Ctrl-C works;
torch connects in C++, where it does not.

Rendezvous: torchrun's rendezvous can complete with a node that was already dropped (its keep-alive was late on a loaded
machine). The others then wait minutes for that node's entry in the store, and exit; repeating the rendezvous takes
seconds. torchrun's agents restart ranks when a node joins, but not when one leaves: they rely on their own ranks to fail,
which takes long for a rank that computes, or waits in NCCL for the lost node. And they exit with their ranks when etcd
does not answer for a moment, although ranks need no etcd to train.
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
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from allranks.channel.frames import HeldPort, split_address
from allranks.errors import AllranksError, EtcdError
from allranks.launch.spares import Spares
from allranks.supervise.orphans import Guard, sweep

if TYPE_CHECKING:
    import signal
    import subprocess

    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from allranks.launch.node_agent import NodeAgent

    Starting = Callable[..., subprocess.Popen[bytes]]

log = logging.getLogger("allranks.agent")

_ELASTIC = "torch.distributed.elastic."
RENDEZVOUS = f"{_ELASTIC}agent.server.api:SimpleElasticAgent._rendezvous"
WAITING = f"{_ELASTIC}rendezvous.dynamic_rendezvous:DynamicRendezvousHandler.num_nodes_waiting"
STARTING = f"{_ELASTIC}multiprocessing.subprocess_handler:SubprocessHandler._popen"
MONITORING = f"{_ELASTIC}agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers"
STOPPING = f"{_ELASTIC}multiprocessing.api:SubprocessContext._close"
CHOOSING = f"{_ELASTIC}rendezvous.api:get_free_port"
HANDLING = f"{_ELASTIC}multiprocessing.api:_terminate_process_handler"
#: The consequence if torch does not have one.
WITHOUT = {
    RENDEZVOUS: "a rendezvous that fails will not be repeated",
    WAITING: "a node that leaves is noticed only when ranks fail",
    STARTING: "children of a dead rank may stay, and restarts will be slower",
    MONITORING: "a Ctrl-C that comes while a line is logged may be lost, and a program that always fails the same way is "
    "restarted every time",
    STOPPING: "--shutdown-timeout is not obeyed at restarts, and children of a dead rank may stay",
    CHOOSING: "another process may take MASTER_PORT before rank 0 does",
    HANDLING: "a Ctrl-C that comes while a line is logged may be lost",
}
_NOTE_S = 3.0  # before a log line about ranks that have not ended
#: Of one rendezvous; if nodes miss each other more often, there is another problem.
ATTEMPTS = 10
#: How long agents wait for an unreachable etcd, or for a new host of a c10d rendezvous.
AWAY_S = 60.0
PAUSE_S = 0.5


@contextlib.contextmanager
def replaced(method: str, instead: Callable[..., object]) -> Iterator[None]:
    """Replaces a method of torch: calls `instead(torch's own method, …)` while open."""
    module, _, place = method.partition(":")
    owner_name, _, name = place.rpartition(".")
    try:
        found = importlib.import_module(module)
        owner = getattr(found, owner_name) if owner_name else found
        ordinary = getattr(owner, name)
    except (ImportError, AttributeError):
        log.warning("this torch has no %s: %s", place, WITHOUT[method])
        yield
        return
    setattr(owner, name, lambda *args, **kwargs: instead(ordinary, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, ordinary)


@dataclass
class TorchrunPatches:
    """Changes torchrun's agent while `in_place`, and counts its rendezvous.

    `node` is notified of ranks that start or are about to be stopped, and of failures. `grace_s` is between SIGTERM and
    SIGKILL; None: torchrun's default (30 s).
    """

    node: NodeAgent | None = None
    restarts: bool = False  # ranks may be started twice
    grace_s: int | None = None
    spares: Spares | None = None
    held: int = 0  # rendezvous that were completed
    nodes: int = 0  # in the last one
    away_s: float | None = None  # since when the rendezvous server does not answer (monotonic)
    _signals: list[int] = field(default_factory=list)
    _guard: Guard = field(default_factory=Guard)
    _port: HeldPort | None = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        table: dict[str, Callable[..., object]] = {
            HANDLING: self._note_signal,
            MONITORING: self._monitor,
            STARTING: self._start_rank,
            STOPPING: self._stop_ranks,
            CHOOSING: self._hold_port,
            RENDEZVOUS: self._rendezvous,
            WAITING: self._count_waiting,
        }
        with contextlib.ExitStack() as stack:
            stack.callback(logging.getLogger(_ELASTIC[:-1]).setLevel, logging.NOTSET)
            for method, instead in table.items():
                stack.enter_context(replaced(method, instead))
            if self.spares is not None:
                self.spares.start()
                stack.callback(self.spares.close)
            self._guard.start()
            stack.callback(self._guard.close)
            yield

    # ranks

    def _note_signal(self, ordinary: Callable[..., None], number: int, frame: object) -> None:
        """torchrun's handler raises an exception anywhere in the thread, where code that catches all exceptions, such as a log
        handler, may swallow it. So `_monitor` raises it again."""
        self._signals.append(number)
        logging.getLogger(_ELASTIC[:-1]).setLevel(logging.ERROR)  # it logs each signal that it sends
        ordinary(number, frame)

    def _monitor(
        self, ordinary: Callable[..., RunResult], agent: SimpleElasticAgent, group: WorkerGroup
    ) -> RunResult:
        """Monitors the ranks; a failure that no restart fixes uses up the remaining restarts."""
        if self._signals:
            from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

            _terminate_process_handler(self._signals[0], None)
        result = ordinary(agent, group)
        if self.node and result.state.name in ("FAILED", "UNHEALTHY") and agent._remaining_restarts > 0:
            exits = {f.pid: int(f.exitcode) for f in (result.failures or {}).values()}
            if why := self.node.why_not_again(exits):
                log.error("%s", why)
                agent._remaining_restarts = 0
        return result

    def _start_rank(
        self, ordinary: Starting, handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts a rank, from a spare if there is one."""
        process = None
        if self.spares is not None:
            names = [getattr(stream, "name", None) for stream in (handler._stdout, handler._stderr)]
            process = self.spares.take(args, env, *names)
        process = process or ordinary(handler, args, env)
        self._guard.add(process.pid)
        if self.node is not None:
            self.node.register_child(process)
        return process

    def _stop_ranks(
        self,
        ordinary: Callable[..., None],
        context: SubprocessContext,
        death_sig: signal.Signals,
        timeout: int = 30,
    ) -> None:
        """Stops ranks within the configured time, and their children.

        torchrun uses --shutdown-timeout only when the whole job ends, not when it restarts; and it does not stop the children of
        a rank that died.
        """
        ranks = [handler.proc for handler in context.subprocess_handlers.values()]
        asked = {rank.pid for rank in ranks if rank.poll() is None}
        if self.node is not None:
            self.node.expect_end(asked, _was_signalled())
        limit_s = timeout if self.grace_s is None else self.grace_s
        note = threading.Timer(_NOTE_S, _log_remaining, (ranks, limit_s))
        note.daemon = True
        note.start()
        try:
            ordinary(context, death_sig, limit_s)
        finally:
            note.cancel()
        for rank in ranks:
            if (
                rank.pid in asked or rank.poll() != 0
            ):  # a rank that exited with 0 may have left an upload running
                sweep(rank.pid)
            self._guard.remove(rank.pid)

    def _hold_port(self, ordinary: Callable[..., int]) -> int:
        """Reserves the port that the agent chose for the ranks' store.

        torchrun finds a free port and releases it; rank 0 binds it seconds later, after its imports. Meanwhile the system may
        give it to another process, and the job fails with "address already in use".
        """
        try:
            self._port = HeldPort("::")  # every address of both families
        except OSError:
            self._port = HeldPort("0.0.0.0")
        return self._port.number

    # the rendezvous

    def _rendezvous(
        self, ordinary: Callable[..., None], agent: SimpleElasticAgent, group: WorkerGroup
    ) -> None:
        """Repeats a rendezvous when not all members answer, or etcd is unreachable."""
        from torch.distributed import DistStoreError
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        attempt = 1
        while True:
            try:
                ordinary(agent, group)
                self._note_answer(None)
                self.held, self.nodes = self.held + 1, int(group.group_world_size)
                return
            except (RendezvousConnectionError, EtcdError) as error:
                if not _survives_agents(group.spec.rdzv_handler) or self._note_answer(error) > AWAY_S:
                    raise
                time.sleep(PAUSE_S)
            except (LookupError, DistStoreError) as error:
                if attempt == ATTEMPTS:
                    raise
                attempt += 1
                log.warning("a node left during the rendezvous (%s): repeating it", error)

    def _count_waiting(self, ordinary: Callable[..., int], handler: DynamicRendezvousHandler) -> int:
        """Counts waiting nodes; 0 while etcd is unreachable, so that ranks continue training. If ranks may restart, counts
        departed nodes too, which starts a new rendezvous."""
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        try:
            waiting = int(ordinary(handler))
        except RendezvousConnectionError as error:
            if not _survives_agents(handler):
                raise
            self._note_answer(error)
            return 0
        self._note_answer(None)
        state = handler._state_holder.state
        left = count_departed(self.nodes, len(state.participants), state.closed) if self.restarts else 0
        if left and not waiting:
            log.warning("%d of %d nodes left: a new rendezvous without them", left, self.nodes)
        return waiting or left

    def _note_answer(self, error: Exception | None) -> float:
        """Notes whether the server answered; returns for how long it has not."""
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


def _was_signalled() -> bool:
    """Whether the launcher stops its ranks because it got a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return isinstance(sys.exc_info()[1], SignalException)


def _log_remaining(ranks: list[subprocess.Popen[bytes]], limit_s: int) -> None:
    if left := sum(1 for rank in ranks if rank.poll() is None):
        how = "they are killed after %d s (--shutdown-timeout)"
        log.warning(f"waiting for %d of %d ranks to end; {how}", left, len(ranks), limit_s)


def count_departed(met: int, present: int, closed: bool) -> int:
    """How many nodes have left since the rendezvous; 0 once it is closed, at the end of the job."""
    return 0 if closed else max(0, met - present)


def _survives_agents(handler: RendezvousHandler) -> bool:
    """Whether the server can return: an etcd may be restarted; a c10d store is lost with the agent that hosts it."""
    return str(handler.get_backend()).startswith("etcd")


DEFAULT_PORT = 29400  # torchrun's
POLL_S = 0.2


class LaunchError(AllranksError):
    """The job could not be started, or its rendezvous failed."""


def port_in_use(endpoint: str, text: str) -> LaunchError:
    return LaunchError(
        f"the rendezvous port of {endpoint or 'this node'} is in use: {text}",
        hint="Find the process that uses it (ss -ltnp), or choose another with --rdzv-endpoint HOST:PORT "
        "(port 0 with --standalone takes a free one).",
    )


def no_server(endpoint: str, text: str) -> LaunchError:
    return LaunchError(
        f"no rendezvous server answers at {endpoint}: {text}",
        hint="Is etcd running? `allranks etcd status`, `allranks etcd start`. For c10d, the node that "
        "hosts the endpoint must be started too, and the name must resolve to it.",
    )


def split(endpoint: str) -> tuple[str, int]:
    return split_address(endpoint or "localhost", DEFAULT_PORT)


def port_state(endpoint: str) -> Literal["free", "used", "elsewhere"]:
    """Whether the port is free on this machine; `elsewhere`: the address is another machine's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(split(endpoint))
        except OSError as error:
            return "used" if error.errno == errno.EADDRINUSE else "elsewhere"
    return "free"


def wait_for_host(endpoint: str, deadline: float) -> bool:
    """Waits until a process listens at the endpoint, or this node may; False at the deadline (monotonic)."""
    while True:
        if port_state(endpoint) != "elsewhere":
            return True
        with contextlib.suppress(OSError), socket.create_connection(split(endpoint), timeout=2.0):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)


def refuse_other_server(endpoint: str, wait_s: float = 10.0) -> None:
    """Raises LaunchError if a server that is not a rendezvous store uses this node's rendezvous port.

    torch would connect to it and wait without limit for an answer. Another agent's store answers at once.
    """
    if port_state(endpoint) != "used":
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
        raise port_in_use(endpoint, "the server there is not a rendezvous store")
