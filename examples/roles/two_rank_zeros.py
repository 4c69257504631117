"""Two worlds of two ranks: trainers and rollouts. Rank 0 of the rollouts hangs in its sampler; rank 0 of the trainers waits
for samples in a queue of the store."""

import datetime
import threading

import torch
import torch.distributed as dist
from job import free_port, main, ready, start, tell

DAY = datetime.timedelta(days=1)


def join(port, rank):
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=rank == 0, timeout=DAY)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=DAY)


def sample(step, rank):
    if step == 3 and rank == 0:
        ready()
        threading.Semaphore(0).acquire()  # <- here
    return torch.ones(4)


def rollout(rank, port, shared):
    join(port, int(rank))
    samples = dist.TCPStore("127.0.0.1", int(shared), is_master=False, timeout=DAY)
    for step in range(10):
        dist.all_reduce(sample(step, int(rank)))
        samples.set(f"sample{step}/{rank}", "ready")


def trainer(rank, port, shared):
    join(port, int(rank))
    samples = dist.TCPStore("127.0.0.1", int(shared), is_master=False, timeout=DAY)
    for step in range(10):
        samples.wait([f"sample{step}/{rank}"], DAY)
        dist.all_reduce(torch.ones(4))


def driver():
    tell("driver")
    shared = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=DAY, wait_for_workers=False)
    parts = []
    for role in (trainer, rollout):
        port = free_port()
        parts += [start(role, n, port, shared.port, name=f"{role.__name__}{n}") for n in range(2)]
    for part in parts:
        part.wait()


main(driver, trainer, rollout)
