"""The vote that ends a step, and what the sum of all votes means. vote_mesh.py exchanges them.

It comes after every gradient has been reduced. If it succeeds, every rank knows that every rank holds the same
gradients, and whether anybody has news (a replica waits to come in), so all act at the same boundary. No
lighthouse is asked.
"""

from __future__ import annotations

from dataclasses import dataclass


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
