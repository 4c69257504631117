"""Every cause, planted in a small imaginary job: the verdict names it and the guilty rank, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.model.diagnosis import RankNow
from allranks.model.trace import Frame, Progress, State
from allranks.report import text

from .histories import (
    AT,
    DIE,
    FLAVOURS,
    LAYOUT,
    START_NS,
    STUCK,
    Do,
    edit,
    expect,
    run,
    tail,
    traces_of,
    verdict_of,
    with_change,
)

everywhere = pytest.mark.parametrize("flavour", sorted(FLAVOURS))


@everywhere
def test_a_healthy_job_has_nothing_wrong(flavour: str) -> None:
    """Uneven gathers, subgroups and broadcasts included."""
    result = diagnose(traces_of(LAYOUT.programs(6), flavour))
    assert (result.status, result.verdict) == ("ok", None)


@everywhere
def test_a_rank_that_never_enters_is_the_root_of_the_cascade(flavour: str) -> None:
    """All other ranks end up waiting, most of them for innocents."""
    verdict = expect(
        diagnose(traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), flavour)), "missing_rank", 5
    )
    assert verdict.group == "dp_1"
    assert set(verdict.waiting) == set(range(8)) - {5}


@everywhere
def test_a_rank_without_a_dump_is_held_to_be_dead(flavour: str) -> None:
    """Its partners wait for it and its file is not there."""
    expect(diagnose(traces_of(with_change(LAYOUT.programs(8), 3, AT, DIE), flavour)), "rank_died", 3)


@everywhere
def test_a_rank_that_never_called_anything_has_not_started(flavour: str) -> None:
    """Its dump is there and empty."""
    expect(diagnose(traces_of(with_change(LAYOUT.programs(8), 6, 0, STUCK), flavour)), "not_started", 6)


@everywhere
def test_another_operation_is_a_type_mismatch_of_the_minority(flavour: str) -> None:
    """One broadcasts where three reduce_scatter."""
    programs = LAYOUT.programs(8)
    odd = edit(programs[5][AT], op="all_reduce", line=77)
    verdict = expect(diagnose(traces_of(with_change(programs, 5, AT, odd), flavour)), "type_mismatch", 5)
    assert (verdict.group, verdict.sequence) == ("dp_1", 13)


@everywhere
def test_another_size_is_a_size_mismatch(flavour: str) -> None:
    """In the world all_reduce of the fifth round."""
    programs = LAYOUT.programs(8)
    at = 6 * 4 + 5
    expect(
        diagnose(traces_of(with_change(programs, 2, at, edit(programs[2][at], size=3)), flavour)),
        "size_mismatch",
        2,
    )


@everywhere
def test_another_dtype_is_a_dtype_mismatch(flavour: str) -> None:
    """Same elements, other type, of a scalar."""
    programs = LAYOUT.programs(8)
    at = 6 * 4 + 5
    odd = edit(programs[2][at], dtype="Double")
    expect(diagnose(traces_of(with_change(programs, 2, at, odd), flavour)), "dtype_mismatch", 2)


def test_another_root_is_a_root_mismatch() -> None:
    """The black box records the root."""
    programs = LAYOUT.programs(8)
    at = 6 * 4 + 4
    odd = edit(programs[6][at], root=6)
    expect(diagnose(traces_of(with_change(programs, 6, at, odd), "nccl")), "root_mismatch", 6)


def test_another_reduce_op_is_found_though_nothing_hangs() -> None:
    """The collective ends and the result is wrong."""
    programs = LAYOUT.programs(8)
    at = 6 * 4 + 5
    result = diagnose(traces_of(with_change(programs, 1, at, edit(programs[1][at], reduce_op="max")), "nccl"))
    expect(result, "reduce_op_mismatch", 1)


@pytest.mark.parametrize("flavour", ["nccl", "nccl running ahead", "gloo", "gloo without members"])
def test_an_extra_call_of_the_same_size_is_found_where_it_was_made(flavour: str) -> None:
    """The others later lack in a call that they are not guilty of."""
    programs = LAYOUT.programs(8)
    do = programs[4][AT - 1]
    verdict = expect(
        diagnose(traces_of(with_change(programs, 4, AT - 1, edit(do, line=99), do), flavour)),
        "extra_collective",
        4,
    )
    assert (verdict.group, verdict.sequence, verdict.where) == ("tp_2", 10, "train.py:99 in step")


@everywhere
def test_an_extra_call_of_another_size_is_no_size_mismatch(flavour: str) -> None:
    """The calls behind it fit when moved by one."""
    members = {"world": (0, 1, 2, 3)}
    usual = [Do("all_reduce", size=12, line=8)] * 2 + [Do("all_reduce", size=12, line=14)] * 2
    programs = {rank: list(usual) for rank in range(4)}
    programs[0].insert(2, Do("all_reduce", size=20, line=12))
    traces = run(members, programs, **{**FLAVOURS[flavour], "ahead": 5}).traces()
    assert expect(diagnose(traces), "extra_collective", 0).sequence == 3


@everywhere
def test_a_skipped_call_that_met_another_says_so(flavour: str) -> None:
    """gloo ends a rank that gets another size: the judge of the incident must know that the rank died of it."""
    calls = [Do("all_reduce", size=12, line=8)] * 2 + [Do("all_reduce", size=20, line=12)]
    programs = {rank: [*calls, *[Do("all_reduce", size=12, line=14)] * 2] for rank in range(4)}
    programs[0].pop(2)
    traces = run({"world": (0, 1, 2, 3)}, programs, **{**FLAVOURS[flavour], "ahead": 5}).traces()
    assert expect(diagnose(traces), "missing_rank", 0).met_another


@pytest.mark.parametrize("inside", [1, 2])
def test_the_same_calls_in_another_order_are_no_skipped_call(inside: int) -> None:
    """One branch reduces a and then b, the other b and then a; small calls of gloo end on one side."""
    usual, one, two = [Do("all_reduce", line=8)] * 3, Do("all_reduce", size=12), Do("all_reduce", size=20)
    programs = {rank: [*usual, edit(one, line=20), edit(two, line=21)] for rank in range(3)}
    programs[1] = [*usual, *[edit(two, line=30), edit(one, line=31)][:inside], STUCK]
    verdict = expect(
        diagnose(run({"world": (0, 1, 2)}, programs, backend="gloo", ahead=1).traces()), "size_mismatch", 1
    )
    assert (verdict.sequence, verdict.where) == (4, "train.py:30 in step")


def test_an_extra_call_between_two_ranks_is_told_by_the_line_that_only_one_knows() -> None:
    """Without a majority."""
    programs = {rank: [Do("all_reduce", line=8)] * 3 + [Do("all_reduce", line=14)] * 3 for rank in range(2)}
    programs[0].insert(3, Do("all_reduce", line=12))
    verdict = expect(
        diagnose(run({"world": (0, 1)}, programs, backend="gloo").traces()), "extra_collective", 0
    )
    assert verdict.sequence == 4


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
def test_a_rank_that_skips_a_call_is_named_at_that_call(flavour: str) -> None:
    """It continues and waits in a circle with those that it left behind."""
    result = diagnose(traces_of(with_change(LAYOUT.programs(8), 3, AT), flavour))
    assert expect(result, "missing_rank", 3).group == "dp_1"


def test_two_groups_in_different_order_are_an_inversion() -> None:
    """Both wait for the other; the circle is shown."""
    members = {"world": (0, 1), "a": (0, 1), "b": (0, 1)}
    a, b = Do("all_reduce", "a", line=5), Do("all_reduce", "b", line=6)
    result = diagnose(run(members, {0: [a, b], 1: [b, a]}, backend="gloo").traces())
    verdict = expect(result, "order_inversion", 0, 1)
    assert "group a" in verdict.sentence and "group b" in verdict.sentence


def test_an_inversion_on_a_device_queue_is_found_though_all_calls_are_there() -> None:
    """Everybody entered everything; the order of entering differs."""
    members = {"world": (0, 1, 2, 3), "a": (0, 1), "b": (0, 1), "c": (2, 3)}
    a, b, c = Do("all_reduce", "a", line=5), Do("all_reduce", "b", line=6), Do("all_reduce", "c", line=5)
    programs = {0: [a, b], 1: [b, a], 2: [c], 3: [c]}
    expect(diagnose(run(members, programs, ahead=4).traces()), "order_inversion", 0, 1)


def test_a_circle_of_four_ranks_is_an_inversion_of_all_four() -> None:
    """0 waits for 1, 1 for 3, 3 for 2, 2 for 0."""
    members = {"world": (0, 1, 2, 3), "p": (0, 1), "q": (1, 3), "r": (2, 3), "s": (0, 2)}
    calls = {name: Do("all_reduce", name, line=ord(name)) for name in "pqrs"}
    programs = {
        0: [calls["p"], calls["s"]],
        1: [calls["q"], calls["p"]],
        3: [calls["r"], calls["q"]],
        2: [calls["s"], calls["r"]],
    }
    expect(diagnose(run(members, programs).traces()), "order_inversion", 0, 1, 2, 3)


def test_everybody_inside_and_nobody_out_is_the_network_or_a_device() -> None:
    """Nobody's program is to blame."""
    traces = traces_of(LAYOUT.programs(4), "nccl")
    stuck = [
        replace(t, calls=tail(t.calls, state=int(State.STARTED), completed_ns=0, flags=0)) for t in traces
    ]
    verdict = expect(diagnose(stuck), "none_finished")
    assert "network or device" in verdict.sentence


