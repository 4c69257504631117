"""The output of ranks: each line goes to the terminal with a rank prefix, and unchanged to a file."""

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
MAX_WAITING_BYTES = 8 << 20  # of lines that the terminal has not accepted yet
CLOSE_S = 2.0
ROOM_BYTES = 1 << 30  # free space that a file system for logs must have
SCARCE_BYTES = ROOM_BYTES // 4  # with less free space, or longer logs, the beginnings of logs are discarded
KEPT_BYTES = 1 << 20  # kept at the end of a log then
TRIM_S = 0.5
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Terminal:
    """Writes to a terminal or pipe on its own thread, so that a blocked one (Ctrl-S, a full pipe) blocks no other thread.

    `start()` and `close()` own the thread. Lines beyond the limit are dropped, with a note; the log files have them.
    """

    def __init__(self, fd: int) -> None:
        # not a Python file, whose lock, held by a blocked write, would block the interpreter's exit
        self._fd = fd
        self._waiting: deque[bytes] = deque()
        self._size = self._dropped = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="allranks-terminal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def write(self, lines: bytes) -> None:
        """Queues lines; never blocks."""
        with self._changed:
            if self._size + len(lines) > MAX_WAITING_BYTES:
                self._dropped += lines.count(b"\n")
                return
            self._waiting.append(lines)
            self._size += len(lines)
            self._changed.notify()

    def _run(self) -> None:
        while (lines := self._next()) is not None:
            try:
                # small writes of whole lines, which the output of other processes cannot split
                at, view = 0, memoryview(lines)
                while at < len(lines):
                    at += self._write(view[at : _end_of_lines(lines, at)])
            except OSError:
                return  # the reader has closed

    def _write(self, lines: memoryview) -> int:
        """As os.write, but waits for a terminal that another program has made non-blocking."""
        try:
            return os.write(self._fd, lines)
        except BlockingIOError:
            select.select([], [self._fd], [], 1.0)
            return 0

    def _next(self) -> bytes | None:
        """The next lines to write; None when all are written after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            lines = b"".join(self._waiting)
            self._waiting.clear()
            dropped, self._size, self._dropped = self._dropped, 0, 0
        note = f"[allranks] {dropped} lines dropped: terminal too slow; the log files have them\n"
        return lines + note.encode() if dropped else lines


def _end_of_lines(lines: bytes, at: int) -> int:
    """The end of a write that begins `at`: as many whole lines as a pipe takes atomically, or one longer line."""
    if len(lines) - at <= select.PIPE_BUF:
        return len(lines)
    return lines.rfind(b"\n", at, at + select.PIPE_BUF) + 1 or lines.find(b"\n", at) + 1 or len(lines)


@dataclass
class LogPump:
    """Reads one rank's pipe without blocking; call `read()` when the pipe is readable."""

    fd: int
    prefix: str
    terminal: Terminal | None
    file: BinaryIO | None
    _rest: bytes = field(default=b"")

    def read(self) -> bool:
        """Passes the available output on. False once the other side has closed the pipe."""
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
        """Reads the remaining output, then closes the pipe and the file."""
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
    """The folder for a job's logs: below its own, or on disk; None if log files could run out of space."""
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
    """Keeps log files from filling memory or a disk while ranks write. `start()` and `close()` own the thread."""

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
            with contextlib.suppress(OSError):  # the folder may not exist
                trim(self._folder)


def trim(folder: Path, most: int = SCARCE_BYTES, scarce: int = SCARCE_BYTES) -> None:
    """Frees the space of long logs except for their ends. The files keep their length, so that writers and readers continue."""
    limit = 2 * KEPT_BYTES if _free(folder) < scarce else most
    libc = ctypes.CDLL(None)
    for path in folder.rglob("*.log"):
        facts = path.stat()
        if facts.st_blocks * 512 > limit:
            with path.open("r+b") as file:
                end = max(facts.st_size - max(KEPT_BYTES, limit // 4), 0)
                libc.fallocate(file.fileno(), _PUNCH, ctypes.c_long(0), ctypes.c_long(end))


def open_log(folder: Path | None, name: str) -> BinaryIO | None:
    """Opens a rank's log file for appending; None without a folder, or if the file cannot be written.

    Refuses links and pipes, since other users may be able to write to the folder.
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
