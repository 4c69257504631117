"""Who waits in which call for whom: the blocked calls of all groups, whether that is a hang, and where the waiting begins.

A blocked call counts only when it has lasted longer than the job's usual pauses. Time is an argument: for black boxes the
moment they were read, for dump files the moment they were written. Without it a dump is taken at its word: people dump jobs
that hang.

The wait-for graph. Blocked calls are nodes between ranks, so 16,384 waiters cost 16,384 edges.

    rank → the calls it is blocked in → the ranks that never entered them
    a call that everybody entered → calls that one of its members issued earlier and that are blocked too, and members
        that have not left an earlier call of the group
    a send or receive whose partner is posted → what its own or the partner's batch lacks, or what blocks one of them earlier

What waits for nothing is where the trouble began: a rank (missing, dead), or a call (mismatch, network).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from allranks.diagnosis.job import SYNCHRONISING, GroupView, Job, Lane, Now, is_synchronising
from allranks.diagnosis.p2p import P2PMismatch, P2PWait
from allranks.model.trace import Flag

#: Snapshots this much older than a call cannot tell whether the rank entered it.
STALE_NS = 50_000_000
_DONE, _OPEN, _FAILED = int(Now.DONE), int(Now.OPEN), int(Now.FAILED)


@dataclass(frozen=True)
class Blocked:
    """A collective, or a send or receive, that did not come to its end."""

    index: int
    group: int
    seq: int  # -1 for point-to-point
    rows: dict[int, int] = field(default_factory=dict)  # rank → row, of those that entered, not left
    missing: tuple[int, ...] = ()  # never entered, though their dump would show it
    absent: tuple[int, ...] = ()  # members without a dump
    unsure: tuple[int, ...] = ()  # their dump is cut, too old or has lost this group
    passed: tuple[int, ...] = ()  # got out of it
    behind: tuple[int, ...] = ()  # entered it too, but have not left an earlier call of the group
    failed: tuple[int, ...] = ()  # entered; the call failed or timed out
    p2p: P2PWait | None = None

    @property
    def waiters(self) -> tuple[int, ...]:
        return tuple(sorted(self.rows))


def find_blocked(job: Job, p2p_waits: list[P2PWait]) -> list[Blocked]:
    """All blocked calls: per group the first one of every rank, then open sends and receives."""
    stuck = [_stuck_lanes(job, group) for group in job.groups]
    busy = {lane.rank for lanes in stuck for found in lanes.values() for lane in found}
    busy |= {wait.rank for wait in p2p_waits}
    found: list[Blocked] = []
    for group, lanes in zip(job.groups, stuck, strict=True):
        found += [
            _blocked(job, group, seq, lanes[seq], len(found) + i) for i, seq in enumerate(sorted(lanes))
        ]
    idle = tuple(rank for rank, view in job.ranks.items() if rank not in busy and not view.cut)
    lonely = {b.waiters[0] for b in found if is_lonely(job, b)}
    found = [_with_idle(job, blocked, idle, lonely) for blocked in found]
    return found + [_blocked_p2p(job, wait, len(found) + i, idle) for i, wait in enumerate(p2p_waits)]


def is_lonely(job: Job, blocked: Blocked) -> bool:
    """One rank alone in a group whose members nobody knows."""
    group = job.groups[blocked.group]
    return not group.members_known and len(group.lanes) == 1 and len(job.ranks) > 1


def has_unseen_members(job: Job, blocked: Blocked) -> bool:
    """Whether members of the group have no file: its earlier calls came to their end, and no rank with a file made one of them."""
    group = job.groups[blocked.group]
    whole = all(not len(v.trace.calls) or int(v.trace.calls["begin"][0]) == 1 for v in job.ranks.values())
    return is_lonely(job, blocked) and whole and group.lanes[blocked.waiters[0]].first < blocked.seq


def _blocked_p2p(job: Job, wait: P2PWait, index: int, idle: tuple[int, ...]) -> Blocked:
    failed = (wait.rank,) if job.ranks[wait.rank].now[wait.row] == Now.FAILED else ()
    if wait.peer < 0:  # from anyone: a rank that is not waiting itself may still send
        others = [rank for rank in job.groups[wait.group].members if rank != wait.rank]
        absent = tuple(rank for rank in others if rank not in job.ranks)
        senders = tuple(rank for rank in others if rank in idle)
        lacking = senders or (() if absent else tuple(others))
        return Blocked(index, wait.group, -1, {wait.rank: wait.row}, lacking, absent, failed=failed, p2p=wait)
    alone = wait.partner < 0
    missing = (wait.peer,) if alone and wait.peer_known else ()
    absent = (wait.peer,) if alone and wait.peer not in job.ranks else ()
    unsure = (wait.peer,) if alone and not missing and not absent else ()
    return Blocked(
        index, wait.group, -1, {wait.rank: wait.row}, missing, absent, unsure, failed=failed, p2p=wait
    )


def _with_idle(job: Job, blocked: Blocked, idle: tuple[int, ...], lonely: set[int]) -> Blocked:
    """Where the members are unknown, any rank that is idle or without a dump may be the one that lacks.

    Of ranks that are each alone in some group one may be waiting for the other, unless a rank has no dump.
    """
    group = job.groups[blocked.group]
    if group.members_known or blocked.missing or blocked.unsure or blocked.passed:
        return blocked
    lacking = tuple(rank for rank in idle if rank not in group.lanes)
    if is_lonely(job, blocked) and not job.missing_ranks:
        if has_unseen_members(job, blocked):
            return blocked
        others = tuple(sorted(lonely - set(group.lanes)))
        lacking = others or lacking or tuple(rank for rank in job.ranks if rank not in group.lanes)
    absent = blocked.absent or (() if lacking else job.missing_ranks)
    return replace(blocked, missing=lacking, absent=absent)


def _stuck_lanes(job: Job, group: GroupView) -> dict[int, list[Lane]]:
    """Sequence number → lanes that did not get through it."""
    stuck: dict[int, list[Lane]] = {}
    floor = lowest_end(group)
    for lane in group.lanes.values():
        seq = stuck_at(job, lane, floor)
        if seq is not None:
            stuck.setdefault(seq, []).append(lane)
    return stuck


def lowest_end(group: GroupView) -> int:
    """The smallest `last` among lanes that can be trusted to show their end; -1 when one never began."""
    ends = [
        lane.last for lane in group.lanes.values() if not lane.cut and (len(lane.seqs) or not lane.wrapped)
    ]
    return min(ends, default=1 << 62)


def stuck_at(job: Job, lane: Lane, floor: int) -> int | None:
    """The first sequence number that the rank did not get through, or None.

    A call behind which a later one is done was done too. A call that was put away although a member never
    entered it (`floor`) has failed, if nobody can finish it alone.
    """
    if not len(lane.seqs):
        return None
    view = job.ranks[lane.rank]
    newest = view.now[lane.rows[-2:]].tolist()
    if newest[-1] == _DONE:
        return None
    if newest[-1] == _OPEN and (newest[0] == _DONE or len(lane.rows) == 1):
        return lane.last
    now = view.now[lane.rows]
    done = np.flatnonzero(now == _DONE)
    start = int(done[-1]) + 1 if len(done) else 0
    now = now[start:]
    bad = (now == _OPEN) | (now == _FAILED)
    if lane.last > floor:
        alone = is_synchronising(view.family[lane.rows[start:]])
        bad |= (now == Now.LEFT) & (lane.seqs[start:] > floor) & alone
    hits = np.flatnonzero(bad)
    return int(lane.seqs[start + int(hits[0])]) if len(hits) else None


def _blocked(job: Job, group: GroupView, seq: int, lanes: list[Lane], index: int) -> Blocked:
    rows = {lane.rank: lane.row(seq) for lane in lanes}
    failed = tuple(sorted(r for r, row in rows.items() if job.ranks[r].now[row] != Now.OPEN))
    entered_ns = min(int(job.ranks[r].trace.calls["created_ns"][row]) for r, row in rows.items())
    found: dict[str, list[int]] = {"missing": [], "unsure": [], "passed": [], "behind": []}
    for rank, lane in group.lanes.items():
        if rank not in rows:
            found[_whereabouts(job, group, lane, seq, entered_ns)].append(rank)
    absent = tuple(r for r in group.members if r not in group.lanes)
    family = int(job.ranks[lanes[0].rank].family[rows[lanes[0].rank]])
    done = any(_is_done(job, group.lanes[rank], seq) for rank in found["passed"])
    if done and not absent and family in SYNCHRONISING:
        # Somebody finished it, so everybody entered it: the others' dumps are merely older. With a rank gone this
        # does not hold: NCCL then turns pending calls of the others to "completed".
        found["unsure"] += found["missing"]
        found["missing"] = []
    missing, unsure, passed, behind = (tuple(sorted(ranks)) for ranks in found.values())
    return Blocked(index, group.index, seq, rows, missing, absent, unsure, passed, behind, failed)


def _whereabouts(job: Job, group: GroupView, lane: Lane, seq: int, entered_ns: int) -> str:
    """Which of the four sets of Blocked a rank belongs to that is not stuck in the call."""
    if lane.last >= seq:
        row = lane.row(seq)
        return "passed" if row < 0 or job.ranks[lane.rank].now[row] in (Now.DONE, Now.LEFT) else "behind"
    if job.ranks[lane.rank].trace.last_completed.get(group.name, -1) >= seq:
        return "passed"
    lost = lane.cut or (lane.wrapped and not len(lane.seqs))
    return "unsure" if lost or is_too_old(job, lane.rank, entered_ns) else "missing"


def _is_done(job: Job, lane: Lane, seq: int) -> bool:
    row = lane.row(seq)
    return row >= 0 and bool(job.ranks[lane.rank].now[row] == Now.DONE)


def is_too_old(job: Job, rank: int, entered_ns: int) -> bool:
    """Whether the rank's dump was written before the others entered the call."""
    view = job.ranks[rank]
    if not view.snapshot_ns or view.snapshot_ns >= entered_ns - STALE_NS:
        return False
    calls = view.trace.calls
    return not len(calls) or int(calls["created_ns"].max()) <= view.snapshot_ns


