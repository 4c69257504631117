"""A rank's progress, read from its black box by the liveness proxy, which starts in no time: without numpy."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.blackbox.header import find_header


@dataclass(frozen=True)
class Mark:
    """Where a rank is. `count` grows with every step and call."""

    step: int
    count: int
    closed: str = ""


def read_mark(path: str) -> Mark | None:
    """The rank's mark; None when there is no black box (yet) or it is not one."""
    head = find_header(path)
    if head is None:
        return None
    return Mark(head.step, max(head.step, 0) + head.calls_started + head.calls_completed, head.closed)
