"""When silence becomes suspicion: pure decisions over samples and a hand-set clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.boxes import write_box

from allranks.watch.samples import OpenCall, RankSample, Rhythm, read_samples
from allranks.watch.silence import (
    MANAGER_TIMEOUT_S,
    NoticeOptions,
    NoticeState,
    left_behind,
    limit_s,
    not_retrying,
    notice,
    observe,
)

OPTIONS = NoticeOptions(floor_s=10, cap_s=300, factor=4, warm_up_s=60, warm_up_marks=5)


REPLICAS = replace(OPTIONS, retry_s=MANAGER_TIMEOUT_S)


def sample(rank: int, step: int, **facts: object) -> RankSample:
    """A rank that has done `step` steps and twice as many calls."""
    base = {
        "rank": rank, "pid": 100 + rank, "path": "", "alive": True, "step": step, "calls_started": 2 * step,
        "calls_completed": 2 * step, "last_ns": 0, "start_ns": 1,
    }  # fmt: skip
    return RankSample(**{**base, **facts})  # type: ignore[arg-type]


def trained(
    step_s: float, steps: int = 30, ranks: int = 3, options: NoticeOptions = OPTIONS
) -> tuple[float, NoticeState]:
    """The clock and the state after a job has stepped evenly."""
    now, state = 0.0, NoticeState()
    for step in range(steps):
        state = observe(now, state, [sample(r, step) for r in range(ranks)], options)
        now += step_s
    return now - step_s, state


def look(now: float, state: NoticeState, samples: list[RankSample]) -> tuple[bool, str]:
    """Observes and asks, as the agent does."""
    state = observe(now, state, samples, OPTIONS)
    suspicion, reason = notice(now, 10**18, state, samples, OPTIONS)
    return suspicion is not None, reason


def test_a_standstill_beyond_the_floor_is_suspected() -> None:
    """Fast steps, then nothing for longer than the floor."""
    now, state = trained(step_s=0.1)
    stuck = [sample(r, 29) for r in range(3)]
    assert look(now + 9.9, state, stuck)[0] is False
    suspected, reason = look(now + 10.1, state, stuck)
    assert suspected
    assert "10.1 s" in reason


def test_slow_steps_raise_the_limit() -> None:
    """A job whose steps take 20 s may be silent for four of them."""
    now, state = trained(step_s=20)
    assert limit_s(state, OPTIONS) == 80
    stuck = [sample(r, 29) for r in range(3)]
    assert look(now + 79, state, stuck)[0] is False
    assert look(now + 81, state, stuck)[0] is True


def test_one_moving_rank_means_the_job_is_not_at_a_standstill() -> None:
    """A straggler that still completes calls keeps the whole job above suspicion."""
    now, state = trained(step_s=0.1)
    samples = [sample(0, 29), sample(1, 29), sample(2, 30)]
    assert look(now + 15, state, samples)[0] is False


def test_first_steps_get_the_warm_up_limit() -> None:
    """Compilation before the first steps is not a hang."""
    state = observe(0.0, NoticeState(), [sample(0, 0)], OPTIONS)
    assert limit_s(state, OPTIONS) == 60
    assert look(59, state, [sample(0, 0)])[0] is False
    assert look(61, state, [sample(0, 0)])[0] is True


def test_a_silence_after_calls_that_differed_is_looked_at_early() -> None:
    """Also in the first steps; new processes begin anew."""
    state = replace(observe(0.0, NoticeState(), [sample(0, 0)], OPTIONS), diverged=True)
    assert limit_s(state, OPTIONS) == 10
    assert limit_s(observe(1.0, state, [sample(0, 0)], OPTIONS), OPTIONS) == 10
    assert limit_s(observe(1.0, state, [sample(0, 0, start_ns=2)], OPTIONS), OPTIONS) == 60


def test_an_announced_phase_is_silence_by_consent() -> None:
    """`allranks.expect` on any rank stops suspicion until its time is over."""
    now, state = trained(step_s=0.1)
    announced = [sample(r, 29, expect_until_ns=2 * 10**18 if r == 0 else 0) for r in range(3)]
    assert look(now + 500, state, announced) == (False, "rank 0 has announced a long phase")
    expired = [sample(r, 29, expect_until_ns=10**18 - 1) for r in range(3)]
    assert look(now + 500, state, expired)[0] is True


def test_ranks_that_shut_down_are_left_out_and_named() -> None:
    """Survivors waiting for a rank that finished its program are a standstill."""
    now, state = trained(step_s=0.1)
    samples = [sample(0, 29), sample(1, 29, closed="exit", alive=False), sample(2, 29, alive=False)]
    state = observe(now + 11, state, samples, OPTIONS)
    suspicion, _ = notice(now + 11, 10**18, state, samples, OPTIONS)
    assert suspicion is not None
    assert (suspicion.quiet, suspicion.left, suspicion.gone) == ((0,), (1,), (2,))


def test_a_job_that_has_ended_is_never_suspected() -> None:
    """All ranks shut down."""
    now, state = trained(step_s=0.1)
    assert look(now + 999, state, [sample(r, 29, closed="exit", alive=False) for r in range(3)])[0] is False


def test_the_second_look_comes_soon_and_later_ones_half_a_limit_apart_until_progress_returns() -> None:
    """After a look that did not settle it the same silence is not examined again at once; progress resets it."""
    now, state = trained(step_s=0.1)
    stuck = [sample(r, 29) for r in range(3)]
    state = replace(observe(now + 11, state, stuck, OPTIONS), extended=1)
    assert [limit_s(replace(state, extended=times), OPTIONS) for times in range(5)] == [10, 12.5, 15, 20, 25]
    assert look(now + 12, state, stuck)[0] is False
    assert look(now + 13, state, stuck)[0] is True
    state = observe(now + 25, state, [sample(r, 30) for r in range(3)], OPTIONS)
    assert state.extended == 0


def test_a_restarted_rank_starts_a_new_history() -> None:
    """A new pid under the same rank is a new life; the others' history still counts, alone it has none."""
    now, state = trained(step_s=0.1)
    samples = [sample(0, 29), sample(1, 29), sample(2, 0, pid=999)]
    assert limit_s(observe(now, state, samples, OPTIONS), OPTIONS) == 10
    reborn = [sample(r, 0, pid=900 + r) for r in range(3)]
    assert limit_s(observe(now, state, reborn, OPTIONS), OPTIONS) == 60


