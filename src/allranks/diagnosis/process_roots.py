"""Where a chain of waits ends: a process that must move first, or a circle; and whom of a circle to blame. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from allranks.diagnosis.process_units import LIFE, SOON_S, Unit, Waits
from allranks.model.stacks import ProcessLink, ThreadLook, Where

#: What ends sooner than this does not hang by itself: a pause between requests, a retry, an answer from outside the job.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Root:
    """Where a chain of waits ends."""

    waits: Waits
    nodes: tuple[int, ...]  # units: one, or a circle

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return tuple(self.waits.units[n] for n in self.nodes)

    @property
    def circle(self) -> bool:
        first = self.nodes[0]
        return len(self.nodes) > 1 or first in self.waits.edges[first]

    @cached_property
    def behind(self) -> set[int]:
        """The units that wait for it and have not moved."""
        seen, todo = set(self.nodes), list(self.nodes)
        while todo:
            for n in self.waits.graph.waits_for_me.get(todo.pop(), ()):
                unit = self.waits.units[n]
                if n not in seen and unit.still and n not in self.waits.moved:
                    seen.add(n)
                    todo.append(n)
        return seen - set(self.nodes)

    @cached_property
    def waiting(self) -> set[Where]:
        """The processes behind it."""
        return {self.waits.units[n].process.where for n in self.behind} - {
            u.process.where for u in self.units
        }

    @property
    def edges(self) -> tuple[tuple[Where, Where], ...]:
        """Which process waits for which, of all that are in it or behind it."""
        units, inside = self.waits.units, {*self.nodes, *self.behind}
        pairs = ((n, m) for n in sorted(inside) for m in self.waits.edges[n] if m in inside)
        found = dict.fromkeys((units[n].process.where, units[m].process.where) for n, m in pairs)
        return tuple(pair for pair in found if pair[0] != pair[1])

    @property
    def demanded(self) -> bool:
        """Whether some unit needs it to act, rather than to end."""
        direct = {n for m in self.nodes for n in self.waits.graph.waits_for_me.get(m, ())} & self.behind
        units = [self.waits.units[n] for n in direct]
        return any(u.active and u.thread.wait.kind not in LIFE for u in units)

    @property
    def still(self) -> bool:
        return all(u.still for u in self.units) and not set(self.nodes) & self.waits.moved

    @property
    def soon_s(self) -> float | None:
        """When its wait ends by itself, if that is soon."""
        left = [u.thread.wait.left_s for u in self.units if u.thread.wait.left_s is not None]
        sleeps = [u for u in self.units if u.thread.wait.kind == "sleep"]
        return left[0] if sleeps and left and left[0] <= SOON_S else None

    @property
    def timed_s(self) -> float | None:
        """When a wait that it needs ends by itself, if that is soon, or if only those wait for it that take work from it; when
        a sleep ends, if not too late."""
        asleep = self.units[0].thread.wait
        if asleep.kind == "sleep" and asleep.left_s is not None and asleep.left_s <= PATIENCE_S:
            return asleep.left_s
        left = [
            u.thread.wait.left_s for u in self.units if u.thread.wait.kind in ("event", "queue", "answer")
        ]
        known = min((one for one in left if one is not None), default=None)
        needed = any(self.waits.units[n].active for n in self.behind)
        return known if known is not None and (known <= SOON_S or not needed) else None

    @property
    def asked(self) -> ProcessLink | None:
        """What it waits on that leads out of the job: a connection that was used not long ago, a named pipe."""
        link = self.waits.outside.get(self.nodes[0]) if len(self.nodes) == 1 else None
        if link is None or link.named:
            return link
        return link if link.quiet_s is not None and link.quiet_s < PATIENCE_S else None

    @property
    def accused(self) -> bool:
        """Whether it is a hang: it does not move, and somebody needs it."""
        timed = self.soon_s is not None or self.timed_s is not None or self.asked is not None
        unread = any(u.thread.wait.kind == "unread" for u in self.units)
        if unread or not self.still or timed or self.stays_alive or all(u.process.system for u in self.units):
            return False
        unit = self.units[0]
        if unit.thread.wait.kind == "signal" and unit.thread.wait.operation != "pending":
            return self.demanded  # anybody may send it
        if unit.active or self.circle:
            alone = not self.behind and len(self.nodes) == 1
            return not alone or self._is_whole_job(unit)
        return self.demanded

    @property
    def stays_alive(self) -> bool:
        """Whether it waits for an event in a process that serves, and those behind it only for the end of that: a server's main
        function does so until somebody stops it."""
        unit = self.units[0]
        first = (
            unit.thread.wait.kind == "event" and (unit.thread.main or unit.thread.task) and not self.circle
        )
        ends = all(self.waits.units[n].thread.wait.kind in LIFE for n in self.behind)
        return first and ends and any(link.kind == "listen" for link in unit.process.links)

    @cached_property
    def blamed(self) -> tuple[Unit, ...]:
        """Those of its units that must move first."""
        return tuple(to_blame(hub(self) or self.units))

    def _is_whole_job(self, unit: Unit) -> bool:
        """Nobody waits for it: trouble only in a main thread, in a process that serves nobody."""
        beside = [
            t
            for t in unit.process.threads
            if t is not unit.thread and t.wait.kind == "idle" and t.frames and not _is_helper(t)
        ]
        works = any(not u.still and not u.process.system for u in self.waits.units)
        later = (
            ("child", "thread", "poll", "sleep")
            if works or not unit.process.read
            else ("child", "thread", "poll")
        )
        return unit.thread.main and not beside and unit.thread.wait.kind not in later

    @property
    def polls(self) -> bool:
        """Whether a main thread waits for something that somebody else would have to make."""
        unit = self.units[0]
        return self.still and unit.thread.main and unit.thread.wait.kind == "poll" and not unit.process.system

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The best one first."""
        stopped = any(u.thread.wait.kind == "stopped" for u in self.units)
        busy = self.units[0].active or self.circle
        return (not stopped, not busy, self.polls, -len(self.waiting))


