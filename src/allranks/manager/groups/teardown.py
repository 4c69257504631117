"""Destroying process group backends without ever waiting for them.

A backend's destructor waits for its operations. gloo can miss that its sockets were shut, and an operation then
stays until its timeout: the destructor must not run before its operations have ended. And it must not run on a
thread that the interpreter kills at exit: C++ then terminates the process. At exit nothing is destroyed any more
that could take time: such backends are kept, and end with the process.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from allranks.torch_private import compile_workers

EXIT_S = 2.0  # the longest that the end of a process waits for teardowns
_POLL_S = 0.02
_PATIENCE_S = 120.0  # longer than any timeout of an operation that we know of
_exiting = threading.Event()
_threads: set[threading.Thread] = set()
_lock = threading.Lock()
_registered = False


def destroy_later(
    backend: object,
    works: Sequence[object],
    keep_at_exit: bool = False,
    abort: threading.Thread | None = None,
) -> None:
    """Destroys a backend once its works have ended, in a thread of its own. Give no reference away.

    `keep_at_exit`: its destructor may take seconds; not while the process ends. `abort`: the thread that aborts it.
    """
    start_attended("allranks-teardown", _destroy, [backend], list(works), keep_at_exit, abort)


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """One that ends with the process."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def start_attended(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Starts a thread that works on a backend; the end of the process waits for it a little (see `finish`)."""
    global _registered
    with _lock:
        _threads.difference_update([each for each in _threads if each.ident and not each.is_alive()])
        if not _registered:
            _registered = True
            atexit.register(finish, for_good=True)
        thread = start_thread(name, target, *args)
        _threads.add(thread)
    return thread


def finish(limit_s: float = EXIT_S, for_good: bool = False) -> None:
    """Waits for teardowns, at most `limit_s`: what does not end by then is kept until the process is gone.

    And for those that these start. Each is waited for once: the next end need not.
    """
    _exiting.set()
    deadline = time.monotonic() + limit_s
    while waiting := _take_threads():
        for thread in waiting:
            thread.join(max(0.0, deadline - time.monotonic()))
    if not for_good:
        _exiting.clear()


def _take_threads() -> set[threading.Thread]:
    global _threads
    with _lock:
        taken, _threads = _threads, set()
    return taken


def end_compile_workers() -> None:
    """The worker processes of torch.compile are asked to end, and not waited for: at exit torch would, for seconds."""
    workers = compile_workers()
    if workers is None:
        return
    end, running = workers
    start_thread("allranks-workers", end)
    deadline = time.monotonic() + EXIT_S
    while running():
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _destroy(
    last: list[object], works: list[object], keep_at_exit: bool, abort: threading.Thread | None
) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    time.sleep(_POLL_S)  # a call that is just entering the backend must not end up as its last owner

    def over() -> bool:
        # Not asked while NCCL aborts: a work may answer only when that is over, and keep the interpreter waiting.
        return not (abort is not None and abort.is_alive()) and all(ended(work) for work in works)

    while not (finished := over()) and time.monotonic() < deadline:
        if _exiting.wait(_POLL_S):
            break
    if not finished or (keep_at_exit and _exiting.is_set()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(last[0]))  # never destroyed
    works.clear()
    last.clear()
    with _lock:
        _threads.discard(threading.current_thread())


def ended(work: Any) -> bool:
    """Whether an operation is over, well or badly."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True  # aborted
