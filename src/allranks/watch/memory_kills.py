"""Whether the kernel ended processes of this node for lack of memory. Runs in the agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VMSTAT = Path("/proc/vmstat")


@dataclass
class MemoryKills:
    """Counts since it was last asked."""

    source: Path = VMSTAT
    _before: int = 0

    def __post_init__(self) -> None:
        self._before = self._count()

    def new(self) -> int:
        """How many there were since the last time."""
        now = self._count()
        found, self._before = now - self._before, now
        return found

    def _count(self) -> int:
        try:
            lines = self.source.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
