"""Destroys process group backends without waiting for them.

A backend's destructor waits for its operations. gloo can miss that its sockets were shut down, and an operation then lasts
until its timeout, so the destructor must not run before its operations have ended. It must not run on a thread that the
interpreter kills at exit either: C++ then terminates the process. At exit, slow backends are kept, and end with the process.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from allranks.torch_private import compile_workers

EXIT_S = 2.0  # the exit of a process waits this long for teardowns
_POLL_S = 0.02
_PATIENCE_S = 120.0  # longer than known timeouts of operations
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
    """Destroys a backend once its works have ended, in its own thread. The caller must drop its references.

    `keep_at_exit`: its destructor may take seconds, so it does not run at exit. `abort`: the thread that aborts it.
    """
    start_attended("allranks-teardown", _destroy, [backend], list(works), keep_at_exit, abort)


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def start_attended(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Starts a thread that works on a backend; the exit of the process waits for it (see `finish`)."""
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
    """Waits at most `limit_s` for teardowns, and for those that they start. Waits for each once only.

    A backend that is not destroyed by then is kept until the process ends.
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
    """Ends the worker processes of torch.compile, for which torch would wait for seconds at exit."""
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
    time.sleep(_POLL_S)  # a call that is just entering the backend must not become its last owner

    def over() -> bool:
        # not while NCCL aborts: a work may answer only after the abort, and block the interpreter until then
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
    """Whether an operation has ended, with or without an error."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True  # aborted
