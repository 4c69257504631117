"""Processes as /proc shows them, no matter who started them."""

from __future__ import annotations

import time
from pathlib import Path


def _stat(pid: int) -> list[str]:
    """The fields after the name: state, parent, ... Empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    stat = _stat(pid)
    return not stat or stat[0] in "ZX"


def parent_of(pid: int) -> int:
    """The parent of a process, 0 when it is gone."""
    stat = _stat(pid)
    return int(stat[1]) if stat else 0


def children_of(pid: int) -> list[int]:
    """The children of a process' first thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def settle(pid: int, quiet_s: float = 0.5, computes_s: float = 0.5, timeout_s: float = 5.0) -> None:
    """Waits until a process and all below it have begun what they do: they rest, or compute. Not for ever: some never rest.

    On a busy machine, a process that has just been forked is on its way there for as long as a look at it takes.
    """
    first: dict[int, int] = {}
    since: dict[int, tuple[object, float]] = {}
    until = time.monotonic() + timeout_s
    while (now := time.monotonic()) < until:
        settled = True
        for one in _tree(pid):
            ticks, switches, runs = _activity(one)
            seen, at = since.get(one, (None, now))
            if runs or seen != (ticks, switches):
                since[one] = (ticks, switches), now
                at = now
            computes = ticks - first.setdefault(one, ticks) >= 100 * computes_s
            settled = settled and (computes or now - at >= quiet_s)
        if settled:
            return
        time.sleep(0.05)


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    below = [
        int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _text(path).split()
    ]
    return [pid, *(each for one in below for each in _tree(one))]


def _activity(pid: int) -> tuple[int, int, bool]:
    """CPU ticks and context switches of a process' threads, and whether one of them runs."""
    ticks = switches = 0
    runs = False
    for task in Path(f"/proc/{pid}/task").glob("*"):
        fields = _text(task / "stat").rpartition(")")[2].split()
        if fields:
            ticks += int(fields[11]) + int(fields[12])
            runs = runs or fields[0] in "RD"
        switches += sum(
            int(line.split()[1]) for line in _text(task / "status").splitlines() if "ctxt_switches" in line
        )
    return ticks, switches, runs


def _text(path: Path) -> str:
    """A file of a process, "" when that has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
