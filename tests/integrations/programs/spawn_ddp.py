"""DDP as PyTorch's tutorials start it: one process starts its ranks by torch.multiprocessing.spawn."""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from faults import say, trouble


def train(rank, world_size, folder):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(40):
        if trouble(step, rank):
            time.sleep(10_000)  # hangs here
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    say(list(model.parameters()), 40, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2, pathlib.Path(sys.argv[1]).resolve()), nprocs=2)
