"""Forms quorums: runs the pure decision, saves the outcome (in etcd), announces it. On the loop's thread.

A number is announced only after it is saved. No other decision is made while a save is in progress.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from allranks.errors import AllranksError
from allranks.lighthouse.decide import (
    Form,
    Wait,
    decide,
    find_broken,
    find_joining,
    find_unproved,
    find_wanted,
)
from allranks.lighthouse.messages import Refused, encode
from allranks.lighthouse.options import Options
from allranks.lighthouse.sessions import EventLog, Sessions
from allranks.lighthouse.state import QuorumState
from allranks.lighthouse.status import PersistedState
from allranks.model.cluster import Probe, Quorum, QuorumFormed, QuorumWanted, addresses_of

log = logging.getLogger("allranks.lighthouse")

_NAMED = 8  # newcomers whose addresses are sent to the members
_LASTING_S = 1.0  # a wait this long is logged
_TOGETHER_S = 0.05  # after a loss members join again within moments, without a notice

#: Saves the state. Raises when that fails or this lighthouse does not lead.
Keep = Callable[[PersistedState], Awaitable[None]]


class Timers(Protocol):
    """The part of an asyncio loop that is used here."""

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle: ...
    def call_soon(self, callback: Callable[..., object], *args: object) -> asyncio.Handle: ...


@dataclass
class QuorumCoordinator:
    """See the module. `soon()` schedules one decision for all requests of this round of the loop."""

    options: Options
    timers: Timers
    now: Callable[[], float]
    state: QuorumState
    sessions: Sessions
    event_log: EventLog
    keep: Keep | None = None
    active: bool = True
    # completes a quorum of other members before it is formed
    on_new: Callable[[Quorum], Quorum] | None = None
    reason: str = "no quorum yet"
    waiting: str = ""
    _rule: str = "nobody"
    _logged: tuple[str, int] = ("", -1)
    _wanted: tuple[int, str] = (-1, "")  # round and reason of the last notice that a replica waits to join
    _broken: int = -1  # the quorum whose members are, or will be, notified that its group was left
    _planned: bool = False
    _timer: asyncio.TimerHandle | None = None
    _saving: asyncio.Task[None] | None = None
    _left_out: tuple[str, ...] = ()  # of the quorum that is being formed
    _kept: PersistedState = field(default_factory=PersistedState)
    _after: list[Callable[[], None]] = field(default_factory=list)

    def reset(self, state: QuorumState, active: bool, keep: Keep | None) -> None:
        """Starts over: this lighthouse was elected, or deposed."""
        self.close()
        self.state, self.active, self.keep = state, active, keep
        self.reason, self.waiting, self._rule = "no quorum yet", "", "nobody"
        self._kept = self._to_keep(None)

    def close(self) -> None:
        """Stops the timer and a save in progress."""
        self._plan(None)
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None

    def soon(self) -> None:
        """Schedules a decision at the end of this round of the loop."""
        if not self._planned:
            self._planned = True
            self.timers.call_soon(self._settle)

    def after_kept(self, callback: Callable[[], None]) -> None:
        """Calls back once the current evictions and finished members are saved; at once without etcd."""
        if self.keep is None:
            callback()
        else:
            self._after.append(callback)
            self.soon()

    def wait_reason(self) -> tuple[str, tuple[str, ...]]:
        """Why there is no quorum now, and the replicas waited for."""
        decision, reason = decide(self.now(), self.state, self.options)
        return reason, decision.missing if isinstance(decision, Wait) else ()

    def _settle(self) -> None:
        self._planned = False
        self.event_log.flush()
        if not self.active or self._saving is not None:
            return
        if self.keep is not None and self._changed():
            self._save(None)
            return
        after, self._after = self._after, []
        for callback in after:
            callback()
        now = self.now()
        self.state.advance(now)
        decision, reason = decide(now, self.state, self.options)
        if isinstance(decision, Form):
            self._rule, self.waiting = decision.rule, ""
            quorum = self.state.next_quorum(decision.members, decision.spares, reason)
            self._left_out = decision.left_out
            if self.keep is None or quorum.number == self.state.number:
                self._announce(quorum)
            else:
                self._save(quorum)
        else:
            self._wait(decision, reason, now)

    def _to_keep(self, new: Quorum | None) -> PersistedState:
        state = self.state
        number = max(state.number, new.number if new else 0)
        finished = () if new else tuple(sorted(state.finishers))
        return PersistedState(state.epoch, number, new or state.last, dict(state.evicted), finished)

    def _changed(self) -> bool:
        """Whether evictions or finished members have changed since the last save."""
        return self._kept.evicted != self.state.evicted or set(self._kept.finished) != self.state.finishers

    def _save(self, quorum: Quorum | None) -> None:
        self._saving = asyncio.ensure_future(self._keep_then_announce(quorum))

    async def _keep_then_announce(self, new: Quorum | None) -> None:
        """A member lost during the save makes the quorum void; its number is used up."""
        assert self.keep is not None
        state, kept = self.state, self._to_keep(new)
        try:
            await self.keep(kept)
        except (OSError, AllranksError) as error:
            log.error("could not save quorum %d: %s", kept.number, error)
            self._saving = None
            self.timers.call_later(max(self.options.quorum_tick_s, 0.05), self.soon)
            return
        self._saving, self._kept = None, kept
        state.number = kept.number
        if new is not None and all(
            m.replica in state.asking and state.asking[m.replica].session == m.session for m in new.members
        ):
            self._announce(new)
        self.soon()

    def _announce(self, quorum: Quorum) -> None:
        """Sends the quorum to its members, encoded once for all."""
        last, before = self.state.last, self.state.members
        new = last is None or quorum.number != last.number
        if new and self.on_new is not None:
            quorum = self.on_new(quorum)
        self.state.form(quorum, self.now())
        self.reason = quorum.reason
        frame = encode(quorum)
        for member in quorum.members:
            for session in self.sessions.of(member.replica):
                session.asking = None
                if session.peer is not None:
                    session.peer.deliver(quorum, frame)
        if new:
            self.event_log.event("quorum", f"quorum {quorum.number}: {quorum.reason}", number=quorum.number)
            others = (self.sessions.observers | before | set(quorum.spares)) - set(quorum.names)
            self.event_log.notify(
                QuorumFormed(quorum.number, quorum.epoch, quorum.names, quorum.reason), others
            )
        self.event_log.flush()
        if self._left_out:
            self.soon()  # to probe them
        now = self.now()
        self._plan(self.state.next_change(now), now)

    def _wait(self, decision: Wait, reason: str, now: float) -> None:
        self.waiting = "" if decision.rule == "nobody" else reason
        if decision.rule != self._rule and self.waiting:
            self.timers.call_later(_LASTING_S, self._log_wait, decision.rule, self.state.round)
        self._rule = decision.rule
        self._refuse_late(decision.refused, reason)
        self._probe_newcomers(now)
        self._call_members(now)
        self._plan(decision.until, now)

    def _refuse_late(self, names: tuple[str, ...], reason: str) -> None:
        """Answers these replicas that the training has finished."""
        refused = Refused("finished", reason)
        for name in names:
            self.state.withdraw(name)
            for session in self.sessions.of(name):
                session.asking = None
                session.tell(refused, encode(refused))
            self.event_log.event("refused", f"{name} joined too late: the training has finished", name)

    def _log_wait(self, rule: str, round_: int) -> None:
        """Logs a wait that lasts, once per rule and round."""
        if self._rule == rule and self.state.round == round_ and self._logged != (rule, round_):
            self._logged = (rule, round_)
            self.event_log.event("waiting", f"no quorum yet: {self.waiting}")

    def _probe_newcomers(self, now: float) -> None:
        """Asks members and newcomers to connect to each other, before any member stops training for a newcomer."""
        state, reach = self.state, self.state.reach
        if not (unproved := find_unproved(now, state)):
            return
        by_session = {m.session: m for m in state.last.members} if state.last else {}
        by_session |= {each.session: each.asking for each in state.asking.values() if each.asking}
        wanted: dict[str, dict[str, tuple[str, ...]]] = {}
        for newcomer, provers in ((each.member, each.provers) for each in unproved):
            ready = [one for one in provers if not reach.are_apart(now, one, newcomer.session)]
            for one in reach.begin_probe(newcomer.session, ready):
                wanted.setdefault(by_session[one].replica, {})[newcomer.session] = addresses_of(newcomer)
            for one in ready:
                if reach.begin_probe(one, [newcomer.session]):
                    wanted.setdefault(newcomer.replica, {})[one] = addresses_of(by_session[one])
        for name, addresses in wanted.items():
            self.event_log.notify(Probe(addresses), [name])
        self.event_log.flush()

    def _call_members(self, now: float) -> None:
        """Notifies training members of waiting newcomers, once each, and of a group that others have left."""
        reason = find_wanted(now, self.state, self.options)
        if not reason:
            self._wanted = (-1, "")  # the next one is another newcomer, even under the same name
        elif (self.state.round, reason) != self._wanted:
            self._wanted = (self.state.round, reason)
            joining = find_joining(now, self.state)
            # members prepare a group for a few only
            waiting = tuple(joining) if len(joining) <= _NAMED else ()
            wanted = QuorumWanted(reason, self.state.number, waiting=waiting)
            self.event_log.notify(wanted, self.state.continuing_not_asking)
            self.event_log.flush()
        if self._broken != self.state.number and find_broken(self.state):
            self._broken = self.state.number
            self.timers.call_later(_TOGETHER_S, self._notify_broken, self.state, self.state.number)

    def _notify_broken(self, state: QuorumState, number: int) -> None:
        """Notifies members that still wait in a group, or for one, that another member has left it."""
        if state is not self.state or number != state.number:
            return
        reason = find_broken(state)
        if not reason:
            self._broken = -1
            return
        self.event_log.notify(QuorumWanted(reason, number, broken=True), state.continuing_not_asking)
        self.event_log.flush()

    def _plan(self, until: float | None, now: float | None = None) -> None:
        """Sets the one timer for the next moment at which time alone changes a decision."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if until is not None:
            delay = until - (self.now() if now is None else now)
            self._timer = self.timers.call_later(
                max(delay, self.options.quorum_tick_s / 10, 0.001), self.soon
            )
