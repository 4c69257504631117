"""What a slow rank costs, predicted from arrival times and compared with the same job without the delay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from allranks.blackbox.phases import GC, PhaseMark
from allranks.ledger import arrivals
from allranks.ledger.agent import compare_interval_s
from allranks.ledger.arrivals import find_blocking, find_collectives, find_waits, is_blocking
from allranks.ledger.changes import ChangePoint, find_change
from allranks.ledger.slow import (
    Lateness,
    OwnTimes,
    SlowReport,
    WhatIf,
    find_slow,
    own_times,
    rank_change,
)
from allranks.model.trace import CALL, Flag, Frame, Group, RankTrace, State, TraceHeader

T0 = 1_790_000_000.0
STEP_S, COMM_S = 0.2, 0.002
Plan = list[
    tuple[tuple[int, ...], float]
]  # the collectives of a step: members, and share of the step before it

DDP: Plan = [(tuple(range(8)), 1.0)]
FSDP: Plan = [(tuple(range(8)), 0.25)] * 4
TENSOR: Plan = [
    *[(pair, 0.2) for _ in range(4) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))],
    (tuple(range(8)), 0.2),
]
EXPERT: Plan = [((0, 1, 2, 3), 0.5), ((4, 5, 6, 7), 0.5), (tuple(range(8)), 0.5)]


def record(
    plan: Plan,
    factors: np.ndarray,
    hosts: Sequence[str] = ("a",) * 8,
    skew: Sequence[float] = (0.0,) * 8,
    non_blocking: Sequence[int] = (),
    jitter: float = 0.005,
) -> tuple[list[RankTrace], float]:
    """Black boxes of a job whose rank r is `factors[r, s]` times as slow in step s, and how long its steps take."""
    ranks, steps = factors.shape
    chance = np.random.default_rng(11)
    rows: list[list[tuple[int, float, float, int, int, int]]] = [[] for _ in range(ranks)]
    groups = list(dict.fromkeys(members for members, _ in plan))
    seqs = dict.fromkeys(groups, 0)
    free, begins = np.full(ranks, T0), []
    for step in range(steps):
        begins.append(free.max())
        for number, (members, share) in enumerate(plan):
            seqs[members] += 1
            own = STEP_S * share * chance.normal(1.0, jitter, ranks)
            at = {rank: free[rank] + own[rank] * factors[rank, step] for rank in members}
            end = max(at.values()) + COMM_S
            for rank in members:
                rows[rank].append((groups.index(members) + 1, at[rank], end, seqs[members], step, number))
                free[rank] = at[rank] if number in non_blocking else end
    table = (Group(""), *(Group(f"g{number}", ranks=members) for number, members in enumerate(groups)))
    traces = []
    for rank in range(ranks):
        calls = np.zeros(len(rows[rank]), CALL)
        for index, (group, at, end, seq, step, line) in enumerate(rows[rank]):
            ns = [round((t + skew[rank]) * 1e9) for t in (at, end)]
            calls[index]["created_ns"], calls[index]["completed_ns"] = ns
            calls[index]["group"], calls[index]["seq"], calls[index]["step"] = group, seq, step
            calls[index]["op"], calls[index]["state"], calls[index]["in_numel"] = 1, State.COMPLETED, 16
            calls[index]["stack"] = line
        traces.append(
            RankTrace(
                TraceHeader(rank, ranks, hosts[rank]),
                calls,
                table,
                ("", "all_reduce"),
                stacks=((),) * len(plan),
            )
        )
    return traces, float(np.mean(np.diff(begins)))


def noise(seed: int, ranks: int = 8, steps: int = 120, width: float = 0.01) -> np.ndarray:
    found: np.ndarray = np.random.default_rng(seed).normal(1.0, width, (ranks, steps)).clip(0.8)
    return found


@pytest.mark.parametrize("plan", [DDP, FSDP, TENSOR, EXPERT], ids=["ddp", "fsdp", "tensor", "expert"])
@pytest.mark.parametrize("slow", [1.1, 1.25, 2.0])
def test_the_predicted_step_is_the_step_without_the_delay(plan: Plan, slow: float) -> None:
    factors = noise(1)
    _, expected = record(plan, factors)
    factors[5] *= slow
    traces, _ = record(plan, factors)
    found = find_slow(traces)
    assert found is not None and found.what_ifs
    assert 5 in found.what_ifs[0].ranks
    alone = next(one for one in found.what_ifs if one.ranks == (5,))
    assert alone.step_s == pytest.approx(expected, rel=0.03)
    assert found.replayed_s == pytest.approx(found.step_s, rel=0.02)
    assert found.cause == "one rank always"


def test_a_rank_that_became_slow_is_named_beside_evaluation_of_all_ranks_and_for_the_steps_since_then() -> (
    None
):
    def steps(slow: float) -> np.ndarray:
        factors = noise(6, ranks=4, steps=160)
        factors[:, 7::20] *= 6.0
        factors[1, 100:] *= slow
        return factors

    plan: Plan = [((0, 1, 2, 3), 0.25)] * 4
    found = find_slow(record(plan, steps(1.1))[0])
    assert found is not None
    assert (found.what_ifs[0].ranks, found.cause) == ((1,), "one rank since a moment")
    expected = find_slow(record(plan, steps(1.0)[:, 100:])[0])
    assert expected is not None
    assert found.what_ifs[0].step_s == pytest.approx(expected.step_s, rel=0.02)
    assert found.steps <= 60


@pytest.mark.parametrize("uneven", [0.01, 0.2], ids=["noise", "uneven inputs"])
@pytest.mark.parametrize("non_blocking", [(), (0, 1, 2, 3, 4, 5, 6, 7)], ids=["waits", "overlaps"])
def test_a_call_that_ranks_do_not_wait_in_delays_nobody(non_blocking: tuple[int, ...], uneven: float) -> None:
    """A slow rank is a tenth slower, not a tenth for every call that overlaps with its computing."""
    plan: Plan = [*[(pair, 0.25) for _ in range(4) for pair in ((0, 1), (2, 3))], ((0, 1, 2, 3), 0.01)]
    factors = noise(5, ranks=4, width=uneven)
    factors[2, 60:] *= 1.1
    traces, _ = record(plan, factors, non_blocking=non_blocking, jitter=0.02)
    waits = [one.blocks.all() for one in find_collectives(traces) if len(one.ranks) == 2]
    assert waits == [not non_blocking] * 2
    own = own_times(find_blocking(find_collectives(traces))).own
    assert np.median(own[2, 65:]) / np.median(own[[0, 1, 3], 65:]) == pytest.approx(
        1.1, abs=0.03 + uneven / 2
    )


@pytest.mark.parametrize("seed", range(6))
def test_ranks_wait_in_each_gather_of_fsdp_although_the_last_layer_is_gathered_twice_in_a_row(
    seed: int,
) -> None:
    """All layers are gathered in one line; what follows differs from layer to layer, and nobody is late for the second of the last."""
    every = (0, 1, 2, 3)
    plan: Plan = [(every, share) for share in (0.02, 0.24, 0.24, 0.002, 0.25, 0.25)]
    factors = noise(seed, ranks=4, steps=160, width=0.02)
    factors[1, 100:] *= 1.1
    factors[:, 40:80] *= 1.25  # longer inputs of all ranks
    traces, _ = record(plan, factors, jitter=0.04)
    for trace in traces:
        trace.calls["stack"] = trace.calls["stack"] // 4  # gathers, and the scatters of the backward pass
    assert all(one.blocks.all() for one in find_collectives(traces))


def test_waits_of_a_window_need_only_its_calls_once_the_lines_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent books them every few seconds: it does not judge the lines of all calls each time."""
    plan: Plan = [*[(pair, 0.25) for _ in range(4) for pair in ((0, 1), (2, 3))], ((0, 1, 2, 3), 0.01)]
    traces, _ = record(plan, noise(5, ranks=4, steps=300, width=0.2), non_blocking=range(8), jitter=0.02)
    begin, end = T0 + 25.0, T0 + 35.0
    whole = find_waits([traces], begin, end)
    lateness = Lateness()
    lateness.add(traces)
    matched: list[int] = []
    match = arrivals._match

    def counted(name: str, lane: arrivals.Lane) -> arrivals.Collectives | None:
        found = match(name, lane)
        matched.append(0 if found is None else found.arrived.shape[1])
        return found

    monkeypatch.setattr(arrivals, "_match", counted)
    monkeypatch.setattr(arrivals, "find_non_blocking", None)
    part = find_waits([traces], begin, end, non_blocking=lateness.non_blocking)
    assert sum(matched) < 9 * (end - begin + 3) / STEP_S < 0.5 * 9 * 300
    for rank in range(4):
        expected = whole.during(rank, begin, end, end - begin)
        assert expected and part.during(rank, begin, end, end - begin) == pytest.approx(expected)


