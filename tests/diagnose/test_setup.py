"""Ranks that wait for each other in init_process_group and new_group."""

from __future__ import annotations

from dataclasses import replace

from allranks.diagnose import DiagnoseOptions, diagnose
from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import Progress

from .histories import START_NS, STUCK, Do, expect, run, verdict_of


def test_ranks_that_are_still_in_init_process_group_are_named_as_such() -> None:
    """Rank 2 believes in a world of four: it and rank 1 wait for the fourth, rank 0 has gone on to its first call."""
    traces = run(
        {"world": (0, 1, 2)}, {0: [Do("all_reduce")], 1: [STUCK], 2: [STUCK]}, backend="gloo"
    ).traces()
    boxes = [replace(t, kind="black box 2") for t in traces]
    inside = Progress(inside="init_process_group", inside_ns=START_NS, setups=0)
    boxes[1:] = [replace(t, progress=inside) for t in boxes[1:]]
    verdict = verdict_of(diagnose(boxes, options=DiagnoseOptions(now_ns=START_NS + 60 * 10**9)))
    assert verdict.cause == "not_started" and verdict.confidence <= 0.6
    assert verdict.sentence.endswith("; they are inside init_process_group"), verdict.sentence
    assert "WORLD_SIZE" in verdict.advice[0]


def _in_new_group(setups: tuple[int, ...]) -> Diagnosis:
    traces = run({"world": (0, 1, 2)}, {r: [Do("all_reduce")] * 5 for r in range(3)}, backend="gloo").traces()
    now = max(int(t.calls["completed_ns"].max()) for t in traces)
    boxes = [
        replace(t, kind="black box 2", progress=Progress(inside="new_group", inside_ns=now, setups=count))
        for t, count in zip(traces, setups, strict=True)
    ]
    return diagnose(boxes, options=DiagnoseOptions(now_ns=now + 60 * 10**9))


def test_a_rank_that_did_not_take_part_in_a_new_group_waits_in_another_one_than_the_rest() -> None:
    """Ranks 0 and 1 made a group for themselves; the next group of all has another number on rank 2."""
    verdict = expect(_in_new_group((2, 2, 1)), "missing_rank", 2)
    assert verdict.sentence.startswith("rank 2 made 1 call of new_group fewer than ranks 0, 1"), (
        verdict.sentence
    )
    assert "also of those outside the new group" in verdict.advice[0]
    expect(_in_new_group((1, 1, 1)), "order_inversion", 0, 1, 2)
