"""The training script of elastic.py: the same job, resumed with torch.save or with allranks' snapshots.

_elastic_script.py torch|allranks FOLDER WIDTH EVERY PACE_S

Rank 0 appends to FOLDER/log.jsonl: one line per start with its times, one per finished step.
"""

import time

BEGAN = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.time()


class TorchSave:
    """What people write by themselves: rank 0 saves, every rank loads; written aside and renamed."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every

    def restore(self, model, optimizer):
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    def step(self, step, model, optimizer):
        if step % self.every == 0 and dist.get_rank() == 0:
            new = self.path.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
            new.rename(self.path)


class Snapshots:
    """The agents' memory; no disk."""

    def __init__(self, every: int) -> None:
        from allranks.checkpoint import CheckpointConfig, CheckpointManager

        self.manager = CheckpointManager(CheckpointConfig(nvme_path=None, memory_snapshot_interval=every))

    def restore(self, model, optimizer):
        state = self.manager.restore(model, optimizer)
        return 0 if state is None else state.step

    def step(self, step, model, optimizer):
        self.manager.step(step, model, optimizer)


def main(how: str, folder: Path, width: int, every: int, pace_s: float) -> None:
    """Trains until it is ended."""
    dist.init_process_group("gloo")
    joined = time.time()
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saver = TorchSave(folder / "checkpoint.pt", every) if how == "torch" else Snapshots(every)
    done = saver.restore(model, optimizer)
    wrapped = DistributedDataParallel(model)
    log = open(folder / f"log-{rank}.jsonl", "ab", buffering=0)  # noqa: SIM115
    times = {"began": BEGAN, "imported": IMPORTED, "joined": joined, "restored": time.time()}
    log.write(json.dumps({"start": done, "pid": os.getpid(), **times}).encode() + b"\n")
    for step in range(done + 1, 1_000_000):
        optimizer.zero_grad()
        wrapped(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        saver.step(step, model, optimizer)
        log.write(json.dumps({"step": step, "at": time.time()}).encode() + b"\n")
        time.sleep(pace_s)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
