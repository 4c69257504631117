"""Output of ranks: every line gets its rank in front on the terminal, and goes unchanged to a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import stat
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from allranks.blackbox.files import fallback_folder, make_folder

MAX_LINE_BYTES = 1 << 16
MAX_WAITING_BYTES = 8 << 20  # of lines that the terminal has not taken yet
CLOSE_S = 2.0
ROOM_BYTES = 1 << 30  # that a file system must have for logs
SCARCE_BYTES = ROOM_BYTES // 4  # with less than this, or with longer logs, their beginnings are given back
KEPT_BYTES = 1 << 20  # of a log, then
TRIM_S = 0.5
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Terminal:
    """Writes to a terminal or pipe on a thread of its own: one that takes nothing (Ctrl-S, a full pipe) holds up nobody.

    `start()` and `close()` own the thread. What does not fit is left out, and said; the log files have it.
    """

    def __init__(self, fd: int) -> None:
        # not a Python file: its lock, held by a write that blocks, would stop the interpreter's end
        self._fd = fd
        self._waiting: deque[bytes] = deque()
        self._size = self._left_out = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="allranks-terminal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Writes what is waiting, within a short time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def write(self, lines: bytes) -> None:
        """Soon; never blocks."""
        with self._changed:
            if self._size + len(lines) > MAX_WAITING_BYTES:
                self._left_out += lines.count(b"\n")
                return
            self._waiting.append(lines)
            self._size += len(lines)
            self._changed.notify()

    def _run(self) -> None:
        while (lines := self._next()) is not None:
            try:
                # small writes of whole lines: what others write to the same place cannot tear them
                at, view = 0, memoryview(lines)
                while at < len(lines):
                    at += self._write(view[at : _end_of_lines(lines, at)])
            except OSError:
                return  # nobody reads any more

    def _write(self, lines: memoryview) -> int:
        """As os.write; a terminal that another program made non-blocking is waited for."""
        try:
            return os.write(self._fd, lines)
        except BlockingIOError:
            select.select([], [self._fd], [], 1.0)
            return 0

    def _next(self) -> bytes | None:
        """What to write next; None when all is written and it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            lines = b"".join(self._waiting)
            self._waiting.clear()
            left_out, self._size, self._left_out = self._left_out, 0, 0
        note = f"[allranks] {left_out} lines left out: the terminal does not keep up; the logs have them\n"
        return lines + note.encode() if left_out else lines


def _end_of_lines(lines: bytes, at: int) -> int:
    """Where a write that begins `at` ends: behind as many whole lines as a pipe takes in one piece, or one longer line."""
    if len(lines) - at <= select.PIPE_BUF:
        return len(lines)
    return lines.rfind(b"\n", at, at + select.PIPE_BUF) + 1 or lines.find(b"\n", at) + 1 or len(lines)


@dataclass
class LogPump:
    """Reads one rank's pipe without ever blocking; `read()` is called when the pipe is readable."""

    fd: int
    prefix: str
    terminal: Terminal | None
    file: BinaryIO | None
    _rest: bytes = field(default=b"")

    def read(self) -> bool:
        """Passes on what is there. False once the other side has closed the pipe."""
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)
        return True

    def close(self) -> None:
        """Drains what is left and closes the pipe and the file."""
        try:
            while self.read() and select.select([self.fd], [], [], 0)[0]:
                pass
        except OSError:
            pass
        if self._rest:
            self._write([self._rest])
            self._rest = b""
        os.close(self.fd)
        if self.file is not None:
            self.file.close()

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self.file is not None:
            try:
                self.file.write(b"".join(line + b"\n" for line in lines))
                self.file.flush()
            except OSError:
                self.file = None  # a full disk must not stop training; the terminal still has the lines
        if self.terminal is not None:
            head = self.prefix.encode()
            self.terminal.write(b"".join(head + line + b"\n" for line in lines))


def find_room(job: Path) -> Path | None:
    """Where a job's logs go: below its folder, or on disk; None where ranks that write to files would run out of room one day."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None
    for folder in (job, fallback_folder(job.name)):
        with contextlib.suppress(OSError):
            make_folder(folder)
            if _free(folder) >= ROOM_BYTES:
                return folder / "logs"
    return None


def _free(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


class LogTrimmer:
    """Keeps our logs from filling memory or a disk while ranks write on. `start()` and `close()` own the thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="allranks-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(TRIM_S):
            with contextlib.suppress(OSError):  # a folder that is not there yet, or no longer
                trim(self._folder)


def trim(folder: Path, most: int = SCARCE_BYTES, scarce: int = SCARCE_BYTES) -> None:
    """Gives back the room of all but the ends of long logs. Their length stays: who writes or reads one notices nothing."""
    limit = 2 * KEPT_BYTES if _free(folder) < scarce else most
    libc = ctypes.CDLL(None)
    for path in folder.rglob("*.log"):
        facts = path.stat()
        if facts.st_blocks * 512 > limit:
            with path.open("r+b") as file:
                end = max(facts.st_size - max(KEPT_BYTES, limit // 4), 0)
                libc.fallocate(file.fileno(), _PUNCH, ctypes.c_long(0), ctypes.c_long(end))


def open_log(folder: Path | None, name: str) -> BinaryIO | None:
    """Opens a rank's log file for appending, or None when there is no folder or it cannot be written.

    Not through a link, nor into a pipe: others may be able to write to the folder.
    """
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(folder / name, flags, 0o666)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return os.fdopen(fd, "ab")
        os.close(fd)
        return None
    except OSError:
        return None
