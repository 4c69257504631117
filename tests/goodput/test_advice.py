"""Advice: the best interval of checkpoints by formula and by replay, and what else costs time."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from allranks.ledger.advice import advise, best_interval_s, expected_loss, find_intervals, replay
from allranks.ledger.file import NodeLedger
from allranks.ledger.records import Booked, Outage, Record, RunEnd, RunStart
from allranks.ledger.summary import JobAccount, account
from goodput.timelines import T0


def job(saves: int, save_s: float, failures: int, hours: float, **shares: float) -> JobAccount:
    """A job of 8 ranks: what is left of its time is useful."""
    length = hours * 3600
    seconds = {
        "saving:nvme": 8 * saves * save_s,
        **{name: 8 * length * share for name, share in shares.items()},
    }
    seconds["useful"] = 8 * length - sum(seconds.values())
    records: list[Record] = [RunStart(T0, "j", "n", "whole_job")]
    records.append(Booked(1, T0, T0 + length, "0-7", seconds, 100, {"saving:nvme": saves}))
    for number in range(failures):
        at = T0 + length * (number + 0.5) / failures
        records.append(
            Outage(f"d{number}", "death", "rank_died", "n", (1,), at, at + 1, at + 2, at + 60, at + 60)
        )
    return account([NodeLedger(Path("x"), [*records, RunEnd(T0 + length)])])


@pytest.mark.parametrize(
    ("cost", "mtbf"), [(1.0, 3600.0), (30.0, 10_800.0), (300.0, 3600.0), (0.01, 86_400.0)]
)
def test_the_best_interval_loses_least(cost: float, mtbf: float) -> None:
    best = best_interval_s(cost, mtbf)
    assert best == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.35)
    for factor in (0.3, 0.5, 2.0, 3.0):
        assert expected_loss(best, cost, mtbf) < expected_loss(best * factor, cost, mtbf)


def test_the_replay_agrees_with_the_formula_over_many_failures() -> None:
    chance, mtbf, cost = random.Random(3), 3600.0, 20.0
    at, failures = 0.0, []
    for _ in range(4000):
        at += chance.expovariate(1 / mtbf)
        failures.append(at)
    best = best_interval_s(cost, mtbf)
    for interval in (best / 2, best, best * 2):
        assert replay(failures, at, interval, cost) == pytest.approx(
            expected_loss(interval, cost, mtbf), rel=0.12
        )


def test_a_job_that_saves_too_rarely_is_told_so_with_the_gain() -> None:
    found = job(saves=12, save_s=2.0, failures=24, hours=48)
    (interval,) = find_intervals(found)
    assert interval.tier == "nvme" and interval.cost_s == pytest.approx(2.0)
    assert interval.best_s == pytest.approx(math.sqrt(2 * 2.0 * 7200), rel=0.1)
    first = advise(found)[0]
    assert first.what.startswith("save more often to nvme: every 2 min") and first.gain > 0.05


def test_a_job_that_saves_too_often_is_told_so() -> None:
    found = job(saves=2000, save_s=2.0, failures=2, hours=48)
    assert advise(found)[0].what.startswith("save less often to nvme")


def test_a_good_job_gets_no_advice() -> None:
    assert advise(job(saves=100, save_s=0.5, failures=1, hours=48)) == []


def test_slow_ranks_and_evaluation_are_named_with_their_share() -> None:
    found = job(100, 0.5, 1, 48, **{"waiting:5": 0.08, "evaluation": 0.2})
    assert [round(one.gain, 2) for one in advise(found)] == [0.1, 0.08]
    assert "rank 5" in advise(found)[1].what


def test_a_job_that_hung_most_of_its_time_is_told_so() -> None:
    """ "3.9% useful; no change is worth more than 0.2% of the time." was said of a job that hung 72% of it."""
    records: list[Record] = [RunStart(T0, "j", "n", "whole_job")]
    records.append(Booked(1, T0, T0 + 100, "0-1", {"useful": 60.0, "stalled": 140.0}, 5, {}))
    records.append(Outage("h", "hang", "stuck_before_collective", "n", (1,), T0 + 30, T0 + 40, T0 + 45, 0, 0))
    first = advise(account([NodeLedger(Path("x"), [*records, RunEnd(T0 + 100)])]))[0]
    assert "--recovery on" in first.what and first.gain > 0.5 and "70.0%" in first.why
