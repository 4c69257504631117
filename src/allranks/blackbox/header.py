"""The header of a black box: its writer and the writer's progress. Also checks whether a process is alive.

Parsed with `struct`, without numpy, for processes that must start fast. Eight-byte fields are written with single aligned
stores, so a reader sees either the old or the new value.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from allranks.errors import InputError

MAGIC = b"ALLRANKS"
VERSION = 2
CLOSED_BYTES, EXIT_MESSAGE_BYTES = 64, 512
HEADER_BYTES = 4096  # reserved in front of the ring


class Header(NamedTuple):
    """The fields of the header at one moment. -1 = unknown; times are epoch nanoseconds, 0 = never."""

    magic: bytes
    version: int
    record_bytes: int
    capacity: int
    heap_offset: int
    heap_bytes: int
    heap_used: int
    heap_full: int
    next_id: int  # records ever begun; dropped = max(0, next_id - capacity)
    rank: int
    world_size: int
    local_rank: int
    attempt: int
    pid: int  # in the rank's own PID namespace
    start_ns: int
    start_ticks: int  # /proc/PID/stat field 22, to detect a reused pid
    step: int
    step_ns: int
    calls_started: int
    calls_completed: int
    last_call_ns: int
    expect_until_ns: int
    phase: int  # NAME id
    closed_ns: int  # 0 while running or after a sudden death
    closed_bytes: bytes  # the beginning of `exit_message`
    inside: int  # NAME id of the function in trace.SETUP_CALLS that the rank is in
    inside_ns: int
    setups: int  # finished calls of those functions
    exit_message: bytes = b""  # see `closed`
    loss: float = 0.0  # of the last step mark; 0: none
    tokens: float = 0.0  # of this rank in its last complete step; 0: none
    flops: float = 0.0
    taken_ns: int = 0  # when the box was copied, if its process was running
    path: Path = Path()  # of the file

    @property
    def closed(self) -> str:
        """How the rank shut down: "exit", "exit code 3 (sys.exit at FILE:LINE): TEXT", "exception: KIND (FILE:LINE): TEXT",
        "signal 15"; "" if it is running or was killed."""
        message = self.exit_message.rstrip(b"\0") or self.closed_bytes
        return message.split(b"\0")[0].decode("utf-8", "replace")

    @property
    def last_sign_ns(self) -> int:
        """Time of the last activity: a step, a call, or the start."""
        return max(self.start_ns, self.step_ns, self.last_call_ns)


#: The `struct` codes of the fields in the file.
CODES = ("8s", *"IIQQQQQQ", *"qqqqqqqqqqqqqQq", f"{CLOSED_BYTES}s", *"Qqq", f"{EXIT_MESSAGE_BYTES}s", *"dddQ")
STRUCT = struct.Struct("<" + "".join(CODES))


def parse_header(data: bytes) -> Header:
    """Parses a header; InputError if this is not a black box or has another layout version."""
    if data[:8] != MAGIC:
        raise InputError("not a black box: it does not begin with ALLRANKS")
    if len(data) < STRUCT.size:
        raise InputError("truncated in its header")
    header = Header(*STRUCT.unpack_from(data))
    if header.version != VERSION:
        raise InputError(f"layout version {header.version} is not supported, only {VERSION}")
    return header


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The first bytes of a regular file; OSError for anything else, such as a pipe, which may never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return os.read(fd, limit)
    finally:
        os.close(fd)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads the header of a box with one small read; InputError if that is not possible."""
    try:
        data = read_regular(path, STRUCT.size)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        return parse_header(data)._replace(path=Path(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def find_header(path: str | os.PathLike[str]) -> Header | None:
    """The header of a box; None if the file is missing or not a box."""
    try:
        return read_header(path)
    except InputError:
        return None


def shorten(text: str, limit: int) -> bytes:
    """At most `limit` bytes of a text, truncated between words, with an ellipsis."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data
    cut = data[: limit - 3].decode(errors="ignore")
    return (cut.rsplit(maxsplit=1)[0] if " " in cut else cut).encode() + "…".encode()


# -- the process that writes ------------------------------------------------------------------------------------


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; [] without such a process or without /proc."""
    try:
        # called often: a Path and a text file would cost twice as much
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read().decode(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


_PF_EXITING = 0x4  # of the kernel's task flags


def process_state(pid: int) -> str:
    """The kernel's state letter ("R", "S", "T" stopped, "Z" dead); "" if there is no such process.

    "X" while the kernel tears the process down, which takes half a second with GPU memory.
    """
    return task_state(process_stat(pid))


def task_state(fields: Sequence[str]) -> str:
    """`process_state` from the fields of `process_stat`."""
    exiting = len(fields) > 6 and fields[0] != "Z" and int(fields[6]) & _PF_EXITING
    return "X" if exiting else "".join(fields[:1])


def start_ticks(pid: int) -> int:
    """When a process was started, in kernel ticks; 0 unknown. Pid and start time identify a process uniquely."""
    fields = process_stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def seconds_since_start(ticks: int) -> float:
    """The age of a process that started then, by a clock that nobody sets; infinite when the start is not known."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else math.inf


def is_alive(pid: int, ticks: int = 0) -> bool:
    """Whether the process with this pid and start time is running and not a zombie. `ticks` 0: any start time."""
    fields = process_stat(pid)
    return bool(fields) and fields[0] not in "ZX" and (ticks == 0 or int(fields[19]) == ticks)
