"""NCCL for GPU tensors: the communicator is ended and made again in place, the process lives on.

Runs in a rank with a GPU. `abort` ends the kernels that wait for a dead peer, so that the stream continues; the
step is then tried again with a new communicator over the members that are left. Where NCCL can, the old one is only
revoked then, and its memory freed some steps later. torch's watchdog tells every peer that goes with a C++ stack
trace: its log is silent while such a group is in use, unless TORCH_CPP_LOG_LEVEL is set. What goes wrong is raised,
and told by the manager.
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


#: Read once by NCCL, at its first communicator, so it is set for good: all members connect while the group is made, where a
#: death is noticed. Otherwise they connect in the first collective of each kind, and a member that dies in those milliseconds
#: stops the others for the limit of time.
CONNECT_AT_ONCE = {"NCCL_RUNTIME_CONNECT": "0"}
#: Read by torch when a group is made: its watchdog must not end the process when we abort the group.
_SURVIVE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_POLL_S = 0.002
_TAKEN_S = 2.0  # more than a GPU needs to be given an operation
_ENDED_S = 1.5  # more than the end of a communicator takes, unless it waits for the device
_IDLE_STEPS = 10  # with the next group, before the one before it is ended
_KEPT = 4  # communicators that wait for that; with more of them, the next commit ends them
_REVOKED_S = 10.0  # more than it takes until nothing runs in a communicator
_SUCCESS, _IN_PROGRESS = 0, 7  # as NCCL counts
_lock = threading.Lock()
_users: Counter[str] = Counter()  # of variables that we have set
_ending: set[threading.Thread] = set()  # each ends communicators


class ProcessGroupNCCL(ReconfigurableGroup):
    """One NCCL communicator on one device (default: the training thread's current one)."""

    backend_name = "nccl"
    slow_to_destroy = True

    def __init__(self, timeout: Seconds = 60.0, device: torch.device | str | int | None = None) -> None:
        super().__init__(timeout)
        self.device = (
            device
            if device is None
            else torch.device("cuda", device)
            if isinstance(device, int)
            else torch.device(device)
        )
        for name, value in CONNECT_AT_ONCE.items():
            os.environ.setdefault(name, value)
        self._quiet = contextlib.ExitStack()
        self._retired: list[object] = []  # communicators that were left in good order
        self._revoked: list[object] = []  # nothing runs in them, and nothing can
        self._steps = 0  # committed since the last of them was left
        self._communicators: dict[int, int] = {}  # id of a backend -> NCCL's pointer
        self._over = False
        self._alone: object = None  # the communicator of one that loaded NCCL
        self._probe: tuple[torch.cuda.Stream, torch.Tensor] | None = None

    def choose_device(self) -> None:
        if self.device is None and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def settle(self) -> None:
        """Waits for the stream: only then it is known that the gradients are reduced."""
        torch.cuda.current_stream(self.device).synchronize()

    def prepare(self) -> None:
        """Loads NCCL and its kernels, by a group of one: a replica that joins must not keep the others waiting.

        It is kept: it holds 10 MB, and its end would take 1 s of the first step.
        """
        began = time.monotonic()
        try:
            self._alone = self._make(GroupSpec(dist.HashStore(), 0, 1, name="allranks_prepare"))
        except RuntimeError as error:  # the first real group will raise it again, with the members' names
            log.debug("NCCL could not be prepared: %s", str(error).splitlines()[0])
        log.debug("NCCL was prepared in %.0f ms", (time.monotonic() - began) * 1e3)

    def meet(self, meeting: GroupSpec, made: object = None) -> None:
        self._quiet.close()
        if "TORCH_CPP_LOG_LEVEL" not in os.environ:
            self._quiet.enter_context(silenced())
        super().meet(meeting, made)

    def retire(self, reason: str) -> None:
        """Aborting a communicator keeps the device busy: not in the first step with the next one."""
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
        alone, self._alone = self._alone, None
        self._retired += [alone] if alone is not None else []
        self._over = True
        self._end_retired()
        super().shutdown()
        self._quiet.close()

    def drop_retired(self) -> None:
        """Some steps later than the first with the next group, in which a new member is most likely to die.

        The end of a communicator waits for what the device does, and keeps the driver's lock. Beside a collective whose
        member is dead it does not end before that is aborted, and the abort waits for an operation that waits for the
        lock. After `_TAKEN_S` it waits no more, and torch asks the aborted communicator for its limit of time
        whether it has taken the operation. So the next step begins when all ends are over.
        """
        if idle := len(self._retired) + len(self._revoked):
            self._steps += 1
            if self._steps >= _IDLE_STEPS or idle > _KEPT:
                self._end_retired()
        wait_for_endings()

    def _end_retired(self) -> None:
        """Those that were revoked; the others are revoked first, since their end takes as long and nobody should wait for it."""
        with self._guard:
            retired, self._retired = self._retired, []
            revoked, self._revoked = self._revoked, []
        ending = [(backend, True) for backend in revoked]
        for backend in retired:
            if self._start_revoking(backend, threading.Lock()) is None:
                ending.append((backend, False))
        if ending:
            _start_ending("allranks-nccl-end", _end, ending)

    def _make(self, meeting: GroupSpec) -> object:
        """The communicator is ready when this returns.

        torch would wait for that in the first collective, holding a lock that its abort needs too: a member that
        dies meanwhile would stop the training thread. Here only this thread waits, and can be abandoned.
        """
        return self._begin(self._connect(meeting))

    def make_beside(self, meeting: GroupSpec) -> object:
        """Without an operation: one that waits for a member, beside one of the group that works, could stop both."""
        backend = self._connect(meeting)
        if can_wait_until_connected(backend):
            try:
                wait_for_members(meeting, "connected", self.timeout_s)
            except (RuntimeError, GroupAborted):
                self.discard(backend)
                raise
            with torch.cuda.device(self.device or torch.device("cuda", 0)):
                communicator_of(backend)  # which waits until all have connected
            wait_for_endings()  # here nobody waits for us
        return backend

    def _begin(self, made: Any) -> Any:
        """The first operation, when no other communicator is being ended.

        That waits for the device and keeps the driver's lock. If a member died now, our operation would keep the device, our
        abort would wait for the lock, and nothing would move in this process until torch's limit of time.
        """
        wait_for_endings()
        if abandoned():  # a member is dead, and nobody would abort the operation
            self.discard(made)
            raise GroupAborted("called off")
        return self._launch(made)

    def _launch(self, made: Any) -> Any:
        """Gives the communicator its first operation, on memory that is there: an allocation would wait for an abort."""
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

    def _connect(self, meeting: GroupSpec) -> object:
        """The first member that fails closes its connections, so that the others fail too instead of waiting for it."""
        device = self.device or torch.device("cuda", 0)
        limit_s = meeting.limit_s or self.timeout_s
        wait_for_members(meeting, "here", limit_s)
        options = with_limit(dist.ProcessGroupNCCL.Options(), self.timeout_s)
        options.global_ranks_in_group = list(meeting.global_ranks or range(meeting.world_size))
        options.group_name = meeting.name or f"allranks_{meeting.number}"
        if hasattr(options, "config"):
            options.config.blocking = False  # a blocking communicator waits without a limit
            if meeting.world_size == 1:
                options.config.max_ctas = 1  # it moves nothing: 1 channel instead of 32, which take 390 MB
        variables = {**_SURVIVE, "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, int(limit_s)))}
        with torch.cuda.device(device), environment(variables):
            began = time.monotonic()
            backend = dist.ProcessGroupNCCL(meeting.store, meeting.rank, meeting.world_size, options)
            try:
                backend.eager_connect_single_device(device)
            except RuntimeError:
                self.discard(backend)
                raise
        took_ms = (time.monotonic() - began) * 1e3
        log.debug("NCCL communicator of %d made in %.0f ms", meeting.world_size, took_ms)
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
        if not communicator or nccl is None or self._over:
            return None
        return start_attended("allranks-nccl-revoke", self._revoke, nccl, backend, communicator, gate)

    def _revoke(self, nccl: ctypes.CDLL, backend: object, communicator: int, gate: threading.Lock) -> None:
        """Ends the kernels at once. What an abort does besides takes half a second, and then frees memory: that waits for the
        device and keeps the driver's lock, so it comes when the next group works."""
        with _not_taking(gate):
            revoked = revoke(nccl, communicator)
        if not revoked:
            _start_ending("allranks-nccl-abort", _abort, backend, gate)
            return
        with self._guard:
            self._revoked.append(backend)
            self._steps = 0


def find_revoking_nccl() -> ctypes.CDLL | None:
    """NCCL as torch has loaded it; None when it cannot revoke: before 2.28, or linked into torch."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return nccl if hasattr(nccl, "ncclCommRevoke") else None


def revoke(nccl: ctypes.CDLL, communicator: int) -> bool:
    """Ends what runs in it; returns when nothing does. False: it cannot be revoked."""
    began, pointer = time.monotonic(), ctypes.c_void_p(communicator)
    if nccl.ncclCommRevoke(pointer, 0) not in (_SUCCESS, _IN_PROGRESS):
        return False
    state = ctypes.c_int(_IN_PROGRESS)
    while state.value == _IN_PROGRESS and time.monotonic() - began < _REVOKED_S:
        time.sleep(_POLL_S)
        nccl.ncclCommGetAsyncError(pointer, ctypes.byref(state))
    log.debug("NCCL communicator revoked in %.0f ms", (time.monotonic() - began) * 1e3)
    return True


def wait_for_members(meeting: GroupSpec, what: str, limit_s: float) -> None:
    """Returns when all have come that far; ends at once when the group is called off.

    NCCL itself waits for a member that died before it connected, and keeps a core busy, until torch's limit of time.
    """
    meeting.store.set(f"{what}/{meeting.rank}", "1")
    everybody = [f"{what}/{rank}" for rank in range(meeting.world_size)]
    deadline = time.monotonic() + limit_s
    while not meeting.store.check(everybody):
        if abandoned() or time.monotonic() > deadline:
            raise GroupAborted(
                "called off" if abandoned() else f"not all members came within {limit_s:.0f} s"
            )
        time.sleep(_POLL_S)
    if abandoned():
        raise GroupAborted("called off")


def wait_for_endings() -> None:
    """Until no communicator of this process is being ended, but not for one that cannot end before the next one works."""
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
    """Sets variables for a while; what the user has set is left alone.

    Several threads at once: one that was abandoned must not take them away from the next.
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
    """Ends communicators in which nothing is in flight: half the time of an abort, and no peer is needed for it."""
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
def _not_taking(gate: threading.Lock) -> Iterator[None]:
    """Not while the backend takes an operation, which it does without its peers: torch would keep asking the dead
    communicator whether it has been taken. Only a queue that is full would need the end to move on."""
    taken = gate.acquire(timeout=_TAKEN_S)
    try:
        yield
    finally:
        if taken:
            gate.release()


def _abort(backend: Any, gate: threading.Lock) -> None:
    """NCCL's abort may take hundreds of milliseconds: never on the thread that listens to the lighthouse."""
    with _not_taking(gate):
        began = time.monotonic()
        try:
            backend.abort()
            log.debug("NCCL communicator aborted in %.0f ms", (time.monotonic() - began) * 1e3)
        except RuntimeError as error:
            log.debug("NCCL abort: %s", str(error).splitlines()[0])
