"""Reads black boxes of this machine from outside: no torch, no help from the rank. Runs in the agent and in `dump`.

`read_progress` is one small read and cheap enough to be done for every rank several times a second.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allranks.blackbox.decode import BoxBytes, decode
from allranks.blackbox.decode import read_header as header_of
from allranks.blackbox.layout import HEADER, HEADER_BYTES, whole_rows
from allranks.errors import InputError
from allranks.model.trace import CALL, RankTrace


@dataclass(frozen=True)
class BoxHeader:
    """The header of a box at one moment. -1 = unknown; times are epoch nanoseconds, 0 = never."""

    path: Path
    rank: int
    world_size: int
    local_rank: int
    attempt: int
    pid: int
    start_ticks: int
    start_ns: int
    step: int
    step_ns: int
    calls_started: int
    calls_completed: int
    last_call_ns: int
    expect_until_ns: int
    closed_ns: int
    closed: str

    @property
    def last_sign_ns(self) -> int:
        """When the rank was last heard of: a step, a call, or its start."""
        return max(self.start_ns, self.step_ns, self.last_call_ns)


def read_header(path: str | os.PathLike[str]) -> BoxHeader:
    """The header of a box; InputError when it is not one."""
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    row = header_of(data)
    numbers = {
        name: int(row[name])
        for name in HEADER.names or ()
        if name in BoxHeader.__dataclass_fields__ and name not in {"closed"}
    }
    return BoxHeader(
        path=Path(path), closed=bytes(row["closed"]).rstrip(b"\0").decode(errors="replace"), **numbers
    )


read_progress = read_header


def read_trace(path: str | os.PathLike[str]) -> RankTrace:
    """Everything in a box, also while its rank is writing."""
    return decode(copy_box(path), str(path))


def copy_box(path: str | os.PathLike[str]) -> BoxBytes:
    """A copy of a box, taken in the order that makes torn rows visible; the heap last, so that it knows every id."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER_BYTES:
                raise InputError(f"{path} is not a black box: {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _copy(view, size)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def settled(box: BoxBytes) -> bytes:
    """The copy as a file of its own: rows that were being written are marked torn for good."""
    data = bytearray(box.data)
    if box.ends_before is not None and box.begins_after is not None:
        count = len(box.begins_after)
        rows = np.frombuffer(data, CALL, count=count, offset=HEADER_BYTES)
        whole = whole_rows(rows, box.begins_after, box.ends_before)
        rows["end"][~whole & (rows["begin"] != 0)] = 0
    return bytes(data)


def _copy(view: mmap.mmap, size: int) -> BoxBytes:
    capacity = int(header_of(view[:HEADER_BYTES])["capacity"])
    there = max(0, min(capacity, (size - HEADER_BYTES) // CALL.itemsize))
    ring_end = HEADER_BYTES + there * CALL.itemsize
    ends = _column(view, there, "end")
    _fence()
    ring = view[HEADER_BYTES:ring_end]
    _fence()
    begins = _column(view, there, "begin")
    header = view[:HEADER_BYTES]
    return BoxBytes(header + ring + view[ring_end:], ends, begins)


_lock = threading.Lock()


def _fence() -> None:
    """Lets no later read overtake an earlier one, on CPUs that would: what two turns of a lock do."""
    for _ in range(2):
        with _lock:
            pass


def _column(view: mmap.mmap, count: int, name: str) -> np.ndarray:
    column: np.ndarray = np.frombuffer(view, CALL, count=count, offset=HEADER_BYTES)[name].copy()
    return column


def find_boxes(folder: str | os.PathLike[str]) -> list[Path]:
    """The black boxes under a folder, oldest name first; files that are none are passed over."""
    return sorted(path for path in Path(folder).rglob("*.box") if path.is_file())


def boxes_of_process(pid: int) -> list[Path]:
    """The black boxes that a living process writes to, wherever they are; empty when we may not look."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            names = {line.split(maxsplit=5)[5].strip() for line in maps if line.rstrip().endswith(".box")}
    except (OSError, IndexError):
        return []
    return sorted(path for name in names if (path := Path(name)).is_file())


def processes() -> list[int]:
    """Processes of this machine that we may look into."""
    return sorted(
        int(path.name) for path in Path("/proc").glob("[0-9]*") if os.access(path / "maps", os.R_OK)
    )


def is_alive(header: BoxHeader) -> bool:
    """Whether the process that wrote this box still runs here (a reused pid is not mistaken for it)."""
    try:
        with open(f"/proc/{header.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return fields[0] != "Z" and (header.start_ticks == 0 or int(fields[19]) == header.start_ticks)