def _is_helper(thread: ThreadLook) -> bool:
    """A thread that a library of queues or pools keeps for itself."""
    return any(
        f.file.endswith(("multiprocessing/queues.py", "concurrent/futures/thread.py")) for f in thread.frames
    )


def smallest_circle(waits: Waits, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Of units that wait for each other those of the shortest circles: the others only wait for these."""
    if len(nodes) < 3:
        return nodes
    inside, best = set(nodes), len(nodes) + 1
    found: set[int] = set()
    for start in nodes:
        steps, seen, length = [start], {start}, 0
        while steps and length < best:
            length += 1
            steps = [t for n in steps for t in waits.edges[n] if t in inside]
            if start in steps:
                found = found | {start} if length == best else {start}
                best = length
                break
            steps = [t for t in dict.fromkeys(steps) if t not in seen]
            seen.update(steps)
    return tuple(sorted(found)) if found else nodes


def share_object(root: Root) -> list[Unit]:
    """Threads of the same process that wait for the same object: nobody is left who could wake any of them."""
    unit = root.units[0]
    if len(root.units) > 1 or not unit.thread.wait.lock:
        return []
    direct = [root.waits.units[n] for n in root.waits.graph.waits_for_me.get(root.nodes[0], ())]
    same = (unit.process.where, unit.thread.wait.lock)
    return [u for u in direct if (u.process.where, u.thread.wait.lock) == same and u.still and u.active]


def hub(root: Root) -> list[Unit]:
    """Of a circle the units that all the others wait for: calls that wait for one that was sent, but finds no room beside them, or
    the process that cannot tell its ZMQ peers apart, where which one it needs is unknown."""
    inside, edges, units = set(root.nodes), root.waits.edges, root.waits.units
    middle = inside & root.waits.full
    if not middle and len(inside) > 2:
        middle = {n for n in inside if units[n].thread.wait.operation == "zmq"}
        middle = {n for n in middle if all(inside & set(edges[m]) == {n} for m in inside - {n})}
    return [units[n] for n in sorted(middle)] if all(middle & set(edges[m]) for m in inside - middle) else []


def to_blame(units: Sequence[Unit]) -> Sequence[Unit]:
    """Of a circle all units. Where most of them meet, in calls of a group, at a barrier or for keys, those that are elsewhere;
    where all of them do, those that wait for one partner, else the minority."""
    if late := join_late(units):
        return late
    elsewhere = [u for u in units if not _meets(u)]
    if len(units) == 1 or elsewhere:
        return elsewhere if 0 < len(elsewhere) * 2 < len(units) else units
    partners = [u for u in units if u.thread.wait.operation in _P2P]
    sites = Counter(_site(u) for u in units)
    (common, count), *rest = sites.most_common()
    if partners or not rest or count * 2 <= len(units):
        return partners or (units if rest else ())
    return [u for u in units if _site(u) != common]


def _meets(unit: Unit) -> bool:
    wait = unit.thread.wait
    return wait.kind in ("collective", "store") or wait.operation == "barrier"


def _site(unit: Unit) -> tuple[object, ...]:
    user = unit.thread.user
    return unit.thread.wait.kind, unit.thread.wait.operation, user and (user.file, user.line)


_P2P = frozenset(
    {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
)


def join_late(units: Sequence[Unit]) -> list[Unit]:
    """Those that still form a group which the others of a circle use."""
    late = [u for u in units if u.thread.wait.kind == "rendezvous"]
    return late if len(late) < len(units) else []
