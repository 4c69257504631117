"""Knows a standstill by evidence: nobody makes progress for longer than this job's own history allows.

Pure: samples and the clock come in, a suspicion and its reason go out. A suspicion is not yet a hang: the
agent looks at stacks and CPU next, since a slow rank (compiling, evaluating, saving) also stands still.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from allranks.agent.sample import RankSample


@dataclass(frozen=True)
class NoticeOptions:
    """How long silence must last. The limit adapts to the job between `floor_s` and `cap_s`."""

    floor_s: float = 10.0
    cap_s: float = 300.0
    factor: float = 4.0  # times the longest silence that the job has recovered from lately
    warm_up_s: float = 60.0  # limit before the job has a history: first steps, compilation
    warm_up_marks: int = 20  # steps or completed calls of a rank that make a history
    memory: int = 64  # silences remembered per rank

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.cap_s:
            raise ValueError(f"floor_s ({self.floor_s}) must be positive and not above cap_s ({self.cap_s})")


@dataclass(frozen=True)
class RankHistory:
    """One rank as the agent has seen it. Seconds are of the agent's monotonic clock."""

    pid: int
    mark: tuple[int, int, int]
    changed_s: float
    changes: int = 0  # steps or completed calls seen
    silences_s: tuple[float, ...] = ()


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
        known = ranks.get(sample.rank)
        if known is None or known.pid != sample.pid:
            ranks[sample.rank] = RankHistory(sample.pid, sample.mark, now_s)
        elif known.mark != sample.mark:
            silence = now_s - known.changed_s
            # start-up is slower than anything later: it would make the job look slow for ever
            settled = known.changes >= options.warm_up_marks
            silences = known.silences_s if settled else ()
            if settled and known.changed_s >= state.cured_s:
                silences = (*silences, silence)[-options.memory :]
            gained = max(1, sample.step - known.mark[0], sample.calls_completed - known.mark[2])
            ranks[sample.rank] = RankHistory(sample.pid, sample.mark, now_s, known.changes + gained, silences)
            excused = 0
    present = {sample.rank for sample in samples}
    return replace(state, ranks={r: h for r, h in ranks.items() if r in present}, excused=excused)


def limit_s(state: NoticeState, options: NoticeOptions) -> float:
    """How long this job may be silent before we look closer."""
    histories = [h for h in state.ranks.values() if h.changes >= options.warm_up_marks]
    if not histories:  # a replica that has just been restarted does not make the others slow
        base = max(options.floor_s, options.warm_up_s)
    else:
        longest = max((max(h.silences_s) for h in histories if h.silences_s), default=0.0)
        base = max(options.floor_s, options.factor * longest)
    return min(options.cap_s, base * (1 + state.excused / 2))


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


def _own_limit_s(known: RankHistory, options: NoticeOptions) -> float:
    """By the rank's own history: the others' was lengthened when they waited for it in vain."""
    if known.changes < options.warm_up_marks:
        return options.cap_s
    return min(options.cap_s, max(options.floor_s, options.factor * max(known.silences_s, default=0.0)))


def cure(state: NoticeState, now_s: float) -> NoticeState:
    """After an action: the silence that it ends does not make the job look slow from now on."""
    return replace(state, cured_s=now_s)


def excuse(state: NoticeState, now_s: float, options: NoticeOptions) -> NoticeState:
    """After a look that did not settle it: be patient for half a limit more, each time."""
    return replace(state, excused=state.excused + 1, allowed_until_s=now_s)
