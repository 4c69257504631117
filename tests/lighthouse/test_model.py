"""A job in simulated time, disturbed at random: what must hold holds, and each defect, put back, is found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from allranks.lighthouse import decide as deciding
from allranks.lighthouse import quorum_coordinator as coordinating
from allranks.lighthouse import service as serving
from allranks.lighthouse.options import Options
from allranks.lighthouse.reach import Reach
from allranks.lighthouse.state import QuorumState
from allranks.manager import plan as planning

from .simulated import CUT_S, Job, Process

MOST_PER_S = 20
SETTLE_S = 150.0  # longer than every back-off
STILL_S = 5.0
CALM_S = 45.0  # after which everything that happened is known
names = some.sampled_from("abcdef")
waits = some.sampled_from((0.05, 0.3, 1.0, 3.0, 8.0, 20.0, 40.0))
which = some.integers(0, 7)


class JobMachine(RuleBasedStateMachine):
    """Deaths, freezes, cuts, duplicates and liars. At the end everything is mended: all that live train together, and a
    process that was refused stays out."""

    job: Job
    changed_at = 0.0
    events = 0  # of all machines

    @initialize(presume_dead_s=some.sampled_from((8.0, 30.0)), first=some.sets(names, min_size=1, max_size=4))
    def begin(self, presume_dead_s: float, first: set[str]) -> None:
        self.job = Job(Options(presume_dead_s=presume_dead_s))
        for name in sorted(first):
            self.job.start(name)

    @property
    def alive(self) -> list[Process]:
        return [each for each in self.job.processes if each.alive]

    def wait(self, seconds: float) -> None:
        """After something has happened."""
        JobMachine.events += 1
        self.changed_at = self.job.now
        self.watch(seconds)

    def watch(self, seconds: float) -> None:
        end = self.job.now + seconds
        while self.job.now < end:
            self.job.run(min(1.0, end - self.job.now))
            assert not self.job.violations, self.job.violations[0]
            assert self.job.most_per_s <= MOST_PER_S, f"{self.job.most_per_s} quorums in one second"
        if self.job.now - self.changed_at >= CALM_S and self.nobody_is_odd():
            still = self.job.now - self.job.last_commit
            assert still <= STILL_S, (
                f"nobody trains for {still:.1f} s: {self.job.service.coordinator.waiting}"
            )

    def nobody_is_odd(self) -> bool:
        """Some run, and nobody is frozen, cut off from the lighthouse, a liar or asks without pause: then some must train,
        whatever is cut between them."""
        alive = self.alive
        odd = any(each.frozen or each.cut or each.liar or each.hasty for each in alive)
        return not odd and any(each.runs and not each.garbage for each in alive)

    # ---- processes come and go

    @rule(
        name=names,
        kind=some.sampled_from(("", "", "", "liar", "garbage", "hasty", "again", "again")),
        wait=waits,
    )
    def start(self, name: str, kind: str, wait: float) -> None:
        alive = self.alive
        taken = {each.name: each for each in alive}
        if kind == "again":
            name = name if name in taken else next(iter(taken), name)
        # one that lies from the start of the job on cannot be told from the holder of its state
        trains = any(each.phase == "training" and each.step and not each.liar and each.runs for each in alive)
        if len(alive) < 8 and (name in taken) == (kind == "again"):
            lies = kind == "liar" and trains
            self.job.start(name, liar=lies, garbage=kind == "garbage", hasty=kind == "hasty")
        self.wait(wait)

    @rule(index=which, kind=some.sampled_from(("kill", "freeze", "thaw", "lose", "regain")), wait=waits)
    def change(self, index: int, kind: str, wait: float) -> None:
        """Something happens to a process; "lose" and "regain" are about its connection to the lighthouse."""
        if alive := self.alive:
            process = alive[index % len(alive)]
            if kind == "kill":
                self.job.kill(process)
            elif kind in ("freeze", "thaw"):
                self.job.freeze(process, kind == "freeze")
            else:
                self.job.cut_lighthouse(process, kind == "lose")
        self.wait(wait)

    # ---- the network between them

    @rule(one=which, other=which, seconds=some.sampled_from((None, None, 0.5, 2.0, 4.0)), wait=waits)
    def cut(self, one: int, other: int, seconds: float | None, wait: float) -> None:
        """Two processes cannot talk any more, or for some seconds."""
        if alive := self.alive:
            pair = frozenset((alive[one % len(alive)].session, alive[other % len(alive)].session))
            if len(pair) == 2:
                self.job.cuts.add(pair)
                if seconds is not None:
                    self.job.run(seconds)
                    self.job.cuts.discard(pair)
        self.wait(wait)

    @rule()
    def leave_alone(self) -> None:
        self.watch(CALM_S)

    @rule(index=which, wait=waits)
    def mend(self, index: int, wait: float) -> None:
        if cuts := sorted(self.job.cuts, key=sorted):
            self.job.cuts.discard(cuts[index % len(cuts)])
        self.wait(wait)

    # ---- what must hold

    def teardown(self) -> None:
        job = self.job
        job.cuts.clear()
        for process in job.processes:
            job.freeze(process, False)
            job.cut_lighthouse(process, False)
            if process.hasty:
                job.kill(process)
        self.watch(SETTLE_S)
        honest = [each for each in job.processes if each.runs and not each.liar and not each.garbage]
        if not honest or any(each.runs and each.liar and each.phase == "training" for each in job.processes):
            return  # a liar that is older than all others cannot be told from the holder of the state
        phases = [(each.session, each.phase, each.quorum.number if each.quorum else 0) for each in honest]
        waiting = job.service.coordinator.waiting
        assert job.now - job.last_commit <= STILL_S, f"nobody trains, {phases}: {waiting}"
        assert all(each.phase == "training" for each in honest), f"some are left out, {phases}: {waiting}"


def run(examples: int, steps: int = 30, soak: int | None = None) -> None:
    """`soak`: the seed of other examples; without it always the same."""
    limits = settings(
        max_examples=examples,
        deadline=None,
        stateful_step_count=steps,
        derandomize=soak is None,
        database=None,
        phases=(Phase.generate,) if soak is None else (Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    machine = JobMachine if soak is None else seed(soak)(type("Seeded", (JobMachine,), {}))
    run_state_machine_as_test(machine, settings=limits)  # type: ignore[no-untyped-call]


def play_many(number: int) -> dict[str, object]:
    """About 1,200 events, from a seed."""
    before = JobMachine.events
    run(40, 50, soak=number)
    return {"events": JobMachine.events - before}


def test_whatever_happens_one_process_per_name_commits_and_the_largest_set_trains() -> None:
    """More than a hundred events; at the end all that live train together."""
    run(8, 20)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(90))
def test_the_model_finds_nothing_in_100_000_events(number: int) -> None:
    """The same, long."""
    play_many(number)


def _no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuorumState, "_wait_for_lease", lambda *_: None)
    monkeypatch.setattr(Options, "lease_s", 1e9)


def _second_process_takes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Service, "_refuse_second", lambda *_: None)
    monkeypatch.setattr(Options, "lease_s", 1e9)


def _nobody_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reach, "report", lambda *_: None)


def _lies_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reach, "discredit", lambda *_: None)
    monkeypatch.setattr(Reach, "report", lambda *_: None)


def _claims_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_fault", lambda text: "")


def _no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuorumState, "not_before", lambda *_: 0.0)


def _the_latest_group_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "by_age", lambda position: position)


def _lost_steps_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.TrainingView, "begin_at", lambda *_: None)


def _newcomers_are_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "find_unproved", lambda now, state: [])
    monkeypatch.setattr(coordinating, "find_unproved", lambda now, state: [])


def play_unreachable_newcomer() -> tuple[int, float]:
    """(new quorums, longest pause between steps) of two that train while one comes that they cannot reach."""
    job = Job()
    for name in "ab":
        job.start(name)
    job.run(10.0)
    before, longest = job.service.state.number, 0.0
    job.cuts = {frozenset(("a.0", "c.0")), frozenset(("b.0", "c.0"))}
    job.start("c")
    for _ in range(1000):
        job.run(0.1)
        longest = max(longest, job.now - job.last_commit)
    return job.service.state.number - before, longest


def test_members_do_not_stop_for_a_newcomer_that_they_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is late and no quorum is formed; without the proof there would be."""
    assert play_unreachable_newcomer() == (0, pytest.approx(0.1, abs=0.15))
    _newcomers_are_not_proved(monkeypatch)
    numbers, longest = play_unreachable_newcomer()
    assert numbers and longest > 1.0


