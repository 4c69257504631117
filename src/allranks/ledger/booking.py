"""Turns the samples of one rank into stretches of time, each with the rank's state. Pure.

A rank's time is booked up to its last progress mark, by the rank's own timestamps. The time after the mark is booked with the
next mark, or when the process ends, so all time is booked exactly once.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from allranks.blackbox.phases import FIRST, GC, PhaseMark
from allranks.ledger.records import (
    COMPILING,
    HEALING,
    IDLE,
    REPEATED,
    STALLED,
    STARTING,
    USEFUL,
    Outage,
    state_of,
)
from allranks.watch.samples import RankSample

LOST, DOWN = "lost", "down"  # states before `resolve` has looked for an incident
MEMORY = 64  # steps
NEAR_S = 5.0  # an incident that begins this soon after the end of a process explains that end


@dataclass(frozen=True)
class Stretch:
    """A period of one rank. `usual_s` is how long the steps in it usually take."""

    rank: int
    begin: float
    end: float
    state: str
    usual_s: float = 0.0


@dataclass(frozen=True)
class RankBook:
    """How far a rank's time is booked, and the state of its process."""

    rank: int
    booked: float  # epoch; all time before it is booked
    process: tuple[int, int] | None = None  # pid and start
    alive: bool = False
    step: int = -1
    calls: int = 0
    marked: bool = False  # has made a step or completed a call
    redo_until: int = -1  # steps below this one had been done when the process began
    steps_s: tuple[float, ...] = ()  # durations of the last steps

    @property
    def usual_s(self) -> float:
        return statistics.median(self.steps_s) if self.steps_s else 0.0


def advance(book: RankBook, sample: RankSample, now: float, reached: int) -> tuple[RankBook, list[Stretch]]:
    """The book after one more sample, and the new stretches. `reached` is the highest step that any rank has begun."""
    done: list[Stretch] = []
    if book.process != sample.process:
        book, done = _new_process(book, sample, now, reached)
    if not book.alive:
        return book, done
    at = _progress_at(book, sample)
    if at > book.booked:
        book, stretches = _marked(book, sample, min(at, max(now, book.booked)))
        done += stretches
    if sample.closed or not sample.alive:
        end = sample.closed_ns / 1e9 if sample.closed else now
        end, clean = max(end, book.booked), sample.closed.startswith("exit") and "code" not in sample.closed
        done += _last(book, sample.phases, end, clean=clean)
        book = replace(book, alive=False, booked=end)
    return book, done


def finish(book: RankBook, phases: Sequence[PhaseMark], now: float) -> list[Stretch]:
    """The remaining stretches when the job ends at `now`. A silence at the end becomes DOWN, which an incident may explain."""
    if book.alive:
        last = _last(book, phases, now, clean=True)
        return [replace(one, state=DOWN) if one.state == IDLE else one for one in last]
    return _cut(book, [], now, IDLE)


def _progress_at(book: RankBook, sample: RankSample) -> float:
    """Time of the rank's last progress; 0 without progress since the last sample."""
    if sample.step >= 0:
        return sample.step_ns / 1e9
    return sample.last_ns / 1e9 if sample.calls_completed > book.calls else 0.0


def _new_process(
    book: RankBook, sample: RankSample, now: float, reached: int
) -> tuple[RankBook, list[Stretch]]:
    start = min(max(sample.start_ns / 1e9, book.booked), now)
    first = book.process is None
    done = [Stretch(book.rank, book.booked, start, STARTING if first else LOST if book.alive else DOWN)]
    fresh = RankBook(book.rank, start, sample.process, alive=True, redo_until=reached)
    return replace(fresh, steps_s=book.steps_s), [one for one in done if one.end > one.begin]


