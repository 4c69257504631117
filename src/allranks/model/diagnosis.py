"""Findings of `diagnose`, its further inputs, and incidents. Pure data; JSON in docs/reference/json.md.

Times of an incident are epoch seconds, so that nodes can be compared; each of `durations_s` is from one monotonic clock.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Literal

from allranks.model.formatting import one_line
from allranks.model.trace import Frame, World

INCIDENT_SCHEMA = 1
#: A stall becomes a hang when it is known not to end by itself.
Kind = Literal["stall", "hang", "death", "partition", "request", "slow"]
ActionKind = Literal[
    "none", "dry_run", "collect", "evict", "set_aside", "restart_rank", "restart_job", "leave_node", "command"
]
Severity = Literal["root", "consequence", "warning"]
Status = Literal["ok", "fault", "unclear"]
#: (minimum confidence, share of such verdicts with correct ranks and cause), from benchmarks/results/verdicts.json.
CALIBRATION = ((0.9, 0.9876), (0.8, 0.9838), (0.6, 0.8883), (0.4, 0.7696), (0.0, 0.4))


def share_right(confidence: float) -> float:
    """The share of correct verdicts with this confidence."""
    return next(share for least, share in CALIBRATION if confidence >= least or not least)


def confidence_text(confidence: float) -> str:
    """ "90% (right in 99 of 100 such verdicts)"."""
    return f"{confidence:.0%} (right in {100 * share_right(confidence):.0f} of 100 such verdicts)"


@dataclass(frozen=True, repr=False)
class Finding:
    """One problem. `ranks` are only the guilty ones."""

    cause: str
    ranks: tuple[int, ...]
    sentence: str
    severity: Severity = "warning"
    group: str = ""
    sequence: int | None = None
    confidence: float = 0.0
    where: str = ""  # "train.py:44 in sync_stats"
    waiting: tuple[int, ...] = ()  # ranks that wait because of it
    waited_s: float | None = None
    stacks: tuple[tuple[tuple[int, ...], tuple[Frame, ...]], ...] = ()  # (ranks, stack), guilty ones first
    evidence: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()  # exact commands
    stack_labels: tuple[
        str, ...
    ] = ()  # origin of each of `stacks`: "live", "last finished call", …; () unknown
    wrong_if: str = ""  # what would disprove it
    met_another: bool = False  # the others' call was matched with a different call of the guilty ranks
    kind: str = ""  # the rule in diagnosis/kinds.py; "" for findings from other evidence

    def __repr__(self) -> str:
        return f"<Finding {self.cause}, {self.confidence:.0%}: {self.sentence}>"


@dataclass(frozen=True)
class FileNote:
    """The result of reading one input file."""

    path: str
    rank: int | None
    kind: str
    status: Literal["ok", "damaged", "unreadable", "skipped"]
    note: str = ""


@dataclass(frozen=True)
class RankNow:
    """What a rank is doing now, from its stacks.

    `cause` is a cause of `allranks stacks` ("sleep", "dataloader_wait", "collective_wait", ...), or "gone" if the process no
    longer exists. `where` is "data.py:31 in load_batch".
    """

    rank: int
    cause: str
    where: str = ""
    evidence: str = ""
    stack: tuple[Frame, ...] = ()
    held_by: int | None = None  # the rank that holds the file lock that it waits for

    @property
    def line(self) -> str:
        """Its evidence as one line."""
        return f"rank {self.rank}: {self.evidence}" if self.evidence else ""


@dataclass(frozen=True)
class GroupSummary:
    """One process group of the whole job, for reports."""

    label: str
    name: str
    desc: str
    backend: str
    members: tuple[int, ...]
    members_known: bool
    first_sequence: int | None
    last_sequence: int | None
    behind: tuple[int, ...] = ()  # members whose last call is before the group's last


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. `verdict` is None if status is ok."""

    status: Status
    verdict: Finding | None
    findings: tuple[Finding, ...] = ()
    files: tuple[FileNote, ...] = ()
    world_size: int | None = None
    ranks: tuple[int, ...] = ()  # ranks with a readable trace
    summary: tuple[str, ...] = field(default=())
    groups: tuple[GroupSummary, ...] = ()
    hosts: tuple[tuple[int, str], ...] = ()  # (rank, host), if known
    worlds: tuple[World, ...] = ()  # of a job with several worlds


def describe_exit(code: int) -> str:
    """ "died of SIGKILL", "exited with code 3": for a code of subprocess, which is negative for a signal."""
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
    """The decision of the policy, and its result."""

    kind: ActionKind
    reason: str
    ranks: tuple[int, ...] = ()
    replica: int | None = None
    command: str = ""
    done: bool = False
    result: str = ""


@dataclass(frozen=True)
class Failure:
    """A failure of a rank's own program, in a form that allows recognizing a repetition."""

    rank: int
    reason: str  # "raised ValueError", "exited with code 3"
    where: str = ""  # the user's line; "" if unknown
    text: str = ""
    step: int = -1  # of the last mark, -1 without one
    calls: int = 0  # completed

    @property
    def sentence(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"rank {self.rank} {self.reason}{at}" + (f": {one_line(self.text, 500)}" if self.text else "")

    @property
    def place(self) -> str:
        """When it happened, as text."""
        if self.step >= 0:
            return f"in step {self.step}"
        return f"after {self.calls} collective calls" if self.calls else "before the first step"

    def repeats(self, earlier: Failure) -> bool:
        """Whether line, error and step are the same; without step marks, whether the number of calls is similar."""
        if (self.reason, self.where, self.step) != (earlier.reason, earlier.where, earlier.step):
            return False
        if not self.where and self.text != earlier.text:
            return False
        near = abs(self.calls - earlier.calls) <= max(2, 0.02 * max(self.calls, earlier.calls))
        return self.step >= 0 or near


@dataclass(frozen=True)
class Incident:
    """One incident. Fields are filled in as it proceeds; its file is rewritten atomically."""

    id: str
    kind: Kind
    job: str
    opened: float
    reason: str  # why it was opened
    node: str = ""
    ranks: tuple[int, ...] = ()  # the guilty ones, once known
    step: int = -1  # last good step
    verdict: Finding | None = None
    stacks: dict[str, Any] | None = None  # summary as in `allranks stacks --json`, without threads
    action: Action | None = None
    timeline: tuple[Moment, ...] = ()
    missing: tuple[str, ...] = ()  # sources without a response
    closed: float | None = None
    durations_s: dict[str, float] = field(default_factory=dict)
    folder: str = ""

    @property
    def acted(self) -> bool:
        """Whether an action was carried out."""
        return self.action is not None and self.action.done
