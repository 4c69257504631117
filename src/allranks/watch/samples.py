"""Reads what ranks say of themselves in their black boxes, with no help from the ranks. Runs in the agent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allranks.blackbox.layout import HEADER, HEADER_BYTES, MAGIC, READABLE, whole_rows
from allranks.model.trace import CALL, Flag, State

_NAMES = HEADER.names or ()


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
    try:
        with open(path, "rb") as box:
            raw = box.read(HEADER.itemsize)
    except OSError:
        return None
    if len(raw) < HEADER.itemsize:
        return None
    head = dict(
        zip(_NAMES, np.frombuffer(raw, HEADER, 1)[0].item(), strict=True)
    )  # far cheaper than field by field
    if head["magic"] != MAGIC or head["version"] not in READABLE:
        return None
    return RankSample(
        rank=head["rank"],
        pid=head["pid"],
        path=str(path),
        alive=is_alive(head["pid"], head["start_ticks"]),
        step=head["step"],
        calls_started=head["calls_started"],
        calls_completed=head["calls_completed"],
        last_ns=max(head["step_ns"], head["last_call_ns"], head["start_ns"]),
        start_ns=head["start_ns"],
        expect_until_ns=head["expect_until_ns"],
        closed=head["closed"].split(b"\0")[0].decode("utf-8", "replace"),
        closed_ns=head["closed_ns"],
        attempt=head["attempt"],
        step_ns=head["step_ns"],
    )


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether the very process that wrote the box still runs (a reused pid does not count; nor does a zombie)."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX" and (start_ticks == 0 or int(fields[19]) == start_ticks)


def process_state(pid: int) -> str:
    """The kernel's letter ("R", "S", "T" stopped, "Z" dead); "" when there is no such process."""
    return "".join(_stat(pid)[:1])


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def read_oldest_open_ns(path: str) -> int | None:
    """Creation time of the oldest call that is neither finished nor failed; None when there is none."""
    try:
        with open(path, "rb") as box:
            fd = box.fileno()
            head = np.frombuffer(os.pread(fd, HEADER.itemsize, 0), HEADER, 1)[0]
            size = int(head["capacity"]) * CALL.itemsize
            rows = np.frombuffer(os.pread(fd, size, HEADER_BYTES), CALL)
            again = np.frombuffer(os.pread(fd, size, HEADER_BYTES), CALL)
    except (OSError, ValueError, IndexError):
        return None
    count = min(len(rows), len(again))
    rows = rows[:count][whole_rows(rows[:count], again["begin"][:count])]
    unknowable = int(Flag.CAPTURED | Flag.COALESCED_PART)
    open_ = (rows["state"] <= State.STARTED) & ((rows["flags"] & unknowable) == 0)
    if not open_.any():
        return None
    return int(rows["created_ns"][open_].min())
