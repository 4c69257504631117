"""Incidents that have been answered, until those who survived train again. Runs in the agent's watch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from allranks.incidents.folder import IncidentFolder
from allranks.model.incident import Moment
from allranks.watch.samples import RankSample

PATIENCE_S = 600.0


@dataclass(frozen=True)
class _Awaited:
    opened: IncidentFolder
    before: dict[int, RankSample]  # of the ranks that must go on
    since_s: float
    reborn: bool  # only new processes count: the old ones may do a last step before they end
    patience_s: float


@dataclass
class Recoveries:
    """All incidents that wait for progress."""

    _waiting: list[_Awaited] = field(default_factory=list)

    def add(
        self,
        opened: IncidentFolder,
        samples: Sequence[RankSample],
        guilty: Iterable[int],
        *,
        reborn: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """From now on. When all went at once, their next processes count; with `reborn`, always."""
        out = set(guilty)
        survivors = {s.rank: s for s in samples if s.rank not in out and s.alive and not s.closed}
        everybody = {s.rank: s for s in samples}
        self._waiting.append(_Awaited(opened, survivors or everybody, time.monotonic(), reborn, patience_s))

    def recent(self, for_s: float) -> bool:
        """Whether something has been answered within this time and has not recovered: worth a closer look."""
        return any(time.monotonic() - waiting.since_s < for_s for waiting in self._waiting)

    def open(self) -> list[IncidentFolder]:
        """Those that have not recovered."""
        return [waiting.opened for waiting in self._waiting]

    def look(self, samples: list[RankSample]) -> Iterator[IncidentFolder]:
        """Closes and gives back those whose survivors all train again; forgets those that never will."""
        now = {s.rank: s for s in samples}
        for waiting in list(self._waiting):
            before, opened = waiting.before, waiting.opened
            moved = [r for r, old in before.items() if r in now and _further(now[r], old, waiting.reborn)]
            took = time.monotonic() - waiting.since_s
            if before and len(moved) == len(before):
                step = max((s.step for s in samples), default=-1)
                opened.update(
                    Moment("recovered", time.time(), f"{_count(moved)} again, step {step}"),
                    closed=time.time(),
                    durations_s={**opened.current.durations_s, "recovered": took},
                )
                self._waiting.remove(waiting)
                yield opened
            elif not before or took > waiting.patience_s:
                self._waiting.remove(waiting)


def _count(ranks: list[int]) -> str:
    return "1 rank trains" if len(ranks) == 1 else f"{len(ranks)} ranks train"


def _further(now: RankSample, before: RankSample, reborn: bool) -> bool:
    """Completed calls or steps went on (a new process counts from zero again and also trains)."""
    if reborn or now.calls_started < before.calls_started:
        return now.process != before.process and now.calls_completed > 0
    return now.step > before.step or now.calls_completed > before.calls_completed
