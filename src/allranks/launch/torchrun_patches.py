"""The private methods and functions of torchrun's agent that we replace, and the endpoint of its rendezvous. Runs in the agent.

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
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from allranks.channel.frames import HeldPort
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
MEETING = f"{_ELASTIC}agent.server.api:SimpleElasticAgent._rendezvous"
WAITING = f"{_ELASTIC}rendezvous.dynamic_rendezvous:DynamicRendezvousHandler.num_nodes_waiting"
STARTING = f"{_ELASTIC}multiprocessing.subprocess_handler:SubprocessHandler._popen"
MONITORING = f"{_ELASTIC}agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers"
STOPPING = f"{_ELASTIC}multiprocessing.api:SubprocessContext._close"
CHOOSING = f"{_ELASTIC}rendezvous.api:get_free_port"
HANDLING = f"{_ELASTIC}multiprocessing.api:_terminate_process_handler"
#: What each one costs that a torch does not have.
WITHOUT = {
    MEETING: "a rendezvous that fails will not be repeated",
    WAITING: "a node that leaves is noticed only when ranks fail",
    STARTING: "children of a dead rank may stay, and restarts will be slower",
    MONITORING: "a Ctrl-C that comes while a line is logged may be lost, and a program that always fails the same way is "
    "restarted again and again",
    STOPPING: "--shutdown-timeout is not obeyed at restarts, and children of a dead rank may stay",
    CHOOSING: "another process may take MASTER_PORT before rank 0 does",
    HANDLING: "a Ctrl-C that comes while a line is logged may be lost",
}
_NOTE_S = 3.0  # after this a line says what is waited for
#: Of one rendezvous; nodes that miss each other more often have another problem.
ATTEMPTS = 10
#: How long agents wait for an etcd that is away, or for a new host of a c10d rendezvous.
AWAY_S = 60.0
PAUSE_S = 0.5


@contextlib.contextmanager
def replaced(method: str, instead: Callable[..., object]) -> Iterator[None]:
    """While it is open, `instead(torch's own method, …)` is called in place of the method."""
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
    """What torchrun's agent does otherwise while `in_place`, and the rendezvous that it has completed.

    `node` is notified of ranks that start, of ranks that are about to be asked to end, and of failures. `grace_s` lies between
    SIGTERM and SIGKILL; None is torchrun's choice (30 s).
    """

    node: NodeAgent | None = None
    restarts: bool = False  # ranks may be started twice
    grace_s: int | None = None
    spares: Spares | None = None
    held: int = 0  # rendezvous that were completed
    nodes: int = 0  # in the last one
    away_s: float | None = None  # since when its server does not answer (monotonic)
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
            MEETING: self._meet,
            WAITING: self._count_waiting,
        }
        with contextlib.ExitStack() as stack:
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
        """torchrun's handler raises an exception wherever the thread is; code that catches everything, such as a log handler,
        may swallow it. It is raised again at the next look at the ranks."""
        self._signals.append(number)
        ordinary(number, frame)

    def _monitor(
        self, ordinary: Callable[..., RunResult], agent: SimpleElasticAgent, group: WorkerGroup
    ) -> RunResult:
        """A failure that no restart fixes uses up the restarts that are left."""
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
        """From the spares, where there are any."""
        process = None
        if self.spares is not None:
            names = [getattr(stream, "name", None) for stream in (handler._stdout, handler._stderr)]
            process = self.spares.take(args, env, *names)
        process = process or ordinary(handler, args, env)
        self._guard.add(process.pid)
        if self.node is not None:
            self.node.know_child(process)
        return process

    def _stop_ranks(
        self,
        ordinary: Callable[..., None],
        context: SubprocessContext,
        death_sig: signal.Signals,
        timeout: int = 30,
    ) -> None:
        """Ranks end in the time that was asked for, and with all that they have started.

        torchrun obeys --shutdown-timeout only when the whole job ends, and not when it restarts; and it leaves alone what a
        rank that died had started.
        """
        ranks = [handler.proc for handler in context.subprocess_handlers.values()]
        asked = {rank.pid for rank in ranks if rank.poll() is None}
        if self.node is not None:
            self.node.expect_end(asked, _was_signalled())
        limit_s = timeout if self.grace_s is None else self.grace_s
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
            self._guard.remove(rank.pid)

    def _hold_port(self, ordinary: Callable[..., int]) -> int:
        """Nobody else gets the port that the agent chose for the ranks' store.

        torchrun finds a free port and lets it go; rank 0 binds it seconds later, after its imports. Until then the system
        may give it to any other process, and the job ends with "address already in use".
        """
        try:
            self._port = HeldPort("::")  # every address of both families
        except OSError:
            self._port = HeldPort("0.0.0.0")
        return self._port.number

    # the rendezvous

    def _meet(self, ordinary: Callable[..., None], agent: SimpleElasticAgent, group: WorkerGroup) -> None:
        """Once more where the members do not all answer, or etcd is away."""
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
                if not _comes_back(group.spec.rdzv_handler) or self._note_answer(error) > AWAY_S:
                    raise
                time.sleep(PAUSE_S)
            except (LookupError, DistStoreError) as error:
                if attempt == ATTEMPTS:
                    raise
                attempt += 1
                log.warning("a node went away during the rendezvous (%s): repeating it", error)

    def _count_waiting(self, ordinary: Callable[..., int], handler: DynamicRendezvousHandler) -> int:
        """Ranks continue training while etcd is away; where they may restart, a node that leaves starts a new rendezvous."""
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        try:
            waiting = int(ordinary(handler))
        except RendezvousConnectionError as error:
            if not _comes_back(handler):
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


def _was_signalled() -> bool:
    """Whether the launcher ends its ranks because it got a signal itself."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    return isinstance(sys.exc_info()[1], SignalException)


def _say_who_is_left(ranks: list[subprocess.Popen[bytes]], limit_s: int) -> None:
    if left := sum(1 for rank in ranks if rank.poll() is None):
        how = "they are killed after %d s (--shutdown-timeout)"
        log.warning(f"waiting for %d of %d ranks to end; {how}", left, len(ranks), limit_s)


def count_departed(met: int, present: int, closed: bool) -> int:
    """How many nodes have left since. At the end of a job they may: a closed rendezvous takes nobody back."""
    return 0 if closed else max(0, met - present)


def _comes_back(handler: RendezvousHandler) -> bool:
    """A server may be restarted; a c10d store is lost with the agent that hosts it."""
    return str(handler.get_backend()).startswith("etcd")


DEFAULT_PORT = 29400  # torchrun's
POLL_S = 0.2


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
