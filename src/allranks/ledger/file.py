"""The ledger's file: one line per record, with a checksum. One agent appends; any process may read at any time.

INCIDENTS/JOB.NODE.ledger      finished rows, never rewritten
INCIDENTS/JOB.NODE.ledger.now  open rows, replaced as a whole every few seconds

Each node has its own file, since several machines cannot append to one file of a network file system. Truncated or damaged
lines are skipped and counted. After a crash the next agent of the node appends the rows of the `.now` file.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import msgspec

from allranks.errors import InputError
from allranks.ledger.records import Booked, Passed, Record, RunStart
from allranks.model.files import write_atomically

SUFFIX, NOW = ".ledger", ".now"
MAX_BYTES = 1 << 30
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode


@dataclass(frozen=True)
class NodeLedger:
    """One node's records, in the order of the file."""

    path: Path
    records: list[Record] = field(default_factory=list)
    damaged: int = 0  # lines


def ledger_path(folder: Path, job: str, node: str) -> Path:
    return folder / f"{_safe(job)}.{_safe(node)}{SUFFIX}"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:100] or "_"


def line_of(record: Record) -> bytes:
    data = _encode(record)
    return b"%08x %s\n" % (crc32(data), data)


def read_lines(data: bytes) -> tuple[list[Record], int]:
    """The records in these bytes, and the number of damaged lines."""
    records: list[Record] = []
    damaged = 0
    for line in data.split(b"\n"):
        if not line:
            continue
        body = line[9:]
        try:
            if int(line[:8], 16) != crc32(body):
                raise ValueError("wrong checksum")
            records.append(_decode(body))
        except (ValueError, msgspec.DecodeError):
            damaged += 1
    return records, damaged


def read_ledger(path: Path) -> NodeLedger:
    """A node's records, open rows included. OSError when the file cannot be read."""
    if path.stat().st_size > MAX_BYTES:
        raise OSError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    records, damaged = read_lines(path.read_bytes())
    return NodeLedger(path, [*records, *_still_open(path, records)], damaged)


def _still_open(path: Path, records: Sequence[Record]) -> list[Record]:
    """The rows of the `.now` file that the ledger does not have: those of the last run with later numbers."""
    found = _read_now(path)
    start = next((one for one in reversed(records) if isinstance(one, RunStart)), None)
    run, rows = found[:1], found[1:]
    if start is None or run != [start]:
        return []
    since = records[records.index(start) :]
    last = max((one.number for one in since if isinstance(one, Booked)), default=0)
    return [one for one in rows if not isinstance(one, Booked) or one.number > last]


def read_recent(path: Path) -> tuple[RunStart | None, Passed | None]:
    """The run of a node's agent and its newest `Passed` record; None for what is missing."""
    found = _read_now(path)
    notes = [one for one in found if isinstance(one, Passed)]
    return next((one for one in found if isinstance(one, RunStart)), None), notes[-1] if notes else None


def _read_now(path: Path) -> list[Record]:
    try:
        return read_lines(path.with_name(path.name + NOW).read_bytes())[0]
    except OSError:
        return []


@dataclass
class LedgerFile:
    """Appends to one node's ledger. Methods raise OSError; records that could not be written are tried again later."""

    path: Path
    _unwritten: list[Record] = field(default_factory=list)
    _held: int = -1  # a descriptor with the lock
    _torn: bool = False  # the last write failed and may have left a part of a line

    def lock(self) -> bool:
        """Locks the file until this process ends; False when another process holds the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._held = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            return False
        except OSError:
            pass  # a file system without locks
        return True

    def open(self) -> list[Record]:
        """Creates the file, or continues that of earlier runs; returns their records."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        records, _ = read_lines(data)
        left = _still_open(self.path, records)
        if data and not data.endswith(b"\n"):
            self._write(b"\n")  # a crash has truncated the last line
        self.append(left)
        self.path.with_name(self.path.name + NOW).unlink(missing_ok=True)
        return [*records, *left]

    def append(self, records: Iterable[Record]) -> None:
        """Appends in one write: a crash leaves at most one truncated line."""
        self._unwritten += records
        if self._unwritten:
            lines = b"".join(line_of(one) for one in self._unwritten)
            self._write(b"\n" + lines if self._torn else lines)
            self._unwritten = []

    def write_open(self, start: RunStart, rows: Sequence[Booked | Passed]) -> None:
        """Replaces the open rows."""
        lines = [line_of(start), *(line_of(one) for one in rows)]
        write_atomically(self.path.with_name(self.path.name + NOW), b"".join(lines))

    def close(self) -> None:
        self.path.with_name(self.path.name + NOW).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._held >= 0:
            os.close(self._held)
        self._held = -1

    def _write(self, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._torn = True
        fd = os.open(self.path, flags, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            self._torn = False
        finally:
            os.close(fd)


def find_ledgers(folder: Path, job: str = "") -> list[Path]:
    """The ledgers of one job, or of all jobs, in a folder of incidents."""
    begins = f"{_safe(job)}." if job else ""
    return sorted(
        path for path in folder.glob(f"*{SUFFIX}") if path.name.startswith(begins) and path.is_file()
    )


def read_jobs(paths: Iterable[Path]) -> dict[str, list[NodeLedger]]:
    """Job -> the ledgers of its nodes. InputError without any ledger, or when one cannot be read."""
    found: dict[str, list[NodeLedger]] = {}
    for path in dict.fromkeys(paths):
        try:
            ledger = read_ledger(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        job = next((one.job for one in ledger.records if isinstance(one, RunStart)), path.name)
        found.setdefault(job, []).append(ledger)
    if not found:
        hint = (
            "`allranks run` writes one next to the incidents of a job. Give the job's name, or that folder."
        )
        raise InputError("no ledger was found", hint=hint)
    return found
