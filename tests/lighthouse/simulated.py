"""A whole job in simulated time: the real lighthouse service and the real plan of sources, with simulated processes.

Processes die, freeze, are started twice under one name, lose the lighthouse or each other, and lie about their state.
`Job.violations` collects what must never happen: see `check_*`. No sockets, no threads, no clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allranks.lighthouse.messages import Beat, Hello, Probed, Refused
from allranks.lighthouse.options import Options
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session
from allranks.manager.plan import FRESH, NOWHERE, Claim, ReplicaClaim, decide
from allranks.model.cluster import (
    DIALECT,
    Evicted,
    Member,
    MemberLeft,
    MemberLost,
    Probe,
    Quorum,
    QuorumWanted,
)

TICK_S = 0.1
CUT_S = 3.0  # after which a cut connection between two members is noticed
FORM_S = 2.0  # after which a group that cannot be made is given up
LIE = 1_000_000


class Handle:
    """Of a timer."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Timers:
    """The part of an asyncio loop that the service uses."""

    now: float = 0.0
    _heap: list[tuple[float, int, Handle, Callable[..., object], tuple[object, ...]]] = field(
        default_factory=list
    )
    _order: Any = field(default_factory=itertools.count)

    def call_later(self, delay: float, callback: Callable[..., object], *args: object) -> Any:
        handle = Handle()
        heapq.heappush(self._heap, (self.now + max(0.0, delay), next(self._order), handle, callback, args))
        return handle

    def call_soon(self, callback: Callable[..., object], *args: object) -> Any:
        return self.call_later(0.0, callback, *args)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            at, _, handle, callback, args = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            if not handle.cancelled:
                callback(*args)
        self.now = end


@dataclass(eq=False)
class Process:
    """One process of a replica; its other end at the lighthouse (sessions.Peer) too."""

    job: Job
    name: str
    session: str
    liar: bool = False
    garbage: bool = False
    hasty: bool = False  # gives every group up at once and asks again
    alive: bool = True
    frozen: bool = False
    cut: bool = False  # from the lighthouse
    refused: str = ""
    line: Session | None = None
    address: str = "sim"
    lease_until: float = 0.0
    quorum: Quorum | None = None
    phase: str = "idle"  # asking | forming | training
    since: float = 0.0
    news: bool = False
    broken: bool = False
    asked: Member | None = None
    step: int = 0
    term: int = 0
    seen: int = 0
    history: tuple[int, int] = (0, 0)  # of the state: equal only if all its commits are
    unreached: set[str] = field(default_factory=set)
    failures: tuple[tuple[str, ...], tuple[str, ...]] = (
        (),
        (),
    )  # reported with the request: unreached, unserved
    failed_serves: Counter[str] = field(default_factory=Counter)
    trouble: dict[str, float] = field(default_factory=dict)  # session of a member that is cut off, since when
    inbox: list[object] = field(default_factory=list)
    outbox: list[Callable[[], None]] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen and not self.refused

    @property
    def may_commit(self) -> bool:
        return self.job.now < self.lease_until

    # ---- sessions.Peer

    def deliver(self, message: object, frame: bytes) -> None:
        if self.line is not None:
            self.line.pending.clear()
        if self.cut or self.frozen:
            self.inbox.append(message)
        else:
            self.job.timers.call_later(0.001, self.receive, message)

    def close(self) -> None:
        if self.alive:
            self.line = None
            self.job.timers.call_later(0.2, self.connect)

    # ---- what it does

    def connect(self) -> None:
        if not self.runs or self.cut or (self.line is not None and self.line.peer is self):
            return
        last = self.quorum
        known = (last.epoch, last.number, last.round) if last else (0, 0, 0)
        hello = Hello(
            replica=self.name, session=self.session, node=self.session, probes=True,
            epoch=known[0], number=known[1], round=known[2],
        )  # fmt: skip
        answer = self.job.service.hello(self, hello)
        if isinstance(answer, Refused):
            if answer.code in ("superseded", "taken"):
                self.refused = answer.code
            else:
                self.job.timers.call_later(0.3, self.connect)
            return
        self.line = answer
        self.lease_until = self.job.now + self.job.options.lease_s
        if self.phase == "idle":
            self.ask()
        elif self.asked is not None:
            self.send_join()

    def send(self, action: Callable[[], None]) -> None:
        if self.cut:
            self.outbox.append(action)
        elif self.line is not None and self.alive:
            action()

    def ask(self, broken: bool = False) -> None:
        if not self.runs:
            return
        claim = Claim(
            term=LIE if self.liar else self.term, step=LIE if self.liar else self.step, seen=self.seen,
            address=f"{self.session}:1", broken=broken,
        )  # fmt: skip
        text = '{"ranks": "many"}' if self.garbage else ReplicaClaim(ranks=(claim,)).encode()
        unserved = tuple(session for session, times in self.failed_serves.items() if times >= 2)
        self.failures = (tuple(sorted(self.unreached)), unserved)
        self.asked = Member(
            self.name, self.session, address=f"{self.session}:1", step=claim.step, data=text,
            commit_failures=int(broken), dialect=DIALECT,
        )  # fmt: skip
        self.unreached.clear()
        self.trouble.clear()
        self.phase, self.since, self.news, self.broken = "asking", self.job.now, False, False
        self.send_join()

    def send_join(self) -> None:
        def join() -> None:
            assert self.line is not None
            if self.asked is not None and self.line.peer is self:
                known = self.quorum.round if self.quorum else 0
                refused = self.job.service.join(self.line, self.asked, known)
                if refused is not None:
                    self.phase, self.asked = "refused", None
                else:
                    self.job.service.note_failures(self.line, *self.failures)

        self.send(join)

    def receive(self, message: object) -> None:
        if self.alive and self.frozen:
            self.inbox.append(message)
        if not self.runs:
            return
        if isinstance(message, Quorum):
            self.take_quorum(message)
        elif isinstance(message, Probe):
            self.probe(message)
        elif isinstance(message, Refused) and message.code in ("superseded", "taken"):
            self.refused = message.code
        elif isinstance(message, MemberLost | MemberLeft | Evicted):
            self.leave_group(message.number)
        elif isinstance(message, QuorumWanted):
            if message.broken:
                self.leave_group(message.number)
            else:
                self.news = True

    def leave_group(self, number: int) -> None:
        if self.quorum is not None and number == self.quorum.number and self.phase in ("forming", "training"):
            self.ask(broken=True)

    def take_quorum(self, quorum: Quorum) -> None:
        if quorum.rank_of(self.name) is None or self.asked is None:
            return
        same = (
            self.quorum is not None and self.quorum.order == quorum.order and not self.asked.commit_failures
        )
        self.asked, self.quorum = None, quorum
        self.phase, self.since = ("training" if same else "forming"), self.job.now
        if self.hasty:
            self.ask(broken=True)

    def probe(self, probe: Probe) -> None:
        found = {session: self.job.linked(self.session, session) for session in probe.addresses}
        reached = tuple(session for session, good in found.items() if good)
        failed = tuple(session for session in found if session not in reached)
        delay = 1.5 if failed else 0.01

        def answer() -> None:
            line = self.line
            if line is not None:
                self.send(lambda: self.job.service.probed(line, Probed(reached, failed)))

        self.job.timers.call_later(delay, answer)