def test_waits_of_a_group_that_meets_rarely_are_booked_too() -> None:
    """Two collectives of a group in a window are fewer than are needed to compare ranks; those before them help."""
    traces, _ = record(DDP, 40 * noise(5, width=0.2), jitter=0.02)  # one every eight seconds
    begin, end = T0 + 100.0, T0 + 110.0
    found = find_waits([traces], begin, end), find_waits([traces], begin, end, non_blocking=())
    whole, part = ([waits.during(rank, begin, end, end - begin) for rank in range(8)] for waits in found)
    assert any(whole) and part == [pytest.approx(one) for one in whole]


def test_clocks_of_hosts_may_differ() -> None:
    factors = noise(2)
    factors[5] *= 1.3
    traces, _ = record(DDP, factors, hosts="aaaabbbb", skew=(0, 0, 0, 0, 3, 3, 3, 3))
    found = find_slow(traces)
    assert found is not None and found.what_ifs[0].who == "rank 5"


def test_a_slow_node_is_named_as_a_node() -> None:
    factors = noise(3)
    factors[4:] *= 1.3
    traces, _ = record(FSDP, factors, hosts="aaaabbbb")
    found = find_slow(traces)
    assert found is not None
    assert (found.what_ifs[0].who, found.cause) == ("node b", "node")


