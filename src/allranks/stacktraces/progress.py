"""Stuck, slow or moving? Only progress marks can tell; stacks alone cannot. Pure.

With times (our bundles, or captures whose file times are genuine) a rank has stalled when its last mark is
older than `still_s` and several times its own longest gap between marks. Without times the snapshots must
show whether anything moved after the last mark: a rank that waits in a collective on the same futex, with
the same frames and no CPU tick spent, has not finished one in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from allranks.model.formatting import count
from allranks.model.stacks import WAITS, RankMarks, StackFrame
from allranks.stacktraces.causes import Cause
from allranks.stacktraces.views import ProcessView, ThreadView, has_run, line_of, user_frame


@dataclass(frozen=True)
class Stillness:
    """When silence counts as standing still."""

    still_s: float = 10.0
    gaps: float = 3.0  # times the longest gap between two marks of the rank


@dataclass(frozen=True)
class HangDecision:
    """Whether the job hangs, None when nothing tells, and why."""

    hung: bool | None
    reason: str


def decide_progress(
    marks: Mapping[int, RankMarks],
    views: Mapping[int, ProcessView],
    causes: Mapping[int, Cause],
    stillness: Stillness,
) -> HangDecision:
    """Whether the job is hung, and the reason as a sentence."""
    marked = {rank: one for rank, one in marks.items() if one.marks or one.seen_s is not None}
    if not marked:
        return HangDecision(None, "there are no progress marks")
    timed = {rank: _by_clock(one, stillness) for rank, one in marked.items() if one.seen_s is not None}
    if timed:
        return _join_timed(timed, marked, stillness)
    return _by_snapshots(marked, views, causes)


def decide_by_movement(
    views: Mapping[int, ProcessView], causes: Mapping[int, Cause], seconds: float
) -> HangDecision:
    """Without marks: what the main threads did between the first and the last look. Stacks, CPU time and context switches
    that all stayed the same are a stall; a wait that ended, or another line, is progress."""
    mains = {
        rank: view.main for rank, view in views.items() if view.main is not None and len(view.main.facts) > 1
    }
    if not mains or len(mains) < len(views) or seconds < SHORT_S:
        return HangDecision(
            None, "there are no progress marks, and not all ranks could be watched for some seconds"
        )
    lines = {rank: {_user_line(path) for path in main.paths} for rank, main in mains.items()}
    if moved := sorted(rank for rank, seen in lines.items() if len(seen) > 1):
        return HangDecision(False, f"rank {moved[0]} went to another line between the looks")
    woken = [
        rank
        for rank, main in mains.items()
        if causes[rank].cause in WAITS and not main.busy and has_run(main)
    ]
    asks = [rank for rank in woken if causes[rank].cause in _POLLS]
    if woken := sorted(set(woken) - set(asks)):
        return HangDecision(False, f"rank {min(woken)} finished what it waited for between the looks")
    others = {rank: main for rank, main in mains.items() if causes[rank].cause not in WAITS}
    ends = {
        rank: main.now.left_s
        for rank, main in others.items()
        if main.now is not None and main.now.left_s is not None
    }
    if soon := {rank: left for rank, left in ends.items() if left <= SOON_S}:
        rank = min(soon)
        return HangDecision(
            None, f"rank {rank} sleeps, and wakes up in {max(0.0, soon[rank]):.0f} s: look again then"
        )
    if works := sorted(rank for rank, main in others.items() if main.busy or has_run(main)):
        return HangDecision(
            None, f"rank {works[0]} works on the same line for {seconds:.0f} s: look longer, --for 60"
        )
    if asks and seconds < SOON_S:
        return HangDecision(
            None,
            f"rank {asks[0]} asks again and again on the same line for {seconds:.0f} s: look longer, --for 60",
        )
    still = "and waits that only ask again" if asks else "no CPU time, no context switches"
    return HangDecision(True, f"no rank moved for {seconds:.0f} s: same lines, {still}")


SHORT_S = 2.0  # a shorter look tells nothing
SOON_S = 60.0
LONG_S = 300.0  # a computation that is silent for longer is taken for a loop
_WORK = ("busy_python", "native_call")
_POLLS = ("rendezvous_wait", "store_wait")  # such a wait may use CPU time without progress


def _user_line(path: tuple[StackFrame, ...]) -> tuple[str, int]:
    frame = user_frame(path)
    return (frame.file, line_of(frame)) if frame is not None else ("", 0)


def may_be_slow(
    culprits: Sequence[int],
    marks: Sequence[RankMarks],
    views: Mapping[int, ProcessView],
    causes: Mapping[int, Cause],
) -> str:
    """Why a silence proves nothing yet: all that the others wait for compute, look again and again for a change, or wait for
    the network."""
    silent = [one.seen_s - one.marks[-1].at_s for one in marks if one.marks and one.seen_s is not None]
    words: dict[int, str] = {}
    for rank in culprits:
        main, cause = views[rank].main, causes[rank].cause
        if main is not None and main.busy and cause in _WORK:
            words[rank] = "computes"
        elif main is not None and cause == "sleep" and has_run(main):
            words[rank] = "looks again and again for a change"
        elif cause == "network_io":
            words[rank] = "waits for the network"
    limit = LONG_S if "computes" in words.values() else SOON_S
    if not words or len(words) < len(culprits) or not silent or max(silent) >= limit:
        return ""
    rank, did = next(iter(words.items()))
    return f"the last progress was {max(silent):.0f} s ago, and rank {rank} {did}: look again later"


def decide_by_counts(decided: HangDecision, still_s: float | None, stillness: Stillness) -> HangDecision:
    """Where marks cannot tell: NCCL's operation counts, which stood still for `still_s` (0: they moved)."""
    if still_s is None:
        return decided
    if still_s == 0.0:
        return HangDecision(False, "NCCL's operation counts move")
    stood = f"stood still for {still_s:.0f} s"
    if still_s >= stillness.still_s:
        return HangDecision(True, f"NCCL's operation counts have differed and {stood}")
    return HangDecision(None, f"{decided.reason}; NCCL's operation counts {stood} between the looks")


