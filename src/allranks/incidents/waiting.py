"""Who waits for whom on this node, in one sentence, while no call is finished. Reads black boxes; runs in the agent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allranks.incidents.job_overview import find_absent, find_open
from allranks.load import LoadOptions, load_paths
from allranks.model.trace import RankTrace
from allranks.pages.cards import short
from allranks.watch.samples import RankSample

SILENT_S = 3.0  # a shorter wait is usual
EVERY_S = 2.0


@dataclass
class Waiting:
    """Reads the boxes only while ranks are silent, and not at every look."""

    _said: str = ""
    _next_s: float = 0.0

    def look(self, samples: Sequence[RankSample]) -> str:
        """The sentence, or "" when the ranks move."""
        now = time.time()
        latest = max((sample.last_ns for sample in samples), default=0) / 1e9
        if not latest or now - latest < SILENT_S:
            self._said = ""
        elif now >= self._next_s:
            self._next_s = now + EVERY_S
            loaded = load_paths([sample.path for sample in samples], LoadOptions(allow_nothing=True))
            self._said = who_waits(loaded.traces)
        return self._said


def who_waits(traces: Iterable[RankTrace]) -> str:
    """ "ranks 0, 1 wait for rank 2 in all_reduce #12 of default_pg": of the call in which most wait."""
    known = {trace.header.rank: trace for trace in traces if trace.header.rank is not None}
    open_ = {rank: find_open(trace) for rank, trace in known.items()}
    calls: dict[tuple[str, int], list[int]] = {}
    for rank, mine in open_.items():
        for call in mine:
            calls.setdefault(call, []).append(rank)
    best = ""
    most = 0
    for call, waiters in calls.items():
        absent = find_absent(known[waiters[0]], *call, open_)
        if absent and len(waiters) > most:
            most, text = len(waiters), open_[waiters[0]][call]
            best = (
                f"{_ranks(waiters)} {'wait' if len(waiters) > 1 else 'waits'} for {_ranks(absent)} in {text}"
            )
    return best


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {short(tuple(ranks))}"
