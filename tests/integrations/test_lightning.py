"""Lightning, as it comes from the registry."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.replicas import KILLS, run

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

import torch  # noqa: E402

import allranks  # noqa: E402
from allranks.blackbox.header import read_header  # noqa: E402
from allranks.integrations.lightning import AllranksCallback, FaultTolerantStrategy  # noqa: E402
from allranks.lighthouse.options import Options, ServerOptions  # noqa: E402
from allranks.lighthouse.server import Lighthouse  # noqa: E402

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
    def validation_step(self, batch, index):
        self.log("val_loss", ((self.net(batch[0]) - batch[1]) ** 2).mean())
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
    def on_train_batch_end(self, *_):
        lives(trainer.strategy.manager)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
stopping = pl.callbacks.EarlyStopping("val_loss", mode="max", patience=1000)  # counts, and never stops
trainer = pl.Trainer(strategy=FaultTolerantStrategy(), max_epochs=50, logger=False, default_root_dir=sys.argv[1],
                     enable_progress_bar=False, enable_model_summary=False, callbacks=[stopping,
                         pl.callbacks.ModelCheckpoint(sys.argv[1], every_n_train_steps=500)])
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
            torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(32)), batch_size=32))
bits = torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().tobytes()
scheduler = trainer.lr_scheduler_configs[0].scheduler
says(f"name={NAME}", f"step={trainer.global_step}", f"epoch={trainer.current_epoch}",
      f"scheduler={scheduler.last_epoch}", f"lr={scheduler.get_last_lr()[0]!r}",
      f"patience={stopping.wait_count}", f"bits={hashlib.sha256(bits).hexdigest()}")
"""


@pytest.mark.parametrize("kills", KILLS)
def test_trainers_are_replicas_with_equal_bits_after_kills(tmp_path: Path, kills: int) -> None:
    """One changed argument: after the kills steps, epochs, rates, callbacks and parameters are equal at the end."""
    said = run(REPLICA, tmp_path, kills, str(tmp_path / "out"))
    assert said["replica-0"] == said["replica-1"]
    facts = said["replica-0"]
    assert (facts["step"], facts["scheduler"]) == (
        "1000",
        "1000",
    )  # 50 passes over 160 samples in batches of 8


def test_the_callback_marks_steps_and_announces_validation(tmp_path: Path, folder: Path) -> None:
    """An unmodified Trainer: the box knows the step, and that a validation is not a hang."""
    seen: list[tuple[int, bool, float]] = []

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.net(batch["input_ids"]).sum()

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            header = read_header(recorder.path)
            seen.append((header.step, header.expect_until_ns > 0, header.tokens))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    recorder = allranks.record()
    loader = torch.utils.data.DataLoader([{"input_ids": torch.randn(2)} for _ in range(4)], batch_size=1)
    trainer = pl.Trainer(
        max_steps=4, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path, callbacks=[AllranksCallback()],
    )  # fmt: skip
    trainer.fit(Module(), loader, loader)
    assert seen == [(1, True, 2), (3, True, 2)]
    recorder.close()


@pytest.mark.parametrize("fails_at", [(), (2, 5)])
def test_accumulated_batches_give_the_parameters_of_an_ordinary_trainer(
    fails_at: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica, two batches per step, five batches per pass; also when a step fails and is made again."""
    monkeypatch.setenv("ALLRANKS_TOKEN", "")
    rows = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(2, 1)
            self.calls = 0

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            self.calls += 1
            if self.calls in fails_at and isinstance(self.trainer.strategy, FaultTolerantStrategy):
                self.trainer.strategy.manager.report_error(RuntimeError("a link broke"))
            return (self.net(batch[0]) ** 2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def trained(**named: object) -> list[torch.Tensor]:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
        module = Module()
        pl.Trainer(
            max_epochs=2, accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, **named,
        ).fit(module, loader)  # fmt: skip
        return [p.detach() for p in module.parameters()]

    with Lighthouse(Options(), ServerOptions()) as lighthouse:
        monkeypatch.setenv("ALLRANKS_LIGHTHOUSE", lighthouse.address)
        replica = trained(strategy=FaultTolerantStrategy())
    assert all(map(torch.equal, replica, trained(accelerator="cpu")))
