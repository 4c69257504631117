"""Backends that torch knows under another name or type than they say themselves train as without us, and are recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.drill.ranks import Ranks
from allranks.recording import torch_internals as internals

from .boxes import ops, traces

_made: list[
    object
] = []  # torch keeps one backend of type "custom"; the other would end while its peer still connects


def _register(name: str) -> None:
    """A backend made in Python over gloo: its type is "custom", and it calls itself "gloo"."""

    def make(options: Any, _: object) -> dist.ProcessGroupGloo:
        made = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        _made.append(made)
        return made

    dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])


def _train(rank: int, world: int, backend: str, record: bool) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if record:
            allranks.record()
        for name in ("mine", "other"):
            _register(name)
        dist.init_process_group(backend)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for step in range(3):
            model(torch.full((1, 4), float(rank + step))).sum().backward()
        gradient = model.module.weight.grad
        assert gradient is not None
        value = dist._functional_collectives.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        result = [*gradient.flatten().tolist(), float(value)]
        dist.destroy_process_group()
    return result, [str(item.message) for item in seen if "allranks" in str(item.message)]


@pytest.mark.parametrize("backend", ["gloo", "mine", "cpu:mine", "cpu:mine,cuda:other", "cpu:gloo,cuda:mine"])
def test_ddp_trains_over_any_backend_as_without_us_and_its_calls_are_recorded(
    backend: str, folder: Path
) -> None:
    """The reducer's calls, which C++ makes by itself, are there too."""
    with Ranks(_train, 2, (backend, False), backend=None) as ranks:
        alone = ranks.values()
    with Ranks(_train, 2, (backend, True), backend=None) as ranks:
        assert ranks.values() == alone
    assert [said for _, said in alone] == [[], []]
    for trace in traces(folder).values():
        assert ops(trace).count("all_reduce") == 4  # one of the reducer in each step, and the functional one
        assert trace.groups[int(trace.calls[0]["group"])].backend == backend


PYTHON_BACKEND = """
import torch, torch.distributed as dist, allranks
from torch._C import _distributed_c10d as c10d

class Mine(c10d.Backend):
    def name(self):
        return "mine"
    def getBackendName(self):
        return "mine"
    def allreduce(self, tensors, options):
        done = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)

kept = Mine(0, 1)
dist.Backend.register_backend("mine", lambda *_: kept, devices=["cpu"])
recorder = allranks.record()
dist.init_process_group("mine", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(recorder.writer.box.get("calls_started"), recorder._hook.guard.active)
"""


@pytest.mark.usefixtures("forks")
def test_a_backend_written_in_python_is_not_asked_for_options_that_it_lacks(folder: Path) -> None:
    """It would ask itself without an end: an error of ours with Python 3.11, the end of the process with 3.12."""
    if "options" not in vars(internals.Backend):
        pytest.skip("this torch has no backends in Python")
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "0"}  # torch's own recorder asks for them
    done = subprocess.run(
        [sys.executable, "-c", PYTHON_BACKEND], capture_output=True, text=True, timeout=300, env=env
    )
    assert (done.returncode, done.stdout) == (0, "1 True\n"), done.stderr
    assert "disabled" not in done.stderr
