"""Where the training thread stands inside a step, and what may be done at each place. Pure.

BETWEEN --start_quorum--> COMPUTING --first collective--> REDUCING --vote--> VOTING --yes--> APPLYING --> BETWEEN
                                                              `--- failed / no: back to BETWEEN ---'
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The state (parameters, optimizer) changes only in APPLYING."""

    BETWEEN = "between steps"
    COMPUTING = "computing"
    REDUCING = "reducing gradients"
    VOTING = "voting"
    APPLYING = "applying the step"


def may_ask(phase: Phase, broken: bool, eager: bool = True, parked: bool = False) -> bool:
    """Whether the rank may ask for a quorum now: its state stands still and its claim will stay true.

    While it reduces or votes in a healthy group it must not: the others count on it. While it applies a step
    the state is neither the old nor the new one. Not `eager` (sharded models, local steps): its state may be
    read only while the training thread waits for us, parked in start_quorum or in a vote that has failed.
    """
    if phase is Phase.APPLYING:
        return False
    if not eager:
        return parked or (phase is Phase.VOTING and broken)
    return broken or phase in (Phase.BETWEEN, Phase.COMPUTING)
