"""Healing at both ends: fetches the state that a group needs, offers ours to other members, and loads a fetched one into
the user's objects.

Runs in a rank, on the regrouping thread; the training thread calls `make_offer_if_due` and `load`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from allranks import recording as record
from allranks.checkpoint.manager import finish_copies, save_last_steps
from allranks.errors import AllranksError, HealingFailed
from allranks.manager.drift import StateSums
from allranks.manager.groups.generation import Generation
from allranks.manager.groups.teardown import start_thread
from allranks.manager.heal.fetch import Fetch, HealSource, report_fetched
from allranks.manager.heal.serve import HealServer
from allranks.manager.heal.state import LiveState
from allranks.manager.options import ManagerOptions
from allranks.manager.plan import NOWHERE, QuorumPlan, ReplicaClaim
from allranks.manager.reachability import Reachability
from allranks.manager.registered_state import RegisteredState
from allranks.manager.replica_rendezvous import ReplicaRendezvous
from allranks.manager.training import TrainingState

log = logging.getLogger("allranks.manager")

_POLL_S = 0.1
_HEAL_TRIES = 10
_EMPTY_TRIES = 3


@dataclass(eq=False)
class Healing:
    """`fetch` is the state being fetched, or fetched and not loaded yet."""

    options: ManagerOptions
    training: TrainingState
    server: HealServer
    live: LiveState
    registered: RegisteredState
    sums: StateSums
    rendezvous: ReplicaRendezvous
    reach: Reachability = field(default_factory=Reachability)
    fetch: Fetch | None = None
    _offer_due: Generation | None = None
    _failures: int = 0  # since the last success
    _guard: threading.Lock = field(default_factory=threading.Lock)

    # ---- to us ----

    def fetched_for(self, generation: Generation) -> Fetch | None:
        """The state that this group needs, once it has arrived completely."""
        fetch, top = self.fetch, generation.plan.top
        return fetch if fetch and fetch.position == top == self.training.held.arrived else None

    def prepare_fetch(self, plan: QuorumPlan) -> Fetch:
        if self.fetch is None or self.fetch.position != plan.top:
            self.training.arrived(NOWHERE)
            keep = self.training.held.worth_keeping
            limit_s, tear = self.options.timeout_s, self.training.tear
            self.fetch = Fetch(plan.top, self.live, limit_s, keep, self._wait_until_read, tear, plan.lineage)
        return self.fetch

    def _wait_until_read(self, wanted: Callable[[], bool]) -> None:
        """Waits until our bytes may be replaced: the script has opened its next step, and copies of the state are done."""
        deadline = time.monotonic() + self.options.timeout_s
        while wanted() and time.monotonic() < deadline:
            if self.training.wait_until_opened(wanted, _POLL_S):
                break
        finish_copies()

    def begin(self, fetch: Fetch, generation: Generation) -> None:
        """Starts to fetch, unless it is complete or has begun."""
        if not fetch.complete and not fetch.begun:
            fetch.begin(self._sources(generation))

    def pause(self) -> None:
        """The group failed or is gone: stops writing into our state until the next one."""
        fetch = self.fetch
        if fetch is not None:
            fetch.cancel()
            with contextlib.suppress(HealingFailed):
                fetch.finish()
                self._arrived(fetch)

    def _arrived(self, fetch: Fetch) -> None:
        """A state has arrived completely; the training thread may load it, also in the next group."""
        with self.training.changed:
            if self.fetch is fetch:  # else it is loaded already
                self.training.arrived(fetch.position, fetch.lineage)

    def take_state(self, generation: Generation) -> None:
        """Fetches the state if we must heal; the training thread will load it."""
        with self.training.changed:  # the training thread may be loading the state of the previous group
            wanted = generation.usable and not generation.loaded
            fetch = self.prepare_fetch(generation.plan) if wanted else None
        if fetch is None:
            self.pause()
            with self.training.changed:
                if generation.usable and generation.loaded:
                    self.fetch = None  # no longer needed: frees its memory
                    self.training.arrived(NOWHERE)
        if generation.heals and (generation.loaded if fetch is None else self._heal(generation, fetch)):
            self._end_transfer(generation)

    def _heal(self, generation: Generation, fetch: Fetch) -> bool:
        try:
            self.begin(fetch, generation)
            fetch.finish()
        except HealingFailed as error:
            if not fetch.cancelled:  # a cancelled fetch says nothing about its sources
                self._failures += 1
                members = generation.quorum.members
                self.reach.note_not_served(
                    [members[place] for place in generation.plan.sources_of(generation.index)]
                )
            if self.training.break_group(generation, f"healing failed: {error}"):
                log.warning("%s", error)
            if self._failures >= (_EMPTY_TRIES if fetch.received_nothing else _HEAL_TRIES):
                self.training.finish_regrouping(error)
            return False
        self._failures = 0
        self._arrived(fetch)
        self.reach.served()
        self.training.times.mark("state fetched")
        took_ms = (time.monotonic() - fetch.began_at) * 1e3
        log.info("healed: %.1f MB in %.0f ms", fetch.total_bytes / 1e6, took_ms)
        return True

    def _end_transfer(self, generation: Generation) -> None:
        """Our state has arrived: this rank and its sources may launch collectives again. Uses no device."""
        order, index, limit_s = generation.quorum.order, generation.index, self.options.timeout_s
        for source in self._sources(generation):
            args = (source, index, limit_s, lambda: generation.usable)
            start_thread("allranks-heal-report", report_fetched, *args)
        self.training.transferred(order, index)

    def _sources(self, generation: Generation) -> list[HealSource]:
        members, found = generation.quorum.members, []
        credential = self.server.keys.for_quorum(*generation.quorum.order)
        for place in generation.plan.sources_of(generation.index):
            said = ReplicaClaim.decode(members[place].data)
            address = said.ranks[self.options.rank].address
            found.append(HealSource(address, credential, members[place].replica))
        return found

    def cancel(self) -> None:
        """Ends the fetch; received bytes are kept."""
        if self.fetch is not None:
            self.fetch.cancel()

    # ---- from us ----

    def make_offer_if_due(self) -> None:
        """Offers the state after a roll forward; called by the training thread when the state is stable."""
        with self._guard:
            generation, self._offer_due = self._offer_due, None
        if generation is not None and generation.usable:
            self.server.offer(self.live.offer(generation.plan.top), generation.quorum.order)

    def offer(self, generation: Generation, later: bool) -> None:
        """Makes our state fetchable in the next step, or, if `later`, after a roll forward was applied."""
        if later:
            with self._guard:
                self._offer_due = generation
        else:
            start_thread("allranks-offer", self._offer_in_step, generation)

    def _offer_in_step(self, generation: Generation) -> None:
        top = generation.plan.top
        try:
            self.training.wait_until_opened(lambda: generation.usable, self.options.timeout_s)
            offer = self.live.offer(top)
        except HealingFailed as error:
            self.training.break_group(generation, str(error))
            return
        if generation.usable and self.training.held.position == top:
            self.server.offer(offer, generation.quorum.order)
            self.training.times.mark("state offered")

    def needs_nothing(self) -> None:
        """This group needs no healing: forgets earlier failures."""
        self._failures = 0
        self.reach.served()

    # ---- into the user's objects, on the training thread ----

    def load(self, generation: Generation) -> bool:
        """Waits for the fetched state and loads it; False when the group broke first."""
        self.training.times.mark_first("state due")
        with self.training.parking():
            fetch = self._wait_for_state(generation)
        if fetch is None:
            return False
        self.training.times.mark("state loading")
        self.sums.forget()
        state = fetch.state()
        if generation.drops and not self.training.held.torn:
            self._keep_dropped_state()
        finish_copies()
        self.training.tear()
        self.registered.load(state["user"])
        with self.training.changed:
            if self.fetch is not fetch:
                return False  # the next group needs another state, which is being fetched already
            self.training.batches = int(state["manager"]["batches_committed"])
            self.training.healed(generation, fetch.position)
            self.fetch = None
        self.make_offer_if_due()
        record.step(self.training.step)
        return True

    def _wait_for_state(self, generation: Generation) -> Fetch | None:
        """Waits for the state that this group needs on all ranks of this replica; None when it must not be loaded."""
        limit_s = self.options.timeout_s
        deadline = time.monotonic() + limit_s
        with self.training.changed:
            self.training.changed.wait_for(
                lambda: not generation.usable or self.fetched_for(generation) is not None, limit_s
            )
            arrived = self.fetched_for(generation) is not None

        def waiting() -> bool:
            if self.rendezvous.others_request():
                self.training.want("another rank of this replica requests a quorum")
            return self._may_load(generation) and time.monotonic() < deadline

        if arrived and generation.heals:  # else all ranks hold or have received it already
            arrived = self.rendezvous.wait_until_all_arrived(generation.quorum.order, waiting)
        with self.training.changed:
            if arrived and self._may_load(generation):
                return self.fetched_for(generation)
        if not arrived and generation.usable and time.monotonic() >= deadline:
            raise HealingFailed(f"healing did not finish in {limit_s:.1f} s")
        return None

    def _may_load(self, generation: Generation) -> bool:
        """Whether our claim stays true if the state is replaced now: not while a quorum is requested."""
        current = generation is self.training.generation and generation.usable
        return current and not self.training.regrouping

    def _keep_dropped_state(self) -> None:
        """Saves our state before it is replaced, because no other replica holds its last steps; if checkpoints are in use."""
        try:
            saved = save_last_steps()
        except (AllranksError, RuntimeError, OSError) as error:
            log.warning("step %d is dropped, and could not be saved: %s", self.training.step, error)
            return
        kept = f"it is kept as the checkpoint of step {max(saved)}" if saved else "no checkpoint keeps it"
        log.warning("step %d of this replica is dropped; %s", self.training.step, kept)
