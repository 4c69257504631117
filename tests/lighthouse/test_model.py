"""A job in simulated time, disturbed at random: what must hold holds, and each defect, put back, is found."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from allranks.lighthouse import decide as deciding
from allranks.lighthouse import quorum_coordinator as coordinating
from allranks.lighthouse import service as serving
from allranks.lighthouse.options import Options
from allranks.lighthouse.reach import Reach
from allranks.lighthouse.state import QuorumState

from .simulated import Job

NAMES = "abcdef"
KINDS = (
    "start", "start", "start", "kill", "freeze", "thaw", "lose", "regain", "cut", "cut", "cut", "mend", "mend_all",
    "liar", "garbage", "hasty", "again", "flap",
)  # fmt: skip
WAITS = (0.05, 0.3, 1.0, 3.0, 8.0, 20.0, 40.0)
MOST_PER_S = 20
SETTLE_S = 150.0  # longer than every back-off
STILL_S = 5.0


def disturb(job: Job, choose: random.Random) -> str:
    """One event, and some time after it."""
    kind, process = choose.choice(KINDS), choose.choice(job.processes) if job.processes else None
    alive = [each for each in job.processes if each.alive]
    if kind in ("start", "liar", "garbage", "hasty", "again") or process is None:
        taken = {each.name for each in alive}
        free = [name for name in NAMES if name not in taken]
        names = sorted(taken) if kind == "again" and taken else free
        # one that lies from the start of the job on cannot be told from the holder of its state
        trains = any(each.phase == "training" and each.step and not each.liar and each.runs for each in alive)
        if names and len(alive) < 8:
            name, lies = choose.choice(names), kind == "liar" and trains
            job.start(name, liar=lies, garbage=kind == "garbage", hasty=kind == "hasty")
    elif kind == "kill":
        job.kill(process)
    elif kind in ("freeze", "thaw"):
        job.freeze(process, kind == "freeze")
    elif kind in ("lose", "regain"):
        job.cut_lighthouse(process, kind == "lose")
    elif kind in ("cut", "flap") and len(alive) > 1:
        pair = frozenset(each.session for each in choose.sample(alive, 2))
        job.cuts.add(pair)
        if kind == "flap":
            job.run(choose.choice((0.5, 2.0, 4.0)))
            job.cuts.discard(pair)
    elif kind == "mend" and job.cuts:
        job.cuts.discard(choose.choice(sorted(job.cuts, key=sorted)))
    elif kind == "mend_all":
        job.cuts.clear()
    job.run(choose.choice(WAITS))
    return kind


def play(seed: int, events: int = 30) -> tuple[Job, list[str]]:
    """A random life, then everything is mended: all that live train together, whoever was refused stays out."""
    choose = random.Random(seed)
    job = Job(Options(presume_dead_s=choose.choice((8.0, 30.0))))
    happened = [disturb(job, choose) for _ in range(events)]
    job.cuts.clear()
    for process in job.processes:
        job.freeze(process, False)
        job.cut_lighthouse(process, False)
        if process.hasty:
            job.kill(process)
    job.run(SETTLE_S)
    found = list(job.violations)
    if job.most_per_s > MOST_PER_S:
        found.append(f"{job.most_per_s} quorums in one second")
    honest = [p for p in job.processes if p.runs and not p.liar and not p.garbage]
    if any(p.runs and p.liar and p.phase == "training" for p in job.processes):
        honest = []  # older than all others: it cannot be told from the holder of the state
    if honest and job.now - job.last_commit > STILL_S:
        phases = [(p.session, p.phase, p.quorum.number if p.quorum else 0) for p in honest]
        found.append(f"nobody trains, {phases}: {job.service.former.waiting}")
    out = [p.session for p in honest if p.phase != "training"]
    if honest and out:
        found.append(f"{out} are left out although all can talk: {job.service.former.waiting}")
    return job, [f"seed {seed}, {happened}: {each}" for each in found[:3]]


@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_one_process_per_name_commits_and_the_largest_set_trains(part: int) -> None:
    """Deaths, freezes, cuts, duplicates and liars; at the end all that live train together."""
    commits = 0
    for seed in range(part * 6, part * 6 + 6):
        job, found = play(seed)
        assert not found, found[0]
        commits += job.commits
    assert commits


@pytest.mark.soak
def test_the_model_finds_nothing_in_100_000_events() -> None:
    """The same, long."""
    for seed in range(1000, 1500):
        _, found = play(seed, events=200)
        assert not found, found[0]


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


def _newcomers_are_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "find_unproved", lambda state: [])
    monkeypatch.setattr(coordinating, "find_unproved", lambda state: [])


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
    monkeypatch.setattr(QuorumState, "not_before", lambda *_: 0.0)
    assert play_hasty(1.2) > 10 * MOST_PER_S


#: The defect, and a seed that is known to find it.
MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    "A1 lease": (_no_lease, 19),
    "A1 names": (_second_process_takes_the_name, 19),
    "A2 nobody left out": (_nobody_is_left_out, 40),
    "A4 lies": (_lies_are_believed, 7),
    "A4 claims": (_claims_are_not_checked, 2),
}


@pytest.mark.parametrize("defect", MUTANTS)
def test_each_defect_put_back_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would have seen it."""
    mutate, known = MUTANTS[defect]
    mutate(monkeypatch)
    for seed in (known, *range(100)):
        try:
            _, found = play(seed)
        except (ValueError, TypeError, KeyError, AttributeError):  # a member crashed on a claim
            return
        if found:
            return
    pytest.fail(f"{defect} was not found")