def _by_clock(one: RankMarks, stillness: Stillness) -> bool | None:
    """True moving, False still, None too early to tell."""
    seen = one.seen_s or 0.0
    if one.closed:
        return True
    if not one.marks:
        return None
    times = [mark.at_s for mark in one.marks]
    age = seen - times[-1]
    if seen < one.expect_until_s:
        return None
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if age > _limit_s(one, stillness):
        return False
    recent = stillness.gaps * max(median(gaps), 0.05) if gaps else 0.0
    # Marks taken between the first and the last sample mean that the rank moved while we watched.
    return True if age <= recent or (len(times) > 1 and age < 1.0) else None


def _limit_s(one: RankMarks, stillness: Stillness) -> float:
    """So long a silence of this rank counts as a stall."""
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(one.marks)]
    # Not the longest: one long checkpoint must not blind us.
    usual = sorted(gaps)[int(0.95 * (len(gaps) - 1))] if gaps else 0.0
    return max(stillness.still_s, stillness.gaps * usual)


def _too_early(marked: Mapping[int, RankMarks], stillness: Stillness) -> str:
    """What is seen, and when it can be decided: a second after the first rank's silence is long enough."""
    seen = {rank: one.seen_s or 0.0 for rank, one in marked.items()}
    pauses = {rank: one.expect_until_s - seen[rank] for rank, one in marked.items()}
    declared = max(pauses, key=pauses.__getitem__)
    if pauses[declared] > 0:
        return f"rank {declared} declared a pause: ask again in {pauses[declared] + 1:.0f} s"
    ages = {rank: seen[rank] - one.marks[-1].at_s for rank, one in marked.items() if one.marks}
    if not ages:
        return "no rank has made progress yet: ask again in 10 s"
    limits = {rank: _limit_s(marked[rank], stillness) for rank in ages}
    first = min(ages, key=lambda rank: limits[rank] - ages[rank])
    left = max(1.0, limits[first] - ages[first] + 1)
    return (
        f"the last progress was {ages[first]:.0f} s ago, and silence is a hang after {limits[first]:.0f} s here: "
        f"ask again in {left:.0f} s"
    )


