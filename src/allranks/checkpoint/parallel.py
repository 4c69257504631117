"""A few threads that work off a list together: reading and hashing free the GIL. Torch-free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def cores() -> int:
    """How many threads read and hash at once."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


def in_threads(count: int, items: Iterable[T], worker: Callable[[], Callable[[T], None]]) -> None:
    """Acts on every item, in their order, with a worker for each of a few threads; raises the first error."""
    left = list(items)
    left.reverse()
    errors: list[BaseException] = []

    def work() -> None:
        act = worker()
        while not errors:
            try:
                item = left.pop()
            except IndexError:
                return
            try:
                act(item)
            except BaseException as error:
                errors.append(error)

    others = [threading.Thread(target=work, name="allranks-read") for _ in range(min(count, len(left)) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
