"""torch's pipeline: rank 1 splits the batch into four micro-batches, rank 0 into two; rank 1 fails in its loss."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

stage = PipelineStage(torch.nn.Linear(8, 8), rank, world, torch.device("cpu"))
for step in range(6):
    count = 4 if rank == 1 and step == 3 else 2
    schedule = ScheduleGPipe(stage, count, loss_fn=torch.nn.functional.mse_loss)
    batch = (torch.ones(8, 8),) if rank == 0 else ()
    schedule.step(*batch, target=torch.ones(8, 8) if rank == 1 else None)  # <- here
