"""What the lighthouse knows: replicas, the last quorum, who is gone. Pure: no clock, no sockets, no files.

Every change is a method that takes `now` (awake seconds, see detect.AwakeClock). `replicas` holds only the
living, so dead names never pile up; a member of the last quorum that died stays in `gone` until the next one.

Besides the facts the state keeps small indexes, so that a decision costs nothing while most are missing:
`asking`, `requesting_members`, `continuing` (members of the last quorum that never left it), `idle` and `continuing_not_asking`
(those of them that do not ask). `_index` keeps them true for one name; tests compare with a decision made without them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allranks.lighthouse.options import Options
from allranks.lighthouse.reach import Reach
from allranks.model.cluster import Member, Quorum


@dataclass(slots=True)
class Replica:
    """One living replica."""

    name: str
    session: str
    node: str = ""
    observer: bool = False  # never a member
    unfit: bool = False  # its last claim was refused: nobody waits for it
    probes: bool = False  # it can be asked to prove that others are reachable
    connected: bool = True  # False: known from an earlier lighthouse, expected to come back
    since: float = 0.0
    asking: Member | None = None
    asked_at: float = 0.0
    patient_until: float = math.inf  # it goes on before it would give up: then nobody is waited for any more
    cooling_until: float = 0.0  # flapping: not before this; 0 when it is free


@dataclass(frozen=True)
class Gone:
    """A member of the last quorum that is no longer there."""

    session: str
    at: float
    reason: str
    certain: bool  # False: only silent, may be training on behind a cut network
    left: bool = False  # with a shutdown message
    finished: bool = False  # its training is over
    step: int = -1  # steps that its state had; -1: not known
    node: str = ""
    closed: bool = False  # its connection was closed: by its end, or that of its liveness proxy
    stopped: bool = False  # it is frozen: it trains no more, but its state is not lost


MAX_LOSERS = 20_000  # names whose losses are remembered, beyond the largest job
_MORE_LOSSES = 64  # beyond the limit; the back-off is longest long before
_EARLY_S = 2.0  # before a replica that asks gives up, it goes on without those who do not
PACE, PACE_S = 10, 2.5  # at most so many new quorums in so many seconds
_FREE_TRIES = 3  # quorums of the same members without a step between them that cost no pause
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 5.0  # before the next; doubles with each
_WORD_S = 1.0  # how long the word of a client that was in a later quorum is waited for


@dataclass
class QuorumState:
    """Facts and indexes. Change it only by its methods."""

    options: Options
    epoch: int = 1
    number: int = 0
    round: int = 0
    last: Quorum | None = None
    members: frozenset[str] = frozenset()  # names of the last quorum
    replicas: dict[str, Replica] = field(default_factory=dict)
    gone: dict[str, Gone] = field(default_factory=dict)
    departed: set[str] = field(default_factory=set)  # members told as gone, also if they came back
    evicted: dict[str, str] = field(default_factory=dict)  # name -> reason
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    taken_over: bool = False  # False: all quorums so far were formed here, out of nothing
    yielding: bool = False  # such a quorum gives way to the one that a client is about to tell
    settling_until: float = 0.0  # until then members of an earlier lighthouse's quorum may still turn up
    largest: int = 0  # members of the largest quorum of this training
    finished_at: float = 0.0
    reach: Reach = field(default_factory=Reach)
    # when the last new ones were formed
    formed: deque[float] = field(default_factory=lambda: deque(maxlen=PACE))
    fruitless: int = 0  # new quorums of the same members in a row, without a step between them
    # indexes
    asking: dict[str, Replica] = field(default_factory=dict)  # in the order of asking
    cooling: dict[str, float] = field(default_factory=dict)
    requesting_members: dict[str, Replica] = field(default_factory=dict)  # in the order of asking
    continuing: set[str] = field(default_factory=set)
    continuing_not_asking: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    finishers: set[str] = field(default_factory=set)  # members of the last quorum whose training is over
    _sessions: dict[str, str] = field(default_factory=dict)  # of the last quorum

    # ---- coming and going -------------------------------------------------------------------------------

    def connect(
        self,
        now: float,
        name: str,
        session: str,
        node: str = "",
        observer: bool = False,
        probes: bool = False,
    ) -> Replica:
        """A replica says hello: new, back after a blip (same session), or restarted (another session).

        The caller has told the loss of the old session first (`lose`) when one lives under this name.
        """
        known = self.replicas.get(name)
        if known is not None and known.session == session:
            known.connected, known.node, known.probes = True, node, probes
        else:
            self.replicas[name] = Replica(name, session, node, observer, probes=probes, since=now)
            self._cool(now, name)
            self._wait_for_lease(name, session, node)
        self._settle_gone(name, session)
        self._index(name)
        return self.replicas[name]

    def ask(self, now: float, name: str, member: Member, patience_s: float = 0.0) -> None:
        """A replica joined for a quorum. Asking again replaces what it said, not its place."""
        replica = self.replicas[name]
        early_s = min(_EARLY_S, patience_s / 2)
        replica.patient_until = now + patience_s - early_s if patience_s else math.inf
        if replica.asking is None:
            replica.asked_at = now
        replica.asking, replica.unfit = member, False
        self._index(name)

    def note_failures(
        self, now: float, name: str, unreached: Collection[str], unserved: Collection[str]
    ) -> None:
        """A replica could not connect to some sessions, and could not fetch what others claim to hold."""
        replica = self.replicas[name]
        since = {each.session: each.since for each in self.replicas.values()}
        self.reach.report(now, replica.session, since.keys() & {*unreached, *unserved})
        # what one that came later says of an older one does not cost that its place
        self.reach.discredit(session for session in unserved if since.get(session, 0.0) > replica.since)

    def refuse(self, name: str) -> None:
        """Its claim was refused: until it asks with another, it is not there."""
        if replica := self.replicas.get(name):
            replica.asking, replica.unfit = None, True
            self._index(name)

    def withdraw(self, name: str) -> None:
        if replica := self.replicas.get(name):
            replica.asking = None
            self._index(name)

    def lose(
        self,
        now: float,
        name: str,
        reason: str,
        certain: bool,
        back_s: float | None = None,
        stopped: bool = False,
    ) -> None:
        """It died, froze or was cut off. If that is not certain it may train on, and come back: within `back_s`, or
        else presume_dead_s."""
        replica = self.replicas.pop(name)
        self.reach.forget(replica.session)
        recent = self._recent_losses(now, name)[-self.options.flap_limit - _MORE_LOSSES :]
        self.losses[name] = (*recent, now)
        if len(self.losses) > MAX_LOSERS:
            del self.losses[next(iter(self.losses))]
        early = 0.0 if back_s is None else max(0.0, self.options.presume_dead_s - back_s)
        gone = Gone(replica.session, now - early, reason, certain, node=replica.node, stopped=stopped)
        self._depart(replica, replace(gone, closed=back_s is not None))

    def confirm_death(self, name: str) -> bool:
        """One that was stopped, or silent, is dead: nobody waits for it. False when it is not known as gone."""
        if name not in self.gone:
            return False
        self._amend(name, certain=True, stopped=False)
        return True

    def leave(self, now: float, name: str, reason: str, step: int = -1) -> None:
        """It left in good order, with a state of `step` steps."""
        replica = self.replicas.pop(name)
        self.reach.forget(replica.session)
        self._depart(
            replica, Gone(replica.session, now, reason, True, left=True, step=step, node=replica.node)
        )

    def describe_unreached(self, name: str, other: str) -> str:
        """One of them is a member, the other one waits to join."""
        if name in self.members:
            return f"{name} cannot connect to {other}, which waits to join"
        return f"{name} waits to join and cannot connect to {other}"

    def returned(self, names: Iterable[str]) -> list[float]:
        """When those of them came back that were given up as members: they hold a state, and are about to ask."""
        return [self.replicas[n].since for n in names if self._sessions.get(n) == self.replicas[n].session]

    def finish(self, now: float, name: str) -> bool:
        """A member that is gone was through with its training; False when nothing is known of it."""
        if name not in self.gone:
            return False
        self._amend(name, finished=True)
        self.finished_at = now
        return True

    @property
    def has_newcomers(self) -> bool:
        """Whether a replica asks that is not a member: looked up at every event, with thousands of members."""
        return len(self.asking) > len(self.requesting_members)

    @property
    def over(self) -> bool:
        """Whether the training is over: members have finished, and none is left that could continue."""
        return bool(self.finishers) and not self.continuing and not self.silent

    @property
    def too_late(self) -> bool:
        """Whether those who ask could only repeat steps of a training that is finished, and nobody else trains."""
        if not self.finishers or self.continuing_not_asking or self.silent:
            return False
        done = max(self.gone[name].step for name in self.finishers)
        asked = max((replica.asking.step for replica in self.asking.values() if replica.asking), default=0)
        if asked < done:
            return not self.finishers <= self.asking.keys()
        return not self.continuing and 2 * len(self.asking) <= self.largest

    def evict(self, name: str, reason: str) -> None:
        """It stays out until it is let in, also under a new session."""
        self.evicted[name] = reason
        if replica := self.replicas.get(name):
            replica.asking = None
            self._note_departure(replica)
        if name in self.gone:
            self._amend(name, certain=True)
        self._index(name)

    def let_in(self, name: str) -> bool:
        """Takes an eviction back, forgives flapping, and lets a new training begin after one that is over; False
        when there was nothing to take back."""
        had = self.evicted.pop(name, None) is not None or name in self.cooling
        if (self.over or self.too_late) and name in self.replicas:
            had, self.largest = True, 0
            for finisher in list(self.finishers):
                self._amend(finisher, finished=False)
        self.losses.pop(name, None)
        if replica := self.replicas.get(name):
            replica.cooling_until = 0.0
            self._settle_gone(name, replica.session)
        self._index(name)
        return had

    def advance(self, now: float) -> None:
        """What time alone changes: cooling ends, the silent are presumed dead, old losses are forgotten."""
        for name in [name for name, until in self.cooling.items() if until <= now]:
            self.replicas[name].cooling_until = 0.0
            self._index(name)
        for name in [n for n in self.silent if now - self.gone[n].at >= self.options.presume_dead_s]:
            self._amend(name, certain=True, stopped=False)
        old = now - self.options.flap_window_s
        for name in [name for name, times in self.losses.items() if times[-1] < old]:
            del self.losses[name]

    def next_change(self, now: float) -> float | None:
        """When `advance` will next change something that a decision looks at."""
        times = list(self.cooling.values())
        times += [self.gone[name].at + self.options.presume_dead_s for name in self.silent]
        if self.asking and (pair := self.reach.next_change(now)) is not None:
            times.append(pair)
        return min(times, default=None)

    # ---- quorums ----------------------------------------------------------------------------------------

    def next_quorum(self, members: Iterable[Member], spares: Iterable[str], reason: str) -> Quorum:
        """The quorum these members would form. Nothing changes yet: it may have to be kept safe first."""
        chosen = tuple(sorted(members, key=lambda member: member.replica))
        changed = self.is_new(chosen)
        return Quorum(
            number=self.number + 1 if changed else self.number,
            epoch=self.epoch,
            members=chosen,
            reason=reason,
            round=self.round + 1,
            max_step=max((member.step for member in chosen), default=0),
            spares=tuple(sorted(spares)),
            evicted=tuple(sorted(self.evicted)),
        )

    def is_new(self, members: Sequence[Member]) -> bool:
        """Whether these members, sorted by name, need a new number and with it a new group."""
        # Members that heard of a departure have taken their groups down, even if the same members are back by now.
        broken = bool(self.departed) or any(member.commit_failures > 0 for member in members)
        return broken or not self._same(members)

    def _same(self, members: Sequence[Member]) -> bool:
        sessions = self._sessions
        return len(members) == len(sessions) and all(sessions.get(m.replica) == m.session for m in members)

    def not_before(self, members: Sequence[Member]) -> float:
        """When a new quorum of these members, sorted by name, may be formed: never more than PACE in PACE_S, and with a
        pause that doubles for the same members that have made no step."""
        over = self.fruitless - _FREE_TRIES
        if (len(self.formed) < PACE and over < 0) or not self.is_new(members):
            return 0.0
        until = self.formed[0] + PACE_S if len(self.formed) == PACE else 0.0
        if over >= 0 and self._same(members) and not self._stepped(members):
            pause = min(_FIRST_PAUSE_S * 2.0 ** min(over, 16), _LAST_PAUSE_S)
            until = max(until, self.formed[-1] + pause)
        return until

    def _stepped(self, members: Sequence[Member]) -> bool:
        top = max((member.step for member in members), default=0)
        return self.last is not None and top > self.last.max_step

    def form(self, quorum: Quorum, now: float = 0.0) -> None:
        """Makes it the current quorum; its members ask no more."""
        before = self._sessions
        if quorum.number > self.number:
            fruitless = self._same(quorum.members) and not self._stepped(quorum.members)
            self.fruitless = self.fruitless + 1 if fruitless else 0
            self.formed.append(now)
        self.largest = max(0 if self.over else self.largest, len(quorum.members))
        self.last = quorum
        self.number, self.round = max(self.number, quorum.number), max(self.round, quorum.round)
        self._sessions = {member.replica: member.session for member in quorum.members}
        self.members = frozenset(self._sessions)
        self.gone.clear()
        self.departed.clear()
        self.silent.clear()
        self.finishers.clear()
        for member in quorum.members:
            if replica := self.replicas.get(member.replica):
                replica.asking = None
        for name in before.keys() | self._sessions.keys():
            self._index(name)

    def hear_of(self, now: float, last: tuple[int, int, int], unknown: bool) -> bool:
        """What a client says of the (epoch, number, round) it was in last; True: ask it for that quorum.

        Numbers never go back. The quorum of an unknown session is of an earlier lighthouse: one that was formed here
        without knowing it gives way to it.
        """
        epoch, number, round_ = last
        if number > self.number or round_ > self.round or epoch > self.epoch:
            self.number, self.round = max(self.number, number), max(self.round, round_)
            self.epoch = max(self.epoch, epoch + 1)
        asked = unknown and number > 0 and self.last is not None and not self.taken_over
        self.yielding = self.yielding or asked
        asked = asked or (round_ == self.round and self.needs_recall)
        if asked:  # nobody new may form a quorum of its own before we know who trains already
            self.settling_until = max(self.settling_until, now + _WORD_S)
        return asked

    @property
    def needs_recall(self) -> bool:
        """Whether a client knows of a later quorum than we do."""
        return self.yielding or self.round > (self.last.round if self.last else 0)

    def adopt(self, now: float, quorum: Quorum, finished: Iterable[str] = ()) -> list[str]:
        """Takes over a quorum formed by an earlier lighthouse; returns the members expected to come back."""
        self.epoch = max(self.epoch, quorum.epoch + 1)
        self.taken_over, self.yielding, self.settling_until = True, False, 0.0
        for name in quorum.evicted:
            self.evicted.setdefault(name, "evicted before the lighthouse restarted")
        pending = {name: replica.asking for name, replica in self.replicas.items() if replica.asking}
        self.form(quorum, now)
        expected, finished = [], frozenset(finished)
        for member in quorum.members:
            if member.replica in self.evicted:
                self.departed.add(member.replica)
                self.gone[member.replica] = Gone(member.session, now, self.evicted[member.replica], True)
            elif member.replica in finished:
                self.departed.add(member.replica)
                self.gone[member.replica] = Gone(member.session, now, "finished", True, left=True)
                self.finish(now, member.replica)
            elif member.replica not in self.replicas:
                self.replicas[member.replica] = Replica(
                    member.replica, member.session, member.node, connected=False, since=now
                )
                expected.append(member.replica)
                self._index(member.replica)
        for name, member_asking in pending.items():
            self.replicas[name].asking = member_asking
            self._index(name)
        return expected

    # ---- inside -----------------------------------------------------------------------------------------

    def _depart(self, replica: Replica, gone: Gone) -> None:
        if self._note_departure(replica):
            # nobody waits for one that was thrown out
            self.gone[replica.name] = replace(gone, certain=gone.certain or replica.name in self.evicted)
        self._index(replica.name)
        if not self.continuing:  # the state is with those that are stopped: who has none waits for them
            for name, other in list(self.gone.items()):
                if other.stopped and other.certain and name not in self.evicted:
                    self._amend(name, certain=False, at=gone.at)

    def _amend(self, name: str, **changes: Any) -> None:
        self.gone[name] = replace(self.gone[name], **changes)
        self._index(name)

    def _note_departure(self, replica: Replica) -> bool:
        """Whether it was a member; nobody waits for it from now on, also if the same session comes back."""
        member = self._sessions.get(replica.name) == replica.session
        if member:
            self.departed.add(replica.name)
        return member

    def _settle_gone(self, name: str, session: str) -> None:
        """A name came back: the same session is alive after all; another one waits until the old one's lease is over."""
        if name in self.gone:
            if self.gone[name].session == session:
                del self.gone[name]
            elif not self.replicas[name].cooling_until:
                self._amend(name, certain=True, stopped=False)

    def _wait_for_lease(self, name: str, session: str, node: str) -> None:
        """One process per name: another session may be a member when the old one cannot commit any more.

        A silent one may, for presume_dead_s. One on the same node whose connection was closed is dead: its agent
        starts the next only then.
        """
        gone = self.gone.get(name)
        if gone is None or gone.certain or gone.session == session or (gone.closed and gone.node == node):
            return
        replica = self.replicas[name]
        replica.cooling_until = max(replica.cooling_until, gone.at + self.options.presume_dead_s)

    def _recent_losses(self, now: float, name: str) -> list[float]:
        return [at for at in self.losses.get(name, ()) if now - at < self.options.flap_window_s]

    def _cool(self, now: float, name: str) -> None:
        """Back-off of a replica that was lost too often of late."""
        options = self.options
        over = len(self._recent_losses(now, name)) - options.flap_limit
        if over > 0:
            pause = min(options.flap_backoff_s * 2.0 ** (over - 1), options.flap_backoff_max_s)
            self.replicas[name].cooling_until = now + pause

    def _index(self, name: str) -> None:
        """Makes the indexes true for one name."""
        replica = self.replicas.get(name)
        if replica is not None and (replica.observer or replica.unfit or name in self.evicted):
            replica = None
        if replica is not None and replica.cooling_until:
            self.cooling[name], replica = replica.cooling_until, None
        else:
            self.cooling.pop(name, None)
        # from here on: None when it cannot be a member just now
        asker = replica if replica is not None and replica.asking is not None else None
        idle = replica is not None and asker is None
        veteran = replica is not None and self._sessions.get(name) == replica.session
        veteran = veteran and name not in self.departed
        _keep(self.asking, name, asker)
        _keep(self.requesting_members, name, asker if veteran else None)
        _put(self.idle, name, idle)
        _put(self.continuing, name, veteran)
        _put(self.continuing_not_asking, name, veteran and idle)
        gone = self.gone.get(name)
        _put(self.silent, name, gone is not None and not gone.certain)
        _put(self.finishers, name, gone is not None and gone.finished)


def _keep(index: dict[str, Replica], name: str, replica: Replica | None) -> None:
    if replica is None:
        index.pop(name, None)
    elif index.get(name) is not replica:
        index.pop(name, None)  # another life of the name asks later than the first did
        index[name] = replica


def _put(index: set[str], name: str, inside: bool) -> None:
    if inside:
        index.add(name)
    else:
        index.discard(name)
