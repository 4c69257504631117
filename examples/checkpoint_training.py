"""Training that can be killed at any moment and continues where it was.

    python examples/checkpoint_training.py --folder /tmp/example-run --steps 200
    (kill it, start it again)
    allranks checkpoint ls /tmp/example-run

Also under torchrun: `torchrun --nproc-per-node 2 examples/checkpoint_training.py …`, and with another number of
ranks after a restart.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from allranks.checkpoint import CheckpointConfig, CheckpointManager


def main() -> None:
    """Trains a small model and saves as it goes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="/tmp/allranks-example")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    )
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    config = CheckpointConfig(nvme_path=args.folder, checkpoint_interval=50, memory_snapshot_interval=10)
    with CheckpointManager(config) as manager:
        state = manager.restore(model, optimizer, schedule)
        first = state.step + 1 if state is not None else 1
        print(f"starting at step {first}")
        for step in range(first, args.steps + 1):
            batch = torch.randn(32, 64)
            loss = (model(batch) - batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            saved = manager.step(step, model, optimizer, schedule, metrics={"loss": loss.item()})
            if saved:
                print(
                    f"step {step}: loss {loss.item():.4f}, saved to {', '.join(tier.name for tier in saved)}"
                )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