def behind(now: float, state: NoticeState, samples: list[RankSample]) -> tuple[tuple[int, ...], str]:
    """Who is left behind, and the reason."""
    suspicion, reason = left_behind(now, 10**18, observe(now, state, samples, OPTIONS), samples, OPTIONS)
    return (suspicion.quiet if suspicion is not None else ()), reason


def test_a_frozen_rank_that_the_others_go_on_without_is_left_behind() -> None:
    """The lighthouse gave it up after a missed heartbeat; nobody waits for it, so there is no standstill."""
    now, state = trained(step_s=0.1)
    for extra in range(1, 12):  # ranks 0 and 2 go on
        samples = [sample(0, 29 + extra), sample(1, 29), sample(2, 29 + extra)]
        state = observe(now + extra, state, samples, OPTIONS)
    assert behind(now + 9, state, samples)[0] == ()
    assert look(now + 12, state, samples)[0] is False
    found, reason = behind(now + 12, state, samples)
    assert found == (1,)
    assert "is at step 29" in reason and "at step 40" in reason


def test_a_replica_on_its_way_in_is_not_left_behind() -> None:
    """It starts, imports and heals: without a history of its own only the cap ends its time."""
    now, state = trained(step_s=0.1)
    samples = [sample(0, 500), sample(1, 0, pid=999), sample(2, 500)]
    state = observe(now, state, samples, OPTIONS)
    later = [sample(0, 900), sample(1, 0, pid=999), sample(2, 900)]
    assert behind(now + 200, state, later)[0] == ()
    assert behind(now + 301, state, later)[0] == (1,)


