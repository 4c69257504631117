"""fairscale's sharded optimizer and sharded data parallel over two ranks."""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
sharded = ShardedDataParallel(model, optimizer)
for _ in range(20):
    optimizer.zero_grad()
    sharded(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
print("trained")
dist.destroy_process_group()