def pair(one: str, other: str) -> frozenset[str]:
    return frozenset((f"{one}.0", f"{other}.0"))


def watch_pause(job: Job, seconds: float) -> float:
    """The longest time without a step."""
    longest = 0.0
    for _ in range(round(10 * seconds)):
        job.run(0.1)
        longest = max(longest, job.now - job.last_commit)
    return longest


def test_a_newcomer_is_proved_again_when_members_have_lost_each_other() -> None:
    """b was reached by all before the network changed; now c cannot reach it. A group with it would cost 2 s more."""
    job = Job()
    for name in "abcd":
        job.start(name)
    job.run(10.0)
    job.cuts = {pair("a", "b")}
    job.run(9.0)
    assert [each.name for each in job.processes if each.phase != "training"] == ["b"]
    job.cuts = {pair("b", "c"), pair("a", "d")}
    before = job.service.state.number
    assert watch_pause(job, 15.0) < CUT_S + 1.0 and job.service.state.number == before + 1


def test_newcomers_that_cannot_reach_each_other_do_not_come_together() -> None:
    """The members reach both. One joins, and the other when it can."""
    job = Job()
    for name in "abc":
        job.start(name)
    job.run(10.0)
    job.cuts = {pair("d", "e")}
    for name in "de":
        job.start(name)
    assert watch_pause(job, 30.0) < 1.0
    assert [each.name for each in job.processes if each.phase != "training"] in (["d"], ["e"])
    job.cuts.clear()
    assert watch_pause(job, 70.0) < 1.0 and all(each.phase == "training" for each in job.processes)


