"""Measures checkpoints of a model on a CUDA device: gpu_checkpoint.py OUT.

Goals: the copy out of the device reaches 85 % of the pinned-copy bandwidth measured in the same run; a loop with
saves takes at most 2 % longer than the same loop without; what is restored equals, bit for bit, a copy of the
state taken on the device at the saved step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier

GB = 1 << 30


class Job:
    """Layers of one width with AdamW; heavy enough that the device, not Python, sets the pace."""

    def __init__(self, device: str, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(width, width) for _ in range(layers)]
        self.model = torch.nn.Sequential(*blocks, torch.nn.BatchNorm1d(width)).to(device)
        fused = {"fused": True} if device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **fused)
        self.batch = torch.randn(batch, width, device=device)
        self.device = device

    def step(self, passes: int) -> None:
        """Several forward and backward passes (gradient accumulation), one update."""
        for _ in range(passes):
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.model(self.batch).float().pow(2).mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state."""
        return [
            *self.model.state_dict().values(),
            *(v for s in self.optimizer.state.values() for v in s.values()),
        ]


def main() -> int:
    """Runs everything; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    on_device = args.device == "cuda"
    width = args.width or (4096 if on_device else 128)
    job = Job(args.device, width, args.layers, 8192 if on_device else 64)
    folder = Path(tempfile.mkdtemp(prefix="gpu-checkpoint-", dir=os.environ.get("CHECKPOINT_FOLDER")))
    try:
        numbers = measure(job, folder, on_device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    goals = judge(numbers, on_device)
    (args.out / "gpu_checkpoint.json").write_text(json.dumps({"numbers": numbers, "goals": goals}, indent=1))
    print(json.dumps(numbers, indent=1))
    for name, passed in goals.items():
        print(f"{'PASS' if passed else 'FAIL'} {name}")
    return 0 if all(goals.values()) else 1


def measure(job: Job, folder: Path, on_device: bool) -> dict[str, Any]:
    """All numbers."""
    job.step(1)
    size = sum(t.nbytes for t in job.tensors())
    passes = fit_passes(job, 0.25 if on_device else 0.01)
    numbers: dict[str, Any] = {
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if on_device else "cpu",
        "state_gb": size / GB, "passes_per_step": passes, "pinned_gb_s": pinned_bandwidth() if on_device else None,
    }  # fmt: skip
    numbers.update(copy_speed(job, size))
    numbers.update(lost_time(job, folder, passes))
    numbers.update(round_trip(job, folder, size))
    return numbers


def pinned_bandwidth() -> float:
    """The best of several plain copies from the device into pinned memory, GB/s."""
    source = torch.empty(2 * GB, dtype=torch.uint8, device="cuda")
    target = torch.empty(2 * GB, dtype=torch.uint8, pin_memory=True)
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, 2 / (time.perf_counter() - began))
    return best


def copy_speed(job: Job, size: int) -> dict[str, Any]:
    """Our copy with the device otherwise idle, after the first save has allocated and pinned its memory."""
    speeds, calls = [], []
    config = CheckpointConfig(nvme_path=None, memory_snapshot_interval=1, max_snapshots=2)
    with CheckpointManager(config) as manager:
        for step in range(1, 8):
            synchronize()
            began = time.perf_counter()
            manager.step(step, job.model, job.optimizer)
            calls.append(time.perf_counter() - began)
            manager.wait_for_pending_saves()
            assert manager._copy is not None and manager._copy.error is None
            if step > 2:
                speeds.append(size / GB / manager._copy.copied_s)
    return {
        "copy_gb_s": max(speeds),
        "copy_median_gb_s": statistics.median(speeds),
        "call_ms": 1e3 * statistics.median(calls[2:]),
    }


def lost_time(job: Job, folder: Path, passes: int) -> dict[str, Any]:
    """A loop with one save in 20 steps against the same loop without, alternating; memory tier, then disk."""
    found: dict[str, Any] = {}
    for tier, more in (
        ("memory", {"nvme_path": None, "memory_snapshot_interval": 20}),
        (
            "nvme",
            {
                "nvme_path": folder / "lost",
                "memory_snapshot_interval": 0,
                "checkpoint_interval": 20,
                "keep_last_n": 1,
            },
        ),
    ):
        plain, saving = [], []
        with CheckpointManager(CheckpointConfig(**more)) as manager:
            manager.attach(job.optimizer)
            run(job, manager, 20, passes)  # warm-up: memory is allocated
            manager.wait_for_pending_saves()
            for _ in range(3):
                plain.append(run(job, None, 20, passes))
                saving.append(run(job, manager, 20, passes))
                manager.wait_for_pending_saves()
            found[f"{tier}_skipped"] = manager.skipped
        base = statistics.median(plain)
        found[f"{tier}_step_ms"] = 1e3 * base / 20
        found[f"{tier}_lost_percent"] = 100 * (statistics.median(saving) - base) / base
    return found


def run(job: Job, manager: CheckpointManager | None, steps: int, passes: int) -> float:
    """Seconds for some steps; the save begins after the first one and overlaps with the rest."""
    synchronize()
    began = time.perf_counter()
    for step in range(1, steps + 1):
        job.step(passes)
        if manager is not None:
            manager.step(20 if step == 1 else 1, job.model, job.optimizer)
    synchronize()
    return time.perf_counter() - began


def round_trip(job: Job, folder: Path, size: int) -> dict[str, Any]:
    """Saves while training continues, restores, and compares with a copy made on the device at that step."""
    config = CheckpointConfig(nvme_path=folder / "trip", checkpoint_interval=1, memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        job.step(1)
        expected = [t.clone() for t in job.tensors()]
        began = time.perf_counter()
        manager.step(1, job.model, job.optimizer)
        for _ in range(5):  # changes buffers, parameters and optimizer state while the copy runs
            job.step(1)
        assert manager.wait_for_pending_saves()
        durable = time.perf_counter() - began
        synchronize()
        began = time.perf_counter()
        state = manager.restore(job.model, job.optimizer, tier=CheckpointTier.NVME)
        synchronize()
        restore = time.perf_counter() - began
    assert state is not None and state.step == 1
    equal = all(torch.equal(a, b.to(a.device)) for a, b in zip(expected, job.tensors(), strict=True))
    return {
        "bit_equal": equal,
        "durable_s": durable,
        "restore_s": restore,
        "restore_gb_s": size / GB / restore,
    }


def judge(numbers: dict[str, Any], on_device: bool) -> dict[str, bool]:
    """The goals, by name."""
    goals = {"what is restored equals what was saved": numbers["bit_equal"]}
    if on_device:
        goals["copy at 85 % of the pinned bandwidth"] = numbers["copy_gb_s"] >= 0.85 * numbers["pinned_gb_s"]
        goals["at most 2 % lost with memory snapshots"] = numbers["memory_lost_percent"] <= 2.0
        goals["at most 2 % lost with saves to disk"] = numbers["nvme_lost_percent"] <= 2.0
    return goals


def fit_passes(job: Job, seconds: float) -> int:
    """Passes per step, so that a step takes about this long."""
    synchronize()
    began = time.perf_counter()
    job.step(4)
    synchronize()
    return max(1, round(4 * seconds / (time.perf_counter() - began)))


def synchronize() -> None:
    """Waits for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
