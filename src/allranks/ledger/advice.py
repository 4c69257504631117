"""Advice that would raise a job's goodput, each with its expected gain, from the job's account. Pure.

The interval of checkpoints follows Young and Daly: with saves of C seconds and M seconds between failures, saving every
sqrt(2 C M) seconds loses least. A replay checks it: the failures of the ledger at their own times, with other intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from allranks.ledger.records import COMPILING, EVALUATION, STALLED, STARTING, USEFUL, WAITING
from allranks.ledger.summary import JobAccount
from allranks.model.formatting import duration

WORTH = 0.002  # of the time; advice with a smaller gain is dropped
NO_FAILURE = 3.0  # without a failure so far, one is expected after this many times the running time


@dataclass(frozen=True)
class Advice:
    what: str  # what to change
    why: str
    gain: float  # expected share of the time; 0: not known


@dataclass(frozen=True)
class Interval:
    """The best time between saves to a tier."""

    tier: str
    cost_s: float  # of one save
    now_s: float  # the job's own interval
    best_s: float
    mtbf_s: float
    loss_now: float  # expected share of the time: saving, and work done again
    loss_best: float
    replay_now: float  # the same share in the replay of the ledger
    replay_best: float


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's estimate; Young's sqrt(2 C M) for small costs."""
    if cost_s <= 0 or mtbf_s <= 0:
        return math.inf
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = math.sqrt(cost_s / (2 * mtbf_s))
    return max(cost_s, math.sqrt(2 * cost_s * mtbf_s) * (1 + part / 3 + part * part / 9) - cost_s)


def expected_loss(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Share of the time spent on saves and on repeating work since the last save."""
    lost = cost_s / interval_s + interval_s / 2 / mtbf_s  # per second of training
    return lost / (1 + lost)


def replay(failures_at: Sequence[float], trained_s: float, interval_s: float, cost_s: float) -> float:
    """Share of the time lost with a save every `interval_s` of training and the job's own failures at their own times."""
    lost = trained_s / interval_s * cost_s
    before = 0.0
    for at in sorted(failures_at):
        lost += (at - before) % interval_s
        before = at
    return lost / max(trained_s + lost, 1e-9)


def find_intervals(found: JobAccount) -> list[Interval]:
    """The best interval for every tier that the job saves to."""
    useful_s = found.seconds.get(USEFUL, 0.0) / max(found.ranks, 1)
    share = useful_s / max(found.running_s, 1e-9)
    failures = [(one.begin - found.begin) * share for one in found.failures]
    mtbf = found.mtbf_s or NO_FAILURE * max(found.running_s, 1.0)
    intervals = []
    for tier, (number, cost) in sorted(found.saves.items()):
        if number < 2 or cost <= 0:
            continue
        now, best = useful_s / number, best_interval_s(cost, mtbf)
        losses = [expected_loss(one, cost, mtbf) for one in (now, best)]
        replayed = [replay(failures, useful_s, one, cost) for one in (now, best)]
        intervals.append(Interval(tier or "checkpoint", cost, now, best, mtbf, *losses, *replayed))
    return intervals


def advise(found: JobAccount) -> list[Advice]:
    """The largest gain first."""
    total = max(found.rank_seconds, 1e-9)
    shares = {
        state: found.seconds.get(state, 0.0) / total
        for state in (WAITING, STALLED, STARTING, COMPILING, EVALUATION)
    }
    advice = [_of_interval(one, bool(found.failures)) for one in find_intervals(found)]

    def add(wanted: bool, what: str, why: str, gain: float) -> None:
        if wanted:
            advice.append(Advice(what, why, gain))

    rank = next(iter(found.waiting_for), -1)
    why = f"ranks waited for slow ones {shares[WAITING]:.1%} of the time, most for rank {rank}"
    what = f"find out why rank {rank} is slow: `allranks slow {found.job}`"
    add(shares[WAITING] > 0.03, what, why, shares[WAITING])
    restarts = len([one for one in found.failures if one.kind == "death"])
    again = shares[STARTING] * (1 - 1 / max(restarts + found.runs, 1))
    why = f"{restarts} restarts spent {shares[STARTING]:.1%} of the time on starting processes"
    what = "keep warm processes (`--spares`, the default), or train with replicas"
    add(restarts > 0 and again > 0.01, what, why, again)
    explained = found.mean_s("begin", "explained") or 0.0
    gain = shares[STALLED] - len(found.failures) * explained / max(found.running_s, 1.0)
    cause = max(found.stalled_by, key=lambda one: found.stalled_by[one], default="incidents")
    why = f"incidents stalled the ranks {shares[STALLED]:.1%} of the time, most of it: {cause.replace('_', ' ')}"
    what = "fix the cause (`allranks diagnose` names the line), or let `--recovery on` restart what hangs"
    add(gain > 0.01, what, why, gain)
    notice = found.mean_s("begin", "noticed") or 0.0
    gain = len(found.failures) * (notice - 15.0) / max(found.running_s, 1.0)
    why = f"failures were noticed after {duration(notice)} on average"
    add(notice > 30.0, "notice hangs earlier: `--notice-s 10`", why, gain)
    what = "keep compiled code between restarts (TORCHINDUCTOR_CACHE_DIR on a disk that stays)"
    why = f"first steps of processes took {shares[COMPILING]:.1%} of the time"
    add(shares[COMPILING] > 0.03, what, why, shares[COMPILING] / 2)
    why = f"evaluation took {shares[EVALUATION]:.1%} of the time"
    add(shares[EVALUATION] > 0.1, "evaluate less often, or on other machines", why, shares[EVALUATION] / 2)
    return sorted((one for one in advice if one.gain >= WORTH), key=lambda one: -one.gain)


def _of_interval(one: Interval, failed: bool) -> Advice:
    way = "less" if one.best_s > one.now_s else "more"
    what = f"save {way} often to {one.tier}: every {duration(one.best_s)} instead of {duration(one.now_s)}"
    rate = f"a failure every {duration(one.mtbf_s)}"
    rate = rate if failed else f"no failure yet, one in {duration(one.mtbf_s)} is assumed"
    why = (
        f"a save stops training for {duration(one.cost_s)}, {rate}; in a replay of this job's own failures the loss changes "
        f"from {one.replay_now:.2%} to {one.replay_best:.2%}"
    )
    replayed = one.replay_now - one.replay_best if failed else 1.0
    return Advice(what, why, max(0.0, min(one.loss_now - one.loss_best, replayed)))
