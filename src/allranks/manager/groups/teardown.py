"""Destroying process group backends without ever waiting for them.

A backend's destructor waits for its operations. gloo can miss that its sockets were shut, and an operation then
sits there until its timeout: the destructor must not run before its operations have ended. And it must not run
on a thread that the interpreter kills at exit: C++ then terminates the process.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

_POLL_S = 0.02
_PATIENCE_S = 120.0  # longer than any timeout of an operation that we know of
_hurry = threading.Event()
_threads: set[threading.Thread] = set()
_lock = threading.Lock()
_registered = False


def bury(backend: Any, works: Sequence[Any]) -> None:
    """Destroys a backend once its works have ended, in a thread of its own. Give no reference away."""
    grave = [backend]
    attend(threading.Thread(target=_dig, args=(grave, list(works)), name="allranks-bury", daemon=True))


def attend(thread: threading.Thread) -> None:
    """Starts a thread that works on a backend; the process does not end before it has (see `finish`)."""
    global _registered
    with _lock:
        _threads.difference_update([each for each in _threads if each.ident and not each.is_alive()])
        if not _registered:
            _registered = True
            atexit.register(finish)
        thread.start()
        _threads.add(thread)


def finish(limit_s: float = 10.0) -> None:
    """Waits for burials and aborts; a backend with an operation that does not end is kept until the process is gone."""
    _hurry.set()
    deadline = time.monotonic() + limit_s
    with _lock:
        waiting = list(_threads)
    for thread in waiting:
        thread.join(max(0.0, deadline - time.monotonic()))
    _hurry.clear()


def _dig(grave: list[Any], works: list[Any]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    time.sleep(_POLL_S)  # a call that is just entering the backend must not end up as its last owner
    while works and not all(ended(work) for work in works) and time.monotonic() < deadline:
        if _hurry.wait(_POLL_S):
            break
    if not all(ended(work) for work in works):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(grave[0]))  # never destroyed
    works.clear()
    grave.clear()
    with _lock:
        _threads.discard(threading.current_thread())


def ended(work: Any) -> bool:
    """Whether an operation is over, well or badly."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True  # aborted
