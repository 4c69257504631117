"""A plain loop with Accelerate, saved and loaded by save_state and load_state."""

import pathlib
import sys
import time

import torch
from accelerate import Accelerator
from faults import say, trouble

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(800, 8), torch.randn(800, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
folder = pathlib.Path(sys.argv[1])
done = max((int(path.name) for path in folder.glob("[0-9]*") if (path / "whole").exists()), default=0)
if done:
    accelerator.load_state(str(folder / str(done)))
for step, (x, y) in enumerate(accelerator.skip_first_batches(loader, done), start=done):
    if step == 40:
        break
    if trouble(step):
        time.sleep(10_000)  # hangs here
    accelerator.backward(((model(x) - y) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(str(folder / str(step + 1)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / str(step + 1) / "whole").touch()
    accelerator.wait_for_everyone()
say(list(model.parameters()), 40)
accelerator.end_training()
