"""NCCL for GPU tensors: the communicator is aborted and made again in the same process.

Runs in a rank with a GPU. `abort` ends the kernels that wait for a dead peer, so that the stream continues; the step is
then tried again with a new communicator over the remaining members. If NCCL supports it, the old communicator is only
revoked at first, and its memory freed some steps later. torch's watchdog logs a C++ stack trace for every lost peer, so
its log is silenced while such a group is in use, unless TORCH_CPP_LOG_LEVEL is set. Errors are raised, and the manager
reports them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import GroupAborted
from allranks.manager.groups.group import ReconfigurableGroup
from allranks.manager.groups.group_spec import GroupSpec, Seconds
from allranks.manager.groups.native_calls import abandoned, silenced
from allranks.manager.groups.teardown import destroy_later, ended, start_attended
from allranks.torch_private import can_wait_until_connected, communicator_of, with_limit

log = logging.getLogger("allranks.manager")


#: NCCL reads it once, at its first communicator, so it is set for good: all members connect while the group is made, when a
#: death is noticed. Otherwise they connect in the first collective of each kind, and a member that dies in those
#: milliseconds blocks the others until the timeout.
CONNECT_AT_ONCE = {"NCCL_RUNTIME_CONNECT": "0"}
#: torch reads them when a group is made: its watchdog must not end the process when we abort the group.
_SURVIVE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_POLL_S = 0.002
_TAKEN_S = 2.0  # launching an operation takes less
_ENDED_S = 1.5  # ending a communicator takes less, unless it waits for the device
_IDLE_STEPS = 10  # steps of the next group before the previous one is ended
_KEPT = 4  # idle communicators; with more, the next commit ends them
_REVOKED_S = 10.0  # revoking takes less
_SUCCESS, _IN_PROGRESS = 0, 7  # as NCCL counts
_lock = threading.Lock()
_users: Counter[str] = Counter()  # of variables that we have set
_ending: set[threading.Thread] = set()  # threads that end communicators


class ProcessGroupNCCL(ReconfigurableGroup):
    """One NCCL communicator on one device (default: the training thread's current one)."""

    backend_name = "nccl"
    slow_to_destroy = True

    def __init__(self, timeout: Seconds = 60.0, device: torch.device | str | int | None = None) -> None:
        super().__init__(timeout)
        self.device = (
            torch.device("cuda", device) if isinstance(device, int) else device and torch.device(device)
        )
        for name, value in CONNECT_AT_ONCE.items():
            os.environ.setdefault(name, value)
        self._quiet = contextlib.ExitStack()
        self._retired: list[object] = []  # idle communicators of groups that were left while they worked
        self._revoked: list[object] = []  # revoked communicators
        self._steps = 0  # committed since the last of them was left
        self._communicators: dict[int, int] = {}  # id of a backend -> NCCL's pointer
        self._closed = False
        self._warm_up: object = None  # the communicator of one rank that loaded NCCL
        self._probe: tuple[torch.cuda.Stream, torch.Tensor] | None = None

    def choose_device(self) -> None:
        if self.device is None and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def settle(self) -> None:
        """Waits for the stream: only then are the gradients known to be reduced."""
        torch.cuda.current_stream(self.device).synchronize()

    def prepare(self) -> None:
        """Loads NCCL and its kernels with a group of one rank, so that other members need not wait for it.

        The group is kept: it holds 10 MB, and ending it would take 1 s of the first step.
        """
        began = time.monotonic()
        try:
            self._warm_up = self._make(GroupSpec(dist.HashStore(), 0, 1, name="allranks_prepare"))
        except RuntimeError as error:  # the first real group will raise it again, with the members' names
            log.debug("NCCL could not be prepared: %s", str(error).splitlines()[0])
        log.debug("NCCL was prepared in %.0f ms", (time.monotonic() - began) * 1e3)

    def reconfigure(self, spec: GroupSpec, made: object = None) -> None:
        self._quiet.close()
        if "TORCH_CPP_LOG_LEVEL" not in os.environ:
            self._quiet.enter_context(silenced())
        super().reconfigure(spec, made)

    def retire(self, reason: str) -> None:
        """Keeps an idle communicator for later: aborting it would delay the first step with the next one."""
        with self._guard:
            idle = self._backend is not None and all(ended(work) for work in self._works)
            if idle:
                self._retired.append(self._backend)
                self._steps = 0
                self._backend, self._error = None, GroupAborted(reason)
                self._works.clear()
        if not idle:
            self.abort(reason)

    def shutdown(self) -> None:
        warm_up, self._warm_up = self._warm_up, None
        self._retired += [warm_up] if warm_up is not None else []
        self._closed = True
        self._end_retired()
        super().shutdown()
        self._quiet.close()

    def drop_retired(self) -> None:
        """Ends old communicators some steps after the first with the next group, in which a new member is most likely to die.

        Ending a communicator waits for the device and holds the driver's lock. If a member is lost in a collective
        meanwhile, the end waits for the abort of that collective, and the abort waits for a launch that waits for the lock.
        After `_TAKEN_S` the abort goes ahead, and torch polls the aborted communicator until its timeout. So the next step
        waits until all communicators have ended.
        """
        if idle := len(self._retired) + len(self._revoked):
            self._steps += 1
            if self._steps >= _IDLE_STEPS or idle > _KEPT:
                self._end_retired()
        wait_for_endings()

    def _end_retired(self) -> None:
        """Ends revoked communicators, in a thread; revokes the others first, because ending them takes longer."""
        with self._guard:
            retired, self._retired = self._retired, []
            revoked, self._revoked = self._revoked, []
        ending = [(backend, True) for backend in revoked]
        for backend in retired:
            if self._start_revoking(backend, threading.Lock()) is None:
                ending.append((backend, False))
        if ending:
            _start_ending("allranks-nccl-end", _end, ending)

    def _make(self, spec: GroupSpec) -> object:
        """Makes a communicator and waits until it is ready.

        torch would wait in the first collective, holding a lock that its abort needs: a member that dies meanwhile would
        block the training thread. Here only this thread waits, and it can be abandoned.
        """
        return self._begin(self._connect(spec))

    def make_next(self, spec: GroupSpec) -> object:
        """Makes a communicator without launching an operation, which could deadlock with one of the current group."""
        backend = self._connect(spec)
        if can_wait_until_connected(backend):
            try:
                wait_for_members(spec, "connected", self.timeout_s)
            except (RuntimeError, GroupAborted):
                self.discard(backend)
                raise
            with torch.cuda.device(self.device or torch.device("cuda", 0)):
                communicator_of(backend)  # waits until all members have connected
            wait_for_endings()  # no member waits for this rank here
        return backend

    def _begin(self, made: Any) -> Any:
        """Launches the first operation, once no other communicator is being ended.

        Ending one waits for the device and holds the driver's lock. If a member died now, our operation would keep the device
        busy, our abort would wait for the lock, and this process would be blocked until torch's timeout.
        """
        wait_for_endings()
        if abandoned():  # a member is dead, and the operation would not be aborted
            self.discard(made)
            raise GroupAborted("cancelled")
        return self._launch(made)

    def _launch(self, made: Any) -> Any:
        """Launches the communicator's first operation, on memory allocated before: an allocation would wait for an abort."""
        device, began = self.device or torch.device("cuda", 0), time.monotonic()
        with torch.cuda.device(device):
            if self._probe is None:
                stream = torch.cuda.Stream(device)
                with torch.cuda.stream(stream):
                    self._probe = stream, torch.zeros(1, device=device)
            stream, tensor = self._probe
            try:
                with torch.cuda.stream(stream):
                    made.allreduce([tensor], dist.AllreduceOptions())
                self._communicators[id(made)] = communicator_of(made)
            except RuntimeError:
                self.discard(made)
                raise
        log.debug("NCCL launched its first operation in %.0f ms", (time.monotonic() - began) * 1e3)
        return made

    def _connect(self, spec: GroupSpec) -> object:
        """Connects. The first member that fails closes its connections, so that the others fail too instead of waiting."""
        device = self.device or torch.device("cuda", 0)
        limit_s = spec.limit_s or self.timeout_s
        wait_for_members(spec, "here", limit_s)
        options = with_limit(dist.ProcessGroupNCCL.Options(), self.timeout_s)
        options.global_ranks_in_group = list(spec.global_ranks or range(spec.world_size))
        options.group_name = spec.name or f"allranks_{spec.number}"
        if hasattr(options, "config"):
            options.config.blocking = False  # a blocking communicator waits without a limit
            if spec.world_size == 1:
                # it transfers nothing: 1 channel instead of 32, which take 390 MB
                options.config.max_ctas = 1
        variables = {**_SURVIVE, "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, int(limit_s)))}
        with torch.cuda.device(device), environment(variables):
            began = time.monotonic()
            backend = dist.ProcessGroupNCCL(spec.store, spec.rank, spec.world_size, options)
            try:
                backend.eager_connect_single_device(device)
            except RuntimeError:
                self.discard(backend)
                raise
        took_ms = (time.monotonic() - began) * 1e3
        log.debug("NCCL communicator of %d made in %.0f ms", spec.world_size, took_ms)
        return backend

    def discard(self, backend: object) -> None:
        destroy_later(backend, (), self.slow_to_destroy, self._take_down(backend, threading.Lock()))

    def _take_down(self, backend: object, gate: threading.Lock) -> threading.Thread | None:
        if backend is None:
            return None
        revoking = self._start_revoking(backend, gate)
        return revoking or _start_ending("allranks-nccl-abort", _abort, backend, gate)

    def _start_revoking(self, backend: object, gate: threading.Lock) -> threading.Thread | None:
        communicator, nccl = self._communicators.pop(id(backend), 0), find_revoking_nccl()
        if not communicator or nccl is None or self._closed:
            return None
        return start_attended("allranks-nccl-revoke", self._revoke, nccl, backend, communicator, gate)

    def _revoke(self, nccl: ctypes.CDLL, backend: object, communicator: int, gate: threading.Lock) -> None:
        """Ends the kernels at once. The rest of an abort takes half a second and then frees memory, which waits for the device
        and holds the driver's lock; it is done once the next group works."""
        with _holding(gate):
            revoked = revoke(nccl, communicator)
        if not revoked:
            _start_ending("allranks-nccl-abort", _abort, backend, gate)
            return
        with self._guard:
            self._revoked.append(backend)
            self._steps = 0


def find_revoking_nccl() -> ctypes.CDLL | None:
    """The NCCL library that torch has loaded; None if it cannot revoke: before 2.28, or linked into torch."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return nccl if hasattr(nccl, "ncclCommRevoke") else None


def revoke(nccl: ctypes.CDLL, communicator: int) -> bool:
    """Ends a communicator's kernels and waits until none is running. False: it cannot be revoked."""
    began, pointer = time.monotonic(), ctypes.c_void_p(communicator)
    if nccl.ncclCommRevoke(pointer, 0) not in (_SUCCESS, _IN_PROGRESS):
        return False
    state = ctypes.c_int(_IN_PROGRESS)
    while state.value == _IN_PROGRESS and time.monotonic() - began < _REVOKED_S:
        time.sleep(_POLL_S)
        nccl.ncclCommGetAsyncError(pointer, ctypes.byref(state))
    log.debug("NCCL communicator revoked in %.0f ms", (time.monotonic() - began) * 1e3)
    return True


def wait_for_members(spec: GroupSpec, what: str, limit_s: float) -> None:
    """Waits until all members have come that far; raises GroupAborted at once when abandoned.

    NCCL itself would wait for a member that died before it connected, and keep a core busy, until torch's timeout.
    """
    spec.store.set(f"{what}/{spec.rank}", "1")
    everybody = [f"{what}/{rank}" for rank in range(spec.world_size)]
    deadline = time.monotonic() + limit_s
    while not spec.store.check(everybody):
        if abandoned() or time.monotonic() > deadline:
            raise GroupAborted("cancelled" if abandoned() else f"not all members came within {limit_s:.0f} s")
        time.sleep(_POLL_S)
    if abandoned():
        raise GroupAborted("cancelled")


def wait_for_endings() -> None:
    """Waits until no communicator of this process is being ended; at most `_ENDED_S`, since one may wait for the next."""
    deadline = time.monotonic() + _ENDED_S
    with _lock:
        ending = list(_ending)
    for thread in ending:
        thread.join(max(0.0, deadline - time.monotonic()))


def _start_ending(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    thread = start_attended(name, target, *args)
    with _lock:
        _ending.difference_update([each for each in _ending if not each.is_alive()])
        _ending.add(thread)
    return thread


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables temporarily; keeps those that the user has set.

    Counts users, because an abandoned thread must not unset them for the next.
    """
    with _lock:
        for name, value in values.items():
            if name in _users or name not in os.environ:
                _users[name] += 1
                os.environ.setdefault(name, value)
        ours = [name for name in values if name in _users]
    try:
        yield
    finally:
        with _lock:
            for name in ours:
                _users[name] -= 1
                if not _users[name]:
                    del _users[name]
                    os.environ.pop(name, None)


def _end(retired: list[tuple[Any, bool]]) -> None:
    """Ends idle communicators: takes half the time of an abort, and needs no peer."""
    began = time.monotonic()
    while retired:
        backend, revoked = retired.pop()
        try:
            backend.abort() if revoked else backend.shutdown()
        except RuntimeError as error:
            log.debug("NCCL shutdown: %s", str(error).splitlines()[0])
        destroy_later(backend, (), keep_at_exit=True)
        del backend
    log.debug("idle NCCL communicators ended in %.0f ms", (time.monotonic() - began) * 1e3)


@contextlib.contextmanager
def _holding(gate: threading.Lock) -> Iterator[None]:
    """Waits while the backend launches an operation, which needs no peers: otherwise torch would poll the dead communicator
    until its timeout. Waits at most `_TAKEN_S`, because a launch into a full queue needs the abort."""
    taken = gate.acquire(timeout=_TAKEN_S)
    try:
        yield
    finally:
        if taken:
            gate.release()


def _abort(backend: Any, gate: threading.Lock) -> None:
    """Aborts a communicator, which may take hundreds of milliseconds: never call it on the client's thread."""
    with _holding(gate):
        began = time.monotonic()
        try:
            backend.abort()
            log.debug("NCCL communicator aborted in %.0f ms", (time.monotonic() - began) * 1e3)
        except RuntimeError as error:
            log.debug("NCCL abort: %s", str(error).splitlines()[0])
