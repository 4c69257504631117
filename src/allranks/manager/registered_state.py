"""`Manager(state=[model, optimizer, ...])`: the state that healing transfers, and a check for missing parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from allranks.errors import ConfigurationError

log = logging.getLogger("allranks.manager")

_DEPTH = 4  # levels of a state that are searched for schedulers and scalers

LoadFunction = Callable[[Any], object]
SaveFunction = Callable[[], object]


@dataclass(eq=False)
class RegisteredState:
    """The functions that load and save each part of the state, by its name."""

    functions: dict[str, tuple[LoadFunction, SaveFunction]] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)  # may have a scheduler
    scaler_seen: bool = False  # a GradScaler calls our optimizer

    def add(self, state: Sequence[object] | Mapping[str, object]) -> dict[str, Any]:
        """Adds objects; returns schedulers, scalers and samplers, whose plain values must be equal in all replicas."""
        parts = named_parts(state)
        self.functions |= {name: state_functions(part) for name, part in parts.items()}
        large = (nn.Module, torch.optim.Optimizer, torch.Generator)
        return {name: part for name, part in parts.items() if not isinstance(part, large)}

    def save(self) -> dict[str, object]:
        return {key: save() for key, (_, save) in self.functions.items()}

    def load(self, parts: Mapping[str, object]) -> None:
        for key, (load, _) in self.functions.items():
            if key in parts:
                load(parts[key])

    def warn_about_missing(self) -> None:
        """Warns about a scheduler or scaler that is not registered. After the first step, in which it was seen."""
        missing = (
            missing_parts(self.optimizers, self.scaler_seen, self.save().values()) if self.functions else []
        )
        if missing:
            log.warning(
                "%s is not part of the state that a joining replica loads, so it would train with different values. "
                "Pass it: Manager(state=[model, optimizer, scheduler, scaler, ...])",
                " and ".join(missing),
            )


def named_parts(state: Sequence[object] | Mapping[str, object]) -> dict[str, object]:
    """The objects by name: the mapping's keys, or the lower-case class name, numbered if it repeats."""
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
    if isinstance(part, torch.Generator):
        return lambda state: part.set_state(state["state"].cpu()), lambda: {"state": part.get_state()}
    return part.load_state_dict, part.state_dict


def missing_parts(
    optimizers: Iterable[torch.optim.Optimizer], scaler_seen: bool, states: Iterable[object]
) -> list[str]:
    """Parts that this training loop uses and that are in none of these states."""
    keys: set[str] = set()
    for state in states:
        _collect_keys(state, keys, _DEPTH)
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
