"""The header of a black box: who writes it and how far that rank is. Read with `struct` alone, so that processes
which must start in no time need no numpy. Also: whether the writer still runs.

Eight-byte fields are written with single aligned stores; a reader sees the old value or the new one.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
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
    pid: int  # as the rank itself sees it: inside its PID namespace
    start_ns: int
    start_ticks: int  # /proc/PID/stat field 22, so that a reused pid is not mistaken
    step: int
    step_ns: int
    calls_started: int
    calls_completed: int
    last_call_ns: int
    expect_until_ns: int
    phase: int  # NAME id
    closed_ns: int  # 0 while running or after a sudden death
    closed_bytes: bytes  # the beginning of `exit_message`
    inside: int  # NAME id of the function of trace.SETUP_CALLS that was entered and not left
    inside_ns: int
    setups: int  # how many of those functions were finished
    exit_message: bytes = b""  # see `closed`
    loss: float = 0.0  # that the last step mark gave; 0: none
    tokens: float = 0.0  # of this rank in its last whole step; 0: none given
    flops: float = 0.0
    taken_ns: int = 0  # of a copy made while the process still ran
    path: Path = Path()  # where it was read

    @property
    def closed(self) -> str:
        """How the rank shut down: "exit", "exit code 3 (sys.exit at FILE:LINE): TEXT", "exception: KIND (FILE:LINE): TEXT",
        "signal 15"; "" if it did not."""
        message = self.exit_message.rstrip(b"\0") or self.closed_bytes
        return message.split(b"\0")[0].decode("utf-8", "replace")

    @property
    def last_sign_ns(self) -> int:
        """When the rank was last heard of: a step, a call, or its start."""
        return max(self.start_ns, self.step_ns, self.last_call_ns)


#: The code of `struct` of every field in the file, in order.
CODES = ("8s", *"IIQQQQQQ", *"qqqqqqqqqqqqqQq", f"{CLOSED_BYTES}s", *"Qqq", f"{EXIT_MESSAGE_BYTES}s", *"dddQ")
STRUCT = struct.Struct("<" + "".join(CODES))


def parse_header(data: bytes) -> Header:
    """The header in these bytes; InputError when they are not a black box that this version can read."""
    if data[:8] != MAGIC:
        raise InputError("not a black box: it does not begin with ALLRANKS")
    if len(data) < STRUCT.size:
        raise InputError("cut short inside its header")
    header = Header(*STRUCT.unpack_from(data))
    if header.version != VERSION:
        raise InputError(f"layout {header.version} is not known, only {VERSION}")
    return header


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The first bytes of a file; OSError for anything else: a pipe or a device that somebody laid there never ends."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return os.read(fd, limit)
    finally:
        os.close(fd)


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a box; InputError when it is not one or cannot be read. Cheap: one small read."""
    try:
        data = read_regular(path, STRUCT.size)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        return parse_header(data)._replace(path=Path(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def find_header(path: str | os.PathLike[str]) -> Header | None:
    """The header of a box; None when there is none (yet), or the file is not a box."""
    try:
        return read_header(path)
    except InputError:
        return None


def shorten(text: str, limit: int) -> bytes:
    """At most so many bytes, cut between words and marked as cut."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data
    cut = data[: limit - 3].decode(errors="ignore")
    return (cut.rsplit(maxsplit=1)[0] if " " in cut else cut).encode() + "…".encode()


# -- the process that writes ------------------------------------------------------------------------------------


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; [] when there is no such process or no /proc."""
    try:
        # Called often: a Path and a text file cost twice as much.
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read().decode(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


_PF_EXITING = 0x4  # of the kernel's task flags


def process_state(pid: int) -> str:
    """The kernel's letter ("R", "S", "T" stopped, "Z" dead); "" when there is no such process.

    "X" while it is being taken down: a GPU's memory takes half a second.
    """
    return task_state(process_stat(pid))


def task_state(fields: Sequence[str]) -> str:
    """`process_state` of fields that were read already."""
    exiting = len(fields) > 6 and fields[0] != "Z" and int(fields[6]) & _PF_EXITING
    return "X" if exiting else "".join(fields[:1])


def start_ticks(pid: int) -> int:
    """When a process was started, as the kernel counts; 0 unknown. With the pid it identifies a process for good."""
    fields = process_stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def is_alive(pid: int, ticks: int = 0) -> bool:
    """Whether the very process still runs: a reused pid does not count, nor does a zombie. `ticks` 0: unknown."""
    fields = process_stat(pid)
    return bool(fields) and fields[0] not in "ZX" and (ticks == 0 or int(fields[19]) == ticks)
