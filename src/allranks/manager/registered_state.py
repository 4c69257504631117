"""`Manager(state=[model, optimizer, ...])`: what healing carries over, named automatically; and what may be missing in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from allranks.errors import ConfigurationError

log = logging.getLogger("allranks.manager")

_DEEP = 4  # levels of a state in which schedulers and scalers are looked for

LoadFunction = Callable[[Any], object]
SaveFunction = Callable[[], object]


@dataclass(eq=False)
class RegisteredState:
    """The functions that load and save each part of the state, by its name."""

    functions: dict[str, tuple[LoadFunction, SaveFunction]] = field(default_factory=dict)
    # a scheduler may be attached to them
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    scaler_seen: bool = False  # a GradScaler steps our optimizer

    def add(self, state: Sequence[object] | Mapping[str, object]) -> dict[str, Any]:
        """Takes objects in; returns schedulers, scalers and samplers: their plain values must be equal in all replicas."""
        parts = named_parts(state)
        self.functions |= {name: state_functions(part) for name, part in parts.items()}
        large = (nn.Module, torch.optim.Optimizer, torch.Generator)
        return {name: part for name, part in parts.items() if not isinstance(part, large)}

    def save(self) -> dict[str, object]:
        """Every part as its function returns it."""
        return {key: save() for key, (_, save) in self.functions.items()}

    def load(self, parts: Mapping[str, object]) -> None:
        """Gives each part that is there to its function."""
        for key, (load, _) in self.functions.items():
            if key in parts:
                load(parts[key])

    def warn_about_missing(self) -> None:
        """Once, after the first step: a scheduler or scaler shows itself there."""
        missing = (
            missing_parts(self.optimizers, self.scaler_seen, self.save().values()) if self.functions else []
        )
        if missing:
            log.warning(
                "%s is not part of the state that a joining replica takes over: it will train with other values than "
                "the others. Pass it: Manager(state=[model, optimizer, scheduler, scaler, ...])",
                " and ".join(missing),
            )


def named_parts(state: Sequence[object] | Mapping[str, object]) -> dict[str, object]:
    """The objects by name: the mapping's own, or the class name in small letters, numbered when it repeats."""
    if isinstance(state, Mapping):
        found = dict(state)
    else:
        found = {}
        for part in state:
            name, count = type(part).__name__.lower(), 1
            while (key := name if count == 1 else f"{name}{count}") in found:
                count += 1
            found[key] = part
    for name, part in found.items():
        if not isinstance(part, torch.Generator) and not (
            hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        ):
            raise ConfigurationError(
                f"Manager(state=...): {name} ({type(part).__name__}) has no state_dict and load_state_dict",
                hint="pass objects that have both, or torch.Generator; for others use register_state_dict_fn(name, load, save)",
            )
    return found


def state_functions(part: Any) -> tuple[LoadFunction, SaveFunction]:
    """How a part is loaded and saved."""
    if isinstance(part, torch.Generator):
        return lambda state: part.set_state(state["state"].cpu()), lambda: {"state": part.get_state()}
    return part.load_state_dict, part.state_dict


def missing_parts(
    optimizers: Iterable[torch.optim.Optimizer], scaler_seen: bool, states: Iterable[object]
) -> list[str]:
    """What this training loop has and none of these states carries."""
    keys: set[str] = set()
    for state in states:
        _collect_keys(state, keys, _DEEP)
    missing = []
    if any(_has_scheduler(optimizer) for optimizer in optimizers) and "last_epoch" not in keys:
        missing.append("the learning rate scheduler")
    if scaler_seen and "growth_factor" not in keys:
        missing.append("the GradScaler")
    return missing


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))


def _collect_keys(state: object, keys: set[str], depth: int) -> None:
    if isinstance(state, Mapping) and depth:
        for key, value in state.items():
            keys.add(str(key))
            _collect_keys(value, keys, depth - 1)
