"""Coordinates the ranks of one replica, which request a quorum together, through the store they share.

Rank 0 collects the claims of all ranks; every rank sends the lighthouse the same request and gets the same answer. At
each step the ranks agree on the group of that step (`exchange`). Otherwise a rank that knows of a loss and waits for a new
group would deadlock with a rank that does not, and waits in a collective inside the replica. Not needed for one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from allranks.channel.keys import Keyring
from allranks.errors import ManagerError
from allranks.manager.groups.generation import Generation
from allranks.manager.plan import Claim
from allranks.manager.training import TrainingState
from allranks.manager.vote_mesh import VoteMesh, Voter
from allranks.model.cluster import Member
from allranks.model.formatting import ranks_text
from allranks.model.parsing import from_json, to_json

_POLL_S = 0.005


def mesh_name(session: str) -> str:
    """The mesh name of the ranks of one replica; a quorum's voters use "EPOCH.NUMBER"."""
    return f"replica-{session}"


@dataclass(eq=False)
class ReplicaRendezvous:
    """`store` is None for a replica of one rank. All ranks count the rounds alike."""

    rank: int
    world_size: int
    store: dist.Store | None = None
    closing: Callable[[], bool] = lambda: False  # ends every wait
    mesh: VoteMesh = field(default_factory=VoteMesh)  # connects the ranks for the agreement at each step
    _round: int = 0

    def __post_init__(self) -> None:
        self.mesh.places = self.world_size

    def connect(self, session: str, address: str, keys: Keyring, limit_s: float) -> None:
        """Connects the ranks to each other; `address` is this rank's healing server, which accepts the connections."""
        if self.store is None:
            return
        self.store.set(f"address/{self.rank}", address)
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        self._await([f"address/{rank}" for rank in ranks], limit_s)
        name = mesh_name(session)
        credential = keys.for_purpose(f"quorum {name}")
        voters = [Voter(rank, self.store.get(f"address/{rank}").decode(), credential) for rank in ranks]
        self.mesh.connect(name, 0, self.rank, voters, limit_s)

    def agree_on_group(
        self,
        training: TrainingState,
        must_load: Callable[[Generation | None], bool],
        wait_for_group: Callable[[], None],
    ) -> None:
        """All ranks of this replica open the step in the same group, or wait for the next one together."""

        def waiting() -> None:
            if self.others_request():
                training.want("another rank of this replica requests a quorum")

        while True:
            generation = training.settled()
            if must_load(generation):
                wait_for_group()
                continue
            number = generation.number if generation is not None else 0
            with training.parking():
                numbers = self.exchange(number, waiting)
            if generation is not None and numbers == {
                number
            }:  # even if it broke meanwhile: the others continue too
                training.attempt.generation = generation
                return
            if 0 in numbers:
                training.want("another rank of this replica needs a new group")
            wait_for_group()

    def exchange(self, number: int, waiting: Callable[[], None]) -> set[int]:
        """The numbers of all ranks; every rank of the replica must call this equally often."""
        if self.store is None:
            return {number}
        return {other for (other,) in self.mesh.exchange((number,), waiting=waiting)}

    def others_request(self) -> bool:
        """Whether another rank has requested a quorum and waits for this rank to do so too."""
        return self.store is not None and bool(self.store.check([f"asked/{self._round + 1}"]))

    @property
    def is_leader(self) -> bool:
        """Whether this rank makes the requests of the replica."""
        return self.rank == 0

    def agree(self, key: str, value: str, timeout_s: float) -> str:
        """Rank 0's value, known to all ranks."""
        if self.store is None:
            return value
        if self.is_leader:
            self.store.set(key, value)
        self._await([key], timeout_s)
        return str(self.store.get(key).decode())

    def gather(self, claim: Claim, timeout_s: float) -> list[Claim]:
        """Sends this rank's claim to rank 0, which gets the claims of all ranks; () on the others."""
        self._round += 1
        if self.store is None:
            return [claim]
        self.store.set(f"claim/{self._round}/{self.rank}", to_json(claim))
        self.store.set(f"asked/{self._round}", "1")
        if not self.is_leader:
            return []
        keys = [f"claim/{self._round}/{rank}" for rank in range(self.world_size)]
        self._await(keys, timeout_s)
        return [from_json(self.store.get(key), Claim) for key in keys]

    def share(self, member: Member | None, timeout_s: float) -> Member:
        """Rank 0's member data, for all ranks, so that every rank sends the same request."""
        if self.store is None:
            assert member is not None
            return member
        key = f"member/{self._round}"
        if member is not None:
            self.store.set(key, to_json(member))
            return member
        self._await([key], timeout_s)
        return from_json(self.store.get(key), Member)

    def wait_until_all_arrived(self, order: tuple[int, int], waiting: Callable[[], bool]) -> bool:
        """Waits until all ranks of the replica have received the state of the quorum of this order, while `waiting` returns
        True. If one rank loaded it earlier and the source then died, the replica would have no complete state."""
        return self._mark("arrived/{}.{}".format(*order), lambda: not self.closing() and waiting())

    def wait_for_others(self, limit_s: float) -> None:
        """Waits briefly until the other ranks have finished too: with the first rank that leaves, the replica is gone."""
        deadline = time.monotonic() + limit_s
        self._mark("bye", lambda: time.monotonic() < deadline)

    def _mark(self, name: str, wanted: Callable[[], bool]) -> bool:
        """Marks this rank under a name; waits until all ranks are marked. False when no longer `wanted`."""
        if self.store is None:
            return True
        self.store.set(f"{name}/{self.rank}", "1")
        return self._poll([f"{name}/{rank}" for rank in range(self.world_size)], wanted)

    def _await(self, keys: list[str], timeout_s: float) -> None:
        """Waits for keys that the other ranks set. Raises ManagerError."""
        deadline = time.monotonic() + timeout_s

        def wanted() -> bool:
            if self.closing():
                raise ManagerError("the manager was shut down while it waited for its replica's other ranks")
            if gone := self.mesh.gone():
                raise ManagerError(f"{ranks_text(gone)} of this replica died")
            return time.monotonic() <= deadline

        if not self._poll(keys, wanted):
            text = f"not all {self.world_size} ranks of this replica requested a quorum in {timeout_s:.1f} s"
            raise ManagerError(text)

    def _poll(self, keys: list[str], wanted: Callable[[], bool]) -> bool:
        """Waits until all keys are set; False when no longer `wanted`. torch's own wait cannot be interrupted."""
        assert self.store is not None
        while not self.store.check(keys):
            if not wanted():
                return False
            time.sleep(_POLL_S)
        return True
