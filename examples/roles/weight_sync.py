"""Two trainers are one world. Trainer 0 and two rollout engines are a second one, for weights. Rollout 1 does not
enter the broadcast: it waits until its requests are finished, and one never is."""

import datetime
import threading

import torch
import torch.distributed as dist
from job import free_port, main, ready, start, tell

DAY = datetime.timedelta(days=1)


def join(port, rank, size):
    store = dist.TCPStore("127.0.0.1", int(port), size, is_master=rank == 0, timeout=DAY)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=DAY)


def weight_group(port, rank):
    """A group of processes of different worlds, made as RL frameworks make it."""
    store = dist.TCPStore("127.0.0.1", int(port), 3, is_master=rank == 0, timeout=DAY)
    prefixed = dist.PrefixStore("weights", store)
    return dist.ProcessGroupGloo(prefixed, rank, 3, DAY)


def trainer(rank, port, weights_port):
    rank = int(rank)
    join(port, rank, 2)
    group = weight_group(weights_port, 0) if rank == 0 else None
    while True:
        dist.all_reduce(torch.ones(4))
        if group is not None:
            group.broadcast([torch.ones(4)], dist.BroadcastOptions()).wait()


def rollout(number, weights_port):
    group, drained = weight_group(weights_port, int(number) + 1), threading.Event()
    for step in range(10):
        if step == 3 and number == "1":
            ready()
            drained.wait()  # <- here
        group.broadcast([torch.ones(4)], dist.BroadcastOptions()).wait()


def driver():
    tell("driver")
    port, weights_port = free_port(), free_port()
    parts = [start(trainer, n, port, weights_port, name=f"trainer{n}") for n in range(2)]
    parts += [start(rollout, n, weights_port, name=f"rollout{n}") for n in range(2)]
    for part in parts:
        part.wait()


main(driver, trainer, rollout)
