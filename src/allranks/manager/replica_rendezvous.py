"""The ranks inside one replica: they request a quorum as one, through the store they share.

Rank 0 collects the claims of all ranks; every rank sends the lighthouse the same request and gets the same answer.
At each step the ranks agree on the group of that step (`exchange`): a rank that heard of a loss and waits for a new
group would otherwise wait for one that did not and stands in a collective inside the replica, and the other way
round. A replica of one rank needs none of this.
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

_LOOK_S = 0.005


def mesh_name(session: str) -> str:
    """Under which the ranks of one replica connect; a quorum's voters connect under "EPOCH.NUMBER"."""
    return f"replica-{session}"


@dataclass(eq=False)
class ReplicaRendezvous:
    """`store` is None for a replica of one rank. Rounds are counted alike in every rank."""

    rank: int
    world_size: int
    store: dist.Store | None = None
    closing: Callable[[], bool] = lambda: False  # ends every wait
    mesh: VoteMesh = field(default_factory=VoteMesh)  # connects the ranks, for the agreement at each step
    _round: int = 0

    def __post_init__(self) -> None:
        self.mesh.places = self.world_size

    def connect(self, session: str, address: str, keys: Keyring, limit_s: float) -> None:
        """Connects the ranks with each other; `address` is this rank's healing server, which takes the calls."""
        if self.store is None:
            return
        self.store.set(f"address/{self.rank}", address)
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        self._await([f"address/{rank}" for rank in ranks], limit_s)
        name = mesh_name(session)
        credential = keys.for_purpose(f"quorum {name}")
        voters = [Voter(rank, self.store.get(f"address/{rank}").decode(), credential) for rank in ranks]
        self.mesh.meet(name, 0, self.rank, voters, limit_s)

    def agree_on_group(
        self,
        training: TrainingState,
        must_load: Callable[[Generation | None], bool],
        wait_for_group: Callable[[], None],
    ) -> None:
        """All ranks of this replica open the step in the same group, or wait for the next one together."""

        def waiting() -> None:
            if self.others_ask():
                training.want("another rank of this replica requests a quorum")

        while True:
            generation = training.settled()
            if must_load(generation):  # also one that came a moment ago
                wait_for_group()
                continue
            number = generation.number if generation is not None else 0
            with training.parking():
                numbers = self.exchange(number, waiting)
            # also if it broke meanwhile: the others continue too
            if generation is not None and numbers == {number}:
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

    def others_ask(self) -> bool:
        """Whether another rank asks for a quorum and waits for this rank to do so too."""
        return self.store is not None and bool(self.store.check([f"asked/{self._round + 1}"]))

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for the replica."""
        return self.rank == 0

    def agree(self, key: str, value: str, timeout_s: float) -> str:
        """Rank 0's value, known to all ranks."""
        if self.store is None:
            return value
        if self.speaks:
            self.store.set(key, value)
        self._await([key], timeout_s)
        return str(self.store.get(key).decode())

    def gather(self, claim: Claim, timeout_s: float) -> list[Claim]:
        """Rank 0 gets the claims of all ranks, the others only give theirs."""
        self._round += 1
        if self.store is None:
            return [claim]
        self.store.set(f"claim/{self._round}/{self.rank}", to_json(claim))
        self.store.set(f"asked/{self._round}", "1")
        if not self.speaks:
            return []
        keys = [f"claim/{self._round}/{rank}" for rank in range(self.world_size)]
        self._await(keys, timeout_s)
        return [from_json(self.store.get(key), Claim) for key in keys]

    def share(self, member: Member | None, timeout_s: float) -> Member:
        """What rank 0 says for the replica, known to all ranks: every rank then asks with the same words."""
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
        """All of another state is here, in the quorum of this order: waits until it is in every rank of the replica, while
        `waiting` returns True. A rank that replaced its state before would leave the replica without a whole one if the
        source died now."""
        if self.store is None:
            return True
        name = "arrived/{}.{}".format(*order)
        self.store.set(f"{name}/{self.rank}", "1")
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        while not self.store.check(keys):
            if self.closing() or not waiting():
                return False
            time.sleep(_LOOK_S)
        return True

    def depart(self, limit_s: float) -> None:
        """Waits a moment for the other ranks to be through too: with the first that leaves the replica is gone."""
        if self.store is None:
            return
        self.store.set(f"bye/{self.rank}", "1")
        keys = [f"bye/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + limit_s
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _await(self, keys: list[str], timeout_s: float) -> None:
        """Waits for the other ranks; looked at again and again, for torch's own wait cannot be ended."""
        assert self.store is not None
        deadline = time.monotonic() + timeout_s
        while not self.store.check(keys):
            if self.closing():
                raise ManagerError("the manager was shut down while it waited for its replica's other ranks")
            if gone := self.mesh.gone():
                raise ManagerError(f"rank {ranks_text(gone)} of this replica died")
            if time.monotonic() > deadline:
                raise ManagerError(
                    f"not all {self.world_size} ranks of this replica asked for a quorum in {timeout_s:.1f} s"
                )
            time.sleep(_LOOK_S)