MIN_WAIT_S, MAX_WAIT_S, UNTRAINED_WAIT_S = 0.1, 30.0, 1.0
SAMPLED_RANKS, SAMPLED_CALLS, WARM_UP_CALLS = 64, 256, 3
#: A wait longer than this is the age of the file, not of the wait.
BELIEVABLE_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Patience:
    """How long a wait is normal in this job, and why."""

    limit_s: float
    reason: str


def usual_pause(job: Job, quiet_s: float = 0.0) -> Patience:
    """Twice the longest pause between two calls of a rank, within limits; half of a silence that is known to be too long."""
    longest = 0.0
    count = 0
    for rank in list(job.ranks)[:SAMPLED_RANKS]:
        created = job.ranks[rank].trace.calls["created_ns"][-SAMPLED_CALLS:]
        gaps = np.diff(created)[WARM_UP_CALLS:]
        count += len(gaps)
        if len(gaps):
            longest = max(longest, float(gaps.max()) / 1e9)
    if count < 8:
        return Patience(
            UNTRAINED_WAIT_S, f"too few calls to know this job's pauses; {UNTRAINED_WAIT_S:.0f} s assumed"
        )
    limit = min(max(2 * longest, MIN_WAIT_S), MAX_WAIT_S)
    if 0 < quiet_s / 2 < limit:
        return Patience(quiet_s / 2, f"nothing has moved for {quiet_s:.3g} s, which is too long for this job")
    return Patience(limit, f"the longest pause between two calls was {longest:.3g} s")


