"""Calls into torch's C++ that cannot be interrupted, and silencing its log while they are abandoned.

Runs in a rank. gloo waits for a member to connect without a socket that could be shut down, and torch's store retries a dead
address. Such a call runs in its own thread: abandoning it frees the caller at once, and its late result is discarded.
torch then prints C++ stack traces; its log level is a variable in libc10, read at every line, and torch has no function to
set it after the import. If the variable is not found, the log is not silenced.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

import torch

from allranks.errors import GroupAborted

T = TypeVar("T")
_here = threading.local()  # `call`: the call running on this thread
MAX_LEFT_RUNNING = 16  # abandoned calls; each keeps a thread and torch's resources until its own time limit
# abandoned and still running; changed under the calls' locks
_left_running: set[AbandonableCall[Any]] = set()


def _used() -> NoReturn:
    """Replaces `make` after the call, so that the objects it refers to are released."""
    raise RuntimeError("this call was made already")


@dataclass(eq=False)
class AbandonableCall(Generic[T]):
    """One call. `abandon` may come from any thread, before, during or after the call."""

    make: Callable[[], T]
    discard: Callable[[T], None] = lambda made: None  # of a late result, on the call's own thread
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _made: list[T] = field(default_factory=list)
    _failure: list[BaseException] = field(default_factory=list)
    _abandoned: bool = False
    _running: bool = False

    def result(self) -> T:
        """The result; raises the call's error, or the one it was abandoned with. The call has its own time limit.

        Drops its reference to the error: a traceback would keep the call's objects until a garbage collection destroys
        them, on any thread.
        """
        if len(_left_running) >= MAX_LEFT_RUNNING:
            raise GroupAborted(f"{len(_left_running)} earlier calls into torch have not returned yet")
        self._running = True
        threading.Thread(target=self._run, name="allranks-making", daemon=True).start()
        with self._changed:
            while not (self._made or self._failure):
                self._changed.wait()
            if self._made:
                return self._made.pop()
            raise self._failure.pop()

    def abandon(self, error: BaseException) -> None:
        """Makes `result` raise this error, unless the call has ended."""
        with self._changed:
            if not self._abandoned:
                self._abandoned = True
                self._failure.append(error)
                if self._running:
                    _left_running.add(self)
            self._changed.notify_all()

    def _run(self) -> None:
        _here.call = self
        made: list[T] = []
        failure: list[BaseException] = []
        frames: TracebackType | None = None
        try:
            made.append(self.make())
        except BaseException as error:
            failure.append(error)
            frames = error.__traceback__
        self.make = _used
        with self._changed:
            late, self._running = self._abandoned, False
            _left_running.discard(self)
            if not late:
                self._made, self._failure = made, failure
            self._changed.notify_all()
        traceback.clear_frames(frames)
        frames = None
        if late:
            failure.clear()
            if made:
                self.discard(made.pop())


def abandoned() -> bool:
    """Whether the call running on this thread was abandoned."""
    call = getattr(_here, "call", None)
    return call is not None and call._abandoned


_FATAL = 3
_lock = threading.Lock()
_silencers = 0
_before = 0


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Silences torch's log: errors are raised, and we report them. For any number of threads at once."""
    global _silencers, _before
    level = _level()
    if level is None:
        yield
        return
    with _lock:
        if _silencers == 0:
            _before, level.value = level.value, max(level.value, _FATAL)
        _silencers += 1
    try:
        yield
    finally:
        with _lock:
            _silencers -= 1
            if _silencers == 0:
                level.value = _before


@lru_cache(maxsize=1)
def _level() -> ctypes.c_int | None:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
