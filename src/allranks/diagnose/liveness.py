"""Hung, or merely busy? A blocked call counts only when it has lasted longer than the job's usual pauses.

Time is an argument: for black boxes the moment they were read, for dump files the moment they were written. Without
it a dump is taken at its word: people dump jobs that hang.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allranks.diagnose.job import Job
from allranks.diagnose.waits import Blocked

MIN_WAIT_S, MAX_WAIT_S, UNTRAINED_WAIT_S = 0.1, 30.0, 1.0
SAMPLED_RANKS, SAMPLED_CALLS, WARM_UP_CALLS = 64, 256, 3
#: A wait longer than this is the age of the file, not of the wait.
BELIEVABLE_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Patience:
    """How long a wait is normal in this job, and why."""

    limit_s: float
    reason: str


def usual_pause(job: Job, quiet_s: float = 0.0) -> Patience:
    """Twice the longest pause between two calls of a rank, within limits; half of a silence that is known to be too long."""
    longest = 0.0
    count = 0
    for rank in list(job.ranks)[:SAMPLED_RANKS]:
        created = job.ranks[rank].trace.calls["created_ns"][-SAMPLED_CALLS:]
        gaps = np.diff(created)[WARM_UP_CALLS:]
        count += len(gaps)
        if len(gaps):
            longest = max(longest, float(gaps.max()) / 1e9)
    if count < 8:
        return Patience(
            UNTRAINED_WAIT_S, f"too few calls to know this job's pauses; {UNTRAINED_WAIT_S:.0f} s assumed"
        )
    limit = min(max(2 * longest, MIN_WAIT_S), MAX_WAIT_S)
    if 0 < quiet_s / 2 < limit:
        return Patience(quiet_s / 2, f"nothing has moved for {quiet_s:.3g} s, which is too long for this job")
    return Patience(limit, f"the longest pause between two calls was {longest:.3g} s")


def waited_s(job: Job, blocked: Blocked) -> float | None:
    """How long the longest waiter has waited; None when no time of the dump is known."""
    longest = None
    for rank, row in blocked.rows.items():
        view = job.ranks[rank]
        entered = int(view.trace.calls["created_ns"][row])
        if view.snapshot_ns and entered:
            wait = (view.snapshot_ns - entered) / 1e9
            if 0 <= wait < BELIEVABLE_S:
                longest = wait if longest is None else max(longest, wait)
    return longest


def is_hung(job: Job, blocked: Blocked, patience: Patience) -> bool:
    """Whether the call has lasted too long; failed calls, calls that lack a rank which has ended, and calls of unknown
    age count as such, but when everybody was killed only those that somebody lacks in: the others were about to end."""
    ended = any(job.ranks[rank].trace.progress.closed for rank in blocked.missing if rank in job.ranks)
    if blocked.failed or ended:
        return True
    wait = waited_s(job, blocked)
    if wait is None:
        return not job.ended or bool(blocked.missing or blocked.absent)
    return wait >= patience.limit_s


def is_paused(job: Job, rank: int) -> bool:
    """Whether the rank has declared its silence normal until a time that has not come yet."""
    view = job.ranks.get(rank)
    return view is not None and job.now_ns > 0 and view.trace.progress.expect_until_ns > job.now_ns
