"""The training state at one step, and how to load it into a model and an optimizer."""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from allranks.errors import CheckpointValidationError

#: A state_dict: plain values and tensors by name.
StateDict: TypeAlias = dict[str, Any]
SavedDict: TypeAlias = Mapping[str, Any]  # the same, read-only
#: Fields that each rank saves for itself and gets back by its rank number.
PER_RANK = ("dataset_state", "rng_states", "metrics", "timestamp")
#: Those that a rank without a saved part takes from the first rank.
FROM_THE_FIRST = ("metrics", "timestamp")


@dataclass
class CheckpointState:
    """Complete training state. `step` counts finished optimizer steps: training continues with `step + 1`.

    A load fills `rank_states` with the per-rank fields of every rank that saved.
    """

    step: int = 0
    epoch: int = 0
    model_state_dict: StateDict = field(default_factory=dict)
    optimizer_state_dict: StateDict = field(default_factory=dict)
    lr_scheduler_state_dict: StateDict = field(default_factory=dict)
    dataset_state: StateDict = field(default_factory=dict)
    rng_states: StateDict = field(default_factory=dict)
    metrics: StateDict = field(default_factory=dict)
    world_size: int = 1
    timestamp: float = field(default_factory=time.time)
    rank_states: dict[int, StateDict] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.step = whole_number("step", self.step)
        epoch = int(self.epoch) if isinstance(self.epoch, float) else self.epoch  # the HF Trainer saves 1.5
        self.epoch = whole_number("epoch", epoch)

    def to_dict(self) -> StateDict:
        """All saved fields; tensors are not copied."""
        return {name: getattr(self, name) for name in _KEYS}

    @classmethod
    def from_dict(cls, data: SavedDict) -> CheckpointState:
        """Builds a state from a dict; unknown keys are ignored and missing ones get their default."""
        return cls(**{name: data[name] for name in _KEYS if name in data})

    def cpu_copy(self) -> CheckpointState:
        """A copy that shares no memory with this one, all tensors on the CPU."""
        return CheckpointState(**{name: _copied(getattr(self, name)) for name in _KEYS})


def whole_number(name: str, value: object) -> int:
    """The value as an int, also from numpy and tensor integers; TypeError for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r:.80}") from None


_KEYS = tuple(f.name for f in fields(CheckpointState) if f.name != "rank_states")
REQUIRED_KEYS = ("step", "model_state_dict", "optimizer_state_dict")


#: Keys that torch's tutorials, DCP, Lightning, Megatron and nanoGPT use for the same fields.
_OTHER_NAMES = {
    "model_state_dict": ("model", "state_dict"),
    "optimizer_state_dict": ("optimizer", "optim", "optimizer_states"),
    "lr_scheduler_state_dict": ("lr_scheduler", "scheduler", "scheduler_state_dict", "lr_schedulers"),
    "step": ("global_step", "iteration", "iter_num"),
}


def state_of(raw: SavedDict) -> CheckpointState:
    """Converts a saved dict: one of ours, a dict such as `{"model": …, "optimizer": …}`, or a bare state_dict."""
    if len(raw) == 1 and isinstance(inner := next(iter(raw.values())), Mapping) and "model" in inner:
        raw = inner  # {"app": …} in DCP's tutorial
    known = {name: raw[name] for name in _KEYS if name in raw}
    for ours, names in _OTHER_NAMES.items():
        found = next((_one(raw[name]) for name in names if name in raw), None)
        if ours not in known and isinstance(found, int if ours == "step" else Mapping):
            known[ours] = found
    step, epoch = known.pop("step", 0), known.pop("epoch", 0)
    known["step"] = step if isinstance(step, int) else 0
    if "model_state_dict" in known:
        known["epoch"] = epoch if isinstance(epoch, (int, float)) else 0
        return CheckpointState.from_dict(known)
    bare = {name: value for name, value in raw.items() if name != "step" or not isinstance(value, int)}
    return CheckpointState(step=known["step"], model_state_dict=bare)


def _one(value: object) -> object:
    """Unwraps a list of one: Lightning saves a list of optimizers."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def create_checkpoint_state(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: LRScheduler | None = None,
    dataset_state: StateDict | None = None,
    metrics: StateDict | None = None,
    epoch: int = 0,
) -> CheckpointState:
    """Collects the training state without copying tensors. DDP and torch.compile wrappers are removed."""
    return CheckpointState(
        step=step,
        epoch=epoch,
        model_state_dict=unwrap(model).state_dict(),
        optimizer_state_dict=optimizer.state_dict() if optimizer is not None else {},
        lr_scheduler_state_dict=lr_scheduler.state_dict() if lr_scheduler is not None else {},
        dataset_state=dict(dataset_state or {}),
        rng_states=collect_rng_states(),
        metrics=dict(metrics or {}),
        world_size=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
    )


def load_checkpoint_to_model(
    state: CheckpointState,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
    strict: bool = True,
    restore_rng: bool = False,
) -> None:
    """Loads a state into model, optimizer and scheduler. For sharded models use `CheckpointManager.restore`.

    With `strict`, missing names, unexpected names and different shapes raise before anything changes.
    """
    target = unwrap(model)
    if strict:
        _check_fit(target.state_dict(), state.model_state_dict)
    target.load_state_dict(state.model_state_dict, strict=strict)
    if optimizer is not None and state.optimizer_state_dict:
        optimizer.load_state_dict(state.optimizer_state_dict)
    if lr_scheduler is not None and state.lr_scheduler_state_dict:
        lr_scheduler.load_state_dict(state.lr_scheduler_state_dict)
    if restore_rng:
        restore_rng_states(state.rng_states)


def unwrap(model: torch.nn.Module) -> Any:
    """The model inside DDP, torch.compile or any wrapper that adds no tensors to its `.module`."""
    for _ in range(8):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ != "FullyShardedDataParallel":  # FSDP1
            inner = None if _holds_more(model) else getattr(model, "module", None)
        if inner is None or not hasattr(inner, "state_dict"):
            break
        model = inner
    return model


def _holds_more(model: torch.nn.Module) -> bool:
    """Whether a wrapper has tensors outside its `module`, such as AveragedModel."""
    inner = getattr(model, "module", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(inner, torch.nn.Module):
        return False
    inside = {id(one) for one in (*inner.parameters(), *inner.buffers())}
    return any(id(one) not in inside for one in (*model.parameters(), *model.buffers()))


def collect_rng_states() -> StateDict:
    """The states of the random generators of Python, numpy, torch and, if CUDA is in use, every visible device."""
    states: StateDict = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_rng_states(states: SavedDict) -> None:
    """Restores the saved random generators; a rank without a saved state keeps its own."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"].cpu())
    saved = states.get("cuda", [])
    if saved and torch.cuda.is_available() and len(saved) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in saved])


def _check_fit(live: SavedDict, saved: SavedDict) -> None:
    missing = tuple(name for name in live if name not in saved)
    other = tuple(
        name
        for name, value in saved.items()
        if name not in live or getattr(value, "shape", None) != getattr(live[name], "shape", None)
    )
    if missing or other:
        raise CheckpointValidationError(
            "the model and the checkpoint do not match",
            missing,
            other,
            hint="load with strict=False to load the tensors that match",
        )
