"""An incident: a hang or a failure with everything known of it. Pure data, one JSON file in its folder.

Times are epoch seconds so that nodes can be compared; `durations_s` come from one monotonic clock each.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Literal

from allranks.model.diagnosis import Finding

SCHEMA = 1

#: A stall becomes a hang when it is known that it will not end by itself.
Kind = Literal["stall", "hang", "death", "partition", "request", "slow"]
ActionKind = Literal[
    "none", "dry_run", "collect", "evict", "set_aside", "restart_rank", "restart_job", "leave_node", "command"
]


def describe_exit(code: int) -> str:
    """ "died of SIGKILL", "exited with code 3": a code as that of subprocess, negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


@dataclass(frozen=True)
class Moment:
    """One point of the story's timeline."""

    name: str  # "last good step", "overdue", "noticed", "evidence", "verdict", "action", "recovered"
    at: float  # epoch seconds
    text: str = ""


@dataclass(frozen=True)
class Action:
    """What the policy decided, and how it went."""

    kind: ActionKind
    reason: str
    ranks: tuple[int, ...] = ()
    replica: int | None = None
    command: str = ""
    done: bool = False
    result: str = ""


@dataclass(frozen=True)
class Failure:
    """How a rank's program ended by its own doing, in a form that recognises the same failure when it happens again."""

    rank: int
    reason: str  # "raised ValueError", "exited with code 3"
    where: str = ""  # the user's line, "" when nothing tells
    text: str = ""
    step: int = -1  # of the last mark, -1 without one
    calls: int = 0  # completed

    @property
    def sentence(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"rank {self.rank} {self.reason}{at}" + (f": {self.text}" if self.text else "")

    @property
    def place(self) -> str:
        """When it happened, in words."""
        if self.step >= 0:
            return f"in step {self.step}"
        return f"after {self.calls} collective calls" if self.calls else "before the first step"

    def repeats(self, earlier: Failure) -> bool:
        """Whether it is the same line and error at the same step; without marks, after about as many calls."""
        if (self.reason, self.where, self.step) != (earlier.reason, earlier.where, earlier.step):
            return False
        if not self.where and self.text != earlier.text:
            return False
        near = abs(self.calls - earlier.calls) <= max(2, 0.02 * max(self.calls, earlier.calls))
        return self.step >= 0 or near


@dataclass(frozen=True)
class Incident:
    """The whole story. Fields are filled in as the incident proceeds; the file is rewritten atomically."""

    id: str
    kind: Kind
    job: str
    opened: float
    reason: str  # why it was opened, in the noticer's words
    node: str = ""
    ranks: tuple[int, ...] = ()  # the guilty ones, once known
    step: int = -1  # last good step
    verdict: Finding | None = None
    stacks: dict[str, Any] | None = None  # summary as in `allranks stacks --json`, without threads
    action: Action | None = None
    timeline: tuple[Moment, ...] = ()
    missing: tuple[str, ...] = ()  # what did not answer
    closed: float | None = None
    durations_s: dict[str, float] = field(default_factory=dict)
    folder: str = ""

    @property
    def acted(self) -> bool:
        """Whether an action was carried out."""
        return self.action is not None and self.action.done
