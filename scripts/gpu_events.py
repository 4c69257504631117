"""What a CUDA event costs behind each kind of NCCL call, and what reading the shapes of three tensors costs there.

scripts/gpu_events.py        # two ranks share one GPU; prints JSON: operation and what followed it ->
                             # [CPU us of the call, us of what followed (median), the fastest tenth of it]
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_replicas import SHARED_GPU

from allranks.channel.frames import HeldPort

ROUNDS = 300


def measure(rank: int, port: int) -> None:
    """One of two ranks; the first prints."""
    os.environ.update(SHARED_GPU, NCCL_HOSTID=f"h{rank}", RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    one, both = torch.ones(1024, device="cuda"), torch.ones(2048, device="cuda")
    halves = [torch.ones(1024, device="cuda") for _ in range(2)]
    event = torch.cuda.Event()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(both, one),
        "all_gather": lambda: dist.all_gather(halves, one),
        "reduce_scatter": lambda: dist.reduce_scatter(one, halves),
    }
    followers: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "event": event.record,
        "shapes": lambda: hash(tuple([each.shape for each in halves] + [one.shape])),
    }
    found = {f"{c}, {f}": _time(calls[c], followers[f]) for c in calls for f in followers}
    if rank == 0:
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


def _time(call: Callable[[], object], follower: Callable[[], object]) -> tuple[float, float, float]:
    whole, took = [], []
    for number in range(ROUNDS):
        begin = time.thread_time_ns()
        call()
        called = time.thread_time_ns()
        follower()
        took.append((time.thread_time_ns() - called) / 1000)
        whole.append((called - begin) / 1000)
        if number % 5 == 4:
            torch.cuda.synchronize()
    return (
        round(statistics.median(whole), 1),
        round(statistics.median(took), 2),
        round(sorted(took)[ROUNDS // 10], 2),
    )


if __name__ == "__main__":
    port = HeldPort()
    mp.spawn(measure, args=(port.number,), nprocs=2)
