"""The worker process of the DataLoader of rank 1 hangs; its training loop waits for a batch."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
trainer = os.getpid()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        while rank == 1 and index == 9 and os.getppid() == trainer:
            time.sleep(0.1)
        return torch.ones(4)


for batch in torch.utils.data.DataLoader(Samples(), num_workers=1):
    dist.all_reduce(batch)  # <- here
