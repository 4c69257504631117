"""The part in C and the same in Python record the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.model.trace import RankTrace
from allranks.recording.options import fast

from .boxes import record_ranks

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


def test_both_engines_record_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, sizes, numbers, states and stacks of every kind of call."""
    if fast(True) is None:
        pytest.skip("the part in C was not built")
    found = []
    for pure in ("0", "1"):
        monkeypatch.setenv("ALLRANKS_DIR", str(folder / pure))
        traces = record_ranks(_all_kinds, folder / pure, env={"ALLRANKS_PURE_PYTHON": pure})
        found.append({rank: _facts(trace) for rank, trace in sorted(traces.items())})
    for rank in (0, 1):
        assert len(found[0][rank]) >= 17
        assert found[0][rank] == found[1][rank]
