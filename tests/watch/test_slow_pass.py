"""A pass that lasts longer than --slow-ms: told once, while it lasts, and not of a rank that is idle."""

from __future__ import annotations

from allranks.watch.samples import RankSample
from allranks.watch.sidecar import SlowPasses


def _rank(silent_ms: float, started: int = 5, completed: int = 5, now_s: float = 100.0) -> RankSample:
    last_ns = int(now_s * 1e9 - silent_ms * 1e6)
    return RankSample(1, 7, "x.box", True, -1, started, completed, last_ns, 1)


def test_a_rank_in_a_call_or_at_work_is_slow_and_one_that_is_idle_is_not() -> None:
    passes = SlowPasses(200)
    assert passes.after(100.0, [_rank(150, started=6)], {1: 3})[1] == ""
    assert passes.after(100.0, [_rank(350)], {1: 3})[1] == ""
    assert passes.after(100.0, [_rank(350, started=6)], {1: 3})[1] == "a pass of rank 1 lasts 350 ms"
    before, _ = passes.after(100.0, [_rank(100)], {1: 3})
    assert before.after(100.0, [_rank(350)], {1: 4})[1] == "a pass of rank 1 lasts 350 ms"


def test_one_pass_is_told_once_and_the_next_one_again() -> None:
    passes, reason = SlowPasses(200).after(100.0, [_rank(350, started=6)], {})
    assert reason
    passes, reason = passes.after(130.0, [_rank(30_000, started=6, now_s=130.0)], {})
    assert reason == ""
    assert passes.after(140.0, [_rank(300, started=7, completed=6, now_s=140.0)], {})[1]
