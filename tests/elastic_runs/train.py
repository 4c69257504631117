"""A job whose arithmetic does not depend on the world: every global batch is the same in every world.

python train.py FOLDER LAST_STEP

Goes no further than the step in FOLDER/gate. Rank 0 appends one line per finished step to FOLDER/steps.jsonl with
the samples of all ranks; every rank appends its topology event to FOLDER/events.jsonl. Every rank has a child that
sleeps, as a DataLoader worker may: it must never outlive its rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allranks.checkpoint import CheckpointConfig, CheckpointManager
from allranks.elastic import ElasticJob, cleanup_distributed, setup_distributed_environment
from allranks.elastic.data import ElasticDataLoader, ResumableDataset
from allranks.elastic.scaling import ElasticScalingManager, GradAccumulationConfig, ScalingConfig

BATCH, MICRO, EVERY, PACE_S = 12, 2, 3, 0.03


def note(path: Path, row: dict[str, object]) -> None:
    """Appends one line in one write."""
    with open(path, "ab", buffering=0) as out:
        out.write(json.dumps(row).encode() + b"\n")


class Examples:
    """A line with a little noise: example i is always the same."""

    def __init__(self, count: int) -> None:
        made = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 8, generator=made)
        self.y = self.x @ torch.arange(8.0) + 0.1 * torch.randn(count, generator=made)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[number], "y": self.y[number]}


def main(folder: Path, last: int) -> None:
    """Trains until step `last`: once over all samples."""
    child = subprocess.Popen(["sleep", "3600"])
    world = setup_distributed_environment("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaling = ElasticScalingManager(
        ScalingConfig(1e-2, MICRO, 3, "none"), GradAccumulationConfig(BATCH, MICRO, 3, "exact"), optimizer,
        "constant_batch", rank=world.rank, world_size=world.world_size,
    )  # fmt: skip
    here = {"rank": world.rank, "world_size": world.world_size}
    dataset = ResumableDataset(Examples(BATCH * last), seed=5, epochs=1, **here)
    job = ElasticJob(
        wrapped, optimizer, scaling=scaling,
        loader=ElasticDataLoader(dataset, MICRO, plan=scaling.accum_manager.plan, **here),
        checkpoint=CheckpointManager(CheckpointConfig(nvme_path=None, memory_snapshot_interval=EVERY)),
    )  # fmt: skip
    event = job.start()
    note(
        folder / "events.jsonl",
        {**event.to_dict(), "pid": os.getpid(), "child": child.pid, "timestamp": time.time()},
    )
    batches = iter(job.loader)
    for step in range(event.step, last + 1):
        while step > int((folder / "gate").read_text() or 0):
            time.sleep(0.02)
        loss, read = train_step(job, batches)
        rows: list[Any] = [None] * world.world_size
        dist.all_gather_object(rows, (loss, read))
        if world.rank == 0:  # before the save: what a snapshot has finished must be written down
            samples = [number for _, numbers in rows for number in numbers]
            row = {"step": step, "loss": sum(one for one, _ in rows) / len(rows), "world": len(rows)}
            note(folder / "steps.jsonl", {**row, "samples": samples, "at": time.time()})
        job.save(step)
        job.checkpoint.wait_for_pending_saves(60)
        time.sleep(PACE_S)
    job.checkpoint.close()
    child.kill()
    child.wait()
    cleanup_distributed()


def train_step(job: ElasticJob, batches: Any) -> tuple[float, list[int]]:
    """One optimizer step: (this rank's weighted loss, the samples it took)."""
    total, read = 0.0, []
    for i in range(job.scaling.accumulation_steps):
        batch = next(batches)
        read += [int(number) for number in job.loader.last_samples]
        job.model.require_backward_grad_sync = i == job.scaling.accumulation_steps - 1
        loss = (job.model(batch["x"]).squeeze(1) - batch["y"]).square().mean() * job.loader.weight
        loss.backward()
        total += float(loss.detach())
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scaling.step_lr()
    return total, read


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
