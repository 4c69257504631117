"""An optimizer that steps only when the step was committed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer as TorchOptimizer

from allranks import torch_private
from allranks.manager.manager import Manager


class OptimizerWrapper(TorchOptimizer):
    """`zero_grad` opens a step, `step` closes it: the wrapped optimizer steps if all members commit.

    A GradScaler calls `step` after an overflow too, so that all members skip the batch, or none does.
    """

    _step_supports_amp_scaling = True

    def __init__(self, manager: Manager, optim: TorchOptimizer) -> None:
        self.manager = manager
        self.optim = optim
        manager.sums.optimizers.append(optim)
        manager.registered.optimizers += [self, optim]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Opens a step, then clears the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], object] | None = None) -> bool:
        """Closes the step; True when it was committed and applied."""
        if closure is not None:
            raise ValueError("closures are not supported: the step may be voted down after it has run")
        # set by a GradScaler while it calls this method
        overflow, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        scaler = sys._getframe(1).f_locals.get("self") if overflow is not None else None
        self.manager.registered.scaler_seen |= overflow is not None
        if not self.manager.should_commit():
            torch_private.forget_overflow(scaler, self)
            return False
        if overflow is None or not overflow.item():
            if scale is not None:
                grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
                healed = scaler.get_scale() if isinstance(scaler, GradScaler) else scale.item()
                torch_private.multiply_all(grads, 1.0 / healed)
            self.optim.step()
        self.manager.step_applied()
        return True

    def add_param_group(self, param_group: dict[str, object]) -> None:
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = self.optim.state_dict()
        return state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    @property
    def state(self) -> Any:
        return self.optim.state

    @property
    def defaults(self) -> dict[str, object]:
        defaults: dict[str, object] = self.optim.defaults
        return defaults

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optim!r})"

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a managed optimizer cannot be pickled: save its state_dict()")


Optimizer = OptimizerWrapper
