"""What is done about an incident: pure decisions."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.blackbox.phases import PhaseMark
from allranks.incidents.hangs import has_left_training
from allranks.incidents.policy import (
    HangFacts,
    PolicyOptions,
    PolicyState,
    decide_action,
    decide_leaving,
    weigh,
)
from allranks.model.diagnosis import CALIBRATION, share_right
from allranks.watch.samples import RankSample

REPLICA = HangFacts(
    "replica", "stuck_before_collective", (5,), 0.95, ranks_per_replica=2, replicas=4, members=(0, 1, 2, 3)
)
WHOLE = HangFacts("whole_job", "missing_rank", (5,), 0.95)


def kind(case: HangFacts, state: PolicyState | None = None, options: PolicyOptions | None = None) -> str:
    """Only the kind of the action."""
    return decide_action(1000.0, case, state or PolicyState(), options or PolicyOptions()).kind


def test_replica_mode_evicts_the_guilty_replica() -> None:
    """Rank 5 of replicas of two belongs to replica 2."""
    action = decide_action(1000.0, REPLICA, PolicyState(), PolicyOptions())
    reason = action.reason
    assert (action.kind, action.replica, action.ranks) == ("evict", 2, (5,))
    assert "rank 5, stuck before collective, 95% sure" in reason


def test_whole_job_mode_is_a_dry_run_unless_enabled() -> None:
    """A restart of the whole job is the user's decision."""
    assert kind(WHOLE) == "dry_run"
    assert kind(WHOLE, options=PolicyOptions(enabled=True)) == "restart_job"


def test_nobody_is_evicted_for_the_network() -> None:
    """All entered, none finished: no rank is blamed."""
    assert kind(replace(REPLICA, cause="none_finished", ranks=())) == "collect"
    assert kind(replace(REPLICA, cause="none_finished")) == "collect"


def test_a_doubtful_verdict_evicts_nobody() -> None:
    """Below the least confidence only evidence is kept."""
    assert kind(replace(REPLICA, confidence=0.5)) == "collect"


def test_a_replica_that_has_trained_is_ended_only_if_it_surely_hangs() -> None:
    """It may upload its last checkpoint for minutes; a thread that waits for nobody keeps it for ever."""
    left = replace(REPLICA, cause="shutdown_join", leaving=True, certain=False, stalled_s=500.0)
    assert kind(replace(left, leaving=False)) == "evict"
    action = decide_action(1000.0, left, PolicyState(), PolicyOptions())
    assert action.kind == "collect" and "finished training and may still save" in action.reason
    assert kind(replace(left, certain=True)) == "evict"
    assert (
        kind(replace(left, certain=True, mode="whole_job"), options=PolicyOptions(enabled=True))
        == "restart_job"
    )


def test_a_rank_has_left_its_training_while_it_leaves() -> None:
    def sample(rank: int, *phases: PhaseMark) -> RankSample:
        return RankSample(rank, 7 + rank, "", True, 40, 9, 9, 1, 1, phases=phases)

    left, back = sample(1, PhaseMark("leaving", 5, 0)), sample(2, PhaseMark("leaving", 5, 6))
    assert has_left_training([left]) and not has_left_training([left, back]) and not has_left_training([])


def test_most_replicas_at_once_are_not_evicted() -> None:
    """If three of four are named, the verdict or the program is wrong."""
    assert kind(replace(REPLICA, ranks=(0, 2, 4))) == "collect"


def test_the_budget_and_the_back_off_hold() -> None:
    """No restart storms."""
    options = PolicyOptions(max_actions=2, window_s=100, back_off_s=10)
    assert kind(REPLICA, PolicyState((995.0,)), options) == "collect"
    assert kind(REPLICA, PolicyState((950.0,)), options) == "evict"
    assert kind(REPLICA, PolicyState((920.0, 950.0)), options) == "collect"
    assert kind(REPLICA, PolicyState((800.0, 850.0)), options) == "evict"


def test_actions_are_remembered_within_the_window() -> None:
    """Old actions are forgotten, repeated offenders counted."""
    state = PolicyState().after(0.0, 2, 100).after(50.0, 2, 100).after(140.0, 3, 100)
    assert state.acted_s == (50.0, 140.0)
    assert state.against == {2: 2, 3: 1}


def test_a_node_that_fails_again_and_again_leaves() -> None:
    """Three failures within the window; a dry run without the permission of the user."""
    on = PolicyOptions(enabled=True)
    assert decide_leaving(100.0, [1.0, 50.0], on)[0] is None
    assert decide_leaving(100.0, [1.0, 50.0, 99.0], on)[0] == "leave_node"
    assert decide_leaving(4000.0, [1.0, 50.0, 3999.0], on)[0] is None
    kind, reason = decide_leaving(100.0, [1.0, 50.0, 99.0], PolicyOptions())
    assert kind == "dry_run" and "would leave the job" in reason


def test_a_hang_that_only_time_tells_waits_until_acting_is_cheaper() -> None:
    """A restart of half an hour is not spent on a silence of a minute and a half; a certain hang is acted on at once."""
    on = PolicyOptions(enabled=True)
    case = replace(WHOLE, certain=False, stalled_s=95.0, act_s=1800.0)
    early = decide_action(1000.0, case, PolicyState(), on)
    assert early.kind == "collect" and early.reason.startswith("not yet: waiting costs about ")
    assert "acting about 30 min" in early.reason
    assert kind(replace(case, stalled_s=300.0), options=on) == "restart_job"
    assert kind(replace(case, act_s=60.0), options=on) == "restart_job"
    certain = decide_action(1000.0, replace(case, certain=True, stalled_s=15.0), PolicyState(), on)
    assert certain.kind == "restart_job"
    assert "costs" not in certain.reason  # "about 36 s" for a sleep of 27 h: they are not why it acts


def test_a_longer_stall_and_a_surer_verdict_make_waiting_dearer() -> None:
    """A verdict of 95 % is right in 99 of 100 cases."""
    case = replace(WHOLE, stalled_s=15.0, act_s=100.0)
    assert weigh(case).wait_s == pytest.approx(15.0 + 100 * share_right(0.95))
    assert weigh(replace(case, confidence=0.5)).wait_s < weigh(case).wait_s
    doubtful = replace(case, certain=False)
    assert (
        weigh(doubtful).wait_s
        < weigh(replace(doubtful, stalled_s=60.0)).wait_s
        < 60.0 + 100 * share_right(0.95)
    )


def test_what_a_confidence_means_is_what_was_counted() -> None:
    """The table in the code is the one of the benchmark."""
    counted = json.loads((Path(__file__).parents[2] / "benchmarks/results/verdicts.json").read_text())[
        "ratios"
    ]
    bounds = sorted({1.0, *(least for least, _ in CALIBRATION)})
    for least, most in itertools.pairwise(bounds):
        assert share_right(least) == counted[f"right at {least:.0%} to {most:.0%}"]
    assert share_right(0.95) == share_right(1.0) >= 0.98
