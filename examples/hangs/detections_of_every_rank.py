"""all_gather of the boxes found in an image: every rank brings another number of them."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(10):
    boxes = torch.ones(8) if step != 6 else torch.ones(8 + 4 * rank)
    dist.all_gather([torch.empty_like(boxes) for _ in range(world)], boxes)  # <- here
