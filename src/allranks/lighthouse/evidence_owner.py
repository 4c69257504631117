"""Who gathers the evidence of an incident. Pure.

All nodes of a job notice the same hang within moments of each other: the first one leads, the others send it their
part and wait. A leader that has gone, or has not asked again for a while, is followed no longer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from allranks.model.cluster import CollectEvidence, Gathering
from allranks.model.nodes import AGENT


@dataclass(frozen=True)
class Current:
    """The last gathering that others follow."""

    gathering: Gathering
    asked_s: float


def decide_gathering(
    now_s: float, wanted: CollectEvidence, current: Current | None, observers: Collection[str]
) -> tuple[Gathering, bool]:
    """The gathering that whoever asks belongs to, and whether agents must be told of it."""
    if (
        wanted.alone
        and current is not None
        and current.gathering.lead != wanted.lead
        and current.gathering.lead in observers
        and now_s - current.asked_s < wanted.follow_s
    ):
        return current.gathering, False
    agents = sorted(name for name in observers if name.startswith(AGENT) and name != wanted.lead)
    return Gathering(wanted.incident, wanted.lead, tuple(agents)), bool(agents)
