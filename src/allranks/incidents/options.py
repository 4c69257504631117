"""What a watch looks at and how it answers: one frozen dataclass for all its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from allranks.incidents.policy import Mode, PolicyOptions
from allranks.watch.silence import NoticeOptions


@dataclass(frozen=True)
class WatchOptions:
    """What to watch and how to answer."""

    folder: Path  # black boxes of the job on this node
    incidents: Path  # where incident folders go; shared between nodes if there are several
    job: str
    node: str = ""
    mode: Mode = "whole_job"
    ranks_per_replica: int = 1
    replicas: int = 1
    poll_s: float = 0.5
    notice: NoticeOptions = field(default_factory=NoticeOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    webhooks: tuple[str, ...] = ()
    collect_stacks: bool = True
    may_leave: bool = False  # the job can go on with fewer nodes (whole-job mode)

    @property
    def whole_job(self) -> bool:
        """Whether all ranks end and start together."""
        return self.mode == "whole_job"
