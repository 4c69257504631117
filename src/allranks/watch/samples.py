"""Reads what ranks say of themselves in their black boxes, with no help from the ranks. Runs in the agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allranks.blackbox.header import find_header, is_alive, read_header
from allranks.blackbox.reader import read_rows
from allranks.errors import InputError
from allranks.model.trace import Flag, State


@dataclass(frozen=True)
class RankSample:
    """One look at one rank. Times in epoch nanoseconds; 0 = never."""

    rank: int
    pid: int
    path: str
    alive: bool
    step: int
    calls_started: int
    calls_completed: int
    last_ns: int  # last sign of progress in the box
    start_ns: int
    expect_until_ns: int = 0
    closed: str = ""  # how it said goodbye; "" while running or after a sudden death
    closed_ns: int = 0
    attempt: int = 0
    step_ns: int = 0  # of the last step mark

    @property
    def mark(self) -> tuple[int, int, int]:
        """What must change for the rank to have made progress."""
        return (self.step, self.calls_started, self.calls_completed)


def read_samples(folder: Path) -> list[RankSample]:
    """The newest box of every rank in a folder; files that are not boxes are passed over."""
    newest: dict[int, RankSample] = {}
    for path in sorted(folder.glob("*.box")):
        sample = read_sample(path)
        if sample is None:
            continue
        known = newest.get(sample.rank)
        if known is None or sample.start_ns > known.start_ns:
            newest[sample.rank] = sample
    return [newest[rank] for rank in sorted(newest)]


def read_sample(path: Path) -> RankSample | None:
    """Reads one header; None when the file is no whole black box of a version that we know."""
    head = find_header(path)
    if head is None:
        return None
    return RankSample(
        rank=head.rank,
        pid=head.pid,
        path=str(path),
        alive=is_alive(head.pid, head.start_ticks),
        step=head.step,
        calls_started=head.calls_started,
        calls_completed=head.calls_completed,
        last_ns=head.last_sign_ns,
        start_ns=head.start_ns,
        expect_until_ns=head.expect_until_ns,
        closed=head.closed,
        closed_ns=head.closed_ns,
        attempt=head.attempt,
        step_ns=head.step_ns,
    )


def read_oldest_open_ns(path: str) -> int | None:
    """Creation time of the oldest call that is neither finished nor failed; None when there is none."""
    try:
        rows = read_rows(path, read_header(path))
    except InputError:
        return None
    unknowable = int(Flag.CAPTURED | Flag.COALESCED_PART)
    open_ = (rows["state"] <= State.STARTED) & ((rows["flags"] & unknowable) == 0)
    return int(rows["created_ns"][open_].min()) if open_.any() else None