def test_a_rank_that_froze_in_its_first_step_is_left_behind_when_the_others_waited_for_it_in_vain() -> None:
    """It has hardly trained, as one that starts; but the job stalled with it, and the others gave it up."""
    now, state = trained(0.1, steps=2)
    state = observe(now + 20, state, [sample(0, 40), sample(1, 1), sample(2, 40)], OPTIONS)
    samples = [sample(0, 90), sample(1, 1), sample(2, 90)]
    state = observe(now + 64, state, samples, OPTIONS)
    stalled = {samples[1].process}
    assert left_behind(now + 65, 10**18, state, samples, OPTIONS)[0] is None
    assert left_behind(now + 65, 10**18, state, samples, OPTIONS, stalled)[0] is not None


def test_a_replica_that_is_stopped_before_its_first_step_is_left_behind_at_the_notice_limit() -> None:
    """It is not on its way in: a stopped process does nothing. The five minutes are for one that loads its state."""
    state = observe(0.0, NoticeState(), [sample(0, 0), sample(1, -1), sample(2, 0)], REPLICAS)
    samples = [sample(0, 90), sample(1, -1), sample(2, 90)]
    for now, found in ((9.0, False), (11.0, True)):
        late, _ = left_behind(
            now, 10**18, observe(now, state, samples, REPLICAS), samples, REPLICAS, (), lambda pid: True
        )
        assert (late is not None and late.quiet == (1,)) == found
    assert left_behind(11.0, 10**18, observe(11.0, state, samples, REPLICAS), samples, REPLICAS)[0] is None


def test_a_rank_that_has_done_its_last_step_is_not_left_behind() -> None:
    """It saves its model for minutes while the other ends the same step; one that announced it may also wait."""
    now, state = trained(step_s=0.1)
    assert behind(now + 100, state, [sample(0, 29), sample(1, 30), sample(2, 30)])[0] == ()
    announced = sample(0, 29, expect_until_ns=2 * 10**18)
    assert behind(now + 100, state, [announced, sample(1, 90), sample(2, 90)])[0] == ()


def test_a_silence_that_an_action_ended_does_not_make_the_job_look_slow() -> None:
    """The survivors waited 12 s for the culprit; the next hang is noticed as soon as the first."""
    now, state = trained(step_s=0.1)
    state = replace(state, acted_s=now + 12)
    state = observe(now + 12.1, state, [sample(r, 30) for r in range(3)], OPTIONS)
    assert limit_s(state, OPTIONS) == 10
    state = observe(now + 22.1, state, [sample(r, 31) for r in range(3)], OPTIONS)
    assert round(limit_s(state, OPTIONS)) == 20  # this one it recovered from by itself


def test_a_frozen_rank_is_judged_by_its_own_history() -> None:
    """The others stood still for 10 s until the lighthouse gave it up: that does not buy it time."""
    now, state = trained(step_s=0.1)
    state = observe(now + 10, state, [sample(0, 30), sample(1, 29), sample(2, 30)], OPTIONS)
    samples = [sample(0, 60), sample(1, 29), sample(2, 60)]
    assert round(limit_s(state, OPTIONS)) == 20
    assert behind(now + 11, state, samples)[0] == (1,)


def test_a_replica_that_starts_while_the_others_have_finished_gets_the_warm_up() -> None:
    """The quick steps of those who shut down are no measure for the imports of the one that comes back."""
    now, state = trained(step_s=0.1)
    samples = [sample(0, 29, closed="exit"), sample(1, 0, pid=999), sample(2, 29, closed="exit")]
    state = observe(now, state, samples, OPTIONS)
    assert look(now + 59, state, samples)[0] is False
    assert look(now + 61, state, samples)[0] is True


def silent_until_noticed(options: NoticeOptions, now: float, state: NoticeState, step: int) -> float:
    """Rank 1 hangs in `step`. The others give up after the managers' timeout, regroup and try the step again, for ever:
    calls and groups come and go. Seconds until it is noticed."""
    for half in range(2 * 300):
        attempt = int(half / 2 / MANAGER_TIMEOUT_S)
        calls = 2 * step + 5 * attempt
        again = {"calls_started": calls + 1, "calls_completed": calls, "step_ns": attempt + 1}
        samples = [sample(0, step, **again), sample(1, step, calls_started=calls), sample(2, step, **again)]
        state = observe(now + half / 2, state, samples, options)
        if notice(now + half / 2, 10**18, state, samples, options)[0] is not None:
            return half / 2
    raise AssertionError("never noticed")


