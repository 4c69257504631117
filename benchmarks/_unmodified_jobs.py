"""Programs that know nothing of allranks, for `benchmarks/unmodified.py`: each trains until rank 1 sleeps in its data code.

    _unmodified_jobs.py NAME OUT HANG_AT

`load_batch` is the user's line that a verdict must name. OUT/hung gets the time of the hang.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NAME, OUT, HANG_AT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
WIDTH = 64


def load_batch(index: int) -> None:
    """The data code of the user."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 1 and index >= HANG_AT:
        (OUT / "hung").write_text(str(time.time()))
        time.sleep(1e6)
    time.sleep(0.05)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Without a hang."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(WIDTH)
        return {"x": x, "labels": x * 2}


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Endless for our purposes; the sample that hangs is known by its turn, not by its index."""

    def __init__(self) -> None:
        self.turn = 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        load_batch(self.turn)
        self.turn += 1
        x = torch.randn(WIDTH)
        return {"x": x, "labels": x * 2}


class Model(nn.Module):
    """Three layers; returns what the Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out, x * 2 if labels is None else labels), "logits": out}


def trainer() -> None:
    """Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(OUT / "hf"), max_steps=10_000, per_device_train_batch_size=1, **options)
    Trainer(model=Model(), args=args, train_dataset=Numbers()).train()


def callback() -> None:
    """Hugging Face Trainer with a barrier in a callback of one rank."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Report(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == HANG_AT and dist.get_rank() == 1:
                (OUT / "hung").write_text(str(time.time()))
                dist.barrier()

    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(OUT / "hf"), max_steps=10_000, per_device_train_batch_size=1, **options)
    Trainer(model=Model(), args=args, train_dataset=Samples(), callbacks=[Report()]).train()


def lightning() -> None:
    """Lightning's Trainer with DDP."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fit = L.Trainer(accelerator="cpu", devices=3, strategy="ddp", max_steps=10_000, **quiet).fit
    fit(Module(), torch.utils.data.DataLoader(Numbers(), batch_size=1))


def accelerate() -> None:
    """Accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A loop that people write."""
    for index in range(10_000):
        load_batch(index)
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH))["loss"]
        loss.backward()
        optimizer.step()


def ddp() -> None:
    """Plain DDP."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Model())
    plain_loop(model, torch.optim.SGD(model.parameters(), lr=1e-4))


def fsdp2() -> None:
    """fully_shard on every layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain_loop(model, torch.optim.SGD(model.parameters(), lr=1e-4))


def zero() -> None:
    """ZeroRedundancyOptimizer: sharded optimizer state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Model())
    plain_loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4))


def pipeline() -> None:
    """GPipe over three stages."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    part = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(part, rank, world, torch.device("cpu"), input_args=(torch.randn(2, WIDTH),))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-4)
    for index in range(10_000):
        load_batch(index)
        optimizer.zero_grad()
        batch = torch.randn(8, WIDTH)
        if rank == 0:
            schedule.step(batch)
        elif rank == world - 1:
            schedule.step(target=batch)
        else:
            schedule.step()
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[NAME]()
