"""The group of a coming quorum, made beside the running one, so that nobody stops for a replica that joins.

Runs in a rank. The lighthouse tells the members who waits to join. In a thread beside the training each member makes the
next group together with the newcomers, who run their first forward and backward meanwhile: there kernels are loaded and
models are compiled. When all are ready, the members ask for the quorum at their next step boundary and find its group
made. Whatever goes wrong here costs nothing but that time: the quorum is asked for, and its group made, as without it.

Members and newcomers meet in the store of the first newcomer. A newcomer learns of it by an invitation in its own store.
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
_FIRST_STEP_S = 10.0  # a first step may fail again and again: newcomers do not wait longer for it
_STORE_S = 10.0  # of reaching a store
_ANSWER_S = 10.0  # within which every newcomer must have read its invitation
_DEATH_S = 0.5  # after which the lighthouse, too, knows of a death that closed its connections


@dataclass(frozen=True)
class Invitation:
    """To the making of a group; equal in all who are invited, but for the rank."""

    name: str  # of this making: the running quorum and the sessions of the newcomers
    store: str  # host:port where all meet
    rank: int
    world_size: int
    group_name: str
    global_ranks: tuple[int, ...] = ()


def invitations(quorum: Quorum, waiting: Sequence[Member]) -> dict[str, Invitation]:
    """For each replica of the coming quorum, by name; {} when these newcomers cannot be prepared for."""
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
    """One making. `make` and `wait_for_all` block, on a thread beside the training; `cancel` ends both from any thread."""

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
        """Makes the group; raises when that fails or is called off."""
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
        call = AbandonableCall(lambda: self.group.make_beside(spec), self.group.discard)
        with self._lock:
            self._call = call
        if self.cancelled:
            raise GroupAborted("called off")
        with silenced():
            backend = call.result()
        with self._lock:
            self._call, self._made = None, True
            self._backend = backend
        if self.cancelled:
            self.discard()
            raise GroupAborted("called off")

    def report(self, made: bool) -> None:
        """Tells the others that we have made it and can join at once, or that it cannot be made."""
        if self._store is not None:
            self._store.set(f"made/{self.invitation.rank}" if made else "failed", "1")

    def wait_for_all(self, wanted: Callable[[], bool]) -> None:
        """Returns when all have made it, or it is not wanted any more; raises when it cannot be had.

        A newcomer may compile its model for minutes before it is ready, but it is there soon, or never.
        """
        deadline = time.monotonic() + _ANSWER_S
        while wanted() and not self.cancelled and not self.is_complete():
            if self._store is None or self._store.check(["failed"]):
                raise GroupAborted("a newcomer could not make the group")
            if time.monotonic() > deadline and not self._store.check(self._keys("here")):
                raise GroupAborted("a newcomer did not answer its invitation")
            time.sleep(_POLL_S)

    def is_complete(self) -> bool:
        """Whether everybody who is invited has made the group."""
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
        """The backend, now the caller's; None where the group is made only when it is needed."""
        with self._lock:
            backend, self._backend = self._backend, None
        return backend

    def is_for(self, name: str, rank: int, world_size: int) -> bool:
        """Whether this is the group of that name, and it was made for this place in a quorum of this size."""
        mine = self.invitation
        return self._made and (mine.name, mine.rank, mine.world_size) == (name, rank, world_size)

    def cancel_unless_made(self) -> None:
        """Another making has begun."""
        if not self._made:
            self.cancel()

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._cancelled.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.abandon(GroupAborted("called off"))
        self.discard()

    def discard(self) -> None:
        """Gives back what was made, unless it was taken."""
        backend = self.take()
        if backend is not None:
            self.group.discard(backend)


@dataclass(eq=False)
class NextGroup:
    """What a rank prepares for the quorum that comes next. Threads of its own do the work."""

    options: ManagerOptions
    training: TrainingState
    group: ReconfigurableGroup
    own_store: str  # host:port
    _preparations: list[GroupPreparation] = field(default_factory=list)  # the last counts
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _inviting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def may_be_invited(self) -> bool:
        """A newcomer of one rank: it has no group yet."""
        return self.training.generation is None and self.options.world_size == 1

    def prepare(self, notice: QuorumWanted) -> bool:
        """In a member: begins to make the group with those who wait; False when that cannot be.

        When a newcomer has gone, the rest may be those of an earlier making, which was called off: they join without.
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
        """In a newcomer: makes the group with those who invite it, while it waits for its first quorum."""
        if self.may_be_invited:
            start_thread("allranks-prepare", self._accept_invitations, ticket)

    def name_if_complete(self) -> str:
        """Of the group that everybody who is invited has made; "": none."""
        last = self._preparations[-1:]
        return last[0].invitation.name if last and last[0].is_complete() else ""

    def take(self, name: str, rank: int, world_size: int) -> object:
        """The group of that name, if we have it; None: it must be made. All others are called off."""
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
            each.cancel_unless_made()  # a quorum that is under way may still want one that is made
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
                "group with %s made beside the running one in %.0f ms, waited %.0f ms for the others",
                ", ".join(member.replica for member in notice.waiting),
                (made - began) * 1e3,
                (time.monotonic() - made) * 1e3,
            )
        except (AllranksError, RuntimeError, OSError) as error:
            log.info("no group could be prepared: %s", str(error).partition("\n")[0])
            time.sleep(_DEATH_S)  # a newcomer that died must not get into the quorum that we ask for
        finally:  # in any case they join
            if generation.usable and self._preparations[-1:] == [preparation]:
                self.training.on_replicas_waiting(notice.reason)

    def _wait_for_first_step(self, generation: Generation, preparation: GroupPreparation) -> None:
        """Of the running group: beside its first collectives no other group is made. They did not end on a GPU then."""
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
                raise GroupAborted("called off")
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
    """The invitation in our own store, other than the one of the name `known`; None when it is not wanted any more."""
    while wanted():
        if store.check([_INVITATION]):
            found = from_json(store.get(_INVITATION), Invitation)
            if found.name != known:
                return found
        time.sleep(_POLL_S)
    return None


def open_store(address: str, limit_s: float, reached: Callable[[str], None] = lambda end: None) -> dist.Store:
    """Tried with a plain socket first: torch keeps trying a dead address for twice its timeout. `reached`: is told the
    "ip:port" behind the name."""
    host, port = split_address(address)
    with socket.create_connection((host, port), timeout=limit_s) as line:
        reached(name_of(line.getpeername()))
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))


def known_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    """Global ranks in group order; () unless every member knows its own and no two say the same."""
    found = tuple(ranks)
    return found if min(found, default=-1) >= 0 and len(set(found)) == len(found) else ()
