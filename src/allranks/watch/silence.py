"""Notices that a job makes no progress for longer than its own history allows.

Progress is a committed step in replica mode, where steps are retried, else a step mark or a completed call. Its usual duration
is known from earlier steps, or from earlier calls at the same place (watch/samples.py), so hangs of programs without marks are
noticed equally early. For a rank with marks, collectives that continue for minutes inside one step are not progress. Pure,
except for `ProgressHistory`: samples and the clock in, a suspicion and its reason out. A suspicion is not yet a hang: the
agent inspects stacks and CPU next, since a rank that compiles, evaluates or saves also stalls.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from allranks.model.options import option
from allranks.watch.samples import (
    ProcessId,
    RankSample,
    Rhythm,
    contradict,
    elsewhere,
    is_stopped,
    read_rhythm,
)

MANAGER_TIMEOUT_S = 60.0  # `retry_s` of replica mode unless the job sets another
FIRST_LOOK, SECOND_LOOK = 0.7, 0.85  # of `retry_s`: both inspections see the calls that wait for the hang
MIN_SILENCES = 3  # with fewer, one pause would be the usual length
TRAINED = 3  # changes after which a replica has loaded its state and made a step
OUTLIER_FACTOR = 2.0  # times the longest silence that has ended lately
MEMORY = 64  # silences kept per rank


@dataclass(frozen=True)
class NoticeOptions:
    """How long silence must last. The limit adapts to the job between `floor_s` and `cap_s`."""

    floor_s: float = option(
        10.0, "never investigate a silence shorter than this", unit="s", above=0, key="hang_floor_s"
    )
    cap_s: float = option(
        300.0, "always investigate one longer than this", unit="s", above=0, key="hang_cap_s"
    )
    factor: float = 4.0  # times the usual silences of this job
    warm_up_s: float = option(
        60.0,
        "allowed before the job has a history: first steps, compilation",
        unit="s",
        above=0,
        key="startup_s",
    )
    warm_up_marks: int = 20  # steps or completed calls of a rank that make a history
    asked: bool = (
        False  # floor_s was set by the user: it holds from the first step or call, also after a pause
    )
    retry_s: float | None = None  # time after which a collective is aborted and its step retried; None: never

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.cap_s:
            raise ValueError(f"floor_s ({self.floor_s}) must be positive and not above cap_s ({self.cap_s})")

    def progress(self, sample: RankSample) -> tuple[int, int, int]:
        """Progress of the rank: any change counts. Calls of a step that is retried do not."""
        by_step = self.retry_s is not None and sample.step >= 0
        return (sample.step, 0, 0) if by_step else sample.mark


@dataclass(frozen=True)
class RankHistory:
    """One rank's progress over time. Seconds are of the agent's monotonic clock."""

    process: ProcessId
    mark: tuple[int, int, int]
    changed_s: float
    changes: int = 0  # steps or completed calls seen
    silences_s: tuple[float, ...] = ()
    marked_ns: int = 0  # epoch: of the step mark; a later mark of the same step is another attempt
    stepped_s: float = 0.0  # last change of the step
    steps_s: tuple[float, ...] = ()  # durations between step marks

    @property
    def begun(self) -> bool:
        """Whether the rank has reached its first step or call."""
        return self.mark[0] >= 0 or self.mark[1] > 0

    @property
    def connects(self) -> bool:
        """Whether the rank is in its first call, which makes NCCL's connections and may take long in a large job."""
        return self.mark[0] < 0 and self.mark[1] > 0 and self.mark[2] == 0

    def after(self, sample: RankSample, now_s: float, acted_s: float, options: NoticeOptions) -> RankHistory:
        """The history after one more change of the mark."""
        mark, steps_s, stepped_s = options.progress(sample), self.steps_s, self.stepped_s
        if mark[0] != self.mark[0]:
            steps_s = (*steps_s, now_s - stepped_s)[-MEMORY:] if self.mark[0] >= 0 else ()
            stepped_s = now_s
        # start-up is slower than later steps and would raise the limit for good
        settled = self.changes >= options.warm_up_marks
        silences = self.silences_s if settled else ()
        if settled and self.changed_s >= acted_s:
            silences = (*silences, now_s - self.changed_s)[-MEMORY:]
        changes = self.changes + max(1, mark[0] - self.mark[0], mark[2] - self.mark[2])
        return RankHistory(self.process, mark, now_s, changes, silences, sample.step_ns, stepped_s, steps_s)


