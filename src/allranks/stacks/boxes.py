"""Reads black boxes from outside: who a rank is, its progress mark, and when its next timeout is due. No ptrace."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allranks.blackbox.layout import HEADER, HEADER_BYTES, MAGIC, READABLE, whole_rows
from allranks.model.stacks import Mark, RankMarks
from allranks.model.trace import CALL, State

RECENT_CALLS = 64  # calls whose times tell how often a rank usually moves


@dataclass(frozen=True)
class Box:
    """The header of one black box."""

    path: Path
    rank: int
    world_size: int
    pid: int  # as the rank itself sees it: inside its PID namespace
    start_ticks: int
    start_s: float
    job: str


def find_boxes(folders: tuple[Path, ...] = ()) -> list[Box]:
    """Boxes in the default folders of every user and in the given ones; what is no box is passed over."""
    roots = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    places = [place for root in roots if root.is_dir() for place in root.glob("allranks-*/*")]
    places += [path for folder in folders for path in (folder, *_subfolders(folder))]
    found = {}
    for place in places:
        try:
            for path in place.glob("*.box"):
                if (box := read_box(path)) is not None:
                    found[path] = box
        except OSError:
            continue
    return list(found.values())


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def read_box(path: Path) -> Box | None:
    """The header of a box, None when the file is none."""
    head = _header(path)
    if head is None:
        return None
    return Box(
        path=path,
        rank=int(head["rank"]),
        world_size=int(head["world_size"]),
        pid=int(head["pid"]),
        start_ticks=int(head["start_ticks"]),
        start_s=int(head["start_ns"]) / 1e9,
        job=path.name.split(".a")[0],
    )


def _header(path: Path) -> np.void | None:
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER.itemsize)
    except OSError:
        return None
    if len(data) < HEADER.itemsize or data[:8] != MAGIC:
        return None
    head: np.void = np.frombuffer(data, HEADER, 1)[0]
    return head if int(head["version"]) in READABLE else None


def read_marks(path: Path, rank: int, now_s: float) -> RankMarks | None:
    """The progress marks of a box: its last calls and its last step; None when it cannot be read."""
    head = _header(path)
    if head is None:
        return None
    step, calls = int(head["step"]), int(head["calls_completed"])
    marks = [Mark(int(head["start_ns"]) / 1e9, -1, "start", 0)] if int(head["start_ns"]) else []
    marks += _call_marks(path, head)
    last = max(int(head["step_ns"]), int(head["last_call_ns"]))
    if last:
        marks.append(Mark(last / 1e9, step, "", calls))
    marks.sort(key=lambda mark: mark.at_s)
    return RankMarks(
        rank=rank,
        marks=tuple(marks),
        seen_s=now_s,
        expect_until_s=int(head["expect_until_ns"]) / 1e9,
        closed=bytes(head["closed"]).split(b"\0")[0].decode("utf-8", "replace"),
    )


def _rows(path: Path, head: np.void) -> np.ndarray:
    """The whole rows of the ring, oldest first."""
    size = int(head["capacity"]) * CALL.itemsize
    with open(path, "rb") as file:
        rows = np.frombuffer(os.pread(file.fileno(), size, HEADER_BYTES), CALL)
        again = np.frombuffer(os.pread(file.fileno(), size, HEADER_BYTES), CALL)
    count = min(len(rows), len(again))
    rows = rows[:count][whole_rows(rows[:count], again["begin"][:count])]
    ordered: np.ndarray = rows[np.argsort(rows["begin"], kind="stable")]
    return ordered


def _call_marks(path: Path, head: np.void) -> list[Mark]:
    try:
        rows = _rows(path, head)[-RECENT_CALLS:]
    except (OSError, ValueError):
        return []
    marks = []
    for row in rows:
        for name in ("created_ns", "completed_ns"):
            if int(row[name]):
                marks.append(Mark(int(row[name]) / 1e9, int(row["step"]), "", int(row["begin"]) - 1))
    return marks


def timeout_due_s(path: Path, now_s: float) -> float | None:
    """Seconds until the first open call of a box times out; None when no call is open or no limit is known."""
    head = _header(path)
    if head is None:
        return None
    try:
        rows = _rows(path, head)
    except (OSError, ValueError):
        return None
    waiting = rows[(rows["state"] <= State.STARTED) & (rows["timeout_ms"] > 0)]
    if not len(waiting):
        return None
    due = waiting["created_ns"] / 1e9 + waiting["timeout_ms"] / 1e3
    return float(due.min()) - now_s


@dataclass(frozen=True)
class BoxProgress:
    """The progress mark of a box at one moment."""

    mark: tuple[int, ...]  # (step, calls started, calls completed)
    oldest_call_s: float | None  # age of the oldest call that is neither finished nor failed
    expected_s: float  # silence is declared normal for so long from now


def read_progress(path: Path, now_s: float) -> BoxProgress | None:
    """One glance at a box; None when it cannot be read."""
    head = _header(path)
    if head is None:
        return None
    age = None
    if int(head["calls_started"]) > int(head["calls_completed"]):
        try:
            rows = _rows(path, head)
            waiting = rows[(rows["state"] <= State.STARTED) & (rows["created_ns"] > 0)]
            age = now_s - float(waiting["created_ns"].min()) / 1e9 if len(waiting) else None
        except (OSError, ValueError):
            age = None
    return BoxProgress(
        mark=(int(head["step"]), int(head["calls_started"]), int(head["calls_completed"])),
        oldest_call_s=age,
        expected_s=int(head["expect_until_ns"]) / 1e9 - now_s,
    )
