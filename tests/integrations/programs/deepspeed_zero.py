"""DeepSpeed on CPU: ZeRO stage 1 with its engine's own checkpoints."""

import pathlib
import sys
import time

import deepspeed
import torch
from faults import say, trouble

deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
config = {
    "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
    "steps_per_print": 1000,
}  # fmt: skip
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
if (pathlib.Path(sys.argv[-1]) / "latest").exists():
    engine.load_checkpoint(sys.argv[-1])
for step in range(engine.global_steps, 40):
    generator = torch.Generator().manual_seed(step)
    if trouble(step):
        time.sleep(10_000)  # hangs here
    loss = engine(torch.randn(8, 8, generator=generator)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(sys.argv[-1])
say(list(net.parameters()), engine.global_steps)
torch.distributed.destroy_process_group()