@dataclass(frozen=True)
class Suspicion:
    """A possible stall of the job."""

    since_s: float  # monotonic time of the last progress
    quiet_s: float
    limit_s: float
    quiet: tuple[int, ...]  # ranks alive, without progress
    gone: tuple[int, ...] = ()  # ranks whose process exited without shutting down
    left: tuple[int, ...] = ()  # ranks that shut down
    reason: str = ""
    by_step: bool = False  # collectives are completed, steps are not


@dataclass(frozen=True)
class NoticeState:
    """The state of the detector between two samples."""

    ranks: dict[int, RankHistory] = field(default_factory=dict)
    extended: int = 0  # inspections in a row without a result
    acted_s: float = 0.0  # last action; a silence that it ended does not count as usual
    diverged: bool = False  # calls of these processes differ, so a silence is not usual


def observe(
    now_s: float, state: NoticeState, samples: list[RankSample], options: NoticeOptions
) -> NoticeState:
    """The state after one more sample of the ranks."""
    ranks: dict[int, RankHistory] = {}
    extended, diverged = state.extended, state.diverged
    for sample in samples:
        known, mark = state.ranks.get(sample.rank), options.progress(sample)
        if known is None or known.process != sample.process:
            known = RankHistory(sample.process, mark, now_s, marked_ns=sample.step_ns, stepped_s=now_s)
            diverged = False
        elif known.mark != mark:
            known, extended = known.after(sample, now_s, state.acted_s, options), 0
        ranks[sample.rank] = known
    return replace(state, ranks=ranks, extended=extended, diverged=diverged)


def limit_s(state: NoticeState, options: NoticeOptions, rhythms: Sequence[Rhythm] = ()) -> float:
    """How long this job may be silent before it is inspected. `rhythms` are of the places where its ranks are now."""
    histories = [h for h in state.ranks.values() if h.changes >= options.warm_up_marks]
    silences = [h.silences_s for h in histories if h.silences_s]
    usual = max((statistics.median(s) for s in silences if len(s) >= MIN_SILENCES), default=0.0)
    base = max((_allowed_s(s, options) for s in silences), default=options.floor_s)
    # a restarted rank does not raise the limit of the others
    if not histories or not _history_applies(state, rhythms):
        base = _young_limit_s(base, state, options, rhythms)
    if state.diverged or contradict(rhythms):
        base = options.floor_s
    limit = min(base, _before_retry_s(FIRST_LOOK, usual, options)) * (1 + _extension(state.extended))
    if state.extended == 1:
        limit = min(limit, _before_retry_s(SECOND_LOOK, usual, options))
    return min(options.cap_s, limit)


def _extension(times: int) -> float:
    """Extension of the limit, as a share: the second inspection comes soon, later ones half a limit apart."""
    return 0.25 if times == 1 else max(0, times - 1) / 2


def _history_applies(state: NoticeState, rhythms: Sequence[Rhythm]) -> bool:
    """Whether the history applies at the present place: the ranks have marks, or one of them has been there before."""
    marked = any(h.mark[0] >= 0 for h in state.ranks.values())
    return marked or not rhythms or any(rhythm.known for rhythm in rhythms)


