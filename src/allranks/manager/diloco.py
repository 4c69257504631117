"""LocalSGD and DiLoCo: replicas train separately for some local steps, then synchronise. Runs in a rank.

LocalSGD averages the parameters. A copy of the last committed average is kept: a joining replica gets this copy, never
parameters in the middle of local steps.

DiLoCo applies an outer optimizer to the mean change. The model is cut into fragments that are synchronised alternately
(streaming): a fragment's reduction starts, `fragment_sync_delay` local steps continue meanwhile, then a vote commits the
outer step. Each fragment keeps its global parameters, which are the state that heals and the fallback of a failed commit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.hooks import RemovableHandle

from allranks.errors import ConfigurationError
from allranks.manager.manager import Manager
from allranks.manager.work import ManagedWork

T = TypeVar("T", bound="LocalSteps")


class LocalSteps:
    """A context manager around the training loop; hooks into the optimizer's `step`."""

    def __init__(self, manager: Manager, optimizer: TorchOptimizer) -> None:
        # local steps change the parameters, so the training thread waits for every quorum
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
    """Averages the parameters after every `sync_every` local steps.

    This class registers the parameters as state; the inner optimizer may be in the user's own state functions.
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
        """Averages over all members; False when that was not committed (local steps are kept, and it is tried again)."""
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


log = logging.getLogger("allranks.manager")


@dataclass(eq=False)
class Fragment:
    """Some parameters, their global values, and the outer optimizer that updates them."""

    module: nn.Module
    outer: TorchOptimizer
    alpha: float
    device: torch.device | None
    globals: dict[str, torch.Tensor] = field(default_factory=dict)
    distances: dict[str, torch.Tensor] = field(default_factory=dict)
    works: list[ManagedWork] = field(default_factory=list)

    def keep(self) -> None:
        self.globals = {
            name: p.detach().to(self.device or p.device, copy=True)
            for name, p in self.module.named_parameters()
        }

    def start(self, manager: Manager) -> None:
        """Starts averaging (global - local) over the members."""
        self.distances = {
            name: self.globals[name].to(p.device) - p.detach() for name, p in self.module.named_parameters()
        }
        self.works = [
            manager.allreduce(distance, reduce_op=dist.ReduceOp.AVG) for distance in self.distances.values()
        ]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def apply(self) -> None:
        """Makes the outer step from the global parameters, then mixes the new global and the local ones."""
        local = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.restore()
        before = {name: p.grad for name, p in self.module.named_parameters()}
        for name, p in self.module.named_parameters():
            p.grad = self.distances[name]
        self.outer.step()
        self.keep()
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.grad = before[name]
                if self.alpha:
                    p.lerp_(local[name], self.alpha)
        self.distances = {}

    def restore(self) -> None:
        """Sets the local parameters to the global ones."""
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.copy_(self.globals[name])

    def save(self) -> dict[str, object]:
        return {"globals": dict(self.globals), "outer": self.outer.state_dict()}

    def kept(self) -> dict[str, torch.Tensor]:
        """The state that is equal on all members between two exchanges: global parameters and the outer optimizer's state."""
        found = dict(self.globals)
        for name, p in self.module.named_parameters():
            for key, value in self.outer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"outer {key} of {name}"] = value
        return found

    def load(self, state: dict[str, Any]) -> None:
        for name, value in self.globals.items():
            value.copy_(state["globals"][name])
        self.outer.load_state_dict(state["outer"])
        self.restore()


class DiLoCo(LocalSteps):
    """A context manager around the training loop; hooks into `inner_optimizer.step`.

    `pin_memory`, `use_bucketization` and `bucket_cap_mb` are accepted, as by torchft, and change nothing.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: nn.Module | Sequence[nn.Module],
        inner_optimizer: TorchOptimizer,
        outer_optimizer: TorchOptimizer | Sequence[TorchOptimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        fragments = [model_fragments] if isinstance(model_fragments, nn.Module) else list(model_fragments)
        outers = list(outer_optimizer) if isinstance(outer_optimizer, Sequence) else [outer_optimizer]
        if len(outers) == 1:
            outers *= len(fragments)
        _check(len(fragments), outers, sync_every, fragment_sync_delay, fragment_update_alpha)
        if should_quantize:
            log.warning("should_quantize is ignored: tensors are reduced in their own precision")
        if manager.options.use_async_quorum:
            raise ConfigurationError("DiLoCo needs Manager(use_async_quorum=False)")
        super().__init__(manager, inner_optimizer)
        self.inner_optimizer = inner_optimizer
        self.every = sync_every // len(fragments)
        self.delay = fragment_sync_delay
        self.fragments = [
            Fragment(module, outer, fragment_update_alpha, backup_device)
            for module, outer in zip(fragments, outers, strict=True)
        ]
        self._moving: Fragment | None = None
        for number, fragment in enumerate(self.fragments):
            fragment.keep()
            manager.register_state_dict_fn(f"diloco_{number}", fragment.load, fragment.save)
            manager.sums.kept.append(fragment.kept)

    def _stepped(self) -> None:
        self.local_step += 1
        if self.local_step == self.every - self.delay:
            self._begin()
        if self.local_step >= self.every:
            self.local_step = 0
            self._end()

    def _begin(self) -> None:
        """Starts the next fragment, which follows from the committed steps: all members agree, even after healing."""
        self.manager.start_quorum()
        self._moving = self.fragments[self.manager.current_step() % len(self.fragments)]
        self._moving.start(self.manager)

    def _end(self) -> None:
        fragment, self._moving = self._moving, None
        if fragment is None:
            return
        fragment.wait()
        if self.manager.should_commit():
            fragment.apply()
            self.manager.step_applied()
        else:
            fragment.restore()


def _check(count: int, outers: Sequence[TorchOptimizer], every: int, delay: int, alpha: float) -> None:
    """Raises ConfigurationError for options that do not fit the number of fragments."""
    if len(outers) != count:
        raise ConfigurationError(f"{count} fragments need as many outer optimizers or one")
    if count > 1 and len(set(map(id, outers))) != count:
        raise ConfigurationError("every fragment needs an outer optimizer over its own parameters")
    if every % count:
        raise ConfigurationError(f"sync_every={every} must be a multiple of {count} fragments")
    if not 0 <= delay < every // count:
        raise ConfigurationError("fragment_sync_delay must be less than the steps between two fragments")
    if not 0.0 <= alpha <= 1.0:
        raise ConfigurationError("fragment_update_alpha must lie between 0 and 1")
