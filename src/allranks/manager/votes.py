"""The vote that ends a step, and what its sum means; `cast` votes by one small allreduce over all ranks.

It comes after every gradient has been reduced. If it succeeds, every rank knows that every rank holds the same
gradients, and whether anybody has news (a replica waits to come in), so all act at the same boundary. No
lighthouse is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    small: tuple[int, ...] = ()  # in the order of the voters; () where only sums are known
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


def cast(backend: Any, voters: int, vote: Vote, usable: Callable[[], bool]) -> Tally:
    """Votes and waits for the sum; raises RuntimeError or GroupAborted when the group broke."""
    ballot = torch.tensor([1, int(vote.good), int(vote.news), vote.step, vote.step * vote.step])
    options = dist.AllreduceOptions()
    wait_while(backend.allreduce([ballot], options), usable, backend.peer_gone)
    count, good, news, steps, squares = ballot.tolist()
    if count != voters or steps != vote.step * voters or squares != vote.step * vote.step * voters:
        raise ManagerError(
            f"the members do not vote on the same step: mine is {vote.step}, the sum over {count} is {steps}"
        )
    return Tally(count, good, news)
