"""Hangs by mechanism: calls inside another statement, loops of different length, messages that differ, and who still waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.diagnosis.kinds import CAUSES, KINDS, PHRASES, fill
from allranks.model.diagnosis import Diagnosis, RankNow
from allranks.model.trace import Frame, Progress, RankTrace, Shapes, State

from .histories import STUCK, Do, Layout, Program, edit, expect, run, with_change

TORCH = Frame("all_reduce", "/opt/lib/torch/distributed/c10d.py", 1)


def _with_frames(traces: list[RankTrace], frames: dict[int, tuple[Frame, ...]]) -> list[RankTrace]:
    """The traces with longer stacks, by the line of the user's frame."""
    return [
        replace(t, stacks=tuple((TORCH, *frames.get(stack[-1].line, stack[1:])) if stack else () for stack in t.stacks))
        for t in traces
    ]  # fmt: skip


def _boxes(traces: list[RankTrace]) -> tuple[list[RankTrace], DiagnoseOptions]:
    """The traces as live black boxes, read 20 s after the last call."""
    last = max(int(t.calls["created_ns"].max()) for t in traces if len(t.calls))
    return [replace(t, kind="black box 2") for t in traces], DiagnoseOptions(now_ns=last + 20 * 10**9)


def test_a_call_inside_the_statement_of_the_others_is_one_more_and_nothing_was_skipped() -> None:
    """Activation checkpointing: rank 1 makes a call while it recomputes, inside the same backward in which the others are."""
    forward, backward = Do("all_gather", line=20, out=24), Do("all_reduce", size=64, line=40)
    programs: dict[int, Program] = {rank: [forward, backward] * 6 for rank in range(3)}
    programs = with_change(programs, 1, 11, Do("all_reduce", size=1, line=77), backward)
    recomputed = (Frame("forward", "/home/me/model.py", 77), Frame("step", "/home/me/train.py", 40))
    traces = _with_frames(run({"world": (0, 1, 2)}, programs).traces(), {77: recomputed})
    verdict = expect(diagnose(traces), "extra_collective", 1)
    assert verdict.where == "model.py:77 in forward"
    assert "skipped" not in verdict.sentence and "loop" not in verdict.sentence


@pytest.mark.parametrize("short", [1, 2])
def test_loops_of_different_length_are_named_by_the_line_of_the_loop(short: int) -> None:
    """One rank generates fewer tokens and continues with the update, where it meets the others' next token."""
    token, update = Do("all_reduce", size=8, line=20), Do("reduce_scatter", size=64, line=44, out=16)
    rounds = [[*[token] * length, update] for length in (5, 7, 4, 6, 8)]
    programs: dict[int, Program] = {rank: [do for each in rounds for do in each] for rank in range(4)}
    early = [do for each in rounds[:-1] for do in each] + [*[token] * (8 - short), update]
    generate = (Frame("generate", "/home/me/rollout.py", 20), Frame("step", "/home/me/train.py", 40))
    traces = run({"world": (0, 1, 2, 3)}, programs | {2: early}).traces()
    verdict = expect(diagnose(_with_frames(traces, {20: generate})), "missing_rank", 2)
    assert verdict.where == "rollout.py:20 in generate"


def test_a_message_that_does_not_fit_comes_before_what_follows_from_it() -> None:
    """Evaluation against training in a pipeline: stage 0 sends another size, which NCCL accepts, and then no more; stage 1 waits
    for it, and stage 2 for stage 1."""
    send, receive = Do("send", peer=1, line=30), Do("recv", peer=0, line=31)
    programs: dict[int, Program] = {
        0: [send] * 6,
        1: [receive, edit(send, peer=2)] * 8,
        2: [edit(receive, peer=1)] * 8,
    }
    first, *others = run({"world": (0, 1, 2)}, programs).traces()
    calls = first.calls.copy()
    calls["shapes"][-1], calls["in_numel"][-1] = len(first.shapes), 2
    first = replace(
        first, calls=calls, shapes=(*first.shapes, Shapes(((2,),), ((2,),), ("Float",), ("Float",)))
    )
    verdict = expect(diagnose([first, *others]), "p2p_mismatch", 0)
    assert "message #6 from rank 0 to rank 1" in verdict.sentence, verdict.sentence


