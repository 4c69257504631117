"""Who must take the state from whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.model.cluster import Member


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
