"""States of NCCL's own recorder that cannot be: completions that are not, and finished calls that read unfinished.

NCCL marks a coalesced collective as completed although a member never entered it. Two things look alike in the dumps: a rank that never came while the others stand in the call, and a rank whose dump
was merely taken earlier. What separates them is the late rank's own clock: when its file holds a time later than
the others' completion, it had still not entered when the call was said to be over, and the completion is false.
Without such a time nothing is certain; it is worth a word only where all the others stand still in that very call.

torch takes the CUDA events of synchronous calls again for later ones: as long as a later call is pending, all that had its event
before read "scheduled". So a collective that has ended on one rank has been reached by all, and a rank of which nothing is said
to have ended tells nothing but the order of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from allranks.diagnosis.align import is_box, is_hook
from allranks.diagnosis.job import GroupView, Job, Lane, Now, RankCalls, is_synchronising
from allranks.diagnosis.p2p import CLOCKS_NS, newest_ns
from allranks.diagnosis.waits import is_too_old, lowest_end
from allranks.model.trace import Flag

#: Of a rank with fewer calls none need have ended.
MIN_UNTOLD = 3


@dataclass(frozen=True)
class Doubt:
    """A coalesced collective said to be over on `rows`, which the `late` ranks never entered."""

    group: int
    seq: int
    rows: dict[int, int]  # rank → row
    late: tuple[int, ...]
    proven: bool


def finish_known(job: Job) -> Job:
    """The job with the calls of NCCL's dumps taken for finished that must be, whatever their state says."""
    changed = {}
    for rank, view in job.ranks.items():
        if not is_box(view.trace) and len(view.now) >= MIN_UNTOLD and _is_untold(job, view):
            changed[rank] = view.now.copy()
            changed[rank][:-1] = np.where(view.now[:-1] == Now.OPEN, Now.LEFT, view.now[:-1])
    whole = [g for g in job.groups if g.backend.startswith("nccl") and all(r in job.ranks for r in g.members)]
    lacked = any(lowest_end(group) < group.last for group in whole)
    for group in whole:
        _finish_reached(job, group, changed)
        if lacked:
            _finish_shared(job, group, changed)
    if not changed:
        return job
    return replace(job, ranks={r: replace(v, now=changed.get(r, v.now)) for r, v in job.ranks.items()})


def _is_untold(job: Job, view: RankCalls) -> bool:
    """Whether not one call of a rank, all of them NCCL's, is said to have ended."""
    if bool(((view.now != Now.OPEN) & (view.now != Now.UNKNOWN)).any()):
        return False
    return all(
        number >= 0 and job.groups[number].backend.startswith("nccl") for number in set(view.group.tolist())
    )


def _finish_reached(job: Job, group: GroupView, changed: dict[int, np.ndarray]) -> None:
    """Calls before one that ended on some rank have ended on all: nobody can be inside it without them."""
    lanes = [
        lane for lane in group.lanes.values() if len(lane.rows) and not is_box(job.ranks[lane.rank].trace)
    ]
    hook = [lane for lane in lanes if is_hook(job.ranks[lane.rank].trace)]  # it looks once a second
    behind = hook or [lane for lane in lanes if job.ranks[lane.rank].now[lane.rows[0]] == Now.OPEN]
    if not behind or (len(behind) == len(lanes) and not hook):
        return
    reached = max((_last_ended(job.ranks[lane.rank], lane) for lane in lanes), default=-1)
    for lane in behind:
        now = changed.setdefault(lane.rank, job.ranks[lane.rank].now.copy())
        rows = lane.rows[lane.seqs <= min(reached, lane.last - 1)]
        if hook:  # on the root of a call they may disagree
            rooted = ~is_synchronising(job.ranks[lane.rank].family[rows]) & (now[rows] == Now.OPEN)
            rows = rows[: int(np.argmax(rooted))] if rooted.any() else rows
        now[rows[(now[rows] == Now.OPEN) | (now[rows] == Now.LEFT)]] = Now.DONE


def _finish_shared(job: Job, group: GroupView, changed: dict[int, np.ndarray]) -> None:
    """Calls that all members have entered, where somebody lacks in another: that one holds them up, or the state is old.
    Not of calls with a root, on which ranks may disagree, nor of calls that differ, nor of ranks that have ended."""
    floor, found, made = lowest_end(group), [], dict[int, object]()
    for lane in group.lanes.values():
        view = job.ranks[lane.rank]
        now = changed.get(lane.rank, view.now)
        rows = lane.rows[lane.seqs <= floor]
        rows = rows[now[rows] == Now.OPEN]
        if not len(rows) and not is_hook(view.trace):
            return  # it has left what another is still in
        if view.trace.progress.closed or not is_synchronising(view.family[rows]).all():
            return
        found.append((lane.rank, rows))
        for row in rows.tolist():
            call = view.trace.calls[row]
            kind = (view.family[row], view.trace.shapes[call["shapes"]], call["reduce_op"])
            if made.setdefault(int(call["seq"]), kind) != kind:
                return
    for rank, rows in found:
        changed.setdefault(rank, job.ranks[rank].now.copy())[rows] = Now.UNKNOWN


def _last_ended(view: RankCalls, lane: Lane) -> int:
    """The last collective of a lane that has ended and that nobody can end alone; -1 when there is none."""
    rows = lane.rows[(view.now[lane.rows] == Now.DONE) & is_synchronising(view.family[lane.rows])]
    rows = rows[~_is_coalesced(view, rows)] if len(rows) else rows
    return int(view.trace.calls["seq"][rows[-1]]) if len(rows) else -1


