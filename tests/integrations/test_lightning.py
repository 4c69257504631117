"""Lightning, as it comes from the registry."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.replicas import KILLS, run

pytest.importorskip("lightning", reason="lightning is not installed")

REPLICA = """
import hashlib, sys, torch, lightning.pytorch as pl
from allranks.integrations.lightning import FaultTolerantStrategy
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    def training_step(self, batch, index):
        x, y = batch
        return ((self.net(x) - y) ** 2).mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
    def on_train_batch_end(self, *_):
        lives(trainer.strategy.manager)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
trainer = pl.Trainer(strategy=FaultTolerantStrategy(), max_epochs=50, logger=False, default_root_dir=sys.argv[1],
                     enable_progress_bar=False, enable_model_summary=False, callbacks=[
                         pl.callbacks.ModelCheckpoint(sys.argv[1], every_n_train_steps=500)])
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
bits = torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().tobytes()
scheduler = trainer.lr_scheduler_configs[0].scheduler
print("SAYS", f"name={NAME}", f"step={trainer.global_step}", f"epoch={trainer.current_epoch}",
      f"scheduler={scheduler.last_epoch}", f"lr={scheduler.get_last_lr()[0]!r}",
      f"bits={hashlib.sha256(bits).hexdigest()}", flush=True)
"""


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.timeout(300)
def test_trainers_are_replicas_with_equal_bits_after_kills(tmp_path: Path, kills: int) -> None:
    """One changed argument: after the kills steps, epochs, rates and parameters are equal at the end."""
    said = run(REPLICA, tmp_path, kills, str(tmp_path / "out"))
    assert said["replica-0"] == said["replica-1"]
    facts = said["replica-0"]
    assert (facts["step"], facts["scheduler"]) == (
        "1000",
        "1000",
    )  # 50 passes over 160 samples in batches of 8
