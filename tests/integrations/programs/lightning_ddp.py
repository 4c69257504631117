"""Lightning's Trainer with its ddp strategy and its own checkpoints."""

import pathlib
import sys
import time

import lightning as L
import torch
from faults import say, trouble


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        if trouble(self.global_step):
            time.sleep(10_000)  # hangs here
        # Lightning begins an epoch's data again when it resumes within it: the batch is drawn by the step.
        seed = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
        return (self.net(torch.randn(8, 8, generator=seed)) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.zeros(640, 1))
saved = L.pytorch.callbacks.ModelCheckpoint(sys.argv[1], every_n_train_steps=1, save_last=True)
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=40, logger=False, callbacks=[saved],
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
last = pathlib.Path(sys.argv[1]) / "last.ckpt"
module = Module()
trainer.fit(
    module, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=str(last) if last.exists() else None
)
say(list(module.parameters()), trainer.global_step)
