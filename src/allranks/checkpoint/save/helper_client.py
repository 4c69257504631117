"""The rank's client of its helper process: starts it, submits saves, receives their results.

`submit` returns a Future immediately. If a helper dies, its unfinished saves are handed to a new one, once: their bytes are
still in shared memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import allranks
from allranks.channel.frames import JsonReader, send_json
from allranks.checkpoint.save.helper import SOCKET_FD, Message, job_to_json, saved_from_json
from allranks.checkpoint.save.plan import Plan
from allranks.checkpoint.save.snapshot import SharedArena
from allranks.checkpoint.save.writer import Saved, SaveJob
from allranks.errors import CheckpointSaveError

RESTARTS = 1  # how often a save is handed to a new helper
MOST_LAYOUTS = 8  # layouts kept by a helper


@dataclass(frozen=True)
class SaveOrder:
    """One save for the helper. The shards of a plan are sent once per helper."""

    job: SaveJob
    arena: SharedArena
    plan: Plan


@dataclass
class _Running:
    """One helper process and its unfinished saves. The listener thread references this and not the client."""

    sock: socket.socket
    pid: int
    unfinished: dict[int, tuple[SaveOrder, Future[Saved], int]] = field(default_factory=dict)
    arenas: dict[int, weakref.ref[SharedArena]] = field(default_factory=dict)
    layouts: set[int] = field(default_factory=set)
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class HelperClient:
    """Starts its helper with the first save. `close()` lets it finish within a limit, then kills it."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._numbers = itertools.count(1)
        self._finalizer: weakref.finalize[..., HelperClient] | None = None

    @property
    def pid(self) -> int | None:
        """The helper's process id while it is running."""
        running = self._running
        return running.pid if running is not None and not running.ended else None

    def start(self) -> None:
        """Starts the helper unless it is running."""
        if self._running is None or self._running.ended:
            self._running = _start()
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _end, self._running, os.getpid())

    def submit(self, order: SaveOrder) -> Future[Saved]:
        """Hands a save to the helper. The arena must not change until the Future is done."""
        future: Future[Saved] = Future()
        number = next(self._numbers)
        self.start()
        assert self._running is not None
        _give(self._running, number, order, future, 0)
        return future

    def close(self, timeout_s: float | None = 30.0) -> None:
        """Closes the channel, waits for the helper, and kills it at the limit; None: does not wait."""
        running, self._running = self._running, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if running is None:
            return
        with contextlib.suppress(OSError):
            running.sock.shutdown(socket.SHUT_WR)
        if timeout_s is not None and not _reap(running.pid, timeout_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
            _reap(running.pid, 5.0)


def _start() -> _Running:
    """Starts the process with posix_spawn: a fork would copy the page tables of a large torch process."""
    ours, theirs = socket.socketpair()
    source = str(Path(allranks.__file__).parent.parent)
    env = {
        **os.environ,
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }
    # -OO drops docstrings, which saves half a megabyte
    command = [sys.executable, "-OO", "-m", "allranks.checkpoint.save.helper"]
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, theirs.fileno(), SOCKET_FD),
    ]
    # its own session: Ctrl-C in the terminal must not interrupt a save
    try:
        pid = os.posix_spawn(sys.executable, command, env, file_actions=actions, setsid=True)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    running = _Running(ours, pid)
    thread = threading.Thread(target=_listen, args=(running,), name="allranks-checkpoint-helper", daemon=True)
    thread.start()
    return running


def _give(running: _Running, number: int, order: SaveOrder, future: Future[Saved], restarts: int) -> None:
    with running.lock:
        running.unfinished[number] = (order, future, restarts)
        dead = running.ended
        if not dead:
            with contextlib.suppress(OSError):  # the helper has just died: its listener restarts the save
                _send_order(running, number, order)
    if dead:
        _settle_dead(running)


def _send_order(running: _Running, number: int, order: SaveOrder) -> None:
    arena = order.arena
    if arena.id not in running.arenas:
        send_json(running.sock, {"kind": "arena", "id": arena.id, "bytes": arena.bytes}, (arena.fd,))
        running.arenas[arena.id] = weakref.ref(arena)
    for gone in [key for key, ref in running.arenas.items() if ref() is None]:
        del running.arenas[gone]
        send_json(running.sock, {"kind": "drop", "id": gone})
    if order.plan.id not in running.layouts:
        if len(running.layouts) >= MOST_LAYOUTS:  # the state has other tensors at each save
            running.layouts.clear()
            send_json(running.sock, {"kind": "forget"})
        running.layouts.add(order.plan.id)
        shards = [placed.shard for placed in order.plan.layout.placed]
        send_json(running.sock, {"kind": "layout", "id": order.plan.id, "shards": shards})
    save = {"kind": "save", "save": number, "layout": order.plan.id, "arena": arena.id}
    send_json(running.sock, {**save, "job": job_to_json(order.job)})


def _listen(running: _Running) -> None:
    """Listener thread of one helper: completes futures until the helper exits."""
    inbox = JsonReader(running.sock)
    try:
        while (message := inbox.receive()) is not None:
            _deliver(
                running, message
            )  # a function, so that this frame does not keep the save and its manager alive
    except OSError:
        pass
    with running.lock:
        running.ended = True
    running.sock.close()
    _reap(running.pid, 1.0)
    _settle_dead(running)


def _deliver(running: _Running, message: Message) -> None:
    with running.lock:
        order, future, _ = running.unfinished.pop(message["save"])
    if message["kind"] == "saved":
        future.set_result(saved_from_json(message["result"]))
        return
    error = CheckpointSaveError(
        str(message["reason"]), tier=order.job.tier, path=str(message["path"]), hint=str(message["hint"])
    )
    error.__cause__ = RuntimeError(f"in the helper process:\n{message['trace']}")
    future.set_exception(error)


def _settle_dead(running: _Running) -> None:
    """Hands the unfinished saves of a dead helper to a new one, or fails them the second time."""
    with running.lock:
        unfinished, running.unfinished = running.unfinished, {}
    successor: _Running | None = None
    for number, (order, future, restarts) in unfinished.items():
        if restarts >= RESTARTS:
            job, died = (
                order.job,
                f"the helper process (pid {running.pid}) died while saving, {restarts + 1} times",
            )
            hint = "out of memory? Check the kernel log: dmesg | tail"
            future.set_exception(CheckpointSaveError(died, tier=job.tier, path=job.path, hint=hint))
            continue
        successor = successor or _start()
        _give(successor, number, order, future, restarts + 1)
    if successor is not None:
        successor.sock.shutdown(socket.SHUT_WR)  # it exits when its saves are done


def _end(running: _Running, owner: int) -> None:
    """Finalizer of a client that was not closed: lets the helper finish. Does nothing in a forked child."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        running.sock.shutdown(socket.SHUT_WR)
    if not running.unfinished:
        _reap(running.pid, 2.0)


def _reap(pid: int, timeout_s: float) -> bool:
    """Waits for a child to exit; True if it has."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