def waited_s(job: Job, blocked: Blocked) -> float | None:
    """How long the longest waiter has waited; None when no time of the dump is known."""
    longest = None
    for rank, row in blocked.rows.items():
        view = job.ranks[rank]
        entered = int(view.trace.calls["created_ns"][row])
        if view.snapshot_ns and entered:
            wait = (view.snapshot_ns - entered) / 1e9
            if 0 <= wait < BELIEVABLE_S:
                longest = wait if longest is None else max(longest, wait)
    return longest


def is_hung(job: Job, blocked: Blocked, patience: Patience) -> bool:
    """Whether the call has lasted too long; failed calls, calls that lack a rank which has ended, and calls of unknown
    age count as such, but when everybody was killed only those that somebody lacks in: the others were about to end."""
    ended = any(job.ranks[rank].trace.progress.closed for rank in blocked.missing if rank in job.ranks)
    if blocked.failed or ended:
        return True
    wait = waited_s(job, blocked)
    if wait is None:
        return not job.ended or bool(blocked.missing or blocked.absent)
    return wait >= patience.limit_s


def is_paused(job: Job, rank: int) -> bool:
    """Whether the rank has declared its silence normal until a time that has not come yet."""
    view = job.ranks.get(rank)
    return view is not None and job.now_ns > 0 and view.trace.progress.expect_until_ns > job.now_ns


