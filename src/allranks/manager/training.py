"""What the training thread, the regrouping thread and the notices share, behind one lock.

Runs in a rank. Every change goes through a method here, so that the rules of `Phase` hold: the state moves only
while APPLYING, and a claim made to the lighthouse stays true until its answer has been acted upon.
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
_REMEMBERED_TRANSFERS = 8  # quorums; only the one that is being made matters
_LOOK_S = 0.2  # how often we look whether a peer is gone without notice


class Phase(Enum):
    """Where the training thread stands inside a step. The state (parameters, optimizer) changes only in APPLYING.

    BETWEEN --start_quorum--> COMPUTING --first collective--> REDUCING --vote--> VOTING --yes--> APPLYING --> BETWEEN;
    from REDUCING and VOTING a step that failed goes back to BETWEEN.
    """

    BETWEEN = "between steps"
    COMPUTING = "computing"
    REDUCING = "reducing gradients"
    VOTING = "voting"
    APPLYING = "applying the step"


def may_ask(phase: Phase, broken: bool, eager: bool = True, parked: bool = False) -> bool:
    """Whether the rank may ask for a quorum now: nothing changes its state and its claim will stay true.

    While it reduces or votes in a healthy group it must not: the others count on it. While it applies a step
    the state is neither the old nor the new one. Not `eager` (sharded models, local steps): its state may be
    read only while the training thread waits for us, parked in start_quorum or in a vote that has failed.
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
    wanted: str = ""  # why a new quorum should be asked for; "": not
    regrouping: bool = False
    news: str = ""  # raised in the next vote
    patient_until: float = 0.0  # left out of the quorum, which is tried again: the training thread waits too
    forming: int = 0  # number of the quorum whose group is being made
    losses: dict[int, str] = field(default_factory=dict)  # quorum number -> what was lost
    heard: set[Position] = field(default_factory=set)  # states of members that left
    # order of a quorum that we do not have yet -> replicas that have fetched their state in it
    fetched: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    failure: BaseException | None = None  # why no quorum could be had
    # whether the state may be read beside the computation; False: LocalSGD, DiLoCo, sharded models
    eager: bool = True
    parked: bool = False  # the training thread waits in start_quorum
    readers: int = 0  # threads that read the state meanwhile
    read_limit_s: float = 60.0  # of one read: the training thread changes the state only when it is done
    thread: int = 0  # the training thread
    times: RegroupTimes = field(default_factory=RegroupTimes)  # since the last commit
    closing: bool = False
    # before the first group: the members prepare for us, and wait for our first backward
    invited: bool = False
    due: bool = False  # the training thread waits for a group

    # ---- training thread ----

    @property
    def in_step(self) -> bool:
        """Whether a step is open: outside of one nothing is communicated."""
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
        """A new step attempt. One that left collectives without a vote has put the group out of step."""
        with self.changed:
            old = self.attempt
            abandoned = old.issuers and self.phase is Phase.REDUCING and not old.spoiled
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
        """The group of this attempt, waiting for it to be made; None when the attempt cannot be saved."""
        with self.changed:
            if attempt.spoiled:
                return None
            if attempt.generation is None:
                self.times.mark("first collective due")
                generation = self._wait_for_group(limit_s)
                if generation.participates and (attempt.gave_zeros or not generation.loaded):
                    attempt.spoiled = "computed on a state that had to be healed"
                    if generation.loaded:
                        attempt.spoiled = "computed as one whose gradients do not count"
                    return None
                attempt.generation, attempt.gave_zeros = generation, not generation.participates
            if not attempt.generation.usable:
                attempt.spoiled = attempt.generation.broken or "the members changed"
                return None
            self.phase = Phase.REDUCING
            return attempt.generation

    def rebind(self, attempt: StepAttempt, limit_s: float) -> Generation | None:
        """After the group broke: the next one, if our state stands and the collectives can be repeated."""
        with self.changed:
            if attempt.error is not None or self.closing:
                return None
            if not self.eager:  # the other ranks of this replica try the step again from its start
                attempt.spoiled = attempt.spoiled or "the members changed"
                return None
            attempt.generation, attempt.spoiled = None, ""
            attempt.issuers.clear()
            attempt.works.clear()
            self.phase = Phase.COMPUTING
            self.changed.notify_all()
            return self.bind(attempt, limit_s)

    def bound(self, limit_s: float) -> Generation | None:
        """The group of this step, waiting for it to be made; None before the first step."""
        if self.attempt.generation is not None or not self.attempt.opened:
            return self.attempt.generation
        with self.changed:
            generation = self._wait_for_group(limit_s)
            self.attempt.gave_zeros |= not generation.participates  # the script may have asked for its share
            return generation

    def may_launch(self, attempt: StepAttempt) -> bool:
        """Whether a collective of this attempt would not be held back (or would fail at once)."""
        with self.changed:
            if attempt.spoiled:
                return True
            generation = attempt.generation or self.settled()
            return generation is not None and not (generation.usable and generation.holding(attempt))

    def wait_for_transfers(self, attempt: StepAttempt, generation: Generation, limit_s: float) -> str:
        """Waits until no transfer holds the next collective back, or the group broke; returns who took too long."""
        deadline = time.monotonic() + limit_s
        with self.changed:
            while generation.usable and (healers := generation.holding(attempt)):
                if generation.peer_gone():
                    break
                if time.monotonic() >= deadline:
                    members = generation.quorum.members
                    names = ", ".join(members[healer].replica for healer in sorted(healers))
                    return f"{names} did not fetch its state in {limit_s:.1f} s"
                self.changed.wait(_LOOK_S)
        return ""

    def park(self, limit_s: float) -> Generation:
        """The training thread waits for the group, and lets its state be read meanwhile."""
        with self.parking(), self.changed:
            return self._wait_for_group(limit_s)

    def park_until_invited(self, limit_s: float) -> bool:
        """Before the first group: True when the first step may begin without one, for the members prepare it."""
        with self.parking(), self.changed:
            self.changed.wait_for(
                lambda: self.invited or self.failure is not None or self.settled() is not None, limit_s
            )
            return self.invited

    def invite(self) -> None:
        """The members prepare a group with us: our first step may begin."""
        with self.changed:
            self.invited = self.generation is None
            self.changed.notify_all()

    def wait_until_due(self, wanted: Callable[[], bool]) -> None:
        """Until the training thread needs the group."""
        with self.changed:
            while wanted() and not self.due:
                self.changed.wait(_LOOK_S)

    @contextlib.contextmanager
    def parking(self) -> Iterator[None]:
        """Inside, the training thread waits for others: its state may be read."""
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
                        f"another thread has read the state for {self.read_limit_s:.1f} s: is a state_dict function blocked?"
                    )

    @contextlib.contextmanager
    def reading(self, limit_s: float) -> Iterator[None]:
        """Inside, the state may be read: from any thread if `eager`, else while the training thread waits."""
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
        """Until the next step is open: what a script changes after a step (schedule, scale, sampler) is changed by then.
        At the limit the state is taken as it is: a script that saves or evaluates for so long has changed it."""
        closed = (Phase.BETWEEN, Phase.APPLYING)
        with self.changed:
            return self.changed.wait_for(
                lambda: self.phase not in closed or self.parked or not wanted(), limit_s
            )

    def settled(self) -> Generation | None:
        """The group that works; None while a new one is needed or being made."""
        with self.changed:
            usable = self.generation is not None and self.generation.usable
            return self.generation if usable and not self.wanted and not self.regrouping else None

    def want(self, reason: str) -> None:
        """A new quorum is to be requested as soon as that is possible."""
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
                    if self.patient_until > deadline:
                        deadline = self.patient_until
                        continue
                    why = self.wanted or "regrouping"
                    raise TimeoutError(f"no process group after {limit_s:.1f} s; last: {why}")
        if self.failure is not None:
            raise self.failure
        assert self.generation is not None
        self.due = False
        return self.generation

    def begin_vote(self, attempt: StepAttempt, good: bool = True) -> Generation | None:
        """Enters VOTING unless the group is gone. Who votes against the step is not in doubt: it cannot be committed."""
        with self.changed:
            generation = attempt.generation
            if attempt.spoiled or generation is None or not generation.usable:
                return None
            self.phase, self.held = Phase.VOTING, self.held.vote(generation.plan.term if good else 0)
            return generation

    def passed(self, generation: Generation, limit_s: float) -> bool:
        """The vote passed. True unless the quorum was asked meanwhile and decides otherwise.

        A member that has left with this step committed decides too: after the last step there is no next quorum.
        """
        with self.changed:
            if self.held.claimed:
                return self._wait_for_verdict(limit_s, generation.plan.term)
            self._commit(generation.plan.term)
            return True

    def refuse(self) -> None:
        """The vote failed, and our claim says so from now on, unless the quorum was asked before. One in doubt could pass."""
        with self.changed:
            if not self.held.claimed:
                self.end_step()

    def decided_otherwise(self, limit_s: float) -> bool:
        """Whether the quorum that was asked before we refused has committed the step."""
        with self.changed:
            return self.held.claimed and self._wait_for_verdict(limit_s)

    def doubtful(self, generation: Generation, reason: str, limit_s: float) -> bool:
        """The vote was given and its result did not come: the next quorum, or a member that left, decides."""
        with self.changed:
            self.break_group(generation, reason)
            if self.held.pending or self.held.claimed:
                return self._wait_for_verdict(limit_s, generation.plan.term)
            self.end_step()  # we have voted against it
            return False

    def _wait_for_verdict(self, limit_s: float, term: int = 0) -> bool:
        def heard() -> bool:
            return bool(term) and (term, self.step + 1) in self.heard

        def decided() -> bool:
            return heard() or self.held.verdict is not None or self.failure is not None

        if not self.changed.wait_for(decided, limit_s):
            raise TimeoutError(f"nobody could say whether step {self.step} was committed ({limit_s:.1f} s)")
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
        """Nothing changes the state any more: the step was applied, or it failed."""
        with self.changed:
            self.phase, self.held = Phase.BETWEEN, self.held.fail()
            if self.wanted:  # waking the regrouping thread for nothing would cost every step a switch
                self.changed.notify_all()

    def break_group(self, generation: Generation, reason: str) -> bool:
        """The group failed us; True when we are the first to notice."""
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
        """A member of quorum `number` is gone. True when that quorum is ours and was healthy until now.

        `position`: of the state that it held; our doubtful step may depend on it.
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
        """Somebody waits to join: the next vote tells all members, who then ask at the same boundary."""
        with self.changed:
            self.news = reason
            if self.generation is not None and self.generation.voters == 1:  # nobody to agree with
                self.wanted = self.wanted or reason
                self.changed.notify_all()

    def transferred(self, order: tuple[int, int], healer: int) -> None:
        """Replica `healer` has fetched all it needs in that quorum; it may be one that we do not have yet."""
        with self.changed:
            if self.generation is not None and self.generation.quorum.order == order:
                self.generation.transfers.discard(healer)
            else:
                self.fetched.setdefault(order, set()).add(healer)
                while len(self.fetched) > _REMEMBERED_TRANSFERS:
                    self.fetched.pop(min(self.fetched))
            self.changed.notify_all()

    # ---- regrouping thread ----

    def be_patient(self, limit_s: float) -> None:
        """This replica is left out for now: so much longer the training thread waits for a group."""
        with self.changed:
            self.patient_until = time.monotonic() + limit_s

    def wait_until_wanted(self) -> bool:
        """Blocks until a quorum should and may be asked for; False when the manager closes."""
        with self.changed:
            while not self.closing:
                broken = self.generation is None or not self.generation.usable
                if self.wanted and may_ask(self.phase, broken, self.eager, self.parked):
                    self.regrouping = True
                    return True
                self.changed.wait()
            return False

    def claim(self, **more: Any) -> Claim:
        """What we say of our state; from here on a vote in doubt is decided by the quorum."""
        with self.changed:
            self.wanted, self.news = "", ""
            self.times.mark("quorum requested")
            self.held, said = self.held.claim(**more)
            return said

    def form(self, number: int) -> str:
        """From here on a loss in quorum `number` interrupts its making; returns a loss that came before."""
        with self.changed:
            self.forming = number
            self.times.mark("quorum answered")
            return self.losses.get(number, "")

    def publish(self, generation: Generation) -> None:
        """The new group works: threads that wait for it continue."""
        with self.changed:
            self.forming = 0
            if self.generation is not None and self.generation is not generation:
                self.generation.over = True
            self.generation, self.invited = generation, False
            self.times.quorum = generation.number
            self.times.mark("group published")
            self.wanted = ""  # was about the group before; a loss in this one is looked up below
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
        """Bytes of our state are about to be replaced: until all of them are, it is not a state."""
        with self.changed:
            self.held = self.held.change()

    def arrived(self, position: Position, lineage: Lineage = ()) -> None:
        """All of another state is here; NOWHERE: it is not wanted any more."""
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
        """The regrouping thread is done for now."""
        with self.changed:
            self.regrouping, self.forming = False, 0
            self.failure = failure
            self.changed.notify_all()
