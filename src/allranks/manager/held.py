"""The training state that a rank holds, and its transitions. Pure: every transition returns a new `HeldState`.

A rank is in one of these conditions:
  whole     its state is at `position`: it may train, and serve the state to others
  voted     it has voted for the next step and does not know the result. Once it has sent a claim (`claimed`), only the
            next quorum decides, or the shutdown message of a member that left with that step
  fetching  it fetches another state. In new memory (`arrived` when complete) its own stays whole until `load`
  torn      some bytes of its own were replaced: unusable until a state is loaded

training.py keeps the current one behind its lock and acts on it. tests/manager/test_held_machine.py checks with random
freezes, deaths and returns that no state is lost while a complete copy of it exists.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from allranks.manager.plan import FRESH, NOWHERE, Claim, Lineage, Position, QuorumPlan, StateFacts, extend


class HeldState(StateFacts, frozen=True):
    claimed: bool = False  # the next quorum decides the result
    verdict: bool | None = None  # the quorum's decision

    @property
    def worth_keeping(self) -> bool:
        """Whether the state must not be overwritten before another one has arrived: it is neither fresh nor unusable."""
        return self.position not in (FRESH, NOWHERE)

    def claim(self, **more: Any) -> tuple[HeldState, Claim]:
        """The claim for the lighthouse: from now on the quorum decides a step in doubt."""
        claim = Claim(**{one: getattr(self, one) for one in StateFacts.__struct_fields__}, **more)
        return replace(self, claimed=self.claimed or self.pending > 0), claim

    def restore(self, term: int, step: int) -> HeldState:
        """From a checkpoint."""
        return replace(self, term=term, step=step, seen=max(self.seen, term))

    def open_step(self) -> HeldState:
        """Called before each step, so it must be cheap without a step in doubt."""
        if not self.pending and not self.claimed and self.verdict is None:
            return self
        return replace(self, pending=0, claimed=False, verdict=None)

    def vote(self, term: int) -> HeldState:
        """Our gradients are reduced and our vote is sent."""
        return replace(self, pending=term)

    def commit(self, term: int) -> HeldState:
        lineage = extend(self.lineage, (term, self.step + 1))
        return replace(self, term=term, step=self.step + 1, lineage=lineage, pending=0)

    def fail(self) -> HeldState:
        """The step was not committed, or was applied."""
        return replace(self, pending=0) if self.pending else self

    def decide(self) -> HeldState:
        """The verdict on a step in doubt was processed."""
        return replace(self, claimed=False, verdict=None)

    def join(self, plan: QuorumPlan, replica: int, rank: int) -> tuple[HeldState, bool]:
        """A new group works. Also returns whether we may train in it at once, without healing or loading first."""
        rolls = (replica, rank) in plan.rolls_forward
        held = replace(self, seen=max(self.seen, plan.term))
        if self.claimed:
            held = replace(held, verdict=rolls)
            held = held.commit(plan.top[0]) if rolls else held
        ready = replica not in plan.healing and (rolls or held.position == plan.top)
        return replace(held, lineage=plan.lineage) if ready else held, ready

    def change(self) -> HeldState:
        """Bytes of the state are about to be replaced, not all at once."""
        return replace(self, torn=True)

    def arrive(self, position: Position, lineage: Lineage = ()) -> HeldState:
        """Another state has arrived completely; NOWHERE: it is no longer wanted."""
        return replace(self, arrived=position, arrived_lineage=lineage)

    def load(self) -> HeldState:
        """The state that has arrived becomes ours."""
        term, step = self.arrived
        held = replace(self, term=term, step=step, lineage=self.arrived_lineage, torn=False)
        return held.arrive(NOWHERE)
