"""The trainer opens a second world for weights. The rollout engine never joins it: it waits for a message on another port."""

import datetime
import socket

import torch.distributed as dist
from job import free_port, main, ready, start, tell

DAY = datetime.timedelta(days=1)


def trainer(port):
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=True, timeout=DAY, wait_for_workers=False)
    ready()
    dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=DAY)
    dist.barrier()


def rollout(port):
    control = socket.create_server(("127.0.0.1", 0))
    control.accept()  # <- here
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=False, timeout=DAY)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=DAY)


def driver():
    tell("driver")
    port = free_port()
    parts = [start(rollout, port), start(trainer, port)]
    for part in parts:
        part.wait()


main(driver, trainer, rollout)
