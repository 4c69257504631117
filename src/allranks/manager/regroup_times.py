"""When each part of a regroup happened: one debug line after the first step of the new group. Runs in a rank."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

log = logging.getLogger("allranks.manager")


@dataclass(eq=False)
class RegroupTimes:
    """Marks since the last commit, from any thread. Appending is cheap enough for every step."""

    began: float = field(default_factory=time.monotonic)
    quorum: int = 0  # of the group that was made since the last commit; 0: none, and nothing is logged
    _marks: list[tuple[float, str]] = field(default_factory=list)

    def mark(self, part: str) -> None:
        """This part is behind us, now."""
        self._marks.append((time.monotonic(), part))

    def mark_first(self, part: str) -> None:
        """As `mark`, for a part that happens several times: the first counts."""
        if all(known != part for _, known in self._marks):
            self.mark(part)

    def parts(self) -> str:
        """ "part milliseconds since the last commit", in order of time."""
        return ", ".join(f"{part} {(at - self.began) * 1e3:.0f}" for at, part in sorted(self._marks))

    def log_if_regrouped(self, step: int) -> None:
        """At a commit: a group was made since the one before, and this is what took so long."""
        if self.quorum and log.isEnabledFor(logging.DEBUG):
            log.debug("quorum %d, step %d; ms since the last commit: %s", self.quorum, step, self.parts())
