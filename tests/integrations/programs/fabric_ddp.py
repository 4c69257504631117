"""Lightning Fabric, for `fabric run`, which sets strategy, devices and accelerator."""

import sys
import time

import torch
from faults import say, trouble
from lightning.fabric import Fabric

fabric = Fabric()  # the command has started the processes
torch.manual_seed(0)
net = torch.nn.Linear(16, 16)
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
for step in range(40):
    if trouble(step):
        time.sleep(10_000)  # hangs here
    fabric.backward(model(torch.randn(8, 16)).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
fabric.save(f"{sys.argv[1]}/last.ckpt", {"model": model})
say(list(net.parameters()), 40)
