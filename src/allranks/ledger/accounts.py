"""One node's open account: samples and incidents in, ledger records out. No clock, no files, no threads.

Stretches stay pending for `SETTLE_S`, because an incident is published a few seconds after the time that it explains. Then they
are summed by rank, and once per window the sums become rows, one for all ranks that did about the same. Windows grow with the
age of the job, so that the ledger of a month stays small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from allranks.blackbox.phases import PhaseMark
from allranks.ledger.arrivals import Waited
from allranks.ledger.booking import RankBook, Stretch, advance, finish, resolve
from allranks.ledger.records import (
    IDLE,
    REPEATED,
    SAVING,
    STALLED,
    STARTING,
    USEFUL,
    WAITING,
    Booked,
    Outage,
    kind_of,
)
from allranks.model.formatting import rank_runs
from allranks.watch.samples import RankSample

SETTLE_S = 8.0
SHORTEST_S, LONGEST_S, WINDOWS = 10.0, 1800.0, 50  # a window is a fiftieth of the job's age, between these
LONG_S = 5.0  # a longer stretch without training gets its own rows
ALIKE = 0.05  # ranks that differ by less than this share of a window have one row
KEPT_OUTAGES = 200
SILENT = (STARTING, STALLED, IDLE)  # states in which a rank makes no calls
COUNTED = (SAVING, "restoring", "healing", "regrouping")

#: (begin, end, incidents) -> which rank waited for which, without the time of the incidents
Waits = Callable[[float, float, Sequence[Outage]], Waited]


@dataclass
class _Sum:
    """One rank since the last row: seconds by state, and how often it entered the states in COUNTED."""

    begin: float
    end: float
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass
class Accounts:
    began: float  # epoch
    reached: int = -1  # the highest step of this and all earlier runs of the job
    waits: Waits = lambda begin, end, outages: Waited()
    number: int = 0  # of the last row
    _books: dict[int, RankBook] = field(default_factory=dict)
    _phases: dict[int, tuple[PhaseMark, ...]] = field(default_factory=dict)
    _pending: list[Stretch] = field(default_factory=list)
    _outages: dict[str, Outage] = field(default_factory=dict)
    _sums: dict[int, _Sum] = field(default_factory=dict)
    _past: set[tuple[int, int]] = field(default_factory=set)  # processes whose book a new rank continues
    _folded: float = 0.0
    _tokens: float = 0.0  # since the last row

    def observe(self, now: float, samples: Sequence[RankSample]) -> list[Booked]:
        """Takes one sample of each of this node's ranks; returns the finished rows."""
        for sample in sorted(samples, key=lambda one: one.start_ns):
            if sample.process in self._past:
                continue
            book = self._books.get(sample.rank) or self._new_book(sample)
            if book.process == sample.process and book.step >= 0:
                self._tokens += sample.tokens * max(0, sample.step - max(book.step, book.redo_until))
            book, done = advance(book, sample, now, self.reached)
            self._books[sample.rank], self._phases[sample.rank] = book, sample.phases
            self._pending += done
        self.reached = max([self.reached, *(sample.step for sample in samples)])
        return self._settle(now - SETTLE_S, now)

    def _new_book(self, sample: RankSample) -> RankBook:
        """The book of a new rank. In a job that was resized it continues the book of a rank that is gone."""
        for rank, book in self._books.items():
            if book.process is not None and not book.alive and sample.start_ns / 1e9 >= book.booked:
                self._past.add(book.process)
                del self._books[rank], self._phases[rank]
                return replace(book, rank=sample.rank)
        return RankBook(sample.rank, self.began)

    def note(self, outage: Outage) -> Outage | None:
        """Takes a new or changed incident; returns the record to write, None when nothing changed."""
        if self._outages.get(outage.id) == outage:
            return None
        self._outages.pop(outage.id, None)
        self._outages[outage.id] = outage
        while len(self._outages) > KEPT_OUTAGES:
            del self._outages[next(iter(self._outages))]
        return outage

    def open_rows(self, now: float) -> list[Booked]:
        """The rows if the job ended now. Changes nothing."""
        sums = {
            rank: replace(one, seconds=one.seconds.copy(), counts=one.counts.copy())
            for rank, one in self._sums.items()
        }
        draft = replace(
            self, waits=Accounts.waits, _books=dict(self._books), _pending=[*self._pending], _sums=sums
        )
        return draft.close(now)

    def close(self, now: float) -> list[Booked]:
        """The last rows."""
        for rank, book in self._books.items():
            self._pending += finish(book, self._phases[rank], now)
        return [*self._settle(float("inf"), now), *self._fold(now)]

    def _settle(self, until: float, now: float) -> list[Booked]:
        ready = [one for one in self._pending if one.end <= until]
        self._pending = [one for one in self._pending if one.end > until]
        resolved = [part for one in ready for part in self._resolve(one)]
        rows: list[Booked] = []
        if any(part.end - part.begin >= LONG_S and kind_of(part.state) != USEFUL for part in resolved):
            rows += self._fold(now)
            self._add(resolved)
            return rows + self._fold(now)
        self._add(resolved)
        if now - max(self._folded, self.began) >= self._window_s(now):
            rows += self._fold(now)
        return rows

    def _resolve(self, stretch: Stretch) -> list[Stretch]:
        book = self._books.get(stretch.rank)
        last = book is not None and book.booked <= stretch.end
        return resolve(stretch, tuple(self._outages.values()), over=last)

    def _add(self, parts: Sequence[Stretch]) -> None:
        for part in parts:
            found = self._sums.setdefault(part.rank, _Sum(part.begin, part.end))
            found.seconds[part.state] += part.end - part.begin
            found.begin, found.end = min(found.begin, part.begin), max(found.end, part.end)
            if kind_of(part.state) in COUNTED:
                found.counts[part.state] += 1

    def _window_s(self, now: float) -> float:
        return min(LONGEST_S, max(SHORTEST_S, (now - self.began) / WINDOWS))

    def _fold(self, now: float) -> list[Booked]:
        self._folded = now
        sums, self._sums = self._sums, {}
        if not sums:
            return []
        low, high = min(one.begin for one in sums.values()), max(one.end for one in sums.values())
        waits = self.waits(low, high, tuple(self._outages.values()))
        alike: dict[object, list[int]] = defaultdict(list)
        for rank, one in sums.items():
            _book_waits(one, rank, waits)
            unit = max(1e-3, ALIKE * (high - low))
            shape = sorted((state, round(seconds / unit)) for state, seconds in one.seconds.items())
            alike[tuple(part for part in shape if part[1])].append(rank)
        return [self._row(ranks, [sums[rank] for rank in ranks]) for ranks in alike.values()]

    def _row(self, ranks: Sequence[int], sums: Sequence[_Sum]) -> Booked:
        self.number += 1
        total: dict[str, float] = defaultdict(float)
        most: dict[str, int] = defaultdict(int)
        for one in sums:
            for state, seconds in one.seconds.items():
                total[state] += seconds
            for state, count in one.counts.items():
                most[state] = max(most[state], count)
        rounded = {state: round(seconds, 4) for state, seconds in total.items()}
        low, high = round(min(one.begin for one in sums), 4), round(max(one.end for one in sums), 4)
        tokens, self._tokens = round(self._tokens), 0.0
        return Booked(
            self.number, low, high, ",".join(rank_runs(ranks)), rounded, self.reached, dict(most), tokens
        )


def _book_waits(one: _Sum, rank: int, waits: Waited) -> None:
    """Moves time of steps that the rank spent waiting for other ranks."""
    states = one.seconds
    calling = sum(seconds for state, seconds in states.items() if kind_of(state) not in SILENT)
    steps = {state: states.get(state, 0.0) for state in (USEFUL, REPEATED)}
    own = sum(steps.values())
    waited = waits.during(rank, one.begin, one.end, calling)
    scale = min(1.0, own / max(sum(waited.values()), 1e-9))
    for whom, seconds in waited.items():
        states[f"{WAITING}:{whom}"] = seconds * scale
        for state, part in steps.items():
            states[state] -= seconds * scale * part / max(own, 1e-9)
    for state in [state for state, seconds in states.items() if seconds <= 0.0]:
        del states[state]
