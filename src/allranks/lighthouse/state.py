"""What the lighthouse knows: live replicas, the last quorum, departed members. Pure: no clock, no sockets, no files.

Every change is a method that takes `now` (awake seconds, see detect.AwakeClock). `replicas` holds live replicas only,
so dead names do not pile up; a member of the last quorum that died stays in `gone` until the next quorum.

The state also keeps indexes, so that a decision is cheap while most replicas have not joined: `asking`,
`requesting_members`, `continuing` (members of the last quorum that never left it), `idle` and `continuing_not_asking`
(those that have not joined). `_index` updates them for one name; tests compare with a decision made without them.
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
    name: str
    session: str
    node: str = ""
    observer: bool = False  # never a member
    unfit: bool = False  # its last claim was refused: no replica waits for it
    probes: bool = False  # it answers a Probe
    connected: bool = True  # False: known from an earlier lighthouse, expected to come back
    since: float = 0.0
    asking: Member | None = None
    asked_at: float = 0.0
    patient_until: float = math.inf  # shortly before it gives up; stragglers are not waited for beyond this
    cooling_until: float = 0.0  # end of its back-off; 0: none


@dataclass(frozen=True)
class Gone:
    """A member of the last quorum that has departed."""

    session: str
    at: float
    reason: str
    certain: bool  # False: only silent, may still be training behind a cut network
    left: bool = False  # with a shutdown message
    finished: bool = False  # it completed its training
    step: int = -1  # steps that its state had; -1: not known
    node: str = ""
    closed: bool = False  # its connection closed because the process or its liveness proxy ended
    stopped: bool = False  # the process is stopped: it does not train, but its state is not lost


MAX_LOSERS = 20_000  # names whose losses are remembered; more than the largest job has
_MORE_LOSSES = 64  # losses kept beyond the flap limit; the back-off reaches its maximum long before
_EARLY_S = 2.0  # stragglers are no longer waited for this long before a waiting replica would give up
PACE, PACE_S = 10, 2.5  # at most PACE new quorums in PACE_S
_FREE_TRIES = 3  # quorums of the same members without a step that cost no pause
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 5.0  # before the next one; doubles each time
_RECALL_S = 1.0  # how long to wait for a client to send the later quorum that it was in


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
    departed: set[str] = field(default_factory=set)  # members reported as gone, even if they have returned
    evicted: dict[str, str] = field(default_factory=dict)  # name -> reason
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    taken_over: bool = False  # False: this lighthouse has adopted no quorum of an earlier one
    yielding: bool = False  # our own quorum gives way to the earlier one that a client is about to send
    settling_until: float = 0.0  # until then members of an earlier lighthouse's quorum may still return
    largest: int = 0  # members of the largest quorum of this training
    finished_at: float = 0.0
    reach: Reach = field(default_factory=Reach)
    formed: deque[float] = field(default_factory=lambda: deque(maxlen=PACE))  # times of the last new quorums
    stepless: int = 0  # consecutive new quorums of the same members without a step between them
    # indexes
    asking: dict[str, Replica] = field(default_factory=dict)  # in the order in which they joined
    cooling: dict[str, float] = field(default_factory=dict)
    requesting_members: dict[str, Replica] = field(default_factory=dict)  # in the order in which they joined
    continuing: set[str] = field(default_factory=set)
    continuing_not_asking: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    # members of the last quorum that completed their training
    finishers: set[str] = field(default_factory=set)
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
        """A replica connects: new, back after an interruption (same session), or restarted (another session).

        If an old session is live under this name, the caller has reported its loss (`lose`) first.
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
        """A replica joins. Joining again replaces its member data and keeps its place in the order."""
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
        """A replica could not connect to some sessions, and could not fetch the states that others claim to hold."""
        replica = self.replicas[name]
        since = {each.session: each.since for each in self.replicas.values()}
        self.reach.report(now, replica.session, since.keys() & {*unreached, *unserved})
        if name in self.members and not set(self._sessions.values()).isdisjoint(unreached):
            # what cut members from each other may have cut newcomers off, too
            for newcomer in self.asking.keys() - self.requesting_members.keys():
                self.reach.doubt(self.asking[newcomer].session)
        # a report about a replica that was here earlier does not cost that replica its place
        self.reach.discredit(session for session in unserved if since.get(session, 0.0) > replica.since)

    def refuse(self, name: str) -> None:
        """Its claim was refused: it counts as absent until it joins with another one."""
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
        """A replica died, froze or was cut off. If not `certain`, it may continue training and return within `back_s`
        (None: within presume_dead_s)."""
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
        """A stopped or silent replica is dead, so no replica waits for it. False when it was not lost before."""
        if name not in self.gone:
            return False
        self._amend(name, certain=True, stopped=False)
        return True

    def leave(self, now: float, name: str, reason: str, step: int = -1) -> None:
        """A replica left with a shutdown message, holding a state of `step` steps."""
        replica = self.replicas.pop(name)
        self.reach.forget(replica.session)
        self._depart(
            replica, Gone(replica.session, now, reason, True, left=True, step=step, node=replica.node)
        )

    def describe_unreached(self, name: str, other: str) -> str:
        """A sentence for the pair; one of the two is a member and the other waits to join."""
        if name in self.members:
            return f"{name} cannot connect to {other}, which waits to join"
        return f"{name} waits to join and cannot connect to {other}"

    def returned(self, names: Iterable[str]) -> list[float]:
        """When lost members among these returned: they hold a state and are about to join."""
        return [self.replicas[n].since for n in names if self._sessions.get(n) == self.replicas[n].session]

    def finish(self, now: float, name: str) -> bool:
        """A departed member had completed its training; False when the member is not known."""
        if name not in self.gone:
            return False
        self._amend(name, finished=True)
        self.finished_at = now
        return True

    @property
    def has_newcomers(self) -> bool:
        """Whether a replica that is not a member joined. Checked at every event, so it must be cheap."""
        return len(self.asking) > len(self.requesting_members)

    @property
    def over(self) -> bool:
        """Whether the training has finished: members reported it, and no other could continue."""
        return bool(self.finishers) and not self.continuing and not self.silent

    @property
    def too_late(self) -> bool:
        """Whether the replicas that joined could only repeat steps of a finished training, and no other trains."""
        if not self.finishers or self.continuing_not_asking or self.silent:
            return False
        done = max(self.gone[name].step for name in self.finishers)
        asked = max((replica.asking.step for replica in self.asking.values() if replica.asking), default=0)
        if asked < done:
            return not self.finishers <= self.asking.keys()
        return not self.continuing and 2 * len(self.asking) <= self.largest

    def evict(self, name: str, reason: str) -> None:
        """Excludes a replica until it is readmitted, also under a new session."""
        self.evicted[name] = reason
        if replica := self.replicas.get(name):
            replica.asking = None
            self._note_departure(replica)
        if name in self.gone:
            self._amend(name, certain=True)
        self._index(name)

    def let_in(self, name: str) -> bool:
        """Readmits a replica: lifts its eviction and back-off, and lets a new training begin after a finished one.
        False when there was nothing to lift."""
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
        """Applies what time alone changes: back-offs end, silent members are presumed dead, old losses expire."""
        for name in [name for name, until in self.cooling.items() if until <= now]:
            self.replicas[name].cooling_until = 0.0
            self._index(name)
        for name in [n for n in self.silent if now - self.gone[n].at >= self.options.presume_dead_s]:
            self._amend(name, certain=True, stopped=False)
        old = now - self.options.flap_window_s
        for name in [name for name, times in self.losses.items() if times[-1] < old]:
            del self.losses[name]

    def next_change(self, now: float) -> float | None:
        """When time alone next changes something that a decision depends on."""
        times = list(self.cooling.values())
        times += [self.gone[name].at + self.options.presume_dead_s for name in self.silent]
        if self.asking and (pair := self.reach.next_change(now)) is not None:
            times.append(pair)
        return min(times, default=None)

    # ---- quorums ----------------------------------------------------------------------------------------

    def next_quorum(self, members: Iterable[Member], spares: Iterable[str], reason: str) -> Quorum:
        """The quorum that these members would form. Nothing changes yet: it may have to be saved first."""
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
        # members that were notified of a departure have aborted their groups, even if the same members are back now
        broken = bool(self.departed) or any(member.commit_failures > 0 for member in members)
        return broken or not self._same(members)

    def _same(self, members: Sequence[Member]) -> bool:
        sessions = self._sessions
        return len(members) == len(sessions) and all(sessions.get(m.replica) == m.session for m in members)

    def not_before(self, members: Sequence[Member]) -> float:
        """When a new quorum of these members, sorted by name, may be formed: at most PACE in PACE_S, with a pause that
        doubles while the same members make no step."""
        over = self.stepless - _FREE_TRIES
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
        """Makes it the current quorum; the requests of its members are answered."""
        before = self._sessions
        if quorum.number > self.number:
            stepless = self._same(quorum.members) and not self._stepped(quorum.members)
            self.stepless = self.stepless + 1 if stepless else 0
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

    def note_last_quorum(self, now: float, last: tuple[int, int, int], unknown: bool) -> bool:
        """A client reports the (epoch, number, round) of its last quorum; True: ask the client for that quorum.

        Numbers never go back. The quorum of an unknown session comes from an earlier lighthouse: a quorum formed here
        without knowledge of it gives way.
        """
        epoch, number, round_ = last
        if number > self.number or round_ > self.round or epoch > self.epoch:
            self.number, self.round = max(self.number, number), max(self.round, round_)
            self.epoch = max(self.epoch, epoch + 1)
        asked = unknown and number > 0 and self.last is not None and not self.taken_over
        self.yielding = self.yielding or asked
        asked = asked or (round_ == self.round and self.needs_recall)
        if asked:  # newcomers must not form a quorum before we know which replicas already train
            self.settling_until = max(self.settling_until, now + _RECALL_S)
        return asked

    @property
    def needs_recall(self) -> bool:
        """Whether a client knows of a later quorum than we do."""
        return self.yielding or self.round > (self.last.round if self.last else 0)

    def adopt(self, now: float, quorum: Quorum, finished: Iterable[str] = ()) -> list[str]:
        """Adopts a quorum formed by an earlier lighthouse; returns the members expected to reconnect."""
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

    def _depart(self, replica: Replica, gone: Gone) -> None:
        if self._note_departure(replica):
            # no replica waits for an evicted one
            self.gone[replica.name] = replace(gone, certain=gone.certain or replica.name in self.evicted)
        self._index(replica.name)
        if not self.continuing:  # only stopped members hold the state: the others wait for them
            for name, other in list(self.gone.items()):
                if other.stopped and other.certain and name not in self.evicted:
                    self._amend(name, certain=False, at=gone.at)

    def _amend(self, name: str, **changes: Any) -> None:
        self.gone[name] = replace(self.gone[name], **changes)
        self._index(name)

    def _note_departure(self, replica: Replica) -> bool:
        """Whether it was a member. It no longer is one, even if the same session returns."""
        member = self._sessions.get(replica.name) == replica.session
        if member:
            self.departed.add(replica.name)
        return member

    def _settle_gone(self, name: str, session: str) -> None:
        """A name returned: the same session is alive after all; another one waits for the old one's lease to expire."""
        if name in self.gone:
            if self.gone[name].session == session:
                del self.gone[name]
            elif not self.replicas[name].cooling_until:
                self._amend(name, certain=True, stopped=False)

    def _wait_for_lease(self, name: str, session: str, node: str) -> None:
        """One process per name: a new session may become a member once the old one can no longer commit.

        A silent process can commit for presume_dead_s. A process of the same node whose connection was closed is dead:
        its agent starts the next one only then.
        """
        gone = self.gone.get(name)
        if gone is None or gone.certain or gone.session == session or (gone.closed and gone.node == node):
            return
        replica = self.replicas[name]
        replica.cooling_until = max(replica.cooling_until, gone.at + self.options.presume_dead_s)

    def _recent_losses(self, now: float, name: str) -> list[float]:
        return [at for at in self.losses.get(name, ()) if now - at < self.options.flap_window_s]

    def _cool(self, now: float, name: str) -> None:
        """Backs off a replica that was lost too often recently."""
        options = self.options
        over = len(self._recent_losses(now, name)) - options.flap_limit
        if over > 0:
            pause = min(options.flap_backoff_s * 2.0 ** (over - 1), options.flap_backoff_max_s)
            self.replicas[name].cooling_until = now + pause

    def _index(self, name: str) -> None:
        """Updates the indexes for one name."""
        replica = self.replicas.get(name)
        if replica is not None and (replica.observer or replica.unfit or name in self.evicted):
            replica = None
        if replica is not None and replica.cooling_until:
            self.cooling[name], replica = replica.cooling_until, None
        else:
            self.cooling.pop(name, None)
        # `replica` is None from here on when it cannot be a member now
        asker = replica if replica is not None and replica.asking is not None else None
        idle = replica is not None and asker is None
        member = replica is not None and self._sessions.get(name) == replica.session
        member = member and name not in self.departed
        _keep(self.asking, name, asker)
        _keep(self.requesting_members, name, asker if member else None)
        _put(self.idle, name, idle)
        _put(self.continuing, name, member)
        _put(self.continuing_not_asking, name, member and idle)
        gone = self.gone.get(name)
        _put(self.silent, name, gone is not None and not gone.certain)
        _put(self.finishers, name, gone is not None and gone.finished)


def _keep(index: dict[str, Replica], name: str, replica: Replica | None) -> None:
    if replica is None:
        index.pop(name, None)
    elif index.get(name) is not replica:
        index.pop(name, None)  # a restarted replica joins later than its earlier process did
        index[name] = replica


def _put(index: set[str], name: str, inside: bool) -> None:
    if inside:
        index.add(name)
    else:
        index.discard(name)