def test_a_kernel_that_never_started_points_at_its_rank() -> None:
    """With timing on, the others are started and one is only scheduled."""
    traces = traces_of(LAYOUT.programs(4), "nccl")
    states = [State.SCHEDULED if t.header.rank == 6 else State.STARTED for t in traces]
    stuck = [
        replace(t, calls=tail(t.calls, state=int(s), completed_ns=0, flags=0))
        for t, s in zip(traces, states, strict=True)
    ]
    expect(diagnose(stuck), "none_finished", 6)


def test_stacks_turn_missing_into_stuck_with_the_line() -> None:
    """The verdict says where the rank is instead."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "gloo")
    now = RankNow(5, "dataloader_wait", "data.py:88 in next_batch", "waits for worker 3")
    verdict = expect(diagnose(traces, stacks=[now]), "stuck_before_collective", 5)
    assert verdict.where == "data.py:88 in next_batch"
    assert "it waits for its DataLoader at data.py:88 in next_batch" in verdict.sentence
    assert "rank 5: waits for worker 3" in verdict.evidence  # whose evidence it is
    assert verdict.advice == (
        "at data.py:88 in next_batch (rank 5): check the DataLoader's workers: slow storage, a lock, or a worker that died",
    )
    locked = verdict_of(diagnose(traces, stacks=[replace(now, cause="lock_deadlock")]))
    assert locked.advice[0].endswith(
        "find the thread that holds this lock, and release it before the next collective"
    )
    assert (
        "it waits for a lock at data.py:88 in next_batch" in locked.sentence
    )  # its holder may wait for the network


def test_who_looks_again_and_again_may_wait_for_what_another_rank_left_out() -> None:
    """Ranks that count arrivals in the store, and one whose save failed before it had counted itself."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "gloo")
    polls = "looks again and again in arrive (save.py:6) whether `store.add(tag, 0) < 8` has changed"
    verdict = verdict_of(diagnose(traces, stacks=[RankNow(5, "sleep", "save.py:6 in arrive", polls)]))
    assert (
        verdict.confidence == 0.75
        and "; it looks again and again for a change at save.py:6" in verdict.sentence
    )
    (missing,) = verdict.missing_evidence
    assert missing == "which rank should make that change: perhaps a rank that waits here and skipped it"


