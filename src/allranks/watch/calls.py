"""Compares the calls of a node's ranks while they run, from their black boxes: the ranks do nothing for it. Runs in the agent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from allranks.blackbox.reader import Arena, OpenFile, opened_box, read_box
from allranks.blackbox.tables import HeapCache, Tables
from allranks.diagnosis.divergence import find_divergence
from allranks.errors import InputError
from allranks.model.diagnosis import Finding
from allranks.model.trace import RankTrace
from allranks.watch.samples import ProcessId, RankSample

PERIOD_S = 0.5
SHARE = 0.02  # of one core at most
NEWEST = 600  # calls of each rank that are compared, and fewer where there are many ranks
ALL_CALLS = 40_000
IDLE_S = 20.0  # ranks that have not moved for so long have been compared often enough
MAX_NAMED = 3  # per set of processes: one difference leads to others


@dataclass
class CallComparison:
    """`look` names a difference once, when two samples in a row show it. Not for two threads."""

    _next_s: float = 0.0
    _moved_s: float = 0.0
    _marks: tuple[object, ...] = ()
    _processes: frozenset[ProcessId] = frozenset()
    _seen: tuple[object, ...] = ()
    _named: set[tuple[object, ...]] = field(default_factory=set)

    def look(self, now_s: float, samples: Sequence[RankSample]) -> Finding | None:
        """The difference that these ranks show, the first time that it is sure."""
        samples = _of_one_run(samples)
        if now_s < self._next_s or not self._due(now_s, samples):
            return None
        begin = time.thread_time()
        found = find_divergence(read_calls([sample.path for sample in samples]), time.time_ns())
        self._next_s = now_s + max(PERIOD_S, (time.thread_time() - begin) / SHARE)
        key = (found.kind, found.ranks, found.group, found.sequence) if found is not None else ()
        sure, self._seen = bool(key) and key == self._seen, key
        if not sure or key[:3] in self._named or len(self._named) >= MAX_NAMED:
            return None
        self._named.add(key[:3])
        return found

    def _due(self, now_s: float, samples: Sequence[RankSample]) -> bool:
        """Whether there is anything to compare that was not compared before."""
        processes, marks = frozenset(s.process for s in samples), tuple(s.mark for s in samples)
        if processes != self._processes:
            self._processes, self._seen, self._named = processes, (), set()
        if marks != self._marks:
            self._marks, self._moved_s = marks, now_s
        calling = sum(sample.calls_started > 0 for sample in samples)
        return calling > 1 and now_s - self._moved_s < IDLE_S


def _of_one_run(samples: Sequence[RankSample]) -> list[RankSample]:
    """The ranks of the newest attempt, without those that ended before another one started: their calls are of an earlier run."""
    newest = max((sample.attempt for sample in samples), default=0)
    started = max((sample.start_ns for sample in samples if sample.alive), default=0)
    return [s for s in samples if s.attempt == newest and (s.alive or s.last_ns > started)]


def read_calls(paths: Sequence[str]) -> list[RankTrace]:
    """The newest calls in these black boxes, on shared tables; files that cannot be read are left out."""
    cache, raws = HeapCache(Tables()), []
    newest = min(NEWEST, ALL_CALLS // max(1, len(paths)))
    for path in paths:
        try:
            with opened_box(path) as file:
                raws.append((read_box(OpenFile(file.fileno(), Arena()), cache, newest=newest), path))
        except InputError:
            continue
    tables = cache.tables.freeze()
    return [raw.as_trace(*tables, path) for raw, path in raws]
