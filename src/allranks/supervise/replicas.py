"""Replica mode: starts each replica's ranks, and restarts a dead replica while the others continue training.

Runs in the agent, imports no torch. One selector loop watches the ranks by pidfd, their output, and the requests of
other threads. Signal handlers only set a number; the loop acts.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from allranks.blackbox.header import process_state
from allranks.channel.frames import HeldPort, loopback
from allranks.model.diagnosis import Failure, describe_exit
from allranks.supervise.logs import LogPump, Terminal, open_log
from allranks.supervise.orphans import Guard, sweep
from allranks.supervise.restarts import (
    SAME_FAILURES,
    RestartHistory,
    RestartOptions,
    decide_restart,
    find_common_error,
    find_program_error,
)

log = logging.getLogger("allranks.agent")


@dataclass(frozen=True)
class ReplicaOptions:
    command: tuple[str, ...]  # of one rank
    replicas: int
    ranks_per_replica: int = 1
    first_replica: int = 0  # number of this node's first replica in the job
    total_replicas: int | None = None  # over all nodes; None: this node's
    environment: dict[str, str] = field(default_factory=dict)
    restarts: RestartOptions = field(default_factory=RestartOptions)
    stop_grace_s: float = 10.0  # between SIGTERM and SIGKILL
    kill_grace_s: float = 30.0  # a rank that has not ended this long after SIGKILL is abandoned
    finish_grace_s: float = 10.0  # a restarted replica may outlive the first finished one for this long
    log_folder: Path | None = None
    quiet: bool = False  # no rank output on the terminal


@dataclass(frozen=True)
class Event:
    """Something that happened to a replica, for `on_event`."""

    kind: Literal["started", "rank_exited", "restarting", "set_aside", "finished", "stopped"]
    replica: int
    detail: str = ""
    rank: int | None = None  # global rank, for rank_exited
    exit_code: int | None = None
    pid: int | None = None
    expected: bool = False  # we asked the rank to stop


@dataclass(frozen=True)
class Request:
    """An action that another thread requests from the supervisor."""

    action: Literal["restart", "stop", "set_aside"]
    replica: int
    reason: str


@dataclass
class _Rank:
    number: int  # global
    process: subprocess.Popen[bytes]
    pidfd: int
    pump: LogPump


@dataclass
class _Replica:
    number: int
    port: HeldPort | None = None  # its MASTER_PORT
    ranks: list[_Rank] = field(default_factory=list)
    history: RestartHistory = field(default_factory=RestartHistory)
    started_s: float = 0.0
    start_at_s: float = 0.0  # when to start next
    state: Literal["waiting", "running", "stopping", "finished", "aside"] = "waiting"
    kill_at_s: float = 0.0
    after_stop: Literal["restart", "stop", "set_aside"] = "restart"
    reason: str = ""
    raised: bool = False  # it exited by itself with an error, which may repeat; else it was killed
    exits: dict[int, int] = field(default_factory=dict)  # of its last processes: pid -> exit code
    failures: list[Failure] = field(default_factory=list)  # of its program


@dataclass
class Supervisor:
    """Runs this node's replicas until all are finished or set aside."""

    options: ReplicaOptions
    on_event: Callable[[Event], None] = lambda event: None
    # whether a replica's last processes trained for a while
    trained: Callable[[int], bool] = lambda replica: False
    _replicas: dict[int, _Replica] = field(default_factory=dict)
    _requests: queue.SimpleQueue[Request] = field(default_factory=queue.SimpleQueue)
    _wake: int = -1  # an eventfd
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _guard: Guard = field(default_factory=Guard)
    _terminal: Terminal | None = None
    #: how the program of a replica's last processes failed; the argument is their pid -> exit code
    failure: Callable[[int, dict[int, int]], Failure | None] = lambda replica, exits: None
    _signal: int = 0
    before_end: Callable[[], object] = lambda: None  # called once when all replicas have ended
    _given_up: str = ""  # why the job ends: its program cannot train
    _finished_s: float | None = None  # when the first replica finished by itself

    def request(self, request: Request) -> None:
        """Requests an action of the loop, from any thread."""
        self._requests.put(request)
        self.wake()

    def wake(self) -> None:
        """Wakes the loop."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def give_up(self, reason: str) -> None:
        """Ends the job from any thread: its program cannot train. The first reason is the one that is logged."""
        self._given_up = self._given_up or reason
        self.wake()

    def note_signal(self, number: int, frame: object = None) -> None:
        """A signal handler: the loop then stops all replicas and passes the signal on."""
        self._signal = number
        self.wake()

    def pids(self) -> dict[int, int]:
        """Global rank -> pid of the running ranks."""
        return {rank.number: rank.process.pid for r in self._replicas.values() for rank in r.ranks}

    def has(self, replica: int) -> bool:
        return 0 <= replica - self.options.first_replica < self.options.replicas

    def is_running(self, replica: int) -> bool:
        """Whether the replica's ranks run and are not being stopped."""
        return replica in self._replicas and self._replicas[replica].state == "running"

    def restarted(self) -> tuple[int, ...]:
        """Replicas that were restarted, or are about to be."""
        alive = [r for r in self._replicas.values() if r.state in ("waiting", "running")]
        return tuple(r.number for r in alive if r.history.restarts)

    def run(self) -> int:
        """Runs to the end: 0 when every replica that was not set aside finished, else 1, or 128 + signal."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: os.eventfd_read(self._wake))
        first = self.options.first_replica
        self._replicas = {n: _Replica(n) for n in range(first, first + self.options.replicas)}
        self._guard.start()
        if not self.options.quiet:
            self._terminal = Terminal(sys.stdout.fileno())
            self._terminal.start()
        try:
            while not self._over():
                self._start_due()
                self._turn()
                self._serve_requests()
                self._kill_overdue()
                self._stop_latecomers()
                if self._signal:
                    return self._stop_all()
                if self._given_up:
                    break
            else:
                self.before_end()
            if self._given_up:
                self._stop_all()
                log.error("%s", self._given_up)
                return 1
            return self._exit_code()
        finally:
            self._stop_all()
            self._guard.close()
            if self._terminal is not None:
                self._terminal.close()
            self._selector.close()
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _turn(self) -> None:
        """Waits for the next events and handles them."""
        for key, _ in self._selector.select(self._timeout()):
            if self._selector.get_map().get(key.fileobj) == key:  # not unregistered by an earlier event
                key.data()

    # starting

    def _start_due(self) -> None:
        now = time.monotonic()
        for replica in self._replicas.values():
            if replica.state == "waiting" and replica.start_at_s <= now:
                self._start(replica, now)

    def _start(self, replica: _Replica, now: float) -> None:
        replica.port = HeldPort()
        replica.ranks = [
            self._spawn(replica, local, replica.port.number)
            for local in range(self.options.ranks_per_replica)
        ]
        replica.state, replica.started_s = "running", now
        replica.raised, replica.exits = False, {}
        pids = ", ".join(str(rank.process.pid) for rank in replica.ranks)
        self._tell(Event("started", replica.number, f"pid {pids}", pid=replica.ranks[0].process.pid))

    def _environment(self, replica: _Replica, local: int, port: int) -> dict[str, str]:
        size = self.options.ranks_per_replica
        total = self.options.total_replicas or self.options.replicas
        on_node = (replica.number - self.options.first_replica) * size + local
        return {
            **os.environ,
            **self.options.environment,
            "RANK": str(local),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(on_node),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": loopback(),
            "MASTER_PORT": str(port),
            "REPLICA_GROUP_ID": str(replica.number),
            "NUM_REPLICA_GROUPS": str(total),
            "ALLRANKS_REPLICA": f"replica-{replica.number}",
            "ALLRANKS_RANK": str(replica.number * size + local),
            "ALLRANKS_WORLD_SIZE": str(total * size),
            "ALLRANKS_ATTEMPT": str(replica.history.restarts),
            "ALLRANKS_AGENT_PID": str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }

    def _spawn(self, replica: _Replica, local: int, port: int) -> _Rank:
        number = replica.number * self.options.ranks_per_replica + local
        process = subprocess.Popen(
            self.options.command,
            env=self._environment(replica, local, port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children (DataLoader workers, commands) can be killed with it
        )
        self._guard.add(process.pid)
        assert process.stdout is not None
        fd = os.dup(process.stdout.fileno())
        process.stdout.close()
        os.set_blocking(fd, False)
        log_file = open_log(self.options.log_folder, f"rank{number}.log")
        pump = LogPump(fd, f"[rank {number}] ", self._terminal, log_file)
        rank = _Rank(number, process, os.pidfd_open(process.pid), pump)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._exited(replica, rank))
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._output(rank))
        return rank

    # events of ranks

    def _output(self, rank: _Rank) -> None:
        if not rank.pump.read():
            self._unregister(rank.pump.fd)

    def _exited(self, replica: _Replica, rank: _Rank) -> None:
        code = rank.process.poll()
        if code is None:  # an attached debugger keeps the exit code until it detaches
            code = -signal.SIGKILL if replica.state == "stopping" else 1
        self._end_rank(replica, rank, code, describe_exit(code))

    def _end_rank(self, replica: _Replica, rank: _Rank, code: int, detail: str) -> None:
        pid = rank.process.pid
        self._forget(rank)
        replica.exits[pid] = code
        if (
            code != 0 or replica.state == "stopping"
        ):  # a rank that exited with 0 may have left an upload running
            sweep(pid)
        self._guard.remove(pid)
        replica.ranks.remove(rank)
        asked = replica.state == "stopping" or self._signal != 0  # Ctrl-C reaches the ranks as well
        self._tell(Event("rank_exited", replica.number, detail, rank.number, code, pid, asked))
        if code != 0 and replica.state == "running":
            replica.raised = code > 0
            self._begin_stop(replica, "restart", f"rank {rank.number} {detail}", grace_s=1.0)
        if not replica.ranks:
            self._ended(replica)

    def _ended(self, replica: _Replica) -> None:
        """All ranks of the replica are gone: finished, restarted or set aside."""
        now = time.monotonic()
        if replica.state == "running":
            replica.state = "finished"
            self._finished_s = self._finished_s or now
            self._tell(Event("finished", replica.number))
            return
        if replica.after_stop == "stop":
            replica.state = "finished"
            self._tell(Event("stopped", replica.number, replica.reason))
            return
        trained = not replica.raised and self.trained(replica.number)
        ran_s = now - replica.started_s
        replica.history = replica.history.after_failure(now, ran_s, self.options.restarts, trained)
        delay, why = decide_restart(replica.history, self.options.restarts)
        error = self._find_program_error(replica) if replica.raised else ""
        if replica.after_stop == "set_aside":
            delay, why = None, f"set aside: {replica.reason}"
        elif error:
            delay, why = None, f"set aside: {error}"
        elif self.training_over:
            delay, why = None, "not restarted: the training has finished"
        if delay is None:
            replica.state = "aside"
            self._tell(Event("set_aside", replica.number, why))
            return
        replica.history = replica.history.after_restart()
        replica.state, replica.start_at_s = "waiting", now + delay
        self._tell(Event("restarting", replica.number, f"{replica.reason}: {why}"))

    @property
    def training_over(self) -> bool:
        """Whether a replica has finished, and the others have had time to: none is restarted. From any thread."""
        done_s = self._finished_s
        return done_s is not None and time.monotonic() >= done_s + self.options.finish_grace_s

    def _find_program_error(self, replica: _Replica) -> str:
        """Why a restart of the replica would not help; if all replicas have the same error, the job ends."""
        failure = self.failure(replica.number, replica.exits)
        if failure is None:
            return ""
        replica.failures = [*replica.failures, failure][-SAME_FAILURES:]
        histories = {other.number: other.failures for other in self._replicas.values()}
        self._given_up = self._given_up or find_common_error(histories, len(self._replicas))
        return self._given_up or find_program_error(replica.failures)

    # stopping

    def _begin_stop(
        self,
        replica: _Replica,
        then: Literal["restart", "stop", "set_aside"],
        reason: str,
        grace_s: float | None = None,
    ) -> None:
        grace = self.options.stop_grace_s if grace_s is None else grace_s
        replica.state, replica.after_stop, replica.reason = "stopping", then, reason
        replica.kill_at_s = time.monotonic() + grace
        for rank in replica.ranks:
            _send(rank, signal.SIGTERM)
            _send(rank, signal.SIGCONT)  # a stopped process cannot act on SIGTERM

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for replica in self._replicas.values():
            if replica.state == "stopping" and now >= replica.kill_at_s:
                for rank in list(replica.ranks):
                    _send(rank, signal.SIGKILL)
                    if now >= replica.kill_at_s + self.options.kill_grace_s:
                        self._abandon(replica, rank)

    def _abandon(self, replica: _Replica, rank: _Rank) -> None:
        """SIGKILL does not end the rank (state D): the job continues or ends without it, and its replica is set aside."""
        why = f"pid {rank.process.pid} has not ended {self.options.kill_grace_s:g} s after SIGKILL"
        log.error("rank %d is abandoned: %s (state %s)", rank.number, why, process_state(rank.process.pid))
        replica.after_stop = "stop" if replica.after_stop == "stop" else "set_aside"
        replica.reason = f"rank {rank.number}: {why}"
        self._end_rank(replica, rank, -signal.SIGKILL, why)

    def _stop_latecomers(self) -> None:
        """Stops replicas that were restarted too late, which would train alone from the start."""
        if not self.training_over:
            return
        for replica in self._replicas.values():
            if replica.history.restarts and replica.state == "running":
                self._begin_stop(replica, "stop", "the training has finished")
            elif replica.state == "waiting":
                replica.state = "finished"

    def _serve_requests(self) -> None:
        while not self._requests.empty():
            request = self._requests.get()
            replica = self._replicas.get(request.replica)
            if replica is None:
                log.warning("no replica %d on this node: %s ignored", request.replica, request.action)
            elif replica.state == "running":
                self._begin_stop(replica, request.action, request.reason, grace_s=1.0)
            elif request.action != "restart" and replica.state == "waiting":
                replica.state = "finished" if request.action == "stop" else "aside"

    def _stop_all(self) -> int:
        """Stops all remaining ranks; returns the exit code."""
        why = f"the agent got signal {self._signal}" if self._signal else "the job ends"
        for replica in self._replicas.values():
            if replica.ranks:
                self._begin_stop(replica, "stop", why)
            elif replica.state == "waiting":
                replica.state = "finished"
        while any(replica.ranks for replica in self._replicas.values()):
            self._turn()
            self._kill_overdue()
        return 128 + self._signal if self._signal else self._exit_code()

    def _forget(self, rank: _Rank) -> None:
        self._unregister(rank.pidfd)
        self._unregister(rank.pump.fd)
        os.close(rank.pidfd)
        rank.pump.close()

    def _unregister(self, fd: int) -> None:
        try:
            self._selector.unregister(fd)
        except KeyError:
            pass

    def _timeout(self) -> float:
        """Seconds until the next action is due, at most 1."""
        now = time.monotonic()
        due = [r.start_at_s for r in self._replicas.values() if r.state == "waiting"]
        due += [r.kill_at_s for r in self._replicas.values() if r.state == "stopping" and r.kill_at_s > now]
        if self._finished_s is not None:
            due.append(self._finished_s + self.options.finish_grace_s)
        return max(0.01, min(1.0, min([t - now for t in due], default=1.0)))

    def _over(self) -> bool:
        return all(replica.state in {"finished", "aside"} for replica in self._replicas.values())

    def _exit_code(self) -> int:
        return 0 if any(replica.state == "finished" for replica in self._replicas.values()) else 1

    def _tell(self, event: Event) -> None:
        expected = self._signal or event.exit_code == 0
        level = logging.DEBUG if expected else logging.INFO
        detail = f": {event.detail}" if event.detail else ""
        if event.kind == "rank_exited":
            log.log(level, "replica %d: rank %s %s", event.replica, event.rank, event.detail)
        else:
            log.log(level, "replica %d %s%s", event.replica, event.kind.replace("_", " "), detail)
        self.on_event(event)


def _send(rank: _Rank, number: int) -> None:
    try:
        signal.pidfd_send_signal(rank.pidfd, number)
    except (ProcessLookupError, OSError):
        pass
