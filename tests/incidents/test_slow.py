"""A rank that became slow: what the policy does, and how its evidence reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.blackbox.phases import GC, PhaseMark
from allranks.incidents.policy import HangFacts, Mode, PolicyOptions, PolicyState, decide_slow
from allranks.incidents.slow import describe_pauses, describe_places, write_stacks
from allranks.model.stacks import StackFrame
from allranks.stacktraces.gpus import describe_clocks


def facts(mode: Mode = "replica", members: tuple[int, ...] = (0, 1, 2)) -> HangFacts:
    return HangFacts(mode, "slow", (5,), 1.0, ranks_per_replica=2, replicas=3, members=members)


@pytest.mark.parametrize(
    "mode, on_slow, may_leave, kind",
    [
        ("replica", "report", False, "none"),
        ("replica", "profile", False, "none"),
        ("replica", "swap", False, "evict"),
        ("replica", "evict", False, "set_aside"),
        ("whole_job", "report", True, "none"),
        ("whole_job", "swap", True, "leave_node"),
        ("whole_job", "evict", True, "leave_node"),
        ("whole_job", "evict", False, "none"),
    ],
)
def test_the_policy_decides(mode: Mode, on_slow: str, may_leave: bool, kind: str) -> None:
    options = PolicyOptions(enabled=True, on_slow=on_slow)  # type: ignore[arg-type]
    action = decide_slow(100.0, facts(mode), PolicyState(), options, may_leave)
    assert (action.kind, action.ranks, action.replica) == (kind, (5,), 2)
    assert action.reason


def test_without_recovery_it_only_says_what_it_would_do() -> None:
    action = decide_slow(100.0, facts("whole_job"), PolicyState(), PolicyOptions(on_slow="evict"), True)
    assert action.kind == "dry_run" and "would evict" in action.reason


def test_a_replica_is_answered_once_and_the_last_one_never() -> None:
    options = PolicyOptions(enabled=True, on_slow="swap")
    before = PolicyState().after(0.0, 2, options.window_s)
    again = decide_slow(100.0, facts(), before, options, False)
    assert again.kind == "none" and "slow again" in again.reason
    alone = decide_slow(0.0, facts(members=(2,)), PolicyState(), PolicyOptions(on_slow="evict"), False)
    assert alone.kind == "none"


def test_clocks_are_described() -> None:
    assert describe_clocks(["3", "1200", "1980", "84", "0x0000000000000040"]) == (
        "GPU 3: 1200 of 1980 MHz, 84 °C, slowed down by heat"
    )
    assert (
        describe_clocks(["0", "1980", "1980", "41", "0x0000000000000000"]) == "GPU 0: 1980 of 1980 MHz, 41 °C"
    )


def test_pauses_and_places_are_described(tmp_path: Path) -> None:
    marks = [
        PhaseMark(GC, 10**9, 15 * 10**8),
        PhaseMark("save", 10**9, 2 * 10**9),
        PhaseMark(GC, 2 * 10**9, 3 * 10**9),
    ]
    assert describe_pauses(marks, 100.0) == ["garbage collection: 2 long pauses, 1.5 s"]
    assert describe_pauses(marks, 1000.0) == []
    load = (StackFrame("load", "data.py", 31), StackFrame("main", "train.py", 7))
    other = (StackFrame("main", "train.py", 8),)
    assert describe_places([load, load, other])[0] == "in 2 of 3 samples at data.py:31 in load"
    write_stacks(tmp_path / "s.txt", [load, load, other])
    assert (tmp_path / "s.txt").read_text().splitlines()[0] == "train.py:7 in main;data.py:31 in load 2"
