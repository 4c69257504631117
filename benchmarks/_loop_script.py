"""What `benchmarks/loop.py` trains to measure overhead: plain DDP on gloo, or the same under a Manager in replicas.

    _loop_script.py OUT STEPS WIDTH

Rank 0 leaves the times of its steps, and the CPU seconds per second that the ranks and everything around them
(launcher, agent, lighthouse, helpers) used meanwhile.
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


def cpu_s(pid: int) -> float:
    """CPU seconds of one process; 0 when it has gone."""
    try:
        tasks = [(task / "schedstat").read_text().split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return 0.0
    return sum(map(int, tasks)) / 1e9


def family(root: int) -> list[int]:
    """A process and everything below it."""
    try:
        tasks = Path(f"/proc/{root}/task").glob("*/children")
        children = [int(word) for path in tasks for word in path.read_text().split()]
    except OSError:
        return []
    return [root, *(pid for child in children for pid in family(child))]


def is_rank(pid: int, launcher: int) -> bool:
    """Whether it runs this script as a child of the launcher."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
        return int(parent) == launcher and Path(__file__).name in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def job_cpu_s() -> tuple[float, float]:
    """CPU seconds so far of (the ranks, everything around them)."""
    launcher = os.getppid()
    used = [(cpu_s(pid), is_rank(pid, launcher)) for pid in family(launcher)]
    return sum(s for s, rank in used if rank), sum(s for s, rank in used if not rank)


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
    times, cpu, begun = [], (0.0, 0.0), 0.0
    for number in range(WARM_UP + steps):
        if number == WARM_UP and reports:
            cpu, begun = job_cpu_s(), time.perf_counter()
        begin = time.perf_counter()
        mark(number)
        zero_grad()
        model(batch).square().mean().backward()
        step()
        times.append(time.perf_counter() - begin)
    if reports:
        took = time.perf_counter() - begun
        ranks, around = (now - then for now, then in zip(job_cpu_s(), cpu, strict=True))
        facts = {"step_s": times[WARM_UP:], "ranks_cpu": ranks / took, "around_cpu": around / took}
        out.write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
