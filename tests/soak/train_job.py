"""Trains in whole-job mode with checkpoints in memory and on a disk, and writes down every step and every restore.

python train_job.py FOLDER STORE      (started by `allranks run --nproc-per-node`; ends when FOLDER/stop exists)
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.soak.train_replicas import digest

from allranks.checkpoint import CheckpointConfig, CheckpointManager

PACE_S = 0.05


def main(folder: Path, store: Path) -> None:
    """Until told to stop."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = open(folder / f"job-{rank}-{os.getpid()}.jsonl", "ab", buffering=0)  # noqa: SIM115

    def note(**row: object) -> None:
        row = {"at": time.time(), "pid": os.getpid(), "replica": str(rank), **row}
        out.write(json.dumps(row).encode() + b"\n")

    s3 = os.environ.get("SOAK_S3")
    remote = {"s3_bucket": "soak", "s3_prefix": "run", "s3_options": json.loads(s3)} if s3 else {}
    config = CheckpointConfig(nvme_path=store, checkpoint_interval=20, memory_snapshot_interval=5, **remote)
    with CheckpointManager(config) as manager:
        state = manager.restore(ddp, optimizer)
        step = state.step if state is not None else 0
        note(kind="restored" if state else "start", step=step, hash=digest(model))
        while True:
            noise = torch.Generator().manual_seed(step * 1000 + rank)
            loss = ddp(torch.randn(8, 16, generator=noise)).square().mean()
            loss.backward()
            time.sleep(PACE_S)
            while (folder / f"hang-{os.getpid()}").exists():
                time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            note(kind="step", step=step, hash=digest(model))
            manager.step(step, ddp, optimizer)
            told = torch.tensor([float((folder / "stop").exists())])
            dist.all_reduce(told)
            if told.item():
                break
    note(kind="end", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
