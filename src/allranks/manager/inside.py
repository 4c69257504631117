"""The ranks inside one replica: they ask for a quorum as one, through the store they share.

Rank 0 collects the claims of all and speaks for the replica; the others wait for what it publishes. A replica
of one rank needs none of this.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from allranks.errors import ManagerError
from allranks.manager.plan import Claim
from allranks.model.cluster import Member, Quorum


@dataclass(eq=False)
class InsideReplica:
    """`store` is None for a replica of one rank. Rounds are counted alike in every rank."""

    rank: int
    world_size: int
    store: dist.Store | None = None
    _round: int = 0

    @property
    def speaks(self) -> bool:
        """Whether this rank talks to the lighthouse."""
        return self.rank == 0

    def agree(self, key: str, value: str, timeout_s: float) -> str:
        """Rank 0's value, known to all ranks."""
        if self.store is None:
            return value
        if self.speaks:
            self.store.set(key, value)
        self.store.wait([key], timedelta(seconds=timeout_s))
        return str(self.store.get(key).decode())

    def gather(self, claim: Claim, timeout_s: float) -> list[Claim]:
        """Rank 0 gets the claims of all ranks, the others only give theirs."""
        self._round += 1
        if self.store is None:
            return [claim]
        self.store.set(f"claim/{self._round}/{self.rank}", json.dumps(asdict(claim)))
        if not self.speaks:
            return []
        keys = [f"claim/{self._round}/{rank}" for rank in range(self.world_size)]
        self.store.wait(keys, timedelta(seconds=timeout_s))
        return [Claim(**json.loads(self.store.get(key))) for key in keys]

    def publish(self, quorum: Quorum | None, error: str = "") -> None:
        """Rank 0 tells the others the answer, or why there is none."""
        if self.store is not None:
            answer = {"error": error} if quorum is None else _to_json(quorum)
            self.store.set(f"quorum/{self._round}", json.dumps(answer))

    def receive(self, timeout_s: float) -> Quorum:
        """The other ranks wait for the answer."""
        assert self.store is not None
        key = f"quorum/{self._round}"
        self.store.wait([key], timedelta(seconds=timeout_s))
        answer = json.loads(self.store.get(key))
        if answer.get("error"):
            raise ManagerError(f"rank 0 of this replica got no quorum: {answer['error']}")
        return _from_json(answer)


def _to_json(quorum: Quorum) -> dict[str, Any]:
    return {
        "number": quorum.number,
        "epoch": quorum.epoch,
        "reason": quorum.reason,
        "members": [asdict(member) for member in quorum.members],
    }


def _from_json(raw: dict[str, Any]) -> Quorum:
    return Quorum(
        number=raw["number"],
        epoch=raw["epoch"],
        reason=raw["reason"],
        members=tuple(Member(**member) for member in raw["members"]),
    )
