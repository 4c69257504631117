"""The state that a rank holds, and what may happen to it. Pure: every transition returns a new `HeldState`.

A rank is in one of these conditions:
  whole     its state is that of `position`: it may train, and give it to others
  voted     it has voted for the next step and does not know the result. Once it has claimed so (`claimed`), only the next
            quorum decides, or the message of a member that left with that step
  fetching  it takes another state. In new memory (`arrived` when all of it is here) its own stays whole until `load`
  torn      bytes of its own were replaced and not all of them: not a state, until one is loaded

training.py keeps the current one behind its lock and carries out what follows from it. tests/manager/test_held_machine.py
checks over random freezes, deaths and returns that no state is lost while a complete copy of it exists.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from allranks.manager.plan import FRESH, NOWHERE, Claim, Lineage, Position, QuorumPlan, StateFacts, extend


class HeldState(StateFacts, frozen=True):
    """See the module."""

    claimed: bool = False  # the result is decided by the next quorum
    verdict: bool | None = None  # what it decided

    @property
    def precious(self) -> bool:
        """Whether it is worth more than a fresh start: it is not overwritten before all of another state is here."""
        return self.position not in (FRESH, NOWHERE)

    def claim(self, **more: Any) -> tuple[HeldState, Claim]:
        """What we say of it to the lighthouse: from here on a vote in doubt is decided by the quorum."""
        said = Claim(**{one: getattr(self, one) for one in StateFacts.__struct_fields__}, **more)
        return replace(self, claimed=self.claimed or self.pending > 0), said

    def restore(self, term: int, step: int) -> HeldState:
        """From a checkpoint."""
        return replace(self, term=term, step=step, seen=max(self.seen, term))

    def open_step(self) -> HeldState:
        """Before each step, so it costs nothing where no vote was in doubt."""
        if not self.pending and not self.claimed and self.verdict is None:
            return self
        return replace(self, pending=0, claimed=False, verdict=None)

    def vote(self, term: int) -> HeldState:
        """Our gradients are reduced and our vote is given."""
        return replace(self, pending=term)

    def commit(self, term: int) -> HeldState:
        lineage = extend(self.lineage, (term, self.step + 1))
        return replace(self, term=term, step=self.step + 1, lineage=lineage, pending=0)

    def fail(self) -> HeldState:
        """The step is not committed, or was applied."""
        return replace(self, pending=0) if self.pending else self

    def decide(self) -> HeldState:
        """The verdict on a doubtful step was acted upon."""
        return replace(self, claimed=False, verdict=None)

    def join(self, plan: QuorumPlan, replica: int, rank: int) -> tuple[HeldState, bool]:
        """A new group works; also whether we may train in it at once: we do not heal, and have loaded what has arrived."""
        rolls = (replica, rank) in plan.rolls_forward
        held = replace(self, seen=max(self.seen, plan.term))
        if self.claimed:
            held = replace(held, verdict=rolls)
            held = held.commit(plan.top[0]) if rolls else held
        ready = replica not in plan.healing and (rolls or held.position == plan.top)
        return replace(held, lineage=plan.lineage) if ready else held, ready

    def change(self) -> HeldState:
        """Bytes of it are about to be replaced, and not by all of another state at once."""
        return replace(self, torn=True)

    def arrive(self, position: Position, lineage: Lineage = ()) -> HeldState:
        """All of another state is here; NOWHERE: what had arrived is not wanted any more."""
        return replace(self, arrived=position, arrived_lineage=lineage)

    def load(self) -> HeldState:
        """What has arrived has become our state."""
        term, step = self.arrived
        held = replace(self, term=term, step=step, lineage=self.arrived_lineage, torn=False)
        return held.arrive(NOWHERE)