def _marked(book: RankBook, sample: RankSample, at: float) -> tuple[RankBook, list[Stretch]]:
    """Books up to a progress mark."""
    done: list[Stretch] = []
    if not book.marked:
        first = [mark.begin_ns / 1e9 for mark in sample.phases if mark.name == FIRST]
        until = min(max(first[0], book.booked), at) if first else at
        done += _cut(book, sample.phases, until, STARTING)
        book = replace(book, booked=until, step=sample.step if not first else max(book.step, 0))
    steps = max(0, sample.step - book.step) if sample.step >= 0 and book.marked else 0
    parts = [*_cut(book, sample.phases, at, USEFUL)]
    own = sum(part.end - part.begin for part in parts if part.state == USEFUL)
    healed = any(part.state == HEALING for part in parts)
    if not book.marked and book.usual_s:  # estimates the steps before the first sample
        missed = round(own / book.usual_s)
        again = _share_again(replace(book, step=sample.step - missed), sample.step, missed)
    else:
        again = _share_again(book, sample.step, steps)
    again = again if sample.step >= 0 and not healed else 0.0
    usual = book.usual_s * max(1, steps) if steps else book.usual_s
    for part in parts:
        done += _split_again(
            replace(part, usual_s=usual * (part.end - part.begin) / own if own else 0.0), again
        )
    if steps and own and not healed and not any(part.state == COMPILING for part in parts):
        book = replace(book, steps_s=(*book.steps_s, own / steps)[-MEMORY:])
    return replace(book, booked=at, step=sample.step, calls=sample.calls_completed, marked=True), done


def _share_again(book: RankBook, step: int, steps: int) -> float:
    """The share of these steps that had been done before this process began."""
    if not steps:
        return 1.0 if step < book.redo_until else 0.0
    return min(1.0, max(0, book.redo_until - book.step) / steps)


def _split_again(part: Stretch, again: float) -> list[Stretch]:
    if part.state != USEFUL or not again:
        return [part]
    middle = part.begin + again * (part.end - part.begin)
    halves = [replace(part, end=middle, state=REPEATED), replace(part, begin=middle)]
    return [half for half in halves if half.end > half.begin]


def _last(book: RankBook, phases: Sequence[PhaseMark], end: float, *, clean: bool) -> list[Stretch]:
    """The time after the last mark: one more step and the end of the program, or the lost step of a process that died."""
    if not book.marked:
        return _cut(book, phases, end, STARTING)
    if not clean:
        return _cut(book, phases, end, LOST)
    step = min(end, book.booked + book.usual_s)
    done = [replace(one, usual_s=one.end - one.begin) for one in _cut(book, phases, step, USEFUL)]
    return done + _cut(replace(book, booked=step), phases, end, IDLE)


def _cut(book: RankBook, phases: Sequence[PhaseMark], end: float, base: str) -> list[Stretch]:
    """The time from the end of the book until `end`, split by phases; the rest is `base`. The inner one of nested phases counts."""
    begin = book.booked
    if end <= begin:
        return []
    inside = [
        (
            max(mark.begin_ns / 1e9, begin),
            min(mark.end_ns / 1e9 if mark.end_ns else end, end),
            state_of(mark.name),
        )
        for mark in phases
        if mark.name != GC and mark.begin_ns / 1e9 < end and (not mark.end_ns or mark.end_ns / 1e9 > begin)
    ]
    if not inside:
        return [Stretch(book.rank, begin, end, base)]
    edges = sorted({begin, end, *(edge for low, high, _ in inside for edge in (low, high))})
    found: list[Stretch] = []
    for low, high in itertools.pairwise(edges):
        over = [(began, state) for began, until, state in inside if began <= low and until >= high]
        state = max(over)[1] if over else base
        if found and found[-1].state == state:
            found[-1] = replace(found[-1], end=high)
        else:
            found.append(Stretch(book.rank, low, high, state))
    return found


def resolve(stretch: Stretch, outages: Sequence[Outage], over: bool = False) -> list[Stretch]:
    """The stretch, split where an incident explains a part of it. `over`: it is the rank's last stretch."""
    ended = stretch.state in (LOST, DOWN)
    if not ended and stretch.state not in (USEFUL, REPEATED):
        return [stretch]
    near = NEAR_S if ended else 0.0
    found = [one for one in outages if one.overlap(stretch.begin - near, stretch.end + near) > 0]
    cause = max(found, key=lambda one: one.overlap(stretch.begin, stretch.end), default=None)
    if ended:
        otherwise = REPEATED if stretch.state == LOST else IDLE if over else STARTING
        return [replace(stretch, state=f"{STALLED}:{cause.id}" if cause is not None else otherwise)]
    if cause is None:
        return [stretch]
    lost = min(stretch.end - stretch.begin - stretch.usual_s, cause.overlap(stretch.begin, stretch.end))
    middle = stretch.end - max(lost, 0.0)
    stalled = replace(stretch, begin=middle, state=f"{STALLED}:{cause.id}", usual_s=0.0)
    return [part for part in (replace(stretch, end=middle), stalled) if part.end > part.begin]