def reopen_unseen(job: Job) -> Job:
    """The job with collectives open that somebody has not entered and that were put away when they were issued."""
    changed: dict[int, np.ndarray] = {}
    for group in job.groups:
        floor = lowest_end(group) if all(rank in job.ranks for rank in group.members) else group.last
        for lane in group.lanes.values() if floor < group.last else ():
            view = job.ranks[lane.rank]
            rows = lane.rows[lane.seqs > floor]
            rows = rows[(view.trace.calls["flags"][rows] & Flag.ENDED_UNSEEN) != 0]
            rows = rows[is_synchronising(view.family[rows])]
            if len(rows):
                changed.setdefault(lane.rank, view.now.copy())[rows] = Now.OPEN
    return replace(job, ranks={r: replace(v, now=changed.get(r, v.now)) for r, v in job.ranks.items()})


def find_doubts(job: Job) -> list[Doubt]:
    """At most one per group: the first collective that somebody lacks."""
    found = (_doubt(job, group) for group in job.groups)
    return [doubt for doubt in found if doubt is not None]


def reopen(job: Job, doubts: Iterable[Doubt]) -> Job:
    """The job with every false completion, and those behind it, taken for unfinished."""
    ranks = dict(job.ranks)
    for doubt in doubts:
        for rank in doubt.rows if doubt.proven else ():
            lane = job.groups[doubt.group].lanes[rank]
            rows = lane.rows[lane.seqs >= doubt.seq]
            now = ranks[rank].now.copy()
            now[rows[now[rows] == Now.DONE]] = Now.OPEN
            ranks[rank] = replace(ranks[rank], now=now)
    return replace(job, ranks=ranks)


def _doubt(job: Job, group: GroupView) -> Doubt | None:
    if not group.backend.startswith("nccl") or not all(rank in job.ranks for rank in group.members):
        return None
    lanes = [lane for lane in group.lanes.values() if _shows_its_end(job, lane)]
    floor = min((lane.last for lane in lanes), default=group.last)
    ahead = [lane for lane in group.lanes.values() if lane.last > floor]
    if not ahead or not all(_only_coalesced_ended(job.ranks[lane.rank], lane, floor) for lane in ahead):
        return None
    late = tuple(lane.rank for lane in lanes if lane.last == floor)
    return _in_first_call(job, group, ahead, floor, late)


def _in_first_call(
    job: Job, group: GroupView, ahead: list[Lane], floor: int, late: tuple[int, ...]
) -> Doubt | None:
    """The doubt about the first call behind `floor`, if it is said to be over wherever it was made."""
    seq = min(int(lane.seqs[lane.seqs > floor][0]) for lane in ahead)
    rows = {lane.rank: row for lane in ahead if (row := lane.row(seq)) >= 0}
    ends = [_ended_ns(job.ranks[rank], row) for rank, row in rows.items()]
    if not ends or min(ends) < 0:
        return None
    proven = _still_outside(job, late, min(filter(None, ends), default=0))
    return Doubt(group.index, seq, rows, proven, True) if proven else _unproven(job, group, seq, rows, late)


def _still_outside(job: Job, late: tuple[int, ...], ended_ns: int) -> tuple[int, ...]:
    """Those of the late ranks whose own clock shows that they had not entered when the call was said to be over."""
    return tuple(r for r in late if ended_ns and newest_ns(job.ranks[r]) >= ended_ns + CLOCKS_NS)


def _unproven(
    job: Job, group: GroupView, seq: int, rows: dict[int, int], late: tuple[int, ...]
) -> Doubt | None:
    """Worth a word only where all the others stand in that very call, and few are late."""
    entered = min(int(job.ranks[rank].trace.calls["created_ns"][row]) for rank, row in rows.items())
    suspects = tuple(rank for rank in late if not is_too_old(job, rank, entered))
    standing = all(_stands_at(job.ranks[rank], group, seq) for rank in rows)
    few = 0 < len(suspects) * 2 <= len(group.members)
    return Doubt(group.index, seq, rows, suspects, False) if standing and few else None


def _shows_its_end(job: Job, lane: Lane) -> bool:
    view = job.ranks[lane.rank]
    return not lane.cut and (len(lane.seqs) > 0 or not lane.wrapped) and not is_box(view.trace)


def _is_coalesced(view: RankCalls, rows: np.ndarray) -> np.ndarray:
    """Per row: whether the call stands for a coalesced group."""
    calls = view.trace.calls[rows]
    by_name = np.array([view.trace.names[op].endswith("coalesced") for op in calls["op"].tolist()], bool)
    coalesced: np.ndarray = by_name | ((calls["flags"] & Flag.COALESCED_END) != 0)
    return coalesced


def _only_coalesced_ended(view: RankCalls, lane: Lane, floor: int) -> bool:
    """Whether no ordinary collective behind `floor` is done: one that is proves that everybody went on."""
    rows = lane.rows[lane.seqs > floor]
    done = view.now[rows] == Now.DONE
    ordinary = done & ~_is_coalesced(view, rows) & is_synchronising(view.family[rows])
    return not bool(ordinary.any())


def _ended_ns(view: RankCalls, row: int) -> int:
    """When a coalesced call was said to be over; 0 unknown, -1 when it is open or no such call."""
    if view.now[row] != Now.DONE or not bool(_is_coalesced(view, np.array([row]))[0]):
        return -1
    return int(view.trace.calls["completed_ns"][row])


def _stands_at(view: RankCalls, group: GroupView, seq: int) -> bool:
    """Whether the rank has issued nothing behind this call, in any group."""
    return int(view.group[-1]) == group.index and int(view.trace.calls["seq"][-1]) == seq
