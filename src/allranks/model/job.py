"""A running job as a person sees it: its ranks, what they wait for, its incidents. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class RankRow:
    """One rank now. Ages in seconds; None = never."""

    rank: int
    pid: int
    host: str
    alive: bool
    step: int
    calls_completed: int
    silent_s: float | None  # since the last sign of progress
    doing: str  # "all_reduce #12 of dp_0", "computes", "exited", "died"
    waits_for: tuple[int, ...] = ()
    steps_per_s: float | None = None
    phase: str = ""


@dataclass(frozen=True)
class JobView:
    """One look at a job."""

    job: str
    folder: str
    at: float  # epoch seconds
    rows: tuple[RankRow, ...]
    lighthouse: str = ""
    quorum: str = ""  # the lighthouse's own sentence
    incidents: tuple[str, ...] = ()  # one line each, newest last

    @property
    def running(self) -> bool:
        """Whether any rank lives."""
        return any(row.alive for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of `allranks status --json`."""
        return {"schema": SCHEMA, "running": self.running, **asdict(self)}
