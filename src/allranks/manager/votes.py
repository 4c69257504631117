"""The vote that ends a step, and what its sum means; `cast` votes by one small allreduce over all ranks.

It comes after every gradient has been reduced. If it succeeds, every rank knows that every rank holds the same
gradients, and whether anybody has news (a replica waits to come in), so all act at the same boundary. No
lighthouse is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from allranks.errors import ManagerError
from allranks.manager.work import wait_while


@dataclass(frozen=True)
class Vote:
    """What one rank says at the end of a step."""

    good: bool  # its gradients are reduced and it wants to commit
    news: bool  # the membership should change at this boundary
    step: int  # the step it is about to make
    small: int = 0  # digest of learning rates, loss scale and the like; 0: none
    state: int = 0  # digest of parameters and optimizer state, in some steps; 0: not in this one


@dataclass(frozen=True)
class Tally:
    """The sum of all votes."""

    voters: int
    good: int
    news: int
    small: tuple[int, ...] = ()  # in the order of the voters
    state: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """Everybody wants the step."""
        return self.good == self.voters

    @property
    def reason(self) -> str:
        return (
            "all voted for the step" if self.passed else f"{self.voters - self.good} voted against the step"
        )


def cast(
    backend: dist.ProcessGroup, voters: int, place: int, vote: Vote, usable: Callable[[], bool]
) -> Tally:
    """Votes and waits for the sum; raises RuntimeError or GroupAborted when the group broke.

    Each voter writes its digests to its place, where all others add nothing.
    """
    digests = torch.zeros(2, voters, dtype=torch.int64)
    digests[0, place], digests[1, place] = vote.small, vote.state
    counts = torch.tensor([1, int(vote.good), int(vote.news), vote.step, vote.step * vote.step])
    ballot = torch.cat([counts, digests.flatten()])
    _allreduce(backend, ballot, dist.ReduceOp.SUM, usable)
    count, good, news, steps, squares = ballot[:5].tolist()
    if count != voters or steps != vote.step * voters or squares != vote.step * vote.step * voters:
        raise ManagerError(
            f"the members do not vote on the same step: mine is {vote.step}, the sum over {count} is {steps}"
        )
    small, state = ballot[5:].view(2, voters).tolist()
    return Tally(count, good, news, tuple(small), tuple(state))


def exchange_sums(
    backend: dist.ProcessGroup,
    place: int,
    sums: Sequence[int],
    wanted: Sequence[int],
    usable: Callable[[], bool],
) -> list[list[int]]:
    """The sums of the voters at the wanted places, known to all; every voter calls this with its own sums."""
    longest = torch.tensor([len(sums)])
    _allreduce(backend, longest, dist.ReduceOp.MAX, usable)
    table = torch.zeros(len(wanted), int(longest) + 1, dtype=torch.int64)
    for row, voter in enumerate(wanted):
        if voter == place:
            table[row, : len(sums) + 1] = torch.tensor([len(sums), *sums])
    _allreduce(backend, table, dist.ReduceOp.SUM, usable)
    return [values[: int(length)] for length, *values in table.tolist()]


def _allreduce(
    backend: dist.ProcessGroup, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, usable: Callable[[], bool]
) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    wait_while(backend.allreduce([tensor], options), usable, backend.peer_gone)