def _lacking_two(state: State, closed: str = "") -> Diagnosis:
    """Rank 2 never enters a call of three; the call of rank 0 has the given state, and its program may have ended."""
    work = [Do("all_reduce", size=8, line=10)] * 12
    boxes, options = _boxes(run({"world": (0, 1, 2)}, {0: work, 1: work, 2: [*work[:9], STUCK]}).traces())
    calls = boxes[0].calls.copy()
    calls["state"][-1] = state
    boxes[0] = replace(boxes[0], calls=calls, progress=Progress(closed=closed))
    return diagnose(boxes, options=options)


def test_a_rank_whose_call_failed_and_one_that_has_finished_do_not_wait() -> None:
    """Two ranks wait; of two whose one call failed, one; a program that has ended waits for nobody."""
    assert "; 2 ranks have waited " in expect(_lacking_two(State.SCHEDULED), "missing_rank", 2).sentence
    failed = expect(_lacking_two(State.FAILED), "missing_rank", 2).sentence
    assert "; 1 rank has waited " in failed and "the call failed on rank 0" in failed, failed
    assert "; 1 rank has waited " in expect(_lacking_two(State.SCHEDULED, "exit"), "missing_rank", 2).sentence


def test_what_follows_is_told_once_for_each_kind_of_group_in_the_order_of_ranks() -> None:
    """Sixteen ranks, two kinds of groups: not one line for each group."""
    layout = Layout(16, 4)
    result = diagnose(
        run(layout.members(), with_change(layout.programs(6), 5, 12, STUCK), backend="nccl").traces()
    )
    expect(result, "missing_rank", 5)
    follows = [finding for finding in result.findings if finding.severity == "consequence"]
    assert len(follows) <= 4, [finding.sentence for finding in follows]
    assert any("dp groups" in finding.sentence for finding in follows), [f.sentence for f in follows]
    assert [f.waiting for f in follows] == sorted(f.waiting for f in follows)


def test_the_table_of_kinds_is_complete_and_says_what_would_prove_a_cause_wrong() -> None:
    """Every template can be filled, with all facts known and with none; every kind belongs to a cause of the table."""

    class All(dict[str, object]):
        def __missing__(self, name: str) -> object:
            return name

    class Nothing(dict[str, object]):
        def __missing__(self, name: str) -> object:
            return ""

    for kind in KINDS.values():
        assert kind.cause in CAUSES or not kind.cause
        for template in (kind.sentence, kind.evidence, kind.ask, kind.advice):
            for facts in (All(), Nothing()):
                assert "[" not in fill(template, facts) and "{" not in fill(template, facts), template
    for phrase in PHRASES.values():
        assert "[" not in fill(phrase, All()) and "[" not in fill(phrase, Nothing()), phrase
    assert all(cause.title for cause in CAUSES.values())


def test_a_group_that_counts_its_ranks_for_itself_is_not_one_of_the_first_ranks_of_the_job() -> None:
    """Trainers 0 and 1, rollouts 2 and 3; the weights go from 0 to 2 and 3 in a group made by hand, whose ranks are 0, 1, 2."""
    train, send = Do("all_reduce", "train", line=10), Do("broadcast", "weights", line=20, root=0)
    programs: dict[int, Program] = {0: [*[train, send] * 3, send], 1: [train] * 3, 2: [send] * 4}
    programs[3] = [*[send] * 3, STUCK]
    groups = {"world": (0, 1, 2, 3), "train": (0, 1), "weights": (0, 2, 3)}
    traces = run(groups, programs).traces()
    by_hand = [
        replace(t, groups=tuple(replace(g, ranks=(0, 1, 2)) if g.desc == "weights" else g for g in t.groups))
        for t in traces
    ]
    verdict = expect(diagnose(by_hand), "missing_rank", 3)
    assert (verdict.group, verdict.waiting) == ("weights", (0, 2))