def play_partitions(seed: int) -> tuple[float, str]:
    """The longest pause in four cuts between 3 to 6 processes, some of them soon after another, and which cut it was."""
    choose, worst = random.Random(seed), (0.0, "")
    job, names = Job(), "abcdef"[: choose.randint(3, 6)]
    for name in names:
        job.start(name)
    job.run(8.0)
    for _ in range(4):
        if choose.random() < 0.5:
            side = set(choose.sample(names, choose.randint(1, len(names) - 1)))
            job.cuts = {pair(one, other) for one in side for other in set(names) - side}
        else:
            pairs = list(itertools.combinations(names, 2))
            job.cuts = {pair(*each) for each in choose.sample(pairs, choose.randint(1, 2))}
        worst = max(worst, (watch_pause(job, 10.0), str(sorted(map(sorted, job.cuts)))))
        job.cuts.clear()
        job.run(choose.choice((0.0, 0.2, 1.0, 3.0, 10.0)))
    assert not job.violations
    return worst


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 5000), marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_no_partition_stops_all_for_long(seeds: range) -> None:
    """In simulated time, so that none of the pauses is the machine's."""
    longest, cuts, seed = max((*play_partitions(seed), seed) for seed in seeds)
    assert longest < STILL_S, f"{longest:.1f} s, seed {seed}: {cuts}"


def play_hasty(seconds: float) -> int:
    """The most quorums in a second, of two that give up every group at once."""
    job = Job()
    for name in "ab":
        job.start(name, hasty=True)
    job.run(seconds)
    return job.most_per_s


def test_members_that_ask_again_and_again_have_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 20 quorums in a second cannot be; without the pace there would be hundreds."""
    assert 0 < play_hasty(20.0) <= MOST_PER_S
    _no_pace(monkeypatch)
    assert play_hasty(1.2) > 10 * MOST_PER_S


Rules = Sequence[tuple[object, ...]]  # (rule, arguments ...)
TWO_OF_ONE_NAME: Rules = (("change", 0, "lose", 20.0), ("start", "a", "again", 40.0))
#: The defect, and a course of events that shows it; it begins with one process that trains.
MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Rules]] = {
    "A1 lease": (_no_lease, TWO_OF_ONE_NAME),
    "A1 names": (_second_process_takes_the_name, TWO_OF_ONE_NAME),
    "A2 nobody left out": (
        _nobody_is_left_out,
        (("start", "b", "", 3.0), ("start", "c", "", 3.0), ("cut", 0, 1, None, 0.3), ("leave_alone",)),
    ),
    "A4 lies": (_lies_are_believed, (("start", "b", "", 3.0), ("start", "c", "liar", 40.0))),
    "A4 claims": (_claims_are_not_checked, (("start", "b", "garbage", 3.0),)),
    "A5 pace": (
        _no_pace,
        (("change", 0, "kill", 1.0), ("start", "b", "hasty", 0.05), ("start", "c", "hasty", 3.0)),
    ),
    "A9 nothing is said": (
        _lost_steps_are_not_said,
        (
            ("start", "b", "", 8.0),
            ("change", 0, "kill", 0.05),
            ("change", 0, "kill", 1.0),
            ("start", "c", "", 20.0),
        ),
    ),
    "A8 order": (
        _the_latest_group_wins,
        (("change", 0, "freeze", 40.0), ("start", "b", "", 3.0), ("change", 0, "thaw", 8.0)),
    ),
}


def play(rules: Rules) -> None:
    """These events, one after the other, and the end."""
    machine = JobMachine()
    machine.begin(8.0, {"a"})
    machine.wait(40.0)
    for name, *values in rules:
        getattr(machine, str(name))(*values)
    machine.teardown()


FOUND = (AssertionError, ValueError, TypeError, KeyError, AttributeError)  # a member may crash on a claim


@pytest.mark.parametrize("defect", MUTANTS)
def test_each_defect_put_back_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A course of events that the machine may take: everything holds, and does not with the defect."""
    mutate, rules = MUTANTS[defect]
    play(rules)
    mutate(monkeypatch)
    with pytest.raises(FOUND):
        play(rules)


@pytest.mark.soak
@pytest.mark.parametrize("defect", MUTANTS)
def test_the_machine_finds_each_defect_by_itself(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told where to look."""
    MUTANTS[defect][0](monkeypatch)
    with pytest.raises(FOUND):
        run(2000, soak=1)