def test_ranks_that_pause_in_turn_are_not_one_slow_rank() -> None:
    factors = noise(4)
    for step in range(120):
        factors[step * 3 % 8, step] *= 1.4
    found = find_slow(record(DDP, factors)[0])
    assert found is not None and found.cause == "different ranks in turn"


def test_nobody_is_slow_in_a_healthy_job() -> None:
    found = find_slow(record(FSDP, noise(5, width=0.003))[0])
    assert found is not None
    assert found.what_ifs == () and found.sentence.startswith("No rank slows the others down")


def test_long_inputs_are_named_where_calls_show_their_size() -> None:
    sizes = np.random.default_rng(6).integers(100, 400, (8, 120))
    traces, _ = record(DDP, 0.5 + sizes / 400)
    for rank, trace in enumerate(traces):
        trace.calls["in_numel"] = sizes[rank]
    found = find_slow(traces)
    assert found is not None and found.cause == "input length"


def test_sizes_that_are_exchanged_before_the_tokens_show_the_length_too() -> None:
    """Expert parallel: ranks wait in the small exchange of sizes, the large one that follows has the tokens."""
    sizes = np.random.default_rng(16).integers(100, 300, (8, 120))
    plan: Plan = [(tuple(range(8)), 1.0), (tuple(range(8)), 0.001)]
    _, expected = record(plan, np.ones((8, 120)))
    traces, _ = record(plan, sizes / 200)
    for rank, trace in enumerate(traces):
        trace.calls["in_numel"][1::2] = sizes[rank]
    found = find_slow(traces)
    assert found is not None and (found.cause, found.what_ifs[0].who) == ("input length", "uneven inputs")
    assert found.what_ifs[0].step_s == pytest.approx(expected, rel=0.05)


def test_saves_are_named() -> None:
    factors = noise(7)
    factors[0, 10::10] *= 2.5
    traces, _ = record(DDP, factors)
    begins = [int(traces[0].calls["created_ns"][step]) - 10**8 for step in range(10, 120, 10)]
    found = find_slow(traces, {0: [PhaseMark("save", begin, begin + 10**8) for begin in begins]})
    assert found is not None and found.cause == "saving"


