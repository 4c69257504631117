"""The wait-for graph. Blocked calls are nodes between ranks, so 16,384 waiters cost 16,384 edges.

    rank → the calls it is blocked in → the ranks that never entered them
    a call that everybody entered → calls that one of its members issued earlier and that are blocked too, and members
        that have not left an earlier call of the group
    a send or receive whose partner is posted → what its own or the partner's batch lacks, or what blocks one of them earlier

What waits for nothing is where the trouble began: a rank (missing, dead), or a call (mismatch, network).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from allranks.diagnosis.job import Job
from allranks.diagnosis.p2p import P2PMismatch
from allranks.diagnosis.waits import Blocked
from allranks.model.trace import Flag


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
    """index of a send or receive of NCCL → nodes of those before it at either end, where these wait for it: NCCL takes the
    calls of a rank in their order."""
    before = {
        call.index: tuple(o.index for o in _before(job, call, calls_of, batch=False) if o.p2p is not None)
        for call in blocked
        if call.p2p is not None and job.groups[call.group].backend.startswith("nccl")
    }
    before = {index: tuple(o for o in others if o in before) for index, others in before.items()}
    number = _components(before)
    found = {
        index: [-1 - other for other in others if number[other] == number[index]]
        for index, others in before.items()
    }
    return {index: nodes for index, nodes in found.items() if nodes}


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