def test_of_several_ranks_that_have_not_come_the_one_that_was_seen_is_named() -> None:
    """ "Ranks 1, 2 never entered …; it is at …" did not say whose line that was."""
    traces = run(
        {"world": (0, 1, 2, 3)},
        {r: [Do("all_reduce", line=9)] * 20 + [Do("barrier", line=30) if r > 1 else STUCK] for r in range(4)},
    ).traces()
    now = RankNow(1, "file_lock_wait", "data.py:8 in lock", "waits for a lock on a file")
    verdict = verdict_of(diagnose(traces, stacks=[now]))
    assert (
        verdict.ranks == (0, 1) and "; rank 1 waits for a file lock at data.py:8 in lock" in verdict.sentence
    )


def test_a_rank_whose_program_has_ended_is_not_looked_for_in_the_thread_that_keeps_it() -> None:
    """sys.exit(0) on one rank, and a thread that is no daemon: the line of that thread is not why the others wait."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "gloo")
    exits = "the interpreter is exiting and joins what was left running (_shutdown); thread uploader sleeps"
    now = RankNow(5, "shutdown_join", "upload.py:7 in run", exits)
    verdict = expect(diagnose(traces, stacks=[now]), "stuck_before_collective", 5)
    (advice,) = verdict.advice
    assert advice == "find why the program of rank 5 ended early: it returned, or called sys.exit(0)"


def test_a_rank_that_is_always_late_is_a_warning_beside_nothing_wrong() -> None:
    """Slow, not stuck: everything finishes, so there is no fault."""
    programs = {rank: [Do("all_reduce", line=9, take_s=0.4 if rank == 2 else 0.1)] * 40 for rank in range(4)}
    result = diagnose(run({"world": (0, 1, 2, 3)}, programs).traces())
    assert (result.status, result.verdict) == ("ok", None)
    (slow,) = [finding for finding in result.findings if finding.cause == "straggler"]
    assert (slow.ranks, slow.severity) == ((2,), "warning")
    assert slow.waited_s == pytest.approx(0.3, abs=0.05)
    assert slow.evidence and "evidence" not in list(
        text.render(result)
    )  # it does not show that nothing is wrong


def test_a_little_jitter_makes_nobody_a_straggler() -> None:
    """Somebody is always last."""
    programs = {rank: [Do("all_reduce", line=9, take_s=0.1 + 0.001 * rank)] * 40 for rank in range(4)}
    assert not diagnose(run({"world": (0, 1, 2, 3)}, programs).traces()).findings


def test_a_live_job_between_two_calls_has_nothing_wrong() -> None:
    """One rank is a call behind, but only for a moment."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "nccl")
    boxes = [replace(t, kind="black box 1") for t in traces]
    newest = max(int(t.calls["created_ns"].max()) for t in boxes)
    soon = diagnose(boxes, options=DiagnoseOptions(now_ns=newest + 50_000_000))
    assert (soon.status, [f.cause for f in soon.findings]) == ("ok", ["skew"])
    late = diagnose(boxes, options=DiagnoseOptions(now_ns=newest + 31_000_000_000))
    assert "have waited 31 s" in expect(late, "missing_rank", 5).sentence


