"""Steps that may never end, because a file system gives no answer: they are taken in a thread, which is left behind.

A read from a dead NFS server cannot be interrupted. Whoever waits for it here stops waiting after a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")
#: How often progress is shown and looked at, in seconds.
TICK_S = 0.1


class _Taking(threading.Thread, Generic[T]):
    """Takes one step after the other until the last, or for ever."""

    def __init__(self, steps: Iterable[T]) -> None:
        super().__init__(name="allranks-load", daemon=True)
        self._steps = steps
        self.taken: list[T] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Collects what the steps give."""
        try:
            for item in self._steps:
                self.taken.append(item)
        except BaseException as error:  # raised again by whoever waits
            self.error = error
        finally:
            self.ended.set()


def take_within(
    steps: Iterable[T], limit_s: float, show: Callable[[int], None] | None = None
) -> tuple[list[T], bool]:
    """(what the steps gave, whether all were taken): gives up when one step takes longer than the limit. What the
    thread that is left behind works on must not be used by anybody else afterwards."""
    taking = _Taking(steps)
    taking.start()
    done, since, cpu = 0, time.monotonic(), time.process_time()
    while not taking.ended.wait(TICK_S):
        count, now = len(taking.taken), time.monotonic()
        if count > done or time.process_time() - cpu > TICK_S / 2:  # a large file is work, not a wait
            done, since = count, now
            if show is not None:
                show(count)
        elif now - since > limit_s:
            return taking.taken[:count], False
        cpu = time.process_time()
    taking.join()
    if taking.error is not None:
        raise taking.error
    return taking.taken, True
