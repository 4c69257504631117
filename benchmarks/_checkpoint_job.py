"""The job whose state benchmarks/checkpoint.py saves, and what a way to save it looks like."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MB = 1 << 20
#: Wait until the state may change; wait until the save is safe.
Started = tuple[Callable[[], Any], Callable[[], Any]]


def build(size_mb: int) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A chain of linear layers and a new AdamW: 98 layers, so that with Adam's state it is about 590 tensors."""
    layers = 98
    width = int((size_mb * MB / 4 / 3 / layers) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=size_mb > 512)  # else minutes of steps


class Job:
    """A model in training, after its first step."""

    def __init__(self, size_mb: int) -> None:
        self.model, self.optimizer = build(size_mb)
        self.batch = torch.randn(16, self.model[0].in_features)
        self.step()
        self.bytes = sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state."""
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *states]

    def state(self) -> dict[str, Any]:
        """The state as the peers take it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, before_update: Callable[[], Any] = lambda: None) -> None:
        """Forward, backward, update."""
        self.model(self.batch).pow(2).mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


@dataclass
class Method:
    """One way to save. `start(folder, step)` begins a save; `close` ends helpers. `stands`: nothing runs after
    `start`, the whole save is a stall."""

    name: str
    start: Callable[[Path, int], Started]
    close: Callable[[], Any] = lambda: None
    stands: bool = False


def nothing() -> None:
    """Nothing to wait for."""


def timed(act: Callable[[], Any]) -> float:
    """Seconds an act takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def median(act: Callable[[], Any], rounds: int) -> float:
    """The median of a few runs, in seconds."""
    return statistics.median(timed(act) for _ in range(rounds))