@dataclass(frozen=True)
class Graph:
    """The wait-for graph. Nodes: ranks as numbers, blocked calls as -1 - index."""

    edges: dict[int, tuple[int, ...]]
    blocked: tuple[Blocked, ...]

    def sinks(self) -> list[tuple[int, ...]]:
        """Strongly connected components that wait for nothing outside themselves."""
        number = self._components
        leaving = {
            number[n] for n, targets in self.edges.items() if any(number[t] != number[n] for t in targets)
        }
        return sorted(nodes for nodes in self._members() if number[nodes[0]] not in leaving)

    def circles(self) -> list[tuple[int, ...]]:
        """Strongly connected components of several nodes, whatever else they wait for."""
        return sorted(nodes for nodes in self._members() if len(nodes) > 1)

    @cached_property
    def _components(self) -> dict[int, int]:
        return _components(self.edges)

    def _members(self) -> list[tuple[int, ...]]:
        """The nodes of every strongly connected component, in order."""
        members: dict[int, list[int]] = {}
        for node, number in self._components.items():
            members.setdefault(number, []).append(node)
        return [tuple(sorted(nodes)) for nodes in members.values()]

    @cached_property
    def waits_for_me(self) -> dict[int, list[int]]:
        """The edges turned round."""
        back: dict[int, list[int]] = {}
        for node, targets in self.edges.items():
            for target in targets:
                back.setdefault(target, []).append(node)
        return back

    def behind(self, nodes: Iterable[int]) -> set[int]:
        """All nodes that wait for these, directly or not, and these."""
        seen = set(nodes)
        todo = list(seen)
        while todo:
            for node in self.waits_for_me.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        return seen

    def weight(self, sink: Iterable[int]) -> int:
        """How many ranks wait, directly or not, for this sink, and are in it."""
        return sum(1 for node in self.behind(sink) if node >= 0)


def wait_graph(job: Job, blocked: list[Blocked], misfits: Sequence[P2PMismatch] = ()) -> Graph:
    """Edges of all blocked calls. `misfits` are pairs of a send and a receive that can never end."""
    edges: dict[int, list[int]] = {}
    calls_of: dict[int, list[Blocked]] = {}
    for call in blocked:
        for rank in call.rows:
            edges.setdefault(rank, []).append(-1 - call.index)
            calls_of.setdefault(rank, []).append(call)
    ends = {(m.source, m.send_row) for m in misfits} | {(m.target, m.recv_row) for m in misfits}
    held = _held_up(job, blocked, calls_of, ends)
    for call in blocked:
        targets = list(call.missing) + list(call.absent)
        if not targets:
            late = [rank for rank in call.behind if rank in calls_of]
            targets = held.get(call.index) or _earlier(call, calls_of) or late
        edges.setdefault(-1 - call.index, []).extend(targets)
        for target in targets:
            edges.setdefault(target, [])
    return Graph({node: tuple(dict.fromkeys(targets)) for node, targets in edges.items()}, tuple(blocked))