def test_a_hang_after_a_long_pause_is_one_when_the_caller_knows_that_nothing_moves() -> None:
    """The agent has watched the job; one long pause before (a checkpoint) does not hide who is waited for."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "nccl")
    boxes = [replace(t, kind="black box 1", calls=t.calls.copy()) for t in traces]
    for box in boxes:
        box.calls["created_ns"][len(box.calls) // 2 :] += 20_000_000_000
    now = max(int(t.calls["created_ns"].max()) for t in boxes) + 5_000_000_000
    assert diagnose(boxes, options=DiagnoseOptions(now_ns=now)).status == "ok"
    expect(diagnose(boxes, options=DiagnoseOptions(now_ns=now, quiet_s=4.0)), "missing_rank", 5)


def test_a_declared_pause_is_no_hang() -> None:
    """The rank said that it would be silent, and for how long."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "nccl")
    now = START_NS + 3600 * 10**9
    boxes = [replace(t, kind="black box 1") for t in traces]
    boxes[5] = replace(boxes[5], progress=Progress(phase="checkpoint", expect_until_ns=now + 10**9))
    blamed = {
        r
        for f in diagnose(boxes, options=DiagnoseOptions(now_ns=now)).findings
        if f.severity == "root"
        for r in f.ranks
    }
    assert 5 not in blamed


