"""Reads black boxes from outside: who a rank is, its progress mark, and when its next timeout is due. No ptrace."""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allranks.blackbox import files
from allranks.blackbox.header import Header, find_header
from allranks.blackbox.reader import boxes_of_process, read_rows, read_trace
from allranks.errors import InputError
from allranks.model.stacks import GroupCall, Mark, RankMarks
from allranks.model.trace import CALL, State

RECENT_CALLS = 64  # calls whose times tell how often a rank usually moves


@dataclass(frozen=True)
class LiveBox:
    """The header of one black box."""

    path: Path
    rank: int
    world_size: int
    pid: int  # as the rank itself sees it: inside its PID namespace
    start_ticks: int
    start_s: float
    job: str
    uid: int | None = None  # of the user who may have made it, whatever it says; None: one whom we trust


def find_boxes(
    folders: tuple[Path, ...] = (), named: Iterable[tuple[Path, int]] = (), uids: Container[int] | None = None
) -> list[LiveBox]:
    """Boxes in the default folders of these users (None: of all) and in the given ones; what is not a box is passed over.

    `named`: folders that processes name themselves, and whose processes these are.
    """
    roots = {files.SHARED_MEMORY, Path(tempfile.gettempdir())}
    bases = [(base, _owner(base)) for root in roots if root.is_dir() for base in root.glob("allranks-*")]
    bases = [(base, uid) for base, uid in bases if uids is None or uid in uids]
    given = {*named, *((folder, None) for folder in folders)}
    places = [(place, uid) for base, uid in (*bases, *given) for place in files.subfolders(base)]
    found = {}
    for place, uid in (*places, *given):
        try:
            for path in place.glob("*.box"):
                if (box := read_box(path, uid)) is not None:
                    found[path, uid] = box
        except OSError:
            continue
    return list(found.values())


def _owner(base: Path) -> int:
    """Who made a folder of /tmp, or a link there; -1 when it is gone."""
    try:
        return base.lstat().st_uid
    except OSError:
        return -1


def read_box(path: Path, uid: int | None = None) -> LiveBox | None:
    """The header of a box, None when the file is none."""
    head = find_header(path)
    if head is None:
        return None
    job = path.name.split(".a")[0]
    start_s = head.start_ns / 1e9
    return LiveBox(path, head.rank, head.world_size, head.pid, head.start_ticks, start_s, job, uid)


def read_marks(path: Path, rank: int, now_s: float) -> RankMarks | None:
    """The progress marks of a box: its last calls and its last step; None when it cannot be read."""
    head = find_header(path)
    if head is None:
        return None
    marks = [Mark(head.start_ns / 1e9, -1, "start", 0)] if head.start_ns else []
    marks += _call_marks(path, head)
    last = max(head.step_ns, head.last_call_ns)
    if last:
        marks.append(Mark(last / 1e9, head.step, "", head.calls_completed))
    marks.sort(key=lambda mark: mark.at_s)
    return RankMarks(rank, tuple(marks), now_s, head.expect_until_ns / 1e9, head.closed)


def _rows(path: Path, head: Header) -> np.ndarray:
    """The whole rows of the ring, oldest first; none when it cannot be read."""
    try:
        return read_rows(path, head)
    except InputError:
        return np.zeros(0, CALL)


def _call_marks(path: Path, head: Header) -> list[Mark]:
    marks = []
    for row in _rows(path, head)[-RECENT_CALLS:]:
        for name in ("created_ns", "completed_ns"):
            if int(row[name]):
                marks.append(Mark(int(row[name]) / 1e9, int(row["step"]), "", int(row["begin"]) - 1))
    return marks


def group_calls(pid: int) -> tuple[GroupCall, ...]:
    """The newest collective of a living process in each of its groups; () when it is not recorded."""
    found = []
    for path in boxes_of_process(pid):
        try:
            trace = read_trace(path)
        except InputError:
            continue
        head, calls = trace.header, trace.calls[trace.calls["p2p_seq"] == 0]
        world = head.rendezvous.address or head.rendezvous.store or head.launched.address
        for index, group in enumerate(trace.groups):
            rows = calls[calls["group"] == index]
            if len(rows) and index not in trace.destroyed:
                begun = rows[rows["state"] <= State.STARTED]
                row = begun[0] if len(begun) else rows[-1]
                name = group.desc if group.desc not in ("", "undefined") else group.name
                call = (trace.names[int(row["op"])], int(row["seq"]), len(begun) > 0)
                found.append(GroupCall(f"{group.store or world} {group.name}", name, *call))
    return tuple(found)


def timeout_due_s(path: Path, now_s: float) -> float | None:
    """Seconds until the first open call of a box times out; None when no call is open or no limit is known."""
    head = find_header(path)
    if head is None:
        return None
    rows = _rows(path, head)
    waiting = rows[(rows["state"] <= State.STARTED) & (rows["timeout_ms"] > 0)]
    if not len(waiting):
        return None
    due = waiting["created_ns"] / 1e9 + waiting["timeout_ms"] / 1e3
    return float(due.min()) - now_s
