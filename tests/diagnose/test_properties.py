"""What holds for all histories: the fast matcher is the plain one, a planted fault is found, names do not matter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from allranks.diagnosis import diagnose
from allranks.diagnosis.align import align
from allranks.diagnosis.match import find_mismatches
from allranks.diagnosis.waits import find_blocked, wait_graph
from allranks.model.trace import RankTrace

from . import reference
from .histories import (
    DIE,
    STUCK,
    Do,
    Flavour,
    Layout,
    Program,
    World,
    edit,
    on_shared_tables,
    run,
    with_change,
)

OPS = (
    "all_reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
    "reduce",
)


def random_job(rng: random.Random) -> list[RankTrace]:
    """Random groups and calls, some of them wrong; some ranks stop, some leave no dump, some rings are short."""
    world = rng.randint(2, 7)
    members = {"world": tuple(range(world))}
    for index in range(rng.randint(0, 3)):
        size = rng.randint(2, world)
        members[f"g{index}"] = tuple(sorted(rng.sample(range(world), size)))
    common = []
    for _ in range(rng.randint(1, 14)):
        op, size = rng.choice(OPS), rng.choice((4, 8))
        group = rng.choice(sorted(members))
        out = size * len(members[group]) if op == "all_gather" else None
        root = members[group][0] if op in ("broadcast", "reduce") else -1
        common.append(
            Do(op, group, size, line=rng.randint(1, 4), root=root, out=out, reduce_op=rng.choice(("", "sum")))
        )
    programs = {rank: [do for do in common if rank in members[do.group]] for rank in range(world)}
    for _ in range(rng.randint(0, 3)):
        programs = _spoil(rng, programs, members)
    flavour = Flavour(
        backend=rng.choice(("nccl", "gloo")), ahead=rng.choice((0, 0, 3)), strict=rng.random() < 0.7,
        ring={rank: rng.randint(1, 6) for rank in range(world) if rng.random() < 0.3},
    )  # fmt: skip
    lost = frozenset(rank for rank in range(world) if rng.random() < 0.06)
    return World(members, programs, flavour).run().traces(lost=lost)


def _spoil(
    rng: random.Random, programs: dict[int, Program], members: dict[str, tuple[int, ...]]
) -> dict[int, Program]:
    rank = rng.choice(sorted(programs))
    if not programs[rank]:
        return programs
    at = rng.randrange(len(programs[rank]))
    do = programs[rank][at]
    if do.op in ("stuck", "die"):
        return programs
    change = rng.randrange(8)
    if change == 0:
        return with_change(programs, rank, at, STUCK)
    if change == 1:
        return with_change(programs, rank, at, DIE)
    if change == 2:
        return with_change(programs, rank, at)
    if change == 3:
        return with_change(programs, rank, at, do, do)
    if change == 4:
        return with_change(programs, rank, at, edit(do, size=do.size + 1))
    if change == 5:
        return with_change(programs, rank, at, edit(do, dtype="Half"))
    if change == 6 and do.root >= 0:
        return with_change(programs, rank, at, edit(do, root=members[do.group][-1]))
    return with_change(programs, rank, at, edit(do, op=rng.choice(OPS), root=-1, out=None))


def _compare(seed: int) -> None:
    traces = random_job(random.Random(seed))
    if not traces:
        return
    job = align(traces)
    names = [(group.name, group.members) for group in job.groups]
    groups, _ = reference.read(traces)
    plain = {
        key: found for key, by_seq in groups.items() if (found := reference.first_mismatch(key[1], by_seq))
    }
    fast = {names[m.group]: (m.seq, m.cause) for m in find_mismatches(job)}
    assert fast == plain, seed
    blocked = find_blocked(job, [])
    seen = {(names[b.group], b.seq, b.waiters, b.missing, tuple(sorted(b.absent))) for b in blocked}
    assert seen == reference.blocked_calls(traces), seed
    sinks = {
        node for sink in wait_graph(job, blocked).sinks() if len(sink) == 1 for node in sink if node >= 0
    }
    assert sinks == reference.idle_culprits(traces), seed


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.everything) for n in (1, 2, 3))])
def test_the_fast_matcher_equals_the_plain_one(block: int) -> None:
    """Mismatches, blocked calls and idle culprits, over 1,200 random histories with planted faults."""
    for seed in range(block * 300, block * 300 + 300):
        _compare(seed)


@pytest.mark.soak
def test_the_fast_matcher_equals_the_plain_one_at_length() -> None:
    """The same, over 20,000."""
    for seed in range(10_000, 30_000):
        _compare(seed)


def test_random_histories_never_break_the_diagnosis() -> None:
    """Whatever the mess, there is an answer, with a confidence, and guilty ranks that exist."""
    for seed in range(600):
        traces = random_job(random.Random(seed))
        result = diagnose(traces)
        assert (result.verdict is None) == (result.status == "ok" or not traces)
        for finding in result.findings:
            assert 0 <= finding.confidence <= 1
            assert finding.sentence
            assert set(finding.ranks) <= set(range(8))


def test_ranks_of_one_program_are_told_the_same_as_each_for_itself() -> None:
    """What is worked out once for ranks that share tables changes nothing, whatever the mess."""
    shared = 0
    for seed in range(300):
        traces = random_job(random.Random(f"kin {seed}"))
        together = on_shared_tables(traces)
        assert diagnose(together) == diagnose(traces), seed
        lanes = [lane for group in align(together).groups for lane in group.lanes.values() if lane.kin]
        shared += len(lanes) > len({lane.kin for lane in lanes})
    assert shared > 100, "hardly any ranks were alike, so this test shows nothing"


PLANTS = ("healthy", "missing", "die", "not_started", "size", "dtype", "type", "extra", "skip")


def plant(kind: str, rng: random.Random) -> tuple[World, tuple[str, tuple[int, ...]] | None]:
    """A realistic job with one fault in its second half, and the answer."""
    layout = rng.choice([Layout(6, 2), Layout(8, 2), Layout(9, 3), Layout(16, 4)])
    programs = layout.programs(rng.choice((5, 8)))
    rank = rng.randrange(layout.world)
    at = rng.randrange(len(programs[rank]) // 2, len(programs[rank]) - 6)
    do = programs[rank][at]
    changes: dict[str, tuple[tuple[Do, ...], str]] = {
        "missing": ((STUCK,), "missing_rank"),
        "die": ((DIE,), "rank_died"),
        "size": ((edit(do, size=do.size + 1, out=do.out),), "size_mismatch"),
        "dtype": ((edit(do, dtype="Half"),), "dtype_mismatch"),
        "type": ((edit(do, op="broadcast" if do.op != "broadcast" else "all_reduce"),), "type_mismatch"),
        "extra": ((edit(do, line=99), do), "extra_collective"),
        "skip": ((), "missing_rank"),
    }
    answer: tuple[str, tuple[int, ...]] | None = None
    if kind == "not_started":
        programs, answer = with_change(programs, rank, 0, STUCK), ("not_started", (rank,))
    elif kind != "healthy":
        new, cause = changes[kind]
        programs, answer = with_change(programs, rank, at, *new), (cause, (rank,))
    flavour = rng.choice([{}, {"ahead": 5}, {"backend": "gloo"}])
    return run(layout.members(), programs, **flavour), answer


@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_fault_is_found(kind: str) -> None:
    """Cause and guilty rank, wherever the fault is and whichever rank is guilty."""
    for seed in range(16):
        world, answer = plant(kind, random.Random(f"{kind} {seed}"))
        verdict = diagnose(on_shared_tables(world.traces())).verdict
        got = None if verdict is None else (verdict.cause, verdict.ranks)
        assert got == answer, (kind, seed, verdict and verdict.sentence)


@pytest.mark.soak
@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_fault_is_found_nearly_always(kind: str) -> None:
    """Over 400 jobs of each kind at most one in a hundred is judged wrong."""
    wrong = []
    for seed in range(400):
        world, answer = plant(kind, random.Random(f"{kind} soak {seed}"))
        verdict = diagnose(world.traces()).verdict
        if (None if verdict is None else (verdict.cause, verdict.ranks)) != answer:
            wrong.append((seed, verdict and verdict.sentence))
    assert len(wrong) <= 4, wrong


@pytest.mark.parametrize("kind", PLANTS)
def test_wrapped_rings_accuse_no_innocent(kind: str) -> None:
    """With short rings the evidence may be lost, but then nobody else is blamed for it."""
    for seed in range(10):
        rng = random.Random(f"ring {kind} {seed}")
        world, answer = plant(kind, rng)
        world.flavour.ring = {rank: rng.choice((12, 18, 25, 60)) for rank in world.programs}
        verdict = diagnose(world.traces()).verdict
        if verdict is None or answer is None or verdict.confidence < 0.6:
            assert verdict is None or answer is not None, (kind, seed)
            continue
        if verdict.cause != "order_inversion":  # a circle names all its members
            assert verdict.ranks == answer[1], (kind, seed, verdict.sentence)


@pytest.mark.parametrize("kind", PLANTS)
def test_neither_the_order_of_files_nor_the_numbering_of_ranks_matters(kind: str) -> None:
    """Shuffled files give the same diagnosis; renumbered ranks give the renumbered one."""
    for seed in range(3):
        rng = random.Random(f"order {kind} {seed}")
        world, _ = plant(kind, rng)
        traces = world.traces()
        usual = diagnose(traces)
        shuffled = traces[:]
        rng.shuffle(shuffled)
        assert diagnose(shuffled) == usual
        numbers = list(world.programs)
        rng.shuffle(numbers)
        other = diagnose([_renumber(trace, numbers) for trace in traces])
        assert (other.verdict is None) == (usual.verdict is None)
        if usual.verdict is not None and other.verdict is not None:
            assert other.verdict.cause == usual.verdict.cause
            assert other.verdict.ranks == tuple(sorted(numbers[rank] for rank in usual.verdict.ranks))
            assert other.verdict.sequence == usual.verdict.sequence


def _renumber(trace: RankTrace, numbers: list[int]) -> RankTrace:
    """The same rank under another number, in all groups."""
    assert trace.header.rank is not None
    groups = tuple(
        replace(group, ranks=tuple(numbers[rank] for rank in group.ranks)) for group in trace.groups
    )
    calls = trace.calls.copy()
    for column in ("peer", "root"):
        known = calls[column] >= 0
        calls[column][known] = [numbers[value] for value in calls[column][known]]
    return replace(
        trace, header=replace(trace.header, rank=numbers[trace.header.rank]), groups=groups, calls=calls
    )
