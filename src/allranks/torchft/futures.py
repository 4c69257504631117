"""torchft.futures: limits on how long a future, a block or a stream may take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch

__all__ = ["context_timeout", "future_timeout", "future_wait", "stream_timeout"]


T = TypeVar("T")


def future_timeout(fut: torch.futures.Future[T], timeout: timedelta) -> torch.futures.Future[T]:
    """Ends as `fut` does, or with TimeoutError when `fut` takes longer than `timeout`."""
    limited: torch.futures.Future[T] = torch.futures.Future()
    first = threading.Lock()  # taken by the thread that settles it, and never released

    def late() -> None:
        if first.acquire(blocking=False):
            limited.set_exception(TimeoutError(f"future did not complete within {timeout}"))

    timer = _timer(timeout, late)

    def arrived(done: torch.futures.Future[T]) -> None:
        timer.cancel()
        if not first.acquire(blocking=False):
            return
        try:
            limited.set_result(done.value())
        except Exception as error:
            limited.set_exception(error)

    fut.add_done_callback(arrived)
    return limited


def future_wait(fut: torch.futures.Future[object], timeout: timedelta) -> object:
    """The result of `fut`; raises its error, or TimeoutError when it takes longer than `timeout`."""
    done = threading.Event()
    fut.add_done_callback(lambda _: done.set())
    if not done.wait(timeout.total_seconds()):
        raise TimeoutError(f"future did not complete within {timeout}")
    return fut.wait()


@contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Iterator[None]:
    """Calls `callback`, on another thread, when the block is not left within `timeout`."""
    timer = _timer(timeout, callback)
    try:
        yield
    finally:
        timer.cancel()


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Calls `callback` when what the current CUDA stream holds now is not done within `timeout`."""
    if not torch.cuda.is_available():
        return
    event = torch.cuda.Event()
    event.record()

    def look() -> None:
        if not event.query():
            callback()

    _timer(timeout, look)


def _timer(timeout: timedelta, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(timeout.total_seconds(), action)
    timer.daemon = True
    timer.start()
    return timer
