"""A DDP loop inside hydra.main, which runs it in an output folder of its own (hydra.job.chdir=True)."""

from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@hydra.main(version_base=None, config_path=None)
def main(config: object) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    print("trained in", "outputs" if "outputs" in Path.cwd().parts else Path.cwd(), flush=True)


main()