@pytest.mark.parametrize("steps", [1, 2, 5, 19, 60])
def test_a_hang_is_noticed_before_the_managers_give_the_collective_up(steps: int) -> None:
    """At default flags in any step, the first one too."""
    options = NoticeOptions(retry_s=MANAGER_TIMEOUT_S)
    now, state = trained(0.15, steps, options=options)
    assert silent_until_noticed(options, now, state, steps - 1) < 0.8 * MANAGER_TIMEOUT_S


def test_a_hang_after_a_long_pause_is_noticed_before_the_managers_give_the_collective_up() -> None:
    """Four times the pause would be longer than their timeout."""
    now, state = trained(0.15, 40, options=REPLICAS)
    now += 20
    state = observe(now, state, [sample(r, 40) for r in range(3)], REPLICAS)
    assert 20 < silent_until_noticed(REPLICAS, now, state, 40) < 0.8 * MANAGER_TIMEOUT_S


def test_a_regroup_without_a_committed_step_is_no_progress() -> None:
    """A limit longer than the timeout (asked for, or the script has a shorter timeout) is reached all the same."""
    options = replace(REPLICAS, floor_s=100)
    now, state = trained(0.15, options=options)
    assert 100 <= silent_until_noticed(options, now, state, 29) <= 101


def test_both_looks_at_a_hang_come_before_the_managers_give_up() -> None:
    """The second one waits half a limit more, but not until what it should see is gone."""
    state = observe(0.0, NoticeState(), [sample(0, 0)], REPLICAS)
    first, second, third = (limit_s(replace(state, extended=times), REPLICAS) for times in range(3))
    assert first < second < MANAGER_TIMEOUT_S < third


def test_slow_steps_are_no_suspicion_in_replica_mode() -> None:
    """Steps of 50 s are this job's rhythm: the others begin to wait for a hung rank only after 50 s."""
    _, state = trained(50, options=REPLICAS)
    assert 50 < limit_s(state, REPLICAS) < 50 + MANAGER_TIMEOUT_S


@pytest.mark.parametrize("steps", [1, 2, 3, 30])
def test_the_silence_that_was_asked_for_is_obeyed_from_the_first_step(steps: int) -> None:
    """--notice-s: also in the first step, and whatever history says."""
    options = replace(REPLICAS, floor_s=5, asked=True)
    now, state = trained(0.15, steps, options=options)
    assert silent_until_noticed(options, now, state, steps - 1) == 5


def test_the_silence_that_was_asked_for_is_obeyed_after_a_long_pause() -> None:
    """One pause is not a habit; steps that always take longer are."""
    options = replace(OPTIONS, floor_s=5, asked=True)
    now, state = trained(0.15, 40, options=options)
    state = observe(now + 20, state, [sample(r, 40) for r in range(3)], options)
    assert limit_s(state, options) == 5
    assert limit_s(trained(20, options=options)[1], options) == 80


@pytest.mark.parametrize("asked", [False, True])
def test_a_pause_that_is_the_only_silence_of_a_young_job_is_not_its_usual_length(asked: bool) -> None:
    """Steps are fast and looks are rare: all that is known of the job is one pause."""
    options = replace(REPLICAS, floor_s=5, asked=asked, warm_up_marks=20)
    state = observe(0.0, NoticeState(), [sample(r, 0) for r in range(3)], options)
    state = observe(1.0, state, [sample(r, 25) for r in range(3)], options)
    state = observe(21.0, state, [sample(r, 30) for r in range(3)], options)
    assert limit_s(state, options) == (5 if asked else pytest.approx(0.7 * MANAGER_TIMEOUT_S, abs=3))


def test_a_process_that_waits_for_its_first_call_gets_the_warm_up_whatever_was_asked_for() -> None:
    """It imports."""
    options = replace(OPTIONS, floor_s=5, asked=True)
    state = observe(0.0, NoticeState(), [sample(0, -1, calls_started=0, calls_completed=0)], options)
    assert limit_s(state, options) == 60


