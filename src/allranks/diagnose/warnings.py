"""What is worth saying and nobody's fault: damaged and missing files, a slow rank, a tight timeout, pauses. Pure."""

from __future__ import annotations

import numpy as np

from allranks.diagnose.context import Context
from allranks.diagnose.job import GroupView, Job, Lane
from allranks.diagnose.ops import is_synchronising
from allranks.diagnose.phrasing import place, ranks_text, seconds, who
from allranks.diagnose.waits import Blocked, is_hung, is_paused
from allranks.model.diagnosis import Finding
from allranks.model.trace import State

WINDOW, MIN_COLLECTIVES, EXAMINED_GROUPS, EXAMINED_RANKS = 256, 10, 16, 128
_TIMED_OUT, _COMPLETED = int(State.TIMED_OUT), int(State.COMPLETED)
#: A timeout is tight when a call that finished took more than this share of it.
TIGHT = 0.5
MIN_LATE_S, LATE_SHARE, LAST_SHARE = 0.005, 0.25, 0.7


def find_warnings(
    context: Context, every: list[Blocked], damaged: frozenset[int], incomplete: bool, roots: list[Finding]
) -> list[Finding]:
    """All warnings. `every`: the unfinished calls, hung or not; `incomplete`: missing files are expected."""
    found = []
    if damaged:
        text = f"the file of {ranks_text(damaged)} is damaged: what could be read was used, and its end is not held against it"
        found.append(Finding("damaged_file", (), text))
    blamed = {rank for root in roots for rank in root.ranks}
    absent = [rank for rank in context.job.missing_ranks if rank not in blamed]
    if absent and not incomplete:
        found.append(Finding("missing_dump", (), f"no file of {ranks_text(absent)}"))
    slow = find_straggler(context.job) if not roots and not context.blocked else None
    young = [b for b in every if b.missing and not is_hung(context.job, b, context.patience)]
    skew = _skew(context, young) if young and not roots else None
    pause = _pause(context) if context.blocked else None
    return found + [one for one in (slow, find_tight_timeout(context.job), skew, pause) if one is not None]


def _skew(context: Context, young: list[Blocked]) -> Finding:
    """Ranks that are a few calls apart, as those of a running job are."""
    wait = max(filter(None, (context.waited(b) for b in young)), default=0.0)
    text = (
        f"ranks are a few calls apart ({len(young)} unfinished, oldest {seconds(wait)}), within this job's usual pauses: "
        f"{context.patience.reason}; run again in {seconds(context.patience.limit_s)} to be sure"
    )
    return Finding("skew", (), text)


def _pause(context: Context) -> Finding | None:
    """A pause that ranks declared and that has not ended."""
    paused = [rank for rank in context.job.ranks if is_paused(context.job, rank)]
    if not paused:
        return None
    phase = context.job.ranks[paused[0]].trace.progress.phase
    named = f" ({phase})" if phase else ""
    text = f"{ranks_text(paused)} declared a pause{named} that has not ended: waiting for it is no hang"
    return Finding("pause", (), text)


def find_straggler(job: Job) -> Finding | None:
    """The rank that keeps the others waiting, over the collectives that all ranks of a group have in their rings."""
    groups = sorted(job.groups, key=lambda g: (-len(g.lanes), -g.last, g.index))[:EXAMINED_GROUPS]
    found = [finding for group in groups if (finding := _late_in(job, group)) is not None]
    return max(found, key=lambda finding: finding.waited_s or 0.0, default=None)


def _late_in(job: Job, group: GroupView) -> Finding | None:
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    if len(lanes) < 2 or len(lanes) < len(group.lanes):
        return None
    low = max(lane.first for lane in lanes)
    high = min(lane.last for lane in lanes)
    low = max(low, high - WINDOW + 1)
    if high - low + 1 < MIN_COLLECTIVES:
        return None
    late = _waits(job, lanes, low, high)
    if late is None or late.shape[1] < MIN_COLLECTIVES:
        return None
    period = _period(job, lanes[0], low, high)
    typical = np.median(late, axis=1)
    slowest = int(np.argmax(typical))
    share = float((np.argmax(late, axis=0) == slowest).mean())
    behind = float(typical[slowest] - np.median(np.delete(typical, slowest)))
    if behind < max(MIN_LATE_S, LATE_SHARE * period) or share < LAST_SHARE:
        return None
    rank, count = lanes[slowest].rank, late.shape[1]
    sentence = (
        f"{who(job, (rank,))} is slow, not stuck: in {share:.0%} of the last {count} collectives of group {group.label} it "
        f"came last, {seconds(behind)} behind the others ({behind / max(period, 1e-9):.0%} of a round)"
    )
    advice = f"compare the node of rank {rank} with the others: data loading, clocks, temperature, other jobs"
    return Finding(
        "straggler",
        (rank,),
        sentence,
        group=group.label,
        sequence=high,
        confidence=round(min(0.95, 0.5 + share / 2), 2),
        where=place(job.frames(rank, group.lanes[rank].row(high))),
        waiting=tuple(lane.rank for lane in lanes if lane.rank != rank),
        waited_s=behind,
        evidence=(f"lateness per rank: {_table(lanes, typical)}",),
        missing_evidence=(f"what rank {rank} does meanwhile: run `allranks stacks` twice on its node",),
        advice=(advice,),
    )


