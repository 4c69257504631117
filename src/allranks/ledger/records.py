"""The records of a ledger, and the states that time is booked to. Pure data; times are epoch seconds.

A `Booked` row holds the rank-seconds of some ranks between two times, by state. "waiting:5" is time spent waiting for rank 5,
"stalled:ID" belongs to an incident, "phase:NAME" was announced by the script.
"""

from __future__ import annotations

import msgspec

USEFUL, WAITING, STALLED, REPEATED = "useful", "waiting", "stalled", "repeated"
STARTING, COMPILING, IDLE = "starting", "compiling", "idle"
REGROUPING, HEALING, SAVING, RESTORING = "regrouping", "healing", "saving", "restoring"
EVALUATION, PHASE = "evaluation", "phase"

#: State -> its description, in the order of reports.
STATES = {
    USEFUL: "training steps that count",
    WAITING: "waiting for a slow rank",
    STALLED: "stalled by an incident",
    REGROUPING: "making a new process group",
    HEALING: "fetching the state of other replicas",
    SAVING: "saving checkpoints",
    RESTORING: "restoring a checkpoint",
    STARTING: "starting processes, until the first step",
    COMPILING: "the first step of a process, compilation included",
    REPEATED: "steps done again, and work lost with a process",
    EVALUATION: "evaluation",
    PHASE: "other announced phases",
    IDLE: "finished while other ranks still ran, or the end of the job",
}

#: Phase name, as scripts and integrations use it -> state.
PHASES = {
    "save": SAVING, "saving": SAVING, "checkpoint": SAVING, "another replica ": SAVING, "load": RESTORING,
    "restore": RESTORING, "restoring": RESTORING, "eval": EVALUATION, "evaluate": EVALUATION, "evaluation": EVALUATION,
    "validation": EVALUATION, "validate": EVALUATION, "test": EVALUATION, "first step": COMPILING, "leaving": IDLE,
    "after training": IDLE, HEALING: HEALING, REGROUPING: REGROUPING,
}  # fmt: skip


class RunStart(msgspec.Struct, tag="start", array_like=True, frozen=True, gc=False):
    """An agent began to run its part of the job."""

    at: float
    job: str
    node: str
    mode: str  # "whole_job" or "replica"
    ranks: int = 0  # of this node; 0: not known yet
    version: str = ""


class RunEnd(msgspec.Struct, tag="end", array_like=True, frozen=True, gc=False):
    """An agent ended. The agent of a run without this record was killed."""

    at: float


class Booked(msgspec.Struct, tag="row", array_like=True, frozen=True, gc=False):
    """Where the time of some ranks went. The seconds of all states add up to the time of all these ranks."""

    number: int  # counts from 1 in each run
    begin: float
    end: float
    ranks: str  # "0-7,9"
    seconds: dict[str, float]  # rank-seconds by state
    step: int = -1  # the highest that was begun
    counts: dict[str, int] = {}  # how often a rank began to save, restore, heal, regroup
    tokens: int = 0  # of this node's ranks until `end`, without repeated steps


class Outage(msgspec.Struct, tag="incident", array_like=True, frozen=True, gc=False):
    """An incident. A later record of the same id replaces an earlier one. 0: not known."""

    id: str
    kind: str
    cause: str
    node: str
    ranks: tuple[int, ...]
    begin: float  # of the fault, or the last good step
    noticed: float = 0.0
    explained: float = 0.0
    recovered: float = 0.0
    closed: float = 0.0
    text: str = ""

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of this period inside the incident."""
        return min(end, self.closed or self.recovered or end) - max(begin, self.begin)


class Passed(msgspec.Struct, tag="passed", array_like=True, frozen=True, gc=False):
    """Collectives with other nodes in a window (across.py). The lists have one entry per sampled collective."""

    begin: float
    end: float
    calls: int  # collectives in all
    keys: list[int]
    inside_us: list[int]  # microseconds inside, of this node's last rank
    last: list[int]  # this node's last rank
    ranks: list[int]  # ranks of this node that took part


Record = RunStart | RunEnd | Booked | Outage | Passed


def state_of(phase: str) -> str:
    """The state of a phase; saves include their tier: "saving:nvme"."""
    if phase.startswith("saving "):
        return f"{SAVING}:{phase.removeprefix('saving ')}"
    return PHASES.get(phase) or f"{PHASE}:{phase}"


def ranks_in(text: str) -> tuple[int, ...]:
    """(0, 1, 2, 9) for "0-2,9"."""
    runs = (part.partition("-") for part in text.split(",") if part)
    return tuple(rank for low, _, high in runs for rank in range(int(low), int(high or low) + 1))


def kind_of(state: str) -> str:
    """ "waiting" for "waiting:5"."""
    return state.partition(":")[0]
