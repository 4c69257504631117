"""Calls into torch's C++ that cannot be interrupted, and its log while they are called off.

Runs in a rank. gloo waits for a member that should call us without holding a socket that could be cut, and torch's
store keeps trying an address that is dead. Such a call runs in a thread of its own: the one that abandons it frees
the caller at once, and what the call makes after that is discarded. torch then prints C++ stack traces; its log level
is one number in libc10, read at every line, and torch offers no way to set it once it is imported. Where the number cannot be
found nothing is silenced.
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
_here = threading.local()  # `call`: the one that runs on this thread
MAX_LEFT_RUNNING = 16  # each is a thread, and what torch holds for the call, until the call's own limit
# abandoned, and not returned yet; changed under the calls' locks
_left_running: set[AbandonableCall[Any]] = set()


def _forget(made: object) -> None:
    """Discards what needs no care."""


def _forgotten() -> NoReturn:
    """Stands for a call that was made: it may have held what it was to finish."""
    raise RuntimeError("this call was made already")


@dataclass(eq=False)
class AbandonableCall(Generic[T]):
    """One call. `abandon` may come from any thread, before, during or after it."""

    make: Callable[[], T]
    discard: Callable[[T], None] = _forget  # of what was made too late; on the call's own thread
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _made: list[T] = field(default_factory=list)
    _failure: list[BaseException] = field(default_factory=list)
    _abandoned: bool = False
    _running: bool = False

    def result(self) -> T:
        """What was made; raises what the call raised, or what it was abandoned with. Limits are the call's own.

        An error is kept by nobody then: its traceback leads to us, and what the call has made would wait, unfinished,
        for a garbage collection to destroy it, on any thread.
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
        """Ends the waiting with this error, unless the call is through."""
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
        self.make = _forgotten
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
    """Whether nobody waits any more for the call that runs on this thread."""
    call = getattr(_here, "call", None)
    return call is not None and call._abandoned


_FATAL = 3
_lock = threading.Lock()
_silencers = 0
_before = 0


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """torch prints nothing inside: what goes wrong is raised, and told by us. Any number of threads at once."""
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
