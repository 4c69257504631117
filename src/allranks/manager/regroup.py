"""The regrouping thread: requests a quorum, makes its groups, and starts the state transfer (heal/healing.py).

Runs in a rank while the training thread continues computing. A notice of the lighthouse about the quorum ends everything
that can block here, and nothing waits without a limit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

from allranks.channel.server import FoldedLog
from allranks.checkpoint.manager import saves_checkpoints
from allranks.errors import (
    AllranksError,
    ConfigurationError,
    GroupAborted,
    HealingFailed,
    LighthouseError,
    LighthouseRefused,
    ManagerError,
    QuorumTimeout,
    StateLost,
    TrainingFinished,
)
from allranks.lighthouse.client.actions import PendingAnswer
from allranks.lighthouse.client.client import Client
from allranks.manager.groups.generation import Generation
from allranks.manager.groups.gloo import cut_connected
from allranks.manager.groups.group import ReconfigurableGroup
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.groups.native_calls import AbandonableCall, silenced
from allranks.manager.groups.teardown import start_thread
from allranks.manager.heal.healing import Healing
from allranks.manager.heal.serve import HealServer
from allranks.manager.options import ManagerOptions, WorldSizeMode
from allranks.manager.plan import (
    FRESH,
    NOWHERE,
    Claim,
    QuorumPlan,
    ReplicaClaim,
    decide,
    describe_conflict,
    find_conflicts,
    find_mismatch,
)
from allranks.manager.prepared_group import NextGroup, agreed, known_ranks, open_store
from allranks.manager.replica_rendezvous import ReplicaRendezvous
from allranks.manager.training import TrainingState
from allranks.manager.vote_mesh import VoteMesh, Voter
from allranks.model.cluster import DIALECT, Member, Quorum

log = logging.getLogger("allranks.manager")

_STORE_S = 10.0  # to connect to the store of the primary
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0  # before another quorum is requested; the first time at once


@dataclass(eq=False)
class Regrouper:
    """`run` is the thread's target; the client's thread calls `interrupt`."""

    options: ManagerOptions
    training: TrainingState
    client: Client
    rendezvous: ReplicaRendezvous
    group: ReconfigurableGroup
    votes: VoteMesh
    server: HealServer
    store_address: str  # of the store hosted by rank 0 of this replica; the group is made in the primary's
    healing: Healing
    may_come_late: Callable[[], bool]  # a wrapped module loads a state that arrives during the step
    shrink_only: bool = False
    _ticket: PendingAnswer[Quorum] | None = None  # the pending request
    _store_end: str = ""  # ip:port of the store where the group is being made
    _opening: AbandonableCall[dist.Store] | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)
    next_group: NextGroup = field(init=False)
    _folded: FoldedLog = field(default_factory=lambda: FoldedLog(log))

    def __post_init__(self) -> None:
        self.next_group = NextGroup(self.options, self.training, self.group, self.store_address)

    def run(self) -> None:
        """Regroups whenever it is wanted, until the manager closes."""
        while self.training.wait_until_wanted():
            try:
                generation = self._regroup()
            except LighthouseRefused as error:
                if error.code == "finished":
                    log.warning("this replica exits: %s", error)
                    self.training.finish_regrouping(TrainingFinished(str(error)))
                else:
                    self._no_quorum(error)
                continue
            except Exception as error:
                self._no_quorum(error)
                continue
            self.training.finish_regrouping()
            if not generation.heals:
                self.healing.needs_nothing()
            self.healing.take_state(generation)

    def _no_quorum(self, error: Exception) -> None:
        if not self.training.closing:
            log.error("no quorum: %s", error)
        self.training.finish_regrouping(error)

    def interrupt(self, number: int, reason: str) -> None:
        """A member of the quorum being formed, or one that heals us, is gone: stops waiting for it."""
        if number and self.training.forming == number:
            start_thread("allranks-abort", self._stop_forming, number, reason)
        generation = self.training.generation
        if generation is not None and generation.number == number:
            self.healing.cancel()

    def cancel(self) -> None:
        """Ends every wait, because the manager closes."""
        with self._guard:
            ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
        self.healing.cancel()
        self.next_group.cancel()

    def _stop_forming(self, number: int, reason: str) -> None:
        """Aborts the group being made, repeatedly, since it may be between two waits.

        Under the lock, so as not to hit the next group, which may follow at once.
        """
        deadline = time.monotonic() + self.options.connect_timeout_s
        while time.monotonic() < deadline:
            with self.training.changed:
                if self.training.forming != number:
                    return
                self.votes.abort(reason)
                self.group.abort(reason)
                if self._opening is not None:
                    self._opening.abandon(GroupAborted(reason))
                cut_connected((), (self._store_end,))
            time.sleep(0.005)

    # ---- the quorum ----

    def _regroup(self) -> Generation:
        deadline = time.monotonic() + self.options.quorum_timeout_s
        began = time.monotonic()
        failures = unexplained = 0
        while True:
            old = self.training.generation
            broken = failures > 0 or (old is not None and not old.usable)
            self._note_silent(old)
            quorum = self._request_until_answered(deadline, broken)
            deadline = max(deadline, self.training.extended_until)
            if self.training.invited:  # the first step has been computing meanwhile
                deadline = max(deadline, time.monotonic() + self.options.connect_timeout_s)
            if old is not None and old.usable and old.quorum.order == quorum.order:
                return old
            try:
                generation = self._form(quorum, old)
            except (AllranksError, RuntimeError, OSError, TimeoutError) as error:
                if (
                    isinstance(error, (ConfigurationError, StateLost))
                    or self.training.closing
                    or time.monotonic() > deadline
                ):
                    raise
                self.training.form(0)
                why = _short(error)
                text = "quorum %d could not connect (%s): requesting another quorum"
                self._folded.warn(why, text, quorum.number, why)
                self._leave_group(old, why)
                failures += 1
                if (
                    quorum.number not in self.training.losses
                ):  # else the next quorum is without the lost member
                    self._pause(unexplained)
                    unexplained += 1
                continue
            level = logging.WARNING if broken else logging.INFO
            took_ms = (time.monotonic() - began) * 1e3
            why, plan = quorum.reason, generation.plan.reason
            log.log(level, "quorum %d after %.0f ms: %s; %s", quorum.number, took_ms, why, plan)
            return generation

    def _pause(self, failures: int) -> None:
        """Waits before another quorum is requested: not the first time, then longer each time."""
        if failures:
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** (failures - 1), _LAST_PAUSE_S)
            with self.training.changed:
                self.training.changed.wait_for(lambda: self.training.closing, pause_s)

    def _note_silent(self, old: Generation | None) -> None:
        """Reports members whose vote connections have been silent for seconds as unreachable."""
        if old is not None and self.votes.silent:
            silent = {old.seats[place][0] for place in self.votes.silent if place < len(old.seats)}
            self.votes.silent = frozenset()
            self.healing.reach.note([old.quorum.members[index] for index in silent])

    def _request_until_answered(self, deadline: float, broken: bool) -> Quorum:
        """As `_request_quorum`, but keeps waiting if this replica is left out because others cannot reach it."""
        while True:
            try:
                return self._request_quorum(deadline, broken)
            except QuorumTimeout as error:
                if "left out" not in error.reason or self.training.closing:
                    raise
                self._folded.warn("left out", "this replica keeps waiting: %s", error.reason)
                limit_s = self.options.quorum_timeout_s
                deadline = time.monotonic() + limit_s
                self.training.extend_deadline(limit_s + self.options.connect_timeout_s)

    def _request_quorum(self, deadline: float, broken: bool) -> Quorum:
        left = max(0.1, deadline - time.monotonic())
        claim = self.training.claim(
            address=self.server.address,
            listener=self.group.listener,
            broken=broken,
            global_rank=self.options.global_rank,
        )
        claims = self.rendezvous.gather(claim, left)
        member = self._member(claims) if self.rendezvous.is_leader else None
        return self._join(self.rendezvous.share(member, left), left)

    def _member(self, claims: Sequence[Claim]) -> Member:
        options = self.options
        said = ReplicaClaim(
            ranks=tuple(claims),
            min_replicas=options.min_replica_size,
            init_sync=options.init_sync,
            fixed=options.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES,
            beside=options.use_async_quorum and self.training.eager and self.may_come_late(),
            prepares=self.next_group.may_be_invited,
            prepared="" if any(claim.broken for claim in claims) else self.next_group.name_if_complete(),
            backend=self.group.backend_name,
        )
        return Member(
            replica=options.replica_id,
            session=self.client.session,
            address=self.server.address,
            store=self.store_address,
            step=claims[0].step,
            world_size=options.world_size,
            shrink_only=self.shrink_only,
            commit_failures=int(any(claim.broken for claim in claims)),
            data=said.encode(),
            dialect=DIALECT,
        )

    def _join(self, member: Member, timeout_s: float) -> Quorum:
        """As client.join, but `cancel` ends it at once."""
        with self._guard:
            self._ticket = self.client.request_quorum(member, *self.healing.reach.report(), timeout_s)
            ticket = self._ticket
        if self.training.closing:
            ticket.cancel()
        self.next_group.accept_invitations(ticket)
        due = False
        while not (answered := ticket.wait(timeout_s)) and self.training.invited and not due:
            due = self.training.due  # the time limit starts when the training thread waits for the quorum
        if not answered:
            ticket.fail(ticket._on_timeout(ticket, timeout_s))
        return ticket.result(0.0)

    # ---- its groups ----

    def _form(self, quorum: Quorum, old: Generation | None) -> Generation:
        said = self._read_claims(quorum)
        plan = decide(said, quorum.number)
        index = quorum.rank_of(self.options.replica_id)
        if index is None:
            raise ManagerError(f"quorum {quorum.number} does not contain us ({self.options.replica_id})")
        if plan.top == NOWHERE:
            raise HealingFailed(plan.reason)
        self._check_state_loss(quorum, plan)
        odd, why = find_mismatch(said, [member.replica for member in quorum.members], plan.sources[0])
        if why:
            if odd == index and not self.training.held.seen:  # a replica that trains already is not to blame
                raise ConfigurationError(why)
            raise GroupAborted(why)
        lost = self.training.form(quorum.number)
        if lost:
            raise GroupAborted(lost)
        self._leave_group(old, "the members changed")
        self.training.times.mark("old group left")
        generation = Generation(quorum, plan, index, self.options.rank, self.group, self.votes)
        rolls = (index, self.options.rank) in plan.rolls_forward
        generation.drops = self._report_conflicts(said, plan, quorum.names, index)
        if index in plan.sources and plan.healing:
            self.healing.offer(generation, later=rolls or self.training.held.position != plan.top)
        if generation.heals and plan.top != FRESH:  # a fresh state is kept until the group is ready
            self.healing.begin(self.healing.prepare_fetch(plan), generation)
        with contextlib.ExitStack() as undo:
            undo.callback(self.healing.pause)
            with (
                self.healing.reach.watching(quorum, index, partial(self._stop_forming, quorum.number)),
                silenced(),
            ):
                self._connect(quorum, plan, said, index)
            undo.pop_all()
        self.training.publish(generation)
        return generation

    def _check_state_loss(self, quorum: Quorum, plan: QuorumPlan) -> None:
        """Raises StateLost instead of starting over from step 0, if configured or if checkpoints were not restored."""
        if plan.top != FRESH or quorum.reached <= 0:
            return
        why = f"over from step 0: all replicas that had reached step {quorum.reached} are gone"
        if self.options.on_state_loss == "stop":
            raise StateLost(f"this training would start {why}, and --on-state-loss is stop")
        if not self.options.on_state_loss and saves_checkpoints():
            raise StateLost(f"this training would start {why}, and none of its checkpoints was restored")
        log.warning("this training starts %s", why)

    def _report_conflicts(
        self, said: Sequence[ReplicaClaim], plan: QuorumPlan, names: Sequence[str], index: int
    ) -> bool:
        """Logs steps that are dropped; the replica that drops them requests an incident. Whether this replica does."""
        ours = False
        for conflict in find_conflicts(said, plan):
            text = describe_conflict(conflict, plan, names)
            log.warning("%s", text)
            if conflict.replica == index:
                ours = True
                if self.rendezvous.is_leader:
                    start_thread("allranks-conflict", self._request_incident, text)
        return ours

    def _request_incident(self, text: str) -> None:
        try:
            self.client.collect(text)
        except LighthouseError as error:
            log.warning("the lighthouse was not notified: %s", error)

    def _read_claims(self, quorum: Quorum) -> list[ReplicaClaim]:
        """The members' claims; a member whose claim cannot be read is reported, and left out of the next quorum."""
        said = []
        for member in quorum.members:
            try:
                said.append(ReplicaClaim.decode(member.data))
            except (ValueError, RecursionError) as error:
                self.healing.reach.note([member])
                raise GroupAborted(f"the claim of {member.replica} cannot be read: {error}") from error
        return said

    def _leave_group(self, old: Generation | None, reason: str) -> None:
        """Takes the previous group down, so that no member waits in it for us."""
        with self.training.changed:
            healthy = old is not None and old.usable
            if old is not None:
                old.replaced = True
                self.client.release(old.number)
        self.votes.abort(reason)
        (self.group.retire if healthy else self.group.abort)(reason)

    def _connect(self, quorum: Quorum, plan: QuorumPlan, said: Sequence[ReplicaClaim], index: int) -> None:
        rank, times = self.options.rank, self.training.times
        store = self._reach_store(quorum.members[plan.sources[0]].store)
        times.mark("store reached")
        prefix = f"allranks/{quorum.epoch}.{quorum.number}"
        others = [replica for place, replica in enumerate(said) if place != index]
        listeners = tuple(replica.ranks[rank].listener for replica in others)
        own_store = dist.PrefixStore(f"{prefix}/{rank}", store)
        global_ranks = known_ranks(replica.ranks[rank].global_rank for replica in said)
        name = f"replicas/{quorum.number}" + (f"/{rank}" if self.options.world_size > 1 else "")
        limit_s = self.options.connect_timeout_s
        spec = GroupSpec(own_store, index, len(said), quorum.number, listeners, name, global_ranks, limit_s)
        self.group.reconfigure(spec, self.next_group.take(agreed(said), index, len(said)))
        times.mark("communicator made")
        first = sum(len(replica.ranks) for replica in said[:index]) + rank
        voters = [claim for replica in said for claim in replica.ranks]
        credential = self.server.keys.for_quorum(quorum.epoch, quorum.number)
        other_voters = [
            Voter(place, claim.address, credential) for place, claim in enumerate(voters) if place != first
        ]
        name = f"{quorum.epoch}.{quorum.number}"
        self.votes.connect(name, quorum.number, first, other_voters, limit_s)
        times.mark("voters connected")

    def _reach_store(self, address: str) -> dist.Store:
        """A new client of the primary's store, even if that is this rank: an abort cuts clients, not the server."""
        self._store_end = ""
        limit_s = min(self.options.connect_timeout_s, _STORE_S)
        self._opening = AbandonableCall(lambda: open_store(address, limit_s, self._note_store))
        try:
            return self._opening.result()
        finally:
            self._opening = None

    def _note_store(self, end: str) -> None:
        self._store_end = end


def _short(error: BaseException) -> str:
    """The first line of an error, without gloo's C++ location."""
    text = str(error).strip().splitlines()
    return text[0].split("] ")[-1] if text else type(error).__name__