def test_buckets_that_overlap_with_backward_wait_once() -> None:
    """DDP starts a bucket and computes on: only the last one of a backward pass waits."""
    factors = noise(8, ranks=2, width=0.0)
    factors[1] *= 1.5
    traces, _ = record([((0, 1), 0.5), ((0, 1), 0.5)], factors)
    step = traces[0].calls["created_ns"][::2]
    for rank, trace in enumerate(traces):  # arrivals as if nobody waited for the first bucket
        begin = step - int(0.5 * STEP_S * factors[0, 0] * 1e9)
        for part in (0, 1):
            trace.calls["created_ns"][part::2] = begin + int(
                (part + 1) * 0.5 * STEP_S * factors[rank, 0] * 1e9
            )
        trace.calls["stack"] = 1
    backward = tuple(
        RankTrace(t.header, t.calls, t.groups, t.names, stacks=((), (Frame("backward", "autograd.py", 1),)))
        for t in traces
    )
    waited, end = find_waits([backward], T0, T0 + 1000.0), T0 + 1000.0
    all_of_it = waited.during(0, T0, end, 9.0)
    assert all_of_it == pytest.approx({1: 0.5 * STEP_S * len(step)}, rel=0.05)
    assert waited.during(1, T0, end, 9.0) == {}
    middle = float(step.mean()) / 1e9  # two stretches of time have all of it, and nothing twice
    halves = [waited.during(0, *part, 9.0)[1] for part in ((T0, middle), (middle, end))]
    assert sum(halves) == pytest.approx(all_of_it[1]) and min(halves) > 0.3 * all_of_it[1]
    lost = [replace(trace, header=replace(trace.header, dropped=9)) for trace in backward]
    older = find_waits([lost], T0, end)  # the ring has overwritten what was before
    assert older.during(0, T0, end, 2 * older.covered_s)[1] == pytest.approx(2 * all_of_it[1], rel=0.05)


