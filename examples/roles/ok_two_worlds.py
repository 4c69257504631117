"""Healthy: two worlds of two ranks, each with a slow rank."""

import datetime
import time

import torch
import torch.distributed as dist
from job import free_port, main, ready, start, tell

DAY = datetime.timedelta(days=1)


def trainer(rank, port, pause_s):
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=rank == "0", timeout=DAY)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2, timeout=DAY)
    for step in range(10**6):
        if rank == "1":
            time.sleep(float(pause_s))
        dist.all_reduce(torch.ones(4))
        if step == 3 and rank == "1":
            ready()


def rollout(rank, port, pause_s):
    trainer(rank, port, pause_s)


def driver():
    tell("driver")
    parts = []
    for role, pause_s in ((trainer, 0.4), (rollout, 0.7)):
        port = free_port()
        parts += [start(role, n, port, pause_s, name=f"{role.__name__}{n}") for n in range(2)]
    for part in parts:
        part.wait()


main(driver, trainer, rollout)
