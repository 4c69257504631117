"""The heart of a lighthouse: takes what clients say, lets the pure core decide, tells whoever must know.

No sockets here. Clients are `Peer`s (sessions.py); time comes from an AwakeClock; timers from the event loop.
Runs on the loop's thread only. Seams for the web page and other doors: `snapshot()`, `subscribe()`,
`evict()`, `let_in()`, `collect()`, `tell_incident()`, and `hello()` / `join()` for a door of another protocol.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from allranks.lighthouse.codec import encode
from allranks.lighthouse.decide import Form, Wait, decide, find_wanted
from allranks.lighthouse.detect import AwakeClock, find_silent
from allranks.lighthouse.messages import Beat, Hello, Pong, Refused, Waiting, Welcome
from allranks.lighthouse.options import Options
from allranks.lighthouse.sessions import Peer, Session, Sessions, deliver
from allranks.lighthouse.state import State
from allranks.lighthouse.status import Event, Status
from allranks.lighthouse.view import replica_rows
from allranks.model.cluster import (
    CollectEvidence,
    Evicted,
    Incident,
    LetIn,
    Member,
    MemberLeft,
    MemberLost,
    Notice,
    Quorum,
    QuorumFormed,
    QuorumWanted,
)

log = logging.getLogger("allranks.lighthouse")

_REMEMBERED = 10_000  # sessions of the past that are still known
_LASTING_S = 1.0  # a wait this long is worth a line in the log
_PONG = encode(Pong())


class Timers(Protocol):
    """The part of an asyncio loop that is used here."""

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle: ...
    def call_soon(self, callback: Callable[..., object], *args: object) -> asyncio.Handle: ...


#: Keeps a quorum safe before it is announced (etcd). Raises when this lighthouse no longer leads.
Keep = Callable[[Quorum, dict[str, str]], Awaitable[None]]


@dataclass
class Service:
    """See the module. `start()` begins the sweep for silent replicas, `close()` ends it."""

    options: Options
    timers: Timers
    address: str = ""
    clock: Callable[[], float] = time.monotonic
    keep: Keep | None = None
    leading: bool = True
    leader: str = ""  # where clients are sent while we do not lead
    state: State = field(init=False)
    sessions: Sessions = field(default_factory=Sessions)
    history: deque[Event] = field(default_factory=lambda: deque(maxlen=1000))
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=200))
    reason: str = "no quorum yet"
    waiting: str = ""
    awake: AwakeClock = field(init=False)
    started: float = 0.0
    draining: bool = False
    _listeners: list[Callable[[Event], None]] = field(default_factory=list)
    _lost: dict[str, str] = field(default_factory=dict)  # sessions declared lost -> why
    _retired: dict[str, str] = field(default_factory=dict)  # sessions replaced by a restart
    _notices: list[tuple[Notice, frozenset[str]]] = field(default_factory=list)  # not flushed yet
    _decide_soon: bool = False
    _decide_timer: asyncio.TimerHandle | None = None
    _sweep_timer: asyncio.TimerHandle | None = None
    _next_sweep: float = 0.0
    _logged: tuple[str, int] = ("", -1)
    _rule: str = "nobody"
    _wanted: tuple[int, str] = (-1, "")
    _saving: asyncio.Task[None] | None = None
    _stalled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = State(self.options)
        self.awake = AwakeClock(max_step_s=min(0.5, self.options.heartbeat_timeout_s / 4))

    # ---- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to look for silent replicas."""
        self.started = self.clock()
        self.now()
        self._sweep()

    def close(self) -> None:
        """Stops timers; peers are the server's."""
        for timer in (self._sweep_timer, self._decide_timer):
            if timer is not None:
                timer.cancel()
        if self._saving is not None:
            self._saving.cancel()

    def now(self) -> float:
        """Awake seconds."""
        return self.awake.tick(self.clock())

    # ---- what clients say -------------------------------------------------------------------------------

    def hello(self, peer: Peer, hello: Hello) -> Session | Refused:
        """Lets a client in; token and version were checked by the door. Sends Welcome and what it missed."""
        if not self.leading or self.draining:
            code = "draining" if self.draining else "moved"
            return Refused(
                code, f"this lighthouse {'is closing' if self.draining else 'does not lead'}", self.leader
            )
        observer = hello.role == "observer"
        name = hello.replica or f"{hello.node or 'observer'}#{hello.session[:8] or uuid.uuid4().hex[:8]}"
        key = hello.session or uuid.uuid4().hex
        if key in self._retired:
            return Refused("superseded", f"{name}: another process of the same name took this one's place")
        session = self._enter(peer, hello, name, key, observer)
        recall = self._remember(hello)
        welcome = Welcome(
            self.address, self.options.beat_s, self.options.heartbeat_timeout_s, self.state.epoch,
            self.state.number, recall,
        )  # fmt: skip
        peer.deliver(welcome, encode(welcome))
        deliver(session, session.pending)
        if key in self._lost and not observer:
            why = self._lost.pop(key)
            self.sessions.push([MemberLost(name, f"declared lost: {why}", key, self.state.number)], [name])
        self._soon()
        return session

    def _enter(self, peer: Peer, hello: Hello, name: str, key: str, observer: bool) -> Session:
        now = self.now()
        here = self.sessions.of(name)
        if here and here[0].session != key:
            self._supersede(name)
        known = self.state.replicas.get(name)
        old = self.sessions.get(name, hello.rank)
        if old is not None:
            previous, old.peer, old.heard = old.peer, peer, now
            old.connections, old.node = hello.connections, hello.node
            if previous is not None and previous is not peer:
                previous.close()
            session = old
        else:
            session = Session(name, key, hello.rank, observer, hello.node, hello.connections, peer, now)
            self.sessions.add(session)
        back = known is not None or key in self._lost
        if known is not None or len(self.sessions.of(name)) >= hello.connections:
            self.state.connect(
                now, name, key, hello.node, observer
            )  # a replica lives when all its ranks are here
        if observer:
            log.debug("observer %s connected from %s", name, peer.address)
        elif old is None and not back and hello.rank == 0:
            self._event("connected", f"{name} connected from {peer.address}", name)
        elif back and hello.rank == 0:
            self._event("returned", f"{name} is back from {peer.address}", name)
        self._plan_sweep(now + self.options.heartbeat_timeout_s)
        return session

    def _supersede(self, name: str) -> None:
        """The same name starts another life: the old one is over."""
        why = "restarted under the same name"
        for session in self.sessions.of(name):
            _remember_key(self._retired, session.session, name)
            if session.peer is not None:
                refused = Refused(
                    "superseded", f"{name}: another process of the same name took this one's place"
                )
                session.peer.deliver(refused, encode(refused))
        self._lose(name, why, certain=True)

    def _remember(self, hello: Hello) -> bool:
        """Numbers never go back: take what a client knows; True: ask it for its last quorum."""
        state = self.state
        if hello.number > state.number or hello.round > state.round or hello.epoch > state.epoch:
            state.number = max(state.number, hello.number)
            state.round = max(state.round, hello.round)
            state.epoch = max(state.epoch, hello.epoch + 1)
        known = state.last.round if state.last else 0
        return hello.round > known and hello.round == state.round

    def recalled(self, quorum: Quorum) -> None:
        """A client answers a recall: the quorum that an earlier lighthouse formed."""
        last = self.state.last
        if last is None or (quorum.number, quorum.round) > (last.number, last.round):
            self.take_over(quorum)

    def take_over(self, quorum: Quorum) -> None:
        """Goes on from a quorum formed by an earlier lighthouse; its members are expected to come back."""
        now = self.now()
        for name in self.state.adopt(now, quorum):
            member = quorum.member(name)
            assert member is not None
            self.sessions.add(Session(name, member.session, 0, False, member.node, 1, None, now))
        self.reason = f"taken over: {quorum.reason}"
        self._event(
            "quorum",
            f"took over quorum {quorum.number} of {len(quorum.members)} members",
            number=quorum.number,
        )
        self._plan_sweep(now + self.options.heartbeat_timeout_s)
        self._soon()

    def beat(self, session: Session, beat: Beat) -> None:
        """A heartbeat that says something. (An empty one only sets `session.heard`.)"""
        if beat.step >= 0:
            session.step = beat.step
        if beat.progress >= 0:
            session.progress = beat.progress
        session.idle_s, session.health = beat.idle_s, beat.health
        if beat.ping and session.peer is not None:
            session.peer.deliver(Pong(), _PONG)
        if self.options.stall_s:
            self._look_for_stall(session)

    def join(self, session: Session, member: Member, known: int = -1) -> Refused | None:
        """One rank asks; the replica asks when all its ranks have. A Refused is the answer when it may not.

        `known` is the last round that it received: a member that missed the current one is sent it again,
        because the others are training in it already and would wait for this one. -1: it missed nothing.
        """
        if session.observer:
            return Refused("observer", f"{session.replica} is an observer and cannot be a member")
        if session.replica in self.state.evicted:
            return Refused("evicted", f"{session.replica} is evicted: {self.state.evicted[session.replica]}")
        last = self.state.last
        if (
            last is not None
            and 0 <= known < last.round
            and self._is_member(session)
            and session.peer is not None
        ):
            session.peer.deliver(last, encode(last))
            return None
        session.asking = replace(member, replica=session.replica, session=session.session,
                                 node=member.node or session.node)  # fmt: skip
        session.step = max(session.step, member.step)
        ranks = self.sessions.of(session.replica)
        if sum(1 for each in ranks if each.asking) >= session.connections:
            self.state.ask(self.now(), session.replica, _merged(ranks))
            self._soon()
        return None

    def withdraw(self, session: Session) -> Waiting:
        """One rank asks no more; says why there was no quorum."""
        decision, reason = decide(self.now(), self.state, self.options)
        missing = decision.missing if isinstance(decision, Wait) else ()
        ages = {
            each.replica: self.awake.now - each.heard for name in missing for each in self.sessions.of(name)
        }
        heard = ", ".join(f"{name} last heard {ages[name]:.1f} s ago" for name in missing if name in ages)
        mine = [each.rank for each in self.sessions.of(session.replica) if each.asking]
        session.asking = None
        if session.replica not in self.state.asking and len(mine) < session.connections:
            reason = f"only {len(mine)} of {session.connections} ranks of {session.replica} asked"
        self.state.withdraw(session.replica)
        self._soon()
        return Waiting(reason + (f" ({heard})" if heard else ""), missing)

    def leave(self, session: Session, reason: str) -> None:
        """The replica goes in good order."""
        name = session.replica
        if session.observer:
            self._drop_observer(session)
            return
        if name not in self.state.replicas:
            self.sessions.drop(name)
            return
        number = self._number_of(name)
        targets = self._concerned(name)
        self.state.leave(self.now(), name, reason)
        for each in self.sessions.drop(name):
            if each.peer is not None:
                each.peer.close()
        self._event("left", f"{name} left: {reason or 'no reason given'}", name, number)
        self._notices.append((MemberLeft(name, reason, number), targets))
        self._soon()

    def accuse(self, name: str, reason: str) -> bool:
        """Somebody who can see it (its beacon, its agent) says that a replica is dead."""
        if name not in self.sessions.by_replica:
            return False
        self._lose(name, reason, certain=True)
        return True

    def acknowledge(self, session: Session, notice_id: int) -> None:
        """A notice has arrived."""
        session.pending.pop(notice_id, None)

    def disconnected(self, session: Session, peer: Peer, clean: bool) -> None:
        """A connection ended without a good-bye. An orderly close is a death; an error may be a blip."""
        if session.peer is not peer:
            return
        session.peer, session.cut = None, not clean
        grace = self.options.grace_s if clean else self.options.reset_grace_s
        self.timers.call_later(grace, self._grace_over, session)

    def _grace_over(self, session: Session) -> None:
        current = self.sessions.get(session.replica, session.rank)
        if current is not session or session.peer is not None or self.draining or not self.leading:
            return
        if session.observer:
            self._drop_observer(session)
            return
        where = f" (rank {session.rank})" if session.connections > 1 else ""
        how = "was cut and did not come back" if session.cut else "closed without a good-bye"
        self._lose(session.replica, f"connection{where} {how}", certain=not session.cut)

    def _drop_observer(self, session: Session) -> None:
        """Observers come and go without anybody being told."""
        self.sessions.drop(session.replica)
        self.state.leave(self.now(), session.replica, "observer")
        if session.peer is not None:
            session.peer.close()
        log.debug("observer %s went", session.replica)

    # ---- actions ----------------------------------------------------------------------------------------

    def evict(self, name: str, reason: str) -> None:
        """Throws a replica out; it stays out until let in."""
        number = self._number_of(name)
        targets = self._concerned(name) | {name}
        self.state.evict(name, reason)
        for session in self.sessions.of(name):
            if session.asking is not None and session.peer is not None:
                refused = Refused("evicted", f"{name} is evicted: {reason}")
                session.peer.deliver(refused, encode(refused))
            session.asking = None
        self._event("evicted", f"{name} evicted: {reason}", name, number)
        self._notices.append((Evicted(name, reason, number), targets))
        self._keep_evictions()
        self._soon()

    def let_in(self, name: str) -> bool:
        """Takes an eviction or a back-off back; False when there was none."""
        if not self.state.let_in(name):
            return False
        self._event("let_in", f"{name} may come in again", name)
        self._notices.append((LetIn(name), self._members() | self.sessions.observers | {name}))
        self._keep_evictions()
        self._soon()
        return True

    def collect(self, reason: str, replicas: Iterable[str] = ()) -> str:
        """Asks agents (observers) and the named replicas for evidence; returns the incident's id."""
        names = tuple(replicas)
        incident = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        targets = self.sessions.observers | frozenset(names or self.sessions.by_replica)
        self._event("collect", f"evidence wanted: {reason}", ", ".join(names))
        self._notices.append((CollectEvidence(incident, reason, names), frozenset(targets)))
        self._soon()
        return incident

    def tell_incident(self, incident: Incident) -> None:
        """An agent tells what it found."""
        self.incidents.append(incident)
        self._event("incident", incident.sentence, ", ".join(incident.replicas))

    def snapshot(self) -> Status:
        """Everything at this moment."""
        state, now = self.state, self.now()
        return Status(
            schema=1,
            address=self.address,
            leading=self.leading,
            leader=self.address if self.leading else self.leader,
            epoch=state.epoch,
            number=state.number,
            reason=self.reason,
            waiting=self.waiting,
            quorum=state.last,
            replicas=replica_rows(state, self.sessions, now),
            lost={name: gone.reason for name, gone in state.gone.items()},
            evicted=dict(state.evicted),
            history=tuple(self.history),
            incidents=tuple(self.incidents),
            up_s=round(self.clock() - self.started, 3),
            slept_s=round(self.awake.slept_s, 3),
            connections=sum(1 for each in self.sessions if each.peer is not None),
        )

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Calls `listener` for every event, on the loop's thread; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # ---- deciding ---------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """One decision for all that arrives in this round of the loop."""
        if not self._decide_soon:
            self._decide_soon = True
            self.timers.call_soon(self._settle)

    def _settle(self) -> None:
        """Sends what is to be told, then decides, until nothing changes."""
        self._decide_soon = False
        self._flush()
        if not self.leading or self._saving is not None:
            return
        now = self.now()
        self.state.advance(now)
        decision, reason = decide(now, self.state, self.options)
        if isinstance(decision, Form):
            self._rule, self.waiting = decision.rule, ""
            self._form(self.state.next_quorum(decision.members, decision.spares, reason))
        else:
            self._note_waiting(decision.rule, reason)
            self._call_members()
            self._plan_decision(decision.until, now)

    def _form(self, quorum: Quorum) -> None:
        if self.keep is None or quorum.number == self.state.number:
            self._announce(quorum)
            return
        self._saving = asyncio.ensure_future(self._keep_then_announce(self.keep, quorum))

    async def _keep_then_announce(self, keep: Keep, quorum: Quorum) -> None:
        """A number is made known only after it is safe. Whoever was lost meanwhile makes it void."""
        try:
            await keep(quorum, dict(self.state.evicted))
        except Exception as error:
            log.error("quorum %d could not be kept: %s", quorum.number, error)
            self._saving = None
            self.timers.call_later(self.options.quorum_tick_s or 0.1, self._soon)
            return
        self._saving = None
        self.state.number = quorum.number
        asking = self.state.asking
        if all(m.replica in asking and asking[m.replica].session == m.session for m in quorum.members):
            self._announce(quorum)
        self._soon()

    def _announce(self, quorum: Quorum) -> None:
        """Tells the members, encoded once."""
        new = self.state.last is None or quorum.number != self.state.last.number
        before = self._members()
        self.state.form(quorum)
        self.reason = quorum.reason
        frame = encode(quorum)
        for member in quorum.members:
            for session in self.sessions.of(member.replica):
                session.asking = None
                if session.peer is not None:
                    session.peer.deliver(quorum, frame)
        if new:
            self._stalled.clear()
            self._event("quorum", f"quorum {quorum.number}: {quorum.reason}", number=quorum.number)
            formed = QuorumFormed(quorum.number, quorum.epoch, quorum.names, quorum.reason)
            others = (self.sessions.observers | before | set(quorum.spares)) - set(quorum.names)
            self._notices.append((formed, frozenset(others)))
        self._flush()
        if self.state.asking:
            self._soon_later()

    def _soon_later(self) -> None:
        """Spares keep asking: look again when something changes, not at once (nothing has)."""
        self._plan_decision(self.state.next_change(), self.awake.now)

    def _call_members(self) -> None:
        """Tells training members, once per newcomer, that somebody waits for them."""
        reason = find_wanted(self.state, self.options)
        key = (self.state.number, reason)
        if reason and key != self._wanted:
            self._wanted = key
            self._notices.append(
                (QuorumWanted(reason, self.state.number), frozenset(self.state.idle_veterans))
            )
            self._flush()

    def _plan_decision(self, until: float | None, now: float) -> None:
        if self._decide_timer is not None:
            self._decide_timer.cancel()
            self._decide_timer = None
        if until is not None:
            delay = max(until - now, 0.001, self.options.quorum_tick_s / 10)
            self._decide_timer = self.timers.call_later(delay, self._soon)

    # ---- losing -----------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Looks for the silent when somebody may have become so; keeps the clock awake in between."""
        now = self.now()
        if now >= self._next_sweep:
            timeout = self.options.heartbeat_timeout_s
            silent, self._next_sweep = find_silent(now, self.sessions, timeout)
            for session in silent:
                if self.sessions.get(session.replica, session.rank) is session:
                    self._lose_silent(session, now)
        beat = self.awake.max_step_s / 2
        delay = min(beat, max(self._next_sweep - now, 0.001)) if self.sessions.by_replica else beat
        self._sweep_timer = self.timers.call_later(delay, self._sweep)

    def _plan_sweep(self, at: float) -> None:
        self._next_sweep = min(self._next_sweep, at) if self.sessions.by_replica else at

    def _lose_silent(self, session: Session, now: float) -> None:
        if session.observer:
            self._drop_observer(session)
            return
        replica = self.state.replicas.get(session.replica)
        what = (
            "nothing heard"
            if replica is None or replica.connected
            else "did not come back to the new lighthouse"
        )
        self._lose(session.replica, f"{what} for {now - session.heard:.2f} s", certain=False)

    def _lose(self, name: str, reason: str, certain: bool) -> None:
        """A replica is gone: note it, tell the others, decide again."""
        now = self.now()
        number = self._number_of(name)
        targets = self._concerned(name)
        sessions = self.sessions.drop(name)
        heard = min((each.heard for each in sessions), default=now)
        key = sessions[0].session if sessions else ""
        _remember_key(self._lost, key, reason)
        if name in self.state.replicas:
            self.state.lose(now, name, reason, certain)
        notice = MemberLost(name, reason, key, number, round((now - heard) * 1000, 3), certain)
        if len(sessions) > 1:  # its other ranks are told too, on the connections they still have
            frame = encode(notice, 0)
            for each in sessions:
                if each.peer is not None:
                    each.peer.deliver(notice, frame)
        for each in sessions:
            if each.peer is not None:
                each.peer.close()
        self._event("lost", f"{name} lost: {reason}", name, number)
        self._notices.append((notice, targets))
        self._soon()

    def _look_for_stall(self, session: Session) -> None:
        """A member that beats but stands still: ask for evidence, once per standstill."""
        if session.idle_s < self.options.stall_s:
            self._stalled.discard(session.replica)
        elif session.replica not in self._stalled and session.replica in self._members():
            self._stalled.add(session.replica)
            text = f"{session.replica} makes no progress for {session.idle_s:.1f} s at step {session.step}"
            self._event("stalled", text, session.replica)
            self.collect(text, [session.replica])

    # ---- telling ----------------------------------------------------------------------------------------

    def _members(self) -> frozenset[str]:
        last = self.state.last
        return frozenset(last.names) if last else frozenset()

    def _is_member(self, session: Session) -> bool:
        return session.replica in self.state.veterans

    def _number_of(self, name: str) -> int:
        """The quorum that this living session is a member of, or 0."""
        return self.state.number if name in self.state.veterans else 0

    def _concerned(self, name: str) -> frozenset[str]:
        """Who must know that `name` goes: observers, and its fellow members."""
        fellows = self._members() if self._number_of(name) else frozenset()
        return frozenset((fellows | self.sessions.observers) - {name})

    def _flush(self) -> None:
        """Pushes notices; those for the same receivers go out together."""
        waiting, self._notices = self._notices, []
        groups: dict[frozenset[str], list[Notice]] = {}
        for notice, targets in waiting:
            groups.setdefault(targets, []).append(notice)
        for targets, notices in groups.items():
            self.sessions.push(notices, targets)

    def _event(self, kind: str, text: str, replica: str = "", number: int = 0) -> None:
        event = Event(time.time(), kind, text, replica, number)
        self.history.append(event)
        level = logging.WARNING if kind in ("lost", "evicted", "stalled", "incident") else logging.INFO
        log.log(level, text)
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed")

    def _note_waiting(self, rule: str, reason: str) -> None:
        """A wait is told when it lasts, once per rule: not at every step, nor for each replica that comes."""
        self.waiting = "" if rule == "nobody" else reason
        if rule != self._rule and self.waiting:
            self.timers.call_later(_LASTING_S, self._tell_waiting, rule, self.state.round)
        self._rule = rule

    def _tell_waiting(self, rule: str, round_: int) -> None:
        if self._rule == rule and self.state.round == round_ and self._logged != (rule, round_):
            self._logged = (rule, round_)
            self._event("waiting", f"no quorum yet: {self.waiting}")

    def _keep_evictions(self) -> None:
        """Evictions are kept at once, with the quorum as it stands."""
        if self.keep is not None and self.state.last is not None:
            task = asyncio.ensure_future(self._keep_quietly(self.keep, self.state.last))
            task.add_done_callback(lambda done: done.exception())

    async def _keep_quietly(self, keep: Keep, quorum: Quorum) -> None:
        try:
            await keep(quorum, dict(self.state.evicted))
        except Exception as error:
            log.error("evictions could not be kept: %s", error)


def _merged(ranks: list[Session]) -> Member:
    """What the replica says, of what its ranks said: the lowest rank speaks, failures and wishes add up."""
    members = [each.asking for each in sorted(ranks, key=lambda each: each.rank) if each.asking]
    return replace(
        members[0],
        shrink_only=any(member.shrink_only for member in members),
        commit_failures=max(member.commit_failures for member in members),
        step=min(member.step for member in members),
    )


def _remember_key(book: dict[str, str], key: str, value: str) -> None:
    book[key] = value
    if len(book) > _REMEMBERED:
        del book[next(iter(book))]