def series(
    seed: int, slow_from: int | None = None, slow: float = 0.1, steps: int = 200
) -> tuple[np.ndarray, np.ndarray]:
    """Lateness of a rank against the others, and the others' time: noise, a save every 20 steps, evaluation, longer inputs."""
    chance = np.random.default_rng(seed)
    others = np.full(steps, 1.0)
    others[80:] *= 1.3  # longer inputs from here on, for all
    others[steps // 2] *= 20  # evaluation
    own = others * chance.normal(1.0, 0.02, steps)
    own[::20] += 0.8  # this rank saves
    own[chance.integers(0, steps, 4)] *= 1.5  # and pauses now and then
    if slow_from is not None:
        own[slow_from:] += slow * others[slow_from:]
    return own - others, others


def test_a_rank_that_becomes_a_tenth_slower_is_named_within_sixty_steps() -> None:
    named = 0
    for seed in range(40):
        late, others = series(seed, slow_from=100)
        found = find_change(late[:160], others[:160], np.arange(160.0), 3)
        named += found is not None and 95 <= found.index <= 115 and abs(found.share - 0.1) < 0.03
    assert named >= 38


def test_healthy_jobs_give_no_alarm() -> None:
    alarms = [
        seed for seed in range(60) if find_change(*series(seed, steps=1000), np.arange(1000.0), 3) is not None
    ]
    assert alarms == []


def test_a_running_job_is_told_once_that_a_rank_became_slow() -> None:
    factors = noise(9, ranks=4, steps=200)
    factors[2, 120:] *= 1.2
    plan: Plan = [((0, 1, 2, 3), 1.0)]
    lateness, told = Lateness(), []
    for seen in (60, 120, 160, 200):  # the boxes at four looks
        traces, _ = record(plan, factors[:, :seen])
        told += [(change.rank, seen) for change in lateness.add(traces)]
    assert told == [(2, 160)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_recovers_does_not_make_the_others_slow(ranks: int) -> None:
    """A slow rank was replaced: one alarm for it, none for another rank."""
    factors = noise(14, ranks=ranks, steps=300)
    factors[1, 80:160] *= 2.0
    lateness, told = Lateness(), []
    for seen in range(40, 301, 20):
        traces, _ = record([(tuple(range(ranks)), 1.0)], factors[:, :seen])
        told += [change.rank for change in lateness.add(traces)]
    assert told == [1]


@pytest.mark.parametrize("seed", [3, 5, 8, 9])
def test_a_busy_node_makes_no_rank_slower_than_the_others(seed: int) -> None:
    """Other jobs take the processors: each of three ranks is late now and then, two of them later than the fastest."""
    factors = noise(15, ranks=3, steps=300)
    factors[:, 100:] *= np.exp(np.random.default_rng(seed).normal(0.0, 1.0, (3, 200)))
    lateness = Lateness()
    for seen in range(60, 301, 60):
        traces, _ = record([((0, 1, 2), 1.0)], factors[:, :seen])
        assert lateness.add(traces) == []


def test_a_rank_that_has_left_is_not_compared() -> None:
    """The box of an evicted replica stays, and the others train on in a new group."""
    before, step_s = record([((0, 1, 2), 1.0)], noise(17, ranks=3, steps=100))
    after, _ = record([((0, 1), 1.0)], noise(18, ranks=2, steps=100))
    traces = [before[1]]
    for old, new in ((before[0], after[0]), (before[2], after[1])):
        calls = new.calls.copy()
        calls["group"], calls["step"] = 2, calls["step"] + 100
        for column in ("created_ns", "completed_ns"):
            calls[column] += int(100 * step_s * 1e9)
        groups = (*old.groups, Group("new", ranks=(0, 2)))
        traces.append(replace(old, calls=np.concatenate([old.calls, calls]), groups=groups))
    lateness = Lateness()
    for seen in range(20, 201, 20):
        assert lateness.add([replace(trace, calls=trace.calls[:seen]) for trace in traces]) == []
    assert lateness.times is not None and lateness.times.ranks == (0, 2)


def test_looks_may_cut_a_step_in_two_and_the_boxes_forget() -> None:
    """Four collectives in a step, boxes of forty steps, a look every fifteen steps in the middle of a step."""
    factors = noise(10, ranks=4, steps=300)
    traces, _ = record([((0, 1, 2, 3), 0.25)] * 4, factors)
    lateness = Lateness()
    for calls in range(62, 1200, 62):
        seen = [replace(trace, calls=trace.calls[max(0, calls - 160) : calls]) for trace in traces]
        assert lateness.add(seen) == []
    assert lateness.times is not None and np.array_equal(
        lateness.times.steps, np.arange(1, len(lateness.times.steps) + 1)
    )
    assert np.allclose(lateness.times.own[1], factors[1, lateness.times.steps] * STEP_S, rtol=0.05)


def test_steps_are_measured_anew_when_it_turns_out_that_ranks_do_not_wait() -> None:
    """One rank is always slow: its calls overlap with computing, which shows after some steps only. It did not become slow."""
    plan: Plan = [*[(pair, 0.25) for _ in range(4) for pair in ((0, 1), (2, 3))], ((0, 1, 2, 3), 0.01)]
    factors = noise(12, ranks=4, steps=300)
    factors[2] *= 1.1
    traces, _ = record(plan, factors, non_blocking=range(8), jitter=0.02)
    lateness = Lateness()
    for calls in range(62, 1500, 62):
        seen = [replace(trace, calls=trace.calls[max(0, calls - 700) : calls]) for trace in traces]
        assert lateness.add(seen) == []
    assert lateness.times is not None
    first = lateness.times.own[:, :10]
    assert np.median(first[2] / first[3]) == pytest.approx(1.1, abs=0.05)


def pipeline(factors: np.ndarray, microbatches: int = 4) -> tuple[list[RankTrace], float]:
    """Two stages of two ranks: stage 0 sends to stage 1, gradients come back, then both ranks of a stage meet."""
    ranks, steps = factors.shape
    rows: list[list[tuple[str, float, int, int, int]]] = [[] for _ in range(ranks)]  # op, at, peer, seq, step
    free, begins = np.full(ranks, T0), []
    for step in range(steps):
        begins.append(free.max())
        for lane in (0, 1):
            first, second = lane, lane + 2
            work = [STEP_S / 2 / microbatches * factors[rank, step] for rank in range(ranks)]
            for way in ((first, second), (second, first)):  # forward, then backward
                sent = []
                for _ in range(microbatches):
                    free[way[0]] += work[way[0]]
                    sent.append(free[way[0]])
                    rows[way[0]].append(("send", free[way[0]], way[1], 0, step))
                for at in sent:
                    rows[way[1]].append(("recv", free[way[1]], way[0], 0, step))
                    free[way[1]] = max(free[way[1]], at) + work[way[1]]
        for stage in ((0, 1), (2, 3)):
            at = free[list(stage)].max()
            for rank in stage:
                rows[rank].append(("all_reduce", free[rank], -1, step + 1, step))
                free[rank] = at
    names = ("", "send", "recv", "all_reduce")
    traces = []
    for rank in range(ranks):
        calls = np.zeros(len(rows[rank]), CALL)
        for index, (op, at, peer, seq, step) in enumerate(rows[rank]):
            calls[index]["created_ns"] = calls[index]["completed_ns"] = round(at * 1e9)
            calls[index]["op"], calls[index]["peer"], calls[index]["seq"] = names.index(op), peer, seq
            calls[index]["step"], calls[index]["state"] = step, State.COMPLETED
            calls[index]["group"], calls[index]["flags"] = (2, 0) if op == "all_reduce" else (1, Flag.P2P)
        stage, lane = rank // 2 * 2, rank % 2
        groups = Group(""), Group("p", ranks=(lane, lane + 2)), Group(f"d{stage}", ranks=(stage, stage + 1))
        traces.append(RankTrace(TraceHeader(rank, ranks, "a"), calls, groups, names, stacks=((),)))
    return traces, float(np.mean(np.diff(begins)))


@pytest.mark.parametrize("slow, cause", [((2, 3), "stage"), ((1,), "one rank always")])
def test_a_slow_stage_of_a_pipeline_is_told_from_a_slow_rank(slow: tuple[int, ...], cause: str) -> None:
    factors = noise(21, ranks=4, width=0.002)
    _, expected = pipeline(factors)
    factors[list(slow)] *= 1.5
    found = find_slow(pipeline(factors)[0])
    assert found is not None
    assert (found.what_ifs[0].ranks, found.cause) == (slow, cause)
    assert found.what_ifs[0].step_s == pytest.approx(expected, rel=0.03)
    assert found.replayed_s == pytest.approx(found.step_s, rel=0.02)


def test_garbage_collection_is_named_by_its_marks() -> None:
    factors = noise(22, width=0.005)
    _, expected = record(DDP, factors)
    for step in range(120):
        factors[step * 3 % 8, step] *= 1.4
    traces, _ = record(DDP, factors)
    marks: dict[int, list[PhaseMark]] = {}
    for step in range(1, 120):
        rank = step * 3 % 8
        end = int(traces[rank].calls["created_ns"][step])
        marks.setdefault(rank, []).append(PhaseMark(GC, end - int(0.4 * STEP_S * 1e9), end))
    found = find_slow(traces, marks)
    assert found is not None and (found.cause, found.what_ifs[0].who) == ("garbage collection",) * 2
    assert found.what_ifs[0].step_s == pytest.approx(expected, rel=0.03)


def test_comparing_ranks_costs_the_agent_less_than_a_thousandth_of_a_core_for_each() -> None:
    """Ranks are compared after fifteen steps, but more rarely where it takes long; the first time, with imports, does not count."""
    assert (
        compare_interval_s(15, [], 4)
        == compare_interval_s(15, [9.0], 4)
        == compare_interval_s(15, [9.0, 0.004], 4)
        == 5.0
    )
    assert compare_interval_s(14, [], 4) == 30.0
    for cpu_s in (0.001, 0.005, 0.012):
        for ranks in (1, 8, 64):
            assert cpu_s * ranks / compare_interval_s(1000, [cpu_s * ranks] * 2, ranks) <= 0.0004 * ranks
    assert compare_interval_s(1000, [9.0, 9.0], 1) == 30.0


def lateness_of(own: np.ndarray, rank: int) -> ChangePoint | None:
    steps = own.shape[1]
    times = OwnTimes(tuple(range(len(own))), np.arange(steps), np.arange(steps) * 1.0, own, np.ones(steps))
    return rank_change(times, rank, rank)


def uneven(chance: np.random.Generator, steps: int, spread: float, memory: float) -> np.ndarray:
    """Own times of four ranks; with memory a slow step is followed by slow ones, as on a machine that others use too."""
    found = chance.standard_normal((4, steps))
    for step in range(1, steps):
        found[:, step] = memory * found[:, step - 1] + np.sqrt(1 - memory**2) * found[:, step]
    return np.clip(1 + spread * found, 0.3, None)


@pytest.mark.parametrize(("spread", "memory"), [(0.02, 0.5), (0.07, 0.0), (0.05, 0.3)])
def test_ranks_that_are_uneven_did_not_become_slow(spread: float, memory: float) -> None:
    chance = np.random.default_rng(39)
    for _ in range(4):
        own = uneven(chance, 1000, spread, memory)
        assert [lateness_of(own, rank) for rank in range(4)] == [None] * 4


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.04])
def test_a_tenth_is_found_among_uneven_steps(spread: float) -> None:
    chance = np.random.default_rng(40)
    named = []
    for _ in range(20):
        own = uneven(chance, 145, spread, 0.0)  # a look comes up to fifteen steps late
        own[2, 100:] *= 1.1
        named.append([rank for rank in range(4) if lateness_of(own, rank) is not None])
    assert named.count([2]) >= 19


