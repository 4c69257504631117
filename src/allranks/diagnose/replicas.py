"""Traces of replicas that come and go, before they are aligned: past quorums left out, torchft's ranks moved. Pure.

Groups of replicas are made anew with every quorum: what failed in an earlier one is history. torchft numbers the ranks of
each replica from 0: `--transform-ft` moves them to where they are in the whole job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from allranks.model.trace import Group, RankTrace

_QUORUM = re.compile(r"^(replicas|votes)/(\d+)(/\d+)?$")


def forget_past_quorums(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces without calls of groups of replicas that a later quorum has replaced.

    Members that were lost left their calls unfinished there, and the survivors went on in the next group: neither
    says anything about the present.
    """
    names = {group.name for trace in traces for group in trace.groups}
    newest = max(map(_number, names), default=-1)
    if newest < 0:
        return list(traces)
    return [_without(trace, newest) for trace in traces]


def _without(trace: RankTrace, newest: int) -> RankTrace:
    past = [index for index, group in enumerate(trace.groups) if 0 <= _number(group.name) < newest]
    if not past or not len(trace.calls):
        return trace
    return replace(trace, calls=trace.calls[~np.isin(trace.calls["group"], past)])


def _number(name: str) -> int:
    """The quorum of a group's name; -1 for groups of any other kind."""
    found = _QUORUM.match(name)
    return int(found[2]) if found else -1


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
