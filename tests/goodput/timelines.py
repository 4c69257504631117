"""A job on paper: ranks whose black boxes are written by hand, sampled on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from allranks.blackbox.phases import FIRST, PhaseMark
from allranks.ledger.accounts import Accounts
from allranks.ledger.records import Booked, Outage
from allranks.watch.samples import RankSample

T0 = 1_790_000_000.0


def ns(at: float) -> int:
    return round((T0 + at) * 1e9)


@dataclass
class PaperRank:
    """One rank; times are seconds since the job's begin."""

    number: int
    pid: int = 100
    changes: list[tuple[float, RankSample]] = field(default_factory=list)

    def _last(self) -> RankSample:
        return self.changes[-1][1]

    def _add(self, at: float, sample: RankSample) -> None:
        self.changes.append((at, sample))

    def start(self, at: float) -> None:
        self.pid += 1000
        self._add(at, RankSample(self.number, self.pid + self.number, "", True, -1, 0, 0, ns(at), ns(at)))

    def steps(self, begin: float, first: int, count: int, each: float) -> float:
        """Marks `count` steps; returns when the last of them ends (a mark is the beginning of a step)."""
        for index in range(count):
            self.mark(begin + index * each, first + index)
        return begin + count * each

    def mark(self, at: float, step: int) -> None:
        old = self._last()
        phases = old.phases
        if old.step < 0:
            phases = (*phases, PhaseMark(FIRST, ns(at), 0))
        else:
            phases = tuple(
                p._replace(end_ns=ns(at)) if p.name == FIRST and not p.end_ns else p for p in phases
            )
        calls = old.calls_completed + 2
        self._add(
            at, replace(old, step=step, step_ns=ns(at), last_ns=ns(at), calls_completed=calls, phases=phases)
        )

    def phase(self, name: str, begin: float, end: float) -> None:
        old = self._last()
        self._add(begin, replace(old, phases=(*old.phases, PhaseMark(name, ns(begin), 0))))
        self._add(end, replace(old, phases=(*old.phases, PhaseMark(name, ns(begin), ns(end)))))

    def exit(self, at: float) -> None:
        self._add(at, replace(self._last(), closed="exit", closed_ns=ns(at)))

    def kill(self, at: float) -> None:
        self._add(at, replace(self._last(), alive=False))

    def at(self, now: float) -> RankSample | None:
        return next((sample for at, sample in reversed(self.changes) if at <= now), None)


def book(
    ranks: Sequence[PaperRank],
    end: float,
    outages: Iterable[tuple[float, Outage]] = (),
    poll_s: float = 0.5,
    reached: int = -1,
) -> list[Booked]:
    """The rows of the whole job; `outages` become known at these times."""
    accounts = Accounts(T0, reached)
    rows: list[Booked] = []
    known = sorted(outages, key=lambda one: one[0])
    for turn in range(round(end / poll_s) + 1):
        now = turn * poll_s
        while known and known[0][0] <= now:
            accounts.note(known.pop(0)[1])
        samples = [sample for rank in ranks if (sample := rank.at(now)) is not None]
        rows += accounts.observe(T0 + now, samples)
    return rows + accounts.close(T0 + end)


def totals(rows: Iterable[Booked]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for state, seconds in row.seconds.items():
            found[state] = found.get(state, 0.0) + seconds
    return found
