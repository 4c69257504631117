"""torchft numbers the ranks of each replica from 0: `--transform-ft` moves them to where they are in the whole job."""

from __future__ import annotations

from dataclasses import replace

from allranks.model.trace import Group, RankTrace


def transform_ft(trace: RankTrace, group_world_size: int) -> RankTrace:
    """The trace with the default group's members, and the peers in it, moved by the replica's first rank."""
    rank = trace.header.rank
    if rank is None or group_world_size < 1:
        return trace
    offset = rank // group_world_size * group_world_size
    if offset == 0:
        return trace
    moved = [index for index, group in enumerate(trace.groups) if group.desc == "default_pg" and group.ranks]
    groups = tuple(
        _moved(group, offset) if index in moved else group for index, group in enumerate(trace.groups)
    )
    calls = trace.calls.copy()
    for index in moved:
        for column in ("peer", "root"):
            rows = (calls["group"] == index) & (calls[column] >= 0)
            calls[column][rows] += offset
    return replace(trace, groups=groups, calls=calls)


def _moved(group: Group, offset: int) -> Group:
    return replace(group, ranks=tuple(rank + offset for rank in group.ranks))
