"""What one cell of `benchmarks/loop.py --matrix` trains: plain DDP, or the same model under a Manager in replicas.

    _loop_matrix_train.py OUT STEPS [--pause-at N] [--device cpu|cuda] [--pace-s S]

Saves every ten steps and begins from its own last save. Tells the drill when it saves and restores, so that faults can
strike there. On CUDA several ranks share one GPU: each looks like a host of its own to NCCL.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("ALLRANKS_RANK") or os.environ["RANK"])
os.environ.setdefault("NCCL_HOSTID", f"rank-{RANK}")
REPLICAS = "REPLICA_GROUP_ID" in os.environ

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import allranks  # noqa: E402
from allranks.drill.preload import reach  # noqa: E402

SAVE_EVERY, PAUSE_S = 10, 20.0


def save(path: Path, step: int, state: dict[str, Any]) -> None:
    """As a training script does it, atomically."""
    reach("save")
    new = path.with_name(f"{path.name}.new")
    torch.save({"step": step, "state": state}, new)
    new.replace(path)


def train_plain(args: argparse.Namespace, model: nn.Module, batch: torch.Tensor) -> None:
    """torch's own DDP; all ranks restart together."""
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    path, first = args.out / f"save.{RANK}", 0
    if path.exists():
        reach("heal")
        found = torch.load(path, weights_only=True)
        first = found["step"]
        model.load_state_dict(found["state"])
    # ranks may have saved different steps: the earliest counts
    agreed = torch.tensor([first], device=args.device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(int(agreed), args.steps):
        begin = time.monotonic()
        allranks.step(step)
        pause(args, step)
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            save(path, step + 1, model.state_dict())
        time.sleep(max(0.0, args.pace_s - (time.monotonic() - begin)))
    dist.destroy_process_group()


def train_replicas(args: argparse.Namespace, model: nn.Module, batch: torch.Tensor) -> None:
    """The same under a Manager."""
    from allranks.manager.ddp import DistributedDataParallel
    from allranks.manager.manager import Manager
    from allranks.manager.optimizer import Optimizer

    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    manager = Manager(
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (step := manager.current_step()) < args.steps:
        begin = time.monotonic()
        optimizer.zero_grad()
        pause(args, step)
        wrapped(batch).square().mean().backward()
        if optimizer.step() and step % SAVE_EVERY == SAVE_EVERY - 1:
            save(args.out / f"save.{RANK}", step + 1, model.state_dict())
        time.sleep(max(0.0, args.pace_s - (time.monotonic() - begin)))
    manager.shutdown()


def pause(args: argparse.Namespace, step: int) -> None:
    """All ranks rest at this step, once: a silence that is not a hang."""
    mark = args.out / f"paused.{RANK}"
    if step == args.pause_at and not mark.exists():
        mark.touch()
        time.sleep(PAUSE_S)


def main() -> None:
    """Trains to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause-at", type=int, default=-1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pace-s", type=float, default=0.05)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(args.device)
    batch = torch.randn(16, 64, device=args.device)
    (train_replicas if REPLICAS else train_plain)(args, model, batch)


if __name__ == "__main__":
    main()
