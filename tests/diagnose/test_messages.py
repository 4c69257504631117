"""Sends and receives that do not meet, planted in a small imaginary job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.diagnosis import diagnose
from allranks.model.diagnosis import RankNow
from allranks.model.trace import State

from .histories import STUCK, Do, Program, expect, run, verdict_of

MESSAGES = pytest.mark.parametrize(("op", "other"), [("recv", "send"), ("send", "receive")])


@MESSAGES
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_went_on_to_a_collective_without_posting_is_named_alone(
    op: str, other: str, world: int
) -> None:
    """The partner that posted its end is innocent: there is no majority of two, and of three one has had messages before."""
    programs = {rank: [*[Do("all_reduce")] * 3, Do("all_reduce", line=30)] for rank in range(world)}
    if world == 3:
        programs[1].insert(2, Do("send", peer=2, line=15))
        programs[2].insert(2, Do("recv", peer=1, line=15))
    programs[0].insert(len(programs[0]) - 1, Do(op, peer=1, line=20))
    verdict = expect(diagnose(run({"world": tuple(range(world))}, programs).traces()), "p2p_mismatch", 1)
    assert f"rank 1 never posted the {other} for rank 0's {op}" in verdict.sentence
    assert verdict.confidence < 0.8


@MESSAGES
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_only_message_of_a_job_is_extra_where_all_others_agree_on_the_next_collective(
    op: str, other: str, before: int, ahead: bool
) -> None:
    """Nobody has sent or received anything before, and its partner waits with all the rest for the rank that does; it may
    have got out of the collective that rank 1 lacks in, and wait in the next one."""
    programs = {rank: [*[Do("all_reduce")] * before, Do("broadcast", line=30)] for rank in range(3)}
    programs[1].insert(before, Do(op, peer=2, line=20))
    world = run({"world": (0, 1, 2)}, programs)
    if ahead:
        last = world.calls[2][-1]
        world.calls[2].append(replace(last, seq=last.seq + 1, created=last.created + 10**7))
        last.state, last.completed = State.COMPLETED, last.created + 10**6
    verdict = expect(diagnose(world.traces()), "p2p_mismatch", 1)
    assert f"rank 1 posted an extra {op}" in verdict.sentence and "train.py:20" in verdict.where
    assert verdict.waiting == (0, 2) and verdict.confidence < 0.8


@MESSAGES
def test_a_forgotten_first_message_of_a_pipeline_is_the_fault_of_its_stage(op: str, other: str) -> None:
    """Two pipelines of two stages: the other pair has exchanged its message, so there are to be messages."""
    first, second = ("recv", "send") if op == "send" else ("send", "recv")
    programs = {rank: [Do("all_reduce"), Do("all_reduce", line=30)] for rank in range(4)}
    programs[1].insert(1, Do(first, peer=3, line=20))
    programs[3].insert(1, Do(second, peer=1, line=20))
    programs[2].insert(1, Do(op, peer=0, line=20))
    verdict = expect(diagnose(run({"world": (0, 1, 2, 3)}, programs).traces()), "p2p_mismatch", 0)
    assert f"rank 0 never posted the {other} for rank 2's {op}" in verdict.sentence


def test_a_rank_seen_elsewhere_never_posted_rather_than_entered_a_receive() -> None:
    """ "Rank 1 never entered recv from rank 1" says nothing."""
    programs: dict[int, Program] = {0: [Do("all_reduce"), Do("recv", peer=1)], 1: [Do("all_reduce"), STUCK]}
    traces = run({"world": (0, 1)}, programs).traces()
    verdict = verdict_of(diagnose(traces, stacks=[RankNow(1, "sleep", "data.py:8 in load")]))
    assert "rank 1 never posted the send for rank 0's recv from rank 1" in verdict.sentence


def test_a_rank_in_a_new_collective_while_several_messages_wait_for_it_is_named_alone() -> None:
    """A stage calls a barrier that the other stage does not, or left out its messages: either way it is this rank."""
    step = {0: [Do("send", peer=1, line=20)], 1: [Do("recv", peer=0, line=20)]}
    programs = {rank: [Do("all_reduce"), *step[rank] * 4] for rank in range(2)}
    programs[1].insert(4, Do("all_reduce", line=30))
    world = run({"world": (0, 1)}, programs, backend="gloo")
    last = world.calls[0][-1]
    second = Do("recv", peer=1, line=22)
    world.calls[0].append(replace(last, do=second, created=last.created + 10**6))  # of one batch
    verdict = expect(diagnose(world.traces()), "p2p_mismatch", 1)
    assert "it is in all_reduce" in verdict.sentence and "train.py:30" in verdict.sentence
