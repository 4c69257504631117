"""The state shared by the training thread, the regrouping thread and the client's thread, behind one lock.

Runs in a rank. Every change goes through a method here, so that the rules of `Phase` hold: the training state changes
only while APPLYING, and a claim sent to the lighthouse stays true until its answer has been processed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from allranks.blackbox.phases import during
from allranks.errors import HealingFailed
from allranks.manager.groups.generation import Generation, RegroupTimes, StepAttempt
from allranks.manager.held import HeldState
from allranks.manager.plan import Claim, Lineage, Position

_REMEMBERED_LOSSES = 64
_REMEMBERED_TRANSFERS = 8  # quorums; only the one being formed matters
_POLL_S = 0.2  # between checks whether a peer is gone without a notice


class Phase(Enum):
    """The training thread's phase in a step. The training state (parameters, optimizer) changes only in APPLYING.

    BETWEEN --start_quorum--> COMPUTING --first collective--> REDUCING --vote--> VOTING --yes--> APPLYING --> BETWEEN;
    from REDUCING and VOTING a step that failed goes back to BETWEEN.
    """

    BETWEEN = "between steps"
    COMPUTING = "computing"
    REDUCING = "reducing gradients"
    VOTING = "voting"
    APPLYING = "applying the step"


def may_ask(phase: Phase, broken: bool, eager: bool = True, parked: bool = False) -> bool:
    """Whether the rank may request a quorum now: its state is stable and its claim will stay true.

    Not while it reduces or votes in a healthy group, where the others count on it, nor while it applies a step, when the
    state is neither the old nor the new one. If not `eager` (sharded models, local steps), the state may be read only
    while the training thread waits: parked in start_quorum, or in a vote that has failed.
    """
    if phase is Phase.APPLYING:
        return False
    if not eager:
        return parked or (phase is Phase.VOTING and broken)
    return broken or phase in (Phase.BETWEEN, Phase.COMPUTING)


@dataclass(eq=False)
class TrainingState:
    """All fields are guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    phase: Phase = Phase.BETWEEN
    held: HeldState = field(default_factory=HeldState)
    batches: int = 0
    attempt: StepAttempt = field(default_factory=StepAttempt)
    generation: Generation | None = None
    wanted: str = ""  # why a new quorum should be requested; "": not needed
    regrouping: bool = False
    news: str = ""  # raised in the next vote
    # this replica is left out and tries again: the training thread waits until then
    extended_until: float = 0.0
    forming: int = 0  # number of the quorum whose group is being made
    losses: dict[int, str] = field(default_factory=dict)  # quorum number -> what was lost
    heard: set[Position] = field(default_factory=set)  # states of members that left
    # order of a quorum that we have not received yet -> replicas that have fetched their state in it
    fetched: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    failure: BaseException | None = None  # why there is no quorum
    # the state may be read during the computation; False: LocalSGD, DiLoCo, sharded models
    eager: bool = True
    parked: bool = False  # the training thread waits in start_quorum
    readers: int = 0  # threads that read the state meanwhile
    read_limit_s: float = 60.0  # of one read, for which the training thread waits before it changes the state
    thread: int = 0  # the training thread
    times: RegroupTimes = field(default_factory=RegroupTimes)  # since the last commit
    closing: bool = False
    invited: bool = False  # before the first group: the members prepare one, and wait for our first backward
    due: bool = False  # the training thread waits for a group

    # ---- training thread ----

    @property
    def in_step(self) -> bool:
        """Whether a step is open; gradients are reduced only in one."""
        return self.phase in (Phase.COMPUTING, Phase.REDUCING)

    @property
    def step(self) -> int:
        """How many steps the state has."""
        return self.held.step

    @property
    def position(self) -> Position:
        """Of the state: the term that committed it, and its steps."""
        return self.held.position

    def state_dict(self) -> dict[str, int]:
        """The manager's own part of a checkpoint."""
        with self.changed:
            return {"step": self.step, "batches_committed": self.batches, "term": self.held.term}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from a checkpoint; before the first step."""
        with self.changed:
            self.held = self.held.restore(int(state.get("term", 0)), int(state["step"]))
            self.batches = int(state.get("batches_committed", 0))

    def begin(self) -> StepAttempt:
        """Opens a new step attempt. If the last one had collectives and no vote, the group is out of step: breaks it."""
        with self.changed:
            old = self.attempt
            abandoned = old.issuers and self.phase is Phase.REDUCING and not old.invalid
            if abandoned and old.generation is not None:
                self.break_group(old.generation, "a step was abandoned in the middle")
            if old.committed and old.generation is not None:
                old.generation.together = True
            self.attempt = StepAttempt(opened=True)
            self.times.mark("step opened")
            self.thread = threading.get_ident()
            self.phase = Phase.COMPUTING
            self.held = self.held.open_step()
            self.failure = None
            if self.generation is None or not self.generation.usable:
                self.wanted = self.wanted or ("" if self.regrouping else "starting")
            if self.wanted or self.regrouping or (self.generation and self.generation.transfers):
                self.changed.notify_all()
            return self.attempt

    def bind(self, attempt: StepAttempt, limit_s: float) -> Generation | None:
        """Waits for the group of this attempt; None when the attempt is invalid."""
        with self.changed:
            if attempt.invalid:
                return None
            if attempt.generation is None:
                self.times.mark("first collective due")
                generation = self._wait_for_group(limit_s)
                if generation.participates and (attempt.gave_zeros or not generation.loaded):
                    attempt.invalid = "computed on a state that had to be healed"
                    if generation.loaded:
                        attempt.invalid = "computed as one whose gradients do not count"
                    return None
                attempt.generation, attempt.gave_zeros = generation, not generation.participates
            if not attempt.generation.usable:
                attempt.invalid = attempt.generation.broken or "the members changed"
                return None
            self.phase = Phase.REDUCING
            return attempt.generation

    def rebind(self, attempt: StepAttempt, limit_s: float) -> Generation | None:
        """Waits for the next group after one broke; None when the collectives cannot be repeated in it."""
        with self.changed:
            if attempt.error is not None or self.closing:
                return None
            if not self.eager:  # the other ranks of this replica restart the step
                attempt.invalid = attempt.invalid or "the members changed"
                return None
            attempt.generation, attempt.invalid = None, ""
            attempt.issuers.clear()
            attempt.works.clear()
            self.phase = Phase.COMPUTING
            self.changed.notify_all()
            return self.bind(attempt, limit_s)

    def bound(self, limit_s: float) -> Generation | None:
        """Waits for the group of this step; None before the first step."""
        if self.attempt.generation is not None or not self.attempt.opened:
            return self.attempt.generation
        with self.changed:
            generation = self._wait_for_group(limit_s)
            self.attempt.gave_zeros |= not generation.participates  # the script may have computed its share
            return generation

    def may_launch(self, attempt: StepAttempt) -> bool:
        """Whether a collective of this attempt would be launched (or fail) without a delay."""
        with self.changed:
            if attempt.invalid:
                return True
            generation = attempt.generation or self.settled()
            return generation is not None and not (generation.usable and generation.holding(attempt))

    def wait_for_transfers(self, attempt: StepAttempt, generation: Generation, limit_s: float) -> str:
        """Waits until no transfer delays the next collective, or the group broke; returns which replicas were too slow."""
        deadline = time.monotonic() + limit_s
        with self.changed:
            while generation.usable and (healers := generation.holding(attempt)):
                if generation.peer_gone():
                    break
                if time.monotonic() >= deadline:
                    members = generation.quorum.members
                    names = ", ".join(members[healer].replica for healer in sorted(healers))
                    return f"{names} did not fetch its state in {limit_s:.1f} s"
                self.changed.wait(_POLL_S)
        return ""

    def park(self, limit_s: float) -> Generation:
        """Makes the training thread wait for the group; its state may be read meanwhile."""
        with self.parking(), self.changed:
            return self._wait_for_group(limit_s)

    def park_until_invited(self, limit_s: float) -> bool:
        """Before the first group: True when the first step may begin without one, because the members prepare it."""
        with self.parking(), self.changed:
            self.changed.wait_for(
                lambda: self.invited or self.failure is not None or self.settled() is not None, limit_s
            )
            return self.invited

    def invite(self) -> None:
        """The members prepare a group with this replica: its first step may begin."""
        with self.changed:
            self.invited = self.generation is None
            self.changed.notify_all()

    def wait_until_due(self, wanted: Callable[[], bool]) -> None:
        """Waits until the training thread needs the group."""
        with self.changed:
            while wanted() and not self.due:
                self.changed.wait(_POLL_S)

    @contextlib.contextmanager
    def parking(self) -> Iterator[None]:
        """Marks that the training thread waits for others, so that its state may be read."""
        with self.changed:
            self.parked = True
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.parked = False
                if not self.changed.wait_for(lambda: not self.readers, self.read_limit_s):
                    raise HealingFailed(
                        f"another thread has been reading the state for {self.read_limit_s:.1f} s: is a state_dict function blocked?"
                    )

    @contextlib.contextmanager
    def reading(self, limit_s: float) -> Iterator[None]:
        """Allows reading the state inside: from any thread if `eager`, else while the training thread waits."""
        if self.eager or threading.get_ident() == self.thread:
            yield
            return
        with self.changed:
            if not self.changed.wait_for(lambda: self.parked or self.phase is Phase.VOTING, limit_s):
                raise HealingFailed(f"the training thread did not reach its next step in {limit_s:.1f} s")
            self.readers += 1
        try:
            yield
        finally:
            with self.changed:
                self.readers -= 1
                self.changed.notify_all()

    def wait_until_opened(self, wanted: Callable[[], bool], limit_s: float) -> bool:
        """Waits until the next step is open: by then a script has updated schedule, scale and sampler. After the limit the
        state counts as updated too: the script is saving or evaluating."""
        closed = (Phase.BETWEEN, Phase.APPLYING)
        with self.changed:
            return self.changed.wait_for(
                lambda: self.phase not in closed or self.parked or not wanted(), limit_s
            )

    def settled(self) -> Generation | None:
        """The working group; None while a new one is needed or being made."""
        with self.changed:
            usable = self.generation is not None and self.generation.usable
            return self.generation if usable and not self.wanted and not self.regrouping else None

    def want(self, reason: str) -> None:
        """Requests a new quorum as soon as that is possible."""
        with self.changed:
            self.wanted = self.wanted or reason
            self.changed.notify_all()

    def _wait_for_group(self, limit_s: float) -> Generation:
        def ready() -> bool:
            return self.failure is not None or self.settled() is not None

        if not ready():
            self.due = True
            self.changed.notify_all()
            with during("regrouping"):
                deadline = time.monotonic() + limit_s
                while not self.changed.wait_for(ready, deadline - time.monotonic()):
                    if self.extended_until > deadline:
                        deadline = self.extended_until
                        continue
                    why = self.wanted or "regrouping"
                    raise TimeoutError(f"no process group after {limit_s:.1f} s; last: {why}")
        if self.failure is not None:
            raise self.failure
        assert self.generation is not None
        self.due = False
        return self.generation

    def begin_vote(self, attempt: StepAttempt, good: bool = True) -> Generation | None:
        """Enters VOTING unless the group is gone. A vote against the step leaves no doubt: it cannot be committed."""
        with self.changed:
            generation = attempt.generation
            if attempt.invalid or generation is None or not generation.usable:
                return None
            self.phase, self.held = Phase.VOTING, self.held.vote(generation.plan.term if good else 0)
            return generation

    def passed(self, generation: Generation, limit_s: float) -> bool:
        """The vote passed. True unless a quorum was requested meanwhile and decides against the step.

        A member that left with this step committed decides too: after the last step there is no next quorum.
        """
        with self.changed:
            if self.held.claimed:
                return self._wait_for_verdict(limit_s, generation.plan.term)
            self._commit(generation.plan.term)
            return True

    def refuse(self) -> None:
        """The vote failed: ends the step, unless a claim was sent before, which leaves the decision to the quorum."""
        with self.changed:
            if not self.held.claimed:
                self.end_step()

    def committed_by_quorum(self, limit_s: float) -> bool:
        """Whether the quorum that was requested before we refused the step has committed it."""
        with self.changed:
            return self.held.claimed and self._wait_for_verdict(limit_s)

    def resolve_lost_vote(self, generation: Generation, reason: str, limit_s: float) -> bool:
        """The vote was sent but its result did not arrive: the next quorum, or a member that left, decides."""
        with self.changed:
            self.break_group(generation, reason)
            if self.held.pending or self.held.claimed:
                return self._wait_for_verdict(limit_s, generation.plan.term)
            self.end_step()  # we voted against it
            return False

    def _wait_for_verdict(self, limit_s: float, term: int = 0) -> bool:
        def heard() -> bool:
            return bool(term) and (term, self.step + 1) in self.heard

        def decided() -> bool:
            return heard() or self.held.verdict is not None or self.failure is not None

        if not self.changed.wait_for(decided, limit_s):
            raise TimeoutError(f"unknown after {limit_s:.1f} s whether step {self.step} was committed")
        if heard():
            self.held = self.held.decide()
            self._commit(term)
            return True
        if self.held.verdict is None and self.failure is not None:
            raise self.failure
        verdict, self.held = bool(self.held.verdict), self.held.decide()
        if not verdict:
            self.end_step()
        return verdict

    def _commit(self, term: int) -> None:
        self.held = self.held.commit(term)
        self._committed()

    def _committed(self) -> None:
        self.times.mark("committed")
        self.times.log_if_regrouped(self.step)
        self.times = RegroupTimes()
        self.attempt.committed = True
        self.phase = Phase.APPLYING

    def end_step(self) -> None:
        """The state is stable: the step was applied, or it failed."""
        with self.changed:
            self.phase, self.held = Phase.BETWEEN, self.held.fail()
            if self.wanted:  # else waking the regrouping thread would cost every step a context switch
                self.changed.notify_all()

    def break_group(self, generation: Generation, reason: str) -> bool:
        """Marks the group as broken; True if it was not before."""
        with self.changed:
            first = generation.break_off(reason)
            if first:
                self.times.mark("group broken")
                if generation is self.generation:
                    self.wanted = self.wanted or reason
            self.changed.notify_all()
            return first

    # ---- notices ----

    def lost(self, number: int, reason: str, act: bool, position: Position | None = None) -> bool:
        """A member of quorum `number` is gone. True if that quorum is ours and was healthy until now.

        `position`: of the state that it held, which may decide whether our step in doubt was committed.
        """
        with self.changed:
            self.losses[number] = reason
            while len(self.losses) > _REMEMBERED_LOSSES:
                self.losses.pop(min(self.losses))
            if position is not None:
                self.heard.add(position)
            self.changed.notify_all()
            generation = self.generation
            if not act or generation is None or generation.number != number:
                return False
            return self.break_group(generation, reason)

    def on_replicas_waiting(self, reason: str) -> None:
        """A replica waits to join: the next vote notifies all members, so that they join at the same boundary."""
        with self.changed:
            self.news = reason
            if self.generation is not None and self.generation.voters == 1:  # no other voter
                self.wanted = self.wanted or reason
                self.changed.notify_all()

    def transferred(self, order: tuple[int, int], healer: int) -> None:
        """Replica `healer` has fetched its state in that quorum, which we may not have received yet."""
        with self.changed:
            if self.generation is not None and self.generation.quorum.order == order:
                self.generation.transfers.discard(healer)
            else:
                self.fetched.setdefault(order, set()).add(healer)
                while len(self.fetched) > _REMEMBERED_TRANSFERS:
                    self.fetched.pop(min(self.fetched))
            self.changed.notify_all()

    # ---- regrouping thread ----

    def extend_deadline(self, limit_s: float) -> None:
        """This replica is left out for now: the training thread waits this much longer for a group."""
        with self.changed:
            self.extended_until = time.monotonic() + limit_s

    def wait_until_wanted(self) -> bool:
        """Blocks until a quorum should and may be requested; False when the manager closes."""
        with self.changed:
            while not self.closing:
                broken = self.generation is None or not self.generation.usable
                if self.wanted and may_ask(self.phase, broken, self.eager, self.parked):
                    self.regrouping = True
                    return True
                self.changed.wait()
            return False

    def claim(self, **more: Any) -> Claim:
        """Our claim for the next quorum, which from now on decides a step in doubt."""
        with self.changed:
            self.wanted, self.news = "", ""
            self.times.mark("quorum requested")
            self.held, claim = self.held.claim(**more)
            return claim

    def form(self, number: int) -> str:
        """From now on a loss in quorum `number` interrupts making its group; returns a loss reported before."""
        with self.changed:
            self.forming = number
            self.times.mark("quorum answered")
            return self.losses.get(number, "")

    def publish(self, generation: Generation) -> None:
        """Makes the new group the current one; threads that wait for it continue."""
        with self.changed:
            self.forming = 0
            if self.generation is not None and self.generation is not generation:
                self.generation.replaced = True
            self.generation, self.invited = generation, False
            self.times.quorum = generation.number
            self.times.mark("group published")
            self.wanted = ""  # concerned the previous group; a loss in this one is handled below
            before = self.held.step
            self.held, generation.loaded = self.held.join(generation.plan, generation.index, generation.rank)
            if self.held.step != before:
                self._committed()
            self.heard.clear()
            generation.transfers -= self.fetched.pop(generation.quorum.order, set())
            lost = self.losses.get(generation.number)
            if lost:
                self.break_group(generation, lost)
            self.changed.notify_all()

    def tear(self) -> None:
        """Bytes of our state are about to be replaced: it is unusable until all of them are."""
        with self.changed:
            self.held = self.held.change()

    def arrived(self, position: Position, lineage: Lineage = ()) -> None:
        """Another state has arrived completely; NOWHERE: it is no longer wanted."""
        with self.changed:
            self.held = self.held.arrive(position, lineage)
            self.changed.notify_all()

    def healed(self, generation: Generation, position: Position) -> None:
        """The training thread has loaded the fetched state."""
        with self.changed:
            self.held = self.held.load()
            self.times.mark("state loaded")
            for one in (generation, self.generation):  # the next group may want the same state
                if one is not None and one.plan.top == position:
                    one.loaded = True
            self.changed.notify_all()

    def finish_regrouping(self, failure: BaseException | None = None) -> None:
        """Regrouping has ended, with a group or with this failure."""
        with self.changed:
            self.regrouping, self.forming = False, 0
            self.failure = failure
            self.changed.notify_all()
