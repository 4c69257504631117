"""The result of `diagnose`, and what it can be given besides the dumps. Pure data; JSON in docs/reference/json.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from allranks.model.trace import Frame, World

Severity = Literal["root", "consequence", "warning"]
Status = Literal["ok", "fault", "unclear"]


#: Stated confidence, and the share of such verdicts whose ranks and cause are right: benchmarks/results/verdicts.json.
CALIBRATION = ((0.9, 0.9885), (0.8, 0.9837), (0.6, 0.884), (0.4, 0.7457), (0.0, 0.4))


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