def _join_timed(
    timed: Mapping[int, bool | None], marked: Mapping[int, RankMarks], stillness: Stillness
) -> HangDecision:
    still = [rank for rank, moves in timed.items() if moves is False]
    moving = sum(1 for moves in timed.values() if moves)
    if still:
        ages = [(marked[rank].seen_s or 0.0) - marked[rank].marks[-1].at_s for rank in still]
        how = f"{len(still)} of {count(len(timed), 'rank')} made no progress for {max(ages):.0f} s"
        return HangDecision(True, how)
    if moving and moving == len(timed):
        return HangDecision(
            False, f"all {moving} ranks make progress" if moving > 1 else "the rank makes progress"
        )
    if moving and moving * 2 >= len(timed):
        how = f"{moving} of {len(timed)} ranks make progress, the others were heard lately"
        return HangDecision(False, how)
    return HangDecision(None, _too_early({rank: marked[rank] for rank in timed}, stillness))


def _by_snapshots(
    marked: Mapping[int, RankMarks], views: Mapping[int, ProcessView], causes: Mapping[int, Cause]
) -> HangDecision:
    """Without a clock: what moved between the snapshots?"""
    waiting, others, ticks = _movements(views, causes)
    if not waiting and not others:
        return HangDecision(None, "no time of the looks is known, and /proc was not read twice")
    if moved := [rank for rank, did in waiting.items() if did]:
        return HangDecision(False, f"rank {min(moved)} finished a collective between two snapshots")
    if ticks > 1:  # one may be the price of being looked at
        return HangDecision(False, f"the waiting ranks ran for {ticks} clock ticks between the snapshots")
    if waiting or all(how == "none" for how in others.values()):
        return HangDecision(True, "no rank got further between the snapshots, and the marks have ended")
    return _only_busy(marked, others)


def _movements(
    views: Mapping[int, ProcessView], causes: Mapping[int, Cause]
) -> tuple[dict[int, bool], dict[int, str], int]:
    """(whether the ranks that wait got further, how the others moved, clock ticks of the waiting) between the looks."""
    waiting: dict[int, bool] = {}
    others: dict[int, str] = {}
    ticks = 0
    for rank, view in views.items():
        main = view.main
        if main is None or len(main.facts) < 2:
            continue  # equal stacks alone prove nothing: a straggler shows them, too
        if causes[rank].cause in ("collective_wait", "p2p_wait"):
            waiting[rank] = _wait_moved(main)
            ticks += 0 if main.busy else main.ticks_moved or 0
        elif causes[rank].cause in WAITS:
            waiting[rank] = False  # these waits poll: other frames and CPU time are no progress
        else:
            others[rank] = _movement(main)
    return waiting, others, ticks


def _only_busy(marked: Mapping[int, RankMarks], others: Mapping[int, str]) -> HangDecision:
    """Nobody waits for anybody, and some rank spent CPU time: are they new steps or the same one?"""
    steps = {rank: len({mark.step for mark in one.marks}) for rank, one in marked.items()}
    if max(steps.values(), default=0) <= 1:
        return HangDecision(True, "no rank has finished its first step")
    if any(how != "heavy" for how in others.values()):
        return HangDecision(False, "the ranks step: frames or CPU time moved between the snapshots")
    return HangDecision(None, "busy on the same line in every snapshot, and no time of the looks is known")


def _wait_moved(main: ThreadView) -> bool:
    """Whether a waiting thread waits for something else than before."""
    if len(set(main.paths)) > 1:
        return True
    words = {fact.args[0] for fact in main.facts if fact.syscall == "futex" and fact.args}
    return len(words) > 1


def _movement(main: ThreadView) -> str:
    """`none`, `light` (a few ticks or other frames) or `heavy` (it ran the whole time on the same lines)."""
    if len(set(main.paths)) > 1:
        return "light"
    if main.busy:
        return "heavy"
    return "light" if (main.ticks_moved or 0) > 0 else "none"
