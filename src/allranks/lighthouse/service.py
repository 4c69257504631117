"""The core of a lighthouse: takes client reports, detects lost replicas, and lets the coordinator decide.

No sockets here: clients are `Peer`s (sessions.py), time comes from an AwakeClock, timers from the event loop.
Runs on the loop's thread only. The web page uses `event_log`, `evict()`, `let_in()` and `agents` (evidence,
incidents); another protocol uses `hello()`, `join()`, `heard()`, `leave()` and `disconnected()` with its own Peer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from allranks.lighthouse.agents import CUT_BACK_S, SILENT_BACK_S, Agents
from allranks.lighthouse.detect import AwakeClock
from allranks.lighthouse.history import History
from allranks.lighthouse.messages import Beat, Hello, NoQuorumYet, Pong, Probed, Refused, Welcome, encode
from allranks.lighthouse.options import Options
from allranks.lighthouse.quorum_coordinator import Keep, QuorumCoordinator, Timers
from allranks.lighthouse.sessions import (
    EventLog,
    Names,
    Peer,
    Session,
    Sessions,
    deliver,
    merged,
    refuse_names,
    signed,
    superseded,
)
from allranks.lighthouse.state import QuorumState
from allranks.lighthouse.status import PersistedState
from allranks.lighthouse.training import LostSteps, TrainingView
from allranks.model.cluster import (
    DIALECT,
    Evicted,
    LetIn,
    Member,
    MemberLeft,
    MemberLost,
    Quorum,
    QuorumWanted,
    find_fault,
)

log = logging.getLogger("allranks.lighthouse")

_PONG = encode(Pong())
#: A rank whose liveness proxy was killed starts another one, and reconnects within this time.
PROXY_BACK_S = 5.0


@dataclass
class Service:
    """See the module. `start()` begins the sweep for silent replicas, `close()` ends it."""

    options: Options
    timers: Timers
    address: str = ""
    job: str = ""
    clock: Callable[[], float] = time.monotonic
    leading: bool = True
    leader: str = ""  # where clients are redirected while we do not lead
    draining: bool = False
    started: float = 0.0
    awake: AwakeClock = field(init=False)
    state: QuorumState = field(init=False)
    sessions: Sessions = field(init=False)
    event_log: EventLog = field(init=False)
    coordinator: QuorumCoordinator = field(init=False)
    agents: Agents = field(init=False)
    training: TrainingView = field(init=False)
    history: History = field(default_factory=History)  # for the page
    on_health: Callable[[], object] = lambda: None  # an agent reports another health of its ranks
    token_file: str = ""  # where users find the job token
    names: Names = field(default_factory=Names)
    _sweep_timer: asyncio.TimerHandle | None = None
    _next_sweep: float = 0.0
    _audience: tuple[frozenset[str], frozenset[str], frozenset[str]] = (frozenset(), frozenset(), frozenset())
    _lost_steps: LostSteps | None = None  # last reported
    # sessions reported as finished that have not departed yet
    _finishing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.awake = AwakeClock(max_step_s=min(0.5, self.options.heartbeat_timeout_s / 4))
        self.state = QuorumState(self.options)
        self.sessions = Sessions()
        self.event_log = EventLog(self.sessions)
        parts = self.timers, self.now, self.state, self.sessions, self.event_log
        self.coordinator = QuorumCoordinator(self.options, *parts, active=self.leading)
        self.coordinator.on_new = self._check_lost_steps
        serving = lambda: self.leading and not self.draining  # noqa: E731
        self.agents = Agents(self.sessions, self.event_log, self.timers, self.now, serving)
        self.training = TrainingView(self.now)
        self.event_log.subscribe(self.training.happened)

    def _check_lost_steps(self, quorum: Quorum) -> Quorum:
        lost = self.training.begin_at(quorum.max_step, quorum.names)
        if lost is None or self.state.over:
            return quorum
        self._report_lost_steps(lost, quorum.number)
        return replace(quorum, reached=lost.reached)

    def _report_lost_steps(self, lost: LostSteps, number: int = 0) -> None:
        """Logs an event and asks every agent for an incident, once per loss."""
        if self._lost_steps != lost:
            self._lost_steps = lost
            self.event_log.event("went_back", lost.text, number=number)
            if self.agents.count and not lost.restored:
                self.agents.collect(lost.text)

    # ---- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the sweep for silent replicas."""
        self.started = self.clock()
        if self.leading:
            self.state.settling_until = self.now() + self.options.start_grace_s
        self._sweep()

    def close(self) -> None:
        """Stops timers; connections are the server's."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self.coordinator.close()

    def now(self) -> float:
        """Awake seconds."""
        return self.awake.tick(self.clock())

    def lead(self, kept: PersistedState, keep: Keep) -> None:
        """Starts leading with the state that the last leader saved."""
        self.leading, self.leader = True, ""
        self.state = QuorumState(self.options, kept.epoch, kept.number, evicted=dict(kept.evicted))
        self.coordinator.reset(self.state, active=True, keep=keep)
        self.event_log.event("leader", f"leading in epoch {kept.epoch}")
        if kept.quorum is not None:
            # a replica readmitted since that quorum was formed is no longer evicted: the saved state is newer
            self.take_over(replace(kept.quorum, evicted=tuple(sorted(kept.evicted))), kept.finished)
        self.state.epoch = kept.epoch

    def follow(self, leader: str) -> None:
        """Another lighthouse leads ("" when unknown): redirects all clients to it."""
        if self.leading:
            refused = Refused("moved", "this lighthouse no longer leads", leader)
            frame = encode(refused)
            for session in list(self.sessions):
                session.tell(refused, frame, close=True)
            self.event_log.event("leader", f"no longer leading; the leader is {leader or 'unknown'}")
        self.leading, self.leader = False, leader
        self.sessions.clear()
        self.event_log.clear()
        self.state = QuorumState(self.options, epoch=self.state.epoch, number=self.state.number)
        self.coordinator.reset(self.state, active=False, keep=None)

    # ---- connecting -------------------------------------------------------------------------------------

    def hello(self, peer: Peer, hello: Hello) -> Session | Refused:
        """Admits a client whose token and version the listener has checked. Sends Welcome and the missed notices."""
        if self.draining:
            return Refused("draining", "this lighthouse is closing", self.leader)
        if not self.leading:
            return Refused("moved", "this lighthouse does not lead", self.leader)
        if refused := refuse_names(hello.replica, hello.node, hello.session):
            return refused
        observer = hello.role == "observer"
        name = hello.replica or f"{hello.node or 'observer'}#{hello.session[:8] or uuid.uuid4().hex[:8]}"
        key = hello.session or uuid.uuid4().hex
        if refused := self._refuse_second(name, key, observer):
            return refused
        here = self.state.replicas.get(name)
        unknown = key not in self.names.lost and (here is None or here.session != key)
        session = self._enter(peer, hello, name, key, observer)
        last = (hello.epoch, hello.number, hello.round)
        recall = self.state.note_last_quorum(self.now(), last, unknown)
        options, known = self.options, (self.state.epoch, self.state.number)
        times = options.beat_s, options.heartbeat_timeout_s
        welcome = Welcome(self.address, *times, *known, recall, lease_s=options.lease_s)
        peer.deliver(welcome, encode(welcome))
        deliver(session, session.pending)
        if key in self.names.lost and not observer:
            lost = self.names.lost.pop(key)
            self.sessions.push([replace(lost, reason=f"declared lost: {lost.reason}")], [name])
        self.coordinator.soon()
        return session

    def _enter(self, peer: Peer, hello: Hello, name: str, key: str, observer: bool) -> Session:
        now = self.now()
        here = self.sessions.of(name)
        if here and here[0].session != key:  # an observer: a replica was refused above
            self._supersede(name)
        self.names.retire_lost(name, key)
        known = self.state.replicas.get(name)
        session = self.sessions.get(name, hello.rank)
        returned = known is not None or key in self.names.lost
        if session is not None:
            previous, session.peer, session.heard = session.peer, peer, now
            session.connections, session.node = hello.connections, hello.node
            if previous is not None and previous is not peer:
                previous.close()
        else:
            session = Session(name, key, hello.rank, observer, hello.node, hello.connections, peer, now)
            session.proxy = hello.proxy
            self.sessions.add(session)
        if known is not None or len(self.sessions.of(name)) >= hello.connections:
            # a replica is live once all its ranks are connected
            self.state.connect(now, name, key, hello.node, observer, hello.probes)
        if observer:
            log.debug("observer %s connected from %s", name, peer.address)
        elif hello.rank == 0:
            kind, words = ("returned", "is back") if returned else ("connected", "connected")
            self.event_log.event(kind, f"{name} {words} from {peer.address}", name)
        self._next_sweep = min(self._next_sweep, now + self.options.heartbeat_timeout_s)
        return session

    def _refuse_second(self, name: str, key: str, observer: bool) -> Refused | None:
        """One process per name; of two observers the newer one wins."""
        others = (each for each in self.sessions.of(name) if each.session != key)
        first = next((each for each in others if not observer and not each.observer), None)
        refused = self.names.refuse(name, key, first, self.now(), self.options.beat_s)
        if refused is not None and refused.code == "taken":
            self.event_log.event("refused", f"a second {name} was refused: {refused.message}", name)
        return refused

    def _supersede(self, name: str) -> None:
        """A new observer of the same name replaces the old one."""
        refused = superseded(name)
        for session in self.sessions.of(name):
            self.names.retire(name, session.session)
            session.tell(refused, encode(refused))
        self._lose(name, "restarted under the same name", certain=True)

    def recalled(self, quorum: Quorum) -> None:
        """A client answers a recall with the quorum that an earlier lighthouse formed."""
        state, last = self.state, self.state.last
        newer = last is None or (quorum.number, quorum.round) > (last.number, last.round)
        if newer or state.yielding:
            displaced = state.continuing - set(quorum.names)
            self.take_over(quorum)
            reason = f"quorum {quorum.number} of an earlier lighthouse is training: it comes first"
            self.event_log.notify(QuorumWanted(reason, state.number), displaced)

    def take_over(self, quorum: Quorum, finished: Iterable[str] = ()) -> None:
        """Continues from a quorum formed by an earlier lighthouse; its members are expected to reconnect."""
        now, members = self.now(), {member.replica: member for member in quorum.members}
        heard = now + self.options.return_s - self.options.heartbeat_timeout_s
        for name in self.state.adopt(now, quorum, finished):
            member = members[name]
            self.sessions.add(Session(name, member.session, 0, False, member.node, 1, None, heard))
        self.coordinator.reason = f"taken over: {quorum.reason}"
        text = f"took over quorum {quorum.number} of {len(quorum.members)} members"
        self.event_log.event("quorum", text, number=quorum.number)
        self._next_sweep = min(self._next_sweep, now + self.options.heartbeat_timeout_s)
        self.coordinator.soon()

    # ---- connected --------------------------------------------------------------------------------------

    def heard(self, session: Session) -> None:
        session.heard = self.now()

    def beat(self, session: Session, beat: Beat) -> None:
        """A heartbeat with a payload."""
        if beat.step >= 0 and beat.step != session.step:
            session.step = beat.step
            lost = self.training.note_step(session.replica, beat.step, session.heard)
            if lost is not None and self.state.last is None:  # whole-job mode: there is no quorum
                self._report_lost_steps(lost)
        if beat.progress >= 0:
            session.progress = beat.progress
            if session.observer and beat.step < 0:
                self.training.note_calls(session.replica, beat.progress, session.heard)
        before, session.idle_s, session.health = session.health, beat.idle_s, beat.health
        if before != beat.health and session.observer:
            self.on_health()
        if beat.ping:
            session.tell(Pong(), _PONG)

    def join(
        self, session: Session, member: Member, known: int = -1, patience_s: float = 0.0
    ) -> Refused | None:
        """One rank requests a quorum; the replica joins once all its ranks have. Returns a Refused if it may not.

        `known` is the last round that the rank received (-1: it missed none). A member that missed the current round
        gets it again, because the others already train in it and would wait.
        """
        name, last = session.replica, self.state.last
        if session.observer:
            return Refused("observer", f"{name} is an observer and cannot be a member")
        if name in self.state.evicted:
            return Refused("evicted", f"{name} is evicted: {self.state.evicted[name]}")
        dialect = session.dialect or member.dialect
        if dialect == DIALECT and (fault := find_fault(member.data)):
            text = f"the claim of {name} ({session.node or '?'}) is malformed: {fault}"
            self.event_log.event("refused", text, name)
            session.asking = None
            self.state.refuse(name)
            self.coordinator.soon()
            return Refused("claim", text)
        if last is not None and 0 <= known < last.round and name in self.state.continuing and session.peer:
            session.peer.deliver(last, encode(last))
            return None
        session.asking = signed(member, session, dialect)
        session.step = max(session.step, member.step)
        self.training.note_step(name, session.step, self.now())
        ranks = self.sessions.of(name)
        if name in self.state.replicas and sum(1 for each in ranks if each.asking) >= session.connections:
            joined = merged(ranks) if len(ranks) > 1 else session.asking
            self.state.ask(self.now(), name, joined, patience_s)
            self.coordinator.soon()
        return None

    def note_failures(self, session: Session, unreached: Collection[str], unserved: Collection[str]) -> None:
        """A rank that joins reports sessions that it could not reach, or fetch a state from, in the last quorum."""
        if session.replica in self.state.replicas:
            self.state.note_failures(self.now(), session.replica, unreached, unserved)

    def withdraw(self, session: Session) -> NoQuorumYet:
        """One rank withdraws its request; returns why there was no quorum."""
        name = session.replica
        reason, missing = self.coordinator.wait_reason()
        asked = sum(1 for each in self.sessions.of(name) if each.asking)
        if name not in self.state.asking and asked < session.connections:
            reason = f"only {asked} of {session.connections} ranks of {name} requested a quorum"
        session.asking = None
        self.state.withdraw(name)
        self.coordinator.soon()
        ages = {who: self.awake.now - each.heard for who in missing for each in self.sessions.of(who)}
        heard = ", ".join(f"{who} last heard {max(0.0, age):.1f} s ago" for who, age in ages.items())
        return NoQuorumYet(reason + (f" ({heard})" if heard else ""), missing)

    def probed(self, session: Session, probed: Probed) -> None:
        """A client has tried to reach others. Only rank 0's result counts for its replica."""
        if session.rank == 0 and not session.observer:
            reach, now = self.state.reach, self.now()
            known = {each.session: name for name, each in self.state.replicas.items()}
            for other in known.keys() & set(probed.reached):
                reach.prove(session.session, other)
            failed = known.keys() & set(probed.unreached)
            reach.report(now, session.session, failed)
            for other in failed:
                text = self.state.describe_unreached(session.replica, known[other])
                self.event_log.event("unreachable", text, known[other])
            self.coordinator.soon()

    # ---- departing --------------------------------------------------------------------------------------

    def leave(
        self, session: Session, reason: str, finished: bool = False, term: int = 0, step: int = -1
    ) -> None:
        """A replica or observer shuts down cleanly (see messages.Leave)."""
        name = session.replica
        if session.observer or name not in self.state.replicas:
            self._drop(session)
            if session.observer:
                self.agents.leave(name, reason)
            return
        number, targets = self._number_of(name), self._concerned(name)
        self.state.leave(self.now(), name, reason, step)
        self._drop(session)
        self.event_log.event("left", f"{name} left: {reason or 'no reason given'}", name, number)
        self.event_log.notify(MemberLeft(name, reason, number, term, step), targets)
        self.coordinator.soon()
        if finished:
            self._finishing.add(session.session)
        self._note_finish(name, session.session)

    def finish(self, name: str) -> bool:
        """A departed or departing member completed its training; False when no such member is known."""
        if here := self.state.replicas.get(name):  # its shutdown message is still on the way
            self._finishing.add(here.session)
            return True
        known = self.state.finish(self.now(), name)
        if known:
            over = ": the training has finished" if self.state.over else ""
            self.event_log.event("finished", f"{name} has finished{over}", name, self.state.number)
            self.coordinator.soon()
        return known

    def _note_finish(self, name: str, session: str) -> None:
        """A session has departed: marks it as finished if that was reported before."""
        if session in self._finishing:
            self._finishing.discard(session)
            self.finish(name)

    def accuse(self, name: str, reason: str, stopped: bool = False) -> bool:
        """A replica's liveness proxy or agent reports that it is dead, or stopped."""
        if name not in self.sessions.by_replica:
            self.coordinator.soon()
            return self.state.confirm_death(name)
        self._lose(name, reason, certain=True, stopped=stopped)
        return True

    def disconnected(self, session: Session, peer: Peer, clean: bool) -> None:
        """A connection ended without a shutdown message. An orderly close means a death; an error may be temporary."""
        if session.peer is peer:
            session.peer, session.cut = None, not clean
            grace = self.options.grace_s if clean else self.options.reset_grace_s
            self.timers.call_later(grace, self._grace_over, session)

    def _grace_over(self, session: Session) -> None:
        current = self.sessions.get(session.replica, session.rank)
        if current is not session or session.peer is not None or self.draining:
            return
        if session.observer:
            self._drop(session)
            self.agents.lose(session, CUT_BACK_S if session.cut else 0.0)
            return
        proxy = session.proxy and not session.cut
        back_s = PROXY_BACK_S if proxy else None
        self._lose(session.replica, session.end, not session.cut and not proxy, back_s)

    def _sweep(self) -> None:
        """Finds silent sessions when one may be due; ticks the awake clock in between."""
        now = self.now()
        if now >= self._next_sweep:
            silent, self._next_sweep = self.sessions.find_silent(now, self.options.heartbeat_timeout_s)
            for session in silent:
                if self.sessions.get(session.replica, session.rank) is session:
                    self._lose_silent(session, now)
        pause = self.awake.max_step_s / 2
        delay = min(pause, max(self._next_sweep - now, 0.001)) if self.sessions.by_replica else pause
        self._sweep_timer = self.timers.call_later(delay, self._sweep)

    def _lose_silent(self, session: Session, now: float) -> None:
        if session.observer:
            self._drop(session)
            self.agents.lose(session, SILENT_BACK_S)
            return
        what, since = "nothing heard", session.heard
        replica = self.state.replicas.get(session.replica)
        if replica is not None and not replica.connected:
            what, since = "did not reconnect to the new lighthouse", replica.since
        self._lose(session.replica, f"{what} for {now - since:.2f} s", certain=False)

    def _lose(
        self, name: str, reason: str, certain: bool, back_s: float | None = None, stopped: bool = False
    ) -> None:
        """Records the loss of a replica, notifies the others (its other ranks too), and decides again."""
        now = self.now()
        number, targets = self._number_of(name), self._concerned(name)
        sessions = self.sessions.drop(name)
        key = sessions[0].session if sessions else ""
        heard = min((each.heard for each in sessions), default=now)
        if name in self.state.replicas:
            self.state.lose(now, name, reason, certain, back_s, stopped)
        notice = MemberLost(name, reason, key, number, round((now - heard) * 1000, 3), certain)
        self.names.lose(notice)
        frame = encode(notice)
        for each in sessions:
            each.tell(notice, frame, close=True)
        self.event_log.event("lost", f"{name} lost: {reason}", name, number)
        self.event_log.notify(notice, targets)
        self.coordinator.soon()
        self._note_finish(name, key)

    def _drop(self, session: Session) -> None:
        """Forgets all sessions of a name without a notice, and closes their connections."""
        if session.observer and session.replica in self.state.replicas:
            self.state.leave(self.now(), session.replica, "observer")
        for each in self.sessions.drop(session.replica):
            if each.peer is not None:
                each.peer.close()

    def _number_of(self, name: str) -> int:
        """The quorum that this live replica is a member of, or 0."""
        return self.state.number if name in self.state.continuing else 0

    def _concerned(self, name: str) -> frozenset[str]:
        """Receivers of a notice that `name` departs: observers and the members of its quorum, itself included.

        All departing members get the same set object, so that their notices are sent in one piece.
        """
        members, observers = self.state.members, self.sessions.observers
        if not self._number_of(name):
            return observers
        if self._audience[0] is not members or self._audience[1] is not observers:
            self._audience = (members, observers, members | observers)
        return self._audience[2]

    def evict(self, name: str, reason: str) -> None:
        """Evicts a replica until it is readmitted."""
        number, targets = self._number_of(name), self._concerned(name) | {name}
        self.state.evict(name, reason)
        for session in self.sessions.of(name):
            if session.asking is not None:
                refused = Refused("evicted", f"{name} is evicted: {reason}")
                session.tell(refused, encode(refused))
            session.asking = None
        self.event_log.event("evicted", f"{name} evicted: {reason}", name, number)
        self.event_log.notify(Evicted(name, reason, number), targets)
        self.coordinator.soon()

    def let_in(self, name: str) -> bool:
        """Lifts an eviction or a back-off; False when there was none."""
        if not self.state.let_in(name):
            return False
        self.event_log.event("let_in", f"{name} may rejoin", name)
        self.event_log.notify(LetIn(name), self.state.members | self.sessions.observers | {name})
        self.coordinator.soon()
        return True
