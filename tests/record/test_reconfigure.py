"""A group that changes its members while it lives (`dist._reconfigure`, torch 2.14 and later)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.drill.ranks import Ranks

from .boxes import traces

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has no dist._reconfigure")


def _train(rank: int, world: int, folder: str, record: bool) -> list[float]:
    """Three ranks; the last one leaves, and the others go on in another order."""
    if record:
        allranks.record()
    meet = {"rank": rank, "world_size": world, "store": dist.FileStore(f"{folder}/store", world)}
    extra: dict[str, Any] = {"enable_reconfigure": True}
    dist.init_process_group("gloo", **meet, **extra)
    side = dist.FileStore(f"{folder}/side", world)
    _reconfigure(side, 1, rank, [0, 1, 2])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    torch.nn.init.ones_(model.module.weight)
    if rank == 2:
        _step(model, rank)
        return []
    first = _step(model, rank)
    _reconfigure(side, 2, rank, [1, 0])
    return [*first, *_step(model, rank)]


def _step(model: Any, rank: int) -> list[float]:
    model.zero_grad()
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    return [float(number) for number in model.module.weight.grad.flatten()]


def _reconfigure(side: Any, number: int, rank: int, members: list[int]) -> None:
    side.set(f"{number}.{rank}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]
    handles = [side.get(f"{number}.{member}").decode() for member in members]
    dist._reconfigure(number, handles).wait()  # type: ignore[attr-defined]


def test_a_reconfigured_group_has_its_new_members_and_trains_as_without_us(
    folder: Path, tmp_path: Path
) -> None:
    """Gradients are divided by the new size, and the rank that left is in no group that is still in use."""
    results = []
    for record in (False, True):
        place = tmp_path / str(record)
        place.mkdir()
        with Ranks(_train, 3, (str(place), record), backend=None) as ranks:
            results.append(ranks.values())
    assert results[0] == results[1]
    assert results[0][0][:4] == [2.0] * 4 and results[0][0][4:] == [1.5] * 4
    found = traces(folder)
    assert sorted(found) == [0, 1, 2]
    for rank in (0, 1):
        trace = found[rank]
        group = trace.groups[int(trace.calls[-1]["group"])]
        assert (group.ranks, group.name.rpartition("@")[2]) == ((1, 0), "2")
    left = found[2].groups[int(found[2].calls[-1]["group"])]
    assert left.ranks == (0, 1, 2)
