"""Lightning: step marks for the black box, and a strategy with replicas that survive each other's failures.

    from allranks.integrations.lightning import AllranksCallback             # Trainer(callbacks=[AllranksCallback()])
    from allranks.integrations.lightning import FaultTolerantStrategy        # Trainer(strategy=FaultTolerantStrategy())

Runs in a rank. With the strategy, a Trainer is a replica of one rank under `allranks run --replicas N`. A step that is not
committed is retried with the same batch. A replica that heals takes parameters, optimizers, schedulers and its position from
another replica. Needs automatic optimization with one optimizer, Lightning's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _update_dataloader
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, RandomSampler

from allranks import recording as record
from allranks.errors import ConfigurationError
from allranks.integrations import Silences
from allranks.integrations.replica_sampler import ReplicaSampler, replica_number
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.manager.manager import Manager


class _ReplicaState(TypedDict):
    """The state that a healing replica takes from another one."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, object]
    schedulers: list[dict[str, object]]
    callbacks: dict[str, dict[str, object]]  # such as EarlyStopping's patience


class AllranksCallback(pl.Callback):
    """Marks every step, with the tokens of batches with `input_ids`, and announces validation as a pause of up to `pause_s`
    seconds."""

    def __init__(self, pause_s: float = 1800.0) -> None:
        self._silences = Silences(pause_s)

    def on_train_batch_start(self, trainer: pl.Trainer, module: object, batch: object, *_: object) -> None:
        self._silences.end()
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        record.step(trainer.global_step, tokens=ids.numel() if isinstance(ids, torch.Tensor) else None)

    def on_validation_start(self, *_: object) -> None:
        self._silences.begin("validate")

    def on_validation_end(self, *_: object) -> None:
        self._silences.end()

    def on_train_end(self, *_: object) -> None:
        self._silences.end()
        record.announce("after training", up_to_s=self._silences.up_to_s)


class _StepApplied(pl.Callback):
    """Notifies the manager that the state is final, after the schedulers have stepped."""

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self.strategy = strategy

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.strategy.begin(trainer)

    def on_train_batch_end(self, *_: object) -> None:
        self.strategy.manager.step_applied()


