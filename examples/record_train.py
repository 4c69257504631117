"""A recorded job: two ranks train over gloo; read their black boxes while they run and after they are gone.

torchrun --nproc-per-node 2 examples/record_train.py
allranks dump --list
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import allranks


def main() -> None:
    recorder = allranks.record()  # before DDP is built, so that its reducer is recorded too
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        allranks.step(step)  # the progress mark
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 10:
            with allranks.expect("evaluation", up_to_s=60):  # silence here is not a hang
                dist.all_reduce(loss.detach())
    print(f"rank {dist.get_rank()}: {recorder.path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
