"""What is read in C and what is read in Python is recorded the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.cli import main as command
from allranks.drill.ranks import Ranks
from allranks.model.trace import RankTrace
from allranks.recording import torch_internals as internals

from .boxes import record_one, traces

TOLD = ("seq", "p2p_seq", "op_id", "step", "in_numel", "out_numel", "timeout_ms", "tag", "peer", "root")


def _all_kinds(rank: int, world: int) -> None:
    """One call of each kind, waited for in each way, and one that fails."""
    one, two, group = torch.ones(2), torch.ones(4), dist.new_group([0, 1])
    dist.all_reduce(one, dist.ReduceOp.MAX)
    dist.broadcast(one, src=1)
    dist.reduce(one, dst=0, group=group)
    dist.all_gather_into_tensor(two, one)
    dist.all_gather([torch.ones(2), torch.ones(2)], one)
    dist.reduce_scatter_tensor(one, two)
    dist.all_to_all_single(two, torch.ones(4), [2, 2], [2, 2])
    dist.barrier()
    work = dist.all_reduce(one, async_op=True)
    assert work is not None
    work.wait()
    swap = [
        dist.P2POp(dist.isend, one, 1 - rank, tag=3),
        dist.P2POp(dist.irecv, torch.ones(2), 1 - rank, tag=3),
    ]
    for sent in dist.batch_isend_irecv(swap):
        sent.wait()
    dist.all_gather_object([None] * world, {"rank": rank})
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        dist.group.WORLD.allreduce("not a tensor")  # type: ignore[attr-defined, union-attr]


def _facts(trace: RankTrace) -> list[tuple[Any, ...]]:
    rows = []
    for call in trace.calls:
        group = trace.groups[int(call["group"])]
        stack = [(os.path.basename(frame.file), frame.name) for frame in trace.stacks[int(call["stack"])]]
        names = trace.names[int(call["op"])], group.name, group.ranks, int(call["state"]), int(call["flags"])
        rows.append((*names, trace.shapes[int(call["shapes"])], stack, *(int(call[field]) for field in TOLD)))
    return rows


def _record_slowly(rank: int, world: int, slow: bool) -> None:
    if slow:
        internals.form_of = lambda kind: internals.READ_IN_PYTHON
    record_one(rank, world, _all_kinds)


def test_calls_in_an_unusual_form_are_recorded_as_those_in_the_usual_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, sizes, numbers, states and stacks of every kind of call: read in C, and read in Python."""
    found = []
    for slow in (False, True):
        place = folder / str(slow)
        monkeypatch.setenv("ALLRANKS_DIR", str(place))
        with Ranks(_record_slowly, 2, (slow,)) as ranks:
            ranks.values(timeout_s=90)
        found.append({rank: _facts(trace) for rank, trace in sorted(traces(place).items())})
    for rank in (0, 1):
        assert len(found[0][rank]) >= 17
        assert found[0][rank] == found[1][rank]


def test_without_the_part_in_c_nothing_is_recorded_and_the_program_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning says what to install; `dump --list` does not call it running."""
    monkeypatch.setitem(sys.modules, "allranks.recording._fast", None)
    monkeypatch.delattr("allranks.recording._fast", raising=False)
    with pytest.warns(RuntimeWarning, match="recording disabled: its C extension .*C compiler") as told:
        recorder = allranks.record()
    assert "NotRecording" not in str(told[0].message)
    assert not recorder.active
    allranks.step(1)
    assert command(["dump", str(folder), "--list", "--json"]) == 0
    assert [box["state"] for box in json.loads(capsys.readouterr().out)["boxes"]] == ["could not start"]


def test_only_one_rank_of_a_node_says_that_the_part_in_c_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(sys.modules, "allranks.recording._fast", None)
    monkeypatch.delattr("allranks.recording._fast", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not allranks.record().active
    assert not [one for one in recwarn if "allranks" in str(one.message)]
