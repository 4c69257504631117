"""Follows every call of a rank until it completes. Runs in all threads of the rank.

`_fast.c` writes a row before it enters the library, and keeps the Work that the library returns. Completion is noted by the
program's wait() (in C), by a later call, or by the side thread. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from allranks.blackbox.file_writer import FIELD, Box
from allranks.blackbox.header import start_ticks
from allranks.blackbox.layout import Item
from allranks.model.parsing import role_of_command, without_secrets
from allranks.model.trace import State
from allranks.recording.options import TORCH_ERRORS, RecorderOptions, fast
from allranks.recording.stack import Stacks

if TYPE_CHECKING:
    import torch.distributed as dist

    from allranks.recording._fast import Counters, Ring

Shapes = tuple[int, int, int]  # (id, elements in, elements out)


class PendingWork(Protocol):
    """A Work of torch, or a marker on the device."""

    def is_completed(self) -> bool:
        """Whether the call has ended; may raise the error of the call."""


#: (work, number of the call, counters of its group, numbers of the calls that end with it)
Entry: TypeAlias = "tuple[PendingWork, int, Counters, tuple[int, ...]]"

SWEEP_CALLS = 4  # pending calls that a later call checks
MAX_ERROR = 300  # characters of the error of the first failed call
MAX_THREADS = 1000  # names of threads, so that a program with many threads does not fill the heap
COMPLETED, FAILED, TIMED_OUT = int(State.COMPLETED), int(State.FAILED), int(State.TIMED_OUT)

WAITS_BLOCK = frozenset({"gloo", "mpi", "fake"})  # backends whose wait() returns after completion


class GroupState:
    """Name, members and counters of a process group. Looked up by its Python object once per call."""

    __slots__ = ("backend", "counters", "first_ranks", "name", "ranks", "ref")

    def __init__(self, number: int, name: str, ranks: tuple[int, ...], backend: str, timeout_ms: int) -> None:
        self.name = name
        self.ranks = ranks  # global ranks in group order; () = unknown
        self.first_ranks = ranks  # before it was reconfigured
        self.backend = backend
        # numbers its calls; thread-safe, because autograd's thread makes calls, too
        make: type[Counters] = fast().Counters
        self.counters = make(number, timeout_ms, backend in WAITS_BLOCK, ranks)
        if "," in backend:  # "cpu:gloo,cuda:nccl": whether wait() blocks depends on the tensor
            self.counters.cpu_side = make(number, timeout_ms, True, ranks)
        self.ref: weakref.ref[dist.ProcessGroup] | None = None

    def global_rank(self, group_rank: int) -> int:
        """The global rank for a group-local one; unchanged if the members are unknown."""
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else group_rank


def make_ring(box: Box) -> Ring:
    """The ring of an open box. It is written without locks, because a signal handler may interrupt a write and record a call
    itself. A call is identified by its number: record id + 1, the `begin` of its row."""
    fields = [FIELD[name] for name in ("next_id", "calls_started", "last_call_ns", "calls_completed")]
    made: Ring = fast().Ring(box.memory, box.capacity, *fields)
    return made


class CallWriter:
    """Writes calls into an open box. One per process; used by all its threads without a lock."""

    def __init__(self, box: Box, options: RecorderOptions) -> None:
        self.box = box
        self.ring = make_ring(box)
        self.ring.on_thread = functools.partial(
            _note_thread, box, set()
        )  # avoids a reference cycle through C
        self.stacks = Stacks(box, options.stack_depth) if options.stack_depth else None
        self.pending: dict[int, Entry] = {}  # by id(work), oldest first

        self.label = 0
        self.asking = threading.RLock()  # held while works and events are queried; acquired with a timeout
        self._error = 0  # number of the first failed call
        self.on_timeout: Callable[[bool], None] | None = None  # called with whether the timeout is new
        self.original_wait: Callable[[PendingWork], object] | None = None  # Work.wait before it was wrapped
        self.markers: Any = None  # CUDA events of pending calls, in C

    def begin(
        self,
        group: GroupState,
        op: int,
        shapes: Shapes,
        reduce_op: int = 0,
        root: int = -1,
        peer: int = -1,
        p2p: bool = False,
        timeout_ms: int = 0,
        frame: FrameType | None = None,
        tag: int = -1,
    ) -> int:
        """Writes the row of a call before it is made; returns its number."""
        sizes_and_place = (shapes, self.stack(frame), p2p, timeout_ms)
        number: int = self.ring.begin(group.counters, op, *sizes_and_place, reduce_op, root, peer, tag)
        return number

    def stack(self, frame: FrameType | None) -> int:
        """The id of the stack that starts at `frame`; 0 if stacks are not recorded."""
        return self.stacks.at(frame) if self.stacks is not None else 0

    def track(self, work: PendingWork, number: int, group: GroupState) -> None:
        """Follows `work` until the library completes the call."""
        if group.counters.blocking:
            self.ring.started(number)
        self.pending[id(work)] = (work, number, group.counters, ())

    def finish(self, number: int, parts: tuple[int, ...] = (), state: int = COMPLETED) -> None:
        """Records the end of a call and of the calls that end with it."""
        self.ring.finish(number, state, parts)

    def wait_failed(self, work: PendingWork, error: BaseException, limited: bool) -> None:
        """Called if the program's wait() raised. `limited`: wait() had its own timeout, after which the call may still be
        running (Manager waits in slices)."""
        key = id(work)
        known = self.pending.get(key)
        if (
            limited
            and known is not None
            and known[2].blocking
            and is_timeout(error)
            and not work.is_completed()
        ):
            return
        entry = self.pending.pop(key, None)
        if entry is not None:
            self.failed(entry[1], error, entry[3])
        elif self.on_timeout is not None and is_timeout(error):
            # the side thread was faster; the program must not exit before its dump is written
            self.on_timeout(False)

    def failed(self, number: int, error: BaseException, parts: tuple[int, ...] = ()) -> None:
        """Marks a call as failed or timed out."""
        timed_out = is_timeout(error)
        self.finish(number, parts, TIMED_OUT if timed_out else FAILED)
        if not self._error:
            self._error = number
            text = without_secrets(f"{type(error).__name__}: {error}")[:MAX_ERROR]
            self.box.append(Item.META, {"first_error": [number, text]})
        if timed_out and self.on_timeout is not None:
            self.on_timeout(True)

    def sweep(self, everything: bool = False) -> None:
        """Records completed calls: the oldest ones during a later call, all of them in the side thread."""
        pending = self.pending
        self.ring.hand_over(pending)
        if everything and self.markers is not None:
            self.markers.settle()
        if not pending or not self.asking.acquire(timeout=1.0 if everything else 0.0):
            return  # nothing to do, or another thread is sweeping
        try:
            oldest = self.box.get("next_id") - self.box.capacity
            for key in list(pending) if everything else list(itertools.islice(pending, SWEEP_CALLS)):
                if self.ring.capturing:
                    return
                if not self._settle(key, oldest) and not everything:
                    return
        finally:
            self.asking.release()

    def _settle(self, key: int, oldest: int) -> bool:
        """Records the end of one call; False if it is still running. The rows of calls up to `oldest` are overwritten."""
        pending = self.pending
        entry = pending.get(key)
        if entry is None:
            return True
        if entry[1] <= oldest:  # some works never report completion
            pending.pop(key, None)
            return True
        try:
            if not entry[0].is_completed():
                return False
            error = self._outcome(entry)
        except Exception as raised:  # a Work may raise the error of its call
            error = raised
        if pending.pop(key, None) is None:
            return True  # the program's wait() was faster
        if error is None:
            self.finish(entry[1], entry[3])
        else:
            self.failed(entry[1], error, entry[3])
        return True

    def given_up(self, works: Iterable[object], error: BaseException) -> None:
        """Records the state of these works and stops following them. Called before their group is aborted.

        NCCL's abort seems to hold a lock that `is_completed` waits for without releasing the GIL: recovery became faster
        when works were no longer queried during an abort.
        """
        self.ring.hand_over(self.pending)
        taken = self.asking.acquire(timeout=0.1)
        try:
            for work in works:
                if not self.ring.capturing and self._settle(id(work), oldest=0):
                    continue
                entry = self.pending.pop(id(work), None)
                if entry is not None:
                    self.failed(entry[1], error, entry[3])
        finally:
            if taken:
                self.asking.release()

    def begin_capture(self) -> None:
        """Called before a CUDA graph is captured: no event is queried after it returns."""
        self.ring.capturing += 1
        if self.markers is not None:
            deadline = time.monotonic() + 1.0
            while self.markers.busy and time.monotonic() < deadline:
                time.sleep(0.0005)
        if self.asking.acquire(timeout=1.0):
            self.asking.release()

    def end_capture(self) -> None:
        self.ring.capturing = max(0, self.ring.capturing - 1)

    def _outcome(self, entry: Entry) -> BaseException | None:
        """The error of a completed Work, without blocking; None on success."""
        work, counters = entry[0], entry[2]
        if not counters.blocking:
            return _watchdog_error(work)
        try:
            if self.original_wait is not None:
                self.original_wait(work)
        except Exception as error:  # the error of the call
            return error
        return None


def _watchdog_error(work: PendingWork) -> BaseException | None:
    """The error that NCCL's watchdog reports for a call (torch 2.6 and later), or None."""
    try:
        future: Any = work.get_future_result()  # type: ignore[attr-defined]
        if not future.done():
            return None
        name = str(future.value())
    except TORCH_ERRORS:  # not every backend has it
        return None
    if "TIMEOUT" in name:
        return TimeoutError("the call timed out")
    return RuntimeError(name) if "ERROR" in name else None  # may be UNKNOWN


