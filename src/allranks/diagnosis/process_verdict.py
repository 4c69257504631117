"""The verdict on a job of several processes: STUCK, MOVING or UNCLEAR, who must move first, and who waits for it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from allranks.diagnosis.processes import LIFE, SOON_S, Unit, Waits, find_waits
from allranks.model.stacks import (
    ChainLink,
    Guilty,
    JobLook,
    Process,
    ProcessFinding,
    ProcessLink,
    ThreadLook,
    Where,
)

MAX_NAMED = 6
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
        left = [u.thread.wait.left_s for u in self.units if u.thread.wait.kind in ("event", "queue")]
        known = min((one for one in left if one is not None), default=None)
        needed = any(self.waits.units[n].active for n in self.behind)
        return known if known is not None and (known <= SOON_S or not needed) else None

    @property
    def asked(self) -> ProcessLink | None:
        """The connection to a process outside the job on which it waits, if that was used not long ago."""
        link = self.waits.outside.get(self.nodes[0]) if len(self.nodes) == 1 else None
        return link if link is not None and link.quiet_s is not None and link.quiet_s < PATIENCE_S else None

    @property
    def accused(self) -> bool:
        """Whether it is a hang: it does not move, and somebody needs it."""
        timed = self.soon_s is not None or self.timed_s is not None or self.asked is not None
        if not self.still or timed or self.stays_alive or all(u.process.system for u in self.units):
            return False
        unit = self.units[0]
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

    def _is_whole_job(self, unit: Unit) -> bool:
        """Nobody waits for it: trouble only in a main thread, in a process that serves nobody."""
        beside = [
            t
            for t in unit.process.threads
            if t is not unit.thread and t.wait.kind == "idle" and t.frames and not _is_helper(t)
        ]
        works = any(not u.still and not u.process.system for u in self.waits.units)
        later = ("child", "thread", "poll", "sleep") if works else ("child", "thread", "poll")
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


def explain_processes(look: JobLook) -> ProcessFinding:
    """What a look at a job says."""
    waits = find_waits(look)
    roots = [Root(waits, _smallest_circle(waits, nodes)) for nodes in waits.graph.sinks()]
    stuck = sorted((root for root in roots if root.accused), key=lambda root: root.rank)
    dead = [p for p in look.processes if not p.alive and p.ended and not p.system]
    # what was killed may have made others end, not the other way round
    dead = [p for p in dead if p.ended.startswith("killed")] or dead
    works = any(not u.still and not u.process.system for u in waits.units)
    missed = stuck or [root for root in roots if root.polls and not works]
    if dead and missed and not _joins_again(dead, missed[0]):
        return _dead(look, dead, missed[0])
    if stuck:
        return _stuck(look, [root for root in stuck if root.rank[:3] == stuck[0].rank[:3]])
    return _retries(look, waits) or _lost_task(look, waits) or _not_stuck(look, waits, roots)


def _lost_task(look: JobLook, waits: Waits) -> ProcessFinding | None:
    """A process waits for a result of its pool, and every worker waits for a task: one has died with it."""
    for unit in waits.units:
        frames = unit.thread.frames[:6]
        if unit.thread.wait.kind != "child" or not any(
            f.file.endswith("multiprocessing/pool.py") for f in frames
        ):
            continue
        family = {unit.process.pid, *unit.thread.wait.pids}
        near = [u for u in waits.units if u.process.pid in family and u is not unit]
        near = [
            u for u in near if not _calls(u, "_handle_workers")
        ]  # it only looks for workers that have ended
        if unit.still and not any(u.active or not u.still for u in near):
            takes = any(_calls(u, "_handle_results") for u in near)
            why = (
                "the one with this task has ended" if takes else "the thread that takes its results has ended"
            )
            says = f"{_says(unit)}, and every worker of its pool waits for a task: {why}"
            return ProcessFinding("stuck", says, (_guilty(unit),), reason="nobody works on the result")
    return None


def _calls(unit: Unit, function: str) -> bool:
    return any(f.name.endswith(function) for f in unit.thread.frames)


def _retries(look: JobLook, waits: Waits) -> ProcessFinding | None:
    """Processes that ask again and again, while those that could answer otherwise do nothing but answer: no answer will change.
    None where anything else works, or waits for something."""
    mine = [u for u in waits.units if not u.process.system]
    asking = [u for u in mine if u.thread.wait.operation == "retry" and u.thread.main]
    others = [u for u in mine if u not in asking and u.thread.wait.kind not in LIFE]
    asked = {u.process.where for u in asking}
    servers = [p for p in look.processes if p.where not in asked and any(x.kind == "listen" for x in p.links)]
    works = [u for u in others if (u.active or u.thread.busy) and not (u.thread.moved and u.thread.handles)]
    if not asking or not servers or works:
        return None
    names = _listed(f"{p.name} (pid {p.pid})" for p in servers[:3])
    sentence = f"{_says(asking[0])}; {names} answers and does nothing else"
    guilty = tuple(_guilty(unit) for unit in asking[:MAX_NAMED])
    return ProcessFinding(
        "stuck",
        sentence,
        guilty,
        reason=f"the same loop for {look.seconds:.0f} s, and nobody works on an answer",
    )


def _smallest_circle(waits: Waits, nodes: tuple[int, ...]) -> tuple[int, ...]:
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


# --- the answer -------------------------------------------------------------------------------------------


def _dead(look: JobLook, dead: Sequence[Process], root: Root) -> ProcessFinding:
    guilty = tuple(Guilty(p.pid, p.name, wait=p.ended, node=p.node) for p in dead[:MAX_NAMED])
    guilty += () if root.circle else tuple(_guilty(unit) for unit in root.units)
    names = _listed(f"{p.name} (pid {p.pid}) has ended: {p.ended}" for p in dead[:3])
    tail = _waiters(root, {u.process.where for u in root.units})
    blocked = "; ".join(dict.fromkeys(_says(u) for u in root.units[:2] if u.active))
    sentence = ". ".join(text for text in (names, blocked, tail) if text)
    return ProcessFinding(
        "stuck", sentence, guilty, _chain(root), root.edges, "a process of the job has ended, and others wait"
    )


def _joins_again(dead: Sequence[Process], root: Root) -> bool:
    """Whether a process of the same role was started in place of a dead one, and waits to join the group that the others
    still use: they never form it again."""
    return any(u.process.role == p.role for u in _late(root.units) for p in dead)


def _late(units: Sequence[Unit]) -> list[Unit]:
    """Those that still form a group which the others of a circle use."""
    late = [u for u in units if u.thread.wait.kind == "rendezvous"]
    return late if len(late) < len(units) else []


def _stuck(look: JobLook, roots: Sequence[Root]) -> ProcessFinding:
    best = roots[0]
    chosen = [best]
    guilty: dict[tuple[int, int], Guilty] = {}
    for root in chosen:
        for unit in (*_to_blame(_hub(root) or root.units), *_beside(root)):
            one = _guilty(unit)
            guilty.setdefault((one.pid, one.line), one)
    for unit in best.units if len(best.units) == 1 else ():
        if not unit.process.read:  # not Python: the line that started it is what people can see
            guilty |= {(g.pid, g.line): g for g in _starters(best, unit)}
    return ProcessFinding(
        "stuck",
        _sentence(best),
        tuple(guilty.values())[: 2 * MAX_NAMED],
        _chain(best),
        best.edges,
        "; ".join([f"nothing of this moved for {look.seconds:.0f} s", *_clues(look, best)]),
    )


def _clues(look: JobLook, root: Root) -> list[str]:
    """What no wait leads to: processes that those of a root started and that have ended without an error; who polls."""
    mine = {u.process.where for u in root.units}
    ended = [f"{p.name} (pid {p.pid})" for p in look.processes if (p.node, p.ppid) in mine and not p.alive]
    polls = [u for u in root.waits.units if u.thread.main and u.still and u.thread.wait.kind == "poll"]
    said = [f"ended: {', '.join(ended[:3])}{' …' if len(ended) > 3 else ''}"] if ended else []
    return said + [_says(unit) for unit in polls if unit.process.where not in mine][:3]


def _beside(root: Root) -> list[Unit]:
    """Threads of the same process that wait for the same object: nobody is left who could wake any of them."""
    unit = root.units[0]
    if len(root.units) > 1 or not unit.thread.wait.lock:
        return []
    direct = [root.waits.units[n] for n in root.waits.graph.waits_for_me.get(root.nodes[0], ())]
    same = (unit.process.where, unit.thread.wait.lock)
    return [u for u in direct if (u.process.where, u.thread.wait.lock) == same and u.still and u.active]


def _hub(root: Root) -> list[Unit]:
    """Of a circle the one that cannot tell its ZMQ peers apart, if each of them waits for it alone: which one it needs is
    unknown."""
    inside, edges = set(root.nodes), root.waits.edges
    middle = [
        n
        for n, u in zip(root.nodes, root.units, strict=True)
        if u.thread.wait.operation == "zmq" and all(inside & set(edges[m]) == {n} for m in inside - {n})
    ]
    return [root.waits.units[n] for n in middle] if len(inside) > 2 else []


def _to_blame(units: Sequence[Unit]) -> Sequence[Unit]:
    """Of a circle all, but of calls of a group and waits for keys those that wait for one partner, else the minority."""
    if late := _late(units):
        return late
    if len(units) == 1 or any(u.thread.wait.kind not in ("collective", "store") for u in units):
        return units
    partners = [u for u in units if u.thread.wait.operation in _P2P]
    sites = Counter(_site(u) for u in units)
    (common, count), *rest = sites.most_common()
    if partners or not rest or count * 2 <= len(units):
        return partners or (units if rest else ())
    return [u for u in units if _site(u) != common]


def _site(unit: Unit) -> tuple[object, ...]:
    user = unit.thread.user
    return unit.thread.wait.kind, unit.thread.wait.operation, user and (user.file, user.line)


_P2P = frozenset(
    {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
)


def _starters(root: Root, unit: Unit) -> list[Guilty]:
    direct = [root.waits.units[n] for n in root.waits.graph.waits_for_me.get(root.nodes[0], ())]
    reads = [u for u in direct if u.thread.wait.kind == "output" or u.process.pid == unit.process.ppid]
    return [_guilty(one) for one in reads][:1]


def _guilty(unit: Unit) -> Guilty:
    frame = unit.thread.user or next((f for f in unit.thread.frames if not f.native), None)
    where = (frame.file, frame.line, frame.name.rsplit(".", 1)[-1]) if frame is not None else ("", 0, "")
    thread = "" if unit.thread.main or unit.thread.task else f" (thread {unit.thread.name})"
    return Guilty(
        unit.process.pid,
        unit.process.name,
        *where,
        wait=unit.thread.wait.says + thread,
        node=unit.process.node,
    )


def _says(unit: Unit) -> str:
    thread = "" if unit.thread.main or unit.thread.task else f", thread {unit.thread.name}"
    left = unit.thread.wait.left_s
    rest = f" for {left:.0f} s more" if unit.thread.wait.kind != "poll" and left is not None else ""
    at = f" at {unit.thread.at}" if unit.thread.at else ""
    return f"{unit.process.name} (pid {unit.process.pid}{thread}) {unit.thread.wait.says}{rest}{at}"


def _sentence(root: Root) -> str:
    """From the one who must move first outwards."""
    units = list({(u.process.where, u.thread.user): u for u in root.units}.values())
    first = "; ".join(_says(u) for u in units[:4])
    if root.circle and len(units) > 1:
        first = f"a circle of waits: {first}"
    elif root.circle:
        first = f"{first}, and waits for itself"
    elif not units[0].active:
        first = f"{first}, while others wait for it"
    return ". ".join(text for text in (first, _waiters(root, {u.process.where for u in root.units})) if text)


def _waiters(root: Root, without: set[Where]) -> str:
    links = [link for link in _chain(root) if link.waits_for]
    return "; ".join(f"{link.role} {link.waits_for}" for link in links[:4])


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(texts)


def _chain(root: Root) -> tuple[ChainLink, ...]:
    """Who waits for whom, from the root outwards: one link for each role and line."""
    waits, done = root.waits, {u.process.where for u in root.units}
    links: list[ChainLink] = []
    seen, level = set(root.nodes), list(root.nodes)
    while level and len(links) < 20:
        next_level: list[int] = []
        groups: dict[tuple[object, ...], list[tuple[Unit, Unit]]] = {}
        for node in level:
            for n in waits.graph.waits_for_me.get(node, ()):
                if n in seen or n not in root.behind:
                    continue
                seen.add(n)
                next_level.append(n)
                unit, target = waits.units[n], waits.units[node]
                if unit.process.where not in done:
                    done.add(unit.process.where)
                    user = unit.thread.user
                    line = user and (user.file, user.line)
                    key = (unit.process.role, unit.thread.wait.says, line, target.process.role)
                    groups.setdefault(key, []).append((unit, target))
        links += [_link(pairs) for pairs in groups.values()]
        level = next_level
    return tuple(links)


def _link(pairs: Sequence[tuple[Unit, Unit]]) -> ChainLink:
    unit, target = pairs[0]
    processes = [one.process for one, _ in pairs]
    numbers = [p.number for p in processes if p.number is not None]
    name = processes[0].name if len(processes) == 1 else f"{processes[0].role} {_runs(numbers)}".strip()
    says, needs = unit.thread.wait.says, "needs"
    if len(processes) > 1:
        first, _, rest = says.partition(" ")
        says, needs = f"{first.removesuffix('s')} {rest}", "need"
    to = f", {needs} {target.process.name} (pid {target.process.pid})"
    return ChainLink(name, tuple(p.pid for p in processes), f"{says}{to}", unit.thread.at)


def _runs(numbers: Sequence[int]) -> str:
    from allranks.model.formatting import rank_runs

    return ",".join(rank_runs(numbers))


def _computes(look: JobLook, waits: Waits) -> ProcessFinding:
    """The busy thread that most processes wait for. A look cannot tell a long computation from a loop without end."""
    busy = [n for n, u in enumerate(waits.units) if u.thread.busy and not u.process.system]
    roots = (Root(waits, (n,)) for n in busy)
    root = max(roots, key=lambda one: (one.units[0].active, len(one.waiting)))
    unit, behind = root.units[0], _waiters(root, set())
    text = f"{_says(unit)} for the whole {look.seconds:.0f} s"
    at = unit.thread.at or "this line"
    advice = f"a long computation or a loop without end: --for 60 tells whether it leaves {at}"
    return ProcessFinding("unclear", f"{text}; {behind}" if behind else text, reason=advice)


def _takes_inside(look: JobLook, waits: Waits) -> list[Unit]:
    """Main threads that take their work from processes of the job, if all do so and nothing from outside can come to any."""
    mains = [u for u in waits.units if u.thread.main and not u.process.system]
    mains = [u for u in mains if u.thread.wait.kind not in LIFE and not _keeps_objects(u.process)]
    served = any(
        x.kind == "listen" for p in look.processes if not _keeps_objects(p) and not p.system for x in p.links
    )
    inside = all(u.thread.wait.ends and u.still for u in mains)
    return mains if inside and not served and not waits.outside else []


def _keeps_objects(process: Process) -> bool:
    """Whether it is the server of a multiprocessing manager."""
    frames = (f for t in process.threads for f in t.frames if f.file.endswith("multiprocessing/managers.py"))
    return any(f.name.endswith("serve_forever") for f in frames)


def _not_stuck(look: JobLook, waits: Waits, roots: Sequence[Root]) -> ProcessFinding:
    moving = [u for u in waits.units if u.thread.moved and not u.process.system]
    busy = [u for u in waits.units if u.thread.busy and not u.process.system]
    links = [p for p in look.processes for link in p.links if link.moved and not p.system and p.read]
    polls = {u.process.where for u in waits.units if u.thread.wait.kind == "poll" and u.still}
    ticks = [
        p for p in look.processes if p.ticks > 10 and p.where not in polls and not p.system and not p.ours
    ]
    if moving:
        names = _listed(dict.fromkeys(f"{u.process.name} (pid {u.process.pid})" for u in moving[:3]))
        return ProcessFinding("moving", f"stacks change in {names}", reason="stacks change")
    if soon := [
        root
        for root in roots
        if root.soon_s is not None
        and not root.units[0].process.system
        and root.still
        and (root.behind or root.units[0].thread.main)
    ]:
        unit = soon[0].units[0]
        return ProcessFinding(
            "moving", f"{_says(unit)}; then the job continues", reason="a sleep that ends soon"
        )
    if links:
        names = _listed(dict.fromkeys(f"{p.name} (pid {p.pid})" for p in links[:3]))
        return ProcessFinding("moving", f"data moves between processes: {names}", reason="data moves")
    if busy:
        return _computes(look, waits)
    if ticks:
        return ProcessFinding(
            "unclear",
            f"{ticks[0].name} (pid {ticks[0].pid}) used the processor for {ticks[0].ticks / 100:.1f} of {look.seconds:.0f} s",
            reason="look longer: --for 60",
        )
    if not any(p.read for p in look.processes):
        return ProcessFinding("unclear", "no stack of this job could be read", reason="see the notes")
    rests = {root.nodes[0] for root in roots if root.stays_alive}
    works = [u for n, u in enumerate(waits.units) if u.active and n not in rests and not u.process.system]
    if all(u.thread.wait.kind in LIFE for u in works):
        if closed := _takes_inside(look, waits):
            said = "; ".join(_says(u) for u in closed[:4])
            advice = (
                "idle, if their work comes from elsewhere; else who should bring it has ended or forgotten it"
            )
            return ProcessFinding(
                "unclear", f"nobody works, and these wait for each other's work: {said}", reason=advice
            )
        return ProcessFinding("moving", "idle: every process waits for its next work", reason="idle")
    still = [root for root in roots if root.still and root.units[0].active]
    timed = [root for root in still if root.timed_s is not None or root.asked is not None]
    blocked = [u for u in waits.units if u.active and u.still and u.thread.wait.kind not in LIFE]
    text = _says(blocked[0]) if blocked else "no process could be judged"
    text = _sentence((timed or still)[0]) if still else text
    advice = "nobody waits for it; look again in a minute: a line that is still the same then is stuck"
    if timed and timed[0].timed_s is not None:
        advice = f"this wait has a time limit: look again in {timed[0].timed_s:.0f} s"
    elif timed and (link := timed[0].asked) is not None:
        there = link.peer.split(">")[0].rsplit(" ", 1)[-1]
        advice = (
            f"no process of this job is at {there}, and {link.quiet_s:.0f} s ago data moved: look at that one"
        )
    return ProcessFinding("unclear", text, reason=advice)
