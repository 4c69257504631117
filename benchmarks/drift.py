"""What comparing the replicas' states costs: `python benchmarks/drift.py [--device cuda] [--batch 32] [--fused]`.

One process trains a small transformer (AdamW), takes the checksum of parameters and optimizer state in every step,
beside it, and in none. Printed: seconds per step, what one checksum adds, how much of that the training thread spends in
it, and its share of a step when it is taken every `EVERY_STEPS` steps, as by default; and the digest of learning rates and
scales that every vote carries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from allranks.manager.drift import EVERY_STEPS, StateSums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--fused", action="store_true", help="AdamW with its step counts on the device")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=arguments.fused)
    data = torch.randn(arguments.batch, 128, 512, device=device)
    sums = StateSums(modules=[model], optimizers=[optimizer])

    spent: list[float] = []

    def step(checked: bool) -> None:
        begin_s = _timed(sums.begin) if checked else 0.0
        optimizer.zero_grad()
        model(data).square().mean().backward()
        if checked:
            spent.append(begin_s + _timed(sums.finish))
        optimizer.step()

    step(True)
    plain, checked = [], []
    for _ in range(arguments.steps):  # alternately: the load of the machine changes
        plain.append(_timed(lambda: step(False), device))
        checked.append(_timed(lambda: step(True), device))
    small = statistics.median(_timed(sums.small_digest) for _ in range(100))
    step_s = statistics.median(plain)
    added_s = statistics.median(b - a for a, b in zip(plain, checked, strict=True))
    found = {
        "device": str(device),
        "state_mb": round(sum(3 * p.numel() * p.element_size() for p in model.parameters()) / 1e6, 1),
        "step_s": round(step_s, 4),
        "checksum_adds_s": round(added_s, 5),
        "checksum_in_training_thread_s": round(statistics.median(spent), 5),
        "every_steps": EVERY_STEPS,
        "checksum_share_percent": round(100 * added_s / step_s / EVERY_STEPS, 4),
        "small_digest_us": round(small * 1e6, 1),
        "small_digest_share_percent": round(100 * small / step_s, 4),
    }
    print(json.dumps(found, indent=1))


def _timed(work: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds an act takes; with a device until that has done it."""
    began = time.perf_counter()
    work()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
