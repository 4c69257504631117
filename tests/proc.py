"""Processes as /proc shows them, no matter who started them."""

from __future__ import annotations

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
