"""Ranks that died, raised, were stopped or left no file, planted in a small imaginary job: who is the root."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.model.diagnosis import FileNote, RankNow
from allranks.model.trace import Flag, Progress, RankTrace, State

from .histories import (
    AT,
    DIE,
    LAYOUT,
    STUCK,
    Do,
    expect,
    run,
    tail,
    traces_of,
    verdict_of,
    with_change,
    with_lost_call,
)


def test_a_call_that_failed_on_one_rank_is_a_call_error() -> None:
    """The others are still in it."""
    traces = traces_of(LAYOUT.programs(4), "nccl")
    states = [State.FAILED if t.header.rank == 2 else State.STARTED for t in traces]
    stuck = [
        replace(t, calls=tail(t.calls, state=int(s), completed_ns=0, flags=0))
        for t, s in zip(traces, states, strict=True)
    ]
    expect(diagnose(stuck), "call_error", 2)


def test_a_rank_that_ended_with_an_exception_died() -> None:
    """Its black box says so; the others still wait."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "nccl")
    traces[5] = replace(traces[5], progress=Progress(closed="exception: ValueError: bad batch"))
    assert "ValueError: bad batch" in expect(diagnose(traces), "rank_died", 5).sentence
    ending = RankNow(5, "queue_wait", "train.py:5 in flush", "waits on a queue that nobody empties")
    verdict = expect(diagnose(traces, stacks=[ending]), "rank_died", 5)
    assert "its process has not ended, it waits for an event at train.py:5 in flush" in verdict.sentence
    assert "rank 5 never entered" in verdict.sentence and ending.line in verdict.evidence
    assert verdict.advice[-1].startswith("end what runs at train.py:5 in flush when the program fails")


def test_ctrl_c_is_no_death_and_tells_where_a_rank_was() -> None:
    """All ranks get it. Of a hang it names the line; of a job that trained it says nothing; nothing tells for how long."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "gloo")
    lines = {5: 7}

    def stopped(traces: list[RankTrace]) -> list[RankTrace]:
        ends = [f"exception: KeyboardInterrupt (train.py:{lines.get(rank, 30)}): " for rank in range(8)]
        return [replace(t, progress=Progress(closed=end)) for t, end in zip(traces, ends, strict=True)]

    verdict = expect(diagnose(stopped(traces)), "missing_rank", 5)
    assert "it was interrupted at train.py:7" in verdict.sentence and verdict.where == "train.py:7"
    for took_s, sure in ((90, 0.9), (0.1, 0.35)):  # their connections broke when rank 5 ended
        failed = [
            replace(t, calls=with_lost_call(t.calls, took_s)) if t.header.rank != 5 else t for t in traces
        ]
        lost = verdict_of(diagnose(stopped(failed)))
        found = (lost.cause, lost.ranks, lost.where, lost.confidence)
        assert found == ("missing_rank", (5,), "train.py:7", sure), lost.sentence
    ended = verdict_of(diagnose(stopped(traces), options=DiagnoseOptions(ended=True)))
    assert ended.ranks == (5,) and ended.confidence < 0.6
    assert diagnose(stopped(traces_of(LAYOUT.programs(8), "gloo"))).status == "ok"


def test_a_rank_whose_process_is_gone_died_even_inside_the_call() -> None:
    """It entered, was killed, and the others saw the connection break."""
    traces = traces_of(LAYOUT.programs(4), "nccl")
    states = [State.SCHEDULED if t.header.rank == 4 else State.FAILED for t in traces]
    broken = [
        replace(t, calls=tail(t.calls, state=int(s), flags=0)) for t, s in zip(traces, states, strict=True)
    ]
    expect(diagnose(broken), "rank_died", 4)


@pytest.mark.parametrize(("later_ms", "cause", "call"), [(500, "rank_died", 3), (-2, "call_error", 1)])
def test_of_two_calls_that_failed_the_one_that_failed_first_is_the_root(
    later_ms: int, cause: str, call: int
) -> None:
    """Rank 1 made a group of its own instead of the third call: the others ended, and its call lost them; or the reverse."""
    members, world = {"world": (0, 1, 2), "own": (1,)}, [Do("all_reduce", "world", line=1)] * 2
    programs = {
        rank: [*world, Do("all_reduce", "own" if rank == 1 else "world", line=2)] for rank in range(3)
    }
    broken = []
    for trace in run(members, programs, backend="gloo").traces():
        ended = int(trace.calls["created_ns"][-1]) + 5_000_000
        ended += later_ms * 1_000_000 if trace.header.rank == 1 else 0
        broken.append(
            replace(
                trace,
                calls=tail(trace.calls, state=int(State.FAILED), completed_ns=ended),
                kind="black box 1",
            )
        )
    assert expect(diagnose(broken), cause, 1).sequence == call


def test_a_failure_long_before_the_timeout_means_that_the_peer_is_gone() -> None:
    """Black boxes of a gloo job after kill -9: the others' calls failed at once."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, 6 * 4 + 5, STUCK), "nccl")
    broken = []
    for trace in traces:
        calls = trace.calls.copy()
        last = calls[-1]
        if trace.header.rank != 5:
            calls["state"][-1], calls["completed_ns"][-1] = State.FAILED, int(last["created_ns"]) + 5_000_000
        broken.append(replace(trace, calls=calls, kind="black box 1"))
    expect(diagnose(broken), "rank_died", 5)


