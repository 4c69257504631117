"""Small training jobs for the tests: a model with buffers, an optimizer with state, and ways to compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here instead of in every fork

from allranks.checkpoint import CheckpointState, create_checkpoint_state


def make_job(
    seed: int = 0, width: int = 16, layers: int = 2
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with a BatchNorm (its buffers change in the forward pass) and AdamW after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        *[torch.nn.Linear(width, width) for _ in range(layers)], torch.nn.BatchNorm1d(width)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, optimizer, seed)
    return model, optimizer


def train_step(model: Any, optimizer: Any, seed: int) -> None:
    """One deterministic step."""
    width = next(model.parameters()).shape[-1]
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(8, width, generator=generator)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make_state(step: int = 1, seed: int = 0, width: int = 16) -> CheckpointState:
    """A state of its own, sharing memory with nothing."""
    model, optimizer = make_job(seed, width)
    return create_checkpoint_state(step, model, optimizer, metrics={"loss": 0.5}).cpu_copy()


def same(one: Any, other: Any) -> bool:
    """Bit for bit: tensors, nested containers and plain values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def same_state(one: CheckpointState, other: CheckpointState) -> bool:
    """Model, optimizer and scheduler of two states are equal bit for bit."""
    return all(
        same(getattr(one, name), getattr(other, name))
        for name in ("step", "epoch", "model_state_dict", "optimizer_state_dict", "lr_scheduler_state_dict")
    )


def contents(folder: Path) -> list[str]:
    """What lies in a folder store beside its pointer."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".allranks.json")


def flip(path: Path, *positions: int, bit: int = 0) -> None:
    """Flips one bit of a file at each position, as a bad disk does."""
    data = bytearray(path.read_bytes())
    for position in positions:
        data[position] ^= 1 << bit
    path.write_bytes(data)
