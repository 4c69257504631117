"""Replicas as the lighthouse knows them, and which of them must take the state from which. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.model.cluster import Member


@dataclass(slots=True)
class Replica:
    """One living replica."""

    name: str
    session: str
    node: str = ""
    observer: bool = False  # never a member
    connected: bool = True  # False: known from an earlier lighthouse, expected to come back
    since: float = 0.0
    asking: Member | None = None
    asked_at: float = 0.0
    cooling_until: float = 0.0  # flapping: not before this; 0 when it is free


@dataclass(frozen=True)
class Gone:
    """A member of the last quorum that is no longer there."""

    session: str
    at: float
    reason: str
    certain: bool  # False: only silent, may be training on behind a cut network
    left: bool = False  # said good-bye
    finished: bool = False  # its training is over
    step: int = -1  # steps that its state had; -1: not known


def assign_healing(members: Sequence[Member]) -> tuple[int, dict[str, str]]:
    """(max step, {replica that must heal: its source}) for members sorted by name.

    Whoever is behind the highest step heals from one that is there, sources taken in turn so that no single
    one serves all. At step 0 nobody is behind, but random initial weights differ: every member that asked
    for `init_sync` takes those of the first.
    """
    if not members:
        return 0, {}
    top = max(member.step for member in members)
    sources = [member for member in members if member.step == top]
    if top == 0:
        behind = [member for member in members[1:] if member.init_sync]
        return 0, {member.replica: members[0].replica for member in behind}
    behind = [member for member in members if member.step != top]
    return top, {m.replica: sources[i % len(sources)].replica for i, m in enumerate(behind)}