@pytest.mark.parametrize(
    ("calls", "limit"), [([1, 1, 1], 60), ([1, 1, 0], 5), ([1, 0, 0], 5)], ids=["all", "two", "one"]
)
def test_the_first_call_may_take_long_when_all_are_in_it_and_not_when_one_never_came(
    calls: list[int], limit: float
) -> None:
    """NCCL connects all ranks there: seconds for a few of them, a minute for thousands. Also after a restart."""
    options = replace(OPTIONS, floor_s=5, asked=True)
    ranks = [sample(r, -1, calls_started=n, calls_completed=0) for r, n in enumerate(calls)]
    assert limit_s(observe(0.0, NoticeState(), ranks, options), options) == limit


@pytest.mark.parametrize(
    ("backend", "first", "limit"),
    [("nccl", "", 60), ("gloo", "", 5), ("nccl", "recv", 5), ("gloo", "recv", 5)],
)
def test_only_nccl_connects_in_the_first_call_and_only_when_all_members_have_come_to_it(
    backend: str, first: str, limit: float
) -> None:
    """gloo has connected when the group was made. A rank whose first call is a receive is not in the others' all_reduce."""
    options = replace(OPTIONS, floor_s=5, asked=True)
    ranks = [sample(r, -1, calls_started=1, calls_completed=0) for r in range(3)]
    state = observe(0.0, NoticeState(), ranks, options)
    reducing = frozenset({OpenCall(("world", (0, 1, 2)), 1, "all_reduce")})
    rhythms = [Rhythm(waits=reducing, rank=r, connects=backend == "nccl") for r in range(3)]
    if first:
        rhythms[1] = Rhythm(rank=1, connects=backend == "nccl")
    assert limit_s(state, options, rhythms) == limit


def test_the_managers_timeout_is_the_one_that_managers_have() -> None:
    """Two parts that do not import each other agree."""
    from allranks.manager.options import ManagerOptions

    assert ManagerOptions.timeout_s == MANAGER_TIMEOUT_S


def test_after_a_regroup_who_has_not_begun_another_attempt_is_suspected() -> None:
    """Ranks 0 and 2 have marked the same step again; rank 1 has not moved since before."""
    now, state = trained(0.15, options=REPLICAS)
    before = [sample(r, 29) for r in range(3)]
    assert not_retrying(observe(now + 9, state, before, REPLICAS), before) == ()
    after = [sample(0, 29, step_ns=7), sample(1, 29), sample(2, 29, step_ns=7)]
    assert not_retrying(observe(now + 70, state, after, REPLICAS), after) == (1,)


def test_a_rank_that_froze_in_its_first_steps_is_left_behind_soon() -> None:
    """It has trained: it is not on its way in, and does not get the five minutes of one that is."""
    now, state = trained(0.15, 4, options=REPLICAS)
    samples = [sample(0, 90), sample(1, 3), sample(2, 90)]
    state = observe(now + 61, state, samples, REPLICAS)
    found, _ = left_behind(now + 61, 10**18, state, samples, REPLICAS)
    assert found is not None and found.quiet == (1,)


def unmarked(rank: int, calls: int, **facts: object) -> RankSample:
    """A rank of a program that never marks a step."""
    return sample(rank, -1, **{"calls_started": calls, "calls_completed": calls, **facts})


def look_at_unmarked(quiet_s: float, calls: int, rhythm: Rhythm) -> bool:
    """Whether a job that is silent after so many calls is suspected."""
    state = observe(0.0, NoticeState(), [unmarked(r, 0) for r in range(2)], OPTIONS)
    samples = [unmarked(r, calls) for r in range(2)]
    state = observe(1.0, state, samples, OPTIONS)
    return notice(1.0 + quiet_s, 10**18, state, samples, OPTIONS, lambda path: rhythm)[0] is not None


@pytest.mark.parametrize("calls", [3, 60])
def test_a_program_without_marks_is_suspected_soon_where_it_has_passed_before(calls: int) -> None:
    """Earlier calls at this place were followed by the next one at once: no warm-up is needed."""
    assert not look_at_unmarked(9.9, calls, Rhythm((0.1, 0.1)))
    assert look_at_unmarked(10.1, calls, Rhythm((0.1, 0.1)))


