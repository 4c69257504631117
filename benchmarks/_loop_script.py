"""What `benchmarks/loop.py` trains to measure overhead: plain DDP on gloo, or the same under a Manager in replicas.

    _loop_script.py OUT STEPS WIDTH

Rank 0 leaves the times of its steps and the CPU seconds of the whole job (launcher, ranks, helpers) per step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import allranks

WARM_UP = 20


def job_cpu_s(root: int) -> float:
    """CPU seconds of a process and everything below it."""
    try:
        fields = Path(f"/proc/{root}/stat").read_text().rsplit(")", 1)[1].split()
        children = [
            int(w) for p in Path(f"/proc/{root}/task").glob("*/children") for w in p.read_text().split()
        ]
    except OSError:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(job_cpu_s(child) for child in children)


def plain(model: nn.Module) -> tuple[nn.Module, Callable[[], None], Callable[[], None], bool]:
    """(model, zero_grad, step, whether this rank reports) with torch's own DDP."""
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return wrapped, optimizer.zero_grad, lambda: optimizer.step() and None, dist.get_rank() == 0


def managed(model: nn.Module) -> tuple[nn.Module, Callable[[], None], Callable[[], None], bool]:
    """The same in replicas."""
    from allranks.manager.ddp import DistributedDataParallel
    from allranks.manager.manager import Manager
    from allranks.manager.optimizer import Optimizer

    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    manager = Manager(load_state_dict=lambda state: None, state_dict=dict, min_replica_size=2)
    optimizer = Optimizer(manager, inner)
    wrapped = DistributedDataParallel(manager, model)
    return wrapped, optimizer.zero_grad, lambda: optimizer.step() and None, os.environ["ALLRANKS_RANK"] == "0"


def main() -> None:
    """Trains and reports."""
    out, steps, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))
    model, zero_grad, step, reports = managed(body) if "REPLICA_GROUP_ID" in os.environ else plain(body)
    batch = torch.randn(64, width)
    mark = allranks.step if "ALLRANKS_DRILL" in os.environ else lambda number: None
    times, cpu = [], 0.0
    for number in range(WARM_UP + steps):
        if number == WARM_UP and reports:
            cpu = job_cpu_s(os.getppid())
        begin = time.perf_counter()
        mark(number)
        zero_grad()
        model(batch).square().mean().backward()
        step()
        times.append(time.perf_counter() - begin)
    if reports:
        used = (job_cpu_s(os.getppid()) - cpu) / steps
        out.write_text(json.dumps({"step_s": times[WARM_UP:], "cpu_s": used}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