def test_a_call_in_the_wrong_group_is_not_called_one_more() -> None:
    """At this line the rank has always reduced over its pair; later calls of all ranks fit again when moved."""
    pair, world = Do("all_reduce", "pair", 8, line=12), Do("all_reduce", "world", 16, line=13)
    usual = [pair, world] * 12
    astray = [*usual[:16], replace(pair, group="world"), *usual[17:]]
    programs = {0: usual, 1: astray, 2: [world] * 12}
    traces = run({"world": (0, 1, 2), "pair": (0, 1)}, programs, ahead=99, strict=False).traces()
    verdict = diagnose(traces).verdict
    assert verdict is not None and (verdict.cause, verdict.ranks) == ("size_mismatch", (1,)), verdict


def test_a_mismatch_of_two_ranks_says_that_a_call_may_have_been_skipped() -> None:
    """One rank is at the end of its loop, the other in the loop: nobody can tell whether a call is lacking or added."""
    reduce, barrier = Do("all_reduce", size=8, line=10), Do("barrier", size=0, line=20)
    programs = {0: [*[reduce] * 10, barrier], 1: [*[reduce] * 9, barrier]}
    found = diagnose(run({"world": (0, 1)}, programs).traces()).verdict
    assert found is not None and "rank 1 skipped 1 call at train.py:10" in found.sentence, found.sentence
    epoch = [*[reduce] * 4, barrier]
    programs = {0: epoch * 3, 1: [*epoch, *[reduce] * 3, barrier, *epoch]}
    found = diagnose(run({"world": (0, 1)}, programs).traces()).verdict
    assert found is not None and "one of them skipped a call or made one more" in found.sentence, (
        found.sentence
    )


def test_the_time_of_a_file_that_may_be_a_copy_is_the_longest_that_ranks_can_have_waited() -> None:
    """Black boxes that are copied later, and dumps, whose only time is that of the file."""
    work = [Do("all_reduce", size=8, line=10)] * 12
    boxes, options = _boxes(run({"world": (0, 1, 2)}, {0: work, 1: work, 2: [*work[:9], STUCK]}).traces())
    assert "have waited at most" not in expect(diagnose(boxes, options=options), "missing_rank", 2).sentence
    copied = diagnose(boxes, options=replace(options, copied=True))
    assert "2 ranks have waited at most " in expect(copied, "missing_rank", 2).sentence
    dumps = [replace(box, header=replace(box.header, dated=True)) for box in boxes]
    assert "have waited at most " in expect(diagnose(dumps, options=options), "missing_rank", 2).sentence


def test_the_ranks_of_one_gather_pass_other_sizes_and_none_of_them_made_one_more() -> None:
    """A checkpoint gathered to rank 0 between two steps, once; what it waits for later is not caused by that gather."""
    step, ready = Do("all_reduce", line=19), Do("all_gather", "saving", 1, line=46)
    gather = [Do("gather", "saving", 8, line=36, root=0, out=out) for out in (16, 0)]
    programs = {rank: [*[step] * 10, gather[rank], *[step] * 3, (ready, STUCK)[rank]] for rank in (0, 1)}
    found = diagnose(run({"world": (0, 1), "saving": (0, 1)}, programs).traces())
    assert (verdict := expect(found, "missing_rank", 1)).group == "saving" and "extra" not in verdict.sentence


def test_an_evaluation_of_one_rank_is_named_where_it_began_though_its_first_calls_fitted() -> None:
    """Sharded weights: its gathers meet those of the other rank's next step, until that one reduces its gradients."""
    gathers, reduce = [Do("all_gather", out=16, line=26)] * 4, Do("reduce_scatter", size=16, out=8, line=27)
    steps = [*gathers, reduce] * 8
    programs = {0: [*steps, *[replace(gathers[0], line=15)] * 9], 1: [*steps, *gathers, reduce]}
    verdict = expect(diagnose(run({"world": (0, 1)}, programs).traces()), "extra_collective", 0)
    assert (verdict.where, verdict.sequence) == ("train.py:15 in step", len(steps) + 1)
    assert "in all earlier rounds rank 0 made another call at this point" in verdict.evidence