@pytest.mark.parametrize("calls", [3, 60])
def test_a_place_that_is_new_to_a_program_without_marks_gets_the_warm_up(calls: int) -> None:
    """The first step compiles, the first evaluation builds its data: however many calls came before."""
    assert not look_at_unmarked(59, calls, Rhythm((0.1,)))
    assert look_at_unmarked(61, calls, Rhythm((0.1,)))


def test_a_replica_that_starts_again_and_again_does_not_hide_that_nobody_moves() -> None:
    """Each new process begins its own history; the others wait since before."""
    now, state = trained(step_s=0.1)
    for life in range(12):
        at = now + 1 + 6 * life
        samples = [sample(0, 29), sample(1, 29), sample(2, -1, pid=900 + life)]
        state = observe(at, state, samples, OPTIONS)
        if notice(at, 10**18, state, samples, OPTIONS)[0] is not None:
            break
    assert 60 <= at - now < 70


def test_a_rank_that_waits_where_it_was_before_is_enough_when_the_other_is_somewhere_new() -> None:
    """Rank 1 never came back from its first log message; rank 0 waits in the next step."""
    samples = [unmarked(0, 20, path="waits"), unmarked(1, 20, path="new")]
    state = observe(1.0, NoticeState(), samples, OPTIONS)
    rhythms = {"waits": Rhythm((0.1, 0.1)), "new": Rhythm()}
    assert notice(12.0, 10**18, state, samples, OPTIONS, rhythms.__getitem__)[0] is not None


def test_a_living_process_is_the_newest_of_its_rank_whatever_the_clock_said(tmp_path: Path) -> None:
    """A rank that started while the clock was an hour ahead, and died, hides nobody who came after it."""
    ahead, after = tmp_path / "a", tmp_path / "b"
    ahead.mkdir()
    after.mkdir()
    write_box(ahead, rank=0, step=5, pid=2**22 - 1, start_ns=10**18 + 3600 * 10**9).rename(
        tmp_path / "0-a.box"
    )
    write_box(after, rank=0, step=6, start_ns=10**18).rename(tmp_path / "0-b.box")
    (sample,) = read_samples(tmp_path)
    assert sample.alive and sample.step == 6


def test_a_replica_that_hangs_while_it_starts_is_noticed_before_the_others_give_it_up() -> None:
    """Replica 2 was restarted and heals for ever: the managers wait 60 s for it, and hide what they waited for then."""
    now, state = trained(step_s=0.1, options=REPLICAS)
    waiting = [sample(0, 29), sample(1, 29), sample(2, -1, pid=900, start_ns=7)]
    state = observe(now + 1, state, waiting, REPLICAS)
    assert notice(now + 40, 10**18, state, waiting, REPLICAS)[0] is None
    assert notice(now + 43, 10**18, state, waiting, REPLICAS)[0] is not None


def test_ranks_in_different_calls_get_no_more_time_than_the_floor() -> None:
    """They will never meet: neither a first step nor long steps are a reason to wait."""
    group = ("world", (0, 1))
    crossed = [Rhythm(waits=frozenset({OpenCall(group, 3, op)})) for op in ("barrier", "all_reduce")]
    slow = trained(step_s=20.0)[1]
    assert limit_s(slow, OPTIONS) == 80.0
    for state in (NoticeState(), slow):
        assert limit_s(state, OPTIONS, crossed) == OPTIONS.floor_s
        assert limit_s(state, OPTIONS, crossed[:1] * 2) > OPTIONS.floor_s


def test_a_program_that_only_starts_others_is_never_suspected() -> None:
    """A driver that waits for its children makes neither a group nor a call nor a step, however long it takes."""
    driver = sample(0, -1, calls_started=0, calls_completed=0)
    state = observe(0.0, NoticeState(), [driver], OPTIONS)
    suspected, reason = look(10_000.0, state, [driver])
    assert not suspected and "only starts other processes" in reason
    joining = replace(driver, joined=True)  # waits for a rank that does not come
    assert look(10_000.0, state, [joining])[0]
    assert look(10_000.0, observe(0.0, state, [driver, sample(1, 3)], OPTIONS), [driver, sample(1, 3)])[0]