@pytest.mark.parametrize(("waits", "times"), [(True, 0.0), (False, 1.0), (False, 2.0)])
def test_whether_ranks_wait_in_a_call_is_told_although_one_saves_now_and_then(
    waits: bool, times: float
) -> None:
    """After a save of another rank nothing is left to do beside the call, so the rank waits for it in any case."""
    chance = np.random.default_rng(3)
    late = np.abs(chance.normal(0, 0.02, 300))
    late[::30] = 0.5
    after = np.maximum(chance.normal(0.125, 0.02, 300) - times * late, 0.0)
    before, late_before = chance.normal(0.1, 0.01, 300), np.abs(chance.normal(0, 0.01, 300))
    parts = [one - np.median(one) for one in (late, after, before, late_before)]
    assert is_blocking([np.stack(parts)]) == waits


@pytest.mark.parametrize("sizes", [(16,), (64, 8)], ids=["one bucket", "two buckets"])
def test_a_script_without_step_marks_is_compared_too(sizes: tuple[int, ...]) -> None:
    """Each bucket of DDP seemed to overlap with the next one, so `allranks slow` of an unmodified script had no step at all."""
    factors = noise(9, ranks=4)
    factors[2] *= 1.5
    group = (0, 1, 2, 3)
    traces, _ = record(
        [(group, 0.9), (group, 0.1)][: len(sizes)], factors, non_blocking=(0,) * (len(sizes) - 1)
    )
    for trace in traces:
        trace.calls["stack"], trace.calls["step"] = 1, -1
        for part, size in enumerate(sizes):
            trace.calls["in_numel"][part :: len(sizes)] = size
    stacks = ((), (Frame("backward", "autograd.py", 1),))
    found = find_slow([replace(trace, stacks=stacks) for trace in traces])
    assert found is not None and found.what_ifs[0].ranks == (2,), found
    assert found.steps == pytest.approx(factors.shape[1], abs=2)


@pytest.mark.parametrize("ranks", [3, 512])
def test_the_sentence_is_true_for_few_and_for_many_ranks(ranks: int) -> None:
    """ "2% of 3 ranks" is less than one rank: the share is of their time."""
    gain = WhatIf("rank 1", (1,), 0.098, 0.02)
    found = SlowReport(0.1, 0.1, (gain,), "one rank always", (), ranks, 100)
    assert found.sentence == (
        f"Without rank 1: 98 ms instead of 100 ms per step, which saves 2% of the time of {ranks} ranks (one rank always)."
    )
