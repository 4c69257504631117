"""Who waits for whom between the processes of a job, and who must move first. Pure; the graph is that of `waits.py`.

Nodes are threads (and suspended tasks of event loops). An edge leads to the thread that must move before this one can: the
holder of a lock, the server of a request, the member of a group that has not come. What waits for nothing else is the verdict:
a thread that does not move, a circle, a process that has ended or is idle while others need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from allranks.diagnosis.process_units import LIFE, Unit, Waits, is_in, is_same_lock, is_task
from allranks.diagnosis.waits import Graph
from allranks.model.stacks import JobLook, Process, ProcessLink, StackFrame, Where, is_user_file

#: A wait inside a process that nothing is known to end: one such wait does not end another one.
_BESIDE = frozenset({"event", "queue", "lock"})
_SHELL = re.compile(r"-?(\S*/)?((|ba|da|z|a|k)sh|sleep)( |$)")


class _Finder:
    """Finds the edges. Only reads the look."""

    def __init__(self, look: JobLook) -> None:
        self.look = look
        alive = [p for p in look.processes if p.alive and not p.ours]
        self.units = tuple(Unit(p, t) for p in alive for t in p.threads)
        self.processes = {p.where: p for p in look.processes}
        self.of: dict[Where, list[int]] = {}
        for number, unit in enumerate(self.units):
            self.of.setdefault(unit.process.where, []).append(number)
        self.ends: dict[str, list[Process]] = {}
        for process in alive:
            for link in process.links:
                self.ends.setdefault(link.end, []).append(process)
        self.sites: dict[StackFrame | None, set[str]] = {}  # a line -> the roles that are at it
        for unit in self.units:
            self.sites.setdefault(unit.thread.user, set()).add(unit.process.role)
        self.bereft = {
            (p.node, p.ppid) for p in look.processes if not p.alive
        }  # a process of theirs has ended
        self.units = tuple(self._reread(unit) for unit in self.units)
        self.moved: set[int] = set()
        self.outside: dict[int, ProcessLink] = {}
        self.full: set[int] = set()
        self.fed: set[int] = set()  # units whose wait nobody in their process is about to end

    def find(self) -> Waits:
        edges = {number: tuple(dict.fromkeys(self._targets(number))) for number in range(len(self.units))}
        for number in sorted(self.fed):
            behind = Graph(edges, ()).behind([number])
            edges[number] = tuple(n for n in self._feeders(number) if n not in behind) or edges[number]
        return Waits(self.look, self.units, edges, frozenset(self.moved), self.outside, frozenset(self.full))

    def _reread(self, unit: Unit) -> Unit:
        """What the threads of other processes say of a unit: that several roles are at its line, which tells little without
        its caller; that the process whose output it reads has ended, and who keeps the pipe open."""
        thread, own, wait = unit.thread, unit.process, unit.thread.wait
        frames = [f for f in thread.frames if is_user_file(f.file)]
        outer = next((f for f in frames[1:] if f.name != frames[0].name), None)
        if outer is not None and len(self.sites.get(thread.user, ())) > 1:
            thread = replace(thread, caller=f"{outer.file.rsplit('/', 1)[-1]}:{outer.line}")
        whole = thread.main or any(f.file.endswith("subprocess.py") for f in thread.frames)
        if wait.kind == "child" and wait.ends and whole and own.where in self.bereft:
            links = [one for one in own.links if one.end in wait.ends and one.side == "read" and one.fd]
            writers = self._peers(unit, links)
            names = " and ".join(f"{p.name} (pid {p.pid})" for p in writers[:3])
            says = f"waits for {names} to close the output of an ended process"
            says = says if names else "waits for more output of an ended process"
            if links and not any(p.ppid == own.pid for p in writers):
                thread = replace(thread, wait=replace(wait, kind="output", says=says))
        if wait.kind == "pipe" and unit.still and self._only_reads(unit):
            says = "reads from a pipe that no other process has open for writing"
            thread = replace(thread, wait=replace(wait, says=says, strong=True))
        return replace(unit, thread=thread)

    def _only_reads(self, unit: Unit) -> bool:
        """Whether those that have the other ends of its pipes open only read from the same pipes, and do nothing else. What
        never blocks is written by signal handlers."""
        links = [one for one in unit.process.links if one.end in unit.thread.wait.ends and one.side == "read"]
        near = [p for one in links for p in self.ends.get(one.peer, ())]
        if not near or not all(any(self._on_same_side(p, one, unit) for one in links) for p in near):
            return False
        others = (t for p in near for t in p.threads if not set(unit.thread.wait.ends) & set(t.wait.ends))
        peers = {one.peer for one in links}
        signals = any(x.owner == "signals" for p in near for x in p.links if x.end in peers)
        return not signals and all(t.wait.kind == "idle" and not t.moved for t in others)

    def _targets(self, number: int) -> Iterable[int]:
        unit = self.units[number]
        find = getattr(self, f"_{unit.thread.wait.kind}", None)
        return find(number, unit) if find is not None else ()

    # --- inside a process ---------------------------------------------------------------------------------

    def _lock(self, number: int, unit: Unit) -> list[int]:
        """The threads that stand inside a block of the same lock, here or, where processes share it, in others."""
        wait = unit.thread.wait
        near = self.of[unit.process.where]
        if wait.tids:
            return [n for n in near if self.units[n].thread.tid in wait.tids]
        places = (
            near
            if not wait.ends
            else [n for p in self._sharers(unit, wait.ends) for n in self.of.get(p.where, ())] + near
        )
        return [n for n in places if any(is_same_lock(one, wait.lock) for one in self.units[n].thread.holds)]

    def _thread(self, number: int, unit: Unit) -> list[int]:
        key = unit.thread.wait.key
        found = [n for n in self.of[unit.process.where] if key and self.units[n].thread.thread_key == key]
        return found or self._beside(number, unit)

    def _event(self, number: int, unit: Unit) -> list[int]:
        wait, near = unit.thread.wait, [n for n in self.of[unit.process.where] if n != number]
        if wait.ends:
            return self._shared(number, unit)
        clients: list[int] = []
        if wait.key == "future":
            found = [n for n in near if is_task(self.units[n].thread) and self.units[n].active]
            found = found or ([] if is_task(unit.thread) else self._beside(number, unit))
        elif not wait.setters:
            skipped = _BESIDE | LIFE if wait.lock else ()
            found = [n for n in self._beside(number, unit) if self.units[n].thread.wait.kind not in skipped]
        else:
            inside = [n for n in near if is_in(self.units[n].thread, wait.setters, unit.thread)]
            if not inside and wait.lost:
                return []
            # one that itself waits for its next work tells less than this wait
            found = [n for n in inside if self.units[n].active]
            others = [n for n in found if not wait.key or self.units[n].thread.wait.key != wait.key]
            clients = [] if others or (inside and not found) else self._clients(unit)
            found = [] if clients else found
            sent = {name for n in clients for name in self.units[n].thread.sent}
            self.full |= {number} if sent & {*wait.setters} else set()
        if not found and (unit.thread.main or unit.thread.user is not None):
            self.fed.add(number)
        return found or clients

    def _feeders(self, number: int) -> list[int]:
        """Those that do something in the processes that this one is connected with: what they send may end its wait."""
        own = self.units[number].process
        links = [one for one in own.links if one.kind in ("tcp", "unix") and not one.owner.startswith("gloo")]
        found = [n for p in self._peers(self.units[number], links) for n in self.of.get(p.where, ())]
        return [n for n in found if self.units[n].active and self.units[n].thread.wait.kind not in LIFE]

    def _queue(self, number: int, unit: Unit) -> list[int]:
        wait = unit.thread.wait
        if wait.lock == "_rlock" and any(p.ended for p in self.look.processes):
            return []  # a reader that was killed in get() keeps the readers' lock for ever
        if wait.ends:
            return self._shared(number, unit)
        found = self._event(number, unit)
        same = [n for n in found if self.units[n].thread.wait.key == wait.key and wait.key]
        return [n for n in found if n not in same]

    def _beside(self, number: int, unit: Unit) -> list[int]:
        """Threads of the process that do something."""
        near = [n for n in self.of[unit.process.where] if n != number]
        return [n for n in near if self.units[n].active and self.units[n].thread.wait.kind != "poll"]

    def _clients(self, unit: Unit) -> list[int]:
        """What would have to ask this process, so that it does what is missing."""
        links = [one for one in unit.process.links if one.kind == "tcp" and one.side == "server"]
        return [n for p in self._peers(unit, links) for n in self.of.get(p.where, ()) if self.units[n].active]

    def _peers(self, unit: Unit, links: Iterable[ProcessLink]) -> list[Process]:
        """The other processes at the other ends of links."""
        return _unique(p for one in links for p in self.ends.get(one.peer, ()) if p is not unit.process)

    # --- between processes --------------------------------------------------------------------------------

    def _sharers(self, unit: Unit, ends: Sequence[str]) -> list[Process]:
        return _unique(p for end in ends for p in self.ends.get(end, ()) if p is not unit.process)

    def _shared(self, number: int, unit: Unit) -> list[int]:
        """A semaphore that processes share: those of them that do not wait for it, too."""
        wait = unit.thread.wait
        found = [n for p in self._sharers(unit, wait.ends) for n in self.of.get(p.where, ())]
        found = [n for n in found if not set(self.units[n].thread.wait.ends) & set(wait.ends)]
        if works := [n for n in found if not self.units[n].still]:
            return works
        active = [n for n in found if self.units[n].active]
        acts = [n for n in active if self.units[n].thread.wait.kind not in LIFE]
        return acts or active or [n for n in found if self.units[n].thread.main]

    def _poll(self, number: int, unit: Unit) -> list[int]:
        """Something that another process changes, in memory that they share."""
        ends = [one.end for one in unit.process.links if one.owner == "memory"]
        if unit.thread.wait.operation != "memory":
            return []
        found = [n for p in self._sharers(unit, ends) for n in self.of.get(p.where, ())]
        kinds = {n: self.units[n].thread.wait.kind for n in found}
        idle = {"poll", "child", "thread"}  # these do not change it
        return [n for n in found if kinds[n] == "signal" or (self.units[n].active and kinds[n] not in idle)]

    def _signal(self, number: int, unit: Unit) -> list[int]:
        """Threads of other processes that do something: any of them may send a signal."""
        others = (
            n for n, u in enumerate(self.units) if u.process is not unit.process and not u.process.system
        )
        return [n for n in others if unit.active and not self.units[n].still]

    def _socket(self, number: int, unit: Unit) -> list[int]:
        return self._over(number, unit, unit.thread.wait.ends)

    _pipe = _socket

    def _answer(self, number: int, unit: Unit) -> list[int]:
        """A library's own threads hold the connection: those on which we sent last, else all that it has opened."""
        links = [one for one in unit.process.links if one.kind in ("tcp", "unix")]
        if unit.thread.wait.operation == "zmq":
            links = [one for one in links if one.owner.startswith("zmq")]
        else:
            links = [one for one in links if one.side == "client" or one.kind == "unix"]
            asked = [one for one in links if one.turn == "awaits"]
            links = asked or [one for one in links if one.side == "client"] or links
        if links:
            return self._over(number, unit, [one.end for one in links])
        below = [
            p for p in self.look.processes if (p.node, p.ppid) == unit.process.where
        ]  # they may yet connect
        return [n for p in below for n in self.of.get(p.where, ()) if self.units[n].active]

    def _over(self, number: int, unit: Unit, ends: Sequence[str]) -> list[int]:
        """The units at the other end of links: those that wait on the same link or serve a request come first."""
        mine = [one for one in unit.process.links if one.end in ends]
        if any(one.moved for one in mine):
            self.moved.add(number)
        found: list[int] = []
        for link in mine:
            others = self._peers(unit, [link]) or self.ends.get(link.peer, [])
            if not others:
                self.outside[number] = link
            # who made a pair of sockets may have kept both
            others = [p for p in others if all(one.end != link.end for one in p.links)] or others
            if link.kind == "pipe":
                others = [p for p in others if not self._on_same_side(p, link, unit)]
                writers = [p for p in others if not self._keeps_open(p, link, unit)]
                if others and not writers:
                    self.outside[number] = link
                others = writers
            if len(others) > 1:  # any of them may write: those that were forked keep the end, too
                others = [p for p in others if self._works(p)] or others
            for process in _unique(others):
                # both ends are ours: only a thread that uses the other one can help
                own = process is unit.process
                found += self._users(process, link.peer) if own else self._serving(process, link.peer, number)
        return found

    def _keeps_open(self, process: Process, link: ProcessLink, unit: Unit) -> bool:
        """Whether a shell or `sleep` only keeps a named pipe open for others, or a process has the descriptor from such a shell."""
        above = self.processes.get((process.node, process.ppid), process)
        fds = [{one.fd for one in p.links if one.end == link.peer} for p in (process, above)]
        shell = above if _SHELL.match(above.title) and fds[0] & fds[1] else process
        below = [p for p in self.look.processes if (p.node, p.ppid) == shell.where and p is not unit.process]
        return bool(link.named and _SHELL.match(shell.title)) and not any(p.read for p in below)

    def _works(self, process: Process) -> bool:
        return any(not self.units[n].still for n in self.of.get(process.where, ()))

    def _on_same_side(self, process: Process, link: ProcessLink, unit: Unit) -> bool:
        """Whether a process with both ends of a pipe uses the same one as this unit: another reader of a queue."""
        return any(link.end in self.units[n].thread.wait.ends for n in self.of.get(process.where, ()))

    def _users(self, process: Process, end: str) -> list[int]:
        return [n for n in self.of.get(process.where, ()) if end in self.units[n].thread.wait.ends]

    def _serving(self, process: Process, end: str, number: int) -> list[int]:
        here = [n for n in self.of.get(process.where, ()) if n != number]
        active = [n for n in here if self.units[n].active]
        for chosen in (
            [n for n in active if end in self.units[n].thread.wait.ends],
            [n for n in active if self.units[n].thread.handles],
            [n for n in active if self.units[n].thread.wait.kind != "poll"],
            [n for n in here if end in self.units[n].thread.wait.ends],
            active,
            [n for n in here if self.units[n].thread.wait.kind != "idle"],
        ):
            if chosen:
                return chosen
        return self._behind_broker(process, number) or [n for n in here if self.units[n].thread.main]

    def _behind_broker(self, process: Process, number: int) -> list[int]:
        """Of a process that only keeps what others put there, a multiprocessing manager or a server that is not Python: the
        other processes that use it. Those that only take their work from it count for a wait that needs more than work."""
        frames = (f for n in self.of.get(process.where, ()) for f in self.units[n].thread.frames)
        native = not process.read and not process.notes and any(x.kind == "listen" for x in process.links)
        if not native and not any(frame.file.endswith("multiprocessing/managers.py") for frame in frames):
            return []
        users = _unique(p for one in process.links for p in self.ends.get(one.peer, ()))
        others = [p for p in users if p is not process and p is not self.units[number].process]
        found = [n for p in others for n in self.of.get(p.where, ())]
        mains = (
            [n for n in found if self.units[n].thread.main] if native and self.units[number].active else []
        )
        return [n for n in found if self.units[n].active] or mains

    def _connect(self, number: int, unit: Unit) -> list[int]:
        """The process that listens at the address."""
        kind, _, name = unit.thread.wait.path.partition(" ")
        found = [
            p
            for end, rows in self.ends.items()
            if end.startswith(kind) and end.endswith(f" listen {name}")
            for p in rows
        ]
        return [n for p in _unique(found) if p is not unit.process for n in self._whole(p.where)]

    def _open(self, number: int, unit: Unit) -> list[int]:
        """Threads whose function names the same file in or behind its line: they open its other end."""
        name = unit.thread.wait.path.rsplit("/", 1)[-1]
        others = [n for n, u in enumerate(self.units) if u.process is not unit.process]
        return [n for n in others if name in self.units[n].thread.later]

    def _child(self, number: int, unit: Unit) -> list[int]:
        """Those of its processes that do something, where there are any: a resource tracker or `sleep` in the background does
        not. An idle one stands for those that it started: the server of multiprocessing that forks."""
        found = self._file_lock(number, unit)
        idle = {self.units[n].process.where for n in found if not self.units[n].active}
        below = [p for p in self.look.processes if (p.node, p.ppid) in idle]
        found += [n for p in below for n in self._whole(p.where)]
        found = [n for n in found if self.units[n].active] or found
        return [
            n for n in found if self.units[n].process.read or not _SHELL.match(self.units[n].process.title)
        ] or found

    def _output(self, number: int, unit: Unit) -> list[int]:
        return [n for n in self._over(number, unit, unit.thread.wait.ends) if self.units[n].active]

    def _file_lock(self, number: int, unit: Unit) -> list[int]:
        wait = unit.thread.wait
        over = self._over(number, unit, wait.ends)
        pids = [p for p in wait.pids if (unit.process.node, p) in self.processes]
        return over + [n for pid in pids for n in self._whole((unit.process.node, pid))]

    def _whole(self, where: Where) -> list[int]:
        here = self.of.get(where, [])
        return [n for n in here if self.units[n].active] or [n for n in here if self.units[n].thread.main]

    def _ray(self, number: int, unit: Unit) -> list[int]:
        """Those that run its calls, where Ray says so; else actors that it is connected to and that run something."""
        if calls := [one for one in self.look.tasks if one.caller == unit.process.where]:
            workers = dict.fromkeys(one.worker for one in calls if one.worker is not None)
            return [n for where in workers for n in self._whole(where) if n != number]
        peers = {
            p.where for one in unit.process.links for p in self.ends.get(one.peer, ()) if one.kind == "tcp"
        }
        actors = [
            p
            for p in self.look.processes
            if p.alive and p.title.startswith("ray::") and p is not unit.process and not p.system
        ]
        near = [p for p in actors if p.where in peers] or actors
        return [
            n
            for p in near
            for n in self.of.get(p.where, ())
            if self.units[n].active and self.units[n].thread.handles
        ]

    # --- process groups -----------------------------------------------------------------------------------

    def _collective(self, number: int, unit: Unit) -> list[int]:
        """The members of the group that have not come; where they all have, the members."""
        if late := self._late(unit.process):
            return [n for p in late for n in self._whole(p.where)]
        groups: dict[str, list[ProcessLink]] = {}
        for link in unit.process.links:
            if link.owner.startswith("gloo"):
                groups.setdefault(link.owner, []).append(link)
        if any(link.moved for links in groups.values() for link in links):
            self.moved.add(number)
        sets = [self._peers(unit, links) for links in groups.values()]
        waiting = [[p for p in members if self._collects(p)] for members in sets]
        # not a group whose members only wait for their next work, if another one may be it
        if not any(waiting):
            waiting = [
                [p for p in members if any(self.units[n].active for n in self.of.get(p.where, ()))]
                for members in sets
            ]
        if any(waiting):  # another member waits, too: that is the group
            sets = [members for members, come in zip(sets, waiting, strict=True) if come]
        found = [p for members in sets for p in members] or self._siblings(unit)
        missing = [p for p in found if not self._collects(p)]
        return [n for p in _unique(missing or found) for n in self._whole(p.where)]

    def _device(self, number: int, unit: Unit) -> list[int]:
        """A device waits for nobody, but for the calls of a group that it was given."""
        return [n for p in self._late(unit.process) for n in self._whole(p.where)]

    def _late(self, process: Process) -> list[Process]:
        """The members of a group that have not begun the call in which this process is, by the black boxes of both."""
        for call in (one for one in process.calls if one.open):
            others = [
                (p, one.number)
                for p in self.look.processes
                for one in p.calls
                if one.key == call.key and p is not process
            ]
            if late := [p for p, number in others if number < call.number]:
                return late
        return []

    def _collects(self, process: Process) -> bool:
        kinds = {self.units[n].thread.wait.kind for n in self.of.get(process.where, ())}
        return bool(kinds & {"collective", "rendezvous"})

    def _siblings(self, unit: Unit) -> list[Process]:
        """Other processes that may be of the same world: of the same parent, not machinery."""
        p = unit.process
        found = [o for o in self.look.processes if o.alive and o is not p and not o.system and not o.ours]
        world = [o for o in found if o.rank is not None and o.world == p.world] if p.rank is not None else []
        return world or [o for o in found if o.ppid == p.ppid and o.node == p.node]

    def _rendezvous(self, number: int, unit: Unit) -> list[int]:
        """Those at the same store, where that is known, else of the same world, that are not forming it, too; then those of
        the job that the group lacks."""
        met = self._at_store(unit)
        others = [n for n in met if self.units[n].thread.wait.kind != "rendezvous"]
        if not met:
            missing = [p for p in self._siblings(unit) if not self._collects(p)]
            others = [n for p in missing for n in self._whole(p.where) if self.units[n].active]
        return others or [n for p in self._absent(unit, met) for n in self._whole(p.where)]

    def _absent(self, unit: Unit, met: Sequence[int]) -> list[Process]:
        """Idle processes that have not come to a store, if something shows that they belong to the group that forms there,
        and the group lacks as many: their rank, a call ahead of them that joins, the store's port on their command line, the
        role of one that has come."""
        own, wait = unit.process, unit.thread.wait
        come = {own.where, *(self.units[n].process.where for n in met)}
        if not wait.ends:
            come |= {u.process.where for u in self.units if u.thread.wait.kind == "rendezvous"}
        ports = {end.rsplit(":", 1)[-1] for end in wait.ends}
        away = [p for p in self.look.processes if p.alive and p.where not in come and not self._collects(p)]
        away = [p for p in away if not (p.system or p.ours)]
        signs: tuple[Callable[[Process], bool], ...] = (
            lambda p: own.rank is not None and p.rank is not None and p.world == own.world == wait.members,
            lambda p: any("init_process_group" in t.later for t in p.threads),
            lambda p: p.pid != own.ppid and bool(ports & set(re.findall(r"\d+", p.title))),
            lambda p: any(o.role == p.role for o in self.look.processes if o.where in come),
        )
        found = ([p for p in away if sign(p)] for sign in signs)
        return next((some for some in found if 0 < len(some) <= wait.members - len(come)), [])

    def _store(self, number: int, unit: Unit) -> list[int]:
        """All that are connected to the store and do not wait for a key themselves."""
        return [n for n in self._at_store(unit) if self.units[n].thread.wait.kind != "store"]

    def _at_store(self, unit: Unit) -> list[int]:
        """All that are connected to the store on which a unit waits."""
        ends = unit.thread.wait.ends
        servers = _unique(
            p for link in unit.process.links if link.end in ends for p in self.ends.get(link.peer, ())
        )
        ports = {
            link.end.rsplit(">", 1)[0].rsplit(":", 1)[-1]
            for p in servers
            for link in p.links
            if any(link.end == o.peer for o in unit.process.links if o.end in ends)
        }
        users = [
            p
            for p in self.look.processes
            if p.alive
            and any(
                link.kind == "tcp" and link.side == "client" and link.end.rsplit(":", 1)[-1] in ports
                for link in p.links
            )
        ]
        others = [p for p in _unique([*servers, *users]) if p is not unit.process]
        return [n for p in others if not p.system for n in self._whole(p.where)]


def _unique(processes: Iterable[Process]) -> list[Process]:
    return list({p.where: p for p in processes}.values())


def find_waits(look: JobLook) -> Waits:
    """The graph of a job."""
    return _Finder(look).find()