def _earlier(call: Blocked, calls_of: dict[int, list[Blocked]]) -> list[int]:
    """Blocked calls that a member of this one issued before it."""
    others = ((other, rank, row) for rank, row in call.rows.items() for other in calls_of[rank])
    found = (-1 - o.index for o, rank, row in others if o is not call and o.rows[rank] < row)
    return list(dict.fromkeys(found))


def _held_up(
    job: Job, blocked: list[Blocked], calls_of: dict[int, list[Blocked]], misfits: set[tuple[int, int]]
) -> dict[int, list[int]]:
    """index of a matched send or receive → nodes of the calls that hold it up, as far as these lead to one that lacks
    somebody or does not fit. Where there is none, both ends being posted is all that is known."""
    guilty = {
        call.index
        for call in blocked
        if call.missing or call.absent or (call.p2p and (call.p2p.rank, call.p2p.row) in misfits)
    }
    found: dict[int, list[int]] = {}
    pending = [call for call in blocked if call.p2p is not None and call.index not in guilty]
    while pending:
        rest = []
        for call in pending:
            holders = [other for other in _before(job, call, calls_of) if other.index in guilty]
            if holders:
                found[call.index] = [-1 - other.index for other in holders]
            else:
                rest.append(call)
        guilty.update(call.index for call in pending if call.index in found)
        if len(rest) == len(pending):
            break
        pending = rest
    return found or _in_circles(job, blocked, calls_of)


def _in_circles(job: Job, blocked: list[Blocked], calls_of: dict[int, list[Blocked]]) -> dict[int, list[int]]:
    """index of a send or receive of NCCL → nodes of the calls before it at either end, where these wait for it: NCCL takes the
    calls of a rank in their order."""
    nccl = [call for call in blocked if job.groups[call.group].backend.startswith("nccl")]
    before = {
        call.index: tuple(o.index for o in _before(job, call, calls_of, batch=False))
        if call.p2p is not None
        else tuple(-1 - node for node in _earlier(call, calls_of))
        for call in nccl
    }
    before = {index: tuple(o for o in others if o in before) for index, others in before.items()}
    number = _components(before)
    found = {
        index: [-1 - other for other in others if number[other] == number[index]]
        for index, others in before.items()
    }
    messages = {call.index for call in nccl if call.p2p is not None}
    return {index: nodes for index, nodes in found.items() if nodes and index in messages}


def _before(job: Job, call: Blocked, calls_of: dict[int, list[Blocked]], batch: bool = True) -> list[Blocked]:
    """Calls that must end before a send or receive can: earlier ones, or of the same batch (if `batch`), at either end."""
    wait = call.p2p
    assert wait is not None
    ends = [(wait.rank, wait.row)] + ([(wait.peer, wait.partner)] if wait.partner >= 0 else [])
    found = []
    for rank, row in ends:
        for other in calls_of.get(rank, ()):
            at = other.rows[rank]
            together = _same_batch(job, rank, at, row)
            if other is not call and (batch if together else at < row):
                found.append(other)
    return found


def _same_batch(job: Job, rank: int, one: int, two: int) -> bool:
    calls = job.ranks[rank].trace.calls
    if not int(calls["flags"][one]) & int(calls["flags"][two]) & Flag.COALESCED_PART:
        return False
    return bool(calls["p2p_seq"][one] == calls["p2p_seq"][two] and calls["group"][one] == calls["group"][two])


def _components(edges: dict[int, tuple[int, ...]]) -> dict[int, int]:
    """Tarjan's strongly connected components, without recursion. node → component number."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    done: dict[int, int] = {}
    stack: list[int] = []
    for start in edges:
        if start in order:
            continue
        work = [(start, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                order[node] = low[node] = len(order)
                stack.append(node)
            targets = edges[node]
            while at < len(targets):
                target = targets[at]
                at += 1
                if target not in order:
                    work.append((node, at))
                    work.append((target, 0))
                    break
                if target not in done:
                    low[node] = min(low[node], order[target])
            else:
                if low[node] == order[node]:
                    while True:
                        member = stack.pop()
                        done[member] = order[node]
                        if member == node:
                            break
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
    return done