def is_timeout(error: BaseException) -> bool:
    """Whether an error of a collective is a timeout, which in torch's backends only the text shows."""
    if isinstance(error, TimeoutError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)


def fill_header(box: Box, options: RecorderOptions, **facts: object) -> dict[str, object]:
    """Writes the facts about this process into a new box and returns them; they are written again when more are known."""
    pid = os.getpid()
    names = ("rank", "world_size", "local_rank", "attempt")
    known = {name: getattr(options, name) for name in names}
    box.set(**known, pid=pid, start_ticks=start_ticks(pid), start_ns=time.time_ns())
    about: dict[str, object] = {"host": socket.gethostname(), "job": options.job, "backend": ""}
    about |= {
        "role": own_role(),
        "versions": {},
        "argv": [],
        **facts,
        "launched": [launched_at(), max(0, options.world_size), ""],
    }
    box.append(Item.META, about)
    return about


def own_role() -> str:
    """The role of this process: $ALLRANKS_ROLE, its title (Ray actors), its function (multiprocessing), or its command."""
    if given := os.environ.get("ALLRANKS_ROLE"):
        return given[:64]
    with contextlib.suppress(OSError), open("/proc/self/cmdline", errors="replace") as title:
        if found := re.match(r"\w+::(\w+)", title.read(200)):
            return found[1]
    module = sys.modules.get("multiprocessing.process")
    target = getattr(module and module.current_process(), "_target", None)
    name = str(getattr(target, "__name__", ""))
    return name if name and not name.startswith("_") else role_of_command(" ".join(sys.argv[:20]))[:64]


def launched_at() -> str:
    """The rendezvous address in the environment; "" unknown."""
    host, port = (os.environ.get(f"MASTER_{name}", "") for name in ("ADDR", "PORT"))
    return f"{host}:{port}" if host and port else ""


def warn_once(message: str) -> None:
    """Issues a warning; prints it if warnings are errors."""
    try:
        warnings.warn(f"allranks: {message}", RuntimeWarning, stacklevel=2)
    except Exception:  # -W error
        print(f"allranks: {message}", file=sys.stderr)


def _note_thread(box: Box, known: set[int], number: int) -> None:
    """Records the name of a thread at its first call."""
    if len(known) < MAX_THREADS:
        known.add(number)
        box.intern(Item.THREAD, [number, thread_name(number)])


def thread_name(native_id: int) -> str:
    """The name of the calling thread: Python's, or the kernel's for a thread of C++ ("pt_autograd_0")."""
    ident = threading.get_ident()  # `native_id` is wrong after a fork
    for thread in threading.enumerate():
        if thread.ident == ident:
            return thread.name[:64]
    try:
        with open(f"/proc/self/task/{native_id}/comm", errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return ""
