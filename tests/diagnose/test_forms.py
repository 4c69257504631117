"""Fourteen jobs with one fault each, as NCCL's recorder, torch's hook and gloo dump them, and with short rings: the right rank, cause
and line in every form, and nothing false."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import diagnose
from allranks.load import load_paths
from allranks.model.torch_dump import to_torch_dump

from .facts import false_statements
from .histories import DIE, STUCK, Do, Layout, Program, run
from .hook_form import write_hook_dumps

LATER_NS = 30 * 10**9
LAYOUT = Layout(8, 2)
FORMS: dict[str, dict[str, Any]] = {
    "nccl": {"backend": "nccl"},
    "nccl_ahead": {"backend": "nccl", "ahead": 3},
    "nccl_short": {"backend": "nccl", "ring": {rank: 9 + rank for rank in range(8)}},
    "nccl2": {"backend": "nccl2"},
    "gloo": {"backend": "gloo"},
}
WORLD = {"world": (0, 1, 2, 3)}
Groups = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fault:
    """The truth. `lines`: of the program; () where any is right."""

    groups: Groups
    programs: dict[int, Program]
    ranks: tuple[int, ...]
    causes: frozenset[str]
    lines: tuple[int, ...] = ()


def _rounds(count: int, ranks: int, body: Callable[[int, int], Program]) -> dict[int, Program]:
    """`body` of (rank, round) for each rank."""
    return {rank: [do for step in range(count) for do in body(rank, step)] for rank in range(ranks)}


def _changed(programs: dict[int, Program], rank: int, at: int, *new: Do, drop: int = 0) -> dict[int, Program]:
    program = [*programs[rank]]
    program[at : at + drop] = new
    return {**programs, rank: program}


def _stuck(programs: dict[int, Program], rank: int, at: int, how: Do = STUCK) -> dict[int, Program]:
    return {**programs, rank: [*programs[rank][:at], how]}


def _experts(rank: int, step: int) -> Program:
    exchanges = [Do("all_to_all", size=16, line=21), Do("all_to_all", size=16, line=22)]
    return [*exchanges, Do("all_reduce", f"pair_{rank % 2}", line=23)]


def _pipeline(rank: int, step: int) -> Program:
    get, give = Do("recv", line=30, peer=rank - 1), Do("send", line=31, peer=rank + 1)
    return [*([get] * (rank > 0) + [give] * (rank < 3)) * 3, Do("all_reduce", size=4, line=33)]


def _sharded(rank: int, step: int) -> Program:
    gathers = [Do("all_gather", size=4, out=16, line=40), Do("all_gather", size=4, out=16, line=41)]
    return [*gathers, Do("reduce_scatter", size=16, out=4, line=50)]


def _mixed(rank: int, step: int) -> Program:
    dtype = "Float" if rank == 2 and step == 4 else "BFloat16"
    return [Do("all_reduce", line=30), Do("all_reduce", size=64, dtype=dtype, line=31)]


def _metrics(rank: int, step: int) -> Program:
    """Every other round the even ranks gather; rank 2 forgets it once."""
    gathers = rank % 2 == 0 and step % 2 and not (rank == 2 and step == 5)
    metrics = [Do("all_gather", "even", 2, out=4, line=35)] if gathers else []
    return [Do("all_reduce", line=30), *metrics, Do("all_reduce", size=16, line=40)]


def _ring(rank: int, step: int) -> Program:
    give, get = Do("send", line=30, peer=(rank + 1) % 4), Do("recv", line=31, peer=(rank - 1) % 4)
    both = [give, get] if rank % 2 == 0 or step == 4 else [get, give]
    return [*both, Do("all_reduce", size=4, line=32)]


def _validating(rank: int, step: int) -> Program:
    validation = [Do("all_gather", size=1, out=4, line=70), Do("broadcast", size=4, root=0, line=71)]
    now = step in (2, 5 if rank == 2 else 6)
    return [Do("all_reduce", line=20), Do("all_reduce", size=16, line=21), *(validation if now else [])]


def _nested(rank: int, step: int) -> Program:
    own, other = f"cp_{rank // 2}", f"tp_{rank % 4 // 2}{rank % 2}"
    first = [Do("all_gather", own, 4, out=8, line=21), Do("all_reduce", other, line=22)]
    return [*first, Do("all_gather", own, 6, out=12, line=23), Do("all_reduce", size=1, line=24)]


def _faults() -> dict[str, Fault]:
    missing, extra, message = frozenset({"missing_rank"}), frozenset({"extra_collective"}), "p2p_mismatch"
    shifted = missing | extra | {"type_mismatch", "size_mismatch", "order_inversion"}
    pairs = {**WORLD, "pair_0": (0, 2), "pair_1": (1, 3)}
    nested = {"world": tuple(range(8)), **{f"cp_{i}": (2 * i, 2 * i + 1) for i in range(4)}}
    nested |= {f"tp_{a}{b}": (2 * a + b, 2 * a + b + 4) for a in (0, 1) for b in (0, 1)}
    pipeline, sharded = _rounds(6, 4, _pipeline), _rounds(6, 4, _sharded)
    steps, blocks = _rounds(6, 4, lambda rank, step: [Do("all_reduce", line=20)]), LAYOUT.programs(6)
    steps = {
        rank: [*([program[0]] * (rank == 0)), *program, Do("barrier", size=0, line=60)]
        for rank, program in steps.items()
    }
    buckets = _rounds(
        6,
        4,
        lambda rank, step: [
            Do("all_reduce", size=size, line=line) for line, size in ((30, 8), (31, 99), (32, 200))
        ],
    )
    swapped = _changed(buckets, 3, 13, *buckets[3][14:12:-1], drop=2)
    astray = _changed(blocks, 5, 25, Do("all_reduce", "dp_1", 16, line=21), drop=1)
    return {
        "experts_second_exchange": Fault(pairs, _stuck(_rounds(6, 4, _experts), 3, 13), (3,), missing, (22,)),
        "last_stage_receives_once_more": Fault(
            WORLD, _changed(pipeline, 3, 19, pipeline[3][0]), (3,), extra | {message}, (30, 31, 33)),
        "early_reduce_scatter": Fault(WORLD, _changed(sharded, 1, 13, sharded[1][2]), (1,), shifted, (40, 41, 50)),
        "one_block_of_four": Fault(LAYOUT.members(), _stuck(blocks, 6, 25), (6,), missing, (21,)),
        "stuck_and_killed": Fault(
            LAYOUT.members(), _stuck(_stuck(blocks, 1, 24), 6, 24, DIE), (1, 6), missing | {"rank_died"}),
        "one_dtype_differs": Fault(WORLD, _rounds(6, 4, _mixed), (2,), frozenset({"dtype_mismatch"}), (31,)),
        "more_data_on_rank_0": Fault(WORLD, steps, (0,), shifted, (20, 60)),
        "metrics_of_a_subgroup": Fault(
            {**WORLD, "even": (0, 2)}, _rounds(8, 4, _metrics), (2,), missing, (35,)),
        "healthy": Fault(LAYOUT.members(), LAYOUT.programs(5), (), frozenset()),
        "call_in_another_group": Fault(LAYOUT.members(), astray, (5,), shifted),
        "buckets_swapped": Fault(WORLD, swapped, (3,), shifted, (31, 32)),
        "ring_of_sends": Fault(WORLD, _rounds(6, 4, _ring), (0, 1, 2, 3), frozenset({message}), (30,)),
        "validation_in_another_step": Fault(WORLD, _rounds(8, 4, _validating), (2,), shifted),
        "nested_groups": Fault(nested, _stuck(_rounds(6, 8, _nested), 4, 18), (4,), missing, (23,)),
    }  # fmt: skip


FAULTS = _faults()


def _write(fault: Fault, form: str, folder: Path) -> Path:
    traces = run(fault.groups, fault.programs, **FORMS[form]).traces()
    last = max(int(max(t.calls["created_ns"].max(), t.calls["completed_ns"].max())) for t in traces)
    if form == "nccl2":
        return write_hook_dumps(folder, traces, last + LATER_NS)
    for trace in traces:
        path = folder / f"trace_{trace.header.rank}"
        path.write_bytes(pickle.dumps(to_torch_dump(trace), protocol=2))
        os.utime(path, ns=(last + LATER_NS,) * 2)
    return folder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_every_form_of_its_dumps(name: str, form: str, tmp_path: Path) -> None:
    """All ranks at fault are among the root causes, nobody else is, and every call and line that is named is in the dumps."""
    fault = FAULTS[name]
    loaded = load_paths([str(_write(fault, form, tmp_path))])
    found = diagnose(loaded.traces, loaded.files)
    assert false_statements(found, loaded.traces, ()) == []
    roots = [one for one in found.findings if one.severity == "root"]
    assert {rank for one in roots for rank in one.ranks} == {*fault.ranks}, found.findings
    if (verdict := found.verdict) is not None:
        assert verdict.cause in fault.causes, verdict
        line = verdict.where.partition(":")[2].partition(" ")[0]
        assert not fault.lines or int(line) in fault.lines, verdict


def test_a_call_that_a_rank_passed_over_may_still_come(tmp_path: Path) -> None:
    """Two calls in another order begin like one that was skipped: the verdict says what would tell."""
    loaded = load_paths([str(_write(FAULTS["buckets_swapped"], "nccl", tmp_path))])
    verdict = diagnose(loaded.traces).verdict
    assert verdict is not None and "its calls are in another order" in verdict.missing_evidence[0]
