"""LocalSGD: replicas train alone for some steps, then take the mean of their parameters.

Runs in a rank. The truth is what the last committed synchronisation left (a copy is kept): that is what a
replica that joins is given, never somebody's parameters in the middle of local steps.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.hooks import RemovableHandle

from allranks.errors import ConfigurationError
from allranks.manager.manager import Manager

T = TypeVar("T", bound="LocalSteps")


class LocalSteps:
    """A context manager around the training loop; hooks itself to the optimizer's `step`."""

    def __init__(self, manager: Manager, optimizer: TorchOptimizer) -> None:
        # Local steps change the parameters while a quorum would form beside them: every quorum is waited for.
        manager.training.eager = False
        manager._volatile = True
        self.manager = manager
        self.local_step = 0
        self._stepping = optimizer
        self._handle: RemovableHandle | None = None

    def __enter__(self: T) -> T:
        self._handle = self._stepping.register_step_post_hook(lambda *_: self._stepped())
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _stepped(self) -> None:
        """After each local step."""
        raise NotImplementedError


class LocalSGD(LocalSteps):
    """Takes the mean of the parameters after every `sync_every` local steps.

    The user's own state functions may carry the inner optimizer; the parameters are carried by this class.
    """

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: TorchOptimizer, sync_every: int
    ) -> None:
        if sync_every < 1:
            raise ConfigurationError(f"sync_every must be at least 1, not {sync_every}")
        super().__init__(manager, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.sync_every = sync_every
        self._synced = {name: p.detach().clone() for name, p in model.named_parameters()}
        manager.register_state_dict_fn("local_sgd", self._load, lambda: dict(self._synced))
        manager.sums.kept.append(lambda: self._synced)

    def sync(self) -> bool:
        """Takes the mean over all members; False when it was not committed (local work is kept and retried)."""
        self.local_step = 0
        self.manager.start_quorum()
        means = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        works = [self.manager.allreduce(mean, reduce_op=dist.ReduceOp.AVG) for mean in means.values()]
        for work in works:
            work.wait()
        if not self.manager.should_commit():
            return False
        self._synced = means
        self._restore()
        self.manager.step_applied()
        return True

    def _stepped(self) -> None:
        self.local_step += 1
        if self.local_step >= self.sync_every:
            self.sync()

    def _restore(self) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self._synced[name])

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        self._synced = {name: state[name].detach().clone() for name in self._synced}
        self._restore()
