"""Knows a standstill by evidence: nobody makes progress for longer than this job's own history allows.

Progress is a committed step where steps are tried again (replica mode), else a step mark or a completed call. Pure: samples and the clock come in, a suspicion and its reason go out. A suspicion is not yet a hang: the
agent looks at stacks and CPU next, since a slow rank (compiling, evaluating, saving) also stands still.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

from allranks.watch.samples import RankSample

MANAGER_TIMEOUT_S = 60.0  # `retry_s` of replica mode unless the job sets another
FIRST_LOOK, SECOND_LOOK = 0.7, 0.85  # of `retry_s`: both looks at a hang see the calls that wait for it
BEGUN = 2  # changes: one when the first step begins, one when it is done
TRAINED = 3  # changes: a replica that joined has loaded its state and then made a step


@dataclass(frozen=True)
class NoticeOptions:
    """How long silence must last. The limit adapts to the job between `floor_s` and `cap_s`."""

    floor_s: float = 10.0
    cap_s: float = 300.0
    factor: float = 4.0  # times the longest silence that the job has recovered from lately
    warm_up_s: float = 60.0  # limit before the job has a history: first steps, compilation
    warm_up_marks: int = 20  # steps or completed calls of a rank that make a history
    memory: int = 64  # silences remembered per rank
    first_steps_s: float | None = None  # limit between the first step and a history; None: warm_up_s
    retry_s: float | None = (
        None  # ranks give a collective up after this long and try the step again; None: never
    )

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.cap_s:
            raise ValueError(f"floor_s ({self.floor_s}) must be positive and not above cap_s ({self.cap_s})")

    def progress(self, sample: RankSample) -> tuple[int, int, int]:
        """What must change for the rank to have made progress: calls of a step that is tried again are none."""
        by_step = self.retry_s is not None and sample.step >= 0
        return (sample.step, 0, 0) if by_step else sample.mark


@dataclass(frozen=True)
class RankHistory:
    """One rank as the agent has seen it. Seconds are of the agent's monotonic clock."""

    pid: int
    mark: tuple[int, int, int]
    changed_s: float
    changes: int = 0  # steps or completed calls seen
    silences_s: tuple[float, ...] = ()
    marked_ns: int = (
        0  # epoch: the rank's own time of the mark; a later one of the same step is another attempt
    )


@dataclass(frozen=True)
class Suspicion:
    """The job seems to stand still."""

    since_s: float  # monotonic time of the last progress
    quiet_s: float
    limit_s: float
    quiet: tuple[int, ...]  # ranks alive, without progress
    gone: tuple[int, ...] = ()  # ranks whose process is gone without a goodbye
    left: tuple[int, ...] = ()  # ranks that said goodbye
    reason: str = ""


@dataclass(frozen=True)
class NoticeState:
    """All that `notice` remembers between two looks."""

    ranks: dict[int, RankHistory] = field(default_factory=dict)
    allowed_until_s: float = 0.0  # silence is excused until then (after "slow, not hung")
    excused: int = 0  # looks in a row that did not settle it; each adds half a limit
    cured_s: float = (
        0.0  # of the last action: a silence that began before it was ended by it and proves nothing
    )


def observe(
    now_s: float, state: NoticeState, samples: list[RankSample], options: NoticeOptions
) -> NoticeState:
    """The state after one more look at the ranks."""
    ranks = dict(state.ranks)
    excused = state.excused
    for sample in samples:
        known, mark = ranks.get(sample.rank), options.progress(sample)
        if known is None or known.pid != sample.pid:
            ranks[sample.rank] = RankHistory(sample.pid, mark, now_s, marked_ns=sample.step_ns)
        elif known.mark != mark:
            silence = now_s - known.changed_s
            # start-up is slower than anything later: it would make the job look slow for ever
            settled = known.changes >= options.warm_up_marks
            silences = known.silences_s if settled else ()
            if settled and known.changed_s >= state.cured_s:
                silences = (*silences, silence)[-options.memory :]
            changes = known.changes + max(1, mark[0] - known.mark[0], mark[2] - known.mark[2])
            ranks[sample.rank] = RankHistory(sample.pid, mark, now_s, changes, silences, sample.step_ns)
            excused = 0
    present = {sample.rank for sample in samples}
    return replace(state, ranks={r: h for r, h in ranks.items() if r in present}, excused=excused)


def limit_s(state: NoticeState, options: NoticeOptions) -> float:
    """How long this job may be silent before we look closer."""
    histories = [h for h in state.ranks.values() if h.changes >= options.warm_up_marks]
    longest = usual = 0.0
    if histories:  # a replica that has just been restarted does not make the others slow
        longest = max((max(h.silences_s) for h in histories if h.silences_s), default=0.0)
        usual = max((statistics.median(h.silences_s) for h in histories if h.silences_s), default=0.0)
        base = max(options.floor_s, options.factor * longest)
    else:
        begun = any(h.changes >= BEGUN for h in state.ranks.values())
        base = max(options.floor_s, _first_steps_s(options) if begun else options.warm_up_s)
    limit = min(base, _before_retry_s(FIRST_LOOK, usual, options)) * (1 + state.excused / 2)
    if state.excused == 1:
        limit = min(limit, _before_retry_s(SECOND_LOOK, usual, options))
    return min(options.cap_s, limit)


