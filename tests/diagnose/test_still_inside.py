"""A rank that is still in a call which another has left already, and the other stands in the next one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import RankTrace, State

from .histories import START_NS, Do, run

CALLS = 10
MINUTE_NS = 60_000_000_000


def _open(trace: RankTrace, last: int, made: int) -> RankTrace:
    """The trace of a rank that made so many calls, the last of which are open."""
    calls = trace.calls[:made].copy()
    for name, value in (("state", State.SCHEDULED), ("flags", 0), ("completed_ns", 0)):
        calls[name][made - last :] = value
    return replace(trace, calls=calls)


def _job(world: int, ahead: bool, kind: str) -> list[RankTrace]:
    """Rank 0 is in #9 (and has issued #10 where it may run ahead); the others have left #9 and stand in #10."""
    programs = {rank: [Do("all_reduce")] * CALLS for rank in range(world)}
    first, *others = run({"world": tuple(range(world))}, programs, kind=kind).traces()
    return [_open(first, 2, 10) if ahead else _open(first, 1, 9), *(_open(trace, 1, 10) for trace in others)]


def _expect_rank_0(result: Diagnosis, others: str) -> None:
    verdict = result.verdict
    assert verdict is not None, result.findings
    assert (verdict.ranks, verdict.sequence) == ((0,), 9), verdict.sentence
    assert f"all_reduce #9 of group default_pg finished on {others} but not on rank 0" in verdict.sentence
    assert "all 1 ranks" not in verdict.sentence


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("world", "others"), [(2, "rank 1"), (3, "ranks 1, 2")])
def test_the_rank_that_did_not_leave_the_earlier_call_is_named(world: int, others: str, ahead: bool) -> None:
    """It stands in #9, a rank that has left it waits in #10 for it."""
    traces = _job(world, ahead, "black box 1")
    result = diagnose(traces, options=DiagnoseOptions(now_ns=START_NS + MINUTE_NS))
    assert result.status == "fault"
    _expect_rank_0(result, others)


@pytest.mark.parametrize("ahead", [True, False])
def test_without_times_it_is_said_but_unclear(ahead: bool) -> None:
    """A dump taken a moment earlier looks the same."""
    result = diagnose(_job(3, ahead, "torch pickle 2.10"))
    assert result.status == "unclear"
    _expect_rank_0(result, "ranks 1, 2")
