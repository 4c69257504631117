"""Brings a fetched state into the user's objects: on the training thread, which waits for it here. Runs in a rank."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from allranks import recording as record
from allranks.checkpoint.manager import save_last_steps
from allranks.errors import AllranksError, HealingFailed
from allranks.manager.drift import StateSums
from allranks.manager.groups.generation import Generation
from allranks.manager.heal.fetch import Fetch
from allranks.manager.heal.healing import Healing
from allranks.manager.registered_state import RegisteredState
from allranks.manager.replica_rendezvous import ReplicaRendezvous
from allranks.manager.training import TrainingState

log = logging.getLogger("allranks.manager")


@dataclass(eq=False)
class StateLoader:
    """See the module."""

    training: TrainingState
    registered: RegisteredState
    sums: StateSums
    timeout_s: float

    def load(self, healing: Healing, inside: ReplicaRendezvous, generation: Generation) -> bool:
        """Waits for the fetched state and loads it; False when the group broke first."""
        self.training.times.mark_first("state due")
        with self.training.parking():
            fetch = self._wait_for(healing, inside, generation)
        if fetch is None:
            return False
        self.training.times.mark("state loading")
        self.sums.forget()
        state = fetch.state()
        if generation.drops and not self.training.held.torn:
            self._keep_dropped_state()
        self.training.tear()
        self.registered.load(state["user"])
        with self.training.changed:
            if healing.fetch is not fetch:
                return False  # the next group wants another state, which is landing already
            self.training.batches = int(state["manager"]["batches_committed"])
            self.training.healed(generation, fetch.position)
            healing.fetch = None
        healing.make_offer_if_due()
        record.step(self.training.step)
        return True

    def _wait_for(self, healing: Healing, inside: ReplicaRendezvous, generation: Generation) -> Fetch | None:
        """The state that this group wants, once all ranks of this replica have theirs; None when it must not be loaded."""
        deadline = time.monotonic() + self.timeout_s
        with self.training.changed:
            self.training.changed.wait_for(
                lambda: not generation.usable or healing.fetched_for(generation) is not None, self.timeout_s
            )
            arrived = healing.fetched_for(generation) is not None

        def waiting() -> bool:
            if inside.others_ask():
                self.training.want("another rank of this replica requests a quorum")
            return self._may_load(generation) and time.monotonic() < deadline

        if arrived and generation.heals:  # else all ranks hold it already, or have received it before
            arrived = inside.wait_until_all_arrived(generation.quorum.order, waiting)
        with self.training.changed:
            if arrived and self._may_load(generation):
                return healing.fetched_for(generation)
        if not arrived and generation.usable and time.monotonic() >= deadline:
            raise HealingFailed(f"healing did not finish in {self.timeout_s:.1f} s")
        return None

    def _may_load(self, generation: Generation) -> bool:
        """Whether what we claimed of our state stays true if it is replaced now: not while a quorum is requested."""
        current = generation is self.training.generation and generation.usable
        return current and not self.training.regrouping

    def _keep_dropped_state(self) -> None:
        """Another state replaces ours, and no other replica holds its last steps: saved, if the script saves checkpoints."""
        try:
            saved = save_last_steps()
        except (AllranksError, RuntimeError, OSError) as error:
            log.warning("step %d is dropped, and could not be saved: %s", self.training.step, error)
            return
        kept = f"it is kept as the checkpoint of step {max(saved)}" if saved else "no checkpoint keeps it"
        log.warning("step %d of this replica is dropped; %s", self.training.step, kept)
