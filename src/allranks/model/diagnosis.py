"""What allranks says of a job: the findings of `diagnose`, what it can be given besides the dumps, and incidents, which hold them.

Pure data; JSON in docs/reference/json.md. Times of an incident are epoch seconds so that nodes can be compared; `durations_s` come
from one monotonic clock each.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Literal

from allranks.model.formatting import one_line
from allranks.model.trace import Frame, World

INCIDENT_SCHEMA = 1
#: A stall becomes a hang when it is known that it will not end by itself.
Kind = Literal["stall", "hang", "death", "partition", "request", "slow"]
ActionKind = Literal[
    "none", "dry_run", "collect", "evict", "set_aside", "restart_rank", "restart_job", "leave_node", "command"
]
Severity = Literal["root", "consequence", "warning"]
Status = Literal["ok", "fault", "unclear"]
#: Stated confidence, and the share of such verdicts whose ranks and cause are right: benchmarks/results/verdicts.json.
CALIBRATION = ((0.9, 0.9877), (0.8, 0.9837), (0.6, 0.8878), (0.4, 0.7457), (0.0, 0.4))


def share_right(confidence: float) -> float:
    """How many of the verdicts that state this confidence are right."""
    return next(share for least, share in CALIBRATION if confidence >= least or not least)


def confidence_text(confidence: float) -> str:
    """ "90% (right in 99 of 100 such verdicts)"."""
    return f"{confidence:.0%} (right in {100 * share_right(confidence):.0f} of 100 such verdicts)"


@dataclass(frozen=True, repr=False)
class Finding:
    """One thing that is wrong. `ranks` are the guilty ones only."""

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
    advice: tuple[str, ...] = ()  # what to do, exact commands
    #: what each of `stacks` is: "live", "last finished call", …; () all unknown
    stack_labels: tuple[str, ...] = ()
    wrong_if: str = ""  # what would prove it wrong
    met_another: bool = False  # the others' call met another call of the guilty ranks, which does not fit
    kind: str = ""  # the rule that found it: a row of diagnosis/kinds.py; "" for findings of other evidence

    def __repr__(self) -> str:
        return f"<Finding {self.cause}, {self.confidence:.0%}: {self.sentence}>"


@dataclass(frozen=True)
class FileNote:
    """What became of one input file."""

    path: str
    rank: int | None
    kind: str
    status: Literal["ok", "damaged", "unreadable", "skipped"]
    note: str = ""


@dataclass(frozen=True)
class RankNow:
    """What a rank is doing now, seen from outside: its stacks, or its process being gone.

    `cause` is a word of `allranks stacks` ("sleep", "dataloader_wait", "collective_wait", ...), or "gone" when
    the process does not exist any more. `where` is "data.py:31 in load_batch".
    """

    rank: int
    cause: str
    where: str = ""
    evidence: str = ""
    stack: tuple[Frame, ...] = ()
    held_by: int | None = None  # the rank that holds the lock on a file for which it waits

    @property
    def line(self) -> str:
        """Its evidence, as a line of a list."""
        return f"rank {self.rank}: {self.evidence}" if self.evidence else ""


@dataclass(frozen=True)
class GroupSummary:
    """One process group as the whole job knows it, for reports."""

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
    """The whole answer. `verdict` is None when status is ok."""

    status: Status
    verdict: Finding | None
    findings: tuple[Finding, ...] = ()
    files: tuple[FileNote, ...] = ()
    world_size: int | None = None
    ranks: tuple[int, ...] = ()  # ranks with a readable trace
    summary: tuple[str, ...] = field(default=())
    groups: tuple[GroupSummary, ...] = ()
    hosts: tuple[tuple[int, str], ...] = ()  # (rank, host), where known
    worlds: tuple[World, ...] = ()  # of a job of several: which ranks have which role


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
        return f"rank {self.rank} {self.reason}{at}" + (f": {one_line(self.text, 500)}" if self.text else "")

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
