"""The state of a training job at one step: what is saved, and how it gets back into model and optimizer."""

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

#: What torch's parts save of themselves: plain values and tensors by name.
StateDict: TypeAlias = dict[str, Any]
SavedDict: TypeAlias = Mapping[str, Any]  # the same, as it is read
#: Fields whose value belongs to one rank: saved by every rank, given back to the rank of the same number.
PER_RANK = ("dataset_state", "rng_states", "metrics", "timestamp")
#: Of these, what a rank that was not there at the save gets from the first one.
FROM_THE_FIRST = ("metrics", "timestamp")


@dataclass
class CheckpointState:
    """Complete training state. `step` counts finished optimizer steps: training continues with `step + 1`.

    `rank_states` is filled by a load only: for every rank that saved, its `dataset_state` and `rng_states`.
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
        epoch = int(self.epoch) if isinstance(self.epoch, float) else self.epoch  # a Trainer's may be 1.5
        self.epoch = whole_number("epoch", epoch)

    def to_dict(self) -> StateDict:
        """The ten known keys; tensors are not copied."""
        return {name: getattr(self, name) for name in _KEYS}

    @classmethod
    def from_dict(cls, data: SavedDict) -> CheckpointState:
        """From the known keys; unknown ones are ignored, missing ones get their default."""
        return cls(**{name: data[name] for name in _KEYS if name in data})

    def cpu_copy(self) -> CheckpointState:
        """A copy that shares no memory with this one, all tensors on the CPU."""
        return CheckpointState(**{name: _copied(getattr(self, name)) for name in _KEYS})


def whole_number(name: str, value: object) -> int:
    """An int of what counts as one, numpy's and a tensor's too; TypeError names the rest."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r:.80}") from None


_KEYS = tuple(f.name for f in fields(CheckpointState) if f.name != "rank_states")
REQUIRED_KEYS = ("step", "model_state_dict", "optimizer_state_dict")


#: What other savers call the parts of a state: torch's tutorials and examples, DCP's, Lightning, Megatron, nanoGPT.
_OTHER_NAMES = {
    "model_state_dict": ("model", "state_dict"),
    "optimizer_state_dict": ("optimizer", "optim", "optimizer_states"),
    "lr_scheduler_state_dict": ("lr_scheduler", "scheduler", "scheduler_state_dict", "lr_schedulers"),
    "step": ("global_step", "iteration", "iter_num"),
}


def state_of(raw: SavedDict) -> CheckpointState:
    """Any saved dict as a state: ours, `{"model": …, "optimizer": …}` as people write it, or a bare state_dict."""
    if len(raw) == 1 and isinstance(inner := next(iter(raw.values())), Mapping) and "model" in inner:
        raw = inner  # {"app": …} of DCP's tutorial
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
    """Lightning keeps a list of optimizers; the only one of them."""
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
    """Collects the state of the parts without copying a tensor. DDP and compiled wrappers are taken off."""
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
    """Puts a loaded state into the parts. A sharded model takes each rank's shards with `CheckpointManager.restore`.

    With `strict`, missing or unexpected names, or other shapes, raise before anything is changed.
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
    """The model inside DDP or torch.compile; any wrapper with the wrapped one, and no more, as `.module`."""
    for _ in range(8):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ != "FullyShardedDataParallel":  # FSDP1
            inner = None if _holds_more(model) else getattr(model, "module", None)
        if inner is None or not hasattr(inner, "state_dict"):
            break
        model = inner
    return model


def _holds_more(model: torch.nn.Module) -> bool:
    """Whether it is no mere wrapper: it has tensors outside of its `module`, as an AveragedModel has."""
    inner = getattr(model, "module", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(inner, torch.nn.Module):
        return False
    inside = {id(one) for one in (*inner.parameters(), *inner.buffers())}
    return any(id(one) not in inside for one in (*model.parameters(), *model.buffers()))


def collect_rng_states() -> StateDict:
    """Python, numpy, torch and, where it is in use, every visible CUDA device."""
    states: StateDict = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_rng_states(states: SavedDict) -> None:
    """Sets the generators that were saved; a new rank without a saved state keeps its own."""
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
            "the model and the checkpoint do not fit together",
            missing,
            other,
            hint="load with strict=False to take what fits",
        )
