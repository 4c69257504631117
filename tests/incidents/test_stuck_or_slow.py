"""Stuck or slow: decisions over looks at a silent job."""

from __future__ import annotations

from dataclasses import replace

from allranks.incidents.policy import Look, judge
from allranks.model.stacks import ChildState, RankState, StackFrame, StacksReport


def look(number: int, cause: str, *functions: str, file: str = "train.py", moved: bool = False) -> Look:
    """One look at a job whose rank 1 is in `functions`, innermost first; line numbers differ each time."""
    stack = tuple(StackFrame(name, file, 10 + number) for name in functions)
    state = RankState(1, cause, "train.py:10 in f", "", stack=stack)
    report = StacksReport(hung=True, culprits=(1,), sentence="", ranks={1: state})
    return Look(at_s=number * 5.0, quiet_s=10.0 + number * 5.0, report=report, moved=moved)


def test_one_look_never_decides() -> None:
    """Four identical snapshots of a healthy straggler look like a hang."""
    assert judge([look(0, "sleep", "load")], 300)[0] is None


def test_a_sleeper_is_hung_at_the_second_look() -> None:
    """It waits for nobody and does not move."""
    verdict, reason = judge([look(0, "sleep", "load"), look(1, "sleep", "load")], 300)
    assert verdict is True
    assert "rank 1 (sleep, train.py:10 in f)" in reason


def test_progress_during_a_look_means_slow() -> None:
    """The mark moved: no hang."""
    assert judge([look(0, "sleep", "load"), look(1, "sleep", "load", moved=True)], 300)[0] is False


def test_a_working_rank_gets_time_until_the_cap() -> None:
    """Evaluation: CPU burns and the functions change."""
    looks = [look(n, "busy_python", f"layer{n}", "evaluate") for n in range(6)]
    assert judge(looks, 300)[0] is None
    assert judge([*looks, Look(99, 301, looks[-1].report, False)], 300)[0] is True


def test_an_endless_loop_is_hung_at_the_third_look() -> None:
    """CPU burns in the same function, though the line moves inside it."""
    looks = [look(n, "busy_python", "spin", "main") for n in range(3)]
    assert judge(looks[:2], 300)[0] is None
    assert judge(looks, 300)[0] is True


def test_compilation_is_not_a_hang() -> None:
    """Frames of the compiler get patience even if they stand still."""
    looks = [look(n, "native_call", "compile", file="/x/torch/_inductor/codecache.py") for n in range(5)]
    assert judge(looks, 300)[0] is None


def test_a_command_that_works_gets_time_until_the_cap() -> None:
    """The rank waits for tar, which packs a checkpoint; one that waits for a command that only sleeps is hung."""
    looks = [look(n, "subprocess_wait", "run") for n in range(3)]
    assert judge(looks, 300)[0] is True
    tar = ChildState(0, 7, "busy_python", "", "")
    report = StacksReport(True, (1,), "", {1: RankState(1, "subprocess_wait", "", "", children=(tar,))})
    assert judge([*looks, Look(20, 30, report, False)], 300)[0] is None
    assert judge([*looks, Look(20, 301, report, False)], 300)[0] is True


def test_when_all_wait_for_each_other_it_is_a_hang() -> None:
    """A deadlock by order has no culprit in the stacks."""
    report = StacksReport(hung=True, culprits=(), sentence="")
    looks = [Look(0, 10, report, False), Look(5, 15, report, False)]
    assert judge(looks, 300)[0] is True


def test_calls_of_a_long_step_buy_time_until_the_cap() -> None:
    """An evaluation between two steps: no step is done, but its collectives complete."""
    looks = [look(n, "sleep", "load") for n in range(3)]
    assert judge([*looks[:2], replace(looks[2], calling=True)], 300)[0] is None
    assert judge([*looks[:2], replace(looks[2], calling=True, quiet_s=301)], 300)[0] is True


def test_a_pause_of_all_ranks_is_a_hang_after_a_minute_and_work_of_all_at_the_cap() -> None:
    """Everybody loads data or evaluates: nobody waits for anybody. Once one waits for another it is a hang."""

    def looks(*causes: str, quiet_s: float = 15) -> list[Look]:
        ranks = {rank: RankState(rank, cause, "train.py:10 in f", "") for rank, cause in enumerate(causes)}
        guilty = tuple(rank for rank, cause in enumerate(causes) if cause in ("sleep", "busy_python"))
        report = StacksReport(hung=True, culprits=guilty, sentence="", ranks=ranks)
        return [Look(0, 10, report, False), Look(5, quiet_s, report, False)]

    assert judge(looks("sleep", "sleep", "sleep"), 300)[0] is None
    assert judge(looks("sleep", "sleep", "sleep", quiet_s=59), 300)[0] is None
    assert judge(looks("sleep", "sleep", "sleep", quiet_s=61), 300)[0] is True
    assert judge(looks("busy_python", "sleep", "busy_python", quiet_s=299), 300)[0] is None
    assert judge(looks("busy_python", "sleep", "busy_python", quiet_s=300), 300)[0] is True
    assert judge(looks("collective_wait", "sleep", "sleep"), 300)[0] is True


def test_ranks_whose_calls_block_each_other_do_not_pause() -> None:
    """Two threads and one lock: each rank holds it in a call of another group, and its main thread waits for the lock."""
    ranks = {rank: RankState(rank, "lock_deadlock", "train.py:17 in main", "") for rank in range(2)}
    report = StacksReport(hung=True, culprits=(0, 1), sentence="", ranks=ranks)
    looks = [Look(at, 10 + at, report, False, blamed=(0, 1)) for at in (0, 5)]
    assert judge(looks, 300)[0] is None
    assert judge([replace(look, crossed=True) for look in looks], 300)[0] is True


def test_ranks_that_wait_in_a_cuda_call_are_not_busy_on_their_own_when_the_boxes_name_another() -> None:
    """NCCL: the others block wherever they need the GPU next, here in a copy for a checkpoint and in the optimizer."""
    causes = {0: "checkpoint_io", 1: "sleep", 2: "native_call"}
    ranks = {rank: RankState(rank, cause, "train.py:61 in train", "") for rank, cause in causes.items()}
    report = StacksReport(hung=True, culprits=(0, 1, 2), sentence="", ranks=ranks)
    looks = [Look(0, 10, report, False), Look(5, 15, report, False)]
    assert judge(looks, 300)[0] is None
    hung, reason = judge([replace(look, blamed=(1,)) for look in looks], 300)
    assert hung is True and "rank 1 (sleep" in reason and "rank 0" not in reason
