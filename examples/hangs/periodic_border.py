"""Halo exchange without wrap-around: in one step rank 3 takes the border as periodic and exchanges with rank 0."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def exchange(peers):
    operations = []
    for peer in peers:
        operations.append(dist.P2POp(dist.isend, torch.ones(4), peer))
        operations.append(dist.P2POp(dist.irecv, torch.ones(4), peer))
    for work in dist.batch_isend_irecv(operations):  # <- here
        work.wait()


for step in range(8):
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < world]
    if rank == 3 and step == 5:
        peers.append(0)
    exchange(peers)
    dist.all_reduce(torch.ones(16))