def _first_steps_s(options: NoticeOptions) -> float:
    return options.warm_up_s if options.first_steps_s is None else options.first_steps_s


def _before_retry_s(share: float, usual_s: float, options: NoticeOptions) -> float:
    """The others reach the collective after a usual step, wait there for `retry_s`, and what they show is gone."""
    if options.retry_s is None:
        return options.cap_s
    return max(options.floor_s * (1 if share == FIRST_LOOK else 1.5), usual_s + share * options.retry_s)


def notice(
    now_s: float, now_ns: int, state: NoticeState, samples: list[RankSample], options: NoticeOptions
) -> tuple[Suspicion | None, str]:
    """Whether the job stands still, and why we think so (or why not)."""
    running = [s for s in samples if s.alive and not s.closed]
    if not running:
        return None, "no rank runs"
    expecting = [s.rank for s in running if s.expect_until_ns > now_ns]
    if expecting:
        return None, f"rank {expecting[0]} has announced a long phase"
    present = {s.rank for s in running}  # those who have finished say nothing about those who start
    limit = limit_s(replace(state, ranks={r: h for r, h in state.ranks.items() if r in present}), options)
    last = max(state.ranks[s.rank].changed_s for s in running if s.rank in state.ranks)
    quiet_s = now_s - last
    if now_s < state.allowed_until_s:
        return None, "silence is excused for now"
    if quiet_s < limit:
        return None, f"last progress {quiet_s:.1f} s ago, within the {limit:.1f} s that this job may take"
    gone = tuple(s.rank for s in samples if not s.alive and not s.closed)
    left = tuple(s.rank for s in samples if s.closed)
    quiet = tuple(s.rank for s in running)
    reason = f"no rank has made progress for {quiet_s:.1f} s; this job's history allows {limit:.1f} s" + (
        f"; gone: {list(gone)}" if gone else ""
    )
    return Suspicion(last, quiet_s, limit, quiet, gone, left, reason), reason


def left_behind(
    now_s: float, now_ns: int, state: NoticeState, samples: list[RankSample], options: NoticeOptions
) -> tuple[Suspicion | None, str]:
    """A rank that stands still while the others train on without it, in replica mode: frozen and given up.

    It must have trained before (a replica that starts or heals is not behind but on its way) and stand more than
    one step back (one that has finished its last step waits for nobody).
    """
    running = [s for s in samples if s.alive and not s.closed and s.rank in state.ranks]
    general = limit_s(replace(state, excused=0), options)
    ahead = max((s.step for s in running if now_s - state.ranks[s.rank].changed_s < general), default=-1)
    behind = []
    for sample in running:
        known = state.ranks[sample.rank]
        patience = _own_limit_s(known, options)
        late = now_s - known.changed_s >= patience
        if late and ahead > sample.step + 1 and sample.expect_until_ns <= now_ns:
            behind.append(sample)
    if not behind:
        return None, "nobody is left behind"
    first = behind[0]
    since = state.ranks[first.rank].changed_s
    reason = (
        f"rank {first.rank} has made no progress for {now_s - since:.1f} s and stands at step {first.step}; "
        f"the others go on without it and are at step {ahead}"
    )
    limit = _own_limit_s(state.ranks[first.rank], options)
    return Suspicion(since, now_s - since, limit, tuple(s.rank for s in behind), reason=reason), reason


def not_retrying(state: NoticeState, samples: list[RankSample]) -> tuple[int, ...]:
    """After a regroup without a committed step: ranks that have not begun another attempt, while others have."""
    running = [s for s in samples if s.alive and not s.closed and s.step >= 0 and s.rank in state.ranks]
    again = {s.rank for s in running if s.step_ns > state.ranks[s.rank].marked_ns}
    return tuple(s.rank for s in running if s.rank not in again) if again else ()


def _own_limit_s(known: RankHistory, options: NoticeOptions) -> float:
    """By the rank's own history: the others' was lengthened when they waited for it in vain."""
    if known.changes < TRAINED:
        return options.cap_s
    if known.changes < options.warm_up_marks:
        return min(options.cap_s, max(options.floor_s, _first_steps_s(options)))
    return min(options.cap_s, max(options.floor_s, options.factor * max(known.silences_s, default=0.0)))


def cure(state: NoticeState, now_s: float) -> NoticeState:
    """After an action: the silence that it ends does not make the job look slow from now on."""
    return replace(state, cured_s=now_s)


def excuse(state: NoticeState, now_s: float, options: NoticeOptions) -> NoticeState:
    """After a look that did not settle it: be patient for half a limit more, each time."""
    return replace(state, excused=state.excused + 1, allowed_until_s=now_s)
