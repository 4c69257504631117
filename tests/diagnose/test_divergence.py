"""Calls that differ are named while the job runs: recorded jobs, looked at as they were at a moment before their hang."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from allranks.diagnosis.divergence import find_divergence
from allranks.model.diagnosis import Finding
from allranks.model.trace import RankTrace, State

from .test_recorded import NAMES, TRUTH, _read

HEALTHY = [name for name in NAMES if not TRUTH[name].causes]
SECOND = 10**9
#: Kinds of difference: operation, dtype, order, a skipped module, other order of groups, a skipped step by marks, splits, roots.
CHOSEN = [
    "different_operations",
    "dtypes",
    "swapped_calls",
    "fsdp_skipped_module",
    "inversion_of_two_groups",
    "nan_skip",
    "all_to_all_splits",
    "broadcast_roots",
    "group_left_out",
    "most_make_an_extra_call",
]
#: What the others lack is a call that nobody made: only the wait tells. And partners or tags of messages, until a rank breaks a habit.
DIFFER = ("type", "size", "dtype", "root", "reduce_op", "order", "extra")


def as_of(traces: Sequence[RankTrace], now_ns: int) -> list[RankTrace]:
    """The traces as they were then."""
    found = []
    for trace in traces:
        calls = trace.calls[trace.calls["created_ns"] <= now_ns].copy()
        later = calls["completed_ns"] > now_ns
        calls["state"][later], calls["completed_ns"][later] = State.STARTED, 0
        progress = replace(trace.progress, closed="", inside="", first_error=(0, ""))
        header = replace(trace.header, written_ns=0)
        found.append(replace(trace, calls=calls, progress=progress, header=header))
    return found


def named_in_time(name: str) -> Finding | None:
    """What two looks in a row, half a second apart, show before a rank has waited for 5 s, or the job has ended for so long."""
    traces = _read(name)[1]
    calls = np.concatenate([trace.calls for trace in traces])
    waits = calls[calls["completed_ns"] == 0]["created_ns"]
    end = int(waits.min() if len(waits) else calls["created_ns"].max()) + 5 * SECOND
    before: object = None
    for now_ns in range(int(calls["created_ns"].min()) + SECOND // 8, end, SECOND // 2):
        found = find_divergence(as_of(traces, now_ns), now_ns)
        key = (found.kind, found.ranks, found.group, found.sequence) if found is not None else None
        if found is not None and key == before:
            return found
        before = key
    return None


@pytest.mark.parametrize("name", CHOSEN)
def test_a_difference_is_named_before_a_rank_has_waited_five_seconds(name: str) -> None:
    """With the rank and the line of the table."""
    found = named_in_time(name)
    assert found is not None and found.ranks == TRUTH[name].ranks and found.where


@pytest.mark.everything
def test_nine_of_ten_differences_are_named_in_time() -> None:
    """Of all programs of the gallery whose ranks make calls that differ."""
    differ = [name for name in NAMES if TRUTH[name].causes and TRUTH[name].causes[0].startswith(DIFFER)]
    found = [name for name in differ if named_in_time(name) is not None]
    assert len(found) >= 0.9 * len(differ), sorted(set(differ) - set(found))


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_named_in_a_healthy_job_that_pauses_at_any_moment(name: str) -> None:
    """All ranks stop where they are, for seconds: messages in flight, calls not waited for, threads beside the loop."""
    traces, rng = _read(name)[1], random.Random(name)
    moments = np.concatenate([trace.calls["created_ns"] for trace in traces])
    for moment in rng.sample(moments.tolist(), min(12, len(moments))):
        for pause_ns in (0, 6 * SECOND):
            found = find_divergence(as_of(traces, moment + 1000), moment + 1000 + pause_ns)
            assert found is None, found


def test_a_group_that_some_rank_has_destroyed_is_not_compared() -> None:
    """The same name may be another group by now: one rank has begun to use the next, the others still use the first."""
    traces = list(_read("different_operations")[1])
    now_ns = int(max(trace.calls["created_ns"].max() for trace in traces)) + SECOND
    assert find_divergence(as_of(traces, now_ns), now_ns) is not None
    traces[0] = replace(traces[0], destroyed={int(traces[0].calls["group"][0]): now_ns - SECOND})
    assert find_divergence(as_of(traces, now_ns), now_ns) is None


def test_a_difference_is_named_although_other_ranks_are_on_other_nodes() -> None:
    """Two of three ranks are enough to see that their calls differ; the third is not taken for dead."""
    traces = list(_read("different_operations")[1])[1:]
    now_ns = int(max(trace.calls["created_ns"].max() for trace in traces)) + SECOND
    found = find_divergence(as_of(traces, now_ns), now_ns)
    assert found is not None and set(found.ranks) <= {1, 2} and found.cause == "type_mismatch"


def test_groups_between_replicas_are_not_compared_and_those_inside_a_replica_are() -> None:
    """Each rank of a replica reduces its own shard with the same rank of other replicas, in groups of one name."""
    traces = list(_read("different_operations")[1])
    now_ns = max(int(trace.calls["created_ns"].max()) for trace in traces) + SECOND
    assert find_divergence(as_of(traces, now_ns), now_ns) is not None
    between = [
        replace(trace, groups=tuple(replace(group, name="replicas/3") for group in trace.groups))
        for trace in traces
    ]
    assert find_divergence(as_of(between, now_ns), now_ns) is None
