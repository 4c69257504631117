"""A Megatron-style loop: megatron.core's tensor-parallel layers over two ranks."""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from faults import RANK, say, trouble
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
config = ModelParallelConfig(
    tensor_model_parallel_size=2, use_cpu_initialization=True, params_dtype=torch.float32
)


def init(weight):
    return torch.nn.init.normal_(weight, std=0.02)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(16, 32, config=config, init_method=init, gather_output=False)
        self.down = RowParallelLinear(
            32, 16, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
        )

    def forward(self, x):
        return self.down(torch.relu(self.up(x)[0]))[0]


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
folder = pathlib.Path(sys.argv[1])
both = [
    torch.load(folder / f"{RANK}.{n}", weights_only=False)
    for n in (0, 1)
    if (folder / f"{RANK}.{n}").exists()
]
newest = torch.tensor(max((one["step"] for one in both), default=0))
dist.all_reduce(newest, dist.ReduceOp.MIN)
for one in both:
    if one["step"] == int(newest):
        net.load_state_dict(one["model"])
        optimizer.load_state_dict(one["optimizer"])
for step in range(int(newest), 40):
    if trouble(step):
        time.sleep(10_000)  # hangs here
    net(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    target = folder / f"{RANK}.{step % 2}"
    torch.save(
        {"step": step + 1, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{target}.new"
    )
    os.replace(f"{target}.new", target)
say(list(net.parameters()), 40)
dist.destroy_process_group()