def test_a_rank_that_has_left_its_loop_of_messages_is_asked_for_the_end_of_the_loop() -> None:
    """One stage of a pipeline makes a step less and waits at the end; where it is, its stack has shown."""
    send = [Do("send", peer=1, line=19), Do("recv", peer=0, line=19)]
    programs = {rank: [send[rank]] * (8 + rank) + [Do("barrier", line=21)] for rank in (0, 1)}
    now = RankNow(0, "collective_wait", "train.py:21 in main", "waits in barrier")
    found = diagnose(run({"world": (0, 1)}, programs).traces(), stacks=[now])
    verdict = expect(found, "p2p_mismatch", 0)
    assert not verdict.missing_evidence
    assert verdict.advice[0].startswith(
        "look for a condition, an exception or an early end of a loop that makes rank 0"
    )


def test_a_branch_of_one_function_that_names_another_root_is_not_one_more_call() -> None:
    """`gather(group_dst=1)` in one branch and `gather(dst=1)` in the other."""
    usual = [Do("all_reduce", line=10), Do("gather", root=1, line=20)] * 6
    odd = [*usual[:9], Do("gather", root=2, line=21), *usual[10:]]
    traces = run({"world": (0, 1, 2)}, {0: usual, 1: usual, 2: odd}, backend="gloo").traces()
    expect(diagnose(traces), "root_mismatch", 2)


@pytest.mark.parametrize(("odd", "sentence"), [
    (Do("all_reduce", line=33), "rank 2 made an extra all_reduce #10 of group default_pg at train.py:33 in step, where ranks 0, 1 called all_reduce at train.py:20 in step"),
    (Do("all_reduce", size=5, line=33), "rank 2 made an extra all_reduce #10 of group default_pg at train.py:33 in step, where ranks 0, 1 called all_reduce at train.py:20 in step"),
])  # fmt: skip
def test_calls_of_one_helper_are_told_apart_by_the_lines_that_call_it(odd: Do, sentence: str) -> None:
    """Every call goes through `reduce` in util.py: its line alone says nothing."""
    usual = [Do("all_reduce", line=10), Do("all_reduce", line=20)] * 12
    programs = {0: usual, 1: usual, 2: [*usual[:9], odd, *usual[9:]]}
    traces = run({"world": (0, 1, 2)}, programs, backend="gloo").traces()
    helper = Frame("reduce", "/home/me/util.py", 5)
    stacks = (tuple((s[0], helper, *s[1:]) if s else s for s in trace.stacks) for trace in traces)
    found = diagnose([replace(trace, stacks=one) for trace, one in zip(traces, stacks, strict=True)])
    verdict = expect(found, "extra_collective", 2)
    assert verdict.sentence.startswith(sentence), verdict.sentence


def test_a_call_of_another_kind_through_one_helper_is_told_by_the_lines_that_call_it() -> None:
    usual = [Do("all_reduce", line=10), Do("all_reduce", line=20)] * 6
    odd = [*usual[:9], Do("broadcast", line=33), *usual[10:]]
    traces = run({"world": (0, 1, 2)}, {0: usual, 1: usual, 2: odd}, backend="gloo").traces()
    helper = Frame("comm", "/home/me/util.py", 5)
    stacks = (tuple((s[0], helper, *s[1:]) if s else s for s in trace.stacks) for trace in traces)
    found = diagnose([replace(trace, stacks=one) for trace, one in zip(traces, stacks, strict=True)])
    verdict = expect(found, "type_mismatch", 2)
    assert "at train.py:33 in step" in verdict.sentence and verdict.where == "train.py:33 in step"
