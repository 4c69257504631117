"""Groups of replicas are made anew with every quorum: what failed in an earlier one is history. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from allranks.model.trace import RankTrace

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