def test_a_timeout_of_the_others_means_that_the_rank_is_missing() -> None:
    """gloo puts timed-out calls away like finished ones; the rank that never entered gives it away."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, 6 * 4 + 5, STUCK), "gloo")
    left = []
    for trace in traces:
        calls = trace.calls.copy()
        calls["flags"] |= int(Flag.RETIRED)
        left.append(replace(trace, calls=calls))
    expect(diagnose(left), "missing_rank", 5)


def test_a_damaged_file_lowers_confidence_and_accuses_nobody() -> None:
    """The rank whose file was cut is only perhaps the one."""
    traces = traces_of(LAYOUT.programs(4), "nccl")
    stuck = [replace(t, calls=tail(t.calls, state=0, flags=0, completed_ns=0)) for t in traces]
    stuck[3] = replace(stuck[3], calls=stuck[3].calls[:-4])
    result = diagnose(stuck, [FileNote("trace_3", 3, "torch pickle 2.10", "damaged", "cut short")])
    assert result.status == "unclear"
    assert verdict_of(result).confidence < 0.5


def test_gloo_kills_the_innocent_and_the_larger_size_is_blamed() -> None:
    """Of three ranks one is gone, and the two left disagree."""
    programs = {
        rank: [Do("all_reduce", size=8, line=5)] * 3
        + [Do("all_reduce", size=20 if rank == 1 else 10, line=7)]
        for rank in range(3)
    }
    programs[0] = [*programs[0][:3], DIE]
    expect(diagnose(run({"world": (0, 1, 2)}, programs, backend="gloo").traces()), "size_mismatch", 1)


def test_a_missing_file_of_a_finished_job_is_unclear_and_only_a_warning_when_allowed() -> None:
    """Everything completed, on all ranks that are there."""
    traces = [t for t in traces_of(LAYOUT.programs(4), "nccl") if t.header.rank != 2]
    result = diagnose(traces)
    assert (result.status, verdict_of(result).cause, verdict_of(result).ranks) == (
        "unclear",
        "rank_died",
        (2,),
    )
    assert diagnose(traces, options=DiagnoseOptions(allow_incomplete_ranks=True)).status == "ok"


def test_black_boxes_of_other_nodes_are_merely_elsewhere() -> None:
    """Each node keeps its own."""
    boxes = [
        replace(t, kind="black box 1") for t in traces_of(LAYOUT.programs(4), "nccl") if t.header.rank != 2
    ]
    assert diagnose(boxes).status == "ok"


def test_completed_is_not_believed_once_a_rank_is_gone() -> None:
    """NCCL turns the others' pending calls to completed when a peer exits."""
    traces = traces_of(with_change(LAYOUT.programs(8), 3, AT + 3, DIE), "nccl")
    flipped = []
    for trace in traces:
        calls = trace.calls.copy()
        if trace.header.rank in (0, 1):
            calls["state"] = State.COMPLETED
        flipped.append(replace(trace, calls=calls))
    expect(diagnose(flipped), "rank_died", 3)


@pytest.mark.parametrize(("lost", "ranks", "sure"), [(2, (3,), 0.6), (3, (), 0.35)])
def test_a_rank_alone_in_a_group_of_unknown_members_waits_perhaps_for_one_without_a_file(
    lost: int, ranks: tuple[int, ...], sure: float
) -> None:
    """Two pairs across two pairs, without a call of all ranks: who is in a pair is not recorded, nor how many ranks there are."""
    groups = {"tp_0": (0, 1), "tp_1": (2, 3), "dp_0": (0, 2), "dp_1": (1, 3), "world": (0, 1, 2, 3)}
    programs = {
        rank: [Do("all_reduce", f"tp_{rank // 2}", line=20), Do("all_reduce", f"dp_{rank % 2}", line=30)] * 6
        for rank in range(4)
    }
    programs = with_change(programs, 3, 10, Do("all_gather", "tp_1", line=20))
    traces = run(groups, programs, backend="gloo", members=False).traces(lost=frozenset({lost}))
    traces = [replace(trace, groups=trace.groups[:-1]) for trace in traces]
    verdict = verdict_of(diagnose(traces))
    assert verdict.ranks == ranks and verdict.confidence <= sure, verdict.sentence
    assert any("dumps of the other" in text or "file of" in text for text in verdict.missing_evidence)