class FaultTolerantStrategy(SingleDeviceStrategy):
    """One replica on one device. At least `min_replica_size` replicas must take part in a step.

    A shuffled DataLoader gives every replica its own part of the data; other loaders are unchanged.
    """

    strategy_name = "allranks"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        manager: Manager | None = None,
        min_replica_size: int = 1,
        **named: object,
    ) -> None:
        super().__init__(device=device, **named)
        group = ProcessGroupNCCL() if self.root_device.type == "cuda" else ProcessGroupGloo()
        self.manager = manager or Manager(pg=group, min_replica_size=min_replica_size)
        self.manager.register_state_dict_fn("lightning", self._load_replica_state, self._replica_state)
        self._trainer: pl.Trainer
        self._sampler: ReplicaSampler | None = None
        self._batch_size = 1
        self._healed = False
        self._accumulated: list[tuple[object, ...]] = []  # arguments of this step's batches except the last

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1 or not self.lightning_module.automatic_optimization:
            raise ConfigurationError("FaultTolerantStrategy needs automatic optimization with one optimizer")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigurationError(
                "FaultTolerantStrategy does not support precision='16-mixed': the scaler unscales gradients before the "
                "replicas vote, so a replica that joins in that step would apply them with its old scale",
                hint="use precision='bf16-mixed', which needs no loss scaling",
            )
        self._trainer = trainer
        self.model = DistributedDataParallel(self.manager, self.lightning_module)
        trainer.callbacks.insert(0, _StepApplied(self))

    def begin(self, trainer: pl.Trainer) -> None:
        """Converts epochs into steps, so that all replicas end at the same step."""
        loop = trainer.fit_loop
        if loop.epoch_loop.max_steps < 0 and loop.max_epochs >= 0:
            loop.epoch_loop.max_steps = loop.max_epochs * self._steps_per_epoch()
        loop.max_epochs = -1
        if trainer.global_step:  # resumed from a checkpoint
            self.manager.load_state_dict({"step": trainer.global_step, "batches_committed": 0})

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor | None],
        model: pl.LightningModule | None = None,
        **named: object,
    ) -> torch.Tensor | None:
        """Computes the gradients with the closure until all replicas commit, then applies them."""
        while True:
            self.manager.start_quorum()
            result = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)
            if self.manager.should_commit():
                break
            self._accumulate_again(optimizer)
        self._accumulated.clear()
        optimizer.step(**named)
        if self._healed:
            self._healed = False
            self._align(self.manager.current_step())
        return result

    def training_step(self, *args: object) -> object:
        if self._trainer.fit_loop._should_accumulate():
            self._accumulated.append(args)
        return super().training_step(*args)

    def _accumulate_again(self, optimizer: torch.optim.Optimizer) -> None:
        """Recomputes the gradients of all batches before the last one, which the uncommitted step has reduced."""
        optimizer.zero_grad()
        for args in self._accumulated:
            result = self._trainer.fit_loop.epoch_loop.automatic_optimization._training_step(
                dict(enumerate(args))
            )
            if result.closure_loss is not None:
                self.backward(result.closure_loss, optimizer)

    def process_dataloader(self, dataloader: object) -> object:
        """Gives a shuffled loader a sampler over the replicas."""
        if not isinstance(dataloader, DataLoader) or not isinstance(dataloader.sampler, RandomSampler):
            return dataloader
        self._batch_size = dataloader.batch_size or 1
        self._sampler = ReplicaSampler(
            len(dataloader.dataset), *replica_number(), seed=torch.initial_seed() % 2**31
        )
        return _update_dataloader(dataloader, self._sampler)

    @property
    def is_global_zero(self) -> bool:
        """Whether this replica saves and logs."""
        return not self.manager.quorum_id() or self.manager.participating_rank() == 0

    def teardown(self) -> None:
        self.manager.shutdown()
        super().teardown()

    # ---- state for healing ----

    def _replica_state(self) -> _ReplicaState:
        schedulers = [config.scheduler.state_dict() for config in self.lr_scheduler_configs]
        return {
            "model": self.lightning_module.state_dict(),
            "optimizer": self.optimizers[0].state_dict(),
            "schedulers": schedulers,
            "callbacks": call._call_callbacks_state_dict(self._trainer),
        }

    def _load_replica_state(self, given: _ReplicaState) -> None:
        self.lightning_module.load_state_dict(given["model"])
        self.optimizers[0].load_state_dict(given["optimizer"])
        for config, state in zip(self.lr_scheduler_configs, given["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        call._call_callbacks_load_state_dict(self._trainer, {"callbacks": given["callbacks"]})
        self._healed = True

    def _steps_per_epoch(self) -> int:
        return max(
            1, -(-int(self._trainer.num_training_batches) // int(self._trainer.accumulate_grad_batches))
        )

    def _align(self, step: int) -> None:
        """Sets Lightning's counters as if this process had made `step` steps. Lightning counts the last one itself."""
        loop, accumulate = self._trainer.fit_loop, self._trainer.accumulate_grad_batches
        epoch, within = divmod(step - 1, self._steps_per_epoch())
        batches = min((within + 1) * accumulate, int(self._trainer.num_training_batches))
        current = loop.epoch_loop.batch_progress.current
        current.ready = current.started = batches
        current.processed = current.completed = batches - 1
        loop.epoch_loop.batch_progress.is_last_batch = False
        epochs = loop.epoch_progress.current
        epochs.ready = epochs.started = epoch + 1
        epochs.processed = epochs.completed = epoch
        steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready, steps.completed = step, step - 1
        if self._sampler is not None:
            self._sampler.seek(epoch, batches * self._batch_size)