def _young_limit_s(
    base_s: float, state: NoticeState, options: NoticeOptions, rhythms: Sequence[Rhythm]
) -> float:
    """The limit without a history that applies: by earlier passes of the same place, else the limit of a first step."""
    known = [rhythm.pauses_s for rhythm in rhythms if rhythm.known]
    if known:
        return max(_allowed_s(pauses, options) for pauses in known)
    begun = any(h.begun for h in state.ranks.values())
    if options.asked and begun and not _connecting(state, rhythms):
        return base_s
    return max(base_s, options.warm_up_s)


def _connecting(state: NoticeState, rhythms: Sequence[Rhythm]) -> bool:
    """Whether all ranks may be connecting in their first call: all members of its group have entered it."""
    if rhythms and (elsewhere(rhythms) or not any(rhythm.connects for rhythm in rhythms)):
        return False
    return all(h.connects for h in state.ranks.values())


def _allowed_s(silences: Sequence[float], options: NoticeOptions) -> float:
    """The limit by usual silences and, unless the user has set a limit, by the longest silence that ended."""
    ordered = sorted(silences) or [0.0]
    if options.asked:  # a single pause is not usual
        ordered = ordered[:-1] or [0.0]
    usual, longest = ordered[(len(ordered) - 1) * 9 // 10], ordered[-1]
    outlier = 0.0 if options.asked else OUTLIER_FACTOR * longest
    return max(options.floor_s, options.factor * usual, outlier)


def _before_retry_s(share: float, usual_s: float, options: NoticeOptions) -> float:
    """The latest time of an inspection in replica mode: the other ranks reach the collective after a usual step and abort it
    `retry_s` later, and the evidence is gone."""
    if options.retry_s is None:
        return options.cap_s
    return max(options.floor_s * (1 if share == FIRST_LOOK else 1.5), usual_s + share * options.retry_s)


def notice(
    now_s: float,
    now_ns: int,
    state: NoticeState,
    samples: list[RankSample],
    options: NoticeOptions,
    rhythm: Callable[[str], Rhythm] | None = None,
) -> tuple[Suspicion | None, str]:
    """A suspicion if the job stalls, and the reason for the decision. `rhythm` reads a rank's black box."""
    running = [s for s in samples if s.alive and not s.closed and s.rank in state.ranks]
    if not running:
        return None, "no rank runs"
    expecting = [s.rank for s in running if s.expect_until_ns > now_ns]
    if expecting:
        return None, f"rank {expecting[0]} has announced a long phase"
    if len(running) == 1 and not running[0].takes_part:
        return (
            None,
            f"rank {running[0].rank} is alone, without a group or a step: it only starts other processes",
        )
    present = {s.rank: state.ranks[s.rank] for s in running}  # finished ranks do not count
    silent, reason = _silent(now_s, replace(state, ranks=present), running, options, rhythm)
    if silent is not None:
        gone = tuple(s.rank for s in samples if not s.alive and not s.closed)
        left = tuple(s.rank for s in samples if s.closed)
        reason += f"; gone: {list(gone)}" if gone else ""
        silent = replace(silent, gone=gone, left=left, reason=reason)
    found = silent or _looping(now_s, present, options)
    return found, reason if found is None else found.reason


def _silent(
    now_s: float,
    state: NoticeState,
    running: list[RankSample],
    options: NoticeOptions,
    rhythm: Callable[[str], Rhythm] | None,
) -> tuple[Suspicion | None, str]:
    """A suspicion if there were neither steps nor calls for longer than the limit."""
    last = _last_progress_s(state, list(state.ranks.values()))
    quiet_s = now_s - last
    if quiet_s < options.floor_s:
        return None, f"last progress {quiet_s:.1f} s ago"
    limit = limit_s(state, options, [rhythm(s.path) for s in running] if rhythm is not None else ())
    if any(h.changes == 0 and h.changed_s > last for h in state.ranks.values()):
        # a new process may import and heal, but the others continue without it after `retry_s`
        limit = max(limit, min(options.warm_up_s, _before_retry_s(FIRST_LOOK, 0.0, options)))
    if quiet_s < limit:
        return None, f"last progress {quiet_s:.1f} s ago, within the {limit:.1f} s that this job may take"
    reason = f"no rank has made progress for {quiet_s:.1f} s; this job's history allows {limit:.1f} s"
    return Suspicion(last, quiet_s, limit, tuple(state.ranks), reason=reason), reason


def _looping(now_s: float, present: dict[int, RankHistory], options: NoticeOptions) -> Suspicion | None:
    """A suspicion if ranks with steps complete collectives but no step for minutes: a loop inside one step."""
    marked = {r: h for r, h in present.items() if h.mark[0] >= 0 and len(h.steps_s) >= TRAINED}
    if not marked or options.retry_s is not None:
        return None  # in replica mode calls never count
    since = max(h.stepped_s for h in marked.values())
    limit = max(options.cap_s, *(_allowed_s(h.steps_s, options) for h in marked.values()))
    if now_s - since < limit:
        return None
    step = max(h.mark[0] for h in marked.values())
    reason = (
        f"no step has ended for {now_s - since:.0f} s although collectives are completed: the ranks loop inside step "
        f"{step}, or a long phase was not announced (allranks.expect); the limit is {limit:.0f} s"
    )
    return Suspicion(since, now_s - since, limit, tuple(marked), reason=reason, by_step=True)


def _last_progress_s(state: NoticeState, histories: list[RankHistory]) -> float:
    """Time of the last progress. The start of a process is not progress of the ranks that wait for it; an action counts."""
    moved = [h.changed_s for h in histories if h.changes]
    if not moved:
        return max(h.changed_s for h in histories)
    return max(*moved, state.acted_s) if state.acted_s else max(moved)


def left_behind(
    now_s: float,
    now_ns: int,
    state: NoticeState,
    samples: list[RankSample],
    options: NoticeOptions,
    stalled: Collection[ProcessId] = (),
    stopped: Callable[[int], bool] = lambda pid: False,
) -> tuple[Suspicion | None, str]:
    """A suspicion if a rank makes no progress while the others continue without it, in replica mode.

    A replica that starts or heals is not left behind: the rank must have trained before, or the others have waited for it
    without success (`stalled`), or its process is `stopped`. It must be more than one step back, since a rank that has
    finished its last step is done.
    """
    running = [s for s in samples if s.alive and not s.closed and s.rank in state.ranks]
    general = limit_s(replace(state, extended=0), options)
    ahead = max((s.step for s in running if now_s - state.ranks[s.rank].changed_s < general), default=-1)
    behind: list[tuple[RankSample, float]] = []
    for sample in running:
        if ahead <= sample.step + 1 or sample.expect_until_ns > now_ns:
            continue
        known = state.ranks[sample.rank]
        patience = _own_limit_s(known, options)
        young = known.changes < TRAINED
        if (sample.step >= 0 and sample.process in stalled) or (young and stopped(sample.pid)):
            patience = min(patience, options.floor_s)
        if now_s - known.changed_s >= patience:
            behind.append((sample, patience))
    if not behind:
        return None, "no rank is left behind"
    first, limit = behind[0]
    since = state.ranks[first.rank].changed_s
    reason = (
        f"rank {first.rank} has made no progress for {now_s - since:.1f} s and is at step {first.step}; "
        f"the others continue without it and are at step {ahead}"
    )
    return Suspicion(since, now_s - since, limit, tuple(s.rank for s, _ in behind), reason=reason), reason


def not_retrying(state: NoticeState, samples: list[RankSample]) -> tuple[int, ...]:
    """Ranks that have not retried their step after a regroup, while others have."""
    running = [s for s in samples if s.alive and not s.closed and s.step >= 0 and s.rank in state.ranks]
    again = {s.rank for s in running if s.step_ns > state.ranks[s.rank].marked_ns}
    return tuple(s.rank for s in running if s.rank not in again) if again else ()


def _own_limit_s(known: RankHistory, options: NoticeOptions) -> float:
    """The limit by the rank's own history, since the others' includes their waits for it."""
    if known.changes < TRAINED:
        return options.cap_s
    if known.changes < options.warm_up_marks and not options.asked:
        return min(options.cap_s, max(options.floor_s, options.warm_up_s))
    return min(options.cap_s, _allowed_s(known.silences_s, options))


def longest_pause(silences_s: Sequence[float], rhythms: Sequence[Rhythm]) -> float:
    """The longest silence that was watched or recorded by ranks. A recorded one must have occurred twice at its place, since a
    clock that is set forward also makes one."""
    return max(
        (*silences_s, *(sorted(rhythm.pauses_s)[-2] for rhythm in rhythms if rhythm.known)), default=0.0
    )


@dataclass
class ProgressHistory:
    """A `NoticeState` under a lock, for the watch's and the examining thread; `now_s` is monotonic."""

    options: NoticeOptions
    _state: NoticeState = field(default_factory=NoticeState)
    _rhythms: dict[str, tuple[tuple[object, ...], Rhythm]] = field(default_factory=dict)  # path -> (mark, …)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began_s: float | None = None
    started_in_s: float = 0.0  # until the first progress, which is the cost of a restart; 0: not known

    def observe(self, now_s: float, samples: list[RankSample]) -> None:
        with self._lock:
            self._state = observe(now_s, self._state, samples, self.options)
        self._began_s = now_s if self._began_s is None else self._began_s
        if not self.started_in_s and any(history.changes for history in self._state.ranks.values()):
            self.started_in_s = now_s - self._began_s

    def standstill(self, now_s: float, samples: list[RankSample]) -> Suspicion | None:
        """A suspicion if no rank makes progress."""
        marks = {sample.path: (*sample.mark, sample.joined) for sample in samples}

        def rhythm(path: str) -> Rhythm:
            """Read again only after progress: a hang may last for hours."""
            known = self._rhythms.get(path)
            if known is None or known[0] != marks[path]:
                known = self._rhythms[path] = (marks[path], read_rhythm(path) if path else Rhythm())
            return known[1]

        return notice(now_s, time.time_ns(), self._state, samples, self.options, rhythm)[0]

    def left_behind(
        self, now_s: float, samples: list[RankSample], stalled: Collection[ProcessId] = ()
    ) -> Suspicion | None:
        """A suspicion if some ranks make no progress while others do."""
        return left_behind(now_s, time.time_ns(), self._state, samples, self.options, stalled, is_stopped)[0]

    def not_retrying(self, samples: list[RankSample]) -> tuple[int, ...]:
        return not_retrying(self._state, samples)

    def extend_deadline(self, times: int = 1) -> None:
        """Raises the limit after an inspection without a result, each time further."""
        with self._lock:
            self._state = replace(self._state, extended=self._state.extended + times)

    def note_divergence(self) -> None:
        """Calls of the ranks differ: the next silence is inspected early."""
        with self._lock:
            self._state = replace(self._state, diverged=True)

    def mark_resumed(self) -> None:
        """An action ends this silence, which does not count as usual."""
        with self._lock:
            self._state = replace(self._state, acted_s=time.monotonic())

    @property
    def longest_s(self) -> float:
        """The longest pause that ended, of the job and of the places where its ranks are."""
        silences = [s for history in self._state.ranks.values() for s in history.silences_s]
        return longest_pause(silences, [rhythm for _, rhythm in self._rhythms.values()])

    @property
    def trained(self) -> bool:
        """Whether a rank has made steps, or many calls."""
        many = 10 * self.options.warm_up_marks
        histories = self._state.ranks.values()
        return any(h.changes >= (TRAINED if h.mark[0] >= 0 else many) for h in histories)

    @property
    def moves(self) -> bool:
        """Whether the job has made progress since the limit was extended."""
        return self._state.extended == 0
