"""The group of the next quorum, made while the current one trains, so that members need not stop for a joining replica.

Runs in a rank. The lighthouse notifies the members of waiting newcomers. Each member makes the next group with them in a
thread, while the newcomers run their first forward and backward, which load kernels and compile models. When all are
ready, the members request the quorum at their next step boundary, and its group exists already. If the preparation
fails, the quorum is requested and its group made as usual.

The group is made in the store of the first newcomer. Each newcomer finds an invitation in its own store.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from allranks.channel.frames import split_address
from allranks.errors import AllranksError, GroupAborted
from allranks.lighthouse.client.actions import PendingAnswer
from allranks.manager.groups.generation import Generation
from allranks.manager.groups.gloo import name_of
from allranks.manager.groups.group import ReconfigurableGroup
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.groups.native_calls import AbandonableCall, silenced
from allranks.manager.groups.teardown import start_thread
from allranks.manager.options import ManagerOptions
from allranks.manager.plan import ReplicaClaim
from allranks.manager.training import TrainingState
from allranks.model.cluster import Member, Quorum, QuorumWanted
from allranks.model.parsing import from_json, to_json

log = logging.getLogger("allranks.manager")

_INVITATION = "allranks/invitation"
_POLL_S = 0.005
_LOOK_S = 0.1
_FIRST_STEP_S = 10.0  # newcomers wait this long for a first step, which may fail repeatedly
_STORE_S = 10.0  # to connect to a store
_ANSWER_S = 10.0  # within which every newcomer must have read its invitation
_DEATH_S = 0.5  # the lighthouse notices a death that closed connections within this time


@dataclass(frozen=True)
class Invitation:
    """Invites a replica to make a group; the same for all invited replicas except for the rank."""

    name: str  # of this preparation: the current quorum and the sessions of the newcomers
    store: str  # host:port where the group is made
    rank: int
    world_size: int
    group_name: str
    global_ranks: tuple[int, ...] = ()


def invitations(quorum: Quorum, waiting: Sequence[Member]) -> dict[str, Invitation]:
    """An invitation for each replica of the next quorum, by name; {} when no group can be prepared with these newcomers."""
    everybody = sorted((*quorum.members, *waiting), key=lambda member: member.replica)
    said = [ReplicaClaim.decode(member.data) for member in everybody]
    newcomers = [claim for claim, member in zip(said, everybody, strict=True) if member in waiting]
    distinct = len({member.replica for member in everybody}) == len(everybody)
    alike = len({claim.backend for claim in said} - {""}) < 2
    if (
        not distinct
        or not alike
        or not newcomers
        or not all(claim.prepares and claim.beside for claim in newcomers)
    ):
        return {}
    name = f"{quorum.epoch}.{quorum.number}+{','.join(sorted(member.session for member in waiting))}"
    host = min(waiting, key=lambda member: member.replica).store
    ranks = known_ranks(claim.ranks[0].global_rank for claim in said)
    group_name = f"replicas/{quorum.number + 1}"
    return {
        member.replica: Invitation(name, host, rank, len(everybody), group_name, ranks)
        for rank, member in enumerate(everybody)
    }


def agreed(said: Sequence[ReplicaClaim]) -> str:
    """The prepared group that all members of a new quorum have ready, by its name; "": none."""
    names = {claim.prepared for claim in said if not claim.prepares}
    return names.pop() if len(names) == 1 else ""


@dataclass(eq=False)
class GroupPreparation:
    """Makes one group. `make` and `wait_for_all` block, on their own thread; `cancel` ends both from any thread."""

    invitation: Invitation
    group: ReconfigurableGroup
    limit_s: float
    _complete: bool = False
    _backend: object = None
    _made: bool = False
    _store: dist.Store | None = None
    _call: AbandonableCall[object] | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self) -> None:
        """Makes the group; raises when that fails or is cancelled."""
        invitation = self.invitation
        store = open_store(invitation.store, min(self.limit_s, _STORE_S))
        self._store = dist.PrefixStore(f"allranks/prepare/{invitation.name}", store)
        self._store.set(f"here/{invitation.rank}", "1")
        spec = GroupSpec(
            dist.PrefixStore("group", self._store),
            invitation.rank,
            invitation.world_size,
            name=invitation.group_name,
            global_ranks=invitation.global_ranks,
            limit_s=self.limit_s,
        )
        call = AbandonableCall(lambda: self.group.make_next(spec), self.group.discard)
        with self._lock:
            self._call = call
        if self.cancelled:
            raise GroupAborted("cancelled")
        with silenced():
            backend = call.result()
        with self._lock:
            self._call, self._made = None, True
            self._backend = backend
        if self.cancelled:
            self.discard()
            raise GroupAborted("cancelled")

    def report(self, made: bool) -> None:
        """Reports to the others that this rank has made the group, or that it cannot be made."""
        if self._store is not None:
            self._store.set(f"made/{self.invitation.rank}" if made else "failed", "1")

    def wait_for_all(self, wanted: Callable[[], bool]) -> None:
        """Returns when all have made the group, or it is no longer wanted; raises when it cannot be made.

        A newcomer may compile its model for minutes before it is ready, but must read its invitation soon.
        """
        deadline = time.monotonic() + _ANSWER_S
        while wanted() and not self.cancelled and not self.is_complete():
            if self._store is None or self._store.check(["failed"]):
                raise GroupAborted("a newcomer could not make the group")
            if time.monotonic() > deadline and not self._store.check(self._keys("here")):
                raise GroupAborted("a newcomer did not answer its invitation")
            time.sleep(_POLL_S)

    def is_complete(self) -> bool:
        """Whether all invited replicas have made the group."""
        if not self._complete and self._made and self._store is not None:
            try:
                self._complete = self._store.check(self._keys("made"))
            except RuntimeError:  # the newcomer that hosts the store is gone
                return False
        return self._complete

    def _keys(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in range(self.invitation.world_size)]

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def take(self) -> object:
        """The backend, now owned by the caller; None if the group is made only when needed."""
        with self._lock:
            backend, self._backend = self._backend, None
        return backend

    def is_for(self, name: str, rank: int, world_size: int) -> bool:
        """Whether this is the group of that name, made for this rank in a quorum of this size."""
        mine = self.invitation
        return self._made and (mine.name, mine.rank, mine.world_size) == (name, rank, world_size)

    def cancel_unless_made(self) -> None:
        """A later preparation has begun."""
        if not self._made:
            self.cancel()

    def cancel(self) -> None:
        """Ends the preparation and discards its group."""
        self._cancelled.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.abandon(GroupAborted("cancelled"))
        self.discard()

    def discard(self) -> None:
        """Discards the backend unless it was taken."""
        backend = self.take()
        if backend is not None:
            self.group.discard(backend)


@dataclass(eq=False)
class NextGroup:
    """A rank's preparations for the next quorum. They run on their own threads."""

    options: ManagerOptions
    training: TrainingState
    group: ReconfigurableGroup
    own_store: str  # host:port
    _preparations: list[GroupPreparation] = field(default_factory=list)  # the last counts
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _inviting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def may_be_invited(self) -> bool:
        """Whether this is a newcomer of one rank without a group."""
        return self.training.generation is None and self.options.world_size == 1

    def prepare(self, notice: QuorumWanted) -> bool:
        """In a member: starts to make the group with the waiting replicas; False when that is not possible.

        After a newcomer has gone, the rest may equal an earlier preparation, which was cancelled: they join without one.
        """
        generation = self.training.generation
        if generation is None or generation.number != notice.number or not self.training.eager:
            return False
        found = invitations(generation.quorum, notice.waiting)
        mine = found.get(self.options.replica_id)
        names = [each.invitation.name for each in self._preparations]
        if mine is None or mine.name in names[:-1]:
            return False
        if mine.name not in names:
            start_thread(
                "allranks-prepare", self._prepare_as_member, generation, notice, found, self._add(mine)
            )
        return True

    def accept_invitations(self, ticket: PendingAnswer[Quorum]) -> None:
        """In a newcomer: accepts invitations while it waits for its first quorum."""
        if self.may_be_invited:
            start_thread("allranks-prepare", self._accept_invitations, ticket)

    def name_if_complete(self) -> str:
        """The name of the prepared group that all invited replicas have made; "": none."""
        last = self._preparations[-1:]
        return last[0].invitation.name if last and last[0].is_complete() else ""

    def take(self, name: str, rank: int, world_size: int) -> object:
        """The prepared group of that name; None: it must be made. Cancels all others."""
        with self._lock:
            preparations, self._preparations = self._preparations, []
        taken = None
        for preparation in preparations:
            if name and preparation.is_for(name, rank, world_size):
                taken = preparation.take()
            preparation.cancel()
        return taken

    def cancel(self) -> None:
        """The manager closes."""
        self.take("", 0, 0)

    def _add(self, invitation: Invitation) -> GroupPreparation:
        preparation = GroupPreparation(invitation, self.group, self.options.connect_timeout_s)
        with self._lock:
            earlier = list(self._preparations)
            self._preparations.append(preparation)
        for each in earlier:
            each.cancel_unless_made()  # a quorum already requested may still use a finished one
        return preparation

    def _prepare_as_member(
        self,
        generation: Generation,
        notice: QuorumWanted,
        found: dict[str, Invitation],
        preparation: GroupPreparation,
    ) -> None:
        began = time.monotonic()
        try:
            for member in notice.waiting:
                self._invite(member, found[member.replica], preparation)
            self._wait_for_first_step(generation, preparation)
            preparation.make()
            made = time.monotonic()
            preparation.report(made=True)
            preparation.wait_for_all(lambda: generation.usable and not self.training.closing)
            log.debug(
                "group with %s prepared in %.0f ms, waited %.0f ms for the others",
                ", ".join(member.replica for member in notice.waiting),
                (made - began) * 1e3,
                (time.monotonic() - made) * 1e3,
            )
        except (AllranksError, RuntimeError, OSError) as error:
            log.info("no group could be prepared: %s", str(error).partition("\n")[0])
            time.sleep(_DEATH_S)  # so that a dead newcomer does not get into the next quorum
        finally:  # the newcomers join in any case
            if generation.usable and self._preparations[-1:] == [preparation]:
                self.training.on_replicas_waiting(notice.reason)

    def _wait_for_first_step(self, generation: Generation, preparation: GroupPreparation) -> None:
        """Waits for the current group's first step: on a GPU, making another group stalled its first collectives."""
        deadline = time.monotonic() + _FIRST_STEP_S
        changed = self.training.changed
        with changed:
            while generation.usable and not (generation.together or generation.voters == 1):
                if preparation.cancelled or self.training.closing or time.monotonic() > deadline:
                    break
                changed.wait(_LOOK_S)

    def _invite(self, newcomer: Member, invitation: Invitation, preparation: GroupPreparation) -> None:
        """Leaves the invitation in the newcomer's store, where it must not replace a later one."""
        store = open_store(newcomer.store, min(self.options.connect_timeout_s, _STORE_S))
        with self._inviting:
            if preparation.cancelled:
                raise GroupAborted("cancelled")
            store.set(_INVITATION, to_json(invitation))

    def _accept_invitations(self, ticket: PendingAnswer[Quorum]) -> None:
        known = ""
        try:
            store = open_store(self.own_store, _STORE_S)
            while invitation := wait_for_invitation(store, lambda: not ticket.done(), known):
                known = invitation.name
                start_thread("allranks-prepare", self._prepare_as_newcomer, self._add(invitation), ticket)
        except (RuntimeError, OSError, ValueError) as error:
            log.debug("invitations cannot be read: %s", error)

    def _prepare_as_newcomer(self, preparation: GroupPreparation, ticket: PendingAnswer[Quorum]) -> None:
        self.training.invite()
        try:
            preparation.make()
            self.training.wait_until_due(lambda: not ticket.done())
            preparation.report(made=True)
        except (AllranksError, RuntimeError, OSError) as error:
            log.info("no group could be prepared with the members: %s", str(error).partition("\n")[0])
            with contextlib.suppress(RuntimeError):
                preparation.report(made=False)


def wait_for_invitation(store: dist.Store, wanted: Callable[[], bool], known: str) -> Invitation | None:
    """Waits for an invitation in our own store with a name other than `known`; None when no longer wanted."""
    while wanted():
        if store.check([_INVITATION]):
            found = from_json(store.get(_INVITATION), Invitation)
            if found.name != known:
                return found
        time.sleep(_POLL_S)
    return None


def open_store(address: str, limit_s: float, reached: Callable[[str], None] = lambda end: None) -> dist.Store:
    """A client of the store, after a test with a plain socket: torch retries a dead address for twice its timeout. Calls
    `reached` with the resolved "ip:port"."""
    host, port = split_address(address)
    with socket.create_connection((host, port), timeout=limit_s) as line:
        reached(name_of(line.getpeername()))
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))


def known_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    """Global ranks in group order; () unless all are known and distinct."""
    found = tuple(ranks)
    return found if min(found, default=-1) >= 0 and len(set(found)) == len(found) else ()