@dataclass
class Job:
    """The world: processes, links, a lighthouse."""

    options: Options = field(default_factory=Options)
    timers: Timers = field(default_factory=Timers)
    processes: list[Process] = field(default_factory=list)
    by_session: dict[str, Process] = field(default_factory=dict)
    cuts: set[frozenset[str]] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    commits: int = 0
    last_commit: float = 0.0
    formed: deque[tuple[float, int]] = field(default_factory=deque)
    committed_by: dict[str, list[str]] = field(default_factory=dict)  # name -> sessions, in order
    most_per_s: int = 0
    known_step: int = (
        0  # that an honest process has told the lighthouse, since the training began or started over
    )
    _number: int = 0

    def __post_init__(self) -> None:
        self.service = Service(self.options, self.timers, clock=lambda: self.timers.now)
        self.service.start()
        self.timers.call_later(TICK_S, self._tick)

    @property
    def now(self) -> float:
        return self.timers.now

    def run(self, seconds: float) -> None:
        self.timers.run(seconds)

    def linked(self, one: str, other: str) -> bool:
        """Whether the kernels of both can talk: a frozen process still accepts connections, a dead one does not."""
        return (
            self.by_session[one].alive
            and self.by_session[other].alive
            and (not self.cuts or frozenset((one, other)) not in self.cuts)
        )

    # ---- what happens to it

    def start(self, name: str, liar: bool = False, garbage: bool = False, hasty: bool = False) -> Process:
        session = f"{name}.{sum(process.name == name for process in self.processes)}"
        process = Process(self, name, session, liar, garbage, hasty)
        self.processes.append(process)
        self.by_session[session] = process
        process.connect()
        return process

    def kill(self, process: Process) -> None:
        process.alive = False
        line = process.line
        if line is not None and not process.cut:
            self.service.disconnected(line, process, clean=True)

    def freeze(self, process: Process, frozen: bool) -> None:
        process.frozen = frozen
        if not frozen:
            self._drain(process)

    def cut_lighthouse(self, process: Process, cut: bool) -> None:
        process.cut = cut
        if not cut:
            self._drain(process)

    def _drain(self, process: Process) -> None:
        """What TCP kept arrives, if the connection still stands; otherwise it connects again."""
        if process.cut or not process.runs:
            return
        line = process.line
        if line is not None and line.peer is process and self.service.sessions.get(process.name, 0) is line:
            inbox, process.inbox = process.inbox, []
            outbox, process.outbox = process.outbox, []
            for action in outbox:
                action()
            for message in inbox:
                process.receive(message)
        else:
            process.inbox.clear()
            process.outbox.clear()
            process.line = None
            process.connect()

    # ---- time

    def _tick(self) -> None:
        for process in self.processes:
            if process.runs and not process.cut and process.line is not None and process.line.peer is process:
                self.service.heard(process.line)
                if process.phase == "training" and not process.liar:
                    self.service.beat(process.line, Beat(step=process.step))
                    self.known_step = max(self.known_step, process.step)
                process.lease_until = self.now + self.options.lease_s
            elif process.runs and not process.cut and process.line is None:
                process.connect()
        for number in {p.quorum.number for p in self.processes if p.quorum is not None and p.runs}:
            self._run_group(number)
        self._count_quorums()
        self.timers.call_later(TICK_S, self._tick)

    def _count_quorums(self) -> None:
        """How many new numbers came within a second."""
        self.formed.append((self.now, self.service.state.number))
        while self.formed[0][0] < self.now - 1.0:
            self.formed.popleft()
        self.most_per_s = max(self.most_per_s, self.formed[-1][1] - self.formed[0][1])

    def _group(self, number: int) -> list[Process]:
        return [p for p in self.processes if p.quorum is not None and p.quorum.number == number and p.alive]

    def _run_group(self, number: int) -> None:
        inside = {p.session: p for p in self._group(number)}
        some = next(iter(inside.values()), None)
        if some is None or some.quorum is None:
            return
        sessions = [member.session for member in some.quorum.members]
        members = [inside.get(session) for session in sessions]
        for process in list(inside.values()):
            if process.runs and process.phase in ("forming", "training"):
                self._look_for_cuts(process, sessions)
        if all(member is not None and member.runs for member in members):
            whole = [member for member in members if member is not None]
            if any(
                not self.linked(one.session, other.session) for one, other in itertools.combinations(whole, 2)
            ):
                return
            if all(member.phase == "forming" for member in whole):
                self._make(whole)
            elif all(member.phase == "training" for member in whole):
                self._commit(whole)

    def _look_for_cuts(self, process: Process, sessions: list[str]) -> None:
        lost = [s for s in sessions if s != process.session and not self.linked(process.session, s)]
        process.trouble = {s: process.trouble.get(s, self.now) for s in lost}
        limit = FORM_S if process.phase == "forming" else CUT_S
        late = {s for s, since in process.trouble.items() if self.now - max(since, process.since) >= limit}
        if late:
            process.unreached |= late
            process.ask(broken=True)
        elif process.phase == "forming" and self.now - process.since > 40.0:
            process.ask(broken=True)

    def _make(self, members: list[Process]) -> None:
        """The group is made; those behind take the state of a source."""
        quorum = members[0].quorum
        assert quorum is not None
        plan = decide([ReplicaClaim.decode(member.data) for member in quorum.members], quorum.number)
        if plan.top == NOWHERE:
            for member in members:
                member.ask(broken=True)
            return
        if plan.top == FRESH and self.known_step > 1 and quorum.reached < self.known_step - 1:
            self.violations.append(
                f"step 0 again after step {self.known_step}: the members hear of {quorum.reached}"
            )
        for index in plan.healing:
            source = members[plan.sources_of(index)[0]]
            healer = members[index]
            if source.liar and plan.top != FRESH:
                healer.failed_serves[source.session] += 1
                healer.ask(broken=True)
                continue
            if source.step < healer.step and not healer.liar:
                self.violations.append(
                    f"{healer.session} at {healer.step} took the state of {source.session} at {source.step}"
                )
            healer.step, healer.term, healer.history = source.step, source.term, source.history
        if any(member.phase != "forming" for member in members):
            return
        self.known_step = plan.top[1]
        for member in members:
            member.failed_serves.clear()
            member.seen = max(member.seen, plan.term)
            member.phase, member.since = "training", self.now

    def _commit(self, members: list[Process]) -> None:
        if not all(member.may_commit for member in members):
            return
        if any(member.news for member in members):
            for member in members:
                member.ask()
            return
        honest = [member for member in members if not member.liar]
        if len({member.history for member in honest}) > 1:
            self.violations.append(f"members with different states commit: {[m.session for m in members]}")
        quorum = members[0].quorum
        assert quorum is not None
        self.commits, self.last_commit = self.commits + 1, self.now
        for member in members:
            member.step, member.term = member.step + 1, quorum.number
            member.history = (quorum.number, self.commits)
            if member.step > LIE // 2:
                self.violations.append(f"{member.session} holds a step that nobody has made: {member.step}")
            owners = self.committed_by.setdefault(member.name, [])
            if member.session in owners[:-1]:
                self.violations.append(
                    f"{member.session} commits after {owners[-1]} has: two processes of one name"
                )
            elif member.session not in owners:
                owners.append(member.session)