def _waits(job: Job, lanes: list[Lane], low: int, high: int) -> np.ndarray | None:
    """Lateness in seconds, ranks x collectives; None when the times do not allow telling."""
    seqs = np.arange(low, high + 1)
    created, ended = np.zeros((len(lanes), len(seqs))), np.zeros((len(lanes), len(seqs)))
    for i, lane in enumerate(lanes):
        at = np.searchsorted(lane.seqs, seqs)
        if not bool((lane.seqs[at] == seqs).all()):
            return None
        calls = job.ranks[lane.rank].trace.calls
        created[i], ended[i] = calls["created_ns"][lane.rows[at]], calls["completed_ns"][lane.rows[at]]
    family = job.ranks[lanes[0].rank].family[lanes[0].rows[np.searchsorted(lanes[0].seqs, seqs)]]
    keep = is_synchronising(family) & (created > 0).all(axis=0)
    created, ended = created[:, keep], ended[:, keep]
    if not created.shape[1]:
        return None
    if bool((ended > 0).any()):
        # How long each waited does not depend on clocks: who waits least came last.
        took = ended - created
        late: np.ndarray = (took.max(axis=0) - took) / 1e9
        return late if bool((took >= 0).all()) else None
    # Without ends only the order of entering is left: nobody can be in the next call before the last is in this one.
    possible = created.max(axis=0)[:-1] <= created.min(axis=0)[1:]
    by_clock: np.ndarray = (created - np.median(created, axis=0)) / 1e9
    return by_clock if len(possible) and float(possible.mean()) > 0.8 else None


def _period(job: Job, lane: Lane, low: int, high: int) -> float:
    rows = lane.rows[np.searchsorted(lane.seqs, low) : np.searchsorted(lane.seqs, high) + 1]
    created = job.ranks[lane.rank].trace.calls["created_ns"][rows]
    return float(np.mean(np.diff(created))) / 1e9 if len(created) > 1 else 0.0


def _table(lanes: list[Lane], typical: np.ndarray) -> str:
    order = np.argsort(-typical)[:6]
    return ", ".join(f"rank {lanes[i].rank} {seconds(max(0.0, float(typical[i])))}" for i in order.tolist())


def find_tight_timeout(job: Job) -> Finding | None:
    """A timeout that calls which did finish came close to, or that struck."""
    longest, limit, rank = TIGHT, 0.0, -1
    struck = 0
    for view in list(job.ranks.values())[:EXAMINED_RANKS]:
        calls = view.trace.calls
        states = calls["state"]
        struck += int(np.count_nonzero(states == _TIMED_OUT))
        took = calls["completed_ns"] - calls["created_ns"]
        shortest = int(calls["timeout_ms"].min()) if len(calls) else 0
        if shortest > 0 and int(took.max()) <= longest * shortest * 1e6:
            continue  # nothing here can come closer to its timeout
        done = (states == _COMPLETED) & (took > 0) & (calls["timeout_ms"] > 0)
        if done.any():
            share = took[done] / (calls["timeout_ms"][done] * 1e6)
            at = int(np.argmax(share))
            if float(share[at]) > longest:
                longest, rank = float(share[at]), view.rank
                limit = float(calls["timeout_ms"][done][at]) / 1e3
    if rank < 0:
        return None
    sentence = (
        f"the timeout of {seconds(limit)} leaves no room: a call on rank {rank} that did finish took {seconds(longest * limit)}"
        + (f", and {struck} calls timed out" if struck else "")
    )
    advice = f"init_process_group(timeout=timedelta(seconds={max(60, int(longest * limit * 4))}))"
    return Finding("timeout_too_short", (), sentence, confidence=0.8, advice=(advice,))
