"""torchft.optim: the optimizer that steps when all commit."""

from __future__ import annotations

from allranks.manager.optimizer import Optimizer, OptimizerWrapper

__all__ = ["Optimizer", "OptimizerWrapper"]