def test_a_large_job_is_settled_by_its_newest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is the same, and the report says what was examined."""
    traces = traces_of(with_change(LAYOUT.programs(60), 5, AT + 6 * 50, STUCK), "nccl")
    whole = expect(diagnose(traces), "missing_rank", 5)
    monkeypatch.setattr("allranks.diagnosis.verdict.LARGE_JOB", 8 * 130)
    result = diagnose(traces)
    verdict = expect(result, "missing_rank", 5)
    assert (verdict.group, verdict.sequence) == (whole.group, whole.sequence)
    assert result.summary[-1] == "the newest 130 calls of every rank were examined"


@pytest.mark.parametrize("op", ["all_gather", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"])
def test_one_tensor_is_gathered_from_equal_parts(op: str) -> None:
    """Parts that add up to the whole do not allow it: only lists of tensors may be uneven. gloo's own recorder calls
    all_gather_into_tensor all_gather."""
    sizes = (4, 3, 5, 4)
    programs = {rank: [Do("all_reduce"), Do(op, size=sizes[rank], out=16)] for rank in range(4)}
    verdict = verdict_of(diagnose(run({"world": (0, 1, 2, 3)}, programs).traces()))
    assert (verdict.cause, verdict.ranks) == ("size_mismatch", (1, 2)), verdict.sentence


def test_lists_of_tensors_may_be_gathered_unevenly() -> None:
    """One output tensor for each rank."""
    sizes = (4, 3, 5, 4)
    programs = {rank: [Do("all_reduce"), Do("all_gather", size=sizes[rank], out=16)] for rank in range(4)}
    traces = run({"world": (0, 1, 2, 3)}, programs).traces()
    outputs = tuple((size,) for size in sizes)
    listed = [replace(t, shapes=(*t.shapes[:-1], replace(t.shapes[-1], outputs=outputs))) for t in traces]
    assert diagnose(listed).verdict is None


def test_a_barrier_does_not_meet_a_monitored_barrier() -> None:
    """They are different operations: a monitored barrier sends messages to rank 0."""
    programs = {
        rank: [*[Do("all_reduce")] * 3, Do("monitored_barrier" if rank == 1 else "barrier")]
        for rank in range(3)
    }
    verdict = expect(diagnose(run({"world": (0, 1, 2)}, programs).traces()), "type_mismatch", 1)
    assert "called monitored_barrier #4" in verdict.sentence
    assert "ranks 0, 2 called barrier" in verdict.sentence


def test_a_tie_at_different_lines_advises_to_compare_the_lines() -> None:
    """Neither line depends on the rank: the program took two paths."""
    programs = {
        rank: [Do("all_reduce"), Do("broadcast" if rank else "all_reduce", line=50 + rank, root=0)]
        for rank in (0, 1)
    }
    verdict = verdict_of(diagnose(run({"world": (0, 1)}, programs).traces()))
    assert verdict.ranks == (0, 1)
    assert verdict.advice == ("compare train.py:50 in step (rank 0) with train.py:51 in step (rank 1): "
                              "all ranks of the group must make the same call here",)  # fmt: skip


def test_each_stack_says_what_it_is_and_the_live_one_comes_first() -> None:
    """The stack of the last finished call is not where the rank is now, and the advice names the line where it is."""
    traces = traces_of(with_change(LAYOUT.programs(8), 5, AT, STUCK), "nccl")
    live = (Frame("next_batch", "/home/me/data.py", 88),)
    now = RankNow(5, "dataloader_wait", "data.py:88 in next_batch", "waits for worker 3", live)
    verdict = expect(diagnose(traces, stacks=[now]), "stuck_before_collective", 5)
    assert verdict.stacks[0] == ((5,), live)
    assert verdict.stack_labels[:3] == ("live", "last finished call", "in this call")
    assert len(verdict.stack_labels) == len(verdict.stacks)
    assert verdict.advice == (
        "at data.py:88 in next_batch (rank 5): check the DataLoader's workers: slow storage, a lock, or a worker that died",
    )
    without = expect(diagnose(traces), "missing_rank", 5)
    assert without.stack_labels[0] == "last finished call"


def test_a_rank_that_waits_for_a_file_lock_of_one_that_waits_for_it_is_told_who_must_release_it() -> None:
    """The first to come meets a barrier while it holds the lock of a cache."""
    programs = {
        rank: [*[Do("all_reduce", line=9)] * 20, (Do("barrier", line=30), STUCK)[rank]] for rank in (0, 1)
    }
    traces = run({"world": (0, 1)}, programs).traces()
    now = RankNow(
        1, "file_lock_wait", "data.py:8 in lock", "waits for a lock on a file, held by rank 0", held_by=0
    )
    verdict = verdict_of(diagnose(traces, stacks=[now]))
    assert "waits for a file lock at data.py:8 in lock (rank 0 holds the lock)" in verdict.sentence
    assert verdict.advice == ("let rank 0 release the lock before it enters barrier #21 of group default_pg",)


def test_a_call_that_has_come_behind_a_loop_before_is_not_called_an_extra_one_for_sure() -> None:
    """Rank 1 leaves the loop of its second epoch early and comes to the barrier behind it."""
    step = [Do("all_gather", line=16), Do("reduce_scatter", line=17), Do("reduce_scatter", line=17)]
    epoch = [*step * 8, Do("barrier", line=18)]
    programs = {rank: [*epoch, *epoch] for rank in range(3)}
    programs[1] = [*epoch, *step * 5, Do("barrier", line=18), *epoch]
    world = run({"world": (0, 1, 2)}, programs, backend="gloo")
    verdict = verdict_of(diagnose(world.traces()))
    assert verdict.ranks == (1,) and "train.py:18" in verdict.where
    assert "left its loop early" in verdict.sentence


def test_a_call_that_ends_late_does_not_hide_the_mismatch_before_it() -> None:
    """gloo accepted another reduction; two calls later the end of a call is recorded on two ranks, and on the third not yet."""
    programs = {rank: [Do("all_reduce", reduce_op="sum")] * 12 for rank in range(3)}
    programs[1] = [*programs[0][:9], Do("all_reduce", reduce_op="max"), *programs[0][10:]]
    traces = []
    for trace in run({"world": (0, 1, 2)}, programs, backend="gloo").traces():
        calls = trace.calls.copy()
        calls["state"], calls["flags"], calls["completed_ns"] = State.COMPLETED, 0, calls["created_ns"] + 10
        if trace.header.rank == 0:
            calls["state"][-1], calls["completed_ns"][-1] = State.STARTED, 0
        traces.append(replace(trace, calls=calls, kind="black box 2"))
    options = DiagnoseOptions(now_ns=int(traces[0].calls["created_ns"][-1]) + 10**9)
    expect(diagnose(traces, options=options), "reduce_op_mismatch", 1)
