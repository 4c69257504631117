"""A plain torch loop whose state of each rank is saved by torch.save; FSDP2, a pipeline or ZeRO by its first argument."""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from faults import RANK, say, trouble

kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(3)])

if kind == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    model, optimizer = net, torch.optim.AdamW(net.parameters())
elif kind == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
else:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = net[RANK]
    schedule = Schedule1F1B(PipelineStage(model, RANK, 2, torch.device("cpu")), 4, loss_fn=torch.nn.MSELoss())
    optimizer = torch.optim.AdamW(model.parameters())


def one_step(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)
    if trouble(step):
        time.sleep(10_000)  # hangs here
    if kind == "pipeline":
        schedule.step(x) if RANK == 0 else schedule.step(target=y)
    else:
        (model(x) - y).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def shards(values):
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


def states():
    return [
        one.local_state_dict() if hasattr(one, "local_state_dict") else one.state_dict()
        for one in [optimizer]
    ]


def local_optimizer():
    return optimizer.optim if kind == "zero" else optimizer


both = [
    torch.load(folder / f"{RANK}.{n}", weights_only=False)
    for n in (0, 1)
    if (folder / f"{RANK}.{n}").exists()
]
newest = torch.tensor(max((one["step"] for one in both), default=0))
dist.all_reduce(newest, dist.ReduceOp.MIN)  # what both have
begin = int(newest)
for one in both:
    if one["step"] == begin:
        with torch.no_grad():
            for mine, saved in zip(shards(model.parameters()), one["model"], strict=True):
                mine.copy_(saved)
        local_optimizer().load_state_dict(one["optimizer"])
for step in range(begin, 40):
    one_step(step)
    state = {
        "step": step + 1,
        "model": shards(model.parameters()),
        "optimizer": local_optimizer().state_dict(),
    }
    target = folder / f"{RANK}.{step % 2}"
    torch.save(state, f"{target}.new")
    os.replace(f"{target}.new", target)
say(shards(model.parameters()), 40)
dist.destroy_process_group()
