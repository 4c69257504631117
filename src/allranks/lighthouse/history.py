"""The last 24 hours of a job as samples: every second, every 10 s, every minute. On the loop's thread.

In a file it survives the lighthouse: a header (JSON: the job's current facts) and three rings of fixed rows, 210 kB.
Other lighthouses on this machine read the headers for their list of jobs.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path

MAGIC = b"HISTORY-ALLRANKS-3\n"  # the other files of the folder are black boxes
HEAD_BYTES = 4096
TIERS = ((1.0, 1800), (10.0, 1440), (60.0, 1440))  # (seconds, rows)
FILE_NAME = "history"
NONE = math.nan


@dataclass(frozen=True)
class Sample:
    """One row; NaN: not known."""

    at: float  # epoch seconds
    step: float = NONE
    steps_per_s: float = NONE
    calls_per_s: float = NONE
    step_p50_s: float = NONE
    step_p99_s: float = NONE
    loss: float = NONE
    tokens_per_s: float = NONE
    alive: float = NONE  # replicas, or ranks of a whole job
    total: float = NONE
    level: float = 0.0  # 0 good, 1 warn, 2 bad


_ROW = struct.Struct(f"<d{len(fields(Sample)) - 1}f")
_SIZE = HEAD_BYTES + _ROW.size * sum(rows for _, rows in TIERS)
_HIGHEST = (
    "at",
    "step",
    "step_p99_s",
    "level",
)  # a longer sample has the highest; the lowest `alive`; else the mean


def join(samples: Sequence[Sample]) -> Sample:
    values = {}
    for name in (one.name for one in fields(Sample)):
        known = [value for value in (getattr(one, name) for one in samples) if not math.isnan(value)]
        if not known:
            values[name] = NONE
        elif name in _HIGHEST:
            values[name] = max(known)
        else:
            values[name] = min(known) if name == "alive" else sum(known) / len(known)
    return Sample(**values)


@dataclass
class History:
    """`path` None: in memory only."""

    path: Path | None = None
    _data: mmap.mmap | bytearray = field(default_factory=lambda: bytearray(_SIZE))
    _next: list[int] = field(default_factory=lambda: [0] * len(TIERS))
    _open: list[list[Sample]] = field(default_factory=lambda: [[] for _ in TIERS])

    def open(self) -> None:
        """Continues the file's history; replaces a file of another format. OSError when it cannot be written."""
        if self.path is None:
            return
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            known = os.fstat(fd).st_size == _SIZE and os.pread(fd, len(MAGIC), 0) == MAGIC
            if not known:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, _SIZE)
            self._data = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        self._data[: len(MAGIC)] = MAGIC
        for tier in range(len(TIERS)):
            rows = [(sample.at, index) for index, sample in self._rows(tier)]
            self._next[tier] = (max(rows)[1] + 1) % TIERS[tier][1] if rows else 0

    def close(self) -> None:
        if isinstance(self._data, mmap.mmap):
            self._data.close()
            self._data = bytearray(_SIZE)

    def note(self, sample: Sample) -> None:
        """Adds a sample; writes one of a longer tier when its interval is complete."""
        for tier, (seconds, _) in enumerate(TIERS):
            waiting = self._open[tier]
            if waiting and sample.at < waiting[0].at:
                waiting.clear()  # the clock was set back
            waiting.append(sample)
            if tier == 0 or sample.at - waiting[0].at >= seconds - 1.5 * TIERS[0][0]:
                self._write(tier, join(waiting) if tier else sample)
                waiting.clear()

    def describe(self, facts: dict[str, object]) -> None:
        """Writes the job's current facts, for lists of jobs."""
        text = json.dumps(facts).encode()[: HEAD_BYTES - len(MAGIC) - 1]
        self._data[len(MAGIC) : HEAD_BYTES] = text.ljust(HEAD_BYTES - len(MAGIC), b"\0")

    def since(self, begin: float, span_s: float) -> dict[str, list[float | None]]:
        """Columns of the samples since `begin`, from the shortest tier that covers `span_s`; None: not known.

        The newest samples, which a longer tier does not have yet, come from the shorter ones.
        """
        tier = next((i for i, (s, rows) in enumerate(TIERS) if s * rows >= span_s), len(TIERS) - 1)
        chosen: list[Sample] = []
        for each in range(tier, -1, -1):
            last = max((sample.at for sample in chosen), default=begin - 1e-6)
            chosen += [sample for _, sample in self._rows(each) if sample.at > last]
        chosen.sort(key=lambda sample: sample.at)
        return {one.name: [tidy(getattr(sample, one.name)) for sample in chosen] for one in fields(Sample)}

    def _rows(self, tier: int) -> Iterator[tuple[int, Sample]]:
        for index in range(TIERS[tier][1]):
            sample = Sample(*_ROW.unpack_from(self._data, _offset(tier, index)))
            if sample.at > 0:
                yield index, sample

    def _write(self, tier: int, sample: Sample) -> None:
        _ROW.pack_into(self._data, _offset(tier, self._next[tier]), *astuple(sample))
        self._next[tier] = (self._next[tier] + 1) % TIERS[tier][1]


def _offset(tier: int, index: int) -> int:
    return HEAD_BYTES + _ROW.size * (sum(rows for _, rows in TIERS[:tier]) + index)


def tidy(value: float) -> float | None:
    """Rounded for a chart; None for NaN."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if value < 1e6 else round(value, 1)


def row_of(sample: Sample) -> dict[str, float | None]:
    return {name: tidy(value) for name, value in asdict(sample).items()}


def read_jobs(folders: Sequence[Path]) -> list[dict[str, object]]:
    """The facts of the jobs in these folders, from their history files."""
    found = []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(folder / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                head = file.read(HEAD_BYTES)
            facts = json.loads(head[len(MAGIC) :].rstrip(b"\0")) if head.startswith(MAGIC) else None
            if isinstance(facts, dict):
                found.append(facts)
    return found
